"""What stands in a file for things that no file holds: functions, static fields, keys of foreign classes."""

from __future__ import annotations

import functools
import re
import types
from typing import Any, Final

from treering._format.index import ForeignKey, OpaqueLeaf
from treering._format.structure import class_name
from treering._tree.registry import is_code

__all__ = ["key_value", "opaque_of", "shows_its_address", "static_value", "text_of"]

_LONGEST: Final = 400
_ADDRESS: Final = re.compile(r" (?:object )?at 0x[0-9a-fA-F]+|\b0x[0-9a-fA-F]{8,}\b")
# Deeper tuples and longer numbers are text: keys in a file are for people, too.
_TUPLE_LEVELS: Final = 8
_NUMBER_BITS: Final = 4096


def opaque_of(x: object) -> OpaqueLeaf:
    """Return what stands in a file for a leaf that cannot be stored.

    Example:
        >>> import math
        >>> opaque_of(math.sqrt)
        OpaqueLeaf(class_name='builtins.builtin_function_or_method', text='math.sqrt')
    """
    return x if isinstance(x, OpaqueLeaf) else OpaqueLeaf(class_name(type(x)), text_of(x))


def static_value(x: object) -> Any:
    """Return a static field as a file holds it: itself where it is plain, else its class and its text.

    A tuple stays one, and each of its items is held like this.

    Example:
        >>> import math
        >>> static_value(("relu", 3)), static_value(math.sqrt).text
        (('relu', 3), 'math.sqrt')
    """
    return _held(x, _TUPLE_LEVELS)


def _held(x: object, levels: int) -> Any:
    if type(x) is tuple and levels:
        return tuple(_held(item, levels - 1) for item in x)
    return x if _is_plain(x) else ForeignKey(class_name(type(x)), text_of(x))


def key_value(key: object) -> Any:
    """Return a dict key as a file holds it; the text of one that is not plain is all of ``str(key)``.

    Raises:
        ValueError: an int of more digits than Python prints.
    """
    return key if _is_plain(key) else ForeignKey(class_name(type(key)), _ADDRESS.sub("", str(key)))


def _is_plain(x: object, levels: int = _TUPLE_LEVELS) -> bool:
    kind = type(x)
    if kind is tuple:
        return levels > 0 and all(_is_plain(item, levels - 1) for item in x)  # type: ignore[attr-defined]
    if kind is int:
        return x.bit_length() <= _NUMBER_BITS  # type: ignore[attr-defined,no-any-return]
    return kind in (str, bool, type(None), float, bytes, ForeignKey)


def shows_its_address(x: object) -> bool:
    """Tell whether the repr of ``x`` says where in memory it lies, which tells nothing about it."""
    return f"0x{id(x):x}" in repr(x).lower()


def text_of(x: object) -> str:
    """Return the name of a function or class, or the repr of anything else without addresses, cut to a length."""
    if is_code(x):
        text = _name_of(x)
    elif isinstance(x, types.ModuleType):
        text = x.__name__
    elif isinstance(x, set | frozenset):
        # Their own order is another one in each process.
        text = f"{type(x).__name__}({', '.join(sorted(map(text_of, x)))})"
    else:
        text = _ADDRESS.sub("", repr(x))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _name_of(code: Any) -> str:
    if isinstance(code, functools.partial):
        arguments = [_argument(value) for value in code.args]
        arguments += [f"{name}={_argument(value)}" for name, value in code.keywords.items()]
        return f"functools.partial({', '.join([text_of(code.func), *arguments])})"
    name = getattr(code, "__qualname__", None) or getattr(code, "__name__", None)
    if not isinstance(name, str):
        return _ADDRESS.sub("", repr(code))
    module = getattr(code, "__module__", None)
    return f"{module}.{name}" if isinstance(module, str) else name


def _argument(value: object) -> str:
    return text_of(value)
