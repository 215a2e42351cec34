"""A tree of dicts, lists and leaves -> the pieces of a msgpack file, in order, without copying large arrays.

Large arrays stay what they are until their bytes are wanted (``Block``), so a file can be written with one staging
buffer and ``bytes`` can be filled in one pass. Nothing here recurses.

`vary` gives the same tree in other bytes: msgpack has several forms of one header, and every reader takes them for the
same. A file in a bucket needs that, for its version may say no more than its bytes do, and a version that came back
would let a late request be done. ``docs/design/buckets.md`` says more, ``docs/spec/msgpack.md`` names the forms.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import msgpack
import numpy as np

from treering._codec.array_bytes import holds_wire_bytes, wire_blocks
from treering._codec.msgpack.scan import CHUNK_MARKER, EXT_ARRAY, EXT_COMPLEX, EXT_SCALAR, LONGEST_PAYLOAD, MAX_DEPTH
from treering._printable import kind_of, way_to_pack
from treering._values.dtypes import check_writable
from treering._values.human import pluralize
from treering.errors import TreeringError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

SMALL_ARRAY: Final = 8 * 1024
"""Bytes up to which an array is copied at once: cheaper than carrying it along."""


class ArrayLike(Protocol):
    """A numpy or jax array: what has a shape and a numpy dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy dtype of an item."""


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """The bytes of items ``start`` to ``stop`` (C order) of an array, not yet taken."""

    array: ArrayLike
    """The array that the items belong to."""

    start: int
    """First item."""

    stop: int
    """One past the last item."""

    nbytes: int
    """Bytes of these items on the wire."""


Piece = bytes | Block

_PACKED_TYPES: Final = frozenset({type(None), bool, int, float, str, bytes, bytearray, memoryview, msgpack.Timestamp})


class IntTooLargeError(UnsupportedError, OverflowError):
    """flax raises OverflowError for an int beyond 64 bits."""


def pieces_size(pieces: list[Piece]) -> int:
    """Return how many bytes the pieces are together."""
    return sum(len(piece) if isinstance(piece, bytes) else piece.nbytes for piece in pieces)


@dataclasses.dataclass(slots=True)
class Encoder:
    """Makes the msgpack form of one tree: the pieces so far and the containers that are open."""

    adopt: Callable[[object], ArrayLike | None]
    """Called with each leaf of a type unknown here; an array-like to store in its place, or None to refuse."""
    to_host: Callable[[ArrayLike], NDArray[Any]]
    """Makes a numpy array of what ``adopt`` gave."""
    chunk_size: int
    """Arrays of more bytes than this become chunk maps, except inside lists (as flax does)."""
    sort_keys: bool
    """Write every dict in the order of its sorted keys instead of its own."""
    small: int = SMALL_ARRAY
    """Bytes up to which an array is taken at once; -1: none is."""
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    _headers: dict[tuple[Any, ...], tuple[bytes, int, bool]] = dataclasses.field(default_factory=dict)
    """What stands before a small array, by shape and dtype: header, bytes, are they in wire order already."""
    _keys: dict[str, bytes] = dataclasses.field(default_factory=dict)
    _adopted: set[type] = dataclasses.field(default_factory=set)
    """Types that ``adopt`` has taken before."""
    _frames: list[tuple[Iterator[tuple[Any, object]], bool, bool]] = dataclasses.field(default_factory=list)
    """One frame for each open container: its remaining items, is it a map, may its arrays be chunked."""
    _at: list[object] = dataclasses.field(default_factory=list)
    _key: object = None

    def encode(self, tree: object) -> list[Piece]:
        """Return the pieces whose concatenation is the msgpack form of ``tree``.

        Args:
            tree: dicts and lists around leaves; dict keys are scalars, in the order in which they shall stand.

        Raises:
            UnsupportedError: a leaf or key that could not be read back, with its path; also TypeError or OverflowError
                as flax would raise.
        """
        try:
            self._run(tree)
        except TreeringError as error:
            error.path = error.path or tuple(str(key) for key in [*self._at, self._key][1:])
            raise
        return self.pieces

    def _run(self, tree: object) -> None:
        frames, append = self._frames, self.pieces.append
        headers, ndarray = self._headers, np.ndarray
        frames.append((iter([(None, tree)]), False, True))
        while frames:
            items, is_map, chunkable = frames[-1]
            for key, value in items:
                self._key = key
                if is_map:
                    append(self._keys.get(key) or self._pack_key(key) if type(key) is str else self._pack_key(key))
                kind = type(value)
                if kind is ndarray:
                    found = headers.get((value.shape, value.dtype))  # type: ignore[attr-defined]
                    if found is not None and found[2]:
                        append(found[0])
                        append(value.tobytes())  # type: ignore[attr-defined]
                    else:
                        self._array(value, chunkable)  # type: ignore[arg-type]
                elif kind is dict or kind is list:
                    self._open(value, chunkable)  # type: ignore[arg-type]
                    break
                elif kind in _PACKED_TYPES:
                    append(_pack(value))
                else:
                    self._other(value, chunkable)
            else:
                frames.pop()
                if self._at:
                    self._at.pop()

    def _pack_key(self, key: object) -> bytes:
        if key == CHUNK_MARKER:
            problem = "marks a chunked array in this format and cannot be a key"
            raise UnsupportedError(f"the key {CHUNK_MARKER!r} {problem}", hint="rename it")
        if type(key) is str:
            packed = self._keys[key] = _pack(key)
            return packed
        if type(key) in _PACKED_TYPES and type(key) is not memoryview:
            return _pack(key)
        if type(key) is complex:
            return complex_leaf(key)
        if isinstance(key, np.generic):
            return self._scalar(key)
        raise UnsupportedError(f"can not serialize a key of type {type(key).__name__!r}")

    def _open(self, container: dict[object, object] | list[object], chunkable: bool) -> None:
        if len(self._frames) > MAX_DEPTH:
            hint = "it may hold itself; flatten it otherwise"
            raise UnsupportedError(f"the tree is more than {MAX_DEPTH} containers deep", hint=hint)
        if isinstance(container, dict):
            items = self._order_items(container)  # where that fails, this container is the leaf that is named
            self.pieces.append(map_header(len(container)))
            self._frames.append((iter(items), True, chunkable))
        else:
            self.pieces.append(list_header(len(container)))
            self._frames.append((iter(enumerate(container)), False, False))
        self._at.append(self._key)

    def _order_items(self, container: dict[Any, object]) -> Iterable[tuple[Any, object]]:
        if not self.sort_keys:
            return container.items()
        try:
            return [(key, container[key]) for key in sorted(container)]
        except TypeError as error:
            hint = "in_place=True keeps the order they have"
            raise UnsupportedError(f"the keys of a dict cannot be sorted: {error}", hint=hint) from error

    def _other(self, value: object, chunkable: bool) -> None:
        """Write a leaf that is none of the common exact types."""
        if type(value) in self._adopted:
            self._array(self.adopt(value), chunkable)  # type: ignore[arg-type]
        elif isinstance(value, np.generic):
            self.pieces.append(self._scalar(value))
        elif type(value) is complex:
            self.pieces.append(complex_leaf(value))
        elif isinstance(value, np.ma.MaskedArray):
            hint = "store .data and .mask as two arrays, or .filled(value)"
            raise UnsupportedError("a masked array would lose its mask", hint=hint)
        elif isinstance(value, np.ndarray):
            self._array(value, chunkable)
        else:
            if (array := self.adopt(value)) is None:
                raise UnsupportedError(f"can not serialize {type(value).__name__!r} object", hint=way_to_pack(value))
            self._adopted.add(type(value))
            self._array(array, chunkable)

    def _scalar(self, value: np.generic) -> bytes:
        array = np.asarray(value)
        dtype = check_writable(array.dtype)
        header, _ = array_header(EXT_SCALAR, (), dtype.name, dtype.itemsize)
        return header + b"".join(wire_blocks(array, 0, 1))

    def _array(self, array: ArrayLike, chunkable: bool) -> None:
        shape, dtype = array.shape, array.dtype
        if (known := self._headers.get((shape, dtype))) is None:
            wire = check_writable(dtype)
            if chunkable and math.prod(shape) * wire.itemsize > self.chunk_size:
                self._chunks(array, wire.name, wire.itemsize)
                return
            header, nbytes = array_header(EXT_ARRAY, shape, wire.name, wire.itemsize)
            known = (header, nbytes, holds_wire_bytes(dtype))
            if nbytes <= min(self.small, self.chunk_size):
                self._headers[shape, dtype] = known
        header, nbytes, plain = known
        self.pieces.append(header)
        if nbytes > self.small:
            self.pieces.append(Block(array, 0, math.prod(shape), nbytes))
            return
        host = self.to_host(array)
        self.pieces.append(host.tobytes() if plain else b"".join(wire_blocks(host, 0, host.size)))

    def _chunks(self, array: ArrayLike, dtype_name: str, itemsize: int) -> None:
        """Write an array above the limit as flax does: a map of the shape and of flat chunks."""
        total = math.prod(array.shape)
        step = max(1, int(self.chunk_size / itemsize))
        append = self.pieces.append
        append(map_header(3) + _pack(CHUNK_MARKER) + b"\xc3" + _pack("shape"))
        append(_pack({str(axis): length for axis, length in enumerate(array.shape)}))
        starts = range(0, total, step)
        append(_pack("chunks") + map_header(len(starts)))
        for number, start in enumerate(starts):
            stop = min(start + step, total)
            header, nbytes = array_header(EXT_ARRAY, (stop - start,), dtype_name, itemsize)
            append(_pack(str(number)) + header)
            append(Block(array, start, stop, nbytes))


def _pack(value: object) -> bytes:
    """Pack a Python scalar, a str or bytes, in the shortest form."""
    try:
        packed: bytes = msgpack.packb(value, strict_types=True)
    except OverflowError as error:
        problem = f"the int {_shorten(value)} does not fit into 64 bits"
        raise IntTooLargeError(problem, hint="store it as a str or as an array") from error
    except UnicodeEncodeError as error:
        raise UnsupportedError(f"the text {ascii(value)[:80]} is not valid Unicode") from error
    except (ValueError, BufferError) as error:
        raise UnsupportedError(f"{kind_of(value)} cannot be packed: {error}") from error
    return packed


def _shorten(value: object) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"of {pluralize(value.bit_length(), 'bits')}"
    return str(value)


# -------------------------------------------------------------------------------------------------------------- headers

_FIXEXT: Final = {1: b"\xd4", 2: b"\xd5", 4: b"\xd6", 8: b"\xd7", 16: b"\xd8"}


def map_header(count: int) -> bytes:
    r"""Return the header of a map of ``count`` pairs.

    Example:
        >>> map_header(3), map_header(16)
        (b'\x83', b'\xde\x00\x10')
    """
    return bytes((0x80 | count,)) if count < 16 else _sized_header(0xDE, count, narrowest=2)


def list_header(count: int) -> bytes:
    r"""Return the header of an array of ``count`` items.

    Example:
        >>> list_header(2)
        b'\x92'
    """
    return bytes((0x90 | count,)) if count < 16 else _sized_header(0xDC, count, narrowest=2)


def _ext_header(code: int, nbytes: int) -> bytes:
    return (_FIXEXT.get(nbytes) or _sized_header(0xC7, nbytes)) + struct.pack(">b", code)


def _sized_header(first: int, count: int, narrowest: int = 1) -> bytes:
    """Return the first byte and the count behind it, in as few bytes as hold it; ``first`` says the narrowest form."""
    width = max(narrowest, 1 if count < 2**8 else 2 if count < 2**16 else 4)
    return bytes((first + (width // narrowest).bit_length() - 1,)) + count.to_bytes(width, "big")


def array_header(code: int, shape: tuple[int, ...], dtype_name: str, itemsize: int) -> tuple[bytes, int]:
    r"""Return what stands before an array's bytes, and how many bytes follow.

    The header holds the ext header, the inner array of three, the shape, the dtype name and the bin header, so that
    an array is written as header, then its C-order little-endian bytes.

    Raises:
        UnsupportedError: the payload exceeds what one msgpack ext can hold.

    Example:
        >>> array_header(EXT_ARRAY, (1, 2), "float32", 4)
        (b'\xc7\x16\x01\x93\x92\x01\x02\xa7float32\xc4\x08', 8)
    """
    nbytes = math.prod(shape) * itemsize
    inner = b"\x93" + msgpack.packb(shape) + msgpack.packb(dtype_name)
    if nbytes <= LONGEST_PAYLOAD:
        inner += _sized_header(0xC4, nbytes)
    if (payload := len(inner) + nbytes) > LONGEST_PAYLOAD:
        raise UnsupportedError(
            f"an array of {pluralize(nbytes, 'bytes')} does not fit into one msgpack item of {LONGEST_PAYLOAD} bytes",
            hint="put it into a dict, so that it is written in chunks (MAX_CHUNK_SIZE)",
        )
    return _ext_header(code, payload) + inner, nbytes


def complex_leaf(value: complex) -> bytes:
    """Return a Python complex number: ext 2 around an array of two float64."""
    return _ext_header(EXT_COMPLEX, 19) + struct.pack(">BBdBd", 0x92, 0xCB, value.real, 0xCB, value.imag)


# ------------------------------------------------------------------------------------------------------ forms by chance

ENOUGH: Final = 64.0
"""Bits after which the rest of a file is left as it is."""

FEWEST: Final = 32.0
"""Bits with which no two files are taken to be alike."""

_Family: TypeAlias = tuple[int, int, int, range]
"""The forms of a header: the first byte of the narrowest with a count behind it, the bytes of that count, how many such
forms there are, each with a count of twice the bytes, and the first bytes that have the count in themselves.
"""

_MAP: Final = (0xDE, 2, 2, range(0x80, 0x90))
_LIST: Final = (0xDC, 2, 2, range(0x90, 0xA0))
_STR: Final = (0xD9, 1, 3, range(0xA0, 0xC0))
_BIN: Final = (0xC4, 1, 3, range(0))
_EXT: Final = (0xC7, 1, 3, range(0xD4, 0xD9))
_UINT: Final = (0xCC, 1, 4, range(0x80))
_OTHER: Final = (0, 0, 0, range(0))
_FIXED: Final = {0xCA: 5, 0xCB: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
"""Bytes of other numbers, which have one form here."""
_MOST_GROWTH: Final = 1024


def vary(pieces: list[Piece]) -> tuple[list[Piece], bool]:
    r"""Return pieces that every reader decodes to the same tree, some headers of which have a form drawn by chance.

    Returns:
        The pieces, and whether there were so many forms that no other call returns the same ones.

    Example:
        >>> pieces, unique = vary([b"\x81", b"\xa1w", b"\xc0"])
        >>> import msgpack
        >>> msgpack.unpackb(b"".join(pieces)), unique
        ({'w': None}, False)
    """
    draw = _Draw()
    varied: list[Piece] = []
    skip = 0  # bytes of these pieces that belong to the last item
    for piece in pieces:
        if isinstance(piece, Block) or draw.bits >= ENOUGH:
            varied.append(piece)
            skip -= piece.nbytes if isinstance(piece, Block) else 0
        else:
            parts, end = _vary_items(piece, skip, draw)
            varied.append(b"".join((piece[:skip], *parts)))
            skip = end - len(piece)
    return varied, draw.bits >= FEWEST


class _Draw:
    """Draws forms of headers, and counts by how many bits."""

    def __init__(self) -> None:
        self.bits = 0.0

    def __call__(self, family: _Family, count: int, short: bytes = b"") -> bytes:
        """Return a header of a family; ``short`` is its form without a count, where it has one."""
        first, narrowest, wide, _ = family
        widths = enumerate(narrowest << number for number in range(wide))
        forms = [bytes((first + n,)) + count.to_bytes(width, "big") for n, width in widths if count < 256**width]
        forms += [short] if short else []
        self.bits += math.log2(len(forms))
        return secrets.choice(forms)


def _vary_items(data: bytes, at: int, draw: _Draw, *, in_array: bool = False) -> tuple[list[bytes], int]:
    """Return the items from ``at`` on with other headers, and where the last one ends; of an array all but its bytes.

    In arrays, readers of older versions know two forms of the shape, and two of the name of the dtype.
    """
    parts: list[bytes] = []
    while at < len(data):
        family, count, short, begin = _read_header(data, at)
        at = begin + (family is _EXT) + (count if family in (_STR, _BIN, _EXT) else 0)
        if in_array and family in (_LIST, _STR):
            family = (*family[:2], 1, family[3])
        if family is _EXT and data[begin] in (EXT_ARRAY, EXT_SCALAR) and count < LONGEST_PAYLOAD - _MOST_GROWTH:
            inner, after = _vary_items(data, begin + 2, draw, in_array=True)
            growth = sum(map(len, inner)) - (after - begin - 2)
            parts += [draw(_EXT, count + growth), data[begin : begin + 2], *inner]
            begin = after
        else:
            parts.append(draw(family, count, short))
        if in_array and family is _BIN:
            return parts, begin
        parts.append(data[begin:at])
    return parts, at


def _read_header(data: bytes, at: int) -> tuple[_Family, int, bytes, int]:
    """Return the family of a header, its count or number, its form without a count, and where it ends."""
    first = data[at]
    for family in (_UINT, _MAP, _LIST, _STR, _BIN, _EXT):
        code, narrowest, wide, shorts = family
        if first in shorts:
            number = first - shorts.start
            return family, 1 << number if family is _EXT else number, data[at : at + 1], at + 1
        if code <= first < code + wide:
            end = at + 1 + (narrowest << first - code)
            return family, int.from_bytes(data[at + 1 : end], "big"), b"", end
    end = at + _FIXED.get(first, 1)
    return _OTHER, 0, data[at:end], end
