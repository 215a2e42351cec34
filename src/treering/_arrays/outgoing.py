"""Leaves on their way into files: what each one is, the boxes that it is cut into, and their checked bytes.

A leaf that lies over several processes is described by its shape and its sharding, so each of them comes to the same
boxes and owners by itself. A leaf that a process holds alone is process 0's.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import numpy as np
import xxhash

from treering._arrays.host import (
    TOGETHER,
    BoxedArray,
    CastArray,
    HostCopies,
    cut_box,
    join_arrays,
    parts_of,
    read_checked,
    require_alive,
    shards_of,
)
from treering._arrays.jobs import Progress
from treering._format.document import data_name
from treering._format.index import ARRAY_KINDS, LARGE_VALUE, Chunks, DataFile, LeafType, leaf_bytes
from treering._format.safetensors import Row, lay_out_files
from treering._format.selection import choose_dtypes
from treering._plan.increment import row_bytes
from treering._plan.save import FILE_BYTES, LeafLayout, SavePlan, file_counts, files_by_position, plan_save
from treering._store.memory_pool import MemoryPool
from treering._tree.flatten import Flattened
from treering._values.arguments import require_part
from treering._values.boxes import Box, box_of_slices, contains, held_boxes, whole
from treering._values.casts import float_dtypes
from treering._values.checksums import SMALLEST_BLOCK, block_count
from treering._values.dtypes import check_writable, lookup, numpy_dtype
from treering._values.keys import split_key
from treering._values.processes import Processes, failure_of
from treering.errors import TreeringError, UnsupportedError

# Small arrays are read together, so many bytes and so many arrays at once.
_RUN_BYTES: Final = 256 << 10
_RUN_CHUNKS: Final = 1024
# What is read twice keeps so many bytes from the first time, of arrays that are so small: a second reading of larger
# ones costs little beside what their bytes cost anyway.
_KEPT_BYTES: Final = 16 << 20
_KEPT_LEAF_BYTES: Final = 8 << 10

ALONE: Final = Processes(this=0, count=1)
"""A process that saves what it holds, without others."""

HeldBoxes: TypeAlias = tuple[tuple[Box, tuple[int, ...]], ...]
"""The distinct boxes of a leaf, each with the processes that hold it."""


class HeldBox(NamedTuple):
    """A box of a leaf and the array that holds it."""

    box: Box
    """Which box."""
    data: Any
    """The array of just that box, on a device or on the host."""


class LeafSources(Mapping[int, tuple[HeldBox, ...]]):
    """Leaf number -> its distinct boxes that this process holds: columns, in which most leaves have no object.

    Args:
        whole: the leaves that lie here in one piece, each with its array.
        parted: all others that lie in files, each with its boxes; none where nothing of a leaf is here.

    Example:
        >>> sources = LeafSources({0: np.zeros(3), 2: np.zeros(2)}, {1: ()})
        >>> list(sources), sources[2][0].box
        ([0, 1, 2], ((0, 2),))
    """

    def __init__(self, whole: Mapping[int, Any], parted: Mapping[int, tuple[HeldBox, ...]] | None = None) -> None:
        self.whole: Final = whole
        self.parted: Final = parted or {}
        self._order = sorted([*whole, *self.parted])

    def __getitem__(self, leaf: int) -> tuple[HeldBox, ...]:
        return self.parted[leaf] if (data := self.whole.get(leaf)) is None else (HeldBox(whole(data.shape), data),)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)


class Cast(NamedTuple):
    """What a leaf is cast to on its way into a file."""

    dtype: np.dtype[Any]
    """The dtype that is written."""
    key: str
    """Its key."""


@dataclasses.dataclass(frozen=True, slots=True)
class SavedPart:
    """What of a tree is saved, and which floats are written in another dtype."""

    only: tuple[str, ...] | None = None
    """The globs that keep leaves; None keeps all."""
    dtypes: tuple[tuple[str | None, str | None], ...] = ()
    """Globs and names of dtypes, of which the first that matches counts; None for every leaf, and for its own dtype."""

    @classmethod
    def of(cls, only: object, dtype: object) -> SavedPart:
        """Return what the arguments of ``treering.save`` say.

        Raises:
            UnsupportedError: one of them has no meaning.

        Example:
            >>> SavedPart.of("**/lora", {"head": "float32", "**": np.float16})
            SavedPart(only=('**/lora',), dtypes=(('head', 'float32'), ('**', 'float16')))
        """
        if only is None and dtype is None:
            return WHOLE
        require_part(None, only)
        globs: Any = (only,) if isinstance(only, str) else only
        return cls(None if globs is None else tuple(globs), float_dtypes(dtype))


WHOLE: Final = SavedPart()
"""All of a tree, as it is."""


def cast_leaves(flat: Flattened, leaves: DescribedLeaves, part: SavedPart) -> DescribedLeaves:
    """Return described leaves of which some are cast when they are read.

    Raises:
        MismatchError: nothing matches a glob.
    """
    types = [leaves.types[number] for number in leaves.leaf_types]
    chosen = choose_dtypes(flat.tokens, flat.keys, types, part.dtypes)
    if not chosen:
        return leaves
    numbers: dict[LeafType, int] = {}
    for number, name in chosen.items():
        types[number] = dataclasses.replace(types[number], dtype=name)
    known = {name: numpy_dtype(found) for name in chosen.values() if (found := lookup(name)) is not None}
    casts = {number: Cast(known[name], flat.keys[number]) for number, name in chosen.items()}
    leaf_types = [numbers.setdefault(kind, len(numbers)) for kind in types]
    held = (leaves.types, leaves.leaf_types)
    return dataclasses.replace(leaves, types=tuple(numbers), leaf_types=leaf_types, casts=casts, held=held)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DescribedLeaves:
    """A tree's leaves, described."""

    types: Sequence[LeafType]
    """The different types."""
    leaf_types: Sequence[int]
    """Number of the type of each leaf."""
    values: dict[int, Any]
    """Values of the leaves that lie in no file."""
    sources: LeafSources
    """The leaves that lie in files, and what this process holds of them."""
    meshes: Sequence[str]
    """Their meshes, as text."""
    casts: Mapping[int, Cast] = dataclasses.field(default_factory=dict)
    """Leaf number -> what its array is cast to when it is read; its type has that dtype, its sources have their own."""
    held: tuple[Sequence[LeafType], Sequence[int]] | None = None
    """The types, and the number of that of each leaf, before the casts; None where nothing is cast."""
    spread: Mapping[int, HeldBoxes] = dataclasses.field(default_factory=dict)
    """Leaf number -> its distinct boxes and who holds each, of the leaves that lie over processes. Equal ones are one
    object. The other leaves are process 0's, whatever this process has in their place."""

    def data_of(self, leaf: int, box: Box | None) -> Any:
        """Return the array of one box of a leaf, or of all of it; of a box inside of a source, just that is taken."""
        sources = self.sources[leaf]
        if box is None:
            return self._cast(leaf, sources[0].data, ())
        same = (source for source in sources if source.box == box)
        source = next(same, None) or next(source for source in sources if contains(source.box, box))
        return self._cast(leaf, source.data if source.box == box else cut_box(source.data, source.box, box), box)

    def _cast(self, leaf: int, data: Any, box: Box) -> Any:
        cast = self.casts.get(leaf)
        return data if cast is None else CastArray(data, cast.dtype, cast.key, [start for start, _ in box])

    def data_of_all(self, leaves: Iterable[int], boxes: Iterable[Box | None]) -> list[Any]:
        """Return the arrays of one box of each of these leaves."""
        held = {} if self.casts else self.sources.whole
        rows = zip(leaves, boxes, strict=True)
        return [held[leaf] if box is None and leaf in held else self.data_of(leaf, box) for leaf, box in rows]

    def whole_of(self, leaf: int) -> Any:
        """Return all of a leaf as one array, where this process holds all of its boxes."""
        sources = self.sources[leaf]
        if len(sources) == 1:
            return self._cast(leaf, sources[0].data, ())
        return self._cast(leaf, BoxedArray(self.types[self.leaf_types[leaf]].shape or (), sources), ())

    def shared_by(self, leaf: int) -> HeldBoxes | None:
        """Return who holds which box of a leaf that others than process 0 hold; None for one that is process 0's.

        Those are its alone to write, however this process would cut what it has in their place.
        """
        held = self.spread.get(leaf)
        return None if held is None or all(owners == (0,) for _, owners in held) else held

    def layout_of(self, leaf: int) -> LeafLayout:
        """Return where the parts of a leaf lie, for a plan."""
        leaf_type = self.types[self.leaf_types[leaf]]
        shape = leaf_type.shape or ()
        nbytes = leaf_bytes(leaf_type)
        # An array without items is planned by its boxes alone.
        per_item = nbytes // math.prod(shape) if nbytes else 1
        held = self.spread.get(leaf) or tuple([(source.box, (0,)) for source in self.sources[leaf]])
        return LeafLayout(nbytes_per_item=per_item, shape=shape, boxes=held)


