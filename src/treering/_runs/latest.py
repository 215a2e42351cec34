"""A run -> its latest step, the checkpoint that is meant by it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from treering._runs.steps import latest_of, step_path
from treering._store.resolve import located
from treering.errors import NotFound

if TYPE_CHECKING:
    from treering._arrays.source import Source

_TRIES: Final = 100

_Read = TypeVar("_Read")


def latest_step(path: str | os.PathLike[str]) -> Path:
    """Return the path of a run's latest step.

    Raises:
        NotFound: it has none yet.
        StoreFailed: the system refuses.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> run = os.path.join(tempfile.mkdtemp(), "run")
        >>> tr.save(os.path.join(run, "step_00000007"), {"w": 1.5})
        >>> latest_step(run).name
        'step_00000007'
    """
    latest = latest_of(located(path))
    if latest is None:
        raise NotFound(f"the run {os.fspath(path)!r} has no step yet", hint="treering doctor shows what is there")
    return step_path(located(path), latest)


def of_latest(path: str | os.PathLike[str], read: Callable[[str | os.PathLike[str]], _Read]) -> _Read:
    """Read the latest step of a run; one that goes meanwhile has a newer one beside it.

    Raises:
        NotFound: the run has no step; and whatever ``read`` raises.
    """
    for _ in range(_TRIES):
        step = latest_step(path)
        try:
            return read(step)
        except NotFound:
            if step == latest_step(path):
                raise
    raise NotFound(f"the steps of the run {os.fspath(path)!r} were removed {_TRIES} times during the read")


def open_latest(path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool) -> Source:
    """Open the latest step of a run; its files stay open until ``files`` closes them.

    Raises:
        NotFound: it has none yet.
        TreeringError: as `treering._checkpoint.source.open_checkpoint`.
    """
    from treering._checkpoint.source import open_checkpoint

    return of_latest(path, lambda step: open_checkpoint(step, files, mapped=mapped))
