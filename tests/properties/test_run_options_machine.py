"""The options of a run with each other: shared files, leases, resumes past damage, rollbacks and calls."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import treering as tr
from tests import limits
from tests.drawn import drawn
from tests.on_disk import step_path
from treering.errors import CorruptError, StepPassedOverWarning
from treering.run import StepCommit

Tree = dict[str, Any]
KEEP = st.sampled_from([None, tr.KeepLast(1), tr.KeepLast(2), tr.KeepLast(1) | tr.KeepEvery(steps=3)])
PICK = st.integers(0, 3)
LAYERS = st.sets(st.integers(0, 7), max_size=2)


class Options(RuleBasedStateMachine):
    """One run, opened again and again with other options, and the trees that its steps have to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        limits.lower(self.patch, compared_box=256)
        self.path = Path(tempfile.mkdtemp()) / "run"
        self.saved: dict[int, Tree] = {}
        self.leases: dict[int, Any] = {}
        self.ending: list[Any] = []
        self.handed: set[tuple[int, float]] = set()
        self.expected: set[tuple[int, float]] = set()
        self.damaged: set[int] = set()
        self.kept_open = contextlib.ExitStack()
        self.tree: Tree = {"layers": np.zeros((8, 64), np.float32), "count": 0.0}
        self.newest: int | None = None

    def teardown(self) -> None:
        self.look()
        for lease in (*self.leases.values(), *self.ending):
            lease.release()
        self.run.close()
        assert not (self.path / ".leases").exists()
        self.kept_open.close()
        self.patch.undo()
        shutil.rmtree(self.path.parent)

    @initialize(keep=KEEP, incremental=st.booleans(), calls=st.booleans())
    def open(self, keep: Any, incremental: bool, calls: bool) -> None:
        self.calls = calls
        self.run = tr.Run(self.path, keep=keep, incremental=incremental, on_commit=self._hand_over if calls else None)

    def _hand_over(self, commit: StepCommit) -> None:
        self.handed.add((commit.step, commit.metrics["count"]))

    @rule(keep=KEEP, incremental=st.booleans(), calls=st.booleans(), fallback=st.booleans())
    def open_again(self, keep: Any, incremental: bool, calls: bool, fallback: bool) -> None:
        self.run.close()
        self.open(keep, incremental, calls)
        if fallback and self.saved:
            self.resume()

    def _save(self, step: int, layers: set[int], *, rollback: bool = False) -> None:
        changed = self.tree["layers"].copy()
        count = self.tree["count"] + 1.0
        changed[sorted(layers)] = count
        self.tree = {"layers": changed, "count": count}
        self.run.save(step, self.tree, metrics={"count": count}, rollback=rollback).result()
        self.saved = {old: tree for old, tree in self.saved.items() if not rollback or old < step}
        self.saved[step] = self.tree
        self.newest = step
        if self.calls:  # a rollback takes back what was not handed over of the steps that it removes
            self.expected = {one for one in self.expected if not rollback or one[0] < step} | {(step, count)}

    @rule(layers=LAYERS, more=st.integers(1, 2))
    def save(self, layers: set[int], more: int) -> None:
        self._save(max([*self.run.steps(), -1]) + more, layers)

    @rule(layers=LAYERS, pick=PICK)
    def roll_back(self, layers: set[int], pick: int) -> None:
        self.run.wait()
        if steps := self.run.steps():
            step = steps[pick % len(steps)]
            self._save(step, layers, rollback=True)
            # A training that needs the name of a step again, or another rollback, ends the leases on superseded steps.
            self.ending += [self.leases.pop(held) for held in sorted(self.leases) if held >= step]

    @rule(pick=PICK)
    def hold(self, pick: int) -> None:
        self.run.wait()
        if steps := [step for step in self.run.steps() if step not in self.leases]:
            step = steps[pick % len(steps)]
            self.leases[step] = self.run.hold(step)

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        if self.leases:
            self.leases.pop(sorted(self.leases)[pick % len(self.leases)]).release()

    @rule()
    def collect(self) -> None:
        self.run.gc(dry_run=False)

    def _files(self, step: int) -> list[Path]:
        return sorted(step_path(self.path, step).glob("data-*"))

    def _is_damaged(self, step: int) -> bool:
        return any(file.stat().st_ino in self.damaged for file in self._files(step))

    @rule()
    def damage_the_newest_and_resume(self) -> None:
        self.run.wait()
        steps = self.run.steps()
        if len(steps) < 2 or self._is_damaged(steps[-1]):
            return
        file = self._files(steps[-1])[-1]
        file.chmod(0o644)
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 8]))
        self.damaged.add(file.stat().st_ino)
        self.kept_open.enter_context(file.open("rb"))  # so that no other file gets its number
        self.resume()

    def resume(self) -> None:
        whole = [step for step in self.run.steps() if not self._is_damaged(step)]
        with (
            warnings.catch_warnings(action="ignore", category=StepPassedOverWarning),
            contextlib.suppress(CorruptError),
        ):
            found = self.run.load(fallback=True)
            assert whole
            assert found["count"] == self.saved[whole[-1]]["count"]
            self.newest = whole[-1]
            return
        assert not whole

    @rule()
    def look(self) -> None:
        self.run.wait()
        steps = self.run.steps()
        assert self.newest is None or self.newest in steps  # the last that was acknowledged, or resumed from
        assert set(steps) <= self.saved.keys()
        assert self.expected <= self.handed
        for step in steps:
            if not self._is_damaged(step):
                found = self.run.load(step)
                assert found["count"] == self.saved[step]["count"]
                np.testing.assert_array_equal(found["layers"], self.saved[step]["layers"])
        for step in self.leases:
            assert self._files(step)  # whoever holds a step has it


TestRunOptions = Options.TestCase
TestRunOptions.settings = settings(max_examples=drawn(12), stateful_step_count=20, deadline=None)
