"""Which types turn into state dicts, and how: the handlers, the pytree nodes, and flax's own registry.

A type is looked for in this order: handlers registered here (exact type, as flax does), namedtuples, jax pytree nodes,
and last what only a loaded flax knows. Everything else is a leaf.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import numpy as np

from treering.errors import Unsupported

__all__ = [
    "LEAF_TYPES",
    "REGISTRY",
    "Node",
    "flax_serves",
    "is_namedtuple",
    "is_serializable",
    "is_typed_key",
    "opened_node",
    "register_serialization_state",
]

ToState = Callable[[Any], Any]
FromState = Callable[[Any, Any], Any]

REGISTRY: Final[dict[Any, tuple[ToState, FromState]]] = {}

# Types that are surely leaves, so that the walk over 10,000 arrays asks nobody. Grows by jax's array type.
LEAF_TYPES: Final[set[type]] = {np.ndarray, type(None), bool, int, float, complex, str, bytes}


def register_serialization_state(
    ty: type, ty_to_state_dict: ToState, ty_from_state_dict: FromState, override: bool = False
) -> None:
    """Register how instances of ``ty`` become a state dict and back.

    Args:
        ty: the exact type; subclasses are not covered.
        ty_to_state_dict: ``f(instance)`` returns a dict with str keys; it calls ``to_state_dict`` on what it holds.
        ty_from_state_dict: ``f(target, state)`` returns a new instance; it calls ``from_state_dict`` likewise.
        override: replace a handler that is there.

    Raises:
        ValueError: ``ty`` has a handler and ``override`` is False.

    Source: flax.serialization.register_serialization_state.

    Example:
        >>> class Counter:
        ...     def __init__(self, n):
        ...         self.n = n
        >>> register_serialization_state(Counter, lambda c: {"n": c.n}, lambda c, s: Counter(s["n"]))
        >>> is_serializable(Counter)
        True
    """
    if ty in REGISTRY and not override:
        raise ValueError(f'a serialization handler for "{ty.__name__}" is already registered')
    REGISTRY[ty] = (ty_to_state_dict, ty_from_state_dict)


def is_serializable(target: Any) -> bool:
    """Tell whether a handler is registered for ``target``'s exact type, here or in a loaded flax.

    This is flax's question, not "can I save this": arrays and numbers say False and can be saved. For that question
    see ``validate_serializable``.

    Example:
        >>> is_serializable({"a": 1}), is_serializable(dict), is_serializable(3)
        (True, True, False)
    """
    ty = target if isinstance(target, type) else type(target)
    return ty in REGISTRY or flax_serves(ty)


def flax_serves(ty: type) -> bool:
    """Tell whether flax is loaded and has a handler for ``ty``."""
    flax_serialization = sys.modules.get("flax.serialization")
    return flax_serialization is not None and bool(flax_serialization.is_serializable(ty))


def is_namedtuple(x: object) -> bool:
    """Tell whether ``x`` is a tuple with named fields."""
    return isinstance(x, tuple) and hasattr(x, "_fields")


def is_typed_key(x: object) -> bool:
    """Tell whether ``x`` is a typed PRNG key array (``jax.random.key``), or stands for one."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and not isinstance(dtype, np.dtype) and jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A pytree node opened by one level."""

    children: dict[str, Any]
    """Key text -> child, in the order in which a state dict lists them."""

    kind: str
    """"mapping", "fields" or "items": how the node names its children."""

    rebuild: Callable[[dict[str, Any]], Any]
    """Makes a node of the same type and static data from other children."""


def opened_node(x: Any) -> Node | None:
    """Open ``x`` by one level where jax knows its type as a pytree node; None for a leaf.

    Raises:
        Unsupported: two children have the same key text.
    """
    pairs, treedef = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda y: y is not x)
    if jax.tree_util.treedef_is_leaf(treedef) and treedef.num_leaves == 1:
        if isinstance(x, np.generic) or (isinstance(x, jax.Array) and not is_typed_key(x)):
            LEAF_TYPES.add(type(x))
        return None
    keys = [_key_text(path[0]) for path, _ in pairs]
    children = dict(zip(keys, (child for _, child in pairs), strict=True))
    if len(children) != len(keys):
        raise Unsupported(f"two children of a {type(x).__name__} have the same key text among {keys}")

    def rebuild(restored: dict[str, Any]) -> Any:
        return jax.tree_util.tree_unflatten(treedef, [restored[key] for key in keys])

    if isinstance(x, Mapping):
        return _mapping_node(x, children, rebuild)
    entries = {type(path[0]) for path, _ in pairs}
    by_index = entries <= {jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey} and bool(entries)
    return Node(children=children, kind="items" if by_index else "fields", rebuild=rebuild)


def _mapping_node(x: Mapping[Any, Any], children: dict[str, Any], rebuild: Callable[[dict[str, Any]], Any]) -> Node:
    """Keep the mapping's own order, which jax's sorted flattening loses."""
    own_order = [str(key) for key in x]
    if set(own_order) == set(children):
        children = {key: children[key] for key in own_order}
    frozen = sys.modules.get("flax.core.frozen_dict")
    if frozen is not None and type(x) is frozen.FrozenDict:
        originals = {str(key): key for key in x}
        frozen_dict = frozen.FrozenDict
        rebuild = lambda restored: frozen_dict({originals[key]: value for key, value in restored.items()})  # noqa: E731
    return Node(children=children, kind="mapping", rebuild=rebuild)


def _key_text(entry: Any) -> str:
    for name in ("key", "name", "idx"):
        if hasattr(entry, name):
            return str(getattr(entry, name))
    return str(entry)
