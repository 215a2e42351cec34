"""One rule of a key map: which leaves it takes, and what they become. A value that can be compared and inverted.

Patterns over key texts have captures: the same pattern finds keys, and writes them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from treering._values.boxes import Box, whole
from treering._values.dtypes import is_kind_kept, lookup
from treering._values.human import pluralize
from treering.errors import UnsupportedError


class MapLeaf(NamedTuple):
    """A leaf as a map sees it."""

    key: str
    """Its key text."""
    shape: tuple[int, ...] | None = None
    """Its shape; None where it can only have another key, as a Python value or a PRNG key can."""
    dtype: str | None = None
    """Name of its dtype."""


class Piece(NamedTuple):
    """A box of a new leaf that is one box of a stored one."""

    box: Box
    """Which box of the new leaf."""
    leaf: int
    """Number of the stored leaf."""
    start: tuple[int, ...]
    """First corner of the box of the stored leaf."""
    axes: tuple[int | None, ...]
    """As in ``SourceBox``; the box has the length one along axes that are not among them."""


class LeafPart(NamedTuple):
    """A box of a stored leaf with its axes in the order of the new one, without stacked axes."""

    leaf: int
    start: tuple[int, ...]
    shape: tuple[int, ...] | None
    axes: tuple[int | None, ...]
    """Before they are joined by ``flatten``; None: the first one of the two that ``unflatten`` makes."""
    dtype: str | None


class LeafCut(NamedTuple):
    """How a rule divides a leaf, and orders the axes of the parts."""

    lengths: list[int]
    """Of the axes that are unstacked."""
    axis: int
    """The axis that is split."""
    targets: list[tuple[int, tuple[int | None, ...], tuple[int, ...] | None]]
    """For each of them where its part of that axis begins, and axes and shape as in ``LeafPart``."""


def cut_leaf(leaf: MapLeaf, rule: KeyRule) -> LeafCut | str:
    """Return how a rule divides a leaf, or why it cannot.

    Example:
        >>> cut_leaf(MapLeaf("w", (6, 4), "int8"), KeyRule("w", "w", unflatten=(0, 3))).targets
        [(0, (None, 0, 1), (3, 2, 4))]
    """
    if (shape := leaf.shape) is None:
        whole_leaf = LeafCut([], 0, [(0, (), None)])
        return "changes arrays, and it can only have another key" if rule.moves_items else whole_leaf
    if rule.cast is not None and leaf.dtype != rule.cast[0]:
        return f"casts from {rule.cast[0]}, found {leaf.dtype}"
    if rule.cast is not None and not is_kind_kept(*rule.cast):
        return f"casts from {rule.cast[0]} to {rule.cast[1]}, which holds another kind of number"
    gone = rule.unstack.values()
    if any(axis >= len(shape) for axis in gone):
        return f"unstacks an axis that it does not have, its shape is {shape}"
    axes = [axis for axis in range(len(shape)) if axis not in gone]
    axis, ranges = 0, [(0, 0)]
    if rule.split is not None:
        if not -len(axes) <= rule.split < len(axes):
            return f"splits an axis that it does not have, its shape is {shape}"
        axis = axes[rule.split]
        if (sizes := part_sizes(shape[axis], rule.sizes, len(rule.targets))) is None:
            return f"splits axis {axis} into {rule.sizes or f'{len(rule.targets)} equal parts'}, its shape is {shape}"
        ranges = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))
    cut = LeafCut([shape[one] for one in gone], axis, [])
    for start, stop in ranges:
        lengths = [stop - start if rule.split is not None and one == axis else shape[one] for one in axes]
        if isinstance(made := _order_axes(axes, lengths, rule), str):
            return f"{made}, its shape is {shape}"
        cut.targets.append((start, *made))
    return cut


def _order_axes(
    stored: Sequence[int], lengths: list[int], rule: KeyRule
) -> tuple[tuple[int | None, ...], tuple[int, ...]] | str:
    """Return axes and shape of a part, as in ``LeafPart``, or why the rule does not fit them."""
    axes: list[int | None] = list(stored)
    if rule.unflatten is not None:
        place, count = rule.unflatten
        if place >= len(axes) or lengths[place] % count:
            return f"unflattens axis {place} into {count} equal parts"
        axes.insert(place, None)
        lengths[place : place + 1] = [count, lengths[place] // count]
    order = range(len(axes)) if rule.transpose is None else rule.transpose
    if len(order) != len(axes):
        return f"is for {pluralize(len(order), 'axes')}"
    lengths = [lengths[one] for one in order]
    if rule.flatten is not None:
        place, count = rule.flatten
        if place + 1 >= len(axes) or lengths[place] != count:
            return f"flattens axis {place} of the length {count} and the next one"
        lengths[place : place + 2] = [count * lengths[place + 1]]
    return tuple(axes[one] for one in order), tuple(lengths)


def divide_part(part: LeafPart, rule: KeyRule) -> Iterator[Piece]:
    """Yield the pieces of a part: one for each place along an axis that is added or taken away.

    Example:
        >>> part = LeafPart(0, (0,), (2, 2), (None, 0), "int8")
        >>> [(piece.box, piece.start) for piece in divide_part(part, KeyRule("w", "w", unflatten=(0, 2)))]
        [(((0, 1), (0, 2)), (0,)), (((1, 2), (0, 2)), (2,))]
    """
    lengths, divided, inner = list(part.shape or ()), 0, 0
    joined, count = rule.flatten or (0, 1)
    if rule.flatten is not None:
        inner = lengths[joined] // count
        lengths[joined : joined + 1] = [count, inner]
    if rule.unflatten is not None:
        divided = sorted(axis for axis in part.axes if axis is not None)[rule.unflatten[0]]
    for place, row in itertools.product(range((rule.unflatten or (0, 1))[1]), range(count)):
        box, start, axes = list(whole(tuple(lengths))), list(part.start), list(part.axes)
        if rule.unflatten is not None:
            box[axes.index(None)] = (place, place + 1)
            start[divided] += place * lengths[axes.index(divided)]
        if rule.flatten is not None:
            if (outer := axes.pop(joined)) is not None:
                start[outer] += row
            elif row != place:
                continue
            low, high = box[joined + 1]
            box[joined : joined + 2] = [(row * inner + low, row * inner + high)]
        yield Piece(tuple(box), part.leaf, tuple(start), tuple(axes))


def part_sizes(length: int, sizes: Sequence[int] | None, count: int) -> list[int] | None:
    """Return how long each part of an axis is; None where it has another length.

    Example:
        >>> part_sizes(6, None, 3), part_sizes(6, (4, 2), 2), part_sizes(7, None, 3)
        ([2, 2, 2], [4, 2], None)
    """
    if sizes is not None:
        return list(sizes) if sum(sizes) == length else None
    return [length // count] * count if length and length % count == 0 else None


def place_piece(piece: Piece, places: Sequence[int], merge: int, first: int, stacks: Sequence[int]) -> Piece:
    """Return a piece of a part at its place in the new leaf: that of its source, and along the stacked axes.

    Args:
        piece: of the part.
        places: the places along the stacked axes.
        merge: the axis along which sources are joined.
        first: where the source begins along it.
        stacks: the stacked axes.
    """
    box = list(piece.box)
    if first:
        box[merge] = (first + box[merge][0], first + box[merge][1])
    axes = list(piece.axes)
    for axis, place in zip(stacks, places, strict=True):
        box.insert(axis, (place, place + 1))
        axes.insert(axis, None)
    return Piece(tuple(box), piece.leaf, piece.start, tuple(axes))


_MOST_AXES: Final = 32
MOST_RULES: Final = 10_000
"""Rules of one map, at most."""


@dataclasses.dataclass(frozen=True)
class KeyRule:
    """Which leaves of a tree one rule of a ``KeyMap`` takes, and what they become.

    ``source`` and ``target`` are key texts with captures: ``{name}`` stands for characters other than ``/`` and ``.``,
    ``{name*}`` for characters other than ``/``, ``{name**}`` for any. A capture of both keeps its text. One that only
    the source has is stacked, one that only the target has is unstacked: its values are 0, 1, 2, ...

    The steps of a rule are done in this order: unstack, split, unflatten, transpose, flatten, merge, stack.

    Args:
        source: the pattern of the stored keys; of ``merge`` and of a rule without a target several.
        target: the pattern of the new keys; of ``split`` several. None leaves the leaves out: a declared loss.
        stack: capture -> the axis of the result along which its leaves are stacked.
        unstack: capture -> the axis of the stored leaf that becomes one leaf for each place.
        unflatten: an axis and a length: the axis becomes two, of which the first has this length.
        transpose: the order of the axes, as ``numpy.transpose`` takes it.
        flatten: an axis and its length: it and the next one become one. The opposite of ``unflatten``.
        merge: the axis along which the leaves of several sources are joined.
        split: the axis along which a leaf is divided into several targets.
        sizes: how long each part is, of ``merge`` and ``split``; None: all are equal.
        cast: the dtype of the stored leaves, and the one that they get. Rounding is accepted, no other change.
        copy: take leaves that another rule takes too. The way back leaves this copy out.
        rest: take only leaves that no other rule takes: ``KeyRule("{key**}", "{key**}", rest=True)`` keeps them.

    Raises:
        UnsupportedError: the parts of the rule contradict each other.

    Example:
        >>> KeyRule("h.{i}.mlp.weight", "h/mlp/kernel", stack={"i": 0}, transpose=(1, 0)).inverse()
        KeyRule('h/mlp/kernel', 'h.{i}.mlp.weight', unstack={'i': 0}, transpose=(1, 0))
    """

    source: str | Sequence[str]
    target: str | Sequence[str] | None
    _: dataclasses.KW_ONLY
    stack: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unstack: Mapping[str, int] = dataclasses.field(default_factory=dict)
    unflatten: Sequence[int] | None = None
    transpose: Sequence[int] | None = None
    flatten: Sequence[int] | None = None
    merge: int | None = None
    split: int | None = None
    sizes: Sequence[int] | None = None
    cast: Sequence[str] | None = None
    copy: bool = False
    rest: bool = False
    place: str = dataclasses.field(default="", compare=False)
    """Where it was written, for messages."""

    def __post_init__(self) -> None:
        for name in ("source", "target", "unflatten", "transpose", "flatten", "sizes", "cast"):
            if isinstance(given := getattr(self, name), list):
                object.__setattr__(self, name, tuple(given))
        for name in ("stack", "unstack"):
            given = getattr(self, name)
            object.__setattr__(self, name, dict(given) if isinstance(given, Mapping) else given)
        try:
            problem = self._find_problem()
        except UnsupportedError as error:
            problem = str(error)
        if problem:
            raise UnsupportedError(f"{self.text}: {problem}")

    @property
    def text(self) -> str:
        """The rule for people."""
        where = f" ({self.place})" if self.place else ""
        return f"the rule {self.source!r:.200} -> {self.target!r:.200}{where}"

    @functools.cached_property
    def sources(self) -> tuple[KeyPattern, ...]:
        """The patterns of stored keys."""
        return _patterns(self.source)

    @functools.cached_property
    def targets(self) -> tuple[KeyPattern, ...]:
        """The patterns of new keys; none where leaves are left out."""
        return () if self.target is None else _patterns(self.target)

    @property
    def moves_items(self) -> bool:
        """Whether it does more than give keys."""
        steps = (self.unflatten, self.transpose, self.flatten, self.merge, self.split, self.cast)
        return bool(self.stack or self.unstack) or any(step is not None for step in steps)

    def inverse(self) -> KeyRule | None:
        """Return the rule of the way back; None where this one leaves leaves out."""
        if self.target is None:
            return None
        if self.copy:
            return KeyRule(self.target, None, place=self.place)
        order = self.transpose
        return KeyRule(
            self.target, self.source, stack=self.unstack, unstack=self.stack, merge=self.split, split=self.merge,
            unflatten=self.flatten, flatten=self.unflatten,
            transpose=None if order is None else tuple(sorted(range(len(order)), key=order.__getitem__)),
            sizes=self.sizes, cast=None if self.cast is None else tuple(reversed(self.cast)), rest=self.rest,
            place=self.place,
        )  # fmt: skip

    def __repr__(self) -> str:
        options = [(name, getattr(self, name)) for name in OPTIONS]
        given = [
            f", {name}={value!r}" for name, value in options if value is not None and value is not False and value != {}
        ]
        return f"KeyRule({self.source!r}, {self.target!r}{''.join(given)})"

    def _find_problem(self) -> str | None:
        """Return what is wrong with the rule, None for nothing."""
        sources, targets = self.sources, self.targets
        for name in ("copy", "rest"):
            if type(given := getattr(self, name)) is not bool:
                return f"{name}={given!r:.50} is neither True nor False"
        if self.copy and self.rest:
            return "copy= and rest= exclude each other"
        if not targets:
            return "a rule without a target has nothing else" if self.moves_items or self.copy else None
        if (self.merge is not None) != (len(sources) > 1):
            return "several sources and merge=, the axis along which they are joined, belong together"
        if (self.split is not None) != (len(targets) > 1):
            return "several targets and split=, the axis along which the leaf is divided, belong together"
        if self.merge is not None and self.split is not None:
            return "merge= and split= exclude each other"
        return self._find_wrong_captures() or self._find_wrong_axes()

    def _find_wrong_captures(self) -> str | None:
        sides = [{pattern.captures for pattern in side} for side in (self.sources, self.targets)]
        if any(len(side) > 1 for side in sides):
            return "the patterns of one side have different captures"
        (found,), (made,) = sides
        for option, wanted in (("stack", found - made), ("unstack", made - found)):
            given = getattr(self, option)
            if not isinstance(given, dict) or not all(_is_axis(axis) for axis in given.values()):
                return f"{option}={given!r:.100} does not map captures to axes, which count from 0"
            if given.keys() != wanted:
                side = "source" if option == "stack" else "target"
                names = ", ".join(f"{{{name}}}" for name in sorted(wanted)) or "none"
                return f"{option}= names the captures that only the {side} has, which are: {names}"
            if len(set(given.values())) < len(given):
                return f"{option}= has an axis twice"
        return None

    def _find_wrong_axes(self) -> str | None:
        order, sizes, cast = self.transpose, self.sizes, self.cast
        for name, axis in (("merge", self.merge), ("split", self.split)):
            if axis is not None and not (type(axis) is int and -_MOST_AXES <= axis < _MOST_AXES):
                return f"{name}={axis!r:.50} is not an axis"
        for name in ("unflatten", "flatten"):
            given = getattr(self, name)
            is_pair = _is_ints(given) and len(given) == 2 and _is_axis(given[0]) and given[1] >= 1  # noqa: PLR2004
            if given is not None and not is_pair:
                return f"{name}={given!r:.100} is not a pair of an axis, which counts from 0, and a length"
        if order is not None and not (_is_ints(order) and sorted(order) == list(range(len(order)))):
            return f"transpose={order!r:.100} is not an order of axes"
        if sizes is not None:
            parts = max(len(self.sources), len(self.targets))
            if parts == 1:
                return "sizes= belongs to merge= and split="
            if not _is_ints(sizes) or min(sizes, default=0) < 1 or len(sizes) != parts:
                return f"sizes={sizes!r:.100} has to have a size of 1 or more for each of the {parts} parts"
        if cast is not None:
            names = [each for each in cast if isinstance(each, str)] if isinstance(cast, tuple) else []
            if len(names) != 2 or len(cast) != 2 or None in map(lookup, names):  # noqa: PLR2004 - a pair
                return f"cast={cast!r:.100} is not a pair of dtypes: the stored one and the new one"
        return None


OPTIONS: Final = tuple(field.name for field in dataclasses.fields(KeyRule)[2:] if field.compare)
"""What a rule has beside source and target."""


def invert_rules(rules: Iterable[KeyRule]) -> tuple[KeyRule, ...]:
    """Return the rules of the way back."""
    return tuple(rule for each in rules if (rule := each.inverse()) is not None)


def _patterns(given: Any) -> tuple[KeyPattern, ...]:
    texts = given if isinstance(given, tuple) else (given,)
    if not texts:
        raise UnsupportedError("it has no pattern")
    return tuple(map(KeyPattern, texts))


def _is_ints(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(value) is int for value in values)


def _is_axis(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST_AXES


_PIECE: Final = re.compile(r"(\{\{|\}\})|\{([A-Za-z][A-Za-z0-9_]*)(\*{0,2})\}|[{}]")
_CLASSES: Final = {"": "[^/.]", "*": "[^/]", "**": "."}
_MOST_CAPTURES: Final = 16


class KeyPattern:
    """A key text in which ``{name}`` stands for some characters, and ``{{`` and ``}}`` for braces.

    ``{name}`` is one or more characters other than ``/`` and ``.``, ``{name*}`` other than ``/``, and ``{name**}`` is
    any of them. A capture ends at the first place where the text stands that follows it in the pattern, and the last
    one of a pattern where all of the rest fits. So a match costs time in proportion to the key.

    Args:
        text: the pattern.

    Attributes:
        text: the same.
        captures: the names in it.

    Raises:
        UnsupportedError: it is not such a text.

    Example:
        >>> pattern = KeyPattern("model.layers.{i}.{name}_proj.weight")
        >>> pattern.match("model.layers.7.q_proj.weight")
        {'i': '7', 'name': 'q'}
        >>> pattern.match("model.norm.weight") is None
        True
        >>> KeyPattern("layers/{name}/kernel").render({"i": "7", "name": "q"})
        'layers/q/kernel'
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise UnsupportedError(f"a pattern is a text, found {text!r:.100}")
        self.text = text
        self._pieces: list[tuple[str, str, str]] = []
        """Each capture, its class, and the text behind it; the first of them is the text before all captures."""
        name, kind, literal, start = "", "", "", 0
        for found in _PIECE.finditer(text):
            literal += text[start : found.start()]
            start = found.end()
            if found[1]:
                literal += found[1][0]
            elif found[2]:
                if not literal and name:
                    between = f"{{{name}}} and {found[0]}"
                    raise UnsupportedError(f"nothing lies between {between} in the pattern {text!r:.200}")
                self._pieces.append((name, kind, literal))
                name, kind, literal = found[2], found[3], ""
            else:
                raise UnsupportedError(f"a brace stands alone in the pattern {text!r:.200}", hint="write '{{' for '{'")
        self._pieces.append((name, kind, literal + text[start:]))
        names = [piece[0] for piece in self._pieces[1:]]
        if len(set(names)) < len(names) or len(names) > _MOST_CAPTURES:
            raise UnsupportedError(f"the pattern {text!r:.200} has a capture twice, or more than {_MOST_CAPTURES}")
        self.captures = frozenset(names)
        # Atomic groups: what was found is not tried again in another way.
        *middle, last = [f"(?P<{n}>{_CLASSES[k]}+?){re.escape(t)}" for n, k, t in self._pieces[1:]] or [""]
        groups = "".join(f"(?>{group})" for group in middle)
        self._regex = re.compile(rf"{re.escape(self._pieces[0][2])}{groups}(?>{last}\Z)", re.DOTALL)

    def match(self, key: str) -> dict[str, str] | None:
        """Return what each capture stands for in a key; None where the key does not fit."""
        found = self._regex.match(key)
        return None if found is None else found.groupdict()

    def render(self, captures: Mapping[str, str]) -> str:
        """Return the key in which the captures are these texts."""
        return "".join((captures[name] if name else "") + literal for name, _, literal in self._pieces)
