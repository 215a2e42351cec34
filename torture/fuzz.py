"""The fuzzer: watches the process that is fed, ends it when it hangs, and adds up."""

from __future__ import annotations

import collections
import dataclasses
import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torture import feeder
from torture.seeds import seeds
from treering.errors import TreeringError
from treering.serialization import msgpack_restore

__all__ = ["fuzz"]

_PATIENCE_SECONDS = 60.0
_MOST_CRASHES = 5


@dataclasses.dataclass(slots=True, kw_only=True)
class _Sum:
    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    violations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    first: int = 0


def fuzz(seconds: float, seed: int, start_from: Path | None, kinds: Sequence[str] = tuple(feeder.KINDS)) -> int:
    """Fuzz for so long; print what was found; return the exit code, 1 when something was."""
    folder = Path(tempfile.mkdtemp(prefix="treering-fuzz-"))
    with (folder / "note").open("wb") as file:
        file.truncate(feeder.ROOM)
    print(f"seed {seed}, findings go to {folder}", flush=True)
    agreed, differing = compared(start_from)
    total = _Sum(violations=[{"number": -1, "wrong": line, "file": "", "bytes": 0} for line in differing])
    begin = time.monotonic()
    crashes = 0
    while (left := seconds - (time.monotonic() - begin)) > 0 and not total.violations[_MOST_CRASHES:]:
        arguments = ["--seed", str(seed), "--first", str(total.first), "--seconds", str(left), "--folder", str(folder)]
        arguments += ["--kinds", ",".join(kinds)]
        if start_from is not None:
            arguments += ["--start-from", str(start_from)]
        crashes += not _fed(arguments, folder, total)
    _tell(total, time.monotonic() - begin, seed, agreed, crashes)
    return 1 if total.violations else 0


def compared(start_from: Path | None) -> tuple[int, list[str]]:
    """Compare with flax on the undamaged files: return how many agree, and what differs; (0, []) without flax."""
    try:
        import flax.serialization
    except ImportError:
        return 0, []
    agreed, differing = 0, []
    for name, data in seeds(start_from).items():
        try:
            ours = msgpack_restore(data)
        except TreeringError:
            continue
        try:
            theirs = flax.serialization.msgpack_restore(data)
        except Exception:  # noqa: BLE001 - flax refuses with any class, and then there is nothing to compare
            continue
        if _shown(ours) == _shown(theirs):
            agreed += 1
        elif "mislabelled" not in name:  # flax drops the byte order there
            differing.append(f"flax reads the undamaged {name} as another tree")
    return agreed, differing


def _shown(value: Any) -> Any:
    """Types, dtypes, shapes and bits, comparable by ``==`` whatever the values (nan too)."""
    if isinstance(value, dict):
        return ("dict", [(_shown(key), _shown(child)) for key, child in value.items()])
    if isinstance(value, list | tuple):
        return (type(value).__name__, [_shown(child) for child in value])
    if hasattr(value, "dtype"):
        return (type(value).__name__, value.dtype.str, value.dtype.name, value.shape, value.tobytes())
    return (type(value).__name__, repr(value))


def _fed(arguments: list[str], folder: Path, total: _Sum) -> bool:
    """Run one feeder to its end, or to a crash or a hang, which becomes a violation."""
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "torture.feeder", *arguments]
    with (folder / "note").open("rb") as file:
        note = mmap.mmap(file.fileno(), feeder.ROOM, access=mmap.ACCESS_READ)
    with (folder / "errors").open("w+b") as errors:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)
        hung = _watch(process, note)
        output = process.communicate()[0]
        errors.seek(0)
        said = errors.read()[-2000:].decode(errors="replace")
    if process.returncode == 0:
        result = json.loads(output)
        total.outcomes.update(result["outcomes"])
        total.violations.extend(result["violations"])
        total.first = result["next"]
        return True
    number, length = int.from_bytes(note[:8]), int.from_bytes(note[8:16])
    wrong = "hung" if hung else f"ended with {process.returncode}: {said.strip()[-500:]}"
    total.violations.append(feeder.keep(note[16 : 16 + length], number, wrong, folder))
    total.outcomes["any door: untold, its process ended badly"] += number + 1 - total.first
    total.first = number + 1
    return False


def _watch(process: subprocess.Popen[bytes], note: mmap.mmap) -> bool:
    """Wait until the process ends, or end it when it stays with one input for too long."""
    seen, since = b"", time.monotonic()
    while True:
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            if note[:8] != seen:
                seen, since = note[:8], now
            elif now - since > _PATIENCE_SECONDS:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return True
        else:
            return False


def _tell(total: _Sum, seconds: float, seed: int, agreed: int, crashes: int) -> None:
    inputs = sum(total.outcomes.values())
    accepted = sum(count for name, count in total.outcomes.items() if name.endswith(": accepted"))
    print(f"{inputs} inputs in {seconds:.0f} s ({inputs / seconds:.0f}/s)")
    print(f"{accepted} accepted, {inputs - accepted} refused:")
    for name, count in sorted(total.outcomes.items()):
        print(f"  {count:9} {name}")
    print(f"{agreed} undamaged files read as flax reads them; {crashes} crashes or hangs")
    print(f"{len(total.violations)} violations")
    for found in total.violations:
        print(f"  seed {seed}, input {found['number']}, {found['bytes']} bytes, {found['file']}: {found['wrong']}")
