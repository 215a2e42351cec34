"""Which boxes and files of an older checkpoint a new one shares: random inputs, and a thousand processes."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from treering._format.index import DataFile, LeafType
from treering._plan.increment import (
    BEGUN,
    BOX_BYTES,
    CHANGED,
    MOVED,
    SHARED,
    OlderBoxes,
    Share,
    begun_files,
    choose_shared,
    cut_leading,
    cut_rows,
    find_shared_leaves,
    gather_files,
    lay_out_shares,
    most_files,
    row_bytes,
    states_of,
)
from treering._values.boxes import find_cover_error, flat_range, size_of, whole


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(40))
def test_a_box_is_cut_into_runs_of_bytes_that_tile_it(seed: int) -> None:
    chosen = random.Random(seed)
    shape = tuple(chosen.randint(1, 9) for _ in range(chosen.randint(0, 4)))
    itemsize, most = chosen.choice([1, 2, 4, 8]), chosen.randint(1, 600)
    boxes = list(cut_leading(whole(shape), itemsize, most))
    assert find_cover_error(shape, boxes) is None
    at = 0
    for box in boxes:  # in C order, so that each begins where the one before it ends
        found = flat_range(box, shape)
        assert found is not None
        assert found[0] == at
        at = found[1]
        assert size_of(box) * itemsize <= most or size_of(box) == 1


def older_of(chosen: random.Random, count: int) -> OlderBoxes:
    """Random boxes in a few files, each of which may have bytes of boxes that are used no more."""
    files = chosen.randint(1, 6)
    file = [chosen.randrange(files) for _ in range(count)]
    nbytes = [chosen.choice([0, 1, 8, 64, 1000]) for _ in range(count)]
    totals: Counter[int] = Counter()
    for place, size in zip(file, nbytes, strict=True):
        totals[place] += size
    dead = [chosen.choice([0, 0, 10, 2000]) for _ in range(files)]
    return OlderBoxes(file=file, nbytes=nbytes, file_bytes=[totals[number] + more for number, more in enumerate(dead)])


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(60))
def test_at_least_half_of_each_shared_file_is_used_and_no_box_is_lost(seed: int) -> None:
    chosen = random.Random(seed)
    older = older_of(chosen, chosen.randint(1, 40))
    same = [number if chosen.random() < 0.7 else -1 for number in range(len(older.file))] + [-1] * chosen.randint(0, 5)
    most = chosen.randint(0, 4)
    shared = choose_shared(same, older, most)
    assert len(shared) <= most
    live: Counter[int] = Counter()
    for number in same:
        if number >= 0:
            live[older.file[number]] += older.nbytes[number]
    assert all(2 * live[file] >= older.file_bytes[file] for file in shared)
    left_out = [file for file in live if file not in shared and live[file] and 2 * live[file] >= older.file_bytes[file]]
    assert not left_out or len(shared) == most
    if shared and left_out:
        assert min(live[file] for file in shared) >= max(live[file] for file in left_out)
    states = states_of(same, older, shared)
    for number, state in zip(same, states, strict=True):
        assert state == (CHANGED if number < 0 else SHARED if older.file[number] in shared else MOVED)
    states = [BEGUN if state == CHANGED and chosen.random() < 0.5 else state for state in states]
    sizes = [older.nbytes[number] if number >= 0 else chosen.choice([0, 5, 700]) for number in same]
    limit = chosen.choice([1, 100, 5000])
    files = gather_files(states, sizes, limit)
    written = [number for rows in files for number in rows]
    assert sorted(written) == [number for number, state in enumerate(states) if state != SHARED]
    for rows in files:
        assert len({states[row] for row in rows}) == 1  # what changes and what does not lie apart
        assert sum(sizes[row] for row in rows) <= limit or len([row for row in rows if sizes[row]]) == 1
    assert len(files) + len(shared) <= most_files(sum(sizes), limit)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seed", range(40))
def test_what_is_left_on_its_device_lies_in_shared_files_whatever_else_is_found_to_be_the_same(seed: int) -> None:
    chosen = random.Random(seed)
    older = older_of(chosen, chosen.randint(1, 40))
    rows = sorted((chosen.randrange(6), ((n, n + 1),)) for n in range(len(older.file)))
    same = [number if chosen.random() < 0.8 else -1 for number in range(len(rows))]
    known = [number if chosen.random() < 0.8 else -1 for number in same]  # before the others are compared
    states = states_of(same, older, choose_shared(same, older))
    left = find_shared_leaves(rows, known, older)
    assert all(state == SHARED for (leaf, _), state in zip(rows, states, strict=True) if leaf in left)
    assert not left.intersection(leaf for (leaf, _), number in zip(rows, known, strict=True) if number < 0)
    assert find_shared_leaves(rows, same, older) == {leaf for leaf, _ in rows} - {
        leaf for (leaf, _), state in zip(rows, states, strict=True) if state != SHARED
    }


def test_a_thousand_processes_come_to_one_layout() -> None:
    chosen = random.Random(7)
    kind = LeafType(kind="jax", dtype="float32", shape=(4000, 16))
    rows = cut_rows([(0, ((n, n + 2), (0, 16))) for n in range(0, 4000, 2)], [kind], [0])
    assert set(row_bytes(rows, [kind], [0])) == {128}
    older = OlderBoxes(file=[n // 2 for n in range(2000)], nbytes=[128] * 2000,
        offset=[4096 + 128 * (n % 2) for n in range(2000)], file_bytes=[256] * 1000,
    )  # fmt: skip
    count = most_files(256)
    parts = []
    for process in range(1000):
        own = rows[2 * process : 2 * process + 2]
        same = [n if chosen.random() < 0.5 else -1 for n in (2 * process, 2 * process + 1)]
        shared = choose_shared(same, older)
        states = states_of(same, older, shared)
        states = [BEGUN if state == CHANGED and chosen.random() < 0.5 else state for state in states]
        number = process * count + begun_files(states, [128, 128])
        name = f"data-{'0' * 16}-{number:05}-of-{1000 * count:05}.safetensors"
        entry = DataFile(name=name, nbytes=4352, header=4096, digest="xxh3-128:" + "0" * 32)
        linked = dict.fromkeys(shared, entry)
        part = Share(process=process, first=process * count, rows=own, states=states, numbers=same, linked=linked)
        parts.append(part)

    def layout(some: list[Share]) -> Any:
        return lay_out_shares(
            SimpleNamespace, "0" * 16, ["w"], [kind], [0], shares=some, older=older, count=1000 * count
        )

    together = layout(parts)
    assert len(set(together.names)) == len(together.names)
    assert together.chunks.box == [box for _, box in rows]
    at = 0
    for part in parts:  # what a process finds by itself is what process 0 finds of it
        own, stop = layout([part]), at + len(part.rows)
        there = [together.names[file] for file in together.chunks.file[at:stop]]
        assert there == [own.names[file] for file in own.chunks.file]
        assert together.chunks.offset[at:stop] == own.chunks.offset
        assert {together.writers[file] for file in together.chunks.file[at:stop]} == {part.process}
        # What is begun before the rest is known lies where it will lie at the end.
        begun = [row for row, state in enumerate(part.states) if state == BEGUN]
        early = dataclasses.replace(
            part, rows=[part.rows[row] for row in begun], states=[BEGUN] * len(begun), numbers=(), linked={}
        )
        first = layout([early])
        assert first.names == own.names[: len(first.names)]
        assert first.headers == own.headers[: len(first.names)]
        assert first.chunks.offset == [own.chunks.offset[row] for row in begun]
        at = stop


def test_a_box_larger_than_a_file_has_one_of_its_own() -> None:
    assert gather_files([CHANGED] * 3, [1, 10, 1], limit=4) == [[0], [1], [2]]


@pytest.mark.parametrize("frozen", [0.0, 0.4, 1.0])
def test_a_bucket_copies_each_file_of_twenty_gigabytes_by_one_request(frozen: float) -> None:
    chosen = random.Random(3)
    stacked = LeafType(kind="jax", dtype="float32", shape=(48, 1 << 26))  # layers of 256 MiB
    one_row = LeafType(kind="jax", dtype="bfloat16", shape=(1, 1 << 32))  # 8 GiB, of which no axis but the last is cut
    bias = LeafType(kind="numpy", dtype="float64", shape=(1000,))
    types, leaf_types = [stacked, one_row, bias], [0, 1, *[2] * 2000]
    keys = [f"leaf {number}" for number in range(len(leaf_types))]
    rows = cut_rows([(leaf, None) for leaf in range(len(leaf_types))], types, leaf_types)
    sizes = row_bytes(rows, types, leaf_types)
    assert sum(sizes) > 20 << 30
    assert max(sizes) <= BOX_BYTES
    states = [MOVED if chosen.random() < frozen else CHANGED for _ in rows]
    share = Share(process=0, first=0, rows=rows, states=states, numbers=[-1] * len(rows), linked={})
    count = most_files(sum(sizes))
    laid: Any = lay_out_shares(
        SimpleNamespace, "0" * 16, keys, types, leaf_types, shares=[share], older=None, count=count
    )
    ends = [0] * len(laid.names)
    for file, offset, nbytes in zip(laid.chunks.file, laid.chunks.offset, laid.chunks.nbytes, strict=True):
        ends[file] = max(ends[file], offset + nbytes)
    assert len(ends) in {6, 7}
    assert max(ends) < 5_000_000_000  # S3 copies no more by one request


def test_a_file_without_a_byte_in_use_is_not_shared() -> None:
    older = OlderBoxes(file=[0], nbytes=[0], file_bytes=[0])
    assert choose_shared([0], older) == ()
    assert states_of([0], dataclasses.replace(older, file=[0]), ()) == [MOVED]
