"""Leaves that several processes want: which of them reads which rows, and how the devices then exchange these.

Before they begin, the processes compare what each of them has opened and wants. XLA moves the rows. Items travel as
unsigned integers of their width, so that no step may look at them as numbers: every bit arrives, those of NaNs and of
padding in pairs included. The padding around the rows is zeros, and is cut off on the way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import xxhash
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from treering._arrays import delivered
from treering._arrays.delivered import Deliveries, Way, spans, stored_dtype_of, take_arrays, without_shards
from treering._arrays.host import host_blocks, shards_of
from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import cut_by_bytes
from treering._arrays.source import Source
from treering._codec.documents import json_text
from treering._format.index import leaf_bytes
from treering._format.leaf_values import encode_value
from treering._plan.load import Grid, Parts, StoredLeaf, plan_loads
from treering._tree.placement import spec_of
from treering._values.boxes import Box, box_of_slices, size_of, whole
from treering._values.checksums import SMALLEST_BLOCK, digest, pack_checksums

if TYPE_CHECKING:
    from numpy.typing import NDArray

Wanted: TypeAlias = tuple[tuple[Box, ...], ...]
"""Process -> the boxes that it wants."""

# Leaves between two meetings, at most: what one leaf needs beside its bytes is held for all of them.
_MOST_LEAVES: Final = 1024
# Of a tree without checksums so many leaves are compared, so many items of each, as long as that costs so few bytes.
_SAMPLED: Final = 4096
_SPREAD: Final = 0x9E3779B1
_SAMPLE_ITEMS: Final = 1024
_MOST_SAMPLED: Final = 64 << 20


def divide(source: Source, batches: Sequence[Deliveries], processes: int) -> list[Deliveries]:
    """Plan who reads what of the leaves that lie over several processes; return batches of what this one reads.

    What a process counts of a leaf from here on is what it reads itself.
    """
    deliveries = Deliveries.join(batches)
    joint = {way for way in dict.fromkeys(deliveries.ways) if spans(way.sharding)}
    places = [at for at, way in enumerate(deliveries.ways) if way in joint]
    leaves = list(_describe_stored(source, deliveries.take(places), processes))
    known: dict[tuple[Way, Parts | None], Way] = {}
    for at, parts in zip(places, plan_loads(leaves, processes), strict=True):
        alike = (deliveries.ways[at], parts)
        if (way := known.get(alike)) is None:
            way = known[alike] = _own_part(*alike, source.arrays.dtype_of(deliveries.leaves[at]))
        deliveries.ways[at] = way
    ends = itertools.accumulate(map(len, batches))
    return [deliveries[end - len(batch) : end] for batch, end in zip(batches, ends, strict=True)]


def _own_part(way: Way, parts: Parts | None, dtype: np.dtype[Any]) -> Way:
    sharding: Any = way.sharding
    boxes = way.boxes if parts is None else part_boxes(way.shape, sharding, parts)
    nbytes = sum(map(size_of, boxes)) * dtype.itemsize
    return dataclasses.replace(way, boxes=boxes, parts=parts, dtype=dtype, nbytes=nbytes)


def _describe_stored(source: Source, joint: Deliveries, processes: int) -> Iterator[StoredLeaf]:
    """Yield how each leaf is stored and wanted, those that are alike as one object."""
    known: dict[tuple[Way, int], StoredLeaf] = {}
    grids: dict[Way, Grid | None] = {}
    for number, way in zip(joint.leaves, joint.ways, strict=True):
        if way not in grids:
            can = can_exchange(way.fit.dtype or source.arrays.dtype_of(number))
            grids[way] = grid_of(way.sharding, len(way.shape)) if can else None
        chunks = source.arrays.stored_chunks(number) if grids[way] is not None else ()
        if (leaf := known.get((way, id(chunks)))) is None:
            leaf = known[way, id(chunks)] = StoredLeaf(
                shape=way.shape,
                itemsize=source.arrays.dtype_of(number).itemsize,
                chunks=chunks,
                wanted=_wanted_boxes(way.sharding, way.shape, processes),
                grid=grids[way],
            )
        yield leaf


def rounds(deliveries: Deliveries, processes: int, most: int) -> Iterator[slice]:
    """Yield runs of exchanged leaves of which no process gets more than about ``most`` bytes; the same on all."""

    def nbytes(way: Way) -> int:
        return _largest(_wanted_boxes(way.sharding, way.shape, processes)) * (way.dtype.itemsize if way.dtype else 1)

    sizes = {way: nbytes(way) for way in dict.fromkeys(deliveries.ways)}
    return cut_by_bytes(map(sizes.__getitem__, deliveries.ways), most, longest=_MOST_LEAVES)


def plan_digest(keys: Sequence[str], batches: Iterable[Deliveries]) -> str:
    """Return a digest of what all processes have to want alike: leaves that lie over several, and how."""
    lines = []
    known: dict[Way, str | None] = {}
    for number, batch in enumerate(batches):
        for leaf, way in zip(batch.leaves, batch.ways, strict=True):
            if way not in known:
                known[way] = _describe_way(way) if spans(way.sharding) else None
            if (how := known[way]) is not None:
                lines.append(f"{number} {keys[leaf]} {how}")
    return digest(["\n".join(lines).encode("utf-8", "surrogatepass")])


def _describe_way(way: Way) -> str:
    cut = way.parts and (way.parts.axis, way.parts.rows, way.parts.first)
    wanted = _sharding_digest(way.sharding, way.shape)
    return f"{way.fit.kind} {way.fit.dtype or way.dtype} {way.shape} {wanted} {cut}"


def state_digest(source: Source) -> str:
    """Return a digest of what was opened, so that processes can tell whether all of them opened the same.

    Where there are no checksums, Python's values count, and of arrays what the store says of the files, or else some of
    the numbers, all those of small arrays: two hosts may have copies of one file, which are of different times.

    Raises:
        CorruptError, NotFoundError, StoreError: as reading does.
    """
    if source.layers:
        return digest([source.index.keys[n].encode("utf-8", "surrogatepass") for n in range(len(source.index.keys))]
                      + [state_digest(layer).encode() for layer in source.layers])  # fmt: skip
    index = source.index
    head = repr((index.attempt, index.types, [(file.name, file.nbytes, file.digest) for file in index.files]))
    keys = "\0".join(index.keys)
    tokens = _versions(source)
    texts = [text.encode("utf-8", "surrogatepass") for text in (head, keys, *tokens)]
    if not index.verified:
        kinds = ((index.type_of(leaf).kind, value) for leaf, value in index.values.items())
        texts.append(json_text([encode_value(*known) for known in kinds if known[0] != "opaque"]).encode("ascii"))
    samples = _read_samples(source) if is_told_by_numbers(source) else ()
    return digest([*texts, pack_checksums(index.checksums), *samples])


def is_told_by_numbers(source: Source) -> bool:
    """Tell whether nothing but the numbers tells one state of a tree from another: no checksums, and no versions."""
    if source.layers:
        return any(map(is_told_by_numbers, source.layers))
    return not (source.index.verified or _versions(source))


def _versions(source: Source) -> list[str]:
    return [] if source.opened is None or source.index.verified else source.opened.tokens()


def _read_samples(source: Source) -> Iterator[bytes]:
    """Yield some numbers from the middle of each leaf, of a small one all of them.

    Where all leaves cost too much, those of leaves here and there. What lies in the others is read by one process each.
    """
    index = source.index
    stored = index.stored_leaves()
    requests: list[ReadRequest] = []
    cost = 0
    # However many are taken, they are spread over the tree.
    for place in sorted(range(len(stored)), key=lambda number: number * _SPREAD % 2**32)[:_SAMPLED]:
        shape = index.type_of(stored[place]).shape or ()
        box = whole(shape)
        if leaf_bytes(index.type_of(stored[place])) > SMALLEST_BLOCK:  # a smaller one is read as a whole by all
            box = tuple((size // 2, min(size, size // 2 + 1)) for size in shape[:-1])
            box += tuple((size // 2, min(size, size // 2 + _SAMPLE_ITEMS)) for size in shape[-1:])
        requests.append(ReadRequest(stored[place], (box,)))
        # A chunk that has to be decoded for it is read whole.
        cost += max((chunk.block for chunk in source.arrays.stored_chunks(stored[place])), default=0)
        if cost > _MOST_SAMPLED:
            break
    source.arrays.read(requests)
    return (request.arrays[0].tobytes() for request in requests)


def digest_common(state: xxhash.xxh3_128, deliveries: Deliveries, found: list[Any], *, processes: int) -> None:
    """Add to a digest what was read of those leaves of which every process wants the same, and reads it itself."""
    own = (way for way in dict.fromkeys(deliveries.ways) if way.parts is None and spans(way.sharding))
    common = {way for way in own if len(set(_wanted_boxes(way.sharding, way.shape, processes))) == 1}
    read = (one for one, way in zip(found, deliveries.ways, strict=True) if way in common)
    for array in itertools.chain.from_iterable(one if isinstance(one, list) else [one] for one in read):
        for piece in host_blocks(array, 0, array.size):
            state.update(piece)


# ------------------------------------------------------------------------------------------------------- of shardings


def _wanted_boxes(sharding: Any, shape: tuple[int, ...], processes: int) -> Wanted:
    return _wanted_boxes_by(sharding, shape, processes, delivered.process_of)


# Leaves that are wanted alike have to share one: plans know it by its identity.
@functools.lru_cache(maxsize=1024)
def _wanted_boxes_by(sharding: jax.sharding.Sharding, shape: tuple[int, ...], processes: int, owner: Any) -> Wanted:
    wanted: list[dict[Box, None]] = [{} for _ in range(processes)]
    for device, index in sharding.devices_indices_map(shape).items():
        wanted[owner(device)][box_of_slices(index or (), shape)] = None
    return tuple(map(tuple, wanted))


@functools.lru_cache(maxsize=1024)
def _largest(wanted: Wanted) -> int:
    """Return how many items the process gets that gets the most."""
    return max(sum(map(size_of, boxes)) for boxes in wanted)


@functools.lru_cache(maxsize=1024)
def _sharding_digest(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> str:
    """Return a digest of which device has which box; in which order, too: programs are compiled for that."""
    places: Any = sharding.devices_indices_map(shape).items()
    return digest([repr([(device.id, box_of_slices(index or (), shape)) for device, index in places]).encode()])


# An item of these is narrower than the byte that numpy gives it, and their numbers are whole: the number travels.
_NARROW: Final = {"int2": np.int8, "int4": np.int8, "uint2": np.uint8, "uint4": np.uint8}
_BITS_OF_A_BYTE: Final = 8
# So many more rows than the leaf has are carried along; what is longer is cut before the devices exchange anything.
_LONG_PERCENT: Final = 125
# Leaves of one form that one program exchanges; the rest go one by one. So a form is compiled twice at most, and not
# again for each run of leaves in which it comes; and ten thousand small leaves are not ten thousand calls.
_TOGETHER: Final = 64


Runner: TypeAlias = Callable[[Callable[[], dict[int, jax.Array]]], dict[int, jax.Array]]
"""Runs what needs all processes, and returns its result, as `treering._coordination.allgather.run_in_order` does."""


@dataclasses.dataclass(slots=True)
class PartedLeaf:
    """A leaf, of which this process has read the parts of its devices."""

    form: LeafForm
    """Its form."""
    arrays: list[NDArray[Any]]
    """What ``part_boxes`` asked for; let go on the way."""


def grid_of(sharding: Any, axes: int) -> Grid | None:
    """Return how a leaf of so many axes is cut over a mesh of devices; None where its parts cannot be exchanged.

    Example:
        >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
        >>> grid_of(NamedSharding(mesh, PartitionSpec(None, "x")), 2)
        Grid(shape=(1,), owners=(0,), spec=((), (0,)))
        >>> grid_of(jax.sharding.SingleDeviceSharding(jax.devices()[0]), 2) is None
        True
    """
    return _grid(sharding, axes, delivered.process_of) if isinstance(sharding, NamedSharding) else None


@functools.lru_cache(maxsize=1024)
def _grid(sharding: NamedSharding, axes: int, owner: Callable[[jax.Device], int]) -> Grid | None:
    mesh = sharding.mesh
    spec = sharding.spec
    # Of a device of this process, as jax knows nothing of the memories of others' devices.
    usual = jax.local_devices(backend=mesh.devices.flat[0].platform)[0].default_memory().kind
    if sharding.memory_kind not in (None, usual) or getattr(spec, "unreduced", None) or len(spec) > axes:
        return None
    if any(part is PartitionSpec.UNCONSTRAINED for part in spec):
        return None
    numbers = {name: number for number, name in enumerate(mesh.axis_names)}
    named = [() if part is None else part if isinstance(part, tuple) else (part,) for part in spec]
    cut = [tuple(numbers[name] for name in names) for names in named]
    return Grid(
        shape=tuple(mesh.devices.shape),
        owners=tuple(owner(device) for device in mesh.devices.flat),
        spec=(*cut, *((),) * (axes - len(cut))),
    )


def can_exchange(dtype: np.dtype[Any]) -> bool:
    """Tell whether devices can exchange items of a dtype that jax holds; floats of less than a byte they cannot.

    Example:
        >>> can_exchange(np.dtype("complex64")), can_exchange(jnp.dtype("float4_e2m1fn"))
        (True, False)
    """
    if dtype.name in _NARROW or dtype.itemsize > 1 or dtype.kind in "biu":
        return True
    bits: int = jnp.finfo(dtype).bits  # type: ignore[no-untyped-call]
    return bits == _BITS_OF_A_BYTE


def part_boxes(shape: tuple[int, ...], sharding: NamedSharding, parts: Parts) -> tuple[Box, ...]:
    """Return the boxes of a leaf that the devices of this process have first, in the order of the parts."""
    boxes = (parts.box_of(place, shape) for place, _ in _own_places(sharding, len(shape), parts.axis))
    return tuple(box for box in boxes if box is not None)


def take_parts(way: Way, read: Any, key: str) -> PartedLeaf:
    """Return the rows that were read of a leaf for its devices to exchange."""
    sharding: Any = way.sharding
    if way.parts is None:
        raise AssertionError("no exchange was planned for it")
    arrays = take_arrays(read if isinstance(read, list) else [read], way, key)
    return PartedLeaf(LeafForm(way.shape, stored_dtype_of(way), sharding, way.parts), arrays)


def exchange_parts(leaves: Sequence[PartedLeaf], run: Runner) -> list[jax.Array]:
    """Return the leaves where they are wanted; all processes have to call this with the same leaves.

    Args:
        leaves: whose arrays are let go on the way.
        run: runs what needs all processes.
    """
    result: list[Any] = [None] * len(leaves)
    groups: dict[tuple[jax.Device, ...], list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault(tuple(leaf.form.sharding.mesh.devices.flat), []).append(number)
    for numbers in groups.values():
        some = [leaves[number] for number in numbers]
        for number, array in zip(numbers, _exchange_group(some, run), strict=True):
            result[number] = array
    return result


def _exchange_group(leaves: Sequence[PartedLeaf], run: Runner) -> list[jax.Array]:
    """Exchange leaves on the same devices."""
    if not leaves[0].form.sharding.addressable_devices:
        return [without_shards(leaf.form.shape, leaf.form.dtype, leaf.form.sharding) for leaf in leaves]
    alike: dict[LeafForm, list[int]] = {}
    for number, leaf in enumerate(leaves):
        alike.setdefault(leaf.form, []).append(number)
    batches = [(form, batch) for form, numbers in alike.items() for batch in _batches(numbers)]
    # Compiled before anything is exchanged: what comes after is awaited with a deadline.
    programs = [_program(form, len(batch)) for form, batch in batches]
    before = [_on_devices(leaf) for leaf in leaves]

    def work() -> dict[int, jax.Array]:
        found: dict[int, jax.Array] = {}
        for program, (_, batch) in zip(programs, batches, strict=True):
            found |= zip(batch, program(*(before[number] for number in batch)), strict=True)
        for array in found.values():
            array.block_until_ready()
        return found

    after = run(work)
    return [_relabel(after[number], leaf.form.sharding) for number, leaf in enumerate(leaves)]


def _batches(numbers: list[int]) -> list[list[int]]:
    """Return runs of as many as one program takes, and the rest one by one."""
    whole = len(numbers) - len(numbers) % _TOGETHER
    runs = [numbers[start : start + _TOGETHER] for start in range(0, whole, _TOGETHER)]
    return runs + [[number] for number in numbers[whole:]]


def _relabel(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """Return the same shards under the very sharding that was asked for, whose mesh may be of another kind."""
    if array.sharding == sharding:
        return array
    shards = [shard.data for shard in shards_of(array)]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


# ------------------------------------------------------------------------------------------------------------- before


@functools.lru_cache(maxsize=1024)
def _reading_mesh(sharding: NamedSharding, axes: int, axis: int) -> tuple[Mesh, tuple[str, ...], Grid]:
    """Return a mesh of the wanted devices, its axes in the order in which they cut a leaf's axis, and its grid."""
    if (grid := grid_of(sharding, axes)) is None:
        raise AssertionError(f"parts for {sharding} were never planned")
    names = sharding.mesh.axis_names
    # Its own, since that of the user may have axes that XLA must not decide about.
    return Mesh(sharding.mesh.devices, names), tuple(names[number] for number in grid.order(axis)), grid


