"""Where a step stands among those of its run: going back is somebody's word, never an accident."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Sequence
from pathlib import Path

from treering._background.saves import in_flight, raise_unreported, wait_for
from treering._format.document import INDEX_NAME
from treering._runs.place import opened_run
from treering._runs.run_state import RunState
from treering._runs.steps import steps_of
from treering._runs.superseded import finish_left
from treering._store.run_folder import LEFT_DOCUMENT, RunFolder, step_of_name
from treering._values.steps_text import steps_text
from treering.errors import Exists, NotFound, StoreFailed


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """Where a step stands among those that are there."""

    replaced: bool = False
    """Whether there was such a step."""
    left: Sequence[int] = ()
    """Later steps, which are left behind."""
    mark: str | None = None
    """That of the list of those, on the process that writes it down; None where nothing is left behind."""
    there: frozenset[int] | None = None
    """The steps that had a folder, or were in flight; None where nobody knows."""

    def text(self, step: int) -> str:
        """Return what becomes of them, to follow the reason of a save."""
        replaced = f"; it replaces step {step}" if self.replaced else ""
        gone = f"; what was saved later goes, {steps_text(self.left)}" if self.left else ""
        return replaced + gone


def order_of(run: RunState, step: int, *, overwrite: bool, leads: bool) -> Order:
    """Hold a step against those that are there and in flight.

    Args:
        run: the run.
        step: the step that is to be saved.
        overwrite: whether it may replace what is there, and leave later ones behind.
        leads: whether this process also removes what an earlier save has left behind and could not remove.

    Raises:
        Exists: it is there, or a later one is, and nobody said what becomes of them.
        TreeringError: what was left behind cannot be removed.
    """
    names = _names_in(run.path)
    if names is not None:
        if INDEX_NAME in names or not run.known_place:
            with contextlib.suppress(NotFound), opened_run(run.path):
                run.known_place = True
        flying = {pending.path.name for pending in in_flight(run.path)}
        # By names alone: a look into thousands of steps would hold up the loop.
        folders = frozenset(found for found in map(step_of_name, names | flying) if found is not None)
        if step > max(folders, default=-1):
            return Order(there=folders)
    # Only what is in flight knows which steps there will be: it may remove some, or fail.
    wait_for(run.path)
    raise_unreported(run.path)
    if leads and names is not None and LEFT_DOCUMENT in names:
        with RunFolder(run.path) as folder:
            for error in finish_left(folder):
                raise error
    there = steps_of(run.path)
    later = [number for number in there if number > step]
    if not overwrite and step in there and not later:
        what = f"step {step} of the run {run.shown!r} is there already"
        raise Exists(what, hint=f"a loop that goes on from it begins at {step + 1}; overwrite=True replaces it")
    if not overwrite and later:
        raise Exists(
            f"step {step} of the run {run.shown!r} is older than its latest step, {later[-1]}",
            hint=f"run.branch(step, path) goes on from an older step in a new run; overwrite=True goes on here, and "
            f"removes the steps after {step}",
        )
    return Order(replaced=step in there, left=later, mark=secrets.token_hex(8) if leads and later else None)


def _names_in(path: Path) -> set[str] | None:
    """Return what lies in a run's folder; None where it cannot be read, for a reason that a closer look will tell."""
    try:
        with RunFolder(path) as folder:
            return set(folder.names())
    except NotFound:
        return set()
    except StoreFailed:
        return None
