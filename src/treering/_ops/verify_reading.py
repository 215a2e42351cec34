"""Leaves of which checksums do not say all, read as a load reads them: what that refuses is a finding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from treering._arrays.incoming import Wish
from treering._codec.zarr import chunk_box, chunk_bytes, chunk_count, chunk_name
from treering._ops.diff import blocks_of
from treering._ops.leaves_source import LeavesSource
from treering._ops.verify_chunks import Findings, LeafFiles, cannot_be_read
from treering._store.open_folder import DataFileMissing, LinkRefused
from treering._values import boxes as box_sums
from treering._values.boxes import Box
from treering.errors import Corrupt, StoreFailed

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["check_reading"]

# A hostile .zarray of a few bytes may name more chunk files than anybody can count.
_MOST_FINDINGS: Final = 100


def check_reading(source: LeavesSource, leaf: LeafFiles, findings: Findings) -> None:
    """Read a leaf that is compressed, a text, or another program's; of the others every byte has its checksum.

    Args:
        source: what a load would read it from.
        leaf: the leaf; its files are those that were written, as far as a record says.
        findings: what is wrong is added here.

    Raises:
        Unsupported: a compressor that cannot be undone here.
    """
    told_all = leaf.verified and leaf.zarr.plain
    if (told_all or _read_chunks(source, leaf, findings)) and source.index.type_of(leaf.leaf).kind == "str":
        _read_text(source, leaf, findings)


def _read_chunks(source: LeavesSource, leaf: LeafFiles, findings: Findings) -> bool:
    """Read chunk after chunk; return whether all are good."""
    found = 0
    for number in range(chunk_count(leaf.zarr)):
        problem = _problem(source, leaf, number)
        if problem is None:
            continue
        size = leaf.sizes[number] if leaf.verified else _size_there(source, leaf, number)
        found += 1
        if found > _MOST_FINDINGS:
            findings.add(leaf, number, (0, size), f"{problem}, and there may be more like it")
            break
        findings.add(leaf, number, (0, size), problem)
    return not found


def _problem(source: LeavesSource, leaf: LeafFiles, number: int) -> str | None:
    """Read one chunk, a few MiB at a time where its bytes are those of the array."""
    box = chunk_box(leaf.zarr, number)
    try:
        if not leaf.verified:
            source.folder.open(leaf.folder, chunk_name(leaf.zarr, number), leaf.attempt).close()
        for part in _parts(leaf, box):
            source.read([Wish(leaf.leaf, (part,))], None)
    except DataFileMissing:
        return "has lost a chunk file"
    except (Corrupt, LinkRefused, StoreFailed) as error:
        return cannot_be_read(error)
    return None


def _parts(leaf: LeafFiles, box: Box) -> Iterator[Box]:
    if not leaf.zarr.plain:
        yield box
        return
    shape = box_sums.shape_of(box)
    itemsize = chunk_bytes(leaf.zarr) // box_sums.size_of(box_sums.whole(leaf.zarr.chunks))
    for part in blocks_of(shape, itemsize):
        yield tuple((low + side.start, low + side.stop) for (low, _), side in zip(box, part, strict=True))


def _size_there(source: LeavesSource, leaf: LeafFiles, number: int) -> int:
    try:
        with source.folder.open(leaf.folder, chunk_name(leaf.zarr, number), leaf.attempt) as file:
            return file.size
    except (DataFileMissing, Corrupt, LinkRefused, StoreFailed):
        return 0


def _read_text(source: LeavesSource, leaf: LeafFiles, findings: Findings) -> None:
    """Decode a text: its bytes may be those that were written, and yet be no UTF-8."""
    wish = Wish(leaf.leaf, (box_sums.whole(source.index.type_of(leaf.leaf).shape or ()),))
    source.read([wish], None)
    try:
        bytes(wish.arrays[0]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        number, place = divmod(error.start, leaf.zarr.chunks[0])
        span = (place, place + 1) if leaf.zarr.plain else (0, leaf.sizes[number])
        findings.add(leaf, number, span, "is no UTF-8, which a text has to be")
