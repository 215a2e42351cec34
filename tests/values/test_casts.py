"""A cast rounds floats and changes nothing else."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.drawn import drawn
from treering._values.casts import NotKept, cast_array, cast_number

FLOATS = ("float16", "bfloat16", "float32", "float64", "longdouble", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
          "float6_e2m3fn", "float4_e2m1fn")  # fmt: skip
COMPLEX = ("complex64", "complex128", "clongdouble")
INTS = ("bool", "int4", "uint4", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or getattr(np, name, None) or name)


NUMBERS = st.one_of(
    st.integers(-(2**64), 2**64),
    st.sampled_from([2**n + d for n in (3, 4, 7, 8, 11, 15, 16, 24, 31, 32, 53, 63, 64) for d in (-1, 0, 1)]),
    st.floats(width=32),
    st.floats(),
    st.sampled_from([6.0, 6.5, 7.5, 448.0, 449.0, 500.0, 65504.0, 65520.0, 3.4e38, 3.5e38, 5e-324, -0.0]),
)


@st.composite
def arrays(draw: st.DrawFn, names: tuple[str, ...]) -> np.ndarray[Any, Any]:
    dtype = dtype_of(draw(st.sampled_from(names)))
    numbers = draw(st.lists(NUMBERS, min_size=1, max_size=6))
    with np.errstate(all="ignore"):
        if dtype.kind in "biu":
            return np.array([int(n) & (2 ** (8 * dtype.itemsize) - 1) if math.isfinite(n) else 0 for n in numbers],
                            f"u{dtype.itemsize}").astype(dtype)  # fmt: skip
        small = dtype.name in ("int4", "uint4")
        return np.array(
            [int(n) % 8 if small and math.isfinite(n) else 0 if small else n for n in numbers], "f8"
        ).astype(dtype)


def exactly(x: Any) -> Any:
    """Return a number as Python's, which compares without rounding."""
    if x.dtype.name.startswith(("bool", "int", "uint")):
        return int(x)
    if x.dtype.kind == "c":
        return (exactly(x.real), exactly(x.imag))
    if np.isnan(x):
        return "nan"
    wide = x.astype(np.longdouble)  # int() of a bfloat16 from 2**63 on wraps around
    return int(wide) if np.isfinite(wide) and wide == np.trunc(wide) else wide


def kept(before: Any, after: Any) -> bool:
    """Say the rule once more, one number at a time."""
    if after.dtype.kind == "c":
        real = before.real if before.dtype.kind == "c" else before
        return kept(real, after.real) and (before.dtype.kind != "c" or kept(before.imag, after.imag))
    if before.dtype.name.startswith(("bool", "int", "uint")):
        return bool(np.isfinite(after)) and exactly(before) == exactly(after)
    if not np.isfinite(before):
        return exactly(before) == exactly(after)
    clips = after.dtype.name.startswith(("float4", "float6"))
    largest = ml_dtypes.finfo(after.dtype).max if clips else 0
    return bool(np.isfinite(after)) and not (clips and abs(float(before)) > float(largest))


@settings(max_examples=drawn(300))
@given(before=arrays(INTS + FLOATS + COMPLEX), after=st.sampled_from(INTS + FLOATS + COMPLEX))
def test_every_pair_of_dtypes_keeps_or_refuses(before: np.ndarray[Any, Any], after: str) -> None:
    dtype = dtype_of(after)
    rank = [next(n for n, names in enumerate((INTS, FLOATS, COMPLEX)) if name in names)
            for name in (next(k for k in INTS + FLOATS + COMPLEX if dtype_of(k) == before.dtype), after)]  # fmt: skip
    if rank[0] > rank[1]:
        return
    with np.errstate(all="ignore"):
        try:
            plain = before.astype(dtype)
        except TypeError:
            plain = before.astype("f4").astype(dtype)
    wrong = [n for n, pair in enumerate(zip(before, plain, strict=True)) if not kept(*pair)]
    if not wrong:
        found = cast_array(before, dtype)
        assert (found.dtype, list(map(repr, found))) == (dtype, list(map(repr, plain)))
        return
    with pytest.raises(NotKept) as caught:
        cast_array(before, dtype)
    assert caught.value.index == (wrong[0],)
    assert repr(caught.value.value) == repr(before[wrong[0]])


