"""Saves in flight, and the thread that writes them: one for each process, first in, first out.

A thread of our own, and a daemon: executors refuse work while the interpreter goes down, which is when a last save is
written; and what hangs must not hold the program for ever. ``treering._background.saves`` waits then for what is in
flight.
"""

from __future__ import annotations

import _thread
import contextlib
import enum
import itertools
import math
import os
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, NoReturn, TypeAlias

from treering._arrays.jobs import Progress
from treering._printable import show_path
from treering._store.crew import Waiters
from treering._values import timing
from treering._values.arguments import wait_seconds
from treering._values.telemetry import note_value
from treering.errors import CancelledError, TimedOutError, TreeringError, UnsupportedError


class Watch:
    """What a save tells while it goes on, and where it hears that it was called off; here by a caller that waits."""

    def move(self) -> None:
        """Note that something was done; raises ``CancelledError`` if it was called off."""

    def claim(self) -> None:
        """Take the last step before the commit; raises ``CancelledError`` if it was called off."""

    def pause(self, seconds: float) -> None:
        """Sleep while other processes are waited for; raises ``CancelledError`` if it was called off."""
        time.sleep(seconds)


UNWATCHED: Final = Watch()
"""The watch of a save that nobody can call off."""


class SaveStage(enum.IntEnum):
    """How far a save is."""

    WAITING = 0
    """It has its snapshot, and waits for its turn."""
    WRITING = 1
    """It is being written; it can be called off."""
    COMMITTING = 2
    """It is being committed, or handed to process 0 for that: nobody can call it off."""
    ENDED = 3
    """It is saved, or it failed."""


_here: Final = threading.local()
"""What is known of the thread that asks."""


def writes_here() -> bool:
    """Tell whether this thread is writing a save in flight: it would wait for itself if it waited for one."""
    return getattr(_here, "writes", False)


_numbers: Final = itertools.count()
Ended: TypeAlias = "Callable[[SaveJob, BaseException | None], bool]"


class SaveJob(Watch):
    """One save in flight.

    Args:
        path: where it goes, resolved.
        shown: where it goes, as the caller named it.
        run: the run that it is a step of, resolved; None for none.
        timeout: seconds after which one that shows no progress is given up by those who wait for it.
        nbytes: how much memory its snapshot holds on to; at most, until it is made.
        ended: told of its end, with the error or None, before anybody else; returns whether it takes care of the error.

    Attributes:
        tells: the same as ``ended``.
        doing: what it does, for messages.
        stage: how far it is.
        error: why it failed, once it has ended; None where it is saved.
        told: whether the caller knows the error.
        forgiven: whether the error is not to be raised by a later call; the end of the program still tells of it.
        cancelled: whether it was called off in time.
        moved_at: when it last showed progress, on the clock of ``time.monotonic``.
        number: how many saves of this process were begun before it.
    """

    def __init__(
        self, path: Path, *, shown: str, run: Path | None, timeout: float, nbytes: int, ended: Ended | None = None
    ) -> None:
        self.path: Final = path
        self.shown: Final = show_path(shown)
        self.doing: Final = f"save {shown!r}"
        self.run: Final = run
        self.timeout: Final = timeout
        self.nbytes = nbytes
        self.stage = SaveStage.WAITING
        self.error: BaseException | None = None
        self.told = False
        self.forgiven = False
        self.cancelled = False
        self.moved_at = time.monotonic()
        self.number: Final = next(_numbers)
        self._raised = False
        self.tells: Final = ended
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a signal handler may ask while its thread has it
        self._waiters = Waiters()

    def text(self) -> str:
        """Return how far it is, for people."""
        if self.stage is not SaveStage.ENDED:
            return "cancelled" if self.cancelled else self.stage.name.lower()
        return "saved" if self.error is None else f"failed: {self.error!r:.200}"

    # -------------------------------------------------------------------------------------- for the thread that writes

    def begin(self) -> None:
        """Note that its turn has come; the thread that asks writes it."""
        with self._lock:
            self.stage = SaveStage.WRITING
        _here.writes = True
        self.moved_at = time.monotonic()

    def move(self) -> None:
        """Note that something was done.

        Raises:
            CancelledError: it was called off; raised once, for the steps that tell others of it move as well.
        """
        self.moved_at = time.monotonic()
        if self.cancelled and not self._raised:
            self._raise_cancelled()

    def claim(self) -> None:
        """Take the last step before the commit; from now on nobody can call it off.

        Raises:
            CancelledError: it was called off before.
        """
        with self._lock:
            if self.cancelled:
                self._raise_cancelled()
            self.stage = SaveStage.COMMITTING
        self.moved_at = time.monotonic()

    def pause(self, seconds: float) -> None:
        """Sleep, as one who waits for other processes does; their steps have deadlines of their own.

        Raises:
            CancelledError: it was called off.
        """
        self.move()
        time.sleep(seconds)

    def progress(self, wanted: Progress | None) -> Progress:
        """Return what is called with the bytes that are done: it notes them, and tells the caller's own function."""

        def step(done: int, total: int) -> None:
            self.move()
            if wanted is not None:
                wanted(done, total)

        return step

    def end(self, error: BaseException | None) -> None:
        """Note how it ended."""
        with self._lock:
            self.error = error
            self.told = self.told or (self.cancelled and isinstance(error, CancelledError))
            self.stage = SaveStage.ENDED
        self.moved_at = time.monotonic()
        self._waiters.notify()

    # ------------------------------------------------------------------------------------------- for those who wait

    def cancel(self) -> bool:
        """Call it off; whether that came in time."""
        self.require_own()
        with self._lock:
            if self.stage < SaveStage.COMMITTING:
                self.cancelled = True
        return self.cancelled

    def ended(self) -> bool:
        """Tell whether it has ended."""
        self.require_own()
        return self.stage is SaveStage.ENDED

    def wait(self, timeout: float | None) -> bool:
        """Wait until it has ended; whether it has within ``timeout`` seconds.

        Raises:
            TreeringError: it can never end as long as this thread waits; or this is another process.
        """
        self.require_own()
        if writes_here() and not self.ended():
            raise TreeringError(f"the thread that writes the saves cannot wait for the one to {self.shown!r}")
        return self._waiters.wait(self.ended, wait_seconds(timeout))

    def _raise_cancelled(self) -> NoReturn:
        self._raised = True
        raise CancelledError(f"the save to {self.shown!r} was cancelled", hint="nothing changed there")

    def require_own(self) -> None:
        """Refuse to answer in another process: a fork copied this, and nothing moves it here.

        Raises:
            TreeringError: this is another process.
        """
        if os.getpid() != self._owner:
            what = f"belongs to process {self._owner}, of which this process is a fork"
            raise TreeringError(f"the save to {self.shown!r} {what}", hint="only that process knows its outcome")