@functools.lru_cache(maxsize=1024)
def _own_places(sharding: NamedSharding, axes: int, axis: int) -> tuple[tuple[int, jax.Device], ...]:
    """Return the parts that devices of this process have, with the devices."""
    mesh, names, _ = _reading_mesh(sharding, axes, axis)
    numbers = [mesh.axis_names.index(name) for name in names]
    devices = np.transpose(mesh.devices, numbers).reshape(-1)
    own = sharding.addressable_devices
    return tuple((place, device) for place, device in enumerate(devices) if device in own)


def _on_devices(leaf: PartedLeaf) -> jax.Array:
    """Put the parts on their devices, as one array of unsigned integers with zeros around the leaf."""
    form, parts = leaf.form, leaf.form.parts
    arrays, leaf.arrays = leaf.arrays[::-1], []
    carrier, item = _carrier(form.dtype)
    lengths = [*form.shape, *item]
    lengths[parts.axis] = parts.rows
    nothing = np.zeros(lengths, carrier)
    held: list[NDArray[Any]] = []
    places = _own_places(form.sharding, len(form.shape), parts.axis)
    for place, _ in places:
        start, stop = parts.rows_of(place)
        part = nothing if start == stop else _as_carrier(arrays.pop(), carrier)
        if 0 < stop - start < parts.rows:
            room = np.zeros(lengths, carrier)
            room[(slice(None),) * parts.axis + (slice(0, stop - start),)] = part
            part = room
        held.append(part)
    shards = jax.device_put(held, [device for _, device in places])
    return jax.make_array_from_single_device_arrays(form.aval.shape, form.aval.sharding, shards)


