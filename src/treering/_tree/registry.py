"""Which types turn into state dicts, and how: the handlers, the pytree nodes, and flax's own registry.

A type is looked for in this order: handlers registered here (exact type, as flax does), namedtuples, jax pytree nodes,
and last what only a loaded flax knows. Everything else is a leaf.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import jax
import numpy as np

from treering._printable import kind_of
from treering.errors import TreeringError, UnsupportedError


class AlreadyRegisteredError(TreeringError, ValueError):
    """flax raises ValueError."""


ToState = Callable[[Any], Any]
FromState = Callable[[Any, Any], Any]
Rebuild = Callable[[Sequence[Any]], Any]
"""Makes a node of the same class and static data from other children, in the same order."""

BUILT_IN: Final = frozenset({dict, list, tuple, jax.tree_util.Partial})
"""Types that state_dict.py and restore.py walk themselves, unless a handler overrides that."""

REGISTRY: Final[dict[type, tuple[ToState, FromState]]] = {}
"""Handlers that somebody registered."""

# What ``def``, ``lambda``, C, numpy and jax make of functions; classes count, as they make things.
_PYTHON_CODE: Final = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_ARRAY_CODE: Final = (np.ufunc, jax.numpy.ufunc, jax.custom_jvp, jax.custom_vjp, type(jax.jit(lambda: None)))
_CODE_TYPES: Final = (*_PYTHON_CODE, *_ARRAY_CODE, type(functools.lru_cache(lambda: None)))

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
    if (ty in REGISTRY or ty in BUILT_IN) and not override:
        raise AlreadyRegisteredError(f'a serialization handler for "{ty.__name__}" is already registered')
    REGISTRY[ty] = (ty_to_state_dict, ty_from_state_dict)
    LEAF_TYPES.discard(ty)


def is_serializable(target: Any) -> bool:
    """Tell whether a handler is registered for ``target``'s exact type, here or in a loaded flax.

    This is flax's question, not "can I save this": arrays and numbers say False and can be saved. For that question
    see ``validate_serializable``.

    Example:
        >>> is_serializable({"a": 1}), is_serializable(dict), is_serializable(3)
        (True, True, False)
    """
    ty = target if isinstance(target, type) else type(target)
    return ty in REGISTRY or ty in BUILT_IN or flax_serves(ty)


def flax_serves(ty: type) -> bool:
    """Tell whether flax is loaded and has a handler for ``ty``."""
    ask = _flax_function("is_serializable")
    return ask(ty) if ask is not None else ty in _flax_handlers()


def flax_state(value: Any) -> Any:
    """Return the state that flax's handler for the type of ``value`` gives."""
    ask = _flax_function("to_state_dict")
    return ask(value) if ask is not None else _flax_handlers()[type(value)][0](value)


def restore_with_flax(target: Any, state: Any, name: str) -> Any:
    """Return what flax's handler for the type of ``target`` makes of a state; ``name`` is for flax's messages."""
    ask = _flax_function("from_state_dict")
    return ask(target, state, name=name) if ask is not None else _flax_handlers()[type(target)][1](target, state)


def flax_overrides(ty: type) -> bool:
    """Tell whether somebody other than flax gave a loaded flax a handler for ``ty``.

    Such a handler decides what lies in flax's files, also where jax knows the type as a pytree node. flax has no
    public way to ask; where its table moves, the answer is no and the pytree is used.
    """
    handlers = _flax_handlers().get(ty)
    return handlers is not None and not str(getattr(handlers[0], "__module__", "")).startswith("flax.")


def _flax_handlers() -> Mapping[type, tuple[ToState, FromState]]:
    """Return the table of a loaded flax; an empty one where there is none."""
    return getattr(sys.modules.get("flax.serialization"), "_STATE_DICT_REGISTRY", {})


def _flax_function(name: str) -> Callable[..., Any] | None:
    """Return a function of a loaded flax; None where another one was put in its place, which may ask us in turn."""
    flax_serialization = sys.modules.get("flax.serialization")
    if flax_serialization is None or flax_serialization.__name__ != "flax.serialization":
        return None
    found = getattr(flax_serialization, name, None)
    return found if getattr(found, "__globals__", None) is vars(flax_serialization) else None


def is_code(x: object) -> bool:
    """Tell whether ``x`` is a function in some form: code that a target supplies, and no state.

    An object of another class that can be called may hold state, and a ``functools.partial`` may hold arrays; they
    are not code.
    """
    if isinstance(x, functools.partial):
        return is_code(x.func) and not any(map(has_shape_and_dtype, (*x.args, *x.keywords.values())))
    return isinstance(x, _CODE_TYPES)


def is_namedtuple(x: object) -> bool:
    """Tell whether ``x`` is a tuple with named fields."""
    return isinstance(x, tuple) and hasattr(x, "_fields")


