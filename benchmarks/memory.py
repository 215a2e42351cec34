"""Peak memory of one case, measured in a fresh process of its own.

In a used process the C library keeps freed blocks, and a case that reuses them looks free. So each case
runs once in a new process: the input is built, the heap is trimmed, the kernel's peak is reset, the case
runs, and the peak is read back while the result is still held.

Mapped file pages count in the kernel's peak although they are page cache that it can drop. So the process
that asks also samples the anonymous part about every millisecond: from outside, because a thread inside
would stand still whenever the case holds the interpreter lock.
"""

from __future__ import annotations

import gc
import json
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Case, trim_heap

__all__ = ["Peak", "ask", "available", "serve"]

_SAMPLE_SECONDS = 0.001
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Memory of one case above what its process held before, in bytes; the result counts, the input does not."""

    extra: int
    """Peak resident memory (VmHWM) minus resident memory before: all of it, mapped file pages too."""
    anonymous: int
    """The same without file pages (RssAnon), from samples: a peak shorter than a millisecond may be missed."""
    kept: int
    """Resident memory afterwards, with the result held, minus before."""
    mapped: int
    """File pages among what is kept (RssFile): page cache."""


def available() -> bool:
    """Whether this system can reset and report a process's peak (Linux can)."""
    return Path("/proc/self/clear_refs").exists()


def _status(pid: int | str = "self") -> dict[str, int]:
    """The memory lines of a process's status, in bytes; empty once it has ended."""
    sizes: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in {"VmHWM", "VmRSS", "RssAnon", "RssFile"}:
            sizes[name] = int(value.split()[0]) * 1024
    return sizes


def serve(case: Case) -> None:
    """Run the case once and print its memory; the process that called ``ask`` is at the other end."""
    work = case.begin()
    gc.collect()
    trim_heap()
    before = _status()
    print(json.dumps({"ready": before["RssAnon"]}), flush=True)
    sys.stdin.readline()
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
    result = work()
    after = _status()
    fault = case.check(result)
    answer = {
        "extra": max(0, after["VmHWM"] - before["VmRSS"]),
        "kept": after["VmRSS"] - before["VmRSS"],
        "mapped": after["RssFile"] - before["RssFile"],
        "fault": fault,
    }
    print(json.dumps(answer), flush=True)


def ask(command: Sequence[str]) -> tuple[Peak, str | None]:
    """Start a command that calls ``serve``; its peak, and what was wrong with its result.

    Raises:
        RuntimeError: the process ended without an answer.
    """
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None  # both pipes were asked for just above
        assert child.stdout is not None
        ready = child.stdout.readline()
        if not ready:
            raise RuntimeError(f"{' '.join(command)} ended early with {child.wait()}")
        before = json.loads(ready)["ready"]
        child.stdin.write(b"go\n")
        child.stdin.flush()
        highest = before
        output = child.stdout.fileno()
        while not select.select([output], [], [], _SAMPLE_SECONDS)[0]:
            highest = max(highest, _status(child.pid).get("RssAnon", 0))
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(command)} gave no answer and ended with {child.wait()}")
        answer = json.loads(line)
    anonymous = max(highest - before, answer["kept"] - answer["mapped"])
    peak = Peak(extra=answer["extra"], anonymous=anonymous, kept=answer["kept"], mapped=answer["mapped"])
    return peak, answer["fault"]
