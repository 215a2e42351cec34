"""Workers of `test_grain`: trainings of several processes that read their data with grain."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from grain.experimental import ElasticIterator, WindowShuffleIterDataset

import treering as tr

__all__ = ["PIPELINES", "begins", "elastic", "goes_on", "reads_elastic"]

ROWS = 96
_AHEAD = 6
_TIMEOUT = 60.0


def _shard(this: int, count: int) -> grain.sharding.ShardOptions:
    return grain.sharding.ShardOptions(shard_index=this, shard_count=count)


def _source() -> grain.MapDataset:
    rows = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return grain.MapDataset.source(rows)


def _mapped(this: int, count: int) -> Any:
    """Rows of a shard, shuffled anew in each epoch, in batches."""
    shuffled = _source().seed(5).shuffle()[this::count].repeat(4)
    return iter(shuffled.batch(4, drop_remainder=True).to_iter_dataset())


def _filtered(this: int, count: int) -> Any:
    """Rows that a filter lets through, so that processes come to other places after as many batches."""
    rows = _source().seed(5).shuffle()[this::count].repeat(8).to_iter_dataset().filter(lambda row: row[0] > -0.5)
    return iter(WindowShuffleIterDataset(rows, window_size=8, seed=this).batch(4))


def _random(this: int, count: int) -> Any:
    """Rows with noise of grain's own."""
    noisy = _source().seed(this)[this::count].random_map(lambda row, rng: row + rng.normal(size=3).astype(np.float32))
    return iter(noisy.repeat().batch(2).to_iter_dataset())


def _loader(this: int, count: int) -> Any:
    """The older API; its state is bytes that name the shard."""
    sampler = grain.samplers.IndexSampler(ROWS, _shard(this, count), shuffle=True, num_epochs=4, seed=3)
    rows = grain.sources.RangeDataSource(0, ROWS, 1)  # grain compares the texts of sources, which name no address here
    return iter(
        grain.DataLoader(data_source=rows, sampler=sampler, operations=[grain.transforms.Batch(4)], worker_count=0)
    )


PIPELINES: dict[str, Callable[[int, int], Any]] = {
    "mapped": _mapped,
    "filtered": _filtered,
    "random": _random,
    "loader": _loader,
}


def _text(batch: Any) -> str:
    return base64.b64encode(np.asarray(batch).tobytes()).decode()


@jax.jit
def _trained(w: jax.Array, batch: jax.Array) -> jax.Array:
    return w + jnp.tanh(batch).sum(axis=0)


def _fresh(name: str) -> dict[str, Any]:
    iterator = PIPELINES[name](jax.process_index(), jax.process_count())
    return {"w": np.zeros(3, np.float32), "data": {"train": tr.each(iterator)}}


def begins(folder: str, steps: int) -> dict[str, list[str]]:
    """Train with each pipeline and save in the midst of an epoch; return the batches that come after that."""
    found: dict[str, list[str]] = {}
    for name in PIPELINES:
        with tr.Run(f"{folder}/{name}", keep=tr.KeepLast(2), timeout=_TIMEOUT) as run:
            step, tree = run.load_or_init(lambda name=name: _fresh(name))  # type: ignore[misc]
            assert step is None
            for number in range(1, steps + 1):
                # Not all are at the same place: process 1 reads two batches where process 0 reads one.
                for _ in range(1 + jax.process_index() % 2):
                    batch = next(tree["data"]["train"])
                tree["w"] = np.asarray(_trained(tree["w"], np.asarray(batch, np.float32).reshape(len(batch), -1)))
                run.save(number, tree)
        found[name] = [_text(next(tree["data"]["train"])) for _ in range(_AHEAD)]
    return found


def goes_on(folder: str, steps: int) -> dict[str, list[str]]:
    """Resume each training in a new job; return the next batches."""
    found: dict[str, list[str]] = {}
    for name in PIPELINES:
        step, tree = tr.Run(f"{folder}/{name}", timeout=_TIMEOUT).load_or_init(lambda name=name: _fresh(name))  # type: ignore[misc]
        assert step == steps
        found[name] = [_text(next(tree["data"]["train"])) for _ in range(_AHEAD)]
    return found


# ------------------------------------------------------------------------------------------------------------- elastic


def elastic(this: int, count: int) -> Any:
    """Rows in batches of 8 over all processes: every process has the same state, whatever its share is."""
    rows = grain.MapDataset.range(ROWS).seed(5).shuffle()
    return iter(ElasticIterator(rows, 8, _shard(this, count)))


def _first(states: list[Any]) -> Any:
    """Return the one state, which all have."""
    assert all(state == states[0] for state in states)
    return states[0]


def _marked() -> Any:
    iterator = elastic(jax.process_index(), jax.process_count())
    return tr.each(iterator, merge=_first, split=lambda state, count: [state] * count)


def reads_elastic(folder: str, steps: int) -> list[list[list[int]]]:
    """Go on for some batches from what is saved, by itself and with a mark; save, and return the batches."""
    found: list[list[list[int]]] = []
    for name in ("itself", "marked"):
        with tr.Run(f"{folder}/{name}", timeout=_TIMEOUT) as run:
            step, tree = run.load_or_init(
                lambda name=name: {  # type: ignore[misc]
                    "data": _marked() if name == "marked" else elastic(jax.process_index(), jax.process_count())
                }
            )
            found.append([np.asarray(next(tree["data"])).tolist() for _ in range(steps)])
            run.save((step or 0) + steps, tree)
    return json.loads(json.dumps(found))
