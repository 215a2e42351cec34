"""Workers of `test_each_states`: processes of which each keeps a state of its own in the same item of a tree."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering as tr
from tests.multiprocess.meetings import told

_GENEROUS = 60.0


class Shard:
    """Gives the rows of one process's share of the data, and goes on from a state whose size differs by process."""

    def __init__(self, number: int, count: int) -> None:
        self.left = list(range(number, 24, count))
        self.noise = np.full(number * 800, number / 3)
        self.name = "ü" * number

    def __next__(self) -> int:
        return self.left.pop(0)

    def get_state(self) -> dict[str, Any]:
        return {"left": tuple(self.left), "noise": self.noise, "name": self.name, "raw": b"\0\xff"}

    def set_state(self, state: dict[str, Any]) -> None:
        self.left, self.noise, self.name = list(state["left"]), state["noise"], state["name"]


def merge(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of all rows that are left."""
    return {**states[0], "left": tuple(sorted(row for state in states for row in state["left"])), "name": "merged"}


def split(state: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Deal the rows that are left to some processes."""
    return [{**state, "left": state["left"][number::count]} for number in range(count)]


def trained() -> tuple[Shard, dict[str, Any]]:
    """Return the iterator of this process in the midst of its share, and a tree with it."""
    this, count = jax.process_index(), jax.process_count()
    shard = Shard(this, count)
    for _ in range(this + 1):
        next(shard)
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    w = jax.make_array_from_callback((24, 2), rows, lambda index: np.arange(48.0).reshape(24, 2)[index])
    own = {"a": tr.each(shard, merge=merge, split=split), "small": {"b": tr.each({"process": this})}}
    return shard, {"w": w, "data": own, "step": 7}


def fresh() -> tuple[Shard, dict[str, Any]]:
    """Return a new iterator of this process, and a tree to load into."""
    this, count = jax.process_index(), jax.process_count()
    shard = Shard(this, count)
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
    w = jax.ShapeDtypeStruct((24, 2), jnp.float32, sharding=rows)
    own = {"a": tr.each(shard, merge=merge, split=split), "small": {"b": tr.each(None)}}
    return shard, {"w": w, "data": own, "step": 0}


def found(shard: Shard, tree: dict[str, Any]) -> list[Any]:
    """Return what can be told of a tree and its iterator as JSON."""
    total = float(sum(np.asarray(piece.data).sum() for piece in tree["w"].addressable_shards))
    return [
        list(shard.left),
        shard.noise.tolist()[:1],
        shard.noise.size,
        shard.name,
        tree["data"]["small"]["b"].item,
        total,
    ]


def saves_and_loads(folder: str) -> dict[str, Any]:
    """Save in each way, and load in each way."""
    shard, tree = trained()
    wanted = found(shard, tree)
    tr.save(f"{folder}/save", tree, timeout=_GENEROUS)
    pending = tr.save_async(f"{folder}/async", tree, timeout=_GENEROUS)
    next(shard)  # what is saved does not change any more
    pending.result(_GENEROUS)
    same = []
    for name in ("save", "async"):
        shard, like = fresh()
        same.append(found(shard, tr.load(f"{folder}/{name}", like=like)) == wanted)
    with tr.Run(f"{folder}/run", timeout=_GENEROUS) as run:
        for step in (1, 2):
            shard, tree = trained()
            run.save(step, tree)
            next(shard)
    shard, like = fresh()
    same.append(found(shard, tr.Run(f"{folder}/run").load(like=like)) == wanted)
    made: list[Any] = []

    def init() -> dict[str, Any]:
        shard, tree = fresh()
        made.append(shard)
        return {**tree, "w": jnp.zeros((24, 2))}

    resumed = tr.Run(f"{folder}/run").load_or_init(init, shardings=lambda key, aval: like["w"].sharding)
    same.append(resumed.step == 2 and found(resumed.tree["data"]["a"].item, resumed.tree) == wanted)
    return {"same": same, "wanted": wanted}


def loads_what_others_saved(path: str, regroups: bool = True) -> dict[str, Any]:
    """Load what another number of processes has saved."""
    shard, like = fresh()
    if not regroups:
        like["data"]["a"] = tr.each(shard)
    like["data"].pop("small")
    seen = told(lambda: found_left(tr.load(path, like=like, extra="ignore", timeout=_GENEROUS), shard))
    return {"told": seen, "left": shard.left}


def found_left(tree: Any, shard: Shard) -> list[int]:
    """Return the rows that are left once the tree is loaded."""
    assert int(tree["step"]) == 7
    return shard.left


def saves_for_another_job(path: str) -> None:
    """Save the state of each process."""
    tr.save(path, trained()[1], timeout=_GENEROUS)


def fails_to_give_a_state(folder: str) -> list[dict[str, Any]]:
    """Save while one process has no state to give, or one that no file holds, or too much of it."""
    this = jax.process_index()

    class Broken:
        def get_state(self) -> Any:
            raise ZeroDivisionError("the pipe burst")

        def set_state(self, state: Any) -> None: ...

    odd: list[Any] = [Broken(), jnp.ones(3), b"x" * (2 << 20), Shard(0, 1)]
    path, whole = f"{folder}/odd", tr.each({"process": this})
    return [told(functools.partial(_save_marked, path, tr.each(one) if this else whole)) for one in odd]


def _save_marked(path: str, item: Any) -> None:
    tr.save(path, {"data": item}, timeout=_GENEROUS)
