"""A path in a command that may be a run's: verbs that look into one checkpoint take its latest step, and say so."""

from __future__ import annotations

import os

from treering._checkpoint.forms import is_run
from treering._cli.terminal import note
from treering.errors import Unsupported


def latest_of(path: str) -> str:
    """Return the path of a run's latest step, and say on stderr which one that is; every other path as it is.

    Raises:
        NotFound: the run has no step yet; and as ``detect``.
    """
    if not is_run(path):
        return path
    from treering._runs.steps import latest_step

    step = os.fspath(latest_step(path))
    note(f"{path!r} is a run; this is its latest step, {os.path.basename(step)}")  # noqa: PTH119 - a text
    return step


def require_run(path: str) -> None:
    """Refuse what is no run.

    Raises:
        Unsupported: it is something else; and as ``detect``.
    """
    if not is_run(path):
        raise Unsupported(f"{path!r} is not a run", hint="a run is the folder that treering.Run saves its steps in")
