"""Which boxes of a tree an older checkpoint has already, and which of its files a new one shares: pure functions.

A leaf is cut into boxes of some 16 MiB along its leading axes: a stacked leaf mixes layers that change with others that
do not. Whole files are shared, so what changes together lies together. ``docs/design/incremental.md`` has the figures.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from treering._format.document import data_name
from treering._format.index import Chunks, DataFile, LeafType, leaf_bytes
from treering._format.safetensors import Row, lay_out_files
from treering._values.boxes import Box, size_of, whole
from treering._values.checksums import block_bytes

L = TypeVar("L")

BOX_BYTES: Final = 16 << 20
"""A leaf of more bytes is cut into boxes of at most so many."""
FILE_BYTES: Final = 4 << 30
"""A file that others may share is not begun beyond so many bytes: a bucket copies up to 5 GB by one request."""
MOST_SHARED: Final = 64
"""A process shares so many files at most: the boxes of the others, which have the fewest, are gathered anew."""

CHANGED: Final = 0
"""The state of a box that the older checkpoint does not have."""
MOVED: Final = 1
"""That of a box that it has, in a file that is not shared: it is written, beside others that did not change."""
SHARED: Final = 2
"""That of a box whose bytes lie in a file that is shared."""
BEGUN: Final = 3
"""That of one that was known to have changed before all were compared: its file is written meanwhile."""


def cut_leading(box: Box, itemsize: int, most: int = BOX_BYTES) -> Iterator[Box]:
    """Yield the boxes of at most ``most`` bytes that a box is cut into, in C order, each one run of its bytes.

    Args:
        box: a box of an array.
        itemsize: bytes of an item.
        most: bytes of a box; that of one item may be larger.

    Example:
        >>> list(cut_leading(((0, 5), (0, 8)), 4, most=64))
        [((0, 2), (0, 8)), ((2, 4), (0, 8)), ((4, 5), (0, 8))]
        >>> list(cut_leading(((0, 1), (0, 3)), 4, most=4))
        [((0, 1), (0, 1)), ((0, 1), (1, 2)), ((0, 1), (2, 3))]
    """
    if size_of(box) * itemsize <= most or not box:
        yield box
        return
    (start, stop), inner = box[0], box[1:]
    rows = most // (size_of(inner) * itemsize)
    for first in range(start, stop, max(rows, 1)):
        last = min(first + max(rows, 1), stop)
        below = [inner] if rows else cut_leading(inner, itemsize, most)
        yield from (((first, last), *rest) for rest in below)


def cut_rows(rows: Iterable[Row], types: Sequence[LeafType], leaf_types: Sequence[int]) -> list[Row]:
    """Return the boxes that a tree is compared in, by leaf and by place, given those that a process writes."""
    shapes = [kind.shape or () for kind in types]
    nbytes = list(map(leaf_bytes, types))
    found: list[Row] = []
    for leaf, box in rows:
        kind = leaf_types[leaf]
        if nbytes[kind] <= BOX_BYTES:
            found.append((leaf, box))
            continue
        every = whole(shapes[kind])
        itemsize = nbytes[kind] // math.prod(shapes[kind])
        found += [(leaf, None if cut == every else cut) for cut in cut_leading(box or every, itemsize, BOX_BYTES)]
    return sorted(found, key=lambda row: (row[0], row[1] or ()))


def row_bytes(rows: Iterable[Row], types: Sequence[LeafType], leaf_types: Sequence[int]) -> list[int]:
    """Return how many bytes each of some boxes has."""
    nbytes = list(map(leaf_bytes, types))
    itemsizes = [all_ // (math.prod(kind.shape or ()) or 1) for all_, kind in zip(nbytes, types, strict=True)]
    return [
        nbytes[leaf_types[leaf]] if box is None else itemsizes[leaf_types[leaf]] * size_of(box) for leaf, box in rows
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OlderBoxes:
    """The boxes of a checkpoint, in columns, and its files."""

    file: Sequence[int]
    """Which file each box lies in."""
    nbytes: Sequence[int]
    """How many bytes each has."""
    offset: Sequence[int] = ()
    """Where it begins in that file."""
    file_bytes: Sequence[int]
    """How many bytes of boxes each file has, of boxes that are not used any more too."""


NO_BOXES: Final = OlderBoxes(file=(), nbytes=(), file_bytes=())
"""Those of no checkpoint."""


def choose_shared(same: Sequence[int], older: OlderBoxes, most: int = MOST_SHARED) -> tuple[int, ...]:
    """Return the files of an older checkpoint that a new one shares, ascending.

    Args:
        same: for each box of the new tree the number of the older box that has the same bytes, -1 for none.
        older: the older checkpoint.
        most: how many files are shared at most.

    A file of which less than half is still used is written anew: what a chain of saves takes on the disk is at most
    twice what its newest tree has.

    Example:
        >>> older = OlderBoxes(file=[0, 0, 1], nbytes=[60, 40, 10], file_bytes=[100, 10])
        >>> choose_shared([0, -1, 2], older), choose_shared([-1, 1, 2], older)
        ((0, 1), (1,))
    """
    kept = np.array(same, np.int64)[np.array(same, np.int64) >= 0]
    live = np.zeros(len(older.file_bytes), np.int64)
    np.add.at(live, np.array(older.file, np.int64)[kept], np.array(older.nbytes, np.int64)[kept])
    halves = [file for file, nbytes in enumerate(live.tolist()) if nbytes and 2 * nbytes >= older.file_bytes[file]]
    return tuple(sorted(sorted(halves, key=lambda file: (-live[file], file))[:most]))


def states_of(same: Sequence[int], older: OlderBoxes, shared: Collection[int]) -> list[int]:
    """Return the state of each box of the new tree, given the files that are shared.

    Example:
        >>> older = OlderBoxes(file=[0, 1], nbytes=[1, 1], file_bytes=[1, 1])
        >>> states_of([0, 1, -1], older, {1}) == [MOVED, SHARED, CHANGED]
        True
    """
    return [CHANGED if n < 0 else SHARED if older.file[n] in shared else MOVED for n in same]


def find_stretches(rows: Sequence[int], numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield where rows and numbers go up by one together: the first of both, and how many there are.

    Example:
        >>> list(find_stretches([0, 1, 2, 5], [7, 8, 4, 5]))
        [(0, 7, 2), (2, 4, 1), (5, 5, 1)]
    """
    steps = (np.diff(rows) != 1) | (np.diff(numbers) != 1)
    starts = [0, *(np.flatnonzero(steps) + 1).tolist()] if rows else []
    for start, stop in itertools.pairwise([*starts, len(rows)]):
        yield rows[start], numbers[start], stop - start


