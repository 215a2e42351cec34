"""How long plans take and how even they are: 10,000 leaves, 1,024 processes. ``python -m benchmarks.plans``.

Counts are exact and the same everywhere; only the times are this machine's.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterable, Sequence

from treering._plan.load import StoredChunk, plan_load
from treering._plan.save import LeafLayout, plan_save
from treering._values.boxes import Box, size_of, whole
from treering._values.checksums import block_bytes

__all__ = ["main"]

LEAVES = 10_000
PROCESSES = 1_024
GRID = (32, 32)
"""The mesh of processes."""

Shape = tuple[int, ...]
Boxes = tuple[tuple[Box, tuple[int, ...]], ...]


def cut(shape: Shape, parts: Shape) -> Iterable[tuple[Shape, Box]]:
    """Yield the cells of a grid over an array, with their places in it."""
    for place in itertools.product(*map(range, parts)):
        yield (
            place,
            tuple(
                (number * length // count, (number + 1) * length // count)
                for number, length, count in zip(place, shape, parts, strict=True)
            ),
        )


def save_layouts() -> dict[str, Sequence[LeafLayout]]:
    """The ways in which a leaf lies on 1,024 processes."""
    everybody = tuple(range(PROCESSES))
    rows, columns = GRID
    matrix = (4096, 4096)

    def layout(shape: Shape, boxes: Boxes) -> LeafLayout:
        return LeafLayout(nbytes_per_item=2, shape=shape, boxes=boxes)

    replicated = layout((257, 1031), ((whole((257, 1031)), everybody),))
    sharded = layout(matrix, tuple((box, (at[0],)) for at, box in cut(matrix, (PROCESSES, 1))))
    by_rows = layout(
        matrix,
        tuple((box, tuple(range(at[0] * columns, (at[0] + 1) * columns))) for at, box in cut(matrix, (rows, 1))),
    )
    by_columns = layout(
        matrix, tuple((box, tuple(range(at[1], PROCESSES, columns))) for at, box in cut(matrix, (1, columns)))
    )
    kinds = [replicated, sharded, by_rows, by_columns, *shuffled(matrix)]
    return {
        "replicated, no two alike": [
            layout((1 + leaf, 97), ((whole((1 + leaf, 97)), everybody),)) for leaf in range(LEAVES)
        ],
        "replicated, sides prime": [replicated] * LEAVES,
        "sharded over all": [sharded] * LEAVES,
        "rows sharded, replicated in columns": [by_rows] * LEAVES,
        "all of these and a shuffled mesh": [kinds[leaf % len(kinds)] for leaf in range(LEAVES)],
    }


def shuffled(shape: Shape) -> list[LeafLayout]:
    """Leaves over a mesh of four devices a process in no order at all."""
    devices = list(range(4 * PROCESSES))
    random.Random(0).shuffle(devices)
    layouts = []
    for parts in (16, 64, 256, 1024):
        held = len(devices) // parts
        owners = [tuple({device // 4 for device in devices[at * held : (at + 1) * held]}) for at in range(parts)]
        boxes = tuple((box, owners[at[0]]) for at, box in cut(shape, (parts, 1)))
        layouts.append(LeafLayout(nbytes_per_item=2, shape=shape, boxes=boxes))
    return layouts


def show_saves() -> None:
    """Print how long each plan takes, and what the busiest process writes."""
    print(f"save: {LEAVES:,} leaves, {PROCESSES:,} processes")
    for name, layouts in save_layouts().items():
        start = time.perf_counter()
        plan = plan_save(layouts, PROCESSES)
        parts = plan.parts_of(PROCESSES // 2)
        seconds = time.perf_counter() - start
        share = sum(plan.loads) / PROCESSES
        print(f"  {name:38} {seconds:6.2f} s  busiest {max(plan.loads) / share:.3f} of the mean  {len(parts):6,} parts")


def show_loads() -> None:
    """Print what each way of loading a saved matrix reads."""
    shape, itemsize = (8192, 8192), 4
    unique = math.prod(shape) * itemsize
    print(f"load: {shape[0]} x {shape[1]} float32, bytes read by all processes over bytes that there are")
    for saved_over, processes in itertools.product((1, 8, 1024), (8, 1024)):
        chunks = [
            StoredChunk(box=box, block=block_bytes(size_of(box) * itemsize)) for _, box in cut(shape, (saved_over, 1))
        ]
        for name, parts in (("rows", (processes, 1)), ("columns", (1, processes))):
            start = time.perf_counter()
            plan = plan_load(shape, itemsize, chunks, [[box] for _, box in cut(shape, parts)])
            reads = plan.reads_of(processes // 2)
            seconds = time.perf_counter() - start
            total = sum(read.nbytes for one in plan.reads for read in one)
            print(
                f"  {saved_over:5,} chunks of rows -> {processes:5,} x {name:8} {plan.strategy.value:8} "
                f"{total / unique:.3f}  {1000 * seconds:7.1f} ms  {len(reads):3} reads"
            )


def main() -> None:
    """Print both tables."""
    show_saves()
    show_loads()


if __name__ == "__main__":
    main()
