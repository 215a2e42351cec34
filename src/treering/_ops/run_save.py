"""A step of a run: whether it is saved, as what, and what has to happen once it is durable."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, SupportsIndex

import jax
import numpy as np

from treering._arrays.processes import this_processes
from treering._format.document import INDEX_NAME
from treering._format.run_document import StepNote, noted
from treering._ops.background import in_flight, raise_unreported, wait_for
from treering._ops.pending import PendingSave
from treering._ops.run_gc import collect_after, remove_steps
from treering._ops.run_items import saved_items
from treering._ops.run_meeting import said_by_first
from treering._ops.run_state import RunState
from treering._ops.run_steps import step_path, steps_of
from treering._ops.save_async import begin
from treering._store.run_folder import HIGHEST_STEP, step_of_name
from treering._values.processes import Processes
from treering._values.steps_text import steps_text
from treering.cadence import Decision
from treering.errors import Exists, Unsupported

__all__ = ["StepSave", "require_step_number", "save_step"]

_NUMBERS: Final = (int, float, np.generic, np.ndarray, jax.Array)
# Of numpy: truth values, ints, floats; V: those of ml_dtypes, bfloat16 for instance.
_KINDS: Final = "biufV"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSave:
    """What ``Run.save`` did, and why. It is true where the step is being saved."""

    step: int
    """Its number."""
    saved: bool
    """Whether it is being saved; False where ``save_every`` says that it is not its turn."""
    reason: str
    """Why, in words for people."""
    temporary: bool = False
    """Whether it goes when a newer step is committed."""
    pending: PendingSave | None = None
    """The save in flight; None where nothing is saved."""

    def __bool__(self) -> bool:
        return self.saved

    def result(self, timeout: float | None = None) -> None:
        """Wait until the step is durable, and every step removed that has to go; return at once where nothing is saved.

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
) -> StepSave:
    """Save a step of ``run``; ``Run.save`` says more."""
    run.require_open()
    step = require_step_number(step)
    processes = this_processes(())
    decision = run.pace.decide(step, processes, latest=_first_latest(run), force=force)
    with _taken_back(run, processes):
        if not decision.save:
            raise_unreported(run.path)
            return StepSave(step=step, saved=False, reason=decision.reason)
        order = _Order(replaced=False, left=())
        items, described = None, dict[str, Any]()
        refusal: Exception | None = None
        try:
            raise_unreported(run.path)
            described = _described(run, step, metrics=metrics, metadata=metadata, temporary=decision.temporary)
            if processes.leads or overwrite:
                order = _order(run, step, overwrite=overwrite)
            items = saved_items(tree)
        except Exception as error:
            if processes.count == 1:
                raise
            refusal = error  # the others wait for this process, and are told
        pending = begin(
            step_path(run.path, step),
            items,
            metadata=described,
            overwrite=overwrite,
            progress=None,
            processes="all",
            host_local="first",
            timeout=run.timeout,
            run=run.path,
            after=_Afterwards(run, step, overwrite=overwrite) if processes.leads else None,
            refusal=refusal,
        )
    if decision.final:
        _see_to_its_end(run, pending, decision)
    return StepSave(
        step=step,
        saved=True,
        reason=decision.reason + order.text(step),
        temporary=decision.temporary,
        pending=pending,
    )


@contextlib.contextmanager
def _taken_back(run: RunState, processes: Processes) -> Iterator[None]:
    """Let the rules of a process that is alone hear that a step was not saved: the next one makes up for it."""
    try:
        yield
    except Exception:
        if processes.count == 1:
            run.pace.take_back()
        raise


def require_step_number(step: Any) -> int:
    """Return a step as an int; numpy's and jax's are taken too.

    Raises:
        Unsupported: it is no number of a step.

    Example:
        >>> require_step_number(np.int32(7))
        7
    """
    hint = "steps are ints from 0 on"
    try:
        number = operator.index(step)
    except TypeError:
        raise Unsupported(f"{step!r:.100} is no step", hint=hint) from None
    if isinstance(step, bool | np.bool_) or not 0 <= number <= HIGHEST_STEP:
        raise Unsupported(f"{step!r:.100} is no step", hint=hint)
    return number


# ------------------------------------------------------------------------------------------------ before it is written


def _first_latest(run: RunState) -> int | None:
    """Return the latest step, where the rules count from it; alike on all processes."""
    if run.save_every is None or run.paced:
        return None
    latest = said_by_first(
        lambda: max(steps_of(run.path), default=None),
        path=run.path,
        doing=f"look for the latest step of {run.shown!r}",
        timeout=run.timeout,
    )
    run.paced = True
    return latest


