"""Leaves that are wanted by several processes: which of them reads what, and what they agree on before they begin."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import jax
import xxhash

from treering._arrays import exchange
from treering._arrays.delivered import Delivery
from treering._arrays.exchange import can_exchange, grid_of, part_boxes
from treering._arrays.host import host_blocks
from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import split_by_bytes
from treering._arrays.source import Source
from treering._codec.documents import json_text
from treering._format.index import leaf_bytes
from treering._format.leaf_values import encode_value
from treering._plan.exchange import Grid
from treering._plan.load import StoredLeaf, plan_loads
from treering._values.boxes import Box, box_of_slices, size_of, whole
from treering._values.checksums import SMALLEST_BLOCK, digest, pack_checksums

Wanted: TypeAlias = tuple[tuple[Box, ...], ...]
"""Process -> the boxes that it wants."""

# Leaves between two meetings, at most: what one leaf needs beside its bytes is held for all of them.
_MOST_LEAVES: Final = 1024
# Of a tree without checksums so many leaves are compared, so many items of each, as long as that costs so few bytes.
_SAMPLED: Final = 4096
_SPREAD: Final = 0x9E3779B1
_SAMPLE_ITEMS: Final = 1024
_MOST_SAMPLED: Final = 64 << 20


def spans(sharding: Any) -> bool:
    """Tell whether the devices of a sharding belong to several processes."""
    return sharding is not None and len(_owners(sharding, exchange.process_of)) > 1


def divide(source: Source, deliveries: Iterable[Delivery], processes: int) -> None:
    """Plan who reads what of the leaves that lie over several processes, and turn their requests into that.

    What a process counts of a leaf from here on is what it reads itself.
    """
    joint = [delivery for delivery in deliveries if spans(delivery.sharding)]
    leaves = list(_describe_stored(source, joint, processes))
    items: dict[int, int] = {}
    for delivery, leaf, plan in zip(joint, leaves, plan_loads(leaves, processes), strict=True):
        delivery.dtype = source.arrays.dtype_of(delivery.request.leaf)
        if plan.parts is not None:
            sharding: Any = delivery.sharding
            delivery.parts = plan.parts
            delivery.request = ReadRequest(delivery.request.leaf, part_boxes(delivery.shape, sharding, plan.parts))
        # Of leaves that are stored and wanted alike, this process reads alike, unless they take turns.
        if plan.parts is not None or (count := items.get(id(leaf))) is None:
            count = items[id(leaf)] = sum(map(size_of, delivery.request.boxes))
        delivery.nbytes = count * delivery.dtype.itemsize


def _describe_stored(source: Source, joint: Iterable[Delivery], processes: int) -> Iterator[StoredLeaf]:
    """Yield how each leaf is stored and wanted, those that are alike as one object."""
    known: dict[tuple[object, ...], StoredLeaf] = {}
    grids: dict[tuple[object, ...], Grid | None] = {}
    for delivery in joint:
        number, axes = delivery.request.leaf, len(delivery.shape)
        alike = (source.index.leaf_types[number], delivery.fit.dtype, delivery.sharding)
        if alike not in grids:
            can = can_exchange(delivery.fit.dtype or source.arrays.dtype_of(number))
            grids[alike] = grid_of(delivery.sharding, axes) if can else None
        chunks = source.arrays.stored_chunks(number) if grids[alike] is not None else ()
        if (leaf := known.get((*alike, id(chunks)))) is None:
            leaf = known[(*alike, id(chunks))] = StoredLeaf(
                shape=delivery.shape,
                itemsize=source.arrays.dtype_of(number).itemsize,
                chunks=chunks,
                wanted=_wanted_boxes(delivery.sharding, delivery.shape, processes),
                grid=grids[alike],
            )
        yield leaf


def rounds(deliveries: Sequence[Delivery], processes: int, most: int) -> Iterator[list[Delivery]]:
    """Yield runs of exchanged leaves of which no process gets more than about ``most`` bytes; the same on all."""

    def nbytes(delivery: Delivery) -> int:
        wanted = _wanted_boxes(delivery.sharding, delivery.shape, processes)
        return _largest(wanted) * (delivery.dtype.itemsize if delivery.dtype else 1)

    return (some for some, _ in split_by_bytes(deliveries, nbytes, most, longest=_MOST_LEAVES))


def plan_digest(batches: Iterable[Sequence[Delivery]]) -> str:
    """Return a digest of what all processes have to want alike: leaves that lie over several, and how."""
    lines = []
    known: dict[tuple[object, ...], str] = {}
    for number, batch in enumerate(batches):
        for delivery in batch:
            if not spans(delivery.sharding):
                continue
            alike = (delivery.fit, delivery.dtype, delivery.shape, delivery.sharding)
            if (how := known.get(alike)) is None:
                wanted = _sharding_digest(delivery.sharding, delivery.shape)
                dtype = delivery.fit.dtype or delivery.dtype
                how = known[alike] = f"{delivery.fit.kind} {dtype} {delivery.shape} {wanted}"
            cut = delivery.parts and (delivery.parts.axis, delivery.parts.rows, delivery.parts.first)
            lines.append(f"{number} {delivery.key} {how} {cut}")
    return digest(["\n".join(lines).encode("utf-8", "surrogatepass")])


def state_digest(source: Source) -> str:
    """Return a digest of what was opened, so that processes can tell whether all of them opened the same.

    Where there are no checksums, Python's values count, and of arrays what the store says of the files, or else some of
    the numbers, all those of small arrays: two hosts may have copies of one file, which are of different times.

    Raises:
        CorruptError, NotFoundError, StoreError: as reading does.
    """
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
    return not (source.index.verified or _versions(source))


def _versions(source: Source) -> list[str]:
    return [] if source.opened is None or source.index.verified else source.opened.tokens()


def _read_samples(source: Source) -> Iterator[bytes]:
    """Yield some numbers from the middle of each leaf, of a small one all of them.

    Where all leaves cost too much, those of leaves here and there. What lies in the others is read by one process each.
    """
    index = source.index
    stored = [leaf for leaf, number in enumerate(index.leaf_types) if index.types[number].stored]
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


def digest_common(state: xxhash.xxh3_128, deliveries: Iterable[Delivery], *, processes: int) -> None:
    """Add to a digest what was read of those leaves of which every process wants the same, and reads it itself."""
    own = (one for one in deliveries if one.parts is None and spans(one.sharding))
    common = (one for one in own if len(set(_wanted_boxes(one.sharding, one.shape, processes))) == 1)
    for array in itertools.chain.from_iterable(one.request.arrays for one in common):
        for piece in host_blocks(array, 0, array.size):
            state.update(piece)


# ------------------------------------------------------------------------------------------------------- of shardings


@functools.lru_cache(maxsize=1024)
def _owners(sharding: jax.sharding.Sharding, owner: Any) -> frozenset[int]:
    return frozenset(map(owner, sharding.device_set))


def _wanted_boxes(sharding: Any, shape: tuple[int, ...], processes: int) -> Wanted:
    return _wanted_boxes_by(sharding, shape, processes, exchange.process_of)


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
