"""Every flush that durability rests on: what was acknowledged survives any power cut, and not without that flush."""

import ast
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import faults
from tests.checkpoint.together import Together, job_of
from tests.crash.power_cuts import SOURCES, Line, Recorder, Tree, lay, states
from tests.leaves.jobs_of_threads import Job
from torture.checkpoint_scenes import CheckpointScene
from torture.faults import FILE_SYSTEM_FLUSH
from torture.file_scenes import DocumentScene, FileScene
from torture.judging import next_save, told
from torture.leaves_scenes import NO_DESCRIPTORS, SYNC_TOGETHER, LeavesScene
from torture.run_scenes import RunScene
from torture.scenes import OLD, SETTINGS, Scene, fingerprint, state
from treering.errors import NotFoundError
from treering.leaves import index_leaves, tree_deserialize_leaves, tree_serialize_leaves
from treering.serialization import save_to_file

FLUSHES = {
    "fsync", "make_durable", "sync", "sync_file_system", "sync_folder", "sync_folders", "sync_parent",
    "sync_written", "syncfs", "_make_durable", "_sync", "_sync_if_real",
}  # fmt: skip
"""The functions that flush, and those that do nothing but call them."""

NEW = OLD + 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stream(FileScene):
    """``save_to_file`` into an open file."""

    def save(self, path: Path, version: int, *, old: bool) -> None:
        with path.open("r+b") as file:
            save_to_file(state(self.size, version), file)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Steps(RunScene):
    """A run whose saves end with what comes after the commit, or (``gc``) the removal of a step alone."""

    gc: bool = False

    def furnish(self, path: Path) -> None:
        RunScene.furnish(self, path)
        if self.gc:
            with treering.Run(path) as run:
                run.save(NEW, state(self.size, NEW))

    def save(self, path: Path, version: int, *, old: bool) -> None:
        with treering.Run(path, keep=treering.KeepLast(1)) as run:
            if self.gc and version == NEW:
                run.gc(dry_run=False)
                return
            back = self.back and version <= (run.latest() or 0)
            run.save(version, state(self.size, version), rollback=back)

    def found(self, path: Path) -> str | None:
        if self.gc:  # the step is there and whole, or it is gone
            for step in treering.Run(path).steps():
                treering.Run(path).load(step)
        return RunScene.found(self, path)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaves(LeavesScene):
    """A leaves directory. What is committed stays when another tree is saved beside it."""

    indexed: bool = True
    """The version that is attacked is saved with an index."""

    def save(self, path: Path, version: int, *, old: bool) -> None:
        if version == NEW and not self.indexed:
            self._save(path, version, write_index=False)
        else:
            LeavesScene.save(self, path, version, old=old)

    def found(self, path: Path) -> str | None:
        before = LeavesScene.found(self, path) if self.indexed else None
        tree_serialize_leaves(path, np.arange(3), prefix="another")
        if not self.indexed:
            index_leaves(path)
        after = LeavesScene.found(self, path)
        return after if after == before or not self.indexed else f"{before}, and {after} after another was saved"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrbaxItem(Scene):
    """An item of Orbax, of texts alone: what TensorStore writes of others becomes durable with all that is there."""

    target: ClassVar[str] = "item"

    def furnish(self, path: Path) -> None:
        pass

    def save(self, path: Path, version: int, *, old: bool) -> None:
        if old:
            shutil.rmtree(path)  # such a folder is never replaced
        treering.export(path, self._tree(version), to="orbax")

    def ledger(self, version: int) -> str:
        return repr(self._tree(version))

    def found(self, path: Path) -> str | None:
        return repr(treering.load(path)) if path.exists() else None

    def litter(self, path: Path) -> list[str]:
        folder = path.parent
        return [entry.name for entry in folder.glob("*orbax-checkpoint-tmp*")] if folder.is_dir() else []

    def _tree(self, version: int) -> dict[str, str]:
        return {"text": "ring" * self.size, "version": str(version)}


def _sharded(version: int) -> dict[str, Any]:
    mesh = jax.make_mesh((8,), ("x",))
    place = NamedSharding(mesh, PartitionSpec("x"))
    return {"w": jax.device_put(np.arange(16, dtype=np.float32) + version, place)}