@given(value=st.one_of(NUMBERS, st.integers(-(2**2000), 2**2000), st.booleans()), name=st.sampled_from(FLOATS + INTS))
def test_python_numbers_follow_the_same_rule(value: float, name: str) -> None:
    if isinstance(value, float) and name in INTS:
        return
    dtype = dtype_of(name)
    try:
        found = cast_number(value, dtype)
    except NotKept:
        return
    assert found.shape == ()
    if isinstance(value, int):
        assert exactly(found[()]) == value
    else:
        assert math.isfinite(value) == bool(np.isfinite(found))


@pytest.mark.parametrize(("before", "after", "kept"), [
    ("M8[s]", "M8[ns]", True), ("M8[ns]", "M8[s]", False), ("m8[ns]", "m8[us]", False), ("M8[D]", "M8[s]", True)
])  # fmt: skip
def test_times_are_not_cut(before: str, after: str, kept: bool) -> None:
    array = np.array([np.iinfo("i8").min, 1, 1001]).view(before)
    if kept:
        assert np.array_equal(cast_array(array, np.dtype(after)).astype(before)[1:], array[1:])
    else:
        with pytest.raises(NotKept) as caught:
            cast_array(array, np.dtype(after))
        assert caught.value.index == (1,)
    with pytest.raises(NotKept):
        cast_array(np.array([2**40], "M8[s]"), np.dtype("M8[ns]"))


@pytest.mark.parametrize(("before", "after"), [
    ("M8", "M8[Y]"), ("M8[s]", "M8[as]"), ("m8[s]", "m8[as]"), ("M8[as]", "M8[s]"), ("M8[10ns]", "M8[Y]")
])  # fmt: skip
def test_times_of_which_numpy_makes_none_in_the_other_unit_are_refused(before: str, after: str) -> None:
    nothing, last = np.iinfo("i8").min, np.iinfo("i8").max
    assert np.isnat(cast_array(np.array([nothing, nothing]).view(before), np.dtype(after))).all()
    with pytest.raises(NotKept, match="at index") as caught:
        cast_array(np.array([nothing, last]).view(before), np.dtype(after))
    assert caught.value.index == (1,)


def test_a_cast_takes_memory_for_a_block_beside_the_result() -> None:
    array = np.arange(2**21, dtype=np.int64).reshape(2, -1)
    tracemalloc.start()
    try:
        cast_array(array, np.dtype("float32"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes // 2 + (4 << 20)
    array[1, 7] = 2**53 + 1
    with pytest.raises(NotKept, match=r"9007199254740993 at index \[1, 7\]"):
        cast_array(array, np.dtype("float64"))


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [
        (300.0, "float32", "int8"),
        (2.5, "float32", "uint8"),
        (-1.0, "float64", "uint64"),
        (2.0**64, "float64", "uint64"),
        (2.0**63, "float64", "int64"),
        (float("nan"), "float32", "int32"),
        (float("inf"), "float64", "int64"),
        (0.5, "float32", "bool"),
        (3 + 4j, "complex64", "float64"),
        (2.5 + 0j, "complex64", "int16"),
    ],
)
def test_a_value_that_another_kind_cannot_hold_is_refused(value: complex, before: str, after: str) -> None:
    array = np.array([1, value], before)
    with pytest.raises(NotKept, match="at index"):
        cast_array(array, np.dtype(after))


@pytest.mark.parametrize(
    ("value", "before", "after"),
    [(7.0, "float32", "int8"), (-(2.0**63), "float64", "int64"), (3 + 0j, "complex64", "float32")],
)
def test_a_value_that_another_kind_holds_is_kept(value: complex, before: str, after: str) -> None:
    assert cast_array(np.array([value], before), np.dtype(after)).item() == value


@pytest.mark.parametrize("order", ["<", ">"])
def test_the_order_of_bytes_changes_no_answer(order: str) -> None:
    with pytest.raises(NotKept):
        cast_array(np.array([1e300], f"{order}f8"), np.dtype("float32"), np.empty)
    assert cast_array(np.array([1.5], f"{order}f4"), np.dtype("float64"), np.empty).tolist() == [1.5]
