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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import numpy as np

from treering._arrays.host import TOGETHER, BoxedArray, HostCopies, cut_box, parts_of, read_checked, require_alive
from treering._arrays.jobs import Progress
from treering._format.document import data_name
from treering._format.index import ARRAY_KINDS, LARGE_VALUE, Chunks, LeafType, leaf_bytes
from treering._format.safetensors import Row, lay_out_files
from treering._plan.save import FILE_BYTES, LeafLayout, SavePlan, file_counts, files_by_position, plan_save
from treering._store.memory_pool import MemoryPool
from treering._tree.flatten import Flattened
from treering._values.boxes import Box, box_of_slices, contains, held_boxes, size_of, whole
from treering._values.checksums import block_count
from treering._values.dtypes import check_writable
from treering._values.keys import split_key
from treering._values.processes import Processes, format_processes
from treering.errors import ProcessFailedError, TreeringError, UnsupportedError

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DescribedLeaves:
    """A tree's leaves, described."""

    types: Sequence[LeafType]
    """The different types."""
    leaf_types: Sequence[int]
    """Number of the type of each leaf."""
    values: dict[int, Any]
    """Values of the leaves that lie in no file."""
    sources: Mapping[int, tuple[HeldBox, ...]]
    """Leaf number -> its distinct boxes that this process holds, of the leaves that lie in files. Empty for a leaf
    of which it holds nothing."""
    meshes: Sequence[str]
    """Their meshes, as text."""
    spread: Mapping[int, HeldBoxes] = dataclasses.field(default_factory=dict)
    """Leaf number -> its distinct boxes and who holds each, of the leaves that lie over processes. Equal ones are one
    object. The other leaves are process 0's, whatever this process has in their place."""

    def data_of(self, leaf: int, box: Box | None) -> Any:
        """Return the array of one box of a leaf, or of all of it; of a box inside of a source, just that is taken."""
        sources = self.sources[leaf]
        if box is None:
            return sources[0].data
        source = next(source for source in sources if contains(source.box, box))
        return source.data if source.box == box else cut_box(source.data, source.box, box)

    def whole_of(self, leaf: int) -> Any:
        """Return all of a leaf as one array, where this process holds all of its boxes."""
        sources = self.sources[leaf]
        if len(sources) == 1:
            return sources[0].data
        return BoxedArray(self.types[self.leaf_types[leaf]].shape or (), sources)

    def held_by(self, leaf: int) -> HeldBoxes:
        """Return the distinct boxes of a leaf that lies in files, and who holds each."""
        found = self.spread.get(leaf)
        return tuple((source.box, (0,)) for source in self.sources[leaf]) if found is None else found

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
        return LeafLayout(nbytes_per_item=per_item, shape=shape, boxes=self.held_by(leaf))


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
    sources: dict[int, tuple[HeldBox, ...]] = {}
    spread: dict[int, HeldBoxes] = {}
    for number, (key, kind, leaf) in enumerate(zip(flat.keys, flat.kinds, flat.leaves, strict=True)):
        try:
            if kind in ARRAY_KINDS or is_large(kind, leaf):
                leaf_type, sources[number], held = describe.describe(kind, leaf)
                if held is not None:
                    spread[number] = held
            else:
                leaf_type = describe.number_of(LeafType(kind=kind))
                values[number] = flat.opaque[number] if kind == "opaque" else leaf
        except TreeringError as error:
            error.path = split_key(key)
            raise
        leaf_types.append(leaf_type)
    return DescribedLeaves(
        types=tuple(describe.numbers),
        leaf_types=leaf_types,
        values=values,
        sources=sources,
        meshes=tuple(describe.meshes),
        spread=spread,
    )


def process_of(device: Any) -> int:
    """Return the number of the process that a device belongs to."""
    number: int = device.process_index
    return number


def is_large(kind: str, leaf: Any) -> bool:
    """Tell whether a text is so long that it lies in a data file.

    Example:
        >>> is_large("str", "x" * 4096), is_large("str", "x" * 4097), is_large("int", 10**5000)
        (False, True, False)
    """
    if kind == "str":
        return len(leaf) > LARGE_VALUE // 4 and len(leaf.encode("utf-8", "surrogatepass")) > LARGE_VALUE
    return kind in ("bytes", "bytearray") and len(leaf) > LARGE_VALUE


