"""A stored tree -> the tree, or the part of it that is wanted, where it is wanted."""

from __future__ import annotations

import dataclasses
import operator
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import numpy as np

from treering._arrays.delivered import Delivery, delivered, turned, wish_for
from treering._arrays.host import jax_holds
from treering._arrays.incoming import Progress
from treering._arrays.source import Source
from treering._format.blocks import leaf_bytes
from treering._format.index import Index
from treering._format.selection import Selection, select
from treering._format.structure import build
from treering._ops.source import opened_source, require_path
from treering._tree.fit import Fit, stored_dtype
from treering._tree.flatten import Flattened, flatten_like, opaque_of
from treering._tree.likeness import KEPT, Matched, matched
from treering._tree.placement import Shardings, aval_of, resolved
from treering._tree.unflatten import rebuilt, static_differences
from treering.errors import KeptOnHost, StaticFieldsDiffer, Unsupported

__all__ = ["load"]

# Arrays are read and placed about this many bytes at a time: host copies of device arrays do not add up.
_BATCH_BYTES: Final = 256 << 20
_SHOWN: Final = 20


def load(
    path: str | os.PathLike[str],
    like: Any,
    *,
    only: str | Sequence[str] | None,
    at: str | None,
    shardings: Shardings,
    mesh: Any,
    rename: Mapping[str, str] | None,
    missing: Literal["error", "keep"],
    cast: bool,
    mapped: bool,
    progress: Progress | None,
) -> Any:
    """Return the tree at ``path``; ``treering.load`` says what the arguments mean."""
    _require_sense(like, only=only, at=at, rename=rename, missing=missing, cast=cast)
    require_path(path)
    with opened_source(path, mapped=mapped) as source:
        index = source.index
        if at is None and only is None:
            source.check_files()  # also those that hold nothing: all of it was asked for
        part = select(index.structure, index.keys, at=at, only=only)
        known = select(index.structure, index.keys, at=at, only=None).keys
        asked = _Asked(shardings=shardings, mesh=mesh, known=known)
        if like is None:
            fits = [Fit(leaf_type.kind, impl=leaf_type.impl) for leaf_type in index.types]
            matches = [Matched(leaf, fits[index.leaf_types[leaf]]) for leaf in part.leaves]
            placements = _placements(index, part.keys, matches, None, asked)
            return build(part.structure, _leaves(source, matches, placements, progress))
        target = flatten_like(like)
        matches = matched(index, part, target, rename=rename, missing=missing, cast=cast, raw_keys=source.raw_keys)
        placements = _placements(index, target.keys, matches, target, asked)
        leaves = _leaves(source, matches, placements, progress)
    for number, (match, kind) in enumerate(zip(matches, target.kinds, strict=True)):
        if match.fit is KEPT or kind == "opaque":
            leaves[number] = target.leaves[number]
    if source.structured:
        _report_static(index, part, target, matches)
    return rebuilt(like, leaves)


def _require_sense(like: Any, *, only: Any, at: Any, rename: Any, missing: str, cast: bool) -> None:
    """Refuse arguments of the wrong kind by their names, before anything is opened."""
    globs = only if isinstance(only, list | tuple) else () if only is None else (only,)
    if not all(isinstance(glob, str) for glob in globs):
        raise Unsupported(f"only= is a glob or a list of globs, found {only!r:.100}")
    if not isinstance(at, str | None):
        raise Unsupported(f"at= is one key text, found {at!r:.100}")
    if not isinstance(rename, Mapping | None):
        raise Unsupported(f"rename= is a dict of wanted to stored keys, found {rename!r:.100}")
    if missing not in ("error", "keep"):
        raise Unsupported(f'missing={missing!r} is neither "error" nor "keep"')
    if like is None and (rename or cast or missing == "keep"):
        raise Unsupported("rename=, cast= and missing= say how stored leaves fit `like`, and there is none")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What the user said of devices."""

    shardings: Shardings
    """``shardings=``."""
    mesh: Any
    """``mesh=``."""
    known: Sequence[str]
    """Every key of the checkpoint's part."""


def _placements(
    index: Index, keys: Sequence[str], matches: list[Matched], target: Flattened | None, asked: _Asked
) -> list[Any]:
    """Return the sharding of each leaf; None is the default device, or the host for what stays there."""
    placed: list[Any] = [None] * len(matches)
    explicit = asked.shardings is not None or asked.mesh is not None
    avals: dict[str, Any] = {}
    too_wide: list[str] = []
    holds: dict[np.dtype[Any], bool] = {}
    for number, match in enumerate(matches):
        like = target.leaves[number] if target is not None else None
        dtype = _array_dtype(index, match) if explicit or like is not None else None
        if dtype is None or isinstance(like, np.ndarray | np.generic):
            continue
        if dtype not in holds:
            holds[dtype] = jax_holds(dtype)
        if not holds[dtype]:
            if explicit and match.fit.kind == "jax":
                too_wide.append(f"{keys[number]} ({dtype.name})")
            continue
        if explicit:
            avals[keys[number]] = aval_of(_aval_shape(index, match), dtype)
        elif match.fit.kind in ("jax", "key"):
            placed[number] = _like_placement(like)
    if explicit:
        chosen = resolved(asked.shardings, asked.mesh, avals, [*keys, *asked.known])
        for number, key in enumerate(keys):
            placed[number] = chosen.get(key)
            match = matches[number]
            if placed[number] is not None and match.fit.kind == "numpy":
                matches[number] = Matched(match.leaf, dataclasses.replace(match.fit, kind="jax"))
    if too_wide:
        _warn("jax_enable_x64 is off, so these stay numpy arrays of full width on the host", too_wide, KeptOnHost)
    return placed


