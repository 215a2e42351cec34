"""What is saved under attack, and how an onlooker tells what became of it."""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from treering._store.posix import writing

__all__ = ["OLD", "SETTINGS", "Scene", "fingerprint", "state"]

OLD = 1
"""The version that is there before a save of an overwrite is attacked."""
SETTINGS: tuple[tuple[Any, str], ...] = ((writing, "DIRECT_FROM"), (writing, "FREE_SHARE"), (writing, "BLOCK_BYTES"))
"""What `Scene.configure` sets, module and name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene(abc.ABC):
    """One kind of save."""

    name: str
    """What people call it."""
    size: int = 300
    """Bytes of the largest leaf."""
    old: bool = False
    """Something was saved there already."""
    straight: bool = False
    """Past the page cache, through a ring that is much smaller than the file."""
    folder: str = ""
    """Missing folders on the way."""
    link: bool = False
    """The path is a link to what is saved."""
    leftover: bool = False
    """A writer died here before."""

    target: ClassVar[str]
    """The last part of the path."""
    sweeps_first: ClassVar[bool] = True
    """A save removes whatever the dead left before it writes anything, so the remains of two never lie there."""

    entries: ClassVar[int] = 12
    """More files and folders than a save makes, the old ones included."""

    def prepared(self, base: Path) -> Path:
        """Make a fresh folder for the scene and return the path to save to."""
        shutil.rmtree(base, ignore_errors=True)
        base.mkdir()
        path = base / self.folder / self.target
        if self.link:
            (base / "far").mkdir()
            path.symlink_to(f"far/{self.target}")
        self.furnish(path)
        return path

    def configure(self) -> None:
        """Choose the way to the disk, for the rest of this process."""
        writing.DIRECT_FROM = 0 if self.straight else 1 << 62
        writing.FREE_SHARE = 0
        writing.BLOCK_BYTES = 128 << 10

    @abc.abstractmethod
    def furnish(self, path: Path) -> None:
        """Put there what is there before the save."""

    @abc.abstractmethod
    def save(self, path: Path, version: int, *, old: bool) -> None:
        """Save that version of the state; ``old``: there is another one."""

    @abc.abstractmethod
    def ledger(self, version: int) -> str:
        """Return the fingerprint by which that version must be found, made without a file."""

    @abc.abstractmethod
    def found(self, path: Path) -> str | None:
        """Return the fingerprint of what a reader gets; None when there is nothing to read."""

    @abc.abstractmethod
    def litter(self, path: Path) -> list[str]:
        """Return the names of our files there that no reader needs."""

    def harmed(self, path: Path) -> list[str]:
        """Say what is wrong with what stood there and is not ours."""
        return ["the link is gone"] if self.link and not path.is_symlink() else []


def state(size: int, version: int) -> dict[str, Any]:
    """Return the state of a version: numpy only, so that no device is ever started."""
    noise = np.random.default_rng(version).integers(0, 256, size, np.uint8)
    return {
        "step": version,
        "params": {"kernel": noise, "bias": np.full(7, version, np.float32)},
        "name": "s" * version,
    }


def fingerprint(tree: Any) -> str:
    """Return a digest of containers, arrays and scalars: every type, key, dtype, shape and byte, in order."""
    sums = hashlib.sha256()
    waiting: list[Any] = [tree]
    while waiting:
        value = waiting.pop()
        kind = type(value).__name__
        if isinstance(value, dict):
            sums.update(f"{kind} {list(value)!r}\n".encode())
            waiting += value.values()
        elif isinstance(value, list | tuple):
            sums.update(f"{kind} {len(value)}\n".encode())
            waiting += value
        elif hasattr(value, "dtype"):
            array = np.asarray(value)
            sums.update(f"{kind} {array.dtype} {array.shape}\n".encode() + array.tobytes())
        else:
            sums.update(f"{kind} {value!r}\n".encode("utf-8", "surrogatepass"))
    return sums.hexdigest()
