"""``shardings=`` and ``mesh=`` -> one sharding for each leaf of the result.

A sharding may be given as partition rules: the first pattern that is found in a leaf's name says how it is divided.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeGuard

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from treering._format.structure import key_text
from treering._printable import kind_of, list_lines, printable
from treering._tree.registry import open_pytree_node
from treering._tree.state_dict import map_with_path
from treering._tree.static_values import key_value
from treering._values.human import build_mismatch, join_first, near, pluralize
from treering._values.keys import key_name, split_key
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
        self._found: list[tuple[str, int | None]] = []
        """The names that were looked up, each with the number of its rule."""

    def rule_for(self, name: str) -> tuple[Any, Any] | None:
        """Return the first rule whose pattern is found in a name; None where there is none.

        Raises:
            re.error: a pattern is no regular expression.
        """
        number = next((n for n, (pattern, _) in enumerate(self._pairs) if _matches(pattern, name)), None)
        self._found.append((name, number))
        return None if number is None else self._pairs[number]

    def report(self, names: Iterable[str]) -> RulesReport:
        """Say what did not fit, once every array was looked up.

        Args:
            names: those of all leaves, also of leaves that need no rule.
        """
        names = list(dict.fromkeys(names))
        chosen = {number for _, number in self._found}
        idle = [pattern for number, (pattern, _) in enumerate(self._pairs) if self._found and number not in chosen]
        unmatched = [pattern for pattern in idle if not _matches_any(pattern, (_ANY_NAME, *names))]
        catch_alls = {n for n in chosen if n is not None and _matches(self._pairs[n][0], _ANY_NAME)}
        ends = [name.removesuffix(_NNX_END) for name in names if name.endswith(_NNX_END)]
        meant = any(_matches_any(pattern, ends) for pattern in unmatched)
        return RulesReport(
            unmatched=tuple(map(_pattern_text, unmatched)),
            caught=tuple(name for name, n in self._found if n in catch_alls) if len(self._pairs) > 1 else (),
            hints=(f"nnx ends keys in {_NNX_END!r}",) if meant else (),
        )

    def tell(self, names: Iterable[str], ask: Callable[[RulesReport], object] | None = None) -> None:
        """Give the report to who asked for it; else warn, once for the same rules."""
        key = tuple(_pattern_text(pattern) for pattern, _ in self._pairs)
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


def _pattern_text(pattern: str | re.Pattern[str]) -> str:
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
        found = f"gives {kind_of(spec)} to {printable(name)!r}, but must give a PartitionSpec"
        hint = "PartitionSpec() replicates an array"
        raise UnsupportedError(f"the partition rule {_pattern_text(pattern)!r} {found}", hint=hint)
    if math.prod(shape) < smallest:
        return spec_of()
    return cut_spec(spec, len(shape))


def spec_of(*parts: Any, **sums: Any) -> jax.sharding.PartitionSpec:
    """Return ``PartitionSpec(*parts, **sums)``, typed."""
    return PartitionSpec(*parts, **sums)  # type: ignore[no-untyped-call]


def cut_spec(spec: Any, axes: int) -> Any:
    """Return a spec for no more axes than there are."""
    if len(spec) <= axes:
        return spec
    sums = {name: names for name in ("unreduced", "reduced") if (names := getattr(spec, name, None))}
    return spec_of(*_parts(spec)[:axes], **sums)


def _parts(spec: Any) -> tuple[Any, ...]:
    """Return what a spec says of each axis of an array. jax refuses to iterate over a spec with reduced axes."""
    return tuple(getattr(spec, "partitions", spec))


Choice: TypeAlias = Callable[[str, jax.ShapeDtypeStruct], Any]
"""Says of a key and its array where it goes: ``Sharding``, ``Device``, ``PartitionSpec``; None: the default device."""
_PartitionRules: TypeAlias = Sequence[tuple[str | re.Pattern[str], Any]]
Shardings: TypeAlias = Sharding | PartitionSpec | jax.Device | Choice | _PartitionRules | Any
"""What ``shardings`` takes: a ``Sharding``, ``Device`` or ``PartitionSpec`` for all arrays; a function of (key,
``jax.ShapeDtypeStruct``) that returns one; partition rules, pairs of a pattern and a ``PartitionSpec``; or (``Any``) a
prefix tree of them, in containers of any kind, where None is the default device."""


@dataclasses.dataclass(frozen=True, slots=True)
class ArraysToPlace:
    """The arrays of a result that may go on devices, in the order of its leaves."""

    avals: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Key text -> shape and dtype of each."""
    own: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Key text -> where the leaf of the target lies; None where it lies nowhere."""
    on_host: set[str] = dataclasses.field(default_factory=set)
    """Keys of numpy arrays, which stay on the host unless they are given a place."""
    too_wide: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Key text -> dtype of each that jax, as it is configured now, would make narrower."""


