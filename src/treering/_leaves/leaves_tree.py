"""One opened branch of a leaves directory -> its tree, batch by batch, each array through the caller's callback."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from treering._arrays.delivered import Delivery
from treering._arrays.host import jax_holds
from treering._checkpoint.arrivals import plan_deliveries
from treering._checkpoint.into_like import into_like
from treering._checkpoint.joint_load import LoadGroup
from treering._format.dict_structure import as_dicts
from treering._format.index import ARRAY_KINDS, Index
from treering._format.selection import select
from treering._format.structure import build
from treering._leaves.load_by_manager import ArrayReader, ByManager
from treering._leaves.shardings import Said, dotted, leaf_shardings
from treering._leaves.source import LeavesSource
from treering._tree.fit import Fit
from treering._tree.flatten import Flattened, flatten_like
from treering._tree.likeness import Matched, Wording, array_dtype, as_stored, aval_shape, matched
from treering._tree.placement import aval_of, sharding_of
from treering.errors import Busy, Corrupt, NotFound, Unsupported

Callback: TypeAlias = Callable[[Any, str], Any]
"""Called as ``callback(array, dotted key)``; what it returns is the leaf."""

_WORDING: Final = Wording("target", "treering.load reads the directory too, and takes more: ")
_SHOWN: Final = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user wants of a branch."""

    said: Said
    """Where its arrays go."""
    reader: ArrayReader | None
    """Reads the arrays that it can."""
    callback: Callback | None
    """Makes the leaf of each array."""
    batch: int | None
    """Arrays that are read at a time; None: all."""
    target: Any
    """A tree that the result shall be like, or None."""
    structure: Literal["dicts", "exact"]
    """The containers of the result, where there is no target."""
    x64: Literal["error", "numpy"]
    """What becomes of 64-bit jax arrays where jax holds none."""
    group: LoadGroup
    """Those who load it together."""


def tree_of(source: LeavesSource, wanted: Wanted) -> Any:
    """Return the tree of an opened branch.

    Raises:
        Mismatch, Unsupported: it cannot be had as it is wanted.
        Corrupt: bytes are damaged or not there.
        Busy: the branch was replaced after the callback had been called.
        StoreFailed: the system refuses.
    """
    index = source.index
    source.check_files()
    part = select(index.structure, index.keys, at=None, only=None)
    if wanted.target is None:
        matches = as_stored(index, part)
        leaves = _leaves(source, matches, _placements(index, part.keys, matches, None, wanted), wanted)
        return build(as_dicts(part.structure) if wanted.structure == "dicts" else part.structure, leaves)
    target = flatten_like(wanted.target)
    matches = matched(
        index, part, target, rename=None, missing="error", cast=False, raw_keys=source.raw_keys, wording=_WORDING
    )
    leaves = _leaves(source, matches, _placements(index, target.keys, matches, target, wanted), wanted)
    return into_like(wanted.target, target, source, part=part, matches=matches, leaves=leaves, called=_WORDING.called)


# -------------------------------------------------------------------------------------------------------- where they go


def _placements(
    index: Index, keys: Sequence[str], matches: list[Matched], target: Flattened | None, wanted: Wanted
) -> list[Any]:
    """Return the sharding of each leaf; None is the default device, or the host for what stays there."""
    avals: dict[str, Any] = {}
    own: dict[str, Any] = {}
    on_host: set[str] = set()
    wide: dict[str, np.dtype[Any]] = {}
    # Thousands of leaves are of a few types.
    known: dict[tuple[int, Fit], _Kind] = {}
    for number, (key, match) in enumerate(zip(keys, matches, strict=True)):
        like = target.leaves[number] if target is not None else None
        leaf_type = index.leaf_types[match.leaf]
        kind = known.get((leaf_type, match.fit))
        if kind is None:
            kind = known[leaf_type, match.fit] = _kind_of(index, match)
        if kind.aval is None or isinstance(like, np.ndarray | np.generic):
            continue
        if not kind.held:
            wide[key] = kind.aval.dtype
            if wanted.x64 == "numpy":
                continue
        avals[key] = kind.aval
        if like is not None:
            own[key] = sharding_of(like)
        if match.fit.kind == "numpy":
            on_host.add(key)
    chosen = leaf_shardings(wanted.said, avals, own=own, on_host=on_host, known=index.keys)
    _require_held({key: wide[key] for key in chosen if key in wide})
    placed: list[Any] = [None] * len(matches)
    for number, key in enumerate(keys):
        match = matches[number]
        placed[number] = chosen.get(key)
        if key in on_host and key in chosen:
            matches[number] = Matched(match.leaf, dataclasses.replace(match.fit, kind="jax"))
    return placed


