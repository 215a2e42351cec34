"""Removing the steps of a run that its policy does not keep, and finishing removals that were cut short."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from treering._format.index_glance import glance, names_in
from treering._ops.run_left import finish_left, left_behind
from treering._ops.run_steps import Records, facts, note_records, records_in, records_of, with_step
from treering._store.run_folder import RunFolder
from treering._store.step_removal import remove_step, tidy_step
from treering.errors import Busy, Corrupt, Format, NotFound, TreeringError, Unsupported
from treering.retention import Policy, Verdict, retained

__all__ = ["collect", "collect_after", "remove_steps"]

_NOT_READ: Final = (Corrupt, Format, Unsupported)


def collect(path: Path, keep: Policy | None, *, dry_run: bool) -> list[Verdict]:
    """Remove the steps that a policy does not keep, the oldest first, and finish what was cut short before.

    A step that somebody has saved anew since it was judged stays, and so does one that somebody is saving to; the next
    call judges them. Steps that cannot be read are not judged.

    Args:
        path: the run's folder; where none is there is nothing to do.
        keep: the policy; None keeps all but temporary steps that a newer one has replaced.
        dry_run: whether only to judge.

    Returns:
        What becomes of each step, ascending.

    Raises:
        StoreFailed: the system refused. The other steps are done all the same; what is left is for the next call.
    """
    if dry_run:
        return _judged(records_of(path), keep)
    try:
        with RunFolder(path) as run:
            return _collected(run, records_in(run), keep)
    except NotFound:
        return []


def collect_after(
    path: Path,
    step: int,
    keep: Policy | None,
    *,
    seconds: float | None,
    keep_text: str | None,
    save_every: str | None,
) -> None:
    """Do what follows the commit of a step: `collect`, and `note_step`; the steps are looked at once for both.

    Raises:
        StoreFailed: as they do.
        LinkRefused: ``run.json`` is a link.
    """
    with RunFolder(path) as run:
        records = with_step(records_in(run), step, seconds=seconds, keep=keep_text, save_every=save_every)
        _collected(run, records, keep)


def remove_steps(path: Path, steps: Iterable[int]) -> None:
    """Remove steps, whatever a policy says; one that is not there is gone already.

    A step whose index cannot be read is gone too, but its files stay: nothing proves whose they are.

    Raises:
        Busy: somebody is saving to one of them.
        StoreFailed: the system refused. The other steps are gone all the same.
    """
    errors: list[TreeringError] = []
    with contextlib.suppress(NotFound), RunFolder(path) as run:
        errors += _cleared(run, dict.fromkeys(sorted(steps), _in_any_case))
        with _collecting(errors):
            note_records(run, records_in(run))
    _raise_first(errors)


def _judged(records: Records, keep: Policy | None) -> list[Verdict]:
    return retained(keep, list(map(facts, records.steps)))


def _collected(run: RunFolder, records: Records, keep: Policy | None) -> list[Verdict]:
    """Judge the steps, remove those that no rule keeps, and note the others."""
    verdicts = _judged(records, keep)
    going = {verdict.step for verdict in verdicts if not verdict.kept}
    errors = _cleared(run, {old.step: _if_still(old.digest) for old in records.steps if old.step in going})
    with _collecting(errors):
        note_records(run, records)
    _raise_first(error for error in errors if not isinstance(error, Busy))  # the next call comes by again
    return verdicts


def _cleared(run: RunFolder, going: Mapping[int, Callable[[bytes], str | None]]) -> list[TreeringError]:
    """Remove these steps, and finish what was cut short in any; return what went wrong."""
    errors = finish_left(run)
    back = left_behind(run) if errors else None
    for step, attempt_of in going.items():
        if back is not None and step == back.step:
            continue  # with it would go what hides the steps that it has left behind
        with _collecting(errors):
            remove_step(run, step, names_in, attempt_of)
    folders = run.folders()
    for step in folders:
        with _collecting(errors), contextlib.suppress(Busy):  # whoever saves there has tidied first
            tidy_step(run, step, names_in, newest=step == folders[-1])
    return errors


def _raise_first(errors: Iterable[TreeringError]) -> None:
    for error in errors:
        raise error


@contextlib.contextmanager
def _collecting(errors: list[TreeringError]) -> Iterator[None]:
    try:
        yield
    except TreeringError as error:
        errors.append(error)


def _if_still(digest: str) -> Callable[[bytes], str | None]:
    """Let an index go only while it is the one that was judged."""

    def attempt_of(data: bytes) -> str | None:
        found = glance(data)
        return found.attempt if found.digest == digest else None

    return attempt_of


def _in_any_case(data: bytes) -> str:
    try:
        return glance(data).attempt
    except _NOT_READ:
        return secrets.token_hex(8)
