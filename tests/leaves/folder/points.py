"""Every fault at every call of saves into leaves directories; a program, so that its children are cheap to fork.

``python -m tests.leaves.folder.points 1 "KILL_BEFORE EIO EIO_AFTER ENOSPC SHORT EMFILE"`` does all of it, in minutes.
"""

import dataclasses
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest

from tests.leaves.folder import directories
from tests.leaves.folder.directories import Tree
from tests.store.platforms import without_syncfs
from torture.faults import Kind
from torture.judging import NEW
from torture.points import Report, sweep
from torture.scenes import OLD, Scene
from treering.errors import NotFoundError

OTHER = {"other/a": b"mine", "other/b/c": b"all mine"}
USERS = {"README": b"by hand", "a/notes.txt": b"by hand", "b/1/mine": b"by hand"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavesScene(Scene):
    """One save of a tree of leaves."""

    trees: dict[int, tuple[str, ...]]
    """The folders of the leaves of each version."""
    users: bool = False
    """Files of somebody else lie beside."""
    other: bool = False
    """Another branch is there."""
    waits: str = ""
    """``leave``: the save is one without an index; ``take up``: it was, and gets into the index."""
    portable: bool = False
    """Without ``syncfs``."""

    target: ClassVar[str] = "leaves"

    def configure(self) -> None:
        if self.portable:
            without_syncfs(pytest.MonkeyPatch())

    def furnish(self, path: Path) -> None:
        self.configure()
        if self.old:
            directories.save(path, self.tree(OLD))
        if self.other:
            directories.save(path, OTHER, prefix="other")
        if self.users:
            for name, content in USERS.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(content)
        if self.waits == "take up":
            directories.save(path, self.tree(NEW), leave=True)
        if self.leftover:
            died = path / ".treering" / "0123456789abcdef"
            (died / "leaves" / "a").mkdir(parents=True)
            (died / "leaves" / "a" / ".zarray").write_bytes(b"{}")

    def save(self, path: Path, version: int, *, old: bool) -> None:
        if self.waits != "take up" or version != NEW:
            directories.save(path, self.tree(version), leave=bool(self.waits))
        if self.waits == "take up":
            directories.take_up(path)

    def tree(self, version: int) -> Tree:
        """The leaves of that version, each as long as its number says."""
        folders = self.trees.get(version) or self.trees[OLD]
        return {folder: bytes([64 + version]) * ((5 * number) % 13) for number, folder in enumerate(folders, version)}

    def ledger(self, version: int) -> str:
        return _digest(self.tree(version))

    def found(self, path: Path) -> str | None:
        tree: Tree | None = None
        try:
            if self.waits == "leave" and (waiting := directories.pending(path)):
                with directories.open_leaves(path) as directory:
                    _, _, attempt, names = waiting[-1]
                    branch = {"attempt": attempt, "leaves": names, "moving": []}
                    tree = directories.whole(directory, branch)
            else:
                tree = directories.load(path)
        except NotFoundError:
            if any(path.rglob("tensorstore_index.json")):
                raise
        return None if tree is None else _digest(tree)

    def litter(self, path: Path) -> list[str]:
        index = path / "tensorstore_index.json"
        branches = directories.branches_of(index.read_bytes()) if index.exists() else {}
        if any("moving" in branch for branch in branches.values()):
            return []
        needed = {
            f"{folder}/{name}"
            for branch in branches.values()
            for folder, names in branch["leaves"].items()
            for name in (".zarray", *names)
        }
        named = {branch["attempt"] for branch in branches.values()}
        waiting = {attempt for _, _, attempt, _ in directories.pending(path)} if path.exists() else set()
        left = []
        for name in directories.everything(path, records=True) if path.exists() else []:
            attempt = name.split("/")[1] if name.startswith(".treering/") else ""
            kept = attempt in named and name.endswith("/record.json")
            # What a save without an index moved is of no other branch: all that is there beside an index is its.
            if kept or name in needed or name in USERS or name == index.name or (self.waits and waiting):
                continue
            # The record of what was replaced goes with the next save, if it could not go with this one.
            if self.found(path) == self.ledger(NEW) and name == f".treering/{attempt}/record.json":
                continue
            left.append(name)
        return left

    def harmed(self, path: Path) -> list[str]:
        wrong = Scene.harmed(self, path)
        if self.users:
            wrong += [f"{name} is harmed" for name, content in USERS.items() if _content(path / name) != content]
        if self.other and directories.load(path, "other") != OTHER:
            wrong.append("the other branch is harmed")
        return wrong


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


def _digest(tree: Tree) -> str:
    return hashlib.sha256(repr(sorted(tree.items())).encode()).hexdigest()


_GROWN = {OLD: ("a/b", "a/c", "d"), NEW: ("a/b", "e/f/g", "e/f/h", "d", "a/x")}
_TURNED = {OLD: ("a", "b/0", "b/1", "c/0/x", "c/0/y"), NEW: ("a/0", "a/1/x", "b", "c/0")}

SCENES = (
    LeavesScene(name="first", folder="new/er", trees=_GROWN),
    LeavesScene(name="first, portable", trees=_GROWN, portable=True),
    LeavesScene(name="more", old=True, trees=_GROWN),
    LeavesScene(name="fewer", old=True, trees={OLD: _GROWN[NEW], NEW: _GROWN[OLD]}, link=True),
    LeavesScene(name="turned", old=True, trees=_TURNED),
    LeavesScene(name="turned back", old=True, trees={OLD: _TURNED[NEW], NEW: _TURNED[OLD]}, portable=True),
    LeavesScene(name="beside", trees=_GROWN, other=True),
    LeavesScene(name="among files", old=True, trees=_GROWN, users=True, leftover=True),
    LeavesScene(name="left", trees=_GROWN, waits="leave"),
    LeavesScene(name="left over old", old=True, trees=_GROWN, waits="leave"),
    LeavesScene(name="taken up", trees=_GROWN, waits="take up"),
    LeavesScene(name="taken up over old", old=True, trees=_TURNED, waits="take up", other=True),
)


def main() -> None:
    """Sweep every few calls of the scenes named (all if none is), and print what was found, scene by scene."""
    stride, kinds, *names = sys.argv[1:]
    for scene in SCENES:
        if not names or scene.name in names:
            report = Report()
            folder = Path(tempfile.mkdtemp())
            try:
                sweep(scene, folder / "scene", report, [Kind[kind] for kind in kinds.split()], stride=int(stride))
            finally:
                shutil.rmtree(folder)
            sys.stdout.write(json.dumps([scene.name, dataclasses.asdict(report)]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
