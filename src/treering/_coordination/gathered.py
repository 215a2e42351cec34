"""The collective by which processes talk: each brings a row of bytes, all get all rows."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def allgather(row: bytes) -> list[bytes]:
    """Return the rows of all processes in their order; waits for all of them, for ever.

    One device of each process takes part, for processes may have different numbers of devices, and while one waits, the
    others of its devices can go on.

    Args:
        row: that of this process, of the same length in all.

    Example:
        >>> allgather(b"ring")
        [b'ring']
    """
    sharding, gather = _plan_allgather(tuple(jax.devices()))
    (device,) = sharding.addressable_devices
    own = jax.device_put(np.frombuffer(row, np.uint8)[np.newaxis], device)
    shape = (sharding.mesh.size, len(row))
    rows = jax.make_array_from_single_device_arrays(shape, sharding, [own])
    return [found.tobytes() for found in np.asarray(gather(rows).addressable_data(0))]


@functools.lru_cache(maxsize=2)
def _plan_allgather(devices: tuple[jax.Device, ...]) -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """Return how the rows lie on the first device of each process, and what brings all of them to all."""
    first: dict[int, jax.Device] = {}
    for device in sorted(devices, key=lambda device: device.id):
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[number] for number in sorted(first)]), ("process",))
    by_process: PartitionSpec = PartitionSpec("process")  # type: ignore[no-untyped-call]
    everywhere: PartitionSpec = PartitionSpec()  # type: ignore[no-untyped-call]
    return NamedSharding(mesh, by_process), jax.jit(lambda rows: rows, out_shardings=NamedSharding(mesh, everywhere))
