"""A tree's structure without its leaves: another tree is held against it many times faster than it is flattened.

Never wrong: a tree passes only if ``flatten`` would give the same structure, keys, kinds and opaque leaves.
Containers of Python's own are compared by class, keys and the classes of their children. What classes, handlers or
an object's inside decide is opened and looked at as ``flatten`` does it, since that may have changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from treering._format.index import Container
from treering._tree.flatten import Flattened
from treering._tree.flatten_leaves import KINDS, kind_to_save
from treering._tree.flatten_nodes import opened
from treering._tree.registry import is_namedtuple
from treering._tree.static_text import opaque_of
from treering.errors import Unsupported

__all__ = ["Remembered", "exactly"]

# Keys that are the same in a file where their classes and they themselves are equal; 0.0 and -0.0 are not.
_PLAIN_KEYS: Final = frozenset({str, int, bool, type(None), bytes})

_DICT, _ITEMS, _OTHER = "dict", "items", "other"


@dataclasses.dataclass(slots=True, kw_only=True)
class _Node:
    """A container, and what its children are."""

    way: str
    """How it is opened: "dict", "items" for a sequence of Python's own, "other" for what ``opened`` knows."""
    keys: list[Any]
    """The keys of a dict."""
    key_types: list[int]
    """The identities of their classes, which Python's own never give up."""
    head: Container | None
    """What a file says of one of another class."""
    types: list[int]
    """The identities of the classes of the children."""
    classes: list[type]
    """The classes themselves, held so that their identities stay theirs."""
    steps: list[_Step]
    """The children in order."""


_Step = tuple[int, int, _Node | None]
"""A run of children that are leaves: from, to, None; or one that is a container: its place, the next one, its node."""


class Remembered:
    """The structure of a tree that was flattened.

    Args:
        tree: the tree.
        flat: what became of it.

    Example:
        >>> from treering._tree.flatten import flatten
        >>> tree = {"w": [1.5, None], "f": abs}
        >>> known = Remembered(tree, flatten(tree))
        >>> known.leaves({"w": [2.5, None], "f": abs})
        [2.5, None, <built-in function abs>]
        >>> known.leaves({"w": [2, None], "f": abs}), known.leaves({"f": abs, "w": [2.5, None]})
        (None, None)
    """

    def __init__(self, tree: Any, flat: Flattened) -> None:
        self._top = _recorded(tree)
        self._asked = [
            (number, kind, flat.opaque.get(number))
            for number, kind in enumerate(flat.kinds)
            if kind == "opaque" or type(flat.leaves[number]) not in KINDS
        ]

    def leaves(self, tree: Any) -> list[Any] | None:
        """Return the leaves of a tree of the same structure and kinds, None of any other; dtypes are not compared."""
        try:
            found = self._found(tree)
            return found if found is not None and self._same_objects(found) else None
        except Unsupported:
            return None  # ``flatten`` says what cannot be saved, and where it is

    def _found(self, tree: Any) -> list[Any] | None:
        found: list[Any] = []
        first = _children(self._top, [tree])
        if first is None:
            return None
        levels: list[tuple[Iterator[_Step], Sequence[Any]]] = [(iter(self._top.steps), first)]
        while levels:
            steps, children = levels[-1]
            for start, stop, node in steps:
                if node is None:
                    found += children[start:stop]
                    continue
                inner = _children(node, children[start])
                if inner is None:
                    return None
                if len(node.steps) == 1 and node.steps[0][2] is None:  # nothing but leaves
                    found += inner
                    continue
                levels.append((iter(node.steps), inner))
                break
            else:
                levels.pop()
        return found

    def _same_objects(self, found: list[Any]) -> bool:
        """Tell whether the leaves whose class alone does not say what they are, are what they were."""
        for number, kind, opaque in self._asked:
            leaf = found[number]
            if type(leaf) not in KINDS and (opened(leaf) is not None or kind_to_save(leaf) != kind):
                return False
            if opaque is not None and opaque != opaque_of(leaf):
                return False
        return True


def _recorded(tree: Any) -> _Node:
    top = _begun(_ITEMS, [tree])
    levels: list[tuple[_Node, Iterator[tuple[int, Any]]]] = [(top, iter(enumerate([tree])))]
    while levels:
        node, children = levels[-1]
        for place, child in children:
            inner = None if type(child) in KINDS else _opened(child)
            if inner is not None:
                node.steps.append((place, place + 1, inner[0]))
                levels.append((inner[0], iter(enumerate(inner[1]))))
                break
            if node.steps and node.steps[-1][2] is None:
                node.steps[-1] = (node.steps[-1][0], place + 1, None)
            else:
                node.steps.append((place, place + 1, None))
        else:
            levels.pop()
    return top


def _begun(way: str, children: Sequence[Any], keys: Sequence[Any] = (), head: Container | None = None) -> _Node:
    return _Node(
        way=way,
        keys=list(keys),
        key_types=list(map(id, map(type, keys))),
        head=head,
        types=list(map(id, map(type, children))),
        classes=list(set(map(type, children))),
        steps=[],
    )


def _opened(x: Any) -> tuple[_Node, Sequence[Any]] | None:
    kind = type(x)
    if kind is dict and _PLAIN_KEYS.issuperset(map(type, x)):
        values = list(x.values())
        return _begun(_DICT, values, list(x)), values
    if kind is list or kind is tuple or is_namedtuple(x):
        return _begun(_ITEMS, list(x)), list(x)
    node = opened(x)
    return None if node is None else (_begun(_OTHER, node.children, head=node.container), node.children)


def _children(node: _Node, x: Any) -> Sequence[Any] | None:
    """Return the children of a container whose class is the one that was met; None where it is another one."""
    children: Sequence[Any]
    if node.way is _DICT:
        keys = list(x)
        if not _same_types(keys, node.key_types) or keys != node.keys:
            return None
        children = list(x.values())
    elif node.way is _ITEMS:
        children = list(x)
    else:
        inside = opened(x)
        if inside is None or node.head is None or not exactly(_facts(inside.container), _facts(node.head)):
            return None
        children = inside.children
    return children if _same_types(children, node.types) else None


def _same_types(values: Iterable[Any], types: Sequence[int]) -> bool:
    """Compare classes by their identities, in one go: most containers of a model are small, and there are many."""
    return list(map(id, map(type, values))) == types


def _facts(head: Container) -> tuple[Any, ...]:
    return head.node, head.keys, head.class_name, head.static


def exactly(one: Any, other: Any) -> bool:
    """Tell whether two values of static fields or keys are the same in a file: True is not 1, 0.0 is not -0.0.

    Example:
        >>> exactly((1, 0.5), (1, 0.5)), exactly((1,), (True,)), exactly(0.0, -0.0), exactly(2.0, 2)
        (True, False, False, False)
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(exactly, one, other))
    return one.hex() == other.hex() if type(one) is float else bool(one == other)
