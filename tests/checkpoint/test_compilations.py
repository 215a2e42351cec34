"""How many programs a joint save of replicated arrays lets XLA compile: none, or as few for many leaves as for some."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering
from tests.caches import clear_caches
from tests.checkpoint.together import job_of
from tests.compilations import compiled

__all__ = ["compiled"]


def replicated(leaves: int, rows: int, dtype: str) -> dict[str, jax.Array]:
    """Return leaves of two shapes that lie whole on each of eight devices, with the same bytes in all of them."""
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    arrays = [np.full((rows, 7 + number % 2), number % 8).astype(jnp.dtype(dtype)) for number in range(leaves)]
    return {f"w{number}": jax.device_put(array, sharding) for number, array in enumerate(arrays)}


def same(tree: Any, process: int) -> Any:
    del process
    return tree


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shares_of_arrays_that_numpy_sees_are_cut_without_a_program(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    names = itertools.count()
    for processes in (2, 8):
        job = job_of(processes, monkeypatch)
        for leaves in (5, 50):
            tree = replicated(leaves, 1031, dtype)
            compiled.clear()
            assert job.save(tmp_path / str(next(names)), functools.partial(same, tree)) == [None] * processes
            assert not compiled


@pytest.mark.sampled(2)
@pytest.mark.parametrize("processes", [2, 8])
def test_other_shares_are_cut_by_a_few_programs_however_many_leaves_there_are(
    tmp_path: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    """As on an accelerator, numpy does not see the memory of such an array."""
    job = job_of(processes, monkeypatch)
    counts = []
    for leaves in (8, 40):
        jax.clear_caches()
        clear_caches()
        tree = replicated(leaves, 4096, "int4")
        compiled.clear()
        path = tmp_path / str(leaves)
        assert job.save(path, functools.partial(same, tree)) == [None] * processes
        counts.append(len(compiled))
        found = treering.load(path)
        assert all((np.asarray(found[key]) == np.asarray(leaf)).all() for key, leaf in tree.items())
    # Of the line that all leaves make, each process has one stretch, which ends in a leaf on either side.
    assert max(counts) <= 2 * processes
    assert counts[0] == counts[1]
