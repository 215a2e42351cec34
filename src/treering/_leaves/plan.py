"""A tree -> what a save into a leaves directory will write: leaves, folders, layouts. Nothing is written here."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import xxhash

from treering._arrays.jobs import Progress
from treering._arrays.outgoing import DescribedLeaves, HeldBoxes
from treering._checkpoint.save_options import HostLocal, versions
from treering._codec.zarr import ZarrArray, stored_dtype
from treering._codec.zarr_chunks import require_known_compressor
from treering._leaves.documents.record import MOST_AXES, ChunkLayout, LeavesRecord, folder_of, prefix_folder
from treering._plan.save import LeafLayout
from treering._printable import kind_of
from treering._tree.flatten import Flattened
from treering._values.boxes import Box, shape_of, size_of
from treering._values.dtypes import itemsize_of
from treering._values.human import pluralize
from treering._values.keys import naming_leaf
from treering.errors import UnsupportedError

_MOST_TRIES: Final = 1 << 12
# With chunks of a tenth of a share at most, the busiest has at most 1.10 shares.
_PARTS_OF_SHARE: Final = 10
_SMALLEST: Final = 1 << 20


class ArrayManager(Protocol):
    """What writes arrays in the background, such as jax's ``GlobalAsyncCheckpointManager``."""

    def serialize_with_paths(
        self, arrays: Sequence[Any], paths: Sequence[str], *, on_commit_callback: Callable[[], None]
    ) -> object:
        """Begin to write arrays, each into the folder of its path, and call back when they are there."""

    def wait_until_finished(self) -> object:
        """Wait for what was begun; raise what went wrong."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavesSaveOptions:
    """What a save goes by; ``treering.leaves.tree_serialize_leaves`` says what each option means."""

    prefix: str | None = None
    """Name of the tree."""
    write_index: bool = True
    """Whether the index is to name it."""
    compressor: Mapping[str, Any] | None = None
    """The compressor of the chunks."""
    chunk_bytes: int | None = None
    """The largest chunk."""
    host_local: HostLocal = "first"
    """Where leaves come from that each process holds alone."""
    commit_callback: Callable[[], object] | None = None
    """Called by process 0."""
    progress: Progress | None = None
    """Called with the bytes that this process has written."""
    manager: ArrayManager | None = None
    """What writes jax arrays, if it is not treering."""
    processes: Literal["all", "this"] = "all"
    """Which processes of a job save the tree."""
    timeout: float = 600.0
    """Seconds to wait at one point for other processes."""

    def digest(self) -> bytes:
        """Return a few bytes that are the same on all processes that are given the same arguments."""
        codec = None if self.compressor is None else sorted(self.compressor.items(), key=repr)
        asked = (self.prefix or None, self.write_index, codec, self.chunk_bytes, self.host_local, self.manager is None)
        return xxhash.xxh3_64_digest(repr(asked).encode("utf-8", "surrogatepass"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLeaves:
    """What a save will write, before it has a name and checksums."""

    flat: Flattened
    """The tree."""
    leaves: DescribedLeaves
    """Its leaves."""
    folders: Sequence[str]
    """Folder of each stored leaf, in the order of the leaves."""
    draft: LeavesRecord
    """The record of all leaves, without attempt, time, sizes and checksums."""

    @property
    def nbytes(self) -> int:
        """Bytes of all stored leaves, before any compressor."""
        return sum(source.data.nbytes for sources in self.leaves.sources.values() for source in sources)

    def without(self, numbers: Container[int], arrays: Sequence[ZarrArray]) -> tuple[PlannedLeaves, list[ZarrArray]]:
        """Return the plan of all other leaves, and their arrays out of those of all stored leaves."""
        rows = zip(self.leaves.sources.items(), self.folders, arrays, strict=True)
        kept = [row for row in rows if row[0][0] not in numbers]
        leaves = dataclasses.replace(self.leaves, sources=dict(row[0] for row in kept))
        return dataclasses.replace(self, leaves=leaves, folders=[row[1] for row in kept]), [row[2] for row in kept]

    def record(self, attempt: str) -> LeavesRecord:
        """Return the record of this save; sizes and checksums come when the leaves are written."""
        # Saves are put in the order of their times, so seconds would be too coarse.
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
        written = {**versions(), "at": now, **self.draft.written}
        return dataclasses.replace(self.draft, attempt=attempt, written=written)


def plan_leaves(
    flat: Flattened, leaves: DescribedLeaves, options: LeavesSaveOptions, *, processes: int = 1
) -> PlannedLeaves:
    """Describe what will be written; whatever cannot be is refused here.

    Args:
        flat: the tree.
        leaves: its leaves.
        options: the options of the save.
        processes: how many processes save it together.

    Raises:
        UnsupportedError: a leaf, a key, the prefix, the compressor or the limit of chunks.
    """
    prefix = options.prefix
    if not isinstance(prefix, str | None):
        raise UnsupportedError(f"a prefix is a str, found {kind_of(prefix)}")
    if prefix:
        prefix_folder(prefix)
    numbers: dict[ChunkLayout, int] = {}
    found = _plan_layouts(leaves, flat.keys, options, processes)
    leaf_layouts = [numbers.setdefault(layout, len(numbers)) for layout in found]
    folders = [folder_of(prefix, flat.keys[number]) for number in leaves.sources]
    draft = LeavesRecord(
        prefix=prefix or None,
        written={"processes": processes} if processes > 1 else {},
        meshes=leaves.meshes,
        structure=flat.tokens,
        keys=flat.keys,
        types=leaves.types,
        leaf_types=leaves.leaf_types,
        values=leaves.values,
        folders=folders,
        layouts=tuple(numbers),
        leaf_layouts=leaf_layouts,
        structured=flat.structured,
    )
    return PlannedLeaves(flat=flat, leaves=leaves, folders=folders, draft=draft)


def shared_boxes(leaves: DescribedLeaves, number: int) -> HeldBoxes | None:
    """Return who holds which box of a leaf that lies with other processes than process 0; None for all other leaves.

    Those are process 0's alone to write, however this process would cut what it has in their place.
    """
    held = leaves.spread.get(number)
    return None if held is None or all(owners == (0,) for _, owners in held) else held


def _plan_layouts(
    leaves: DescribedLeaves, keys: Sequence[str], options: LeavesSaveOptions, processes: int
) -> Iterator[ChunkLayout]:
    """Yield the layout of each stored leaf; leaves of one type that are cut alike have the same one."""
    limit = options.chunk_bytes
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UnsupportedError(f"chunk_bytes is {limit!r:.100}, but must be a number of bytes of at least 1")
    codec = None if options.compressor is None else require_known_compressor(options.compressor)
    # Chunks that several processes could write are small enough for them to share the work.
    balanced = limit
    if processes > 1:
        least = balanced_chunk([leaves.layout_of(number) for number in leaves.sources], processes)
        balanced = least if limit is None else min(least, limit)
    known: dict[tuple[int, object], ChunkLayout] = {}
    for number, sources in leaves.sources.items():
        kind, held = leaves.leaf_types[number], shared_boxes(leaves, number)
        boxes = tuple(source.box for source in sources)
        key = (kind, boxes if held is None else id(held))
        if key not in known:
            shape = leaves.types[kind].shape or ()
            with naming_leaf(keys[number]):
                itemsize = itemsize_of(stored_dtype(leaves.types[kind].dtype or ""))
                if len(shape) > MOST_AXES:
                    axes = pluralize(len(shape), "axes")
                    raise UnsupportedError(f"an array of {axes}; those of zarr v2 have at most {MOST_AXES}")
            if held is None:
                chunks = chunk_shape(shape, boxes, itemsize, limit)
            else:
                most = balanced if any(len(owners) > 1 for _, owners in held) else limit
                chunks = shared_chunk_shape(shape, [box for box, _ in held], itemsize, most)
            known[key] = ChunkLayout(chunks=chunks, compressor=codec)
        yield known[key]


# --------------------------------------------------------------------------------------------------------------- chunks


def chunk_shape(shape: tuple[int, ...], boxes: Sequence[Box], itemsize: int, limit: int | None) -> tuple[int, ...]:
    """Return the shape of a leaf's chunks; those at the end of an axis may reach beyond it.

    One chunk is one box of the sharding where the boxes are a grid of equal ones (the last of an axis may be
    smaller); else the whole array is one chunk. Where a chunk is larger than ``limit``, it is cut along the leading
    axes: into equal parts of a box, as far as that makes no chunk smaller than half of what is allowed.

    Args:
        shape: of the leaf.
        boxes: the distinct boxes of its sharding, in any order.
        itemsize: bytes of an item.
        limit: bytes of a chunk, at most (a single item may be larger); None: no limit.

    Example:
        >>> quarters = [((0, 4), (0, 3)), ((0, 4), (3, 6)), ((4, 8), (0, 3)), ((4, 8), (3, 6))]
        >>> chunk_shape((8, 6), quarters, 4, None), chunk_shape((8, 6), quarters[:1], 4, None)
        ((4, 3), (8, 6))
        >>> chunk_shape((8, 6), quarters, 4, 24)
        (2, 3)
    """
    chunks = _grid_chunk(shape, boxes)
    if limit is not None:
        chunks = _cut(shape, chunks, itemsize, limit)
    return tuple(max(length, 1) for length in chunks)


def shared_chunk_shape(
    shape: tuple[int, ...], boxes: Sequence[Box], itemsize: int, limit: int | None
) -> tuple[int, ...]:
    """Return the shape of the chunks of a leaf that lies with several processes: no chunk reaches over a box's end.

    As `chunk_shape`, but a box is only cut into parts that divide it, even if those are smaller than half of what is
    allowed, or, where a length has no fitting divisor, larger.

    Args:
        shape: of the leaf.
        boxes: the distinct boxes of its sharding, in any order.
        itemsize: bytes of an item.
        limit: bytes of a chunk; None: no limit.

    Example:
        >>> halves = [((0, 23), (0, 8)), ((23, 46), (0, 8))]
        >>> chunk_shape((46, 8), halves, 1, 80), shared_chunk_shape((46, 8), halves, 1, 80)
        ((10, 8), (23, 3))
    """
    # Where XLA pads, the last boxes may be empty.
    chunk = _grid_chunk(shape, [box for box in boxes if size_of(box)])
    cut = [max(length, 1) for length in chunk]
    if 0 in shape:
        return tuple(cut)
    # At first cuts that leave about as much as is allowed, then any that there are.
    for least in (2, math.inf):
        for axis, length in enumerate(chunk):
            others = math.prod(cut[:axis] + cut[axis + 1 :]) * itemsize
            if limit is None or cut[axis] * others <= limit:
                return tuple(cut)
            row = math.prod(cut[axis + 1 :]) * itemsize
            most = max(limit // others, 1)
            part = _divisor(cut[axis], most) if length < shape[axis] else -(-length // -(-length // most))
            if row > limit:
                cut[axis] = 1
            elif part is not None and others <= limit * (least - 1) and most < least * part:
                cut[axis] = part
    return tuple(cut)


def _divisor(length: int, most: int) -> int | None:
    """Return the largest divisor that is at most ``most``, as far as it is found in time."""
    fewest = -(-length // most)
    counts = range(fewest, min(length, fewest + _MOST_TRIES) + 1)
    return next((length // count for count in counts if length % count == 0), None)


def _grid_chunk(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[int, ...]:
    distinct = set(boxes)
    if not distinct or 0 in shape:
        return shape
    lengths = [shape_of(box) for box in distinct]
    chunk = tuple(map(max, zip(*lengths, strict=True)))
    if 0 in chunk:
        return shape
    for box in distinct:
        for (start, stop), size, length in zip(box, shape, chunk, strict=True):
            if start % length or stop != min(start + length, size):
                return shape
    grid = math.prod(-(-size // length) for size, length in zip(shape, chunk, strict=True))
    return chunk if len(distinct) == grid else shape


def _cut(shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int, limit: int) -> tuple[int, ...]:
    """Make a chunk smaller along its leading axes until it takes ``limit`` bytes at most."""
    cut = list(chunk)
    for axis, length in enumerate(chunk):
        step = math.prod(chunk[axis + 1 :]) * itemsize
        if length * step <= limit:
            break
        cut[axis] = _part(shape[axis], length, max(limit // step, 1))
        if step <= limit:
            break
    return tuple(cut)


def _part(size: int, length: int, most: int) -> int:
    """Return how long the parts of a box of ``length`` are, ``most`` at most, along an axis of ``size``."""
    # Where more boxes follow along this axis, parts that divide a box lie in one box each.
    if length < size and (part := _divisor(length, most)) is not None and 2 * part >= most:
        return part
    # As few parts as can be, about equally long, so that the last one is hardly padded.
    return -(-size // -(-size // most))


def balanced_chunk(layouts: Sequence[LeafLayout], processes: int) -> int:
    """Return how many bytes a chunk that several processes hold may have, so that writing can be balanced.

    Example:
        >>> leaf = LeafLayout(nbytes_per_item=4, shape=(1 << 24,), boxes=((((0, 1 << 24),), (0, 1)),))
        >>> balanced_chunk([leaf], 2), balanced_chunk([leaf], 64)
        (3355443, 1048576)
    """
    total = sum(math.prod(layout.shape) * layout.nbytes_per_item for layout in layouts)
    return max(total // (processes * _PARTS_OF_SHARE), _SMALLEST)
