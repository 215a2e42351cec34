"""A key map: which leaves of one tree become which leaves of another. A value that can be compared and inverted."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from treering._keymap.key_rule import (
    MOST_RULES,
    OPTIONS,
    KeyRule,
    LeafPart,
    MapLeaf,
    Piece,
    cut_leaf,
    divide_part,
    invert_rules,
    part_sizes,
    place_piece,
)
from treering._printable import list_lines
from treering._store.resolve import open_file
from treering._values.boxes import Box, pick_overlap, whole
from treering._values.human import build_mismatch, near
from treering._values.keys import key_name, split_key
from treering.errors import FormatError, UnsupportedError

if TYPE_CHECKING:
    from treering._keymap.key_rule import KeyPattern

_MOST_PARTS: Final = 1 << 20
_MOST_COMPARED: Final = 100
_MOST_MISSING: Final = 3
_LONGEST_NUMBER: Final = 7


class SourceBox(NamedTuple):
    """A box of a stored leaf, and where it goes."""

    into: Box
    """Which box of the wanted one it fills."""
    leaf: int
    """Number of the stored leaf."""
    box: Box
    """Which box of it."""
    steps: tuple[int, ...] | None
    """The stride along each of its axes; None: every item."""
    axes: tuple[int | None, ...]
    """For each axis of the new leaf that of the stored one; None: a new one, of length one."""


class MappedLeaf(NamedTuple):
    """What a new leaf is made of."""

    key: str
    shape: tuple[int, ...] | None
    dtype: str | None
    pieces: tuple[Piece, ...]
    """They tile it."""
    renamed: bool
    """Whether it is one stored leaf as it is."""

    def find_boxes(self, box: Box, steps: Sequence[int] | None = None) -> Iterator[SourceBox]:
        """Yield the boxes of stored leaves that a box of the new leaf needs.

        Args:
            box: of the new leaf.
            steps: the stride along each axis; None: every item of it is wanted.
        """
        for piece in self.pieces:
            if (found := pick_overlap(piece.box, box, steps)) is None:
                continue
            into, inner = found
            sides = [(start, start + 1) for start in piece.start]
            each = [1] * len(sides)
            for axis, part in zip(piece.axes, inner, strict=True):
                if axis is not None:
                    sides[axis] = (piece.start[axis] + part.start, piece.start[axis] + part.stop)
                    each[axis] = part.step
            yield SourceBox(into, piece.leaf, tuple(sides), None if steps is None else tuple(each), piece.axes)


@dataclasses.dataclass(frozen=True, slots=True)
class MapPlan:
    """What becomes of the leaves of a tree.

    Example:
        >>> rules = [KeyRule("{i}/w", "w", stack={"i": 0}, transpose=(1, 0))]
        >>> plan = plan_map(rules, [MapLeaf("0/w", (2, 3), "int8"), MapLeaf("1/w", (2, 3), "int8")])
        >>> plan.leaves[0].key, plan.leaves[0].shape
        ('w', (2, 3, 2))
        >>> [(part.leaf, part.box) for part in plan.leaves[0].find_boxes(((1, 2), (0, 3), (0, 1)))]
        [(1, ((0, 1), (0, 3)))]
    """

    leaves: tuple[MappedLeaf, ...]
    """The new leaves, in the order of their first stored ones."""
    dropped: tuple[int, ...]
    """Numbers of the stored leaves that the map leaves out."""


def plan_map(rules: Sequence[KeyRule], leaves: Iterable[MapLeaf], back: Sequence[KeyRule] | None = None) -> MapPlan:
    """Plan a map of these rules for the leaves of a tree; ``KeyMap.plan`` says more.

    Args:
        rules: of the map.
        leaves: of the tree.
        back: the rules by which all of these leaves have to come back; None: those of the inverse, by which leaves that
            are left out need not.
    """
    leaves = tuple(leaves)
    planner = _Planner(leaves)
    plan = planner.plan(rules)
    findings = planner.findings
    if not findings:
        kept = planner.kept if back is None else range(len(leaves))
        findings = _find_other_way_back(invert_rules(rules) if back is None else back, leaves, plan, kept)
    if findings:
        message = f"the key map does not fit the leaves:{list_lines(findings)}"
        raise build_mismatch(message, findings)
    return plan


def _find_other_way_back(
    inverse: Sequence[KeyRule], leaves: Sequence[MapLeaf], plan: MapPlan, kept: Iterable[int]
) -> list[str]:
    """Return how the leaves that come back differ from those that are mapped."""
    planner = _Planner([MapLeaf(leaf.key, leaf.shape, leaf.dtype) for leaf in plan.leaves])
    back = {MapLeaf(leaf.key, leaf.shape, leaf.dtype): leaf for leaf in planner.plan(inverse).leaves}
    if planner.findings:
        return [f"on the way back, {finding}" for finding in planner.findings]
    findings = [f"{leaves[number].key}: it does not come back" for number in kept if leaves[number] not in back]
    pieces = [{piece.box: piece for piece in leaf.pieces} for leaf in plan.leaves]
    return findings or [
        f"{leaves[number].key}: another leaf comes back as it, or its items in another order"
        for number in set(kept).difference(plan.dropped)  # a dropped one is made of the leaf that it is a copy of
        if not _is_itself(number, back[leaves[number]], plan, pieces)
    ]


def _is_itself(number: int, back: MappedLeaf, plan: MapPlan, pieces: Sequence[Mapping[Box, Piece]]) -> bool:
    """Tell whether every item of what comes back is that of the stored leaf at the same place."""
    for piece in back.pieces:
        sides = [(start, start + 1) for start in piece.start]
        for middle, (start, stop) in zip(piece.axes, piece.box, strict=True):
            if middle is not None:
                sides[middle] = (piece.start[middle], piece.start[middle] + stop - start)
        made, box = plan.leaves[piece.leaf], tuple(sides)
        if box in pieces[piece.leaf]:  # nearly always, and a leaf may be made of many
            made = made._replace(pieces=(pieces[piece.leaf][box],))
        for found in made.find_boxes(box):
            if found.leaf != number:
                return False
            for axis, (middle, (start, _)) in enumerate(zip(piece.axes, piece.box, strict=True)):
                first, stop = (0, 1) if middle is None else found.into[middle]
                moved = stop - first > 1 and middle is not None and found.axes[middle] != axis
                if moved or found.box[axis][0] != start + first:
                    return False
    return True


class _Group(NamedTuple):
    """What makes up a new leaf."""

    rule: KeyRule
    parts: dict[tuple[tuple[int, ...], int], LeafPart]
    """By the places along the stacked axes, in their order, and by the number of the source."""


class _Planner:
    """Plans a map; what does not fit is in ``findings``.

    Args:
        leaves: the stored leaves.

    Attributes:
        findings: one line for each.
        kept: numbers of the leaves that the way back brings back.
    """

    def __init__(self, leaves: Sequence[MapLeaf]) -> None:
        self._leaves = leaves
        self._groups: dict[str, _Group] = {}
        self._made = 0
        self.findings: list[str] = []
        self.kept: list[int] = []

    def plan(self, rules: Sequence[KeyRule]) -> MapPlan:
        """Return the plan, as far as the map fits."""
        dropped: list[int] = []
        unnamed: list[str] = []
        patterns = [(rule, n, pattern) for rule in rules for n, pattern in enumerate(rule.sources)]
        # A map may have a rule for each leaf: those of plain keys are looked up, and None has the others.
        places: dict[str | None, list[int]] = {None: []}
        for place, (*_, pattern) in enumerate(patterns):
            places.setdefault(None if pattern.captures else pattern.render({}), []).append(place)
        for number, leaf in enumerate(self._leaves):
            found = [
                (rule, n, captures)
                for rule, n, pattern in map(patterns.__getitem__, sorted(places[None] + places.get(leaf.key, [])))
                if (captures := pattern.match(leaf.key)) is not None
            ]
            if any(not (rule.rest or rule.copy) for rule, *_ in found):
                found = [each for each in found if not each[0].rest]
            owners = [rule for rule, *_ in found if not rule.copy]
            if not found:
                unnamed.append(leaf.key)
            elif not owners:
                self._note(leaf.key, f"{found[0][0].text} only copies it")
            elif len(owners) > 1:
                self._note(leaf.key, f"two rules name it, {owners[0].text} and {owners[1].text}")
            elif owners[0].targets:
                self.kept.append(number)
            else:
                dropped.append(number)
            for rule, n, captures in found:
                if rule.targets and len(owners) <= 1:
                    self._take(number, rule, n, captures)
        texts = [pattern.text for *_, pattern in patterns]
        for place, key in enumerate(unnamed):
            close = near(key, texts) if place < _MOST_COMPARED else None
            self._note(key, "no rule names it" + (f"; did you mean {close!r}?" if close else ""))
        made = [self._join(key, group) for key, group in self._groups.items()]
        self._check_keys()
        return MapPlan(tuple(leaf for leaf in made if leaf is not None), tuple(dropped))

    def _note(self, key: str, text: str) -> None:
        self.findings.append(f"{key_name(key):.200}: {text:.1000}")

    # ------------------------------------------------------------------------------------------- one leaf, its parts

    def _take(self, number: int, rule: KeyRule, source: int, captures: Mapping[str, str]) -> None:
        """Put the parts of a stored leaf where they go."""
        leaf = self._leaves[number]
        cut = cut_leaf(leaf, rule)
        if isinstance(cut, str):
            self._note(leaf.key, f"{rule.text} {cut}")
            return
        self._made += math.prod(cut.lengths) * math.prod(pair[1] for pair in (rule.unflatten, rule.flatten) if pair)
        if not math.prod(cut.lengths) or self._made > _MOST_PARTS:
            what = "nothing" if 0 in cut.lengths else f"more than {_MOST_PARTS} leaves"
            self._note(leaf.key, f"{rule.text} makes {what} of it, its shape is {leaf.shape}")
            return
        dtype = leaf.dtype if rule.cast is None else rule.cast[1]
        corner = [0] * len(leaf.shape or ())
        for places in itertools.product(*map(range, cut.lengths)):
            texts = {**captures, **{name: str(place) for name, place in zip(rule.unstack, places, strict=True)}}
            for axis, place in zip(rule.unstack.values(), places, strict=True):
                corner[axis] = place
            for pattern, (start, axes, shape) in zip(rule.targets, cut.targets, strict=True):
                if rule.split is not None:
                    corner[cut.axis] = start
                self._put(rule, pattern, texts, source, LeafPart(number, tuple(corner), shape, axes, dtype))

    def _put(self, rule: KeyRule, pattern: KeyPattern, texts: Mapping[str, str], source: int, part: LeafPart) -> None:
        key, stored = pattern.render(texts), self._leaves[part.leaf].key
        places: list[int] = []
        for name in _stacked(rule):
            text = texts[name]
            if len(text) > _LONGEST_NUMBER or not (text.isascii() and text.isdigit()) or text != str(int(text)):
                self._note(stored, f"{rule.text} stacks by {{{name}}}, and {text!r:.100} is not a place: 0, 1, 2, ...")
                return
            places.append(int(text))
        group = self._groups.setdefault(key, _Group(rule, {}))
        slot = (tuple(places), source)
        if group.rule is rule and slot not in group.parts:
            group.parts[slot] = part
            return
        other = group.parts.get(slot) or next(iter(group.parts.values()))
        self._note(stored, f"{rule.text} makes {key!r} of it, and {self._leaves[other.leaf].key!r} becomes that too")

    # ----------------------------------------------------------------------------------------- one new leaf, its pieces

    def _join(self, key: str, group: _Group) -> MappedLeaf | None:
        """Return a new leaf, or None where its parts do not fit each other."""
        rule, parts = group
        first = next(iter(parts.values()))
        if first.shape is None or not rule.moves_items:
            piece = Piece(whole(first.shape or ()), first.leaf, first.start, first.axes)
            return MappedLeaf(key, first.shape, first.dtype, (piece,), renamed=True)
        stacked = _stacked(rule)
        counts = [1 + max(places[at] for places, _ in parts) for at in range(len(stacked))]
        sources = range(len(rule.sources))
        if lacking := math.prod(counts) * len(sources) - len(parts):
            slots = itertools.product(itertools.product(*map(range, counts)), sources)
            lost = itertools.islice((slot for slot in slots if slot not in parts), _MOST_MISSING)
            texts = []
            for places, source in lost:
                named = [f"{{{name}}}={place}" for name, place in zip(stacked, places, strict=True)]
                texts.append(" ".join([repr(rule.sources[source].text), *(["with"] if named else []), *named]))
            more = f" and {lacking - len(texts):,} more" if lacking > len(texts) else ""
            self._note(key, f"{rule.text} needs parts that are not there: {', '.join(texts)}{more}")
            return None
        shapes = [parts[(0,) * len(stacked), source].shape or () for source in sources]
        problem = _find_unlike(parts, shapes, rule.merge)
        axis = 0 if rule.merge is None else rule.merge
        sizes = [0]
        if rule.merge is not None and problem is None:
            axis %= len(shapes[0])
            sizes = [shape[axis] for shape in shapes]
            wanted = part_sizes(sum(sizes), rule.sizes, len(sizes))
            if sizes != wanted:
                problem = f"parts of the lengths {sizes} along axis {axis}, wanted {rule.sizes or 'equal ones'}"
        rank = len(shapes[0]) + len(stacked)
        if problem is None and any(place >= rank for place in rule.stack.values()):
            problem = f"an axis to stack along beyond the last one, {rank - 1}"
        if problem is not None:
            self._note(key, f"{rule.text} has {problem}")
            return None
        firsts = [0, *itertools.accumulate(sizes)]
        stacks = [rule.stack[name] for name in stacked]
        pieces = tuple(
            place_piece(piece, places, axis, firsts[source], stacks)
            for (places, source), part in parts.items()
            for piece in divide_part(part, rule)
        )
        shape = list(shapes[0])
        if rule.merge is not None:
            shape[axis] = sum(sizes)
        for name, count in zip(stacked, counts, strict=True):
            shape.insert(rule.stack[name], count)
        return MappedLeaf(key, tuple(shape), first.dtype, pieces, renamed=False)

    def _check_keys(self) -> None:
        """Find new keys that cannot be in one tree."""
        known = self._groups
        for key in known:
            try:
                split_key(key)
            except FormatError as error:
                self._note(key, f"it is not a key: {error}")
                continue
            above = list(itertools.accumulate(key.split("/"), "{}/{}".format))[:-1] if len(known) > 1 else []
            if inside := next((one for one in above if one in known), None):
                self._note(key, f"it lies inside {inside!r}, which is a leaf too")
            elif not key and len(known) > 1:
                self._note(key, "it is a leaf, and there are others")


def _stacked(rule: KeyRule) -> list[str]:
    """Return the stacked captures in the order of their axes."""
    return sorted(rule.stack, key=rule.stack.__getitem__)


def _find_unlike(
    parts: Mapping[tuple[tuple[int, ...], int], LeafPart], shapes: Sequence[tuple[int, ...]], merge: int | None
) -> str | None:
    """Return which parts of a new leaf have shapes or dtypes that do not fit those of the others."""
    first = next(iter(parts.values()))
    for (_, source), part in parts.items():
        if part.dtype != first.dtype:
            return f"parts of {first.dtype} and of {part.dtype}"
        if part.shape != shapes[source]:
            return f"parts of the shapes {shapes[source]} and {part.shape}"
    if merge is not None:
        rank = len(shapes[0])
        fits = -rank <= merge < rank and all(len(shape) == rank for shape in shapes)
        if not fits or len({shape[: merge % rank] + shape[merge % rank + 1 :] for shape in shapes}) > 1:
            return f"parts of the shapes {shapes}, to be joined along axis {merge}"
    return None


class KeyMap:
    """Which leaves of one tree become which leaves of another: a value that is checked before a byte moves.

    Every leaf has to be named by one rule, and every new leaf to come from one. ``load(key_map=)`` and
    ``open(key_map=)`` show a checkpoint through a map.

    Args:
        rules: the rules; their order does not matter.

    Attributes:
        rules: the same, as a tuple.

    Raises:
        UnsupportedError: one is not a ``KeyRule``.

    Example:
        >>> names = KeyMap([
        ...     KeyRule("wte.weight", "embed/embedding"),
        ...     KeyRule("h.{i}.mlp.weight", "layers/mlp/kernel", stack={"i": 0}, transpose=(1, 0)),
        ... ])
        >>> names.inverse().inverse() == names
        True
    """

    def __init__(self, rules: Iterable[KeyRule] = ()) -> None:
        given: tuple[Any, ...] = tuple(rules) if hasattr(rules, "__iter__") else (rules,)
        self.rules: tuple[KeyRule, ...] = given
        if odd := [rule for rule in given if not isinstance(rule, KeyRule)]:
            raise UnsupportedError(f"a key map is made of KeyRule, found {odd[0]!r:.100}")
        if len(self.rules) > MOST_RULES:
            raise UnsupportedError(f"a key map has at most {MOST_RULES} rules, found {len(self.rules)}")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> KeyMap:
        """Read a map from a TOML file, in which each ``[[rule]]`` is a rule.

        ``from`` and ``to`` are source and target; the other members are those of ``KeyRule``. ``drop = true`` stands in
        the place of ``to``.

        Raises:
            NotFoundError: there is no such file.
            FormatError: it is not TOML, or a rule is wrong; the error names the rule and its line.
        """
        with open_file(path) as file:
            if file.size > _LARGEST_FILE:
                problem = f"too large for a key map, which has at most {_LARGEST_FILE} bytes"
                raise FormatError(f"{os.fspath(path)!r} is {problem}")
            data = file.read(0, file.size)
        try:
            return cls(parse_rules(data))
        except FormatError as error:
            raise FormatError(f"{os.fspath(path)!r} is not a key map: {error}") from error

    def inverse(self) -> KeyMap:
        """Return the map of the way back. Leaves that this one leaves out do not come back."""
        return KeyMap(invert_rules(self.rules))

    def plan(self, leaves: Iterable[MapLeaf]) -> MapPlan:
        """Return what each new leaf is made of, for these stored leaves.

        Raises:
            MismatchError: map and leaves do not fit; the error has every finding.
        """
        return plan_map(self.rules, leaves)

    def plan_save(self, leaves: Iterable[MapLeaf]) -> MapPlan:
        """Return what each stored leaf is made of, for a tree of these leaves, which `plan` makes of the stored ones.

        Raises:
            MismatchError: map and leaves do not fit; the error has every finding.
        """
        return plan_map(self.inverse().rules, leaves, self.rules)

    def __eq__(self, other: object) -> bool:
        return self.rules == other.rules if isinstance(other, KeyMap) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple((repr(rule.source), repr(rule.target)) for rule in self.rules))

    def __repr__(self) -> str:
        return f"KeyMap({list(self.rules)!r})"


def check_key_map(given: object) -> None:
    """Refuse what is not a key map.

    Raises:
        UnsupportedError: it is something else than a map or None.
    """
    if not isinstance(given, KeyMap | None):
        hint = "KeyMap.read reads a TOML file"
        raise UnsupportedError(f"key_map= is a treering.KeyMap, found {given!r:.100}", hint=hint)


_LARGEST_FILE: Final = 1 << 20
# Texts and comments, also those that do not end; and a key of more parts than any rule needs, since tomllib takes
# memory and time by the square of their number.
_ASIDE: Final = re.compile(
    r'''"""(?:[^\\]|\\.)*?(?:"""|\\?\Z)|'{3}.*?(?:'{3}|\Z)|"(?:[^"\\\n]|\\[^\n])*+"?|'[^'\n]*+'?|#[^\n]*+''', re.DOTALL
)
_LONG_KEY: Final = re.compile(r"(?:\.[ \t]*+[\w-]++[ \t]*+){8}")
_HEAD: Final = re.compile(r"^[ \t]*\[\[[ \t]*rule[ \t]*\]\]", re.MULTILINE)
_NAMES: Final = {"from": "source", "to": "target", "drop": "drop"} | {name: name for name in OPTIONS}


def parse_rules(data: bytes) -> list[KeyRule]:
    r"""Return the rules of a document.

    Raises:
        FormatError: it is not TOML, or a rule is wrong; the error names the rule and its line.

    Example:
        >>> parse_rules(b'[[rule]]\nfrom = "wte.weight"\nto = "embed"\n')
        [KeyRule('wte.weight', 'embed')]
    """
    try:
        text = data.decode()
        has_long_key = _LONG_KEY.search(_ASIDE.sub("_", text)) is not None
        document = {} if has_long_key else tomllib.loads(text)
    except ValueError as error:  # also a number of more digits than Python reads
        raise FormatError(f"it is not TOML: {error}") from error
    except RecursionError:
        raise FormatError("it is not TOML that a key map needs: it is nested too deep") from None
    if has_long_key:
        raise FormatError("it has a key of more parts than any rule needs")
    rules = document.get("rule")
    if document.keys() != {"rule"} or not isinstance(rules, list) or not 0 < len(rules) <= MOST_RULES:
        raise FormatError(f"it has the members {sorted(document)!r:.200}", hint="it is made of [[rule]] tables alone")
    heads = [text.count("\n", 0, found.start()) + 1 for found in _HEAD.finditer(text)]
    lines = heads if len(heads) == len(rules) else [0] * len(rules)
    return [_read_rule(rule, number, line) for number, (rule, line) in enumerate(zip(rules, lines, strict=True), 1)]


def _read_rule(rule: Any, number: int, line: int) -> KeyRule:
    place = f"rule {number}, line {line}" if line else f"rule {number}"
    if not isinstance(rule, dict):
        raise FormatError(f"{place}: it is not a table")
    for name in rule:
        if name not in _NAMES:
            close = near(name, _NAMES)
            raise FormatError(f"{place}: unknown member {name!r:.100}{f'; did you mean {close!r}?' if close else ''}")
    given = {_NAMES[name]: value for name, value in rule.items()}
    drop = given.pop("drop", False)
    if "source" not in given or drop not in (True, False) or drop == ("target" in given):
        raise FormatError(f"{place}: it needs `from`, and either `to` or `drop = true`")
    try:
        return KeyRule(given.pop("source"), given.pop("target", None), **given, place=place)
    except UnsupportedError as error:
        raise FormatError(str(error)) from error
