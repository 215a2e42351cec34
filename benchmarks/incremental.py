"""Command line: ``python -m benchmarks incremental [--rounds N] [--size FACTOR] [--dir DIR] [--json]``.

What a save costs that shares files with an older checkpoint, beside a save that writes everything, in turns:

- nine tenths of the bytes are frozen, in leaves of their own, and in one leaf in which all layers are stacked;
- nothing has changed, in trees of few and of many small leaves;
- the first save of an incremental run, which notes digests, beside one of a plain run;
- how long a call in the background blocks.

Bytes are those of data files that no older checkpoint has. Times are the medians of the rounds.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import treering as tr
from benchmarks.report import table

__all__ = ["Figure", "main", "measure"]

_HEAD = ("what", "found", "goal")
_LAYERS = 40
_TRAINED = 4
_BYTES = 1 << 30
_TINY_LEAF = 4 << 10
_COUNTS = (10, 1_000, 10_000)


class Figure(NamedTuple):
    """A figure, and what is wanted of it."""

    name: str
    found: float
    goal: float


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a table; 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks incremental", description=sys.modules[__name__].__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each measurement (default 5)")
    parser.add_argument("--size", type=float, default=1.0, help="factor on the bytes of the trees, 1 GiB each")
    parser.add_argument("--dir", type=Path, help="folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=given.dir) as folder:
        found = list(measure(Path(folder), rounds=given.rounds, nbytes=int(_BYTES * given.size)))
    if given.json:
        print(json.dumps({"benchmark": "incremental", "figures": [figure._asdict() for figure in found]}))
    else:
        rows = ((figure.name, f"{figure.found:.4g}", f"<= {figure.goal:.4g}") for figure in found)
        print("\n".join(["incremental: saves that write what changed", "", *table(_HEAD, rows)]))
    return int(any(figure.found > figure.goal for figure in found))


def measure(folder: Path, *, rounds: int, nbytes: int) -> Iterator[Figure]:
    """Yield all figures.

    Args:
        folder: where checkpoints are written, and removed.
        rounds: of each measurement.
        nbytes: bytes of the large trees.
    """
    for name, tree_of in (("leaves", _in_leaves), ("stacked", _stacked)):
        yield from _frozen(folder, name, functools.partial(tree_of, nbytes), rounds)
    for leaves in _COUNTS:
        yield _unchanged(folder, {f"leaf {n}": jnp.full(_TINY_LEAF // 4, n) for n in range(leaves)}, rounds)
    yield _first(folder, _in_leaves(nbytes, 0), rounds)


def _in_leaves(nbytes: int, step: int) -> dict[str, Any]:
    """A tree of 40 leaves, of which a tenth changes with each step; the others are the same arrays at each."""
    changed = range(_LAYERS - _TRAINED, _LAYERS)
    trained = {f"layer {n}": jnp.asarray(_numbers(nbytes) + n + step) for n in changed}
    return _frozen_leaves(nbytes) | trained


@functools.lru_cache(1)
def _frozen_leaves(nbytes: int) -> dict[str, Any]:
    return {f"layer {n}": jnp.asarray(_numbers(nbytes) + n) for n in range(_LAYERS - _TRAINED)}


def _numbers(nbytes: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(1).integers(1 << 30, size=nbytes // _LAYERS // 4, dtype=np.int32)


def _stacked(nbytes: int, step: int) -> dict[str, Any]:
    """The same in one leaf."""
    return {"layers": jnp.stack(list(_in_leaves(nbytes, step).values()))}


def _frozen(folder: Path, name: str, tree_of: Callable[[int], Any], rounds: int) -> Iterator[Figure]:
    full: list[float] = []
    less: list[float] = []
    blocked: list[float] = []
    usual: list[float] = []
    shares: list[float] = []
    _timed(tr.save, folder / "0", tree_of(0))
    for step in range(1, rounds + 1):
        tree = jax.block_until_ready(tree_of(step))
        full.append(_timed(tr.save, folder / "full", tree))
        less.append(_timed(tr.save, folder / f"{step}", tree, base=folder / f"{step - 1}"))
        shares.append(_new_bytes(folder / f"{step}") / _new_bytes(folder / "full"))
        _remove(folder / "full")
        begun = time.perf_counter()
        pending = tr.save_async(folder / "full", tree)
        usual.append(time.perf_counter() - begun)
        pending.result()
        begun = time.perf_counter()
        pending = tr.save_async(folder / "later", tree, base=folder / f"{step - 1}")
        blocked.append(time.perf_counter() - begun)
        pending.result()
        for gone in ("full", "later", f"{step - 1}"):
            _remove(folder / gone)
    _remove(folder / f"{rounds}")
    yield Figure(f"{name}: bytes written, to those of a full save", max(shares), 0.12)
    yield Figure(f"{name}: time, to that of a full save", statistics.median(less) / statistics.median(full), 0.2)
    slack = 1.1 * statistics.median(usual) + 1e-3
    yield Figure(f"{name}: seconds that a call in the background blocks", statistics.median(blocked), slack)


def _unchanged(folder: Path, tree: Any, rounds: int) -> Figure:
    _timed(tr.save, folder / "0", tree)
    times: list[float] = []
    for step in range(1, 3 * rounds + 1):
        times.append(_timed(tr.save, folder / f"{step}", tree, base=folder / f"{step - 1}"))
        _remove(folder / f"{step - 1}")
    _remove(folder / f"{3 * rounds}")
    return Figure(
        f"seconds for {len(tree):,} leaves of 4 KiB that did not change",
        statistics.median(times[2:]), 5e-3 + 1e-5 * len(tree),
    )  # fmt: skip


def _first(folder: Path, tree: Any, rounds: int) -> Figure:
    times: dict[bool, list[float]] = {False: [], True: []}
    for step in range(2 * rounds):
        for incremental in (step % 2 == 0, step % 2 == 1):
            with tr.Run(folder / "run", incremental=incremental) as run:
                begun = time.perf_counter()
                run.save(1, tree)
                run.wait()
                times[incremental].append(time.perf_counter() - begun)
                run.delete(1)
            (folder / "run" / "run.json").unlink(missing_ok=True)
    return Figure("time of a first save with digests, to that of one without", *(
        statistics.median(times[True]) / statistics.median(times[False]), 1.15,
    ))  # fmt: skip


def _timed(save: Callable[..., Any], *arguments: Any, **more: Any) -> float:
    begun = time.perf_counter()
    save(*arguments, **more)
    return time.perf_counter() - begun


def _new_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("data-*") if file.stat().st_nlink == 1)


def _remove(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
