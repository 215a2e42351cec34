"""What an array's payload says of itself, checked: shape, dtype, and how many bytes follow.

Source of the layout: docs/spec/msgpack.md: an array of three, the shape, the dtype name, a bin.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from treering._codec.msgpack.window import Window
from treering._codec.msgpack.wire import CHUNK_MARKER, MAX_NDIM
from treering._values.dtypes import Dtype, lookup
from treering._values.human import pluralize
from treering.errors import Corrupt, Format

_LONGEST_DIM: Final = 2**63 - 1
_MOST_ITEMS: Final = 2**58  # times the largest item, 32 bytes, still a signed 64-bit number


class UnknownDtype(Format, TypeError):
    """flax raises TypeError for a dtype name that numpy does not know."""


def array_payload(window: Window, start: int, nbytes: int) -> tuple[tuple[int, ...], Dtype, int]:
    """Return shape, dtype, and where the array's bytes start, of the payload of ``nbytes`` at ``start``.

    Raises:
        Corrupt: it is no [shape, dtype, bytes], or the three disagree with one another or with ``nbytes``.
        Format: a dtype name that no file may hold.
    """
    data = window.data
    if data[start] != 0x93:
        raise Corrupt("an array's payload is not [shape, dtype, bytes]")
    shape, at = _shape(window, start + 1)
    if not (0xA0 <= data[at] <= 0xBF or data[at] == 0xD9):
        raise Corrupt("an array's dtype name is not a str")
    begin, length, _ = window.blob_header(at)
    name, at = data[begin : begin + length], begin + length
    if (dtype := lookup(name.decode("ascii", "backslashreplace"))) is None:
        raise UnknownDtype(f"the dtype name {name[:64]!r} is not one that a file may hold")
    if not 0xC4 <= data[at] <= 0xC6:
        raise Corrupt("an array's bytes are not a bin")
    at, length, _ = window.blob_header(at)
    if (wanted := math.prod(shape) * dtype.itemsize) != length:
        needed = pluralize(wanted, "bytes")
        raise Corrupt(f"an array of shape {shape} and dtype {dtype.name} needs {needed}, its header claims {length}")
    if at + length != start + nbytes:
        raise Corrupt(f"an array's payload of {pluralize(nbytes, 'bytes')} holds {at - start} + {length}")
    return shape, dtype, at


def _shape(window: Window, at: int) -> tuple[tuple[int, ...], int]:
    first = window.data[at]
    if not (0x90 <= first <= 0x9F or first == 0xDC):
        raise Corrupt("an array's shape is not a list of lengths")
    _, ndim, at = window.container_header(at)
    if ndim > MAX_NDIM:
        raise Corrupt(f"an array claims {pluralize(ndim, 'axes')}; {MAX_NDIM} is the most")
    shape: list[int] = []
    for _ in range(ndim):
        dim, at = window.number(at)
        if type(dim) is not int or not 0 <= dim <= _LONGEST_DIM:
            raise Corrupt(f"an array claims an axis of length {dim}")
        shape.append(dim)
    if not possible(shape):
        raise Corrupt(f"an empty array claims the impossible shape {tuple(shape)}")
    return tuple(shape), at


def possible(shape: Sequence[int]) -> bool:
    """Tell whether numpy can make an array of this shape: it multiplies the other axes even where one is 0."""
    return 0 not in shape or math.prod(dim or 1 for dim in shape) <= _MOST_ITEMS


class NotChunked(Corrupt, KeyError):
    """flax raises KeyError where a chunk map lacks its shape."""


def chunked_array(container: dict[Any, Any]) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape of a map that carries the chunk marker, and its pieces.

    The flat pieces are in order, at least one, of one dtype; their lengths add up to the shape.

    Raises:
        Corrupt: other keys, gaps in the numbering, pieces that are no flat arrays of one dtype, or a wrong total.
    """
    if set(container) != {CHUNK_MARKER, "shape", "chunks"} or container[CHUNK_MARKER] is not True:
        raise NotChunked(f"a map with the key {CHUNK_MARKER!r} is not a chunked array")
    shape = tuple(_numbered(container["shape"], "shape"))
    if len(shape) > MAX_NDIM or not all(type(length) is int and length >= 0 for length in shape) or not possible(shape):
        raise Corrupt(f"a chunked array claims the shape {shape!r:.200}")
    parts = _numbered(container["chunks"], "chunks")
    shapes = [getattr(part, "shape", None) for part in parts]
    if not all(isinstance(each, tuple) and len(each) == 1 for each in shapes):
        raise Corrupt("a piece of a chunked array is not a flat array")
    if not parts or any(part.dtype != parts[0].dtype for part in parts):
        raise Corrupt("a chunked array's pieces are missing or differ in dtype")
    needed, found = math.prod(shape), sum(part.shape[0] for part in parts)
    if found != needed:
        raise Corrupt(f"a chunked array of shape {shape} needs {pluralize(needed, 'items')}, its pieces hold {found}")
    return shape, parts


def _numbered(container: Any, role: str) -> list[Any]:
    if not isinstance(container, dict) or list(container) != [str(number) for number in range(len(container))]:
        raise Corrupt(f"a chunked array's {role} are not numbered from 0 on")
    return list(container.values())
