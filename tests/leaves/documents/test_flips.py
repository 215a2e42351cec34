"""Every bit of an index, flipped: an error, a branch that is seen to be damaged, or an unharmed reading; never less."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.leaves.documents.made_records import F32, flat
from treering._format.index import LeafType
from treering._leaves.documents.index import IndexBranch, LeavesIndex, parse_leaves_index, record_of
from treering._leaves.documents.record import LeavesRecord
from treering._leaves.documents.update import unfinished_update, update_for
from treering._store.leaves_api import Move
from treering.errors import TreeringError

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


@pytest.mark.parametrize(("name", "good"), [pytest.param(name, data, id=name) for name, data in indexes()])
def test_every_bit_of_an_index(name: str, good: bytes) -> None:
    index = parse_leaves_index(good)
    folders = ours_with_markers(index)
    whole = {prefix: reading(branch, folders) for prefix, branch in index.branches.items()}
    moves = moves_of(good)
    assert "damaged" not in whole.values()
    assert bool(moves) == (name == "moving")
    outcomes = {"error": 0, "damaged": 0, "unharmed": 0}
    for place in range(len(good)):
        for bit in range(8):
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
