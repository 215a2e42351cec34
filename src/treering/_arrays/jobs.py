"""Work on bytes: memory that jax can take as it is, and jobs that this thread and a second one take in turn."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np

from treering._format.index import Index, Piece
from treering._store.crew import FirstError, work_together
from treering._values.human import bytes_text
from treering.errors import CorruptError, NoMemoryError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ALIGNMENT: Final = 64

# Large memory starts where a large page does: else that page comes as 512 small ones, each with a fault of its own.
_PAGE_BYTES: Final = 2 << 20
_PAGES_FROM: Final = 4 << 20

SMALL_BYTES: Final = 8 * 1024
"""Arrays up to this size share allocations."""

# One array that is kept keeps this much.
_ROOM_BYTES: Final = 64 * 1024
_SMALL_BYTES: Final = 64 << 10


def aligned_bytes(nbytes: int, *, pages: bool = True) -> NDArray[np.uint8]:
    """Return ``nbytes`` of unset memory that starts at a multiple of 64 bytes, with ``pages`` from 4 MiB on at 2 MiB.

    Raises:
        UnsupportedError: the system has no such memory; also a ``MemoryError``.

    Example:
        >>> aligned_bytes(3).ctypes.data % 64
        0
    """
    alignment = _PAGE_BYTES if pages and nbytes >= _PAGES_FROM else ALIGNMENT
    try:
        room = np.empty(nbytes + alignment, np.uint8)
    except (MemoryError, ValueError) as error:  # ValueError: more than an address has bits
        hint = "load a part with only=, or slices of it with open"
        raise NoMemoryError(f"there is not enough memory for {bytes_text(nbytes)}", hint=hint) from error
    skip = -room.ctypes.data % alignment
    return room[skip : skip + nbytes]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any], *, pages: bool = True) -> NDArray[Any]:
    """Return an unset array in `aligned_bytes`.

    Example:
        >>> aligned_empty((2, 3), np.dtype("u1")).shape
        (2, 3)
    """
    return np.ndarray(shape, dtype, aligned_bytes(math.prod(shape) * dtype.itemsize, pages=pages))


def aligned_together(wanted: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[NDArray[Any]]:
    """Return unset arrays of some shapes and dtypes in one `aligned_bytes`: large memory comes in large pages.

    Example:
        >>> [array.shape for array in aligned_together([((2, 3), np.dtype("i4")), ((5,), np.dtype("u1"))])]
        [(2, 3), (5,)]
    """
    sizes = [-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in wanted]
    room, ends = aligned_bytes(sum(sizes)), itertools.accumulate(sizes)
    places = zip(wanted, sizes, ends, strict=True)
    return [np.ndarray(shape, dtype, room, end - size) for (shape, dtype), size, end in places]


class SmallRoom:
    """Keeps small runs of bytes at multiples of 64 bytes, many in one allocation, read-only once they are there.

    Example:
        >>> buffer, start = SmallRoom().keep(b"abc")
        >>> bytes(buffer[start : start + 3]), buffer.readonly
        (b'abc', True)
    """

    def __init__(self) -> None:
        self._start_over()

    def _start_over(self) -> None:
        self._room = aligned_bytes(_ROOM_BYTES).data
        self._shown = self._room.toreadonly()
        self._used = 0

    def keep(self, data: bytes) -> tuple[memoryview, int]:
        """Copy up to ``SMALL_BYTES`` bytes; return a read-only buffer and where in it they start."""
        start = self._used
        if (end := start + len(data)) > _ROOM_BYTES:
            self._start_over()
            start, end = 0, len(data)
        self._room[start:end] = data
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return self._shown, start


def on_host(array: NDArray[Any], kind: str, *, own: bool = True) -> Any:
    """Return the leaf of a kind whose stored items are ``array``.

    Args:
        array: the items.
        kind: a kind of leaf whose bytes lie in files.
        own: copy a small array: those were read together, and one that is kept shall not keep its neighbours.

    Raises:
        CorruptError: a text is no UTF-8.

    Example:
        >>> import numpy as np
        >>> on_host(np.frombuffer(b"ring", np.uint8), "str")
        'ring'
    """
    if kind == "str":
        try:
            return array.tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptError(f"a text is not UTF-8: {error.reason}", offset=error.start) from error
    if kind == "bytes":
        return array.tobytes()
    if kind == "bytearray":
        return bytearray(array.data)
    return array[()] if kind == "numpy scalar" else array.copy() if own and array.nbytes <= _SMALL_BYTES else array


T = TypeVar("T")
P = TypeVar("P", bound="PlacedBytes")
B = TypeVar("B", bound=Sized)

Progress: TypeAlias = Callable[[int, int], object]
"""Called as ``progress(done, total)``, in bytes, from the caller's own thread."""

Job: TypeAlias = Callable[[], int]
"""Does a part of the work and returns for how many bytes that counts."""

_TWO_THREADS_FROM: Final = 4 << 20
_FEW_THREADS: Final = 2


@dataclasses.dataclass(slots=True)
class Work:
    """Jobs, and how many bytes they are."""

    jobs: deque[Job] = dataclasses.field(default_factory=deque)
    """What is to be done, in this order."""
    nbytes: int = 0
    """What all of them count."""


