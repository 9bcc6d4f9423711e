"""Is a layout the same after it was written as JSON, and is a changed document noticed?"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from documents import GROUPS, document, everything, good, layouts
from hypothesis import given
from hypothesis import strategies as st

from reshard.digest import CRC64NVME
from reshard.errors import CorruptError, UnsupportedError
from reshard.layout import FlatSpace, Layout
from reshard.manifest_json import (
    VERSION,
    canonical,
    digests_from_json,
    digests_to_json,
    dumps,
    groups_from_json,
    groups_to_json,
    layout_from_json,
    layout_to_json,
    loads,
)

WHERE = Path("ckpt/zreshard.json")


def facts(layout: Layout) -> Any:
    """A layout as values that compare."""
    return layout.mesh, layout.stage, [_of(s) for s in layout.spaces]


def _of(s: FlatSpace) -> Any:
    place = (dict(s.coords), s.group, s.shard_start, s.shard_step)
    return s.name, s.entries, s.partition, list(s.states.items()), place


@given(layouts())
def test_a_layout_comes_back(layout: Layout) -> None:
    data = json.loads(json.dumps(layout_to_json(layout)))
    assert facts(layout_from_json(data)) == facts(layout)


def test_every_kind_of_space_comes_back() -> None:
    layout = everything()
    data = json.loads(json.dumps(layout_to_json(layout)))
    assert facts(layout_from_json(data)) == facts(layout)
    # the table holds a name once, though three spaces refer to it
    assert data["tensors"]["names"].count("a") == 1
    assert list(data["spaces"][0]) == ["name", "partition", "states", "entries", "group"]


@given(layouts(), st.integers(0, 1 << 32))
def test_digests_come_back(layout: Layout, seed: int) -> None:
    digests = {
        (entry.name, state): CRC64NVME.of(f"{seed} {entry.name} {state}".encode())
        for space in layout.spaces
        for state in space.states
        for entry in space.entries
        if (seed + len(entry.name)) % 3
    }
    data = json.loads(json.dumps(digests_to_json(layout, digests)))
    assert digests_from_json(layout, data) == digests


def test_groups_come_back() -> None:
    data = json.loads(json.dumps(groups_to_json(GROUPS)))
    assert groups_from_json(data) == GROUPS


@given(layouts(), st.integers(0, 99))
def test_a_document_comes_back(layout: Layout, seed: int) -> None:
    made = document(layout, seed)
    assert loads(dumps(made), WHERE) == made


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: shuffled(v) for k, v in reversed(value.items())}
    return [shuffled(v) for v in value] if isinstance(value, list) else value


def test_the_checksum_doesnt_depend_on_how_it_is_written() -> None:
    other = json.dumps(shuffled(good()), indent=1, ensure_ascii=False).encode()
    assert other != dumps(good())
    assert loads(other, WHERE) == good()


def test_the_checksum_is_that_of_the_canonical_text() -> None:
    text = '{"b":[1,2.5,1e-05,"\\u00e9\\"/\\n\\u001f\\u007f\\ud83d\\ude00"],"zreshard":1}'
    made = {
        "zreshard": 1,
        "b": [1, 2.5, 0.00001, 'é"/\n\x1f\x7f\U0001f600'],
        "crc64nvme": "whatever",
    }
    assert canonical(made) == text.encode()
    assert json.loads(dumps(made))["crc64nvme"] == f"{CRC64NVME.of(text.encode()):016x}"


def test_a_changed_value_is_noticed() -> None:
    for place, value in (("stage", 3), ("aliases", {}), ("mesh", {**good()["mesh"], "tensor": 2})):
        changed = {**good(), place: value}
        with pytest.raises(CorruptError, match=r"has the checksum \w{16}, but says \w{16}"):
            loads(json.dumps(changed).encode(), WHERE)


@given(st.data())
def test_a_flipped_bit_is_noticed(data: st.DataObject) -> None:
    good_bytes = dumps(good())
    at = data.draw(st.integers(0, len(good_bytes) - 1))
    bad = bytearray(good_bytes)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    found = None
    with contextlib.suppress(CorruptError, UnsupportedError):
        found = loads(bytes(bad), WHERE)
    # another blank, or another case of the digits of an escape: the same document
    assert found is None or found == good()


@given(st.data())
def test_a_cut_document_is_noticed(data: st.DataObject) -> None:
    good_bytes = dumps(good())
    with pytest.raises(CorruptError):
        loads(good_bytes[: data.draw(st.integers(0, len(good_bytes) - 2))], WHERE)


def test_a_newer_version_is_told_from_a_damaged_one() -> None:
    newer = json.dumps({"zreshard": VERSION + 1, "anything": ["else"]}).encode()
    with pytest.raises(UnsupportedError, match=f"version {VERSION + 1}; this release reads up to"):
        loads(newer, WHERE)
    for version in (0, -1, True, "2", 1.5, None):
        with pytest.raises(CorruptError, match="/zreshard: is"):
            loads(json.dumps({**good(), "zreshard": version}).encode(), WHERE)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "is not JSON"),
        (b"\x80\x04K\x01.", "is not JSON"),
        (b'{"zreshard": 1', "is not JSON"),
        ('{"zreshard": 1}'.encode("utf-16"), "is not JSON"),
        (b'{"zreshard": NaN}', "NaN is no JSON number"),
        (b'{"zreshard": [-Infinity]}', "-Infinity is no JSON number"),
        (b'{"zreshard": 1, "mesh": {"shard": 1, "shard": 2}}', "the key 'shard' stands twice"),
        (b"[" * 100_000, "is not JSON"),
        (b"[1]", "has no 'zreshard' key"),
        (b'{"zarr_format": 3}', "has no 'zreshard' key"),
        (b'{"zreshard": 1}', r"has 10 problem\(s\)"),
        (b'{"zreshard": 1e999}', "/zreshard: is inf"),
    ],
    ids=lambda v: repr(v)[:30],
)
def test_what_isnt_a_manifest_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(CorruptError, match=text):
        loads(data, WHERE)


def test_many_problems_are_counted_and_the_first_are_shown() -> None:
    bad = good()
    bad["tensors"]["names"] = list(range(200))
    with pytest.raises(CorruptError) as error:
        loads(json.dumps(bad).encode(), WHERE)
    lines = str(error.value).splitlines()
    assert "/tensors/names/0: is 0; expected a text" in lines[1] + lines[2]
    assert len(lines) == 52
    assert lines[-1].strip().startswith("and ")
