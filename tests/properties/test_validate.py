"""validate_serializable tells the truth about to_bytes, for any tree."""

from __future__ import annotations

import fractions
from typing import Any

import numpy as np
import pytest
from flax.core import freeze
from hypothesis import example, given
from hypothesis import strategies as st

from tests.properties.strategies import leaves, quick, trees
from treering import serialization
from treering.errors import TreeringError

MARKER = "__msgpack_chunked_array__"


class Text(str):
    """A subclass that msgpack's strict mode refuses."""

    __slots__ = ()


UNWRITABLE: list[Any] = [
    {1, 2},
    fractions.Fraction(1, 2),
    2**64,
    -(2**63) - 1,
    np.array(["text"]),
    np.array([b"bytes"]),
    np.zeros(2, "i4,f4"),
    np.zeros(1, "V3"),
    np.array([None]),
    np.str_("a"),
    Text("a"),
    len,
    int,
    range(2),
    {1: 0, "1": 1},
    {MARKER: 1},
]
_ANY_LEAF = st.one_of(leaves(big_endian=True, keys=True), leaves(), st.sampled_from(UNWRITABLE))


@quick(200)
@given(trees(_ANY_LEAF, max_leaves=6))
def test_it_says_yes_exactly_when_to_bytes_works(tree: Any) -> None:
    valid, issues = serialization.validate_serializable(tree)
    assert valid == (not issues)
    assert all(isinstance(issue, str) and issue for issue in issues)
    if valid:
        serialization.from_bytes(tree, serialization.to_bytes(tree))
    else:
        with pytest.raises(TreeringError):
            serialization.to_bytes(tree)


@pytest.mark.parametrize("number", range(len(UNWRITABLE)))
def test_each_unwritable_leaf_is_an_issue_and_an_error_with_its_path(number: int) -> None:
    tree = {"fine": 1, "outer": [0, UNWRITABLE[number]]}
    valid, issues = serialization.validate_serializable(tree)
    assert not valid
    assert len(issues) == 1
    assert "outer/1" in issues[0]
    with pytest.raises(TreeringError) as caught:
        serialization.to_bytes(tree)
    assert caught.value.path is not None
    assert caught.value.path[:2] == ("outer", "1")


@quick(60)
@given(st.lists(st.booleans(), max_size=8))
def test_all_issues_are_told_at_once(which: list[bool]) -> None:
    tree = {f"leaf{number}": {1, 2} if bad else 1 for number, bad in enumerate(which)}
    valid, issues = serialization.validate_serializable(tree)
    assert valid == (not any(which))
    assert len(issues) == sum(which)
    for number, bad in enumerate(which):
        assert bad == any(f"leaf{number}" in issue for issue in issues)


@quick(80)
@given(trees(_ANY_LEAF, max_leaves=6))
@example(tree=freeze({"a": {1: 0, "1": 1}}))
def test_the_information_agrees(tree: Any) -> None:
    info = serialization.get_serialization_info(tree)
    assert info["is_serializable"] == serialization.validate_serializable(tree)[0]