def _described(
    run: RunState,
    step: int,
    *,
    metrics: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    temporary: bool,
) -> dict[str, Any]:
    """Return the metadata of a step's checkpoint: the user's, and the run's own note."""
    if not isinstance(metadata, Mapping | None):
        raise Unsupported(f"metadata is a {type(metadata).__name__}, not a dict of JSON")
    note = StepNote(step=step, saved=run.now(), metrics=_numbers(metrics), temporary=temporary)
    return noted(metadata or {}, note)


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    if not isinstance(metrics, Mapping | None):
        raise Unsupported(f"metrics is a {type(metrics).__name__}, not a dict of numbers")
    return {_name(name): _number(name, value) for name, value in (metrics or {}).items()}


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise Unsupported(f"the metric {name!r:.100} has no name: names are str")
    return name


def _number(name: str, value: Any) -> float:
    kind = value.dtype.kind if isinstance(value, np.generic | np.ndarray | jax.Array) else "f"
    if isinstance(value, _NUMBERS) and np.ndim(value) == 0 and kind in _KINDS:
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise Unsupported(f"the metric {name!r:.100} is {value!r:.100}, which is no float") from error
    hint = "metrics are numbers: int, float, or an array without axes"
    raise Unsupported(f"the metric {name!r:.100} is {value!r:.100}", hint=hint)


@dataclasses.dataclass(frozen=True, slots=True)
class _Order:
    """Where a step stands among those that are there."""

    replaced: bool
    """Whether there was such a step."""
    left: Sequence[int]
    """Later steps, which are left behind."""

    def text(self, step: int) -> str:
        """Return what becomes of them, to follow the reason of a save."""
        replaced = f"; it replaces step {step}" if self.replaced else ""
        gone = f"; what was saved later goes, {steps_text(self.left)}" if self.left else ""
        return replaced + gone


def _order(run: RunState, step: int, *, overwrite: bool) -> _Order:
    """Hold a step against those that are there and in flight.

    Raises:
        Exists: it is there, or a later one is, and nobody said what becomes of them.
    """
    names = _names_in(run.path)
    if names is not None:
        if INDEX_NAME in names:
            raise Exists(f"{run.shown!r} is a checkpoint, not a run", hint="choose another folder for the run")
        flying = {pending.path.name for pending in in_flight(run.path)}
        if step > max(_steps_in(names | flying), default=-1):
            # By names alone: a look into thousands of steps would hold up the loop.
            return _Order(replaced=False, left=())
    # Only what is in flight knows which steps there will be: it may remove some, or fail.
    wait_for(run.path)
    raise_unreported(run.path)
    there = steps_of(run.path)
    later = [number for number in there if number > step]
    if not overwrite and step in there and not later:
        what = f"step {step} of the run {run.shown!r} is there already"
        raise Exists(what, hint=f"a loop that goes on from it begins at {step + 1}; overwrite=True replaces it")
    if not overwrite and later:
        raise Exists(
            f"step {step} of the run {run.shown!r} is older than its latest step, {later[-1]}",
            hint=f"run.branch(step, path) goes on from an older step in a new run; overwrite=True goes on here, and "
            f"removes the steps after {step}",
        )
    return _Order(replaced=step in there, left=later)


def _names_in(path: Path) -> set[str] | None:
    """Return what lies in a run's folder; None where it cannot be read, for a reason that a closer look will tell."""
    try:
        return {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return set()
    except OSError:
        return None


def _steps_in(names: Iterable[str]) -> set[int]:
    return {step for name in names if (step := step_of_name(name)) is not None}


# --------------------------------------------------------------------------------------------------- once it is durable


@dataclasses.dataclass(slots=True)
class _Afterwards:
    """What process 0 does on the writing thread when a step is committed."""

    run: RunState
    step: int
    overwrite: bool = dataclasses.field(kw_only=True)
    begun: float = dataclasses.field(default_factory=time.monotonic)

    def __call__(self) -> None:
        run = self.run
        seconds = time.monotonic() - self.begun
        if self.overwrite:
            # Saves end in the order in which they began: what is later by now is of the branch that was left.
            remove_steps(run.path, [step for step in steps_of(run.path) if step > self.step])
        collect_after(
            run.path,
            self.step,
            run.keep,
            seconds=seconds,
            keep_text=run.keep_text,
            save_every=run.save_every_text,
        )


def _see_to_its_end(run: RunState, pending: PendingSave, decision: Decision) -> None:
    """Wait until the last step is durable; then let the signal that asked for it have its way."""
    wait_for(pending.path)
    pending.result()
    if decision.signum is not None:
        run.signals.let_go(decision.signum)
