"""Errors of saves in flight, told later or elsewhere than they happened."""

from __future__ import annotations

from collections.abc import Sequence

from treering._background.save_job import SaveJob
from treering._coordination.messages import Failure
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
        late = Failure.of(error).error(said, getattr(error, "processes", ()))
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
