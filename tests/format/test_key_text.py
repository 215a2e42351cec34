"""The text of a key is the same whatever Python thinks is printable, and every part of the program uses the same."""

from __future__ import annotations

import collections
import math
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import treering
from tests.format.indexes import keys_of
from treering._format.index import Container, ForeignKey, Token
from treering._format.selection import select
from treering._format.structure import key_text
from treering._tree.flatten import flatten
from treering.errors import Unsupported

NEW = "\U00031350"  # a letter since Unicode 15: Python 3.11's repr escapes it, that of 3.13 does not


class Pair(NamedTuple):
    """A namedtuple."""

    a: Any
    b: Any


class Named:
    """A key whose text holds the repr of another text."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return f"Named({self.name!r})"


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("é/~" + NEW, "é/~" + NEW),
        (5, "5"),
        (True, "True"),
        (None, "None"),
        (1e16, "1e+16"),
        (-0.0, "-0.0"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (b"'\xe9\n", 'b"\'\\xe9\\n"'),
        ((), "()"),
        (("é", NEW, "it's"), "('\\xe9', '\\U00031350', \"it's\")"),
        (((1,), b"k", None), "((1,), b'k', None)"),
        (("\ud800",), "('\\ud800',)"),
        (ForeignKey("m.C", "é"), "é"),
    ],
    ids=ascii,
)
def test_texts(key: Any, text: str) -> None:
    assert key_text(key) == text


def test_what_repr_shows_does_not_matter() -> None:
    tree: dict[Any, Any] = {(NEW,): 1, Pair(NEW, 1): 2, Named(NEW): 3, (Pair("é", 1), "x"): 4}
    assert flatten(tree).keys == [
        "('\\U00031350',)",
        "Pair(a='\\U00031350', b=1)",
        "Named('\\U00031350')",
        "(Pair(a='\\xe9', b=1), 'x')",
    ]
    assert unicodedata.category(NEW) in ("Lo", "Cn")  # the premise: versions of Python differ


def test_a_key_in_a_tuple_that_files_do_not_hold_makes_all_of_it_text() -> None:
    (container, _) = flatten({(Pair(1, 2), "x"): 1}).tokens
    assert isinstance(container, Container)
    assert container.keys == (ForeignKey("builtins.tuple", "(Pair(a=1, b=2), 'x')"),)


@pytest.mark.parametrize("make", [dict, collections.OrderedDict])
def test_they_come_back_whatever_the_container(tmp_path: Path, make: Any) -> None:
    tree = {"outer": make([((NEW, "é"), 1), (b"\xe9", {("ü",): 2})])}
    treering.save(tmp_path / "ckpt", tree)
    assert treering.load(tmp_path / "ckpt") == tree
    assert treering.load(tmp_path / "ckpt", like=tree) == tree
    text = "outer/('\\U00031350', '\\xe9')"
    with treering.open(tmp_path / "ckpt") as opened:
        assert list(opened) == flatten(tree).keys == [text, "outer/b'\\xe9'/('\\xfc',)"]
    assert treering.load(tmp_path / "ckpt", at=text) == 1


def test_selection_and_structure_agree() -> None:
    tokens: list[Token] = [Container(node="dict", keys=((NEW,), "a")), 2]
    keys = keys_of(tokens)
    assert select(tokens, keys, at=None, only=keys[0]).keys == [keys[0]]
    assert select(tokens, keys, at=keys[0], only=None).leaves == [0]


@pytest.mark.parametrize("key", [frozenset({1}), (1, frozenset({2})), Pair(frozenset(), 1)], ids=repr)
def test_a_set_is_no_key(key: Any) -> None:
    with pytest.raises(Unsupported, match=r"dict key is a frozenset: a set has no order.*sorted tuple") as caught:
        flatten({"a": {key: 1}})
    assert caught.value.path == ("a",)


def test_an_endless_tuple_is_no_key() -> None:
    key: Any = frozenset
    for _ in range(5_000):
        key = (key,)
    with pytest.raises(Unsupported, match="no text"):
        flatten({key: 1})
