"""What some processes save, any other number of processes loads, bit for bit, however their devices are ordered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests.compat import independent_leaves_reader, independent_reader
from tests.multiprocess import trees
from tests.multiprocess.jobs import Outcome, results, run_job
from tests.multiprocess.trips import reads, round_trip
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves


def _good(outcomes: list[Outcome], least: int) -> None:
    for found in results(outcomes):
        assert not found["bad"], "\n".join(found["bad"])
        assert found["count"] >= least


def _check_here(folder: Path, number: int, processes: int) -> None:
    """Read with this process, by treering and by the readers that know nothing of it."""
    assert trees.problems(tr.load(folder / "ckpt"), number, None) == []
    assert trees.problems(tree_deserialize_leaves(folder / "leaves", structure="exact"), number, None) == []
    assert tr.verify(folder / "ckpt").ok
    assert tr.verify(folder / "leaves").ok
    for read, name in ((independent_reader.read, "ckpt"), (independent_leaves_reader.read, "leaves")):
        _, leaves = read(folder / name)
        for key, items in trees.expected(number).items():
            found = leaves[f"arrays/{key}"]
            assert found.shape == items.shape, key
            assert found.tobytes() == items.tobytes(), key
    index = json.loads((folder / "ckpt" / "treering.json").read_bytes())
    assert index["metadata"] == {"number": number}
    assert len(index["files"]) == processes
    assert {path.name for path in (folder / "ckpt").iterdir()} == {
        "treering.json", *(file["name"] for file in index["files"]),
    }  # fmt: skip
    assert not [path for path in (folder / "leaves").iterdir() if path.name.startswith(".treering-")]


def _alone(number: int) -> dict[str, Any]:
    """Return the tree as this process, which has eight devices, holds it."""
    return trees.tree(number)


@pytest.mark.slow
def test_saved_by_four_loaded_by_any_number(tmp_path: Path) -> None:
    four, over, one = tmp_path / "four", tmp_path / "over", tmp_path / "one"
    one.mkdir()
    tr.save(one / "ckpt", _alone(1))
    tree_serialize_leaves(one / "leaves", _alone(1))
    _good(run_job(round_trip, 4, arguments=[str(four), 4], timeout=120), 10)
    _check_here(four, 4, 4)
    shutil.copytree(four, over)
    _good(run_job(reads, 2, devices=[1, 3], arguments=[[str(four), str(one)], [4, 1], str(over), 2], timeout=120), 30)
    _check_here(over, 2, 2)
    _good(
        run_job(reads, 3, devices=[2, 4, 2], arguments=[[str(over), str(one)], [2, 1], str(over), 3], timeout=120), 30
    )
    _check_here(over, 3, 3)


def test_the_counter_makes_every_item_another() -> None:
    assert len(np.unique(trees.whole("large", 1))) == 3072 * 96
    assert (trees.whole("large", 1) != trees.whole("large", 2)).all()


def test_what_is_wrong_with_a_tree_is_seen() -> None:
    tree = _alone(1)
    assert trees.problems(tree, 1, "as saved") == []
    # All arrays but the empty one, the keys, and what each process holds by itself.
    assert len({one.split(":")[0] for one in trees.problems(tree, 2, "as saved")}) == len(trees.ARRAYS) + 2
    moved = trees.problems(tree, 1, "shuffled")
    assert [one for one in moved if one.startswith("rows: lies as")]
    assert trees.problems({"arrays": {}}, 1, None)
