"""A tree's structure without its leaves: another tree is compared with it many times faster than it is flattened.

Never wrong: a tree passes only if ``flatten`` would give the same structure, keys, kinds and opaque leaves.
Containers of Python's own are compared by class, keys and the classes of their children, all those of one depth at
once: most containers of a model are small, there are many, and a step of the interpreter for each costs more than the
comparison. What classes, handlers or an object's inside decide is opened and looked at as ``flatten`` does it, since
that may have changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from treering._format.index import Container
from treering._format.leaf_values import same_value
from treering._tree.flatten import Flattened, open_node
from treering._tree.flatten_leaves import KINDS, kind_to_save
from treering._tree.registry import is_namedtuple
from treering._tree.static_values import opaque_of
from treering.errors import UnsupportedError

# Keys that are the same in a file where their classes and they themselves are equal; 0.0 and -0.0 are not.
_PLAIN_KEYS: Final = frozenset({str, int, bool, type(None), bytes})


@dataclasses.dataclass(slots=True)
class _DepthLevel:
    """The containers of one depth, by the ways in which they are opened, and what their children are.

    The children of all of them are in one sequence: those of the dicts first, then of the sequences, then of others.
    """

    dicts: list[int] = dataclasses.field(default_factory=list)
    """Which children of the level above are dicts."""
    keys: list[Any] = dataclasses.field(default_factory=list)
    """The keys of all of them, one dict after the other."""
    key_types: list[type] = dataclasses.field(default_factory=list)
    """The classes of the keys."""
    items: list[int] = dataclasses.field(default_factory=list)
    """Which are sequences of Python's own."""
    lengths: list[int] = dataclasses.field(default_factory=list)
    """How many children each of the dicts has, then each of the sequences."""
    others: list[tuple[int, Container]] = dataclasses.field(default_factory=list)
    """Which are containers that ``opened`` knows, and what a file says of them."""
    types: list[type] = dataclasses.field(default_factory=list)
    """The classes of all the children."""


class KnownStructure:
    """The structure of a tree that was flattened.

    Args:
        tree: the tree.
        flat: what became of it.

    Example:
        >>> from treering._tree.flatten import flatten
        >>> tree = {"w": [1.5, None], "f": abs}
        >>> known = KnownStructure(tree, flatten(tree))
        >>> known.leaves({"w": [2.5, None], "f": abs})
        [2.5, None, <built-in function abs>]
        >>> known.leaves({"w": [2, None], "f": abs}), known.leaves({"f": abs, "w": [2.5, None]})
        (None, None)
    """

    def __init__(self, tree: Any, flat: Flattened) -> None:
        self._top = type(tree)
        self._levels, self._order = _record_levels(tree)
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
        except UnsupportedError:
            return None  # ``flatten`` says what cannot be saved, and where it is

    def _found(self, tree: Any) -> list[Any] | None:
        if type(tree) is not self._top:
            return None
        above: list[Any] = [tree]
        everything = [tree]
        for level in self._levels:
            if (children := _collect_children(level, above)) is None:
                return None
            everything += children
            above = children
        return list(map(everything.__getitem__, self._order))

    def _same_objects(self, found: list[Any]) -> bool:
        """Tell whether the leaves whose class alone does not say what they are, are what they were."""
        for number, kind, opaque in self._asked:
            leaf = found[number]
            if type(leaf) not in KINDS and (open_node(leaf) is not None or kind_to_save(leaf) != kind):
                return False
            if opaque is not None and not same_value(opaque, opaque_of(leaf), in_file=True):
                return False
        return True


def _collect_children(level: _DepthLevel, above: Sequence[Any]) -> list[Any] | None:
    """Return the children of all containers of a level, whose classes are those that were met; None if others."""
    dicts = list(map(above.__getitem__, level.dicts))
    items = list(map(above.__getitem__, level.items))
    if list(map(len, itertools.chain(dicts, items))) != level.lengths:
        return None
    keys = list(itertools.chain.from_iterable(dicts))
    if not _same(map(type, keys), level.key_types) or keys != level.keys:
        return None
    children = list(itertools.chain.from_iterable(itertools.chain(map(dict.values, dicts), items)))
    for place, head in level.others:
        node = open_node(above[place])
        if node is None or not same_value(_facts(node.container), _facts(head), in_file=True):
            return None
        children += node.children
    return children if len(children) == len(level.types) and _same(map(type, children), level.types) else None


def _same(found: Iterable[type], known: Sequence[type]) -> bool:
    """Compare as many classes: by identity, for what a class says of equality is its own affair."""
    return all(map(operator.is_, found, known))


def _record_levels(tree: Any) -> tuple[list[_DepthLevel], list[int]]:
    """Return the levels of a tree; and where, in the sequence of all its nodes by depth, its leaves lie in order."""
    levels: list[_DepthLevel] = []
    inside: dict[int, range] = {}
    above, before = [tree], 0
    while True:
        level, children, counts = _level_of(above)
        if not counts:
            return levels, list(_in_order(inside))
        levels.append(level)
        start = before + len(above)
        for place, count in counts:
            inside[before + place] = range(start, start + count)
            start += count
        before += len(above)
        above = children


def _level_of(above: Sequence[Any]) -> tuple[_DepthLevel, list[Any], list[tuple[int, int]]]:
    """Return the containers among these nodes, their children, and how many each has, in the order of the children."""
    level = _DepthLevel()
    dicts: list[Any] = []
    items: list[Any] = []
    others: list[Any] = []
    counts: tuple[list[tuple[int, int]], ...] = ([], [], [])
    for place, x in enumerate(above):
        kind = type(x)
        if kind in KINDS:
            continue
        if kind is dict and _PLAIN_KEYS.issuperset(map(type, x)):
            level.dicts.append(place)
            level.keys += x
            dicts += x.values()
            counts[0].append((place, len(x)))
        elif kind is list or kind is tuple or is_namedtuple(x):
            found = list(x)  # whatever a class of the user's says of its length
            level.items.append(place)
            items += found
            counts[1].append((place, len(found)))
        elif (node := open_node(x)) is not None:
            level.others.append((place, node.container))
            others += node.children
            counts[2].append((place, len(node.children)))
    level.key_types = list(map(type, level.keys))
    level.lengths = [count for _, count in counts[0] + counts[1]]
    children = dicts + items + others
    level.types = list(map(type, children))
    return level, children, counts[0] + counts[1] + counts[2]


def _in_order(inside: dict[int, range]) -> Iterator[int]:
    """Yield the leaves as ``flatten`` meets them, all that is in one container before the next one."""
    left = [0]
    while left:
        node = left.pop()
        if node in inside:
            left += reversed(inside[node])
        else:
            yield node


def _facts(head: Container) -> tuple[Any, ...]:
    return head.node, head.keys, head.class_name, head.static
