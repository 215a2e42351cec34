"""The items of a step: what a loop saves together, and which of them keep their own state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from treering._arrays.source import Source
from treering._checkpoint.joint_load import LoadGroup
from treering._checkpoint.load import OF_LIKE, LoadOptions, load_parts, plan_load, select_part
from treering._format.selection import Selection, select
from treering._format.structure import key_text
from treering._runs.results import Stateful
from treering._tree.flatten import flatten_like
from treering._tree.likeness import Wording
from treering._values.keys import escape_part
from treering.errors import MismatchError

Place: TypeAlias = tuple[Any, ...]
"""The keys of the dicts that lead to an object; empty for the tree itself."""


def stateful_items(tree: Any, above: Place = ()) -> dict[Place, Stateful]:
    """Return the objects of a tree that give their state away: values of its dicts at any depth, or it is one itself.

    Example:
        >>> stateful_items({"w": 1.5, "loaders": {}})
        {}
    """
    if _gives_state(type(tree)):
        return {above: tree}
    if type(tree) is not dict:
        return {}
    # By class: there are few of them, and perhaps thousands of leaves.
    kinds = {kind for kind in set(map(type, tree.values())) if kind is dict or _gives_state(kind)}
    found: dict[Place, Stateful] = {}
    for name, item in tree.items() if kinds else ():
        if type(item) in kinds:
            found |= stateful_items(item, (*above, name))
    return found


def state_keys(tree: Any) -> tuple[str, ...]:
    """Return the keys under which the states of the objects of a tree are saved.

    Example:
        >>> state_keys({"w": 1.5})
        ()
    """
    return tuple(_stored_key(place, LoadOptions()) for place in stateful_items(tree))


def replace_stateful_items(tree: Any) -> Any:
    """Return what is saved of a tree: each object that gives its state away is replaced by its state.

    Example:
        >>> replace_stateful_items({"w": 1.5, "count": 3})
        {'w': 1.5, 'count': 3}
    """
    found = stateful_items(tree)
    return _put(tree, tree, {place: item.get_state() for place, item in found.items()}) if found else tree


def _put(like: Any, tree: Any, items: Mapping[Place, Any]) -> Any:
    """Return a tree with items at their places, and the dicts above them in the order of ``like``."""
    if () in items:
        return items[()]
    below = _by_first(items)
    return {
        name: _put(item, tree.get(name, {}), below[name]) if name in below else tree[name]
        for name, item in like.items()
    }


def _cut(tree: Any, places: Mapping[Place, Any]) -> Any:
    """Return a tree without what is at some places."""
    below = _by_first(places)
    return {
        name: _cut(item, below[name]) if name in below else item
        for name, item in tree.items()
        if () not in below.get(name, ())
    }


def _by_first(items: Mapping[Place, Any]) -> dict[Any, dict[Place, Any]]:
    below: dict[Any, dict[Place, Any]] = {}
    for place, item in items.items():
        below.setdefault(place[0], {})[place[1:]] = item
    return below


def _gives_state(kind: type) -> bool:
    return callable(getattr(kind, "get_state", None)) and callable(getattr(kind, "set_state", None))


# ------------------------------------------------------------------------------------------------------------- loading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedItems:
    """What was loaded for a tree that holds objects which take their state back, before they have it."""

    tree: Any
    """What was loaded, with the objects in their places; they do not have their states yet."""
    states: dict[Place, Any]
    """Place of an object -> the state that was loaded for it."""
    kept: tuple[str, ...]
    """Keys of the leaves and objects of ``like`` for which nothing is stored."""


def load_items(
    source: Source, like: Any, options: LoadOptions, group: LoadGroup, *, wording: Wording = OF_LIKE
) -> LoadedItems:
    """Load a part of a step: into ``like`` what has a place there, as it was saved what its objects take back.

    Raises:
        MismatchError: they do not fit; or ``only`` leaves out a part of such a state.
    """
    part = select_part(source, options)
    objects = stateful_items(like)
    parts: dict[Place, Selection] = {}
    for name in objects:
        stored = _stored_key(name, options)
        if options.missing == "error" or _has(part, stored):
            parts[name] = _whole(source, part, stored, options)
    as_saved = LoadOptions(progress=options.progress)
    pieces = [plan_load(source, one, None, as_saved) for one in parts.values()]
    fresh = [_stored_key(name, LoadOptions()) for name in objects if name not in parts]
    kept = [key for key in flatten_like(like).keys if any(_below(key, item) for item in fresh)] if fresh else []
    if () not in objects:
        rest, left, asked = like, part, options
        if objects:
            keys = [_stored_key(name, options) for name in objects]
            renamed = {name: stored for name, stored in options.rename.items() if stored not in keys}
            rest = _cut(like, objects)
            left, asked = (_without(part, keys), dataclasses.replace(options, key_map=renamed or options.whole_map))
        pieces.insert(0, plan_load(source, left, rest, asked, wording=wording))
        kept = [*pieces[0].kept, *kept]
    trees = load_parts(source, pieces, options.progress, group)
    tree = like if () in objects else trees.pop(0)
    tree = _put(like, tree, objects) if objects else tree
    return LoadedItems(tree=tree, states=dict(zip(parts, trees, strict=True)), kept=tuple(kept))


def restore_states(items: LoadedItems) -> Any:
    """Give the objects their states; return the tree, with them in their places."""
    objects = stateful_items(items.tree)
    for name, state in items.states.items():
        objects[name].set_state(state)
    return items.tree


def _stored_key(place: Place, options: LoadOptions) -> str:
    """Return the key under which an item's state is stored, below ``at``; the empty text for the tree itself."""
    key = "/".join(escape_part(key_text(name)) for name in place)
    return options.rename.get(key, key)


def _below(key: str, stored: str) -> bool:
    return not stored or key == stored or key.startswith(f"{stored}/")


def _has(part: Selection, stored: str) -> bool:
    try:
        select(part.structure, part.keys, at=stored, only=None)
    except MismatchError:
        return False
    return True


def _without(part: Selection, stored: Sequence[str]) -> Selection:
    """Return a part without some branches; its structure tells of them still, which only ``like`` is asked for."""
    stay = [number for number, key in enumerate(part.keys) if not any(_below(key, one) for one in stored)]
    leaves, keys = [part.leaves[number] for number in stay], [part.keys[number] for number in stay]
    return Selection(structure=part.structure, leaves=leaves, keys=keys)


def _whole(source: Source, part: Selection, stored: str, options: LoadOptions) -> Selection:
    """Return the branch of an item's state.

    Raises:
        MismatchError: it is not there, or ``only`` keeps a part of it.
    """
    found = select(part.structure, part.keys, at=stored, only=None)
    index = source.index
    at = "/".join(filter(None, (options.at, stored)))
    all_of_it = select(index.structure, index.keys, at=at, only=None)
    if len(found.keys) != len(all_of_it.keys):
        what = f"only= selects a part of {repr(at) if at else 'the tree'}, whose state is restored as a whole"
        raise MismatchError(what, hint="select all of it, or omit the object from `like`")
    return all_of_it
