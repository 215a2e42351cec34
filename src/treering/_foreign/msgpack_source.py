"""A msgpack file as a source of leaves: its state dict, whose arrays are in memory once it is read. No jax."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from treering._arrays.incoming import StoredArrays
from treering._arrays.jobs import SMALL_BYTES, SmallRoom, aligned_bytes
from treering._arrays.source import HeldArrays, Source
from treering._codec.compression import GZIP_MAGIC, gzip_decompress
from treering._codec.msgpack.scan import WINDOW_BYTES, Scanner
from treering._format.index import Container, DataFile, Index, LeafType
from treering._format.listing import LeafRecord, list_msgpack
from treering._format.structure import flatten_nodes
from treering._store.api import Reader
from treering._store.failures import naming_file
from treering._store.open_folder import OpenedFiles
from treering._store.resolve import located, open_file
from treering._values.dtypes import Dtype, check_writable, numpy_dtype
from treering._values.keys import Trail, join_key, unwind

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

_WINDOW_BYTES: Final = 32 << 20  # read by several requests at once


def read_state(
    file: Reader, first: bytes, *, mapped: bool, check: Callable[[Any], object] | None = None, sealed: bool = False
) -> Any:
    """Return the state dict of a msgpack file.

    Headers are always read, which costs less than touching a map here and there.

    Args:
        file: the file.
        first: its first bytes.
        mapped: whether arrays are views of a map.
        check: looks at the state dict before its arrays are read.
        sealed: whether arrays that are read become read-only, as flax's are.
    """
    arrays = Views(file.map() if file.size else b"") if mapped else PlannedArrays()
    at_once = file.threads > Reader.threads and not mapped and check is None
    state = Scanner(first, file.size, file.read, arrays, step=_WINDOW_BYTES if at_once else None).run()
    if isinstance(arrays, PlannedArrays):
        if check is not None:
            check(state)
        file.read_into(arrays.reads())
        for array in arrays.results if sealed else ():
            array.flags.writeable = False
    return state


class _NumpyLeaves:
    """What is the same of leaves that become numpy's, wherever their memory is."""

    def prepare(self, dtype: Dtype) -> np.dtype[Any]:
        """Return the numpy dtype."""
        return numpy_dtype(dtype)

    def scalar(self, shape: tuple[int, ...], dtype: np.dtype[Any], _offset: int, data: bytes) -> object:
        """Return the numpy scalar of these bytes."""
        return np.ndarray(shape, dtype, data)[()]

    def blob(self, read: Callable[[], bytes], _offset: int, _nbytes: int, is_text: bool) -> object:
        """Return the str or bytes, read now."""
        return read().decode() if is_text else read()


class Views(_NumpyLeaves):
    """Makes every array a view of ``buffer``; only chunked arrays are put together in fresh memory.

    Args:
        buffer: what was scanned, readable for as long as any array lives; nobody may write to it.
    """

    def __init__(self, buffer: ReadableBuffer) -> None:
        self._buffer = buffer

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, _data: bytes, _at: int) -> NDArray[Any]:
        """Return the array at ``offset``, read-only."""
        return np.ndarray(shape, dtype, self._buffer, offset)

    def join_chunks(self, shape: tuple[int, ...], parts: list[Any]) -> NDArray[Any]:
        """Return the pieces joined, in fresh writable memory."""
        return np.concatenate(parts).reshape(shape)


def scan_views(source: Any, allowance: int | None = None) -> Any:
    """Return the state dict in bytes or in a view of them; its arrays are views too. ``allowance`` is the scanner's."""
    first = source if isinstance(source, bytes) else bytes(source[:WINDOW_BYTES])

    def fetch(offset: int, count: int) -> bytes:
        return bytes(source[offset : offset + count])

    return Scanner(first, len(source), fetch, Views(source), allowance=allowance).run()


class PlannedArrays(_NumpyLeaves):
    """Allocates an array for each array in the file and remembers which bytes it wants.

    Attributes:
        results: the arrays.
    """

    def __init__(self) -> None:
        self._small = SmallRoom()
        self._jobs: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        self.results: list[NDArray[Any]] = []

    def reads(self) -> list[tuple[int, memoryview]]:
        """Return (file offset, where to) for all bytes that are still wanted, in file order."""
        return [(offset, raw.data) for offset, raw in self._jobs.values() if raw.size]

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int, data: bytes, at: int) -> NDArray[Any]:
        """Return an array with what the window has of it; what follows is still to be read."""
        if (nbytes := math.prod(shape) * dtype.itemsize) <= SMALL_BYTES and at + nbytes <= len(data):
            return np.ndarray(shape, dtype, *self._small.keep(data[at : at + nbytes]))
        raw = aligned_bytes(nbytes)
        result = np.ndarray(shape, dtype, raw)
        known = min(nbytes, len(data) - at)
        raw[:known] = np.frombuffer(data, np.uint8, known, at)
        self._jobs[id(result)] = (offset + known, raw[known:])
        self.results.append(result)
        return result

    def join_chunks(self, shape: tuple[int, ...], parts: list[Any]) -> NDArray[Any]:
        """Return one array whose pieces are read straight into their places."""
        first: NDArray[Any] = parts[0]
        raw = aligned_bytes(sum(part.size for part in parts) * first.dtype.itemsize)
        at = 0
        for part in parts:
            offset, rest = self._jobs.get(id(part), (0, raw[:0]))
            known, place = part.nbytes - rest.nbytes, raw[at : at + part.nbytes]
            place[:known] = part.view(np.uint8)[:known]
            self._jobs[id(part)] = (offset, place[known:])
            at += part.nbytes
        result = np.ndarray(shape, first.dtype, raw)
        self.results.append(result)
        return result