def describe_leaves(flat: Flattened, processes: Processes = ALONE) -> DescribedLeaves:
    """Describe the leaves; nothing is copied from a device yet.

    Args:
        flat: the tree.
        processes: those that save it together. One that saves alone has to hold all of every leaf.

    Raises:
        UnsupportedError: a leaf cannot be stored: deleted, traced, of a dtype that no file has, held by other
            processes.
    """
    describe = Describer(processes)
    leaf_types: list[int] = []
    values: dict[int, Any] = {}
    for number, (key, kind, leaf) in enumerate(zip(flat.keys, flat.kinds, flat.leaves, strict=True)):
        try:
            if kind in ARRAY_KINDS or is_large(kind, leaf):
                leaf_types.append(describe.add(number, kind, leaf))
            else:
                leaf_types.append(describe.number_of(LeafType(kind=kind)))
                values[number] = flat.opaque[number] if kind == "opaque" else leaf
        except TreeringError as error:
            error.path = split_key(key)
            raise
    return DescribedLeaves(
        types=tuple(describe.numbers),
        leaf_types=leaf_types,
        values=values,
        sources=LeafSources(describe.whole, describe.parted),
        meshes=tuple(describe.meshes),
        spread=describe.spread,
    )


def process_of(device: Any) -> int:
    """Return the number of the process that a device belongs to."""
    return int(device.process_index)


