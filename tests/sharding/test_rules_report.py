"""Partition rules that do not fit the keys: told once, or given to the caller; the same keys in every message."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import treering
from tests import meshes
from treering.errors import MismatchError, RulesUnmatchedWarning
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves
from treering.sharding import RulesReport, match_partition_rules

# As nnx names parameters: '/value' at the end of every key.
TREE = {"dense": {"kernel": {"value": jnp.ones((4, 2))}, "bias": {"value": jnp.ones(2)}}, "step": 3}


def mesh() -> Mesh:
    return meshes.line(2, axis="d")


def by_match(rules: Any, path: Path) -> Any:
    return match_partition_rules(rules, TREE)


def by_load(rules: Any, path: Path) -> Any:
    treering.save(path, TREE)
    return treering.load(path, shardings=rules, mesh=mesh())


def by_leaves(rules: Any, path: Path) -> Any:
    tree_serialize_leaves(path, TREE)
    return tree_deserialize_leaves(path, mesh(), partition_rules=rules)


DOORS = [by_match, by_load, by_leaves]


@pytest.mark.parametrize("door", DOORS)
def test_rules_that_fit_nothing_are_told_once(door: Callable[[Any, Path], Any], tmp_path: Path) -> None:
    rules = [(f"kernel$|{door.__name__}$", P("d")), ("nowhere", P("d")), (".*", P())]
    with pytest.warns(RulesUnmatchedWarning) as told:
        door(rules, tmp_path / "a")
    text = str(told[0].message)
    assert "'nowhere' matches no key" in text
    assert f"'kernel$|{door.__name__}$' matches no key" in text
    assert "nnx ends keys in '/value'" in text
    for key in ("dense/kernel/value", "dense/bias/value"):
        assert key in text
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        door(rules, tmp_path / "b")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "rules",
    [
        [(".*", P())],
        [("kernel", P("d")), ("bias", P())],
        [("kernel", P("d")), ("bias", P()), (".*", P())],
        [("kernel", P("d")), ("bias", P()), ("step", P())],
    ],
)
def test_rules_that_fit_are_not_told_of(door: Callable[[Any, Path], Any], rules: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        door(rules, tmp_path / "a")


def test_a_part_is_judged_by_all_keys(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", TREE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        treering.load(tmp_path / "a", shardings=[("kernel", P("d")), ("bias", P())], mesh=mesh(), only="dense/bias")


def test_the_report_can_be_asked_for(tmp_path: Path) -> None:
    rules = [("kernel$", P("d")), ("asked", P()), ("", P())]
    wanted = RulesReport(
        unmatched=("kernel$", "asked"),
        caught=("dense/bias/value", "dense/kernel/value"),
        hints=("nnx ends keys in '/value'",),
    )
    tree_serialize_leaves(tmp_path / "a", TREE)
    found: list[RulesReport] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        match_partition_rules(rules, TREE, report=found.append)
        tree_deserialize_leaves(tmp_path / "a", mesh(), partition_rules=rules, report=found.append)
    assert [sorted(each.caught) for each in found] == [list(wanted.caught)] * 2
    assert [(each.unmatched, each.hints) for each in found] == [(wanted.unmatched, wanted.hints)] * 2


@pytest.mark.parametrize("key", ["dense/kernel/value", "a/b/c"])
def test_errors_show_what_rules_match(key: str, tmp_path: Path) -> None:
    two = meshes.grid(2, 1, axes=("d", "e"))
    tree = {"dense": {"kernel": {"value": jnp.ones((4, 2))}}, "a/b": {"c": jnp.ones((4, 2))}}
    tree_serialize_leaves(tmp_path / "a", tree)
    for rules in (None, [("nothing", P())]):
        with pytest.raises(MismatchError) as caught:
            tree_deserialize_leaves(tmp_path / "a", two, partition_rules=rules)
        assert key in caught.value.differences
        match_partition_rules([(f"^{name}$", P()) for name in caught.value.differences], tree)
