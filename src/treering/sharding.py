"""Shardings for whole trees: by rules over the names of leaves, from the index of a leaves directory, and applied.

The names are those of eformer's ``escale`` and ``sharding_utils``. ``docs/coming-from-eformer.md`` lists the
differences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from treering._arrays.apply_sharding import apply_sharding_tree, make_itsharded, validate_sharding_tree
from treering._leaves.shardings import create_sharding_tree_from_index
from treering._old_names import moved_names
from treering._tree.placement import Rules, RulesReport, fit_spec, no_rule_error, spec_of
from treering._tree.state_dict import map_with_path

__all__ = [
    "RulesReport", "apply_sharding_tree", "create_sharding_tree_from_index", "make_itsharded",
    "match_partition_rules", "validate_sharding_tree",
]  # fmt: skip

_SMALL: Final = 16_384


def match_partition_rules(
    rules: Iterable[tuple[str | re.Pattern[str], Any]],
    tree: Any,
    min_size: int | None = 0,
    strict: bool = True,
    *,
    report: Callable[[RulesReport], object] | None = None,
) -> Any:
    """Return ``tree`` with the partition spec of the first rule that matches each leaf.

    A leaf's name is its path from the root, joined by ``/``: keys of mappings, numbers of list items, names of
    fields. A rule matches if its pattern is found in the name (``re.search``).

    Args:
        rules: pairs of a regular expression, text or compiled, and a ``PartitionSpec``.
        tree: any pytree of arrays or of objects with a shape, such as ``jax.ShapeDtypeStruct``. None stays None.
        min_size: arrays of fewer items are replicated, ``PartitionSpec()``, if a rule matches; None means 16,384.
        strict: replicate arrays without axes, whatever the rules say, and cut a spec to the axes of the array.
            Otherwise the rules' values are returned unchanged, and ``min_size`` is ignored.
        report: called with a ``RulesReport``: rules that match no name, and leaves that only a catch-all such as ``.*``
            matches. Without it a ``RulesUnmatchedWarning`` warning reports these, once for the same rules.

    Raises:
        ValueError: no rule matches a leaf; the error names the first such leaf, and how many more there are.
        TypeError: with ``strict``, the rule that matches has no spec.
        re.error: a pattern is not a regular expression.

    Source: eformer.escale.match_partition_rules.

    Example:
        >>> import jax
        >>> from jax.sharding import PartitionSpec as P
        >>> params = {"dense": [jax.ShapeDtypeStruct((8, 4), "float32")], "scale": jax.ShapeDtypeStruct((), "float32")}
        >>> specs = match_partition_rules([("dense/[0-9]+$", P("fsdp", "tp"))], params)
        >>> specs == {"dense": [P("fsdp", "tp")], "scale": P()}
        True
    """
    known = Rules(rules)
    smallest = _SMALL if min_size is None else min_size
    names, unmatched = list[str](), list[str]()

    def specified(path: tuple[str, ...], leaf: Any) -> Any:
        if leaf is None:
            return None
        name = "/".join(path)
        names.append(name)
        shape = tuple(getattr(leaf, "shape", ()))
        if strict and not shape:
            return spec_of()
        if (rule := known.rule_for(name)) is not None:
            return fit_spec(name, rule, shape, smallest) if strict else rule[1]
        unmatched.append(name)
        return None

    specs = map_with_path(specified, tree, None)
    if unmatched:
        raise no_rule_error(unmatched)
    known.tell(names, report)
    return specs


if not TYPE_CHECKING:  # a type checker is to refuse the old name
    __getattr__ = moved_names(__name__, Shardings="checkpoint")
