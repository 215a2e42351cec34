"""What a save shares with an older checkpoint: boxes are compared, and files that have enough of them get names here.

An array that was saved before, and that nobody can have written into since, is compared by the digest noted then; where
a file with all of it is shared, it is not even copied from its device. Any other is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import weakref
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
import xxhash

from treering._arrays.host import (
    cut_box,
    digest_arrays,
    has_own_memory,
    host_blocks,
    only_jax_writes,
    parts_of,
    to_host,
)
from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import cut_by_bytes
from treering._arrays.outgoing import DescribedLeaves, HeldBox, LeafSources, SaveLayout
from treering._background.saves import reword
from treering._background.writer import Watch
from treering._checkpoint.detect import Form, detect
from treering._checkpoint.save_options import Increment
from treering._checkpoint.source import check_data_file, open_checkpoint
from treering._checkpoint.transaction import AttemptFiles
from treering._format.document import data_name, parse_index, read_digest
from treering._format.index import DIGEST_BYTES, DataFile, Index, LeafType
from treering._format.safetensors import Row
from treering._plan import increment as shares
from treering._plan.increment import NO_BOXES, SHARED, OlderBoxes, Share
from treering._store.api import Reader, Store, Version
from treering._store.crew import map_together
from treering._store.failures import naming_file
from treering._store.open_folder import OpenFolder, find_index_at
from treering._tree.flatten import Flattened
from treering._values.boxes import Box, contains, whole
from treering._values.checksums import SMALLEST_BLOCK, block_bytes, block_checksums, digest, pack_checksums
from treering._values.keys import split_key
from treering._values.telemetry import phase
from treering.errors import NotFoundError, TreeringError, UnsupportedError

_KEPT: Final = 2
_RUN_BYTES: Final = 256 << 10
_TWO_THREADS_FROM: Final = 4 << 20
_INDEXES: Final[list[tuple[str, Index]]] = []


def remember_index(document: bytes, index: Index) -> None:
    """Keep the index of a checkpoint that is likely to be the next one's base; its arrays are not kept."""
    index = dataclasses.replace(index, structure=(), values={}, metadata={})  # what only the program has
    _INDEXES[:] = [(read_digest(document) or "", index), *tuple(_INDEXES)][:_KEPT]


def _index_in(document: bytes) -> Index:
    """Return what a document says, which is not parsed again where this process has just written it."""
    said = read_digest(document)
    known = next((index for text, index in tuple(_INDEXES) if text == said), None)
    return parse_index(document) if known is None else known


def split_digests(table: bytes) -> list[bytes]:
    """Return digests that lie end to end."""
    return [table[start : start + DIGEST_BYTES] for start in range(0, len(table), DIGEST_BYTES)]


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """Arrays of a tree into which nobody but jax can write, and what this process knows of their bytes.

    The arrays are known by weak references: neither they nor their memory live longer for it.
    """

    arrays: Mapping[int, weakref.ref[jax.Array]] = dataclasses.field(default_factory=dict)
    """Leaf number -> the array."""
    digests: Mapping[Row, bytes] = dataclasses.field(default_factory=dict)
    """The digests of boxes that an earlier save noted of these very arrays."""
    left: Collection[int] = ()
    """The leaves that can be left on their devices: all that this process writes of them lies in files to be shared."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnBoxes:
    """The boxes of a new tree that one process writes."""

    keys: Sequence[str]
    """Key text of each leaf."""
    leaves: DescribedLeaves
    """The leaves."""
    rows: Sequence[Row]
    """The boxes, by leaf and by place."""
    held: Held = Held()
    """What is known of the arrays."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OlderCheckpoint:
    """A checkpoint whose files may be shared, as its index says; nothing of it is open."""

    path: Path
    """Its folder."""
    index: Index
    """Its index."""
    leaf: Sequence[int]
    """The leaf of each of its boxes."""
    box: Sequence[Box | None]
    """Which part of it each box is; None for the whole of it."""
    boxes: OlderBoxes
    """Where they lie."""

    @staticmethod
    def find(increment: Increment, attempt: str | None = None) -> OlderCheckpoint | None:
        """Return the checkpoint to share files with, None for none.

        Args:
            increment: says which ones there are.
            attempt: that of the one which process 0 has found; None for any.

        Raises:
            UnsupportedError: it has to be there, and is of another form.
            TreeringError: it has to be there, and is not, or cannot be read.
        """
        for path in increment.find():
            try:
                with OpenFolder(path) as folder, naming_file(path / "treering.json"):
                    index = _index_in(folder.read_index())
            except TreeringError as error:
                if increment.required:
                    raise _refused_base(path, error) from error
                continue
            if attempt is not None and index.attempt != attempt:
                continue
            older = _older_boxes(path, index)
            return None if older.ends_chain(increment) else older
        return None

    def ends_chain(self, increment: Increment) -> bool:
        """Tell whether the save after this one is to write everything."""
        return increment.full_every is not None and max(1, self.index.saves) >= increment.full_every

    def places_of(self, own: OwnBoxes) -> Sequence[int]:
        """Return the number of each box of a new tree here, -1 for one that is not there."""
        index, leaves = self.index, own.leaves
        dtypes = [(kind.dtype, kind.shape) for kind in leaves.types]
        own_dtypes = list(map(dtypes.__getitem__, leaves.leaf_types))
        dtypes = [(kind.dtype, kind.shape) for kind in index.types]
        there = list(map(dtypes.__getitem__, index.leaf_types))
        if index.digests and index.keys == own.keys and there == own_dtypes:
            rows = list(zip(index.chunks.leaf, index.chunks.box, strict=True))
            if rows == own.rows:
                return range(len(rows))
        # A whole leaf has its shape in the header of its file, a box has its own.
        theirs = zip(self.leaf, self.box, strict=True)
        numbers = {
            (index.keys[leaf], *(there[leaf] if box is None else (there[leaf][0], box))): number
            for number, (leaf, box) in enumerate(theirs)
        }
        return [
            numbers.get((own.keys[leaf], *(own_dtypes[leaf] if box is None else (own_dtypes[leaf][0], box))), -1)
            for leaf, box in own.rows
        ]


