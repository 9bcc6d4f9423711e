"""Is what was written down read back, up to the first line that isn't whole?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard import journal
from reshard.delta import Delta, Rows
from reshard.digest import CRC64NVME, Sums
from reshard.errors import TargetError
from reshard.journal import Journal

HEAD = {"what": "a text with blanks\n and lines", "n": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    written = Journal(tmp_path / "journal", HEAD)
    for number in range(5):
        written.append({"number": number}, bytes([number]) * 40 * number)
    written.close()
    return tmp_path / "journal"


def numbers(path: Path) -> list[int]:
    return [line.head.get("number", -1) for line in journal.read(path)]


def test_it_is_read_back(path: Path) -> None:
    first, *lines = journal.read(path)
    assert first.head == HEAD
    assert [line.head for line in lines] == [{"number": n} for n in range(5)]
    assert [line.payload() for line in lines] == [bytes([n]) * 40 * n for n in range(5)]
    assert list(journal.read(path.with_name("none"))) == []


def test_a_torn_line_ends_it(path: Path) -> None:
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert numbers(path) == [-1, 0, 1, 2, 3, 4][:whole]


def test_a_wrong_byte_ends_it(path: Path) -> None:
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x11]) + data[at + 1 :])
        before = data[:at].count(b"\n")
        assert numbers(path) == [-1, 0, 1, 2, 3, 4][:before]


def test_zeros_after_it(path: Path) -> None:
    """As a file system may leave them where the length came to disk and the bytes didn't."""
    with path.open("ab") as file:
        file.write(bytes(5000))
    assert numbers(path) == [-1, 0, 1, 2, 3, 4]


def test_lines_can_be_taken_over(path: Path) -> None:
    lines = list(journal.read(path))
    new = Journal(path, {"head": "new"}, lines[2:4])
    new.append({"number": 7}, b"x")
    new.close()
    assert numbers(path) == [-1, 1, 2, 7]
    assert [line.payload() for line in journal.read(path)][1:] == [b"\1" * 40, b"\2" * 80, b"x"]
    assert sorted(p.name for p in path.parent.iterdir()) == ["journal"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="can't be written"):
        Journal(tmp_path / "none" / "journal", HEAD)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=20),
    st.data(),
)
def test_a_delta_counts_as_if_it_were_added_just_now(sizes: list[int], data: st.DataObject) -> None:
    """Whole sums are put together from what several others had, through bytes."""
    contents = [data.draw(st.binary(min_size=n, max_size=n)) for n in sizes]
    parts = [Sums(CRC64NVME, np.array(sizes)) for _ in range(3)]
    for index, content in enumerate(contents):
        cut = data.draw(st.integers(0, len(content)))
        for start, piece in ((0, content[:cut]), (cut, content[cut:])):
            part = parts[data.draw(st.integers(0, 2))]
            part.add_one(index, start, len(piece), CRC64NVME.of(piece))
    total = parts[0].anew()
    none = Rows.of(total)
    for part in parts:
        delta = Delta(Rows.of(part), none, none, np.array([3, 5]))
        again = Delta.from_bytes(delta.to_bytes())
        assert again.messages.same(delta.messages)
        assert len(again.target) == len(again.source) == 0
        assert again.touched.tolist() == [3, 5]
        again.messages.add_to(total)
    assert total.values().tolist() == [CRC64NVME.of(content) for content in contents]
