"""Leaves -> the chunk files of a leaves directory: small ones with few system calls, large ones by two threads."""

from __future__ import annotations

import dataclasses
import functools
import threading
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import xxhash

from treering._arrays.jobs import Progress, Tally, Work, run_all
from treering._arrays.leaf_pieces import LeafPieces, as_stored
from treering._arrays.outgoing import Outgoing, Source, checked_bytes
from treering._arrays.parted import to_host
from treering._codec.array_bytes import holds_wire_bytes
from treering._codec.zarr import ZarrArray, chunk_bytes, chunk_count, chunk_name, zarray_bytes
from treering._codec.zarr_chunks import encode
from treering._values.checksums import block_bytes, block_checksums, block_count

if TYPE_CHECKING:
    from treering._store.leaves_folder import StagedLeaves

__all__ = ["write_leaves"]

_ZARRAY: Final = ".zarray"
# All of a leaf's files are written at once, by one thread: a second one would wait for the interpreter, not the disk.
_SMALL_BYTES: Final = 64 << 10
# Progress is told this often.
_TOGETHER: Final = 64


def write_leaves(
    staged: StagedLeaves,
    folders: Sequence[str],
    leaves: Outgoing,
    arrays: Sequence[ZarrArray],
    *,
    progress: Progress | None = None,
) -> tuple[list[int], array[int]]:
    """Write every stored leaf: its ``.zarray`` and its chunk files.

    Args:
        staged: where they go.
        folders: the folder of each stored leaf, in leaf order.
        leaves: the leaves; those in ``leaves.sources`` are written.
        arrays: the layout of each of them.
        progress: called from this thread.

    Returns:
        The size of each chunk file of the compressed leaves, and the checksums of all blocks of all chunk files:
        chunk after chunk in the order of the grid, leaf after leaf.

    Raises:
        Unsupported: a compressor that cannot be used here.
        StoreFailed: the system refuses.
    """
    forms: dict[int, _Form] = {}
    small: list[_Leaf] = []
    large: list[_Leaf] = []
    every: list[_Leaf] = []
    total = 0
    for folder, zarr, sources in zip(folders, arrays, leaves.sources.values(), strict=True):
        form = forms.get(id(zarr))  # thousands of leaves share a few layouts
        if form is None:
            form = forms[id(zarr)] = _form_of(zarr)
        leaf = _Leaf(folder, form, sources)
        every.append(leaf)
        total += form.nbytes
        (small if form.nbytes <= _SMALL_BYTES else large).append(leaf)
    large.sort(key=lambda leaf: -leaf.form.nbytes)
    tally = Tally(total, progress)
    run_all(_large_work(staged, large, tally), tally, _small_work(staged, small))
    sizes: list[int] = []
    checksums = array("Q")
    for leaf in every:
        sizes += leaf.sizes
        checksums += leaf.checksums
    return sizes, checksums


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What leaves of one layout have in common."""

    array: ZarrArray
    document: bytes
    count: int
    """Of its chunks."""
    chunk: int
    """Bytes of one, before any compressor."""
    block: int
    """Bytes of a checksummed block."""
    nbytes: int
    """Bytes of all chunks."""
    name: str | None
    """Of the file of a leaf that is one chunk and raw."""


def _form_of(zarr: ZarrArray) -> _Form:
    count, chunk = chunk_count(zarr), chunk_bytes(zarr)
    return _Form(
        array=zarr,
        document=zarray_bytes(zarr),
        count=count,
        chunk=chunk,
        block=block_bytes(chunk),
        nbytes=count * chunk,
        name=chunk_name(zarr, 0) if zarr.compressor is None and zarr.chunks == zarr.shape else None,
    )


class _Leaf:
    """A leaf, and what is known of its files when they are written."""

    __slots__ = ("checksums", "folder", "form", "sizes", "sources")

    def __init__(self, folder: str, form: _Form, sources: Sequence[Source]) -> None:
        self.folder = folder
        self.form = form
        self.sources = sources
        self.sizes: Sequence[int] = ()
        self.checksums = array("Q")


# ---------------------------------------------------------------------------------------------------------------- small


def _small_work(staged: StagedLeaves, leaves: Sequence[_Leaf]) -> Work:
    work = Work()
    for start in range(0, len(leaves), _TOGETHER):
        some = leaves[start : start + _TOGETHER]
        work.jobs.append(functools.partial(_write_small, staged, some))
        work.nbytes += sum(leaf.form.nbytes for leaf in some)
    return work


def _write_small(staged: StagedLeaves, leaves: Sequence[_Leaf]) -> int:
    nbytes = 0
    for leaf in leaves:
        form = leaf.form
        nbytes += form.nbytes
        if form.name is not None and len(leaf.sources) == 1:
            data = _whole_bytes(leaf.sources[0].data, form)
            leaf.checksums.append(xxhash.xxh3_64_intdigest(data))
            staged.write_small(leaf.folder, ((_ZARRAY, form.document), (form.name, data)))
        else:
            _write_small_chunks(staged, leaf)
    return nbytes


def _whole_bytes(data: Any, form: _Form) -> bytes:
    """Return the bytes of an array that is one chunk."""
    host = to_host(data)
    if holds_wire_bytes(host.dtype):
        return host.tobytes()
    return b"".join(checked_bytes(host, form.block, array("Q", bytes(8)), 0))


def _write_small_chunks(staged: StagedLeaves, leaf: _Leaf) -> None:
    form = leaf.form
    pieces = LeafPieces(form.array, leaf.sources)
    files = [(_ZARRAY, form.document)]
    checksums = array("Q")
    for number in range(form.count):
        data = as_stored(pieces.chunk(number), form.array)
        content = data.tobytes() if form.array.compressor is None else encode(form.array, data)
        checksums += block_checksums(memoryview(content), block_bytes(len(content)))
        files.append((chunk_name(form.array, number), content))
    staged.write_small(leaf.folder, files)
    leaf.checksums = checksums
    if form.array.compressor is not None:
        leaf.sizes = [len(content) for _, content in files[1:]]


# ---------------------------------------------------------------------------------------------------------------- large


def _large_work(staged: StagedLeaves, leaves: Sequence[_Leaf], tally: Tally) -> Work:
    """Return a job for each chunk file, those of the largest leaves first; their ``.zarray`` are written now."""
    work = Work()
    for leaf in leaves:
        staged.write_small(leaf.folder, ((_ZARRAY, leaf.form.document),))
        chunks = _Packed(staged, leaf, tally) if leaf.form.array.compressor is not None else _Raw(staged, leaf, tally)
        work.jobs.extend(functools.partial(chunks.job, number) for number in range(leaf.form.count))
        work.nbytes += leaf.form.nbytes
    return work


class _Large:
    """Writes the chunk files of one leaf, each one when a thread takes it."""

    def __init__(self, staged: StagedLeaves, leaf: _Leaf, tally: Tally) -> None:
        self._staged = staged
        self._leaf = leaf
        self._form = leaf.form
        self._tally = tally
        self._pieces = LeafPieces(leaf.form.array, leaf.sources)
        self._left = leaf.form.count
        self._lock = threading.Lock()

    def job(self, number: int) -> int:
        """Write one chunk file; what it counts was counted on the way."""
        self.write(number, chunk_name(self._form.array, number))
        with self._lock:
            self._left -= 1
            if not self._left:
                self._pieces.let_go()
                self.finish()
        return 0

    def write(self, number: int, name: str) -> None:
        """Write one chunk file."""
        raise NotImplementedError

    def finish(self) -> None:
        """Note what is known of all files."""


class _Raw(_Large):
    """Chunks that lie in their files as they are."""

    def __init__(self, staged: StagedLeaves, leaf: _Leaf, tally: Tally) -> None:
        super().__init__(staged, leaf, tally)
        self._blocks = block_count(leaf.form.chunk, leaf.form.block)
        self._checksums = leaf.checksums = array("Q", bytes(8 * self._blocks * leaf.form.count))

    def write(self, number: int, name: str) -> None:
        self._staged.write_file(self._leaf.folder, name, self._content(number), self._form.chunk)

    def _content(self, number: int) -> Iterator[bytes | memoryview]:
        data = self._pieces.chunk(number)
        for piece in checked_bytes(data, self._form.block, self._checksums, number * self._blocks):
            yield piece
            self._tally.add(len(piece))


class _Packed(_Large):
    """Chunks that a compressor makes smaller."""

    def __init__(self, staged: StagedLeaves, leaf: _Leaf, tally: Tally) -> None:
        super().__init__(staged, leaf, tally)
        self._found: list[tuple[int, array[int]]] = [(0, array("Q"))] * leaf.form.count

    def write(self, number: int, name: str) -> None:
        form = self._form
        content = encode(form.array, as_stored(self._pieces.chunk(number), form.array))
        size = len(content)
        self._found[number] = (size, block_checksums(memoryview(content), block_bytes(size)))
        self._staged.write_file(self._leaf.folder, name, (content,), size)
        self._tally.add(form.chunk)

    def finish(self) -> None:
        checksums = array("Q")
        for _, found in self._found:
            checksums += found
        self._leaf.checksums = checksums
        self._leaf.sizes = [size for size, _ in self._found]
