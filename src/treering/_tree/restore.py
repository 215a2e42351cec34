"""State dict -> pytree: the target gives the structure, the state gives the leaves.

Each built-in container is restored by a generator that asks for its children one by one, and one loop drives them all,
so depth is bounded by memory and not by Python's recursion limit. Messages and error classes are those that
flax.serialization's callers know.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, Final

import jax
import numpy as np

from treering._printable import printable, shorten
from treering._tree import registry
from treering._tree.registry import LEAF_TYPES, REGISTRY, Node, is_code, is_namedtuple, is_typed_key, open_pytree_node
from treering._values.human import pluralize
from treering.errors import MismatchError

_LONGEST_NAMES: Final = 2000

Request = tuple[Any, Any, str]
"""A child's target, its state, and its name."""

Restorer = Generator[Request, Any, Any]


class _CurrentPath(threading.local):
    """Where this thread's restore is."""

    def __init__(self) -> None:
        self.names: list[str] = []


_place = _CurrentPath()


class StructureMismatchError(MismatchError):
    """The message already says the path, in flax's words."""

    def __str__(self) -> str:
        return printable(self.message if self.hint is None else f"{self.message}; {self.hint}")


class NotADictError(StructureMismatchError, AttributeError):
    """flax raises AttributeError where a dict's state is no dict."""


class NotItemsError(StructureMismatchError, TypeError):
    """flax raises TypeError where a list's state is no dict."""


class AbsentItemError(StructureMismatchError, KeyError):
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
        MismatchError: missing or unknown keys, another number of items, or a leaf where a container belongs.

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
    if (entry := REGISTRY.get(kind)) is not None:
        return entry[1](target, state), None, False
    if (built_in := _RESTORERS.get(kind)) is not None:
        return None, built_in(target, state), False
    if is_namedtuple(target):
        return None, _restore_namedtuple(target, state), False
    if is_typed_key(target):
        return _restore_key(target, state), None, False
    node = None if registry.flax_overrides(kind) else open_pytree_node(target)
    if node is not None:
        return None, _restore_node(target, node, state), node.kind != "mapping"
    if registry.flax_serves(kind):
        return registry.restore_with_flax(target, state, _place.names[-1]), None, False
    return target if in_class and state is None and is_code(target) else state, None, False


def _restore_parts(
    children: Iterable[tuple[str, Any]],
    state: Any,
    rebuild: Callable[[list[Any]], Any],
    absent: Callable[[str], Exception] | None = None,
) -> Restorer:
    """Restore the children of one container and make it of them.

    Args:
        children: the name of each child and its target.
        state: a dict.
        rebuild: makes the container.
        absent: makes the error for a child that the state does not have; None where it is known to have all.
    """
    restored = []
    for part, value in children:
        if absent is not None and part not in state:
            raise absent(part)
        restored.append(state[part] if type(value) in LEAF_TYPES else (yield value, state[part], part))
    return rebuild(restored)


def _restore_partial(partial: Any, state: Any) -> Restorer:
    _require_dict(NotItemsError, "Partial", state)
    fields = [("args", partial.args), ("keywords", partial.keywords)]
    return _restore_parts(fields, state, lambda found: type(partial)(partial.func, *found[0], **found[1]), _no_item)


def _restore_namedtuple(xs: Any, state: Any) -> Restorer:
    names = xs._fields
    _require_dict(NotADictError, "namedtuple", state)
    if (state := registry.modernize_namedtuple(state, names)) is None:
        raise _error(AbsentItemError, "the old form of a namedtuple is incomplete")
    if set(state) != set(names):
        found, wanted = _set_text(state), _set_text(set(names))
        text = f"The field names of the state dict and the named tuple do not match, got {found} and {wanted}"
        raise _error(StructureMismatchError, text)
    fields = [(name, getattr(xs, name)) for name in names]
    return _restore_parts(fields, state, lambda found: type(xs)(**dict(zip(names, found, strict=True))))


def _restore_dict(xs: dict[Any, Any], state: Any) -> Restorer:
    _check_keys(map(str, xs), state)
    restored = {}
    for key, value in xs.items():
        part = str(key)
        restored[key] = state[part] if type(value) in LEAF_TYPES else (yield value, state[part], part)
    return restored


