"""A real training loop, small: jitted steps that give their buffers away, a data iterator, saves in the background."""

from __future__ import annotations

import collections
import functools
import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

import treering
from torture.scenes import fingerprint
from treering._checkpoint import compare
from treering._plan import increment

__all__ = [
    "BEST",
    "EVERY",
    "LAST",
    "Batches",
    "fingerprint_of",
    "frozen",
    "place_of",
    "reference",
    "resumed",
    "retention",
    "train",
]

LAST: Final = 2
EVERY: Final = 20
BEST: Final = 1
"""How many of the newest and of the best steps the loop keeps, and every so many-th."""

_WIDTH: Final = 64
_ROWS: Final = 512
_RATE: Final = 0.01
_FROZEN: Final = 1 << 18
_BOX: Final = 4096


class Batches:
    """A data iterator whose state is an array that it goes on changing in place."""

    def __init__(self) -> None:
        self._next = 0
        self._seen = np.zeros(64, np.int64)

    def __next__(self) -> dict[str, Any]:
        """Return the next batch."""
        noise = np.random.default_rng(self._next)
        self._seen[self._next % len(self._seen)] = self._next + 1
        self._next += 1
        rows = noise.integers(0, _ROWS, 32).astype(np.int32)
        return {"rows": rows, "wanted": noise.standard_normal(32, np.float32)}

    def get_state(self) -> dict[str, Any]:
        """Return where it is; the array is the live one."""
        return {"next": self._next, "seen": self._seen}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._next = int(state["next"])
        self._seen[:] = state["seen"]


def retention() -> Any:
    """Return what the loop keeps."""
    best = treering.KeepBest("loss", n=BEST, mode="min")
    return treering.KeepLast(LAST) | treering.KeepEvery(steps=EVERY) | best


def reference() -> Callable[[int], tuple[str, float]]:
    """Return a function that trains without any file, and tells the fingerprint and the loss after so many steps.

    It has to be asked for steps in any order, and trains each of them once.
    """
    state, batches = _first(), Batches()
    known: list[tuple[str, float]] = []

    def after(step: int) -> tuple[str, float]:
        nonlocal state
        while len(known) < step:
            state, loss = _step(state, next(batches))
            known.append((fingerprint_of({"data": batches.get_state(), "state": state}), float(loss)))
        return known[step - 1]

    return after


def fingerprint_of(tree: dict[str, Any]) -> str:
    """Return a digest of the items ``data`` and ``state`` of a tree, wherever its arrays lie."""
    return fingerprint(_on_host({name: tree[name] for name in ("data", "state")}))


def frozen() -> Any:
    """Return what never changes in a training that saves what changed: most of its bytes, in many boxes."""
    return np.arange(_FROZEN, dtype=np.float32).reshape(64, -1)


def place_of(text: str) -> PurePath:
    """Return the path that a text names, of a folder or of a place in a bucket, where nothing waits for readers."""
    return treering.bucket(text, grace=0) if "://" in text else Path(text)


def resumed(run: Any, step: int | None, **more: Any) -> tuple[Any, Batches]:
    """Return the state after a step of the run, and the iterator that stands there; the first ones for None.

    Further items of the step are loaded and left alone.
    """
    if step is None:
        return _first(), Batches()
    like = {"config": {"branch": 0}, "data": Batches(), "state": jax.eval_shape(_first), **more}
    tree = run.load(step, like)
    return tree["state"], tree["data"]


