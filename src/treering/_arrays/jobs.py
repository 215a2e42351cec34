"""Work on bytes, cut into jobs: this thread and a second one take the next in turn, and progress is told from here."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeAlias, TypeVar

from treering._format.index import Index, Piece
from treering._store.crew import FirstError, work_together

T = TypeVar("T")

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
    """Yield runs of items that end where they have ``most`` bytes, and the bytes of each run.

    Example:
        >>> list(split_by_bytes(["ab", "c", "def"], len, 3))
        [(['ab', 'c'], 3), (['def'], 3)]
    """
    run: list[T] = []
    held = 0
    for item in items:
        run.append(item)
        held += nbytes(item)
        if held >= most or len(run) == longest:
            yield run, held
            run, held = [], 0
    if run:
        yield run, held


def spans_of_file(index: Index, file: int, most: int) -> Iterator[list[Piece]]:
    """Yield stretches of a data file, end to end, of ``most`` bytes or up to twice that; no block exceeds ``most``."""
    chunks = index.chunks
    pieces = (
        (chunk, start, min(start + most, chunks.nbytes[chunk]))
        for chunk in chunks.of_file(file)
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
