"""Digests of static values: equal for equal values, in every process and version; another one for every change."""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import functools
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax.core import freeze
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import treering
from tests.properties.strategies import Pair, Plain, quick
from treering._tree.static_values import value_digest


class Color(enum.Enum):
    RED = 1
    BLUE = 2


def scheme_and_digits(x: Any) -> str:
    found, _ = value_digest(x)
    assert found is not None
    return found


# ------------------------------------------------------------------------------------------------------------- strategy

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from([Color.RED, Color.BLUE, np.dtype("int8"), jnp.bfloat16, math.sin, P("x"), 1j, range(3), slice(2)])
    | st.builds(np.float32, st.floats(width=32, allow_nan=False))
)
ARRAYS = st.builds(
    lambda items, dtype: np.array(items).astype(dtype),
    st.lists(st.integers(0, 7), max_size=2000),
    st.sampled_from(["int8", ">i4", "float64", "bfloat16", "int4", "complex64", "datetime64[s]", "U3", "O"]),
)
VALUES = st.recursive(
    SCALARS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=4).map(collections.OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Plain, inner, inner, st.text(max_size=2))
        | st.frozensets(st.integers() | st.text(max_size=2), max_size=4)
    ),
    max_leaves=12,
)


def another_order(x: Any) -> Any:
    """Return an equal value whose dicts and sets were filled the other way round, and whose objects are others."""
    if type(x) is dict:
        return {key: another_order(value) for key, value in reversed(x.items())}
    if type(x) is frozenset:
        return frozenset(reversed(list(x)))
    if type(x) in (list, tuple):
        return type(x)(map(another_order, x))
    return copy.deepcopy(x)


def places(x: Any) -> list[Callable[[], Any]]:
    """Return functions that each make a copy of ``x`` with one item changed."""
    if isinstance(x, dict):
        return [functools.partial(with_item, x, key, change) for key in x for change in places(x[key])]
    if type(x) in (list, tuple):
        return [functools.partial(with_place, x, at, change) for at in range(len(x)) for change in places(x[at])]
    if isinstance(x, np.ndarray) and x.size and x.dtype.kind in "ifc":
        return [functools.partial(with_number, x, at) for at in {0, x.size // 2, x.size - 1}]
    return [lambda: ("another", x)]


def with_item(x: Any, key: Any, change: Callable[[], Any]) -> Any:
    return type(x)({**x, key: change()})


def with_place(x: Any, at: int, change: Callable[[], Any]) -> Any:
    return type(x)([*x[:at], change(), *x[at + 1 :]])


def with_number(x: Any, at: int) -> Any:
    changed = x.copy()
    changed[at] += 1
    return changed


@quick(100)
@given(VALUES)
def test_equal_values_have_one_digest(x: Any) -> None:
    assert value_digest(another_order(x)) == value_digest(x)


@quick(100)
@given(VALUES, st.data())
def test_one_change_anywhere_is_another_digest(x: Any, data: st.DataObject) -> None:
    changes = places(x)
    if changes:
        changed = data.draw(st.sampled_from(changes))()
        assert scheme_and_digits(changed) != scheme_and_digits(x)


def test_values_that_compare_equal_and_are_not_the_same() -> None:
    """All of these differ in pairs."""
    values: list[Any] = [
        *(1, 1.0, True, "1", b"1", np.int64(1), np.float64(1), 1 + 0j),
        *(0.0, -0.0, 0, False, None, "", b"", (), [], {}, set(), frozenset(), collections.OrderedDict()),
        *((1,), [1], {1}, frozenset({1}), {1: 1}, {1: {}}, [[1]], [1, []], [(1,), ()], ((), 1)),
        *(np.arange(3), np.arange(3.0), np.arange(3).reshape(3, 1), np.arange(3, dtype=">i8"), jnp.arange(3)),
        *(np.array("a"), np.array("a", object), np.str_("a"), np.array(b"a"), np.zeros(2), -np.zeros(2)),
        *(np.array([(1, 2.0)], "i4,f8"), np.array([(1, 3.0)], "i4,f8"), np.ma.array([1]).data, [1, None], [None, 1]),
        *(jax.random.key(0), jax.random.key(1), jax.random.key_data(jax.random.key(0))),
        *(Color.RED, Color.BLUE, math.sin, math.cos, jax.nn.relu, jax.nn.gelu, int, float, np, math),
        *(functools.partial(max, 1), functools.partial(max, 2), functools.partial(max, key=1), Pair(1, 2), (1, 2)),
        *(datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), datetime.timedelta(1)),  # noqa: DTZ001
        *(pathlib.PurePosixPath("a"), re.compile("a"), re.compile("a", re.IGNORECASE), range(3), range(0, 3, 2)),
        *(collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1), {"a": 1, "b": 2}),
        *(
            collections.defaultdict(int),
            collections.defaultdict(list),
            collections.deque([1]),
            collections.deque([1], 2),
        ),
        *(jax.tree.structure({"a": 1}), jax.tree.structure({"b": 1}), freeze({"a": 1}), freeze({"a": 2})),
        *(float("nan"), float("inf"), 2**70, -(2**70), "\ud800", slice(1), slice(2), ..., P("x"), P("y")),
    ]
    digests = list(map(scheme_and_digits, values))
    assert [values[digests.index(digest)] for digest in digests if digests.count(digest) > 1] == []


