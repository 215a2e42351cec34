"""States of iterators in a joint save: a step has one of each, so that they may not differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests.buckets import MemoryBucket
from tests.checkpoint.together import Together, save_as_step, two
from treering.errors import MismatchError, NotFoundError

__all__ = ["two"]


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Where steps are saved."""
    if request.param == "disk":
        yield tmp_path
        return
    yield treering.bucket(MemoryBucket(f"s3://states-{tmp_path.name}"))


def _require_nothing(path: Path) -> None:
    with pytest.raises(NotFoundError):
        treering.load(path)


def test_states_that_differ_are_refused_and_other_leaves_are_process_0s(two: Together, place: Any) -> None:
    def differing(process: int) -> Any:
        return {"data": {"next": process, "seed": np.arange(3)}, "database": process, "w": np.full(2, process)}

    outcomes = two.save(place / "a", differing, save=save_as_step)
    for outcome in outcomes:
        assert isinstance(outcome, MismatchError)
        assert "leaf 'data/next' differs on process 1" in str(outcome)
        assert "a step holds the state of an iterator once" in str(outcome)
        assert "database" not in str(outcome)
    _require_nothing(place / "a")

    def alike(process: int) -> Any:
        return {**differing(process), "data": {"next": 7, "seed": np.arange(3)}}

    assert two.save(place / "b", alike, save=save_as_step) == [None, None]
    assert treering.load(place / "b")["w"].tolist() == [0, 0]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "state_of",
    [
        lambda process: b'{"sampler": "ShardOptions(shard_index=%d)"}' % process,
        lambda process: b"x" * (5000 + process),
        lambda process: {"train": {"next": 7}, "eval": {"next": process}},
        lambda process: {f"worker {process}": 7},
        lambda process: {"next": [7, 7.5][process]},
        lambda process: [7] * (1 + process),
        lambda process: [7] * (2 - process),
        lambda process: [(), []][process],
        lambda process: [{}, {"next": 7}][process],
        lambda process: np.full(3, process),
        lambda process: np.full(3 + process, 1),
    ],
    ids=[
        "bytes",
        "longer bytes",
        "nested",
        "other keys",
        "other kinds",
        "more leaves",
        "fewer leaves",
        "other containers",
        "none",
        "array",
        "other shapes",
    ],
)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_states_of_any_kind_are_refused_with_what_to_do(two: Together, place: Any, state_of: Any, last: bool) -> None:
    def tree_of(process: int) -> Any:
        other = {"a" if last else "w": np.zeros(2)}
        return other | {"data": state_of(process)} if last else {"data": state_of(process)} | other

    outcomes = two.save(place / "a", tree_of, save=save_as_step)
    for outcome in outcomes:
        assert isinstance(outcome, MismatchError)
        assert "data" in str(outcome) or "containers" in str(outcome)
        assert "a step holds the state of an iterator once" in str(outcome)
    _require_nothing(place / "a")


def test_other_differences_have_no_advice_about_iterators(two: Together, place: Any) -> None:
    for tree_of in (
        lambda process: {"data": 7, "w": [1] * (1 + process)},
        lambda process: {"data": 7, "w": [1, 1.5][process]},
    ):
        for outcome in two.save(place / "a", tree_of, save=save_as_step):
            assert isinstance(outcome, MismatchError)
            assert "iterator" not in str(outcome)
