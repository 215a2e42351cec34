"""Dicts around leaves that are known by their paths alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from treering._format.index import MAX_LEVELS, Container, Token
from treering._values.keys import join_key
from treering.errors import Format

Nested: TypeAlias = "dict[str, int | Nested]"
"""Numbers of leaves in nested dicts, below a root of one key, so that a leaf may be the whole tree."""


def nest_paths(paths: Iterable[tuple[str, ...]]) -> tuple[list[Token], list[int]]:
    """Return dicts around leaves at these paths, and the numbers of the paths in the order of the tree.

    Raises:
        Format: a path is there twice, or inside another one, or has more than 1,024 parts.

    Example:
        >>> structure, order = nest_paths([("a", "w"), ("b",), ("a", "b")])
        >>> [token.keys if isinstance(token, Container) else token for token in structure], order
        ([('a', 'b'), ('w', 'b'), 3], [0, 2, 1])
    """
    root: Nested = {}
    for number, path in enumerate(paths):
        if len(path) >= MAX_LEVELS:
            raise Format(f"{join_key(path)!r:.200} is more than {MAX_LEVELS} containers deep")
        node = root
        *above, last = ("", *path)
        for part in above:
            inner = node.setdefault(part, {})
            if isinstance(inner, int):
                raise Format(f"{join_key(path)!r:.200} lies inside another leaf")
            node = inner
        if node.setdefault(last, number) != number:
            raise Format(f"there are two leaves at {join_key(path)!r:.200}, or others inside it")
    return flatten_nested(root)


def flatten_nested(root: Nested) -> tuple[list[Token], list[int]]:
    """Return the dicts around the leaves, and the numbers of these in the order of the tree.

    Args:
        root: the nested dicts; empty for a tree without leaves, which is one empty dict.

    Example:
        >>> flatten_nested({"": 0})
        ([1], [0])
    """
    structure: list[Token] = []
    order: list[int] = []
    run = 0
    levels: list[Iterator[int | Nested]] = [iter((root or {"": {}}).values())]
    while levels:
        if (child := next(levels[-1], None)) is None:
            levels.pop()
        elif isinstance(child, int):
            order.append(child)
            run += 1
        else:
            structure += [run] if run else []
            run = 0
            structure.append(Container(node="dict", keys=tuple(child)))
            levels.append(iter(child.values()))
    return [*structure, run] if run else structure, order
