"""``mesh``, ``partition_rules`` and ``shardings`` of ``tree_deserialize_leaves`` -> one sharding for each array.

eformer's meaning where it has one: rules are matched on keys with ``/`` and win over shardings for every array; keys of
flat shardings are joined with ``.``; one mesh axis alone replicates what nothing was said of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final

import jax
from jax.sharding import Sharding

from treering._printable import printable
from treering._tree.placement import Choice, is_placement, is_rules, placed, require_mesh
from treering._tree.registry import opened_node
from treering._tree.rules import Rules, RulesReport, fitted_spec, no_rule, spec_of
from treering._tree.walk import mapped_with_path
from treering._values.keys import split_key
from treering._values.near import near
from treering.errors import Mismatch, Unsupported

_SHOWN: Final = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the user said of devices."""

    mesh: jax.sharding.Mesh | None
    """``mesh``."""
    partition_rules: Iterable[Any] | None
    """``partition_rules``: pairs of a pattern and a ``PartitionSpec``."""
    shardings: Any
    """``shardings``: a placement for all arrays, a function of (dotted key, ``jax.ShapeDtypeStruct``) that returns one,
    or a tree of these: nested as the tree is, or flat with dotted keys. What stands at a branch counts for all below;
    None says nothing."""
    report: Callable[[RulesReport], object] | None = None
    """What is given the report on ``partition_rules`` instead of a warning."""


def leaf_shardings(
    said: Said,
    avals: Mapping[str, jax.ShapeDtypeStruct],
    *,
    own: Mapping[str, Sharding],
    on_host: AbstractSet[str],
    known: Sequence[str],
) -> dict[str, Sharding | None]:
    """Return where arrays go; None is the default device. Arrays that stay on the host are left out.

    Args:
        said: what the user said.
        avals: key text -> shape and dtype of each array that may go on devices.
        own: where the arrays of a target lie, which counts where nothing was said.
        on_host: keys of arrays that stay on the host unless something was said of them.
        known: every key of the tree; shardings of others are mistyped.

    Raises:
        Mismatch: no rule fits an array, a mesh of several axes has no sharding for it, its shape cannot be divided so,
            or shardings names what is not there; each with all such names.
        Unsupported: this is no mesh, rule or sharding.
    """
    require_mesh(said.mesh)
    if said.mesh is None and said.partition_rules is None and said.shardings is None:
        return placed(lambda key, _aval: own.get(key), None, {key: avals[key] for key in avals if key not in on_host})
    if said.partition_rules is not None:
        rules = Rules(said.partition_rules)
        given = _by_rules(rules, avals, on_host)
        rules.tell(map(slashed, known), said.report)
        return placed(lambda key, _aval: given[key], said.mesh, {key: avals[key] for key in given})
    choice = _choice(said.shardings, known)
    given = {}
    unsaid: list[str] = []
    replicated = spec_of()
    for key, aval in avals.items():
        there = choice(key, aval)
        if there is None and key in on_host:
            continue
        if there is None:
            there = own.get(key)
        if there is None and said.mesh is not None:
            there = replicated
            if len(said.mesh.axis_names) > 1:
                unsaid.append(slashed(key) or ".")
        given[key] = there
    if unsaid:
        raise _nothing_said(unsaid, said.mesh)
    return placed(lambda key, _aval: given[key], said.mesh, {key: avals[key] for key in given})


def dotted(key: str) -> str:
    """Return a key text as eformer writes keys: its parts, joined with dots.

    Example:
        >>> dotted("params/dense/0")
        'params.dense.0'
    """
    return ".".join(split_key(key))


def slashed(key: str) -> str:
    """Return a key text as rules match it: its parts, joined with slashes and without escapes.

    Example:
        >>> slashed("params/a~1b/0")
        'params/a/b/0'
    """
    return "/".join(split_key(key))


def _by_rules(rules: Rules, avals: Mapping[str, jax.ShapeDtypeStruct], on_host: AbstractSet[str]) -> dict[str, Any]:
    """Return the spec of the first rule that fits each array; what has no axes needs none."""
    given: dict[str, Any] = {}
    unmatched: list[str] = []
    for key, aval in avals.items():
        name = slashed(key)
        rule = rules.rule_for(name) if aval.shape else None
        if rule is not None:
            given[key] = fitted_spec(name, rule, aval.shape)
        elif key in on_host:
            continue
        elif aval.shape:
            unmatched.append(name)
        else:
            given[key] = spec_of()
    if unmatched:
        raise no_rule(unmatched)
    return given


def _choice(shardings: Any, known: Sequence[str]) -> Choice:
    """Return what says of each key where its array goes; None where nothing is said."""
    if shardings is None:
        return lambda _key, _aval: None
    if is_rules(shardings):
        raise Unsupported("shardings= holds partition rules", hint="give them as partition_rules=")
    found: dict[tuple[str, ...], Any] = {}

    def note(path: tuple[str, ...], leaf: Any) -> None:
        found[path] = leaf

    mapped_with_path(note, shardings, _says_where)
    _require_known(found, known)
    by_dots = {".".join(path): leaf for path, leaf in found.items() if path}

    def choose(key: str, aval: jax.ShapeDtypeStruct) -> Any:
        parts = split_key(key)
        leaf = found.get(())
        for end in range(len(parts), 0, -1):
            name = ".".join(parts[:end])
            if parts[:end] in found or name in by_dots:
                leaf = found.get(parts[:end], by_dots.get(name))
                break
        else:
            leaf = by_dots.get("", leaf) if not parts else leaf
        # A mesh is callable too, as a decorator.
        if callable(leaf) and not is_placement(leaf) and not isinstance(leaf, jax.sharding.Mesh):
            return leaf(dotted(key), aval)
        return leaf

    return choose


def _says_where(x: Any) -> bool:
    """Tell a placement or a function from a branch; a model may be callable too, and is a tree."""
    return is_placement(x) or isinstance(x, jax.tree_util.Partial) or (callable(x) and opened_node(x) is None)


def _require_known(found: Iterable[tuple[str, ...]], known: Sequence[str]) -> None:
    """A mistyped key must not leave an array where it was not meant to be."""
    # Branches are as good as leaves, in suggestions too; in order, so that these are always the same ones.
    names = dict.fromkeys(".".join(parts[:end]) for parts in map(split_key, known) for end in range(1, len(parts) + 1))
    if "" in known:
        names[""] = None  # a bare array has no parts
    stray = [".".join(path) for path in found if path and ".".join(path) not in names]
    if not stray:
        return
    shown = [
        f"{key!r:.200}" + (f" (did you mean {close!r}?)" if (close := near(key, names)) else "")
        for key in stray[:_SHOWN]
    ]
    more = f" and {len(stray) - _SHOWN} more" if len(stray) > _SHOWN else ""
    error = Mismatch(
        f"shardings has {', '.join(shown)}{more}, which the tree does not have",
        hint="keys are nested as the tree is, or flat with dots, without the prefix",
    )
    error.differences = tuple(map(printable, stray))
    raise error


def _nothing_said(keys: Sequence[str], mesh: Any) -> Mismatch:
    axes = ", ".join(map(repr, mesh.axis_names))
    keys = list(map(printable, keys))
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    error = Mismatch(
        f"the mesh has the axes {axes}, and there is no sharding for {', '.join(keys[:_SHOWN])}{more}",
        hint="give partition_rules=, which match these keys, or shardings=, nested or flat with dots; "
        "PartitionSpec() is replicated",
    )
    error.differences = tuple(keys)
    return error
