"""Memory that arrays are read into; two threads, whose first error ends all; pieces of files in groups."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treering
from tests import faults
from tests.properties.strategies import quick
from treering._arrays.jobs import aligned_bytes, aligned_together, group_near
from treering.errors import CorruptError
from treering.leaves import tree_serialize_leaves

MIB = 1 << 20


def test_progress_ends_at_its_total_whoever_comes_in_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's thread runs out of work while the other one still reads."""
    treering.save(tmp_path / "c", {"w": np.zeros(4 * MIB, np.uint8)})
    started, finish = threading.Event(), threading.Event()
    main = threading.current_thread()

    def order(*_: object) -> None:
        if threading.current_thread() is main:
            assert started.wait(10)
            finish.set()
        else:
            started.set()
            assert finish.wait(10)

    faults.after(monkeypatch, os, "preadv", order)
    for _ in range(5):
        started.clear()
        finish.clear()
        calls: list[tuple[int, int]] = []
        treering.load(tmp_path / "c", progress=lambda done, total: calls.append((done, total)))  # noqa: B023 - at once
        assert calls[-1] == (4 * MIB, 4 * MIB)
        assert calls == sorted(calls)


def test_the_first_error_stops_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    treering.save(tmp_path / "c", {"w": np.zeros(48 * MIB, np.uint8)})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    with file.open("r+b") as data:
        for at in (0, 2 * MIB):
            data.seek(4096 + at)
            data.write(b"x")
    ran: list[int] = []
    faults.after(monkeypatch, os, "preadv", lambda count, *_: ran.append(count))
    threads = threading.active_count()
    with pytest.raises(CorruptError, match="'w' is damaged"):
        treering.load(tmp_path / "c")
    assert 0 < sum(ran) < 24 * MIB
    assert threading.active_count() == threads


# ---------------------------------------------------------------------------- many short ones, which run in one thread

SMALL = 64_000
MAIN = threading.main_thread().ident


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """What is read from now on: whether it is of a large leaf, and by which thread."""
    found: list[tuple[bool, int]] = []

    def watch(name: str) -> None:
        def watched(descriptor: int, wanted: Any, *arguments: Any) -> None:
            nbytes = wanted if isinstance(wanted, int) else sum(map(len, wanted))
            kind = Path(f"/proc/self/fd/{descriptor}").readlink().name.count(".")
            if nbytes >= SMALL and kind < 2:
                found.append((kind == 1, threading.get_ident()))

        faults.before(monkeypatch, os, name, watched)

    for name in ("pread", "preadv", "read"):
        watch(name)
    return found


def save_leaves(path: Path) -> None:
    """Save small leaves of one axis, whose chunks are all named "0", and a large one of two."""
    tree = {f"n{n:03}": np.full(SMALL // 8, n) for n in range(100)} | {"large": np.arange(4 * MIB).reshape(4096, -1)}
    tree_serialize_leaves(path, tree, chunk_bytes=MIB)


def test_small_leaves_are_read_in_this_thread_only_and_count(tmp_path: Path, reads: list[tuple[bool, int]]) -> None:
    save_leaves(tmp_path)
    reads.clear()
    calls: list[tuple[int, int]] = []
    found = treering.load(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert all((found[f"n{n:03}"] == n).all() for n in range(100))
    small = [thread for large, thread in reads if not large]
    assert len(small) >= 100
    assert set(small) == {MAIN}
    nbytes = 100 * SMALL + 32 * MIB
    assert calls[-1] == (nbytes, nbytes)
    assert calls == sorted(calls)


def test_an_error_of_a_small_leaf_leaves_large_ones_unread(tmp_path: Path, reads: list[tuple[bool, int]]) -> None:
    save_leaves(tmp_path)
    (chunk,) = tmp_path.rglob("n000/0")
    chunk.write_bytes(chunk.read_bytes()[:-1])
    reads.clear()
    with pytest.raises(CorruptError, match="n000"):
        treering.load(tmp_path)
    assert len([large for large, _ in reads if large]) < 32


@pytest.mark.parametrize(
    ("nbytes", "alignment"),
    [(1, 64), ((4 << 20) - 1, 64), (4 << 20, 2 << 20), ((4 << 20) + 1, 2 << 20), (33 << 20, 2 << 20)],
)
def test_large_memory_begins_where_a_large_page_does(nbytes: int, alignment: int) -> None:
    for _ in range(3):
        room = aligned_bytes(nbytes)
        assert room.nbytes == nbytes
        assert room.ctypes.data % alignment == 0
        room[:] = 1  # all of it is there


def test_arrays_that_share_memory_do_not_overlap() -> None:
    dtype = np.dtype(np.int32)
    arrays = aligned_together([((size,), dtype) for size in (1, 0, 1 << 20, 17, 3)])
    for number, array in enumerate(arrays):
        array[:] = number
    assert [set(array.tolist()) for array in arrays] == [{0}, set(), {2}, {3}, {4}]
    assert all(array.ctypes.data % 64 == 0 for array in arrays)


class Wanted(NamedTuple):
    file: int
    offset: int
    nbytes: int


PIECES = st.lists(st.builds(Wanted, st.integers(0, 2), st.integers(0, 400), st.integers(0, 60)), max_size=40)


@quick(300)
@given(PIECES, st.integers(0, 30), st.integers(1, 100))
def test_groups_hold_every_piece_once(pieces: list[Wanted], gap: int, most: int) -> None:
    groups = list(group_near(pieces, gap=gap, most=most))
    assert sorted(itertools.chain.from_iterable(groups)) == sorted(pieces)
    for group in groups:
        assert len({piece.file for piece in group}) == 1
        assert len(group) == 1 or group[-1].offset + group[-1].nbytes - group[0].offset <= most
        for one, other in itertools.pairwise(group):
            assert one.offset + one.nbytes <= other.offset <= one.offset + one.nbytes + gap


def test_contiguous_pieces_fill_their_groups() -> None:
    """A group ends where another piece would not fit: of pieces of a fifth, none has less than four fifths."""
    pieces = [Wanted(0, start, min(20, 1001 - start)) for start in range(0, 1001, 20)]
    groups = list(group_near(reversed(pieces), gap=0, most=100))
    assert [len(group) for group in groups] == [5] * 10 + [1]
