"""The structure, the keys and the values of an index as JSON and back, and parts of them."""

from __future__ import annotations

import collections
import math
import struct
import time
import tracemalloc
import unicodedata
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

import treering
from tests.checkpoint.test_selection import TREE
from tests.format.indexes import keys_of
from tests.properties.strategies import quick
from treering._codec.documents import json_text, parse_json
from treering._format.columns import (
    check_keys,
    decode_structure,
    encode_structure,
    escape_surrogates,
    unescape_surrogates,
)
from treering._format.index import MAX_LEVELS, Container, ForeignKey, OpaqueLeaf, Token
from treering._format.leaf_values import decode_key, decode_value, encode_key, encode_value
from treering._format.selection import Selection, drop_leaves, select
from treering._format.structure import iter_runs, key_text
from treering._tree.flatten import flatten
from treering._tree.likeness import apply_renames
from treering._values.keys import join_key, split_key
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

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
    with pytest.raises(CorruptError):
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
    with pytest.raises(CorruptError, match="1024"):
        check_keys(chain(MAX_LEVELS + 1), ["/".join("0" * (MAX_LEVELS + 1))])


def test_a_key_that_is_far_longer_than_all_that_was_read_is_cut_before_it_is_shown() -> None:
    tokens = [Container(node="dict", keys=("\x01" * 1000,))] * 1000 + [1]
    tracemalloc.start()
    try:
        with pytest.raises(CorruptError, match=r"leaf 0 has the key 'a', the structure says '(\\x01){200}\.\.\.'$"):
            check_keys(tokens, ["a"])
        # Two texts of a million characters, and not their escapes, which are four times as long.
        assert tracemalloc.get_traced_memory()[1] < 3 << 20
    finally:
        tracemalloc.stop()


def test_keys_of_one_text_are_refused_wherever_they_are() -> None:
    two = Container(node="dict", keys=(5, "5"))
    with pytest.raises(CorruptError, match="same key"):
        check_keys([two, 2], ["5", "5"])
    with pytest.raises(CorruptError, match="same name"):
        decode_structure([{"node": "dict", "keys": ["a", "a"]}, 2], 2)
    with pytest.raises(CorruptError, match="same name"):
        decode_structure([{"node": "dict", "keys": [{"int": "1"}, {"bool": True}]}, 2], 2)


def test_equal_containers_are_made_once() -> None:
    layer = {"node": "dict", "keys": ["a", "b"]}
    tokens = decode_structure([{"node": "list", "length": 3}, layer, 2, layer, 2, layer, 2], 6)
    assert tokens[1] is tokens[3] is tokens[5]
    check_keys(tokens, [f"{number}/{name}" for number in range(3) for name in "ab"])


# -------------------------------------------------------------------------------------------------------- texts of keys

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
def test_texts_of_keys(key: Any, text: str) -> None:
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
def test_keys_come_back_whatever_the_container(tmp_path: Path, make: Any) -> None:
    tree = {"outer": make([((NEW, "é"), 1), (b"\xe9", {("ü",): 2})])}
    treering.save(tmp_path / "ckpt", tree)
    assert treering.load(tmp_path / "ckpt") == tree
    assert treering.load(tmp_path / "ckpt", like=tree) == tree
    text = "outer/('\\U00031350', '\\xe9')"
    with treering.open(tmp_path / "ckpt") as opened:
        assert list(opened) == flatten(tree).keys == [text, "outer/b'\\xe9'/('\\xfc',)"]
    assert treering.load(tmp_path / "ckpt", at=text) == 1


def test_lists_cannot_claim_more_children_together_than_there_are() -> None:
    # Each is told at once: all of them together would take memory by the square of their number.
    nodes: list[Any] = [*({"node": "list", "length": 50} for _ in range(100)), 10]
    with pytest.raises(CorruptError, match="token 2 of the structure is a list of 50 items; the tree has 10 for it"):
        decode_structure(nodes, 10)


def test_selection_and_structure_agree() -> None:
    tokens: list[Token] = [Container(node="dict", keys=((NEW,), "a")), 2]
    keys = keys_of(tokens)
    assert select(tokens, keys, at=None, only=keys[0]).keys == [keys[0]]
    assert select(tokens, keys, at=keys[0], only=None).leaves == [0]


@pytest.mark.parametrize("key", [frozenset({1}), (1, frozenset({2})), Pair(frozenset(), 1)], ids=repr)
def test_a_set_is_no_key(key: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"dict key is a frozenset: a set has no order.*sorted tuple") as caught:
        flatten({"a": {key: 1}})
    assert caught.value.path == ("a",)


