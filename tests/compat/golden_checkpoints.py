"""Checkpoints of versions 1, 4 and 5 as they were written once: the trees that went in, and how the files were made.

    python -c "from tests.compat.golden_checkpoints import main; main()"    # writes golden/treering anew, on 8 devices

Every later version has to read them. They change only if a tree here does.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import shutil
import struct
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering
from tests.properties.strategies import EXTENDED_DTYPES, NUMPY_DTYPES

__all__ = ["GOLDEN", "METADATA", "PART", "Layer", "Pair", "bits", "save_shared", "trees", "whole_of_part"]

GOLDEN = Path(__file__).parent / "golden" / "treering"
METADATA = {"run": "a", "nested": {"list": [1, 2.5, None, True, "é"]}}


class Pair(NamedTuple):
    """A namedtuple."""

    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A class with a static field."""

    kernel: Any
    bias: Any
    name: str = dataclasses.field(default="", metadata={"static": True})


def _of_dtype(name: str) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, name, name))
    return np.arange(6).astype(np.uint8).astype(kind).reshape(2, 3)


def _in_rows() -> jax.Array:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    return jax.device_put(np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3), NamedSharding(mesh, P("x")))


def _divided() -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    specs = {"rows": P("x"), "columns": P(None, "y"), "both": P("x", "y"), "replicated": P()}
    array = np.arange(96, dtype=np.float32).reshape(8, 12)
    return {name: jax.device_put(array, NamedSharding(mesh, spec)) for name, spec in specs.items()}


def _python() -> dict[str, Any]:
    odd_nan = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_1234))[0]
    return {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**53, 2**53 + 1, -(10**40)],
        "floats": [0.1, -0.0, 5e-324, math.inf, -math.inf, math.nan, odd_nan],
        "complex": [1 + 2j, complex(math.inf, -0.0)],
        "text": ["", "ring é \U0001f332", "\ud800", "x" * 5000],
        "bytes": [b"", b"\0\xff", b"y" * 5000, bytearray(b"z")],
        "function": jax.nn.relu,
    }


def _containers() -> dict[str, Any]:
    return {
        "keys": {"a/b": 1, "~": 2, "": 3, "__metadata__": np.ones(2)},
        "ints": {3: 1, -(2**70): 2},
        "others": [{(1, "b", (None, 2.5)): 1}, {True: 1}, {0.5: 1}, {None: 1}, {b"k": 1}, {"\ud800": np.zeros(1)}],
        "empty": [{}, [], ()],
        "pair": Pair(1, [2]),
        "ordered": collections.OrderedDict(z=1, y=2),
        "layer": Layer(np.ones((2, 2), np.float32), None, "dense"),
    }


def _packed() -> dict[str, Any]:
    """Enough leaves for an index of version 4; few of them lie in files, so that it stays small."""
    layers = {
        f"layer {number}": {"w": np.full(3, number, np.int16) if number % 16 == 0 else None, "x": None, "n": number}
        for number in range(1366)
    }
    odd = [{("é", 2.5): 1}, {"a/b": np.zeros((0, 2)), "\ud800": [(), 2]}, {}]
    return {"layers": layers, "divided": _divided(), "odd": odd}


def _shared(step: int) -> dict[str, Any]:
    """A tree of which one array changes: its checkpoint is of version 5, and has a file with bytes of no leaf."""
    return {"frozen": np.arange(40, dtype=np.int16), "trained": np.full(3, step, np.int16), "empty": np.zeros((0, 2))}


def save_shared(path: Path) -> None:
    """Save that tree with the one before as its base, which is removed."""
    before = path.with_name("before")
    treering.save(before, _shared(0))
    treering.save(path, _shared(1), base=before, metadata=METADATA)
    shutil.rmtree(before)


def _single() -> dict[str, Any]:
    return {"a": [np.arange(3.0), (jnp.ones(2, jnp.bfloat16), None)], "ints": {5: np.float32(2)}}


def trees() -> dict[str, Any]:
    """The name of each file or folder, and the tree in it.

    ``single.safetensors`` is of version 1 of single files, which nothing writes any more.
    """
    return {
        "example": {"params": {"w": _in_rows(), "scale": np.float64(0.5)}, "pair": Pair(7, None)},
        "dtypes": {name: _of_dtype(name) for name in (*NUMPY_DTYPES, *EXTENDED_DTYPES)},
        "arrays": {
            "jax": jnp.arange(4),
            "scalar": np.float32(1.5),
            "zero-d": np.array(7, np.int16),
            "empty": np.zeros((0, 3)),
            "blocks": (np.arange(20_000) % 251).astype(np.uint32),
            "key": jax.random.key(7),
        },
        "divided": _divided(),
        "python": _python(),
        "containers": _containers(),
        "bare": np.arange(3),
        "packed": _packed(),
        "shared": _shared(1),
        "single.safetensors": _single(),
        "single-2.safetensors": _single(),
    }


PART = ("layers/1", "pair/first")


def whole_of_part() -> dict[str, Any]:
    """The tree of which ``part`` has what the globs keep."""
    layers = [{"w": np.arange(3.0) + number, "lora": (np.float32(number), number)} for number in range(2)]
    return {"layers": layers, "pair": Pair(7, None), "step": 3}


def bits(leaf: Any) -> Any:
    """What makes a leaf equal to another: its kind, and every bit."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return ("key", str(jax.random.key_impl(leaf)), np.asarray(jax.random.key_data(leaf)).tobytes())
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        host = np.asarray(leaf)
        return (type(leaf).__name__, host.dtype.name, host.shape, host.tobytes())
    if isinstance(leaf, float):
        return struct.pack("<d", leaf)
    if isinstance(leaf, complex):
        return struct.pack("<2d", leaf.real, leaf.imag)
    return (type(leaf), leaf)


def main() -> None:
    """Write them all."""
    old = (GOLDEN / "single.safetensors").read_bytes()
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir(parents=True)
    save_shared(GOLDEN / "shared")
    for name, tree in trees().items():
        if name == "shared":
            continue
        treering.save(GOLDEN / name, tree, metadata=METADATA if name != "example" else {"run": "a"})
    (GOLDEN / "single.safetensors").write_bytes(old)
    treering.save(GOLDEN / "part", whole_of_part(), metadata=METADATA, only=PART)
