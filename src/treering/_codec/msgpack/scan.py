"""The bytes of a msgpack file -> a tree, reading headers only and trusting none of them.

Every length, count, shape, dtype name and depth is checked against the bytes that are there before anything is
allocated or opened. Arrays are handed to a ``Leaves`` by position: it may make views of a buffer, plan reads, or only
keep a record. Nothing here recurses, so depth costs memory in proportion and is bounded.

``Scanner._take_arrays`` is the hot path (10,000 small leaves in a few hundredths of a second): it compares a whole
array header at once with the last one of that length, and leaves everything unusual to the careful methods.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, NoReturn, Protocol

import msgpack

from treering._codec.msgpack.chunks import ChunkedArray, chunked_array
from treering._codec.msgpack.wire import (
    CHUNK_MARKER,
    EXT_ARRAY,
    EXT_COMPLEX,
    EXT_SCALAR,
    EXT_TIMESTAMP,
    EXT_TUPLE,
    MAX_DEPTH,
    MAX_NDIM,
)
from treering._values.dtypes import Dtype, lookup
from treering.errors import Corrupt, Format, TreeringError

__all__ = ["Leaves", "Scanner"]

WINDOW_BYTES: Final = 64 * 1024
_SLACK: Final = 1024  # more than any key of one length byte, ext header and inner array header together
_NEVER: Final = 2**63

# What CPython takes for an empty dict or list with its first slots: an estimate that hostile nesting is held to.
_CONTAINER_BYTES: Final = {True: 256, False: 128}
_CONTAINER_ALLOWANCE: Final = 32 * 2**20
_CONTAINER_RATIO: Final = 64

_ARRAY_CODES: Final = (EXT_ARRAY, EXT_SCALAR)
_LONGEST_DIM: Final = 2**63 - 1


class Leaves(Protocol):
    """What becomes of the leaves: views, planned reads, or records."""

    def prepare(self, dtype: Dtype) -> Any:
        """Return what ``array`` wants as dtype; called once for each distinct header."""

    def array(self, shape: tuple[int, ...], dtype: Any, offset: int) -> object:
        """Return the array of that shape and dtype whose bytes start at ``offset``."""

    def scalar(self, shape: tuple[int, ...], dtype: Any, offset: int) -> object:
        """Return the numpy scalar whose bytes start at ``offset``; ``shape`` is ()."""

    def chunked(self, parts: ChunkedArray) -> object:
        """Return the one array that these flat parts make."""

    def blob(self, read: Callable[[], bytes], offset: int, nbytes: int, is_text: bool) -> object:
        """Return the leaf for a str or bytes; ``read`` fetches it when it is wanted."""


class UnhashableKey(Corrupt, TypeError):
    """flax raises TypeError for a map key that cannot be hashed."""


class UnknownDtype(Format, TypeError):
    """flax raises TypeError for a dtype name that numpy does not know."""


_NO_KEY: Final = object()


class _Frame:
    """An open container."""

    __slots__ = ("container", "is_map", "key", "offset", "remaining", "total", "tuple_end")

    def __init__(self, is_map: bool, total: int, offset: int) -> None:
        self.container: Any = {} if is_map else []
        self.is_map = is_map
        self.total = self.remaining = total
        self.offset = offset
        self.key: Any = _NO_KEY
        self.tuple_end: int | None = None


class Scanner:
    r"""One pass over one msgpack object that must fill its source exactly.

    Args:
        first: the bytes at the start of the source, or all of them.
        size: bytes in the whole source.
        fetch: ``fetch(offset, n)`` returns exactly ``n`` bytes; only asked for bytes that are there.
        leaves: makes the leaves.

    Example:
        >>> from treering._codec.msgpack.views import Views
        >>> data = b"\x82\xa1a\x01\xa1b\xc0"
        >>> Scanner(data, len(data), lambda offset, n: data[offset : offset + n], Views(data)).run()
        {'a': 1, 'b': None}
    """

    def __init__(self, first: bytes, size: int, fetch: Callable[[int, int], bytes], leaves: Leaves) -> None:
        self._window = first
        self._base = 0
        self._size = size
        self._fetch = fetch
        self._leaves = leaves
        # The open containers, innermost last. The first holds the root, as a list of one.
        self._frames: list[_Frame] = [_Frame(False, 1, 0)]
        self._headers: dict[int, tuple[bytes, tuple[int, ...], Any, int]] = {}
        self._allowance = _CONTAINER_ALLOWANCE + _CONTAINER_RATIO * size
        # Index in the window of what is read next, and offset in the source of the item being read.
        self._next = 0
        self._at = 0

    def run(self) -> object:
        """Return the tree.

        Raises:
            Corrupt: lengths, counts or shapes that contradict the bytes, duplicate keys, trailing bytes.
            Format: an ext code or dtype name that this version does not know.
        """
        try:
            return self._run()
        except (IndexError, struct.error):
            self._fail_short(self._size)
        except UnicodeDecodeError as error:
            raise self._placed(Corrupt(f"a str is not valid UTF-8: {error.reason}"), self._at) from None
        except TreeringError as error:
            raise self._placed(error, self._at) from error.__cause__

    def _run(self) -> object:
        frames = self._frames
        while True:
            frame = frames[-1]
            if frame.is_map and frame.remaining:
                self._take_arrays(frame)
            if not frame.remaining:
                value = self._closed(frame)
                frames.pop()
                if not frames:
                    return value
                self._put(frames[-1], value)
                continue
            frame.remaining -= 1
            self._refill()
            self._at = self._base + self._next
            if frame.is_map:
                self._take_key(frame)
                self._refill()
                self._at = self._base + self._next
            first = self._window[self._next]
            if 0x80 <= first <= 0x9F or 0xDC <= first <= 0xDF:
                self._open(first)
            elif 0xC7 <= first <= 0xC9 or 0xD4 <= first <= 0xD8:
                self._take_ext(frame, first)
            else:
                value, self._next = self._plain(first, self._next)
                self._put(frame, value)

    def _take_arrays(self, frame: _Frame) -> None:
        """Take pairs of a short key and an array whose header is a known one, for as long as they come.

        This is the hot path. It raises nothing: at whatever is unusual it stops, and the item is read again with care.
        """
        window, base, headers, make = self._window, self._base, self._headers, self._leaves.array
        container, remaining, at = frame.container, frame.remaining, self._next
        safe, limit = self._safe_end(), self._size - base
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
                container[key] = make(known[1], known[2], base + start + known[3])
                remaining -= 1
                at = end
        except (IndexError, UnicodeDecodeError):
            pass
        frame.remaining, self._next = remaining, at

    def _put(self, frame: _Frame, value: object) -> None:
        if frame.is_map:
            frame.container[frame.key] = value
        else:
            frame.container.append(value)

    # ---- the window

    def _safe_end(self) -> int:
        """Return the window index up to which an item's headers surely lie inside the window."""
        reaches_the_end = self._base + len(self._window) >= self._size
        return _NEVER if reaches_the_end else len(self._window) - _SLACK

    def _refill(self) -> None:
        """Move the window where it ends too close behind the next item."""
        if self._next >= self._safe_end():
            offset = self._base + self._next
            self._window = self._fetch(offset, min(WINDOW_BYTES, self._size - offset))
            self._base, self._next = offset, 0

    def _read(self, at: int, nbytes: int) -> bytes:
        """Return ``nbytes`` from window index ``at`` on, from the source where the window ends before."""
        self._need(at, nbytes)
        if at + nbytes <= len(self._window):
            return self._window[at : at + nbytes]
        return self._fetch(self._base + at, nbytes)

    def _need(self, at: int, nbytes: int) -> None:
        if self._base + at + nbytes > self._size:
            self._fail_short(self._base + at + nbytes)

    def _unsigned(self, at: int, width: int) -> int:
        field = self._window[at : at + width]
        if len(field) != width:
            raise IndexError
        return int.from_bytes(field, "big")

    # ---- containers

    def _open(self, first: int) -> _Frame:
        """Open the map or array whose header is next."""
        offset, at = self._base + self._next, self._next
        if first <= 0x9F:
            is_map, total, at = first <= 0x8F, first & 0x0F, at + 1
        else:
            is_map = first >= 0xDE
            width = 4 if first & 1 else 2
            total, at = self._unsigned(at + 1, width), at + 1 + width
        left = self._size - self._base - at
        if total * (1 + is_map) > left:
            kind = "map" if is_map else "array"
            raise Corrupt(f"a {kind} claims {total} items, but only {left} bytes follow")
        if len(self._frames) > MAX_DEPTH:
            raise Corrupt(f"the file nests more than {MAX_DEPTH} containers")
        self._allowance -= _CONTAINER_BYTES[is_map]
        if self._allowance < 0:
            raise Corrupt(
                f"the {self._size} bytes hold so many nested containers that they would fill"
                f" more than {_CONTAINER_RATIO} times their size in memory"
            )
        frame = _Frame(is_map, total, offset)
        self._frames.append(frame)
        self._next = at
        return frame

    def _open_tuple(self, start: int, end: int) -> None:
        """Open the payload of ext 4: Orbax's tuple, an array that fills the payload."""
        first = self._window[start]
        if not (0x90 <= first <= 0x9F or 0xDC <= first <= 0xDD):
            raise Corrupt("the payload of a tuple (ext 4) is not an array")
        self._next = start
        self._open(first).tuple_end = self._base + end

    def _closed(self, frame: _Frame) -> object:
        """Return the value of a container whose last item has been read."""
        container, offset = frame.container, self._base + self._next
        if len(self._frames) == 1:
            self._at = offset
            if offset != self._size:
                raise Corrupt(f"{self._size - offset} bytes follow the end of the tree")
            return container[0]
        if frame.is_map:
            if CHUNK_MARKER in container:
                self._at, frame.key = frame.offset, _NO_KEY
                return self._leaves.chunked(chunked_array(container))
        elif frame.tuple_end is not None:
            if offset != frame.tuple_end:
                raise Corrupt(f"a tuple (ext 4) should end at byte {frame.tuple_end}, its items end at {offset}")
            return tuple(container)
        return container

    # ---- keys and leaves

    def _take_key(self, frame: _Frame) -> None:
        first = self._window[self._next]
        if 0xA0 <= first <= 0xBF:
            start, nbytes = self._next + 1, first & 0x1F
            key: Any = self._read(start, nbytes).decode()
            self._next = start + nbytes
        else:
            key, self._next = self._rare_key(first, self._next)
        frame.key = key
        if key in frame.container:
            raise Corrupt(f"the key {key!r:.80} stands twice in one map")

    def _rare_key(self, first: int, at: int) -> tuple[Any, int]:
        """Read a map key that is not a str of up to 31 bytes."""
        if 0x80 <= first <= 0x9F or 0xDC <= first <= 0xDF:
            raise UnhashableKey("a map or an array stands where a map key belongs")
        if 0xD9 <= first <= 0xDB or 0xC4 <= first <= 0xC6:
            start, nbytes, is_text = self._blob_header(first, at)
            raw = self._read(start, nbytes)
            return (raw.decode() if is_text else raw), start + nbytes
        if 0xC7 <= first <= 0xC9 or 0xD4 <= first <= 0xD8:
            nbytes, code, start = self._ext_header(first, at)
            self._need(start, nbytes)
            if code != EXT_COMPLEX:
                raise UnhashableKey(f"ext code {code} stands where a map key belongs")
            return self._complex(start, nbytes), start + nbytes
        return self._number(first, at)

    def _take_ext(self, frame: _Frame, first: int) -> None:
        nbytes, code, start = self._ext_header(first, self._next)
        self._need(start, nbytes)
        if code == EXT_TUPLE:
            self._open_tuple(start, start + nbytes)
            return
        if code in _ARRAY_CODES:
            _, shape, dtype, skip = self._array_header(start, nbytes, code)
            make = self._leaves.array if code == EXT_ARRAY else self._leaves.scalar
            value = make(shape, dtype, self._base + start + skip)
        else:
            value = self._rare_ext(code, start, nbytes)
        self._put(frame, value)
        self._next = start + nbytes

    def _plain(self, first: int, at: int) -> tuple[object, int]:
        """Read a leaf that is no ext: nil, bool, a number, str or bytes."""
        if 0xA0 <= first <= 0xBF or 0xD9 <= first <= 0xDB or 0xC4 <= first <= 0xC6:
            start, nbytes, is_text = self._blob_header(first, at)
            self._need(start, nbytes)
            offset = self._base + start
            return self._leaves.blob(lambda: self._read(start, nbytes), offset, nbytes, is_text), start + nbytes
        return self._number(first, at)

    def _number(self, first: int, at: int) -> tuple[object, int]:
        if first <= 0x7F:
            return first, at + 1
        if first >= 0xE0:
            return first - 0x100, at + 1
        if first == 0xC0:
            return None, at + 1
        if first in (0xC2, 0xC3):
            return first == 0xC3, at + 1
        form = _NUMBERS.get(first)
        if form is None:
            raise Corrupt(f"byte 0x{first:02x} starts no msgpack item")
        return form.unpack_from(self._window, at + 1)[0], at + 1 + form.size

    def _blob_header(self, first: int, at: int) -> tuple[int, int, bool]:
        """Return where a str or bin starts, its length, and whether it is a str."""
        if first <= 0xBF:
            return at + 1, first & 0x1F, True
        is_text = first >= 0xD9
        width = 1 << (first - (0xD9 if is_text else 0xC4))
        return at + 1 + width, self._unsigned(at + 1, width), is_text

    def _ext_header(self, first: int, at: int) -> tuple[int, int, int]:
        """Return payload length, code (signed) and the index where the payload starts."""
        if first >= 0xD4:
            nbytes, at = 1 << (first - 0xD4), at + 1
        else:
            width = 1 << (first - 0xC7)
            nbytes, at = self._unsigned(at + 1, width), at + 1 + width
        code = self._window[at]
        return nbytes, code - 0x100 if code > 0x7F else code, at + 1

    def _rare_ext(self, code: int, start: int, nbytes: int) -> object:
        """Read an ext leaf that is no array and no tuple."""
        if code == EXT_COMPLEX:
            return self._complex(start, nbytes)
        if code == EXT_TIMESTAMP and nbytes in (4, 8, 12):
            try:
                return msgpack.Timestamp.from_bytes(self._read(start, nbytes))
            except ValueError as error:
                raise Corrupt(f"a time stamp does not hold a time: {error}") from None
        raise Format(
            f"ext code {code} is unknown; known are 1 (array), 2 (complex), 3 (numpy scalar), 4 (tuple), -1 (time)",
            hint="read the file with the tool that wrote it",
        )

    def _complex(self, start: int, nbytes: int) -> complex:
        payload = self._read(start, nbytes) if nbytes == 19 else b""
        if payload[:2] != b"\x92\xcb" or payload[10:11] != b"\xcb":
            raise Corrupt("a complex number (ext 2) is not a pair of float64")
        real, imag = struct.unpack(">dxd", payload[2:])
        return complex(real, imag)

    # ---- array headers

    def _array_header(self, start: int, nbytes: int, code: int) -> tuple[bytes, tuple[int, ...], Any, int]:
        """Check the inner header of an array payload; return its bytes, shape, dtype and its length.

        Source of the layout: docs/spec/msgpack.md: array of three, the shape, the dtype name, a bin.
        """
        at, end = start, start + nbytes
        if self._window[at] != 0x93 or nbytes < 5:
            raise Corrupt("an array's payload is not [shape, dtype, bytes]")
        shape, at = self._shape(at + 1)
        if code == EXT_SCALAR and shape:
            raise Corrupt(f"a numpy scalar claims the shape {shape}")
        first = self._window[at]
        if not (0xA0 <= first <= 0xBF or first == 0xD9):
            raise Corrupt("an array's dtype name is not a str")
        begin, length, _ = self._blob_header(first, at)
        name, at = self._window[begin : begin + length], begin + length
        dtype = lookup(name.decode("ascii", "backslashreplace"))
        if dtype is None:
            raise UnknownDtype(f"the dtype name {name[:64]!r} is not one that a file may hold")
        first = self._window[at]
        if not 0xC4 <= first <= 0xC6:
            raise Corrupt("an array's bytes are not a bin")
        at, length, _ = self._blob_header(first, at)
        wanted = dtype.itemsize
        for dim in shape:
            wanted *= dim
        if wanted != length:
            raise Corrupt(
                f"an array of shape {shape} and dtype {dtype.name} needs {wanted} bytes, its header claims {length}"
            )
        if at + length != end:
            raise Corrupt(f"an array's payload of {nbytes} bytes holds {at - start} + {length}")
        known = (self._window[start:at], shape, self._leaves.prepare(dtype), at - start)
        if code == EXT_ARRAY:
            self._headers[nbytes] = known
        return known

    def _shape(self, at: int) -> tuple[tuple[int, ...], int]:
        first = self._window[at]
        if 0x90 <= first <= 0x9F:
            ndim, at = first & 0x0F, at + 1
        elif first == 0xDC:
            ndim, at = self._unsigned(at + 1, 2), at + 3
        else:
            raise Corrupt("an array's shape is not a list of lengths")
        if ndim > MAX_NDIM:
            raise Corrupt(f"an array claims {ndim} axes; {MAX_NDIM} is the most")
        shape = []
        for _ in range(ndim):
            dim, at = self._number(self._window[at], at)
            if type(dim) is not int or not 0 <= dim <= _LONGEST_DIM:
                raise Corrupt(f"an array claims an axis of length {dim}")
            shape.append(dim)
        if 0 in shape and _nonzero_product(shape) > _LONGEST_DIM:
            raise Corrupt(f"an empty array claims the impossible shape {tuple(shape)}")
        return tuple(shape), at

    # ---- failures

    def _path(self) -> tuple[str, ...]:
        inner = self._frames[1:]
        keys = (frame.key if frame.is_map else frame.total - frame.remaining - 1 for frame in inner)
        return tuple(str(key) for key in keys if key is not _NO_KEY)

    def _placed(self, error: TreeringError, offset: int) -> TreeringError:
        if error.offset is None:
            error.offset = offset
        if error.path is None:
            error.path = self._path() or None
        return error

    def _fail_short(self, wanted: int) -> NoReturn:
        if not self._size:
            raise self._placed(Corrupt("there are no bytes: the input is empty"), 0)
        more = f"; at least {wanted} were needed" if wanted > self._size else ""
        raise self._placed(Corrupt(f"the data is cut short: it ends after {self._size} bytes{more}"), self._at)


_NUMBERS: Final = {
    0xCA: struct.Struct(">f"),
    0xCB: struct.Struct(">d"),
    0xCC: struct.Struct(">B"),
    0xCD: struct.Struct(">H"),
    0xCE: struct.Struct(">I"),
    0xCF: struct.Struct(">Q"),
    0xD0: struct.Struct(">b"),
    0xD1: struct.Struct(">h"),
    0xD2: struct.Struct(">i"),
    0xD3: struct.Struct(">q"),
}


def _nonzero_product(shape: list[int]) -> int:
    product = 1
    for dim in shape:
        product *= dim or 1
    return product
