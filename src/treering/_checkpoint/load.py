"""A stored tree -> the tree, or the part of it that is wanted, where it is wanted; or its shapes and dtypes alone."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from treering._arrays.delivered import ReadProgress, plan_deliveries
from treering._arrays.derived_source import map_index
from treering._arrays.host import jax_holds
from treering._arrays.jobs import Progress, cut_by_bytes
from treering._arrays.source import Source
from treering._background.saves import PendingLoad, begin_load, finish_saves
from treering._checkpoint.forms import Where, paths_of, read_index, read_source
from treering._checkpoint.joint_load import LoadGroup, spans_processes
from treering._format.index import ARRAY_KINDS, Container, Index, OpaqueLeaf, Token
from treering._format.leaf_values import same_value
from treering._format.listing import describe_part
from treering._format.selection import Selection, select
from treering._format.structure import build
from treering._keymap.key_map import KeyMap, check_key_map
from treering._printable import kind_of
from treering._store.resolve import absolute, located
from treering._tree.each import find_items, is_each
from treering._tree.flatten import Flattened, flatten_like
from treering._tree.likeness import (
    KEPT,
    Fit,
    Matches,
    Wording,
    array_dtype,
    aval_shape,
    difference,
    expand_ellipses,
    match_leaves,
    match_stored,
    static_differences,
    stored_dtype,
    unflatten,
)
from treering._tree.placement import (
    ArraysToPlace,
    Placer,
    Shardings,
    aval_of,
    current_mesh,
    is_rules,
    resolve_shardings,
    sharding_of,
)
from treering._tree.registry import key_dtype
from treering._tree.static_values import opaque_of
from treering._values.arguments import require_flags, require_one_of, require_part, timeout_seconds
from treering._values.human import pluralize
from treering._values.keys import key_name, split_key
from treering._values.telemetry import phase, warn_of
from treering._view.progress import reporter, showing
from treering.errors import KeptOnHostWarning, MismatchError, StaticFieldsDifferWarning, UnsupportedError

OF_LIKE: Final = Wording()
"""How one speaks to a user who gave ``like``."""

_MISPLACED: Final[dict[Any, str]] = {
    jax.sharding.Mesh: "mesh",
    jax.sharding.Sharding: "shardings",
    jax.sharding.PartitionSpec: "shardings",
}
"""What is never a tree, and the argument that it belongs to."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What the caller of a load asks for beside the tree; ``treering.load`` says what each means.

    With "leave" for ``missing`` leaves of ``like`` that are not stored stay in the result, abstract ones too. With
    ``none_is_leaf`` a ``like`` of None is the tree that is one leaf, None, not the absence of one. A ``placer`` stands
    in the place of ``shardings`` and ``mesh``.
    """

    only: str | Sequence[str] | None = None
    at: str | None = None
    shardings: Shardings = None
    mesh: Any = None
    missing: Literal["error", "keep", "leave"] = "error"
    extra: Literal["error", "ignore"] = "error"
    cast: bool = False
    mapped: bool = False
    progress: Progress | None = None
    timeout: float | None = None
    key_map: KeyMap | Mapping[str, str] | None = None
    none_is_leaf: bool = False
    placer: Placer | None = None

    @classmethod
    def of(cls, given: Mapping[str, object]) -> LoadOptions:
        """Return what the keywords of ``treering.load`` say; a bar is shown where they ask for one."""
        options = cast("dict[str, Any]", dict(given))
        return cls(**options | {"progress": reporter(options.get("progress"), "loading")})

    @property
    def rename(self) -> Mapping[str, str]:
        """Wanted key -> stored key, for leaves or branches of ``like``."""
        return self.key_map if isinstance(self.key_map, Mapping) else {}

    @property
    def whole_map(self) -> KeyMap | None:
        """The map of the whole stored tree."""
        return self.key_map if isinstance(self.key_map, KeyMap) else None

    @property
    def entire(self) -> bool:
        """Whether every leaf that is stored is read."""
        return self.only is None and self.at is None and self.extra == "error" and self.whole_map is None

    def check(self, like: Any) -> None:
        """Refuse arguments of the wrong kind by their names, before anything is opened.

        Raises:
            UnsupportedError: one of them has no meaning.
        """
        require_part(self.at, self.only)
        pairs: Mapping[Any, Any] = self.rename
        if odd := [key for pair in pairs.items() for key in pair if not isinstance(key, str)]:
            hint = "a key is one text with its parts joined by '/'"
            raise UnsupportedError(f"key_map= has the key {odd[0]!r:.100}", hint=hint)
        given: object = self.key_map
        if not isinstance(given, Mapping | KeyMap | None):
            what = f"key_map= is a KeyMap, or a dict of wanted to stored keys, found {given!r:.100}"
            raise UnsupportedError(what, hint="KeyMap.read reads a TOML file")
        if not isinstance(self.cast, bool | np.bool_):
            raise UnsupportedError(
                f"cast={self.cast!r:.100}, but must be True or False", hint="`like` has the wanted dtypes"
            )
        require_flags(mapped=self.mapped)
        require_one_of("missing", self.missing, ("error", "keep"))
        require_one_of("extra", self.extra, ("error", "ignore"))
        _require_tree(like)
        if like is None and (pairs or self.cast or self.missing == "keep" or self.extra == "ignore"):
            hint = "pass like=, for example jax.eval_shape(init)"
            what = "a dict as key_map=, cast=, missing= and extra= need `like`, and there is none"
            raise UnsupportedError(what, hint=hint)

    def places_array_of(self, like: Any) -> bool:
        """Tell whether there are arrays in ``like``, and all of them are placed, or the load fails."""
        leaves = jax.tree_util.tree_leaves(like) if self.missing == "error" else []
        return any(isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) for leaf in leaves)


def load_tree(
    path: Where,
    like: Any,
    options: LoadOptions,
    read: Callable[[Source, LoadGroup], Any] | None = None,
    *,
    alone: bool = False,
) -> Any:
    """Return the tree at ``path``, or what ``read`` reads of it; ``treering.load`` says more.

    ``alone`` refuses to load it with other processes.
    """
    paths = paths_of(path)
    options.check(like)
    is_shared = functools.partial(spans_processes, options.shardings, options.mesh, like)
    is_joint = functools.partial(options.places_array_of, like)
    group = LoadGroup(paths[-1], timeout=options.timeout, is_shared=is_shared, is_joint=is_joint, alone=alone)

    def work(source: Source) -> Any:
        if read is not None:
            return read(source, group)
        plan = plan_load(source, select_part(source, options, has_like=like is not None), like, options)
        (tree,) = load_parts(source, [plan], options.progress, group)
        return tree

    def opened() -> contextlib.AbstractContextManager[Source]:
        for one in paths:
            finish_saves(one)
        where = paths if len(paths) > 1 else paths[0]
        shared = group.share_index() if len(paths) == 1 else None
        return read_source(where, mapped=options.mapped, key_map=options.whole_map, shared=shared)

    with showing(options.progress):
        return group.retry_on_overwrite(opened, work)


def begin_load_tree(path: Where, like: Any, options: LoadOptions) -> PendingLoad[Any]:
    """Begin to load the tree at ``path`` in the background; ``treering.load_async`` says more."""
    # The program's current folder, and what is set for the calling thread alone, may be others later.
    paths = [absolute(located(one)) for one in paths_of(path)]
    options.check(like)
    if find_items(like, is_each):
        what = "load_async does not restore states that treering.each marks"
        raise UnsupportedError(what, hint="load them by treering.load or Run.load, on the thread that uses them")
    config: Any = jax.config  # jax 0.10 does not say which settings it has
    wide, device, mesh = bool(config.jax_enable_x64), config.jax_default_device, current_mesh()
    group = LoadGroup(paths[-1], timeout=options.timeout, is_shared=lambda: False, alone=True)
    if spans_processes(options.shardings, options.mesh, like):
        group.refuse_others()

    def work(require_wanted: Callable[[], None]) -> Any:
        def step(done: int, total: int) -> None:
            require_wanted()
            if options.progress is not None:
                options.progress(done, total)

        meshed = contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
        with jax.enable_x64(wide), jax.default_device(device), meshed, showing(options.progress):
            return load_tree(paths, like, dataclasses.replace(options, progress=step), alone=True)

    given = [path] if isinstance(path, str | os.PathLike) else path
    shown = " + ".join([os.fspath(one) for one in given])
    return begin_load(work, shown=shown, timeout=timeout_seconds(options.timeout))


def select_part(source: Source, options: LoadOptions, *, has_like: bool = True) -> Selection:
    """Return the part of a stored tree that is wanted; ``has_like`` says whether it is put into another tree.

    Raises:
        MismatchError: nothing lies at ``at``, or nothing matches a glob.
    """
    index = source.index
    if options.at is None and options.only is None:
        source.arrays.check_files()  # also those that hold nothing: all of it was asked for
        return Selection(structure=index.structure, leaves=range(len(index.keys)), keys=index.keys)
    stored = stored_text(source)
    return select(index.structure, index.keys, at=options.at, only=options.only, stored=stored, has_like=has_like)


def stored_text(source: Source) -> str:
    """Return what a tree was read of, for errors."""
    if source.layers:
        return f"the checkpoints {' and '.join(f'{path!r:.200}' for path in source.paths)}"
    part = source.index.part
    return f"the checkpoint, which is a part of a tree ({describe_part(part)})" if part else "the checkpoint"


def _why_absent(index: Index, part: Selection, options: LoadOptions, key: str) -> str:
    """Say which argument left a leaf or a branch out of a part; no text where it is in the part, or nowhere."""

    def is_in(keys: Sequence[str]) -> bool:
        return any(one == key or one.startswith(f"{key}/") for one in keys)

    if is_in(part.keys):
        return ""  # what is wanted is a leaf, and this a branch
    if options.only is not None and is_in(select(index.structure, index.keys, at=options.at, only=None).keys):
        return " (only= leaves it out)"
    return f" (it lies outside of at={options.at!r:.100})" if options.at and is_in(index.keys) else ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A part of a stored tree, what each of its leaves becomes, and what they are put into."""

    part: Selection
    """The part."""
    like: Any
    """The tree that it is put into; None for the containers that were saved."""
    target: Flattened | None
    """The same, flattened."""
    matches: Matches
    """What each leaf of the result becomes."""
    placements: list[Any]
    """Where each leaf of the result goes."""
    called: str = "like"
    """What the user calls ``like``."""
    as_saved: Mapping[int, Selection] = dataclasses.field(default_factory=dict)
    """Number of a leaf of ``like`` -> the container that was saved in its place."""

    @property
    def kept(self) -> list[str]:
        """The keys of the leaves of ``like`` for which nothing is stored."""
        if self.target is None:
            return []
        return [key for key, fit in zip(self.target.keys, self.matches.fits, strict=True) if fit is KEPT]

    def tree(self, source: Source, leaves: list[Any]) -> Any:
        """Return the leaves in their containers; functions, and what is kept, come from ``like``.

        Warns where functions and static fields of ``like`` are others than those that were saved.
        """
        if self.target is None:
            return build(self.part.structure, leaves)
        if -1 in self.matches.leaves or "opaque" in self.target.kinds:
            for number, (fit, kind) in enumerate(zip(self.matches.fits, self.target.kinds, strict=True)):
                if fit is KEPT or kind == "opaque":
                    leaves[number] = self.target.leaves[number]
        if source.structured:
            _report_static(source.index, self.part, self.target, self.matches, self.called)
        return unflatten(self.like, list(self._gather(leaves)) if self.as_saved else leaves)

    def _gather(self, leaves: list[Any]) -> Iterator[Any]:
        """Yield the leaves of ``like``, with the containers that were saved in the place of some."""
        rest = iter(leaves)
        inside = sum(len(part.keys) - 1 for part in self.as_saved.values())
        for number in range(len(leaves) - inside):
            if (part := self.as_saved.get(number)) is None:
                yield next(rest)
            else:
                yield build(part.structure, list(itertools.islice(rest, len(part.keys))))


