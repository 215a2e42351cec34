"""States of iterators in a joint save: a step has one of each, so that they may not differ."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests.checkpoint.together import Together, two
from treering._checkpoint.save import save_tree
from treering._checkpoint.save_options import SaveOptions
from treering.errors import Mismatch

__all__ = ["two"]


def _save(path: Path, tree: Any) -> None:
    options = SaveOptions.of(path, metadata=None, overwrite=False, progress=None, timeout=60)
    save_tree(tree, dataclasses.replace(options, states=("data",)))


def test_states_that_differ_are_refused_and_other_leaves_are_process_0s(two: Together, tmp_path: Path) -> None:
    def differing(process: int) -> Any:
        return {"data": {"next": process, "seed": np.arange(3)}, "database": process, "w": np.full(2, process)}

    outcomes = two.save(tmp_path / "a", differing, save=_save)
    for outcome in outcomes:
        assert isinstance(outcome, Mismatch)
        assert "leaf 'data/next' differs on process 1" in str(outcome)
        assert "a step holds the state of an iterator once" in str(outcome)
        assert "database" not in str(outcome)
    assert not (tmp_path / "a" / "treering.json").exists()

    def alike(process: int) -> Any:
        return {**differing(process), "data": {"next": 7, "seed": np.arange(3)}}

    assert two.save(tmp_path / "b", alike, save=_save) == [None, None]
    assert treering.load(tmp_path / "b")["w"].tolist() == [0, 0]


@pytest.mark.parametrize(
    "state_of",
    [
        lambda process: b'{"sampler": "ShardOptions(shard_index=%d)"}' % process,
        lambda process: b"x" * (5000 + process),
        lambda process: {"train": {"next": 7}, "eval": {"next": process}},
        lambda process: {f"worker {process}": 7},
        lambda process: [7] * (1 + process),
        lambda process: np.full(3, process),
    ],
    ids=["bytes", "longer bytes", "nested", "other keys", "more leaves", "array"],
)
def test_states_of_any_kind_are_refused_with_what_to_do(two: Together, tmp_path: Path, state_of: Any) -> None:
    outcomes = two.save(tmp_path / "a", lambda process: {"data": state_of(process), "w": np.zeros(2)}, save=_save)
    for outcome in outcomes:
        assert isinstance(outcome, Mismatch)
        assert "data" in str(outcome)
    assert not (tmp_path / "a" / "treering.json").exists()
