"""Workers of `test_meetings`: processes that meet, come late, or do not come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import treering as tr
from tests import faults
from tests.multiprocess.jobs import hear, say
from treering._arrays.host import this_processes
from treering._checkpoint.save_options import SaveOptions
from treering._coordination import allgather
from treering._coordination.allgather import PAYLOAD_BYTES, allgather_with_deadline
from treering._coordination.job_handshake import next_sequence
from treering._coordination.message_board import PathMessageBoard
from treering.leaves import tree_serialize_leaves

_GENEROUS = 60.0


def meetings_seen(patch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that fills with what this process brings to each meeting of all."""
    rows: list[object] = []
    faults.before(patch, allgather, "allgather", rows.append)
    return rows


def time_limits_seen(patch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that fills with how long each save waits for others."""
    limits: list[float] = []
    faults.before(patch, SaveOptions, "of", lambda *_, timeout, **__: limits.append(timeout))
    return limits


def told(work: Callable[[], Any]) -> dict[str, Any]:
    """Return what came of it, and how long it took."""
    begun = time.monotonic()
    try:
        said: dict[str, Any] = {"result": work()}
    except Exception as error:  # noqa: BLE001 - the test looks at it
        said = {"error": type(error).__name__, "message": str(error)}
        for name in ("missing", "processes"):
            if hasattr(error, name):
                said[name] = list(getattr(error, name))
    return said | {"seconds": time.monotonic() - begun}


def _call(path: Path, timeout: float = _GENEROUS) -> dict[str, Any]:
    def work() -> list[Any]:
        call = next_sequence(path, this_processes([]), timeout=timeout, doing=f"save {str(path)!r}")
        return [call.job, call.number, call.attempt, call.processes.this]

    return told(work)


def meets(folder: str) -> dict[str, Any]:
    """Bring bytes of all lengths together, whatever jax is told meanwhile."""
    processes = this_processes([])
    number = processes.this

    def bring(payload: bytes) -> list[str]:
        found = allgather_with_deadline(
            payload, processes, timeout=_GENEROUS, board=PathMessageBoard(folder), doing="meet"
        )
        return [part.hex() for part in found]

    said: dict[str, Any] = {"first": bring(b"%d" % number), "longest": bring(bytes([number]) * PAYLOAD_BYTES)}
    said["none"] = bring(b"")
    said["uneven"] = bring(b"\0" * number)
    with jax.enable_x64(True):
        said["x64"] = bring(b"a")
    with jax.default_device(jax.local_devices()[-1]):
        said["default device"] = bring(b"b")
    mesh = Mesh(np.array(jax.devices()), ("x",))
    with mesh:
        said["with mesh"] = bring(b"c")
    with jax.set_mesh(mesh):
        said["set_mesh"] = bring(b"d")
    with jax.disable_jit(), jax.transfer_guard("disallow"):
        said["guarded"] = bring(b"e")
    said["left"] = sorted(path.name for path in Path(folder).iterdir())
    return said


def calls(folder: str) -> list[dict[str, Any]]:
    """Count calls: the first on paths that are not shared, or not writable."""
    base = Path(folder)
    number = jax.process_index()
    return [
        _call(base / str(number) / "ckpt", 5),
        _call(base / ("shared" if number % 2 == 0 else f"own {number}") / "ckpt", 5),
        _call(base / "file" / "ckpt", 5),
        _call(base / "there" / "ckpt"),
        _call(base / "elsewhere" / "ckpt"),
        _call(base / "elsewhere" / "ckpt"),
    ]


def comes_late(folder: str) -> list[dict[str, Any]]:
    """Let the last process come when all others have given up; then all come."""
    path = Path(folder, "ckpt")
    found = []
    if jax.process_index() == jax.process_count() - 1:
        say("waits")
        hear()
        found.append(_call(path, 20))
    else:
        found.append(_call(path, 8))
    say("has given up")
    hear()
    found += [_call(path), _call(path)]
    return found


def saves_late(folder: str, form: str, patience: float) -> list[dict[str, Any]]:
    """Save when all but process 0 have given up their first save; then all save."""
    path = str(Path(folder, "deep", "ckpt"))
    tree = {"w": np.arange(4.0), "device": jax.device_put(np.ones(2))}

    def saved(timeout: float) -> dict[str, Any]:
        save: Callable[..., None] = tree_serialize_leaves if form == "leaves" else tr.save
        return told(lambda: save(path, tree, timeout=timeout))

    if jax.process_index() == 0:
        say("waits")
        hear()
        found = [saved(_GENEROUS)]
    else:
        found = [saved(patience)]
    say("has given up")
    hear()
    return [*found, saved(_GENEROUS)]


def fails_alone(folder: str) -> list[dict[str, Any]]:
    """Let process 1 fail by itself before it meets the others in their second call, then go on to its next."""
    processes = this_processes([])

    def meet(payload: bytes) -> dict[str, Any]:
        def work() -> list[str]:
            notes = PathMessageBoard(folder)
            return [
                part.decode()
                for part in allgather_with_deadline(payload, processes, timeout=20, board=notes, doing="meet")
            ]

        return told(work)

    found = [meet(b"first")]
    if processes.this == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allgather, "allgather", lambda row: 1 // 0)
            found.append(meet(b"second"))
        found.append(meet(b"third"))
    else:
        found.append(meet(b"second"))
    return [*found, meet(b"last")]


def breaks_off(folder: str) -> dict[str, Any]:
    """Wait for a process that is killed."""
    path = Path(folder, "ckpt")
    first = _call(path)
    processes = this_processes([])
    if processes.this == 1:
        say("waits")
        hear()
    say("comes")
    board = PathMessageBoard(str(path))
    work = lambda: len(allgather_with_deadline(b"", processes, timeout=10, board=board, doing="meet again"))  # noqa: E731
    return {"first": first, "second": told(work), "left": [found.name for found in path.iterdir()]}
