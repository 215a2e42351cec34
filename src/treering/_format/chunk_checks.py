"""Chunks that must fit the leaves and the files: every item of a leaf and every byte of a file is there exactly once.

Ten thousand leaves are checked as columns, with a handful of passes that run in C, never one object at a time.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Final

from treering._codec.documents import check_hashes
from treering._format.index import DataFile, Index, TreeColumns, leaf_bytes
from treering._values.boxes import Box, find_cover_error, size_of, text_of
from treering._values.checksums import LARGEST_BLOCK, SMALLEST_BLOCK
from treering._values.dtypes import itemsize_of
from treering._values.human import pluralize
from treering.errors import CorruptError

_BLOCKS: Final = frozenset(1 << bits for bits in range(SMALLEST_BLOCK.bit_length() - 1, LARGEST_BLOCK.bit_length()))
_SHOWN_KEYS: Final = 4


def check_chunks(index: Index) -> None:
    """Require that every byte of the files and every item of the leaves is accounted for exactly once.

    Raises:
        CorruptError: a chunk is of the wrong size, chunks overlap or leave a gap in a file or a leaf, or the number of
            checksums is not that of the blocks; the message names the leaf, or the file and the bytes.
    """
    chunks = index.chunks
    expected = stored_leaves(index)
    if chunks.leaf != expected:
        _check_parts(index, expected)
    _check_sizes(index, whole=len(chunks) == len(expected))
    if not set(chunks.block) <= _BLOCKS:
        raise CorruptError(f"a block of the chunks is not a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}")
    _check_tiles(index)
    if index.verified and (blocks := chunks.first_blocks()[-1]) != len(index.checksums):
        found = pluralize(len(index.checksums), "checksums")
        raise CorruptError(f"the chunks have {pluralize(blocks, 'blocks')}, there are {found}")


def stored_leaves(tree: TreeColumns) -> list[int]:
    """Return the numbers of the leaves that lie in files, in their order.

    Example:
        >>> from treering._format.index import LeafType
        >>> columns = dict(structure=[], keys=["a", "b"], types=[LeafType(kind="int")], leaf_types=[0, 0], values={})
        >>> stored_leaves(TreeColumns(**columns))
        []
    """
    stored = [kind.stored for kind in tree.types]
    if all(stored):
        return list(range(len(tree.leaf_types)))
    return [leaf for leaf, number in enumerate(tree.leaf_types) if stored[number]]


def _check_parts(index: Index, expected: list[int]) -> None:
    """Check the order of the chunks where some leaf has several."""
    if (found := [leaf for leaf, _ in itertools.groupby(index.chunks.leaf)]) == expected:
        return
    wrong = next((pair for pair in itertools.zip_longest(found, expected) if pair[0] != pair[1]), (None, None))
    if wrong[1] is not None and wrong[1] not in set(found):
        raise CorruptError(f"leaf {index.keys[wrong[1]]!r:.200} lies in no file")
    raise CorruptError(
        f"the chunks of leaf {index.keys[wrong[0] or 0]!r:.200} are in the place of those of another leaf"
    )


def _check_sizes(index: Index, *, whole: bool) -> None:
    """Check that the chunks of the leaves have the bytes of these; ``whole`` says that each leaf has one."""
    chunks = index.chunks
    by_type = [leaf_bytes(kind) for kind in index.types]
    if whole and chunks.box.count(None) == len(chunks):
        kinds = index.leaf_types if len(chunks) == len(index.keys) else map(index.leaf_types.__getitem__, chunks.leaf)
        if list(map(by_type.__getitem__, kinds)) == chunks.nbytes:
            return
    # Most leaves of a model are alike, and so are their parts: each way to cut one is looked at once.
    cuts: dict[int, tuple[int, tuple[Box | None, ...], tuple[int, ...]]] = {}
    start = 0
    for leaf, parts in Counter(chunks.leaf).items():
        stop = start + parts
        cuts[start] = (index.leaf_types[leaf], tuple(chunks.box[start:stop]), tuple(chunks.nbytes[start:stop]))
        start = stop
    check_hashes(cuts.values(), "the ways to cut leaves")
    fit: set[tuple[int, tuple[Box | None, ...], tuple[int, ...]]] = set()
    for start, cut in cuts.items():
        if cut not in fit:
            _check_leaf(index, chunks.leaf[start], range(start, start + len(cut[1])))
            fit.add(cut)


def _check_leaf(index: Index, leaf: int, numbers: range) -> None:
    """Check that the chunks of one leaf have the bytes of their boxes, and that these cover it."""
    kind, chunks = index.type_of(leaf), index.chunks
    boxes = list(map(index.box_of, numbers))
    for number, box in zip(numbers, boxes, strict=True):
        if len(box) != len(kind.shape or ()):
            axes = pluralize(len(box), "axes")
            raise CorruptError(f"a box of leaf {index.keys[leaf]!r:.200} has {axes}, its shape {kind.shape}")
        wanted = size_of(box) * itemsize_of(kind.dtype)
        if any(stop < start for start, stop in box) or wanted != chunks.nbytes[number]:
            place = f"[{text_of(box)}]" if chunks.box[number] is not None else ""
            found = f"its chunk in file {chunks.file[number]} has {chunks.nbytes[number]}"
            raise CorruptError(f"leaf {index.keys[leaf]!r:.200}{place} takes {pluralize(wanted, 'bytes')}, {found}")
    if (wrong := find_cover_error(kind.shape or (), boxes)) is not None:
        raise CorruptError(f"the parts of leaf {index.keys[leaf]!r:.200} do not cover it: {wrong}")


def _check_tiles(index: Index) -> None:
    """Check that the chunks of each file follow each other from its header to its end."""
    chunks = index.chunks
    for number, file in enumerate(index.files):
        rows = chunks.of_file(number)
        begins, sizes = [chunks.offset[row] for row in rows], [chunks.nbytes[row] for row in rows]
        if list(itertools.accumulate(sizes, initial=file.header)) == [*begins, file.nbytes]:
            continue
        if index.gapped:
            _check_apart(index, file, [file.header, *begins, file.nbytes], [0, *sizes, 0])
            continue
        # Starts and ends, each in order: ranges tile a stretch exactly when every end but the last is a start.
        full = [(start, start + size) for start, size in zip(begins, sizes, strict=True) if size]
        edges = [file.header, *sorted(stop for _, stop in full)]
        closing = [*sorted(start for start, _ in full), file.nbytes]
        if edges != closing:
            stop, start = next(pair for pair in zip(edges, closing, strict=True) if pair[0] != pair[1])
            raise CorruptError(_tiling_problem(index, file, min(stop, start), max(stop, start), gap=stop < start))
        offset = min({start for start, size in zip(begins, sizes, strict=True) if not size}.difference(edges))
        raise CorruptError(f"an empty array lies inside another one, at byte {offset} of file {number}")


def _check_apart(index: Index, file: DataFile, begins: list[int], sizes: list[int]) -> None:
    """Check that chunks lie in a file in order, apart from each other, from its header to its end."""
    for (begin, size), after in zip(zip(begins, sizes, strict=True), begins[1:], strict=False):
        if begin + size > after:
            raise CorruptError(_tiling_problem(index, file, after, begin + size, gap=False))


def _tiling_problem(index: Index, file: DataFile, first: int, last: int, *, gap: bool) -> str:
    """Say what is wrong with the bytes from ``first`` to ``last`` of a file."""
    chunks, number = index.chunks, index.files.index(file)
    where = f"bytes {first} to {last} of {file.name or 'the file'}"
    if gap:
        return f"{where} belong to no leaf"
    rows = zip(chunks.leaf, chunks.file, chunks.offset, chunks.nbytes, strict=True)
    leaves = (leaf for leaf, of, offset, size in rows if of == number and offset < last and offset + size > first)
    named = ", ".join(f"{index.keys[leaf]!r:.100}" for leaf in itertools.islice(leaves, _SHOWN_KEYS))
    return f"{where} cannot belong to {named}: the file ends there, or its header or another leaf lies there"
