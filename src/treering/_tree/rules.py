"""Partition rules: the first pattern that is found in a leaf's name says how the leaf is divided."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec

from treering._printable import kind_of, printable
from treering._values.human import build_mismatch, join_first
from treering._values.telemetry import warn_of
from treering.errors import MismatchError, RulesUnmatchedWarning, TreeringError, UnsupportedError

_SHOWN: Final = 10
_MOST_TOLD: Final = 1000
# No key has such a name, so a pattern that is found in it is found in any.
_ANY_NAME: Final = "\uffff\uffff"
_NNX_END: Final = "/value"

_told: set[tuple[Any, ...]] = set()


class BadPatternError(TreeringError, re.error):
    """A rule is no regular expression; eformer raises re.error."""


def rule_pairs(rules: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the rules as pairs of a pattern and a spec.

    Raises:
        UnsupportedError: one is no such pair.
    """
    pairs = []
    for rule in rules:
        try:
            pattern, spec = rule
        except (TypeError, ValueError) as error:
            text = f"{rule!r:.100} is not a partition rule"
            raise UnsupportedError(text, hint="write (pattern, PartitionSpec)") from error
        if not isinstance(pattern, str | re.Pattern):
            raise UnsupportedError(f"the pattern of a partition rule is {kind_of(pattern)}", hint="str or re.Pattern")
        pairs.append((pattern, spec))
    return pairs


def _matches(pattern: str | re.Pattern[str], name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as cause:
        error = BadPatternError(f"the partition rule {pattern!r} is not a regular expression: {cause}")
        vars(error).update(vars(cause))
        raise error from cause


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RulesReport:
    """How partition rules and the keys of a tree fit each other, beyond that every array has a rule."""

    unmatched: tuple[str, ...]
    """Patterns that are found in no key. A catch-all is not among them."""
    caught: tuple[str, ...]
    """Keys of arrays for which only a catch-all was found, such as ``.*``, where there are other rules too."""
    hints: tuple[str, ...] = ()
    """What may be the reason."""


class Rules:
    """Partition rules, and what became of each while arrays were looked up.

    Example:
        >>> rules = Rules([("kernel", spec_of("x")), ("scale$", spec_of()), (".*", spec_of())])
        >>> rules.rule_for("dense/kernel")[0], rules.rule_for("norm/scale/value")[0]
        ('kernel', '.*')
        >>> rules.report(["dense/kernel", "norm/scale/value"])
        RulesReport(unmatched=('scale$',), caught=('norm/scale/value',), hints=("nnx ends keys in '/value'",))
    """

    def __init__(self, rules: Iterable[Any]) -> None:
        self._pairs = rule_pairs(rules)
        self._chosen: set[int] = set()
        self._caught: list[str] = []
        self._catch_alls: set[int] = set()
        self._asked = False

    def rule_for(self, name: str) -> tuple[Any, Any] | None:
        """Return the first rule whose pattern is found in a name; None where there is none.

        Raises:
            re.error: a pattern is no regular expression.
        """
        self._asked = True
        for number, pair in enumerate(self._pairs):
            if _matches(pair[0], name):
                if number not in self._chosen:
                    self._chosen.add(number)
                    if _matches(pair[0], _ANY_NAME):
                        self._catch_alls.add(number)
                if number in self._catch_alls:
                    self._caught.append(name)
                return pair
        return None

    def report(self, names: Iterable[str]) -> RulesReport:
        """Say what did not fit, once every array was looked up.

        Args:
            names: those of all leaves, also of leaves that need no rule.
        """
        names = list(dict.fromkeys(names))
        idle = [pair[0] for number, pair in enumerate(self._pairs) if number not in self._chosen]
        unmatched = [pattern for pattern in idle if self._asked and not _matches_any(pattern, (_ANY_NAME, *names))]
        ends = [name.removesuffix(_NNX_END) for name in names if name.endswith(_NNX_END)]
        meant = any(_matches_any(pattern, ends) for pattern in unmatched)
        return RulesReport(
            unmatched=tuple(map(_text, unmatched)),
            caught=tuple(self._caught) if len(self._pairs) > 1 else (),
            hints=(f"nnx ends keys in {_NNX_END!r}",) if meant else (),
        )

    def tell(self, names: Iterable[str], ask: Callable[[RulesReport], object] | None = None) -> None:
        """Give the report to who asked for it; else warn, once for the same rules."""
        key = tuple(_text(pattern) for pattern, _ in self._pairs)
        if ask is not None:
            ask(self.report(names))
            return
        if key in _told:
            return
        found = self.report(names)
        lines = [f"{pattern!r} matches no key" for pattern in found.unmatched]
        if found.caught:
            lines.append(f"only a catch-all matches {join_first(found.caught, _SHOWN)}")
        if lines:
            if len(_told) >= _MOST_TOLD:
                _told.clear()
            _told.add(key)
            warn_of("partition rules and keys do not match", [*lines, *found.hints], RulesUnmatchedWarning)


def _matches_any(pattern: str | re.Pattern[str], names: Iterable[str]) -> bool:
    try:
        return any(_matches(pattern, name) for name in names)
    except BadPatternError:  # no array came as far as to it; it is told when one does
        return True


def _text(pattern: str | re.Pattern[str]) -> str:
    return pattern if isinstance(pattern, str) else pattern.pattern


def no_rule_error(names: Sequence[str]) -> MismatchError:
    """Return the error for leaves that no rule fits, in eformer's words; every one is in its ``differences``."""
    names = list(map(printable, names))
    message = f"Partition rule not found for param: {names[0]}"
    if len(names) > 1:
        message += f", and for {len(names) - 1} more: {', '.join(names[1:_SHOWN])}"
        message += ", ..." if len(names) > _SHOWN else ""
    return build_mismatch(message, names)


def fit_spec(name: str, rule: tuple[Any, Any], shape: tuple[int, ...], smallest: int = 0) -> Any:
    """Return the spec of a rule with no more parts than the array has axes; that of a small array says: replicated.

    Raises:
        TypeError: the rule has no spec.
    """
    pattern, spec = rule
    if not isinstance(spec, PartitionSpec | tuple):
        found = f"has {kind_of(spec)}, no PartitionSpec, for param: {printable(name)}"
        raise UnsupportedError(f"the partition rule {_text(pattern)!r} {found}", hint="PartitionSpec() replicates")
    if math.prod(shape) < smallest:
        return spec_of()
    return spec if len(spec) <= len(shape) else spec_of(*tuple(spec)[: len(shape)])


def spec_of(*parts: Any) -> jax.sharding.PartitionSpec:
    """Return ``PartitionSpec(*parts)``, typed."""
    return PartitionSpec(*parts)  # type: ignore[no-untyped-call]
