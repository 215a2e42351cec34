"""Pytree -> state dict: nested plain dicts with str keys around leaves, as flax.serialization defines them.

The walk keeps its own stack, so depth is bounded by memory and not by Python's recursion limit. The
walks over any pytree keep the order of its dicts, which jax's own functions sort.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np

from treering._codec.msgpack.window import MAX_DEPTH
from treering._printable import MOST_LINES, kind_of, list_lines, printable, shorten
from treering._tree import registry
from treering._tree.registry import LEAF_TYPES, REGISTRY, is_code, is_namedtuple, is_typed_key, open_pytree_node
from treering._values.human import build_mismatch, near, pluralize
from treering._values.keys import Trail, unwind
from treering.errors import TooDeepError, TreeringError, UnsupportedError

_LONGEST_KEY: Final = 400
_COMPARED: Final = 1000  # names that are compared for likeness, which takes time with the square
_PYTHON_LEAVES: Final = (bool, int, float, complex, str, bytes)


class NotStringKeyError(UnsupportedError, AssertionError):
    """flax asserts that a handler's keys are str."""


def to_state_dict(target: Any) -> Any:
    """Return the state of ``target`` as nested dicts with str keys; a leaf is returned as it is.

    dicts keep their order and their keys' text; lists and tuples become ``{"0": .., "1": ..}``; namedtuples,
    dataclasses and other pytree nodes give their fields. Static fields are left out, a function below a registered
    class becomes None (``from_state_dict`` takes both from its target), and a typed PRNG key gives its uint32 data.
    Arrays are not copied.

    Raises:
        UnsupportedError: keys that are alike as text, a handler's key that is no str, more than 131,072 levels.

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
                opened = _open_value(value, in_class, len(frames))
            except TreeringError as error:
                error.path = error.path or tuple(keys[1:])
                refused.append(error)
                if isinstance(error, TooDeepError):  # a tree that holds itself has no end
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


def _open_value(value: Any, in_class: bool, depth: int) -> tuple[Iterable[tuple[str, Any]], bool] | list[Any]:
    """Return a container's pairs (and whether they stand below a class), or the finished value in a list of one."""
    if depth > MAX_DEPTH:
        raise TooDeepError(f"the tree is more than {MAX_DEPTH} containers deep; it may hold itself")
    kind = type(value)
    if (entry := REGISTRY.get(kind)) is not None:
        return [_from_handler(entry[0](value))]
    if (pairs_of := _PAIRS.get(kind)) is not None:
        return pairs_of(value), in_class
    if is_namedtuple(value):
        return [(field, getattr(value, field)) for field in value._fields], in_class
    if is_typed_key(value):
        return [jax.random.key_data(value)] if isinstance(value, jax.Array) else [value]
    node = None if registry.flax_overrides(kind) else open_pytree_node(value)
    if node is not None:
        return node.children.items(), in_class or node.kind != "mapping"
    if registry.flax_serves(kind):
        return [_from_handler(registry.flax_state(value))]
    return [None if in_class and is_code(value) else value]


def _from_handler(state: Any) -> Any:
    if isinstance(state, dict):
        for key in state:
            if not isinstance(key, str):
                raise NotStringKeyError(f"A state dict must only have string keys. Found {key!r:.80}")
    return state


_PAIRS: Final[dict[type, Callable[[Any], Iterable[tuple[str, Any]]]]] = {
    dict: lambda xs: (xs if all(type(key) is str for key in xs) else registry.key_by_text(xs)).items(),
    list: lambda xs: ((str(index), value) for index, value in enumerate(xs)),
    tuple: lambda xs: ((str(index), value) for index, value in enumerate(xs)),
    # The function comes from the target.
    jax.tree_util.Partial: lambda partial: [("args", partial.args), ("keywords", partial.keywords)],
}


def require_match(target: Any, state: Any) -> None:
    """Raise where ``state`` would change structure, shape or dtype of ``target``.

    Raises:
        MismatchError: with ``differences``, one line for each.

    Example:
        >>> import numpy as np
        >>> require_match({"w": np.zeros(2)}, {"w": np.zeros(3), "b": 1})
        Traceback (most recent call last):
            ...
        treering.errors.MismatchError: 2 differences between the target and the data:
          b: unexpected, the data has int
          w: wanted float64[2], found float64[3]
    """
    found = differences(target, state) if target is not None else []
    if found:
        count = pluralize(len(found), "differences")
        raise build_mismatch(f"{count} between the target and the data:{list_lines(found)}", found)


