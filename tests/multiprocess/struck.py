"""Workers of `test_struck`: processes that hold, follow, resume and regroup, and one of them is struck on its way.

Each does what the test says, one command after the other, and answers each; between commands it keeps its run, what it
holds and what it follows.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering as tr
from tests import clocks
from tests.multiprocess import each_states
from tests.multiprocess.async_jobs import arm, obey
from treering.errors import StepPassedOverWarning

__all__ = ["STRIDE", "does_as_told", "hurt"]

STRIDE = 10
_GENEROUS = 60.0


def does_as_told(folder: str) -> None:
    """Do what the test says, one command after the other, and answer each."""
    jax.devices()  # jax waits here until all processes are there, however long that takes
    with pytest.MonkeyPatch.context() as patch:
        clocks.wait_at_most(patch, watch_first=0.05, watch_longest=0.2, swap_patience=0.5)
        obey(_COMMANDS, folder)


# ----------------------------------------------------------------------------------------------------- holding a step

_leases: list[tr.run.Lease] = []


def _hold(folder: Path, *, step: int) -> None:
    """Hold a step, each process by itself; no thread comes in between, for it would renew once in eight hours."""
    _leases.append(tr.Run(folder / "run").hold(step, seconds=86_400))


def _renew(folder: Path) -> None:
    _leases[-1].renew()


def _release(folder: Path) -> None:
    """Release what is held, if anything is."""
    while _leases:
        _leases.pop().release()


def _reads(folder: Path, *, step: int) -> float:
    """Load a step by itself."""
    return float(np.asarray(tr.load(folder / "run" / f"step_{step:08d}")["w"])[0, 0])


# ------------------------------------------------------------------------------------------------- following together

_watches: list[tr.run.StepWatch] = []


def _follow(folder: Path, *, timeout: float = _GENEROUS) -> int | None:
    """Return the next step that all get together; None at the end."""
    if not _watches:
        _watches.append(tr.Run(folder / "run", timeout=timeout).watch(hold=True))
    return next(_watches[0], None)


# --------------------------------------------------------------------------------------------------- resuming a run


def _placed(step: int) -> dict[str, Any]:
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    items = np.full((8, 4), float(step))
    return {"w": jax.make_array_from_callback((8, 4), rows, items.__getitem__), "step": step}


def _resume(folder: Path, *, joint: bool, timeout: float = _GENEROUS) -> list[float]:
    """Resume past damage; return the step, and the least and the greatest number of this process's part."""
    run = tr.Run(folder / "run", timeout=timeout)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _placed(0)["w"])
    with warnings.catch_warnings(action="ignore", category=StepPassedOverWarning):
        tree: Any = run.load(like={"w": like, "step": 0} if joint else None, fallback=tr.Fallback(max_attempts=100))
    found = tree["w"]
    shards = [np.asarray(one.data) for one in found.addressable_shards] if joint else [np.asarray(found)]
    return [tree["step"], float(min(map(np.min, shards))), float(max(map(np.max, shards)))]


class _Leaves(BaseException):
    """A process goes where the others do not hear of it."""


def _load(folder: Path, *, how: str, leaves: bool, timeout: float) -> None:
    """Load the newest step, which is damaged, in one of the ways; who ``leaves`` does so before it reads the step."""

    def go(*_: object) -> None:
        raise _Leaves

    like = _placed(0)
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(_Leaves):
        if leaves:
            patch.setattr("treering._checkpoint.joint_load.LoadGroup.retry_on_overwrite", go)
        run = tr.Run(folder / "run", timeout=timeout)
        match how:
            case "load":
                tr.load(folder / "run" / "step_00000030", like=like, timeout=timeout)
            case "init":
                run.load_or_init(lambda: like)
            case "init with fallback":
                run.load_or_init(lambda: like, fallback=True)
            case "step":
                run.load(30, like=like)
            case _:
                run.load(like=like, fallback=how == "run with fallback")


def _save(folder: Path, *, step: int, timeout: float = _GENEROUS) -> None:
    """Save a step together."""
    tr.Run(folder / "run", timeout=timeout).save(step, _placed(step)).result()


# ------------------------------------------------------------------------------------------------- states of iterators


def _load_each(folder: Path, *, timeout: float = _GENEROUS) -> list[int]:
    """Load what another number of processes has saved; return the rows that this process has yet to read."""
    shard, like = each_states.fresh()
    like["data"].pop("small")
    tree = tr.load(folder / "ckpt", like=like, extra="ignore", timeout=timeout)
    assert tree["step"] == 7
    return shard.left


def _save_each(folder: Path, *, timeout: float = _GENEROUS) -> None:
    """Save the state of each process, over what another number of processes has saved."""
    tree = each_states.trained()[1]
    tr.save(folder / "ckpt", tree, overwrite=True, timeout=timeout)


# ----------------------------------------------------------------------------------------------------------- damage


def hurt(folder: Path, files: str, how: str) -> None:
    """Turn a bit of the files that a pattern finds, or remove them, or make them empty."""
    for file in sorted(folder.glob(files)):
        data = bytearray(file.read_bytes())
        if how == "removed":
            file.unlink()
        else:
            data[len(data) // 2] ^= 4
            file.write_bytes(data if how == "flipped" else b"")


def _arm_damage(folder: Path, *, point: dict[str, Any], files: str, how: str) -> None:
    """Let files be damaged the next time that this process comes to a point."""
    arm(folder, point=point, action=lambda: hurt(folder, files, how))


_COMMANDS: dict[str, Callable[..., Any]] = {
    "arm": arm,
    "harm": _arm_damage,
    "hold": _hold,
    "renew": _renew,
    "release": _release,
    "reads": _reads,
    "follow": _follow,
    "resume": _resume,
    "load": _load,
    "save": _save,
    "load each": _load_each,
    "save each": _save_each,
}
