"""Basic indexing: the box that is read holds all that is selected, and not more than a box must."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from tests.properties.strategies import quick
from treering._arrays.slicing import box_and_rest
from treering._values.boxes import slices

CASES = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=6).flatmap(
    lambda shape: st.tuples(st.just(shape), npst.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
)


@quick(300)
@given(CASES)
def test_the_box_and_the_rest_select_what_numpy_does(case: tuple[tuple[int, ...], Any]) -> None:
    shape, key = case
    array = np.arange(int(np.prod(shape))).reshape(shape)
    box, steps, rest = box_and_rest(key, shape)
    assert len(box) == len(shape)
    assert all(0 <= start <= stop <= length for (start, stop), length in zip(box, shape, strict=True))
    part = array[slices(box, steps)]
    found, want = part[rest], array[key]
    assert type(found) is type(want)
    assert np.array_equal(found, want)
    assert np.shape(found) == np.shape(want)


@quick(100)
@given(CASES)
def test_the_box_is_as_small_as_it_can_be(case: tuple[tuple[int, ...], Any]) -> None:
    shape, key = case
    number = np.arange(int(np.prod(shape))).reshape(shape)
    selected = np.ravel(number[key])
    box, *_ = box_and_rest(key, shape)
    if selected.size:
        places = np.unravel_index(selected, shape) if shape else ()
        assert box == tuple((int(at.min()), int(at.max()) + 1) for at in places)
    else:
        assert any(start == stop for start, stop in box)


@pytest.mark.parametrize("key", [[0], np.array([0]), True, np.True_, "a", 1.0, (0, None, [1])], ids=repr)
def test_no_other_indexing(key: Any) -> None:
    with pytest.raises(TypeError, match="a leaf in a file"):
        box_and_rest(key, (3, 4))


@pytest.mark.parametrize("key", [3, -4, (0, 0, 0), (..., 0, ...), 10**30], ids=repr)
def test_out_of_bounds(key: Any) -> None:
    with pytest.raises(IndexError):
        box_and_rest(key, (3, 4))


def test_hostile_shapes_cost_nothing() -> None:
    huge = (1 << 62, 1 << 62)
    assert box_and_rest((slice(5, 9), -1), huge)[0] == ((5, 9), ((1 << 62) - 1, 1 << 62))
