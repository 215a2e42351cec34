"""A tree with every kind of node that jax's pytree_serialization writes, and what writes it as a golden file.

python -m tests.compat.jax_pytree.all_nodes tests/foreign/golden/jax/0.10
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.experimental.array_serialization import pytree_serialization
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DTYPES = ["bool", "int4", "uint8", "int32", "uint16", "float16", "bfloat16", "float8_e4m3fn", "float32", "complex64"]


class Moments(NamedTuple):
    """A namedtuple, whose fields jax writes."""

    mu: Any
    nu: Any


class Layer:
    """A class whose static data the program writes."""

    def __init__(self, children: tuple[Any, ...], activation: bytes) -> None:
        self.children = children
        self.activation = activation


def register() -> None:
    """Tell jax of both classes."""
    jax.export.register_namedtuple_serialization(Moments, serialized_name="golden.Moments")
    jax.tree_util.register_pytree_node(
        Layer, lambda layer: (layer.children, layer.activation), lambda aux, children: Layer(tuple(children), aux)
    )
    jax.export.register_pytree_node_serialization(
        Layer, serialized_name="golden.Layer", serialize_auxdata=bytes, deserialize_auxdata=bytes
    )


def all_nodes() -> dict[str, Any]:
    """Return the tree."""
    items = np.arange(24).reshape(4, 6)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    return {
        "dtypes": {dtype: jnp.asarray(items % 2).astype(dtype) for dtype in DTYPES},
        "empty": [{}, (), []],
        "layer": Layer((jnp.float32(1), jnp.asarray(items[0])), b"\x00relu"),
        "moments": Moments(jnp.ones(5), jnp.zeros(5)),
        "none": None,
        "ordered": OrderedDict(z=jnp.zeros((0, 3)), a=jnp.ones(2)),
        "sharded": jax.device_put(items.astype(np.float32), NamedSharding(mesh, PartitionSpec("x", "y"))),
        "tuple": (jnp.int32(3), [jnp.arange(2)]),
    }


if __name__ == "__main__":
    register()
    pytree_serialization.save(all_nodes(), sys.argv[1])
