"""A run's folder -> what each step's folder holds: saves in flight or dead, removals that were cut short."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from treering._format.diagnosis import Diagnosis, RunDiagnosis, StepDiagnosis
from treering._format.run_document import parse_run
from treering._ops.run_steps import Records, records_of, step_path
from treering._store.checkpoint_names import INDEX
from treering._store.run_folder import RUN_DOCUMENT, RunFolder
from treering.errors import Corrupt, Format, NotFound, Unsupported

__all__ = ["diagnosed_run", "holds_run"]

_CACHE: Final = "the next save makes it anew from the steps: nothing to do"


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
    notes: list[str] = []
    with RunFolder(place) as run:
        folders = run.folders()
        data = run.read_document()
    if data is None:
        notes.append(f"there is no {RUN_DOCUMENT} that could be read; {_CACHE}")
    else:
        try:
            parse_run(data)
        except (Corrupt, Format, Unsupported) as error:
            notes.append(f"{RUN_DOCUMENT} cannot be used ({error.message}); {_CACHE}")
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
        notes=tuple(notes),
    )


def _saved(records: Records) -> float | None:
    return records.steps[-1].saved if records.steps else None