@phase("load/plan")
def plan_load(
    source: Source, part: Selection, like: Any, options: LoadOptions, *, wording: Wording = OF_LIKE
) -> LoadPlan:
    """Check a part of a stored tree against the template, and find the sharding of each leaf.

    Raises:
        MismatchError: they do not fit; every difference is named.
    """
    index = source.index
    target = None if like is None and not options.none_is_leaf else flatten_like(like)
    as_saved: Mapping[int, Selection] = {}
    if target is not None:
        target, as_saved = expand_ellipses(target, part, options.rename)
    wording = dataclasses.replace(wording, why_absent=functools.partial(_why_absent, index, part, options))
    if source.layers or index.part:
        wording = dataclasses.replace(wording, stored=stored_text(source), is_part=bool(index.part))
    matches = match_stored(index, part) if target is None else match_leaves(
        index, part, target, rename=options.rename, missing=options.missing, extra=options.extra, cast=options.cast,
        raw_keys=source.raw_keys, wording=wording,
    )  # fmt: skip
    keys = part.keys if target is None else target.keys
    explicit = options.shardings is not None or options.mesh is not None or options.placer is not None
    arrays = _arrays_to_place(index, keys, matches, target, every=explicit)
    placements: list[Any] = [None] * len(keys)
    if explicit or arrays.avals:
        known = select(index.structure, index.keys, at=options.at, only=None).keys
        placer = options.placer or functools.partial(_place, options, keys)
        placements = list(map(placer(arrays, known).get, keys))
    moved: dict[int, Fit] = {}  # leaves that are alike still share one
    for number, (fit, place) in enumerate(zip(matches.fits, placements, strict=True) if arrays.on_host else ()):
        if fit.kind == "numpy" and place is not None:
            matches.fits[number] = moved.setdefault(id(fit), dataclasses.replace(fit, kind="jax"))
    return LoadPlan(
        part=part, like=like, target=target, matches=matches, placements=placements, called=wording.called,
        as_saved=as_saved,
    )  # fmt: skip


