"""Errors of the system: at every call, at every system call, under every limit of size, on every full disk."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

from torture.checkpoint_scenes import CheckpointScene
from torture.faults import Kind
from torture.leaves_scenes import LeavesScene
from torture.limits import full_disks, mounting_reason, size_limits
from torture.points import Report, chosen, sweep, sweep_load, tell
from torture.traced import fail_everywhere, missing_reason

__all__ = ["fail"]

_ERRORS = [kind for kind in Kind if kind not in {Kind.KILL_BEFORE, Kind.KILL_AFTER}]


def fail(names: list[str] | None) -> int:
    """Run all of them over the scenes of those names (None: all) and print what was found.

    Returns:
        The exit code: 1 when something was lost, hidden or left behind.
    """
    # jax dislikes every fork; no device and no thread has been started here.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    calls, loads, traced, limits, full = Report(), Report(), Report(), Report(), Report()
    with tempfile.TemporaryDirectory(prefix="treering-faults-") as folder:
        base = Path(folder, "scene")
        no_strace, no_mounts = missing_reason(), mounting_reason(Path(folder, "mount"))
        for scene in chosen(names):
            sweep(scene, base, calls, _ERRORS)
            if isinstance(scene, CheckpointScene | LeavesScene):
                sweep_load(scene, base, loads)
            if no_strace is None:
                fail_everywhere(scene, base, traced)
            size_limits(scene, base, limits)
            if no_mounts is None:
                full_disks(scene, Path(folder, "mount"), full)
            print(f"{scene.name}: done", flush=True)
    tell("every call into os, of a save", calls)
    tell("every call into os, of a load", loads)
    _tell_unless(no_strace, "every system call (strace)", traced)
    tell("limits on the size of a file", limits)
    _tell_unless(no_mounts, "full file systems", full)
    return 1 if any(report.violations for report in (calls, loads, traced, limits, full)) else 0


def _tell_unless(reason: str | None, what: str, report: Report) -> None:
    if reason is None:
        tell(what, report)
    else:
        print(f"{what}: not done, {reason}")
