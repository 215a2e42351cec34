"""Worker of `test_what_works`: each part of the production loop by two processes, in the forms that it is for."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import treering as tr
from tests.multiprocess.trees import placed, spread
from treering.leaves import tree_serialize_leaves

__all__ = ["tries_all"]

_GENEROUS = 60.0


class _Data:
    """An iterator of which each process has its own."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def get_state(self) -> dict[str, int]:
        return {"position": self.position}

    def set_state(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _tree(step: float = 0.0) -> dict[str, Any]:
    rows = spread("line rows", jax.devices(), 1)
    items = np.arange(64 * 8, dtype=np.float32).reshape(64, 8)
    return {"base": placed(items, rows), "adapter": placed(items[:, :2] + step, rows)}


def _saves_file(path: Path) -> list[str]:
    tr.save(path, {"w": np.ones(3)})
    return sorted(tr.load(path, like={"w": ...}))


async def _awaits(run: tr.Run) -> list[int]:
    return [step async for step in run.watch(timeout=0)]


def tries_all(folder: str) -> dict[str, Any]:
    """Return what each cell gave, or the class of the error that refused it."""
    at, process, said = Path(folder), jax.process_index(), dict[str, Any]()
    commits: list[int] = []

    def run(name: str, **options: Any) -> tr.Run:
        return tr.Run(at / name, timeout=_GENEROUS, **options)

    def save_steps() -> Any:
        with run("incremental", incremental=True, full_every=3, on_commit=lambda commit: commits.append(commit.step),
                 on_save_error="warn", max_failures=2) as training:  # fmt: skip
            for step in (1, 2, 3):
                training.save(step, _tree(step) | {"data": tr.each(_Data(10 * step + process))})
                training.preempted(step)
            training.wait()
            return [training.status().step, training.status().failures]

    def resumed() -> Any:
        like = _tree() | {"data": tr.each(_Data())}
        found: Any = run("incremental").load(like=like, fallback=tr.Fallback(max_attempts=3))
        return [found["data"].item.position, float(found["adapter"].addressable_shards[0].data[0, 0]) % 1]

    def watched() -> Any:
        with run("incremental").watch(hold=True, timeout=0) as steps:
            return list(steps)

    def held() -> Any:
        with run("incremental").hold(2, seconds=60) as lease:
            lease.renew()
            return lease.step

    def parts() -> Any:
        tr.save(at / "part", _tree(5), only="adapter", dtype="bfloat16", timeout=_GENEROUS)
        found = tr.load([at / "incremental", at / "part"], like=_tree(), cast=True, extra="ignore", timeout=_GENEROUS)
        return sorted(found)

    def begin() -> Any:
        new = run("new", search=[at / "incremental"], keep=tr.retention.KeepNear([3]) | tr.KeepLast(1))
        state = _tree() | {"data": tr.each(_Data())}
        begun = new.load_or_init(lambda: state, fallback=True)
        new.save(4, begun.tree).result()
        new.close()
        return [begun.step, new.steps()]

    cells: dict[str, Callable[[], Any]] = {
        "1, 3, 4, 5, 8: a run": save_steps,
        "3, 7: resume": resumed,
        "6: watch": watched,
        "6: hold": held,
        "2: parts": parts,
        "7, 8: begin": begin,
        "8: a file": lambda: _saves_file(at / f"{process}.safetensors"),
        "8: another file": lambda: _saves_file(at / f"{process}.msgpack"),
        "8: load in the background": lambda: sorted(tr.load_async(at / "part").result()),
        "1: base": lambda: tr.save(at / "based", _tree(3), base=at / "incremental/step_00000003", timeout=_GENEROUS),
        "6: await": lambda: asyncio.run(_awaits(run("incremental"))),
        "8: load in the background what lies over processes": lambda: tr.load_async(
            at / "part", like={"adapter": _tree()["adapter"]}, cast=True
        ).result(),
        "memory": lambda: tr.save("memory://what/works", _tree(), timeout=_GENEROUS),
        "a run in memory": lambda: tr.Run("memory://what/run", timeout=_GENEROUS).save(1, _tree()).result(),
        "3: leaves": lambda: tree_serialize_leaves(at / "leaves", {"data": tr.each(_Data()), "w": jnp.ones(3)}),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name, cell in cells.items():
            try:
                said[name] = cell()
            except Exception as error:  # noqa: BLE001 - the test looks at it
                said[name] = f"{type(error).__name__}: {error}"
    return said | {"commits": sorted(commits)}