def test_an_endless_tuple_is_no_key() -> None:
    key: Any = frozenset
    for _ in range(5_000):
        key = (key,)
    with pytest.raises(UnsupportedError, match="no text"):
        flatten({key: 1})


# ------------------------------------------------------------------------------------------------- parts of a structure

LAYERS = 5000
ONE: list[Token] = [Container(node="dict", keys=("b", "w")), 2]
STRUCTURE: list[Token] = [Container(node="list", keys=tuple(range(LAYERS))), *(ONE * LAYERS)]
KEYS = keys_of(STRUCTURE)


def test_two_thousand_exact_keys_are_looked_up() -> None:
    wanted = KEYS[::5]
    start = time.process_time()
    part = select(STRUCTURE, KEYS, at=None, only=wanted)
    assert time.process_time() - start < 1  # 10 s where each is compared with each
    assert list(part.keys) == wanted


def test_three_hundred_renamings_are_looked_up() -> None:
    renaming = {f"{layer}/w": f"{layer}/kernel" for layer in range(0, LAYERS, 5)} | {"7": "seven"}
    start = time.process_time()
    found = apply_renames(KEYS, renaming)
    assert time.process_time() - start < 1
    assert found == {wanted: saved for wanted, saved in renaming.items() if wanted != "7"} | {
        "7/b": "seven/b",
        "7/w": "seven/w",
    }


# ------------------------------------------------------------------------------------------ against a plain description


def test_a_selection_is_what_its_description_says() -> None:
    """For every key and branch: the leaves are those below it, the structure rebuilds, the keys are cut."""
    flat = flatten(TREE)
    branches = {"/".join(key.split("/")[:end]) for key in flat.keys for end in range(1, key.count("/") + 2)}
    for branch in sorted(branches):
        inside = [n for n, key in enumerate(flat.keys) if key == branch or key.startswith(f"{branch}/")]
        part = select(flat.tokens, flat.keys, at=branch, only=None)
        assert list(part.leaves) == inside
        above = split_key(branch)
        assert [above + split_key(key) for key in part.keys] == [split_key(flat.keys[n]) for n in inside]
        if "*" not in branch:
            kept = select(flat.tokens, flat.keys, at=None, only=branch)
            assert list(kept.leaves) == inside
            assert list(kept.keys) == [flat.keys[n] for n in inside]


def test_thousands_of_globs_and_leaves_take_no_square_of_time() -> None:
    tree = {f"layer{n}": {"kernel": n, "bias": n} for n in range(3000)}
    flat = flatten(tree)
    part = select(flat.tokens, flat.keys, at=None, only=[f"layer{n}/kernel" for n in range(60)])
    assert len(part.leaves) == 60
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    flat = flatten(deep)
    part = select(flat.tokens, flat.keys, at=None, only="/".join(["**", "*a*"] * 20))
    assert list(part.leaves) == [0]
    with pytest.raises(TreeringError):
        select(flat.tokens, flat.keys, at=None, only="/".join(["**", "b"] * 20))


FEW_NAMES = st.sampled_from(["a", "b/c", "", "~"])
SMALL_TREES = st.recursive(
    st.just(1), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(FEW_NAMES, inner, max_size=3), max_leaves=12
)


@given(tree=SMALL_TREES, data=st.data())
def test_the_structure_has_the_keys_that_stay(tree: Any, data: st.DataObject) -> None:
    flat = flatten(tree)
    dropped = {key for key in flat.keys if data.draw(st.booleans())}
    part = Selection(structure=flat.tokens, leaves=range(10, 10 + len(flat.keys)), keys=flat.keys)
    rest = drop_leaves(part, dropped)
    stay = [(number, key) for number, key in enumerate(flat.keys, 10) if key not in dropped]
    assert list(zip(rest.leaves, rest.keys, strict=True)) == stay
    heads = [token for token in rest.structure if isinstance(token, Container)]
    # Only of a leaf that is the whole tree nothing is left.
    if rest.structure:
        assert [above + name for above, names in iter_runs(rest.structure) for name in names] == rest.keys
    assert len(heads) == sum(isinstance(token, Container) for token in flat.tokens)


