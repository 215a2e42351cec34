"""The boxes of a new tree beside those of an older checkpoint: which of them have the same bytes.

An older checkpoint is known by its index, which has the digests of its boxes. Its bytes are read where none were noted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import operator
import os
import weakref
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import jax
import numpy as np
import xxhash

from treering._arrays.host import digest_arrays, has_own_memory, host_blocks
from treering._arrays.jobs import cut_by_bytes
from treering._arrays.outgoing import DescribedLeaves
from treering._background.saves import reword
from treering._background.writer import UNWATCHED, Watch
from treering._checkpoint.detect import Form, detect
from treering._checkpoint.save_options import Increment
from treering._format.document import parse_index, read_digest
from treering._format.index import DIGEST_BYTES, Index
from treering._format.safetensors import Row
from treering._plan import increment as shares
from treering._plan.increment import OlderBoxes
from treering._store.api import Reader, Store
from treering._store.crew import FirstError, ThreadPool, map_together
from treering._store.failures import naming_file
from treering._store.open_folder import OpenFolder
from treering._values.boxes import Box
from treering._values.checksums import SMALLEST_BLOCK, block_bytes, block_checksums
from treering._values.telemetry import phase
from treering.errors import NotFoundError, TreeringError, UnsupportedError

T = TypeVar("T")

_KEPT: Final = 2
_RUN_BYTES: Final = 256 << 10
_MEANWHILE_FROM: Final = 4 << 20
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
            older = older_boxes(path, index)
            return None if older.ends_chain(increment) else older
        return None

    def ends_chain(self, increment: Increment) -> bool:
        """Tell whether the save after this one is to write everything."""
        return increment.full_every is not None and max(1, self.index.saves) >= increment.full_every

    def places_of(self, own: OwnBoxes) -> Sequence[int]:
        """Return the number of each box of a new tree here, -1 for one that is not there."""
        index, leaves = self.index, own.leaves
        own_dtypes = [(kind.dtype, kind.shape) for kind in leaves.types]
        dtypes = [(kind.dtype, kind.shape) for kind in index.types]
        alike = own_dtypes == dtypes and list(index.leaf_types) == list(leaves.leaf_types) and index.keys == own.keys
        if index.digests and alike and len(index.chunks) == len(own.rows):
            # Column by column: the rows of a large tree are many tuples.
            own_columns = list(map(operator.itemgetter(0), own.rows)), list(map(operator.itemgetter(1), own.rows))
            if own_columns == (index.chunks.leaf, index.chunks.box):
                return range(len(own.rows))
        there = list(map(dtypes.__getitem__, index.leaf_types))
        own_dtypes = list(map(own_dtypes.__getitem__, leaves.leaf_types))
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
    try:
        form = detect(path)
    except NotFoundError as missing:
        error = missing  # it says what is there instead
    except TreeringError:
        pass  # what refused the base first says more
    else:
        if form is not Form.CHECKPOINT:
            step = "pass the folder of one step"
            hint = step if form is Form.RUN else "save the tree to a folder once, and pass that"
            what = f"base is {os.fspath(path)!r}, which is of the form {form.value}, not a checkpoint's folder"
            return UnsupportedError(what, hint=hint)
    return reword(error, "no files can be shared with base=")


def older_boxes(path: Path, index: Index) -> OlderCheckpoint:
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
        self._starts = older.index.chunks.first_blocks()
        self._read = functools.cache(self._read)  # type: ignore[method-assign]
        self._reader = functools.cache(self._reader)  # type: ignore[method-assign]

    @property
    def noted(self) -> bool:
        """Whether its index has them."""
        return bool(self._index.digests)

    def digest_of(self, number: int) -> bytes:
        """Return the digest of a box; none where it cannot be read."""
        if self.noted:
            return self.digests_of(number, 1)
        try:
            return self._read(number)[0]
        except TreeringError:
            return b""

    def digests_of(self, number: int, count: int) -> bytes:
        """Return the digests of some boxes in a row, which can all be read."""
        if self.noted:
            return self._index.digests[DIGEST_BYTES * number : DIGEST_BYTES * (number + count)]
        return b"".join(self._read(n)[0] for n in range(number, number + count))

    def checksums_of(self, number: int, count: int = 1) -> array[int]:
        """Return the checksums of the blocks of some boxes in a row, of which each has a digest."""
        if self.noted:
            return self._index.checksums[self._starts[number] : self._starts[number + count]]
        return array("Q", itertools.chain.from_iterable(self._read(n)[1] for n in range(number, number + count)))

    def _read(self, number: int) -> tuple[bytes, array[int]]:
        boxes = self._boxes
        data = self._reader(boxes.file[number]).read(boxes.offset[number], boxes.nbytes[number])
        return xxhash.xxh3_128_digest(data), block_checksums(memoryview(data))

    def _reader(self, file: int) -> Reader:
        return self._files.enter_context(self._store.open_file(self._index.files[file].name))


class Comparison:
    """Compares boxes with those of an older checkpoint: first what takes no time, then the bytes of the others.

    Args:
        own: the boxes.
        older: the older checkpoint.
        facts: what is known of its boxes.
        sizes: the bytes of each box.
        watch: watches the save.

    Attributes:
        same: the number of the box in the older checkpoint that has the bytes of each, -1 for none.
    """

    def __init__(
        self, own: OwnBoxes, older: OlderCheckpoint, facts: OlderFacts, sizes: Sequence[int], watch: Watch
    ) -> None:
        self._own, self._facts, self._sizes, self._watch = own, facts, sizes, watch
        self._places, self._there = older.places_of(own), older.boxes.nbytes
        self._left: list[int] = []
        self._abandoned = False
        self.same = [-1] * len(own.rows)

    def begin(self) -> list[int]:
        """Compare by what is known already, by first blocks, and what is small; return boxes to be written meanwhile.

        None are returned where too little is left to compare, or to write.
        """
        sizes, places, held = self._sizes, self._places, self._own.held
        nbytes = self._there
        wanted = [at for at, number in enumerate(places) if number >= 0 and nbytes[number] == sizes[at]]
        if digests := held.digests:
            known = [at for at in wanted if self._own.rows[at] in digests]
            self._note(known, [digests[self._own.rows[at]] for at in known])
            wanted = sorted({*wanted}.difference(known))
        left = [at for at in wanted if sizes[at] > SMALLEST_BLOCK]
        small = wanted if not left else [at for at in wanted if sizes[at] <= SMALLEST_BLOCK]
        for run in map(small.__getitem__, cut_by_bytes([sizes[at] for at in small], _RUN_BYTES)):
            arrays = self._own.leaves.data_of_all(*zip(*map(self._own.rows.__getitem__, run), strict=True))
            if (found := digest_arrays(arrays)) is None:
                left += run
            else:
                self._note(run, found)
        self._left = [at for at in left if not self._begins_otherwise(at)]
        if sum(map(sizes.__getitem__, self._left)) < _MEANWHILE_FROM:
            return []
        pending = {*self._left}
        changed = [
            at
            for at, number in enumerate(self.same)
            if number < 0 and at not in pending and self._own.rows[at][0] not in held.left
        ]
        return changed if sum(map(sizes.__getitem__, changed)) >= _MEANWHILE_FROM else []

    def finish(self) -> None:
        """Compare the others by all their bytes."""
        others = 1 if sum(map(self._sizes.__getitem__, self._left)) >= _MEANWHILE_FROM else 0
        self._note(self._left, map_together(self._digest, self._left, others))

    def finish_while(self, write: Callable[[], T]) -> T:
        """Compare the others in another thread, while this one writes; return what it returns."""
        failed = FirstError()

        def compare() -> None:
            with failed, phase("save/compare"):
                self.finish()

        watch, self._watch = self._watch, UNWATCHED  # who writes hears that the save was called off, and hears it once
        with contextlib.closing(ThreadPool(compare, 1)) as crew, crew:
            try:
                written = write()
            except BaseException:  # an interrupt too
                self._abandoned = True
                raise
            self._watch = watch
        if not crew.size:  # the system has no more threads
            compare()
        failed.reraise()
        return written

    def _note(self, rows: Sequence[int], digests: Sequence[bytes | None]) -> None:
        """Note which boxes have the digests of those at their places; what cannot be read has none, and is written."""
        self._watch.move()
        places, facts = self._places, self._facts
        if facts.noted and type(places) is range and rows and None not in digests:  # all boxes are at the same places
            first, stop = rows[0], rows[-1] + 1
            in_a_row = rows == list(range(first, stop))
            if in_a_row and facts.digests_of(first, stop - first) == b"".join(filter(None, digests)):
                self.same[first:stop] = rows
                return
        digest_of = facts.digest_of
        for at, found in zip(rows, digests, strict=True):
            if found is not None and digest_of(places[at]) == found:
                self.same[at] = places[at]

    def _begins_otherwise(self, at: int) -> bool:
        """Tell whether the first block of a box in the memory of the host has another checksum than the older one."""
        data = self._own.leaves.data_of(*self._own.rows[at])
        if not self._facts.noted or (has_own_memory() and not isinstance(data, np.ndarray)):
            return False
        length = min(block_bytes(self._sizes[at]), self._sizes[at])
        first = next(host_blocks(data, 0, data.size), memoryview(b""))[:length]
        if not length or len(first) < length:
            return False
        return xxhash.xxh3_64_intdigest(first) != self._facts.checksums_of(self._places[at])[0]

    def _digest(self, at: int) -> bytes | None:
        if self._abandoned:
            return None
        self._watch.move()
        data, state = self._own.leaves.data_of(*self._own.rows[at]), xxhash.xxh3_128()
        for piece in host_blocks(data, 0, data.size):
            state.update(piece)
        return state.digest()