Placer: TypeAlias = Callable[[ArraysToPlace, Sequence[str]], Mapping[str, Any]]
"""Called with arrays and every key of the stored part; returns their shardings, None for the default device, without
the arrays that stay on the host."""

_NO_RULE: Final = "no partition rule matches"


def resolve_shardings(
    shardings: Shardings,
    mesh: jax.sharding.Mesh | None,
    avals: Mapping[str, jax.ShapeDtypeStruct],
    known: Sequence[str],
    own: Mapping[str, Sharding | None] = MappingProxyType({}),
) -> dict[str, Sharding | None]:
    """Return the sharding of every leaf in ``avals``; None is the default device.

    Args:
        shardings: as the user gave them; None means those of the target.
        mesh: what partition specs are meant for, also those of the target; a leaf without one is replicated on it.
        avals: key text -> shape and dtype of each leaf that goes on devices.
        known: every key of the tree; a prefix tree that names something else is mistyped.
        own: key text -> where the leaf of the target lies.

    Raises:
        MismatchError: a leaf has no sharding or no rule, or its shape cannot be divided so; all of them at once.
        UnsupportedError: this is no sharding.
    """
    require_mesh(mesh)
    rules = Rules(shardings) if is_rules(shardings) else None
    try:
        chosen = choose_shardings(_choice(rules or shardings, mesh, known, own), mesh, avals)
    except MismatchError as error:
        if shardings is None and mesh is not None:
            error.hint = "the specs are those of the target; shardings=PartitionSpec() replicates on the mesh"
        if any(line.endswith(_NO_RULE) for line in error.differences):
            error.hint = '(".*", PartitionSpec()) as the last rule replicates the other arrays'
        raise
    if rules is not None and avals:
        rules.tell(known)
    return chosen


def require_mesh(mesh: Any) -> None:
    """Refuse what is no mesh of devices.

    Raises:
        UnsupportedError: it is none.
    """
    if not isinstance(mesh, jax.sharding.Mesh | None):
        raise UnsupportedError(f"mesh is {kind_of(mesh)}, not a jax.sharding.Mesh of devices")


def choose_shardings(
    choice: Choice, mesh: jax.sharding.Mesh | None, avals: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Sharding | None]:
    """Return the sharding that is chosen for every leaf in ``avals``, if it fits the leaf; None is the default device.

    Raises:
        MismatchError: shapes cannot be divided so; all of them at once.
        UnsupportedError: this is no sharding.
    """
    result: dict[str, Sharding | None] = {}
    wrong: list[str] = []
    # Thousands of arrays are of a few shapes, and go to a few places.
    known: dict[Any, Sharding | None] = {}
    for key, aval in avals.items():
        try:
            given = choice(key, aval)
            alike = (given, aval.shape) if isinstance(given, Sharding | PartitionSpec) else key
            # Asked once: to hash a sharding costs as much as all the rest.
            if (sharding := known.get(alike)) is None:
                sharding = known[alike] = _sharding(given, mesh, aval)
            result[key] = sharding
        except UnsupportedError as error:
            error.path = error.path or split_key(key)
            raise
        except _NoFit as misfit:
            wrong.append(f"{key_name(key)}: {misfit}")
    if wrong:
        count = pluralize(len(avals), "arrays")
        raise build_mismatch(f"shardings do not fit {len(wrong)} of {count}:{list_lines(wrong)}", wrong)
    return result


def current_mesh() -> jax.sharding.Mesh | None:
    """Return the mesh of devices that ``jax.set_mesh`` set; None where there is none, and in a trace."""
    try:
        mesh: Any = jax.sharding.get_mesh()
    except ValueError:
        return None
    return mesh if isinstance(mesh, jax.sharding.Mesh) and not mesh.empty else None


