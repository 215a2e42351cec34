"""Walks over any pytree that keep the order of its dicts, which jax's own functions sort."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from treering._codec.msgpack.wire import MAX_DEPTH
from treering._tree.registry import LEAF_TYPES, open_pytree_node
from treering._tree.state_dict import TooDeep
from treering._values.keys import Trail, unwind
from treering.errors import Unsupported


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves in the order of the tree; None is no leaf.

    Raises:
        TooDeep: more levels than a file may have; the tree may hold itself.

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
            raise TooDeep(f"the tree is more than {MAX_DEPTH} containers deep; it may hold itself")
        else:
            pending.extend((depth + 1, child) for child in reversed(opened[0].values()))


def _open_node(x: Any) -> tuple[dict[Any, Any], Callable[[list[Any]], Any]] | None:
    """Return a node's children by key, and what makes such a node of other children; None for a leaf."""
    if type(x) is dict:
        return x, lambda mapped: dict(zip(x, mapped, strict=True))
    try:
        node = open_pytree_node(x)
    except Unsupported:
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