def _fingerprint(tree: Any) -> str:
    return fingerprint(jax.tree.map(np.asarray, tree))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JointCheckpoint(CheckpointScene):
    """A checkpoint that two processes save; each flushes what it wrote itself, and no more."""

    job: Together

    def save(self, path: Path, version: int, *, old: bool) -> None:
        errors = self.job.save(path, lambda process: _sharded(version), overwrite=old)
        assert errors == [None] * self.job.count

    def ledger(self, version: int) -> str:
        return _fingerprint(_sharded(version))

    def found(self, path: Path) -> str | None:
        try:
            return _fingerprint(treering.load(path)) if treering.verify(path) else "damaged"
        except NotFoundError:
            return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JointLeaves(LeavesScene):
    """A leaves directory that two processes save."""

    job: Job

    def save(self, path: Path, version: int, *, old: bool) -> None:
        assert set(self.job.save(path, _sharded(version)).values()) == {None}

    def ledger(self, version: int) -> str:
        return _fingerprint(_sharded(version))

    def found(self, path: Path) -> str | None:
        try:
            return _fingerprint(tree_deserialize_leaves(path)) if treering.verify(path) else "damaged"
        except NotFoundError:
            return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A scene whose power is cut."""

    scene: Scene
    made: bool = False
    """The folder is there, and its name is not on the disk yet."""
    whole: bool = True
    """There is ``syncfs``."""
    loose: bool = False
    """The disk keeps no order of names at all."""
    clients: bool = False
    """Each process is on a machine of its own."""
    patched: tuple[Any, str, Any] | None = None
    """What is another one on some systems."""


CUTS = [
    Cut(scene=FileScene(name="file, first", folder="a/b"), loose=True),
    Cut(scene=FileScene(name="file, next", old=True), loose=True),
    Cut(scene=Stream(name="file, open", old=True), loose=True),
    Cut(scene=DocumentScene(name="document, first"), loose=True),
    Cut(scene=CheckpointScene(name="checkpoint, first", folder="a/b")),
    Cut(scene=CheckpointScene(name="checkpoint, in a new folder"), made=True),
    Cut(scene=CheckpointScene(name="checkpoint, next", old=True), loose=True),
    Cut(scene=CheckpointScene(name="checkpoint, after a crash", old=True, leftover=True)),
    Cut(scene=Steps(name="run, first")),
    Cut(scene=Steps(name="run, next", old=True)),
    Cut(scene=Steps(name="run, back", old=True, back=True), loose=True),
    Cut(scene=Steps(name="run, gc", old=True, gc=True), loose=True),
    Cut(scene=OrbaxItem(name="item of Orbax", folder="a/b")),
    Cut(scene=Leaves(name="leaves, first", folder="a/b")),
    Cut(scene=Leaves(name="leaves, in a new folder"), made=True, whole=False),
    Cut(scene=Leaves(name="leaves, beside others", old=True, beside=True)),
    Cut(scene=Leaves(name="leaves, beside others, at once", old=True, beside=True), patched=SYNC_TOGETHER),
    Cut(scene=Leaves(name="leaves, no dir_fd"), patched=NO_DESCRIPTORS),
    Cut(scene=Leaves(name="leaves, no index", indexed=False)),
    Cut(scene=Leaves(name="leaves, no index, others in the way", indexed=False, old=True)),
    Cut(scene=Leaves(name="leaves, indexed later", old=True, indexed_later=True)),
]


def joint_cuts(monkeypatch: pytest.MonkeyPatch) -> list[Cut]:
    checkpoint = JointCheckpoint(name="checkpoint, two processes", job=job_of(2, monkeypatch))
    leaves = JointLeaves(name="leaves, two processes", job=Job(monkeypatch, 2))
    return [
        Cut(scene=checkpoint, clients=True),
        Cut(scene=leaves, clients=True),
        Cut(scene=leaves, clients=True, whole=False),
    ]


@pytest.fixture(autouse=True)
def undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenes choose ways to the disk for their process, which is this one: undo that."""
    for module, name in SETTINGS:
        monkeypatch.setattr(module, name, getattr(module, name))
    faults.answer(monkeypatch, os, "fsync", None)
    faults.answer(monkeypatch, *FILE_SYSTEM_FLUSH, True)


def recorded(cut: Cut, base: Path) -> Recorder:
    scene = cut.scene
    path = scene.prepared(base)
    recorder = Recorder(base, whole=cut.whole, clients=cut.clients)
    with recorder.watch(), pytest.MonkeyPatch.context() as patch:
        if cut.patched:
            patch.setattr(*cut.patched)
        if cut.made:
            path.mkdir()
        scene.save(path, NEW, old=scene.old)
        recorder.acknowledge(NEW)
    return recorder


