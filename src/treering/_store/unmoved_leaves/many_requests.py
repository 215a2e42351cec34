"""Many small requests at a store at once: each of them is a wait, and a leaf needs two."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Final

from treering._store.crew import Crew, FirstError

THREADS: Final = 16
"""So many requests are made at once."""

_WAITING: Final = 64


class RequestQueue:
    """Runs jobs in threads of its own while more are added; few of them wait, so that little memory is held.

    Example:
        >>> found = []
        >>> jobs = RequestQueue()
        >>> for number in range(3):
        ...     jobs.add(lambda number=number: found.append(number))
        >>> jobs.finish()
        >>> jobs.close()
        >>> sorted(found)
        [0, 1, 2]
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(_WAITING)
        self._failure = FirstError()
        self._crew = Crew(self._work, THREADS)
        self._crew.__enter__()

    def add(self, job: Callable[[], object]) -> None:
        """Run a job soon; raises the first error of any."""
        self._failure.reraise()
        if self._crew.size:
            self._jobs.put(job)
        else:
            job()

    def finish(self) -> None:
        """Wait for all jobs; raises the first error of any."""
        self._jobs.join()
        self._failure.reraise()

    def close(self) -> None:
        """End the threads; jobs that have not begun are left out. May be called twice."""
        with self._failure:
            raise _Closed
        for _ in range(self._crew.size):
            self._jobs.put(None)
        self._crew.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._failure:
                if self._failure.error is None:
                    job()
            self._jobs.task_done()


class _Closed(Exception):
    """Nothing more is run."""
