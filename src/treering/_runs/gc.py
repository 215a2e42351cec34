"""Garbage collection of a run: remove the steps that its policy does not keep, and finish interrupted removals."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from treering._format.document import read_names, read_summary
from treering._runs.removal import (
    attempt_in,
    collect_errors,
    read_superseded,
    remove_step,
    remove_superseded,
    tidy_step,
)
from treering._runs.steps import note_records, open_run, read_run, records_in, records_of
from treering._store.run_folder import RunFolder
from treering.errors import BusyError, NotFoundError, TreeringError
from treering.rules import Policy, Verdict, retained


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
    return retained(keep, records_of(path).steps) if dry_run else read_run(path, lambda run: _collect(run, keep), [])


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
    raise_first(errors)


def _collect(run: RunFolder, keep: Policy | None) -> list[Verdict]:
    """Judge the steps, remove those that no rule keeps, and note the others."""
    records = records_in(run)
    verdicts = retained(keep, records.steps)
    going = {verdict.step for verdict in verdicts if not verdict.kept}
    errors = _clear(run, {old.step: old.digest for old in records.steps if old.step in going}, by_age=True)
    with collect_errors(errors):
        note_records(run, records)
        run.drop_tombstones()
    raise_first(error for error in errors if not isinstance(error, BusyError))  # the next call comes by again
    return verdicts


def _clear(run: RunFolder, going: dict[int, str | None], *, by_age: bool = False) -> list[TreeringError]:
    """Remove these steps, and finish what was cut short in any; return what went wrong."""
    errors = remove_superseded(run)
    back = read_superseded(run) if errors else None
    if back is not None:
        going.pop(back.step, None)  # with it would go what hides the steps that it has left behind
    remove_judged(run, going, errors)
    tidy_steps(run, run.untidy(), max(run.folders(), default=-1), errors, by_age=by_age)
    return errors


def remove_judged(run: RunFolder, going: Mapping[int, str | None], errors: list[TreeringError]) -> list[int]:
    """Remove steps while their indexes have these digests, None: in any case; return those that were removed."""
    removed = []
    for step, digest in going.items():
        with collect_errors(errors):
            if remove_step(run, step, read_names, functools.partial(_attempt_to_remove, digest)):
                removed.append(step)
    return removed


def tidy_steps(
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


def raise_first(errors: Iterable[TreeringError]) -> None:
    for error in errors:
        raise error


def _attempt_to_remove(digest: str | None, data: bytes) -> str | None:
    """Return the attempt of an index that goes: only while it is the one that was judged, if any was."""
    if digest is None:
        return attempt_in(data) or secrets.token_hex(8)
    found = read_summary(data)
    return found.attempt if found.digest == digest else None
