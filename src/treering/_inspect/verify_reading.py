"""Leaves of which checksums do not say all, read as a load reads them: what that refuses is a finding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

from treering._arrays.incoming import ReadRequest
from treering._codec.zarr import chunk_box, chunk_bytes, chunk_count, chunk_name
from treering._inspect.diff import blocks_of
from treering._inspect.verify_chunks import Findings, LeafFiles, cannot_be_read
from treering._leaves.source import LeavesSource
from treering._store.failures import DataFileMissing, LinkRefused
from treering._values import boxes as box_sums
from treering._values.boxes import Box
from treering.errors import Corrupt, StoreFailed

# A hostile .zarray of a few bytes may name more chunk files than anybody can count.
_MOST_FINDINGS: Final = 100
# Each reading of another program's array looks at the names in its folder.
_BATCH_BOXES: Final = 256
_BATCH_BYTES: Final = 8 << 20


def check_reading(source: LeavesSource, leaf: LeafFiles, findings: Findings) -> None:
    """Read a leaf that is compressed, a text, or another program's; of the others every byte has its checksum.

    Args:
        source: what a load would read it from.
        leaf: the leaf; its files are those that were written, as far as a record says.
        findings: what is wrong is added here.

    Raises:
        Unsupported: a compressor that cannot be undone here.
    """
    told_all = leaf.branch.verified and leaf.zarr.plain
    if (told_all or _read_chunks(source, leaf, findings)) and source.index.type_of(leaf.leaf).kind == "str":
        _read_text(source, leaf, findings)


def _read_chunks(source: LeavesSource, leaf: LeafFiles, findings: Findings) -> bool:
    """Read all chunks, some together; return whether they are good."""
    bad: set[int] = set()
    for batch in _batches(leaf):
        # Of a large chunk the first bad part is enough.
        boxes = [box for number, box in batch if number not in bad]
        if not boxes or _problem(source, leaf, boxes) is None:
            continue
        for number in dict.fromkeys(number for number, _ in batch if number not in bad):
            problem = _problem(source, leaf, [box for owner, box in batch if owner == number], number)
            if problem is None:
                continue
            bad.add(number)
            more = ", and there may be more like it" if len(bad) > _MOST_FINDINGS else ""
            findings.add(leaf, number, (0, _size_of(source, leaf, number)), problem + more)
            if more:
                return False
    return not bad


def _problem(source: LeavesSource, leaf: LeafFiles, boxes: Sequence[Box], number: int | None = None) -> str | None:
    """Read boxes of a leaf, those of one chunk where its number is given; say what is wrong."""
    try:
        if number is not None and not leaf.branch.verified:
            source.folder.open(leaf.folder, chunk_name(leaf.zarr, number), leaf.branch.attempt).close()
        source.arrays.read([ReadRequest(leaf.leaf, boxes)], None)
    except DataFileMissing:
        return "lacks a chunk file"
    except (Corrupt, LinkRefused, StoreFailed) as error:
        return cannot_be_read(error)
    return None


def _batches(leaf: LeafFiles) -> Iterator[list[tuple[int, Box]]]:
    """Yield boxes of some MiB together, each with the number of its chunk."""
    batch: list[tuple[int, Box]] = []
    held = 0
    nbytes = chunk_bytes(leaf.zarr)
    itemsize = nbytes // math.prod(leaf.zarr.chunks)
    for number in range(chunk_count(leaf.zarr)):
        for box in _parts(leaf, chunk_box(leaf.zarr, number), itemsize):
            batch.append((number, box))
            held += box_sums.size_of(box) * itemsize
            if held >= _BATCH_BYTES or len(batch) == _BATCH_BOXES:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def _parts(leaf: LeafFiles, box: Box, itemsize: int) -> Iterator[Box]:
    """Cut a chunk into boxes of a few MiB, where its bytes are those of the array."""
    if not leaf.zarr.plain:
        yield box
        return
    for part in blocks_of(box_sums.shape_of(box), itemsize):
        yield tuple((low + side.start, low + side.stop) for (low, _), side in zip(box, part, strict=True))


def _size_of(source: LeavesSource, leaf: LeafFiles, number: int) -> int:
    if leaf.branch.verified:
        return leaf.sizes[number]
    try:
        with source.folder.open(leaf.folder, chunk_name(leaf.zarr, number), leaf.branch.attempt) as file:
            return file.size
    except (DataFileMissing, Corrupt, LinkRefused, StoreFailed):
        return 0


def _read_text(source: LeavesSource, leaf: LeafFiles, findings: Findings) -> None:
    """Decode a text: its bytes may be those that were written, and yet be no UTF-8."""
    request = ReadRequest(leaf.leaf, (box_sums.whole(source.index.type_of(leaf.leaf).shape or ()),))
    source.arrays.read([request], None)
    try:
        bytes(request.arrays[0]).decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        number, place = divmod(error.start, leaf.zarr.chunks[0])
        span = (place, place + 1) if leaf.zarr.plain else (0, leaf.sizes[number])
        findings.add(leaf, number, span, "is not UTF-8, as text must be")
