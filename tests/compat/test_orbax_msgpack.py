"""Orbax's msgpack_utils as referee: flax's wire plus extension 4, a tuple."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orbax.checkpoint import msgpack_utils

from tests.compat.wire import ext, packed
from tests.properties.strategies import leaves, quick
from tests.trees import assert_same
from treering import serialization
from treering.errors import TreeringError

_TREES = st.recursive(
    leaves(),
    lambda inner: st.one_of(st.dictionaries(st.text(max_size=5), inner, max_size=4), st.lists(inner, max_size=4)),
    max_leaves=10,
)
_TREES_WITH_TUPLES = st.recursive(
    leaves(),
    lambda inner: st.one_of(
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=4).map(tuple),
    ),
    max_leaves=10,
)


@quick(60)
@given(_TREES_WITH_TUPLES)
def test_what_orbax_writes_is_read_tuples_included(tree: Any) -> None:
    data = msgpack_utils.msgpack_serialize(tree, in_place=False)
    got = serialization.msgpack_restore(data)
    assert_same(got, msgpack_utils.msgpack_restore(data))


@quick(60)
@given(_TREES)
def test_both_write_the_same_bytes_and_orbax_reads_ours(tree: Any) -> None:
    ours = serialization.msgpack_serialize(tree)
    assert ours == msgpack_utils.msgpack_serialize(tree)
    assert_same(msgpack_utils.msgpack_restore(ours), serialization.msgpack_restore(ours))


def test_a_tuple_below_a_target_is_left_as_it_is() -> None:
    data = msgpack_utils.msgpack_serialize({"a": (1, np.ones(2))})
    restored = serialization.from_bytes({"a": 0}, data)
    assert_same(restored, {"a": (1, np.ones(2))})


@pytest.mark.parametrize("depth", [3, 60])
def test_tuples_in_tuples(depth: int) -> None:
    tree: Any = 7
    for _ in range(depth):
        tree = (tree,)
    data = msgpack_utils.msgpack_serialize({"a": tree})
    assert serialization.msgpack_restore(data) == {"a": tree}


def test_a_tuple_extension_whose_inside_is_no_array_is_refused() -> None:
    for inside in (packed({"a": 1}), packed(1), packed("ab"), b""):
        with pytest.raises(TreeringError):
            serialization.msgpack_restore(ext(4, inside))


def test_a_bomb_of_nested_tuples_is_a_result_or_an_error_of_ours() -> None:
    data = b"\x07"
    for _ in range(3000):
        data = ext(4, b"\x91" + data)
    try:
        tree = serialization.msgpack_restore(data)
    except TreeringError:
        return
    while isinstance(tree, tuple):
        (tree,) = tree
    assert tree == 7