class _NoFit(Exception):
    """What is wrong with the sharding of one leaf."""


def aval_of(shape: tuple[int, ...], dtype: Any, sharding: Sharding | None = None) -> jax.ShapeDtypeStruct:
    """Return what a function of (key, aval) is shown."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def sharding_of(like: Any) -> Any:
    """Return where an array of a target lies; None for one that jax may move freely, and for what has no place."""
    sharding = getattr(like, "sharding", None)
    return sharding if sharding is not None and getattr(like, "committed", True) else None


def _choice(
    shardings: Shardings, mesh: jax.sharding.Mesh | None, known: Sequence[str], own: Mapping[str, Sharding | None]
) -> Choice:
    if shardings is None:
        if mesh is None:
            return lambda key, _aval: own.get(key)
        replicated = spec_of()
        return lambda key, _aval: getattr(own.get(key), "spec", replicated)
    if is_placement(shardings) or isinstance(shardings, jax.sharding.Mesh):
        return lambda _key, _aval: shardings
    if isinstance(shardings, Rules):
        rules = shardings
        return lambda key, aval: _by_rules(rules, key, aval)
    # A tree may be callable too, as equinox modules are.
    if callable(shardings) and (open_pytree_node(shardings) is None or isinstance(shardings, jax.tree_util.Partial)):
        chosen: Choice = shardings
        return chosen
    return _by_prefix(shardings, known)


def is_placement(x: Any) -> bool:
    """Tell whether something says where an array goes."""
    return isinstance(x, Sharding | PartitionSpec | jax.Device)


def is_rules(x: Any) -> TypeGuard[_PartitionRules]:
    """Tell rules from a prefix tree, which holds no strings."""
    pairs = x if isinstance(x, list | tuple) else ()
    return bool(pairs) and all(isinstance(p, list | tuple) and p and isinstance(p[0], str | re.Pattern) for p in pairs)


def _by_rules(rules: Rules, key: str, aval: jax.ShapeDtypeStruct) -> PartitionSpec:
    """Return the spec of the first rule found in the key; what has no axes is replicated."""
    if not aval.shape:
        return spec_of()
    if (rule := rules.rule_for(key)) is None:
        raise _NoFit(_NO_RULE)
    spec: PartitionSpec = fit_spec(key, rule, aval.shape)
    # jax refuses such a spec as well: without its last entries it says something else than its author meant.
    if len(rule[1]) > len(aval.shape):
        raise _NoFit(f"{_array_text(aval)}: its rule has {rule[1]}, and jax takes no spec with more entries than axes")
    return spec


def _by_prefix(tree: Any, known: Sequence[str]) -> Choice:
    found: dict[tuple[str, ...], Any] = {}

    def note(path: tuple[str, ...], leaf: Any) -> Any:
        found[path] = leaf  # a model mapped to shardings still holds its functions: they matter where an array is
        return leaf

    map_with_path(note, tree, is_placement, lambda key: key_text(key_value(key)))
    _require_known(found, known)

    def choose(key: str, aval: jax.ShapeDtypeStruct) -> Any:
        del aval
        path = split_key(key)
        for end in range(len(path), -1, -1):
            if path[:end] in found:
                return found[path[:end]]
        raise _NoFit("shardings has no entry for it; None there means the default device")

    return choose


def _require_known(found: Mapping[tuple[str, ...], Any], known: Sequence[str]) -> None:
    """A mistyped key must not leave an array on the default device."""
    heads = {path[:end] for path in map(split_key, dict.fromkeys(known)) for end in range(len(path) + 1)}
    for path in found:
        if path not in heads:
            meant = near("/".join(path), ["/".join(head) for head in heads])
            hint = f"did you mean {meant!r}?" if meant else None
            raise MismatchError(f"shardings has {'/'.join(path)!r:.200}, which the tree does not have", hint=hint)


def _sharding(given: Any, mesh: jax.sharding.Mesh | None, aval: jax.ShapeDtypeStruct) -> Sharding | None:
    if given is None:
        return None
    if isinstance(given, PartitionSpec):
        given = _on_mesh(given, mesh, aval)
    if isinstance(given, jax.Device):
        return jax.sharding.SingleDeviceSharding(given)
    if not isinstance(given, Sharding):
        hint = "pass mesh=" if isinstance(given, jax.sharding.Mesh) else "a Sharding, Device or PartitionSpec"
        raise UnsupportedError(f"{kind_of(given)} is not a sharding", hint=hint)
    if isinstance(given, NamedSharding):
        given = _concrete(given, mesh, aval)
        if not is_concrete(given):
            raise _NoFit(f"{_array_text(aval)}: {given.spec} is for partial sums, but the stored array is whole")
        _require_divisible(given, aval)
    sharding: Sharding = given
    try:
        sharding.shard_shape(aval.shape)
    except (ValueError, IndexError) as error:
        raise _NoFit(f"{_array_text(aval)} cannot have the sharding {sharding}: {error}") from error
    return sharding


def _on_mesh(spec: PartitionSpec, mesh: jax.sharding.Mesh | None, aval: jax.ShapeDtypeStruct) -> NamedSharding:
    mesh = current_mesh() if mesh is None else mesh
    if mesh is None:
        hint = "pass mesh=, use jax.set_mesh, or pass NamedSharding(mesh, spec)"
        raise UnsupportedError(f"{spec} needs a mesh", hint=hint)
    for name in [name for part in _parts(spec) for name in _names(part)]:
        if name not in mesh.axis_names:
            meant = near(str(name), map(str, mesh.axis_names))
            known = f"did you mean {meant!r}?" if meant else f"it has {', '.join(map(repr, mesh.axis_names))}"
            raise _NoFit(f"{_array_text(aval)}: the mesh has no axis {name!r} of {spec}; {known}")
    try:
        return NamedSharding(mesh, spec)
    except Exception as error:  # that an axis is named twice is told by a class of jax's own
        raise _NoFit(f"{_array_text(aval)}: {error}") from error


def _concrete(given: NamedSharding, mesh: jax.sharding.Mesh | None, aval: jax.ShapeDtypeStruct) -> NamedSharding:
    """Return the sharding; one of an abstract mesh on the mesh that is given, else on the current one."""
    if isinstance(given.mesh, jax.sharding.Mesh):
        return given
    axes = dict(given.mesh.shape)
    if mesh is None:
        if (mesh := current_mesh()) is None:
            text = f"{given.spec} is for an abstract mesh of {axes}, which has no devices"
            raise UnsupportedError(text, hint="pass mesh=, or use jax.set_mesh")
        if dict(mesh.shape) != axes:
            raise _NoFit(
                f"{_array_text(aval)}: {given.spec} is for a mesh of {axes}, the current one has {dict(mesh.shape)}"
            )
    return _on_mesh(given.spec, mesh, aval)


def is_concrete(sharding: NamedSharding) -> bool:
    """Tell whether a sharding is on devices, each of which has a part of the array and no partial sum."""
    return isinstance(sharding.mesh, jax.sharding.Mesh) and not getattr(sharding.spec, "unreduced", None)


def _names(part: Any) -> tuple[Any, ...]:
    """Return the mesh axes that divide one axis of an array."""
    if part is None or part is PartitionSpec.UNCONSTRAINED:
        return ()
    return tuple(part) if isinstance(part, tuple | list) else (part,)


def _require_divisible(sharding: NamedSharding, aval: jax.ShapeDtypeStruct) -> None:
    spec, sizes = sharding.spec, sharding.mesh.shape
    if len(spec) > len(aval.shape):
        raise _NoFit(f"{_array_text(aval)} has {pluralize(len(aval.shape), 'axes')}, {spec} is for {len(spec)}")
    for axis, (length, part) in enumerate(zip(aval.shape, _parts(spec), strict=False)):
        parts = math.prod(sizes[name] for name in _names(part))
        if length % parts:
            over = ", ".join(map(repr, _names(part)))
            raise _NoFit(
                f"{_array_text(aval)}: axis {axis} of length {length} is not divisible by {parts}, mesh axis {over}"
            )


def _array_text(aval: jax.ShapeDtypeStruct) -> str:
    return f"{aval.dtype.name}{list(aval.shape)}"
