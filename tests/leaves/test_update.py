"""What becomes of an index when branches are saved: the others stay, and no two leaves meet in one folder."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.leaves.documents.test_record import F32, changed, flat
from treering._codec.key_document import find_attempts
from treering._codec.zarr import marker_of, zarray_bytes
from treering._format.index import LeafType
from treering._leaves.commit import unfinished_update, update_for
from treering._leaves.documents import index
from treering._leaves.documents.index import encode_leaves_index, entries_of, parse_leaves_index, record_of
from treering._leaves.documents.record import ChunkLayout, LeavesRecord, arrays_of, encode_record
from treering._store.leaves_api import Move
from treering.errors import CorruptError, FormatError, MismatchError

FIRST, SECOND, THIRD = (digit * 16 for digit in "123")
TEXT = LeafType(kind="str", dtype="uint8", shape=(5000,))


def saved(*records: LeavesRecord) -> bytes:
    """The index after these saves."""
    index = None
    for record in records:
        index = update_for(index, [record]).moved
    assert index is not None
    return index


def written(document: dict[str, Any]) -> bytes:
    return json.dumps(document, indent=2).encode()


def test_the_first_save(monkeypatch: pytest.MonkeyPatch) -> None:
    record = flat({"w": (F32, None), "s": (TEXT, None)}, prefix="model", attempt=FIRST)
    update = update_for(None, [record])
    assert update.moves == (Move(attempt=FIRST, cleared=()),)
    assert update.dropped == ()
    moving, moved = parse_leaves_index(update.moving), parse_leaves_index(update.moved)
    assert moving.branches["model"].moving == ()
    assert moved.branches["model"].moving is None
    assert [entry.document for entry in moved.branches["model"].entries] == entries_of(record)
    assert record_of(moved.branches["model"]) == record
    # The store reads the same moves from it, and comes to the same end.
    assert unfinished_update(update.moving) == update
    # Where it reads none, which is nearly always, it writes no index for it.
    monkeypatch.setattr(index, "encode_leaves_index", lambda _: pytest.fail("an index is written for nothing"))
    assert unfinished_update(update.moved) is None


def test_the_steps_of_a_save_differ_by_its_moves_alone() -> None:
    other = flat({"w": (F32, None)}, prefix="b", attempt=FIRST)
    half = update_for(None, [other]).moving
    update = update_for(half, [flat({"w": (F32, None)}, prefix="a", attempt=SECOND)])
    moving = parse_leaves_index(update.moving)
    branches = {**moving.branches, "a": dataclasses.replace(moving.branches["a"], moving=None)}
    assert update.moved == encode_leaves_index(dataclasses.replace(moving, branches=branches))
    assert [branch.moving for branch in branches.values()] == [(), None]


def test_a_save_replaces_its_own_branch_only() -> None:
    old = flat({"w": (F32, None), "gone": (F32, None), "s": (TEXT, None)}, prefix="model", attempt=FIRST)
    other = flat({"w": (F32, None)}, prefix="other", attempt=SECOND)
    new = flat({"w": (F32, None), "more": (F32, None)}, prefix="model", attempt=THIRD)
    before = saved(old, other)
    update = update_for(before, [new])
    # All leaves of the old save, long texts among them, and none of the other branch.
    assert update.moves == (Move(attempt=THIRD, cleared=("model/w", "model/gone", "model/s")),)
    branches = parse_leaves_index(update.moved).branches
    assert list(branches) == ["model", "other"]
    assert record_of(branches["model"]) == new
    assert branches["other"] == parse_leaves_index(before).branches["other"]
    assert find_attempts(update.moving) == {SECOND, THIRD}


def test_several_records_at_once() -> None:
    records = [flat({"w": (F32, None)}, prefix=prefix, attempt=each) for prefix, each in (("a", FIRST), ("b", SECOND))]
    update = update_for(None, records)
    assert [move.attempt for move in update.moves] == [FIRST, SECOND]
    assert unfinished_update(update.moving) == update
    assert parse_leaves_index(update.moved).branches.keys() == {"a", "b"}
    clash = [flat({"b": (F32, None)}, prefix="a"), flat({"w": (F32, None)}, prefix="a.b")]
    with pytest.raises(MismatchError):
        update_for(None, clash)


def test_what_another_program_wrote_stays() -> None:
    old = {
        "format": "tensorstore",
        "version": "1.0",
        "note": {"by": "me"},
        "arrays": [{"path": "a/w", "shape": [2], "dtype": "float32", "extra": 1}],
    }
    update = update_for(written(old), [flat({"w": (F32, None)}, prefix="model")])
    moved = json.loads(update.moved)
    assert moved["arrays"] == old["arrays"]
    assert moved["note"] == old["note"]
    assert moved["version"] == "2.0"
    assert update.moves[0].cleared == ()


def test_what_another_program_wrote_is_replaced_by_name() -> None:
    old = {"format": "tensorstore", "version": "0.0.101", "prefixes": {}, "arrays": [{"path": "a/w"}, {"path": "b"}]}
    record = flat({"w": (F32, None)}, attempt=FIRST)
    assert update_for(written(old), [record]).moves == (Move(attempt=FIRST, cleared=("a/w", "b")),)
    old["arrays"] = [{"path": "."}]
    assert update_for(written(old), [record]).moves == (Move(attempt=FIRST, cleared=("",)),)


def test_an_array_that_two_branches_list_stays_for_the_other() -> None:
    # eformer saved {"model": {"w": ...}} without a prefix, and {"w": ..., "v": ...} with the prefix "model".
    old = {
        "format": "tensorstore",
        "prefixes": {"model": [{"path": "model/w"}, {"path": "model/v"}]},
        "arrays": [{"path": "model/w"}, {"path": "step"}],
    }
    record = flat({"u": (F32, None)}, prefix="model", attempt=FIRST)
    update = update_for(written(old), [record])
    assert unfinished_update(update.moving) == update
    assert update.moves == (Move(attempt=FIRST, cleared=("model/v",)),)
    with pytest.raises(MismatchError, match="'model/w' of prefix 'model' and 'model/w' of the tree without prefix"):
        update_for(written(old), [flat({"w": (F32, None)}, prefix="model", attempt=FIRST)])


def test_an_unfinished_save_of_the_same_branch_is_cleared_too() -> None:
    first = flat({"a": (F32, None)}, attempt=FIRST)
    unfinished = update_for(saved(first), [flat({"b": (F32, None)}, attempt=SECOND)]).moving
    update = update_for(unfinished, [flat({"c": (F32, None)}, attempt=THIRD)])
    assert update.moves == (Move(attempt=THIRD, cleared=("b", "a")),)


def test_an_unfinished_save_of_another_branch_stays_unfinished() -> None:
    unfinished = update_for(None, [flat({"w": (F32, None)}, prefix="a", attempt=FIRST)])
    update = update_for(unfinished.moving, [flat({"w": (F32, None)}, prefix="b", attempt=SECOND)])
    promised = unfinished_update(update.moving)
    assert promised is not None
    assert promised.moves == (*unfinished.moves, *update.moves)
    promised = unfinished_update(update.moved)
    assert promised is not None
    assert promised.moves == unfinished.moves


@pytest.mark.parametrize(
    ("prefix", "leaf", "other_prefix", "other_leaf"),
    [
        ("model", "ema", "model.ema", "w"),
        ("model.ema", "w", "model", "ema"),
        (None, "model", "model", "w"),
        ("model", "w", None, "model"),
        ("a.b", "w", "a/b", "w"),
    ],
)
def test_leaves_of_two_branches_never_meet(
    prefix: str | None, leaf: str, other_prefix: str | None, other_leaf: str
) -> None:
    there = flat({other_leaf: (F32, None)}, prefix=other_prefix, attempt=FIRST)
    record = flat({"z": (F32, None), leaf: (F32, None)}, prefix=prefix, attempt=SECOND)
    with pytest.raises(MismatchError, match="the same, or one lies in the other") as caught:
        update_for(saved(there), [record])
    assert any(repr(folder) in str(caught.value) for folder in record.folders)
    assert repr(there.folders[0]) in str(caught.value)


def test_long_texts_meet_nobody_either() -> None:
    there = flat({"s": (TEXT, None)}, prefix="a", attempt=FIRST)
    with pytest.raises(MismatchError, match=r"a/s/w.*a/s"):
        update_for(saved(there), [flat({"w": (F32, None)}, prefix="a.s")])


def test_a_bare_array_of_another_program_fills_the_directory() -> None:
    old = {"format": "tensorstore", "arrays": [{"path": "."}]}
    with pytest.raises(MismatchError, match=r"'p/w' of prefix 'p' and '\.' of the tree without prefix"):
        update_for(written(old), [flat({"w": (F32, None)}, prefix="p")])


def test_neighbours_with_like_names_are_no_clash() -> None:
    names = ["w", "w-1", "w0", "W"]
    index = saved(*(flat({name: (F32, None)}, prefix=f"p{number}") for number, name in enumerate(names)))
    more = update_for(index, [flat({"p": (F32, None), "p00": (F32, None)})])
    assert len(parse_leaves_index(more.moved).branches) == 5


def test_other_branches_of_another_program_that_meet_each_other_do_not_matter() -> None:
    old = {"format": "tensorstore", "arrays": [{"path": "a"}, {"path": "a/b"}, {"path": "a"}]}
    update = update_for(written(old), [flat({"w": (F32, None)}, prefix="p")])
    assert json.loads(update.moved)["arrays"] == old["arrays"]


# --------------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": "tensorstore", "arrays": 5}'], ids=range(4))
def test_a_damaged_index_is_not_replaced(data: bytes) -> None:
    with pytest.raises(CorruptError):
        update_for(data, [flat({"w": (F32, None)})])


def test_the_index_of_another_format_is_not_replaced() -> None:
    with pytest.raises(FormatError):
        update_for(b'{"format": "something"}', [flat({"w": (F32, None)})])


def damaged(data: bytes, prefix: str) -> bytes:
    document = json.loads(data)
    node = document["treering"][prefix]
    node["record"] = node["record"].replace("tests", "pests")
    return written(document)


def test_a_branch_whose_record_is_damaged_is_not_replaced_in_silence() -> None:
    index = damaged(saved(flat({"w": (F32, None)}, prefix="a"), flat({"w": (F32, None)}, prefix="b")), "a")
    with pytest.raises(CorruptError, match="prefix 'a', which is to be replaced: the record is damaged"):
        update_for(index, [flat({"v": (F32, None)}, prefix="a")])
    # It is in nobody else's way.
    moved = json.loads(update_for(index, [flat({"v": (F32, None)}, prefix="b")]).moved)
    assert moved["treering"]["a"] == json.loads(index)["treering"]["a"]


def test_a_branch_that_a_newer_version_wrote_is_not_replaced() -> None:
    record = flat({"w": (F32, None)})
    newer = changed(encode_record(record), lambda document: document["types"][0].update(kind="sparse"))
    document = json.loads(saved(record))
    document["treering"][""]["record"] = newer.decode()
    with pytest.raises(FormatError, match="use a newer treering"):
        update_for(written(document), [record])


def test_nothing_is_saved_beside_files_whose_record_is_lost() -> None:
    index = parse_leaves_index(update_for(None, [flat({"w": (F32, None)}, prefix="a", attempt=FIRST)]).moving)
    branch = index.branches["a"]
    bad = dataclasses.replace(branch, record=(branch.record or b"").replace(b"tests", b"pests"))
    data = encode_leaves_index(dataclasses.replace(index, branches={"a": bad}))
    with pytest.raises(CorruptError, match="its files are not all in their places"):
        update_for(data, [flat({"w": (F32, None)}, prefix="b")])


def test_a_branch_that_another_program_saved_over_ours_is_replaced() -> None:
    document = json.loads(saved(flat({"w": (F32, None), "s": (TEXT, None)}, attempt=FIRST)))
    document["arrays"] = [{"path": "x", "shape": [2], "dtype": "float32"}]
    update = update_for(written(document), [flat({"y": (F32, None)}, attempt=SECOND)])
    assert update.moves == (Move(attempt=SECOND, cleared=("x", "w", "s")),)


# ---------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("data", [b"", b"{", b'{"format": "zarr"}', b"\xff"], ids=range(4))
def test_rules_about_what_is_no_index(data: bytes) -> None:
    assert unfinished_update(data) is None
    assert find_attempts(data) == frozenset()


def test_attempts_of_a_damaged_index_are_still_known() -> None:
    index = saved(flat({"w": (F32, None)}, prefix="a", attempt=FIRST), flat({"w": (F32, None)}, attempt=SECOND))
    assert find_attempts(index) == {FIRST, SECOND}
    assert find_attempts(index[:-30]) == {FIRST, SECOND}
    # However a program writes the same JSON.
    assert find_attempts(json.dumps(json.loads(index), separators=(",", ":")).encode()) == {FIRST, SECOND}


def test_moves_of_a_damaged_record_are_none() -> None:
    moving = update_for(None, [flat({"w": (F32, None)}, attempt=FIRST)]).moving
    bad = moving.replace(FIRST.encode(), SECOND.encode())
    assert unfinished_update(bad) is None


def test_rules_about_arrays() -> None:
    record = flat({"w": (F32, ChunkLayout(chunks=(2, 6)))}, attempt=FIRST)
    (ours,) = arrays_of(record)
    zarray = zarray_bytes(ours)
    assert marker_of(zarray) == FIRST
    assert marker_of(zarray_bytes(dataclasses.replace(ours, marker=None))) is None
    for bad in (b"", b"{}", zarray[:-1], b"\xff"):
        assert marker_of(bad) is None


def test_rules_never_change_what_they_do_not_know() -> None:
    moving = json.loads(update_for(None, [flat({"w": (F32, None)}, attempt=FIRST)]).moving)
    moving["note"] = {"a": [1]}
    promised = unfinished_update(written(moving))
    assert promised is not None
    moved = json.loads(promised.moved)
    assert moved["note"] == {"a": [1]}
    assert encode_leaves_index(parse_leaves_index(written(moved))) == written(moved)
