"""Two trees side by side: does one have a place for every leaf of the other?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from treering._codec.msgpack.wire import MAX_DEPTH
from treering._printable import kind_of
from treering._tree.placement import is_placement
from treering._tree.registry import opened_node, text_keyed
from treering._tree.state_dict import TooDeep
from treering._values.keys import join_key
from treering._values.trail import Trail, unwound
from treering.errors import TreeringError

_LONGEST: Final = 200


def paired(tree: Any, places: Any) -> tuple[list[tuple[tuple[str, ...], Any, Any]], list[str]]:
    """Return each leaf of ``tree`` with its path and what ``places`` has for it, and where the two do not agree.

    None is a leaf of both. Containers agree where they are of one class, or one of them is a plain dict, and have the
    same keys, as text: so the dict that a list or a class became in a file stands for that list or class. Static
    fields are not compared.

    Args:
        tree: any pytree.
        places: a tree of anything that is no container, such as shardings or functions.

    Returns:
        The pairs in the order of ``tree``; and one line for each place where the trees differ.

    Example:
        >>> paired({"a": [1, 2]}, {"a": {"0": "x", "1": None}})
        ([(('a', '0'), 1, 'x'), (('a', '1'), 2, None)], [])
        >>> paired({"a": 1, "b": 2}, {"a": 3, "c": 4})[1]
        ['b: it has no place', 'c: no leaf is there']
    """
    pairs: list[tuple[tuple[str, ...], Any, Any]] = []
    unlike: list[str] = []
    pending: list[tuple[int, Trail, Any, Any]] = [(0, None, tree, places)]
    while pending:
        depth, trail, x, place = pending.pop()
        try:
            children, below = _children(x), _children(place)
            # A function may be a tree too, as a module of equinox is: where an array is, it is a function.
            if children is None and (below is None or callable(place)):
                pairs.append((unwound(trail), x, place))
                continue
            if depth > MAX_DEPTH:
                raise TooDeep(f"more than {MAX_DEPTH} containers deep; it may hold itself")
            if children is None or below is None or not _alike(x, place):
                unlike.append(f"{_shown(trail)}: {_kind(x, children)}, and its place is {_kind(place, below)}")
                continue
            children, below = _by_text(children, below)
        except TreeringError as error:
            unlike.append(f"{_shown(trail)}: {error}")
            continue
        unlike += [f"{_shown((trail, str(key)))}: it has no place" for key in children if key not in below]
        unlike += [f"{_shown((trail, str(key)))}: no leaf is there" for key in below if key not in children]
        both = [key for key in children if key in below]
        pending.extend((depth + 1, (trail, str(key)), children[key], below[key]) for key in reversed(both))
    return pairs, unlike


def _children(x: Any) -> Mapping[Any, Any] | None:
    """Return the children of a container by key; None for a leaf."""
    kind = type(x)
    if kind is dict:
        return x  # type: ignore[no-any-return]
    if kind is list or kind is tuple:
        return dict(enumerate(x))
    if x is None or is_placement(x):
        return None
    node = opened_node(x)
    return None if node is None else node.children


def _alike(x: Any, place: Any) -> bool:
    return type(x) is type(place) or dict in (type(x), type(place))


def _by_text(children: Mapping[Any, Any], below: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], Mapping[Any, Any]]:
    """Return both with keys that can be compared; a tree read from a file has the text of each key."""
    same = children.keys() == below.keys()
    return (children, below) if same else (text_keyed(children), text_keyed(below))


def _kind(x: Any, children: Mapping[Any, Any] | None) -> str:
    return f"{kind_of(x)}" if children is not None else "a leaf"


def _shown(trail: Trail) -> str:
    text = join_key(unwound(trail)) or "."
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
