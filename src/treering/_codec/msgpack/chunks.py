"""The map that stands for an array above the size limit: its shape, and its items in flat pieces.

Source: flax.serialization writes ``{marker: true, "shape": {"0": d0, ..}, "chunks": {"0": ext 1, ..}}``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

from treering._codec.msgpack.array_payload import possible
from treering._codec.msgpack.wire import CHUNK_MARKER, MAX_NDIM
from treering._values.human import counted
from treering.errors import Corrupt


class NotChunked(Corrupt, KeyError):
    """flax raises KeyError where a chunk map lacks its shape."""


class Part(Protocol):
    """A flat piece: an array, or a record of one."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """One axis."""

    @property
    def dtype(self) -> Any:
        """The same for all pieces."""


@dataclasses.dataclass(frozen=True, slots=True)
class ChunkedArray:
    """A chunk map whose pieces are known to make up the shape exactly."""

    shape: tuple[int, ...]
    """Shape of the whole."""

    parts: list[Any]
    """The flat pieces in order, at least one, of one dtype; their lengths add up to the shape."""


def chunked_array(container: dict[Any, Any]) -> ChunkedArray:
    """Check a map that carries the chunk marker.

    Raises:
        Corrupt: other keys, gaps in the numbering, pieces that are no flat arrays of one dtype, or a wrong total.
    """
    if set(container) != {CHUNK_MARKER, "shape", "chunks"} or container[CHUNK_MARKER] is not True:
        raise NotChunked(f"a map with the key {CHUNK_MARKER!r} is not a chunked array")
    shape = tuple(_numbered(container["shape"], "shape"))
    if len(shape) > MAX_NDIM or not all(type(length) is int and length >= 0 for length in shape) or not possible(shape):
        raise Corrupt(f"a chunked array claims the shape {shape!r:.200}")
    parts = _numbered(container["chunks"], "chunks")
    lengths = [_flat_length(part) for part in parts]
    if not parts or any(part.dtype != parts[0].dtype for part in parts):
        raise Corrupt("a chunked array's pieces are missing or differ in dtype")
    if sum(lengths) != math.prod(shape):
        raise Corrupt(
            f"a chunked array of shape {shape} needs {counted(math.prod(shape), 'items')}, "
            f"its pieces hold {sum(lengths)}"
        )
    return ChunkedArray(shape, parts)


def _numbered(container: Any, role: str) -> list[Any]:
    if not isinstance(container, dict) or list(container) != [str(number) for number in range(len(container))]:
        raise Corrupt(f"a chunked array's {role} are not numbered from 0 on")
    return list(container.values())


def _flat_length(part: Any) -> int:
    shape = getattr(part, "shape", None)
    if not isinstance(shape, tuple) or len(shape) != 1:
        raise Corrupt("a piece of a chunked array is not a flat array")
    length: int = shape[0]
    return length
