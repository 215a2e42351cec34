"""Boxes against arrays: every function says what numpy's slices do, and what jax says of a sharding."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import meshes
from treering._values.boxes import (
    Box,
    box_of_slices,
    boxes_of_range,
    contains,
    find_cover_error,
    flat_range,
    held_boxes,
    intersection,
    relative,
    runs,
    shape_of,
    size_of,
    slices,
    text_of,
    whole,
)

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...], least: int = 0) -> Box:
    box = []
    for length in shape:
        start = draw(st.integers(0, max(0, length - least)))
        box.append((start, draw(st.integers(min(length, start + least), length))))
    return tuple(box)


@st.composite
def shape_and_boxes(draw: st.DrawFn, count: int) -> tuple[tuple[int, ...], list[Box]]:
    shape = draw(shapes)
    return shape, [draw(boxes_in(shape)) for _ in range(count)]


def items(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.arange(math.prod(shape)).reshape(shape)


def test_whole() -> None:
    assert whole(()) == ()
    assert whole((3, 0)) == ((0, 3), (0, 0))
    assert text_of(whole((4, 6))) == "0:4,0:6"
    assert text_of(()) == ""


@given(shape_and_boxes(2))
def test_boxes_are_slices(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (a, b) = case
    array = items(shape)
    assert array[slices(a)].shape == shape_of(a)
    assert array[slices(a)].size == size_of(a)
    both = set(array[slices(a)].flat) & set(array[slices(b)].flat)
    common = intersection(a, b)
    if common is None:
        assert not both
    else:
        assert size_of(common) > 0
        assert set(array[slices(common)].flat) == both
        assert contains(a, common)
        assert contains(b, common)
        assert np.array_equal(array[slices(a)][slices(relative(common, a))], array[slices(common)])
    if size_of(b):
        assert contains(a, b) == (both == set(array[slices(b)].flat))


@given(shape_and_boxes(1))
def test_runs_are_the_neighbours_in_c_order(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, (box,) = case
    places = items(shape)[slices(box)].ravel()
    jumps = [i for i in range(1, len(places)) if places[i] != places[i - 1] + 1]
    # Runs that happen to touch at their ends may be counted apart only where they are not one run.
    count, length = runs(box, shape)
    assert count * length == len(places)
    assert all(jump % length == 0 for jump in jumps)
    assert count == len(jumps) + 1 if len(places) else count == 0
    if count == 1:
        assert flat_range(box, shape) == (places[0], places[-1] + 1)
    else:
        assert flat_range(box, shape) == (None if count else (0, 0))


@given(st.data(), shapes)
def test_a_range_is_a_few_boxes_in_order(data: st.DataObject, shape: tuple[int, ...]) -> None:
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = boxes_of_range(shape, start, stop)
    array = items(shape)
    assert [int(place) for box in boxes for place in array[slices(box)].flat] == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    assert all(size_of(box) and runs(box, shape)[0] == 1 for box in boxes)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Cut boxes at random, again and again."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple))
    boxes = [whole(shape)]
    for _ in range(draw(st.integers(0, 12))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        start, stop = box[axis]
        cut = draw(st.integers(start, stop))
        parts = [(start, cut), (cut, stop)] if start < cut < stop else [(start, stop)]
        boxes += [(*box[:axis], part, *box[axis + 1 :]) for part in parts]
    return shape, draw(st.permutations(boxes))


@given(tilings())
def test_tilings_cover_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    assert find_cover_error(*case) is None


@given(st.data(), tilings())
def test_covered_once_is_what_counting_says(data: st.DataObject, case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    place = data.draw(st.integers(0, len(boxes) - 1))
    boxes = [*boxes[:place], data.draw(boxes_in(shape, 1)), *boxes[place + 1 :]]
    counted = np.zeros(shape, int)
    for box in boxes:
        counted[slices(box)] += 1
    assert (find_cover_error(shape, boxes) is None) == bool((counted == 1).all())


def test_a_pinwheel_covers_once() -> None:
    pinwheel = [((0, 2), (0, 1)), ((0, 1), (1, 3)), ((1, 3), (2, 3)), ((2, 3), (0, 2)), ((1, 2), (1, 2))]
    assert find_cover_error((3, 3), pinwheel) is None
    # As many items, one of them twice, one never.
    assert "overlap, and as many" in (find_cover_error((3, 3), [*pinwheel[:4], ((0, 1), (1, 2))]) or "")


@pytest.mark.parametrize(
    ("shape", "boxes", "said"),
    [
        ((), [()], None),
        ((), [], "1 item lies in no box, of 1"),
        ((), [(), ()], "overlap"),
        ((0, 3), [((0, 0), (0, 3))], None),
        ((0, 3), [], "no items"),
        ((0, 3), [((0, 0), (0, 1)), ((0, 0), (1, 3))], "no items"),
        ((4,), [((0, 5),)], "leads out"),
        ((4,), [((-1, 3),)], "leads out"),
        ((4,), [((3, 1),), ((0, 4),)], "empty or leads out"),
        ((4,), [((2, 2),), ((0, 4),)], "empty or leads out"),
        ((4,), [((0, 4), (0, 1))], "has 2 axes"),
        ((4,), [((0, 3),)], "1 item lies in no box, of 4"),
        ((4,), [((0, 3),), ((2, 4),)], "they hold 5 items, there are 4"),
        ((1 << 60, 1 << 60), [((0, 1 << 60), (0, 1 << 59)), ((0, 1 << 60), (1 << 59, 1 << 60))], None),
    ],
)
def test_covered_once_says_what_is_wrong(shape: tuple[int, ...], boxes: list[Box], said: str | None) -> None:
    found = find_cover_error(shape, boxes)
    assert found == said if said is None else said in (found or "")


def test_covering_is_checked_once_for_each_box(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of boxes in a hostile order cost one look each, not one for each pair."""
    side = 100
    boxes = [((i, i + 1), (j, j + 1)) for j in range(side) for i in range(side)]
    looks = 0

    class Counted(tuple):
        __slots__ = ()

        def __iter__(self) -> Any:
            nonlocal looks
            looks += 1
            return super().__iter__()

    assert find_cover_error((side, side), [Counted(box) for box in boxes]) is None
    assert looks <= 8 * len(boxes)


