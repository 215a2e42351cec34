"""A training loop that keeps both cores busy, and how much of its time a save takes away."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.run_peers import Saver
from benchmarks.workloads import Tree, flat

__all__ = ["Loop", "Saved", "Stolen", "blocked", "updated"]

_MOST_LEAVES = 200
_WIDTH = 1024

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A save without anything beside it."""

    path: Path
    """Where it is."""
    blocked: float
    """Seconds until the call returned."""
    finished: float
    """Seconds until it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stolen:
    """A save beside a loop."""

    path: Path
    """Where it is."""
    seconds: float
    """How much longer the loop took than the same steps take without a save."""
    longest: float
    """The longest step while it saved, in usual steps."""


def blocked(saver: Saver, path: Path, tree: Tree, clock: Clock = time.perf_counter) -> Saved:
    """Save a tree while nothing else runs."""
    start = clock()
    saving = saver.begin(path, tree)
    returned = clock()
    saving.finish()
    return Saved(path=path, blocked=returned - start, finished=clock() - start)


def _times(tree: Tree, one: jax.Array) -> Tree:
    return jax.tree.map(lambda leaf: leaf * one.astype(leaf.dtype), tree)


_times_kept, _times_donated = jax.jit(_times), jax.jit(_times, donate_argnums=0)


def updated(tree: Tree, one: jax.Array, *, donate: bool) -> Tree:
    """The next state: each leaf times one, by jitted functions of a size that XLA compiles in seconds.

    The bytes stay what they were, which XLA does not know.
    """
    if sum(1 for _ in flat(tree)) > _MOST_LEAVES:
        return {key: updated(branch, one, donate=donate) for key, branch in tree.items()}
    found: Tree = (_times_donated if donate else _times_kept)(tree, one)
    # jax sorts the keys of dicts.
    return _in_order(found, tree)


def _in_order(found: Tree, wanted: Tree) -> Tree:
    return {
        key: _in_order(found[key], value) if isinstance(value, dict) else found[key] for key, value in wanted.items()
    }


@jax.jit
def _train(weights: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """One step of gradient descent of a small network, on all cores."""

    def loss(weights: list[jax.Array]) -> jax.Array:
        hidden = batch
        for each in weights:
            hidden = jnp.tanh(hidden @ each)
        return jnp.mean((hidden - batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return [weight - 0.01 * gradient for weight, gradient in zip(weights, gradients, strict=True)], value


class Loop:
    """A training loop: a network that learns, and a state of many leaves that is donated and renewed at each step.

    Args:
        state: the state, which is donated.
        rows: rows of a batch; how long a step takes.
        steps: how many steps are timed before, and after.
    """

    def __init__(self, state: Tree, *, rows: int, steps: int, clock: Clock = time.perf_counter) -> None:
        self._state = state
        self._one = jnp.float32(1)
        self._weights: Any = [jnp.eye(_WIDTH) * 0.5 for _ in range(2)]
        self._batch = jnp.ones((rows, _WIDTH))
        self._steps = steps
        self._clock = clock
        self._run(2)

    def beside(self, saver: Saver, path: Path) -> Stolen:
        """Go on with the loop, with one save from its beginning to its end in it."""
        before = sum(self._run(self._steps))
        start = self._clock()
        saving = saver.begin(path, self._state)
        taken: list[float] = []
        while len(taken) < self._steps or not saving.done():
            taken += self._run(1)
        during = self._clock() - start
        saving.finish()
        usual = (before + sum(self._run(self._steps))) / (2 * self._steps)
        # Nothing less than what a clock can tell: a ratio is made of it.
        stolen = max(during - usual * len(taken), 1e-4)
        return Stolen(path=path, seconds=stolen, longest=max(taken) / usual)

    def _run(self, steps: int) -> list[float]:
        taken = []
        for _ in range(steps):
            start = self._clock()
            self._state = updated(self._state, self._one, donate=True)
            self._weights, loss = _train(self._weights, self._batch)
            jax.block_until_ready((loss, self._state))
            taken.append(self._clock() - start)
        return taken
