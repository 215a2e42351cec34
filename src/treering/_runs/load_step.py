"""A step of a run -> its tree; and what is known of the steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, SupportsIndex, TypeVar

from treering._arrays.host import this_processes
from treering._arrays.source import Source
from treering._background.saves import raise_unreported, settle, wait_for
from treering._checkpoint.forms import read_source
from treering._checkpoint.joint_load import LoadGroup, spans_processes
from treering._checkpoint.load import LoadOptions
from treering._coordination.allgather import failed_collectives, last_allgather
from treering._runs.copy_run import branch_step
from treering._runs.gc import collect, remove_steps
from treering._runs.iterators import load_items, require_step_number, restore_states
from treering._runs.load_or_init import load_or_initialise
from treering._runs.removal import superseded_steps
from treering._runs.results import Resumed
from treering._runs.run_state import RunState
from treering._runs.steps import missing_step, open_run, records_of, step_path, steps_of
from treering._store.run_folder import is_linked
from treering._values.human import near
from treering._values.processes import format_processes
from treering._values.telemetry import warn_of
from treering._view.progress import showing
from treering.errors import LeavesInitialisedWarning, NotFoundError, NotSharedError, TreeringError
from treering.rules import Verdict, best_steps

T = TypeVar("T")

_SHOWN: Final = 10


def load_step(run: RunState, step: SupportsIndex | None, like: Any, options: LoadOptions) -> Any:
    """Return the tree of a step; ``Run.load`` says more."""
    options.check(like)
    if step is not None:
        return _load(run, require_step_number(step), like, options)()

    def read(latest: int | None) -> Callable[[], Any]:
        if latest is None:
            hint = "load_or_init starts a run if nothing was saved"
            raise NotFoundError(f"the run {run.shown!r} has no step yet", hint=hint)
        return _load(run, latest, like, options)

    return _of_latest(run, read)


def load_or_init(run: RunState, init_fn: Callable[[], T], options: LoadOptions) -> Resumed[T]:
    """Return the latest step, with what it lacks initialised; ``Run.load_or_init`` says more."""
    options.check(())

    def read(step: int | None) -> Callable[[], Resumed[T]]:
        path = None if step is None else step_path(run.path, step)
        with showing(options.progress):
            initialise = load_or_initialise(path, init_fn, options, timeout=run.timeout)

        def finish() -> Resumed[T]:
            tree, initialised = initialise()
            if step is not None and initialised:
                what = f"step {step} of {run.shown!r} does not have these leaves, which `init_fn` initialised"
                warn_of(what, initialised, LeavesInitialisedWarning)
            return Resumed(step, tree, initialised)

        return finish

    return _of_latest(run, read)


def best_step(run: RunState, metric: str, mode: Literal["min", "max"]) -> int | None:
    """Return the step whose metric is best; ``Run.best`` says more."""
    steps = records_of(run.path).steps
    best = best_steps(steps, metric, mode)
    if best or not steps:
        return next(iter(best), None)
    # None would load the latest step.
    names = sorted({name for step in steps for name in step.metrics})
    if metric in names:
        raise NotFoundError(f"no step of the run {run.shown!r} is best: {metric!r} is nan in all that have it")
    close = near(metric, names)
    there = f"they have {', '.join(map(repr, names[:_SHOWN]))}" if names else "they have no metric"
    hint = f"did you mean {close!r}?" if close else there
    raise NotFoundError(f"no step of the run {run.shown!r} has the metric {metric!r}", hint=hint)


def metrics_of(run: RunState, step: SupportsIndex) -> dict[str, float]:
    """Return the metrics of a step; ``Run.metrics`` says more."""
    step = require_step_number(step)
    wait_for(step_path(run.path, step))
    records = records_of(run.path)
    if step in records.unreadable:
        raise records.unreadable[step]
    for record in records.steps:
        if record.step == step:
            return dict(record.metrics)
    raise missing_step(run.shown, step, steps_of(run.path))


def collect_garbage(run: RunState, *, dry_run: bool) -> list[Verdict]:
    """Return what stays and what goes; ``Run.gc`` says more."""
    if dry_run:
        return collect(run.path, run.keep, dry_run=True)
    doing = f"remove steps of {run.shown!r}"
    verdicts: list[Verdict] = []

    def judge() -> None:
        settle(run.path)
        verdicts.extend(collect(run.path, run.keep, dry_run=True))

    def remove() -> None:
        collect(run.path, run.keep, dry_run=False)
        run.known.forget()

    # All processes judge before process 0 removes, so that every process lists the steps that go.
    run.broadcast(lambda: None, doing, before=judge)
    run.broadcast(remove, doing)
    return verdicts


def delete_step(run: RunState, step: SupportsIndex) -> None:
    """Remove a step; ``Run.delete`` says more."""
    step = require_step_number(step)

    def remove() -> None:
        if step not in steps_of(run.path):
            raise missing_step(run.shown, step, steps_of(run.path))
        remove_steps(run.path, [step])
        run.known.forget()

    run.broadcast(remove, f"remove step {step} of {run.shown!r}", before=lambda: settle(run.path))


def branch_run(run: RunState, step: SupportsIndex, new: RunState) -> None:
    """Copy a step into a new run; ``Run.branch`` says more."""
    step = require_step_number(step)

    def copy() -> None:
        if step not in steps_of(run.path):
            raise missing_step(run.shown, step, steps_of(run.path))
        branch_step(run.path, step, new.path, keep=new.keep_text, save_every=new.save_every_text)

    run.broadcast(copy, f"branch from step {step} of {run.shown!r}", before=lambda: settle(run.path))


# --------------------------------------------------------------------------------------------------------------- steps


def _of_latest(run: RunState, read: Callable[[int | None], Callable[[], T]]) -> T:
    """Return what is read of the latest step; None stands for it where there is none.

    Another program may save newer steps, and remove this one, while it is read. Then all processes begin again.

    Args:
        run: the run.
        read: reads a step, and returns what ends the load where all processes have read it.
    """
    latest = run.latest(before=lambda: settle(run.path))  # nothing of the run is in flight then
    while latest is not None:
        found: Callable[[], T] | Exception
        failed, met = failed_collectives(), last_allgather()
        try:
            found = read(latest)
        except Exception as error:
            if failed_collectives() > failed:  # the others may be elsewhere
                raise
            found = error  # raised when the others know
        else:
            if last_allgather() > met:  # a joint load: all have read it
                return found()
        gone = _find_gone(run, found)
        newer = run.latest() if gone else latest
        if newer in (None, latest):
            if gone and (isinstance(found, NotFoundError) or not isinstance(found, Exception)):
                _require_one_folder(run, latest, gone)
            return _value_of(found)
        latest = newer
    return read(None)()


def _value_of(found: Callable[[], T] | Exception) -> T:
    if isinstance(found, Exception):
        raise found
    return found()


def _find_gone(run: RunState, found: object) -> tuple[int, ...]:
    """Return the processes that did not find the step; all call this, and where others do not come, it raises."""
    said = b"gone" if isinstance(found, NotFoundError | NotSharedError) else b""
    try:
        heard = run.gather(said, f"load the latest step of {run.shown!r}")
    except TreeringError as error:
        raise found if isinstance(found, Exception) else error from None
    return tuple(number for number, one in enumerate(heard) if one)


def _require_one_folder(run: RunState, step: int, gone: tuple[int, ...]) -> None:
    """Refuse that some found nothing where others read a step: who hears `NotFoundError` may begin a new run.

    Raises:
        NotSharedError: they did.
    """
    if len(gone) < this_processes(()).count:
        what = f"{format_processes(gone)} did not find what the others found"
        hint = "use one folder for all processes, on a file system that they share"
        error = NotSharedError(f"could not load step {step} of the run {run.shown!r}: {what}", hint=hint)
        error.processes = gone
        raise error


def _load(run: RunState, step: int, like: Any, options: LoadOptions) -> Callable[[], Any]:
    path = step_path(run.path, step)
    is_shared = functools.partial(spans_processes, options.shardings, options.mesh, like)
    is_joint = functools.partial(options.places_array_of, like)
    group = LoadGroup(path, timeout=run.timeout, is_shared=is_shared, is_joint=is_joint)
    with showing(options.progress):
        load = functools.partial(load_items, like=like, options=options, group=group)
        items = group.retry_on_overwrite(functools.partial(_open_step, run, step, path, options, group), load)
    # Only then all of it was checked, and the other processes have theirs.
    return lambda: restore_states(items)


@contextlib.contextmanager
def _open_step(run: RunState, step: int, path: Path, options: LoadOptions, group: LoadGroup) -> Iterator[Source]:
    """Open a step; a save of it that is in flight is waited for."""
    wait_for(path)
    raise_unreported(run.path)
    shared = group.share_index()
    with contextlib.ExitStack() as files:
        try:
            with open_run(run.path) as folder:
                if step in superseded_steps(folder) or is_linked(path):  # files are there, but not the step
                    raise missing_step(run.shown, step, steps_of(run.path))
            opened = read_source(path, mapped=options.mapped, key_map=options.whole_map, shared=shared)
            source = files.enter_context(opened)
        except NotFoundError as error:
            raise missing_step(run.shown, step, steps_of(run.path)) from error
        yield source
