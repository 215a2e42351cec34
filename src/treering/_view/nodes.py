"""What stands at one place of a listing: a branch with children, or a leaf with its record; and walks over all places.

A listing holds dicts, lists and tuples as the file has them; its leaves are records of what was not read, and
small Python values themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from treering._format.index import OpaqueLeaf
from treering._format.records import LeafRecord, Named
from treering._format.structure import key_text
from treering._values.keys import GlobSet, escape_part
from treering._view.plain import cut

_LONGEST_VALUE = 200
_NUMBER_BYTES = {bool: 1, int: 8, float: 8, complex: 16}
_TIMESTAMP_BYTES = 12
_NUMBER_BITS = 64
_WIDEST_NUMBER = 10_000
"""Bits from which an int is shown in hexadecimal: Python refuses to write a longer one in decimal."""
LONGEST_KEY = 1000
"""A longer key text is cut in its middle: a hostile file may nest 100,000 names."""

States: TypeAlias = tuple[Any, ...] | None
"""The state of each glob at one branch; None below a branch that a glob keeps whole: nothing is left to match."""


def is_branch(node: Any) -> bool:
    """Tell whether a node of a listing holds further nodes.

    Example:
        >>> is_branch({}), is_branch("text")
        (True, False)
    """
    return isinstance(node, dict | list | tuple)


def branch_kind(branch: Any) -> str:
    """Name the kind of a branch: "map", "list", "tuple", "namedtuple" or "other".

    Example:
        >>> branch_kind({}), branch_kind(()), branch_kind(Named({}, node="namedtuple", class_name="a.B"))
        ('map', 'tuple', 'namedtuple')
    """
    if isinstance(branch, Named):
        return branch.node
    return "map" if isinstance(branch, dict) else "tuple" if isinstance(branch, tuple) else "list"


def children_of(branch: Any) -> Iterator[tuple[str, Any]]:
    """Walk through the children of a branch with their names; a key that is no text is named as in a key text.

    Example:
        >>> list(children_of({"a": 1, 2: 3})), list(children_of([True]))
        ([('a', 1), ('2', 3)], [('0', True)])
    """
    if isinstance(branch, dict):
        return ((key if isinstance(key, str) else key_text(key), node) for key, node in branch.items())
    return ((str(place), node) for place, node in enumerate(branch))


def weight_of(leaf: Any) -> tuple[int, int, bool]:
    """Answer a leaf's bytes, its elements (0 unless it is an array), and whether it is an array.

    The part of `record_of` that totals need, for files of a million leaves.

    Example:
        >>> weight_of(LeafRecord(kind="array", dtype="int8", shape=(2, 3), nbytes=6, offset=0)), weight_of("text")
        ((6, 6, True), (4, 0, False))
    """
    if isinstance(leaf, LeafRecord):
        is_array = leaf.is_array
        return leaf.nbytes, math.prod(leaf.shape or ()) if is_array else 0, is_array
    return _value_bytes(leaf), 0, False


def record_of(leaf: Any) -> LeafRecord:
    """Return the record of a leaf, also of a small Python value that stands for itself.

    Example:
        >>> record = record_of(7)
        >>> record.kind, record.value, record.nbytes
        ('int', 7, 8)
    """
    if isinstance(leaf, LeafRecord):
        return leaf
    kind = "opaque" if isinstance(leaf, OpaqueLeaf) else "none" if leaf is None else type(leaf).__name__.lower()
    return LeafRecord(kind=kind, dtype=None, shape=None, nbytes=_value_bytes(leaf), offset=None, value=leaf)


def value_text(leaf: Any) -> str | None:
    """Return a small Python value as Python writes it, cut beyond 200 characters; None for None and what was not read.

    Example:
        >>> value_text(7), value_text("text"), value_text(None)
        ('7', "'text'", None)
    """
    return None if leaf is None or isinstance(leaf, LeafRecord) else format_value(leaf, _LONGEST_VALUE)[:_LONGEST_VALUE]


def format_value(value: Any, longest: int) -> str:
    """Write a small Python value as Python does; of a long text or bytes the beginning, a huge int in hexadecimal.

    Example:
        >>> format_value("text", 2), format_value(1 << 20_000, 9)[:4]
        ("'te'", '0x10')
    """
    if isinstance(value, OpaqueLeaf):
        return value.text
    if isinstance(value, str | bytes | bytearray) and len(value) > longest:
        value = value[:longest]
    return hex(value) if isinstance(value, int) and value.bit_length() > _WIDEST_NUMBER else repr(value)


def has_json(value: Any) -> bool:
    """Tell whether JSON has a small Python value as it is; a number that it lacks is written as text.

    Example:
        >>> has_json(None), has_json(7), has_json(1j)
        (True, True, False)
    """
    is_short = not isinstance(value, int) or value.bit_length() <= _WIDEST_NUMBER
    return value is None or (isinstance(value, int | str | float) and is_short)


def _value_bytes(leaf: Any) -> int:
    if isinstance(leaf, str):
        return len(leaf) if leaf.isascii() else len(leaf.encode("utf-8", "surrogatepass"))
    if isinstance(leaf, bytes | bytearray):
        return len(leaf)
    if isinstance(leaf, int) and leaf.bit_length() > _NUMBER_BITS:
        return (leaf.bit_length() + 7) // 8
    return 0 if leaf is None or isinstance(leaf, OpaqueLeaf) else _NUMBER_BYTES.get(type(leaf), _TIMESTAMP_BYTES)


# --------------------------------------------------------------------------------------------------------- walks


def leaves_of(root: Any, globs: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Walk through the leaves in the file's order, each with its key text.

    Without globs all of them. A glob keeps the leaves that it matches, and everything below a branch that it matches.

    Example:
        >>> list(leaves_of({"a": {"b": 1, "c/d": 2}, "e": 3}))
        [('a/b', 1), ('a/c~1d', 2), ('e', 3)]
        >>> list(leaves_of({"a": {"b": 1}, "e": 3}, ["a"]))
        [('a/b', 1)]
    """
    return ((key, node) for key, node in nodes_of(root, globs) if not is_branch(node))


def nodes_of(root: Any, globs: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Walk through branches and leaves, each branch before what it holds.

    With globs only what one of them matches, or lies below a branch that one matches.

    Example:
        >>> [key for key, _ in nodes_of({"a": [1, 2]})]
        ['', 'a', 'a/0', 'a/1']
    """
    together, start = start_matching(globs)
    if start is None:
        yield "", root
    if not is_branch(root):
        return
    stack: list[tuple[str, int, States, Iterator[tuple[str, Any]]]] = [("", 0, start, children_of(root))]
    while stack:
        above, depth, states, children = stack[-1]
        for name, node in children:
            key = child_key(above, depth, name)
            if (below := match_name(together, states, name)) is None:
                yield key, node
            if is_branch(node) and (below is None or below):
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
    key = part or "~" if not depth else f"/{part}" if depth == 1 and above == "~" else f"{above}/{part}"
    return key if len(key) <= LONGEST_KEY else cut(key, LONGEST_KEY + 1)


def start_matching(globs: Sequence[str]) -> tuple[GlobSet, States]:
    """Return the globs and their state at the root; None where they keep everything."""
    together = GlobSet(globs)
    return together, _settle(together, together.start) if globs else None


def match_name(globs: GlobSet, states: States, name: str) -> States:
    """Return the state of globs one name further down; None as soon as one of them matches."""
    return None if states is None else _settle(globs, globs.step(states, name))


def _settle(globs: GlobSet, state: tuple[Any, ...]) -> States:
    return None if globs.accepted(state) else state
