"""Are all problems of a bad document found, each at its place, and does a good one have none?

The judge of form is the ``jsonschema`` library with the published schema: what it refuses,
``problems`` refuses. The judge of sense is the reader: what ``problems`` passes, it can read.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from documents import document, good, layouts
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.dtypes import BY_NAME
from reshard.formats import native
from reshard.layout import AXES
from reshard.manifest_json import digests_from_json, groups_from_json, layout_from_json
from reshard.partition import KINDS
from reshard.plain import decode
from reshard.problems import KEYS, Problem, problems

SCHEMA = json.loads(
    (Path(__file__).parents[1] / "reshard/schema/manifest-1.schema.json").read_text("utf-8")
)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


class _Removed:
    """Stands for a key that is taken out; its name in test ids is the same in every process."""

    def __repr__(self) -> str:
        return "<removed>"


REMOVED = _Removed()


def at(document: Any, place: str) -> tuple[Any, Any]:
    """The container and the key that a JSON pointer names."""
    *path, last = [s.replace("~1", "/").replace("~0", "~") for s in place.split("/")[1:]]
    for step in path:
        document = document[int(step)] if isinstance(document, list) else document[step]
    return document, int(last) if isinstance(document, list) else last


def put(document: Any, place: str, value: Any) -> None:
    container, key = at(document, place)
    if value is REMOVED:
        del container[key]
    elif isinstance(container, list) and key == len(container):
        container.append(value)
    else:
        container[key] = value


def by_place(found: list[Problem]) -> dict[str, str]:
    return {p.place: p.text for p in found}


def test_a_good_document_has_no_problems() -> None:
    assert problems(good()) == []
    assert [e.message for e in VALIDATOR.iter_errors(good())] == []


@given(layouts(), st.integers(0, 9))
def test_what_we_write_has_no_problems_and_satisfies_the_schema(layout: Any, seed: int) -> None:
    written = document(layout, seed)
    assert problems(written) == []
    VALIDATOR.validate(written)


def test_the_schema_is_a_schema_and_knows_what_the_code_knows() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert tuple(SCHEMA["required"]) == tuple(SCHEMA["properties"]) == KEYS
    definitions = SCHEMA["$defs"]
    whole = [d.name for d in BY_NAME.values() if d.bits % 8 == 0]
    assert definitions["dtype"]["enum"] == whole
    assert tuple(SCHEMA["properties"]["mesh"]["properties"]) == AXES
    coords = definitions["space"]["properties"]["coords"]["properties"]
    assert [*coords] == [a for a in AXES if a != "shard"]
    kinds = [rule["properties"]["kind"] for rule in definitions["partition"]["oneOf"]]
    known = [name for k in kinds for name in k.get("enum", [k.get("const")])]
    assert sorted(known) == sorted(KINDS)


HEX = "0123456789abcdef"
BIG = 1 << 63

# (what is put, where, the place that is named, what its text says); spaces of the document:
# 0 contiguous (a, b.weight), 1 per_tensor (expert, empty), 2 replicated, 3 explicit with boxes
# (cut, cut, scalar), 4 whole, 5 rows
BAD: list[tuple[Any, str, str, str]] = [
    # versions and keys
    ("1", "/zreshard", "/zreshard", 'is "1"; expected a version'),
    (True, "/zreshard", "/zreshard", "is true"),
    (0, "/zreshard", "/zreshard", "is 0"),
    (2, "/zreshard", "/zreshard", "is 2; expected version 1"),
    (REMOVED, "/tensors", "/tensors", "is missing"),
    (REMOVED, "/stage", "/stage", "is missing"),
    (REMOVED, "/crc64nvme", "/crc64nvme", "is missing"),
    (1, "/new~key", "/new~0key", "is an unknown key; known: zreshard, mesh"),
    ("0123", "/crc64nvme", "/crc64nvme", '"0123"; expected 16 hexadecimal digits'),
    (4, "/stage", "/stage", "is 4; expected an integer from 0 to 3"),
    (False, "/stage", "/stage", "is false"),
    # mesh
    ([], "/mesh", "/mesh", "is a list of 0; expected an object"),
    (2, "/mesh/data", "/mesh/data", "is no axis; expected pipeline, tensor"),
    (0, "/mesh/tensor", "/mesh/tensor", "is 0; expected an integer from 1"),
    (4.0, "/mesh/shard", "/mesh/shard", "is 4.0"),
    (True, "/mesh/tensor", "/mesh/tensor", "is true"),
    (1 << 60, "/mesh/shard", "/mesh/shard", "expected an integer from 1 to 16777216"),
    # tensors
    (7, "/tensors/names/0", "/tensors/names/0", "is 7; expected a text"),
    ("\ud800", "/tensors/names/0", "/tensors/names/0", "expected valid Unicode"),
    ([1], "/tensors/shapes/9", "/tensors/shapes", "shapes; there are"),
    (REMOVED, "/tensors/shapes/0", "/tensors/shapes", "shapes; there are"),
    (-1, "/tensors/shapes/0/1", "/tensors/shapes/0/1", "is -1; expected an integer from 0"),
    (2.0, "/tensors/shapes/0/1", "/tensors/shapes/0/1", "is 2.0"),
    (True, "/tensors/shapes/0/1", "/tensors/shapes/0/1", "is true"),
    (BIG, "/tensors/shapes/0/1", "/tensors/shapes/0/1", f"is {BIG}"),
    ([1 << 32, 1 << 31], "/tensors/shapes/0", "/tensors/shapes/0", "2^63 elements or more"),
    ([0, 1 << 62, 4], "/tensors/shapes/0", "/tensors/shapes/0", "2^63 elements or more"),
    ([1] * 65, "/tensors/shapes/0", "/tensors/shapes/0", "has 65 dims; expected at most 64"),
    ("8x8", "/tensors/shapes/0", "/tensors/shapes/0", 'is "8x8"; expected a list'),
    # spaces
    ({}, "/spaces", "/spaces", "expected a list"),
    (None, "/spaces/1", "/spaces/1", "is null; expected an object"),
    ("..", "/spaces/0/name", "/spaces/0/name", 'is ".."; expected a name like'),
    ("a/b", "/spaces/0/name", "/spaces/0/name", 'is "a/b"'),
    ("", "/spaces/0/name", "/spaces/0/name", 'is ""'),
    ("é", "/spaces/0/name", "/spaces/0/name", "expected a name like"),
    ("rows", "/spaces/0/name", "/spaces/5/name", 'is "rows", as that of space 0'),
    ("x" * 256, "/spaces/0/name", "/spaces/0/name", "expected a name like"),
    ({}, "/spaces/0/states", "/spaces/0/states", "is empty; expected one state or more"),
    ("fp32", "/spaces/0/states/master", "/spaces/0/states/master", "expected an element type"),
    ("float4_e2m1fn", "/spaces/0/states/a~1b", "/spaces/0/states/a~1b", "float4_e2m1fn"),
    ("float32", "/spaces/0/states/", "/spaces/0/states/", 'is the state ""'),
    ("float32", "/spaces/0/states/\ud800", "/spaces/0/states/\ud800", "valid Unicode"),
    (99, "/spaces/0/entries/1", "/spaces/0/entries/1", "is 99; expected an integer from 0 to 8"),
    (-1, "/spaces/0/entries/1", "/spaces/0/entries/1", "is -1"),
    (False, "/spaces/0/entries/0", "/spaces/0/entries/0", "is false"),
    ("0", "/spaces/0/entries/0", "/spaces/0/entries/0", 'is "0"'),
    # boxes
    ({"2": [[0], [1]]}, "/spaces/0/boxes", "/spaces/0/boxes/2", "expected an index below 2"),
    ([], "/spaces/0/boxes", "/spaces/0/boxes", "expected an object"),
    ([[0, 0], [4, 7]], "/spaces/3/boxes/0", "/spaces/3/boxes/0", "isn't inside the tensor \"cut\""),
    ([[0, 4], [4, 3]], "/spaces/3/boxes/0", "/spaces/3/boxes/0", "the box [0, 4] to [4, 3]"),
    ([[0, -1], [4, 3]], "/spaces/3/boxes/0", "/spaces/3/boxes/0/0/1", "is -1"),
    ([[0], [4]], "/spaces/3/boxes/0", "/spaces/3/boxes/0/0", "has 1 dims; expected the 2 dims"),
    ([[0, 0]], "/spaces/3/boxes/0", "/spaces/3/boxes/0", "expected a pair [start, stop]"),
    ([[], []], "/spaces/3/boxes/9", "/spaces/3/boxes/9", "expected an index below 3"),
    ([[], []], "/spaces/3/boxes/02", "/spaces/3/boxes/02", "is no entry"),
    # coords, groups, shards
    (0, "/spaces/1/coords/shard", "/spaces/1/coords/shard", "is no axis of coordinates"),
    (2, "/spaces/1/coords/expert", "/spaces/1/coords/expert", "an integer from 0 to 1"),
    (2, "/spaces/0/group", "/spaces/0/group", "is 2; expected an integer from 0 to 1"),
    ([], "/groups", "/spaces/0/group", "is 0; expected none: there are none"),
    ([0], "/spaces/1/shards", "/spaces/1/shards", "expected a pair [start, step]"),
    (-1, "/spaces/1/shards/0", "/spaces/1/shards/0", "is -1"),
    (0, "/spaces/1/shards/1", "/spaces/1/shards/1", "is 0; expected an integer from 1"),
    ([2, 2], "/spaces/1/shards", "/spaces/1/shards", "on index 4 of the shard axis"),
    # partitions
    ("flat", "/spaces/0/partition/kind", "/spaces/0/partition/kind", "one of contiguous"),
    (REMOVED, "/spaces/0/partition/kind", "/spaces/0/partition/kind", "is null; expected one of"),
    (0, "/spaces/0/partition/world", "/spaces/0/partition/world", "is 0"),
    (REMOVED, "/spaces/0/partition/world", "/spaces/0/partition/world", "is missing"),
    (0, "/spaces/0/partition/align", "/spaces/0/partition/align", "is 0"),
    ("2", "/spaces/0/partition/multiple", "/spaces/0/partition/multiple", 'is "2"'),
    (2, "/spaces/1/partition/align", "/spaces/1/partition/align", "is an unknown key"),
    (5, "/spaces/0/partition/world", "/spaces/0/shards", "put the last of 5 shards on index 4"),
    (REMOVED, "/spaces/4/partition/owners", "/spaces/4/partition/owners", "is missing"),
    ([0], "/spaces/4/partition/owners", "/spaces/4/partition/owners", "has 1 owners"),
    (4, "/spaces/4/partition/owners/1", "/spaces/4/partition/owners/1", "an integer from 0 to 3"),
    # arrays
    ({}, "/arrays", "/arrays", "expected a list"),
    (REMOVED, "/arrays/9", "/arrays", 'has none of the state "param" of space "rows"'),
    ("exp_avg", "/arrays/0/state", "/arrays/1/state", 'expected a state of space "group0" that'),
    ("other", "/arrays/0/state", "/arrays/0/state", 'is "other"; expected a state of space'),
    ("rows", "/arrays/0/space", "/arrays/0/state", 'expected a state of space "rows"'),
    ("../x", "/arrays/0/path", "/arrays/0/path", 'expected "group0.master"'),
    (1, "/arrays/0/path", "/arrays/0/path", "is 1; expected a text"),
    (0, "/arrays/0/part", "/arrays/0/part", "is 0; expected an integer from 1"),
    (9, "/arrays/0/part", "/arrays/0/part", "is 9; expected a multiple of the chunk, 8"),
    (None, "/arrays/0/chunk", "/arrays/0/chunk", "is null"),
    (16, "/arrays/0/part", "/arrays/0/crc64nvme", "has 4 checksums; 4 shard(s) of 2 chunk(s)"),
    ([HEX] * 3, "/arrays/0/crc64nvme", "/arrays/0/crc64nvme", "need 4"),
    (HEX.upper(), "/arrays/0/crc64nvme/3", "/arrays/0/crc64nvme/3", 'F"; expected 16'),
    (f"{HEX}\n{HEX}", "/arrays/0/crc64nvme/3", "/arrays/0/crc64nvme/3", "16 hexadecimal digits"),
    (None, "/arrays/0/crc64nvme/3", "/arrays/0/crc64nvme/3", "is null"),
    # digests
    ([], "/digests", "/digests", "expected an object"),
    (REMOVED, "/digests/rows", "/digests/rows", "is missing"),
    ({}, "/digests/other", "/digests/other", "is an unknown key; known: group0"),
    (REMOVED, "/digests/group0/master", "/digests/group0/master", "is missing"),
    ([HEX], "/digests/group0/master", "/digests/group0/master", "has 1 digests; the space has 2"),
    ([HEX, 5], "/digests/group0/master", "/digests/group0/master/1", "is 5; expected 16"),
    ([HEX, "f" * 16, None], "/digests/explicit/param", "/digests/explicit/param/1", f'has "{HEX}"'),
    # groups
    (REMOVED, "/groups/0/scalars", "/groups/0/scalars", "is missing"),
    (1, "/groups/0/lr", "/groups/0/lr", "is an unknown key"),
    ("0", "/groups/0/optimizer", "/groups/0/optimizer", 'is "0"'),
    (-1, "/groups/0/optimizer", "/groups/0/optimizer", "is -1"),
    ([], "/groups/0/settings", "/groups/0/settings", "is a list of 0; expected an object"),
    ({"$tuple": []}, "/groups/0/settings", "/groups/0/settings", "is a $tuple value"),
    # aliases
    ("nowhere", "/aliases/tied", "/aliases/tied", 'is "nowhere"; expected the name of a tensor'),
    ("tied", "/aliases/again", "/aliases/again", "expected a tensor's name, not an alias"),
    ("self", "/aliases/self", "/aliases/self", "expected a tensor's name, not an alias"),
    ("a", "/aliases/b.weight", "/aliases/b.weight", "is the name of a tensor too"),
    (3, "/aliases/tied", "/aliases/tied", "is 3; expected a text"),
    # plain data
    (7, "/objects", "/objects", "is 7; expected an object"),
    ({"$new": 1}, "/objects/x", "/objects/x", 'has the unknown mark "$new"'),
    ({"$tuple": "ab"}, "/objects/x~1y", "/objects/x~1y/$tuple", "expected a list of values"),
    ({"$bytes": "?"}, "/objects/x", "/objects/x/$bytes", 'is "?"; expected base64'),
    ({"$float": "1"}, "/groups/1/settings/lr", "/groups/1/settings/lr/$float", 'expected "nan"'),
]  # fmt: skip


def spoil(place: str, value: Any) -> dict[str, Any]:
    bad = good()
    put(bad, place, value)
    return bad


@pytest.mark.parametrize(("value", "place", "named", "text"), BAD, ids=lambda v: str(v)[:40])
def test_a_problem_is_found_at_its_place(value: Any, place: str, named: str, text: str) -> None:
    assert text in by_place(problems(spoil(place, value)))[named]


def test_one_mistake_is_one_problem() -> None:
    quiet = ("/zreshard", "/crc64nvme", "/stage", "/aliases", "/objects", "/tensors/names")
    for value, place, named, _ in BAD:
        if place.startswith(quiet) or (value is REMOVED and place.count("/") == 1):
            assert [p.place for p in problems(spoil(place, value))] == [named], place


def test_all_problems_are_reported_at_once() -> None:
    bad, expected = good(), set()
    for value, place, named in (
        (-1, "/tensors/shapes/0/1", None),
        (-1, "/mesh/tensor", None),
        (99, "/spaces/2/entries/1", None),
        ("..", "/spaces/4/name", None),
        ("zeros", "/arrays/7/crc64nvme/0", None),
        ({"$set": [[]]}, "/objects/client", "/objects/client/$set"),
        ("nowhere", "/aliases/tied", None),
    ):
        put(bad, place, value)
        expected.add(named or place)
    assert expected <= set(by_place(problems(bad)))


def test_rows_of_the_table_differ_and_are_used() -> None:
    bad = good()
    for name, shape in (("a", [4, 6]), ("unused", [])):
        bad["tensors"]["names"].append(name)
        bad["tensors"]["shapes"].append(shape)
    found = by_place(problems(bad))
    count = len(bad["tensors"]["names"])
    assert "again, of the same shape as row 0" in found[f"/tensors/names/{count - 2}"]
    assert 'is "unused", which no space holds' in found[f"/tensors/names/{count - 1}"]


def test_a_part_holds_the_largest_shard() -> None:
    bad = good()
    bad["arrays"][0].update(part=4, chunk=4)
    (found,) = problems(bad)
    assert found == Problem(
        "/arrays/0/part", "is 4; expected at least 8, which the largest shard needs"
    )


def test_neither_elements_nor_bytes_overflow() -> None:
    bad = good()
    bad["tensors"]["shapes"][0] = [1 << 62]
    found = by_place(problems(bad))
    assert "2^63 elements" in found["/spaces/0/entries"]
    bad = good()
    bad["arrays"][0].update(part=1 << 60, chunk=1 << 60)
    found = by_place(problems(bad))
    assert "2^63 bytes" in found["/arrays/0/part"]


def test_an_arrays_folder_is_no_other_file() -> None:
    bad = good()
    bad["spaces"][5]["name"] = "zarr"
    bad["spaces"][5]["states"] = {"json": "float32"}
    bad["arrays"][-1].update(space="zarr", state="json", path="zarr.json")
    bad["digests"]["zarr"] = {"json": bad["digests"].pop("rows")["param"]}
    assert by_place(problems(bad)) == {
        "/arrays/9/path": 'is "zarr.json"; expected another name, of at most 255 bytes'
    }


def test_a_huge_world_costs_nothing() -> None:
    bad = good()
    bad["mesh"]["shard"] = bad["spaces"][4]["partition"]["world"] = 1 << 24
    (found,) = problems(bad)
    assert found.place == "/arrays/8/crc64nvme"


# -- random documents ---------------------------------------------------------------------------

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 1, 2, 1 << 24, 1 << 31, 1 << 62, 1 << 63, 1 << 64])
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["a", "master", "float32", "ab" * 8, "$tuple", "\ud800"])
)
keys = st.text(max_size=3) | st.sampled_from(
    [*KEYS, "name", "names", "kind", "world", "0", "$dict", "$tuple", "$array", "$bytes", "$set"]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


def every_place(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [place] if place else []
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, one in inner:
        found += every_place(one, (*place, key))
    return found


def change(document: Any, place: tuple[Any, ...], how: str, value: Any, key: str) -> None:
    container = document
    for step in place[:-1]:
        container = container[step]
    last = place[-1]
    inside = container[last]
    if how == "remove":
        del container[last]
    elif how == "add" and isinstance(inside, dict):
        inside[key] = value
    elif how == "add" and isinstance(inside, list):
        inside.append(value)
    elif how == "step" and isinstance(inside, int):
        container[last] = inside + 1
    elif how == "copy" and isinstance(container, list):
        container.append(copy.deepcopy(inside))
    else:
        container[last] = value


@st.composite
def mutants(draw: st.DrawFn) -> dict[str, Any]:
    """Good documents with one to three changes."""
    mutant = good()
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(every_place(mutant) or [()]))
        if place:
            how = draw(st.sampled_from(("put", "remove", "add", "step", "copy")))
            change(mutant, place, how, draw(values), draw(keys))
    return mutant


def read_whole(document: dict[str, Any]) -> None:
    """What a reader does with a document that has no problems."""
    layout = layout_from_json(document)
    native._arrays(layout, document["arrays"])
    digests_from_json(layout, document["digests"])
    groups_from_json(document["groups"])
    assert isinstance(decode(document["objects"]), dict)
    for space in layout.spaces:
        assert int(space.kept().sum()) == space.numel * (space.shards if space.shards == 1 else 1)


@settings(max_examples=300)
@given(mutants())
def test_what_the_schema_refuses_is_a_problem_and_what_passes_is_read(mutant: Any) -> None:
    found = problems(mutant)
    if not VALIDATOR.is_valid(mutant):
        assert found
    if not found:
        read_whole(mutant)


@given(values)
def test_no_json_raises(value: Any) -> None:
    assert problems(value)


@given(st.fixed_dictionaries(dict.fromkeys(KEYS, values)))
def test_no_json_with_the_right_keys_raises(document: Any) -> None:
    assert VALIDATOR.is_valid(document) or problems(document)


def test_deep_json_is_a_problem() -> None:
    for opening, closing in (
        ("[", "]"),
        ('{"a":', "}"),
        ('{"$tuple":[', "]}"),
        ('{"$array":', "}"),
    ):
        deep = json.loads(opening * 300 + "1" + closing * 300)
        for place in ("/objects/x", "/groups/0/settings", "/tensors", "/spaces/0/states/master"):
            bad = spoil(place, deep)
            assert any(p.place.startswith(place) for p in problems(bad))


def test_the_text_is_short_whatever_the_value() -> None:
    for value in ("x" * 10**6, list(range(10**5)), {str(i): i for i in range(10**5)}, 1 << 10**5):
        assert all(len(p.text) < 400 for p in problems(spoil("/spaces/0/group", value)))
