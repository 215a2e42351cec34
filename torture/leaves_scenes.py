"""Saves into a leaves directory."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import treering
from torture.checkpoint_scenes import BUT
from torture.judging import NEW
from torture.scenes import OLD, Scene, fingerprint, state
from treering._codec.zarr import chunk_names
from treering._leaves.documents.index import parse_leaves_index
from treering._leaves.documents.record import arrays_of, parse_record
from treering._store.posix import descriptors, folder, folder_tree
from treering.errors import MismatchError, NotFoundError
from treering.leaves import index_leaves, tree_deserialize_leaves, tree_serialize_leaves

__all__ = ["LEAVES", "NO_DESCRIPTORS", "SYNC_TOGETHER", "LeavesScene"]

NO_DESCRIPTORS: tuple[Any, str, bool] = (folder, "FROM_DESCRIPTOR", False)
"""Module, name and value of a system whose calls take no descriptor of a folder."""
SYNC_TOGETHER: tuple[Any, str, int] = (folder_tree, "_ONE_BY_ONE", 0)
"""Module, name and value with which a few files are flushed like many."""

_INDEX = "tensorstore_index.json"
_DEAD = "0123456789abcdef"
_FOREIGN = {"README": b"by hand", "params/kernel/0.bak": b"mine", "turned/notes.txt": b"mine"}
_BESIDE = {"kernel": np.arange(12, dtype=np.float32), "name": "beside"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavesScene(Scene):
    """``tree_serialize_leaves`` into a directory."""

    beside: bool = False
    """Another tree is in the directory, under a prefix, and files of somebody else."""
    compressor: str | None = None
    """What packs the chunks."""
    indexed_later: bool = False
    """The version that is attacked was saved without an index: it gets into the index now."""
    portable: bool = False
    """The file system cannot be synced as a whole."""

    target: ClassVar[str] = "leaves"
    sweeps_first: ClassVar[bool] = False
    entries: ClassVar[int] = 60

    def configure(self) -> None:
        """Choose the way to the disk, and how it is made durable."""
        # No super(): a dataclass with slots is a new class.
        Scene.configure(self)
        if self.portable:
            descriptors.sync_file_system = _no_such_call

    def furnish(self, path: Path) -> None:
        """Put the old tree there, what lies beside it, and what a dead writer left."""
        self.configure()
        if self.old:
            self._save(path, OLD)
        if self.beside:
            tree_serialize_leaves(path, _BESIDE, prefix="beside")
            for name, content in _FOREIGN.items():
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_bytes(content)
        if self.indexed_later:
            self._save(path, NEW, write_index=False)
        if self.leftover:
            left = path / ".treering" / _DEAD / "leaves" / "step"
            left.mkdir(parents=True)
            (left / ".zarray").write_bytes(b"left")

    def save(self, path: Path, version: int, *, old: bool) -> None:  # noqa: ARG002 - replacing is no other call here
        """Save a version."""
        if not self.indexed_later:
            self._save(path, version)
            return
        if version != NEW:
            self._save(path, version, write_index=False)
        index_leaves(path)

    def ledger(self, version: int) -> str:
        """Return the fingerprint of the state itself."""
        return _ledger(self.size, version)

    def found(self, path: Path) -> str | None:
        """Load and verify, which must agree."""
        try:
            tree: Any = tree_deserialize_leaves(path, structure="exact")
        except NotFoundError:
            if (path / _INDEX).exists():
                raise
            return None
        except MismatchError:
            # An index that has a tree with a prefix, and none without.
            if None in parse_leaves_index((path / _INDEX).read_bytes()).branches:
                raise
            return None
        verified = treering.verify(path)
        return fingerprint(tree) if verified else f"{BUT} {verified}"

    def litter(self, path: Path) -> list[str]:
        """Return what no index names; nothing while a save is on its way, for the next one ends it."""
        if not path.exists():
            return []
        files = [str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()]
        needed = {_INDEX, *_FOREIGN}
        if (path / _INDEX).exists():
            for branch in parse_leaves_index((path / _INDEX).read_bytes()).branches.values():
                if branch.moving is not None:
                    return []
                record = parse_record(branch.record or b"")
                needed.add(f".treering/{record.attempt}/record.json")
                for folder, array in zip(record.folders, arrays_of(record), strict=True):
                    needed.update(f"{folder}/{name}" for name in (".zarray", *chunk_names(array)))
        left = sorted(set(files) - needed)
        # What waits for an index is needed, wherever it lies; it is the newest that was saved.
        if self.indexed_later and any(name.endswith("/pending") for name in left):
            return []
        # The record of what was replaced goes with the next save, if it could not go with this one.
        if left and all(name.endswith("/record.json") for name in left) and self.found(path) == self.ledger(NEW):
            return []
        return left

    def harmed(self, path: Path) -> list[str]:
        """Say which files of others are gone or changed, and whether the other tree is."""
        gone = Scene.harmed(self, path)
        if self.beside:
            for name, content in _FOREIGN.items():
                if not (path / name).exists() or (path / name).read_bytes() != content:
                    gone.append(f"{name} of somebody else is gone")
            if not self.beside_is_whole(path):
                gone.append("the other tree is gone or changed")
        return gone

    def beside_is_whole(self, path: Path) -> bool:
        """Whether the other tree is as it was saved."""
        found = tree_deserialize_leaves(path, prefix="beside", structure="exact")
        return fingerprint(found) == fingerprint(_BESIDE)

    def _save(self, path: Path, version: int, *, write_index: bool = True) -> None:
        compressor = None if self.compressor is None else {"id": self.compressor, "level": 1}
        tree = _state(self.size, version)
        tree_serialize_leaves(path, tree, write_index=write_index, compressor=compressor, chunk_bytes=1 << 19)


def _state(size: int, version: int) -> dict[str, Any]:
    """Return the state of a version: from one to the next a leaf becomes a branch or back, and others come and go."""
    ones = np.full(3, version, np.int16)
    turned: Any = ones if version % 2 else {"0": ones, "more": {"x": np.float64(version)}}
    return state(size, version) | {"turned": turned, f"leaf{version % 3}": ones}


@functools.lru_cache(maxsize=8)
def _ledger(size: int, version: int) -> str:
    return fingerprint(_state(size, version))


def _no_such_call(descriptor: int) -> bool:  # noqa: ARG001 - as the call that it stands for
    return False


LEAVES = (
    LeavesScene(name="leaves, first, in new folders", folder="runs/a"),
    LeavesScene(name="leaves, first, file by file", portable=True),
    LeavesScene(name="leaves, overwrite", old=True),
    LeavesScene(name="leaves, overwrite through a link", old=True, link=True, compressor="zstd"),
    LeavesScene(name="leaves, overwrite after a crash", old=True, leftover=True, portable=True),
    LeavesScene(name="leaves, first, beside others", beside=True),
    LeavesScene(name="leaves, overwrite beside others", old=True, beside=True),
    LeavesScene(name="leaves, indexed later", old=True, indexed_later=True),
    LeavesScene(name="leaves, overwrite, large", size=1_300_000, old=True),
)
