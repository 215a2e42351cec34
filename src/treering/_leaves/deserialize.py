"""A leaves directory -> the tree of one of its branches, each array where it is wanted.

``mesh``, ``partition_rules`` and ``shardings`` have eformer's meaning where it has one: rules are matched on keys with
``/`` and win over shardings for every array; keys of flat shardings are joined with ``.``; one mesh axis alone
replicates what nothing was said of.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, overload

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from treering._checkpoint.joint_load import LoadGroup, spans_processes
from treering._checkpoint.load import LoadOptions, LoadPlan, load_parts, plan_load, select_part
from treering._format.index import ARRAY_KINDS, LeafType
from treering._format.structure import as_dicts, build
from treering._leaves.branches import read_branches
from treering._leaves.source import LeavesSource, open_source
from treering._printable import kind_of, printable
from treering._store.resolve import leaves_path, open_leaves
from treering._tree.likeness import Wording
from treering._tree.placement import (
    ArraysToPlace,
    Choice,
    Rules,
    RulesReport,
    Shardings,
    choose_shardings,
    cut_spec,
    fit_spec,
    is_placement,
    is_rules,
    no_rule_error,
    require_mesh,
    spec_of,
)
from treering._tree.registry import open_pytree_node
from treering._tree.state_dict import map_with_path
from treering._values.arguments import require_one_of
from treering._values.human import build_mismatch, join_first, near
from treering._values.keys import key_name, split_key
from treering.errors import MismatchError, UnsupportedError

T = TypeVar("T")


@overload
def tree_deserialize_leaves(
    checkpoint_dir: str | os.PathLike[str], mesh: jax.sharding.Mesh | None = ..., manager: Any = ..., *,
    prefix: str | None = ..., partition_rules: Any = ..., shardings: Shardings = ..., callback: Callback | None = ...,
    chunk_size: int | None = ..., target: None = ..., structure: Literal["dicts", "exact"] = ...,
    x64: Literal["error", "numpy"] = ..., timeout: float | None = ...,
    report: Callable[[RulesReport], object] | None = ...,
) -> Any: ...  # fmt: skip


@overload
def tree_deserialize_leaves(
    checkpoint_dir: str | os.PathLike[str], mesh: jax.sharding.Mesh | None = ..., manager: Any = ..., *,
    prefix: str | None = ..., partition_rules: Any = ..., shardings: Shardings = ..., callback: Callback | None = ...,
    chunk_size: int | None = ..., target: T, structure: Literal["dicts", "exact"] = ...,
    x64: Literal["error", "numpy"] = ..., timeout: float | None = ...,
    report: Callable[[RulesReport], object] | None = ...,
) -> T: ...  # fmt: skip


def tree_deserialize_leaves(
    checkpoint_dir: str | os.PathLike[str], mesh: jax.sharding.Mesh | None = None, manager: Any = None, *,
    prefix: str | None = None,
    partition_rules: Any = None, shardings: Shardings = None, callback: Callback | None = None,
    chunk_size: int | None = None, target: Any = None, structure: Literal["dicts", "exact"] = "dicts",
    x64: Literal["error", "numpy"] = "error", timeout: float | None = None,
    report: Callable[[RulesReport], object] | None = None,
) -> Any:  # fmt: skip
    """Load the tree that `tree_serialize_leaves` of treering or eformer saved; every byte is checked on the way.

    The result is eformer's: nested dicts with text keys for all containers. Leaves of every kind come back, what
    was numpy as numpy unless a sharding or rule is given for it. All arrays of another program's tree are jax arrays,
    and it has no checksums. If a save replaces the tree meanwhile, the newer one is loaded.

    Args:
        checkpoint_dir: the directory.
        mesh: of one axis: replicates what nothing else is said of; of several: each array needs a rule or sharding.
        manager: is waited for, so that what it writes can be read.
        prefix: which tree; None and "" for the one without prefix.
        partition_rules: pairs of a pattern, searched in keys with ``/`` and without prefix, and a ``PartitionSpec``.
            They win over ``shardings``; what has no axes is replicated.
        report: called with a ``treering.sharding.RulesReport`` on ``partition_rules``, instead of the warning.
        shardings: a ``Sharding``, ``PartitionSpec`` or device for all arrays, a function of (dotted key,
            ``jax.ShapeDtypeStruct``) that returns one, or a tree of these: nested, or flat with dotted keys.
        callback: ``callback(array, dotted key)`` is called for each array, in order; its result is the leaf.
        chunk_size: arrays read at a time; only what ``callback`` keeps of a batch stays there. None, 0 or less: all.
        target: a tree of the structure, shapes, dtypes and, where nothing else is said, shardings that are wanted.
        structure: "dicts", or "exact" for the containers that were saved; ``target`` wins over it.
        x64: "error" or "numpy" for 64-bit jax arrays where jax_enable_x64 is off.
        timeout: seconds to wait for other processes where arrays lie over several; else ``TREERING_TIMEOUT_S``, or 600.

    Raises:
        MismatchError: no such prefix, no rule or sharding for an array, or ``target`` differs; all of it is named.
        UnsupportedError: arrays that jax cannot hold, or an argument that makes no sense; also a ``TypeError``.
        CorruptError, FormatError, BusyError: bytes are not those that were saved; another format; a save came after
            ``callback``.
        NotFoundError, NotSharedError, TimedOutError, ProcessFailedError: no directory; others see another, are late...

    Source: eformer.serialization.tree_deserialize_leaves.

    Example:
        >>> import tempfile
        >>> from treering.leaves import tree_serialize_leaves
        >>> path = tempfile.mkdtemp()
        >>> tree_serialize_leaves(path, {"layers": [2.5, None], "step": 7})
        >>> tree_deserialize_leaves(path)
        {'layers': {'0': 2.5, '1': None}, 'step': 7}
    """
    path, batch = leaves_path(checkpoint_dir), _batch(chunk_size)
    is_shared = functools.partial(spans_processes, shardings, mesh, target)
    group = LoadGroup(path, timeout=timeout, is_shared=is_shared, repeats=callback is None)
    placer = LeafPlacer(mesh=mesh, partition_rules=partition_rules, shardings=shardings, report=report, x64=x64)
    _check_options(manager, callback, structure, x64)

    def load(source: LeavesSource) -> Any:
        plan = _plan_branch(source, target, structure, placer)
        called = None if callback is None else lambda leaf, key: callback(leaf, to_dotted(key))
        return load_parts(source, [plan], None, group, callback=called, batch=batch)[0]

    return group.retry_on_overwrite(functools.partial(_opened, path, prefix or None), load)


def _check_options(manager: Any, callback: Any, structure: str, x64: str) -> None:
    """Refuse arguments that make no sense, before anything is opened; then wait for the manager."""
    if manager is not None and not callable(getattr(manager, "wait_until_finished", None)):
        raise UnsupportedError(f"manager is {kind_of(manager)}, which has no method wait_until_finished()")
    if callback is not None and not callable(callback):
        raise UnsupportedError(f"callback is {kind_of(callback)}, not a function of (array, key)")
    require_one_of("structure", structure, ("dicts", "exact"))
    require_one_of("x64", x64, ("error", "numpy"))
    if manager is not None:
        manager.wait_until_finished()


def _batch(chunk_size: Any) -> int:
    """Return how many arrays make a batch, 0 for all."""
    try:
        return 0 if chunk_size is None else max(operator.index(chunk_size), 0)
    except TypeError as error:
        raise UnsupportedError(f"chunk_size={chunk_size!r:.100} is not a whole number of arrays") from error


@contextlib.contextmanager
def _opened(path: Path, prefix: str | None) -> Iterator[LeavesSource]:
    with contextlib.ExitStack() as files:
        yield open_source(path, files, prefix=prefix)


def _plan_branch(source: LeavesSource, target: Any, structure: str, placer: LeafPlacer) -> LoadPlan:
    """Plan to load an opened branch, in the containers of ``target`` or in those that ``structure`` says."""
    options = LoadOptions(placer=placer)
    part = select_part(source, options)
    if structure == "dicts" and target is None:
        part = dataclasses.replace(part, structure=as_dicts(part.structure))
    return plan_load(source, part, target, options, wording=_WORDING)


Callback: TypeAlias = Callable[[Any, str], Any]
"""Called as ``callback(array, dotted key)``; what it returns is the leaf."""

_WORDING: Final = Wording("target", "treering.load reads the directory too, and has more options: ")


# ------------------------------------------------------------------------------------------------------------ shardings


_SHOWN: Final = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeafPlacer:
    """Places the arrays of a branch; what the options mean, ``treering.leaves.tree_deserialize_leaves`` says."""

    mesh: jax.sharding.Mesh | None
    partition_rules: Iterable[Any] | None
    shardings: Any
    report: Callable[[RulesReport], object] | None
    x64: Literal["error", "numpy"]

    def __call__(self, arrays: ArraysToPlace, known: Sequence[str]) -> dict[str, Sharding | None]:
        """Return where arrays go; None is the default device. Arrays that stay on the host are left out.

        Raises:
            MismatchError: no rule fits an array, a mesh of several axes has no sharding for it, its shape cannot be
                divided so, or shardings names what is not there; each with all such names.
            UnsupportedError: this is no mesh, rule or sharding, or jax would make arrays narrower.
        """
        require_mesh(self.mesh)
        avals, on_host = arrays.avals, arrays.on_host
        if self.x64 == "numpy" and arrays.too_wide:
            avals = {key: aval for key, aval in avals.items() if key not in arrays.too_wide}
        if self.partition_rules is not None:
            rules = Rules(self.partition_rules)
            given = _by_rules(rules, avals, on_host)
            rules.tell(map(to_slashed, known), self.report)
        else:
            given = _by_shardings(self.mesh, avals, arrays.own, on_host, _choice(self.shardings, known))
        chosen = choose_shardings(lambda key, _aval: given[key], self.mesh, {key: avals[key] for key in given})
        _require_held({key: dtype for key, dtype in arrays.too_wide.items() if key in chosen})
        return chosen


def _require_held(too_wide: Mapping[str, np.dtype[Any]]) -> None:
    """Refuse arrays that jax would make narrower."""
    if too_wide:
        shown = [f"{to_dotted(key) or '.'} ({dtype.name})" for key, dtype in too_wide.items()]
        raise UnsupportedError(
            f"jax as configured cannot hold {join_first(shown, _SHOWN)}, and treering casts nothing",
            hint='set jax_enable_x64 for 64-bit numbers, or x64="numpy" for numpy arrays',
        )


def to_dotted(key: str) -> str:
    """Return a key text as eformer writes keys: its parts, joined with dots.

    Example:
        >>> to_dotted("params/dense/0")
        'params.dense.0'
    """
    return ".".join(split_key(key))


def to_slashed(key: str) -> str:
    """Return a key text as rules match it: its parts, joined with slashes and without escapes.

    Example:
        >>> to_slashed("params/a~1b/0")
        'params/a/b/0'
    """
    return "/".join(split_key(key))


def _by_rules(rules: Rules, avals: Mapping[str, jax.ShapeDtypeStruct], on_host: AbstractSet[str]) -> dict[str, Any]:
    """Return the spec of the first rule that fits each array; what has no axes needs none."""
    given: dict[str, Any] = {}
    unmatched: list[str] = []
    for key, aval in avals.items():
        name = to_slashed(key)
        rule = rules.rule_for(name) if aval.shape else None
        if rule is not None:
            given[key] = fit_spec(name, rule, aval.shape)
        elif key in on_host:
            continue
        elif aval.shape:
            unmatched.append(name)
        else:
            given[key] = spec_of()
    if unmatched:
        raise no_rule_error(unmatched)
    return given


def _by_shardings(
    mesh: Mesh | None, avals: Mapping[str, Any], own: Mapping[str, Any], on_host: AbstractSet[str], choice: Choice
) -> dict[str, Any]:
    """Return what is said of each array; where nothing is, its place in the target, or all of a mesh of one axis."""
    given: dict[str, Any] = {}
    unsaid: list[str] = []
    replicated = spec_of()
    for key, aval in avals.items():
        there = choice(key, aval)
        if there is None and key in on_host:
            continue
        there = own.get(key) if there is None else there
        if there is None and mesh is not None:
            there = replicated
            if len(mesh.axis_names) > 1:
                unsaid.append(key_name(to_slashed(key)))
        given[key] = there
    if unsaid and mesh is not None:
        shown = join_first(list(map(printable, unsaid)), _SHOWN)
        what = f"the mesh has the axes {', '.join(map(repr, mesh.axis_names))}, and there is no sharding for {shown}"
        hint = "pass partition_rules= that match these keys, or shardings=, nested or flat with dots"
        raise build_mismatch(what, unsaid, f"{hint}; PartitionSpec() replicates")
    return given


def _choice(shardings: Any, known: Sequence[str]) -> Choice:
    """Return what says of each key where its array goes; None where nothing is said."""
    if shardings is None:
        return lambda _key, _aval: None
    if is_rules(shardings):
        raise UnsupportedError("shardings= holds partition rules", hint="pass them as partition_rules=")
    found: dict[tuple[str, ...], Any] = {}
    map_with_path(found.__setitem__, shardings, _says_where)
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
            return leaf(to_dotted(key), aval)
        return leaf

    return choose


def _says_where(x: Any) -> bool:
    """Tell a placement or a function from a branch; a model may be callable too, and is a tree."""
    return is_placement(x) or isinstance(x, jax.tree_util.Partial) or (callable(x) and open_pytree_node(x) is None)


def _require_known(found: Iterable[tuple[str, ...]], known: Sequence[str]) -> None:
    """A mistyped key must not leave an array where it was not meant to be."""
    # Branches are as good as leaves, in suggestions too; in order, so that these are always the same ones.
    names = dict.fromkeys(".".join(parts[:end]) for parts in map(split_key, known) for end in range(1, len(parts) + 1))
    if "" in known:
        names[""] = None  # a bare array has no parts
    stray = [".".join(path) for path in found if path and ".".join(path) not in names]
    if stray:
        shown = [
            f"{key!r:.200}" + (f" (did you mean {close!r}?)" if (close := near(key, names)) else "")
            for key in stray[:_SHOWN]
        ]
        what = f"shardings has {join_first([*shown, *stray[_SHOWN:]], _SHOWN)}, which the tree does not have"
        raise build_mismatch(what, stray, "keys are nested like the tree, or flat with dots, without the prefix")


def create_sharding_tree_from_index(
    checkpoint_dir: str | os.PathLike[str],
    mesh: Mesh | None = None,
    prefix: str | None = None,
    default_sharding: Any = None,
) -> Any:
    """Return a tree of shardings for a leaves directory, of the form in which its tree is loaded by default.

    That is: nested dicts with text for keys, a place for every leaf, and None where a leaf is no array. It fits
    `treering.leaves.tree_deserialize_leaves` and `apply_sharding_tree` as it is. No array is read.

    Args:
        checkpoint_dir: the directory.
        mesh: what a partition spec is meant for.
        prefix: which tree of the directory; None or "" is the one without prefix.
        default_sharding: for every array. A ``Sharding`` or ``PartitionSpec``, cut to the axes that the array has; a
            ``Device``; a function of a dict with the "path" of the array's folder, its "shape" and its "dtype", whose
            result is taken as it is; or None: replicated on ``mesh``, or None where there is no mesh, or where the
            array was saved as numpy and may stay so.

    Raises:
        NotFoundError: there is no directory or no index.
        MismatchError: no tree has this prefix, those there are named; a partition spec has axes that the mesh lacks.
        UnsupportedError: a partition spec without mesh, or what is no sharding.
        CorruptError, FormatError: the index is damaged, or not one that this version reads.

    Source: eformer.serialization.sharding_utils.create_sharding_tree_from_index.

    Example:
        >>> import jax, numpy as np
        >>> from jax.sharding import Mesh, PartitionSpec as P
        >>> from treering.leaves import tree_serialize_leaves
        >>> tree_serialize_leaves("ckpt", {"layers": [jax.numpy.ones((4, 2))], "scale": jax.numpy.float32(1)})
        >>> mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
        >>> tree = create_sharding_tree_from_index("ckpt", mesh, default_sharding=P("d"))
        >>> tree["layers"]["0"].spec == P("d"), tree["scale"].spec == P()
        (True, True)
    """
    require_mesh(mesh)
    place_of = _place_of(default_sharding, mesh)
    with open_leaves(leaves_path(checkpoint_dir)) as folder:
        (branch,), _ = read_branches(folder, prefix=prefix)
    record = branch.record
    places: list[Any] = [None] * len(record.keys)
    for leaf, path in zip(record.stored_leaves(), record.folders, strict=True):
        kind = record.types[record.leaf_types[leaf]]
        if kind.kind in ARRAY_KINDS:
            places[leaf] = place_of(path, kind)
    return build(as_dicts(record.structure), places)


def _place_of(default: Any, mesh: Mesh | None) -> Callable[[str, LeafType], Any]:
    """Return what chooses the sharding of an array by its folder and type."""
    if default is None:
        everywhere = None if mesh is None else NamedSharding(mesh, spec_of())
        return lambda _path, kind: everywhere if kind.kind in ("jax", "key") else None
    if isinstance(default, PartitionSpec):
        if mesh is None:
            raise UnsupportedError(f"default_sharding is {default}, which needs a mesh", hint="pass mesh=")
        try:
            default = NamedSharding(mesh, default)
        except Exception as error:  # noqa: BLE001 - an axis is not there, or twice: then of a class of jax's own
            raise MismatchError(f"default_sharding does not fit the mesh: {error}") from None
    if is_placement(default):
        return lambda _path, kind: _cut(default, len(_shape(kind)))
    if callable(default) and not isinstance(default, Mesh):  # a mesh decorates functions
        return lambda path, kind: default({"path": path, "shape": list(_shape(kind)), "dtype": kind.dtype})
    hint = "a Sharding, PartitionSpec, Device, function or None"
    raise UnsupportedError(f"default_sharding is {kind_of(default)}", hint=hint)


def _shape(kind: LeafType) -> tuple[int, ...]:
    """Return the shape that the array has on devices: a key's data has one axis more than the key."""
    shape = kind.shape or ()
    return shape[:-1] if kind.kind == "key" else shape


def _cut(sharding: Any, axes: int) -> Any:
    """Return the sharding for no more axes than there are."""
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) <= axes:
        return sharding
    return NamedSharding(sharding.mesh, cut_spec(sharding.spec, axes), memory_kind=sharding.memory_kind)
