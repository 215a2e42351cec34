"""How arrays are cut into boxes: the different ways, each with its leaves counted, from the index alone."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any, Final

from treering._checkpoint.forms import read_checkpoint_index
from treering._format.document import parse_index
from treering._format.index import Index, leaf_bytes
from treering._format.listing import LeafRecord, Listing
from treering._store.resolve import located
from treering._values.human import bytes_text
from treering._view.plain import visible
from treering._view.rows import leaves_of

_MOST_WAYS: Final = 24
_MOST_BOXES: Final = 1024


@dataclasses.dataclass(slots=True)
class _Way:
    """One way of cutting arrays of one shape."""

    shape: tuple[int, ...]
    boxes: list[list[int]]
    """Of each box the first and the last + 1 of each axis, one after the other."""
    writers: list[int]
    """The process that wrote each box; empty where it was one."""
    sharding: str
    example: str
    leaves: int = 0
    nbytes: int = 0


def list_splits(path: str | os.PathLike[str], listing: Listing) -> list[dict[str, Any]]:
    """Return the ways in which arrays are cut into several boxes, the one with the most bytes first.

    Args:
        path: the checkpoint, leaves directory or file.
        listing: what its headers say.

    Raises:
        CorruptError, StoreError: the index cannot be read.
    """
    records = [(key, leaf) for key, leaf in leaves_of(listing.root) if isinstance(leaf, LeafRecord) and leaf.chunks > 1]
    if not records:
        return []
    data = read_checkpoint_index(located(path))
    ways = _from_index(parse_index(data)) if data is not None else _from_records(records)
    ways = sorted(ways, key=lambda way: -way.nbytes)[:_MOST_WAYS]
    return [dataclasses.asdict(way) | {"bytes": bytes_text(way.nbytes), "mesh": list(listing.meshes)} for way in ways]


def _from_index(index: Index) -> list[_Way]:
    ways: dict[Any, _Way] = {}
    chunks, at, count = index.chunks, 0, len(index.chunks)
    while at < count:
        leaf, first = chunks.leaf[at], at
        while at < count and chunks.leaf[at] == leaf:
            at += 1
        if at - first == 1 or at - first > _MOST_BOXES:
            continue
        kind = index.type_of(leaf)
        boxes = tuple(index.box_of(row) for row in range(first, at))
        writers = tuple(index.files[chunks.file[row]].process for row in range(first, at))
        if (way := ways.get((kind, boxes, writers))) is None:
            flat = [[side for pair in box for side in pair] for box in boxes]
            known = [each for each in writers if each is not None]
            way = _Way(kind.shape or (), flat, known, visible(kind.sharding or ""), visible(index.keys[leaf], 300))
            ways[kind, boxes, writers] = way
        way.leaves += 1
        way.nbytes += leaf_bytes(kind)
    return list(ways.values())


def _from_records(records: list[tuple[str, LeafRecord]]) -> list[_Way]:
    """Cut arrays into chunks of one shape, as zarr does."""
    ways: dict[Any, _Way] = {}
    for key, leaf in records:
        shape, chunk = leaf.shape or (), leaf.chunk_shape
        if chunk is None or not all(chunk) or math.prod(map(_parts, shape, chunk)) > _MOST_BOXES:
            continue
        if (way := ways.get((shape, chunk))) is None:
            boxes: list[list[int]] = [[]]
            for length, step in zip(shape, chunk, strict=True):
                sides = [[start, min(start + step, length)] for start in range(0, length, step)]
                boxes = [[*box, *side] for box in boxes for side in sides]
            way = ways[shape, chunk] = _Way(shape, boxes, [], f"chunks of {list(chunk)}", visible(key, 300))
        way.leaves += 1
        way.nbytes += leaf.nbytes
    return list(ways.values())


def _parts(length: int, step: int) -> int:
    return -(-length // step)
