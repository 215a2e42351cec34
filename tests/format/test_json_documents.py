"""Strict JSON, keys that are chosen to collide, and documents with a digest in their first line."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import treering
from tests.checkpoint.documents import document_of, signed
from tests.format.indexes import index_of
from tests.properties.strategies import quick
from torture.quadratic import colliding_pairs
from treering._codec.documents import (
    MAX_NESTING,
    SignedForm,
    check_json,
    check_name,
    check_texts,
    collide,
    json_text,
    member,
    parse_json,
)
from treering._format.columns import decode_checksums, decode_container, encode_checksums, read_free_json
from treering._format.document import check_chunks, parse_index
from treering._format.index import Chunks, LeafType
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

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
    with pytest.raises(UnsupportedError) as error:
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
    with pytest.raises(CorruptError, match="it is not JSON"):
        parse_json(text, "it")


def test_members_that_stand_twice_are_named() -> None:
    with pytest.raises(CorruptError, match="'b' is twice"):
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
    with pytest.raises(CorruptError, match="it"):
        member(node, name, kind, "it")


# ----------------------------------------------------------------------------------------------------- keys of one hash

INTS = [number * (2**61 - 1) for number in range(1, 40_001)]
PAIRS = list(colliding_pairs(20_000))


def test_the_pairs_collide() -> None:
    assert len(set(map(hash, PAIRS[:100]))) == 1
    assert len(set(map(str, PAIRS))) == len(PAIRS)  # a set of the pairs themselves takes quadratic time


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (INTS, True),
        (PAIRS, True),
        (INTS[:64], False),
        (INTS[:65], True),
        (INTS[:1] * 1000, False),
        ([2.0**power for power in range(-1000, 1000)], False),
        (list(range(-(2**15), 2**15)), False),
        ([(a, b) for a in range(150) for b in range(150)], False),
        ([number << 40 for number in range(50_000)], False),
        (["k"] * 100, False),
    ],
)
def test_only_chosen_values_collide(values: list[Any], *, found: bool) -> None:
    start = time.process_time()
    assert collide(values) is found
    assert time.process_time() - start < 1


def test_an_index_of_such_keys_is_refused_at_once(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {5: None})
    document = document_of(tmp_path / "ckpt")
    for keys in (
        [{"int": hex(number)} for number in INTS],
        [{"tuple": [{"int": hex(one) if one else "0"} for one in pair]} for pair in PAIRS],
    ):
        document["structure"] = [{"node": "dict", "keys": keys}, len(keys)]
        document["leaves"] = {"key": [f"k{number}" for number in range(len(keys))], "type": [0] * len(keys)}
        document["values"] = [None] * len(keys)
        data = signed(document)
        start = time.process_time()
        with pytest.raises(CorruptError, match="collide"):
            parse_index(data)
        assert time.process_time() - start < 3


def test_leaves_that_are_cut_at_places_of_one_hash_are_refused_at_once() -> None:
    parts, modulus = 16, 2**61 - 1
    columns: dict[str, list[Any]] = {name: [] for name in ("leaf", "box", "file", "offset", "nbytes", "block")}
    for leaf, turns in enumerate(itertools.combinations_with_replacement(range(4), parts - 1)):
        # Each place is another number of the same hash, and so is each length.
        places = [0, *(number + 1 + turn * modulus for number, turn in enumerate(turns)), parts + 3 * modulus]
        for start, stop in itertools.pairwise(places):
            row = {"leaf": leaf, "box": ((start, stop),), "file": leaf, "offset": 4096, "nbytes": stop - start}
            for name, value in {**row, "block": 1 << 20}.items():
                columns[name].append(value)
    keys = [f"k{number}" for number in range(columns["leaf"][-1] + 1)]
    index = index_of(keys, [LeafType(kind="jax", dtype="int8", shape=(0,))], [0] * len(keys), [])
    long = LeafType(kind="jax", dtype="int8", shape=(parts + 3 * modulus,))
    begun = time.process_time()
    with pytest.raises(CorruptError, match="ways to cut leaves collide"):
        check_chunks(dataclasses.replace(index, types=[long], chunks=Chunks(**columns)))
    assert time.process_time() - begun < 1


def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="collide"):
        treering.save(tmp_path / "ckpt", dict.fromkeys(INTS[:100], 1))
    assert not (tmp_path / "ckpt" / "treering.json").exists()
    treering.save(tmp_path / "ckpt", dict.fromkeys(INTS[:64], 1))
    assert treering.load(tmp_path / "ckpt") == dict.fromkeys(INTS[:64], 1)


# ---------------------------------------------------------------------------------------------- documents with a digest

FORM = SignedForm(member="note", version=2, name="the note", hint="write it again")
DATA = FORM.encode([("a", [1, 2]), ("b", {"c": "é"})])


def test_a_member_a_line() -> None:
    assert DATA.decode().splitlines()[1:] == ['"a": [1,2],', '"b": {"c":"\\u00e9"}}']
    assert json.loads(DATA)["note"] == 2
    assert FORM.read(DATA, lambda document: document["b"]) == {"c": "é"}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("place", range(len(DATA)))
def test_every_byte_counts(place: int) -> None:
    bad = DATA[:place] + bytes([DATA[place] ^ 1]) + DATA[place + 1 :]
    assert not FORM.is_whole(bad)
    with pytest.raises(TreeringError):
        FORM.read(bad, lambda document: document)


def test_another_version_is_whole_but_not_read() -> None:
    newer = SignedForm(member="note", version=3, name="the note", hint="").encode([("a", 1)])
    assert FORM.is_whole(newer)
    with pytest.raises(FormatError, match="the note is of version 3; this treering reads version 2"):
        FORM.read(newer, lambda document: document)
    other = SignedForm(member="letter", version=2, name="the letter", hint="").encode([])
    assert not FORM.is_whole(other)


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (CorruptError("too short"), "the note contradicts itself: too short; write it again"),
        (CorruptError("the note is odd", hint="smile"), "the note is odd; smile"),
        (FormatError("of a new kind"), "the note: of a new kind"),
        (UnsupportedError("of a new kind"), "the note: of a new kind"),
    ],
    ids=range(4),
)
def test_what_its_reader_finds_is_said_of_the_document(error: TreeringError, shown: str) -> None:
    def read(_: Any) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        FORM.read(DATA, read)
    assert str(caught.value) == shown


def test_parts() -> None:
    table = array("Q", [0, 1, 2**64 - 1])
    assert decode_checksums(encode_checksums(table)) == table
    assert check_texts(["a"], "the list") == ["a"]
    for broken in (lambda: check_texts(["a", 1], "the list"), lambda: check_name(re.compile("a"), "b", "it")):
        with pytest.raises(CorruptError):
            broken()
    assert read_free_json({"a": {"b": [1]}}, "a", "it") == {"b": [1]}
    with pytest.raises(CorruptError):
        read_free_json({"a": [1]}, "a", "it")


def test_no_other_container_may_have_its_class() -> None:
    head = {"node": "other", "class": "treering.checkpoint.EachStates", "fields": ["states"], "static": {}}
    for odd in (head, {**head, "node": "each", "class": "a.B"}, {**head, "node": "namedtuple"}):
        with pytest.raises(CorruptError, match="its class is"):
            decode_container(odd, "token 0", 1)
