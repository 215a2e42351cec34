"""Strict JSON: what is read, what is refused, and that whatever check_json takes comes back as it was."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.strategies import quick
from treering._codec.documents import MAX_NESTING, check_json, json_text, member, parse_json
from treering.errors import Corrupt, Unsupported

JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner)),
    max_leaves=10,
)


def types(value: Any) -> Any:
    """The value with the type of each part beside it, so that 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return {key: types(each) for key, each in value.items()}
    if isinstance(value, list):
        return [types(each) for each in value]
    return (type(value), math.copysign(1, value) if isinstance(value, float) else None, value)


@quick(200)
@given(JSON)
def test_what_is_checked_comes_back(value: Any) -> None:
    check_json(value, "it")
    text = json_text(value)
    assert text.isascii()
    assert types(parse_json(text, "it")) == types(value)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def holding_itself() -> Any:
    value: dict[str, Any] = {}
    value["twice"] = [value, value]
    return value


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((1,), "it is a tuple"),
        ({"a": [1, (2,)]}, "it['a'][1] is a tuple"),
        ({1: 2}, "it has the key 1"),
        ({"a": {None: 2}}, "it['a'] has the key None"),
        ({10**5000: 2}, "a huge int"),
        (math.nan, "it is nan"),
        ([math.inf], "it[0] is inf"),
        (np.float32(1), "it is a float32"),
        (np.float64(1), "it is a float64"),
        (np.int64(1), "it is an int64"),
        (np.arange(3), "it is a ndarray"),
        (b"x", "it is a bytes"),
        ({"s": {1, 2}}, "it['s'] is a set"),
        (1j, "it is a complex"),
        (10**5000, "it is an int of 16610 bits"),
        (nested(MAX_NESTING + 1), "nested more than 100 levels"),
        (holding_itself(), "holds itself"),
    ],
    ids=range(17),
)
def test_what_would_come_back_as_something_else_is_refused(value: Any, words: str) -> None:
    with pytest.raises(Unsupported) as error:
        check_json(value, "it")
    assert words in str(error.value)
    assert len(str(error.value)) < 500


def test_the_deepest_that_is_taken_is_read_too() -> None:
    check_json(nested(MAX_NESTING), "it")
    assert parse_json(json_text(nested(MAX_NESTING)), "it") == nested(MAX_NESTING)


def test_the_same_list_twice_is_no_circle() -> None:
    shared = [1]
    check_json({"a": shared, "b": [shared, shared]}, "it")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "{",
        "[1,]",
        '{"a":1,}',
        "NaN",
        "-Infinity",
        "1e999",
        "01",
        "0x1",
        "'a'",
        '"\x00"',
        '{"a":1}{}',
        "nul",
        "+1",
        ".5",
    ],
)
def test_no_json(text: str) -> None:
    with pytest.raises(Corrupt, match="it is not JSON"):
        parse_json(text, "it")


def test_members_that_stand_twice_are_named() -> None:
    with pytest.raises(Corrupt, match="'b' is twice"):
        parse_json('[{"a": {"b": 1, "c": 2, "b": 1}}]', "it")


@pytest.mark.parametrize(
    ("node", "name", "kind"),
    [
        ([], "a", int),
        ({}, "a", int),
        ({"a": True}, "a", int),
        ({"a": 1.0}, "a", int),
        ({"a": 1}, "a", float),
        (None, "a", int),
    ],
)
def test_members_of_another_type(node: Any, name: str, kind: type) -> None:
    with pytest.raises(Corrupt, match="it"):
        member(node, name, kind, "it")
