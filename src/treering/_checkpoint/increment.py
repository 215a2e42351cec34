"""What a save shares with an older checkpoint: boxes are compared, and files that have enough of them get names here.

An array that was saved before, and that nobody can have written into since, is compared by the digest noted then; where
a file with all of it is shared, it is not even copied from its device. Any other is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from array import array
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import jax
import numpy as np
import xxhash

from treering._arrays.host import cut_box, has_own_memory, host_blocks, only_jax_writes, parts_of, to_host
from treering._arrays.incoming import ReadRequest
from treering._arrays.outgoing import DescribedLeaves, HeldBox, LeafSources, SaveLayout
from treering._background.writer import Watch
from treering._checkpoint.compare import (
    Comparison,
    Held,
    OlderCheckpoint,
    OlderFacts,
    OwnBoxes,
    older_boxes,
    split_digests,
)
from treering._checkpoint.save_options import Increment
from treering._checkpoint.source import check_data_file, open_checkpoint
from treering._checkpoint.transaction import AttemptFiles
from treering._format.document import data_name
from treering._format.index import DataFile, Index, LeafType
from treering._plan import increment as shares
from treering._plan.increment import BEGUN, NO_BOXES, SHARED, OlderBoxes, Share
from treering._store.api import Store, Version
from treering._store.open_folder import OpenFolder, find_index_at
from treering._store.resolve import absolute
from treering._tree.flatten import Flattened
from treering._values.boxes import Box, contains, whole
from treering._values.checksums import digest, pack_checksums
from treering._values.keys import split_key
from treering._values.telemetry import phase
from treering.errors import NotFoundError, TreeringError

_KEPT: Final = 2


# ------------------------------------------------------------------------------------ arrays that were saved before


_NOTED: Final[list[tuple[OlderCheckpoint, dict[str, weakref.ref[jax.Array]], Version]]] = []
"""What this process saved last, as far as it wrote it, the arrays by the keys of their leaves, and that index there."""


def hold_arrays(flat: Flattened, own: OwnBoxes, increment: Increment, *, joint: bool = False) -> Held:
    """Return what is known of the arrays of a tree, before anything of it is read or copied.

    Args:
        flat: the tree.
        own: the boxes that this process writes.
        increment: says which older checkpoints there are.
        joint: whether other processes take part: then only of arrays that lie over them is it certain who writes them.
    """
    if "jax" not in flat.kinds or not has_own_memory():
        return Held()
    numbers = own.leaves.spread if joint else own.leaves.sources
    found = {n: flat.leaves[n] for n in numbers if flat.kinds[n] == "jax"}
    # Shardings are few objects, which live as long as the arrays do.
    alike = {id(leaf.sharding): leaf for leaf in found.values()}
    certain = {number for number, leaf in alike.items() if only_jax_writes(leaf)}
    arrays = {n: weakref.ref(leaf) for n, leaf in found.items() if leaf.size and id(leaf.sharding) in certain}
    path = next(iter(increment.find()), None) if arrays and _NOTED else None
    for older, noted, version in tuple(_NOTED):
        if older.path == path:
            there = {n for n in arrays if (ref := noted.get(own.keys[n])) is not None and ref() is flat.leaves[n]}
            same = [at if row[0] in there else -1 for row, at in zip(own.rows, older.places_of(own), strict=True)]
            table = split_digests(older.index.digests)
            digests = {row: table[at] for row, at in zip(own.rows, same, strict=True) if at >= 0}
            # Where another program has saved there since, what this one would share is gone already.
            is_there = version is not None and _version_at(path) == version
            if older.ends_chain(increment) or not is_there:
                return Held(arrays, digests)
            return Held(arrays, digests, shares.find_shared_leaves(own.rows, same, older.boxes))
    return Held(arrays)


def note_arrays(path: Path, index: Index, held: Held) -> None:
    """Keep what was found of arrays, for the next save of them.

    Args:
        path: the new checkpoint, which is committed.
        index: its index, as far as this process wrote it.
        held: its arrays.
    """
    if held.arrays:
        with contextlib.suppress(TreeringError):  # the current folder is gone
            path = absolute(path)  # as that of a base is
        arrays = {index.keys[number]: ref for number, ref in held.arrays.items()}
        others = [noted for noted in tuple(_NOTED) if noted[0].path != path]
        _NOTED[:] = [(older_boxes(path, index), arrays, _version_at(path)), *others][:_KEPT]


def _version_at(path: Path) -> Version | None:
    """Return the version of the index that is at a path now; None where there is none, or that cannot be told."""
    with contextlib.suppress(TreeringError):
        return None if (found := find_index_at(path)) is None else found.version
    return None


def _fetch_left(own: OwnBoxes, states: Sequence[int], increment: Increment) -> DescribedLeaves:
    """Return the leaves with the boxes that were left on their devices, and have to be written after all.

    Raises:
        NotFoundError: an array is gone, and so is the checkpoint that has its bytes.
    """
    leaves, held, found = own.leaves, own.held, dict[int, list[HeldBox]]()
    for (leaf, box), state in zip(own.rows, states, strict=True):
        if state != SHARED and leaf in held.left and leaves.sources[leaf][0].data is None:
            kind = leaves.types[leaves.leaf_types[leaf]]
            place = box or whole(kind.shape or ())
            data = _from_device(held.arrays[leaf](), place)
            if data is None:
                data = _from_older(own.keys[leaf], kind, place, held.digests.get((leaf, box), b""), increment)
            found.setdefault(leaf, []).append(HeldBox(place, data))
    if not found:
        return leaves
    parted = {**leaves.sources.parted, **{leaf: tuple(boxes) for leaf, boxes in found.items()}}
    return dataclasses.replace(leaves, sources=LeafSources(leaves.sources.whole, parted))


def _from_device(data: jax.Array | None, box: Box) -> Any:
    """Return a copy of a box of an array, None where the array is gone."""
    if data is not None:
        with contextlib.suppress(RuntimeError):  # it was deleted, before or meanwhile
            for there, part in parts_of(data):
                if contains(there, box):
                    return np.array(to_host(cut_box(part, there, box)))
    return None


def _from_older(key: str, kind: LeafType, box: Box, wanted: bytes, increment: Increment) -> Any:
    """Return a box out of an older checkpoint that has the bytes with that digest."""
    for path in increment.find():
        with contextlib.suppress(TreeringError), contextlib.ExitStack() as files:
            source = open_checkpoint(path, files, mapped=False)
            there = {one: number for number, one in enumerate(source.index.keys)}.get(key)
            if there is None or (known := source.index.type_of(there)).dtype != kind.dtype or known.shape != kind.shape:
                continue  # another tree was saved there meanwhile
            source.arrays.read([request := ReadRequest(there, [box])])
            (data,) = request.arrays
            if xxhash.xxh3_128_digest(b"".join(host_blocks(data, 0, data.size))) == wanted:
                return data
    what = "the array was deleted, probably donated, before it was written, and no older checkpoint has its bytes"
    hint = "keep the checkpoint that files are shared with until the save has ended"
    raise NotFoundError(what, path=split_key(key), hint=hint)


# --------------------------------------------------------------------------------------------------- files are shared


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedFiles:
    """What a process shares, and where it writes what it does not share."""

    share: Share
    """Its boxes."""
    layout: SaveLayout
    """Where they lie; the chunks are its boxes, in their order."""
    facts: OlderFacts | None
    """What is known of the boxes in shared files; None where nothing is shared."""
    begun: Begun | None
    """What was written while the rest was compared."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The files that were written while the rest was compared."""

    rows: Sequence[int]
    """The boxes in them."""
    layout: SaveLayout
    """Where they lie; the chunks are these boxes."""
    checksums: array[int]
    """The checksums of their blocks."""
    digests: Mapping[int, bytes]
    """The digest of each chunk."""