def split_by_bytes(
    items: Iterable[T], nbytes: Callable[[T], int], most: int, *, longest: int = sys.maxsize
) -> Iterator[tuple[list[T], int]]:
    """Return runs of items that end where they have ``most`` bytes, and the bytes of each run.

    Example:
        >>> list(split_by_bytes(["ab", "c", "def"], len, 3))
        [(['ab', 'c'], 3), (['def'], 3)]
    """
    items = list(items)
    sizes = list(map(nbytes, items))
    return ((items[some], sum(sizes[some])) for some in cut_by_bytes(sizes, most, longest=longest))


def cut_by_bytes(sizes: Iterable[int], most: int, *, longest: int = sys.maxsize) -> Iterator[slice]:
    """Yield the same runs of items of these sizes, none longer than ``longest``, as slices.

    Example:
        >>> list(cut_by_bytes([2, 1, 3], 3))
        [slice(0, 2, None), slice(2, 3, None)]
    """
    ends, start = list(itertools.accumulate(sizes)), 0
    while start < len(ends):
        stop = bisect.bisect_left(ends, (ends[start - 1] if start else 0) + most, start) + 1
        stop = min(stop, start + longest, len(ends))
        yield slice(start, stop)
        start = stop


class PlacedBytes(Protocol):
    """Bytes of a file that are read together."""

    @property
    def file(self) -> int:
        """Number of the file."""

    @property
    def offset(self) -> int:
        """Where they begin in it."""

    @property
    def nbytes(self) -> int:
        """How many they are."""


def group_near(pieces: Iterable[P], *, gap: int, most: int) -> Iterator[list[P]]:
    """Yield groups of pieces that are read together, ascending; pieces that overlap are in different groups.

    Args:
        pieces: in any order.
        gap: so many bytes that nobody wants may lie between two pieces of a group.
        most: how many bytes a group covers, unless one piece alone has more.

    Example:
        >>> from collections import namedtuple
        >>> Wanted = namedtuple("Wanted", "file offset nbytes")
        >>> wanted = [Wanted(0, 40, 2), Wanted(0, 0, 8), Wanted(0, 9, 8), Wanted(1, 17, 1)]
        >>> [[piece.offset for piece in group] for group in group_near(wanted, gap=4, most=32)]
        [[0, 9], [40], [17]]
    """
    group: list[P] = []
    file = start = stop = 0
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        end = piece.offset + piece.nbytes
        near = piece.file == file and stop <= piece.offset <= stop + gap
        if group and near and end - start <= most:
            group.append(piece)
        else:
            if group:
                yield group
            group, file, start = [piece], piece.file, piece.offset
        stop = end
    if group:
        yield group


def spans_of_file(index: Index, file: int, most: int) -> Iterator[list[Piece]]:
    """Yield stretches of a data file, end to end, of ``most`` bytes or up to twice that; no block exceeds ``most``.

    Where a file has bytes of no leaf, a stretch ends, and the next one begins behind them.
    """
    chunks, rows = index.chunks, index.chunks.of_file(file)
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or chunks.offset[rows[at - 1]] + chunks.nbytes[rows[at - 1]] != chunks.offset[rows[at]]:
            yield from _spans(index, rows[start:at], most)
            start = at


def _spans(index: Index, rows: Sequence[int], most: int) -> Iterator[list[Piece]]:
    chunks = index.chunks
    pieces = (
        (chunk, start, min(start + most, chunks.nbytes[chunk]))
        for chunk in rows
        for start in range(0, chunks.nbytes[chunk], most)
    )
    return (span for span, _ in split_by_bytes(pieces, lambda piece: piece[2] - piece[1], most))


class Tally:
    """Counts bytes from any thread and tells ``progress`` of them from the one that made it.

    Example:
        >>> tally = Tally(8, lambda done, total: print(done, "of", total))
        >>> tally.add(8)
        8 of 8
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total = total
        self._progress = progress
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._done = self._told = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that are done."""
        with self._lock:
            self._done += nbytes
        if nbytes and threading.get_ident() == self._owner:
            self.tell()

    def counted(self, pieces: Iterable[B]) -> Iterator[B]:
        """Yield pieces of bytes, and count each when the next one is asked for."""
        for piece in pieces:
            yield piece
            self.add(len(piece))

    def tell(self) -> None:
        """Tell ``progress`` of what it has not heard of."""
        done = self._done
        if self._progress is not None and self._told < done:
            self._told = done
            self._progress(done, self._total)


def run_all(shared: Work, tally: Tally, own: Work | None = None, *, threads: int = 2) -> None:
    """Run all jobs; the first error of any ends the others, and is raised here.

    Args:
        shared: jobs for any thread; a second one helps where they are worth it.
        tally: counts what the jobs return.
        own: jobs that this thread runs alone, and first: many short ones run faster in one thread than in two.
        threads: how many take jobs; more than two where each waits for an answer.
    """
    many = threads > _FEW_THREADS or shared.nbytes >= _TWO_THREADS_FROM
    others = max(0, min(threads, len(shared.jobs)) - 1) if many else 0
    if not others:
        for jobs in [own.jobs, shared.jobs] if own is not None else [shared.jobs]:
            while jobs:
                tally.add(jobs.popleft()())
        tally.tell()
        return
    failure = FirstError()

    def work(jobs: deque[Job]) -> None:
        while failure.error is None:
            with failure:
                try:
                    job = jobs.popleft()
                except IndexError:
                    return
                tally.add(job())

    def work_here() -> None:
        if own is not None:
            work(own.jobs)
        work(shared.jobs)

    work_together(lambda: work(shared.jobs), others, work_here)
    failure.reraise()
    tally.tell()  # the other thread may have come in last
