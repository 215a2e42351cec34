"""Basic indexing of a leaf in a file: what numpy selects, and no more is read than what is selected."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

import treering
from tests import faults
from tests.properties.strategies import quick
from treering.leaves import tree_serialize_leaves

SHAPES = [shape for axes in range(4) for shape in itertools.product((0, 1, 2, 5), repeat=axes)] + [(3, 1, 2, 4)]
ARRAYS = {str(shape): np.arange(math.prod(shape)).reshape(shape) for shape in SHAPES}
CASES = st.sampled_from(SHAPES).flatmap(
    lambda shape: st.tuples(st.just(shape), npst.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Arrays of all these shapes."""
    path = tmp_path_factory.mktemp("saved") / "ckpt"
    treering.save(path, ARRAYS)
    with treering.open(path) as checkpoint:
        yield checkpoint


@quick(300)
@given(CASES)
def test_what_numpy_selects_comes_back(opened: Any, case: tuple[tuple[int, ...], Any]) -> None:
    shape, key = case
    found, want = opened[str(shape)][key], ARRAYS[str(shape)][key]
    assert type(found) is type(want)
    assert np.array_equal(found, want)
    assert np.shape(found) == np.shape(want)


# ------------------------------------------------------------------------------------------- chunks of one item each

SPLIT = [(1,), (7,), (3, 4), (2, 3, 3)]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[int, ...], Any]]:
    """Arrays of which each item has a file of its own."""
    path = tmp_path_factory.mktemp("split")
    opened = {}
    for shape in SPLIT:
        folder = path / "x".join(map(str, shape))
        tree_serialize_leaves(folder, {"w": np.arange(math.prod(shape), dtype="u1").reshape(shape)}, chunk_bytes=1)
        assert len([name for name in folder.rglob("*") if re.fullmatch(r"\d+(\.\d+)*", name.name)]) == math.prod(shape)
        opened[shape] = treering.open(folder)
    yield opened
    for checkpoint in opened.values():
        checkpoint.close()


def chunks_opened(read: Callable[[], object]) -> set[tuple[int, ...]]:
    """Return which chunks are opened while something is read."""
    found: set[tuple[int, ...]] = set()

    def watched(path: Any, *arguments: Any, **options: Any) -> None:
        name = str(os.path.basename(os.fspath(path)))  # noqa: PTH119 - it may be bytes
        if re.fullmatch(r"\d+(\.\d+)*", name):
            found.add(tuple(map(int, name.split("."))))

    with pytest.MonkeyPatch.context() as patch:
        faults.before(patch, os, "open", watched)
        read()
    return found


@quick(100)
@given(
    st.sampled_from(SPLIT).flatmap(
        lambda shape: st.tuples(st.just(shape), npst.basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    )
)
def test_no_more_is_read_than_what_is_selected(split: Any, case: tuple[tuple[int, ...], Any]) -> None:
    shape, key = case
    number = np.arange(math.prod(shape)).reshape(shape)
    selected = np.ravel(number[key])
    places = set(zip(*(axis.tolist() for axis in np.unravel_index(selected, shape)), strict=True))
    assert chunks_opened(lambda: split[shape]["w"][key]) == places


@pytest.mark.parametrize("key", [[0], np.array([0]), True, np.True_, "a", 1.0, (0, None, [1])], ids=repr)
def test_no_other_indexing(opened: Any, key: Any) -> None:
    with pytest.raises(TypeError, match="a leaf in a file"):
        opened["(5, 5)"][key]


@pytest.mark.parametrize("key", [5, -6, (0, 0, 0), (..., 0, ...), 10**30], ids=repr)
def test_out_of_bounds(opened: Any, key: Any) -> None:
    with pytest.raises(IndexError):
        opened["(5, 5)"][key]
