"""A diagnosis as lines for people, and as one JSON document for programs."""

from __future__ import annotations

from collections.abc import Iterator

from treering._format.diagnosis import Attempt, Committed, Diagnosis, ProcessState
from treering._values.human import bytes_text, counted, duration_text
from treering._view.listing_json import json_text
from treering._view.plain import padded, visible

_LONGEST = 1000
_MOST_ATTEMPTS = 50
_MOST_PROCESSES = 40
_MOST_PROBLEMS = 50
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
        yield f"and {counted(len(left), 'more attempts', ',')} with {bytes_text(sum(each.nbytes for each in left))}"


def _first(lines: Iterator[str], most: int, count: int) -> Iterator[str]:
    yield from (line for _, line in zip(range(most), lines, strict=False))
    if count > most:
        yield f"  and {count - most:,} more"


def _committed(committed: Committed) -> str:
    who = f" by {committed.processes:,} processes" if committed.processes > 1 else ""
    at = f", saved {committed.at}{who}" if committed.at else who
    files = f"{committed.files:,} {'file' if committed.files == 1 else 'files'}"
    return f"{_NAMES[committed.form]}{at}, {files}, {bytes_text(committed.nbytes)}"


def _attempt(attempt: Attempt) -> Iterator[str]:
    call = "" if attempt.number is None else f", save {attempt.number:,} of its job"
    yield f"attempt {attempt.attempt}: {attempt.life.value}{call}"
    if attempt.files:
        files = f"{attempt.files:,} {'file' if attempt.files == 1 else 'files'}"
        changed = "" if attempt.age is None else f", last changed {duration_text(attempt.age)} ago"
        yield f"  {files}, {bytes_text(attempt.nbytes)}{changed}"
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
        yield f"  process {state.process}: {padded(state.stage, stages)}{_told(state)}"
    left = len(shown) - _MOST_PROCESSES
    if left > 0:
        yield f"  and {counted(left, 'more processes', ',')}"


def _told(state: ProcessState) -> str:
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
    committed = found.committed
    head = {
        "schema": "treering.doctor/1",
        "path": found.path,
        "ok": found.ok,
        "committed": None
        if committed is None
        else {
            "form": committed.form,
            "attempts": list(committed.attempts),
            "at": committed.at,
            "by": committed.by,
            "processes": committed.processes,
            "files": committed.files,
            "nbytes": committed.nbytes,
        },
        "problems": list(found.problems),
        "notes": list(found.notes),
    }
    yield json_text(head)[:-1] + ","
    yield ' "attempts": ['
    for place, attempt in enumerate(found.attempts, 1):
        yield f"  {json_text(_members(attempt))}{',' if place < len(found.attempts) else ''}"
    yield " ]}"


def _members(attempt: Attempt) -> dict[str, object]:
    return {
        "attempt": attempt.attempt,
        "form": attempt.form,
        "life": attempt.life.value,
        "needs_attention": attempt.needs_attention,
        "reason": attempt.reason,
        "advice": attempt.advice,
        "files": attempt.files,
        "nbytes": attempt.nbytes,
        "age": attempt.age,
        "who": attempt.who,
        "number": attempt.number,
        "outcome": attempt.outcome,
        "processes": [
            {
                "process": state.process,
                "stage": state.stage,
                "who": state.who,
                "age": state.age,
                "problem": state.problem,
            }
            for state in attempt.processes
        ],
    }
