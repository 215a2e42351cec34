"""Partition rules: the first pattern that is found in a leaf's name says how the leaf is divided."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec

from treering.errors import Mismatch, TreeringError, Unsupported

__all__ = ["BadPattern", "fitted_spec", "no_rule", "rule_for", "rule_pairs", "spec_of"]

_SHOWN: Final = 10


class BadPattern(TreeringError, re.error):
    """A rule is no regular expression; eformer raises re.error."""


def rule_pairs(rules: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the rules as pairs of a pattern and a spec.

    Raises:
        Unsupported: one is no such pair.
    """
    pairs = []
    for rule in rules:
        try:
            pattern, spec = rule
        except (TypeError, ValueError) as error:
            raise Unsupported(f"{rule!r:.100} is no partition rule", hint="a pair: (pattern, PartitionSpec)") from error
        if not isinstance(pattern, str | re.Pattern):
            raise Unsupported(
                f"the pattern of a partition rule is a {type(pattern).__name__}", hint="str or re.Pattern"
            )
        pairs.append((pattern, spec))
    return pairs


def _found(pattern: str | re.Pattern[str], name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error as cause:
        error = BadPattern(f"the partition rule {pattern!r} is no regular expression: {cause}")
        error.msg, error.pattern, error.pos = cause.msg, cause.pattern, cause.pos
        error.lineno, error.colno = cause.lineno, cause.colno
        raise error from cause


def rule_for(pairs: Iterable[tuple[Any, Any]], name: str) -> tuple[Any, Any] | None:
    """Return the first rule whose pattern is found in a name; None where there is none.

    Raises:
        re.error: a pattern is no regular expression.
    """
    return next((pair for pair in pairs if _found(pair[0], name)), None)


def no_rule(names: Sequence[str]) -> Mismatch:
    """Return the error for leaves that no rule fits, in eformer's words; every one is in its ``differences``."""
    message = f"Partition rule not found for param: {names[0]}"
    if len(names) > 1:
        message += f", and for {len(names) - 1} more: {', '.join(names[1:_SHOWN])}"
        message += ", ..." if len(names) > _SHOWN else ""
    error = Mismatch(message)
    error.differences = tuple(names)
    return error


def fitted_spec(name: str, rule: tuple[Any, Any], shape: tuple[int, ...], smallest: int = 0) -> Any:
    """Return the spec of a rule with no more parts than the array has axes; that of a small array says: replicated.

    Raises:
        TypeError: the rule has no spec.
    """
    pattern, spec = rule
    if not isinstance(spec, PartitionSpec | tuple):
        shown = pattern if isinstance(pattern, str) else pattern.pattern
        raise Unsupported(
            f"the partition rule {shown!r} has no PartitionSpec but a {type(spec).__name__} for param: {name}",
            hint="PartitionSpec() is replicated",
        )
    if math.prod(shape) < smallest:
        return spec_of()
    return spec if len(spec) <= len(shape) else spec_of(*tuple(spec)[: len(shape)])


def spec_of(*parts: Any) -> jax.sharding.PartitionSpec:
    """Return ``PartitionSpec(*parts)``, typed."""
    spec: PartitionSpec = PartitionSpec(*parts)  # type: ignore[no-untyped-call]
    return spec
