"""The values of Python leaves, and keys that are no text, as JSON that gives them back bit for bit.

``docs/spec/checkpoint.md`` has the table.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import math
import re
import struct
from typing import Any, Final, TypeVar

from treering._codec.documents import member, show
from treering._format.index import ARRAY_KINDS, LIMIT, PYTHON_KINDS, ForeignKey, LeafType, OpaqueLeaf
from treering._values.dtypes import lookup
from treering._values.human import pluralize
from treering.errors import CorruptError, FormatError, UnsupportedError

_Named = TypeVar("_Named", ForeignKey, OpaqueLeaf)

_EXACT_INT: Final = 1 << 53
"""Numbers up to here are the same in every JSON reader."""
_HEX: Final = re.compile(r"-?0x[1-9a-f][0-9a-f]*")
_DECIMAL: Final = re.compile(r"0|-?[1-9][0-9]{0,15}")
_HEX_FLOAT: Final = re.compile(r"-?0x[01]\.[0-9a-f]{1,13}p[+-][0-9]{1,4}")
_PLAIN_NAN: Final = 0x7FF8_0000_0000_0000
_NAN: Final = re.compile(r"nan(:[0-9a-f]{16})?")
# A key is nested no deeper than this, so that a plain recursion over it is safe.
_KEY_LEVELS: Final = 32
_KEY_FORMS: Final = frozenset({"base64", "bool", "none", "int", "float", "bytes", "tuple"})
# str() of longer ints is refused by Python, and such a key is no name for anything.
_KEY_BITS: Final = 4096
_MOST_AXES: Final = 64
_LARGE: Final = frozenset({"str", "bytes", "bytearray"})
_KEY_DTYPES: Final = frozenset({"uint8", "uint16", "uint32", "uint64"})
# Items of a key of each implementation that jax brings along; each is a uint32.
_KEY_ITEMS: Final = {"threefry2x32": 2, "rbg": 4, "unsafe_rbg": 4}


def to_base64(data: bytes) -> str:
    """Return bytes as base64 text, with padding.

    Example:
        >>> to_base64(b"tree")
        'dHJlZQ=='
    """
    return base64.b64encode(data).decode("ascii")


def from_base64(text: str, what: str) -> bytes:
    """Return the bytes of a base64 text.

    Raises:
        CorruptError: it is not base64.

    Example:
        >>> from_base64("dHJlZQ==", "the note")
        b'tree'
    """
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise CorruptError(f"{what} is not base64: {error}") from None


def encode_value(kind: str, value: Any) -> Any:
    """Return a Python leaf as JSON.

    Args:
        kind: one of ``PYTHON_KINDS``.
        value: the leaf; an ``OpaqueLeaf`` for an opaque one.

    Example:
        >>> encode_value("int", 2**60), encode_value("float", float("-inf")), encode_value("bytes", b"tree")
        ('0x1000000000000000', '-inf', 'dHJlZQ==')
    """
    match kind:
        case "none" | "bool":
            return value
        case "int":
            return value if -_EXACT_INT <= value <= _EXACT_INT else hex(value)
        case "float":
            return _float_form(value)
        case "complex":
            return [_float_form(value.real), _float_form(value.imag)]
        case "str":
            return _text_form(value)
        case "bytes" | "bytearray":
            return to_base64(bytes(value))
        case _:
            return {"class": value.class_name, "text": _text_form(value.text)} | _digest_member(value)


def decode_value(kind: str, node: Any, what: str) -> Any:
    """Return the Python leaf that `encode_value` wrote.

    Raises:
        CorruptError: ``node`` is no form of this kind.

    Example:
        >>> decode_value("int", "0x1000000000000000", "leaf 'n'") == 2**60
        True
    """
    found: Any = None
    match kind, node:
        case "int", _:
            found = _int_of(node)
        case "float", _:
            found = _float_of(node)
        case ("none", None) | ("bool", bool()):
            return node
        case "complex", [first, second]:
            parts = _float_of(first), _float_of(second)
            found = None if None in parts else complex(*parts)  # type: ignore[arg-type]
        case "str", _:
            return _text_of(node, what)
        case (("bytes" | "bytearray"), str()):
            data = from_base64(node, what)
            return data if kind == "bytes" else bytearray(data)
        case "opaque", _:
            return _decode_named(OpaqueLeaf, node, what)
    if found is None:
        raise CorruptError(f"{what} is no {kind}")
    return found


def encode_key(key: Any, levels: int = _KEY_LEVELS) -> Any:
    """Return a dict key, or the value of a static field, as JSON.

    Raises:
        UnsupportedError: a tuple nested more than 32 levels deep, or an int of more than 4,096 bits.

    Example:
        >>> encode_key("a"), encode_key(5), encode_key((1.5, None))
        ('a', {'int': '5'}, {'tuple': [{'float': '0x1.8000000000000p+0'}, {'none': None}]})
    """
    kind = type(key)
    if kind is str:
        return _text_form(key)
    if kind is bool or key is None:
        return {"none" if key is None else "bool": key}
    if kind is int:
        if key.bit_length() > _KEY_BITS:
            raise UnsupportedError(f"a key of {pluralize(key.bit_length(), 'bits')} cannot be stored")
        return {"int": str(key) if -_EXACT_INT < key < _EXACT_INT else hex(key)}
    if kind is float:
        return {"float": key.hex() if math.isfinite(key) else _float_form(key)}
    if kind is bytes:
        return {"bytes": to_base64(key)}
    if kind is tuple:
        if not levels:
            raise UnsupportedError(f"a key of tuples nested more than {_KEY_LEVELS} levels deep cannot be stored")
        return {"tuple": [encode_key(item, levels - 1) for item in key]}
    if kind is ForeignKey:
        return {"text": _text_form(key.text), "class": key.class_name} | _digest_member(key)
    raise UnsupportedError(f"a key or static field of type {kind.__name__} cannot be stored")


def decode_key(node: Any, what: str, levels: int = _KEY_LEVELS) -> Any:
    """Return the key that `encode_key` wrote.

    Raises:
        CorruptError: ``node`` is no form of a key.
        FormatError: it is of a form that this version does not know.

    Example:
        >>> decode_key({"tuple": [{"int": "5"}, "a"]}, "a key")
        (5, 'a')
    """
    if type(node) is str:
        return node
    if type(node) is not dict or not node:
        raise CorruptError(f"{what} is neither text nor an object that says its type")
    if "text" in node:
        return _decode_named(ForeignKey, node, what)
    if not (known := [form for form in node if form in _KEY_FORMS]):
        raise FormatError(f"{what} is of the unknown form {next(iter(node))[:60]!r}", hint="use a newer treering")
    return _typed_key(known, node[known[-1]], what, levels)


def _digest_member(value: ForeignKey | OpaqueLeaf) -> dict[str, str]:
    return {} if value.digest is None else {"digest": value.digest}


def _decode_named(cls: type[_Named], node: dict[str, Any], what: str) -> _Named:
    name, text = member(node, "class", str, what), _text_of(node.get("text"), what)
    return cls(name, text, member(node, "digest", str, what) if "digest" in node else None)


def _typed_key(forms: list[str], content: Any, what: str, levels: int) -> Any:
    found: int | float | None = None
    match forms, content:
        case ["base64"], str():
            return _text_of({"base64": content}, what)
        case (["bool"], bool()) | (["none"], None):
            return content
        case ["int"], str() if len(content) <= _KEY_BITS // 4 + 3:
            found = int(content) if _DECIMAL.fullmatch(content) else _int_of(content)
        case ["float"], str():
            with contextlib.suppress(OverflowError):
                found = float.fromhex(content) if _HEX_FLOAT.fullmatch(content) else _float_of(content)
        case ["bytes"], str():
            return from_base64(content, what)
        case ["tuple"], list() if levels:
            return tuple(decode_key(item, what, levels - 1) for item in content)
    if found is None:
        raise CorruptError(f"{what} is {show(content)}, which is not a form of {forms[-1]}")
    return found


def _text_form(text: str) -> Any:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # half a surrogate pair: no JSON reader has to keep it
        return {"base64": to_base64(text.encode("utf-8", "surrogatepass"))}
    return text


def _text_of(node: Any, what: str) -> str:
    if type(node) is str:
        return node
    data = from_base64(member(node, "base64", str, what), what)
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise CorruptError(f"{what} is not UTF-8") from None


def _int_of(node: Any) -> int | None:
    if type(node) is int and -_EXACT_INT <= node <= _EXACT_INT:
        return node
    return int(node, 16) if type(node) is str and _HEX.fullmatch(node) else None


def _float_form(number: float) -> float | str:
    if math.isfinite(number):
        return number
    if math.isinf(number):
        return "inf" if number > 0 else "-inf"
    (bits,) = struct.unpack("<Q", struct.pack("<d", number))
    return "nan" if bits == _PLAIN_NAN else f"nan:{bits:016x}"


def _float_of(node: Any) -> float | None:
    if type(node) is float:
        return node
    if type(node) is not str:
        return None
    if node in ("inf", "-inf"):
        return float(node)
    if not _NAN.fullmatch(node):
        return None
    number: float
    (number,) = struct.unpack("<d", struct.pack("<Q", int(node[4:], 16) if node[4:] else _PLAIN_NAN))
    return number if math.isnan(number) else None


def encode_type(kind: LeafType) -> dict[str, Any]:
    """Return a type as JSON; what it does not have is left out.

    Example:
        >>> encode_type(LeafType(kind="jax", dtype="float32", shape=(2, 3)))
        {'kind': 'jax', 'dtype': 'float32', 'shape': [2, 3]}
    """
    shape = None if kind.dtype is None else list(kind.shape or ())
    members = {"kind": kind.kind, "dtype": kind.dtype, "shape": shape, "sharding": kind.sharding, "impl": kind.impl}
    return {name: value for name, value in members.items() if value is not None}


def decode_type(node: Any, number: int) -> LeafType:
    """Return the type that `encode_type` wrote.

    Raises:
        CorruptError: its members do not fit each other, or the shape is absurd.
        FormatError: a kind of leaf that this version does not know.
        UnsupportedError: a dtype that this version does not know.

    Example:
        >>> decode_type({"kind": "none"}, 0).stored
        False
    """
    what = f"type {number} of the leaves"
    if (kind := member(node, "kind", str, what)) not in ARRAY_KINDS and kind not in PYTHON_KINDS:
        raise FormatError(f"{what} is of the unknown kind {kind[:60]!r}", hint="use a newer treering")
    if "dtype" not in node and "shape" not in node and kind not in ARRAY_KINDS:
        return LeafType(kind=kind)
    dtype = member(node, "dtype", str, what)
    shape = check_shape(member(node, "shape", list, what), dtype, what)
    if kind in PYTHON_KINDS and (kind not in _LARGE or dtype != "uint8" or len(shape) != 1):
        raise CorruptError(f"{what}, {kind}, cannot lie in a file as {dtype} {list(shape)}")
    if kind == "numpy scalar" and shape:
        raise CorruptError(f"{what}, a numpy scalar, has the shape {list(shape)}")
    impl = member(node, "impl", str, what) if kind == "key" else None
    if impl is not None:  # those that are not jax's own may have any unsigned ints
        items = _KEY_ITEMS.get(impl)
        if dtype not in _KEY_DTYPES or (items is not None and (dtype != "uint32" or shape[-1:] != (items,))):
            raise CorruptError(f"{what}, keys of {impl[:60]!r}, cannot lie in a file as {dtype} {list(shape)}")
    sharding = member(node, "sharding", str, what) if "sharding" in node else None
    return LeafType(kind=kind, dtype=dtype, shape=shape, sharding=sharding, impl=impl)


def check_shape(lengths: list[Any], dtype: str, what: str) -> tuple[int, ...]:
    """Return a shape as a tuple, if an array of it could be.

    Raises:
        CorruptError: a length is no whole number from 0 on, there are more than 64, or the array would take 2**63
            bytes.
        UnsupportedError: the dtype is unknown.

    Example:
        >>> check_shape([2, 3], "float32", "the array")
        (2, 3)
    """
    if (known := lookup(dtype)) is None:
        problem = f"{what} has the dtype {dtype[:60]!r}, which this version does not know"
        raise UnsupportedError(problem, hint="use a newer treering")
    if len(lengths) > _MOST_AXES:
        raise CorruptError(f"{what} has {pluralize(len(lengths), 'axes')}, an array has at most {_MOST_AXES}")
    if not set(map(type, lengths)) <= {int} or min(lengths, default=0) < 0:
        raise CorruptError(f"{what} has a length of an axis that is not a whole number from 0 on")
    # numpy asks this of an array without items too, with the axes of length 0 left out.
    if known.itemsize * math.prod(filter(None, lengths)) >= LIMIT:
        raise CorruptError(f"{what} has the shape {str(lengths)[:200]}, larger than any memory")
    return tuple(lengths)


def same_value(one: Any, other: Any, *, in_file: bool = False) -> bool:
    """Compare bit for bit: True is not 1, 0.0 is not -0.0, and NaN is itself.

    Values that no file holds are compared by their digests where both have one of one scheme, else by their text.

    Args:
        one: a value.
        other: another one.
        in_file: whether they have to be the same in a file, text and digest.

    Example:
        >>> same_value((1, 0.5), (1, 0.5)), same_value((1,), (True,)), same_value(0.0, -0.0), same_value(2.0, 2)
        (True, False, False, False)
        >>> same_value(ForeignKey("m.C", "[0 ... 9]", "s:1"), ForeignKey("m.C", "[0 ... 9]", "s:2"))
        False
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(functools.partial(same_value, in_file=in_file), one, other))
    if isinstance(one, ForeignKey | OpaqueLeaf):
        if in_file:
            return bool(one == other and one.digest == other.digest)
        digests = _scheme(one) is not None and _scheme(one) == _scheme(other)
        return one.class_name == other.class_name and one.digest == other.digest if digests else bool(one == other)
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex):
        return same_value(one.real, other.real) and same_value(one.imag, other.imag)
    return bool(one == other)


def _scheme(value: ForeignKey | OpaqueLeaf) -> str | None:
    return None if value.digest is None else value.digest.rpartition(":")[0]
