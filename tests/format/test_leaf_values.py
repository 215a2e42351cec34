"""Python leaves and keys as JSON: bit for bit there and back, and nothing else is taken."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.properties.strategies import quick
from treering._codec.documents import json_text, parse_json
from treering._format.index import ForeignKey, OpaqueLeaf
from treering._format.leaf_values import decode_key, decode_value, encode_key, encode_value
from treering.errors import CorruptError, FormatError, UnsupportedError

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
KEYS = st.recursive(
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
@given(KEYS)
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
