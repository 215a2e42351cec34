"""A path that may be a run's -> the checkpoint that is meant by it: of a run its latest step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from treering._checkpoint.detect import Form, detect
from treering._runs.steps import latest_of, step_path
from treering.errors import NotFound

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
    latest = latest_of(Path(path))
    if latest is None:
        raise NotFound(f"the run {os.fspath(path)!r} has no step yet", hint="treering doctor shows what is there")
    return step_path(Path(path), latest)


def of_latest(path: str | os.PathLike[str], read: Callable[[str | os.PathLike[str]], _Read]) -> _Read:
    """Read what stands at a path, of a run the latest step; one that goes meanwhile has a newer one beside it.

    Raises:
        NotFound: the run has no step; and whatever ``read`` raises.
    """
    if detect(path) is not Form.RUN:
        return read(path)
    for _ in range(_TRIES):
        step = latest_step(path)
        try:
            return read(step)
        except NotFound:
            if step == latest_step(path):
                raise
    raise NotFound(f"the steps of the run {os.fspath(path)!r} were removed {_TRIES} times during the read")