def is_large(kind: str, leaf: Any) -> bool:
    """Tell whether a text is so long that it lies in a data file.

    Example:
        >>> is_large("str", "x" * 4096), is_large("str", "x" * 4097), is_large("int", 10**5000)
        (False, True, False)
    """
    if kind == "str":
        return len(leaf) > LARGE_VALUE // 4 and len(leaf.encode("utf-8", "surrogatepass")) > LARGE_VALUE
    return kind in ("bytes", "bytearray") and len(leaf) > LARGE_VALUE


class _Alike(NamedTuple):
    """What arrays of one shape, dtype and sharding have in common."""

    aval: Any
    """Shape and dtype of them; it lives as long as this, so no other object has its id."""
    sharding: Any
    number: int
    """That of their type."""
    held: HeldBoxes | None
    """Who holds which box, where they lie over processes."""
    is_whole: bool
    """Whether this process holds each of them in one piece."""


class Describer:
    """Describes leaves that lie in files; gives equal types, and equal boxes, one number or object.

    Args:
        processes: those that save them together.

    Attributes:
        numbers: the types, each with its number.
        meshes: the meshes, as text.
        whole: the leaves that are here in one piece, each with its array.
        parted: all others, each with its boxes that are here.
        spread: the leaves that lie over processes, each with who holds which box.
    """

    def __init__(self, processes: Processes) -> None:
        self.numbers: dict[LeafType, int] = {}
        self.meshes: dict[str, None] = {}
        self.whole: dict[int, Any] = {}
        self.parted: dict[int, tuple[HeldBox, ...]] = {}
        self.spread: dict[int, HeldBoxes] = {}
        self._processes = processes
        self._known: dict[Any, int] = {}
        self._alike: dict[tuple[int, str | None], _Alike] = {}
        self._held: dict[Any, HeldBoxes | None] = {}
        self._equal: dict[HeldBoxes, HeldBoxes] = {}

    def number_of(self, leaf_type: LeafType) -> int:
        """Return the number of a type."""
        return self.numbers.setdefault(leaf_type, len(self.numbers))

    def add(self, leaf_number: int, kind: str, leaf: Any) -> int:
        """Note where a leaf lies, which is not copied yet; return the number of its type.

        Raises:
            UnsupportedError: it is deleted, traced, of a dtype that no file has, or other processes hold parts of it.
        """
        if kind == "jax":
            return self._add_jax(leaf_number, leaf, None)
        if kind == "key":
            require_alive(leaf)
            return self._add_jax(leaf_number, jax.random.key_data(leaf), str(jax.random.key_impl(leaf)))
        if kind == "str":
            leaf = np.frombuffer(leaf.encode("utf-8", "surrogatepass"), np.uint8)
        elif kind in ("bytes", "bytearray"):
            leaf = np.frombuffer(bytes(leaf), np.uint8)
        elif kind == "numpy scalar":
            leaf = np.asarray(leaf)
        self.whole[leaf_number] = leaf
        return self._number_type(kind, leaf.dtype, leaf.shape, None, None)

    def _add_jax(self, leaf_number: int, leaf: Any, impl: str | None) -> int:
        alike, sharding = self._alike.get((id(leaf.aval), impl)), leaf.sharding
        # What one jitted function gives has a few objects for all of these; a comparison costs more than the rest.
        if alike is None or not (sharding is alike.sharding or sharding == alike.sharding):
            alike = self._alike[id(leaf.aval), impl] = self._look_at(leaf, impl)
        elif leaf.is_deleted():
            require_alive(leaf)
        if alike.is_whole:
            self.whole[leaf_number] = leaf
        elif alike.held is None:
            self.parted[leaf_number] = tuple(HeldBox(box, data) for box, data in parts_of(leaf))
        else:
            self.parted[leaf_number] = self._own_boxes(leaf)
            self.spread[leaf_number] = alike.held
        return alike.number

    def _look_at(self, leaf: Any, impl: str | None) -> _Alike:
        require_alive(leaf)
        kind = "jax" if impl is None else "key"
        number = self._number_type(kind, leaf.dtype, leaf.shape, leaf.sharding, impl)
        held = self._held_by(leaf)
        # An array of no items may be spread out all the same, in boxes of nothing.
        is_whole = held is None and (leaf.is_fully_replicated or not leaf.size)
        return _Alike(leaf.aval, leaf.sharding, number, held, is_whole)

    def _held_by(self, leaf: jax.Array) -> HeldBoxes | None:
        """Return the boxes of an array and who holds each; None where this process holds all of it."""
        if self._processes.count == 1:
            if leaf.is_fully_addressable:
                return None
            raise UnsupportedError("other processes hold some of the array's shards", hint=TOGETHER)
        key = (leaf.sharding, leaf.shape)
        if key not in self._held:
            alone = all(process_of(device) == self._processes.this for device in leaf.sharding.device_set)
            held = () if alone else held_boxes(leaf.sharding.devices_indices_map(leaf.shape), leaf.shape, process_of)
            # Plans take leaves of one tuple together, and all processes have to see the same ones as one.
            self._held[key] = None if alone else self._equal.setdefault(held, held)
        return self._held[key]

    def _own_boxes(self, leaf: jax.Array) -> tuple[HeldBox, ...]:
        """Return the distinct boxes of a spread array that this process holds."""
        held: dict[Box, Any] = {}
        for shard in shards_of(leaf):
            if process_of(shard.device) == self._processes.this:
                box = box_of_slices(shard.index, leaf.shape) if leaf.size else whole(leaf.shape)
                held.setdefault(box, shard.data)
        return tuple(HeldBox(box, held[box]) for box in sorted(held))

    def _number_type(self, kind: str, dtype: Any, shape: tuple[int, ...], sharding: Any, impl: str | None) -> int:
        fast = (kind, dtype, shape, sharding, impl)
        if (number := self._known.get(fast)) is None:
            name = check_writable(np.dtype(dtype)).name
            text = self._sharding_text(sharding)
            number = self.number_of(LeafType(kind=kind, dtype=name, shape=shape, sharding=text, impl=impl))
            self._known[fast] = number
        return number

    def _sharding_text(self, sharding: Any) -> str | None:
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return None
        mesh = sharding.mesh
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        device: Any = next(iter(sharding.device_set))
        self.meshes[f"{axes} on {mesh.size} {device.platform} devices"] = None
        return f"{sharding.spec} over {axes}"


