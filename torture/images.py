"""A disk whose power can be cut: an ext4 image on a loop device, copied while it is in use.

The copy holds what had reached the device at that moment, and nothing of the page cache. Mounting it replays the
journal, as after a power cut. What a real drive may lose of its own cache is not modelled.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Disk", "disk", "missing_reason"]

_SIZE = 64 << 20
# The journal is committed by nobody but whoever calls fsync: the default of 5 s would hide what is not durable.
_OPTIONS = "loop,commit=300"
_TRIES = 20


class Disk:
    """A mounted image."""

    def __init__(self, image: Path, root: Path) -> None:
        self._image = image
        self.root = root

    def configure(self) -> None:
        """Make everything durable that is there now."""
        _run("sync", "-f", str(self.root))

    @contextlib.contextmanager
    def cut(self) -> Iterator[Path]:
        """Cut the power of a copy, start it again, and give the folder where it is mounted.

        The processes that write to the disk must stand still.

        Raises:
            RuntimeError: they did not.
        """
        with tempfile.TemporaryDirectory(dir=self._image.parent) as folder:
            copy, root = Path(folder, "image"), Path(folder, "root")
            self._copy(copy)
            with _mounted(copy, root):
                yield root

    def _copy(self, copy: Path) -> None:
        """Copy the image as it was at one moment: again if the kernel wrote to it meanwhile."""
        for _ in range(_TRIES):
            before = self._image.stat().st_mtime_ns
            _run("cp", "--sparse=always", str(self._image), str(copy))
            if self._image.stat().st_mtime_ns == before:
                return
        raise RuntimeError("the disk does not stand still")


@contextlib.contextmanager
def disk(folder: Path) -> Iterator[Disk]:
    """Make a fresh ext4 file system in an image in ``folder`` and mount it."""
    image = folder / "image"
    with image.open("wb") as file:
        file.truncate(_SIZE)
    _run("mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
    with _mounted(image, folder / "root"):
        yield Disk(image, folder / "root")


def missing_reason() -> str | None:
    """Say why no disk can be made here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root may mount"
    lacking = [tool for tool in ("mkfs.ext4", "mount", "umount", "cp", "sync") if shutil.which(tool) is None]
    if lacking:
        return f"{lacking[0]} is not installed"
    try:
        with tempfile.TemporaryDirectory() as folder, disk(Path(folder)):
            return None
    except subprocess.CalledProcessError as error:
        return f"this machine gives no loop device: {error.stderr.strip()}"


@contextlib.contextmanager
def _mounted(image: Path, root: Path) -> Iterator[None]:
    root.mkdir()
    _run("mount", "-o", _OPTIONS, str(image), str(root))
    try:
        yield
    finally:
        _run("umount", str(root))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
