"""A tree's nodes, opened one level at a time: the head that goes into a file, the children, and the way back."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import jax

from treering._format.index import Container
from treering._format.key_text import key_text
from treering._format.structure import KEYS, class_name
from treering._tree.flatten_leaves import hidden_array
from treering._tree.registry import LEAF_TYPES, REGISTRY, Node, flax_serves, is_namedtuple, opened_node
from treering._tree.restore import from_state_dict
from treering._tree.stand_in import StandIn
from treering._tree.state_dict import to_state_dict
from treering._tree.static_text import key_value, static_value
from treering.errors import Unsupported

_STATE: Final = "state"

Rebuild = Callable[[list[Any]], Any]
"""Makes a node of the same class and static fields from other children, in the same order."""


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """A node opened by one level."""

    container: Container
    """What a file says of it."""
    children: Sequence[Any]
    """Its children, in the order of the container's keys."""
    rebuild: Rebuild
    """Makes another one of other children."""


def opened(x: Any) -> Opened | None:
    """Open ``x`` by one level; None for a leaf.

    dict, list, tuple and namedtuple are opened here, everything else that jax knows as a pytree node by jax. Below
    them come types that have only a state-dict handler, here or in a loaded flax, and last dataclasses that nobody
    registered, by their fields.

    Raises:
        Unsupported: keys that are alike as text, or a node that jax cannot open.
    """
    kind = type(x)
    if kind is jax.ShapeDtypeStruct:
        return None
    if kind is dict:
        return Opened(Container(node="dict", keys=_keys(x)), list(x.values()), functools.partial(_dict, list(x)))
    if kind is list or kind is tuple:
        return Opened(Container(node=kind.__name__, keys=tuple(range(len(x)))), x, kind)
    if kind is StandIn:
        return _other(x.class_name, x.fields, x.static, functools.partial(_stand_in, x))
    if is_namedtuple(x):
        head = Container(node="namedtuple", keys=tuple(x._fields), class_name=class_name(kind))
        return Opened(head, tuple(x), kind._make)
    if kind is jax.tree_util.Partial:
        fields = {"args": x.args, "keywords": x.keywords}
        return _other(class_name(kind), fields, {"func": x.func}, functools.partial(_partial, x.func))
    if kind in LEAF_TYPES:
        return None
    if isinstance(x, Iterator) and kind.__module__ == "builtins":
        return None  # jax would warn that it is a leaf
    node = opened_node(x)
    if node is not None:
        return _jax_node(x, node)
    if kind in REGISTRY or flax_serves(kind):
        return _handled(x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return _plain_dataclass(x)
    return None


def _keys(keys: Iterable[Any]) -> tuple[Any, ...]:
    """Return dict keys as a file holds them.

    Raises:
        Unsupported: two are alike as text, or one has no text.
    """
    found = tuple(keys)
    if all(type(key) is str for key in found):
        return found
    held: list[Any] = []
    texts: dict[str, Any] = {}
    for key in found:
        try:
            value = key_value(key)
            text = key_text(value)
        except (ValueError, RecursionError) as error:  # an int of more digits than Python prints, endless tuples
            if isinstance(error, Unsupported):
                raise
            raise Unsupported(f"a dict key has no text: {error}") from error
        if text in texts:
            raise Unsupported(
                f"the dict keys {texts[text]!r:.200} and {key!r:.200} are alike once they are text",
                hint="rename one of them",
            )
        texts[text] = key
        held.append(value)
    return tuple(held)


def _dict(keys: list[Any], children: list[Any]) -> dict[Any, Any]:
    return dict(zip(keys, children, strict=True))


def _other(name: str, fields: Mapping[Any, Any], static: Mapping[str, Any], rebuild: Rebuild) -> Opened:
    """Return a node of a class; keys that are no str are a static of their own, its fields are their texts."""
    keys = _keys(fields)
    statics = {name: static_value(value) for name, value in static.items()}
    if any(type(key) is not str for key in keys):
        statics[KEYS] = keys
    head = Container(node="other", keys=tuple(map(key_text, keys)), class_name=name, static=tuple(statics.items()))
    return Opened(head, list(fields.values()), rebuild)


def _stand_in(x: StandIn, children: list[Any]) -> StandIn:
    return StandIn(x.class_name, dict(zip(x.fields, children, strict=True)), x.static)


def _partial(func: Callable[..., Any], children: list[Any]) -> Any:
    return jax.tree_util.Partial(func, *children[0], **children[1])  # type: ignore[no-untyped-call]


def _jax_node(x: Any, node: Node) -> Opened:
    texts = list(node.children)

    def rebuild(children: list[Any]) -> Any:
        return node.rebuild(dict(zip(texts, children, strict=True)))

    fields: Mapping[Any, Any] = node.children
    known = _field_values(x) if dataclasses.is_dataclass(x) else None
    if known is not None and node.children.keys() <= known.keys():
        static = {name: value for name, value in known.items() if name not in node.children}
    elif isinstance(x, Mapping):
        own = list(x)
        if list(map(str, own)) == texts:
            fields = dict(zip(own, node.children.values(), strict=True))
        static = {"default_factory": x.default_factory} if type(x) is collections.defaultdict else {}
    else:
        static = {} if node.aux is None else {"aux": node.aux}
    return _other(class_name(type(x)), fields, static, rebuild)


def _field_values(x: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that are set."""
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if hasattr(x, field.name)}


def _handled(x: Any) -> Opened:
    """Open what only a state-dict handler knows: its state dict, or the one thing that the handler returns."""
    state = to_state_dict(x)
    whole = not isinstance(state, dict)
    fields = {_STATE: state} if whole else state

    def rebuild(children: list[Any]) -> Any:
        return from_state_dict(x, children[0] if whole else dict(zip(fields, children, strict=True)))

    return _other(class_name(type(x)), fields, {}, rebuild)


def _plain_dataclass(x: Any) -> Opened | None:
    """Open a dataclass that nobody registered; None where its fields are not what its instances store.

    Raises:
        Unsupported: an array lies in an attribute that is no field; ``like`` would give an old one back.
    """
    fields = _field_values(x)
    if any(isinstance(getattr(type(x), name, None), property) for name in fields):
        return None
    place = hidden_array(x, fields)
    if place is not None:
        raise Unsupported(
            f"a {class_name(type(x))} holds an array in {place!r}, which is no field of it",
            hint="make it a field, or register the class as a pytree node",
        )

    def rebuild(children: list[Any]) -> Any:
        result = copy.copy(x)
        for name, child in zip(fields, children, strict=True):
            object.__setattr__(result, name, child)
        return result

    return _other(class_name(type(x)), fields, {}, rebuild)