def snapshot(leaves: DescribedLeaves, wanted: Iterable[Row] | None = None) -> DescribedLeaves:
    """Return the same leaves with host arrays as their sources; neither donation nor mutation changes them.

    Args:
        leaves: described leaves, on any devices.
        wanted: leaf and box of what this process will need; None for all that it holds. Of a leaf that lies in one
            process its boxes; of one that lies over several, boxes inside of those that this process holds. What is
            not wanted keeps its boxes, and its data is None.

    Example:
        >>> from treering._tree.flatten import flatten
        >>> weights = np.zeros(3)
        >>> held = snapshot(describe_leaves(flatten({"w": weights})))
        >>> weights[:] = 1.0
        >>> held.data_of(0, None)
        array([0., 0., 0.])
    """
    chosen = _choose_boxes(leaves, wanted)
    types, kinds = leaves.held or (leaves.types, leaves.leaf_types)
    taking = HostCopies(types, kinds)
    parted = list(chosen.parted.items())
    for number, parts in parted:
        for _, data in parts:
            taking.begin(data, kinds[number])
    whole_leaves = taking.hold_all(chosen.whole)
    copies = {n: tuple([HeldBox(box, taking.hold(data, kinds[n])) for box, data in parts]) for n, parts in parted}
    values = {number: bytearray(v) if type(v) is bytearray else v for number, v in leaves.values.items()}
    return dataclasses.replace(leaves, sources=LeafSources(whole_leaves, copies), values=values)


