"""The diagnosis of a folder, or of a run, as lines for people and as one JSON document for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

from treering._format.diagnosis import Attempt, Committed, Diagnosis, ProcessState, RunDiagnosis
from treering._values.human import bytes_text, duration_text, pluralize
from treering._view.json_lines import Json, json_document
from treering._view.plain import pad, visible
from treering._view.run_text import when_text

_LONGEST = 1000
_MOST_ATTEMPTS = 50
_MOST_PROCESSES = 40
_MOST_PROBLEMS = 50
_MOST_FOLDERS = 50
_NAMES = {"checkpoint": "checkpoint", "leaves": "leaves directory"}


def doctor_lines(found: Diagnosis) -> Iterator[str]:
    """Write a diagnosis as lines without line ends; whatever comes from files is escaped.

    Example:
        >>> found = Diagnosis(path="ckpt", committed=None, attempts=(), problems=(), notes=("empty",))
        >>> for line in doctor_lines(found):
        ...     print(line)
        'ckpt': nothing is wrong
          note: empty
    """
    return (visible(line, _LONGEST).replace("\\\\", "\\") for line in _lines(found))


def _lines(found: Diagnosis) -> Iterator[str]:
    if found.committed is not None:
        yield f"{found.path!r}: {_committed(found.committed)}"
    elif found.ok:
        yield f"{found.path!r}: nothing is wrong"
    else:
        yield f"{found.path!r}: there is something to do"
    yield from _first((f"  problem: {problem}" for problem in found.problems), _MOST_PROBLEMS, len(found.problems))
    yield from (f"  note: {note}" for note in found.notes[:_MOST_PROBLEMS])
    for attempt in found.attempts[:_MOST_ATTEMPTS]:
        yield from _attempt(attempt)
    if len(found.attempts) > _MOST_ATTEMPTS:
        left = found.attempts[_MOST_ATTEMPTS:]
        yield f"and {pluralize(len(left), 'more attempts', ',')} with {bytes_text(sum(each.nbytes for each in left))}"


def _first(lines: Iterator[str], most: int, count: int) -> Iterator[str]:
    yield from (line for _, line in zip(range(most), lines, strict=False))
    if count > most:
        yield f"  and {count - most:,} more"


def _committed(committed: Committed) -> str:
    who = f" by {committed.processes:,} processes" if committed.processes > 1 else ""
    at = f", saved {committed.at}{who}" if committed.at else who
    size = f"{pluralize(committed.files, 'files', ',')}, {bytes_text(committed.nbytes)}"
    return f"{_NAMES[committed.form]}{at}, {size}"


def _attempt(attempt: Attempt) -> Iterator[str]:
    call = "" if attempt.number is None else f", save {attempt.number:,} of its job"
    yield f"attempt {attempt.attempt}: {attempt.life.value}{call}"
    if attempt.files:
        changed = "" if attempt.age is None else f", last changed {duration_text(attempt.age)} ago"
        yield f"  {pluralize(attempt.files, 'files', ',')}, {bytes_text(attempt.nbytes)}{changed}"
    yield f"  {attempt.reason}"
    if attempt.who is not None:
        yield f"  begun by {attempt.who}"
    yield from _processes(attempt)
    if attempt.outcome is not None:
        yield f"  outcome: {attempt.outcome}"
    yield f"  to do: {attempt.advice}"


def _processes(attempt: Attempt) -> Iterator[str]:
    shown = sorted(attempt.processes, key=lambda state: (state.stage in {"written", "seen"}, state.process))
    stages = max((len(state.stage) for state in shown), default=0)
    for state in sorted(shown[:_MOST_PROCESSES], key=lambda state: state.process):
        yield f"  process {state.process}: {pad(state.stage, stages)}{_process_text(state)}"
    left = len(shown) - _MOST_PROCESSES
    if left > 0:
        yield f"  and {pluralize(left, 'more processes', ',')}"


def _process_text(state: ProcessState) -> str:
    who = "" if state.who is None else f"  {state.who}"
    age = "" if state.age is None else f", {duration_text(state.age)} ago"
    return who + age + ("" if state.problem is None else f": {state.problem}")


def doctor_json(found: Diagnosis) -> Iterator[str]:
    """Write a diagnosis as the lines of one JSON object, one line for each attempt, all in ASCII.

    Example:
        >>> import json
        >>> found = Diagnosis(path="ckpt", committed=None, attempts=(), problems=(), notes=("the folder is empty",))
        >>> json.loads("".join(doctor_json(found)))["ok"]
        True
    """
    head = {
        "schema": "treering.doctor/1",
        "path": found.path,
        "ok": found.ok,
        "committed": None if found.committed is None else dataclasses.asdict(found.committed),
        "problems": list(found.problems),
        "notes": list(found.notes),
    }
    return json_document(head, attempts=map(_members, found.attempts))


def _members(attempt: Attempt) -> Json:
    members = dataclasses.asdict(attempt)
    first = {name: members.pop(name) for name in ("attempt", "form", "life")}
    return first | {"needs_attention": attempt.needs_attention} | members


# -------------------------------------------------------------------------------------------------------------- runs


def run_doctor_lines(found: RunDiagnosis) -> Iterator[str]:
    """Write a diagnosis as lines without line ends; of the steps only those with more in them than a checkpoint.

    Example:
        >>> found = RunDiagnosis(path="run", steps=[10, 20], nbytes=2048, saved=0.0, folders=(), notes=("a note",))
        >>> for line in run_doctor_lines(found):
        ...     print(line)
        'run': a run of 2 steps, 2.00 KiB, the latest is 20, saved 1970-01-01 00:00:00 UTC
          note: a note
    """
    return (visible(line, _LONGEST).replace("\\\\", "\\") for line in _run_lines(found))


def _run_lines(found: RunDiagnosis) -> Iterator[str]:
    latest = ""
    if found.steps and found.saved is not None:
        latest = f", {bytes_text(found.nbytes)}, the latest is {found.steps[-1]}, saved {when_text(found.saved)}"
    yield f"{found.path!r}: a run of {pluralize(len(found.steps), 'steps', ',')}{latest}"
    yield from (f"  note: {note}" for note in found.notes)
    telling = [folder for folder in found.folders if folder.has_something_to_tell]
    for folder in telling[:_MOST_FOLDERS]:
        yield from doctor_lines(folder.found)
    if len(telling) > _MOST_FOLDERS:
        yield f"and {pluralize(len(telling) - _MOST_FOLDERS, 'more folders', ',')} of steps"


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
    entries = ({"step": each.step} | json.loads("".join(doctor_json(each.found))) for each in found.folders)
    return json_document(head, folders=entries)
