"""A conversion of a run, killed at every call; what is there afterwards is whole, and the next call ends it."""

from __future__ import annotations

import functools
import gc
import json
import shutil
import sys
import tempfile
from pathlib import Path

import treering
from torture.children import in_child
from torture.faults import Fault, Injector, Kind
from torture.scenes import state
from treering.errors import TreeringError

__all__ = ["main"]

_STEPS = (10, 20)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _convert(source: Path, target: Path, injector: Injector) -> None:
    injector.install()
    treering.convert(source, target)


def _attempts(run: Path) -> dict[int, str]:
    """Return the attempts of the steps that a run has."""
    if not run.exists():
        return {}
    indexes = {step: run / _name(step) / "treering.json" for step in treering.Run(run).steps()}
    return {step: json.loads(index.read_bytes())["attempt"] for step, index in indexes.items()}


def _judge(source: Path, target: Path) -> str | None:
    """Convert again, and say what is wrong."""
    try:
        done = _attempts(target)
        if list(done) != list(_STEPS[: len(done)]) or (done and not treering.verify(target)):
            return f"the steps {list(done)} were there"
        treering.convert(source, target)
    except TreeringError as error:
        return f"{type(error).__name__}: {error}"
    if not done.items() <= _attempts(target).items():
        return "a step was made twice"
    differing = [
        step
        for step in _STEPS
        if treering.diff(source / _name(step), target / _name(step), values=True).differences
        or treering.Run(target).metrics(step) != {"loss": 1 / step}
        or len(list((target / _name(step)).iterdir())) > 2 + 2 * (step in done)
    ]
    return f"the steps {differing} are others" if differing else None


def main() -> None:
    """Kill at every call, or at every few, and print one JSON object: how many kills, and what must not be."""
    kills, violations = 0, []
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "run"), Path(folder, "new")
        for step in _STEPS:
            note = {"step": step, "saved": "2026-01-01T00:00:00.000000Z", "metrics": {"loss": 1 / step}}
            metadata = {"treering": note | {"temporary": False, "branch": None}}
            treering.save(source / _name(step), state(3000, step), metadata=metadata)
        treering.convert(source, Path(folder, "once"))  # what is imported at the first time is no part of the others
        injector = Injector(None)
        calls = in_child(functools.partial(_convert, source, target, injector), target, injector.calls).calls
        gc.collect()
        gc.freeze()
        for at in range(1, len(calls) + 1, int(sys.argv[1])):
            shutil.rmtree(target, ignore_errors=True)
            injector = Injector(Fault(kind=Kind.KILL_BEFORE, at=at))
            answer = in_child(functools.partial(_convert, source, target, injector), target, injector.calls)
            kills += not answer.acknowledged
            if wrong := _judge(source, target):
                violations.append(f"killed before call {at} ({calls[at - 1]}): {wrong}")
    sys.stdout.write(json.dumps({"calls": len(calls), "kills": kills, "violations": violations}) + "\n")


if __name__ == "__main__":
    main()