_NODES: Final = (dict, list, tuple)
_SAME: Final = (bool, int, float, complex, str, bytes)
# By the types themselves: numpy's bool has the name of Python's.
_KINDS: Final = {type(None): "none"} | {kind: kind.__name__ for kind in _SAME}


def open_msgpack(path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool) -> Source:
    """Read a msgpack file, or one in gzip form.

    Raises:
        CorruptError, FormatError, StoreError: it is damaged; the system refuses.
    """
    file = files.enter_context(open_file(path))
    with naming_file(located(path)):
        first = file.read(0, min(file.size, WINDOW_BYTES))
        if first.startswith(GZIP_MAGIC):
            state = scan_views(gzip_decompress(file.read(0, file.size), None))
        else:
            state = read_state(file, first, mapped=mapped)
    index, leaves = index_leaves(state)
    arrays = HeldArrays({number: np.asarray(leaves[number]) for number in index.stored_leaves()})
    opened = OpenedFiles(file)
    return Source(index, arrays, structured=False, raw_keys=True, mapped=mapped, held=True, opened=opened)


def stream_msgpack(path: str | os.PathLike[str], files: contextlib.ExitStack) -> Source:
    """Open a msgpack file to read its arrays by range; ``files`` closes it.

    Raises:
        CorruptError, FormatError, StoreError: it is damaged; the system refuses.
    """
    file = files.enter_context(open_file(path))
    with naming_file(located(path)):
        root = list_msgpack(file.read(0, min(file.size, WINDOW_BYTES)), file.size, file.read).root
    index, _ = index_leaves(root)
    arrays = StoredArrays(index, [file], lambda _: None, threads=file.threads)
    return Source(index, arrays, structured=False, raw_keys=True, opened=OpenedFiles(file))


def index_leaves(state: Any) -> tuple[Index, list[Any]]:
    """Return the index of a state dict, and its leaves: arrays in memory, or records of what takes room in a file.

    Example:
        >>> record = LeafRecord(kind="array", dtype="int8", shape=(3,), nbytes=3, offset=7)
        >>> index, leaves = index_leaves({"w": record, "step": 1})
        >>> index.keys, index.type_of(0).shape, index.values, leaves == [record, 1]
        (['w', 'step'], (3,), {1: 1}, True)
    """
    # Only here: `treering.serialization` reads bytes, and needs nothing of what opens trees of others.
    from treering._foreign.foreign_tree import ForeignLeaf, build_index, leaf_of_record

    make_type = functools.cache(LeafType)  # thousands of leaves are of few types

    def describe(leaf: Any) -> ForeignLeaf:
        if isinstance(leaf, LeafRecord):
            return leaf_of_record(leaf, "numpy" if leaf.is_array else leaf.kind, 0)
        if isinstance(leaf, np.ndarray | np.generic):
            kind = "numpy" if isinstance(leaf, np.ndarray) else "numpy scalar"
            return ForeignLeaf(make_type(kind=kind, dtype=check_writable(leaf.dtype).name, shape=leaf.shape))
        return ForeignLeaf(make_type(kind=_KINDS.get(type(leaf), "opaque")), leaf)

    root: tuple[Trail, Any] = (None, state)
    structure, found = flatten_nodes([root], _open_node)
    keys, leaves = [join_key(unwind(trail)) for trail, _ in found], [leaf for _, leaf in found]
    file = DataFile(name="", nbytes=0, header=0, digest=None)
    return dataclasses.replace(build_index(structure, keys, list(map(describe, leaves)), [file]), attempt=""), leaves


def _open_node(item: tuple[Trail, Any]) -> tuple[Container, Iterator[tuple[Trail, Any]]] | None:
    trail, value = item
    if not isinstance(value, _NODES):
        return None
    children = value if isinstance(value, dict) else dict(enumerate(value))
    head = Container(node=type(value).__name__, keys=tuple(children))
    return head, (((trail, str(name)), child) for name, child in children.items())
