"""A part of a checkpoint: a subtree made the root, or the leaves that globs keep."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

from treering._codec.documents import show
from treering._format.index import Container, Token
from treering._format.structure import KEYS, key_text, node_keys
from treering._values.human import near
from treering._values.keys import Glob, GlobSet, join_key, split_key
from treering.errors import Mismatch

_COMPARED: Final = 2000
_LEAF: Final = -1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Leaves of a checkpoint, with the containers around them."""

    structure: Sequence[Token]
    """The containers, in pre-order."""
    leaves: Sequence[int]
    """Numbers of the leaves in the checkpoint."""
    keys: Sequence[str]
    """Their key texts, below the new root."""


def select(
    structure: Sequence[Token], keys: Sequence[str], *, at: str | None, only: str | Sequence[str] | None
) -> Selection:
    """Return the part below ``at`` that the globs keep; a glob that matches a container keeps all of it.

    A container that loses children keeps its class and is marked as thinned.

    Raises:
        Mismatch: nothing lies at ``at``, or nothing matches a glob.
        Format: ``at`` or a glob is no key text.

    Example:
        >>> part = select([Container(node="list", keys=(0, 1)), 2], ["0", "1"], at=None, only="1")
        >>> part.structure[0].node, part.structure[0].keys, part.structure[0].thinned, part.leaves, part.keys
        ('list', (1,), True, [1], ['1'])
    """
    whole = Selection(structure=structure, leaves=range(len(keys)), keys=keys)
    if at:
        whole = _below(whole, at)
    if only is None:
        return whole
    globs = [Glob.parse(text) for text in ([only] if isinstance(only, str) else only)]
    if not globs:
        raise Mismatch("only= holds no glob, so it selects nothing", hint="omit it to load everything")
    return _thin(whole, globs, below=bool(at))


@dataclasses.dataclass(slots=True)
class _Node:
    """One node on the way through the structure."""

    parent: int
    key: str
    token: int
    leaf: int
    accepted: tuple[int, ...]
    """Numbers of the globs that match it."""
    kept: bool = False
    needed: bool = False


def _places(structure: Sequence[Token]) -> Iterator[tuple[int, str, int]]:
    """Yield (number of the parent, key part, number of the container's token or -1 for a leaf), in pre-order."""
    open_ones: list[tuple[int, Iterator[str]]] = []
    number = 0
    for at, token in enumerate(structure):
        for _ in range(1 if isinstance(token, Container) else token):
            parent, part = -1, ""
            while open_ones:
                parent, parts = open_ones[-1]
                following = next(parts, None)
                if following is not None:
                    part = following
                    break
                open_ones.pop()
                parent = -1
            yield parent, part, at if isinstance(token, Container) else _LEAF
            if isinstance(token, Container):
                open_ones.append((number, iter([key_text(key) for key in token.keys])))
            number += 1


def _below(whole: Selection, at: str) -> Selection:
    """Return the subtree at a key."""
    wanted = split_key(at)
    depth_of: list[int] = []
    found = -1
    first_leaf = leaves = 0
    first_token = -1
    matching = {-1: 0}  # node -> how many parts of the wanted path lead to it
    for number, (parent, part, token) in enumerate(_places(whole.structure)):
        depth = depth_of[parent] + 1 if parent >= 0 else 0
        depth_of.append(depth)
        if found >= 0 and depth <= len(wanted):
            break
        on_the_way = matching.get(parent) if parent >= 0 else 0
        if found < 0 and on_the_way is not None:
            if parent < 0:
                matching[number] = 0
            elif on_the_way < len(wanted) and part == wanted[on_the_way]:
                matching[number] = on_the_way + 1
                if on_the_way + 1 == len(wanted):
                    found, first_leaf, first_token = number, leaves, token
        leaves += token == _LEAF
    if found < 0:
        raise Mismatch(f"nothing lies at {at!r} in the checkpoint{_near(at, _branches(whole.keys))}")
    if first_token == _LEAF:
        return Selection(structure=[1], leaves=[whole.leaves[first_leaf]], keys=[""])
    numbers = range(first_leaf, leaves)
    return Selection(
        structure=_sub_structure(whole.structure, first_token),
        leaves=[whole.leaves[number] for number in numbers],
        keys=[join_key(split_key(whole.keys[number])[len(wanted) :]) for number in numbers],
    )


