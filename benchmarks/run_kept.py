"""A run that keeps thousands of steps: what one more save costs its caller, and how often it asks for a name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import treering
from benchmarks.measure import Case, Group, Work
from benchmarks.run_loop import Saved
from benchmarks.workloads import Tree
from treering._runs.folder import RunFolder
from treering._runs.steps import note_records, records_of, step_path

__all__ = ["KeptScene"]

_STEPS = 5000
_MARK = "/treering-mark-"
_CALL = re.compile(r"^\d+ +\w+\(")
# Two saves: the first one of a program reads run.json, the second one is counted.
_PROGRAM = f"""
import os, sys
import numpy as np
import treering
with treering.Run(sys.argv[1], keep=treering.KeepLast(int(sys.argv[2]))) as run:
    step = run.latest() + 1
    for number in range(2):
        run.save(step + number, {{"w": np.arange(10.0)}}, metrics={{"loss": 0.5}}).result()
        os.path.lexists("{_MARK}" + str(number))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """What strace saw."""

    calls: int
    """Calls that open, list, look up or change names, of one save."""


class KeptScene:
    """A run of 5,000 steps of one leaf each.

    Args:
        factor: factor on the steps.
        folder: where the run lies.
    """

    repeats = 3

    def __init__(self, factor: float, folder: Path) -> None:
        self._count = max(3, round(_STEPS * factor))
        self._path = folder / "kept"
        self._tree: Tree = {"w": np.arange(10.0)}
        self._run = treering.Run(self._path, keep=treering.KeepLast(self._count))
        self.title = f"a run of {self._count:,} kept steps"
        self.nbytes = 80

    def prepare(self) -> None:
        """Make the steps: copies of one, for the folder says which it is."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with treering.Run(self._path) as run:
            run.save(1, self._tree, metrics={"loss": 0.5})
        for step in range(2, self._count + 1):
            shutil.copytree(step_path(self._path, 1), step_path(self._path, step))
        with RunFolder(self._path) as folder:
            note_records(folder, records_of(self._path))
        self._save()

    def close(self) -> None:
        """Remove every file."""
        self._run.close()
        shutil.rmtree(self._path)

    def groups(self) -> tuple[Group, ...]:
        """Saving, looking, and counting where strace is."""
        groups = (
            Group(name="kept, save", cases=(self._saved(),), peaks=False, unit="s until it is written"),
            Group(name="kept, latest", cases=(self._latest(),), peaks=False),
        )
        if shutil.which("strace") is None:
            return groups
        return (*groups, Group(name="kept, calls", cases=(self._traced(),), once=True, peaks=False, unit="calls"))

    def _saved(self) -> Case:
        return Case(
            name="treering",
            begin=lambda: self._save,
            check=lambda saved: None if saved.path.exists() else "it was not saved",
            seconds=lambda saved: saved.blocked,
            count=lambda saved: saved.finished,
        )

    def _latest(self) -> Case:
        def begin() -> Work:
            return lambda: treering.Run(self._path).latest()

        return Case(name="treering", begin=begin, check=lambda step: None if step else "it has no step")

    def _traced(self) -> Case:
        return Case(
            name="treering",
            begin=lambda: self._count_calls,
            check=lambda counted: None if counted.calls else "strace saw nothing",
            count=lambda counted: counted.calls,
        )

    def _save(self) -> Saved:
        step = (treering.Run(self._path).latest() or 0) + 1
        start = time.perf_counter()
        saving = self._run.save(step, self._tree, metrics={"loss": 0.5})
        returned = time.perf_counter()
        saving.result()
        finished = time.perf_counter() - start
        return Saved(path=step_path(self._path, step), blocked=returned - start, finished=finished)

    def _count_calls(self) -> _Counted:
        with tempfile.NamedTemporaryFile() as log:
            command = ["strace", "-f", "-qq", "-e", "trace=%file,getdents64", "-o", log.name, sys.executable, "-c"]
            subprocess.run([*command, _PROGRAM, str(self._path), str(self._count)], check=True, capture_output=True)
            lines = Path(log.name).read_text().splitlines()
        first, second = (number for number, line in enumerate(lines) if _MARK in line)
        return _Counted(calls=sum(_CALL.match(line) is not None for line in lines[first + 1 : second]))
