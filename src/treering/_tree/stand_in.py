"""Stand-ins for unknown classes as pytree nodes, so that ``jax.tree.map`` works on what ``load`` gives without like."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import jax

from treering._format.structure import StandIn

__all__ = ["StandIn"]  # registered as a pytree node here

_Aux: TypeAlias = tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]


def _opened(node: StandIn) -> tuple[list[tuple[Any, Any]], _Aux]:
    children = [(jax.tree_util.DictKey(key), child) for key, child in node.fields.items()]
    return children, (node.class_name, tuple(node.fields), tuple(node.static.items()))


def _closed(aux: _Aux, children: Iterable[Any]) -> StandIn:
    class_name, keys, static = aux
    return StandIn(class_name, dict(zip(keys, children, strict=True)), dict(static))


jax.tree_util.register_pytree_with_keys(StandIn, _opened, _closed)