class Describer:
    """Describes leaves that lie in files; gives equal types, and equal boxes, one number or object.

    Args:
        processes: those that save them together.
    """

    def __init__(self, processes: Processes) -> None:
        self.numbers: dict[LeafType, int] = {}
        self.meshes: dict[str, None] = {}
        self._processes = processes
        self._known: dict[Any, int] = {}
        self._held: dict[Any, HeldBoxes | None] = {}
        self._equal: dict[HeldBoxes, HeldBoxes] = {}

    def number_of(self, leaf_type: LeafType) -> int:
        """Return the number of a type."""
        return self.numbers.setdefault(leaf_type, len(self.numbers))

    def describe(self, kind: str, leaf: Any) -> tuple[int, tuple[HeldBox, ...], HeldBoxes | None]:
        """Return the number of a leaf's type, its boxes that are here, and who holds each if it lies over processes.

        Raises:
            UnsupportedError: it is deleted, traced, of a dtype that no file has, or other processes hold parts of it.
        """
        if kind in ("jax", "key"):
            return self._jax(kind, leaf)
        if kind == "str":
            leaf = np.frombuffer(leaf.encode("utf-8", "surrogatepass"), np.uint8)
        elif kind in ("bytes", "bytearray"):
            leaf = np.frombuffer(bytes(leaf), np.uint8)
        elif kind == "numpy scalar":
            leaf = np.asarray(leaf)
        number = self._number_type(kind, leaf.dtype, leaf.shape, None, None)
        return number, (HeldBox(whole(leaf.shape), leaf),), None

    def _jax(self, kind: str, leaf: Any) -> tuple[int, tuple[HeldBox, ...], HeldBoxes | None]:
        require_alive(leaf)
        impl = None
        if kind == "key":
            impl = str(jax.random.key_impl(leaf))
            leaf = jax.random.key_data(leaf)
        number = self._number_type(kind, leaf.dtype, leaf.shape, leaf.sharding, impl)
        if (held := self._held_by(leaf)) is not None:
            return number, self._own_boxes(leaf), held
        # An array of no items may be spread out all the same, in boxes of nothing.
        if leaf.is_fully_replicated or not leaf.size:
            return number, (HeldBox(whole(leaf.shape), leaf),), None
        return number, tuple(HeldBox(box, data) for box, data in parts_of(leaf)), None

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
        for shard in leaf.addressable_shards:
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
    taking = HostCopies(leaves.types)
    chosen = [(number, leaves.leaf_types[number], parts) for number, parts in _choose_boxes(leaves, wanted)]
    for _, kind, parts in chosen:
        for _, data in parts:
            taking.begin(data, kind)
    sources = {n: tuple([HeldBox(box, taking.hold(data, kind)) for box, data in parts]) for n, kind, parts in chosen}
    values = {number: bytearray(v) if type(v) is bytearray else v for number, v in leaves.values.items()}
    return dataclasses.replace(leaves, sources=sources, values=values)


def _choose_boxes(leaves: DescribedLeaves, wanted: Iterable[Row] | None) -> Iterable[tuple[int, Sequence[HeldBox]]]:
    """Yield each leaf and what is to be held of it."""
    if wanted is None:
        yield from leaves.sources.items()
        return
    boxes: dict[int, list[Box | None]] = {}
    for number, box in wanted:
        boxes.setdefault(number, []).append(box)
    for number, sources in leaves.sources.items():
        if (chosen := boxes.get(number)) is None:
            yield number, [HeldBox(source.box, None) for source in sources]
        elif number in leaves.spread:
            yield number, [_cut_source(sources, box) for box in chosen]
        else:
            # All of its boxes stay: whoever plans again has to come to the same plan.
            yield number, [s if s.box in chosen or None in chosen else HeldBox(s.box, None) for s in sources]


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

    @property
    def data_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(self.chunks.nbytes)

    def sizes(self) -> list[int]:
        """Return the bytes of each file."""
        sizes = list(map(len, self.headers))
        for file, nbytes in zip(self.chunks.file, self.chunks.nbytes, strict=True):
            sizes[file] += nbytes
        return sizes


class SaveData:
    """What is known of a save while it is written.

    Attributes:
        checksums: those of all blocks, chunk after chunk; complete when every file's content was taken.
    """

    def __init__(self, layout: SaveLayout, progress: Progress | None) -> None:
        self._layout = layout
        self._starts = layout.chunks.first_blocks()
        self._progress = progress
        self._pool = MemoryPool()
        self._done = 0
        self.checksums = array("Q", bytes(8 * self._starts[-1]))

    def data_of(self, file: int, *, kept: bool = True) -> Iterator[bytes | memoryview]:
        """Yield the data of one file, in the order of the file; with ``kept=False`` only to note the checksums."""
        chunks = self._layout.chunks
        total = self._layout.data_bytes
        pool = self._pool if kept else None
        for chunk in chunks.of_file(file):
            data = self._layout.leaves.data_of(chunks.leaf[chunk], chunks.box[chunk])
            for piece in read_checked(data, chunks.block[chunk], self.checksums, self._starts[chunk], pool):
                yield piece
                self._done += len(piece)
                if self._progress is not None:
                    self._progress(self._done, total)
                del piece  # its memory is free for the next one

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

    def files(self, attempt: str, processes: Iterable[int]) -> SaveLayout:
        """Lay out the files of some processes.

        Args:
            attempt: the attempt.
            processes: whose, ascending.
        """
        leaves = self.leaves
        shapes = [kind.shape or () for kind in leaves.types]
        itemsizes = [leaf_bytes(kind) // (math.prod(kind.shape or ()) or 1) for kind in leaves.types]
        counts = file_counts(self.plan, FILE_BYTES)
        firsts = list(itertools.accumulate(counts, initial=0))
        rows: list[list[Row]] = []
        names: list[str] = []
        writers: list[int] = []
        for process in processes:
            found: dict[int, list[Row]] = {}
            mine: list[Row] = []
            sizes: list[int] = []
            for number, box in self.plan.parts_of(process):
                leaf = self.stored[number]
                kind = leaves.leaf_types[leaf]
                mine.append((leaf, None if box == whole(shapes[kind]) else box))
                sizes.append(itemsizes[kind] * size_of(box))
            for row, file in zip(mine, files_by_position(sizes, counts[process], FILE_BYTES), strict=True):
                found.setdefault(file, []).append(row)
            rows += found.values()
            names += [data_name(attempt, firsts[process] + file, firsts[-1]) for file in found]
            writers += [process] * len(found)
        chunks, headers = lay_out_files(attempt, self.keys, leaves.types, leaves.leaf_types, rows)
        return SaveLayout(leaves=leaves, chunks=chunks, headers=headers, names=names, writers=writers)


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
        error = ProcessFailedError(
            f"{format_processes(wrong)} sent checksums for other chunks than planned here", hint=hint
        )
        error.processes = tuple(wrong)
        raise error
    return table
