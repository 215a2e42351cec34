"""Hypothesis strategies of pytrees: every container kind, every leaf kind, every dtype."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import chex
import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from hypothesis import HealthCheck, reject, settings
from hypothesis import strategies as st

from tests.drawn import drawn

__all__ = [
    "EXTENDED_DTYPES",
    "NUMPY_DTYPES",
    "arrays",
    "flax_trees",
    "jax_arrays",
    "leaves",
    "numpy_scalars",
    "python_leaves",
    "quick",
    "trees",
    "typed_keys",
]

NUMPY_DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "datetime64[ns]",
    "datetime64[D]",
    "timedelta64[s]",
)
EXTENDED_DTYPES = (
    "bfloat16",
    "float4_e2m1fn",
    "float6_e2m3fn",
    "float6_e3m2fn",
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "int2",
    "int4",
    "uint2",
    "uint4",
)
# 64-bit types need x64, which is off; datetimes never are jax arrays.
JAX_DTYPES = (
    "bool",
    "int8",
    "int16",
    "int32",
    "uint8",
    "uint16",
    "uint32",
    "float16",
    "float32",
    "complex64",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int4",
    "uint4",
)
# How many low bits of a byte such an item has; the rest of the byte is not its own.
_SUB_BYTE = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6, "uint2": 2, "uint4": 4}
_SIGNED_SUB_BYTE = {"int2": 2, "int4": 4}
_Property = TypeVar("_Property", bound=Callable[..., None])


def quick(max_examples: int) -> Callable[[_Property], _Property]:
    """Mark a property that draws a tenth of its examples by default; repeatable in CI.

    It draws all of them where the mark is selected (``-m examples``), and as many as TREERING_EXAMPLES says.
    """
    few_or_all = settings(
        deadline=None,
        max_examples=drawn(max_examples),
        derandomize="CI" in os.environ,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return lambda test: pytest.mark.examples(few_or_all(test))


# ----------------------------------------------------------------------------------------------------------- containers


class Pair(NamedTuple):
    """A namedtuple with annotations."""

    first: Any
    second: Any


Triple = collections.namedtuple("Triple", ["x", "name", "values"])  # noqa: PYI024


@flax.struct.dataclass
class Point:
    """A flax struct with a static field."""

    x: Any
    y: Any
    label: str = flax.struct.field(pytree_node=False, default="static")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    """A plain dataclass that only jax knows."""

    weight: Any
    bias: Any
    name: str = dataclasses.field(default="static", metadata={"static": True})


class _Chexed:
    alpha: Any
    beta: Any


# The decorator's result takes keywords, which its annotations do not tell.
Chexed: Any = chex.dataclass(_Chexed)


class Layer(eqx.Module):
    """An equinox module with a function leaf and a static field."""

    weight: Any
    activation: Callable[[Any], Any]
    size: int = eqx.field(static=True)


@jax.tree_util.register_pytree_node_class
class Box:
    """An old-style node: its children have positions, no names."""

    def __init__(self, left: Any, right: Any, note: str = "note") -> None:
        self.left = left
        self.right = right
        self.note = note

    def tree_flatten(self) -> tuple[tuple[Any, Any], str]:
        return (self.left, self.right), self.note

    @classmethod
    def tree_unflatten(cls, aux: str, children: Sequence[Any]) -> Box:
        return cls(children[0], children[1], aux)


def add(left: Any, right: Any = 0, *, scale: Any = 1) -> Any:
    """A function at module level, for Partial."""
    return left + scale * right


# --------------------------------------------------------------------------------------------------------------- leaves


def _from_raw(dtype: str, shape: tuple[int, ...], raw: bytes) -> np.ndarray:
    """An array of any bits that are valid for ``dtype``: NaN payloads, denormals, both zeros."""
    octets = np.frombuffer(raw, np.uint8)
    if dtype == "bool":
        return (octets & 1).astype(np.bool_).reshape(shape)
    if dtype in _SIGNED_SUB_BYTE:
        half = 1 << (_SIGNED_SUB_BYTE[dtype] - 1)
        return ((octets % (2 * half)).astype(np.int8) - half).astype(getattr(ml_dtypes, dtype)).reshape(shape)
    if dtype in _SUB_BYTE:
        octets = octets & np.uint8((1 << _SUB_BYTE[dtype]) - 1)
    return np.frombuffer(octets.tobytes(), _dtype(dtype)).reshape(shape)


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if name in EXTENDED_DTYPES else np.dtype(name)


def _laid_out(array: np.ndarray, layout: str) -> np.ndarray:
    """The same values in another memory layout."""
    match layout:
        case "fortran":
            return np.asfortranarray(array)
        case "strided" if array.ndim:
            return np.repeat(array, 2, axis=-1)[..., ::2]
        case "reversed" if array.ndim:
            return np.ascontiguousarray(array[::-1])[::-1]
        case "broadcast":
            return np.broadcast_to(array, (2, *array.shape))
        case "unaligned" if array.size:
            room = np.empty(array.nbytes + 1, np.uint8)
            room[1:] = np.frombuffer(array.tobytes(), np.uint8)
            return np.frombuffer(room.data, array.dtype, offset=1).reshape(array.shape)
        case _:
            return array


LAYOUTS = ("c", "c", "fortran", "strided", "reversed", "broadcast", "unaligned")


@st.composite
def arrays(
    draw: st.DrawFn,
    dtypes: Sequence[str] = NUMPY_DTYPES + EXTENDED_DTYPES,
    *,
    layouts: Sequence[str] = LAYOUTS,
    big_endian: bool = False,
    max_side: int = 4,
) -> np.ndarray:
    """Numpy arrays of any bits, rank 0 to 4, empty ones too, in any layout."""
    dtype = draw(st.sampled_from(dtypes))
    shape = tuple(draw(st.lists(st.integers(0, max_side), max_size=4 if max_side < 5 else 2)))
    size = math.prod(shape) * _dtype(dtype).itemsize
    array = _from_raw(dtype, shape, draw(st.binary(min_size=size, max_size=size)))
    array = _laid_out(array, draw(st.sampled_from(layouts)))
    if big_endian and dtype in NUMPY_DTYPES and draw(st.booleans()):
        array = array.astype(array.dtype.newbyteorder(">"))
    return array


def jax_arrays() -> st.SearchStrategy[jax.Array]:
    """Arrays on the default device."""
    return arrays(JAX_DTYPES, layouts=("c",)).map(jnp.asarray)


@st.composite
def numpy_scalars(draw: st.DrawFn) -> np.generic:
    """Numpy scalars of every dtype."""
    dtype = draw(st.sampled_from(NUMPY_DTYPES + EXTENDED_DTYPES))
    size = _dtype(dtype).itemsize
    scalar = _from_raw(dtype, (), draw(st.binary(min_size=size, max_size=size)))[()]
    assert isinstance(scalar, np.generic)
    return scalar


@st.composite
def typed_keys(draw: st.DrawFn) -> jax.Array:
    """Typed PRNG keys, alone or in arrays, of every implementation."""
    impl, words = draw(st.sampled_from([("threefry2x32", 2), ("rbg", 4), ("unsafe_rbg", 4)]))
    shape = draw(st.sampled_from([(), (3,), (2, 1), (0,)]))
    size = 4 * words * math.prod(shape)
    words_of_key = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint32).reshape(*shape, words)
    return jax.random.wrap_key_data(jnp.asarray(words_of_key), impl=impl)


def python_leaves() -> st.SearchStrategy[Any]:
    """None, bool, int to 64 bits, float, complex, str, bytes."""
    return st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.integers(-200, 300),
        st.floats(allow_nan=True),
        st.complex_numbers(),
        st.text(max_size=40),
        st.binary(max_size=40),
    )


def leaves(*, big_endian: bool = False, keys: bool = False) -> st.SearchStrategy[Any]:
    """Every leaf kind."""
    kinds: list[st.SearchStrategy[Any]] = [
        python_leaves(),
        arrays(big_endian=big_endian),
        arrays(big_endian=big_endian),
        jax_arrays(),
        numpy_scalars(),
    ]
    return st.one_of(*kinds, *([typed_keys()] if keys else []))


# ---------------------------------------------------------------------------------------------------------------- trees

_NAMES = st.text("abcdefgh_", min_size=1, max_size=3)
_TEXT = st.one_of(_NAMES, st.text(max_size=12))
_INTS = st.integers(-5, 2000)


def _flax_containers(inner: st.SearchStrategy[Any]) -> list[st.SearchStrategy[Any]]:
    """Containers that flax can write and read back."""
    return [
        st.dictionaries(_TEXT, inner, max_size=5),
        st.dictionaries(_INTS, inner, max_size=3),
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=12),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.builds(Triple, inner, inner, inner),
        st.builds(Point, inner, inner),
        st.dictionaries(_TEXT, inner, max_size=3).map(freeze),
        st.builds(
            lambda args, keywords: jax.tree_util.Partial(add, *args, **keywords),
            st.lists(inner, max_size=2),
            st.dictionaries(_NAMES, inner, max_size=2),
        ),
        st.builds(optax.ScaleByAdamState, inner, inner, inner),
        st.builds(optax.TraceState, inner),
        st.just(optax.EmptyState()),
        st.just(optax.MaskedNode()),
    ]


def _nnx_state(flat: dict[str, np.ndarray]) -> nnx.State:
    return nnx.State({name: {"kernel": nnx.Param(jnp.asarray(value))} for name, value in flat.items()})


def _layer(weight: Any, activation: Callable[[Any], Any], size: int) -> Layer:
    """Make a module, of what equinox can make one of: it has jax sort the keys of all dicts in it."""
    try:
        return Layer(weight, activation, size)
    except ValueError:
        reject()


def _more_containers(inner: st.SearchStrategy[Any]) -> list[st.SearchStrategy[Any]]:
    """Nodes that only jax knows."""
    return [
        st.builds(Plain, inner, inner),
        st.builds(lambda alpha, beta: Chexed(alpha=alpha, beta=beta), inner, inner),
        st.builds(_layer, inner, st.sampled_from([jax.nn.relu, math.sqrt]), st.integers(0, 3)),
        st.builds(Box, inner, inner),
        st.dictionaries(_TEXT, inner, max_size=3).map(collections.OrderedDict),
        st.dictionaries(_TEXT, inner, max_size=3).map(lambda items: collections.defaultdict(list, items)),
        st.dictionaries(_NAMES, arrays(("float32", "bfloat16"), layouts=("c",)), max_size=3).map(_nnx_state),
    ]


def flax_trees(leaf: st.SearchStrategy[Any] | None = None, *, max_leaves: int = 12) -> st.SearchStrategy[Any]:
    """Trees that flax can write and read back."""
    return st.recursive(
        leaf if leaf is not None else leaves(), lambda inner: st.one_of(*_flax_containers(inner)), max_leaves=max_leaves
    )


def trees(leaf: st.SearchStrategy[Any] | None = None, *, max_leaves: int = 12) -> st.SearchStrategy[Any]:
    """Trees of every kind that treering takes."""
    return st.recursive(
        leaf if leaf is not None else leaves(big_endian=True, keys=True),
        lambda inner: st.one_of(*_flax_containers(inner), *_more_containers(inner)),
        max_leaves=max_leaves,
    )
