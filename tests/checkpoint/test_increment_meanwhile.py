"""``save(base=)`` writes what is known to have changed while it compares the rest."""

from __future__ import annotations

import _thread
import errno
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import faults, limits
from tests.checkpoint.together import Together, together, two
from treering._checkpoint.compare import Comparison
from treering._checkpoint.transaction import AttemptFiles
from treering.errors import StoreError

__all__ = ["together", "two"]

LAYER = 1 << 14
"""Items of a layer of 128 KiB, which has blocks of 64 KiB."""


@pytest.fixture(autouse=True)
def from_the_first_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer is compared by itself, and anything that has changed is worth to be begun."""
    limits.lower(monkeypatch, compared_box=8 * LAYER, compared_meanwhile_from=1)


def tree_of(seed: int = 0) -> dict[str, Any]:
    """Ten layers, of which one changes at its first byte, and two at their last one; and small leaves."""
    layers = np.arange(10 * LAYER, dtype=np.float64).reshape(10, LAYER)
    layers[3, 0] += seed
    layers[4:6, -1] += seed
    return {"layers": layers, "bias": np.arange(9.0) + seed, "frozen": np.ones(7), "step": seed}


def assert_saved(path: Path, tree: dict[str, Any]) -> None:
    found = tr.load(path)
    assert all(np.array_equal(found[key], leaf) for key, leaf in tree.items())
    assert tr.verify(path).ok


def numbers_of(path: Path, *, written: bool) -> list[tuple[int, int]]:
    """The number of each data file, and how many there are at most, of those that were written, or shared."""
    names = [file.name for file in path.glob("data-*") if (file.stat().st_nlink == 1) == written]
    found = [re.fullmatch(r"data-[0-9a-f]{16}-(\d+)-of-(\d+)\.safetensors", name) for name in names]
    return sorted((int(match[1]), int(match[2])) for match in found if match)


def test_what_has_changed_is_in_the_first_file_and_what_was_found_later_in_the_last(tmp_path: Path) -> None:
    tr.save(tmp_path / "0", tree_of())
    tr.save(tmp_path / "1", tree_of(), base=tmp_path / "0")  # digests are noted
    for step in range(2, 6):
        tr.save(tmp_path / f"{step}", tree_of(step), base=tmp_path / f"{step - 1}")
        assert_saved(tmp_path / f"{step}", tree_of(step))
    assert [number for number, _ in numbers_of(tmp_path / "5", written=True)] == [0, 2]
    assert [number for number, _ in numbers_of(tmp_path / "5", written=False)] == [1]
    chunks = json.loads((tmp_path / "5" / "treering.json").read_text())["chunks"]
    assert chunks["file"] == [1, 1, 1, 0, 2, 2, 1, 1, 1, 1, 0, 1]
    for step in range(1, 5):
        assert_saved(tmp_path / f"{step}", tree_of(step if step > 1 else 0))


def test_a_leaf_that_was_not_there_is_begun_at_once(tmp_path: Path) -> None:
    tr.save(tmp_path / "0", tree_of())
    tr.save(tmp_path / "1", tree_of(), base=tmp_path / "0")
    tree = tree_of() | {"adapter": np.arange(2.0 * LAYER)}
    tr.save(tmp_path / "2", tree, base=tmp_path / "1")
    assert_saved(tmp_path / "2", tree)
    assert [number for number, _ in numbers_of(tmp_path / "2", written=True)] == [0]


def test_progress_counts_what_was_written_meanwhile(tmp_path: Path) -> None:
    tr.save(tmp_path / "0", tree_of())
    tr.save(tmp_path / "1", tree_of(), base=tmp_path / "0")
    steps: list[tuple[int, int]] = []
    tr.save(tmp_path / "2", tree_of(1), base=tmp_path / "1", progress=lambda *step: steps.append(step))
    done = [step[0] for step in steps]
    assert done == sorted(done)
    assert steps[-1] == (3 * 8 * LAYER + 72, 3 * 8 * LAYER + 72)


def test_processes_come_to_one_layout(two: Together, tmp_path: Path) -> None:
    mesh = Mesh(np.array([two.devices_of(process)[0] for process in range(2)]), "x")
    sharding = NamedSharding(mesh, P("x"))

    def spread(seed: int) -> dict[str, Any]:
        return {**tree_of(seed), "layers": jax.device_put(tree_of(seed)["layers"], sharding)}

    for step in range(4):
        tree = spread(max(step, 1))
        wishes: dict[str, Any] = {"base": tmp_path / f"{step - 1}"} if step else {}
        assert two.save(tmp_path / f"{step}", {0: tree, 1: tree}.__getitem__, **wishes) == [None, None]
        assert_saved(tmp_path / f"{step}", tree_of(max(step, 1)))
    written = [number for number, _ in numbers_of(tmp_path / "3", written=True)]
    # Process 0 has a layer that was begun and one that was found later, the other process what was found later alone.
    assert written == [0, 2, written[-1]]


def test_a_file_that_cannot_be_written_ends_the_comparison_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tr.save(tmp_path / "0", tree_of())
    tr.save(tmp_path / "1", tree_of(), base=tmp_path / "0")
    with monkeypatch.context() as patch:
        faults.fail(patch, AttemptFiles, "write_file", errno.ENOSPC)
        with pytest.raises(OSError, match="No space"):
            tr.save(tmp_path / "2", tree_of(1), base=tmp_path / "1")
    assert not (tmp_path / "2").exists()
    assert_saved(tmp_path / "1", tree_of())


def test_a_comparison_that_fails_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tr.save(tmp_path / "0", tree_of())
    tr.save(tmp_path / "1", tree_of(), base=tmp_path / "0")
    with monkeypatch.context() as patch:
        faults.fail(patch, Comparison, "finish", StoreError("the disk is gone"))
        with pytest.raises(StoreError, match="the disk is gone"):
            tr.save(tmp_path / "2", tree_of(1), base=tmp_path / "1")
    assert not (tmp_path / "2").exists()


def test_without_a_second_thread_the_rest_is_compared_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tr.save(tmp_path / "0", tree_of())
    tr.save(tmp_path / "1", tree_of(), base=tmp_path / "0")
    with monkeypatch.context() as patch:
        faults.fail(patch, _thread, "start_new_thread", RuntimeError("can't start new thread"))
        tr.save(tmp_path / "2", tree_of(1), base=tmp_path / "1")
    assert_saved(tmp_path / "2", tree_of(1))
    assert [number for number, _ in numbers_of(tmp_path / "2", written=False)] == [1]
