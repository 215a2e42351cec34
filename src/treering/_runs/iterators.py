"""The items of a step: what a loop saves together, and which of them keep their own state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from treering._arrays.host import this_processes
from treering._arrays.incoming import ReadRequest
from treering._arrays.source import Source
from treering._checkpoint import load
from treering._checkpoint.forms import Where
from treering._checkpoint.joint_load import LoadGroup
from treering._checkpoint.load import OF_LIKE, LoadOptions, load_parts, plan_load, select_part, stored_text
from treering._format.columns import EACH_STATES
from treering._format.index import Container, leaf_bytes
from treering._format.selection import Selection, drop_leaves, select
from treering._runs.results import Stateful
from treering._tree.each import (
    SIZE,
    STATES,
    Each,
    Place,
    by_first,
    decode_state,
    find_items,
    gives_state,
    is_each,
    key_of,
    places,
    put_items,
)
from treering._tree.flatten import flatten_like
from treering._tree.likeness import Wording, apply_renames
from treering._values.human import pluralize
from treering.errors import CorruptError, MismatchError


def _common_items(tree: Any) -> dict[Place, Stateful]:
    """Return the objects of a tree that give their state away, and have one for all processes."""
    return find_items(tree, lambda kind: kind is not Each and gives_state(kind))


def state_keys(tree: Any) -> tuple[str, ...]:
    """Return the keys under which the states of the objects of a tree are saved.

    Example:
        >>> state_keys({"w": 1.5})
        ()
    """
    return tuple(_stored_key(place, LoadOptions()) for place in _common_items(tree))


def replace_stateful_items(tree: Any) -> Any:
    """Return what is saved of a tree: each object that gives its state away is replaced by its state.

    Markers of `treering.each` stay: their states are taken where all trees are planned.

    Example:
        >>> replace_stateful_items({"w": 1.5, "count": 3})
        {'w': 1.5, 'count': 3}
    """
    found = _common_items(tree)
    return put_items(tree, tree, {place: item.get_state() for place, item in found.items()}) if found else tree


def _cut(tree: Any, places: Mapping[Place, Any]) -> Any:
    """Return a tree without what is at some places."""
    below = by_first(places)
    return {
        name: _cut(item, below[name]) if name in below else item
        for name, item in tree.items()
        if () not in below.get(name, ())
    }


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


def load_tree(path: Where, like: Any, options: LoadOptions) -> Any:
    """Return the tree at ``path``; ``treering.load`` says more."""
    if not find_items(like, is_each):
        return load.load_tree(path, like, options)

    def read(source: Source, group: LoadGroup) -> LoadedItems:
        return load_items(source, like, options, group, wanted=is_each)

    return restore_states(load.load_tree(path, like, options, read), is_each)


def load_items(
    source: Source,
    like: Any,
    options: LoadOptions,
    group: LoadGroup,
    *,
    wording: Wording = OF_LIKE,
    wanted: Callable[[type], bool] = gives_state,
) -> LoadedItems:
    """Load a part of a step: into ``like`` what has a place there, as it was saved what its objects take back.

    Raises:
        MismatchError: they do not fit; or ``only`` leaves out a part of such a state.
    """
    part = select_part(source, options, has_like=like is not None)
    objects = find_items(like, wanted)
    parts: dict[Place, Selection] = {}
    for name in objects:
        stored = _stored_key(name, options)
        if options.missing == "error" or _has(part, stored):
            parts[name] = _whole(source, part, stored, options)
    as_saved = LoadOptions(progress=options.progress)
    own = {
        name: _own_state(source, part, objects[name], name) for name, part in parts.items() if _holds_each(source, part)
    }
    common = [name for name in parts if name not in own]
    pieces = [plan_load(source, parts[name], None, as_saved) for name in common]
    fresh = [_stored_key(name, LoadOptions()) for name in objects if name not in parts]
    kept = [key for key in flatten_like(like).keys if any(_below(key, item) for item in fresh)] if fresh else []
    if () not in objects:
        rest, left, asked = like, part, options
        if objects:
            keys = [_stored_key(name, options) for name in objects]
            rest = _cut(like, objects)
            renamed = _renames_of(rest, objects, options)
            left, asked = (
                drop_leaves(part, {key for key in part.keys if any(_below(key, one) for one in keys)}),
                dataclasses.replace(options, key_map=renamed or options.whole_map),
            )
        pieces.insert(0, plan_load(source, left, rest, asked, wording=wording))
        kept = [*pieces[0].kept, *kept]
    trees = load_parts(source, pieces, options.progress, group)
    tree = like if () in objects else trees.pop(0)
    tree = put_items(like, tree, objects) if objects else tree
    return LoadedItems(tree=tree, states=own | dict(zip(common, trees, strict=True)), kept=tuple(kept))


def restore_states(items: LoadedItems, wanted: Callable[[type], bool] = gives_state) -> Any:
    """Give the objects their states; return the tree, with them in their places."""
    objects = find_items(items.tree, wanted)
    for name, state in items.states.items():
        objects[name].set_state(state)
    return items.tree


def _holds_each(source: Source, part: Selection) -> bool:
    head = part.structure[0] if part.structure else None
    if source.structured:
        return isinstance(head, Container) and head.class_name == EACH_STATES
    # Another form has no class for it, and an object would take it for its one state.
    kinds = [source.index.type_of(leaf).kind for leaf in part.leaves]
    return list(part.keys) == ["processes", STATES] and kinds == ["int", "bytes"]


def _own_state(source: Source, part: Selection, item: Any, place: Place) -> Any:
    """Return the state of this process, of those that all processes have saved.

    In a job of as many processes each reads its own bytes alone.

    Raises:
        CorruptError: they are no such states.
        MismatchError: the job has another number of processes, for which the item does not regroup them.
    """
    index, here = source.index, this_processes(())
    if [index.type_of(leaf).kind for leaf in part.leaves] != ["int", "bytes"]:
        raise CorruptError(f"{key_of(place)!r:.200} does not hold the states of processes")
    count, leaf = part.leaves
    saved, nbytes = index.values[count], len(index.values.get(leaf, b"")) or leaf_bytes(index.type_of(leaf))
    if not 0 < saved <= nbytes // SIZE:
        raise CorruptError(f"{key_of(place)!r:.200} does not hold the states of {pluralize(saved, 'processes')}")
    spans = places(_bytes_of(source, leaf, 0, SIZE * saved), saved, nbytes)
    if saved == here.count:
        return decode_state(_bytes_of(source, leaf, *spans[here.this]))
    data = _bytes_of(source, leaf, 0, nbytes)
    try:
        each = item if isinstance(item, Each) else Each(item)
        return each.regroup([decode_state(data[start:stop]) for start, stop in spans], here.count)[here.this]
    except MismatchError as error:
        raise MismatchError(f"item {key_of(place)!r:.200}: {error.message}", hint=error.hint) from error


def _bytes_of(source: Source, leaf: int, start: int, stop: int) -> bytes:
    """Return some of the bytes of a leaf, wherever it lies, read and checked."""
    if leaf in source.index.values:
        value: bytes = source.index.values[leaf]
        return value[start:stop]
    request = ReadRequest(leaf, (((start, stop),),))
    source.arrays.read([request], None)
    return request.arrays[0].tobytes()


def _stored_key(place: Place, options: LoadOptions) -> str:
    """Return the key under which an item's state is stored, below ``at``; the empty text for the tree itself."""
    key = key_of(place)
    covering = [wanted for wanted in options.rename if _below(key, wanted)]
    nearest = {wanted: options.rename[wanted] for wanted in sorted(covering, key=len)[-1:]}
    return apply_renames([key], nearest).get(key, key)


