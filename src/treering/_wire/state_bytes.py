"""State dict <-> bytes in memory; the pieces of a state are joined into one ``bytes`` object that is filled once.

``b"".join`` on a gigabyte spends most of its time in page faults of 4 KiB each. Here CPython's own constructor for a
bytes object of unset content (https://docs.python.org/3/c-api/bytes.html#c.PyBytes_FromStringAndSize) gives the memory,
the kernel is asked for huge pages, and two threads fill it before anybody else sees the object. Where one of these is
missing, ``b"".join`` does it.
"""

from __future__ import annotations

import ctypes
import functools
import io
import os
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np

from treering._arrays.host import adopt, piece_buffers, to_host
from treering._codec.msgpack.scan import Scanner
from treering._codec.msgpack.views import Views
from treering._codec.msgpack.window import MAX_DEPTH, WINDOW_BYTES
from treering._codec.msgpack.write import Encoder, Piece, pieces_size, vary
from treering._printable import show_path
from treering._store.crew import FirstError, work_together
from treering._store.pieces import Readable, is_lasting
from treering._store.posix.writing import write_stream
from treering._store.resolve import file_path, needs_nonce, new_file_path, open_file, write_file
from treering._tree.state_dict import partial_state_dict, require_match
from treering._values.human import pluralize
from treering._values.keys import Trail, unwind
from treering._values.telemetry import report
from treering._wire.msgpack_source import read_state
from treering._wire.restore import restore_into
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def encode_state(state: Any, *, chunk_size: int, sort_keys: bool = False) -> list[Piece]:
    """Return the pieces of the msgpack form of a tree of dicts and lists."""
    return Encoder(adopt, to_host, max(0, chunk_size), sort_keys).encode(state)


def pack(pytree: Any, *, chunk_size: int, sort_keys: bool) -> bytes:
    """Return the msgpack form of a tree of dicts and lists; ``sort_keys`` orders every dict as jax does."""
    return join_pieces(encode_state(pytree, chunk_size=chunk_size, sort_keys=sort_keys))


def unpack(encoded: Readable, *, allowance: int | None = None) -> Any:
    """Return the state dict in ``encoded``.

    Arrays are read-only views of bytes and of read-only maps; of anything that somebody could still write to, a copy
    is taken first. ``allowance`` is that of the scanner.
    """
    view = memoryview(encoded)
    owner = view.obj
    if not view.c_contiguous or not is_lasting(owner):
        return unpack(view.tobytes(), allowance=allowance)
    source: Any = owner if view.nbytes == len(owner) else view.cast("B")  # type: ignore[arg-type]
    first = source if isinstance(source, bytes) else bytes(source[:WINDOW_BYTES])
    refuse_gzip(first)
    size, leaves = len(source), Views(source)
    return Scanner(first, size, lambda at, n: bytes(source[at : at + n]), leaves, allowance=allowance).run()


def refuse_gzip(first: bytes) -> None:
    """Tell a gzip file from a damaged msgpack one."""
    if first[:2] == b"\x1f\x8b":
        hint = "read it with from_compressed_bytes or decompress_bytes"
        raise FormatError("this is gzip, not bare msgpack", offset=0, hint=hint)


def unserializable(pytree: Any, *, chunk_size: int) -> list[str]:
    """Return one line for each thing in ``pytree`` that ``to_bytes`` would refuse."""
    state, refused = partial_state_dict(pytree)
    issues = [str(error) for error in refused]
    pending: list[tuple[int, Trail, Any]] = [(0, None, state)]
    while pending:
        depth, trail, value = pending.pop()
        if depth > MAX_DEPTH:  # a handler's dict may hold itself
            return [*issues, f"the tree is more than {MAX_DEPTH} containers deep; it may hold itself"]
        if type(value) is dict and value:
            pending.extend((depth + 1, (trail, str(key)), child) for key, child in reversed(value.items()))
            value = dict.fromkeys(value)  # its keys alone
        try:
            encode_state(value, chunk_size=chunk_size)
        except TreeringError as error:
            error.path = unwind(trail) + (error.path or ())
            issues.append(str(error))
    return issues


_WORTH_IT: Final = 4 * 1024 * 1024
_COPY_BYTES: Final = 4 * 1024 * 1024
_HUGE_PAGE: Final = 2 * 1024 * 1024
_MADV_HUGEPAGE: Final = 14

_Copy = tuple[int, "NDArray[np.uint8]"]


def join_pieces(pieces: list[Piece]) -> bytes:
    """Return the concatenation of the pieces."""
    small = [piece for piece in pieces if isinstance(piece, bytes)]
    if len(small) == len(pieces):
        return b"".join(small)
    if (size := pieces_size(pieces)) < _WORTH_IT or sys.implementation.name != "cpython":
        return b"".join(piece_buffers(pieces))
    result = _unset_bytes(size)
    if (written := _fill(result, _copies(pieces))) != size:
        raise AssertionError(f"the pieces announced {pluralize(size, 'bytes')} and gave {written}")
    return result


