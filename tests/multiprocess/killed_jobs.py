"""Worker of `test_killed_jobs`: a training that other numbers of processes take up, whose losses do not depend on that.

Parameters and what the optimizer keeps lie over all processes between steps, and each process reads its own share of a
batch. A sum over devices would be rounded in another order where there are more of them. So each step brings all rows
together, in the order of the whole batch, and every process computes the same on one of its devices.
"""

from __future__ import annotations

from typing import Any, Final

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from grain.experimental import ElasticIterator
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering as tr
from tests.multiprocess.jobs import say

__all__ = ["trains"]

_ROWS: Final = np.random.default_rng(3).normal(size=(96, 8)).astype(np.float32)
_BATCH: Final = 8
_OPTIMIZER: Final = optax.adam(1e-2)


def _made() -> dict[str, Any]:
    first, second = jax.random.split(jax.random.key(0))
    params = {"up": jax.random.normal(first, (8, 16)) / 3, "down": jax.random.normal(second, (16, 1)) / 4}
    return {"params": params, "opt": _OPTIMIZER.init(params)}


@jax.jit
def _trained(state: dict[str, Any], x: Any) -> tuple[dict[str, Any], Any]:
    def loss_of(params: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - jnp.sin(x.sum(axis=-1, keepdims=True))) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["params"])
    updates, opt = _OPTIMIZER.update(grads, state["opt"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def _first(states: list[Any]) -> Any:
    """Return the one state, which all have: that of the whole batches."""
    assert all(state == states[0] for state in states)
    return states[0]


def _data() -> Any:
    this, count = jax.process_index(), jax.process_count()
    numbers = grain.MapDataset.range(len(_ROWS)).seed(5).shuffle().repeat(8)
    share = grain.sharding.ShardOptions(shard_index=this, shard_count=count)
    iterator = iter(ElasticIterator(numbers, _BATCH, share))
    return tr.each(iterator, merge=_first, split=lambda state, count: [state] * count)


def _sharding(shape: tuple[int, ...]) -> NamedSharding:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return NamedSharding(mesh, PartitionSpec("x") if len(shape) == 2 and shape[0] > 1 else PartitionSpec())


def _together(x: Any) -> Any:
    """Return all of an array of which each process has a part."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def _placed(x: Any) -> Any:
    items = np.asarray(x)
    return jax.make_array_from_callback(items.shape, _sharding(items.shape), items.__getitem__)


def trains(path: str, last: int) -> None:
    """Train up to a step, from where the run is; say the number of each step and the bytes of its loss."""
    count = jax.process_count()
    with tr.Run(path, keep=tr.KeepLast(3), timeout=60) as run:
        step, tree = run.load_or_init(
            lambda: {"state": _made(), "data": _data()}, shardings=lambda key, aval: _sharding(aval.shape)
        )
        for number in range(0 if step is None else step + 1, last):
            # Process n reads the rows n, n + count, n + 2 * count ... of the batch of all.
            shares = _together(np.asarray(next(tree["data"]))).reshape(count, -1)
            state, loss = _trained(jax.tree.map(_together, tree["state"]), _ROWS[shares.T.reshape(-1)])
            tree["state"] = jax.tree.map(_placed, state)
            run.save(number, tree)
            say(f"{number} {np.asarray(loss).tobytes().hex()}")
