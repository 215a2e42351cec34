"""Saves over an earlier step: its commit supersedes all later steps at once.

Which steps those are is written down before the commit, with a mark that the new step's note has too. While both are
there, the steps of the list are not, however many of their files a crash has left. ``docs/spec/run.md`` says more.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from treering._format.document import read_names, read_summary
from treering._format.run_document import SupersededSteps, encode_superseded, find_note, parse_superseded
from treering._runs.removal import remove_step
from treering._store.failures import LinkRefused, naming_file
from treering._store.run_folder import LEFT_DOCUMENT, RunFolder
from treering.errors import Corrupt, Format, TreeringError, Unsupported

_GONE: Final = "gone"

NOT_READ: Final = (Corrupt, Format, Unsupported)
"""The errors of an index, or a ``run.json``, that says nothing that this version could read."""


def read_superseded(run: RunFolder) -> SupersededSteps | None:
    """Return the steps that a committed save superseded; None where there are none, as nearly always.

    Raises:
        Format: a newer version wrote the list.
        StoreFailed: the system refuses.
    """
    data = run.read_left()
    if data is None:
        return None
    try:
        with naming_file(run.path / LEFT_DOCUMENT):
            document = parse_superseded(data)
        index = run.read_index(document.step)
        note = None if index is None else find_note(read_summary(index).metadata)
    except (Corrupt, Unsupported, LinkRefused):  # not written to its end; or nothing proves the commit
        return None
    return document if note is not None and note.mark == document.mark else None


def superseded_steps(run: RunFolder) -> frozenset[int]:
    """Return the superseded steps whose folders still have an index.

    Raises:
        Format: a newer version wrote the list.
        StoreFailed: the system refuses.
    """
    document = read_superseded(run)
    left = {} if document is None else document.left
    return frozenset(step for step, attempt in left.items() if _attempt_of(run, step) == attempt)


def announce_superseded(path: Path, step: int, mark: str, left: Iterable[int]) -> None:
    """Write durably which steps the save of ``step`` with this mark is going to supersede.

    Raises:
        StoreFailed: the system refuses; nothing is superseded.
    """
    with RunFolder(path) as run:
        there = {each: attempt for each in left if (attempt := _attempt_of(run, each)) != _GONE}
        run.write_left(encode_superseded(SupersededSteps(step=step, mark=mark, left=there)))


@contextlib.contextmanager
def withdraw_on_failure(path: Path, mark: str | None) -> Iterator[None]:
    """Remove the list with this mark if the block fails and the save of that list was not committed.

    Args:
        path: the run's folder.
        mark: that of the list; None where nothing is superseded.
    """
    try:
        yield
    except BaseException:  # an interrupt too: the save will not be committed; raised again below
        if mark is not None:
            with contextlib.suppress(TreeringError), RunFolder(path) as run:  # the next save sweeps it
                data = run.read_left()
                if data is not None and parse_superseded(data).mark == mark and read_superseded(run) is None:
                    run.remove_left()
        raise


def remove_superseded(run: RunFolder) -> list[TreeringError]:
    """Remove the superseded steps, then their list; a list whose save was never committed is removed alone.

    Returns:
        What went wrong; the list stays then, for the next one to go by.
    """
    errors: list[TreeringError] = []
    with collect_errors(errors):
        document = read_superseded(run)
        for step, attempt in {} if document is None else document.left.items():
            with collect_errors(errors):
                remove_step(run, step, read_names, functools.partial(_attempt_to_remove, attempt))
        if not errors:
            run.remove_left()
    return errors


@contextlib.contextmanager
def collect_errors(errors: list[TreeringError]) -> Iterator[None]:
    """Add what the block raises to a list."""
    try:
        yield
    except TreeringError as error:
        errors.append(error)


def _attempt_of(run: RunFolder, step: int) -> str | None:
    """Return the attempt of a step's index; None where it cannot be read."""
    try:
        data = run.read_index(step)
    except NOT_READ:
        return None
    return _GONE if data is None else attempt_in(data)


def attempt_in(data: bytes) -> str | None:
    """Return the attempt that an index names; None where it cannot be read."""
    try:
        return read_summary(data).attempt
    except NOT_READ:
        return None


def _attempt_to_remove(listed: str | None, data: bytes) -> str | None:
    """Return the attempt of an index that goes: only while it is the one that was listed."""
    found = attempt_in(data)
    return (found or secrets.token_hex(8)) if found == listed else None
