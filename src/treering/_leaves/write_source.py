"""An opened tree -> a leaves directory, a zarr array for each leaf, as eformer reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.writer import Watch
from treering._checkpoint.detect import refuse_other_form
from treering._checkpoint.save_folder import flatten_source
from treering._checkpoint.save_options import SaveOptions
from treering._checkpoint.targets import Loss, lost_leaves, lost_members
from treering._codec.zarr import stored_dtype
from treering._format.index import LeafType
from treering._format.selection import Selection
from treering._leaves.documents.index import LEAVES_INDEX
from treering._leaves.documents.record import MOST_AXES
from treering._leaves.plan import LeavesSaveOptions
from treering._leaves.serialize import serialize_alone
from treering._store.resolve import find_at
from treering._values.human import pluralize
from treering.errors import ExistsError, UnsupportedError


def find_losses(source: Source, part: Selection, metadata: Mapping[str, Any]) -> Iterator[Loss]:
    """Yield the metadata, and arrays that zarr v2 does not have."""
    yield from lost_members(metadata)
    yield from lost_leaves(source, part, _refuse)


def write(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> None:
    """Write the directory, whose record has checksums of its own."""
    if not save.overwrite and find_at(save.path / LEAVES_INDEX) is not None:
        raise ExistsError(f"{save.shown!r} is a leaves directory", hint="overwrite=True replaces its leaves")
    refuse_other_form(save.path, "leaves")
    options = LeavesSaveOptions(progress=save.progress)
    flat, leaves = flatten_source(source, part), describe_source(source, part)
    serialize_alone(save.path, flat, leaves, options, watch=watch, new=not save.overwrite)


def _refuse(kind: LeafType) -> str | None:
    if not kind.stored:
        return None
    try:
        stored_dtype(kind.dtype or "")
    except UnsupportedError:
        return f"an array of {kind.dtype}"
    axes = len(kind.shape or ())
    return f"an array of {pluralize(axes, 'axes')}" if axes > MOST_AXES else None