def train(command: str, tell: Callable[[str], None]) -> None:
    """Train and save as the command asks, until it is over or this process is killed; tell all that happens.

    What is told: ``begun STEP`` when the first step is taken; before each save ``save STEP BRANCH OVERWRITE``;
    ``skipped STEP`` where that was not due; ``acknowledged STEP`` once its ``result()`` has returned.
    """
    asked = json.loads(command)
    every, more = treering.SaveEvery(steps=asked["every"]), dict[str, Any]()
    options: dict[str, Any] = {}
    if asked.get("incremental"):
        increment.BOX_BYTES = _BOX  # type: ignore[misc]  # so that a small tree has many
        # What has changed is written while the rest is compared, as in a large tree.
        compare.SMALLEST_BLOCK, compare._MEANWHILE_FROM = 0, 1  # type: ignore[attr-defined, misc]
        options, more = {"incremental": True, "full_every": 50}, {"frozen": frozen()}
    with treering.Run(place_of(asked["path"]), keep=retention(), save_every=every, **options) as run:
        newest = run.latest()
        start = newest if asked["back"] is None else asked["back"]
        state, batches = resumed(run, start, **more)
        step = start or 0
        back = start != newest
        listener = _Listener(asked["listens"], tell)
        for _ in range(asked["steps"] or 1 << 40):
            state, loss = _step(state, next(batches))
            step += 1
            tree = {"config": {"branch": asked["branch"]}, "data": batches, "state": state, **more}
            if step == (start or 0) + 1:
                jax.block_until_ready(state)
                tell(f"begun {step}")  # what is compiled at the first time is no part of it
            tell(f"save {step} {asked['branch']} {int(back)}")
            saved = run.save(step, tree, metrics={"loss": loss}, rollback=back)
            if saved:
                back = False
                listener.hear(step, saved.pending)
            else:
                tell(f"skipped {step}")
        run.wait()
        listener.finish()


class _Listener:
    """Tells of each save as soon as its ``result()`` returns: at once, now and then, or on a thread of its own."""

    def __init__(self, how: Literal["at once", "now and then", "thread"], tell: Callable[[str], None]) -> None:
        self._how = how
        self._tell = tell
        self._waiting: collections.deque[tuple[int, Any]] = collections.deque()
        self._queue: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        if how == "thread":
            self._thread.start()

    def hear(self, step: int, pending: Any) -> None:
        if self._how == "thread":
            self._queue.put((step, pending))
            return
        self._waiting.append((step, pending))
        while self._waiting and (self._how == "at once" or self._waiting[0][1].done()):
            self._acknowledge(*self._waiting.popleft())

    def finish(self) -> None:
        """Hear of all the rest."""
        while self._waiting:
            self._acknowledge(*self._waiting.popleft())
        if self._how == "thread":
            self._queue.put(None)
            self._thread.join()

    def _listen(self) -> None:
        while (one := self._queue.get()) is not None:
            self._acknowledge(*one)

    def _acknowledge(self, step: int, pending: Any) -> None:
        pending.result()
        self._tell(f"acknowledged {step}")


def _first() -> dict[str, Any]:
    params = {
        "kernel": jax.random.normal(jax.random.key(1), (_WIDTH, _WIDTH)) / 8,
        "table": jax.random.normal(jax.random.key(2), (_ROWS, _WIDTH)),
    }
    return {"key": jax.random.key(3), "momentum": jax.tree.map(jnp.zeros_like, params), "params": params}


@functools.partial(jax.jit, donate_argnums=0)
def _step(state: dict[str, Any], batch: dict[str, Any]) -> tuple[dict[str, Any], jax.Array]:
    key, use = jax.random.split(state["key"])

    def loss_of(params: dict[str, Any]) -> jax.Array:
        hidden = params["table"][batch["rows"]] @ params["kernel"]
        hidden = jnp.tanh(hidden + 0.01 * jax.random.normal(use, hidden.shape))
        return jnp.mean((hidden.mean(axis=1) - batch["wanted"]) ** 2)

    loss, slopes = jax.value_and_grad(loss_of)(state["params"])
    momentum = jax.tree.map(lambda old, slope: 0.9 * old + slope, state["momentum"], slopes)
    params = jax.tree.map(lambda old, move: old - _RATE * move, state["params"], momentum)
    return {"key": key, "momentum": momentum, "params": params}, loss


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_host(inner) for key, inner in sorted(value.items())}
    if isinstance(value, jax.Array):
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value = jax.random.key_data(value)
        return np.asarray(value)
    return np.asarray(value) if hasattr(value, "dtype") else value
