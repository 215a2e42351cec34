"""A tree of leaves by their paths, as formats have them whose files name no containers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from treering._foreign.foreign_tree import ForeignLeaf
from treering._format.index import MAX_LEVELS, Container, Token
from treering._values.keys import join_key
from treering.errors import CorruptError, UnsupportedError

Step: TypeAlias = tuple[str, bool]
"""A key in a container, and whether that is a list, where it is an index."""

Entry: TypeAlias = "tuple[Sequence[Step], ForeignLeaf | Container]"
"""A leaf or an empty container by its path."""

Containers: TypeAlias = dict[tuple[str, ...], Container]
"""Containers that are recorded beside the leaves, by their paths: tuples and namedtuples."""

EMPTY: dict[str, Container] = {
    "Dict": Container(node="dict", keys=()),
    "List": Container(node="list", keys=()),
    "Tuple": Container(node="tuple", keys=()),
    # Orbax does not record of which class.
    "NamedTuple": Container(node="namedtuple", keys=(), class_name="orbax.checkpoint.EmptyNamedTuple"),
}
"""The containers without children, which stand where leaves do."""

_FREE_STEPS: Final = 1 << 20
_STEP_RATIO: Final = 64


@dataclasses.dataclass(slots=True)
class _Branch:
    listed: bool
    children: dict[str, Any] = dataclasses.field(default_factory=dict)


def build_tree(
    entries: Iterable[Entry], containers: Containers | None = None
) -> tuple[list[Token], list[str], list[ForeignLeaf]]:
    """Return the structure, the key texts and the leaves of a tree; without entries it is an empty dict.

    Args:
        entries: its leaves and empty containers by their paths.
        containers: the containers that are no dicts and lists.

    Raises:
        CorruptError: a path leads through a leaf, two are the same, a list has other indices than 0 to n-1, or a
            container other children than it should.
        UnsupportedError: containers are nested too deep.

    Example:
        >>> from treering._format.index import LeafType
        >>> one = ForeignLeaf(LeafType(kind="none"))
        >>> structure, keys, _ = build_tree([([("a", False), ("0", True)], one), ([("b", False)], one)])
        >>> keys, [token if isinstance(token, int) else token.node for token in structure]
        (['a/0', 'b'], ['dict', 'list', 2])
    """
    top = _Branch(listed=False)
    for path, leaf in entries:
        if len(path) > MAX_LEVELS:
            raise UnsupportedError(f"containers are nested more than {MAX_LEVELS} levels deep")
        here, key = top, ""
        for name, listed in path:
            below = here.children.setdefault(key, _Branch(listed))
            if not isinstance(below, _Branch) or below.listed != listed:
                raise _clash(path)
            here, key = below, name
        if key in here.children:
            raise _clash(path)
        here.children[key] = leaf
    return _flatten(top.children.get("", EMPTY["Dict"]), containers or {})


def _flatten(root: Any, containers: Containers) -> tuple[list[Token], list[str], list[ForeignLeaf]]:
    structure: list[Token] = []
    keys: list[str] = []
    leaves: list[ForeignLeaf] = []
    waiting: list[tuple[tuple[str, ...], Any]] = [((), root)]
    while waiting:
        trail, node = waiting.pop()
        if isinstance(node, Container):
            structure.append(node)
        elif isinstance(node, ForeignLeaf):
            keys.append(join_key(trail))
            leaves.append(node)
            if structure and isinstance(structure[-1], int):
                structure[-1] += 1
            else:
                structure.append(1)
        else:
            names = _ordered(node, trail)
            places: tuple[Any, ...] = tuple(range(len(names))) if node.listed else tuple(names)
            head = Container(node="list" if node.listed else "dict", keys=places)
            if (known := containers.get(trail)) is not None:
                if sorted(known.keys) != sorted(places):
                    raise CorruptError(
                        f"the {known.node} {join_key(trail)!r:.200} has other children than are recorded of it"
                    )
                head, names = known, [str(place) for place in known.keys]
            structure.append(head)
            waiting.extend(((*trail, name), node.children[name]) for name in reversed(names))
    return structure, keys, leaves


def _ordered(branch: _Branch, trail: Sequence[str]) -> list[str]:
    if not branch.listed:
        return list(branch.children)
    names = [str(number) for number in range(len(branch.children))]
    if missing := [name for name in names if name not in branch.children]:
        raise CorruptError(f"the list {join_key(trail)!r:.200} has no item {missing[0]}")
    return names


def _clash(path: Sequence[Step]) -> CorruptError:
    return CorruptError(f"the leaf {join_key([name for name, _ in path])!r:.200} does not fit beside the others")


def most_steps(nbytes: int) -> int:
    """Return how long the paths of a tree may be in all that a file of so many bytes nests.

    Deep inside of each other, a few bytes could make any number of long paths.
    """
    return _FREE_STEPS + _STEP_RATIO * nbytes
