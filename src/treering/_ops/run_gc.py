"""Removing the steps of a run that its policy does not keep, and finishing removals that were cut short."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

from treering._format.index_glance import glance, names_in
from treering._ops.run_steps import facts, forget_steps, records_of
from treering._store.run_folder import RunFolder
from treering._store.step_removal import remove_step, tidy_step
from treering.errors import Busy, Corrupt, Format, NotFound, TreeringError, Unsupported
from treering.retention import Policy, Verdict, retained

__all__ = ["collect", "remove_steps"]

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
    records = records_of(path).steps
    verdicts = retained(keep, list(map(facts, records)))
    if not dry_run:
        going = {verdict.step for verdict in verdicts if not verdict.kept}
        _raise_first(
            error
            for error in _removed(path, {old.step: _if_still(old.digest) for old in records if old.step in going})
            if not isinstance(error, Busy)  # somebody is saving there: the next call comes by again
        )
    return verdicts


def remove_steps(path: Path, steps: Iterable[int]) -> None:
    """Remove steps, whatever a policy says; one that is not there is gone already.

    A step whose index cannot be read is gone too, but its files stay: nothing proves whose they are.

    Raises:
        Busy: somebody is saving to one of them.
        StoreFailed: the system refused. The other steps are gone all the same.
    """
    _raise_first(_removed(path, dict.fromkeys(sorted(steps), _in_any_case)))


def _raise_first(errors: Iterable[TreeringError]) -> None:
    for error in errors:
        raise error


def _removed(path: Path, going: Mapping[int, Callable[[bytes], str | None]]) -> list[TreeringError]:
    """Remove these steps, finish what was cut short in any, and let ``run.json`` know; return what went wrong."""
    errors: list[TreeringError] = []
    try:
        with RunFolder(path) as run:
            for step, attempt_of in going.items():
                with _collecting(errors):
                    remove_step(run, step, names_in, attempt_of)
            for step in run.folders():
                with _collecting(errors), contextlib.suppress(Busy):  # whoever saves there has tidied first
                    tidy_step(run, step, names_in)
            if going:
                with _collecting(errors):
                    forget_steps(path)
    except NotFound:
        pass  # no run is there
    return errors


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
