"""Saves in flight, and the thread that writes them: one for each process, first in, first out.

A thread of our own, and a daemon: executors refuse work while the interpreter goes down, which is when a last save is
written; and what hangs must not hold the program for ever. ``treering._background.saves`` waits then for what is in
flight.
"""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import math
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Self

from treering._background.save_job import SaveJob, SaveStage, writes_here
from treering._store.waiters import Waiters
from treering._values import timing
from treering.errors import Timeout, Unsupported

_VARIABLE: Final = "TREERING_ASYNC_BYTES"
_UNKNOWN: Final = 4 << 30


def async_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the limit: ``TREERING_ASYNC_BYTES``, else half of the machine's memory.

    Raises:
        Unsupported: it is no number of bytes.

    Example:
        >>> async_bytes({"TREERING_ASYNC_BYTES": "1000000"}), async_bytes({}) > 0
        (1000000, True)
    """
    if text := environment.get(_VARIABLE):
        if not (text.isascii() and text.isdigit()):
            raise Unsupported(f"{_VARIABLE} is {text!r:.100}, but must be a number of bytes")
        return int(text)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows, or a system without that question
        return _UNKNOWN


MOST: Final = 2
"""How many saves are in flight at most: one is written, one waits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reservation:
    """The room of one save among those in flight, a context manager: left by an error, it is given up.

    Entered twice, so that an interrupt in the end of one block is met by the other; nothing is taken before `take`.
    """

    take: Callable[[], None]
    """Waits until there is room, and takes it; Timeout where the saves in flight show no progress any more."""
    give_up: Callable[[], None]
    """Gives it back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.give_up()


class Writer:
    """The saves of this process that are in flight, and those whose errors nobody knows.

    Attributes:
        jobs: what is in flight, in the order in which it was admitted.
        failed: what has failed, as long as nobody was told.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may ask while its thread has it
        self._changed = Waiters()
        self.jobs: list[SaveJob] = []
        self.failed: list[SaveJob] = []
        self._queue: deque[tuple[SaveJob, Callable[[], None]]] = deque()
        self._queued: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._threads: list[int] = []

    # -------------------------------------------------------------------------------------------------- taking saves

    def _admit(self, job: SaveJob) -> None:
        limit = async_bytes()

        def has_room() -> bool:
            held = sum(other.nbytes for other in self.jobs)
            return writes_here() or not self.jobs or (len(self.jobs) < MOST and held + job.nbytes <= limit)

        while True:
            with self._lock:
                if has_room():
                    self.jobs.append(job)
                    return
            self._require_progress(f"could not {job.doing}: no room beside the saves in flight")
            self._changed.wait(has_room, timing.current.writer_pause)

    def reserve(self, job: SaveJob) -> Reservation:
        """Return the room that a save will have; ``with room, room:`` gives it back unless the save is handed over."""
        return Reservation(lambda: self._admit(job), lambda: self._give_up(job))

    def _give_up(self, job: SaveJob) -> None:
        """Drop a save that was not handed over; let the thread see one that was."""
        with self._lock:
            if not self.has_taken(job):
                self._drop(job)
        self._queued.put(None)
        self._changed.notify()

    def has_taken(self, job: SaveJob) -> bool:
        """Tell whether a save was handed over: it will end, well or not."""
        return job.stage is not SaveStage.WAITING or any(other is job for other, _ in tuple(self._queue))

    def hand_over(self, job: SaveJob, write: Callable[[], None]) -> None:
        """Let the thread write an admitted save.

        While the program ends nobody would wait for it, or there is no thread any more: then it is written, when its
        turn has come, before this returns.

        Raises:
            BaseException: it was written here, and failed.
        """
        with self._lock:
            if job not in self.jobs:  # what only tells others why it failed needs no room
                self.jobs.append(job)
            if threading.main_thread().is_alive() and self._has_thread():
                self._queue.append((job, write))
                self._queued.put(None)
                return
        while self.jobs[0] is not job and not self._stalled():
            self._changed.wait(lambda: self.jobs[0] is job, timing.current.writer_pause)
        job.begin()
        self._do(job, write)
        if job.error is not None and not job.told:
            job.told = True
            raise job.error

    def _has_thread(self) -> bool:
        if not self._threads:
            with contextlib.suppress(RuntimeError):  # the interpreter goes down, or the system has no more threads
                # One call of C starts and counts it; `threading.Thread.start` hangs after an interrupt in it.
                self._threads.extend(map(_thread.start_new_thread, [self._work], [()]))
        return bool(self._threads)

    # ------------------------------------------------------------------------------------------------------- writing

    def _work(self) -> None:
        threading.current_thread().name = "treering-saves"
        while True:
            self._queued.get()
            while self._queue:
                with self._lock:
                    job, write = self._queue.popleft()
                    job.begin()
                self._do(job, write)
                del job, write  # or their arrays would stay until the next save comes

    def _do(self, job: SaveJob, write: Callable[[], None]) -> None:
        error: BaseException | None = None
        try:
            write()
        except BaseException as raised:  # noqa: BLE001 - an interrupt too: whoever waits for the save gets it
            # It may be kept for long, and holds no arrays then: not by this frame, nor by those that are over.
            error = raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next)
            _release_frames(error)
        with self._lock:
            job.end(error)
            self.failed = [one for one in (*self.failed, job) if one.error is not None and not one.told]
            self._drop(job)
        self._changed.notify()

    def _drop(self, job: SaveJob) -> None:
        self.jobs = [other for other in self.jobs if other is not job]

    # ------------------------------------------------------------------------------------------------------- waiting

    def of(self, path: Path | None) -> list[SaveJob]:
        """Return what is in flight to a path, or as a step of the run there; all of it for None."""
        with self._lock:
            return [job for job in self.jobs if path is None or path in (job.path, job.run)]

    def take_failed(self, path: Path | None = None) -> list[SaveJob]:
        """Return the saves to a path, or of a run, whose errors nobody knows yet; from now on somebody does.

        Args:
            path: the path; None for all.
        """
        with self._lock:
            untold = [job for job in self.failed if not job.told]
            taken = [job for job in untold if path is None or path in (job.path, job.run)]
            for job in taken:
                job.told = True
            self.failed = [job for job in untold if not job.told]
            return taken

    def wait(self, path: Path | None, timeout: float | None) -> None:
        """Wait until nothing is in flight to a path, or of a run; None for all. The thread that writes does not wait.

        Raises:
            Timeout: it did not end within ``timeout`` seconds, or shows no progress any more.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not writes_here() and (jobs := self.of(path)):
            what = f"the save to {jobs[0].shown!r} is not done"
            self._require_progress(what)
            if (left := end - time.monotonic()) <= 0:
                raise Timeout(f"{what} within {timeout:g} s", hint="it goes on")
            self._changed.wait(lambda: not self.of(path), min(left, timing.current.writer_pause))

    def _stalled(self) -> bool:
        """Tell whether nothing moves any more; a save that waits for its turn moves with the one that has it."""
        begun = [job for job in self.jobs if job.stage is not SaveStage.WAITING]
        now = time.monotonic()
        return all(now - job.moved_at > job.timeout for job in begun or self.jobs)

    def _require_progress(self, what: str) -> None:
        jobs = self.jobs
        if jobs and self._stalled():
            raise Timeout(f"{what}: nothing was written for the {jobs[0].timeout:g} s of its timeout")


def _release_frames(error: BaseException) -> None:
    """Let the frames of an error, and of those that led to it, hold nothing."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        if (one := left.pop()) is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            left += [one.__cause__, one.__context__]
