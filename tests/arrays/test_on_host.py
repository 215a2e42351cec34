"""Bytes that were read -> leaves of every kind; and arrays in memory seen like stored ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from treering._arrays.buffers import on_host
from treering._arrays.incoming import ReadRequest
from treering._arrays.source import held_index
from treering._format.index import Container
from treering.errors import Corrupt


def raw(data: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, np.uint8)


@pytest.mark.parametrize("text", ["", "ring", "\ud800 half", "ü\0ñ", "𝄞"])
def test_texts(text: str) -> None:
    found = on_host(raw(text.encode("utf-8", "surrogatepass")), "str")
    assert type(found) is str
    assert found == text


def test_text_that_is_none() -> None:
    with pytest.raises(Corrupt, match="UTF-8") as caught:
        on_host(raw(b"ab\xff"), "str")
    assert caught.value.offset == 2


def test_bytes_of_both_kinds() -> None:
    assert on_host(raw(b"ab"), "bytes") == b"ab"
    found = on_host(raw(b"ab"), "bytearray")
    assert type(found) is bytearray
    found += b"c"
    assert found == b"abc"


def test_scalars_and_arrays() -> None:
    assert type(on_host(np.array(2, "i2"), "numpy scalar")) is np.int16
    room = np.arange(100)
    kept = on_host(room[3:6], "numpy")
    assert not np.shares_memory(kept, room), "a small array shall not keep its neighbours"
    assert np.shares_memory(on_host(room[3:6], "numpy", own=False), room)
    large = np.arange(100_000)
    assert np.shares_memory(on_host(large, "numpy"), large)


def test_held_arrays_give_boxes() -> None:
    array = np.arange(12).reshape(3, 4)
    leaves = [array, 5, np.float32(2)]
    index, held = held_index(
        [Container(node="list", keys=(0, 1, 2)), 3], list("012"), ["numpy", "int", "numpy scalar"], leaves
    )
    assert index.values == {1: 5}
    assert index.type_of(0).shape == (3, 4)
    assert held.dtype_of(0) == array.dtype
    request = ReadRequest(0, [((1, 3), (0, 2)), ((0, 3), (0, 4))])
    calls: list[tuple[int, int]] = []
    held.read([request, ReadRequest(2, [()])], lambda done, total: calls.append((done, total)))
    assert np.array_equal(request.arrays[0], array[1:, :2])
    assert request.arrays[0].flags.c_contiguous
    assert np.array_equal(request.arrays[1], array)
    assert calls[-1] == (100, 100)