def modernize_namedtuple(state: dict[Any, Any], fields: Iterable[str]) -> dict[Any, Any] | None:
    """Return the state of a namedtuple in today's form, also of flax's form from before 2022; None for half of one.

    Example:
        >>> modernize_namedtuple({"name": "P", "fields": {"0": "x"}, "values": {"0": 1}}, ("x",))
        {'x': 1}
    """
    if not set(state) == {"name", "fields", "values"} != set(fields):
        return state
    names, values = state["fields"], state["values"]
    if isinstance(names, dict) and isinstance(values, dict) and names.keys() == values.keys():
        return {str(names[index]): values[index] for index in names}
    return None


def has_shape_and_dtype(x: object) -> bool:
    """Tell whether ``x`` is an array, or stands for one (``jax.ShapeDtypeStruct``); a class like np.float32 is none."""
    return not isinstance(x, type) and hasattr(x, "shape") and hasattr(x, "dtype")


def is_typed_key(x: object) -> bool:
    """Tell whether ``x`` is a typed PRNG key array (``jax.random.key``), or stands for one."""
    # By class and not by attribute: flax's variables answer for the dtype of the key inside them.
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct) and bool(jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key))


def key_impl(keys: Any) -> Any:
    """Return the implementation of typed PRNG keys, also of abstract ones: its name, or what jax has in place of one.

    Example:
        >>> key_impl(jax.eval_shape(lambda: jax.random.key(0, impl="rbg")))
        'rbg'
    """
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), keys)
    return found[0]


def key_dtype(impl: Any) -> Any:
    """Return the dtype of keys of an implementation; None where jax knows no such implementation."""
    try:
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A pytree node opened by one level."""

    children: dict[str, Any]
    """Key text -> child, in the order in which a state dict lists them."""

    kind: str
    """"mapping", "fields" or "items": how the node names its children."""

    rebuild: Rebuild
    """Makes another one."""

    aux: Any = None
    """What the type keeps beside its children, as it gave it to jax; None for mappings."""


def open_pytree_node(x: Any) -> Node | None:
    """Open ``x`` by one level where jax knows its type as a pytree node; None for a leaf.

    Raises:
        UnsupportedError: two children have the same key text.
    """
    if (remake := _dict_maker(x)) is not None:
        return Node(children=key_by_text(x), kind="mapping", rebuild=lambda found: remake(zip(x, found, strict=True)))
    # False for x itself, True for whatever lies in it, even if that is x again.
    answers = iter((False,))
    try:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda _: next(answers, True))
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"jax cannot open {kind_of(x)}: {error}") from error
    if len(pairs) == 1 and not pairs[0][0]:
        if isinstance(x, np.generic) or (isinstance(x, jax.Array) and not is_typed_key(x)):
            LEAF_TYPES.add(type(x))
        return None
    keys = [_key_text(path[0]) for path, _ in pairs]
    children = dict(zip(keys, (child for _, child in pairs), strict=True))
    if len(children) != len(keys):
        raise UnsupportedError(f"two children of {kind_of(x)} have the same key text among {keys}")

    if isinstance(x, Mapping):
        own_order = [str(key) for key in x]  # which jax's sorted flattening loses
        if set(own_order) == set(children):
            children = {key: children[key] for key in own_order}

        def rebuild(found: Sequence[Any]) -> Any:
            by_key = dict(zip(children, found, strict=True))
            return jax.tree_util.tree_unflatten(treedef, [by_key[key] for key in keys])

        return Node(children=children, kind="mapping", rebuild=rebuild)
    entries = {type(path[0]) for path, _ in pairs}
    by_index = entries <= {jax.tree_util.SequenceKey, jax.tree_util.FlattenedIndexKey} and bool(entries)
    _, aux = treedef.node_data() or (None, None)  # type: ignore[attr-defined]  # absent from jaxlib's stubs
    remake_node = functools.partial(jax.tree_util.tree_unflatten, treedef)
    return Node(children=children, kind="items" if by_index else "fields", rebuild=remake_node, aux=aux)


def _dict_maker(x: Any) -> Callable[[Iterable[tuple[Any, Any]]], Any] | None:
    """Return what makes another dict of ``x``'s kind, for the kinds whose keys jax would sort or refuse."""
    kind = type(x)
    if kind is collections.defaultdict:
        return functools.partial(collections.defaultdict, x.default_factory)
    frozen = getattr(sys.modules.get("flax.core.frozen_dict"), "FrozenDict", None)
    return kind if kind in (collections.OrderedDict, frozen) else None


def key_by_text(xs: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the mapping with the text of its keys.

    Raises:
        UnsupportedError: keys that are alike as text.
    """
    texts = {_text(key): value for key, value in xs.items()}
    if len(texts) != len(xs):
        counts = collections.Counter(map(_text, xs))
        clash = sorted(repr(key) for key in xs if counts[_text(key)] > 1)
        alike = ", ".join(clash)[:400]
        raise UnsupportedError(f"Dict keys do not have a unique string representation: {alike} have the same text")
    return texts


def _text(key: Any) -> str:
    try:
        return str(key)
    except ValueError as error:  # an int of more digits than Python prints
        raise UnsupportedError(f"a dict key has no text: {error}") from error


def _key_text(entry: Any) -> str:
    return str(next((getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name)), entry))
