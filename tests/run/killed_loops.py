"""Training loops as people write them, for programs that are killed: python -m tests.run.killed_loops LOOP FOLDER LAST.

Each step prints its number and the bytes of its loss. Parameters lie over all devices of the program between steps; a
step is computed on one of them, so that its bits do not depend on how many there are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import treering as tr

__all__ = ["LOOPS", "main"]

ROWS: Final = np.random.default_rng(3).normal(size=(96, 8)).astype(np.float32)
State = Any


class Loop(NamedTuple):
    """One way to write a training."""

    init: Callable[[], State]
    """Makes the state."""
    step: Callable[[State, Any], tuple[State, Any]]
    """Trains on a batch; returns the next state, and the loss."""


def data() -> Any:
    """Return an iterator of grain: shuffled anew in each epoch, noisy, in batches."""
    noisy = grain.MapDataset.source(ROWS).seed(7).shuffle().repeat().random_map(_with_noise)
    return iter(noisy.batch(10).to_iter_dataset())


def _with_noise(row: Any, rng: np.random.Generator) -> Any:
    return row + rng.normal(size=8).astype(np.float32) / 100


def target(x: jax.Array) -> jax.Array:
    """Return what is learned."""
    return jnp.sin(x.sum(axis=-1, keepdims=True))


# ------------------------------------------------------------------------------------------------------------------ nnx


class Net(nnx.Module):
    """A network with statistics of batches, and counters of random numbers."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.down = nnx.Linear(32, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def _nnx_made() -> tuple[Net, nnx.Optimizer[Net]]:
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)


@nnx.jit
def _nnx_trained(model: Net, optimizer: nnx.Optimizer[Net], x: jax.Array) -> jax.Array:
    def loss_of(model: Net) -> jax.Array:
        return jnp.mean((model(x) - target(x)) ** 2)

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@functools.cache
def _graph() -> Any:
    return nnx.split(_nnx_made())[0]


def _nnx_step(state: State, x: Any) -> tuple[State, Any]:
    model, optimizer = nnx.merge(_graph(), state)
    loss = _nnx_trained(model, optimizer, x)
    return nnx.split((model, optimizer))[1], loss


# ----------------------------------------------------------------------------------------- equinox, LoRA, a frozen base


def _lora_made() -> State:
    keys = jax.random.split(jax.random.key(0), 3)
    base = eqx.nn.MLP(8, 1, 32, 1, key=keys[0])
    adapter = {"a": jax.random.normal(keys[1], (32, 4)) / 6, "b": jnp.zeros((4, 8)), "out": jnp.zeros((1, 32))}
    return {"base": base, "adapter": adapter, "opt": optax.adam(1e-2).init(adapter), "key": keys[2]}


@eqx.filter_jit
def _lora_step(state: State, x: Any) -> tuple[State, Any]:
    key, noise = jax.random.split(state["key"])
    first, last = state["base"].layers

    def loss_of(adapter: Any) -> jax.Array:
        hidden = jax.nn.relu(x @ (first.weight + adapter["a"] @ adapter["b"]).T + first.bias)
        hidden *= jax.random.bernoulli(noise, 0.9, hidden.shape)
        return jnp.mean((hidden @ (last.weight + adapter["out"]).T + last.bias - target(x)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state["adapter"])
    updates, opt = optax.adam(1e-2).update(grads, state["opt"])
    return {**state, "adapter": optax.apply_updates(state["adapter"], updates), "opt": opt, "key": key}, loss


# --------------------------------------------------------------------------------------------------- linen, TrainState


class LinenNet(linen.Module):
    """A network of linen."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.Dense(1)(linen.tanh(linen.Dense(32)(x)))


_NET: Final = LinenNet()
_OPTIMIZER: Final = optax.adam(1e-2)


def _linen_made() -> State:
    params = _NET.init(jax.random.key(0), ROWS[:2])["params"]
    return TrainState.create(apply_fn=_NET.apply, params=params, tx=_OPTIMIZER)


@jax.jit
def _linen_step(state: State, x: Any) -> tuple[State, Any]:
    def loss_of(params: Any) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, x) - target(x)) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=grads), loss


# ------------------------------------------------------------------------------------------------------------- the loop


LOOPS: Final = {
    "nnx": Loop(lambda: nnx.split(_nnx_made())[1], _nnx_step),
    "equinox": Loop(_lora_made, _lora_step),
    "linen": Loop(_linen_made, _linen_step),
}


def _place(x: Any) -> Any:
    """Lay an array over all devices, if its first axis can be divided."""
    if not isinstance(x, jax.Array):
        return x
    return jax.device_put(x, _sharding(x.shape))


def _sharding(shape: tuple[int, ...]) -> NamedSharding:
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = len(shape) == 2 and shape[0] % jax.device_count() == 0
    return NamedSharding(mesh, PartitionSpec("x") if rows else PartitionSpec())


def _gather(x: Any) -> Any:
    return jax.device_put(x, jax.devices()[0]) if isinstance(x, jax.Array) else x


def main(name: str, folder: str, last: int) -> None:
    """Train up to a step, from where the run is."""
    loop = LOOPS[name]
    with tr.Run(folder, keep=tr.KeepLast(3)) as run:
        step, tree = run.load_or_init(
            lambda: {"state": loop.init(), "data": tr.each(data())}, shardings=lambda key, aval: _sharding(aval.shape)
        )
        for number in range(0 if step is None else step + 1, last):
            state, loss = loop.step(jax.tree.map(_gather, tree["state"]), next(tree["data"]))
            tree["state"] = jax.tree.map(_place, state)
            run.save(number, tree, metrics={"loss": loss})
            sys.stdout.write(f"{number} {np.asarray(loss).tobytes().hex()}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
