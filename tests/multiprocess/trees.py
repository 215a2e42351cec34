"""Trees that lie over processes in every way, and the items that each process must find in its shards.

Items come from a counter, so that one in a wrong place is seen. All lengths are multiples of 24: they can be cut for 2,
3, 4 and 8 devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

__all__ = ["ARRAYS", "ORDERS", "expected", "problems", "python_leaves", "spread", "tree", "whole"]

ARRAYS: Final[Mapping[str, tuple[str, tuple[int, ...], str]]] = {
    "rows": ("float32", (48, 24), "line rows"),
    "columns": ("float32", (24, 48), "line columns"),
    "flat": ("float32", (96, 24), "grid both on rows"),
    "both": ("float32", (48, 48), "grid both"),
    "partly": ("int32", (24, 48), "grid rows"),
    "partly columns": ("uint32", (24, 48), "grid columns"),
    "everywhere": ("float32", (24, 24), "line none"),
    "shuffled": ("float32", (48, 24), "shuffled both"),
    "shuffled partly": ("int8", (48, 24), "shuffled rows"),
    "crossed": ("float32", (24, 48), "grid crossed"),
    "half": ("float32", (48, 24), "half rows"),
    "half everywhere": ("float32", (24,), "half none"),
    "large": ("float32", (3072, 96), "grid both"),
    "bf16": ("bfloat16", (48, 24), "line rows"),
    "fp8": ("float8_e4m3fn", (24, 48), "grid crossed"),
    "int4": ("int4", (48, 24), "grid both"),
    "bool": ("bool", (48,), "line rows"),
    "complex": ("complex64", (24, 24), "grid rows"),
    "empty": ("float32", (0, 24), "line columns"),
    "one": ("int32", (), "line none"),
    "deep": ("int16", (24, 2, 24), "grid rows"),
}
"""Name -> dtype, shape, and how it lies over the devices."""

ORDERS: Final = ("as saved", "crossed", "shuffled", "one axis", "everywhere")
"""How arrays may lie when they are loaded."""

_KEYS: Final = 24


def whole(name: str, number: int) -> np.ndarray[Any, Any]:
    """Return all items of one array of the tree with this number."""
    dtype, shape, _ = ARRAYS[name]
    first = 7 * number + 13 * list(ARRAYS).index(name)
    items = first + np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    if dtype == "complex64":
        return (items + 1j * (items % 7)).astype(kind)
    if kind.itemsize == 1 or dtype == "bfloat16":
        items = items % {"int8": 127, "int4": 8}.get(dtype, 2 if dtype == "bool" else 251)
    return items.astype(np.float32).astype(kind) if kind.kind == "V" else items.astype(kind)


def expected(number: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the items of all arrays, those of the keys too."""
    return {name: whole(name, number) for name in ARRAYS} | {"keys": key_data(number)}


def key_data(number: int) -> np.ndarray[Any, Any]:
    """Return what the typed PRNG keys are made of."""
    return np.arange(number, number + 2 * _KEYS, dtype=np.uint32).reshape(_KEYS, 2)


def python_leaves(number: int) -> dict[str, Any]:
    """Return leaves that each process holds by itself."""
    return {
        "numpy": np.arange(number, number + 5000, dtype=np.int64),
        "int": number,
        "float": number / 3,
        "text": f"number {number}",
        "bytes": b"\0" * number,
        "none": None,
        "nested": [(number, {"deeper": np.float32(number)}), []],
    }


