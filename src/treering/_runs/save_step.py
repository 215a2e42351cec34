"""A step of a run: whether it is saved, as what, and what has to happen once it is durable."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex

from treering._arrays.jobs import Progress
from treering._arrays.processes import this_processes
from treering._background.deferred_errors import reword
from treering._background.pending_save import PendingSave
from treering._background.saves import in_flight, raise_unreported, wait_for
from treering._checkpoint.save_async import begin
from treering._runs.agreement import said_by_first
from treering._runs.gc import collect_after, remove_steps
from treering._runs.iterators import saved_items
from treering._runs.listing import unmeasured
from treering._runs.run_state import RunState
from treering._runs.step_note import require_step_number, step_metadata
from treering._runs.step_order import Order, order_of
from treering._runs.steps import latest_of, step_path
from treering._runs.superseded import announce_left, unless_it_fails
from treering._values.processes import Processes
from treering.cadence import Decision


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSave:
    """What ``Run.save`` did, and why. It is true where a save of the step was begun.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> with tr.Run(os.path.join(tempfile.mkdtemp(), "run"), save_every=tr.SaveEvery(steps=100)) as run:
        ...     first, second = run.save(100, {"w": 1.5}), run.save(101, {"w": 1.25})
        ...     first.result()
        >>> bool(first), first.saved, bool(second), second.saved
        (True, True, False, False)
    """

    step: int
    """Its number."""
    reason: str
    """Why, in words for people."""
    temporary: bool = False
    """Whether it goes when a newer step is committed."""
    pending: PendingSave | None = None
    """The save in flight; None where nothing is saved."""

    def __bool__(self) -> bool:
        return self.pending is not None

    @property
    def saved(self) -> bool:
        """Whether the step is durable by now, without waiting; False where no save was begun, or where it failed."""
        return self.pending is not None and self.pending.saved()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the step is durable, on process 0 also until every step is removed that has to go.

        It returns at once where nothing is saved. `Run.wait` waits for the removals on the other processes too.

        Raises:
            Timeout: it is not done in that time; it goes on.
            TreeringError: it failed.
        """
        if self.pending is not None:
            self.pending.result(timeout)


def save_step(
    run: RunState,
    step: SupportsIndex,
    tree: Any,
    *,
    metrics: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
    force: bool,
    progress: Progress | bool | None,
) -> StepSave:
    """Save a step of ``run``; ``Run.save`` says more."""
    run.require_open()
    run.warn()
    step = require_step_number(step)
    processes = this_processes(())
    decision = run.pace.decide(step, processes, latest=_first_latest(run), force=force)
    with _taken_back(run, processes):
        if not decision.save:
            raise_unreported(run.path)
            return StepSave(step=step, reason=decision.reason)
        order = Order()
        items, described = None, dict[str, Any]()
        refusal: Exception | None = None
        try:
            raise_unreported(run.path)
            if processes.leads or overwrite:
                order = order_of(run, step, overwrite=overwrite, leads=processes.leads)
            described = step_metadata(
                step, run.now(), metrics=metrics, metadata=metadata, temporary=decision.temporary, mark=order.mark
            )
            items = saved_items(tree)
            if order.mark is not None:
                announce_left(run.path, step, order.mark, order.left)
        except Exception as error:
            if processes.count == 1:
                raise
            refusal = error  # the others wait for this process, and are told
        begun = time.monotonic()
        run.has_saved = True
        with unless_it_fails(run.path, order.mark):
            pending = begin(
                step_path(run.path, step),
                items,
                metadata=described,
                overwrite=overwrite,
                progress=progress,
                processes="all",
                host_local="first",
                timeout=run.timeout,
                run=run.path,
                around=_with_what_follows(run, step, order, begun=begun) if processes.leads else None,
                refusal=refusal,
            )
    if decision.final:
        _see_to_its_end(run, pending, decision)
    reason = decision.reason + order.text(step)
    return StepSave(step=step, reason=reason, temporary=decision.temporary, pending=pending)


@contextlib.contextmanager
def _taken_back(run: RunState, processes: Processes) -> Iterator[None]:
    """Let the rules of a process that is alone hear that a step was not saved: the next one makes up for it."""
    try:
        yield
    except Exception:  # whatever it is: the step was not saved; raised again below
        if processes.count == 1:
            run.pace.take_back()
        raise


# ------------------------------------------------------------------------------------------------ before it is written


def _first_latest(run: RunState) -> int | None:
    """Return the latest step, where the rules count from it; alike on all processes."""
    if run.save_every is None or run.paced:
        return None
    latest = said_by_first(
        lambda: latest_of(run.path),
        path=run.path,
        doing=f"look for the latest step of {run.shown!r}",
        timeout=run.timeout,
    )
    run.paced = True
    return latest


# --------------------------------------------------------------------------------------------------- once it is durable


@contextlib.contextmanager
def _with_what_follows(run: RunState, step: int, order: Order, *, begun: float) -> Iterator[None]:
    """Do what process 0 does on the writing thread when a step is committed.

    Args:
        run: the run.
        step: the step that is saved in the block.
        order: where it stands among the others.
        begun: when the save began, of the monotonic clock.
    """
    with unless_it_fails(run.path, order.mark):
        yield
    seconds = time.monotonic() - begun
    try:
        if order.replaced or order.left:
            run.known.forget()
            remove_steps(run.path, order.left)
        collect_after(
            run.path,
            step,
            run.keep,
            known=run.known,
            there=order.there,
            seconds=seconds,
            save_every=run.save_every_text,
            more_follow=len(in_flight(run.path)) > 1,
        )
        run.unmeasured = unmeasured(run.keep, run.known.metrics)
    except Exception as error:
        shown = os.fspath(step_path(run.path, step))
        raise reword(error, f"the save to {shown!r} is committed; what comes after it failed") from error


def _see_to_its_end(run: RunState, pending: PendingSave, decision: Decision) -> None:
    """Wait until the last step is durable; then let the signal that asked for it have its way."""
    wait_for(pending.path)
    pending.result()
    if decision.signum is not None:
        run.signals.let_go(decision.signum)