def _refused_base(path: Path, error: TreeringError) -> TreeringError:
    """Return the error for a base that cannot be one."""
    with contextlib.suppress(TreeringError):
        if (form := detect(path)) is not Form.CHECKPOINT:
            hint = (
                "pass the folder of one step" if form is Form.RUN else "save the tree to a folder once, and pass that"
            )
            return UnsupportedError(f"base is {os.fspath(path)!r}, which is no checkpoint but: {form.value}", hint=hint)
    return reword(error, "no files can be shared with base=")


def _older_boxes(path: Path, index: Index) -> OlderCheckpoint:
    """Return a checkpoint by its boxes: its chunks; those that no digests were noted of are cut as a new tree is."""
    chunks = index.chunks
    if any(block_bytes(nbytes) != block for nbytes, block in set(zip(chunks.nbytes, chunks.block, strict=True))):
        index = dataclasses.replace(index, digests=b"")  # its checksums are of other blocks than those of a new one
    columns: Sequence[Sequence[Any]] = (chunks.leaf, chunks.box, chunks.file, chunks.nbytes, chunks.offset)
    if not index.digests:
        cut: list[tuple[Any, ...]] = []
        for leaf, whole_box, file, _, start in zip(*columns, strict=True):
            rows = shares.cut_rows([(0, whole_box)], [index.type_of(leaf)], [0])
            sizes = shares.row_bytes(rows, [index.type_of(leaf)], [0])
            starts = itertools.accumulate(sizes, initial=start)
            cut += ((leaf, box, file, *place) for (_, box), *place in zip(rows, sizes, starts, strict=False))
        columns = list(zip(*cut, strict=True)) or [()] * 5
    leaves, places, files, nbytes, offset = columns
    file_bytes = [entry.nbytes - entry.header for entry in index.files]
    boxes = OlderBoxes(file=files, nbytes=nbytes, offset=offset, file_bytes=file_bytes)
    return OlderCheckpoint(path=path, index=index, leaf=leaves, box=places, boxes=boxes)


class OlderFacts:
    """The digests and the checksums of the boxes of an older checkpoint: those in its index, or of the bytes it has.

    Args:
        older: the checkpoint.
        store: its place.
        files: closes what is opened there: a box is read where no digest was noted.
    """

    def __init__(self, older: OlderCheckpoint, store: Store, files: contextlib.ExitStack) -> None:
        self._index, self._boxes, self._store, self._files = older.index, older.boxes, store, files
        self._table = split_digests(older.index.digests)
        self._starts = older.index.chunks.first_blocks()
        self._read = functools.cache(self._read)  # type: ignore[method-assign]
        self._reader = functools.cache(self._reader)  # type: ignore[method-assign]

    @property
    def noted(self) -> bool:
        """Whether its index has them."""
        return bool(self._table)

    def digest_of(self, number: int) -> bytes:
        """Return the digest of a box; none where it cannot be read."""
        if self._table:
            return self._table[number]
        try:
            return self._read(number)[0]
        except TreeringError:
            return b""

    def checksums_of(self, number: int, count: int = 1) -> array[int]:
        """Return the checksums of the blocks of some boxes in a row, of which each has a digest."""
        if self._table:
            return self._index.checksums[self._starts[number] : self._starts[number + count]]
        return array("Q", itertools.chain.from_iterable(self._read(n)[1] for n in range(number, number + count)))

    def _read(self, number: int) -> tuple[bytes, array[int]]:
        boxes = self._boxes
        data = self._reader(boxes.file[number]).read(boxes.offset[number], boxes.nbytes[number])
        return xxhash.xxh3_128_digest(data), block_checksums(memoryview(data))

    def _reader(self, file: int) -> Reader:
        return self._files.enter_context(self._store.open_file(self._index.files[file].name))


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
        arrays = {index.keys[number]: ref for number, ref in held.arrays.items()}
        others = [noted for noted in tuple(_NOTED) if noted[0].path != path]
        _NOTED[:] = [(_older_boxes(path, index), arrays, _version_at(path)), *others][:_KEPT]


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