def _choose_boxes(leaves: DescribedLeaves, wanted: Iterable[Row] | None) -> LeafSources:
    """Return what is to be held of each leaf."""
    if wanted is None:
        return leaves.sources
    boxes: dict[int, list[Box | None]] = {}
    for number, box in wanted:
        boxes.setdefault(number, []).append(box)
    held: dict[int, Any] = {}
    parted: dict[int, tuple[HeldBox, ...]] = {}
    for number, sources in leaves.sources.items():
        chosen = boxes.get(number, [])
        if chosen and number in leaves.spread:
            parted[number] = tuple(_cut_source(sources, box) for box in chosen)
        elif None in chosen and number in leaves.sources.whole:
            held[number] = leaves.sources.whole[number]
        else:
            # All of its boxes stay: whoever plans again has to come to the same plan.
            parted[number] = tuple(s if s.box in chosen or None in chosen else HeldBox(s.box, None) for s in sources)
    return LeafSources(held, parted)


def _cut_source(sources: Sequence[HeldBox], box: Box | None) -> HeldBox:
    held = next(source for source in sources if box is None or contains(source.box, box))
    return held if box is None or box == held.box else HeldBox(box, cut_box(held.data, held.box, box))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveLayout:
    """Where everything will lie."""

    leaves: DescribedLeaves
    """What is saved."""
    chunks: Chunks
    """Which box lies where."""
    headers: Sequence[bytes]
    """The bytes of each file before its data."""
    names: Sequence[str]
    """The names of the files."""
    writers: Sequence[int]
    """Which process writes each file."""
    linked: Mapping[int, DataFile] = dataclasses.field(default_factory=dict)
    """The files that are shared with an older checkpoint, and are not written."""

    @property
    def data_bytes(self) -> int:
        """Bytes of all arrays that are written."""
        if not self.linked:
            return sum(self.chunks.nbytes)
        return sum(n for file, n in zip(self.chunks.file, self.chunks.nbytes, strict=True) if file not in self.linked)

    def sizes(self) -> list[int]:
        """Return the bytes of each file."""
        sizes = list(map(len, self.headers))
        for file, nbytes in zip(self.chunks.file, self.chunks.nbytes, strict=True):
            sizes[file] += nbytes
        for file, found in self.linked.items():
            sizes[file] = found.nbytes
        return sizes


