"""Structures as JSON and back, and key texts held against them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.indexes import keys_of
from tests.properties.strategies import quick
from treering._codec.documents import json_text, parse_json
from treering._format.index import MAX_LEVELS, Container, ForeignKey, Token
from treering._format.structure_text import (
    check_keys,
    decode_structure,
    encode_structure,
    escape_surrogates,
    unescape_surrogates,
)
from treering._values.keys import join_key
from treering.errors import Corrupt

NAMES = st.text(st.sampled_from("ab~/\ud800é0"), max_size=3)
DICT_KEYS = st.one_of(NAMES, st.integers(), st.booleans(), st.none(), st.builds(ForeignKey, st.just("m.C"), NAMES))


def containers(children: int) -> st.SearchStrategy[Container]:
    names = st.lists(NAMES, min_size=children, max_size=children, unique=True).map(tuple)
    keys = st.lists(DICT_KEYS, min_size=children, max_size=children, unique_by=(str, lambda key: key)).map(tuple)
    static = st.dictionaries(st.text(max_size=2), DICT_KEYS, max_size=2).map(lambda each: tuple(each.items()))
    numbers = tuple(range(children))
    return st.one_of(
        st.builds(Container, node=st.just("dict"), keys=keys),
        st.builds(Container, node=st.sampled_from(["list", "tuple"]), keys=st.just(numbers)),
        st.builds(Container, node=st.just("namedtuple"), keys=names, class_name=st.just("m.N")),
        st.builds(Container, node=st.just("other"), keys=names, class_name=st.just("m.O"), static=static),
    )


@st.composite
def structures(draw: st.DrawFn) -> tuple[list[Token], list[str]]:
    """Tokens of a tree and its key texts, the latter made the plain way."""
    tokens: list[Token] = []
    keys: list[str] = []

    def grow(path: tuple[str, ...], levels: int) -> None:
        children = draw(st.integers(0, 3)) if levels else -1
        if children < 0 or draw(st.integers(0, 2)) == 0:
            keys.append(join_key(path))
            if tokens and isinstance(tokens[-1], int) and draw(st.booleans()):
                tokens[-1] += 1
            else:
                tokens.append(1)
            return
        container = draw(containers(children))
        tokens.append(container)
        for key in container.keys:
            grow((*path, str(key)), levels - 1)

    grow((), 4)
    return tokens, keys


@quick(100)
@given(structures())
def test_structures_come_back(pair: tuple[list[Token], list[str]]) -> None:
    tokens, keys = pair
    text = json_text(encode_structure(tokens))
    assert text.isascii()
    assert decode_structure(parse_json(text, "it"), len(keys)) == tokens
    assert keys_of(tokens) == keys
    if len(set(keys)) == len(keys):
        check_keys(tokens, keys)


@quick(100)
@given(structures(), st.data())
def test_other_keys_and_structures_are_refused(pair: tuple[list[Token], list[str]], data: st.DataObject) -> None:
    tokens, keys = pair
    what = data.draw(st.sampled_from(["key", "more", "less", "token", "cut"]))
    other_tokens, other_keys = list(tokens), list(keys)
    match what:
        case "key" if keys:
            place = data.draw(st.integers(0, len(keys) - 1))
            other_keys[place] = data.draw(NAMES.filter(lambda name: name != keys[place]))
        case "more":
            other_keys.append("x")
        case "less" if keys:
            other_keys.pop()
        case "token":
            more: list[Token] = [1, 2, Container(node="dict", keys=())]
            other_tokens.append(data.draw(st.sampled_from(more)))
        case _:
            other_tokens.pop()
    with pytest.raises(Corrupt):
        check_keys(other_tokens, other_keys)


@quick(200)
@given(st.lists(st.text(st.characters()), max_size=3))
def test_key_texts_come_back_from_documents(path: list[str]) -> None:
    key = join_key(path)
    assert unescape_surrogates(escape_surrogates(key)) == key
    escape_surrogates(key).encode("utf-8")


def test_one_key_text_has_one_written_form() -> None:
    assert len({escape_surrogates(join_key([part])) for part in ("\ud800", "~ud800", "ud800", "~u", "/ud800")}) == 5


def chain(levels: int) -> list[Any]:
    return [Container(node="list", keys=(0,))] * levels + [1]


def test_levels_have_an_end() -> None:
    check_keys(chain(MAX_LEVELS), ["/".join("0" * MAX_LEVELS)])
    with pytest.raises(Corrupt, match="1024"):
        check_keys(chain(MAX_LEVELS + 1), ["/".join("0" * (MAX_LEVELS + 1))])


def test_keys_of_one_text_are_refused_wherever_they_are() -> None:
    two = Container(node="dict", keys=(5, "5"))
    with pytest.raises(Corrupt, match="same key"):
        check_keys([two, 2], ["5", "5"])
    with pytest.raises(Corrupt, match="same name"):
        decode_structure([{"node": "dict", "keys": ["a", "a"]}, 2], 2)
    with pytest.raises(Corrupt, match="same name"):
        decode_structure([{"node": "dict", "keys": [{"int": "1"}, {"bool": True}]}, 2], 2)


def test_equal_containers_are_made_once() -> None:
    layer = {"node": "dict", "keys": ["a", "b"]}
    tokens = decode_structure([{"node": "list", "length": 3}, layer, 2, layer, 2, layer, 2], 6)
    assert tokens[1] is tokens[3] is tokens[5]
    check_keys(tokens, [f"{number}/{name}" for number in range(3) for name in "ab"])