def share_files(
    folder: AttemptFiles,
    own: OwnBoxes,
    older: OlderCheckpoint | None,
    increment: Increment,
    watch: Watch,
    *,
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
    found: dict[int, tuple[DataFile, bytes]] = {}
    boxes = NO_BOXES if older is None else older.boxes
    sizes = shares.row_bytes(rows, leaves.types, leaves.leaf_types)
    # Should it be removed meanwhile, or be damaged, what it has is written.
    with contextlib.ExitStack() as files:
        if older is not None and (store := _open_older(older, files)) is not None:
            facts = OlderFacts(older, store, files)
            with phase("save/compare"):
                same = _compare(own, older, facts, sizes, watch)
            wanted = shares.choose_shared(same, boxes)
            planned = len(wanted) + len(shares.gather_files(shares.states_of(same, boxes, wanted), sizes))
            found = _link_files(folder, store, older, wanted, (first, count or planned))
    states = shares.states_of(same, boxes, found)
    leaves = _fetch_left(own, states, increment)
    linked = {} if facts is None else _with_digests(found, same, boxes, facts)
    share = Share(process=process, first=first, rows=rows, states=states, numbers=same, linked=linked)
    count = count or len(linked) + len(shares.gather_files(states, sizes))
    layout = lay_out(folder.attempt, own.keys, leaves, [share], older=boxes, count=count)
    return SharedFiles(share=share, layout=layout, facts=facts)


def _open_older(older: OlderCheckpoint, files: contextlib.ExitStack) -> Store | None:
    """Return the place of an older checkpoint, None where it is gone or cannot be opened."""
    with contextlib.suppress(TreeringError):
        return files.enter_context(OpenFolder(older.path)).store
    return None


def _compare(own: OwnBoxes, older: OlderCheckpoint, facts: OlderFacts, sizes: Sequence[int], watch: Watch) -> list[int]:
    """Return the number of the box in the older checkpoint that has the bytes of each, -1 for none."""
    same, places, nbytes = [-1] * len(own.rows), older.places_of(own), older.boxes.nbytes
    wanted = [at for at, number in enumerate(places) if number >= 0 and nbytes[number] == sizes[at]]
    held = own.held.digests
    known = [at for at in wanted if own.rows[at] in held] if held else []
    unknown = sorted({*wanted}.difference(known)) if known else wanted
    noted = [(known, [held[own.rows[at]] for at in known])]
    for rows, digests in itertools.chain(noted, _digests_of(own, unknown, sizes, places, facts)):
        watch.move()
        for at, found in zip(rows, digests, strict=True):
            if facts.digest_of(places[at]) == found:  # what cannot be read has none, and is written
                same[at] = places[at]
    return same


def _digests_of(
    own: OwnBoxes, wanted: Sequence[int], sizes: Sequence[int], places: Sequence[int], facts: OlderFacts
) -> Iterator[tuple[Sequence[int], Sequence[bytes | None]]]:
    """Yield some boxes, and their digests: of small ones, many are read together.

    One whose first block has another checksum than the older box has changed: it has none, and is not read to its end.
    """
    small = [at for at in wanted if sizes[at] <= SMALLEST_BLOCK]
    alone = [at for at in wanted if sizes[at] > SMALLEST_BLOCK]
    for run in map(small.__getitem__, cut_by_bytes([sizes[at] for at in small], _RUN_BYTES)):
        arrays = own.leaves.data_of_all(*zip(*map(own.rows.__getitem__, run), strict=True))
        if (found := digest_arrays(arrays)) is None:
            alone += run
        else:
            yield run, found

    def read(at: int) -> bytes | None:
        array_, state, block = own.leaves.data_of(*own.rows[at]), xxhash.xxh3_128(), block_bytes(sizes[at])
        for number, piece in enumerate(host_blocks(array_, 0, array_.size)):
            compared = number == 0 and facts.noted and len(piece) >= block
            if compared and xxhash.xxh3_64_intdigest(piece[:block]) != facts.checksums_of(places[at])[0]:
                return None
            state.update(piece)
        return state.digest()

    others = 1 if sum(map(sizes.__getitem__, alone)) >= _TWO_THREADS_FROM else 0
    yield from (([at], [found]) for at, found in zip(alone, map_together(read, alone, others), strict=True))


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
    kept = [number for number in same if number >= 0]
    used, there = (Counter(map(boxes.file.__getitem__, numbers)) for numbers in (kept, range(len(boxes.file))))
    found: dict[int, DataFile] = {}
    for file, (entry, header) in linked.items():
        # Where all is used, it is what the older index says, and what the header was compared with.
        if used[file] < there[file] or entry.digest is None or not facts.noted:
            rows = sorted((boxes.offset[n], boxes.nbytes[n], n) for n in kept if boxes.file[n] == file)
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
