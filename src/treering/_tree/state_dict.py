"""Pytree -> state dict: nested plain dicts with str keys around leaves, as flax.serialization defines them.

The walk keeps its own stack, so depth is bounded by memory and not by Python's recursion limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import jax

from treering._codec.msgpack.wire import MAX_DEPTH
from treering._tree.registry import (
    LEAF_TYPES,
    REGISTRY,
    flax_overrides,
    flax_serves,
    flax_state,
    is_code,
    is_namedtuple,
    is_typed_key,
    opened_node,
    text_keyed,
)
from treering.errors import TreeringError, Unsupported


class TooDeep(Unsupported):
    """Deeper than a file may be."""


class NotStringKey(Unsupported, AssertionError):
    """flax asserts that a handler's keys are str."""


def to_state_dict(target: Any) -> Any:
    """Return the state of ``target`` as nested dicts with str keys; a leaf is returned as it is.

    dicts keep their order and their keys' text; lists and tuples become ``{"0": .., "1": ..}``; namedtuples,
    dataclasses and other pytree nodes give their fields. Static fields are left out, a function below a registered
    class becomes None (``from_state_dict`` takes both from its target), and a typed PRNG key gives its uint32 data.
    Arrays are not copied.

    Raises:
        Unsupported: keys that are alike as text, a handler's key that is no str, more than 131,072 levels.

    Source: flax.serialization.to_state_dict.

    Example:
        >>> to_state_dict({"a": [1, 2], 3: (None,)})
        {'a': {'0': 1, '1': 2}, '3': {'0': None}}
    """
    state, refused = partial_state_dict(target)
    if refused:
        raise refused[0]
    return state


def partial_state_dict(target: Any) -> tuple[Any, list[TreeringError]]:
    """Return the state dict with None for every branch that was refused, and why each was."""
    keys: list[str] = []
    refused: list[TreeringError] = []
    root: dict[str, Any] = {}
    frames: list[tuple[Iterator[tuple[str, Any]], dict[str, Any], bool]] = [(iter([("", target)]), root, False)]
    while frames:
        pairs, out, in_class = frames[-1]
        for key, value in pairs:
            if type(value) in LEAF_TYPES:
                out[key] = value
                continue
            keys.append(key)
            try:
                opened = _opened(value, in_class, len(frames))
            except TreeringError as error:
                error.path = error.path or tuple(keys[1:])
                refused.append(error)
                if isinstance(error, TooDeep):  # a tree that holds itself has no end
                    return None, refused
                opened = [None]
            if type(opened) is tuple:
                inner: dict[str, Any] = {}
                out[key] = inner
                frames.append((iter(opened[0]), inner, opened[1]))
                break
            out[key] = opened[0]
            keys.pop()
        else:
            frames.pop()
            if keys:
                keys.pop()
    return root[""], refused


def _opened(value: Any, in_class: bool, depth: int) -> tuple[Iterable[tuple[str, Any]], bool] | list[Any]:
    """Return a container's pairs (and whether they stand below a class), or the finished value in a list of one."""
    if depth > MAX_DEPTH:
        raise TooDeep(f"the tree is more than {MAX_DEPTH} containers deep; it may hold itself")
    kind = type(value)
    entry = REGISTRY.get(kind)
    if entry is not None:
        return [_from_handler(entry[0](value))]
    pairs_of = _PAIRS.get(kind)
    if pairs_of is not None:
        return pairs_of(value), in_class
    if is_namedtuple(value):
        return [(field, getattr(value, field)) for field in value._fields], in_class
    if is_typed_key(value):
        return [jax.random.key_data(value)] if isinstance(value, jax.Array) else [value]
    node = None if flax_overrides(kind) else opened_node(value)
    if node is not None:
        return node.children.items(), in_class or node.kind != "mapping"
    if flax_serves(kind):
        return [_from_handler(flax_state(value))]
    return [None if in_class and is_code(value) else value]


def _from_handler(state: Any) -> Any:
    if isinstance(state, dict):
        for key in state:
            if not isinstance(key, str):
                raise NotStringKey(f"A state dict must only have string keys. Found {key!r:.80}")
    return state


def _dict_pairs(xs: dict[Any, Any]) -> Iterable[tuple[str, Any]]:
    """Return a dict's pairs with the text of its keys."""
    if all(type(key) is str for key in xs):
        return xs.items()
    return text_keyed(xs).items()


def _list_pairs(xs: list[Any] | tuple[Any, ...]) -> Iterable[tuple[str, Any]]:
    """Return a list's or tuple's pairs, numbered from "0" on."""
    return ((str(index), value) for index, value in enumerate(xs))


def _partial_pairs(partial: Any) -> Iterable[tuple[str, Any]]:
    """Return what a ``jax.tree_util.Partial`` stores: its arguments; the function comes from the target."""
    return [("args", partial.args), ("keywords", partial.keywords)]


_PAIRS: Final[dict[type, Callable[[Any], Iterable[tuple[str, Any]]]]] = {
    dict: _dict_pairs,
    list: _list_pairs,
    tuple: _list_pairs,
    jax.tree_util.Partial: _partial_pairs,
}