Write: TypeAlias = "Callable[[SaveLayout, MutableMapping[int, bytes]], array[int]]"
"""Writes the files of a layout, notes the digests of its chunks, and returns the checksums of their blocks."""


def share_files(
    folder: AttemptFiles,
    own: OwnBoxes,
    older: OlderCheckpoint | None,
    increment: Increment,
    watch: Watch,
    *,
    write: Write,
    process: int = 0,
    first: int = 0,
    count: int | None = None,
) -> SharedFiles:
    """Share the files of an older checkpoint that have enough of the new boxes, and lay out the others.

    Args:
        folder: where to.
        own: the boxes of this process.
        older: the older checkpoint, if there is one.
        increment: says which older checkpoints there are.
        watch: watches the save.
        write: writes what is known to have changed while the rest is compared.
        process: this process.
        first: the number of its first file.
        count: how many files there are at most; None where this process is alone.

    Raises:
        StoreError: the system refused.
        NotFoundError: an array that was not copied is gone, and so is the checkpoint that has its bytes.
    """
    rows, leaves = own.rows, own.leaves
    same = [-1] * len(rows)
    facts: OlderFacts | None = None
    begun: Begun | None = None
    found: dict[int, tuple[DataFile, bytes]] = {}
    boxes = NO_BOXES if older is None else older.boxes
    sizes = shares.row_bytes(rows, leaves.types, leaves.leaf_types)
    share = Share(process=process, first=first, rows=rows, states=(), numbers=(), linked={})
    # Should it be removed meanwhile, or be damaged, what it has is written.
    with contextlib.ExitStack() as files:
        if older is not None and (store := _open_older(older, files)) is not None:
            facts = OlderFacts(older, store, files)
            comparison = Comparison(own, older, facts, sizes, watch)
            most = count or shares.most_files(sum(sizes))
            begun = _compare(comparison, own, share, write, attempt=folder.attempt, count=most)
            count = count if begun is None else most
            wanted = shares.choose_shared(same := comparison.same, boxes)
            planned = len(wanted) + len(shares.gather_files(shares.states_of(same, boxes, wanted), sizes))
            at = first if begun is None else first + len(begun.layout.names)
            found = _link_files(folder, store, older, wanted, (at, count or planned))
    states = shares.states_of(same, boxes, found)
    for row in () if begun is None else begun.rows:
        states[row] = BEGUN
    leaves = _fetch_left(own, states, increment)
    linked = {} if facts is None else _with_digests(found, same, boxes, facts)
    share = dataclasses.replace(share, states=states, numbers=same, linked=linked)
    count = count or len(linked) + len(shares.gather_files(states, sizes))
    layout = lay_out(folder.attempt, own.keys, leaves, [share], older=boxes, count=count)
    return SharedFiles(share=share, layout=layout, facts=facts, begun=begun)


