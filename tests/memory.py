"""What reading costs in memory, measured in a fresh process and its children. Linux only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treering.errors import TreeringError

_ROOT = Path(__file__).parents[1]


def memory_of_this_process(field: str) -> int:
    """The bytes that a field of ``/proc/self/status`` tells, such as VmRSS, or VmHWM for the peak."""
    lines = (line.split(":") for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return next(int(rest.split()[0]) << 10 for name, rest in lines if name == field)


def measured(read: Callable[[], Any]) -> dict[str, Any]:
    """Read, and tell by how much the peak grew, how long it took, and what came out."""
    before, started = memory_of_this_process("VmRSS"), time.perf_counter()
    try:
        outcome = f"a {type(read()).__name__}"
    except TreeringError as error:
        outcome = f"{type(error).__name__}: {error}"
    grown = memory_of_this_process("VmHWM") - before
    return {"grown": grown, "seconds": time.perf_counter() - started, "outcome": outcome}


def in_child(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run ``work`` in a child that starts with this process's memory, and return what it tells."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        os.write(into, json.dumps(work()).encode())
        os._exit(0)
    os.close(into)
    with os.fdopen(out, "rb") as pipe:
        told = pipe.read()
    os.waitpid(pid, 0)
    result: dict[str, Any] = json.loads(told or b'{"grown": -1, "seconds": -1, "outcome": "died"}')
    return result


def run_script(script: Path, folder: Path) -> list[dict[str, Any]]:
    """Run a script in a fresh process, with a folder as its argument; return the JSON documents on its lines."""
    code = f"import sys, runpy; sys.path.insert(0, {str(_ROOT)!r}); sys.argv = ['', {str(folder)!r}]; "
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
