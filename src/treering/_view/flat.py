"""A listing as a flat sequence: key text and leaf, one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from treering._values.keys import Glob, escape_part
from treering._view.nodes import children_of, is_branch
from treering._view.plain import cut

LONGEST_KEY = 1000
"""A longer key text is cut in its middle: a hostile file may nest 100,000 names."""

_Frame = tuple[str, int, tuple[int, ...] | None, Iterator[tuple[str, Any]]]


def leaves_of(root: Any, globs: Sequence[Glob] = ()) -> Iterator[tuple[str, Any]]:
    """Walk through the leaves in the file's order, each with its key text.

    Without globs all of them. A glob keeps the leaves that it matches, and everything below a branch that it matches.

    Example:
        >>> list(leaves_of({"a": {"b": 1, "c/d": 2}, "e": 3}))
        [('a/b', 1), ('a/c~1d', 2), ('e', 3)]
        >>> list(leaves_of({"a": {"b": 1}, "e": 3}, [Glob.parse("a")]))
        [('a/b', 1)]
    """
    return ((key, node) for key, node in nodes_of(root, globs) if not is_branch(node))


def branches_of(root: Any) -> Iterator[tuple[str, Any]]:
    """Walk through the branches in the file's order, each with its key text; the root's is empty.

    Example:
        >>> [key for key, _ in branches_of({"a": {"b": {}}, "e": 3})]
        ['', 'a', 'a/b']
    """
    return ((key, node) for key, node in nodes_of(root) if is_branch(node))


def nodes_of(root: Any, globs: Sequence[Glob] = ()) -> Iterator[tuple[str, Any]]:
    """Walk through branches and leaves, each branch before what it holds.

    With globs only what one of them matches, or lies below a branch that one matches.

    Example:
        >>> [key for key, _ in nodes_of({"a": [1, 2]})]
        ['', 'a', 'a/0', 'a/1']
    """
    start = _settled(globs, tuple(glob.start for glob in globs)) if globs else None
    if start is None:
        yield "", root
    if not is_branch(root):
        return
    stack: list[_Frame] = [("", 0, start, children_of(root))]
    while stack:
        above, depth, states, children = stack[-1]
        for name, node in children:
            key = child_key(above, depth, name)
            below = states
            if states is not None:
                moved = (glob.step(state, name) for glob, state in zip(globs, states, strict=True))
                below = _settled(globs, tuple(moved))
            if below is None:
                yield key, node
            if is_branch(node) and (below is None or any(below)):
                stack.append((key, depth + 1, below, children_of(node)))
                break
        else:
            stack.pop()


def child_key(above: str, depth: int, name: str) -> str:
    """Write the key text of a child, as join_key does: a lone empty part is "~", because the empty text is the root.

    Args:
        above: the key text of its branch, perhaps cut.
        depth: steps from the root to that branch.
        name: the child's name, not escaped.

    Example:
        >>> child_key("", 0, "a"), child_key("a", 1, "b/c"), child_key("", 0, ""), child_key("~", 1, "")
        ('a', 'a/b~1c', '~', '/')
    """
    part = escape_part(name)
    if not depth:
        key = part or "~"
    elif depth == 1 and above == "~":
        key = f"/{part}"
    else:
        key = f"{above}/{part}"
    return key if len(key) <= LONGEST_KEY else cut(key, LONGEST_KEY + 1)


def _settled(globs: Sequence[Glob], states: tuple[int, ...]) -> tuple[int, ...] | None:
    """Answer None as soon as one glob matches: everything below is kept."""
    matched = any(glob.accepts(state) for glob, state in zip(globs, states, strict=True))
    return None if matched else states
