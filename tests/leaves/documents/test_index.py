"""tensorstore_index.json: every form ever written is read, a flipped bit is seen, what is not understood stays."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.leaves.documents.test_record import F32, flat, nested, records
from tests.properties.strategies import quick
from treering._format.index import LeafType
from treering._leaves.commit import unfinished_update, update_for
from treering._leaves.documents.index import (
    Entry,
    IndexBranch,
    LeavesIndex,
    encode_leaves_index,
    entries_of,
    parse_leaves_index,
    record_of,
)
from treering._leaves.documents.record import LeavesRecord, encode_record
from treering._store.leaves_api import Move
from treering.errors import CorruptError, FormatError, TreeringError

GOLDEN = Path(__file__).parents[2] / "compat" / "golden" / "eformer"
Document = dict[str, Any]

W = {"path": "model/w", "shape": [3, 2], "dtype": "float32"}
MU = {"path": "optimizer/mu", "shape": [], "dtype": "int32"}
B = {"path": "b", "shape": [1], "dtype": "bfloat16"}
RECORD = flat({"w": (F32, None), "n": 7, "text": (LeafType(kind="str", dtype="uint8", shape=(5000,)), None)})


def branch_of(record: LeavesRecord, moving: tuple[str, ...] | None = None) -> IndexBranch:
    entries = [Entry(node["path"], node) for node in entries_of(record)]
    return IndexBranch(prefix=record.prefix, entries=entries, record=encode_record(record), moving=moving)


def index_of(*branches: IndexBranch) -> LeavesIndex:
    return LeavesIndex(branches={branch.prefix: branch for branch in branches}, document={})


def written(document: Document) -> bytes:
    return json.dumps(document, indent=2).encode()


# ------------------------------------------------------------------------------------------------------ other programs


@pytest.mark.parametrize(
    ("document", "branches"),
    [
        ({"format": "tensorstore", "version": "1.0", "arrays": [W, B]}, {None: [W, B]}),
        ({"format": "tensorstore", "arrays": [B]}, {None: [B]}),
        ({"format": "tensorstore", "version": "0.0.101", "prefixes": {}, "arrays": [B]}, {None: [B]}),
        ({"format": "tensorstore", "version": "2.0", "prefixes": {"model": [W]}}, {"model": [W]}),
        (
            {"format": "tensorstore", "version": "0.0.101", "prefixes": {"optimizer": [MU], "model": [W]}},
            {"optimizer": [MU], "model": [W]},
        ),
        (
            {"format": "tensorstore", "version": "0.0.58", "prefixes": {"model": [W]}, "arrays": [B]},
            {"model": [W], None: [B]},
        ),
        ({"format": "tensorstore", "version": "2.0", "prefixes": {}}, {}),
        ({"format": "tensorstore"}, {}),
        ({"format": "tensorstore", "arrays": [{"path": "a/b"}]}, {None: [{"path": "a/b"}]}),
    ],
    ids=["1.0", "no version", "plain", "2.0", "two prefixes", "mixed", "no prefixes", "nothing", "paths only"],
)
def test_what_other_programs_wrote(document: Document, branches: dict[str | None, list[Document]]) -> None:
    index = parse_leaves_index(written(document))
    assert list(index.branches) == list(branches)
    for prefix, nodes in branches.items():
        branch = index.branches[prefix]
        assert branch.entries == [Entry(node["path"], node) for node in nodes]
        assert (branch.prefix, branch.record, branch.moving) == (prefix, None, None)
        assert record_of(branch) is None


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*/tensorstore_index.json")), ids=lambda path: path.parent.name)
def test_golden_indexes(path: Path) -> None:
    document = json.loads(path.read_bytes())
    index = parse_leaves_index(path.read_bytes())
    lists = document.get("prefixes", {}) | ({None: document["arrays"]} if "arrays" in document else {})
    assert {prefix: [node for _, node in branch.entries] for prefix, branch in index.branches.items()} == lists
    again = json.loads(encode_leaves_index(index))
    assert again == {"prefixes": {}} | document | {"version": "2.0" if document.get("prefixes") else "1.0"}


def test_a_bare_array_of_another_program_lies_in_the_directory_itself() -> None:
    document: Document = {"format": "tensorstore", "arrays": [{"path": ".", "shape": [], "dtype": "int32"}]}
    index = parse_leaves_index(written(document))
    assert index.branches[None].entries == [Entry("", document["arrays"][0])]
    assert json.loads(encode_leaves_index(index))["arrays"] == document["arrays"]


def test_what_is_unknown_stays() -> None:
    document = {
        "format": "tensorstore",
        "by": {"who": [1, 2.5, None]},
        "version": "0.0.101",
        "prefixes": {"model": [W | {"sharding": {"x": ["é", "\n"]}}]},
        "arrays": [B],
        "later": [],
    }
    again = json.loads(encode_leaves_index(parse_leaves_index(written(document))))
    assert again == document | {"version": "2.0"}
    assert list(again) == ["format", "version", "prefixes", "arrays", "by", "later"]


# ----------------------------------------------------------------------------------------------------------------- ours


@quick(60)
@given(st.lists(records(), max_size=3, unique_by=lambda record: record.prefix), st.booleans())
def test_branches_come_back(found: list[LeavesRecord], moving: bool) -> None:
    cleared = ("a/b", "c%2E") if moving else None
    index = index_of(*sorted((branch_of(record, cleared) for record in found), key=lambda each: not each.prefix))
    data = encode_leaves_index(index)
    back = parse_leaves_index(data)
    assert back.branches == index.branches
    assert list(back.branches) == list(index.branches)
    # As json lays it out, and unchanged by a program that loads it and writes it again.
    again = json.dumps(json.loads(data), indent=2).encode()
    assert data == again
    for record in found:
        assert record_of(back.branches[record.prefix]) == record


def test_the_index_as_specified() -> None:
    record = flat({"w": (F32, None), "n": 7}, prefix="model")
    data = encode_leaves_index(index_of(branch_of(record, ("model/w",))))
    document = json.loads(data)
    digest = document["treering"]["model"]["moving"].pop("digest")
    assert digest.startswith("xxh3-128:")
    assert document == {
        "format": "tensorstore",
        "version": "2.0",
        "prefixes": {"model": [{"path": "model/w", "shape": [4, 6], "dtype": "float32"}]},
        "treering": {"model": {"record": encode_record(record).decode(), "moving": {"cleared": ["model/w"]}}},
    }
    assert json.loads(encode_leaves_index(index_of(branch_of(RECORD)))) == {
        "format": "tensorstore",
        "version": "1.0",
        "prefixes": {},
        "arrays": [{"path": "w", "shape": [4, 6], "dtype": "float32"}],
        "treering": {"": {"record": encode_record(RECORD).decode()}},
    }


def test_entries_are_the_arrays_of_a_record() -> None:
    # A long text lies in a folder and is not listed; a dtype that zarr lacks is listed as the ints that lie there.
    kinds = {
        "u": LeafType(kind="numpy", dtype="uint4", shape=(2,)),
        "k": LeafType(kind="str", dtype="uint8", shape=(9,)),
    }
    record = flat({"layer.0": (F32, None), **{name: (kind, None) for name, kind in kinds.items()}}, prefix="a.b")
    assert entries_of(record) == [
        {"path": "a/b/layer%2E0", "shape": [4, 6], "dtype": "float32"},
        {"path": "a/b/u", "shape": [2], "dtype": "uint8"},
    ]


def test_what_is_unknown_in_our_member_stays() -> None:
    document = json.loads(encode_leaves_index(index_of(branch_of(RECORD, ("w",)))))
    document["treering"][""]["later"] = [1]
    index = parse_leaves_index(written(document))
    again = json.loads(encode_leaves_index(index))
    assert again == document
    branches: dict[str | None, IndexBranch] = {None: dataclasses.replace(index.branches[None], moving=None)}
    moved = json.loads(encode_leaves_index(dataclasses.replace(index, branches=branches)))
    assert set(moved["treering"][""]) == {"record", "later"}


# ------------------------------------------------------------------------------------------------- entries and record


def entry_changes() -> dict[str, Callable[[list[Document]], object]]:
    return {
        "path": lambda nodes: nodes[0].update(path="v"),
        "shape": lambda nodes: nodes[0].update(shape=[6, 4]),
        "dtype": lambda nodes: nodes[0].update(dtype="int32"),
        "no shape": lambda nodes: nodes[0].pop("shape"),
        "one more": lambda nodes: nodes.append(B),
        "one less": lambda nodes: nodes.pop(),
        "order": lambda nodes: nodes.reverse(),
    }


@pytest.mark.parametrize("name", entry_changes())
def test_entries_that_are_not_those_of_the_record(name: str) -> None:
    document = json.loads(encode_leaves_index(index_of(branch_of(flat({"w": (F32, None), "x": (F32, None)})))))
    entry_changes()[name](document["arrays"])
    with pytest.raises(CorruptError, match=r"tensorstore_index\.json: the tree without prefix: (entry|\d array)"):
        record_of(parse_leaves_index(written(document)).branches[None])


def test_members_that_another_program_adds_to_entries_do_no_harm() -> None:
    document = json.loads(encode_leaves_index(index_of(branch_of(RECORD))))
    document["arrays"][0]["sharding"] = "P()"
    assert record_of(parse_leaves_index(written(document)).branches[None]) == RECORD


def test_a_record_in_the_wrong_place() -> None:
    document = json.loads(encode_leaves_index(index_of(branch_of(RECORD))))
    document["prefixes"] = {"p": document.pop("arrays")}
    document["treering"] = {"p": document["treering"][""]}
    with pytest.raises(CorruptError, match="prefix 'p': the record is that of prefix None"):
        record_of(parse_leaves_index(written(document)).branches["p"])


def test_a_lost_list_is_seen() -> None:
    document = json.loads(encode_leaves_index(index_of(branch_of(RECORD))))
    del document["arrays"]
    branch = parse_leaves_index(written(document)).branches[None]
    assert list(branch.entries) == []
    with pytest.raises(CorruptError, match="0 arrays are listed, the record has 1"):
        record_of(branch)


def test_a_branch_without_anything_has_lost_its_record() -> None:
    index = parse_leaves_index(b'{"format": "tensorstore", "prefixes": {"p": []}}')
    with pytest.raises(CorruptError, match="prefix 'p' has neither arrays nor a record"):
        record_of(index.branches["p"])


def test_a_branch_of_python_values_only() -> None:
    record = flat({"n": 7}, prefix="p")
    index = parse_leaves_index(encode_leaves_index(index_of(branch_of(record))))
    assert record_of(index.branches["p"]) == record


# -------------------------------------------------------------------------------------------------------------- hostile

PATHS = ["/etc/passwd", "..", "../out", "a/../b", "a/..", "./a", "a/./b", "a//b", "a/", "", "/", "a\0b", ".treering"]
PATHS += [".treering/0/leaves/a", "a/.", "\ud800", "x/\udfff"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", PATHS, ids=ascii)
@pytest.mark.parametrize("others", [0, 3])
def test_paths_that_lead_out(path: str, others: int) -> None:
    nodes = [{"path": f"a/{number}", "shape": [], "dtype": "int8"} for number in range(others)]
    nodes.insert(others // 2, {"path": path, "shape": [], "dtype": "int8"})
    for document in ({"arrays": nodes}, {"prefixes": {"model": nodes}}):
        with pytest.raises(CorruptError, match="leads out of the directory"):
            parse_leaves_index(written({"format": "tensorstore"} | document))


@pytest.mark.parametrize("path", ["a\n/b", "a/...", "..a", "a..", "é", "a\\..\\b", "x/.hidden", "a\n.."], ids=ascii)
def test_odd_paths_of_other_programs(path: str) -> None:
    index = parse_leaves_index(written({"format": "tensorstore", "arrays": [{"path": path}]}))
    assert index.branches[None].entries[0].path == path


@pytest.mark.parametrize(
    ("document", "error", "message"),
    [
        ({"format": "zarr", "arrays": []}, FormatError, "of the format 'zarr'"),
        ({"arrays": []}, FormatError, "of the format None"),
        ({"format": ["tensorstore"]}, FormatError, "of the format a list"),
        ([], CorruptError, "not a JSON object"),
        ({"format": "tensorstore", "arrays": {}}, CorruptError, "'arrays'"),
        ({"format": "tensorstore", "arrays": [7]}, CorruptError, "not a JSON object"),
        ({"format": "tensorstore", "arrays": [{"shape": []}]}, CorruptError, "no member 'path'"),
        ({"format": "tensorstore", "arrays": [{"path": 5}]}, CorruptError, "'path'"),
        ({"format": "tensorstore", "prefixes": None}, CorruptError, "'prefixes'"),
        ({"format": "tensorstore", "prefixes": {"p": {}}}, CorruptError, "no list of arrays"),
        ({"format": "tensorstore", "prefixes": {"": []}}, CorruptError, "or is none"),
        ({"format": "tensorstore", "treering": []}, CorruptError, "'treering'"),
        ({"format": "tensorstore", "treering": {"": "x"}}, CorruptError, "not a JSON object"),
        ({"format": "tensorstore", "treering": {"": {"record": 5}}}, CorruptError, "'record'"),
        ({"format": "tensorstore", "treering": {"": {"record": "é"}}}, CorruptError, "not ASCII"),
        ({"format": "tensorstore", "treering": {"": {"record": "", "moving": []}}}, CorruptError, "'moving'"),
        ({"format": "tensorstore", "treering": {"": {"record": "", "moving": {}}}}, CorruptError, "'cleared'"),
        ({"format": "tensorstore", "by": nested(200)}, CorruptError, "nested"),
        ({"format": "tensorstore", "arrays": [{"path": "a", "shape": nested(200)}]}, CorruptError, "nested"),
        ({"format": "tensorstore", "arrays": [{"path": "a", "x": nested(200)}]}, CorruptError, "nested"),
        ({"format": "tensorstore", "arrays": [W | {"dtype": nested(200)}]}, CorruptError, "nested"),
        ({"format": "tensorstore", "treering": {"": {"record": "", "x": nested(200)}}}, CorruptError, "nested"),
    ],
    ids=range(22),
)
def test_what_no_program_wrote(document: Any, error: type[TreeringError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        parse_leaves_index(written(document))
    assert str(caught.value).startswith("tensorstore_index.json ")
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff{}",
        b'{"format": "tensorstore", "a": NaN}',
        b'{"format": "tensorstore", "arrays": [], "arrays": []}',
        b'{"format": "tensorstore", "arrays": [{"path": "a", "path": "b"}]}',
        b'{"format": "tensorstore", "arrays": [{"path": "a", "shape": [1e999]}]}',
        b'{"format": "tensorstore", "a": ' + b"[" * 100_000,
        b'{"format": "tensorstore", "a": ' + b'{"a":' * 100_000,
        b'{"format": "tensorstore", "a": ' + b"9" * 5_000 + b"}",
        b"\xef\xbb\xbf{}",
    ],
    ids=range(11),
)
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises(CorruptError, match=r"^tensorstore_index\.json"):
        parse_leaves_index(data)


@pytest.mark.parametrize("folder", [*PATHS[:4], ".treering/0123456789abcdef", "a\0b"], ids=ascii)
def test_nothing_outside_is_ever_cleared(folder: str) -> None:
    document = json.loads(encode_leaves_index(index_of(branch_of(RECORD, ("w",)))))
    document["treering"][""]["moving"]["cleared"] = [folder]
    with pytest.raises(CorruptError, match="is to clear something that is not a folder"):
        parse_leaves_index(written(document))


def test_a_damaged_list_of_folders_to_clear_is_seen() -> None:
    document = json.loads(encode_leaves_index(index_of(branch_of(RECORD, ("w", "x")))))
    for cleared in (["w"], ["w", "y"], ["x", "w"], []):
        document["treering"][""]["moving"]["cleared"] = cleared
        with pytest.raises(CorruptError, match="is to clear is damaged"):
            parse_leaves_index(written(document))


def test_absurd_entries_take_no_memory() -> None:
    nodes = [{"path": f"a/{number}", "shape": [1 << 62] * 3, "dtype": "float32"} for number in range(100)]
    data = written({"format": "tensorstore", "arrays": nodes})
    tracemalloc.start()
    parse_leaves_index(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 * len(data) + (1 << 20)


FIRST, SECOND = "1" * 16, "2" * 16
TEXT = LeafType(kind="str", dtype="uint8", shape=(5000,))
RECORDS = (
    flat({"w": (F32, None), "n": 7, "s": (TEXT, None)}, attempt=FIRST),
    flat({"n": None, "k": 3}, prefix="q", attempt=SECOND),
)


def indexes() -> Iterator[tuple[str, bytes]]:
    moved = None
    for record in RECORDS:
        moved = update_for(moved, [record]).moved
    assert moved is not None
    yield "moved", moved
    again = flat({"w": (F32, None), "x": (F32, None)}, attempt="3" * 16)
    yield "moving", update_for(moved, [again]).moving
    foreign = b'{"format": "tensorstore", "version": "2.0", "prefixes": {"f": [{"path": "f/w", "shape": [2]}]}}'
    yield "beside another program's", update_for(foreign, [RECORDS[0]]).moved


def ours_with_markers(index: LeavesIndex) -> dict[str, bool]:
    """Every folder that has a ``.zarray``, and whether that has a marker."""
    folders = {entry.path: branch.record is not None for branch in index.branches.values() for entry in branch.entries}
    for branch in index.branches.values():
        record = record_of(branch)
        if record is not None:
            folders |= dict.fromkeys(record.folders, True)
    return folders


def moves_of(index: bytes) -> tuple[Move, ...]:
    promised = unfinished_update(index)
    return () if promised is None else promised.moves


def reading(branch: IndexBranch, folders: dict[str, bool]) -> LeavesRecord | str:
    """What a reader makes of a branch, or "damaged": `record_of`, then the markers, as that says."""
    try:
        record = record_of(branch)
    except TreeringError:
        record = None
        if not branch.entries:
            return "damaged"
    if record is not None:
        return record
    # A ``.zarray`` that is missing, or has a marker, makes it damaged.
    return "damaged" if any(folders.get(entry.path, True) for entry in branch.entries) else "another program's"


@pytest.mark.parametrize("bits", [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "good"), [pytest.param(name, data, id=name) for name, data in indexes()])
def test_every_bit_of_an_index(name: str, good: bytes, bits: int) -> None:
    index = parse_leaves_index(good)
    folders = ours_with_markers(index)
    whole = {prefix: reading(branch, folders) for prefix, branch in index.branches.items()}
    moves = moves_of(good)
    assert "damaged" not in whole.values()
    assert bool(moves) == (name == "moving")
    outcomes = {"error": 0, "damaged": 0, "unharmed": 0}
    for place in range(len(good)):
        # Where it is not all of them, each byte has another one than the byte before it.
        for bit in range(8) if bits == 8 else [place % 8]:
            bad = good[:place] + bytes([good[place] ^ 1 << bit]) + good[place + 1 :]
            outcomes[outcome(bad, whole, folders)] += 1
            # Nothing is cleared or moved that was not to be.
            assert set(moves_of(bad)) <= set(moves)
    assert all(outcomes.values())


def outcome(bad: bytes, whole: dict[str | None, LeavesRecord | str], folders: dict[str, bool]) -> str:
    try:
        found = parse_leaves_index(bad)
    except TreeringError:
        return "error"
    seen = {prefix: reading(branch, folders) for prefix, branch in found.branches.items()}
    damaged = "damaged" in seen.values()
    for prefix, was in whole.items():
        now = seen.get(prefix)
        if now == was:
            continue
        # A branch is never another one in silence; one of ours is missing only where the damage shows beside it.
        assert now == "damaged" or now is None, (prefix, bad)
        assert damaged or was == "another program's", (prefix, bad)
    return "damaged" if damaged else "unharmed"
