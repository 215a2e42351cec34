"""Leaves -> the chunk files of a leaves directory: small ones with few system calls, large ones by two threads."""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import xxhash

from treering._arrays.jobs import Progress, Tally, Work, run_all
from treering._arrays.outgoing import Outgoing, checked_bytes
from treering._arrays.parted import to_host
from treering._codec.array_bytes import holds_wire_bytes
from treering._codec.zarr import ZarrArray, chunk_name
from treering._codec.zarr_chunks import encode
from treering._leaves.chunks.large_leaves import large_work
from treering._leaves.chunks.pieces import LeafPieces, as_stored
from treering._leaves.chunks.written_leaf import Form, WrittenLeaf, form_of
from treering._values.checksums import block_bytes, block_checksums

if TYPE_CHECKING:
    from treering._leaves.folder.staged_files import StagedFiles

# All of a leaf's files are written at once, by one thread: a second one would wait for the interpreter, not the disk.
_SMALL_BYTES: Final = 64 << 10
# Progress is told this often.
_TOGETHER: Final = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one process of several writes."""

    chunks: Mapping[int, Sequence[int]]
    """Leaf number -> which of its chunks, ascending."""
    headed: bool
    """Whether it writes the ``.zarray`` of every leaf as well."""


def write_leaves(
    staged: StagedFiles,
    folders: Sequence[str],
    leaves: Outgoing,
    arrays: Sequence[ZarrArray],
    *,
    progress: Progress | None = None,
    share: Share | None = None,
) -> tuple[list[int], array[int]]:
    """Write every stored leaf: its ``.zarray`` and its chunk files.

    Args:
        staged: where they go.
        folders: the folder of each stored leaf, in leaf order.
        leaves: the leaves; those in ``leaves.sources`` are written.
        arrays: the layout of each of them.
        progress: called from this thread.
        share: what this process writes of them; None: everything.

    Returns:
        The size of each chunk file of the compressed leaves, and the checksums of all blocks of all chunk files, of
        those that this process writes: chunk after chunk in the order of the grid, leaf after leaf.

    Raises:
        Unsupported: a compressor that cannot be used here.
        StoreFailed: the system refuses.
    """
    forms: dict[int, Form] = {}
    small: list[WrittenLeaf] = []
    large: list[WrittenLeaf] = []
    every: list[WrittenLeaf] = []
    total = 0
    headed = share is None or share.headed
    for number, folder, zarr, sources in zip(leaves.sources, folders, arrays, leaves.sources.values(), strict=True):
        form = forms.get(id(zarr))  # thousands of leaves share a few layouts
        if form is None:
            form = forms[id(zarr)] = form_of(zarr)
        numbers = range(form.count) if share is None else share.chunks.get(number, ())
        if not (numbers or headed):
            continue
        leaf = WrittenLeaf(folder, form, sources, numbers, headed=headed)
        every.append(leaf)
        total += leaf.nbytes
        (small if leaf.nbytes <= _SMALL_BYTES else large).append(leaf)
    large.sort(key=lambda leaf: -leaf.nbytes)
    tally = Tally(total, progress)
    run_all(large_work(staged, large, tally), tally, _small_work(staged, small))
    sizes: list[int] = []
    checksums = array("Q")
    for leaf in every:
        sizes += leaf.sizes
        checksums += leaf.checksums
    return sizes, checksums


def _small_work(staged: StagedFiles, leaves: Sequence[WrittenLeaf]) -> Work:
    work = Work()
    for start in range(0, len(leaves), _TOGETHER):
        some = leaves[start : start + _TOGETHER]
        work.jobs.append(functools.partial(_write_small, staged, some))
        work.nbytes += sum(leaf.nbytes for leaf in some)
    return work


def _write_small(staged: StagedFiles, leaves: Sequence[WrittenLeaf]) -> int:
    single: list[tuple[WrittenLeaf, str, bytes]] = []
    for leaf in leaves:
        name = leaf.form.name
        if name is not None and leaf.numbers and len(leaf.sources) == 1:
            data = _whole_bytes(leaf.sources[0].data, leaf.form)
            leaf.checksums.append(xxhash.xxh3_64_intdigest(data))
            single.append((leaf, name, data))
        else:
            _write_small_chunks(staged, leaf)
    # Written together: a turn to the system and back for each leaf costs the processor's caches.
    for leaf, name, data in single:
        staged.write_small(leaf.folder, (*leaf.head, (name, data)))
    return sum(leaf.nbytes for leaf in leaves)


def _whole_bytes(data: Any, form: Form) -> bytes:
    """Return the bytes of an array that is one chunk."""
    host = to_host(data)
    if holds_wire_bytes(host.dtype):
        return host.tobytes()
    return b"".join(checked_bytes(host, form.block, array("Q", bytes(8)), 0))


def _write_small_chunks(staged: StagedFiles, leaf: WrittenLeaf) -> None:
    form = leaf.form
    pieces = LeafPieces(form.array, leaf.sources)
    files = list(leaf.head)
    checksums = array("Q")
    for number in leaf.numbers:
        data = as_stored(pieces.chunk(number), form.array)
        content = data.tobytes() if form.array.compressor is None else encode(form.array, data)
        checksums += block_checksums(memoryview(content), block_bytes(len(content)))
        files.append((chunk_name(form.array, number), content))
    staged.write_small(leaf.folder, files)
    leaf.checksums = checksums
    if form.array.compressor is not None:
        leaf.sizes = [len(content) for _, content in files[len(leaf.head) :]]