class PendingSave:
    """A save that is being written in the background; its snapshot is safe already.

    An error that nobody asks for is not lost: the next save or load of the same path, or the same run, raises it, and
    the end of the program says so at the latest.

    Args:
        job: the save.

    Example:
        >>> import os, tempfile, treering
        >>> pending = treering.save_async(os.path.join(tempfile.mkdtemp(), "ckpt"), {"step": 7})
        >>> pending.result()
        >>> pending.done(), pending.cancel()
        (True, False)
    """

    def __init__(self, job: SaveJob) -> None:
        self._job = job

    def __repr__(self) -> str:
        return f"<PendingSave {self._job.shown!r}: {self._job.text()}>"

    @property
    def path(self) -> Path:
        """The path that it saves to, absolute."""
        return self._job.path

    def result(self, timeout: float | None = None) -> None:
        """Wait until it is saved; when this returns, it survives a power cut.

        Args:
            timeout: how many seconds to wait; None for as long as it takes.

        Raises:
            TimedOutError: it is not done in that time; it goes on.
            CancelledError: `cancel` stopped it.
            TreeringError: what ``save`` raises.
        """
        if (error := self.exception(timeout)) is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does, and return the error; None where it is saved.

        Args:
            timeout: how many seconds to wait; None for as long as it takes.

        Raises:
            TimedOutError: it is not done in that time; it goes on.
        """
        job = self._job
        if not job.wait(seconds := wait_seconds(timeout)):
            raise TimedOutError(f"the save to {job.shown!r} is not done within {seconds:g} s", hint="it goes on")
        job.told = True
        return job.error

    def done(self) -> bool:
        """Tell whether it has ended, well or not; without waiting."""
        return self._job.ended()

    def saved(self) -> bool:
        """Tell whether it is durable by now, without waiting. It raises nothing; an error is still raised later."""
        return self.done() and self._job.error is None

    def cancel(self) -> bool:
        """Stop it if it is not committed yet; this does not wait.

        In a job of processes the others are told, and fail with ``CancelledError`` or ``ProcessFailedError``.

        Returns:
            Whether it is stopped, so that the path stays as it was and `result` raises ``CancelledError``. Else it is
            committed or being committed, or it has failed.
        """
        return self._job.cancel()


_VARIABLE: Final = "TREERING_ASYNC_BYTES"
_UNKNOWN: Final = 4 << 30


def async_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the limit: ``TREERING_ASYNC_BYTES``, else half of the machine's memory.

    Raises:
        UnsupportedError: it is no number of bytes.

    Example:
        >>> async_bytes({"TREERING_ASYNC_BYTES": "1000000"}), async_bytes({}) > 0
        (1000000, True)
    """
    if text := environment.get(_VARIABLE):
        if not (text.isascii() and text.isdigit()):
            raise UnsupportedError(f"{_VARIABLE} is {text!r:.100}, but must be a number of bytes")
        return int(text)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows, or a system without that question
        return _UNKNOWN


MOST: Final = 2
"""How many saves are in flight at most: one is written, one waits."""


