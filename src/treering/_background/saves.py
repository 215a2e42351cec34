"""The saves of this process that are in flight, by their paths, and what became of those that were.

Each process has one `treering._background.writer.Writer`; a fork begins with a new one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from treering._background.save_job import PendingSave, SaveJob
from treering._background.writer import Writer
from treering._coordination.messages import Failure
from treering._store.resolve import settled
from treering.errors import Mismatch, TreeringError


def reword(error: BaseException, said: str) -> TreeringError:
    """Return an error of the same class that says first where it comes from; ``error`` is its cause.

    Args:
        error: what was raised; of a class that is none of ours it becomes a plain ``TreeringError``.
        said: what to say first.

    Example:
        >>> reword(KeyError("a"), "could not do it")
        TreeringError("could not do it: KeyError: 'a'")
        >>> reword(TreeringError("no a"), "could not do it")
        TreeringError('could not do it: no a')
    """
    if type(error) is TreeringError:
        late = TreeringError(f"{said}: {error}")
    elif isinstance(error, TreeringError):
        late = Failure.of(error).to_error(said, getattr(error, "processes", ()))
        if isinstance(late, Mismatch) and isinstance(error, Mismatch):
            late.differences = error.differences
        if isinstance(late, OSError) and isinstance(error, OSError):
            late.errno, late.strerror, late.filename = error.errno, error.strerror, error.filename
    else:
        late = TreeringError(f"{said}: {error_text(error)}")
    late.__cause__ = error
    return late


def deferred_error(failed: Sequence[SaveJob]) -> TreeringError:
    """Return the error to raise for saves that failed earlier, at least one; of all but the first it has notes."""
    first, *others = failed
    late = reword(first.error or RuntimeError(), f"the earlier save to {first.shown!r} failed")
    for job in others:
        late.add_note(f"the earlier save to {job.shown!r} failed as well: {error_text(job.error)}")
    return late


def error_text(error: BaseException | None) -> str:
    """Return the class of an error and what it says, in one line."""
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))


_current: Final = {"writer": Writer()}
if hasattr(os, "register_at_fork"):
    # A fork has neither the thread nor the saves, and locks as somebody held them: it begins anew.
    os.register_at_fork(after_in_child=lambda: _current.update(writer=Writer()))


def writer() -> Writer:
    """Return what writes the saves of this process."""
    return _current["writer"]


def in_flight(path: str | os.PathLike[str]) -> list[PendingSave]:
    """Return the saves that are in flight to a path, or as steps of the run there, the oldest first.

    Example:
        >>> in_flight("/runs/7")
        []
    """
    return list(map(PendingSave, _current["writer"].of(settled(path))))


def wait_for(path: str | os.PathLike[str], timeout: float | None = None) -> None:
    """Wait until nothing is in flight to a path, or of the run there; how it ended is not said.

    Args:
        path: the path.
        timeout: how many seconds to wait; None for as long as there is progress.

    Raises:
        Timeout: it did not end in that time, or shows no progress any more.
    """
    if _current["writer"].jobs:
        _current["writer"].wait(settled(path), timeout)


def raise_unreported(path: str | os.PathLike[str]) -> None:
    """Raise the error of an earlier save to a path, or of the run there, that nobody was told.

    Raises:
        TreeringError: an earlier save failed; the message names it.
    """
    if _current["writer"].failed and (failed := _current["writer"].take_failed(settled(path))):
        raise deferred_error(failed)


def settle(path: str | os.PathLike[str]) -> None:
    """Wait for the saves to a path that are in flight; raise what one of them failed at, unless that was told.

    Raises:
        Timeout: one shows no progress any more.
        TreeringError: an earlier save failed; the message names it.
    """
    wait_for(path)
    raise_unreported(path)