class Judge:
    """Says what is wrong with a state that a power cut left; each state is looked at once."""

    def __init__(self, cut: Cut, base: Path) -> None:
        base.mkdir(exist_ok=True)
        self.cut, self.scene, self.base = cut, cut.scene, base
        self.path = self.scene.prepared(base / "path").relative_to(base / "path")
        self.recorder = recorded(cut, base / "recorded")
        *_, (self.last, _) = self.states()
        self.seen: dict[Tree, tuple[Any, list[str]]] = {}

    def states(
        self, left_out: Callable[[frozenset[Line]], bool] = lambda _: False
    ) -> Iterator[tuple[Tree, int | None]]:
        return states(self.recorder, OLD if self.scene.old else None, left_out, loose=self.cut.loose)

    def first_wrong(self, left_out: Callable[[frozenset[Line]], bool] = lambda _: False) -> str | None:
        """Return what is wrong with one of all states; the last ones are looked at first."""
        for tree, version in reversed(list(self.states(left_out))):
            if wrong := self.wrong(tree, version):
                return f"{wrong}\n{shown(tree)}"
        return None

    def wrong(self, tree: Tree, version: int | None) -> list[str]:
        if tree not in self.seen:
            self.seen[tree] = self.look(tree)
        found, wrong = self.seen[tree]
        versions = [NEW] if version == NEW else [OLD, NEW] if self.scene.old else [None, NEW]
        allowed = [None if one is None else self.scene.ledger(one) for one in versions]
        if version == NEW and isinstance(self.scene, LeavesScene) and to_others(tree) != to_others(self.last):
            wrong = [*wrong, "other programs find other files than when the save returned"]
        return [*([] if found in allowed else [f"{versions} may be there, and this was found: {found}"]), *wrong]

    def look(self, tree: Tree) -> tuple[Any, list[str]]:
        here = self.base / str(len(self.seen))
        lay(tree, here)
        found = told(lambda: self.scene.found(here / self.path))
        return found, told(lambda: list(next_save(self.scene, here / self.path, old=found is not None)))


def to_others(tree: Tree) -> Tree:
    """Return what those see who know nothing of ``.treering``."""
    return tuple(
        (name, what if isinstance(what, bytes) else to_others(what))
        for name, what in tree
        if not name.startswith(".treering")
    )


def shown(tree: Tree, above: str = "") -> str:
    return "\n".join(
        f"{above}{name}: {len(what)} bytes" if isinstance(what, bytes) else shown(what, f"{above}{name}/")
        for name, what in tree
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.scene.name)
def test_what_was_acknowledged_is_there_after_a_power_cut(cut: Cut, tmp_path: Path) -> None:
    judge = Judge(cut, tmp_path)
    barest = next(tree for tree, version in judge.states() if version == NEW)
    assert judge.wrong(barest, NEW) == [], shown(barest)


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.scene.name)
def test_a_power_cut_at_any_moment_leaves_one_state_whole(cut: Cut, tmp_path: Path) -> None:
    wrong = Judge(cut, tmp_path).first_wrong()
    assert wrong is None, wrong


@pytest.mark.slow
def test_a_power_cut_at_any_moment_of_a_joint_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, cut in enumerate(joint_cuts(monkeypatch)):
        wrong = Judge(cut, tmp_path / f"{number}").first_wrong()
        assert wrong is None, wrong


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """A call of a function that flushes."""

    file: str
    first: int
    last: int
    call: str

    def asks(self, lines: frozenset[Line]) -> bool:
        return any(file == self.file and self.first <= line <= self.last for file, line in lines)


def sites() -> Iterator[Site]:
    """Yield every call in treering of a function that flushes files; in a bucket, what was answered is durable."""
    for path in sorted(SOURCES.rglob("*.py")):
        if path == SOURCES / "_store" / "unmoved_leaves.py":
            continue
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if any(name in text for name in FLUSHES) else ():
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", None))
                if name in FLUSHES and node.end_lineno is not None:
                    file = path.relative_to(SOURCES).as_posix()
                    yield Site(file, node.lineno, node.end_lineno, ast.unparse(node.func))


@pytest.mark.slow
def test_no_flush_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = [*CUTS, *joint_cuts(monkeypatch)]
    judges = [Judge(cut, tmp_path / f"{number}") for number, cut in enumerate(cuts)]
    unseen = []
    for site in sites():
        asking = [judge for judge in judges if any(site.asks(event.lines) for event in judge.recorder.flushes())]
        if not any(judge.first_wrong(site.asks) for judge in asking):
            unseen.append(f"{site.file}:{site.first} {site.call}, in {[judge.scene.name for judge in asking]}")
    # The one call that `Recorder` stands in for.
    assert [each for each in unseen if "syncfs" not in each] == []


def test_only_one_module_flushes() -> None:
    asking = {site.file for site in sites() if site.call.rpartition(".")[2] in {"fsync", "syncfs"}}
    assert asking == {"_store/posix/descriptors.py"}
