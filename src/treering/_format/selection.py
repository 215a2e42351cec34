"""A part of a checkpoint: a subtree made the root, or the leaves that globs keep."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

from treering._codec.documents import show
from treering._format.index import ARRAY_KINDS, Container, LeafType, Token
from treering._format.structure import KEYS, key_text, node_keys, walk
from treering._values.dtypes import is_float
from treering._values.human import near
from treering._values.keys import GlobSet, split_key
from treering.errors import MismatchError

_COMPARED: Final = 2000
_TOP: Final = Container(node="dict", keys=("",))
_ABOUT_STARS: Final = "'*' stays inside one part of a key, '**/NAME' looks at every depth, and '~2' is a '*' in a key"


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
    structure: Sequence[Token],
    keys: Sequence[str],
    *,
    at: str | None,
    only: str | Sequence[str] | None,
    saves: str = "",
    stored: str = "the checkpoint",
    has_like: bool = False,
) -> Selection:
    """Return the part below ``at`` that the globs keep; a glob that matches a container keeps all of it.

    A container that loses children keeps its class and is marked as thinned. ``saves`` is the name of the argument that
    has the globs where they are about a tree that is saved, ``stored`` what else the tree is, ``has_like`` whether the
    part is put into another tree, all for errors.

    Raises:
        MismatchError: nothing lies at ``at``, or nothing matches a glob.
        FormatError: ``at`` or a glob is no key text.

    Example:
        >>> part = select([Container(node="list", keys=(0, 1)), 2], ["0", "1"], at=None, only="1")
        >>> part.structure[0].node, part.structure[0].keys, part.structure[0].thinned, part.leaves, part.keys
        ('list', (1,), True, [1], ['1'])
    """
    whole = Selection(structure=structure, leaves=range(len(keys)), keys=keys)
    if at:
        whole = _below(whole, at, stored)
    if only is None:
        return whole
    globs = [only] if isinstance(only, str) else list(only)
    if not globs:
        what = "save" if saves else "load"
        raise MismatchError("only= holds no glob, so it selects nothing", hint=f"omit it to {what} everything")
    part, hit = _thin(whole, globs)
    if len(hit) < len(globs):
        missed = globs[min(set(range(len(globs))) - hit)]
        branches = _branches(whole.keys)
        where = f"the tree matches {missed!r} of {saves}=" if saves else f"{stored} matches {missed!r}"
        raise MismatchError(
            f"nothing in {where}{_near(missed, branches)}",
            hint=_ABOUT_STARS if saves else _about_globs(missed, branches, below=bool(at), has_like=has_like),
        )
    return part


def drop_leaves(part: Selection, dropped: AbstractSet[str]) -> Selection:
    """Return a part without the leaves of these keys; containers stay, and are marked as thinned.

    Example:
        >>> part = Selection(structure=[Container(node="list", keys=(0, 1)), 2], leaves=[5, 6], keys=["0", "1"])
        >>> rest = drop_leaves(part, {"0"})
        >>> rest.structure[0].keys, rest.structure[1:], rest.leaves, rest.keys
        ((1,), [1], [6], ['1'])
    """
    structure: list[Token] = []
    stays = [key not in dropped for key in part.keys]
    levels = [_OpenContainer(_TOP, -1, None, kept=True, stay=[])]
    leaf = 0
    for depth, _, token in walk(part.structure):
        _close(levels, depth, structure)
        if isinstance(token, Container):
            levels.append(_OpenContainer(token, len(structure), None, kept=True, stay=[]))
            structure.append(token)
        else:
            _take_run(levels[-1], stays[leaf : leaf + token], structure)
            leaf += token
    _close(levels, 0, structure)
    leaves, keys = list(itertools.compress(part.leaves, stays)), list(itertools.compress(part.keys, stays))
    return Selection(structure=structure, leaves=leaves, keys=keys)


def choose_dtypes(
    structure: Sequence[Token],
    keys: Sequence[str],
    types: Sequence[LeafType],
    dtypes: Iterable[tuple[str | None, str | None]],
) -> dict[int, str]:
    """Return leaf number -> name of the dtype, of the arrays of floats that get another one.

    Args:
        structure: the containers.
        keys: key text of each leaf.
        types: the type of each leaf.
        dtypes: what `float_dtypes` returns.

    Raises:
        MismatchError: nothing matches a glob.

    Example:
        >>> types = [LeafType(kind="jax", dtype="float32", shape=(2,)), LeafType(kind="int")]
        >>> choose_dtypes([Container(node="dict", keys=("w", "n")), 2], ["w", "n"], types, [(None, "bfloat16")])
        {0: 'bfloat16'}
    """
    chosen: dict[int, str | None] = {}
    for glob, name in dtypes:
        found = range(len(keys)) if glob is None else select(structure, keys, at=None, only=glob, saves="dtype").leaves
        for number in found:
            chosen.setdefault(number, name)
    arrays = ARRAY_KINDS - {"key"}
    return {
        number: name
        for number, name in chosen.items()
        if name is not None
        and types[number].kind in arrays
        and is_float(types[number].dtype)
        and types[number].dtype != name
    }


def thinned_as_dicts(structure: Sequence[Token]) -> list[Token]:
    """Return a structure in which each container that lost children is a dict of those that it has.

    Example:
        >>> thinned_as_dicts([Container(node="list", keys=(1,), thinned=True), 1])[0].node
        'dict'
    """
    return [
        Container(node="dict", keys=node_keys(token)) if isinstance(token, Container) and token.thinned else token
        for token in structure
    ]


def _below(whole: Selection, at: str, stored: str) -> Selection:
    """Return the subtree at a key."""
    count = len(split_key(at))
    part, hit = _thin(whole, [at.replace("*", "~2")], first=True)
    if not hit:
        raise MismatchError(f"nothing lies at {at!r} in {stored}{_near(at, _branches(whole.keys))}")
    # Each container on the way has one child left. An empty part alone, above or below, is written "~".
    start = len(at) + (at != "~")
    keys = ["" if key == at else key[start:] or "~" for key in part.keys]
    return Selection(structure=part.structure[count:], leaves=part.leaves, keys=keys)


@dataclasses.dataclass(slots=True)
class _OpenContainer:
    """A container whose children are being looked at."""

    head: Container
    place: int
    """Where it stands in the new structure."""
    state: Any
    """How far the globs have come."""
    kept: bool
    """Whether a glob matches it, or a container around it."""
    stay: list[bool]
    """Of each child so far, whether it or something in it is kept."""


def _thin(whole: Selection, globs: Sequence[str], *, first: bool = False) -> tuple[Selection, set[int]]:
    """Return what the globs keep, or the first of it, and the numbers of those that match something."""
    together = GlobSet(globs)
    hit: set[int] = set()
    structure: list[Token] = []
    kept: list[int] = []
    leaf = 0
    levels = [_OpenContainer(_TOP, -1, together.start, kept=False, stay=[])]
    for depth, place, token in walk(whole.structure):
        _close(levels, depth, structure)
        above = levels[-1]
        if first and hit and not above.kept:
            break
        state, count = above.state, 1 if isinstance(token, Container) else token
        stay = [above.kept] * count
        for number in range(count if state else 0):
            if depth:
                state = together.step(above.state, key_text(above.head.keys[place + number]))
            accepted = together.accepted(state)
            hit.update(accepted)
            stay[number] |= bool(accepted)
        if isinstance(token, Container):
            levels.append(_OpenContainer(token, len(structure), state, stay[0], stay=[]))
            structure.append(token)
            continue
        _take_run(above, stay, structure)
        kept += itertools.compress(range(leaf, leaf + count), stay)
        leaf += count
    _close(levels, 0, structure)
    leaves, keys = [whole.leaves[number] for number in kept], [whole.keys[number] for number in kept]
    return Selection(structure=structure, leaves=leaves, keys=keys), hit


def _take_run(above: _OpenContainer, stay: Sequence[bool], structure: list[Token]) -> None:
    """Keep those leaves of a run that stay."""
    above.stay += stay
    if True in stay:  # a run goes on behind the end of a container
        last = structure.pop() if structure else 0
        structure += [last, sum(stay)] if isinstance(last, Container) else [last + sum(stay)]


def _close(levels: list[_OpenContainer], depth: int, structure: list[Token]) -> None:
    """Leave the containers that are complete: those of which nothing is kept disappear."""
    while len(levels) > depth + 1:
        level = levels.pop()
        stays = level.kept or True in level.stay
        levels[-1].stay.append(stays)
        if stays:
            structure[level.place] = _keep_children(level.head, level.stay)
        else:
            del structure[level.place :]


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
    begun = (itertools.accumulate(key.split("/"), "{}/{}".format) for key in keys[:_COMPARED])
    return list(dict.fromkeys(itertools.chain.from_iterable(begun)))


def _near(text: str, others: Sequence[str]) -> str:
    close = near(text.strip("/"), others)
    return f"; did you mean {close!r}?" if close else ""


def _about_globs(text: str, branches: Sequence[str], *, below: bool, has_like: bool) -> str:
    """Say what the user of this glob may not know."""
    keys = "not those of `like`" if has_like else "those below `at`" if below else "from its root on"
    facts = [f"only= takes the checkpoint's keys, {keys}"]
    named = "/".join(itertools.takewhile(lambda part: "*" not in part, text.split("/")))
    found = next((branch for branch in branches if branch.endswith(f"/{named}")), None) if named else None
    if found is not None:
        glob = show(found + text[len(named) :])
        every = f" selects it, only={show('**/' + text)} at every depth"
        mapped = f" with key_map={{{show(named)}: {show(found)}}} loads {show(named)} of `like`"
        facts.append(f"only={glob}{mapped if has_like else every}")
    elif "*" in text:
        facts.append(_ABOUT_STARS)
    facts += ["keys begin below `at`"] if below and has_like else []
    return "; ".join(facts)
