"""What stands in a run's folder as lines for people, and as one JSON document for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator

from treering._format.diagnosis import RunDiagnosis
from treering._values.human import bytes_text, counted
from treering._view.doctor_text import doctor_json, doctor_lines
from treering._view.listing_json import json_text
from treering._view.plain import visible
from treering._view.run_text import when_text

_LONGEST = 1000
_MOST_FOLDERS = 50


def run_doctor_lines(found: RunDiagnosis) -> Iterator[str]:
    """Write a diagnosis as lines without line ends; of the steps only those with more in them than a checkpoint.

    Example:
        >>> found = RunDiagnosis(path="run", steps=[10, 20], nbytes=2048, saved=0.0, folders=(), notes=("a note",))
        >>> for line in run_doctor_lines(found):
        ...     print(line)
        'run': a run of 2 steps, 2.00 KiB, the latest is 20, saved 1970-01-01 00:00:00 UTC
          note: a note
    """
    return (visible(line, _LONGEST).replace("\\\\", "\\") for line in _lines(found))


def _lines(found: RunDiagnosis) -> Iterator[str]:
    count = f"{len(found.steps):,} {'step' if len(found.steps) == 1 else 'steps'}"
    latest = ""
    if found.steps and found.saved is not None:
        latest = f", {bytes_text(found.nbytes)}, the latest is {found.steps[-1]}, saved {when_text(found.saved)}"
    yield f"{found.path!r}: a run of {count}{latest}"
    yield from (f"  note: {note}" for note in found.notes)
    telling = [folder for folder in found.folders if folder.has_something_to_tell]
    for folder in telling[:_MOST_FOLDERS]:
        yield from doctor_lines(folder.found)
    if len(telling) > _MOST_FOLDERS:
        yield f"and {counted(len(telling) - _MOST_FOLDERS, 'more folders', ',')} of steps"


def run_doctor_json(found: RunDiagnosis) -> Iterator[str]:
    """Write a diagnosis as the lines of one JSON object, one line for each step's folder, all in ASCII.

    Example:
        >>> found = RunDiagnosis(path="run", steps=[10, 20], nbytes=2048, saved=0.0, folders=(), notes=())
        >>> document = json.loads("".join(run_doctor_json(found)))
        >>> document["ok"], document["latest"]
        (True, 20)
    """
    head = {
        "schema": "treering.doctor/1",
        "path": found.path,
        "form": "run",
        "ok": found.ok,
        "steps": list(found.steps),
        "latest": found.steps[-1] if found.steps else None,
        "nbytes": found.nbytes,
        "notes": list(found.notes),
    }
    yield json_text(head)[:-1] + ","
    yield ' "folders": ['
    for place, folder in enumerate(found.folders, 1):
        inner = json.loads("".join(doctor_json(folder.found)))
        yield f"  {json_text({'step': folder.step} | inner)}{',' if place < len(found.folders) else ''}"
    yield " ]}"