def _carrier(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype that items travel in, and how many of them make an item, as a shape."""
    if dtype.name in _NARROW:
        return np.dtype(_NARROW[dtype.name]), ()
    if dtype.kind == "c":
        return np.dtype(f"u{dtype.itemsize // 2}"), (2,)
    return np.dtype(f"u{dtype.itemsize}"), ()


def _as_carrier(array: NDArray[Any], carrier: np.dtype[Any]) -> NDArray[Any]:
    if array.dtype.name in _NARROW:
        return array.astype(carrier)
    flat = np.ascontiguousarray(array)
    return flat[..., None].view(carrier) if array.dtype.kind == "c" else flat.view(carrier)


# -------------------------------------------------------------------------------------------------------- the program


@dataclasses.dataclass(frozen=True, slots=True)
class LeafForm:
    """What a program has to know of a leaf."""

    shape: tuple[int, ...]
    """Global shape."""
    dtype: np.dtype[Any]
    """Of the items."""
    sharding: NamedSharding
    """Where it shall lie."""
    parts: Parts
    """Which rows each device has."""

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """What the program takes: the parts end to end."""
        axis = self.parts.axis
        carrier, item = _carrier(self.dtype)
        lengths = [*self.shape, *item]
        lengths[axis] = self.parts.padded
        mesh, names, _ = _reading_mesh(self.sharding, len(self.shape), axis)
        cut = NamedSharding(mesh, spec_of(*(None,) * axis, names))
        taken: jax.ShapeDtypeStruct = jax.ShapeDtypeStruct(lengths, carrier, sharding=cut)  # type: ignore[no-untyped-call]
        return taken

    def wanted(self, *, gathered: bool) -> NamedSharding:
        """Return how it is cut when other axes are as they are wanted; and when this axis has been gathered too."""
        mesh, names, grid = _reading_mesh(self.sharding, len(self.shape), self.parts.axis)
        cut: list[Any] = [tuple(mesh.axis_names[number] for number in some) or None for some in grid.spec]
        others = sum(len(some) for axis, some in enumerate(grid.spec) if axis != self.parts.axis)
        if not gathered:
            cut[self.parts.axis] = names[: len(names) - others] or None
        return NamedSharding(mesh, spec_of(*cut))


@functools.lru_cache(maxsize=256)
def _program(form: LeafForm, count: int) -> Callable[..., Any]:
    """Return what takes the parts of so many leaves of one form, end to end, and returns them where they are wanted."""

    def work(*arrays: jax.Array) -> list[jax.Array]:
        return [_move(array, form) for array in arrays]

    moved = jax.jit(work, out_shardings=[form.wanted(gathered=True)] * count)
    return moved.lower(*[form.aval] * count).compile()


def _move(array: jax.Array, form: LeafForm) -> jax.Array:
    """Cut off the padding, exchange, gather what is replicated, and make items of carriers."""
    parts, axis = form.parts, form.parts.axis
    halfway = form.wanted(gathered=False)
    if parts.first or 100 * parts.padded > _LONG_PERCENT * parts.length:
        mesh = halfway.mesh
        names = halfway.spec[axis] or ()
        # jax gives back a tuple of one name as the name itself.
        count = math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
        even = -(-parts.length // count) * count
        start = parts.first * parts.rows
        array = jax.lax.slice_in_dim(array, start, min(start + even, parts.padded), axis=axis)
        if missing := even - array.shape[axis]:
            array = jnp.pad(array, [(0, missing if at == axis else 0) for at in range(array.ndim)])
    for sharding in (halfway, form.wanted(gathered=True)):
        array = jax.lax.with_sharding_constraint(array, sharding)  # type: ignore[no-untyped-call]
    array = jax.lax.slice_in_dim(array, 0, parts.length, axis=axis)
    return _items(array, form.dtype)


def _items(array: jax.Array, dtype: np.dtype[Any]) -> jax.Array:
    if dtype == np.bool_:
        return array != 0
    if dtype.name in _NARROW:
        return array.astype(dtype)
    if dtype.kind == "c":
        halves = jax.lax.bitcast_convert_type(array, np.dtype(f"f{dtype.itemsize // 2}"))
        return jax.lax.complex(halves[..., 0], halves[..., 1])
    return jax.lax.bitcast_convert_type(array, dtype)
