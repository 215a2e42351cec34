"""The items of a step: what a loop saves together, and those among them that keep their state to themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from treering._arrays.source import Source
from treering._checkpoint.joint_load import LoadGroup
from treering._checkpoint.load import OF_LIKE, LoadOptions, load_parts, plan_load, select_part
from treering._format.selection import Selection, select
from treering._format.structure import key_text
from treering._runs.results import Stateful
from treering._tree.flatten import flatten_like
from treering._tree.likeness import Wording
from treering._values.keys import escape_part
from treering.errors import Mismatch

# In the place of an item's name: None may be one.
_WHOLE: Final = object()


def stateful_items(tree: Any) -> dict[Any, Stateful]:
    """Return the objects of a tree that give their state away: the values of its dict, or it is one itself.

    Example:
        >>> stateful_items({"w": 1.5})
        {}
    """
    if _gives_state(type(tree)):
        return {_WHOLE: tree}
    if type(tree) is not dict:
        return {}
    # By class: there are few of them, and perhaps thousands of leaves.
    kinds = {kind for kind in set(map(type, tree.values())) if _gives_state(kind)}
    return {name: item for name, item in tree.items() if type(item) in kinds} if kinds else {}


def replace_stateful_items(tree: Any) -> Any:
    """Return what is saved of a tree: each object that gives its state away is replaced by its state.

    Example:
        >>> replace_stateful_items({"w": 1.5, "count": 3})
        {'w': 1.5, 'count': 3}
    """
    found = stateful_items(tree)
    if _WHOLE in found:
        return found[_WHOLE].get_state()
    return {**tree, **{name: item.get_state() for name, item in found.items()}} if found else tree


def _gives_state(kind: type) -> bool:
    return callable(getattr(kind, "get_state", None)) and callable(getattr(kind, "set_state", None))


# ------------------------------------------------------------------------------------------------------------- loading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedItems:
    """What was loaded for a tree that holds objects which take their state back, before they have it."""

    tree: Any
    """What was loaded, with the objects in their places; they do not have their states yet."""
    states: dict[Any, Any]
    """Name of an object -> the state that was loaded for it."""
    kept: tuple[str, ...]
    """Keys of the leaves and objects of ``like`` for which nothing is stored."""


def load_items(
    source: Source, like: Any, options: LoadOptions, group: LoadGroup, *, wording: Wording = OF_LIKE
) -> LoadedItems:
    """Load a part of a step: into ``like`` what has a place there, as it was saved what its objects take back.

    Raises:
        Mismatch: they do not fit; or ``only`` leaves out a part of such a state.
    """
    part = select_part(source, options)
    objects = stateful_items(like)
    parts: dict[Any, Selection] = {}
    for name in objects:
        stored = _stored_key(name, options)
        if options.missing == "error" or _has(part, stored):
            parts[name] = _whole(source, part, stored, options)
    as_saved = LoadOptions(progress=options.progress)
    pieces = [plan_load(source, one, None, as_saved) for one in parts.values()]
    fresh = [_stored_key(name, LoadOptions()) for name in objects if name not in parts]
    kept = [key for key in flatten_like(like).keys if any(_below(key, item) for item in fresh)] if fresh else []
    if _WHOLE not in objects:
        rest, left, asked = like, part, options
        if objects:
            keys = [_stored_key(name, options) for name in objects]
            renamed = {name: stored for name, stored in (options.rename or {}).items() if stored not in keys}
            rest = {name: item for name, item in like.items() if name not in objects}
            left, asked = _without(part, keys), dataclasses.replace(options, rename=renamed)
        pieces.insert(0, plan_load(source, left, rest, asked, wording=wording))
        kept = [*pieces[0].kept, *kept]
    trees = load_parts(source, pieces, options.progress, group)
    tree = like if _WHOLE in objects else trees.pop(0)
    if objects and _WHOLE not in objects:
        tree = {name: objects[name] if name in objects else tree[name] for name in like}
    return LoadedItems(tree=tree, states=dict(zip(parts, trees, strict=True)), kept=tuple(kept))


def restore_states(items: LoadedItems) -> Any:
    """Give the objects their states; return the tree, with them in their places."""
    objects = stateful_items(items.tree)
    for name, state in items.states.items():
        objects[name].set_state(state)
    return items.tree


def _stored_key(name: Any, options: LoadOptions) -> str:
    """Return the key under which an item's state is stored, below ``at``; the empty text for the tree itself."""
    key = "" if name is _WHOLE else escape_part(key_text(name))
    return (options.rename or {}).get(key, key)


def _below(key: str, stored: str) -> bool:
    return not stored or key == stored or key.startswith(f"{stored}/")


def _has(part: Selection, stored: str) -> bool:
    try:
        select(part.structure, part.keys, at=stored, only=None)
    except Mismatch:
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
        Mismatch: it is not there, or ``only`` keeps a part of it.
    """
    found = select(part.structure, part.keys, at=stored, only=None)
    index = source.index
    at = "/".join(filter(None, (options.at, stored)))
    all_of_it = select(index.structure, index.keys, at=at, only=None)
    if len(found.keys) != len(all_of_it.keys):
        what = f"only= selects a part of {repr(at) if at else 'the tree'}, whose state is restored as a whole"
        raise Mismatch(what, hint="select all of it, or omit the object from `like`")
    return all_of_it