def spread(way: str, devices: Sequence[jax.Device], axes: int) -> NamedSharding:
    """Return one way of lying over devices."""
    mesh_name, _, how = way.partition(" ")
    order = list(devices)
    if mesh_name == "shuffled":
        order = order[1::2] + order[0::2][::-1]
    if mesh_name == "half":
        order = order[: len(order) // 2]
    if mesh_name in {"grid", "shuffled"}:
        mesh = Mesh(np.array(order).reshape(2, -1), ("x", "y"))
    else:
        mesh = Mesh(np.array(order), ("x",))
    specs: dict[str, tuple[Any, ...]] = {
        "rows": ("x",),
        "columns": (None, mesh.axis_names[-1]),
        "both": ("x", "y"),
        "both on rows": (("x", "y"),),
        "crossed": ("y", "x"),
        "none": (),
    }
    return NamedSharding(mesh, PartitionSpec(*specs[how][:axes]))


def placed(items: np.ndarray[Any, Any], sharding: Sharding) -> jax.Array:
    """Return an array over the devices of many processes; each puts its own shards there."""
    cut = sharding.addressable_devices_indices_map(items.shape)
    parts = [jax.device_put(items[index], device) for device, index in cut.items()]
    return jax.make_array_from_single_device_arrays(items.shape, sharding, parts, dtype=items.dtype)


def tree(number: int) -> dict[str, Any]:
    """Return the tree with this number, as it lies in this process."""
    devices = jax.devices()
    arrays: dict[str, Any] = {
        name: placed(whole(name, number), spread(way, devices, len(shape))) for name, (_, shape, way) in ARRAYS.items()
    }
    by_rows = spread("line rows", devices, 1)
    arrays["keys"] = jax.jit(jax.random.wrap_key_data, out_shardings=by_rows)(
        placed(key_data(number), spread("line rows", devices, 2))
    )
    return {"arrays": arrays, "own": jnp.arange(number, number + 300, dtype=jnp.int32), "python": python_leaves(number)}


def wanted(order: str, name: str, shape: tuple[int, ...]) -> Sharding:
    """Return how an array is to lie when it is loaded."""
    devices = jax.devices()
    if order == "as saved":
        way = ARRAYS[name][2] if name in ARRAYS else "line rows"
        return spread(way, devices, len(shape))
    ways = {
        "crossed": "grid crossed",
        "shuffled": "shuffled both",
        "one axis": "line columns",
        "everywhere": "line none",
    }
    candidates = [ways[order], "line rows", "line none"]
    if order == "everywhere":
        candidates = ["line none"]
    fitting = (spread(way, devices, len(shape)) for way in candidates)
    return next(sharding for sharding in fitting if _fits(sharding, shape))


def _fits(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def problems(found: Any, number: int, order: str | None) -> list[str]:
    """Return what is wrong with a loaded tree in this process.

    Args:
        found: the tree.
        number: that of the tree that was saved.
        order: how arrays were to lie; None for the default device.
    """
    return list(_problems(found, number, order))


def _problems(found: Any, number: int, order: str | None) -> Iterator[str]:
    right = expected(number)
    if sorted(found) != ["arrays", "own", "python"] or sorted(found["arrays"]) != sorted(right):
        yield f"other keys: {sorted(found)}, {sorted(found['arrays'])}"
        return
    for name, items in right.items():
        array = found["arrays"][name]
        where = wanted(order, name, array.shape) if order else None
        if where is not None and not array.sharding.is_equivalent_to(where, array.ndim):
            yield f"{name}: lies as {array.sharding}, not as {where}"
        if where is None and array.devices() != {jax.local_devices()[0]}:
            yield f"{name}: lies on {array.devices()}"
        data = jax.random.key_data(array) if name == "keys" else array
        if (data.shape, data.dtype) != (items.shape, items.dtype):
            yield f"{name}: {data.dtype}{list(data.shape)}"
            continue
        for shard in data.addressable_shards:
            mine, theirs = np.asarray(shard.data), items[shard.index]
            if mine.tobytes() != np.ascontiguousarray(theirs).tobytes():
                yield f"{name}: other items in {shard.index}"
    own = found["own"]
    if own.dtype != jnp.int32 or np.asarray(own.addressable_data(0)).tolist() != list(range(number, number + 300)):
        yield "own: other items"
    if (told := _flat(found["python"])) != (said := _flat(python_leaves(number))):
        yield f"Python leaves: {told} is not {said}"


def _flat(leaves: Any) -> list[str]:
    """Return leaves as text, with their types."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(leaves, is_leaf=lambda leaf: leaf is None)
    told = []
    for path, leaf in pairs:
        shown = (leaf.dtype.name, leaf.shape, leaf.tobytes().hex()[:200]) if isinstance(leaf, np.ndarray) else leaf
        told.append(f"{jax.tree_util.keystr(path)} {type(leaf).__name__} {shown!r}")
    return told
