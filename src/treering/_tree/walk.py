"""Walks over any pytree that keep the order of its dicts, which jax's own functions sort."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax

from treering._tree.registry import LEAF_TYPES, is_namedtuple, opened_node

__all__ = ["leaves_of", "mapped_with_path", "structure_text"]


def leaves_of(tree: Any) -> Iterator[Any]:
    """Yield the leaves in the order of the tree; None is no leaf.

    Example:
        >>> list(leaves_of({"b": [1, None], "a": (2,)}))
        [1, 2]
    """
    pending = [tree]
    while pending:
        x = pending.pop()
        if type(x) in LEAF_TYPES:
            if x is not None:
                yield x
            continue
        children = _children(x)
        if children is None:
            yield x
        else:
            pending.extend(reversed(children))


def _children(x: Any) -> list[Any] | None:
    if type(x) is dict:
        return list(x.values())
    if type(x) in (list, tuple) or is_namedtuple(x):
        return list(x)
    node = opened_node(x)
    return None if node is None else list(node.children.values())


def structure_text(tree: Any) -> str:
    """Return jax's text of the tree's structure, or why jax has none for it."""
    try:
        return str(jax.tree.structure(tree))
    except (TypeError, ValueError) as error:  # dict keys that jax cannot sort
        return f"no jax structure: {error}"


def mapped_with_path(
    f: Callable[[tuple[str, ...], Any], Any],
    tree: Any,
    is_leaf: Callable[[Any], bool] | None,
    path: tuple[str, ...] = (),
) -> Any:
    """Return ``tree`` with ``f(path, leaf)`` for each leaf; None is a leaf."""
    if tree is None or (is_leaf is not None and is_leaf(tree)):
        return f(path, tree)
    if type(tree) is dict:
        return {key: mapped_with_path(f, value, is_leaf, (*path, str(key))) for key, value in tree.items()}
    node = opened_node(tree)
    if node is None:
        return f(path, tree)
    return node.rebuild(
        {part: mapped_with_path(f, child, is_leaf, (*path, part)) for part, child in node.children.items()}
    )
