"""A tree -> what a save into a leaves directory will write: leaves, folders, layouts. Nothing is written here."""

from __future__ import annotations

import dataclasses
import datetime
from array import array
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from treering._arrays.outgoing import HeldBoxes, Outgoing
from treering._checkpoint.versions import versions
from treering._codec.compressors import known_compressor
from treering._codec.zarr import stored_dtype
from treering._format.index import LeafType
from treering._leaves.chunks.leaf_chunks import chunk_shape, shared_chunk_shape
from treering._leaves.chunks.leaf_writers import balanced_chunk
from treering._leaves.documents.paths import folder_of, prefix_folder
from treering._leaves.documents.record import MOST_AXES, Layout, LeavesRecord
from treering._printable import kind_of
from treering._tree.flatten import Flattened
from treering._values.boxes import Box
from treering._values.dtypes import lookup
from treering._values.human import counted
from treering._values.keys import split_key
from treering.errors import Unsupported


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
    processes: int = 1
    """How many processes save it together."""

    @property
    def nbytes(self) -> int:
        """Bytes of all stored leaves, before any compressor."""
        return sum(source.data.nbytes for sources in self.leaves.sources.values() for source in sources)

    def without(self, numbers: Container[int]) -> PlannedLeaves:
        """Return the plan of all other leaves."""
        rows = list(zip(self.leaves.sources, self.folders, self.leaf_layouts, strict=True))
        kept = [row for row in rows if row[0] not in numbers]
        sources = {number: self.leaves.sources[number] for number, _, _ in kept}
        return dataclasses.replace(
            self,
            leaves=dataclasses.replace(self.leaves, sources=sources),
            folders=[folder for _, folder, _ in kept],
            leaf_layouts=[layout for _, _, layout in kept],
        )

    def record(self, attempt: str) -> LeavesRecord:
        """Return the record of this save; sizes and checksums come when the leaves are written."""
        # Saves are put in the order of their times, so seconds would be too coarse.
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        together = {"processes": self.processes} if self.processes > 1 else {}
        return LeavesRecord(
            prefix=self.prefix,
            attempt=attempt,
            written=versions() | {"at": now} | together,
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
    flat: Flattened,
    leaves: Outgoing,
    *,
    prefix: str | None,
    compressor: Mapping[str, Any] | None,
    chunk_bytes: int | None,
    processes: int = 1,
) -> PlannedLeaves:
    """Describe what will be written; whatever cannot be is refused here.

    Args:
        flat: the tree.
        leaves: its leaves.
        prefix: as the user gave it.
        compressor: as the user gave it.
        chunk_bytes: the largest chunk, as the user gave it.
        processes: how many save it together.

    Raises:
        Unsupported: a leaf, a key, the prefix, the compressor or the limit of chunks.
    """
    prefix = check_prefix(prefix)
    _check_limit(chunk_bytes)
    codec = None if compressor is None else known_compressor(compressor)
    cut = _Cut(leaves, codec, chunk_bytes, processes)
    numbers: dict[Layout, int] = {}
    leaf_layouts = [numbers.setdefault(layout, len(numbers)) for layout in cut.layouts(flat.keys)]
    return PlannedLeaves(
        prefix=prefix,
        flat=flat,
        leaves=leaves,
        folders=[folder_of(prefix, flat.keys[number]) for number in leaves.sources],
        layouts=tuple(numbers),
        leaf_layouts=leaf_layouts,
        processes=processes,
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
        raise Unsupported(f"a prefix is a str, found {kind_of(prefix)}")
    if not prefix:
        return None
    prefix_folder(prefix)
    return prefix


def _check_limit(chunk_bytes: object) -> None:
    if chunk_bytes is not None and (type(chunk_bytes) is not int or chunk_bytes < 1):
        raise Unsupported(f"chunk_bytes is {chunk_bytes!r:.100}, it has to be a number of bytes of at least 1")


def held_together(leaves: Outgoing, number: int) -> HeldBoxes | None:
    """Return who holds which box of a leaf that lies with other processes than process 0; None for all other leaves.

    Those are process 0's alone to write, however this process would cut what it has in their place.
    """
    held = leaves.spread.get(number)
    return None if held is None or all(owners == (0,) for _, owners in held) else held


class _Cut:
    """How the leaves of one save are cut into chunks."""

    def __init__(self, leaves: Outgoing, codec: str | None, limit: int | None, processes: int) -> None:
        self._leaves = leaves
        self._codec = codec
        self._limit = limit
        self._balanced = limit
        if processes > 1:
            least = balanced_chunk([leaves.layout_of(number) for number in leaves.sources], processes)
            self._balanced = least if limit is None else min(least, limit)

    def layouts(self, keys: Sequence[str]) -> Iterator[Layout]:
        """Yield the layout of each stored leaf; leaves of one type that are cut alike have the same one."""
        leaves = self._leaves
        known: dict[tuple[int, object], Layout] = {}
        for number, sources in leaves.sources.items():
            kind, held = leaves.leaf_types[number], held_together(leaves, number)
            boxes = tuple(source.box for source in sources)
            key = (kind, boxes if held is None else id(held))
            layout = known.get(key)
            if layout is None:
                try:
                    layout = known[key] = self._layout(leaves.types[kind], boxes, held)
                except Unsupported as error:
                    error.path = split_key(keys[number])
                    raise
            yield layout

    def _layout(self, leaf_type: LeafType, boxes: Sequence[Box], held: HeldBoxes | None) -> Layout:
        dtype = lookup(stored_dtype(leaf_type.dtype or ""))
        if dtype is None:
            raise Unsupported(f"zarr v2 has no form for the dtype {leaf_type.dtype}")
        shape = leaf_type.shape or ()
        if len(shape) > MOST_AXES:
            raise Unsupported(f"an array of {counted(len(shape), 'axes')}; those of zarr v2 have at most {MOST_AXES}")
        if held is None:
            chunks = chunk_shape(shape, boxes, dtype.itemsize, self._limit)
        else:
            # What several processes could write is cut fine enough for them to share it.
            limit = self._balanced if any(len(owners) > 1 for _, owners in held) else self._limit
            chunks = shared_chunk_shape(shape, [box for box, _ in held], dtype.itemsize, limit)
        return Layout(chunks=chunks, compressor=self._codec)
