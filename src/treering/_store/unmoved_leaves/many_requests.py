"""Many small requests at a store at once: each of them is a wait, and a leaf needs two."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from treering._store.crew import Crew, FirstError, work_together

T = TypeVar("T")

_THREADS: Final = 16
_WAITING: Final = 64


def run_at_once(jobs: Iterable[Callable[[], object]]) -> None:
    """Run all jobs in several threads; the first error of any ends the others, and is raised here.

    Example:
        >>> found = []
        >>> run_at_once([lambda: found.append(1), lambda: found.append(2)])
        >>> sorted(found)
        [1, 2]
    """
    todo = deque(jobs)
    failure = FirstError()

    def work() -> None:
        while failure.error is None:
            with failure:
                try:
                    job = todo.popleft()
                except IndexError:
                    return
                job()

    work_together(work, min(len(todo), _THREADS) - 1 if todo else 0)
    failure.reraise()


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
        self._crew = Crew(self._work, _THREADS)
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
