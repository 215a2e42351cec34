"""The bytes of a msgpack file -> a tree, reading headers only and trusting none of them.

Every length, count, shape, dtype name and depth is checked against the bytes that are there before anything is
allocated or opened. Arrays are handed to a ``Leaves`` by position: it may make views of a buffer, plan reads, or only
keep a record. Nothing here recurses, so depth costs memory in proportion and is bounded.

Methods of a `Window` take an index into it and return values with the index behind them. Reading past the end raises
``IndexError`` or ``struct.error``, which the scanner turns into "cut short".

``Scanner._take_arrays`` is the hot path (10,000 small leaves in a few hundredths of a second): it compares a whole
array header at once with the last one of that length, and leaves everything unusual to the careful methods.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgpack

from treering._values.dtypes import Dtype, lookup
from treering._values.human import pluralize
from treering.errors import CorruptError, FormatError, TreeringError

EXT_ARRAY: Final = 1
EXT_COMPLEX: Final = 2
EXT_SCALAR: Final = 3
EXT_TUPLE: Final = 4
EXT_TIMESTAMP: Final = -1

CHUNK_MARKER: Final = "__msgpack_chunked_array__"

LONGEST_PAYLOAD: Final = 2**32 - 1
"""Bytes that one msgpack ext, bin or str can hold."""

MAX_DEPTH: Final = 2**17
"""Containers inside one another, on writing and on reading."""

MAX_NDIM: Final = 64
"""Axes of one array: what numpy can hold."""

WINDOW_BYTES: Final = 64 * 1024
_FIRST_STEP: Final = 4 * 1024
_SLACK: Final = 1024  # more than any key of one length byte, ext header and inner array header together
_NEVER: Final = 2**63

Fetch = Callable[[int, int], bytes]
"""``fetch(offset, n)`` returns exactly ``n`` bytes of a source."""

_NUMBERS: Final = {0xCA + number: struct.Struct(f">{code}") for number, code in enumerate("fdBHIQbhiq")}


class Window:
    """Some of a source's bytes, around what is read next.

    Args:
        first: the bytes at the start of the source, or all of them.
        size: bytes in the whole source.
        fetch: ``fetch(offset, n)`` returns exactly ``n`` bytes; only asked for bytes that are there.
        step: how many bytes are fetched at once, where all of them are wanted; else few, behind a large array very few.

    Attributes:
        data: the bytes in the window.
        base: offset in the source of its first byte.
        size: bytes in the whole source.
        next: index in ``data`` of what is read next; behind its end after a jump.
        safe: index up to which an item's headers surely lie inside the window.
    """

    __slots__ = ("_all", "_fetch", "_step", "base", "data", "next", "safe", "size")

    def __init__(self, first: bytes, size: int, fetch: Fetch, step: int | None = None) -> None:
        self.data = first
        self.base = 0
        self.size = size
        self.next = 0
        self._fetch = fetch
        self._all = step is not None
        self._step = step or WINDOW_BYTES
        self.safe = self._safe_end()

    def _safe_end(self) -> int:
        reaches_the_end = self.base + len(self.data) >= self.size
        return _NEVER if reaches_the_end else len(self.data) - _SLACK

    def refill(self) -> None:
        """Move on, so that the window starts with the next item; called when that is not safely inside."""
        offset = self.base + self.next
        # Behind a large array another may follow at once: look at little until small items come.
        if not self._all:
            jumped = self.next > len(self.data)
            self._step = _FIRST_STEP if jumped else min(2 * self._step, WINDOW_BYTES)
        self.data = b""  # two of them need not be in memory
        self.data = self._fetch(offset, min(self._step, self.size - offset))
        self.base, self.next = offset, 0
        self.safe = self._safe_end()

    def read(self, at: int, nbytes: int) -> bytes:
        """Return ``nbytes`` from ``at`` on, from the source where the window ends before."""
        self.need(at, nbytes)
        return self.data[at : at + nbytes] if at + nbytes <= len(self.data) else self._fetch(self.base + at, nbytes)

    def need(self, at: int, nbytes: int) -> None:
        """Raise where the source ends before ``nbytes`` from ``at`` on."""
        end = self.base + at + nbytes
        if end > self.size:
            count = pluralize(self.size, "bytes")
            raise CorruptError(f"the data is cut short: it ends after {count}; at least {end} were needed")

    def unsigned(self, at: int, width: int) -> int:
        """Return the big-endian number of ``width`` bytes."""
        field = self.data[at : at + width]
        if len(field) != width:
            raise IndexError
        return int.from_bytes(field, "big")

    def number(self, at: int) -> tuple[int | float | bool | None, int]:
        """Return a nil, bool, int or float."""
        first = self.data[at]
        if first <= 0x7F:
            return first, at + 1
        if first >= 0xE0:
            return first - 0x100, at + 1
        if first == 0xC0:
            return None, at + 1
        if first in (0xC2, 0xC3):
            return first == 0xC3, at + 1
        if (form := _NUMBERS.get(first)) is None:
            raise CorruptError(f"byte 0x{first:02x} starts no msgpack item")
        return form.unpack_from(self.data, at + 1)[0], at + 1 + form.size

    def blob_header(self, at: int) -> tuple[int, int, bool]:
        """Return where a str or bin starts, its length, and whether it is a str."""
        first = self.data[at]
        if first <= 0xBF:
            return at + 1, first & 0x1F, True
        is_text = first >= 0xD9
        width = 1 << (first - (0xD9 if is_text else 0xC4))
        return at + 1 + width, self.unsigned(at + 1, width), is_text

    def ext_header(self, at: int) -> tuple[int, int, int]:
        """Return payload length, code (signed) and where the payload starts."""
        first = self.data[at]
        if first >= 0xD4:
            nbytes, at = 1 << (first - 0xD4), at + 1
        else:
            width = 1 << (first - 0xC7)
            nbytes, at = self.unsigned(at + 1, width), at + 1 + width
        code = self.data[at]
        return nbytes, code - 0x100 if code > 0x7F else code, at + 1

    def container_header(self, at: int) -> tuple[bool, int, int]:
        """Return whether it is a map, how many items it claims, and where they start."""
        first = self.data[at]
        if first <= 0x9F:
            return first <= 0x8F, first & 0x0F, at + 1
        width = 4 if first & 1 else 2
        return first >= 0xDE, self.unsigned(at + 1, width), at + 1 + width

    def complex(self, start: int, nbytes: int) -> complex:
        """Return the complex number in an ext payload."""
        payload = self.read(start, nbytes) if nbytes == 19 else b""
        if payload[:2] != b"\x92\xcb" or payload[10:11] != b"\xcb":
            raise CorruptError("a complex number (ext 2) is not a pair of float64")
        real, imag = struct.unpack(">dxd", payload[2:])
        return complex(real, imag)


_LONGEST_DIM: Final = 2**63 - 1
_MOST_ITEMS: Final = 2**58  # times the largest item, 32 bytes, no signed 64-bit number any more


class UnknownDtypeError(FormatError, TypeError):
    """flax raises TypeError for a dtype name that numpy does not know."""


def array_payload(window: Window, start: int, nbytes: int) -> tuple[tuple[int, ...], Dtype, int]:
    """Return shape, dtype, and where the array's bytes start, of the payload of ``nbytes`` at ``start``.

    Raises:
        CorruptError: it is no [shape, dtype, bytes], or the three disagree with one another or with ``nbytes``.
        FormatError: a dtype name that no file may hold.
    """
    data = window.data
    if data[start] != 0x93:
        raise CorruptError("an array's payload is not [shape, dtype, bytes]")
    shape, at = _shape(window, start + 1)
    if not (0xA0 <= data[at] <= 0xBF or data[at] == 0xD9):
        raise CorruptError("an array's dtype name is not a str")
    begin, length, _ = window.blob_header(at)
    name, at = data[begin : begin + length], begin + length
    if (dtype := lookup(name.decode("ascii", "backslashreplace"))) is None:
        raise UnknownDtypeError(f"the dtype name {name[:64]!r} is not one that a file may hold")
    if not 0xC4 <= data[at] <= 0xC6:
        raise CorruptError("an array's bytes are not a bin")
    at, length, _ = window.blob_header(at)
    if (wanted := math.prod(shape) * dtype.itemsize) != length:
        needed = pluralize(wanted, "bytes")
        raise CorruptError(
            f"an array of shape {shape} and dtype {dtype.name} needs {needed}, its header claims {length}"
        )
    if at + length != start + nbytes:
        raise CorruptError(f"an array's payload of {pluralize(nbytes, 'bytes')} holds {at - start} + {length}")
    return shape, dtype, at


def _shape(window: Window, at: int) -> tuple[tuple[int, ...], int]:
    first = window.data[at]
    if not (0x90 <= first <= 0x9F or first == 0xDC):
        raise CorruptError("an array's shape is not a list of lengths")
    _, ndim, at = window.container_header(at)
    if ndim > MAX_NDIM:
        raise CorruptError(f"an array claims {pluralize(ndim, 'axes')}; {MAX_NDIM} is the most")
    shape: list[int] = []
    for _ in range(ndim):
        dim, at = window.number(at)
        if type(dim) is not int or not 0 <= dim <= _LONGEST_DIM:
            raise CorruptError(f"an array claims an axis of length {dim}")
        shape.append(dim)
    if not possible(shape):
        raise CorruptError(f"an empty array claims the impossible shape {tuple(shape)}")
    return tuple(shape), at


def possible(shape: Sequence[int]) -> bool:
    """Tell whether numpy can make an array of this shape: it multiplies the other axes even where one is 0."""
    return 0 not in shape or math.prod(dim or 1 for dim in shape) < _MOST_ITEMS


class NotChunkedError(CorruptError, KeyError):
    """flax raises KeyError where a chunk map lacks its shape."""


def chunked_array(container: dict[Any, Any]) -> tuple[tuple[int, ...], list[Any]]:
    """Return the shape of a map that carries the chunk marker, and its pieces.

    The flat pieces are in order, at least one, of one dtype; their lengths add up to the shape.

    Raises:
        CorruptError: other keys, gaps in the numbering, pieces that are no flat arrays of one dtype, or a wrong total.
    """
    if set(container) != {CHUNK_MARKER, "shape", "chunks"} or container[CHUNK_MARKER] is not True:
        raise NotChunkedError(f"a map with the key {CHUNK_MARKER!r} is not a chunked array")
    shape = tuple(_numbered(container["shape"], "shape"))
    if len(shape) > MAX_NDIM or not all(type(length) is int and length >= 0 for length in shape) or not possible(shape):
        raise CorruptError(f"a chunked array claims the shape {shape!r:.200}")
    parts = _numbered(container["chunks"], "chunks")
    shapes = [getattr(part, "shape", None) for part in parts]
    if not all(isinstance(each, tuple) and len(each) == 1 for each in shapes):
        raise CorruptError("a piece of a chunked array is not a flat array")
    if not parts or any(part.dtype != parts[0].dtype for part in parts):
        raise CorruptError("a chunked array's pieces are missing or differ in dtype")
    needed, found = math.prod(shape), sum(part.shape[0] for part in parts)
    if found != needed:
        raise CorruptError(
            f"a chunked array of shape {shape} needs {pluralize(needed, 'items')}, its pieces hold {found}"
        )
    return shape, parts


def _numbered(container: Any, role: str) -> list[Any]:
    if not isinstance(container, dict) or list(container) != [str(number) for number in range(len(container))]:
        raise CorruptError(f"a chunked array's {role} are not numbered from 0 on")
    return list(container.values())


# What CPython takes for an empty dict or list with its first slots: an estimate that hostile nesting is held to.
_CONTAINER_BYTES: Final = {True: 256, False: 128}
_CONTAINER_ALLOWANCE: Final = 32 * 2**20
_CONTAINER_RATIO: Final = 64

# Python's hashes of numbers can be made to collide, so that a dict of them takes time with the square.
_MOST_RARE_KEYS: Final = 1000


class LeafBuilder(Protocol):
    """What becomes of the leaves: views, planned reads, or records."""

    def prepare(self, dtype: Dtype) -> Any:
        """Return what ``array`` wants as dtype; called once for each distinct header."""

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int, data: bytes, at: int, /) -> object:
        """Return the array of that shape and dtype whose bytes start at ``offset``.

        ``data`` is the window, in which they start at index ``at``; they may go on behind its end.
        """

    def scalar(self, shape: tuple[int, ...], dtype: Any, offset: int, data: bytes, /) -> object:
        """Return the numpy scalar of these bytes, which start at ``offset``; ``shape`` is ()."""

    def join_chunks(self, shape: tuple[int, ...], parts: list[Any]) -> object:
        """Return the one array of that shape that these flat parts make."""

    def blob(self, read: Callable[[], bytes], offset: int, nbytes: int, is_text: bool, /) -> object:
        """Return the leaf for a str or bytes; ``read`` fetches it when it is wanted."""


class UnhashableKeyError(CorruptError, TypeError):
    """flax raises TypeError for a map key that cannot be hashed."""


_NO_KEY: Final = object()


@dataclasses.dataclass(slots=True)
class _OpenContainer:
    """An open container."""

    is_map: bool
    container: Any
    total: int
    remaining: int
    offset: int
    hopeful: bool
    """Whether the next item may be an array with a known header."""
    key: Any = _NO_KEY
    tuple_end: int | None = None
    holds_chunked: bool = False
    """Whether an array that was put together of chunks lies directly in here ..."""
    chunks_of_chunks: bool = False
    """... or in the map at "chunks"."""

    def put(self, value: object) -> None:
        """Take the value of the item that was read."""
        if self.is_map:
            self.container[self.key] = value
        else:
            self.container.append(value)


class Scanner:
    r"""One pass over one msgpack object that must fill its source exactly.

    Args:
        first: the bytes at the start of the source, or all of them.
        size: bytes in the whole source.
        fetch: ``fetch(offset, n)`` returns exactly ``n`` bytes; only asked for bytes that are there.
        leaves: makes the leaves.
        allowance: bytes of memory that the containers may take, by estimate.
        step: how many bytes are fetched at once, where ``leaves`` take the bytes of arrays from what was fetched.

    Example:
        >>> from treering._foreign.msgpack_source import Views
        >>> data = b"\x82\xa1a\x01\xa1b\xc0"
        >>> Scanner(data, len(data), lambda offset, n: data[offset : offset + n], Views(data)).run()
        {'a': 1, 'b': None}
    """

    def __init__(
        self,
        first: bytes,
        size: int,
        fetch: Fetch,
        leaves: LeafBuilder,
        *,
        allowance: int | None = None,
        step: int | None = None,
    ) -> None:
        self._window = Window(first, size, fetch, step)
        self._leaves = leaves
        # The open containers, innermost last. The first holds the root, as a list of one.
        self._frames: list[_OpenContainer] = [_OpenContainer(False, [], 1, 1, 0, False)]
        # Payload length -> the last array header of that length, its shape, dtype and own length.
        self._headers: dict[int, tuple[bytes, tuple[int, ...], Any, int]] = {}
        # How much memory the containers may still take, by estimate.
        self._allowance = _CONTAINER_ALLOWANCE + _CONTAINER_RATIO * size if allowance is None else allowance
        self._rare_keys = 0
        # Offset in the source of the item being read.
        self._at = 0

    def run(self) -> object:
        """Return the tree.

        Raises:
            CorruptError: lengths, counts or shapes that contradict the bytes, duplicate keys, trailing bytes.
            FormatError: an ext code or dtype name that this version does not know.
        """
        try:
            return self._run()
        except (IndexError, struct.error):
            count = pluralize(self._window.size, "bytes")
            problem = f"the data is cut short: it ends after {count}" if self._window.size else "the input is empty"
            raise self._locate(CorruptError(problem)) from None
        except UnicodeDecodeError as error:
            raise self._locate(CorruptError(f"a str is not valid UTF-8: {error.reason}")) from None
        except TreeringError as error:
            raise self._locate(error) from error.__cause__

    def _run(self) -> object:
        frames, window = self._frames, self._window
        while True:
            frame = frames[-1]
            if frame.hopeful and frame.remaining > 1:
                self._take_arrays(frame)
            if not frame.remaining:
                value = self._close(frame)
                frames.pop()
                if not frames:
                    return value
                frames[-1].put(value)
                continue
            frame.remaining -= 1
            if window.next >= window.safe:
                window.refill()
            self._at = window.base + window.next
            if frame.is_map:
                self._take_key(frame)
                if window.next >= window.safe:
                    window.refill()
                self._at = window.base + window.next
            first = window.data[window.next]
            if 0x80 <= first <= 0x9F or 0xDC <= first <= 0xDF:
                self._open()
            elif 0xC7 <= first <= 0xC9 or 0xD4 <= first <= 0xD8:
                self._take_ext(frame)
            elif 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB or 0xC4 <= first <= 0xC6:
                self._take_blob(frame)
            else:
                value, window.next = window.number(window.next)
                frame.put(value)

    def _take_arrays(self, frame: _OpenContainer) -> None:
        """Take pairs of a short key and an array whose header is a known one, for as long as they come.

        This is the hot path. It never raises: at whatever is unusual it stops, and the item is read again with care.
        """
        window, base, headers, make = self._window.data, self._window.base, self._headers, self._leaves.array
        container, remaining, at = frame.container, frame.remaining, self._window.next
        safe, limit = self._window.safe, self._window.size - base
        try:
            while remaining and at < safe:
                stop = at + window[at] - 0x9F
                head = window[stop]
                if head == 0xC8:
                    nbytes, start = window[stop + 1] << 8 | window[stop + 2], stop + 4
                elif head == 0xC9:
                    nbytes, start = int.from_bytes(window[stop + 1 : stop + 5], "big"), stop + 6
                else:
                    break
                known = headers.get(nbytes)
                end = start + nbytes
                if (
                    known is None
                    or window[start - 1] != EXT_ARRAY
                    or not window.startswith(known[0], start)
                    or end > limit
                    or not 0xA0 <= window[at] <= 0xBF
                ):
                    break
                key = window[at + 1 : stop].decode()
                if key in container:
                    break
                begin = start + known[3]
                container[key] = make(known[1], known[2], base + begin, window, begin)
                remaining -= 1
                at = end
        except (IndexError, UnicodeDecodeError):
            pass
        frame.hopeful = at != self._window.next
        frame.remaining, self._window.next = remaining, at

    # ---- containers

    def _open(self) -> _OpenContainer:
        """Open the map or array that is next."""
        window = self._window
        offset = window.base + window.next
        is_map, total, window.next = window.container_header(window.next)
        left = window.size - window.base - window.next
        if total * (1 + is_map) > left:
            kind = "map" if is_map else "array"
            raise CorruptError(
                f"a {kind} claims {pluralize(total, 'items')}, but only {pluralize(left, 'bytes follow')}"
            )
        if len(self._frames) > MAX_DEPTH:
            raise CorruptError(f"the file nests more than {MAX_DEPTH} containers")
        self._allowance -= _CONTAINER_BYTES[is_map]
        if self._allowance < 0:
            problem = "hold so many nested containers that they would fill many times that in memory"
            raise CorruptError(f"the {window.size} bytes {problem}")
        frame = _OpenContainer(is_map, {} if is_map else [], total, total, offset, is_map)
        self._frames.append(frame)
        return frame

    def _close(self, frame: _OpenContainer) -> object:
        """Return the value of a container whose last item has been read."""
        container, offset = frame.container, self._window.base + self._window.next
        if len(self._frames) == 1:
            self._at = offset
            if offset != self._window.size:
                raise CorruptError(f"{pluralize(self._window.size - offset, 'bytes follow')} the end of the tree")
            return container[0]
        if frame.is_map:
            parent = self._frames[-2]
            if CHUNK_MARKER in container:
                self._at, frame.key = frame.offset, _NO_KEY
                if frame.chunks_of_chunks:
                    raise CorruptError("a piece of a chunked array is itself chunked")
                parent.holds_chunked = True
                return self._leaves.join_chunks(*chunked_array(container))
            if frame.holds_chunked and parent.key == "chunks":
                parent.chunks_of_chunks = True
        elif frame.tuple_end is not None:
            if offset != frame.tuple_end:
                raise CorruptError(f"a tuple (ext 4) should end at byte {frame.tuple_end}, its items end at {offset}")
            return tuple(container)
        return container

    # ---- keys and leaves

    def _take_key(self, frame: _OpenContainer) -> None:
        window = self._window
        first, at = window.data[window.next], window.next
        key: Any
        if 0xA0 <= first <= 0xBF:
            nbytes, at = first & 0x1F, at + 1
            raw = window.data[at : at + nbytes]
            if len(raw) != nbytes:
                window.need(at, nbytes)
            key, at = raw.decode(), at + nbytes
        elif 0xD9 <= first <= 0xDB or 0xC4 <= first <= 0xC6:
            start, nbytes, is_text = window.blob_header(at)
            raw = window.read(start, nbytes)
            key, at = raw.decode() if is_text else raw, start + nbytes
        elif 0x80 <= first <= 0x9F or 0xDC <= first <= 0xDF:
            raise UnhashableKeyError("a map or an array is in the place of a map key")
        elif 0xC7 <= first <= 0xC9 or 0xD4 <= first <= 0xD8:
            nbytes, code, start = window.ext_header(at)
            window.need(start, nbytes)
            self._rare_keys += 1
            if self._rare_keys > _MOST_RARE_KEYS:
                raise CorruptError(f"more than {_MOST_RARE_KEYS} map keys are complex, numpy scalars or time stamps")
            if code in (EXT_ARRAY, EXT_TUPLE):
                raise UnhashableKeyError(f"an array or a tuple (ext code {code}) is in the place of a map key")
            key = self._rare_ext(code, start, nbytes)
            at = start + nbytes
        else:
            key, at = window.number(at)
        frame.key, window.next = key, at
        if key in frame.container:
            raise CorruptError(f"the key {key!r:.80} is twice in one map")

    def _take_blob(self, frame: _OpenContainer) -> None:
        """Take a str or bytes leaf."""
        window = self._window
        start, nbytes, is_text = window.blob_header(window.next)
        window.need(start, nbytes)
        read = functools.partial(window.read, start, nbytes)
        frame.put(self._leaves.blob(read, window.base + start, nbytes, is_text))
        window.next = start + nbytes

    def _take_ext(self, frame: _OpenContainer) -> None:
        window = self._window
        nbytes, code, start = window.ext_header(window.next)
        window.need(start, nbytes)
        if code == EXT_TUPLE:
            # Orbax's tuple, an array that fills the payload.
            first = window.data[start]
            if not (0x90 <= first <= 0x9F or 0xDC <= first <= 0xDD):
                raise CorruptError("the payload of a tuple (ext 4) is not an array")
            window.next = start
            self._open().tuple_end = window.base + start + nbytes
            return
        frame.put(self._array(start, nbytes) if code == EXT_ARRAY else self._rare_ext(code, start, nbytes))
        window.next = start + nbytes

    def _array(self, start: int, nbytes: int) -> object:
        window, leaves = self._window, self._leaves
        known = self._headers.get(nbytes)
        if known is None or not window.data.startswith(known[0], start):
            shape, dtype, begin = array_payload(window, start, nbytes)
            known = self._headers[nbytes] = (window.data[start:begin], shape, leaves.prepare(dtype), begin - start)
        self._frames[-1].hopeful = self._frames[-1].is_map
        begin = start + known[3]
        return leaves.array(known[1], known[2], window.base + begin, window.data, begin)

    def _rare_ext(self, code: int, start: int, nbytes: int) -> object:
        """Read an ext leaf that is no array and no tuple."""
        if code == EXT_SCALAR:
            shape, dtype, begin = array_payload(self._window, start, nbytes)
            if shape:
                raise CorruptError(f"a numpy scalar claims the shape {shape}")
            data = self._window.read(begin, dtype.itemsize)
            return self._leaves.scalar(shape, self._leaves.prepare(dtype), self._window.base + begin, data)
        if code == EXT_COMPLEX:
            return self._window.complex(start, nbytes)
        if code == EXT_TIMESTAMP and nbytes in (4, 8, 12):
            try:
                return msgpack.Timestamp.from_bytes(self._window.read(start, nbytes))
            except ValueError as error:
                raise CorruptError(f"a time stamp does not hold a time: {error}") from None
        known = "1 (array), 2 (complex), 3 (numpy scalar), 4 (tuple), -1 (time)"
        hint = "read the file with the tool that wrote it"
        raise FormatError(f"ext code {code} is unknown; known are {known}", hint=hint)

    # ---- failures

    def _locate(self, error: TreeringError) -> TreeringError:
        """Return an error that says where it is."""
        inner = self._frames[1:]
        keys = (frame.key if frame.is_map else frame.total - frame.remaining - 1 for frame in inner)
        error.offset = self._at if error.offset is None else error.offset
        error.path = error.path or tuple(str(key) for key in keys if key is not _NO_KEY) or None
        return error