def find_shared_leaves(rows: Sequence[Row], same: Sequence[int], older: OlderBoxes) -> set[int]:
    """Return the leaves of which all boxes are known to lie in files that will be shared: their bytes are not needed.

    Args:
        rows: the boxes of the new tree.
        same: as for `choose_shared`; what is not known yet to be the same counts as changed.
        older: the older checkpoint.

    Example:
        >>> older = OlderBoxes(file=[0, 0, 1], nbytes=[60, 40, 10], file_bytes=[100, 10])
        >>> find_shared_leaves([(0, ((0, 6),)), (0, ((6, 10),)), (1, None)], [0, -1, 2], older)
        {1}
    """
    states = states_of(same, older, choose_shared(same, older))
    needed = {leaf for (leaf, _), state in zip(rows, states, strict=True) if state != SHARED}
    return {leaf for leaf, _ in rows} - needed


def gather_files(states: Sequence[int], nbytes: Sequence[int], limit: int = FILE_BYTES) -> list[list[int]]:
    """Return the files that are written, each as the numbers of its boxes: those begun first, then what did not change.

    A file ends where it has ``limit`` bytes; one box may have more.

    Example:
        >>> gather_files([CHANGED, MOVED, CHANGED, SHARED], [2, 2, 2, 2], limit=3)
        [[1], [0], [2]]
    """
    files: list[list[int]] = []
    for state in sorted({BEGUN, MOVED, CHANGED}.intersection(states), reverse=True):
        file, held = list[int](), 0
        for number in [number for number, found in enumerate(states) if found == state]:
            if held and held + nbytes[number] > limit:
                files.append(file)
                file, held = [], 0
            file.append(number)
            held += nbytes[number]
        files += [file] if file else []
    return files


