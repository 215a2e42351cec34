"""A save in flight: what the thread that writes it and those who wait for it know of each other."""

from __future__ import annotations

import enum
import os
import threading
import time
from pathlib import Path
from typing import Final, NoReturn

from treering._arrays.jobs import Progress
from treering._printable import show_path
from treering._store.waiters import Waiters
from treering.errors import Cancelled, Timeout, TreeringError


class Watch:
    """What a save tells while it goes on, and where it hears that it was called off; here by a caller that waits."""

    def move(self) -> None:
        """Note that something was done; raises ``Cancelled`` if it was called off."""

    def claim(self) -> None:
        """Take the last step before the commit; raises ``Cancelled`` if it was called off."""

    def pause(self, seconds: float) -> None:
        """Sleep while other processes are waited for; raises ``Cancelled`` if it was called off."""
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


class _Here(threading.local):
    """What is known of the thread that asks."""

    writes = False


_here: Final = _Here()


def writes_here() -> bool:
    """Tell whether this thread is writing a save in flight: it would wait for itself if it waited for one."""
    return _here.writes


class SaveJob(Watch):
    """One save in flight.

    Args:
        path: where it goes, resolved.
        shown: where it goes, as the caller named it.
        run: the run that it is a step of, resolved; None for none.
        timeout: seconds after which one that shows no progress is given up by those who wait for it.
        nbytes: how much memory its snapshot holds on to.

    Attributes:
        doing: what it does, for messages.
        stage: how far it is.
        error: why it failed, once it has ended; None where it is saved.
        told: whether the caller knows the error.
        cancelled: whether it was called off in time.
        moved_at: when it last showed progress, on the clock of ``time.monotonic``.
    """

    def __init__(self, path: Path, *, shown: str, run: Path | None, timeout: float, nbytes: int) -> None:
        self.path: Final = path
        self.shown: Final = show_path(shown)
        self.doing: Final = f"save {shown!r}"
        self.run: Final = run
        self.timeout: Final = timeout
        self.nbytes: Final = nbytes
        self.stage = SaveStage.WAITING
        self.error: BaseException | None = None
        self.told = False
        self.cancelled = False
        self.moved_at = time.monotonic()
        self._raised = False
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
            Cancelled: it was called off; raised once, for the steps that tell others of it move as well.
        """
        self.moved_at = time.monotonic()
        if self.cancelled and not self._raised:
            self._raise_cancelled()

    def claim(self) -> None:
        """Take the last step before the commit; from now on nobody can call it off.

        Raises:
            Cancelled: it was called off before.
        """
        with self._lock:
            if self.cancelled:
                self._raise_cancelled()
            self.stage = SaveStage.COMMITTING
        self.moved_at = time.monotonic()

    def pause(self, seconds: float) -> None:
        """Sleep, as one who waits for other processes does; their steps have deadlines of their own.

        Raises:
            Cancelled: it was called off.
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
            self.told = self.told or (self.cancelled and isinstance(error, Cancelled))
            self.stage = SaveStage.ENDED
        _here.writes = False
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
        return self._waiters.wait(self.ended, timeout)

    def _raise_cancelled(self) -> NoReturn:
        self._raised = True
        raise Cancelled(f"the save to {self.shown!r} was cancelled", hint="nothing changed there")

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
        """Where it goes, resolved."""
        return self._job.path

    def result(self, timeout: float | None = None) -> None:
        """Wait until it is saved; when this returns, it survives a power cut.

        Args:
            timeout: how many seconds to wait; None for as long as it takes.

        Raises:
            Timeout: it is not done in that time; it goes on.
            Cancelled: it was called off.
            TreeringError: what ``save`` raises.
        """
        if (error := self.exception(timeout)) is not None:
            raise error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does, and return the error; None where it is saved.

        Args:
            timeout: how many seconds to wait; None for as long as it takes.

        Raises:
            Timeout: it is not done in that time; it goes on.
        """
        job = self._job
        if not job.wait(timeout):
            raise Timeout(f"the save to {job.shown!r} is not done within {timeout:g} s", hint="it goes on")
        job.told = True
        return job.error

    def done(self) -> bool:
        """Tell whether it has ended, well or not; without waiting."""
        return self._job.ended()

    def saved(self) -> bool:
        """Tell whether it is saved by now; without waiting, and an error stays to be raised."""
        return self.done() and self._job.error is None

    def cancel(self) -> bool:
        """Call it off, if it is not committed yet; without waiting.

        In a job of processes the others are told, and fail with ``Cancelled`` or ``ProcessFailed``.

        Returns:
            True where it comes to nothing. What stood at the path stays, and `result` raises ``Cancelled``. False where
            it is committed, or being committed, or has failed.
        """
        return self._job.cancel()