def load_parts(
    source: Source,
    parts: Sequence[LoadPlan],
    progress: Progress | None,
    group: LoadGroup,
    *,
    callback: Callable[[Any, str], Any] | None = None,
    batch: int = 0,
) -> list[Any]:
    """Return the trees of some parts: all that is stored of them is read, checked and placed together.

    Args:
        source: the opened tree.
        parts: its parts.
        progress: called with the bytes that are done.
        group: the processes that load it together.
        callback: ``callback(array, key text)`` makes the leaf of each stored array.
        batch: so many arrays are read before the callback is given them, and then let go; 0: all.
    """
    matches = Matches(
        [leaf for one in parts for leaf in one.matches.leaves], [fit for one in parts for fit in one.matches.fits]
    )
    placements = [placement for one in parts for placement in one.placements]
    with phase("load/read") as moved:
        leaves, deliveries = plan_deliveries(source, matches, placements)
        # Long texts, which lie in files too, do not count as arrays.
        is_array = [_is_array(source.index, leaf) for leaf in deliveries.leaves] if batch else []
        cuts = cut_by_bytes(is_array, batch) if batch else [slice(None)]
        batches = group.agree(source, [deliveries[some] for some in cuts])
        report = ReadProgress(progress, total := sum(some.nbytes for some in batches))
        for some in batches:
            found = group.read_batches(source, some, report)
            for number, stored in enumerate(some.leaves if callback is not None else ()):
                # Here nothing of a batch outlives its callbacks.
                leaf, found[number] = found[number], None
                if callback is not None and _is_array(source.index, stored):
                    group.seen = True
                    leaf = callback(leaf, source.index.keys[stored])
                found[number] = leaf
                del leaf
            for place, leaf in zip(some.numbers, found, strict=True):
                leaves[place] = leaf
        moved.nbytes = total
    rest = iter(leaves)
    return [one.tree(source, list(itertools.islice(rest, len(one.placements)))) for one in parts]


