"""A path in a command that may be a run's: verbs that look into one checkpoint take its latest step, and say so."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from treering._checkpoint.detect import ForeignForm, Form, detect
from treering._checkpoint.forms import is_run, list_headers
from treering._cli.terminal import note
from treering._values.human import bytes_text, pluralize, steps_text
from treering._view.nodes import leaves_of
from treering.errors import NotFound, Unsupported

if TYPE_CHECKING:
    from treering._foreign.foreign_tree import ForeignSteps
    from treering._view.run_text import RunListing

T = TypeVar("T")


def read_latest(path: str, read: Callable[[str], T]) -> tuple[str, T]:
    """Read what stands at a path, of a run its latest step, which is said on stderr; return what was read, and of what.

    A step that goes meanwhile has a newer one beside it.

    Raises:
        NotFound: the run has no step yet; and as ``detect`` and ``read``.
    """
    form = detect(path)
    if form is Form.RUN:
        from treering._runs.steps import of_latest

        what = "a run"
        step, found = of_latest(path, lambda latest: (os.fspath(latest), read(os.fspath(latest))))
    elif isinstance(form, ForeignForm) and (steps := _find_steps(path, form)) is not None:
        what, step = f"a folder of steps of {form.value}", os.fspath(steps.path_of(max(steps.names)))
        found = read(step)
    else:
        return path, read(path)
    note(f"{path!r} is {what}; this is its latest step, {os.path.basename(step)}")  # noqa: PTH119 - a text
    return step, found


def list_steps(path: str) -> RunListing | None:
    """List the steps of a run, or in a folder of another program; None for everything else. Raises as ``detect``."""
    form = detect(path)
    steps = _find_steps(path, form) if isinstance(form, ForeignForm) else None
    if form is not Form.RUN and steps is None:
        return None
    from treering._runs.reports import list_foreign_steps, list_run

    return list_run(path) if steps is None else list_foreign_steps(path, steps)


def steps_at(path: str, steps: Sequence[int]) -> list[str]:
    """Return the paths of steps of a run, or in a folder of another program.

    Raises:
        NotFound: one is not there.
        Unsupported: it is no run; and as ``detect``.
    """
    if (listing := list_steps(path)) is None:
        raise no_run(path)
    paths = {step.step: step.path for step in listing.steps}
    if lost := [step for step in steps if step not in paths]:
        hint = f"it has {steps_text(list(paths))}" if paths else "it has no step yet"
        raise NotFound(f"the run {path!r} has no step {lost[0]}", hint=hint)
    return [paths[step] for step in steps]


def describe(path: str) -> str:
    """Say in a few words what stands at a path. Raises as ``detect``."""
    if (run := list_steps(path)) is not None:
        return f"run, {pluralize(len(run.steps), 'steps')}, {bytes_text(run.nbytes)}"
    listing = list_headers(path)
    count = sum(1 for _ in leaves_of(listing.root))
    return f"{listing.form}, {pluralize(count, 'leaves')}, {bytes_text(listing.file_bytes)}"


def _find_steps(path: str, form: ForeignForm) -> ForeignSteps | None:
    from treering._foreign.foreign_tree import find_steps

    return find_steps(path, form)


def require_run(path: str) -> None:
    """Refuse what is no run.

    Raises:
        Unsupported: it is something else; and as ``detect``.
    """
    if not is_run(path):
        raise no_run(path)


def no_run(path: str) -> Unsupported:
    """Return the error that a path is no run."""
    return Unsupported(f"{path!r} is not a run", hint="a run is the folder that treering.Run saves its steps in")