ANY_TEXT = st.text(st.characters())  # with halves of surrogate pairs
FLOATS = st.one_of(
    st.floats(),
    st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0]),
    st.sampled_from([0.0, -0.0, 5e-324, -5e-324, math.inf, -math.inf, math.nan, 1.7976931348623157e308]),
)
INTS = st.one_of(st.integers(), st.sampled_from([2**53, 2**53 + 1, -(2**53), -(2**53) - 1, 0, -1, 2**4000]))
VALUES = st.one_of(
    st.tuples(st.just("none"), st.none()),
    st.tuples(st.just("bool"), st.booleans()),
    st.tuples(st.just("int"), INTS),
    st.tuples(st.just("float"), FLOATS),
    st.tuples(st.just("complex"), st.builds(complex, FLOATS, FLOATS)),
    st.tuples(st.just("str"), ANY_TEXT),
    st.tuples(st.just("bytes"), st.binary()),
    st.tuples(st.just("bytearray"), st.binary().map(bytearray)),
    st.tuples(st.just("opaque"), st.builds(OpaqueLeaf, class_name=st.text(), text=ANY_TEXT)),
)
VALUE_KEYS = st.recursive(
    st.one_of(
        ANY_TEXT,
        st.none(),
        st.booleans(),
        INTS,
        FLOATS,
        st.binary(),
        st.builds(ForeignKey, class_name=st.text(), text=ANY_TEXT),
    ),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


def bits(value: Any) -> Any:
    """A value that is equal only where every bit is."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return (bits(value.real), bits(value.imag))
    if isinstance(value, tuple):
        return tuple(map(bits, value))
    return (type(value), value)


def through_json(node: Any) -> Any:
    text = json_text(node)
    text.encode("ascii")
    return parse_json(text, "it")


@quick(400)
@given(VALUES)
def test_values_come_back_bit_for_bit(pair: tuple[str, Any]) -> None:
    kind, value = pair
    assert bits(decode_value(kind, through_json(encode_value(kind, value)), "it")) == bits(value)


@quick(400)
@given(VALUE_KEYS)
def test_keys_come_back_bit_for_bit(key: Any) -> None:
    assert bits(decode_key(through_json(encode_key(key)), "it")) == bits(key)


@quick(400)
@given(
    kind=st.sampled_from(["none", "bool", "int", "float", "complex", "str", "bytes", "bytearray", "opaque"]),
    node=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(["base64", "text", "class", "int", "tuple", "float", "x"]), inner, max_size=2
            ),
        ),
        max_leaves=4,
    ),
)
def test_anything_else_is_refused_or_has_one_meaning(kind: str, node: Any) -> None:
    for decode, encode in (
        (lambda: decode_value(kind, node, "it"), lambda value: encode_value(kind, value)),
        (lambda: decode_key(node, "it"), encode_key),
    ):
        try:
            value = decode()
        except (CorruptError, FormatError):
            continue
        again = encode(value)
        assert bits(decode_value(kind, again, "it") if encode is not encode_key else decode_key(again, "it")) == bits(
            value
        )


def test_numbers_that_every_reader_keeps_stand_there_as_numbers() -> None:
    assert encode_value("int", 2**53) == 2**53
    assert encode_value("int", 2**53 + 1) == hex(2**53 + 1)
    assert encode_value("float", 0.1) == 0.1
    assert encode_value("float", math.nan) == "nan"
    assert encode_value("complex", complex(1, -math.inf)) == [1.0, "-inf"]


@pytest.mark.parametrize(
    ("kind", "node"),
    [
        ("int", "0x0"),
        ("int", "0x01"),
        ("int", "0xFF"),
        ("int", " 0x1"),
        ("int", "0x1\n"),
        ("int", "1_0"),
        ("int", "-0x"),
        ("float", "1.0"),
        ("float", "NaN"),
        ("float", "infinity"),
        ("float", "nan:7ff0000000000000"),
        ("float", "nan:7ff80000000000001"),
        ("float", True),
        ("complex", [1.0, 2.0, 3.0]),
        ("complex", "1+2j"),
        ("bytes", "AAA"),
        ("bytes", "AA A"),
        ("bytes", "é"),
        ("str", {"base64": 1}),
        ("opaque", {"class": "a"}),
        ("opaque", {"text": "a"}),
        ("opaque", "a"),
    ],
)
def test_forms_that_no_writer_has(kind: str, node: Any) -> None:
    with pytest.raises(CorruptError, match="it"):
        decode_value(kind, node, "it")


def test_keys_that_are_too_much() -> None:
    deep: Any = ()
    for _ in range(40):
        deep = (deep,)
    with pytest.raises(UnsupportedError, match="32 levels"):
        encode_key(deep)
    with pytest.raises(UnsupportedError, match="bits"):
        encode_key(2**5000)
    with pytest.raises(UnsupportedError, match="set"):
        encode_key(frozenset())
