"""Leaves on their way into files: what each one is, the boxes that it is cut into, and their checked bytes."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import numpy as np
import xxhash

from treering._arrays.host import adopt
from treering._arrays.parted import Parted, parts_of, to_host
from treering._codec.array_bytes import holds_wire_bytes, wire_blocks
from treering._format.index import ARRAY_KINDS, LARGE_VALUE, LeafType
from treering._tree.flatten import Flattened
from treering._values.boxes import Box, whole
from treering._values.checksums import block_checksums
from treering._values.dtypes import check_writable
from treering._values.keys import split_key
from treering.errors import TreeringError

__all__ = ["Outgoing", "Source", "checked_bytes", "outgoing"]

_PIECE_BYTES: Final = 2 << 20
_SMALL_BYTES: Final = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A box of a leaf and the array that holds it."""

    box: Box
    """Which box."""
    data: Any
    """The array of just that box, on a device or on the host."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A tree's leaves, described."""

    types: Sequence[LeafType]
    """The different types."""
    leaf_types: Sequence[int]
    """Number of the type of each leaf."""
    values: dict[int, Any]
    """Values of the leaves that lie in no file."""
    sources: dict[int, tuple[Source, ...]]
    """Leaf number -> its distinct boxes, of the leaves that lie in files."""
    meshes: Sequence[str]
    """Their meshes, as text."""

    def source_of(self, leaf: int, box: Box | None) -> Source:
        """Return what holds one box of a leaf, or all of it."""
        sources = self.sources[leaf]
        return sources[0] if box is None else next(source for source in sources if source.box == box)


def outgoing(flat: Flattened) -> Outgoing:
    """Describe the leaves; nothing is copied from a device yet.

    Raises:
        Unsupported: a leaf cannot be stored: deleted, traced, spread over other processes, of a dtype that no file has.
    """
    describe = _Describer()
    leaf_types: list[int] = []
    values: dict[int, Any] = {}
    sources: dict[int, tuple[Source, ...]] = {}
    for number, (key, kind, leaf) in enumerate(zip(flat.keys, flat.kinds, flat.leaves, strict=True)):
        try:
            if kind in ARRAY_KINDS or _is_large(kind, leaf):
                leaf_type, sources[number] = describe.stored(kind, leaf)
            else:
                leaf_type = describe.number_of(LeafType(kind=kind))
                values[number] = flat.opaque[number] if kind == "opaque" else leaf
        except TreeringError as error:
            error.path = split_key(key)
            raise
        leaf_types.append(leaf_type)
    return Outgoing(
        types=tuple(describe.numbers),
        leaf_types=leaf_types,
        values=values,
        sources=sources,
        meshes=tuple(describe.meshes),
    )


def _is_large(kind: str, leaf: Any) -> bool:
    if kind == "str":
        return len(leaf) > LARGE_VALUE // 4 and len(leaf.encode("utf-8", "surrogatepass")) > LARGE_VALUE
    return kind in ("bytes", "bytearray") and len(leaf) > LARGE_VALUE


class _Describer:
    """Gives equal types one number."""

    def __init__(self) -> None:
        self.numbers: dict[LeafType, int] = {}
        self.meshes: dict[str, None] = {}
        self._shardings: dict[Any, str | None] = {}
        self._known: dict[Any, int] = {}

    def number_of(self, leaf_type: LeafType) -> int:
        return self.numbers.setdefault(leaf_type, len(self.numbers))

    def stored(self, kind: str, leaf: Any) -> tuple[int, tuple[Source, ...]]:
        if kind in ("jax", "key"):
            return self._jax(kind, leaf)
        if kind == "str":
            leaf = np.frombuffer(leaf.encode("utf-8", "surrogatepass"), np.uint8)
        elif kind in ("bytes", "bytearray"):
            leaf = np.frombuffer(bytes(leaf), np.uint8)
        elif kind == "numpy scalar":
            leaf = np.asarray(leaf)
        number = self._typed(kind, leaf.dtype, leaf.shape, None, None)
        return number, (Source(whole(leaf.shape), leaf),)

    def _jax(self, kind: str, leaf: Any) -> tuple[int, tuple[Source, ...]]:
        adopt(leaf)
        impl = None
        if kind == "key":
            impl = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        number = self._typed(kind, leaf.dtype, leaf.shape, leaf.sharding, impl)
        # An array of no items may be spread out all the same, in boxes of nothing.
        if leaf.is_fully_replicated or not leaf.size:
            return number, (Source(whole(leaf.shape), leaf),)
        return number, tuple(Source(box, data) for box, data in parts_of(leaf))

    def _typed(self, kind: str, dtype: Any, shape: tuple[int, ...], sharding: Any, impl: str | None) -> int:
        fast = (kind, dtype, shape, sharding, impl)
        number = self._known.get(fast)
        if number is None:
            name = check_writable(np.dtype(dtype)).name
            text = self._sharding_text(sharding)
            number = self.number_of(LeafType(kind=kind, dtype=name, shape=shape, sharding=text, impl=impl))
            self._known[fast] = number
        return number

    def _sharding_text(self, sharding: Any) -> str | None:
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return None
        mesh = sharding.mesh
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        device: Any = next(iter(sharding.device_set))
        self.meshes[f"{axes} on {mesh.size} {device.platform} devices"] = None
        return f"{sharding.spec} over {axes}"


def checked_bytes(data: Any, block: int, checksums: array[int], first: int) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an array in C order, little endian, and note the checksum of each block as it comes by.

    What is yielded was just read by the checksum, so the copy that follows finds it in the processor's cache.

    Args:
        data: an array of jax or numpy.
        block: bytes of a block.
        checksums: where the checksums go.
        first: the place of the first one.
    """
    if isinstance(data, Parted):
        yield from _streamed(data.blocks(0, data.size), block, checksums, first)
        return
    host = to_host(data)
    plain = holds_wire_bytes(host.dtype)
    if plain and host.nbytes <= _SMALL_BYTES:
        small = host.tobytes()  # in C order, whatever the array's own is
        if small:
            checksums[first] = xxhash.xxh3_64_intdigest(small)
            yield small
    elif plain and host.flags.c_contiguous:
        flat = host.reshape(-1).view(np.uint8).data
        step = max(_PIECE_BYTES, block)
        for start in range(0, len(flat), step):
            piece = flat[start : start + step]
            found = block_checksums(piece, block)
            checksums[first : first + len(found)] = found
            first += len(found)
            yield piece
    else:
        yield from _streamed(wire_blocks(host, 0, host.size), block, checksums, first)


def _streamed(pieces: Iterator[memoryview], block: int, checksums: array[int], first: int) -> Iterator[memoryview]:
    """Pass pieces on whose ends are not those of the blocks."""
    state, held = xxhash.xxh3_64(), 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + block - held]
            state.update(part)
            held += len(part)
            at += len(part)
            if held == block:
                checksums[first] = state.intdigest()
                first += 1
                state.reset()
                held = 0
        yield piece
    if held:
        checksums[first] = state.intdigest()
