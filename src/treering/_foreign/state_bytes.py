"""State dict <-> bytes in memory, and a state dict that was read -> the structure of its target.

``b"".join`` on a gigabyte spends most of its time in page faults of 4 KiB each. Here CPython's own constructor for a
bytes object of unset content (https://docs.python.org/3/c-api/bytes.html#c.PyBytes_FromStringAndSize) gives the memory,
the kernel is asked for huge pages, and two threads fill it before anybody else sees the object. Where one of these is
missing, ``b"".join`` does it. On the way back numpy leaves go onto devices, without a copy if possible.
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

import jax
import numpy as np

from treering._arrays.delivered import device_put
from treering._arrays.host import encode_state, jax_holds, piece_buffers
from treering._codec.msgpack.scan import MAX_DEPTH, WINDOW_BYTES
from treering._codec.msgpack.write import Piece, pieces_size, vary
from treering._foreign.msgpack_source import read_state, scan_views
from treering._store.crew import FirstError, work_together
from treering._store.failures import naming_file
from treering._store.pieces import Readable, is_lasting
from treering._store.resolve import file_path, name_of, needs_nonce, new_file_path, open_file, write_file, write_stream
from treering._tree.placement import aval_of, is_concrete, resolve_shardings
from treering._tree.state_dict import from_state_dict, partial_state_dict, require_match, to_state_dict
from treering._values.human import pluralize
from treering._values.keys import Trail, join_key, unwind
from treering._values.telemetry import report
from treering.errors import FormatError, MismatchError, StoreError, TreeringError, UnsupportedError

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    refuse_gzip(bytes(source[:2]))
    return scan_views(source, allowance)


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


_COPY_BYTES: Final = 4 * 1024 * 1024
_HUGE_PAGE: Final = 2 * 1024 * 1024
_MADV_HUGEPAGE: Final = 14

_Copy = tuple[int, "NDArray[np.uint8]"]


def join_pieces(pieces: list[Piece]) -> bytes:
    """Return the concatenation of the pieces."""
    small = [piece for piece in pieces if isinstance(piece, bytes)]
    if len(small) == len(pieces):
        return b"".join(small)
    if (size := pieces_size(pieces)) < _COPY_BYTES or sys.implementation.name != "cpython":
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
        # The whole huge pages inside the range; the kernel may say no, which only costs time.
        start = _address(made)
        first = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        if (length := (start + size - first) // _HUGE_PAGE * _HUGE_PAGE) > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
    return made


def _address(data: bytes) -> int:
    get = ctypes.pythonapi["PyBytes_AsString"]
    get.argtypes, get.restype = (ctypes.py_object,), ctypes.c_void_p
    address: int = get(data)
    return address


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
        with naming_file(path), open_file(path) as file:
            first = file.read(0, min(file.size, WINDOW_BYTES))
            refuse_gzip(first)
            check = functools.partial(require_match, target) if strict else None
            state = read_state(file, first, mapped=mapped, check=check, sealed=True)
        return restore_into(target, state, strict=strict and mapped, to_jax=to_jax, shardings=shardings)


def _neither(given: object) -> UnsupportedError:
    return UnsupportedError(f"a file is a path or an open binary file, not {type(given).__name__}")


def _read_open(file: BinaryIO) -> bytes | bytearray | memoryview:
    given: object = file
    if not hasattr(file, "read"):
        raise _neither(file)
    try:
        data = b"" if isinstance(given, io.TextIOBase) else file.read()
    except OSError as error:  # of a file that is open for writing too
        raise StoreError.of(error, name_of(file), "read") from error
    if isinstance(given, io.TextIOBase) or not isinstance(data, bytes | bytearray | memoryview):
        raise UnsupportedError("the file is open for text", hint='open it in binary mode, "rb"')
    return data


# An array in a container: the container, its key there, where it goes, and its key path.
_Slot = tuple[Any, Any, Any, Trail]

_SMALL_BYTES: Final = 1024 * 1024
_TOGETHER: Final = 256
_NO_PREFIX: Final = "shardings is not a prefix of the tree"


def place(state: Any, target: Any, shardings: Any) -> Any:
    """Put every numpy array in ``state`` on devices and return it; other leaves stay.

    The containers of ``state`` are changed in place, so that each array is let go as soon as it is on its devices.

    Args:
        state: a state dict that nobody else holds, and whose arrays nobody can write to: jax may alias them.
        target: the pytree that the state is for, or None; tells which keys ``shardings`` must cover.
        shardings: None for the default device, one Sharding or Device, or a prefix tree of them (None = default).

    Raises:
        UnsupportedError: a 64-bit array while jax has x64 off, or a dtype that jax does not have; nothing is cast.
        MismatchError: ``shardings`` is no prefix of the tree, or does not divide an array.
    """
    prefix = to_state_dict(shardings)
    wanted = to_state_dict(target) if isinstance(prefix, dict) and target is not None else state
    root = [state]
    small: list[_Slot] = []
    tuples: list[tuple[Any, Any]] = []
    pending: list[tuple[Any, Any, Any, Any, Trail]] = [(root, 0, prefix, wanted, None)]
    while pending:
        holder, slot, prefix, wanted, trail = pending.pop()
        value = holder[slot]
        if isinstance(value, np.ndarray):
            small.append((holder, slot, prefix, trail))
            if value.nbytes > _SMALL_BYTES or len(small) == _TOGETHER:
                _put_all(small)
                small.clear()
        elif isinstance(value, dict | list | tuple):
            if isinstance(value, tuple):
                value = holder[slot] = list(value)
                tuples.append((holder, slot))
            _require_wanted(prefix, wanted, trail)
            keys = value if isinstance(value, dict) else range(len(value))
            for key in keys:
                below: Trail = (trail, str(key))
                if (part := _part_of(prefix, wanted, str(key), below)) is not None:
                    pending.append((value, key, part[0], part[1], below))
    if small:
        _put_all(small)
    for holder, slot in reversed(tuples):
        holder[slot] = tuple(holder[slot])
    return root[0]


def _require_wanted(prefix: Any, wanted: Any, trail: Trail) -> None:
    """Refuse a sharding for what is not there: a mistyped key must not leave an array on the default device."""
    both = isinstance(prefix, dict) and isinstance(wanted, dict)
    if stray := [key for key in prefix if key not in wanted] if both else []:
        what = f"shardings has {stray[0]!r:.200}, which the tree does not have"
        raise MismatchError(what, path=unwind(trail) or None)


def _part_of(prefix: Any, wanted: Any, key: str, trail: Trail) -> tuple[Any, Any] | None:
    """Return what the prefix and the target have for ``key``; None where the target takes no such key."""
    below = wanted.get(key) if isinstance(wanted, dict) else None
    if not isinstance(prefix, dict):
        return prefix, below
    if key in prefix:
        return prefix[key], below
    if isinstance(wanted, dict) and key not in wanted:
        return None
    hint = "None there means the default device"
    raise MismatchError(f"{_NO_PREFIX}: it has no entry for this leaf", path=unwind(trail), hint=hint)


def _put_all(slots: list[_Slot]) -> None:
    """Put the arrays in these slots on their devices with one call, which costs half of a call for each."""
    arrays = [holder[slot] for holder, slot, _, _ in slots]
    shardings = []
    for array, (_, _, sharding, trail) in zip(arrays, slots, strict=True):
        if isinstance(sharding, dict):
            raise MismatchError(f"{_NO_PREFIX}: it continues below this array", path=unwind(trail))
        if not jax_holds(array.dtype):
            what = f"jax cannot hold {array.dtype.name} as configured, and treering casts nothing"
            hint = "set jax_enable_x64 for 64-bit numbers, or load without to_jax and convert"
            raise UnsupportedError(what, path=unwind(trail), hint=hint)
        shardings.append(_with_devices(array, sharding, trail))
    try:
        # None inside a list of shardings would be no leaf for jax, so equal ones are given once.
        if all(sharding is shardings[0] for sharding in shardings):
            placed = device_put(arrays, shardings[0])
        else:
            placed = [device_put(*pair) for pair in zip(arrays, shardings, strict=True)]
    except (ValueError, TypeError, NotImplementedError):
        placed = [_put(array, place, slot[3]) for array, place, slot in zip(arrays, shardings, slots, strict=True)]
    for array, (holder, slot, _, _) in zip(placed, slots, strict=True):
        holder[slot] = array


def _with_devices(array: np.ndarray[Any, Any], sharding: Any, trail: Trail) -> Any:
    """Return the sharding; one of an abstract mesh on the current mesh of devices.

    Raises:
        MismatchError, UnsupportedError: there is none, or an array cannot be laid out so.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or is_concrete(sharding):
        return sharding
    key = join_key(unwind(trail))
    return resolve_shardings(sharding, None, {key: aval_of(array.shape, array.dtype)}, [key])[key]


def _put(array: np.ndarray[Any, Any], sharding: Any, trail: Trail) -> Any:
    """Put one array, and name it where jax refuses it."""
    try:
        return device_put(array, sharding)
    except (ValueError, TypeError, NotImplementedError) as error:
        what = f"an array of shape {array.shape} cannot be placed on {sharding}: {error}"
        raise MismatchError(what, path=unwind(trail)) from error


def restore_into(target: Any, state: Any, *, strict: bool, to_jax: bool, shardings: Any) -> Any:
    """Return ``target``'s structure with the leaves of ``state``, whose containers may change on the way.

    ``shardings`` implies ``to_jax``.
    """
    if strict:
        require_match(target, state)
    if to_jax or shardings is not None:
        state = place(state, target, shardings)
    return from_state_dict(target, state)