def _restore_list(xs: list[Any] | tuple[Any, ...], state: Any) -> Restorer:
    _check_length(len(xs), state)
    return _restore_parts(((str(index), value) for index, value in enumerate(xs)), state, type(xs), _no_item)


def _restore_node(target: Any, node: Node, state: Any) -> Restorer:
    """Restore what jax opened."""
    children, name = node.children, type(target).__name__
    if node.kind == "mapping":
        _check_keys(children, state)
        return _restore_parts(children.items(), state, node.rebuild)
    if node.kind == "items":
        _check_length(len(children), state)
        return _restore_parts(children.items(), state, node.rebuild, _no_item)
    _require_dict(NotADictError, name, state)

    def no_field(part: str) -> StructureMismatchError:
        text = f"Missing field {part} in state dict while restoring an instance of {name},"
        return _error(StructureMismatchError, text)

    def rebuild(found: list[Any]) -> Any:
        if unknown := [str(part) for part in state if part not in children]:
            text = f'Unknown field(s) "{",".join(unknown)[:_LONGEST_NAMES]}" in state dict'
            raise _error(StructureMismatchError, f"{text} while restoring an instance of {name}")
        return node.rebuild(found)

    return _restore_parts(children.items(), state, rebuild, no_field)


def _check_keys(wanted: Iterable[str], state: Any) -> None:
    if not isinstance(state, dict):
        _require_dict(NotADictError, "dict", state)
    if absent := [key for key in wanted if key not in state]:
        text = f"target dict contains keys {_set_text(absent)} which are not present in state dict"
        raise _error(StructureMismatchError, f"The target dict keys and state dict keys do not match, {text}")


def _check_length(length: int, state: Any) -> None:
    # As in flax, whatever has a length of 0 is the state of no items.
    if length == 0 and (state.shape[:1] == (0,) if isinstance(state, np.ndarray) else state in (b"", "", [], ())):
        return
    _require_dict(NotItemsError, f"list of {pluralize(length, 'items')}", state)
    if len(state) != length:
        text = f"The size of the list and the state dict do not match, got {length} and {len(state)}"
        raise _error(StructureMismatchError, text)


def _require_dict(kind: type[StructureMismatchError], what: str, state: Any) -> None:
    if not isinstance(state, dict):
        raise _error(kind, f"the target is a {what}, the state a {_describe(state)},")


def _no_item(part: str) -> StructureMismatchError:
    return _error(AbsentItemError, f"the state has no item {part!r}")


def _error(kind: type[StructureMismatchError], text: str) -> StructureMismatchError:
    return kind(f"{text} at path {current_path()}", path=tuple(_place.names[1:]))


def _restore_key(target: Any, state: Any) -> Any:
    """Make typed PRNG keys of uint32 data, of the kind that the target has."""
    if is_typed_key(state):
        return state
    kind = str(target.dtype).removeprefix("key<").removesuffix(">")
    try:
        with jax.transfer_guard_host_to_device("allow"):
            keys = jax.random.wrap_key_data(jax.numpy.asarray(state), impl=registry.key_impl(target))
        if keys.dtype == target.dtype:
            return keys
        cause: Exception = ValueError("jax knows another implementation by its name")
    except (TypeError, ValueError) as error:
        cause = error
    text = f"the target is a PRNG key ({kind}), the state {_describe(state)} cannot be its data ({cause}),"
    raise _error(NotItemsError, text) from cause


def _describe(state: Any) -> str:
    return f"{type(state).__name__} ({state!r:.40})" if type(state) in LEAF_TYPES else type(state).__name__


def _set_text(names: Any) -> str:
    """Print names as flax prints a set, but always in the same order."""
    return "{" + shorten(", ".join(sorted(map(repr, names))), _LONGEST_NAMES) + "}"


_RESTORERS: Final[dict[type, Callable[[Any, Any], Restorer]]] = {
    dict: _restore_dict,
    list: _restore_list,
    tuple: _restore_list,
    jax.tree_util.Partial: _restore_partial,
}
