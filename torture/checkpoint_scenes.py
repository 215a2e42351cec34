"""Saves of a checkpoint's folder."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import treering
from torture.scenes import OLD, Scene, fingerprint, state
from treering._arrays import plan_cache
from treering.errors import NotFoundError

__all__ = ["BUT", "CHECKPOINTS", "CheckpointScene"]

BUT = "loaded, but verify says:"
_DEAD = "0123456789abcdef"
_FOREIGN = {"config.json": b"{}", "data.safetensors": b"mine", f"data-{_DEAD[::-1]}-00000-of-00001.safetensors": b"?"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointScene(Scene):
    """``treering.save`` into a folder."""

    empty: bool = False
    """An empty folder is there."""
    links: bool = True
    """The file system has hard links."""
    file_bytes: int = 1 << 40
    """A data file is not begun beyond this many bytes."""

    target: ClassVar[str] = "ckpt"

    def configure(self) -> None:
        """Choose the way to the disk, how large files grow, and whether there are hard links."""
        # No super(): a dataclass with slots is a new class.
        Scene.configure(self)
        setattr(plan_cache, "FILE_BYTES", self.file_bytes)  # noqa: B010 - a constant to everybody else
        if not self.links:
            os.link = _no_links

    def furnish(self, path: Path) -> None:
        """Put the old checkpoint there with files of others beside it, and what a dead writer left."""
        if self.empty:
            path.mkdir()
        if self.old:
            path.resolve().mkdir(exist_ok=True)
            for name, content in {**_old(self.size), **_FOREIGN}.items():
                (path / name).write_bytes(content)
        if self.leftover:
            path.resolve().mkdir(exist_ok=True)
            for name in (f".treering.json.{_DEAD}.treering-tmp", f"data-{_DEAD}-00000-of-00001.safetensors"):
                (path / name).write_bytes(b"left")

    def save(self, path: Path, version: int, *, old: bool) -> None:
        """Save a version."""
        treering.save(path, state(self.size, version), overwrite=old)

    def ledger(self, version: int) -> str:
        """Return the fingerprint of the state itself."""
        return _ledger(self.size, version)

    def found(self, path: Path) -> str | None:
        """Load and verify, which must agree."""
        try:
            tree: Any = treering.load(path)
        except NotFoundError:
            if (path / "treering.json").exists():
                raise
            return None
        verified = treering.verify(path)
        return fingerprint(tree) if verified else f"{BUT} {verified}"

    def litter(self, path: Path) -> list[str]:
        """Return what is neither the index, nor a data file that it knows, nor somebody else's."""
        if not path.exists():
            return []
        names = {entry.name for entry in path.iterdir()} - set(_FOREIGN)
        if "treering.json" not in names:
            return sorted(names)
        index = json.loads((path / "treering.json").read_bytes())
        return sorted(names - {"treering.json", *(file["name"] for file in index["files"]), *index["replaces"]})

    def harmed(self, path: Path) -> list[str]:
        """Say which files of others are gone or changed."""
        gone = Scene.harmed(self, path)
        if self.old:
            for name, content in _FOREIGN.items():
                if not (path / name).exists() or (path / name).read_bytes() != content:
                    gone.append(f"{name} of somebody else is gone")
        return gone


@functools.lru_cache(maxsize=8)
def _ledger(size: int, version: int) -> str:
    return fingerprint(state(size, version))


@functools.lru_cache(maxsize=4)
def _old(size: int) -> dict[str, bytes]:
    """Return the files of the old checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "old")
        treering.save(path, state(size, OLD))
        return {entry.name: entry.read_bytes() for entry in path.iterdir()}


def _no_links(*_: Any, **__: Any) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


CHECKPOINTS = (
    CheckpointScene(name="checkpoint, first"),
    CheckpointScene(name="checkpoint, first, in new folders", folder="runs/a"),
    CheckpointScene(name="checkpoint, first, in an empty folder", empty=True),
    CheckpointScene(name="checkpoint, first, after a crash", leftover=True),
    CheckpointScene(name="checkpoint, first, no hard links", links=False),
    CheckpointScene(name="checkpoint, overwrite", old=True),
    CheckpointScene(name="checkpoint, overwrite through a link", old=True, link=True),
    CheckpointScene(name="checkpoint, overwrite after a crash", old=True, leftover=True),
    CheckpointScene(name="checkpoint, overwrite, two files", size=700_000, old=True, file_bytes=1),
    CheckpointScene(name="checkpoint, overwrite, large, direct", size=1_300_000, old=True, straight=True),
    CheckpointScene(name="checkpoint, first, large, direct", size=1_300_000, straight=True),
)
