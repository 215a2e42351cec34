"""Checkpoints that share files, against a naive model: whatever happens to one, every other loads bit for bit."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

import treering as tr
from tests import limits
from tests.command import here
from tests.drawn import drawn
from treering.errors import CorruptError, TreeringError

Tree = dict[str, Any]
CHANGES = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=3)


class Incremental(RuleBasedStateMachine):
    """Folders of checkpoints and steps of a run, with what each has to hold."""

    paths: Bundle[Path] = Bundle("paths")

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        # Arrays on CPU count as those of a device into whose memory only jax writes: those that are held are not read.
        limits.lower(self.patch, compared_box=256, other_writers={"cpu": ()})
        self.folder = Path(tempfile.mkdtemp())
        self.numbers = itertools.count()
        self.there: dict[Path, Tree] = {}
        self.damaged: set[int] = set()
        self.tree: Tree = {"stacked": np.zeros((8, 64), np.float32), "small": np.zeros(5), "text": "a", "step": 0}
        self.held = {"one": jnp.arange(200.0), "two": jnp.zeros((3, 60))}
        self.run = tr.Run(self.folder / "run", incremental=True, full_every=5)
        self.step = 0

    @initialize(meanwhile=st.booleans())
    def compare(self, meanwhile: bool) -> None:
        """What is known to have changed is written while the rest is compared, or all is compared first."""
        if meanwhile:
            limits.lower(self.patch, compared_at_once=0, compared_meanwhile_from=1)

    def teardown(self) -> None:
        self.run.close()
        self.patch.undo()
        for path in sorted(self.there):
            self._check(path)
        shutil.rmtree(self.folder)

    def _changed(self, changes: list[tuple[int, int]]) -> Tree:
        stacked, small = self.tree["stacked"].copy(), self.tree["small"].copy()
        for layer, value in changes:
            stacked[layer] = value
            small[layer % 5] += value == 3
            for key in ("one", "two")[layer % 4 : layer % 4 + 1] if value else ():
                self.held[key] = self.held[key].at[0].add(value)
        if changes == [(7, 0)]:
            self._renew()
        self.tree = {"stacked": stacked, "small": small, "text": "b" * len(changes), "step": self.tree["step"] + 1}
        self.tree |= jax.tree.map(np.array, self.held)
        return self.tree | self.held

    def _renew(self) -> None:
        """Put other arrays in the place of those that are held, which are deleted, as a donation does."""
        old, self.held = self.held, jax.tree.map(jnp.array, self.held)
        for leaf in old.values():
            leaf.delete()

    def _files(self, path: Path) -> list[Path]:
        return sorted(path.glob("data-*"))

    def _is_damaged(self, path: Path) -> bool:
        return any(file.stat().st_ino in self.damaged for file in self._files(path))

    def _check(self, path: Path) -> None:
        if self._is_damaged(path):  # it loads as it was saved, or says that it is damaged
            try:
                found = tr.load(path)
            except CorruptError:
                assert not tr.verify(path).ok
                return
        else:
            found = tr.load(path)
            assert tr.verify(path).ok
        wanted = self.there[path]
        assert found.keys() == wanted.keys()
        assert all(np.asarray(found[key]).tobytes() == np.asarray(leaf).tobytes() for key, leaf in wanted.items())

    def _forget(self, path: Path) -> None:
        self.there.pop(path, None)
        left = {file.stat().st_ino for file in self.folder.rglob("data-*")}
        self.damaged &= left

    @rule(target=paths, changes=CHANGES)
    def save(self, changes: list[tuple[int, int]]) -> Path:
        path = self.folder / f"{next(self.numbers)}"
        tr.save(path, self._changed(changes))
        self.there[path] = self.tree
        return path

    @rule(target=paths, base=paths, changes=CHANGES, later=st.booleans(), deleted=st.booleans())
    def save_with_base(self, base: Path, changes: list[tuple[int, int]], later: bool, deleted: bool) -> Any:
        path, tree = self.folder / f"{next(self.numbers)}", self._changed(changes)
        try:
            if later:
                pending = tr.save_async(path, tree, base=base)
                if deleted:
                    self._renew()
                pending.result()
            else:
                tr.save(path, tree, base=base)
        except TreeringError:
            assert base not in self.there or (later and deleted and self._is_damaged(base))
            return multiple()
        self.there[path] = self.tree
        return path

    @rule(target=paths, changes=CHANGES)
    def save_step(self, changes: list[tuple[int, int]]) -> Path:
        self.step += 1
        self.run.save(self.step, self._changed(changes))
        self.run.wait()
        path = self.folder / "run" / f"step_{self.step:08}"
        self.there[path] = self.tree
        return path

    @rule(path=paths, base=paths, changes=CHANGES)
    def overwrite(self, path: Path, base: Path, changes: list[tuple[int, int]]) -> None:
        if path not in self.there or base not in self.there or path.parent != self.folder:
            return
        tr.save(path, self._changed(changes), base=base, overwrite=True)
        self._forget(path)
        self.there[path] = self.tree

    @rule(path=paths)
    def remove(self, path: Path) -> None:
        if path in self.there:
            shutil.rmtree(path)
            self._forget(path)

    @rule(target=paths, path=paths, by_treering=st.booleans())
    def copy(self, path: Path, by_treering: bool) -> Any:
        if path not in self.there or self._is_damaged(path):
            return multiple()
        copy = self.folder / f"{next(self.numbers)}"
        if by_treering:
            here("cp", str(path), str(copy), code=0)
        else:
            shutil.copytree(path, copy)
        self.there[copy] = self.there[path]
        return copy

    @rule(target=paths, path=paths)
    def move(self, path: Path) -> Any:
        if path not in self.there:
            return multiple()
        moved = self.folder / f"{next(self.numbers)}"
        path.rename(moved)
        self.there[moved] = self.there.pop(path)
        return moved

    @rule(target=paths)
    def branch(self) -> Any:
        steps = self.run.steps()
        if not steps or self._is_damaged(path := self.folder / "run" / f"step_{steps[-1]:08}"):
            return multiple()
        new = self.folder / f"{next(self.numbers)}"
        self.run.branch(steps[-1], new)
        branched = new / path.name
        self.there[branched] = self.there[path]
        return branched

    @rule(path=paths, which=st.integers(0, 5), at=st.floats(0, 1, exclude_max=True))
    def damage(self, path: Path, which: int, at: float) -> None:
        if path not in self.there or not (files := self._files(path)):
            return
        file = files[which % len(files)]
        file.chmod(0o644)
        content = bytearray(file.read_bytes())
        content[int(at * len(content))] ^= 1
        file.write_bytes(content)
        self.damaged.add(file.stat().st_ino)

    @invariant()
    def the_newest_loads(self) -> None:
        for path in list(self.there)[-2:]:
            self._check(path)


TestIncremental = Incremental.TestCase
TestIncremental.settings = settings(max_examples=drawn(12), stateful_step_count=16, deadline=None)
