"""The steps of a run as one JSON document for programs. The page docs/command-line.md describes every member."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping

from treering._view.listing_json import json_text
from treering._view.run_text import RunListing, RunStep


def steps_json(listing: RunListing) -> Iterator[str]:
    """Write the steps of a run as the lines of one JSON object, one step a line, in ASCII.

    Example:
        >>> import json
        >>> step = RunStep(step=7, path="run/step_00000007", saved=0.0, nbytes=9)
        >>> json.loads("".join(steps_json(RunListing(path="run", steps=[step]))))["steps"][0]["saved"]
        '1970-01-01T00:00:00+00:00'
    """
    head = {"schema": "treering.ls/1", "file": listing.path, "form": "run"}
    return _lines(head, (_members(step) for step in listing.steps), len(listing.steps))


def log_json(listing: RunListing, *, now: float) -> Iterator[str]:
    """Write all that is known of a run as the lines of one JSON object, the newest step first, in ASCII.

    Example:
        >>> import json
        >>> step = RunStep(step=7, path="run/step_00000007", saved=0.0, nbytes=9, reasons=("newest",))
        >>> found = json.loads("".join(log_json(RunListing(path="run", steps=[step]), now=60.0)))
        >>> found["steps"][0]["age"], found["steps"][0]["reasons"]
        (60.0, ['newest'])
    """
    head = {
        "schema": "treering.log/1",
        "path": listing.path,
        "keep": listing.keep,
        "save_every": listing.save_every,
        "nbytes": listing.nbytes,
        "notes": list(listing.notes),
    }
    steps = (
        _members(step) | {"age": max(now - step.saved, 0.0), "seconds": step.seconds} | _judgement(step)
        for step in reversed(listing.steps)
    )
    return _lines(head, steps, len(listing.steps))


def gc_json(listing: RunListing, *, removed: bool) -> Iterator[str]:
    """Write which steps stay and which go as the lines of one JSON object, the oldest first, in ASCII.

    Example:
        >>> import json
        >>> step = RunStep(step=7, path="run/step_00000007", saved=0.0, nbytes=9, kept=False)
        >>> found = json.loads("".join(gc_json(RunListing(path="run", steps=[step]), removed=False)))
        >>> found["removed"], found["going"], found["steps"][0]["kept"]
        (False, 1, False)
    """
    going = [step for step in listing.steps if not step.kept]
    head = {
        "schema": "treering.gc/1",
        "path": listing.path,
        "keep": listing.keep,
        "removed": removed,
        "going": len(going),
        "nbytes": sum(step.nbytes for step in going),
    }
    steps = ({"step": step.step, "path": step.path, "nbytes": step.nbytes} | _judgement(step) for step in listing.steps)
    return _lines(head, steps, len(listing.steps))


def _members(step: RunStep) -> dict[str, object]:
    return {
        "step": step.step,
        "path": step.path,
        "saved": _when(step.saved),
        "nbytes": step.nbytes,
        "metrics": dict(step.metrics),
        "temporary": step.temporary,
    }


def _judgement(step: RunStep) -> dict[str, object]:
    return {"kept": step.kept, "reasons": list(step.reasons)}


def _when(seconds: float) -> str | None:
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()
    except (ValueError, OverflowError, OSError):
        return None


def _lines(head: Mapping[str, object], steps: Iterator[Mapping[str, object]], count: int) -> Iterator[str]:
    yield json_text(head)[:-1] + ","
    yield ' "steps": ['
    for place, step in enumerate(steps, 1):
        yield f"  {json_text(step)}{',' if place < count else ''}"
    yield " ]}"
