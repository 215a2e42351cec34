"""State dict -> pytree: the target gives the structure, the state gives the leaves.

Each built-in container is restored by a generator that asks for its children one by one, and one loop drives them all,
so depth is bounded by memory and not by Python's recursion limit. Messages and error classes are those that
flax.serialization's callers know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any, Final

import jax
import numpy as np

from treering._printable import printable
from treering._tree.registry import (
    LEAF_TYPES,
    REGISTRY,
    Node,
    flax_overrides,
    flax_serves,
    is_code,
    is_namedtuple,
    is_typed_key,
    open_pytree_node,
    restore_with_flax,
)
from treering._values.human import pluralize
from treering.errors import Mismatch

_LONGEST_NAMES: Final = 2000

Request = tuple[Any, Any, str]
"""A child's target, its state, and its name."""

Restorer = Generator[Request, Any, Any]


class _CurrentPath(threading.local):
    """Where this thread's restore is."""

    def __init__(self) -> None:
        self.names: list[str] = []


_place = _CurrentPath()


class StructureMismatch(Mismatch):
    """The message already says the path, in flax's words."""

    def __str__(self) -> str:
        return printable(self.message if self.hint is None else f"{self.message}; {self.hint}")


class NotADict(StructureMismatch, AttributeError):
    """flax raises AttributeError where a dict's state is no dict."""


class NotItems(StructureMismatch, TypeError):
    """flax raises TypeError where a list's state is no dict."""


class AbsentItem(StructureMismatch, KeyError):
    """flax raises KeyError where a numbered or named part is absent."""


def current_path() -> str:
    """Return where this thread's ``from_state_dict`` is, as ``./a/b``; empty outside of one. For error messages.

    Example:
        >>> current_path()
        ''
    """
    return "/".join(_place.names)


def from_state_dict(target: Any, state: Any, name: str = ".") -> Any:
    """Return a copy of ``target``'s structure with the leaves of ``state``.

    Leaves of ``target`` are not compared with what replaces them (see ``strict=True`` of ``from_bytes``); a leaf may
    be a ``jax.ShapeDtypeStruct``. Extra keys are ignored for a dict and refused for a namedtuple or a class. Where
    the target has a typed PRNG key, the state's uint32 data become one of the same kind.

    Args:
        target: any pytree.
        state: what ``to_state_dict`` or ``msgpack_restore`` gave.
        name: what to call the root in error messages.

    Raises:
        Mismatch: missing or unknown keys, another number of items, or a leaf where a container belongs.

    Source: flax.serialization.from_state_dict.

    Example:
        >>> from_state_dict({"a": (0, 0)}, {"a": {"0": 1, "1": 2}})
        {'a': (1, 2)}
    """
    names = _place.names
    depth = len(names)
    restorers: list[Restorer] = []
    # Below how many registered classes each open restorer stands.
    in_class: list[bool] = []
    try:
        request: Request | None = (target, state, name)
        answer: Any = None
        while request is not None or restorers:
            if request is not None:
                wanted, found, part = request
                names.append(part)
                below = bool(in_class) and in_class[-1]
                answer, restorer, is_class = _begin(wanted, found, below)
                if restorer is None:
                    names.pop()
                else:
                    restorers.append(restorer)
                    in_class.append(below or is_class)
            try:
                request = restorers[-1].send(answer) if restorers else None
            except StopIteration as stop:
                answer, request = stop.value, None
                restorers.pop()
                in_class.pop()
                names.pop()
        return answer
    finally:
        del names[depth:]


def _begin(target: Any, state: Any, in_class: bool) -> tuple[Any, Restorer | None, bool]:
    """Return the finished value, or the generator that will make it and whether it is a class's."""
    kind = type(target)
    if kind in LEAF_TYPES:
        return state, None, False
    entry = REGISTRY.get(kind)
    if entry is not None:
        return entry[1](target, state), None, False
    built_in = _RESTORERS.get(kind)
    if built_in is not None:
        return None, built_in(target, state), False
    if is_namedtuple(target):
        return None, _restore_namedtuple(target, state), False
    if is_typed_key(target):
        return _restore_key(target, state), None, False
    node = None if flax_overrides(kind) else open_pytree_node(target)
    if node is not None:
        restorer = _restore_items if node.kind == "items" else _restore_fields
        if node.kind == "mapping":
            restorer = _restore_mapping
        return None, restorer(target, node, state), node.kind != "mapping"
    if flax_serves(kind):
        return restore_with_flax(target, state, _place.names[-1]), None, False
    if in_class and state is None and is_code(target):
        return target, None, False
    return state, None, False


def _restore_dict(xs: dict[Any, Any], state: Any) -> Restorer:
    _check_keys(map(str, xs), state)
    restored = {}
    for key, value in xs.items():
        part = str(key)
        restored[key] = state[part] if type(value) in LEAF_TYPES else (yield value, state[part], part)
    return restored


def _check_keys(wanted: Any, state: Any) -> None:
    if not isinstance(state, dict):
        raise NotADict(f"the target is a dict, the state a {_describe(state)}, at path {current_path()}", path=_here())
    absent = [key for key in wanted if key not in state]
    if absent:
        raise StructureMismatch(
            "The target dict keys and state dict keys do not match, target dict contains keys"
            f" {_set_text(absent)} which are not present in state dict at path {current_path()}",
            path=_here(),
        )


def _restore_list(xs: list[Any], state: Any) -> Restorer:
    _check_length(len(xs), state)
    restored = []
    for index, value in enumerate(xs):
        part = str(index)
        if part not in state:
            raise AbsentItem(f"the state has no item {part!r} for the list at path {current_path()}", path=_here())
        restored.append(state[part] if type(value) in LEAF_TYPES else (yield value, state[part], part))
    return restored


