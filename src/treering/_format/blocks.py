"""Which checksums belong to which chunk, and the digest that binds a data file's header to them."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

from treering._format.index import Index, LeafType
from treering._values.boxes import text_of
from treering._values.checksums import block_checksums, digest, pack_checksums
from treering._values.dtypes import itemsize_of
from treering.errors import Corrupt

DAMAGE_HINT: Final = "use another copy; `treering verify` lists all damage"
Piece: TypeAlias = tuple[int, int, int]
"""Chunk, and where whole blocks of it start and stop in it."""


def leaf_bytes(leaf_type: LeafType) -> int:
    """Return how many bytes a leaf of this type takes in the files, 0 where it takes none.

    Example:
        >>> leaf_bytes(LeafType(kind="jax", dtype="bfloat16", shape=(4, 8)))
        64
    """
    return itemsize_of(leaf_type.dtype) * math.prod(leaf_type.shape or ())


def file_digest(index: Index, file: int, header: bytes | Iterable[bytes]) -> str:
    """Return the digest of a data file: over its header, then the checksums of its blocks as they lie in it.

    Args:
        index: chunks and checksums are taken from it.
        file: number of the file.
        header: the file's bytes before its data, whole or in pieces.
    """
    starts, table = index.chunks.first_blocks(), index.checksums
    if starts[-1] == len(index.chunks) and all(index.chunks.nbytes):  # one for each
        in_order = array("Q", map(table.__getitem__, index.chunks.of_file(file)))
    else:
        in_order = array("Q")
        for chunk in index.chunks.of_file(file):
            in_order.extend(table[starts[chunk] : starts[chunk + 1]])
    pieces = (header,) if isinstance(header, bytes) else header
    return digest(itertools.chain(pieces, (pack_checksums(in_order),)))


def file_digests(index: Index, headers: Sequence[bytes]) -> list[str]:
    """Return the digest of each data file, given their headers."""
    return [file_digest(index, file, header) for file, header in enumerate(headers)]


def span_range(index: Index, span: Sequence[Piece]) -> tuple[int, int]:
    """Return where a stretch of a data file begins there, and how many bytes it has."""
    (first, start, _), (last, _, stop) = span[0], span[-1]
    begin = index.chunks.offset[first] + start
    return begin, index.chunks.offset[last] + stop - begin


def damaged_pieces(
    index: Index, starts: Sequence[int], span: Sequence[Piece], data: memoryview
) -> Iterator[tuple[Piece, array[int], array[int]]]:
    """Yield the pieces of a stretch whose bytes are not those that were saved: the checksums found, and the right ones.

    Args:
        index: the tree.
        starts: what `Chunks.first_blocks` says of it.
        span: the stretch.
        data: its bytes.
    """
    chunks, (begin, _) = index.chunks, span_range(index, span)
    for chunk, start, stop in span:
        at, size = chunks.offset[chunk] - begin, chunks.block[chunk]
        found = block_checksums(data[at + start : at + stop], size)
        number = starts[chunk] + start // size
        wanted = index.checksums[number : number + len(found)]
        if found != wanted:
            yield (chunk, start, stop), found, wanted


def format_chunk(index: Index, chunk: int) -> str:
    """Return the key of a chunk's leaf for people, with the box where the chunk is a part of it."""
    key = index.keys[index.chunks.leaf[chunk]]
    box = index.chunks.box[chunk]
    return repr(key) if box is None else f"{key!r}[{text_of(box)}]"


def damage_error(index: Index, chunk: int, block: int, found: int) -> Corrupt:
    """Return the error for a block whose bytes are not those that were saved.

    Args:
        index: the checkpoint's.
        chunk: number of the chunk.
        block: number of the block in that chunk.
        found: the checksum of the bytes that are there.
    """
    chunks = index.chunks
    size = chunks.block[chunk]
    start = chunks.offset[chunk] + block * size
    stop = min(start + size, chunks.offset[chunk] + chunks.nbytes[chunk])
    wanted = index.checksums[chunks.first_blocks()[chunk] + block]
    name = index.files[chunks.file[chunk]].name or "the file"
    damaged, sums = f"is damaged: bytes {start} to {stop} of {name}", f"{found:016x} instead of {wanted:016x}"
    return Corrupt(f"leaf {format_chunk(index, chunk)} {damaged} have the checksum {sums}", hint=DAMAGE_HINT)
