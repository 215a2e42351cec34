"""A run's folder -> what each step's folder holds: saves in flight or dead, removals that were cut short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from treering._format.diagnosis import Diagnosis, RunDiagnosis, StepDiagnosis
from treering._runs.listing_cache import cache_trouble
from treering._runs.steps import Records, records_of, step_path
from treering._runs.superseded import left_behind, left_steps
from treering._store.run_folder import RunFolder
from treering._values.checkpoint_names import INDEX
from treering._values.steps_text import steps_text
from treering.errors import NotFound


def holds_run(path: str) -> bool:
    """Tell whether a folder is that of a run, also of one whose first save never ended.

    Raises:
        StoreFailed: the system refuses.

    Example:
        >>> import os
        >>> os.makedirs("run/step_00000001")
        >>> holds_run("run"), holds_run("run/step_00000001"), holds_run("nowhere")
        (True, False, False)
    """
    place = Path(path)
    if not place.is_dir() or (place / INDEX).exists():
        return False
    with RunFolder(place) as run:
        return bool(run.folders())


def diagnosed_run(path: str, look: Callable[[str], Diagnosis]) -> RunDiagnosis:
    """Look at every step's folder of a run, also at those that have no index.

    Args:
        path: the run's folder.
        look: what looks at one checkpoint's folder.

    Raises:
        NotFound: nothing is there.
        StoreFailed: the system refuses.
    """
    place = Path(path)
    with RunFolder(place) as run:
        folders = run.folders()
        left = _left_text(run)
    trouble = cache_trouble(place)
    records = records_of(place)
    found: list[StepDiagnosis] = []
    for step in folders:
        try:
            found.append(StepDiagnosis(step=step, found=look(str(step_path(place, step)))))
        except NotFound:
            # It was removed meanwhile, or holds nothing of ours.
            continue
    return RunDiagnosis(
        path=path,
        steps=[record.step for record in records.steps],
        nbytes=sum(record.nbytes for record in records.steps),
        saved=_saved(records),
        folders=found,
        notes=tuple(note for note in (trouble, left) if note is not None),
    )


def _left_text(run: RunFolder) -> str | None:
    """Say which steps wait to be removed because an earlier one was gone back to; None where none do."""
    document, steps = left_behind(run), left_steps(run)
    if document is None or not steps:
        return None
    was = "was" if len(steps) == 1 else "were"
    return (
        f"{steps_text(sorted(steps))} {was} left behind when step {document.step} was saved; the next save, or "
        "treering gc --yes, removes what is left of them"
    )


def _saved(records: Records) -> float | None:
    return records.steps[-1].saved if records.steps else None
