"""A leaves directory -> the tree of one of its branches, each array where it is wanted."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, overload

import numpy as np

from treering._arrays.delivered import Delivery, plan_deliveries
from treering._arrays.host import jax_holds
from treering._arrays.jobs import split_by_bytes
from treering._checkpoint.joint_load import LoadGroup, spans_processes
from treering._checkpoint.load import into_like
from treering._checkpoint.save_options import require_one_of
from treering._format.index import ARRAY_KINDS, Index
from treering._format.selection import select
from treering._format.structure import as_dicts, build
from treering._leaves.shardings import ShardingOptions, leaf_shardings, to_dotted
from treering._leaves.source import LeavesSource, open_source
from treering._printable import kind_of
from treering._store.resolve import leaves_path
from treering._tree.flatten import Flattened, flatten_like
from treering._tree.likeness import Fit, LeafMatch, Wording, array_dtype, aval_shape, match_leaves, match_stored
from treering._tree.placement import RulesReport, Shardings, aval_of, sharding_of
from treering._values.human import join_first
from treering.errors import BusyError, CorruptError, NotFoundError, UnsupportedError

if TYPE_CHECKING:
    import jax

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
    path = leaves_path(checkpoint_dir)
    is_shared = functools.partial(spans_processes, shardings, mesh, target)
    options = DeserializeOptions(
        said=ShardingOptions(mesh=mesh, partition_rules=partition_rules, shardings=shardings, report=report),
        manager=manager, callback=callback, batch=_batch(chunk_size), target=target, structure=structure, x64=x64,
        group=LoadGroup(path, timeout=timeout, is_shared=is_shared, repeats=callback is None),
    )  # fmt: skip
    if manager is not None:
        manager.wait_until_finished()
    opened = functools.partial(_opened, path, prefix or None)
    return options.group.retry_on_overwrite(opened, lambda source: load_tree(source, options))


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


Callback: TypeAlias = Callable[[Any, str], Any]
"""Called as ``callback(array, dotted key)``; what it returns is the leaf."""

_WORDING: Final = Wording("target", "treering.load reads the directory too, and has more options: ")
_SHOWN: Final = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeserializeOptions:
    """What the user wants of a branch."""

    said: ShardingOptions
    """Where its arrays go."""
    manager: Any
    """Was waited for."""
    callback: Callback | None
    """Makes the leaf of each array."""
    batch: int
    """Arrays that are read at a time; 0: all."""
    target: Any
    """A tree that the result shall be like, or None."""
    structure: Literal["dicts", "exact"]
    """The containers of the result, where there is no target."""
    x64: Literal["error", "numpy"]
    """What becomes of 64-bit jax arrays where jax holds none."""
    group: LoadGroup
    """Those who load it together."""

    def __post_init__(self) -> None:
        """Refuse arguments that make no sense, before anything is opened."""
        if self.manager is not None and not callable(getattr(self.manager, "wait_until_finished", None)):
            raise UnsupportedError(f"manager is {kind_of(self.manager)}, which has no method wait_until_finished()")
        if self.callback is not None and not callable(self.callback):
            raise UnsupportedError(f"callback is {kind_of(self.callback)}, not a function of (array, key)")
        require_one_of("structure", self.structure, ("dicts", "exact"))
        require_one_of("x64", self.x64, ("error", "numpy"))


def load_tree(source: LeavesSource, options: DeserializeOptions) -> Any:
    """Return the tree of an opened branch.

    Raises:
        MismatchError, UnsupportedError: it cannot be had as it is wanted.
        CorruptError: bytes are damaged or not there.
        BusyError: the branch was replaced after the callback had been called.
        StoreError: the system refuses.
    """
    index = source.index
    source.arrays.check_files()
    part = select(index.structure, index.keys, at=None, only=None)
    if options.target is None:
        matches = match_stored(index, part)
        leaves = _leaves(source, matches, _placements(index, part.keys, matches, None, options), options)
        return build(as_dicts(part.structure) if options.structure == "dicts" else part.structure, leaves)
    target = flatten_like(options.target)
    matches = match_leaves(
        index, part, target, rename=None, missing="error", cast=False, raw_keys=source.raw_keys, wording=_WORDING
    )
    leaves = _leaves(source, matches, _placements(index, target.keys, matches, target, options), options)
    return into_like(options.target, target, source, part=part, matches=matches, leaves=leaves, called=_WORDING.called)


# -------------------------------------------------------------------------------------------------------- where they go


def _placements(
    index: Index, keys: Sequence[str], matches: list[LeafMatch], target: Flattened | None, options: DeserializeOptions
) -> list[Any]:
    """Return the sharding of each leaf; None is the default device, or the host for what stays there."""
    avals: dict[str, Any] = {}
    own: dict[str, Any] = {}
    on_host: set[str] = set()
    wide: dict[str, np.dtype[Any]] = {}
    # Thousands of leaves are of a few types.
    known: dict[tuple[int, Fit], Any] = {}
    held: dict[np.dtype[Any], bool] = {}
    for number, (key, match) in enumerate(zip(keys, matches, strict=True)):
        like = target.leaves[number] if target is not None else None
        alike = index.leaf_types[match.leaf], match.fit
        if alike not in known:
            dtype = array_dtype(index, match)
            known[alike] = None if dtype is None else aval_of(aval_shape(index, match), dtype)
        aval = known[alike]
        if aval is None or isinstance(like, np.ndarray | np.generic):
            continue
        if aval.dtype not in held:
            held[aval.dtype] = jax_holds(aval.dtype)
        if not held[aval.dtype]:
            wide[key] = aval.dtype
            if options.x64 == "numpy":
                continue
        avals[key] = aval
        if like is not None:
            own[key] = sharding_of(like)
        if match.fit.kind == "numpy":
            on_host.add(key)
    chosen = leaf_shardings(options.said, avals, own=own, on_host=on_host, known=index.keys)
    _require_held({key: wide[key] for key in chosen if key in wide})
    for number, (key, match) in enumerate(zip(keys, matches, strict=True)):
        if key in on_host and key in chosen:
            matches[number] = LeafMatch(match.leaf, dataclasses.replace(match.fit, kind="jax"))
    return [chosen.get(key) for key in keys]


def _require_held(wide: Mapping[str, np.dtype[Any]]) -> None:
    """Refuse arrays that jax would make narrower."""
    if wide:
        shown = [f"{to_dotted(key) or '.'} ({dtype.name})" for key, dtype in wide.items()]
        raise UnsupportedError(
            f"jax as configured cannot hold {join_first(shown, _SHOWN)}, and treering casts nothing",
            hint='set jax_enable_x64 for 64-bit numbers, or x64="numpy" for numpy arrays',
        )


# ------------------------------------------------------------------------------------------------------ batch by batch


def _leaves(
    source: LeavesSource, matches: Sequence[LeafMatch], placements: Sequence[Any], options: DeserializeOptions
) -> list[Any]:
    """Return the leaves of the result: read, checked, placed, and given to the callback."""
    result, deliveries = plan_deliveries(source, matches, placements)
    # Long texts, which lie in files too, do not count as arrays.
    runs = split_by_bytes(deliveries, lambda one: _is_array(source.index, one), options.batch or sys.maxsize)
    batches = [run for run, _ in runs]
    options.group.agree(source, batches)
    called = False
    try:
        for batch in batches:
            leaves = options.group.read_batches(source, batch)
            for number, delivery in enumerate(batch):
                leaf, leaves[number] = leaves[number], None  # nothing of a batch outlives its callbacks here
                if options.callback is not None and _is_array(source.index, delivery):
                    called = True
                    leaf = options.callback(leaf, to_dotted(delivery.key))
                result[delivery.number] = leaf
                del leaf
    except (CorruptError, NotFoundError) as error:
        if called and not source.is_current():
            raise _replaced_error(source) from error
        raise
    if called and not source.is_consistent(joint=options.group.joined):
        raise _replaced_error(source)
    return result


def _is_array(index: Index, delivery: Delivery) -> bool:
    return index.type_of(delivery.request.leaf).kind in ARRAY_KINDS


def _replaced_error(source: LeavesSource) -> BusyError:
    return BusyError(
        f"{str(source.folder.path)!r} was replaced while it was being read, after `callback` had been called",
        hint="load it again",
    )