def _renames_of(rest: Any, objects: Mapping[Place, Any], options: LoadOptions) -> dict[str, str]:
    """Return the renamings without those of objects alone."""
    keys = flatten_like(rest).keys if options.rename else []
    return {
        wanted: stored
        for wanted, stored in options.rename.items()
        if any(_below(key, wanted) for key in keys) or not any(_below(key_of(place), wanted) for place in objects)
    }


def _below(key: str, stored: str) -> bool:
    return not stored or key == stored or key.startswith(f"{stored}/")


def _has(part: Selection, stored: str) -> bool:
    try:
        select(part.structure, part.keys, at=stored, only=None)
    except MismatchError:
        return False
    return True


def _whole(source: Source, part: Selection, stored: str, options: LoadOptions) -> Selection:
    """Return the branch of an item's state.

    Raises:
        MismatchError: it is not there, or ``only`` keeps a part of it.
    """
    found = select(part.structure, part.keys, at=stored, only=None, stored=stored_text(source))
    index = source.index
    at = "/".join(filter(None, (options.at, stored)))
    all_of_it = select(index.structure, index.keys, at=at, only=None)
    if len(found.keys) != len(all_of_it.keys):
        what = f"only= selects a part of {repr(at) if at else 'the tree'}, whose state is restored as a whole"
        raise MismatchError(what, hint="select all of it, or omit the object from `like`")
    return all_of_it