class _Kind(NamedTuple):
    """What is to be known of leaves of one type."""

    aval: Any
    """Shape and dtype of an array that may go on devices; None for any other leaf."""
    held: bool
    """Whether jax, as it is configured, holds that dtype."""


def _kind_of(index: Index, match: Matched) -> _Kind:
    dtype = array_dtype(index, match)
    if dtype is None:
        return _Kind(None, held=True)
    return _Kind(aval_of(aval_shape(index, match), dtype), held=jax_holds(dtype))


def _require_held(wide: Mapping[str, np.dtype[Any]]) -> None:
    """Refuse arrays that jax would make narrower."""
    if not wide:
        return
    shown = [f"{dotted(key) or '.'} ({dtype.name})" for key, dtype in list(wide.items())[:_SHOWN]]
    more = f" and {len(wide) - _SHOWN} more" if len(wide) > _SHOWN else ""
    raise Unsupported(
        f"jax, as it is configured, cannot hold {', '.join(shown)}{more}, and nothing is cast",
        hint='set jax_enable_x64 for 64-bit numbers, or x64="numpy" for numpy arrays',
    )


# ------------------------------------------------------------------------------------------------------ batch by batch


def _leaves(source: LeavesSource, matches: Sequence[Matched], placements: Sequence[Any], wanted: Wanted) -> list[Any]:
    """Return the leaves of the result: read, checked, placed, and given to the callback."""
    result, deliveries = plan_deliveries(source, matches, placements)
    by_manager = ByManager(wanted.reader, source) if wanted.reader is not None else None
    batches = list(_batches(source.index, deliveries, wanted.batch))
    if by_manager is None:
        wanted.group.agree(source, batches)
    else:
        others = [[delivery for delivery in batch if not by_manager.takes(delivery)] for batch in batches]
        wanted.group.agree(source, others)
    called = False
    try:
        for batch in batches:
            leaves = _brought(source, batch, by_manager, wanted.group)
            for number, delivery in enumerate(batch):
                leaf, leaves[number] = leaves[number], None  # nothing of a batch outlives its callbacks here
                if wanted.callback is not None and _is_array(source.index, delivery):
                    called = True
                    leaf = wanted.callback(leaf, dotted(delivery.key))
                result[delivery.number] = leaf
                del leaf
    except (Corrupt, NotFound) as error:
        if called and not source.is_current():
            raise _replaced(source) from error
        raise
    if called and not source.index.verified and not source.is_current():
        raise _replaced(source)
    return result


def _brought(
    source: LeavesSource, batch: Sequence[Delivery], by_manager: ByManager | None, group: LoadGroup
) -> list[Any]:
    if by_manager is None:
        return group.read_batches(source, batch)
    taken = [delivery for delivery in batch if by_manager.takes(delivery)]
    others = [delivery for delivery in batch if not by_manager.takes(delivery)]
    leaves: dict[int, Any] = {}
    for some, there in (
        (others, group.read_batches(source, others)),
        (taken, by_manager.bring(taken) if taken else []),
    ):
        leaves |= {delivery.number: leaf for delivery, leaf in zip(some, there, strict=True)}
    return [leaves.pop(delivery.number) for delivery in batch]


def _batches(index: Index, deliveries: list[Delivery], most: int | None) -> Iterator[list[Delivery]]:
    """Yield runs of deliveries with so many arrays; long texts, which lie in files too, do not count."""
    if most is None:
        yield deliveries
        return
    batch: list[Delivery] = []
    arrays = 0
    for delivery in deliveries:
        batch.append(delivery)
        arrays += _is_array(index, delivery)
        if arrays == most:
            yield batch
            batch, arrays = [], 0
    if batch:
        yield batch


def _is_array(index: Index, delivery: Delivery) -> bool:
    return index.type_of(delivery.wish.leaf).kind in ARRAY_KINDS


def _replaced(source: LeavesSource) -> Busy:
    return Busy(
        f"{str(source.folder.path)!r} was replaced while it was being read, after `callback` had been called",
        hint="load it again",
    )
