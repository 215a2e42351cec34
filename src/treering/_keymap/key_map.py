"""A key map: which leaves of one tree become which leaves of another. A value that can be compared and inverted."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from typing import Any, Final

from treering._keymap.key_rule import MOST_RULES, KeyRule, invert_rules
from treering._keymap.leaf_parts import MapLeaf
from treering._keymap.map_plan import MapPlan, plan_map
from treering._store.resolve import open_file
from treering._values.human import near
from treering.errors import Format, Unsupported


class KeyMap:
    """Which leaves of one tree become which leaves of another: a value that is checked before a byte moves.

    Every leaf has to be named by one rule, and every new leaf to come from one. ``load(key_map=)`` and
    ``open(key_map=)`` show a checkpoint through a map.

    Args:
        rules: the rules; their order does not matter.

    Attributes:
        rules: the same, as a tuple.

    Raises:
        Unsupported: one is not a ``KeyRule``.

    Example:
        >>> names = KeyMap([
        ...     KeyRule("wte.weight", "embed/embedding"),
        ...     KeyRule("h.{i}.mlp.weight", "layers/mlp/kernel", stack={"i": 0}, transpose=(1, 0)),
        ... ])
        >>> names.inverse().inverse() == names
        True
    """

    def __init__(self, rules: Iterable[KeyRule] = ()) -> None:
        self.rules = tuple(rules)
        given: tuple[Any, ...] = self.rules
        if odd := [rule for rule in given if not isinstance(rule, KeyRule)]:
            raise Unsupported(f"a key map is made of KeyRule, found {odd[0]!r:.100}")
        if len(self.rules) > MOST_RULES:
            raise Unsupported(f"a key map has at most {MOST_RULES} rules, found {len(self.rules)}")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> KeyMap:
        """Read a map from a TOML file, in which each ``[[rule]]`` is a rule.

        ``from`` and ``to`` are source and target; the other members are those of ``KeyRule``. ``drop = true`` stands in
        the place of ``to``.

        Raises:
            NotFound: there is no such file.
            Format: it is not TOML, or a rule is wrong; the error names the rule and its line.
        """
        return cls(read_rules(path))

    def inverse(self) -> KeyMap:
        """Return the map of the way back. Leaves that this one leaves out do not come back."""
        return KeyMap(invert_rules(self.rules))

    def plan(self, leaves: Iterable[MapLeaf]) -> MapPlan:
        """Return what each new leaf is made of, for these stored leaves.

        Raises:
            Mismatch: map and leaves do not fit; the error has every finding.
        """
        return plan_map(self.rules, leaves)

    def plan_save(self, leaves: Iterable[MapLeaf]) -> MapPlan:
        """Return what each stored leaf is made of, for a tree of these leaves, which `plan` makes of the stored ones.

        Raises:
            Mismatch: map and leaves do not fit; the error has every finding.
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
        Unsupported: it is something else than a map or None.
    """
    if not isinstance(given, KeyMap | None):
        raise Unsupported(f"key_map= is a treering.KeyMap, found {given!r:.100}", hint="KeyMap.read reads a TOML file")


_LARGEST_FILE: Final = 1 << 20
# Texts and comments, also those that do not end; and a key of more parts than any rule needs, since tomllib takes
# memory and time by the square of their number.
_ASIDE: Final = re.compile(
    r'''"""(?:[^\\]|\\.)*?(?:"""|\\?\Z)|'{3}.*?(?:'{3}|\Z)|"(?:[^"\\\n]|\\[^\n])*+"?|'[^'\n]*+'?|#[^\n]*+''', re.DOTALL
)
_LONG_KEY: Final = re.compile(r"(?:\.[ \t]*+[\w-]++[ \t]*+){8}")
_HEAD: Final = re.compile(r"^[ \t]*\[\[[ \t]*rule[ \t]*\]\]", re.MULTILINE)
_OPTIONS: Final = (
    "stack", "unstack", "unflatten", "transpose", "flatten", "merge", "split", "sizes", "cast", "copy", "rest",
)  # fmt: skip
_NAMES: Final = {"from": "source", "to": "target", "drop": "drop"} | {name: name for name in _OPTIONS}


def read_rules(path: str | os.PathLike[str]) -> list[KeyRule]:
    """Return the rules of a file.

    Raises:
        NotFound, StoreFailed: it is not there, or cannot be read.
        Format: it is not such a file.
    """
    with open_file(path) as file:
        if file.size > _LARGEST_FILE:
            raise Format(f"{os.fspath(path)!r} is too large for a key map, which has at most {_LARGEST_FILE} bytes")
        data = file.read(0, file.size)
    try:
        return parse_rules(data)
    except Format as error:
        raise Format(f"{os.fspath(path)!r} is not a key map: {error}") from error


def parse_rules(data: bytes) -> list[KeyRule]:
    r"""Return the rules of a document.

    Raises:
        Format: it is not TOML, or a rule is wrong; the error names the rule and its line.

    Example:
        >>> parse_rules(b'[[rule]]\nfrom = "wte.weight"\nto = "embed"\n')
        [KeyRule('wte.weight', 'embed')]
    """
    try:
        text = data.decode()
        has_long_key = _LONG_KEY.search(_ASIDE.sub("_", text)) is not None
        document = {} if has_long_key else tomllib.loads(text)
    except ValueError as error:  # also a number of more digits than Python reads
        raise Format(f"it is not TOML: {error}") from error
    except RecursionError:
        raise Format("it is not TOML that a key map needs: it is nested too deep") from None
    if has_long_key:
        raise Format("it has a key of more parts than any rule needs")
    rules = document.get("rule")
    if document.keys() != {"rule"} or not isinstance(rules, list) or not 0 < len(rules) <= MOST_RULES:
        raise Format(f"it has the members {sorted(document)!r:.200}", hint="it is made of [[rule]] tables alone")
    heads = [text.count("\n", 0, found.start()) + 1 for found in _HEAD.finditer(text)]
    lines = heads if len(heads) == len(rules) else [0] * len(rules)
    return [_read_rule(rule, number, line) for number, (rule, line) in enumerate(zip(rules, lines, strict=True), 1)]


def _read_rule(rule: Any, number: int, line: int) -> KeyRule:
    place = f"rule {number}, line {line}" if line else f"rule {number}"
    if not isinstance(rule, dict):
        raise Format(f"{place}: it is not a table")
    for name in rule:
        if name not in _NAMES:
            close = near(name, _NAMES)
            raise Format(f"{place}: unknown member {name!r:.100}{f'; did you mean {close!r}?' if close else ''}")
    given = {_NAMES[name]: value for name, value in rule.items()}
    drop = given.pop("drop", False)
    if "source" not in given or drop not in (True, False) or drop == ("target" in given):
        raise Format(f"{place}: it needs `from`, and either `to` or `drop = true`")
    try:
        return KeyRule(given.pop("source"), given.pop("target", None), **given, place=place)
    except Unsupported as error:
        raise Format(str(error)) from error