def _copies(pieces: list[Piece]) -> Iterator[_Copy]:
    """Yield where each run of bytes belongs, and the run; converted arrays live only until they are copied."""
    at = 0
    for buffer in piece_buffers(pieces):
        source = np.frombuffer(buffer, np.uint8)
        for start in range(0, len(source), _COPY_BYTES):
            yield at + start, source[start : start + _COPY_BYTES]
        at += len(source)


def _unset_bytes(size: int) -> bytes:
    make = ctypes.pythonapi["PyBytes_FromStringAndSize"]  # by item: prototypes of our own, not everybody's
    make.argtypes, make.restype = (ctypes.c_void_p, ctypes.c_ssize_t), ctypes.py_object
    made: bytes = make(None, size)
    if sys.platform == "linux":
        _ask_for_huge_pages(_address(made), size)
    return made


def _address(data: bytes) -> int:
    get = ctypes.pythonapi["PyBytes_AsString"]
    get.argtypes, get.restype = (ctypes.py_object,), ctypes.c_void_p
    address: int = get(data)
    return address


def _ask_for_huge_pages(address: int, size: int) -> None:
    """Advise the whole huge pages inside the range; the kernel may say no, which only costs time."""
    first = -(-address // _HUGE_PAGE) * _HUGE_PAGE
    if (length := (address + size - first) // _HUGE_PAGE * _HUGE_PAGE) > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)


def _fill(result: bytes, copies: Iterator[_Copy]) -> int:
    """Copy every run to its place with two threads that take the next one in turn; return the bytes copied.

    The threads' frames keep ``result`` alive, so that an interrupt of the caller cannot free what they write to.
    """
    target = np.frombuffer((ctypes.c_char * len(result)).from_address(_address(result)), np.uint8)
    lock = threading.Lock()
    counts: list[int] = []
    failure = FirstError()

    def work(owner: bytes) -> None:
        count = 0
        with failure:
            while failure.error is None:
                with lock:
                    copy = next(copies, None)
                if copy is None:
                    break
                start, source = copy
                target[start : start + len(source)] = source
                count += len(source)
            counts.append(count)
        del owner

    work_together(lambda: work(result), 1)
    failure.reraise()
    return sum(counts)


PathOrFile = str | os.PathLike[str] | BinaryIO


def save(pieces: list[Piece], filepath: PathOrFile) -> None:
    """Write the pieces durably: to a path all or nothing, to an open file from where it stands."""
    if isinstance(filepath, str | os.PathLike):  # some path classes have a ``write`` too
        with report("save", filepath):
            path = new_file_path(filepath)
            pieces, unique = vary(pieces) if needs_nonce(path) else (pieces, False)
            write_file(path, piece_buffers(pieces), pieces_size(pieces), unique=unique)
    elif hasattr(filepath, "write"):
        write_stream(filepath, piece_buffers(pieces))
    else:
        raise _neither(filepath)


def load(target: Any, filepath: PathOrFile, *, strict: bool, to_jax: bool, shardings: Any, mapped: bool) -> Any:
    """Read a file into ``target``'s structure."""
    if not isinstance(filepath, str | os.PathLike):
        if mapped:
            raise UnsupportedError("an open file cannot be mapped", hint="pass its path")
        return restore_into(target, unpack(_read_open(filepath)), strict=strict, to_jax=to_jax, shardings=shardings)
    path = file_path(filepath)
    with report("load", path):
        try:
            with open_file(path) as file:
                first = file.read(0, min(file.size, WINDOW_BYTES))
                refuse_gzip(first)
                check = functools.partial(require_match, target) if strict else None
                state = read_state(file, first, mapped=mapped, check=check, sealed=True)
        except (CorruptError, FormatError) as error:
            error.message = f"{show_path(str(path))!r}: {error.message}"
            raise
        return restore_into(target, state, strict=strict and mapped, to_jax=to_jax, shardings=shardings)


def _neither(given: object) -> UnsupportedError:
    return UnsupportedError(f"a file is a path or an open binary file, not {type(given).__name__}")


def _read_open(file: BinaryIO) -> bytes | bytearray | memoryview:
    given: object = file
    if not hasattr(file, "read"):
        raise _neither(file)
    data = b"" if isinstance(given, io.TextIOBase) else file.read()
    if isinstance(given, io.TextIOBase) or not isinstance(data, bytes | bytearray | memoryview):
        raise UnsupportedError("the file is open for text", hint='open it in binary mode, "rb"')
    return data