def _compare(
    comparison: Comparison, own: OwnBoxes, share: Share, write: Write, *, attempt: str, count: int
) -> Begun | None:
    """Compare all boxes; where it is worth it, write what is known to have changed meanwhile, in files of its own."""
    with phase("save/compare"):
        if not (changed := comparison.begin()):
            comparison.finish()
            return None
    early = dataclasses.replace(share, rows=[own.rows[at] for at in changed], states=[BEGUN] * len(changed))
    layout = lay_out(attempt, own.keys, own.leaves, [early], older=NO_BOXES, count=count)
    digests: dict[int, bytes] = {}
    checksums = comparison.finish_while(functools.partial(write, layout, digests))
    return Begun(rows=changed, layout=layout, checksums=checksums, digests=digests)


def _open_older(older: OlderCheckpoint, files: contextlib.ExitStack) -> Store | None:
    """Return the place of an older checkpoint, None where it is gone or cannot be opened."""
    with contextlib.suppress(TreeringError):
        return files.enter_context(OpenFolder(older.path)).store
    return None


def _link_files(
    folder: AttemptFiles, store: Store, older: OlderCheckpoint, wanted: Collection[int], numbered: tuple[int, int]
) -> dict[int, tuple[DataFile, bytes]]:
    """Give files of an older checkpoint names of the attempt, as far as that can be; return them by their old number.

    Each comes with its header; its digest is that of the older checkpoint.
    """
    linked: dict[int, tuple[DataFile, bytes]] = {}
    first, count = numbered
    for file in wanted:
        entry = older.index.files[file]
        name = data_name(folder.attempt, first + len(linked), count)
        if not folder.link_file(name, store, entry.name):
            continue
        try:
            with folder.open_linked(name) as data:
                check_data_file(older.index, file, data)
                linked[file] = dataclasses.replace(entry, name=name), data.read(0, entry.header)
        except TreeringError:  # it is damaged, or cannot be read
            folder.unlink(name)
    return linked


def _with_digests(
    linked: Mapping[int, tuple[DataFile, bytes]], same: Sequence[int], boxes: OlderBoxes, facts: OlderFacts
) -> dict[int, DataFile]:
    """Return shared files with the digests that they have here: over the header, and the checksums of what is used."""
    numbers, file_of = np.array(same, np.int64), np.array(boxes.file, np.int64)
    kept = numbers[numbers >= 0]
    used, there = (np.bincount(files, minlength=len(boxes.file_bytes)) for files in (file_of[kept], file_of))
    found: dict[int, DataFile] = {}
    for file, (entry, header) in linked.items():
        # Where all is used, it is what the older index says, and what the header was compared with.
        if used[file] < there[file] or entry.digest is None or not facts.noted:
            rows = sorted((boxes.offset[n], boxes.nbytes[n], n) for n in kept[file_of[kept] == file].tolist())
            table = b"".join(pack_checksums(facts.checksums_of(number)) for _, _, number in rows)
            entry = dataclasses.replace(entry, digest=digest([header, table]))  # noqa: PLW2901
        found[file] = entry
    return found


def lay_out(
    attempt: str, keys: Sequence[str], leaves: DescribedLeaves, parts: Sequence[Share], *, older: OlderBoxes, count: int
) -> SaveLayout:
    """Lay out the files of some processes that share files."""
    make, types = functools.partial(SaveLayout, leaves=leaves), (leaves.types, leaves.leaf_types)
    return shares.lay_out_shares(make, attempt, keys, *types, shares=parts, older=older, count=count)
