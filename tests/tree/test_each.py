"""The bytes of states: every leaf comes back to the last bit, and damage is an error of treering, whatever it is."""

from __future__ import annotations

import contextlib
import json
import struct
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treering as tr
from treering.checkpoint import EachStates
from treering.errors import CorruptError, FormatError, UnsupportedError

STATE: dict[Any, Any] = {
    "position": (3, None, [True, 2.5, float("-inf"), 1 + 2j]),
    "seed": 10**40,
    5: {"name": "é\ud800", "raw": b"\0\xff" * 3000, "array": bytearray(b"z")},
    "rows": np.arange(12, dtype=">i2").reshape(3, 4).T,
    "scalar": np.float32(1.5),
    "bf16": np.arange(3).astype(ml_dtypes.bfloat16),
    "times": np.array(["2026-01-01", "NaT"], "datetime64[D]"),
    "flags": np.array([True, False]),
    "none": np.zeros((0, 3), np.int8),
    "empty": {},
}


def saved(state: Any, tmp_path_factory: pytest.TempPathFactory) -> EachStates:
    """Return what a checkpoint holds of a marked state."""
    path = tmp_path_factory.mktemp("each") / "ckpt"
    tr.save(path, tr.each(state))
    found = tr.load(path)
    assert isinstance(found, EachStates)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The bytes of a state of every kind of leaf."""
    return saved(STATE, tmp_path_factory).states


def test_every_kind_of_leaf_comes_back(whole: bytes) -> None:
    found = EachStates(1, whole)[0]
    assert list(found) == list(STATE)
    for key, want in STATE.items():
        if isinstance(want, np.ndarray | np.generic):
            assert type(found[key]) is type(want)
            assert found[key].dtype == want.dtype.newbyteorder("<")
            assert found[key].shape == want.shape
            assert found[key].tobytes() == want.astype(want.dtype.newbyteorder("<")).tobytes()
        else:
            assert repr(found[key]) == repr(want)
    found["rows"][:] = 0  # it is the caller's


@given(at=st.integers(0, 1 << 20), flip=st.integers(1, 255))
def test_a_flipped_byte_never_is_more_than_an_error(whole: bytes, at: int, flip: int) -> None:
    data = bytearray(whole)
    data[at % len(data)] ^= flip
    with contextlib.suppress(CorruptError, FormatError, UnsupportedError):
        EachStates(1, bytes(data))[0]


@given(cut=st.integers(0, 1 << 20), count=st.integers(-2, 5))
def test_what_is_cut_short_is_damage(whole: bytes, cut: int, count: int) -> None:
    with pytest.raises(CorruptError):
        EachStates(count, whole[: cut % len(whole)])[0]


@pytest.mark.parametrize(
    "change",
    [
        {"types": [{"kind": "numpy", "dtype": "int64", "shape": [1 << 50]}]},
        {"types": [{"kind": "numpy", "dtype": "int8", "shape": [0, 1 << 62]}], "rest": b""},
        {"types": [{"kind": "jax", "dtype": "int8", "shape": [1]}]},
        {"types": [{"kind": "str", "dtype": "uint8", "shape": [1]}]},
        {"types": [{"kind": "numpy", "dtype": "int8", "shape": [1]}], "rest": b"xy"},
        {"types": [{"kind": "int"}], "values": []},
        {"structure": [2]},
        {"structure": [{"node": "odd"}, 1]},
        {"leaves": {"key": ["x"], "type": [0]}},
    ],
)
def test_documents_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    rest = change.pop("rest", b"x")
    node = {
        "structure": [1],
        "types": [{"kind": "numpy", "dtype": "int8", "shape": [1]}],
        "leaves": {"key": [""], "type": [0]},
        "values": [],
    }
    text = json.dumps(node | change).encode()
    state = struct.pack("<Q", len(text)) + text + rest
    try:
        found = EachStates(1, struct.pack("<Q", len(state)) + state)[0]
    except (CorruptError, FormatError):
        return
    assert found.shape == (0, 1 << 62)
