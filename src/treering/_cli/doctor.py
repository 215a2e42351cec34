"""``treering doctor``: saves in flight and what dead ones left, as lines for people and as one JSON document."""

from __future__ import annotations

import collections
import dataclasses
import platform
from collections.abc import Iterable, Iterator
from typing import Any

import click

from treering import __version__
from treering._cli.main import GOOD, NO, write_lines
from treering._cli.verbs import JSON, PATH, verb
from treering._format.findings import Attempt, Committed, Diagnosis, RunDiagnosis
from treering._inspect.doctor import diagnose, diagnose_run, holds_run
from treering._printable import printable
from treering._values.human import bytes_text, duration_text, pluralize
from treering._view.plain import cut, json_document, members_of, pad
from treering._view.run_text import when_text

_PACKAGES = (
    *("jax", "jaxlib", "numpy", "ml-dtypes", "msgpack", "xxhash", "tensorstore", "zstandard", "click", "obstore"),
    *("flax", "optax", "equinox", "orbax-checkpoint", "safetensors", "grain"),
)
_LONGEST = 1000
_MOST = 50
_MOST_PROCESSES = 40
_NAMES = {"checkpoint": "checkpoint", "leaves": "leaves directory"}


@verb(
    "treering doctor checkpoint",
    "treering doctor checkpoint --json | jq '.attempts[] | {attempt, life, advice}'",
    "watch treering doctor checkpoint",
)
@PATH
@JSON
@click.option(
    "--env",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, given: _write_versions(context) if given else None,
    help="Show the versions that a bug report needs, instead; no PATH is needed.",
)
def doctor(path: str, as_json: bool) -> int:
    """Show the state of the folder PATH: what is committed, which saves are in flight or have died, and what to do.

    PATH is the folder of a checkpoint, a leaves directory or a run; a save need not have been committed there yet. Of a
    run, every step is inspected, and folders that hold more than a checkpoint are reported. For a save by several
    processes it shows which of them have written their part, failed or not arrived, and where they run. It also checks
    that the committed files exist with the size that the index gives; only `treering verify` reads what is in them.

    Nothing is locked, written or removed, so a running save is not disturbed. Exit code 0: there is nothing to do; 1:
    files are missing or damaged, or bytes are left of a save whose process has ended; 2: PATH could not be inspected.
    """
    if holds_run(path):
        run = diagnose_run(path)
        write_lines(run_doctor_json(run) if as_json else run_doctor_lines(run))
        return GOOD if run.ok else NO
    found = diagnose(path)
    if as_json:
        write_lines(json_document(_head(found), attempts=map(_members, found.attempts)))
    else:
        write_lines(_escape(_lines(found)))
    return GOOD if found.ok else NO


def _write_versions(context: click.Context) -> None:
    """Write what treering runs on here, without importing it, and end."""
    from importlib import metadata

    installed = {each.name.replace("_", "-").lower(): each.version for each in metadata.distributions()}
    found = {"python": platform.python_version(), "system": platform.platform(), "treering": __version__}
    write_lines(f"{name:<18}{version}" for name, version in found.items())
    write_lines(f"{name:<18}{installed.get(name, 'not installed')}" for name in _PACKAGES)
    context.exit()


def _escape(lines: Iterable[str]) -> Iterator[str]:
    return (printable(cut(line, _LONGEST)) for line in lines)


def _lines(found: Diagnosis) -> Iterator[str]:
    state = "nothing is wrong" if found.ok else "there is something to do"
    yield f"{found.path!r}: {_committed(found.committed) if found.committed is not None else state}"
    yield from (f"  problem: {problem}" for problem in found.problems[:_MOST])
    if len(found.problems) > _MOST:
        yield f"  and {len(found.problems) - _MOST:,} more"
    yield from (f"  note: {note}" for note in found.notes[:_MOST])
    for attempt in found.attempts[:_MOST]:
        yield from _attempt(attempt)
    if len(found.attempts) > _MOST:
        left = found.attempts[_MOST:]
        yield f"and {pluralize(len(left), 'more attempts', ',')} with {bytes_text(sum(each.nbytes for each in left))}"


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
    if len(shown) > 1:
        of_stage = collections.Counter(state.stage for state in attempt.processes)
        stages_text = ", ".join(f"{count:,} {stage}" for stage, count in of_stage.items())
        yield f"  {pluralize(len(shown), 'processes', ',')}: {stages_text}"
    for state in sorted(shown[:_MOST_PROCESSES], key=lambda state: state.process):
        who = "" if state.who is None else f"  {state.who}"
        age = "" if state.age is None else f", {duration_text(state.age)} ago"
        late = "" if state.late is None else f", late for {duration_text(state.late)}"
        wrote = "" if state.nbytes is None else f", wrote {bytes_text(state.nbytes)}"
        way = "" if state.through is None else f", votes through process {state.through}"
        problem = "" if state.problem is None else f": {state.problem}"
        yield f"  process {state.process}: {pad(state.stage, stages)}{who}{age}{late}{wrote}{way}{problem}"
    if (left := len(shown) - _MOST_PROCESSES) > 0:
        yield f"  and {pluralize(left, 'more processes', ',')}"


def _head(found: Diagnosis) -> dict[str, Any]:
    return {"schema": "treering.doctor/1"} | members_of(found, "path", "ok", "committed", "problems", "notes")


def _members(attempt: Attempt) -> dict[str, Any]:
    return members_of(attempt, "attempt", "form", "life", "needs_attention") | dataclasses.asdict(attempt)


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
    return _escape(_run_lines(found))


def _run_lines(found: RunDiagnosis) -> Iterator[str]:
    latest = ""
    if found.steps and found.saved is not None:
        latest = f", {bytes_text(found.nbytes)}, the latest is {found.steps[-1]}, saved {when_text(found.saved)}"
    yield f"{found.path!r}: a run of {pluralize(len(found.steps), 'steps', ',')}{latest}"
    yield from (f"  note: {note}" for note in found.notes)
    telling = [folder for folder in found.folders if folder.has_something_to_tell]
    waiting = [folder.step for folder in telling if folder.found.waits_for_readers]
    if len(waiting) > 1:
        what = f"the data of {pluralize(len(waiting), 'removed steps', ',')} are still here, for readers"
        yield f"  note: {what}; later the next save, or treering gc --yes, removes them; --json has each"
        telling = [folder for folder in telling if not folder.found.waits_for_readers]
    for folder in telling[:_MOST]:
        yield from _lines(folder.found)
    if len(telling) > _MOST:
        yield f"and {pluralize(len(telling) - _MOST, 'more folders', ',')} of steps"


def run_doctor_json(found: RunDiagnosis) -> Iterator[str]:
    """Write a diagnosis as the lines of one JSON object, one line for each step's folder, all in ASCII.

    Example:
        >>> found = RunDiagnosis(path="run", steps=[10, 20], nbytes=2048, saved=0.0, folders=(), notes=())
        >>> import json
        >>> document = json.loads("".join(run_doctor_json(found)))
        >>> document["ok"], document["latest"]
        (True, 20)
    """
    head = {"schema": "treering.doctor/1", "path": found.path, "form": "run", "ok": found.ok, "steps": found.steps}
    head |= {"latest": found.steps[-1] if found.steps else None, "nbytes": found.nbytes, "notes": found.notes}
    entries = (
        {"step": each.step} | _head(each.found) | {"attempts": list(map(_members, each.found.attempts))}
        for each in found.folders
    )
    return json_document(head, folders=entries)