def _is_untold(job: SaveJob) -> bool:
    return job.error is not None and not job.told


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

    def admit(self, job: SaveJob) -> None:
        """Wait until there is room for a save, and take it.

        Raises:
            TimedOutError: the saves in flight show no progress any more.
        """
        limit = async_bytes()

        def has_room() -> bool:
            held = sum(other.nbytes for other in self.jobs)
            return writes_here() or not self.jobs or (len(self.jobs) < MOST and held + job.nbytes <= limit)

        while True:
            with self._lock:
                if has_room():
                    self.jobs.append(job)
                    break
            self._require_progress(f"could not {job.doing}: no room beside the saves in flight")
            self._changed.wait(has_room, timing.current.writer_pause)
        self._tell()

    def _tell(self) -> None:
        jobs = self.jobs
        note_value("save/in_flight", len(jobs))
        note_value("save/in_flight_bytes", sum(job.nbytes for job in jobs))

    @contextlib.contextmanager
    def handing_over(self, job: SaveJob) -> Iterator[None]:
        """Where the block fails, drop a save that was not handed over, and let the thread see one that was.

        Entered twice, so that an interrupt in the end of one block is met by the other.
        """
        try:
            yield
        except BaseException:  # raised again below
            with self._lock:
                if not self.has_taken(job):
                    self._drop(job)
            self._queued.put(None)
            self._changed.notify()
            raise

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
        if job.error is not None and not (job.told or job.forgiven):
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
            release_frames(error)
        self.note_end(job, error)
        _here.writes = False

    def note_end(self, job: SaveJob, error: BaseException | None) -> None:
        """Note how a save ended: one that was written, or failed before it was handed over."""
        if job.tells is not None:
            job.forgiven = job.tells(job, error)
        with self._lock:
            job.end(error)
            if error is None or job.forgiven:
                self.excuse(job.run, before=job)
            self.failed = list(filter(_is_untold, (*self.failed, job)))
            self._drop(job)
        self._changed.notify()
        self._tell()

    def _drop(self, job: SaveJob) -> None:
        self.jobs = [other for other in self.jobs if other is not job]

    # ------------------------------------------------------------------------------------------------------- waiting

    def of(self, path: Path | None) -> list[SaveJob]:
        """Return what is in flight to a path, or as a step of the run there; all of it for None."""
        with self._lock:
            return list(filter(lambda job: path is None or path in (job.path, job.run), self.jobs))

    def excuse(self, run: Path | None, *, before: SaveJob | None = None) -> None:
        """Let the end of the program say nothing of forgiven failures of a run: a later save is what counts.

        Args:
            run: the run.
            before: that save; only what was begun before it is excused. None for all.
        """

        def counts(job: SaveJob) -> bool:
            return not job.forgiven or job.run != run or (before is not None and job.number > before.number)

        self.failed = list(filter(counts, self.failed))

    def take_failed(self, path: Path | None = None) -> list[SaveJob]:
        """Return the saves to a path, or of a run, whose errors nobody knows yet; from now on somebody does.

        Args:
            path: the path; None for all.
        """
        with self._lock:
            return self._take_untold(path)

    def _take_untold(self, path: Path | None) -> list[SaveJob]:
        untold = [job for job in self.failed if not job.told]
        taken = [job for job in untold if path is None or (path in (job.path, job.run) and not job.forgiven)]
        for job in taken:
            job.told = True
        self.failed = [job for job in untold if not job.told]
        return taken

    def wait(self, path: Path | None, timeout: float | None) -> None:
        """Wait until nothing is in flight to a path, or of a run; None for all. The thread that writes does not wait.

        Raises:
            TimedOutError: it did not end within ``timeout`` seconds, or shows no progress any more.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not writes_here() and (jobs := self.of(path)):
            what = f"the save to {jobs[0].shown!r} is not done"
            self._require_progress(what)
            if not (left := end - time.monotonic()) > 0:
                raise TimedOutError(f"{what} within {timeout:g} s", hint="it goes on")
            self._changed.wait(lambda: not self.of(path), min(left, timing.current.writer_pause))

    def _stalled(self) -> bool:
        """Tell whether nothing moves any more; a save that waits for its turn moves with the one that has it."""
        begun = [job for job in self.jobs if job.stage is not SaveStage.WAITING]
        now = time.monotonic()
        return all(now - job.moved_at > job.timeout for job in begun or self.jobs)

    def _require_progress(self, what: str) -> None:
        jobs = self.jobs
        if jobs and self._stalled():
            raise TimedOutError(f"{what}: nothing was written for the {jobs[0].timeout:g} s of its timeout")


def release_frames(error: BaseException, *, callers: bool = False) -> None:
    """Let the frames of an error, and of those that led to it, hold nothing; nor those of the callers, if asked for."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        if (one := left.pop()) is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            if callers:
                one.__traceback__ = None
            left += [one.__cause__, one.__context__]
