"""A msgpack file that has a nonce in the forms of its headers is the same tree to flax, msgpack and treering."""

from __future__ import annotations

import math
from typing import Any

import jax
import ml_dtypes
import msgpack
import numpy as np
import pytest
from flax import serialization as flax_serialization
from hypothesis import given, settings
from hypothesis import strategies as st

import treering
from tests import limits
from tests.buckets import MemoryBucket
from tests.drawn import drawn
from tests.trees import assert_same
from treering import serialization
from treering._arrays.host import encode_state
from treering._codec.msgpack.write import vary
from treering._foreign.state_bytes import join_pieces
from treering._tree.state_dict import to_state_dict

_ARRAYS = st.builds(
    lambda shape, dtype: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(["f4", "i1", "?", "c8", ml_dtypes.bfloat16]),
)
_LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=300)
    | st.binary(max_size=300) | st.complex_numbers(allow_nan=False) | _ARRAYS | _ARRAYS.map(lambda a: a.sum())
)  # fmt: skip
_TREES = st.recursive(_LEAVES, lambda below: st.dictionaries(st.text(max_size=40), below, max_size=20), max_leaves=20)


def _read_raw(data: bytes) -> Any:
    """What the msgpack library makes of it, payloads of extensions too."""

    def hook(code: int, payload: bytes) -> Any:
        return code, msgpack.unpackb(payload) if code > 0 else payload

    return msgpack.unpackb(data, ext_hook=hook, strict_map_key=False)


def _same_to_every_reader(tree: Any, chunk_size: int) -> None:
    pieces = encode_state(to_state_dict(tree), chunk_size=chunk_size)
    plain, varied = join_pieces(pieces), join_pieces(vary(pieces)[0])
    assert _read_raw(varied) == _read_raw(plain)
    found = flax_serialization.msgpack_restore(varied)
    assert_same(found, flax_serialization.msgpack_restore(plain))
    assert_same(serialization.msgpack_restore(varied), found)


@settings(max_examples=drawn(60))
@given(_TREES, st.sampled_from([8, 1 << 30]))
def test_every_reader_decodes_the_same_tree(tree: Any, chunk_size: int) -> None:
    _same_to_every_reader(tree, chunk_size)


def test_every_header_of_a_large_tree_may_have_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, bits_of_nonces=1e9)
    layer = {"kernel": np.ones((300, 70)), "bias": np.zeros(70, np.int8), "n": 1000, "none": None, "t": "ü" * 3000}
    tree = {f"layer {number}": layer | {"a" * number: np.float32(number)} for number in range(20)}
    for chunk_size in (1000, 1 << 30):
        for _ in range(2):
            _same_to_every_reader(tree | {"large": np.arange(70_000)}, chunk_size)


def test_no_two_are_alike_and_each_says_whether_that_is_so() -> None:
    tree = {f"layer {number}": np.ones((2, 3), np.float32) for number in range(4)}
    pieces = encode_state(tree, chunk_size=1 << 30)
    drawn = [vary(pieces) for _ in range(200)]
    assert len({join_pieces(varied) for varied, _ in drawn}) == len(drawn)
    assert all(unique for _, unique in drawn)
    assert not vary(encode_state({"step": 3}, chunk_size=1 << 30))[1]
    many = [*pieces, *pieces]
    assert vary(many)[0][-len(pieces) // 2 :] == many[-len(pieces) // 2 :]  # enough was drawn before


def test_on_disk_and_as_bytes_it_is_what_flax_writes(tmp_path: Any) -> None:
    tree = {f"layer {number}": np.ones((2, 3), np.float32) for number in range(6)}
    wanted = flax_serialization.to_bytes(tree)
    treering.save(tmp_path / "a.msgpack", tree)
    serialization.save_to_file(tree, tmp_path / "b.msgpack")
    assert (tmp_path / "a.msgpack").read_bytes() == (tmp_path / "b.msgpack").read_bytes() == wanted
    assert serialization.to_bytes(tree) == wanted
    bucket = MemoryBucket("s3://nonce")
    treering.save(treering.bucket(bucket) / "a.msgpack", tree)
    in_bucket = bucket._objects["a.msgpack"].data
    assert in_bucket != wanted
    assert jax.tree.all(jax.tree.map(np.array_equal, flax_serialization.from_bytes(tree, in_bucket), tree))
