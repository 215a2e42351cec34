"""Layouts as meshes make them, and others: for the tests of plans."""

from __future__ import annotations

import itertools
import math

from hypothesis import strategies as st

from treering._plan.save import LeafLayout, PlannedPart, SavePlan
from treering._values.boxes import Box, whole

__all__ = ["all_parts", "any_layouts", "grid_boxes", "mesh_layout", "mesh_layouts", "replicated"]

AWKWARD = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13, 31, 64, 97, 128, 257, 1009])
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


def grid_boxes(shape: tuple[int, ...], splits: tuple[int, ...]) -> list[tuple[tuple[int, ...], Box]]:
    """Cut each axis into equal steps, as XLA does: the last ones are shorter, or empty."""
    cells = itertools.product(*(range(split) for split in splits))
    boxes = []
    for cell in cells:
        steps = [-(-length // split) for length, split in zip(shape, splits, strict=True)]
        box = tuple(
            (min(place * step, length), min(place * step + step, length))
            for place, step, length in zip(cell, steps, shape, strict=True)
        )
        boxes.append((cell, box))
    return boxes


def all_parts(plan: SavePlan[Box]) -> tuple[tuple[PlannedPart[Box], ...], ...]:
    return tuple(map(plan.parts_of, range(len(plan.loads))))


def replicated(shape: tuple[int, ...], itemsize: int, processes: int) -> LeafLayout:
    return LeafLayout(nbytes_per_item=itemsize, shape=shape, boxes=((whole(shape), tuple(range(processes))),))


def mesh_layout(
    shape: tuple[int, ...], itemsize: int, mesh: tuple[int, ...], spec: tuple[int | None, ...], devices: int = 1
) -> LeafLayout:
    """Shard axis n over mesh axis ``spec[n]``; the mesh is of devices, numbered in C order, so many to a process."""
    splits = tuple(1 if axis is None else mesh[axis] for axis in spec)
    owners: dict[Box, set[int]] = {}
    cells = dict(grid_boxes(shape, splits))
    for number, place in enumerate(itertools.product(*map(range, mesh))):
        cell = tuple(0 if axis is None else place[axis] for axis in spec)
        owners.setdefault(cells[cell], set()).add(number // devices)
    boxes = tuple((box, tuple(sorted(found))) for box, found in owners.items())
    return LeafLayout(nbytes_per_item=itemsize, shape=shape, boxes=boxes)


@st.composite
def mesh_layouts(draw: st.DrawFn, largest: int = 1024) -> tuple[int, list[LeafLayout]]:
    """Leaves that are replicated, sharded, or both, over one mesh of one or more devices a process."""
    devices = draw(st.sampled_from([1, 1, 2, 4]))
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (7,), (2, 4), (4, 4), (3, 5), (2, 2, 4), (8, 16), (257,), (1024,)]))
    mesh = tuple(size for size in sizes if math.prod(sizes) <= largest) or (largest,)
    mesh = (*mesh, devices) if draw(st.booleans()) else (devices * mesh[0], *mesh[1:])
    layouts = []
    for _ in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(AWKWARD, max_size=3).map(tuple))
        free = [*range(len(mesh)), *([None] * len(shape))]
        spec = tuple(draw(st.permutations(free))[: len(shape)])
        layouts.append(mesh_layout(shape, draw(ITEMSIZES), mesh, spec, devices))
    return math.prod(mesh) // devices, layouts


@st.composite
def any_layouts(draw: st.DrawFn, largest: int = 7) -> tuple[int, list[LeafLayout]]:
    """Leaves whose boxes lie with any processes at all, as no mesh would place them."""
    processes = draw(st.integers(1, largest))
    layouts = []
    for _ in range(draw(st.integers(0, 5))):
        shape = draw(st.lists(AWKWARD, max_size=2).map(tuple))
        splits = tuple(draw(st.integers(1, max(1, min(length, 4)))) for length in shape)
        holders = st.sets(st.integers(0, processes - 1), min_size=1)
        boxes = {box: tuple(draw(holders)) for _, box in grid_boxes(shape, splits)}
        layouts.append(LeafLayout(nbytes_per_item=draw(ITEMSIZES), shape=shape, boxes=tuple(boxes.items())))
    return processes, layouts
