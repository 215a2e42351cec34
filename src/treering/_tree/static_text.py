"""What stands in a file for things that no file holds: functions, static fields, keys of foreign classes."""

from __future__ import annotations

import functools
import types
from collections.abc import Set as AbstractSet
from typing import Any, Final

from treering._format.index import ForeignKey, OpaqueLeaf
from treering._format.key_text import key_text
from treering._format.structure import class_name
from treering._printable import kind_of
from treering._tree.registry import is_code
from treering._tree.value_digest import ADDRESS, code_name, value_digest
from treering.errors import Unsupported

_LONGEST: Final = 400
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
    return x if isinstance(x, OpaqueLeaf) else OpaqueLeaf(class_name(type(x)), text_of(x), *value_digest(x))


def static_value(x: object) -> Any:
    """Return a static field as a file holds it: itself where it is plain, else its class, text and digest.

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
    return x if _is_plain(x) else ForeignKey(class_name(type(x)), text_of(x), *value_digest(x))


def key_value(key: object) -> Any:
    r"""Return a dict key as a file holds it; the text of one that is not plain is that of ``str(key)``, in ASCII.

    A tuple that holds something that is not plain is not plain either.

    Raises:
        Unsupported: it is a set, or a tuple that holds one.
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
            text = text.encode("ascii", "backslashreplace").decode("ascii")
    return ForeignKey(class_name(type(key)), ADDRESS.sub("", text))


def _refuse_sets(key: object) -> None:
    if isinstance(key, AbstractSet):
        raise Unsupported(
            f"a dict key is {kind_of(key)}: a set has no order, so its text is another one in each process",
            hint="make it a sorted tuple",
        )
    if isinstance(key, tuple):
        for item in key:
            _refuse_sets(item)


def _is_plain(x: object, levels: int = _TUPLE_LEVELS) -> bool:
    kind = type(x)
    if kind is tuple:
        return levels > 0 and all(
            type(item) is not ForeignKey and _is_plain(item, levels - 1)
            for item in x  # type: ignore[attr-defined]
        )
    if kind is int:
        return x.bit_length() <= _NUMBER_BITS  # type: ignore[attr-defined,no-any-return]
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
        arguments = [_argument(value) for value in code.args]
        arguments += [f"{name}={_argument(value)}" for name, value in code.keywords.items()]
        return f"functools.partial({', '.join([text_of(code.func), *arguments])})"
    return code_name(code) or ADDRESS.sub("", ascii(code))


def _argument(value: object) -> str:
    return text_of(value)
