"""A tree -> what a save into a leaves directory will write: leaves, folders, layouts. Nothing is written here."""

from __future__ import annotations

import dataclasses
import datetime
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from treering._arrays.outgoing import Outgoing, outgoing
from treering._codec.zarr import stored_dtype
from treering._codec.zarr_chunks import known_compressor
from treering._format.index import LeafType
from treering._format.leaves_record import MOST_AXES, Layout, LeavesRecord
from treering._ops.versions import versions
from treering._plan.leaf_chunks import chunk_shape
from treering._tree.flatten import Flattened, flatten
from treering._values.boxes import Box
from treering._values.dtypes import lookup
from treering._values.keys import split_key
from treering._values.leaf_paths import folder_of, prefix_folder
from treering.errors import Unsupported

__all__ = ["PlannedLeaves", "check_prefix", "planned_leaves"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLeaves:
    """What a save will write, before it has a name and checksums."""

    prefix: str | None
    """The prefix as the user gave it."""
    flat: Flattened
    """The tree."""
    leaves: Outgoing
    """Its leaves."""
    folders: Sequence[str]
    """Folder of each stored leaf, in the order of the leaves."""
    layouts: Sequence[Layout]
    """The different layouts."""
    leaf_layouts: Sequence[int]
    """Number of the layout of each stored leaf."""

    @property
    def nbytes(self) -> int:
        """Bytes of all stored leaves, before any compressor."""
        return sum(source.data.nbytes for sources in self.leaves.sources.values() for source in sources)

    def record(self, attempt: str) -> LeavesRecord:
        """Return the record of this save; sizes and checksums come when the leaves are written."""
        # Saves are put in the order of their times, so seconds would be too coarse.
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        return LeavesRecord(
            prefix=self.prefix,
            attempt=attempt,
            written=versions() | {"at": now},
            meshes=self.leaves.meshes,
            structure=self.flat.tokens,
            keys=self.flat.keys,
            types=self.leaves.types,
            leaf_types=self.leaves.leaf_types,
            values=self.leaves.values,
            folders=self.folders,
            layouts=self.layouts,
            leaf_layouts=self.leaf_layouts,
            sizes=(),
            checksums=array("Q"),
        )


def planned_leaves(
    tree: Any, *, prefix: str | None, compressor: Mapping[str, Any] | None, chunk_bytes: int | None
) -> PlannedLeaves:
    """Describe what will be written; whatever cannot be is refused here.

    Raises:
        Unsupported: a leaf, a key, the prefix, the compressor or the limit of chunks.
    """
    prefix = check_prefix(prefix)
    _check_limit(chunk_bytes)
    codec = None if compressor is None else known_compressor(compressor)
    flat = flatten(tree)
    leaves = outgoing(flat)
    numbers: dict[Layout, int] = {}
    leaf_layouts = [
        numbers.setdefault(layout, len(numbers)) for layout in _layouts(flat.keys, leaves, codec, chunk_bytes)
    ]
    return PlannedLeaves(
        prefix=prefix,
        flat=flat,
        leaves=leaves,
        folders=[folder_of(prefix, flat.keys[number]) for number in leaves.sources],
        layouts=tuple(numbers),
        leaf_layouts=leaf_layouts,
    )


def check_prefix(prefix: object) -> str | None:
    """Return the prefix; the empty one is none.

    Raises:
        Unsupported: it is no text, or cannot be a folder.

    Example:
        >>> check_prefix("model.ema"), check_prefix("")
        ('model.ema', None)
    """
    if prefix is not None and not isinstance(prefix, str):
        raise Unsupported(f"a prefix is a str, found a {type(prefix).__name__}")
    if not prefix:
        return None
    prefix_folder(prefix)
    return prefix


def _check_limit(chunk_bytes: object) -> None:
    if chunk_bytes is not None and (type(chunk_bytes) is not int or chunk_bytes < 1):
        raise Unsupported(f"chunk_bytes is {chunk_bytes!r:.100}, it has to be a number of bytes of at least 1")


def _layouts(keys: Sequence[str], leaves: Outgoing, codec: str | None, limit: int | None) -> Iterator[Layout]:
    """Yield the layout of each stored leaf; leaves of one type that are cut alike have the same one."""
    known: dict[tuple[int, tuple[Box, ...]], Layout] = {}
    for number, sources in leaves.sources.items():
        kind, boxes = leaves.leaf_types[number], tuple(source.box for source in sources)
        layout = known.get((kind, boxes))
        if layout is None:
            try:
                layout = _layout(leaves.types[kind], boxes, codec, limit)
            except Unsupported as error:
                error.path = split_key(keys[number])
                raise
            known[kind, boxes] = layout
        yield layout


def _layout(leaf_type: LeafType, boxes: Sequence[Box], codec: str | None, limit: int | None) -> Layout:
    dtype = lookup(stored_dtype(leaf_type.dtype or ""))
    if dtype is None:
        raise Unsupported(f"zarr v2 has no form for the dtype {leaf_type.dtype}")
    if len(leaf_type.shape or ()) > MOST_AXES:
        raise Unsupported(f"an array of {len(leaf_type.shape or ())} axes; those of zarr v2 have at most {MOST_AXES}")
    return Layout(chunks=chunk_shape(leaf_type.shape or (), boxes, dtype.itemsize, limit), compressor=codec)