def _is_array(index: Index, leaf: int) -> bool:
    return index.type_of(leaf).kind in ARRAY_KINDS


def _require_tree(like: Any) -> None:
    """Refuse a ``like`` that was meant for another argument."""
    meant = next((name for kind, name in _MISPLACED.items() if isinstance(like, kind)), None)
    if meant is not None:
        raise UnsupportedError(f"`like` is {kind_of(like)}, not a tree of arrays", hint=f"did you mean {meant}=?")
    if is_rules(like) and any(isinstance(rule[-1], jax.sharding.PartitionSpec) for rule in like):
        raise UnsupportedError(
            "`like` is a list of partition rules, not a tree of arrays", hint="did you mean shardings=?"
        )


def _arrays_to_place(
    index: Index, keys: Sequence[str], matches: Matches, target: Flattened | None, *, every: bool
) -> ArraysToPlace:
    """Return the arrays that may go on devices: every one, or those whose leaves of the target lie there."""
    found = ArraysToPlace()
    held: dict[np.dtype[Any], bool] = {}  # as jax is configured now
    # Thousands of leaves are of a few types.
    avals: dict[tuple[int, int], Any] = {}
    likes = [None] * len(keys) if target is None else target.leaves
    for key, leaf, fit, like in zip(keys, matches.leaves, matches.fits, likes, strict=True):
        place = sharding_of(like) if getattr(like, "committed", True) else None
        if not (every or place is not None) or fit is KEPT or isinstance(like, np.ndarray | np.generic):
            continue
        alike = index.leaf_types[leaf], id(fit)
        if alike not in avals:
            dtype = array_dtype(index.type_of(leaf), fit)
            avals[alike] = None if dtype is None else aval_of(aval_shape(index.type_of(leaf), fit), dtype)
            if dtype is not None and dtype not in held:
                held[dtype] = jax_holds(dtype)
        if (aval := avals[alike]) is None:
            continue
        found.avals[key] = aval
        found.own[key] = place
        if fit.kind == "numpy":
            found.on_host.add(key)
        if not held[aval.dtype]:
            found.too_wide[key] = aval.dtype
    return found


