"""The digest of a whole static value: the same for equal values in each process, whatever their text leaves out.

A value's digest is made of its class and of the digests of what it holds. The items of sets and dicts are sorted by
their digests, arrays count by dtype, shape and bytes, functions by their name: what they close over changes while a
program runs, as some schedules of optax show.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import re
import struct
import sys
import types
import uuid
import zoneinfo
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final

import jax
import numpy as np
import xxhash
from jax import sharding

from treering._codec.array_bytes import wire_blocks
from treering._format.index import ForeignKey, OpaqueLeaf
from treering._format.structure import class_name, key_text
from treering._printable import kind_of
from treering._tree.registry import is_code, is_namedtuple, is_typed_key, open_pytree_node
from treering._values.dtypes import SUB_BYTE
from treering.errors import UnsupportedError

ADDRESS: Final = re.compile(r" (?:object )?at 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{8,}\b")
"""What the repr of an object has of this process alone."""

_SCHEME: Final = "xxh3-128/1"
_MOST_ITEMS: Final = 100_000
_MOST_BYTES: Final = 1 << 30
_MOST_LEVELS: Final = 64
_MOST_NAMED: Final = 5
_TREEDEF: Final = type(jax.tree.structure(0))

# Their repr says all that they are.
_TIMES: Final = (datetime.date, datetime.timedelta, datetime.timezone, zoneinfo.ZoneInfo)
_NUMBERS: Final = (complex, range, decimal.Decimal, fractions.Fraction)
_WHOLE_REPR: Final = (*_TIMES, *_NUMBERS, uuid.UUID, jax.ShapeDtypeStruct, type(Ellipsis), type(NotImplemented))
_SCALARS: Final[dict[type, Callable[[Any], bytes]]] = {
    type(None): lambda _: b"",
    bool: lambda x: b"1" if x else b"0",
    int: lambda x: hex(x).encode(),
    float: lambda x: struct.pack("<d", x),
    str: lambda x: x.encode("utf-8", "surrogatepass"),
    bytes: bytes,
    bytearray: bytes,
}
# Settings: a program that makes ``like`` makes them too, and their text is all that they are.
_PLACES: Final = (jax.Device, sharding.AbstractMesh, sharding.Mesh, sharding.PartitionSpec, sharding.Sharding)
SETTINGS: Final = (enum.Enum, np.dtype, types.ModuleType, type(jax.tree.structure(0)), *_PLACES)
"""Classes of settings."""

_LONGEST: Final = 400
# Deeper tuples and longer numbers are text: keys in a file are for people, too.
_TUPLE_LEVELS: Final = 8
_NUMBER_BITS: Final = 4096


def value_digest(x: Any) -> tuple[str | None, str]:
    """Return the digest of ``x`` and what in ``x`` takes no part in it; no digest where something has no form.

    Digests of one scheme, the text up to the last colon, can be compared.

    Example:
        >>> value_digest({"a": 1, "b": np.arange(3)}) == value_digest({"b": np.arange(3), "a": 1})
        True
        >>> value_digest(np.arange(3)) == value_digest(np.arange(3.0))
        False
        >>> value_digest([1, object()])
        (None, 'a builtins.object')
    """
    walk = _Digests()
    try:
        return f"{_SCHEME}:{walk.of(x).hex()}", ", ".join(walk.left_out)
    except _NoForm as error:
        return None, str(error)


class _NoForm(Exception):
    """A value has no canonical form; the text says what in it has none."""


def code_name(code: Any) -> str | None:
    """Return module and qualified name of a function or class, None where it has none."""
    name = getattr(code, "__qualname__", None) or getattr(code, "__name__", None)
    if not isinstance(name, str):
        return None
    module = getattr(code, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) else name


def _hash_parts(tag: str, *parts: bytes) -> bytes:
    state = xxhash.xxh3_128(tag.encode("utf-8", "surrogatepass"))
    for part in parts:
        state.update(struct.pack("<q", len(part)))
        state.update(part)
    return state.digest()


class _Digests:
    """One walk over a value."""

    def __init__(self) -> None:
        self._items = 0
        self._bytes = 0
        self._open: list[int] = []
        self.left_out: list[str] = []
        """Functions whose inside may hold more than their names say."""

    def of(self, x: Any) -> bytes:
        """Return the digest of ``x``."""
        self._items += 1
        if self._items > _MOST_ITEMS:
            raise _NoForm(f"more than {_MOST_ITEMS:,} items")
        if (scalar := _SCALARS.get(type(x))) is not None:
            data = scalar(x)
            self._count(len(data))
            return _hash_parts(type(x).__name__, data)
        if id(x) in self._open:  # a list that holds itself
            return _hash_parts("again", str(len(self._open) - self._open.index(id(x))).encode())
        if len(self._open) == _MOST_LEVELS:
            raise _NoForm(f"more than {_MOST_LEVELS} levels")
        self._open.append(id(x))
        try:
            return self._inner(x)
        finally:
            self._open.pop()

    def _inner(self, x: Any) -> bytes:
        if isinstance(x, np.ndarray | np.generic | jax.Array):
            return self._array(x)
        if isinstance(x, enum.Enum):
            return self._parts(x, [x.name, x.value])
        if is_code(x) or isinstance(x, functools.partial):
            return self._code(x)
        if isinstance(x, types.ModuleType):
            return _hash_parts("module", x.__name__.encode())
        return self._container(x) or self._setting(x) or self._object(x)

    def _parts(self, x: Any, parts: Iterable[Any]) -> bytes:
        return _hash_parts(class_name(type(x)), *map(self.of, parts))

    def _container(self, x: Any) -> bytes | None:
        kind = type(x)
        if kind in (list, tuple) or is_namedtuple(x):
            return self._parts(x, x)
        if kind in (set, frozenset):
            return _hash_parts(class_name(kind), *sorted(map(self.of, x)))
        if kind in (dict, types.MappingProxyType, collections.Counter, collections.defaultdict):
            factory = [self.of(x.default_factory)] if kind is collections.defaultdict else []
            return _hash_parts(class_name(kind), *factory, *sorted(self._pairs(x)))
        if kind is collections.OrderedDict:
            return _hash_parts(class_name(kind), *self._pairs(x))
        if kind is collections.deque:
            return self._parts(x, [x.maxlen, *x])
        return self._parts(x, [x.start, x.stop, x.step]) if kind is slice else None

    def _pairs(self, x: Mapping[Any, Any]) -> list[bytes]:
        return [self.of(key) + self.of(value) for key, value in x.items()]

    def _setting(self, x: Any) -> bytes | None:
        if isinstance(x, datetime.datetime | datetime.time) and not isinstance(
            x.tzinfo, datetime.timezone | zoneinfo.ZoneInfo | None
        ):
            return None
        if isinstance(x, re.Pattern):
            return self._parts(x, [x.pattern, x.flags])
        if isinstance(x, _TREEDEF):
            return self._parts(x, [x.node_data(), *x.children()])  # type: ignore[attr-defined]  # absent from stubs
        if isinstance(x, pathlib.PurePath):  # its module has another name in each version of Python
            return _hash_parts("path", ascii(x).encode())
        if isinstance(x, (*_WHOLE_REPR, datetime.time, *SETTINGS)):
            return _hash_parts(class_name(type(x)), ADDRESS.sub("", ascii(x)).encode())
        return None

    def _object(self, x: Any) -> bytes:
        if dataclasses.is_dataclass(x):
            names = [field.name for field in dataclasses.fields(x) if field.compare and hasattr(x, field.name)]
            return self._parts(x, [each for name in names for each in (name, getattr(x, name))])
        node = None
        with contextlib.suppress(UnsupportedError):
            node = None if isinstance(x, Iterator) else open_pytree_node(x)
        if isinstance(x, Mapping) and (node is None or node.aux is None):
            return _hash_parts(class_name(type(x)), *sorted(self._pairs(x)))
        if node is None:
            raise _NoForm(f"a {class_name(type(x))}")
        return self._parts(x, [node.aux, *node.children, *node.children.values()])

    def _code(self, x: Any) -> bytes:
        if isinstance(x, functools.partial):
            return self._parts(x, [x.func, x.args, x.keywords])
        if (name := code_name(x)) is None:
            raise _NoForm(f"a {class_name(type(x))} without a name")
        if not (isinstance(x, type) or _importable(x)):
            inside = f"the inside of {name}"
            if inside not in self.left_out and len(self.left_out) < _MOST_NAMED:
                self.left_out.append(inside)
        return _hash_parts("code", name.encode())

    def _array(self, x: Any) -> bytes:
        if isinstance(x, jax.Array):
            if isinstance(x, jax.core.Tracer) or not x.is_fully_addressable or x.is_deleted():
                raise _NoForm("a jax array whose items this process does not have")
            if is_typed_key(x):
                return _hash_parts("key", str(x.dtype).encode(), self.of(jax.random.key_data(x)))
            return _hash_parts("jax", self._numpy(np.asarray(jax.device_get(x))))
        if type(x) not in (np.ndarray, np.memmap) and not isinstance(x, np.generic):
            raise _NoForm(f"a {class_name(type(x))}")
        return _hash_parts("scalar" if isinstance(x, np.generic) else "numpy", self._numpy(np.asarray(x)))

    def _numpy(self, x: Any) -> bytes:
        head = f"{x.dtype}{x.shape}"
        if x.dtype.names is not None:
            return _hash_parts(head, *(self._numpy(x[name]) for name in x.dtype.names))
        if x.dtype.kind in "OT":
            return _hash_parts(head, *map(self.of, x.reshape(-1).tolist()))
        self._count(x.nbytes)
        if x.dtype.name in SUB_BYTE:
            x = x.astype(np.float32)  # the other bits of a byte mean nothing
        if x.dtype.kind in "USV" and x.dtype.type in (np.str_, np.bytes_, np.void):
            return _hash_parts(head, x.tobytes())
        state = xxhash.xxh3_128()
        for block in wire_blocks(x, 0, x.size):
            state.update(block)
        return _hash_parts(head, state.digest())

    def _count(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes > _MOST_BYTES:
            raise _NoForm(f"more than {_MOST_BYTES >> 30} GiB")


def _importable(code: Any) -> bool:
    """Tell whether the module of a function has it under its name."""
    found: Any = sys.modules.get(str(getattr(code, "__module__", None)))
    for part in str(getattr(code, "__qualname__", None) or getattr(code, "__name__", "")).split("."):
        found = getattr(found, part, None)
    return found is code


def opaque_of(x: object) -> OpaqueLeaf:
    """Return what stands in a file for a leaf that cannot be stored.

    Example:
        >>> import math
        >>> opaque_of(math.sqrt)
        OpaqueLeaf(class_name='builtins.builtin_function_or_method', text='math.sqrt')
    """
    return x if isinstance(x, OpaqueLeaf) else OpaqueLeaf(class_name(type(x)), text_of(x), *value_digest(x))


def static_value(x: object, levels: int = _TUPLE_LEVELS) -> Any:
    """Return a static field as a file holds it: itself where it is plain, else its class, text and digest.

    A tuple stays one, and each of its items is held like this.

    Example:
        >>> import math
        >>> static_value(("relu", 3)), static_value(math.sqrt).text
        (('relu', 3), 'math.sqrt')
    """
    if type(x) is tuple and levels:
        return tuple(static_value(item, levels - 1) for item in x)
    return x if _is_plain(x) else ForeignKey(class_name(type(x)), text_of(x), *value_digest(x))


def key_value(key: object) -> Any:
    r"""Return a dict key as a file holds it; the text of one that is not plain is that of ``str(key)``, in ASCII.

    A tuple that holds something that is not plain is not plain either.

    Raises:
        UnsupportedError: it is a set, or a tuple that holds one.
        ValueError: an int of more digits than Python prints.

    Example:
        >>> import enum
        >>> key_value(("é", enum.Enum("Axis", "X").X)).text
        "('\\xe9', Axis.X)"
    """
    if _is_plain(key):
        return key
    _refuse_sets(key)
    if type(key) is tuple:
        text = key_text(tuple(map(key_value, key)))
    else:
        text = str(key)
        if not isinstance(key, str):
            # In it may be the repr of a text, which shows a character or escapes it as the version of Python knows it.
            text = ADDRESS.sub("", text.encode("ascii", "backslashreplace").decode("ascii"))
    return ForeignKey(class_name(type(key)), text)


def _refuse_sets(key: object) -> None:
    if isinstance(key, AbstractSet):
        text = f"a dict key is {kind_of(key)}: a set has no order, so its text differs between processes"
        raise UnsupportedError(text, hint="make it a sorted tuple")
    if isinstance(key, tuple):
        for item in key:
            _refuse_sets(item)


def _is_plain(x: Any, levels: int = _TUPLE_LEVELS) -> bool:
    kind = type(x)
    if kind is tuple:
        return levels > 0 and all(type(item) is not ForeignKey and _is_plain(item, levels - 1) for item in x)
    if kind is int:
        return bool(x.bit_length() <= _NUMBER_BITS)
    return kind in (str, bool, type(None), float, bytes, ForeignKey)


def text_of(x: object) -> str:
    """Return the name of a function or class, or else the ASCII repr without addresses, cut to a length."""
    if is_code(x):
        text = _name_of(x)
    elif isinstance(x, types.ModuleType):
        text = x.__name__
    elif isinstance(x, set | frozenset):
        # Their own order is another one in each process.
        text = f"{type(x).__name__}({', '.join(sorted(map(text_of, x)))})"
    else:
        text = ADDRESS.sub("", ascii(x))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _name_of(code: Any) -> str:
    if isinstance(code, functools.partial):
        arguments = [text_of(value) for value in code.args]
        arguments += [f"{name}={text_of(value)}" for name, value in code.keywords.items()]
        return f"functools.partial({', '.join([text_of(code.func), *arguments])})"
    return code_name(code) or ADDRESS.sub("", ascii(code))
