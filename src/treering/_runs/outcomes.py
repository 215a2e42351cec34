"""How the saves of a run ended: what failed is raised, or warned of and counted, as the run was told.

A save that was begun ends on the writer's thread; what is to be said of it waits for the next call of the run, on the
caller's thread. Errors that say that the call itself was wrong are raised at once, whatever the run was told. All
processes of a job go by the class of the error, which is the same on all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from treering import errors
from treering._background.saves import error_text, watch_for_end, writer
from treering._background.writer import SaveJob, release_frames
from treering._runs.results import RunStatus, StepSave
from treering._runs.steps import step_path
from treering._store.resolve import resolved
from treering._values.human import pluralize
from treering._values.telemetry import note_event, note_value, warn_of
from treering.errors import SaveFailedWarning, SavesFailedError, UnsupportedError

# The program has to change, or its user has to do something; or somebody wanted it so.
_NO_FAILURES: Final = (
    errors.CancelledError, errors.ClosedError, errors.ExistsError, errors.FormatError, errors.MismatchError,
    errors.MissingExtraError, SavesFailedError, UnsupportedError, SaveFailedWarning,
)  # fmt: skip


class SaveOutcomes:
    """What became of the saves that a run of this process has begun.

    Args:
        path: the folder of the run.
        shown: the same, for messages.
        on_save_error: "raise" or "warn".
        max_failures: after how many failures in a row a run that warns raises; None for never.

    Attributes:
        warns: whether failures are warned of.
        most: after how many in a row they are raised all the same.

    Raises:
        UnsupportedError: an argument has no meaning.

    Example:
        >>> outcomes = SaveOutcomes(Path("run"), "run", "warn", 3)
        >>> outcomes.forgives(OSError("the disk is full")), outcomes.forgives(errors.ExistsError("it is there"))
        (True, False)
    """

    def __init__(self, path: Path, shown: str, on_save_error: str, max_failures: int | None) -> None:
        if on_save_error not in ("raise", "warn"):
            raise UnsupportedError(f'on_save_error is {on_save_error!r:.100}, but must be "raise" or "warn"')
        self.warns = on_save_error == "warn"
        if max_failures is not None and not self.warns:
            hint = 'pass on_save_error="warn" too; without it, the first failure is raised'
            raise UnsupportedError("max_failures counts failures that are warned of", hint=hint)
        if max_failures is not None and (type(max_failures) is not int or max_failures < 1):
            raise UnsupportedError(f"max_failures is {max_failures!r:.100}, but must be a number of 1 or more, or None")
        self.most = max_failures
        self._path = path
        self._shown = shown
        self._lock = threading.RLock()  # a signal handler may ask while its thread has it
        self._newest: tuple[int, float] | None = None
        # The numbers of the jobs that have failed since the last one that did not.
        self._failures: list[int] = []
        self._raised = False
        self._reached = False
        self._last: tuple[int, BaseException] | None = None
        self._unsaid: list[tuple[int, SaveJob, int]] = []

    def forgives(self, error: BaseException) -> bool:
        """Tell whether an error is warned of, and not raised."""
        return self.warns and isinstance(error, Exception) and not isinstance(error, _NO_FAILURES)

    def ended(self, step: int, job: SaveJob, error: BaseException | None, committed: float | None) -> bool:
        """Note how a save ended, on whichever thread; return whether the error is warned of.

        Args:
            step: its number.
            job: the save.
            error: why it failed; None if it did not.
            committed: when it was committed, by the monotonic clock, where that came before the error.
        """
        failed = error is not None and committed is None
        if self._newest is not None:
            note_value("run/step_age", time.monotonic() - self._newest[1])
        if failed:
            note_event("save/failed")
        else:
            note_value("run/step", step)
        with self._lock:
            if not failed:
                self._newest = step, time.monotonic() if committed is None else committed
                # One that came after it may have failed before it could even begin.
                self._failures = list(filter(job.number.__lt__, self._failures))
                self._raised &= bool(self._failures)
                self._reached &= self.most is not None and len(self._failures) >= self.most
            elif isinstance(error, Exception) and not isinstance(error, _NO_FAILURES):
                self._failures.append(job.number)
                self._reached = self.most is not None and len(self._failures) >= self.most
            if error is not None:
                self._last = step, error
            if self.warns and isinstance(error, SavesFailedError):  # another process came to that first
                self._reached = not self._raised
                return True
            if error is None or not self.forgives(error):
                return False
            self._unsaid.append((step, job, len(self._failures) if failed else 0))
            return True

    def fail(self, step: int, error: Exception, timeout: float, *, raises: bool) -> StepSave:
        """Note, and warn of, a save that could not begin; return what the caller gets in place of a save.

        Args:
            step: its number.
            error: why.
            timeout: that of the run.
            raises: as for `settle`: in a job all raise at the next call.

        Raises:
            SavesFailedError: it was the last of too many.
        """
        release_frames(error, callers=True)  # it may be kept for long, and must not hold the tree
        place = step_path(self._path, step)
        ended = BegunSave(self, step).ended
        job = SaveJob(resolved(place), shown=str(place), run=self._place, timeout=timeout, nbytes=0, ended=ended)
        watch_for_end()
        writer().note_end(job, error)
        self.settle(raises=raises)
        return StepSave(step=step, reason=f"it failed: {error_text(error)}", error=error)

    def settle(self, *, raises: bool = True) -> None:
        """Warn of each failure that nobody was told of, on the caller's thread.

        Args:
            raises: whether too many are raised here; the others of a job have to be told of that.

        Raises:
            SavesFailedError: there were too many in a row.
        """
        while (one := self._next_unsaid()) is not None:  # one by one: a warning may be an error
            step, job, number = one
            if job.told:  # by the caller's `result()`
                continue
            in_a_row = f" ({number} in a row)" if number > 1 else ""
            what = f"the save of step {step} of the run {self._shown!r} failed{in_a_row}"
            if not number:  # nothing is lost that the end of the program would have to tell
                what = f"step {step} of the run {self._shown!r} is saved, but what follows a save failed"
                job.told = True
            warn_of(what, [error_text(job.error)], SaveFailedWarning)
        if raises and self._reached and self._last is not None:
            self._reached, self._raised = False, True
            step, cause = self._last
            writer().excuse(self._place)
            count = pluralize(len(self._failures), "saves")
            what = f"{count} of the run {self._shown!r} failed in a row; the last, of step {step}: {error_text(cause)}"
            newest = "nothing was saved before" if self._newest is None else f"the newest step is {self._newest[0]}"
            raise SavesFailedError(what, hint=newest) from cause

    def _next_unsaid(self) -> tuple[int, SaveJob, int] | None:
        with self._lock:
            return self._unsaid.pop(0) if self._unsaid else None

    @contextlib.contextmanager
    def warning(self, what: str) -> Iterator[None]:
        """Warn of an error of the block that is no failed save, where the run warns."""
        try:
            yield
        except Exception as error:
            if not self.forgives(error):
                raise
            warn_of(f"{what} of the run {self._shown!r} failed", [error_text(error)], SaveFailedWarning)

    def loaded(self, step: int, saved: float) -> None:
        """Note that a step was loaded, which was saved at that time of POSIX."""
        with self._lock:
            if self._newest is None or step > self._newest[0]:
                self._newest = step, time.monotonic() - max(0.0, time.time() - saved)

    @functools.cached_property
    def _place(self) -> Path:
        return resolved(self._path)

    def status(self) -> RunStatus:
        """Return what is known; ``Run.status`` says more."""
        flying = [job for job in writer().of(None) if job.run == self._place]
        with self._lock:
            step, since = self._newest or (None, None)
            age = None if since is None else max(0.0, time.monotonic() - since)
            last = None if self._last is None else self._last[1]
            return RunStatus(
                step=step, seconds=age, failures=len(self._failures), last_error=last, saves_in_flight=len(flying),
                bytes_in_flight=sum(job.nbytes for job in flying),
            )  # fmt: skip


@dataclasses.dataclass(slots=True)
class BegunSave:
    """A save of a run on its way to its end."""

    outcomes: SaveOutcomes
    step: int
    begun: float = dataclasses.field(default_factory=time.monotonic)
    """When it began, by the monotonic clock."""
    committed: float | None = None
    """When it was committed, by the monotonic clock; noted on the process that does something after that."""

    def ended(self, job: SaveJob, error: BaseException | None) -> bool:
        """Note its end; return whether the error is warned of."""
        return self.outcomes.ended(self.step, job, error, self.committed)
