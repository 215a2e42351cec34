"""How long plans take and how even they are, for up to 1,024 processes that are only thought of.

Counts are exact and the same everywhere; only the times are this machine's.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from benchmarks import workloads
from benchmarks.measure import Case, Group
from benchmarks.suite import Benchmark, Goal, Scene
from benchmarks.workloads import LeafKind
from treering._plan.chunks import balanced_chunk, plan_writers, shared_chunk_shape
from treering._plan.load import ChunkTable, Grid, Parts, StoredChunk, StoredLeaf, plan_loads
from treering._plan.save import LeafLayout, SavePlan, plan_save
from treering._values.boxes import Box, size_of, whole
from treering._values.checksums import block_bytes

__all__ = ["BENCHMARK"]

LEAVES = 10_000
"""Leaves of the trees that are only thought of."""
GRIDS = {8: (4, 2), 64: (8, 8), 1024: (32, 32)}
"""How many processes, and the mesh of them."""

Shape: TypeAlias = tuple[int, ...]
Boxes: TypeAlias = tuple[tuple[Box, tuple[int, ...]], ...]
Way: TypeAlias = Literal["sharded", "replicated", "mixed"]

_BUSIEST = "bytes of the busiest / mean"
_UNIQUE = "bytes read by all / unique"
_NEEDED = "bytes read by all / needed"


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


# Saves.


def over_grid(shape: Shape, itemsize: int, grid: tuple[int, int]) -> LeafLayout:
    """Rows over one axis of the processes and columns over the other, where the shape can be divided so."""
    parts = [count if size % count == 0 else 1 for size, count in zip(shape, grid, strict=False)]
    rows, columns = (*parts, 1, 1)[:2]
    owners = {
        place: tuple(
            row * grid[1] + column
            for row in ((place[0],) if rows > 1 else range(grid[0]))
            for column in ((place[1],) if columns > 1 else range(grid[1]))
        )
        for place in itertools.product(range(rows), range(columns))
    }
    boxes = tuple((box, owners[at[0], at[1] if len(at) > 1 else 0]) for at, box in cut(shape, tuple(parts)))
    return LeafLayout(nbytes_per_item=itemsize, shape=shape, boxes=boxes)


def on_all(shape: Shape, itemsize: int, processes: int) -> LeafLayout:
    """The whole array on every process."""
    return LeafLayout(nbytes_per_item=itemsize, shape=shape, boxes=((whole(shape), tuple(range(processes))),))


def transformer_layouts(arrays: Sequence[Any], way: Way, processes: int) -> list[LeafLayout]:
    """How the leaves of workload A lie; arrays of one shape share one layout, as those of jax share a sharding."""
    known: dict[tuple[Shape, int, bool], LeafLayout] = {}
    layouts = []
    for number, array in enumerate(arrays):
        replicated = way == "replicated" or (way == "mixed" and number % 2 == 1)
        kind = (array.shape, array.itemsize, replicated)
        if kind not in known:
            known[kind] = on_all(*kind[:2], processes) if replicated else over_grid(*kind[:2], GRIDS[processes])
        layouts.append(known[kind])
    return layouts


def many_layouts(processes: int) -> dict[str, Sequence[LeafLayout]]:
    """The ways in which many leaves lie."""
    rows, columns = GRIDS[processes]
    matrix = (4096, 4096)

    def layout(boxes: Boxes) -> LeafLayout:
        return LeafLayout(nbytes_per_item=2, shape=matrix, boxes=boxes)

    replicated = on_all((257, 1031), 2, processes)
    sharded = layout(tuple((box, (at[0],)) for at, box in cut(matrix, (processes, 1))))
    by_rows = layout(
        tuple((box, tuple(range(at[0] * columns, (at[0] + 1) * columns))) for at, box in cut(matrix, (rows, 1)))
    )
    by_columns = layout(tuple((box, tuple(range(at[1], processes, columns))) for at, box in cut(matrix, (1, columns))))
    kinds = [replicated, sharded, by_rows, by_columns, *shuffled(matrix, processes)]
    return {
        "replicated, no two alike": [on_all((1 + leaf, 97), 2, processes) for leaf in range(LEAVES)],
        "replicated, sides prime": [replicated] * LEAVES,
        "sharded over all": [sharded] * LEAVES,
        "rows sharded, replicated in columns": [by_rows] * LEAVES,
        "all of these and a shuffled mesh": [kinds[leaf % len(kinds)] for leaf in range(LEAVES)],
    }


def shuffled(shape: Shape, processes: int) -> list[LeafLayout]:
    """Leaves over a mesh of four devices a process in no order at all."""
    devices = list(range(4 * processes))
    random.Random(0).shuffle(devices)
    layouts = []
    for parts in (16, 64, 256, 1024):
        held = len(devices) // parts
        owners = [tuple({device // 4 for device in devices[at * held : (at + 1) * held]}) for at in range(parts)]
        boxes = tuple((box, owners[at[0]]) for at, box in cut(shape, (parts, 1)))
        layouts.append(LeafLayout(nbytes_per_item=2, shape=shape, boxes=boxes))
    return layouts


def save_group(name: str, layouts: Sequence[LeafLayout], processes: int) -> Group:
    """Plan a checkpoint for everybody, and list what one process writes."""

    def work() -> tuple[SavePlan[Box], int]:
        plan = plan_save(layouts, processes)
        parts = plan.parts_of(processes // 2)
        return plan, sum(size_of(box) * layouts[leaf].nbytes_per_item for leaf, box in parts)

    return _group(name, work, lambda done: _wrong_save(layouts, done[0].loads, processes, done[1]), _busiest)


def leaves_group(name: str, layouts: Sequence[LeafLayout], processes: int) -> Group:
    """The same for a leaves directory, whose chunk files are dealt out whole."""

    def work() -> tuple[SavePlan[int], int]:
        limit = balanced_chunk(layouts, processes)
        known: dict[int, Shape] = {}
        for layout in layouts:
            if id(layout) not in known:
                boxes = [box for box, _ in layout.boxes]
                known[id(layout)] = shared_chunk_shape(layout.shape, boxes, layout.nbytes_per_item, limit)
        chunks = [known[id(layout)] for layout in layouts]
        plan = plan_writers(layouts, chunks, processes, [str(number) for number in range(len(layouts))])
        parts = plan.parts_of(processes // 2)
        return plan, sum(math.prod(chunks[leaf]) * layouts[leaf].nbytes_per_item for leaf, _ in parts)

    return _group(name, work, lambda done: _wrong_save(layouts, done[0].loads, processes, done[1]), _busiest)


def _busiest(done: tuple[SavePlan[Any], int]) -> float:
    loads = done[0].loads
    return max(loads) * len(loads) / sum(loads)


def _wrong_save(layouts: Sequence[LeafLayout], loads: Sequence[int], processes: int, mine: int) -> str | None:
    """Whether all is written once, and the one process that was asked has what the plan says."""
    there = sum(size_of(whole(layout.shape)) * layout.nbytes_per_item for layout in layouts)
    if not there <= sum(loads) <= 1.005 * there:
        return f"{sum(loads)} bytes are written, there are {there}"
    if mine != loads[processes // 2]:
        return f"one process has {mine} bytes, the plan says {loads[processes // 2]}"
    return None


# Loads.


def stored(shape: Shape, itemsize: int, boxes: Iterable[Box], grid: Grid) -> StoredLeaf:
    """A leaf in boxes, wanted over a mesh of processes with a device each."""
    chunks = tuple(StoredChunk(box=box, block=block_bytes(size_of(box) * itemsize)) for box in boxes)
    wanted: list[tuple[Box, ...]] = [()] * len(grid.owners)
    for owner, at in zip(grid.owners, itertools.product(*map(range, grid.shape)), strict=True):
        box = []
        for length, axes in zip(shape, grid.spec, strict=True):
            place, count = (at[axes[0]], grid.shape[axes[0]]) if axes else (0, 1)
            box.append((place * length // count, (place + 1) * length // count))
        wanted[owner] = (tuple(box),)
    return StoredLeaf(shape=shape, itemsize=itemsize, chunks=chunks, wanted=wanted, grid=grid)


def cut_along(axis: int | None, axes: int, processes: int) -> Grid:
    """A mesh in one line, over which one of the axes of a leaf is cut; None: the leaf is whole on all."""
    spec = tuple((0,) if each == axis else () for each in range(axes))
    return Grid(shape=(processes,), owners=tuple(range(processes)), spec=spec)


def turned_grid(axes: int, grid: tuple[int, int]) -> Grid:
    """The mesh of processes turned: its columns cut the rows of a leaf, and its rows the columns."""
    rows, columns = grid
    owners = tuple(row * columns + column for column in range(columns) for row in range(rows))
    return Grid(shape=(columns, rows), owners=owners, spec=((0,), (1,))[:axes])


def load_group(name: str, leaves: Sequence[StoredLeaf], processes: int, unit: str) -> Group:
    """Plan a load for everybody, and list what one process reads."""

    def work() -> list[Parts | None]:
        plans = plan_loads(leaves, processes)
        for leaf, parts in zip(leaves, plans, strict=True):
            boxes_of(leaf, parts, processes // 2)
        return plans

    def share(plans: list[Parts | None]) -> float:
        there = sum(bytes_of(leaf, needed=unit == _NEEDED) for leaf in leaves)
        read = 0
        kinds = {id(leaf): (leaf, parts) for leaf, parts in zip(leaves, plans, strict=True)}
        times = Counter(map(id, leaves))
        for number, (leaf, parts) in kinds.items():
            table = ChunkTable(leaf.chunks)
            found = [table.costs_of(boxes_of(leaf, parts, process), leaf.itemsize) for process in range(processes)]
            read += times[number] * sum(nbytes for each in found for nbytes, _ in each)
        return read / there

    return _group(name, work, lambda _: None, share, unit=unit)


def boxes_of(leaf: StoredLeaf, parts: Parts | None, process: int) -> Sequence[Box]:
    """The boxes of a leaf that one process reads."""
    if parts is None:
        return leaf.wanted[process]
    places = [place for place, owner in enumerate(parts.owners) if owner == process]
    return [box for place in places if (box := parts.box_of(place, leaf.shape)) is not None]


def bytes_of(leaf: StoredLeaf, *, needed: bool) -> int:
    """Bytes of a leaf: those that processes want, all of them added up, or those that there are."""
    if not needed:
        return math.prod(leaf.shape) * leaf.itemsize
    return sum(size_of(box) for boxes in leaf.wanted for box in boxes) * leaf.itemsize


def transformer_stored(arrays: Sequence[Any], processes: int, *, turned: bool) -> Iterator[StoredLeaf]:
    """Workload A saved whole and wanted by rows; or saved over the mesh of processes and wanted over it turned.

    Rows of vectors are of no use to anybody: each process wants all of them.
    """
    known: dict[tuple[Shape, int], StoredLeaf] = {}
    for array in arrays:
        kind = (array.shape, array.itemsize)
        if kind not in known:
            if turned:
                boxes = [box for _, box in cut(array.shape, GRIDS[processes][: array.ndim])]
                grid = turned_grid(array.ndim, GRIDS[processes])
            else:
                boxes = [whole(array.shape)]
                grid = cut_along(0 if array.ndim > 1 else None, array.ndim, processes)
            known[kind] = stored(*kind, boxes, grid)
        yield known[kind]


def _group(
    name: str,
    work: Callable[[], Any],
    check: Callable[[Any], str | None],
    count: Callable[[Any], float],
    unit: str = _BUSIEST,
) -> Group:
    case = Case(name="treering", begin=lambda: work, check=check, count=count)
    return Group(name=name, cases=(case,), peaks=False, unit=unit)


# Scenes.


class _Plans(Scene):
    """Nothing but plans: no files."""

    repeats = 1

    def __init__(self, title: str, nbytes: int, groups: Callable[[], Iterator[Group]]) -> None:
        self.title = title
        self.nbytes = nbytes
        self._groups = groups

    def prepare(self) -> None:
        """Nothing is needed."""

    def close(self) -> None:
        """Nothing was written."""

    def groups(self) -> tuple[Group, ...]:
        """What is planned."""
        return tuple(self._groups())


def plan_title(form: str, what: str, processes: int) -> str:
    """Name of a group that plans for so many processes.

    Example:
        >>> plan_title("leaves", "save mixed", 1024)
        'leaves: plan save mixed, 1,024 processes'
    """
    return ("" if form == "treering" else f"{form}: ") + f"plan {what}, {processes:,} processes"


def _transformer_groups(arrays: Sequence[Any]) -> Iterator[Group]:
    for processes in GRIDS:
        for way in get_args(Way):
            layouts = transformer_layouts(arrays, way, processes)
            yield save_group(plan_title("treering", f"save {way}", processes), layouts, processes)
            yield leaves_group(plan_title("leaves", f"save {way}", processes), layouts, processes)
        for what, turned, unit in (
            ("load rows of the whole", False, _NEEDED),
            ("load over the turned mesh", True, _UNIQUE),
        ):
            leaves = tuple(transformer_stored(arrays, processes, turned=turned))
            yield load_group(plan_title("treering", what, processes), leaves, processes, unit)


def _many_groups() -> Iterator[Group]:
    processes = max(GRIDS)
    for name, layouts in many_layouts(processes).items():
        yield save_group(plan_title("treering", f"save {name}", processes), layouts, processes)


def _matrix_groups(shape: Shape, itemsize: int) -> Iterator[Group]:
    for saved_over, processes in itertools.product((1, 8, 1024), (8, 1024)):
        boxes = [box for _, box in cut(shape, (saved_over, 1))]
        for axis, name in enumerate(("rows", "columns")):
            leaf = stored(shape, itemsize, boxes, cut_along(axis, len(shape), processes))
            what = f"load {saved_over:,} chunk{'s' if saved_over > 1 else ''} as {name}"
            yield load_group(plan_title("treering", what, processes), [leaf], processes, _UNIQUE)


def _scene(name: str, leaves: LeafKind, factor: float, folder: Path) -> Scene:
    del leaves, factor, folder  # plans have none of them, and those of a smaller tree say nothing
    if name == "plans of A":
        work = workloads.outline("A")
        arrays = [array for _, array in workloads.flat(work.tree)]
        return _Plans(f"{work.title}, planned", work.nbytes, lambda: _transformer_groups(arrays))
    if name == "plans of many":
        return _Plans(f"{LEAVES:,} leaves, planned", 0, _many_groups)
    shape, itemsize = (8192, 8192), 4
    return _Plans("8192 x 8192 float32, planned", math.prod(shape) * itemsize, lambda: _matrix_groups(shape, itemsize))


_GOALS = (
    *(
        Goal(row=8, workload="plans of A", group=plan_title(form, f"save {way}", processes), kind="count", bound=1.10)
        for processes in GRIDS
        for way in get_args(Way)
        for form in ("treering", "leaves")
        # A share of 1 MiB is one chunk of a leaves directory: nothing is promised there.
        if form == "treering" or processes < 1024
    ),
    *(
        Goal(row=4, workload="plans of A", group=plan_title("treering", what, processes), kind="count", bound=1.05)
        for processes in GRIDS
        for what in ("load rows of the whole", "load over the turned mesh")
    ),
    *(
        Goal(
            row=8,
            workload="plans of many",
            group=plan_title("treering", f"save {name}", 1024),
            kind="count",
            bound=1.10,
        )
        for name in (
            "replicated, no two alike",
            "replicated, sides prime",
            "sharded over all",
            "rows sharded, replicated in columns",
            "all of these and a shuffled mesh",
        )
    ),
)

BENCHMARK = Benchmark(
    name="plans",
    title="treering's plans, for processes that are only thought of",
    workloads=("plans of A", "plans of many", "plans of a matrix"),
    numpy_only=(),
    jax_only=("plans of A", "plans of many", "plans of a matrix"),
    packages=("jax", "numpy"),
    scene=_scene,
    goals=_GOALS,
)