@pytest.mark.parametrize(
    ("x", "digest"),
    [
        ({"b": (1, 2.5, None, True), "a": {"x", "y"}, 3: b"k"}, "b497315052aaaa31f4e922aecc36068b"),
        (np.arange(5000, dtype="int64"), "3c90a2d54154ba708d8aeae379fdc8db"),
        (
            [np.float32(1.5), np.array([1, 2], ml_dtypes.bfloat16), np.array(["a", None], object)],
            "ec4af89d36b0b8f3c18010c736a66d76",
        ),
        (
            (Color.BLUE, math.sin, Plain(1, [2], "n"), Pair(0, {}), functools.partial(max, 3)),
            "8b7951666677b262597d82ba5949131d",
        ),
        (
            {"at": pathlib.PurePosixPath("/data/a"), "b": pathlib.PureWindowsPath("c")},
            "4fdb0e782103a8bd38b139b672e9b13e",
        ),
    ],
)
def test_every_process_and_version_finds_the_same(x: Any, digest: str) -> None:
    """These were found by another process; programs compare theirs with what lies in files."""
    assert scheme_and_digits(x) == f"xxh3-128/1:{digest}"


class Opaque:
    """No dataclass, and no node of jax."""


def endless() -> list[Any]:
    found: list[Any] = []
    found.append([found, found])
    return found


def deep(levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("x", "left_out"),
    [
        (Opaque(), f"a {__name__}.Opaque"),
        ({"a": [1, (Opaque(),)]}, f"a {__name__}.Opaque"),
        ([0] * 100_001, "more than 100,000 items"),
        (deep(100), "more than 64 levels"),
        (np.broadcast_to(np.zeros(1), (1 << 40,)), "more than 1 GiB"),
        (np.ma.array([1]), "a numpy.ma.MaskedArray"),
        (iter([1]), "a builtins.list_iterator"),
    ],
    ids=["object", "inside", "items", "levels", "bytes", "masked", "iterator"],
)
def test_what_has_no_form_is_named(x: Any, left_out: str) -> None:
    digest, why = value_digest(x)
    assert (digest, why.replace("core.", "")) == (None, left_out)


def test_a_value_that_holds_itself_has_an_end() -> None:
    assert value_digest(endless()) == value_digest(endless())


def test_padding_and_the_high_bits_of_small_numbers_mean_nothing() -> None:
    raw = np.array([1, 2, 15], np.uint8)
    assert value_digest(raw.view(ml_dtypes.uint4)) == value_digest((raw | 0xF0).view(ml_dtypes.uint4))
    padded = [np.frombuffer(bytes([fill]) * 16, np.dtype("i1,i8", align=True)).copy() for fill in (0, 255)]
    for array in padded:
        array["f0"], array["f1"] = 1, 2
    assert value_digest(padded[0]) == value_digest(padded[1])


def local(rate: float) -> Callable[[float], float]:
    def scaled(x: float) -> float:
        return x * rate

    return scaled


def test_a_function_counts_by_its_name_and_its_inside_is_reported() -> None:
    name = f"{__name__}.local.<locals>.scaled"
    assert value_digest(local(1.0)) == value_digest(local(2.0))
    assert treering.checkpoint.uncompared({"f": local(1.0), "g": [local, len]}) == {"f": f"the inside of {name}"}
    found = treering.checkpoint.uncompared({"a": Plain(1, 2, (local(1.0), {"x": Opaque()}))})  # type: ignore[arg-type]
    assert found == {"a.name[0]": f"the inside of {name}", "a.name[1]": f"a {__name__}.Opaque"}