_WIDE: Final = frozenset({"complex128", "float64", "int64", "uint64"})
"""What jax holds with x64; other dtypes that it does not hold stay on the host, whatever is asked."""


def _place(options: LoadOptions, keys: Sequence[str], arrays: ArraysToPlace, known: Sequence[str]) -> Mapping[str, Any]:
    """Return the shardings that ``shardings`` and ``mesh`` say; what is too wide stays on the host, with a warning."""

    def resolve(avals: Mapping[str, Any]) -> Mapping[str, Any]:
        return resolve_shardings(options.shardings, options.mesh, avals, [*keys, *known], arrays.own)

    wide = arrays.too_wide
    chosen = resolve({key: aval for key, aval in arrays.avals.items() if key not in wide} if wide else arrays.avals)
    if wide and (options.shardings is not None or options.mesh is not None):
        given: Mapping[str, Any] = {
            key: arrays.avals[key] for key, dtype in wide.items() if key in arrays.on_host and dtype.name in _WIDE
        }
        with contextlib.suppress(MismatchError):  # some were given a place, which does not even fit
            given = resolve(given)
        named = {
            key_name(key): one for key, one in wide.items() if key not in arrays.on_host or given.get(key) is not None
        }
        if lines := [f"{name} ({dtype.name})" for name, dtype in named.items()]:
            what = "jax_enable_x64 is off, so these stay numpy arrays of full width on the host"
            warn_of(what, lines, KeptOnHostWarning)
    return chosen


def _report_static(index: Index, part: Selection, target: Flattened, matches: Matches, called: str) -> None:
    same = len(part.structure) == len(target.tokens) and all(map(_same_token, part.structure, target.tokens))
    lines = [] if same else static_differences(part.structure, target.tokens, called=called)
    for number in [number for number, kind in enumerate(target.kinds) if kind == "opaque"]:
        if matches.fits[number] is not KEPT:
            key, saved = target.keys[number], index.values[matches.leaves[number]]
            here = opaque_of(target.leaves[number])
            if not same_value(saved, here):
                lines.append(f"{key_name(key)}: saved as {difference(saved, here, called)}")
    if lines:
        what = f"classes, functions and static fields come from `{called}`, and these are not those that were saved"
        warn_of(what, lines, StaticFieldsDifferWarning)


