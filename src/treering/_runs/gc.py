"""Garbage collection of a run: remove the steps that its policy does not keep, and finish interrupted removals."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from treering._format.document import read_names, read_summary
from treering._runs.removal import (
    attempt_in,
    collect_errors,
    read_superseded,
    remove_step,
    remove_superseded,
    superseded_steps,
    tidy_step,
)
from treering._runs.steps import judge, note_records, open_run, read_run, records_in, records_of
from treering._store.run_folder import RunFolder
from treering._store.waiting import warn_denied
from treering.errors import BusyError, NotFoundError, TreeringError
from treering.retention import Policy, Verdict

if TYPE_CHECKING:
    from treering._runs.run_state import RunState


def collect(path: Path, keep: Policy | None, *, dry_run: bool) -> list[Verdict]:
    """Remove the steps that a policy does not keep, the oldest first, and finish removals that were interrupted before.

    A step stays if another process has replaced it since it was judged, or is saving to it; the next call judges it
    again. Steps that cannot be read are not judged.

    Args:
        path: the run's folder; where none is there is nothing to do.
        keep: the policy; None keeps all but temporary steps that a newer one has replaced.
        dry_run: whether only to judge.

    Returns:
        What becomes of each step, ascending.

    Raises:
        StoreError: the system refused. The other steps are done all the same; what is left is for the next call.
    """
    return judge(records_of(path), keep) if dry_run else read_run(path, lambda run: _collect(run, keep), [])


def collect_after(
    state: RunState,
    step: int,
    *,
    there: Iterable[int] | None,
    left: Collection[int] = (),
    seconds: float | None,
    more_follow: bool = False,
) -> None:
    """Do what follows the commit of a step: remove the steps that the policy does not keep, and note the others.

    What this costs does not grow with the steps that stay: only those are looked at that are new here, that would go,
    or that decide it. What a dead process left in the folder of another step is for `collect`; in a bucket the first
    save of a process looks for it too, by one listing, and then one a day.

    Args:
        state: the run.
        step: the step.
        there: the steps whose folders were there when the save began, and those that were in flight; None to look.
        left: the steps that this save has left behind.
        seconds: how long the save took.
        more_follow: whether another save of the run is waiting, which will note this step too.

    Raises:
        StoreError: as `collect` does.
        LinkRefusedError: ``run.json`` is a link.
    """
    errors: list[TreeringError] = []
    known = state.known
    with RunFolder(state.path) as run:
        back = None
        if run.has_left():
            known.forget()
            errors += remove_superseded(run)
            back = read_superseded(run) if errors else None
        known.bring_up(run, step, there, seconds=seconds, left={*left, *superseded_steps(run)} if errors else left)
        going = known.going(run, state.keep)
        if back is not None:
            going.pop(back.step, None)  # with it would go what hides the steps that it has left behind
        if going and known.denied is not None:
            warn_denied(state.path, known.denied, "steps that `keep` does not keep")
            going.clear()
        known.drop(going)
        with collect_errors(errors):
            known.write(run, state.keep_text, state.save_every_text, may_wait=more_follow and not going)
        removed = _remove(run, going, errors)
        if run.store.grace:
            known.leave(removed, run.store.grace)
        known.expect(_tidy(run, known.untidy(), step, errors, by_age=known.by_age))
    _raise_first(error for error in errors if not isinstance(error, BusyError))  # the next call comes by again


def remove_steps(path: Path, steps: Iterable[int], *, by_age: bool = False) -> None:
    """Remove steps, whatever a policy says; one that is not there is gone already.

    A step whose index cannot be read is gone too, but its files stay: nothing proves whose they are. With ``by_age``
    what is left over in a bucket is judged by its age too.

    Raises:
        BusyError: another process is saving to one of them.
        StoreError: the system refused. The other steps are gone all the same.
    """
    errors: list[TreeringError] = []
    with contextlib.suppress(NotFoundError), open_run(path) as run:
        errors += _clear(run, dict.fromkeys(sorted(steps)), by_age=by_age)
        with collect_errors(errors):
            note_records(run, records_in(run))
    _raise_first(errors)


def _collect(run: RunFolder, keep: Policy | None) -> list[Verdict]:
    """Judge the steps, remove those that no rule keeps, and note the others."""
    records = records_in(run)
    verdicts = judge(records, keep)
    going = {verdict.step for verdict in verdicts if not verdict.kept}
    errors = _clear(run, {old.step: old.digest for old in records.steps if old.step in going}, by_age=True)
    with collect_errors(errors):
        note_records(run, records)
        run.drop_tombstones()
    _raise_first(error for error in errors if not isinstance(error, BusyError))  # the next call comes by again
    return verdicts


def _clear(run: RunFolder, going: dict[int, str | None], *, by_age: bool = False) -> list[TreeringError]:
    """Remove these steps, and finish what was cut short in any; return what went wrong."""
    errors = remove_superseded(run)
    back = read_superseded(run) if errors else None
    if back is not None:
        going.pop(back.step, None)  # with it would go what hides the steps that it has left behind
    _remove(run, going, errors)
    _tidy(run, run.untidy(), max(run.folders(), default=-1), errors, by_age=by_age)
    return errors


def _remove(run: RunFolder, going: Mapping[int, str | None], errors: list[TreeringError]) -> list[int]:
    """Remove steps while their indexes have these digests, None: in any case; return those that were removed."""
    removed = []
    for step, digest in going.items():
        with collect_errors(errors):
            if remove_step(run, step, read_names, functools.partial(_attempt_to_remove, digest)):
                removed.append(step)
    return removed


def _tidy(
    run: RunFolder, steps: Iterable[int], newest: int, errors: list[TreeringError], *, by_age: bool = False
) -> dict[int, float]:
    """Finish in the folders of steps what others did not; return those where something waits, with the seconds left."""
    waits = {}
    for step in steps:
        with collect_errors(errors), contextlib.suppress(BusyError):  # a process that saves there has tidied first
            seconds = tidy_step(run, step, read_names, newest=step >= newest, by_age=by_age)
            if seconds is not None:
                waits[step] = seconds
    return waits


def _raise_first(errors: Iterable[TreeringError]) -> None:
    for error in errors:
        raise error


def _attempt_to_remove(digest: str | None, data: bytes) -> str | None:
    """Return the attempt of an index that goes: only while it is the one that was judged, if any was."""
    if digest is None:
        return attempt_in(data) or secrets.token_hex(8)
    found = read_summary(data)
    return found.attempt if found.digest == digest else None