class SaveData:
    """What is known of a save while it is written.

    Args:
        layout: where everything will lie.
        progress: called with the bytes that were taken.
        before: an earlier reading, of which small arrays are taken as they were read.
        digests: where the digest of each chunk that is read goes; None where none is wanted.
        done: the bytes of files that were written before.

    Attributes:
        checksums: those of all blocks, chunk after chunk; complete when every file's content was taken.
        kept: the bytes of small chunks that were read for a later reading, by the first of them.
    """

    def __init__(
        self,
        layout: SaveLayout,
        progress: Progress | None,
        before: SaveData | None = None,
        *,
        digests: MutableMapping[int, bytes] | None = None,
        done: int = 0,
    ) -> None:
        self._layout = layout
        self._starts = layout.chunks.first_blocks()
        self._progress = progress
        self._pool = MemoryPool()
        self._digests = digests
        self._done = done
        self.kept: dict[int, bytes] = {} if before is None else before.kept
        self._room = _KEPT_BYTES
        self.checksums: array[int] = array("Q", bytes(8 * self._starts[-1]) if before is None else before.checksums)

    def data_of(self, file: int, *, kept: bool = True) -> Iterator[bytes | memoryview]:
        """Yield the data of one file, in the order of the file; with ``kept=False`` only for a later reading."""
        total = self._layout.data_bytes
        for piece in itertools.chain.from_iterable(self._read(run, kept=kept) for run in self._runs(file)):
            yield piece
            self._done += len(piece)
            if self._progress is not None:
                self._progress(self._done, total)
            del piece  # its memory is free for the next one

    def _runs(self, file: int) -> Iterator[Sequence[int]]:
        """Yield the chunks of a file: neighbours that are small together, any other alone."""
        rows = self._layout.chunks.of_file(file)
        start = held = 0
        for at, nbytes in enumerate(map(self._layout.chunks.nbytes.__getitem__, rows)):
            size = nbytes if nbytes <= SMALLEST_BLOCK else _RUN_BYTES + 1
            if start < at and (held + size > _RUN_BYTES or at - start == _RUN_CHUNKS):
                yield rows[start:at]
                start, held = at, 0
            held += size
        if rows:
            yield rows[start:]

    def _read(self, run: Sequence[int], *, kept: bool) -> Iterable[bytes | memoryview]:
        """Return the bytes of some chunks, and note their checksums."""
        if (read := self.kept.get(run[0])) is not None:
            return (read,)
        chunks, starts = self._layout.chunks, self._starts
        arrays = self._layout.leaves.data_of_all(map(chunks.leaf.__getitem__, run), map(chunks.box.__getitem__, run))
        ends = list(itertools.accumulate(map(chunks.nbytes.__getitem__, run), initial=0))
        if len(run) > 1 and (joined := join_arrays(arrays, ends[-1])) is not None:
            for chunk, part in zip(run, map(memoryview(joined).__getitem__, map(slice, ends, ends[1:])), strict=True):
                if part:
                    self.checksums[starts[chunk]] = xxhash.xxh3_64_intdigest(part)
                if self._digests is not None:
                    self._digests[chunk] = xxhash.xxh3_128_digest(part)
            if not kept and len(joined) <= min(self._room, len(run) * _KEPT_LEAF_BYTES):
                self.kept[run[0]] = joined
                self._room -= len(joined)
            return (joined,)
        pool = self._pool if kept else None
        rows = zip(run, arrays, strict=True)
        return itertools.chain.from_iterable(
            self._digested(n, read_checked(data, chunks.block[n], self.checksums, starts[n], pool)) for n, data in rows
        )

    def _digested(self, chunk: int, pieces: Iterator[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        """Yield the pieces of a chunk, of which a digest is noted where that is wanted: of what the file gets."""
        if self._digests is None:
            yield from pieces
            return
        state = xxhash.xxh3_128()
        for piece in pieces:
            state.update(piece)
            yield piece
            del piece  # its memory is free for the next one
        self._digests[chunk] = state.digest()

    def first_other(self, other: SaveData) -> int | None:
        """Return the first leaf whose blocks have other checksums in ``other``, None where all are the same."""
        block = next((n for n, (a, b) in enumerate(zip(self.checksums, other.checksums, strict=True)) if a != b), None)
        return None if block is None else self._layout.chunks.leaf[bisect.bisect_right(self._starts, block) - 1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DividedSave:
    """Who writes what."""

    keys: Sequence[str]
    """Key text of each leaf."""
    leaves: DescribedLeaves
    """The leaves as this process sees them."""
    stored: Sequence[int]
    """The leaves that lie in files; the plan counts these."""
    plan: SavePlan[Box]
    """The plan of all."""

    def rows_of(self, process: int) -> list[Row]:
        """Return the boxes that a process writes."""
        leaves = self.leaves
        every = [whole(kind.shape or ()) for kind in leaves.types]
        rows = [(self.stored[number], box) for number, box in self.plan.parts_of(process)]
        return [(leaf, None if box == every[leaves.leaf_types[leaf]] else box) for leaf, box in rows]

    def files(self, attempt: str, processes: Iterable[int]) -> SaveLayout:
        """Lay out the files of some processes.

        Args:
            attempt: the attempt.
            processes: whose, ascending.
        """
        leaves = self.leaves
        counts = file_counts(self.plan, FILE_BYTES)
        firsts = list(itertools.accumulate(counts, initial=0))
        rows: list[list[Row]] = []
        names: list[str] = []
        writers: list[int] = []
        for process in processes:
            found: dict[int, list[Row]] = {}
            mine = self.rows_of(process)
            sizes = row_bytes(mine, leaves.types, leaves.leaf_types)
            for row, file in zip(mine, files_by_position(sizes, counts[process], FILE_BYTES), strict=True):
                found.setdefault(file, []).append(row)
            rows += found.values()
            names += [data_name(attempt, firsts[process] + file, firsts[-1]) for file in found]
            writers += [process] * len(found)
        chunks, headers = lay_out_files(attempt, self.keys, leaves.types, leaves.leaf_types, rows)
        return SaveLayout(leaves=leaves, chunks=chunks, headers=headers, names=names, writers=writers)

    def file_of(
        self, attempt: str, leaves: DescribedLeaves, values: Mapping[int, bytes], number: int | None = None
    ) -> SaveLayout:
        """Lay out one file more, whose number is behind those of all others: of bytes that were values before.

        Args:
            attempt: the attempt.
            leaves: the leaves.
            values: leaf number -> its bytes.
            number: its number; None: that behind the files of the plan.
        """
        number = sum(file_counts(self.plan, FILE_BYTES)) if number is None else number
        kinds = [LeafType(kind="bytes", dtype="uint8", shape=(len(data),)) for data in values.values()]
        leaf_types = list(leaves.leaf_types)
        for at, leaf in enumerate(values, len(leaves.types)):
            leaf_types[leaf] = at
        leaves = dataclasses.replace(
            leaves,
            types=(*leaves.types, *kinds),
            leaf_types=leaf_types,
            values={leaf: value for leaf, value in leaves.values.items() if leaf not in values},
            sources=LeafSources({leaf: np.frombuffer(data, np.uint8) for leaf, data in values.items()}),
        )
        rows: list[Row] = [(leaf, None) for leaf in values]
        chunks, headers = lay_out_files(attempt, self.keys, leaves.types, leaves.leaf_types, [rows])
        names = [data_name(attempt, number, number + 1)]
        return SaveLayout(leaves=leaves, chunks=chunks, headers=headers, names=names, writers=[0])


def join_layouts(
    one: SaveLayout, sums: array[int], more: SaveLayout, more_sums: array[int]
) -> tuple[SaveLayout, array[int], list[tuple[int, int]]]:
    """Return a layout with the files of ``more`` behind those of ``one``, and the checksums of all chunks.

    The third value says of each chunk in which of both it was, 0 or 1, and its number there.

    Args:
        one: a layout.
        sums: the checksums of its chunks.
        more: another one, of other leaves; it says what all leaves are.
        more_sums: the checksums of its chunks.
    """
    tables = ((one.chunks, sums, 0), (more.chunks, more_sums, len(one.names)))
    rows = sorted((leaf, at, row) for at, (chunks, _, _) in enumerate(tables) for row, leaf in enumerate(chunks.leaf))
    starts, table = [chunks.first_blocks() for chunks, _, _ in tables], array("Q")
    for _, at, row in rows:
        table += tables[at][1][starts[at][row] : starts[at][row + 1]]
    columns = {
        name: [getattr(tables[at][0], name)[row] for _, at, row in rows]
        for name in ("leaf", "box", "offset", "nbytes", "block")
    }
    files = [tables[at][0].file[row] + tables[at][2] for _, at, row in rows]
    joined = SaveLayout(
        leaves=more.leaves,
        chunks=Chunks(**columns, file=files),
        headers=[*one.headers, *more.headers],
        names=[*one.names, *more.names],
        writers=[*one.writers, *more.writers],
        linked=one.linked,
    )
    return joined, table, [(at, row) for _, at, row in rows]


def divide_save(
    keys: Sequence[str], leaves: DescribedLeaves, processes: int, plan: SavePlan[Box] | None = None
) -> DividedSave:
    """Divide leaves among processes, by a ``plan`` that was made for leaves that are alike.

    Example:
        >>> import numpy as np
        >>> from treering._arrays.outgoing import describe_leaves
        >>> from treering._tree.flatten import flatten
        >>> flat = flatten({"w": np.zeros(6, "f4")})
        >>> plan = divide_save(flat.keys, describe_leaves(flat), 2)
        >>> plan.files("0" * 16, [0, 1]).names  # process 1 has nothing to write
        ['data-0000000000000000-00000-of-00001.safetensors']
    """
    stored = list(leaves.sources)
    plan = plan or plan_save([leaves.layout_of(leaf) for leaf in stored], processes)
    return DividedSave(keys=keys, leaves=leaves, stored=stored, plan=plan)


def merge_checksums(layout: SaveLayout, parts: Sequence[array[int]]) -> array[int]:
    """Return the checksums of all chunks, given those that each process found, in the order of its own chunks.

    Raises:
        ProcessFailedError: a process handed in another number of checksums than its part has blocks.
    """
    chunks = layout.chunks
    table = array("Q")
    taken = [0] * len(parts)
    for file, nbytes, block in zip(chunks.file, chunks.nbytes, chunks.block, strict=True):
        process = layout.writers[file]
        start = taken[process]
        taken[process] = stop = start + block_count(nbytes, block)
        table += parts[process][start:stop]
    if wrong := [process for process, part in enumerate(parts) if len(part) != taken[process]]:
        hint = "run the same version of treering on all processes, with the same tree"
        raise failure_of(wrong, "sent checksums for other chunks than planned here", hint)
    return table