def _same_token(one: Token, other: Token) -> bool:
    if not isinstance(one, Container) or not isinstance(other, Container):
        return one == other
    # Equality leaves digests aside.
    return one == other and (not one.static or same_value(one.static, other.static))


_SHARDING: Final = re.compile(r"\w*\((.*)\) over (.*)")
_AXIS: Final = re.compile(r"([\w.-]+)=([1-9][0-9]{0,8})")
_ENTRY: Final = re.compile(r"None|'[\w.-]+'|\([^()]*\)")
_NAME: Final = re.compile(r"'([\w.-]+)'")


def abstract_tree(path: Where, *, at: str | None, only: str | Sequence[str] | None, key_map: KeyMap | None) -> Any:
    """Return the tree at ``path`` without its arrays; ``treering.abstract`` says more."""
    paths = paths_of(path)
    check_key_map(key_map)
    require_part(at, only)
    for one in paths:
        finish_saves(one)
    index = read_index(paths if len(paths) > 1 else paths[0])
    index = index if key_map is None else map_index(index, key_map)
    part = select(index.structure, index.keys, at=at, only=only)
    # Thousands of arrays are of a few types.
    known: dict[int, Any] = {}
    meshes: dict[str, Mesh | None] = {}
    leaves: list[Any] = []
    for leaf in part.leaves:
        if not index.type_of(leaf).stored:
            leaves.append(index.values[leaf])
            continue
        if (number := index.leaf_types[leaf]) not in known:
            known[number] = _abstract_leaf(index, leaf, meshes)
        leaves.append(known[number])
    return build(part.structure, leaves)


def _abstract_leaf(index: Index, leaf: int, meshes: dict[str, Mesh | None]) -> Any:
    kind = index.type_of(leaf)
    shape = kind.shape or ()
    if kind.kind not in ARRAY_KINDS:
        return OpaqueLeaf(kind.kind, f"{pluralize(math.prod(shape), 'bytes')}, in a data file")
    if kind.kind == "key":
        if (dtype := key_dtype(kind.impl or "")) is None:
            what = f"this jax knows no PRNG keys of the implementation {kind.impl!r:.100}"
            raise UnsupportedError(what, path=split_key(index.keys[leaf]))
        shape = shape[:-1]
    else:
        dtype = stored_dtype(kind)
    sharding = _read_sharding(kind.sharding or "", shape, meshes)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def _read_sharding(text: str, shape: tuple[int, ...], meshes: dict[str, Mesh | None]) -> NamedSharding | None:
    """Return a recorded sharding on the devices of this job; None where it says none, or they cannot hold it so."""
    if (found := _SHARDING.fullmatch(text)) is None or _ENTRY.sub("", found[1]).strip(", "):
        return None
    if found[2] not in meshes:
        meshes[found[2]] = _make_mesh(found[2])
    if (mesh := meshes[found[2]]) is None:
        return None
    entries: list[Any] = [
        None if entry == "None" else tuple(_NAME.findall(entry)) if entry.startswith("(") else entry.strip("'")
        for entry in _ENTRY.findall(found[1])
    ]
    # That of a key is of its data, which have one axis more.
    while len(entries) > len(shape) and entries[-1] is None:
        entries.pop()
    try:
        sharding = NamedSharding(mesh, PartitionSpec(*entries))  # type: ignore[no-untyped-call]
        sharding.shard_shape(shape)
    except (ValueError, TypeError):  # an axis that the mesh does not have, twice, or that does not divide the shape
        return None
    return sharding


def _make_mesh(text: str) -> Mesh | None:
    axes = [found for found in map(_AXIS.fullmatch, text.split(", ")) if found is not None]
    sizes = [int(found[2]) for found in axes]
    count, there = math.prod(sizes), jax.devices()
    # In a job of several processes each of them has to take part.
    if text.count(", ") + 1 != len(axes) or (count != len(there) if jax.process_count() > 1 else count > len(there)):
        return None
    return Mesh(np.array(there[:count]).reshape(sizes), tuple(found[1] for found in axes))
