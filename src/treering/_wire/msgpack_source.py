"""A msgpack file as a source of leaves: its state dict, whose arrays are in memory once it is read. No jax."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treering._arrays.buffers import SMALL_BYTES, SmallRoom, aligned_bytes
from treering._arrays.source import Source, held_index
from treering._codec.gzip import GZIP_MAGIC, decompress
from treering._codec.msgpack.arrays import ChunkedArray
from treering._codec.msgpack.scan import Scanner
from treering._codec.msgpack.views import Views
from treering._codec.msgpack.window import WINDOW_BYTES
from treering._format.index import Container, Token
from treering._store.api import Reader
from treering._store.resolve import open_file
from treering._values.dtypes import Dtype, numpy_dtype
from treering._values.keys import Trail, join_key, unwind
from treering.errors import Corrupt, Format

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PlannedArrays:
    """Allocates an array for each array in the file and remembers which bytes it wants.

    Args:
        read: ``read(offset, n)`` returns exactly ``n`` bytes of the file; used for numpy scalars.
    """

    def __init__(self, read: Callable[[int, int], bytes]) -> None:
        self._read = read
        self._small = SmallRoom()
        self._jobs: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        self._results: list[NDArray[Any]] = []

    def reads(self) -> list[tuple[int, memoryview]]:
        """Return (file offset, where to) for all bytes that are wanted, in file order."""
        return [(offset, raw.data) for offset, raw in self._jobs.values()]

    def seal(self) -> None:
        """Make every array read-only, as flax's are."""
        for array in self._results:
            array.flags.writeable = False

    def prepare(self, dtype: Dtype) -> np.dtype[Any]:
        """Return the numpy dtype."""
        return numpy_dtype(dtype)

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, data: bytes, at: int) -> NDArray[Any]:
        """Return an array whose bytes are still to be read from ``offset``; a small one is copied from the window."""
        count = 1
        for length in shape:
            count *= length
        nbytes = count * dtype.itemsize
        if nbytes <= SMALL_BYTES and at + nbytes <= len(data):
            return np.ndarray(shape, dtype, *self._small.keep(data[at : at + nbytes]))
        raw = aligned_bytes(nbytes)
        result = np.ndarray(shape, dtype, raw)
        self._jobs[id(result)] = (offset, raw)
        self._results.append(result)
        return result

    def scalar(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> object:
        """Return the numpy scalar at ``offset``, read now."""
        return np.ndarray(shape, dtype, self._read(offset, dtype.itemsize))[()]

    def join_chunks(self, parts: ChunkedArray) -> NDArray[Any]:
        """Return one array whose pieces are read straight into their places."""
        first: NDArray[Any] = parts.parts[0]
        itemsize = first.dtype.itemsize
        raw = aligned_bytes(sum(part.size for part in parts.parts) * itemsize)
        at = 0
        for part in parts.parts:
            place = raw[at : at + part.nbytes]
            if id(part) in self._jobs:
                self._jobs[id(part)] = (self._jobs[id(part)][0], place)
            else:
                place[:] = part.view(np.uint8)
            at += part.nbytes
        result = np.ndarray(parts.shape, first.dtype, raw)
        self._results.append(result)
        return result

    def blob(self, read: Callable[[], bytes], offset: int, nbytes: int, is_text: bool) -> object:
        """Return the str or bytes, read now."""
        del offset, nbytes
        return read().decode() if is_text else read()


_KINDS: Final = {
    "NoneType": "none",
    "bool": "bool",
    "int": "int",
    "float": "float",
    "complex": "complex",
    "str": "str",
    "bytes": "bytes",
    "ndarray": "numpy",
}


def open_msgpack(path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool) -> Source:
    """Read a msgpack file, or one in gzip form.

    Raises:
        Corrupt, Format, StoreFailed: it is damaged; the system refuses.
    """
    del files  # nothing stays open
    try:
        with open_file(path) as file:
            state = _read(file, mapped=mapped)
    except (Corrupt, Format) as error:
        error.message = f"{os.fspath(path)!r}: {error.message}"
        raise
    structure, keys, leaves = _flatten(state)
    kinds = [_KINDS.get(type(leaf).__name__, "numpy scalar" if hasattr(leaf, "dtype") else "opaque") for leaf in leaves]
    index, arrays = held_index(structure, keys, kinds, leaves)
    return Source(index, arrays, structured=False, raw_keys=True, mapped=mapped, held=True)


def _read(file: Reader, *, mapped: bool) -> Any:
    first = file.read(0, min(file.size, WINDOW_BYTES))
    if first.startswith(GZIP_MAGIC):
        data = decompress(file.read(0, file.size), None)
        return Scanner(data[:WINDOW_BYTES], len(data), lambda at, n: data[at : at + n], Views(data)).run()
    if mapped:
        return Scanner(first, file.size, file.read, Views(file.map())).run()
    arrays = PlannedArrays(file.read)
    state = Scanner(first, file.size, file.read, arrays).run()
    file.read_into(arrays.reads())
    return state


def _flatten(state: Any) -> tuple[list[Token], list[str], list[Any]]:
    """Return the containers, keys and leaves of nested dicts, lists and tuples, in order."""
    structure: list[Token] = []
    keys: list[str] = []
    leaves: list[Any] = []
    pending: list[tuple[Trail, Any]] = [(None, state)]
    while pending:
        trail, value = pending.pop()
        if isinstance(value, dict | list | tuple):
            names = tuple(value) if isinstance(value, dict) else tuple(range(len(value)))
            children = value.values() if isinstance(value, dict) else value
            structure.append(Container(node=type(value).__name__, keys=names))
            below = [((trail, str(name)), child) for name, child in zip(names, children, strict=True)]
            pending.extend(reversed(below))
            continue
        keys.append(join_key(unwind(trail)))
        leaves.append(value)
        if structure and isinstance(structure[-1], int):
            structure[-1] += 1
        else:
            structure.append(1)
    return structure, keys, leaves