def differences(target: Any, state: Any) -> list[str]:
    """Return one line for each difference in structure, shape or dtype, sorted by key path."""
    unlike: dict[tuple[str, ...], str] = {}
    missing: dict[tuple[str, ...], str] = {}
    unexpected: dict[tuple[str, ...], str] = {}
    pending: list[tuple[Trail, Any, Any]] = [(None, to_state_dict(target), state)]
    while pending:
        trail, wanted, found = pending.pop()
        if not (isinstance(wanted, dict) and isinstance(found, dict)):
            wanted_text, found_text = _describe(wanted), _describe(found)
            if wanted_text != found_text:
                unlike[unwind(trail)] = f"wanted {wanted_text}, found {found_text}"
            continue
        modern = registry.modernize_namedtuple(found, wanted)
        found = found if modern is None else modern
        missing |= {unwind((trail, str(key))): _describe(wanted[key]) for key in wanted.keys() - found.keys()}
        for key in found.keys() - wanted.keys():
            unexpected[unwind((trail, str(key)))] = _describe(found[key])
        pending.extend(((trail, str(key)), wanted[key], found[key]) for key in wanted.keys() & found.keys())
    lines = unlike | {path: f"unexpected, the data has {kind}" for path, kind in unexpected.items()}
    others = {"/".join(path): kind for path, kind in unexpected.items()}
    for number, (path, kind) in enumerate(sorted(missing.items())):
        close = suggest("/".join(path), kind, others, " in the data") if number < MOST_LINES else ""
        lines[path] = f"missing, the target has {kind}{close}"
    return [f"{shown_key('/'.join(path)) or '.'}: {lines[path]}" for path in sorted(lines)]


def suggest(key: str, kind: str, others: Mapping[str, str], where: str = "") -> str:
    """Name the key that was probably meant: the most alike one whose leaf is of the same kind."""
    alike = (other for other, found in others.items() if found == kind)
    close = near(key, itertools.islice(alike, _COMPARED), cutoff=0.5)
    return f" (is it {shown_key(close)!r}{where}?)" if close else ""


def shown_key(key: str) -> str:
    """Cut a key from a file to a length for people, and escape what could move a cursor."""
    return printable(shorten(key, _LONGEST_KEY))


def _describe(leaf: Any) -> str:
    """Return what must agree: dtype and shape of an array, the type of a Python leaf."""
    if isinstance(leaf, dict):
        return f"a branch of {len(leaf)}"
    if is_typed_key(leaf):
        data = jax.eval_shape(jax.random.key_data, leaf)
        return f"{data.dtype.name}{list(data.shape)}"
    if registry.has_shape_and_dtype(leaf):
        return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"
    if leaf is None:
        return "None"
    if isinstance(leaf, bytearray | memoryview):
        return "bytes"
    return type(leaf).__name__ if type(leaf) in _PYTHON_LEAVES else kind_of(leaf)


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves in the order of the tree; None is no leaf.

    Raises:
        TooDeepError: more levels than a file may have; the tree may hold itself.

    Example:
        >>> list(leaves_of({"b": [1, None], "a": (2,)}))
        [1, 2]
    """
    pending = [(0, tree)]
    while pending:
        depth, x = pending.pop()
        if type(x) in LEAF_TYPES:
            if x is not None:
                yield x
            continue
        if (opened := _open_node(x)) is None:
            yield x
        elif depth > MAX_DEPTH:
            raise TooDeepError(f"the tree is more than {MAX_DEPTH} containers deep; it may hold itself")
        else:
            pending.extend((depth + 1, child) for child in reversed(opened[0].values()))


def _open_node(x: Any) -> tuple[dict[Any, Any], Callable[[list[Any]], Any]] | None:
    """Return a node's children by key, and what makes such a node of other children; None for a leaf."""
    if type(x) is dict:
        return x, lambda mapped: dict(zip(x, mapped, strict=True))
    try:
        node = open_pytree_node(x)
    except UnsupportedError:
        if not isinstance(x, Mapping):
            raise
        # Keys that are alike as text, which only a state dict cannot hold.
        return dict(x), lambda mapped: type(x)(dict(zip(x, mapped, strict=True)))  # type: ignore[call-arg]
    return None if node is None else (node.children, node.rebuild)


def structure_text(tree: Any) -> str:
    """Return jax's text of the tree's structure, or why jax has none for it."""
    try:
        return str(jax.tree.structure(tree))
    except (TypeError, ValueError) as error:  # dict keys that jax cannot sort
        return f"no jax structure: {error}"
    except (RecursionError, SystemError):  # jax recurses in C++, whose binding turns the one into the other
        return "no jax structure: nested too deep for jax"


def map_with_path(f: Callable[[tuple[str, ...], Any], Any], tree: Any, is_leaf: Callable[[Any], bool] | None) -> Any:
    """Return ``tree`` with ``f(path, leaf)`` for each leaf, called in order; None is a leaf."""
    root: list[Any] = []
    # Each step maps one child into its parent's results, or rebuilds a node whose children are all mapped.
    steps: list[tuple[list[Any], Any, Trail, Callable[[list[Any]], Any] | None]] = [(root, tree, None, None)]
    while steps:
        into, x, trail, rebuild = steps.pop()
        if rebuild is not None:
            into.append(rebuild(x))
            continue
        stops = x is None or (is_leaf is not None and is_leaf(x))
        opened = None if stops else _open_node(x)
        if opened is None:
            into.append(f(unwind(trail), x))
            continue
        children, remake = opened
        mapped: list[Any] = []
        steps.append((into, mapped, trail, remake))
        steps.extend((mapped, child, (trail, str(part)), None) for part, child in reversed(children.items()))
    return root[0]