def _array_dtype(index: Index, match: Matched) -> np.dtype[Any] | None:
    if match.fit is KEPT or match.fit.kind not in ("jax", "key", "numpy"):
        return None
    if match.fit.dtype is not None:
        return match.fit.dtype
    return stored_dtype(index.type_of(match.leaf))


def _aval_shape(index: Index, match: Matched) -> tuple[int, ...]:
    shape = index.type_of(match.leaf).shape or ()
    return shape[:-1] if match.fit.kind == "key" else shape


def _like_placement(like: Any) -> Any:
    """Return where ``like``'s array lies; an array that jax may move freely stays one."""
    sharding = getattr(like, "sharding", None)
    return sharding if sharding is not None and getattr(like, "committed", True) else None


def _leaves(
    source: Source, matches: Sequence[Matched], placements: Sequence[Any], progress: Progress | None
) -> list[Any]:
    """Return the leaves of the result: read, checked and placed."""
    index = source.index
    result: list[Any] = [None] * len(matches)
    deliveries: list[Delivery] = []
    for number, (match, sharding) in enumerate(zip(matches, placements, strict=True)):
        if match.fit is KEPT:
            continue
        leaf_type = index.type_of(match.leaf)
        if leaf_type.stored:
            shape = leaf_type.shape or ()
            wish = wish_for(match.leaf, shape, sharding)
            deliveries.append(Delivery(number, index.keys[match.leaf], wish, shape, match.fit, sharding))
        else:
            result[number] = turned(index.values[match.leaf], match.fit, sharding)
    by_type = list(map(leaf_bytes, index.types))
    sizes = [by_type[index.leaf_types[delivery.wish.leaf]] for delivery in deliveries]
    report = _Report(progress, sum(sizes))
    # A map is no copy: nothing adds up.
    for batch, nbytes in _batches(deliveries, sizes, sum(sizes) if source.mapped else _BATCH_BYTES):
        source.read([delivery.wish for delivery in batch], report.step)
        report.add(nbytes)
        for delivery, leaf in zip(batch, delivered(batch, mapped=source.mapped), strict=True):
            result[delivery.number] = leaf
    return result


class _Report:
    """Adds the batches up for the user's ``progress``, which counts the bytes of the leaves."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._before = 0
        self.step: Progress | None = self._step if progress else None

    def _step(self, done: int, batch: int) -> None:
        del batch
        if self._progress is not None:
            self._progress(min(self._before + done, self._total), self._total)

    def add(self, nbytes: int) -> None:
        self._before += nbytes


def _batches(deliveries: Sequence[Delivery], sizes: Sequence[int], most: int) -> Iterator[tuple[list[Delivery], int]]:
    """Yield runs of deliveries of some ``most`` bytes, and the bytes of each run."""
    batch: list[Delivery] = []
    held = 0
    for delivery, nbytes in zip(deliveries, sizes, strict=True):
        batch.append(delivery)
        held += nbytes
        if held >= most:
            yield batch, held
            batch, held = [], 0
    if batch:
        yield batch, held


def _report_static(index: Index, part: Selection, target: Flattened, matches: Sequence[Matched]) -> None:
    """Warn where functions and static fields of ``like`` are others than those that were saved."""
    same = len(part.structure) == len(target.tokens) and all(map(operator.eq, part.structure, target.tokens))
    lines = [] if same else static_differences(part.structure, target.tokens)
    for key, kind, leaf, match in zip(target.keys, target.kinds, target.leaves, matches, strict=True):
        if kind == "opaque" and match.fit is not KEPT:
            saved, here = index.values[match.leaf], opaque_of(leaf)
            if saved != here:
                lines.append(f"{key}: saved as {saved.text}, like has {here.text}")
    if lines:
        _warn("what lies in no file comes from `like`, and differs from what was saved", lines, StaticFieldsDiffer)


def _warn(what: str, lines: Sequence[str], category: type[UserWarning]) -> None:
    more = f"\n  ... and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    shown = "\n  ".join(lines[:_SHOWN])
    # Past our own frames, to the line that called treering.load.
    warnings.warn(f"{what}:\n  {shown}{more}", category, stacklevel=5)