def _process(device: Any) -> int:
    """Pretend that two devices are in one process."""
    return int(device.id) // 2


@pytest.mark.parametrize(
    ("shape", "spec", "count"),
    [
        ((8, 12), P(), 1),
        ((8, 12), P("a"), 2),
        ((8, 12), P(None, "b"), 4),
        ((8, 12), P("b", "a"), 8),
        ((8, 12), P(("a", "b")), 8),
        ((), P(), 1),
        ((0, 8), P(None, "a"), 1),
    ],
)
def test_jax_shardings(shape: tuple[int, ...], spec: P, count: int) -> None:
    mesh = meshes.grid(2, 4, axes=("a", "b"))
    sharding = NamedSharding(mesh, spec)
    held = held_boxes(sharding.devices_indices_map(shape), shape, _process)
    assert len(held) == count
    assert find_cover_error(shape, [box for box, _ in held]) is None
    assert set().union(*(owners for _, owners in held)) == {0, 1, 2, 3}
    items = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for shard in jax.device_put(items, sharding).addressable_shards:
        if shard.data.size:
            owners = [owners for box, owners in held if np.array_equal(items[slices(box)], shard.data)]
            assert len(owners) == 1
            assert _process(shard.device) in owners[0]


@pytest.mark.parametrize(
    ("index", "shape", "box"),
    [
        ((), (), ()),
        ((slice(None), slice(1, 3)), (4, 5), ((0, 4), (1, 3))),
        ((slice(4, 6),), (5,), ((4, 5),)),
        ((slice(6, 8),), (5,), ((5, 5),)),
    ],
)
def test_slices_are_boxes(index: tuple[slice, ...], shape: tuple[int, ...], box: Box) -> None:
    assert box_of_slices(index, shape) == box


def test_shards_beyond_the_end_are_left_out() -> None:
    """Five items over four devices."""
    parts = {device: (slice(2 * device, 2 * device + 2),) for device in range(4)}
    assert held_boxes(parts, (5,), int) == ((((0, 2),), (0,)), (((2, 4),), (1,)), (((4, 5),), (2,)))
