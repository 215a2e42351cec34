"""Listings laid out as rows: totals, folding, globs, depth."""

from __future__ import annotations

import sys
import time
from functools import reduce
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.view.trees import array, chain, small
from treering._values.keys import GlobSet, join_key
from treering._view.nodes import children_of, is_branch, record_of
from treering._view.rows import DEEPEST, TreeLayout, lay_out


def keys_of(layout: TreeLayout) -> list[str]:
    path: list[str] = []
    keys = []
    for row in layout.rows:
        del path[max(row.depth - 1, 0) :]
        if row.depth:
            path.append(row.name)
        keys.append(join_key(path))
    return keys


def leaves_of(tree: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    if not is_branch(tree):
        return [(path, tree)]
    return [leaf for name, node in children_of(tree) for leaf in leaves_of(node, (*path, name))]


def test_every_place_has_a_row_and_every_branch_its_totals() -> None:
    layout = lay_out(small())
    rows = dict(zip(keys_of(layout), layout.rows, strict=True))
    assert list(rows)[:4] == ["", "params", "params/dense", "params/dense/kernel"]
    assert rows["params"].totals.parameters == 6 + 3 + 3
    assert rows["params"].totals.nbytes == 24 + 6 + 12
    assert rows["names"].totals.leaves == 4
    assert rows["names"].totals.arrays == 0
    assert rows["opt/0"].totals.leaves == 0
    assert layout.everything == layout.kept == rows[""].totals
    assert layout.everything.leaves == 9


def test_depth_folds_and_keeps_the_totals() -> None:
    layout = lay_out(small(), depth=1)
    assert keys_of(layout) == ["", "params", "opt", "names", "step"]
    assert [row.closed for row in layout.rows] == [None, "depth", "depth", "depth", None]
    assert layout.rows[1].totals.parameters == 12
    assert layout.kept == layout.everything
    alone = lay_out(small(), depth=0)
    assert (len(alone.rows), alone.rows[0].closed) == (1, "depth")


@pytest.mark.parametrize(
    ("globs", "wanted"),
    [
        (["**/kernel"], ["params/dense/kernel", "opt/mu/dense/kernel"]),
        (["params"], ["params/dense/kernel", "params/dense/bias", "params/norm/scale"]),
        (["params/*/b*", "step"], ["params/dense/bias", "step"]),
        (["names/2"], ["names/2/0", "names/2/1"]),
        (["kernel"], []),
    ],
)
def test_globs_keep_leaves_and_whole_branches(globs: list[str], wanted: list[str]) -> None:
    layout = lay_out(small(), globs=globs)
    pairs = zip(keys_of(layout), layout.rows, strict=True)
    assert [key for key, row in pairs if not is_branch(row.node)] == wanted
    assert layout.kept.leaves == len(wanted)
    assert layout.everything.leaves == 9


def test_a_kept_empty_branch_keeps_its_row() -> None:
    assert keys_of(lay_out(small(), globs=["opt/0"])) == ["", "opt", "opt/0"]
    assert keys_of(lay_out(small(), globs=["opt/0"], depth=1)) == []


def test_globs_count_below_the_fold_too() -> None:
    layout = lay_out(small(), globs=["**/kernel"], depth=1)
    assert keys_of(layout) == ["", "params", "opt"]
    assert [row.totals.leaves for row in layout.rows] == [2, 1, 1]


def test_a_file_that_is_one_leaf() -> None:
    layout = lay_out(array(4))
    assert [(row.depth, row.name) for row in layout.rows] == [(0, "")]
    assert layout.kept.parameters == 4


trees = st.recursive(
    st.one_of(st.integers(0, 9), st.none(), st.builds(array, st.integers(0, 3))),
    lambda below: st.one_of(st.dictionaries(st.text("ab", max_size=2), below, max_size=3), st.lists(below, max_size=2)),
    max_leaves=12,
)


@given(
    trees,
    st.lists(st.lists(st.sampled_from(["**", "*", "a", "b*", "0"]), max_size=3).map("/".join), max_size=2),
    st.integers(0, 4),
)
def test_totals_agree_with_a_plain_walk(tree: Any, globs: list[str], depth: int) -> None:
    layout = lay_out(tree, globs=globs, depth=depth)

    together = GlobSet(globs)

    def is_kept(path: tuple[str, ...]) -> bool:
        heads = [path[:length] for length in range(len(path) + 1)]
        return not globs or any(together.accepted(reduce(together.step, head, together.start)) for head in heads)

    leaves = leaves_of(tree)
    kept = [(path, leaf) for path, leaf in leaves if is_kept(path)]
    assert layout.everything.leaves == len(leaves)
    assert layout.kept.leaves == len(kept)
    assert layout.kept.nbytes == sum(record_of(leaf).nbytes for _, leaf in kept)
    shown = [row for row in layout.rows if not is_branch(row.node)]
    assert len(shown) == sum(len(path) <= depth for path, _ in kept)
    if layout.rows:
        assert layout.rows[0].totals == layout.kept


def test_depth_beyond_the_recursion_limit() -> None:
    levels = 30 * sys.getrecursionlimit()
    began = time.process_time()
    layout = lay_out(chain(levels), globs=["**/leaf"], depth=DEEPEST)
    assert time.process_time() - began < 15
    assert layout.kept.leaves == levels
    assert max(row.depth for row in layout.rows) == DEEPEST
    assert [row.closed for row in layout.rows if row.closed] == ["depth"]


def test_a_long_list_of_values_is_one_row() -> None:
    tree = {"words": ["a"] * 101, "few": [1, 2], "arrays": [array(1)] * 101}
    layout = lay_out(tree)
    rows = dict(zip(keys_of(layout), layout.rows, strict=True))
    assert rows["words"].closed == "long"
    assert rows["words"].totals.leaves == rows["words"].totals.nbytes == 101
    assert "words/0" not in rows
    assert {"few/1", "arrays/100"} <= set(rows)
    assert layout.everything == layout.kept
    assert keys_of(lay_out(tree, globs=["words/5"])) == ["", "words", "words/5"]
    assert lay_out(["a"] * 101).kept.leaves == 101
