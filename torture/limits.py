"""Too little room: limits on the size of files, file systems that are full, and such without free names."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from torture.children import in_child
from torture.judging import judge
from torture.points import Report, save_new
from torture.scenes import Scene

__all__ = ["full_disks", "mounting_reason", "size_limits"]

_STEPS = 40
_PAGE = 4096
_PLENTY = "256m"


def size_limits(scene: Scene, base: Path, report: Report) -> None:
    """Save under every limit of a file's size from nothing to more than enough."""
    most = 2 * scene.size + (32 << 10)
    for limit in range(0, most, max(512, most // _STEPS)):
        path = scene.prepared(base)
        answer = in_child(functools.partial(_limited, scene, path, limit), path, [])
        report.count("RLIMIT_FSIZE", answer)
        for wrong in judge(scene, path, answer, killed=False):
            report.violations.append(f"{scene.name}: no file beyond {limit} bytes: {wrong}")


def _limited(scene: Scene, path: Path, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        save_new(scene, path, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def mounting_reason(folder: Path) -> str | None:
    """Say why no file system can be mounted here, or None."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root may mount"
    if shutil.which("mount") is None:
        return "there is no mount command"
    folder.mkdir(exist_ok=True)
    try:
        with _memory(folder):
            return None
    except subprocess.CalledProcessError as error:
        return f"this machine does not mount a tmpfs: {error.stderr.strip()}"


def full_disks(scene: Scene, base: Path, report: Report) -> None:
    """Save on a file system with every number of free pages and of free names, from none to enough."""
    need = 2 * scene.size // _PAGE + scene.entries
    options: list[Callable[[os.statvfs_result, int], str]] = [_with_pages, _with_names]
    for option, steps in zip(
        options,
        (range(0, need, max(1, need // _STEPS)), range(0, scene.entries // 2, scene.entries // 12)),
        strict=True,
    ):
        for free in steps:
            base.mkdir(exist_ok=True)
            with _memory(base):
                path = scene.prepared(base / "scene")
                _remount(base, option(os.statvfs(base), free))
                answer = in_child(functools.partial(save_new, scene, path, None), path, [])
                _remount(base, f"size={_PLENTY},nr_inodes=100k")
                report.count("full", answer)
                for wrong in judge(scene, path, answer, killed=False):
                    report.violations.append(f"{scene.name}: {free} free ({option.__name__}): {wrong}")


def _with_pages(used: os.statvfs_result, free: int) -> str:
    # A size of 0 would mean no limit at all.
    return f"size={max((used.f_blocks - used.f_bfree) * used.f_frsize + free * _PAGE, _PAGE)}"


def _with_names(used: os.statvfs_result, free: int) -> str:
    return f"nr_inodes={used.f_files - used.f_ffree + free}"


@contextlib.contextmanager
def _memory(folder: Path) -> Iterator[None]:
    _run("mount", "-t", "tmpfs", "-o", f"size={_PLENTY}", "treering-torture", str(folder))
    try:
        yield
    finally:
        _run("umount", str(folder))


def _remount(folder: Path, options: str) -> None:
    _run("mount", "-o", f"remount,{options}", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
