"""Saves of one msgpack file."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from pathlib import Path
from typing import ClassVar

from torture.scenes import OLD, Scene, state
from treering._store.api import ANY, Outcome
from treering._store.resolve import store_at
from treering.serialization import load_from_file, save_to_file, to_bytes

__all__ = ["FILES", "DocumentScene", "FileScene"]

_LEFT = ".state.msgpack.0123456789abcdef.treering-tmp"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileScene(Scene):
    """``save_to_file``: the bytes of the file are known beforehand."""

    target: ClassVar[str] = "state.msgpack"

    def furnish(self, path: Path) -> None:
        """Put the old file there, and what a dead writer left."""
        if self.old:
            path.write_bytes(_content(self.size, OLD))
        if self.leftover:
            (path.parent / _LEFT).write_bytes(_content(self.size, OLD)[:100])

    def save(self, path: Path, version: int, *, old: bool) -> None:
        """Save a version; a file is always replaced."""
        del old
        save_to_file(state(self.size, version), path)

    def ledger(self, version: int) -> str:
        """Return the digest of the file's bytes."""
        return hashlib.sha256(_content(self.size, version)).hexdigest()

    def found(self, path: Path) -> str | None:
        """Return the digest of the file, which also loads."""
        if not path.exists():
            return None
        found = path.read_bytes()
        load_from_file(None, path)
        return hashlib.sha256(found).hexdigest()

    def litter(self, path: Path) -> list[str]:
        """Return the staged files."""
        folder = path.resolve().parent
        return [entry.name for entry in folder.glob(".*.treering-tmp")] if folder.is_dir() else []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DocumentScene(FileScene):
    """A small document that a store puts where nothing may be."""

    def save(self, path: Path, version: int, *, old: bool) -> None:
        """Put a version."""
        with store_at(path.parent) as store:
            store.open()
            outcome = store.replace(path.name, _content(self.size, version), ANY if old else None)
        if outcome is not Outcome.DONE:
            raise AssertionError(outcome)


@functools.lru_cache(maxsize=8)
def _content(size: int, version: int) -> bytes:
    return to_bytes(state(size, version))


FILES = (
    FileScene(name="first"),
    FileScene(name="first, in new folders", folder="runs/a"),
    FileScene(name="overwrite", old=True),
    FileScene(name="overwrite through a link", old=True, link=True),
    FileScene(name="overwrite after a crash", old=True, leftover=True),
    FileScene(name="overwrite, large, page cache", size=1_300_000, old=True),
    FileScene(name="overwrite, large, direct", size=1_300_000, old=True, straight=True),
    FileScene(name="first, large, direct", size=1_300_000, straight=True),
)