def most_files(nbytes: int, limit: int = FILE_BYTES) -> int:
    """Return how many files a process may have that writes or shares so many bytes, whatever is found to be shared.

    Example:
        >>> most_files(10) - MOST_SHARED
        6
    """
    return MOST_SHARED + 2 * (nbytes // limit) + 6


def begun_files(states: Sequence[int], nbytes: Sequence[int]) -> int:
    """Return how many files are begun before all boxes are compared; they have the first numbers.

    Example:
        >>> begun_files([CHANGED, BEGUN, SHARED, BEGUN], [2, 2, 2, 2])
        1
    """
    return len(gather_files([BEGUN if state == BEGUN else SHARED for state in states], nbytes))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The boxes of one process in a new checkpoint."""

    process: int
    """The process."""
    first: int
    """The number of its first file: those begun early come first, then those that it shares, then the others."""
    rows: Sequence[Row]
    """Its boxes, by leaf and by place."""
    states: Sequence[int]
    """The state of each."""
    numbers: Sequence[int]
    """The number of each in the older checkpoint, -1 for one that is not there."""
    linked: Mapping[int, DataFile]
    """Number of each file of the older checkpoint that it shares, ascending -> the file here."""


def lay_out_shares(
    make: Callable[..., L],
    attempt: str,
    keys: Sequence[str],
    types: Sequence[LeafType],
    leaf_types: Sequence[int],
    *,
    shares: Sequence[Share],
    older: OlderBoxes | None,
    count: int,
) -> L:
    """Lay out the files of some processes.

    Args:
        make: makes a layout of the chunks, the headers, names and writers of the files, and the files that are linked.
        attempt: the new attempt.
        keys: key text of each leaf.
        types: the different types of leaves.
        leaf_types: number of the type of each leaf.
        shares: what each process has.
        older: the older checkpoint; None where nothing is shared.
        count: how many files the checkpoint has at most; their names say it.
    """
    columns: list[list[Any]] = [[] for _ in range(6)]
    names: list[str] = []
    writers: list[int] = []
    linked: dict[int, DataFile] = {}
    written: list[list[Row]] = []
    numbers: list[int] = []
    for share in shares:
        sizes, start = row_bytes(share.rows, types, leaf_types), len(names)
        files, begun = gather_files(share.states, sizes), begun_files(share.states, sizes)
        here = {file: start + begun + at for at, file in enumerate(share.linked)}
        linked |= {here[file]: found for file, found in share.linked.items()}
        if older is not None and here:
            _extend(columns, _shared_columns(share, sizes, here, older))
        fresh = [*range(begun), *range(begun + len(here), len(files) + len(here))]
        named = [data_name(attempt, share.first + at, count) for at in fresh]
        names += [*named[:begun], *(found.name for found in share.linked.values()), *named[begun:]]
        numbers += [start + at for at in fresh]
        written += [[share.rows[row] for row in rows] for rows in files]
        writers += [share.process] * (len(names) - start)
    chunks, made = lay_out_files(attempt, keys, types, leaf_types, written)
    is_mixed = len(shares) > 1 or len(written) + bool(columns[0]) > 1
    file = map(numbers.__getitem__, chunks.file)
    _extend(columns, (chunks.leaf, chunks.box, file, chunks.offset, chunks.nbytes, chunks.block))
    if is_mixed:
        leaves, boxes = columns[:2]
        order = sorted(range(len(leaves)), key=lambda row: (leaves[row], boxes[row] or ()))
        columns = [[column[row] for row in order] for column in columns]
    found = dict(zip(("leaf", "box", "file", "offset", "nbytes", "block"), columns, strict=True))
    headers = [b""] * len(names)
    for number, header in zip(numbers, made, strict=True):
        headers[number] = header
    return make(chunks=Chunks(**found), headers=headers, names=names, writers=writers, linked=linked)


def _shared_columns(share: Share, sizes: Sequence[int], here: Mapping[int, int], older: OlderBoxes) -> list[Any]:
    """Return leaf, box, file, offset, bytes and bytes of a block of each box that lies in a shared file."""
    shared = [row for row, state in enumerate(share.states) if state == SHARED]
    there, nbytes = (list(map(column.__getitem__, shared)) for column in (share.numbers, sizes))
    blocks = {size: block_bytes(size) for size in set(nbytes)}
    file = map(here.__getitem__, map(older.file.__getitem__, there))
    own = zip(*map(share.rows.__getitem__, shared), strict=True) if shared else ((), ())
    return [*own, file, map(older.offset.__getitem__, there), nbytes, map(blocks.__getitem__, nbytes)]


def _extend(columns: Sequence[list[Any]], more: Iterable[Iterable[Any]]) -> None:
    for column, others in zip(columns, more, strict=True):
        column.extend(others)
