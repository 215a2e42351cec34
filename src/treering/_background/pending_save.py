"""What the caller of ``save_async`` holds while the save is being written."""

from __future__ import annotations

from pathlib import Path

from treering._background.save_job import SaveJob
from treering.errors import Timeout


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
        error = self.exception(timeout)
        if error is not None:
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
