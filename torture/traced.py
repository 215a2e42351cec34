"""Kills and errors at every real system call of a save, injected by strace into a child that waits for it."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from torture.children import Child
from torture.judging import judge
from torture.points import Report, save_new
from torture.scenes import Scene

__all__ = ["fail_everywhere", "kill_everywhere", "missing_reason"]

# What a save asks of the file system; memory and thread calls are the interpreter's own.
_TRACED = "%file,%desc"
_LINE = re.compile(r"^(?:\[pid\s+(\d+)\] |(\d+) +)?(\w+)\(")
# What the kernel may answer at each call besides what it does.
_NAMES = {"mkdir", "rename", "renameat", "linkat", "unlink", "unlinkat"}
_MOVES = {"write", "pwrite64", "fallocate", "sync_file_range"}
_ERRORS = {
    "EIO": {"fsync", "openat", "ftruncate", "lstat", "newfstatat", "getdents64", "pread64", "fchmod"} | _NAMES | _MOVES,
    "ENOSPC": {"fsync", "openat"} | _NAMES | _MOVES - {"unlink", "unlinkat"},
    "EDQUOT": {"linkat", "mkdir"} | _MOVES,
    "EMFILE": {"openat"},
    "EINTR": {"openat", "flock", "write", "pwrite64", "fsync"},
}
_ATTACH_SECONDS = 30


def missing_reason() -> str | None:
    """Say why strace cannot be used here, or None."""
    strace = shutil.which("strace")
    if strace is None:
        return "strace is not installed"
    if subprocess.run([strace, "-qq", "-o", "/dev/null", "true"], check=False, capture_output=True).returncode:
        return "strace may not trace here"
    return None


def kill_everywhere(scene: Scene, base: Path, report: Report) -> None:
    """Kill every system call of one scene."""
    _sweep(scene, base, report, lambda _: ["signal=KILL"])


def fail_everywhere(scene: Scene, base: Path, report: Report) -> None:
    """Let every system call of one scene fail, in every way that it can."""
    _sweep(scene, base, report, lambda call: [f"error={name}" for name, calls in _ERRORS.items() if call in calls])


def _sweep(scene: Scene, base: Path, report: Report, faults_at: Callable[[str], list[str]]) -> None:
    log = base.parent / "strace.log"
    _saved(scene, base, ["-e", f"trace={_TRACED}", "-o", str(log)], None)
    counts = _counted(log.read_text())
    for call, most in sorted(counts.items()):
        for number in range(1, most + 1):
            for fault in faults_at(call):
                inject = ["-e", f"trace={call}", "-e", f"inject={call}:{fault}:when={number}", "-o", str(log)]
                _saved(scene, base, inject, (report, f"{fault} at {call} number {number}"))


def _saved(scene: Scene, base: Path, options: list[str], into: tuple[Report, str] | None) -> None:
    path = scene.prepared(base)
    child = Child(functools.partial(save_new, scene, path, None), path, [], wait=True)
    command = ["strace", "-f", "-qq", "-p", str(child.pid), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as strace:
        try:
            _wait_for_tracer(child.pid, strace)
        finally:
            child.begin()
            answer = child.answer()
            strace.wait()
    if into is None:
        return
    report, where = into
    killed = "KILL" in where
    report.count(where.split()[0], answer)
    # The last calls are the child's own answer: an error there silences it.
    silent = not answer.acknowledged and answer.error is None
    for wrong in judge(scene, path, answer, killed=killed or silent, call=where.split()[2]):
        report.violations.append(f"{scene.name}: {where}: {wrong}")


def _wait_for_tracer(pid: int, strace: subprocess.Popen[bytes]) -> None:
    status = Path(f"/proc/{pid}/status")
    end = time.monotonic() + _ATTACH_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(IndexError):
            if int(status.read_text().split("TracerPid:")[1].split()[0]):
                # Attached; the options of the trace are set within the same moment.
                time.sleep(0.02)
                return
        if (code := strace.poll()) is not None:
            if code == 0:
                return  # attached, and over: the first call that it saw, the child's wait for us, was the one to end it
            break
        time.sleep(0.002)
    strace.kill()
    said = strace.communicate()[1].decode(errors="replace").strip()
    raise RuntimeError(f"strace did not attach to process {pid}: {said or 'it said nothing'}")


def _counted(log: str) -> dict[str, int]:
    """Return for each call how often the busiest thread made it: strace counts for each thread on its own."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in log.splitlines():
        found = _LINE.match(line)
        if found and "resumed>" not in line:
            counts[found[1] or found[2] or "", found[3]] += 1
    most: dict[str, int] = {}
    for (_, call), count in counts.items():
        most[call] = max(most.get(call, 0), count)
    return most
