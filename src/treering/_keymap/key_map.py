"""A key map: which leaves of one tree become which leaves of another. A value that can be compared and inverted."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from treering._keymap.key_rule import MOST_RULES, KeyRule, invert_rules
from treering._keymap.leaf_parts import MapLeaf
from treering._keymap.map_plan import MapPlan, plan_map
from treering._keymap.toml_rules import read_rules
from treering.errors import Unsupported


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