def _restore_tuple(xs: tuple[Any, ...], state: Any) -> Restorer:
    restored = yield from _restore_list(list(xs), state)
    return tuple(restored)


def _check_length(length: int, state: Any) -> None:
    if not isinstance(state, dict):
        # As in flax, whatever has a length of 0 is the state of no items.
        if length == 0 and (
            state in (b"", "", [], ()) if not isinstance(state, np.ndarray) else state.shape[:1] == (0,)
        ):
            return
        raise NotItems(
            f"the target is a list of {pluralize(length, 'items')}, the state a {_describe(state)}, "
            f"at path {current_path()}",
            path=_here(),
        )
    if len(state) != length:
        raise StructureMismatch(
            "The size of the list and the state dict do not match,"
            f" got {length} and {len(state)} at path {current_path()}",
            path=_here(),
        )


def _restore_namedtuple(xs: Any, state: Any) -> Restorer:
    if not isinstance(state, dict):
        raise NotADict(
            f"the target is a namedtuple, the state a {_describe(state)}, at path {current_path()}", path=_here()
        )
    wanted = set(xs._fields)
    if set(state) == {"name", "fields", "values"} != wanted:
        state = _modernize(state)
    if set(state) != wanted:
        raise StructureMismatch(
            "The field names of the state dict and the named tuple do not match,"
            f" got {_set_text(state)} and {_set_text(wanted)} at path {current_path()}",
            path=_here(),
        )
    restored = {}
    for field in xs._fields:
        restored[field] = yield getattr(xs, field), state[field], field
    return type(xs)(**restored)


def _modernize(state: dict[str, Any]) -> dict[str, Any]:
    """Turn the namedtuple form that flax wrote before 2022 into today's."""
    fields, values = state["fields"], state["values"]
    if not (isinstance(fields, dict) and isinstance(values, dict) and fields.keys() == values.keys()):
        raise AbsentItem(f"the old form of a namedtuple is incomplete at path {current_path()}", path=_here())
    return {str(fields[index]): values[index] for index in fields}


def _restore_partial(partial: Any, state: Any) -> Restorer:
    if not isinstance(state, dict):
        raise NotItems(
            f"the target is a Partial, the state a {_describe(state)}, at path {current_path()}", path=_here()
        )
    for part in ("args", "keywords"):
        if part not in state:
            raise AbsentItem(f"the state has no {part!r} for the Partial at path {current_path()}", path=_here())
    args = yield partial.args, state["args"], "args"
    keywords = yield partial.keywords, state["keywords"], "keywords"
    return type(partial)(partial.func, *args, **keywords)


def _restore_mapping(target: Any, node: Node, state: Any) -> Restorer:
    del target
    _check_keys(node.children, state)
    restored = {}
    for part, value in node.children.items():
        restored[part] = yield value, state[part], part
    return node.rebuild(restored)


def _restore_items(target: Any, node: Node, state: Any) -> Restorer:
    del target
    _check_length(len(node.children), state)
    restored = {}
    for part, value in node.children.items():
        if part not in state:
            raise AbsentItem(f"the state has no item {part!r} at path {current_path()}", path=_here())
        restored[part] = yield value, state[part], part
    return node.rebuild(restored)


def _restore_fields(target: Any, node: Node, state: Any) -> Restorer:
    name = type(target).__name__
    if not isinstance(state, dict):
        raise NotADict(
            f"the target is a {name}, the state a {_describe(state)}, at path {current_path()}", path=_here()
        )
    restored = {}
    for part, value in node.children.items():
        if part not in state:
            raise StructureMismatch(
                f"Missing field {part} in state dict while restoring an instance of {name}, at path {current_path()}",
                path=_here(),
            )
        restored[part] = yield value, state[part], part
    unknown = [part for part in state if part not in node.children]
    if unknown:
        raise StructureMismatch(
            f'Unknown field(s) "{",".join(map(str, unknown))[:_LONGEST_NAMES]}" in state dict while restoring'
            f" an instance of {name} at path {current_path()}",
            path=_here(),
        )
    return node.rebuild(restored)


def _restore_key(target: Any, state: Any) -> Any:
    """Make typed PRNG keys of uint32 data, of the kind that the target has."""
    if is_typed_key(state):
        return state
    kind = str(target.dtype).removeprefix("key<").removesuffix(">")
    impl = jax.random.key_impl(target) if isinstance(target, jax.Array) else _KEY_KINDS.get(kind, kind)
    try:
        return jax.random.wrap_key_data(jax.numpy.asarray(state), impl=impl)
    except (TypeError, ValueError) as error:
        raise NotItems(
            f"the target is a PRNG key ({kind}), the state {_describe(state)} cannot be its data,"
            f" at path {current_path()}: {error}",
            path=_here(),
        ) from error


# jax prints the key kinds of an abstract key by a tag; wrap_key_data takes names.
_KEY_KINDS = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}


def _here() -> tuple[str, ...]:
    return tuple(_place.names[1:])


def _describe(state: Any) -> str:
    return f"{type(state).__name__} ({state!r:.40})" if type(state) in LEAF_TYPES else type(state).__name__


def _set_text(names: Any) -> str:
    """Print names as flax prints a set, but always in the same order."""
    text = ", ".join(sorted(repr(name) for name in names))
    return "{" + (text if len(text) <= _LONGEST_NAMES else f"{text[:_LONGEST_NAMES]}...") + "}"


_RESTORERS: Final[dict[type, Callable[[Any, Any], Restorer]]] = {
    dict: _restore_dict,
    list: _restore_list,
    tuple: _restore_tuple,
    jax.tree_util.Partial: _restore_partial,
}
