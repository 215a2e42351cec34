"""Leaves that were read -> the containers of ``like``, with what lies in no file taken from there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from treering._arrays.source import Source
from treering._format.index import Container, Index, Token
from treering._format.leaf_values import same_value
from treering._format.selection import Selection
from treering._tree.flatten import Flattened
from treering._tree.likeness import KEPT, LeafMatch
from treering._tree.static_values import opaque_of
from treering._tree.unflatten import difference, static_differences, unflatten
from treering._values.warned import warn_of
from treering.errors import StaticFieldsDiffer


def into_like(
    like: Any,
    target: Flattened,
    source: Source,
    *,
    part: Selection,
    matches: Sequence[LeafMatch],
    leaves: list[Any],
    called: str = "like",
) -> Any:
    """Return ``like``'s containers around the leaves; functions, and what is kept, come from ``like``.

    Warns where functions and static fields of ``like`` are others than those that were saved.

    Args:
        like: the tree.
        target: the same, flattened.
        source: what the leaves were read from.
        part: which part of it.
        matches: what each leaf became.
        leaves: one for each leaf of ``like``.
        called: what the user calls ``like``.
    """
    for number, (match, kind) in enumerate(zip(matches, target.kinds, strict=True)):
        if match.fit is KEPT or kind == "opaque":
            leaves[number] = target.leaves[number]
    if source.structured:
        _report_static(source.index, part, target, matches, called)
    return unflatten(like, leaves)


def _report_static(index: Index, part: Selection, target: Flattened, matches: Sequence[LeafMatch], called: str) -> None:
    same = len(part.structure) == len(target.tokens) and all(map(_same_token, part.structure, target.tokens))
    lines = [] if same else static_differences(part.structure, target.tokens, called=called)
    for key, kind, leaf, match in zip(target.keys, target.kinds, target.leaves, matches, strict=True):
        if kind == "opaque" and match.fit is not KEPT:
            saved, here = index.values[match.leaf], opaque_of(leaf)
            if not same_value(saved, here):
                lines.append(f"{key}: saved as {difference(saved, here, called)}")
    if lines:
        what = f"what no file holds comes from `{called}`, and differs from what was saved"
        warn_of(what, lines, StaticFieldsDiffer)


def _same_token(one: Token, other: Token) -> bool:
    if not isinstance(one, Container) or not isinstance(other, Container):
        return one == other
    # Equality leaves digests aside.
    return one == other and (not one.static or same_value(one.static, other.static))