def _sub_structure(structure: Sequence[Token], start: int) -> list[Token]:
    """Return the tokens of the container at ``start`` and of all below it."""
    result: list[Token] = []
    open_children = 1
    for token in structure[start:]:
        if isinstance(token, Container):
            open_children += len(token.keys) - 1
            result.append(token)
        else:
            count = min(token, open_children)
            open_children -= count
            result.append(count)
        if not open_children:
            break
    return result


def _thin(whole: Selection, globs: Sequence[Glob], *, below: bool) -> Selection:
    places = _walk(whole.structure, globs)
    hit: set[int] = set()
    for number, place in enumerate(places):
        above = places[place.parent].kept if place.parent >= 0 else False
        hit.update(place.accepted)
        place.kept = above or bool(place.accepted)
        if place.kept and not above:
            _keep_way(places, number)
    if len(hit) < len(globs):
        missed = globs[min(set(range(len(globs))) - hit)].text
        raise Mismatch(
            f"nothing in the checkpoint matches {missed!r}{_near(missed, _branches(whole.keys))}",
            hint=_about_globs(missed, _branches(whole.keys), below=below),
        )
    return _emit(whole, places)


def _walk(structure: Sequence[Token], globs: Sequence[Glob]) -> list[_Node]:
    together = GlobSet(globs)
    places: list[_Node] = []
    states: dict[int, Any] = {}
    leaf = 0
    for number, (parent, part, token) in enumerate(_places(structure)):
        state = together.start if parent < 0 else together.step(states[parent], part)
        places.append(_Node(parent, part, token, leaf, tuple(together.iter_accepted(state))))
        if token == _LEAF:
            leaf += 1
        else:
            states[number] = state
    return places


def _keep_way(places: list[_Node], number: int) -> None:
    """Mark the containers that lead to a kept node; of their children they keep only what is marked."""
    parent = places[number].parent
    while parent >= 0 and not places[parent].needed:
        places[parent].needed = True
        parent = places[parent].parent


def _emit(whole: Selection, places: list[_Node]) -> Selection:
    stays = [place.kept or place.needed for place in places]
    children: dict[int, list[int]] = {}
    for number, place in enumerate(places):
        if place.token != _LEAF:
            children[number] = []
        if place.parent >= 0:
            children[place.parent].append(number)
    structure: list[Token] = []
    leaves: list[int] = []
    keys: list[str] = []
    for number, place in enumerate(places):
        if not stays[number]:
            continue
        if place.token == _LEAF:
            if structure and isinstance(structure[-1], int):
                structure[-1] += 1
            else:
                structure.append(1)
            leaves.append(whole.leaves[place.leaf])
            keys.append(whole.keys[place.leaf])
            continue
        token = whole.structure[place.token]
        if isinstance(token, Container):
            structure.append(_keep_children(token, [stays[child] for child in children[number]]))
    return Selection(structure=structure, leaves=leaves, keys=keys)


def _keep_children(container: Container, stay: Sequence[bool]) -> Container:
    if all(stay):
        return container
    real = node_keys(container)
    static = container.static
    if real is not container.keys:
        static = tuple((name, _keep(real, stay) if name == KEYS else value) for name, value in static)
    return dataclasses.replace(container, keys=_keep(container.keys, stay), static=static, thinned=True)


def _keep(keys: Sequence[Any], stay: Sequence[bool]) -> tuple[Any, ...]:
    return tuple(itertools.compress(keys, stay))


def _branches(keys: Sequence[str]) -> list[str]:
    """Return all keys and the branches above them."""
    found: dict[str, None] = {}
    for key in keys[:_COMPARED]:
        parts = key.split("/")
        for end in range(1, len(parts) + 1):
            found["/".join(parts[:end])] = None
    return list(found)


def _near(text: str, others: Sequence[str]) -> str:
    close = near(text, others)
    return f"; did you mean {close!r}?" if close else ""


def _about_globs(text: str, branches: Sequence[str], *, below: bool) -> str:
    """Say what the user of this glob may not know."""
    facts = ["only= takes the checkpoint's keys, not those of `like`"]
    parts = text.split("/")
    named = "/".join(itertools.takewhile(lambda part: "*" not in part, parts))
    found = next((branch for branch in branches if branch.endswith(f"/{named}")), None) if named else None
    if found is not None:
        glob = show(found + text[len(named) :])
        facts.append(f"only={glob} with rename={{{show(named)}: {show(found)}}} loads {show(named)} of `like`")
    elif "*" in text:
        facts.append("'*' stays inside one part of a key, '**/NAME' looks at every depth, and '~2' is a '*' in a key")
    facts += ["keys begin below `at`"] if below else []
    return "; ".join(facts)
