"""What a sharding says, as boxes with owners; jax is the referee."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests import meshes
from treering._values.boxes import Box, box_of_slices, find_cover_error, held_boxes, slices


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
