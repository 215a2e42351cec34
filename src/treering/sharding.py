"""Shardings for whole trees, by rules over the names of leaves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, Final

import jax
from jax.sharding import PartitionSpec

from treering._tree.walk import mapped_with_path
from treering.errors import Mismatch, TreeringError, Unsupported

__all__ = ["match_partition_rules"]

_SMALL: Final = 16_384
_SHOWN: Final = 10


class BadPattern(TreeringError, re.error):
    """A rule is no regular expression; eformer raises re.error."""


def match_partition_rules(
    rules: Iterable[tuple[str | re.Pattern[str], Any]], tree: Any, min_size: int | None = 0, strict: bool = True
) -> Any:
    """Return ``tree`` with the partition spec of the first rule that fits each leaf.

    A leaf's name is its path from the root, joined by ``/``: keys of mappings, numbers of list items, names of
    fields. A rule fits where its pattern is found in the name (``re.search``).

    Args:
        rules: pairs of a regular expression, text or compiled, and a ``PartitionSpec``.
        tree: any pytree of arrays or of what has their shape, such as ``jax.ShapeDtypeStruct``. None stays None.
        min_size: arrays of fewer items are replicated, ``PartitionSpec()``, once a rule fits; None means 16,384.
        strict: replicate what has no axes, whatever the rules say, and cut a spec to the axes that there are.
            Otherwise the rules' values are returned as they are, and ``min_size`` does not count.

    Raises:
        ValueError: no rule fits a leaf; the first such leaf is named, and how many more there are.
        TypeError: with ``strict``, the rule that fits has no spec.
        re.error: a pattern is no regular expression.

    Source: eformer.escale.match_partition_rules.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> params = {"dense": [jax.ShapeDtypeStruct((8, 4), "float32")], "scale": jax.ShapeDtypeStruct((), "float32")}
        >>> specs = match_partition_rules([("dense/[0-9]+$", P("fsdp", "tp"))], params)
        >>> specs == {"dense": [P("fsdp", "tp")], "scale": P()}
        True
    """
    pairs = _pairs(rules)
    smallest = _SMALL if min_size is None else min_size
    unmatched: list[str] = []

    def spec_of(path: tuple[str, ...], leaf: Any) -> Any:
        if leaf is None:
            return None
        name = "/".join(path)
        shape = tuple(getattr(leaf, "shape", ()))
        if strict and not shape:
            return _spec()
        for pattern, spec in pairs:
            if _found(pattern, name):
                return _fitted(name, pattern, spec, shape, smallest) if strict else spec
        unmatched.append(name)
        return None

    specs = mapped_with_path(spec_of, tree, None)
    if unmatched:
        raise _no_rule(unmatched)
    return specs


def _pairs(rules: Iterable[Any]) -> list[tuple[Any, Any]]:
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


def _fitted(name: str, pattern: str | re.Pattern[str], spec: Any, shape: tuple[int, ...], smallest: int) -> Any:
    """Return a spec with no more parts than the array has axes; that of a small array says: replicated."""
    if not isinstance(spec, PartitionSpec | tuple):
        shown = pattern if isinstance(pattern, str) else pattern.pattern
        raise Unsupported(
            f"the partition rule {shown!r} has no PartitionSpec but a {type(spec).__name__} for param: {name}",
            hint="PartitionSpec() is replicated",
        )
    if math.prod(shape) < smallest:
        return _spec()
    return spec if len(spec) <= len(shape) else _spec(*tuple(spec)[: len(shape)])


def _spec(*parts: Any) -> jax.sharding.PartitionSpec:
    spec: PartitionSpec = PartitionSpec(*parts)  # type: ignore[no-untyped-call]
    return spec


def _no_rule(names: list[str]) -> Mismatch:
    message = f"Partition rule not found for param: {names[0]}"
    if len(names) > 1:
        message += f", and for {len(names) - 1} more: {', '.join(names[1:_SHOWN])}"
        message += ", ..." if len(names) > _SHOWN else ""
    error = Mismatch(message)
    error.differences = tuple(names)
    return error
