"""A planned tree -> a checkpoint's folder, durable when this returns, on any of the processes that hold it.

A process that saves alone writes all files. In a joint save each writes the files of its own part of the plan; process
0 enters the folder and commits, the others join it. An opened tree becomes a checkpoint too, which can hold all of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import xxhash

from treering._arrays.host import host_blocks, join_arrays
from treering._arrays.jobs import cut_by_bytes
from treering._arrays.outgoing import (
    DescribedLeaves,
    DividedSave,
    SaveData,
    SaveLayout,
    divide_save,
    join_layouts,
    merge_checksums,
)
from treering._arrays.plan_cache import TreePlan
from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.saves import reword
from treering._background.writer import UNWATCHED, Watch
from treering._checkpoint.detect import Form, detect
from treering._checkpoint.forms import Loss, key_texts
from treering._checkpoint.joint_driver import JointShare, save_jointly
from treering._checkpoint.save_options import Increment, SaveOptions, require_value, versions
from treering._checkpoint.source import check_data_file
from treering._checkpoint.transaction import AttemptFiles, CheckpointFolder, JoinedFolder
from treering._coordination.job_handshake import next_sequence
from treering._coordination.message_board import MessageBoard
from treering._coordination.operations import Call
from treering._format.document import data_name, encode_index, parse_index, read_digest, read_names
from treering._format.index import DIGEST_BYTES, LARGE_VALUE, LIMIT, DataFile, Index, OpaqueLeaf, file_digest
from treering._format.safetensors import Row
from treering._format.selection import Selection, thinned_as_dicts
from treering._plan import increment as shares
from treering._plan.increment import SHARED, OlderBoxes, Share
from treering._printable import kind_of
from treering._store.api import Reader, Store
from treering._store.crew import map_together
from treering._store.failures import naming_file
from treering._store.open_folder import OpenFolder
from treering._tree.each import pack, unpack
from treering._tree.flatten import Flattened
from treering._values.boxes import Box
from treering._values.checksums import (
    SMALLEST_BLOCK,
    block_bytes,
    block_checksums,
    digest,
    pack_checksums,
    unpack_checksums,
)
from treering._values.processes import Processes, format_processes
from treering._values.telemetry import phase
from treering.errors import MismatchError, ProcessFailedError, TreeringError, UnsupportedError


def write_folder(plan: TreePlan, options: SaveOptions, watch: Watch) -> None:
    """Write the folder as this process alone; ``treering.save`` says more."""
    metadata = options.json_metadata()
    watch.move()
    older = None if options.increment is None else OlderCheckpoint.find(options.increment)
    with closing(CheckpointFolder(options.path, overwrite=options.overwrite, names_in=read_names)) as folder, folder:
        if options.increment is None:
            layout = plan.layout(folder.attempt)
            checksums = write_data(layout, folder, options)
            index = make_index(plan.flat, layout, checksums, metadata, attempt=folder.attempt)
        else:
            boxes = OwnBoxes(keys=plan.flat.keys, leaves=plan.leaves, rows=plan.boxes())
            part = write_changed(folder, boxes, older, options, watch)
            layout = part.layout
            index = make_index(plan.flat, layout, part.checksums, metadata, attempt=folder.attempt)
            index = with_digests(index, part.digests, older, layout)
        commit_index(folder, index, layout.headers, watch)
    if options.increment is not None:
        options.increment.note(options.path)


def write_data(
    layout: SaveLayout, folder: AttemptFiles, options: SaveOptions, digests: dict[int, bytes] | None = None
) -> array[int]:
    """Write the data files, durable but for their names, and return the checksums of their blocks.

    Files that are shared are there already, and their checksums are left out. ``digests`` gets that of each chunk.
    """
    sizes = layout.sizes()
    with phase("save/write") as moved:
        moved.nbytes = sum(size for number, size in enumerate(sizes) if number not in layout.linked)
        folder.require_space(moved.nbytes)
        written = SaveData(layout, options.progress, digests=digests)
        for number, (name, header, size) in enumerate(zip(layout.names, layout.headers, sizes, strict=True)):
            if number not in layout.linked:
                folder.write_file(name, itertools.chain([header], written.data_of(number)), size)
    return written.checksums


def commit_index(folder: CheckpointFolder, index: Index, headers: Sequence[bytes], watch: Watch) -> None:
    """Commit what the index says was written."""
    files = [
        file if file.digest is not None else dataclasses.replace(file, digest=file_digest(index, number, header))
        for number, (file, header) in enumerate(zip(index.files, headers, strict=True))
    ]
    index = dataclasses.replace(index, files=files, replaces=folder.superseded, superseded=folder.waiting)
    document = encode_index(index)
    watch.claim()
    with phase("save/commit"):
        folder.commit(document)
    if index.digests:
        remember_index(document, index)


def make_index(
    flat: Flattened,
    layout: SaveLayout,
    checksums: array[int],
    metadata: Mapping[str, Any],
    *,
    attempt: str,
    processes: int = 1,
) -> Index:
    """Return the index of what was written, without the digests of its files."""
    leaves = layout.leaves
    writers = layout.writers if processes > 1 else [None] * len(layout.names)
    rows = zip(layout.names, layout.sizes(), layout.headers, writers, strict=True)
    files = [DataFile(name=name, nbytes=n, header=len(header), digest=None, process=p) for name, n, header, p in rows]
    for number, found in layout.linked.items():
        files[number] = dataclasses.replace(found, process=writers[number])
    return Index(
        attempt=attempt,
        written=versions(),
        processes=processes,
        meshes=leaves.meshes,
        structure=flat.tokens,
        keys=flat.keys,
        structured=flat.structured,
        types=leaves.types,
        leaf_types=leaves.leaf_types,
        values=leaves.values,
        chunks=layout.chunks,
        checksums=checksums,
        files=files,
        replaces=(),
        metadata=metadata,
        part=flat.part,
    )


# ------------------------------------------------------------------------------------- files of an older checkpoint

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnBoxes:
    """The boxes of a new tree that one process writes."""

    keys: Sequence[str]
    """Key text of each leaf."""
    leaves: DescribedLeaves
    """The leaves."""
    rows: Sequence[Row]
    """The boxes, by leaf and by place."""


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
            if increment.full_every is not None and max(1, index.saves) >= increment.full_every:
                return None
            return _older_boxes(path, index)
        return None

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
    file_bytes = [entry.nbytes - entry.header for entry in index.files]
    if index.digests:
        boxes = OlderBoxes(file=chunks.file, nbytes=chunks.nbytes, offset=chunks.offset, file_bytes=file_bytes)
        return OlderCheckpoint(path=path, index=index, leaf=chunks.leaf, box=chunks.box, boxes=boxes)
    columns: list[list[Any]] = [[] for _ in range(5)]
    for row, leaf in enumerate(chunks.leaf):
        cuts = shares.cut_rows([(0, chunks.box[row])], [index.type_of(leaf)], [0])
        sizes = shares.row_bytes(cuts, [index.type_of(leaf)], [0])
        starts = itertools.accumulate(sizes, initial=chunks.offset[row])
        for (_, box), nbytes, start in zip(cuts, sizes, starts, strict=False):
            for column, item in zip(columns, (leaf, box, chunks.file[row], nbytes, start), strict=True):
                column.append(item)
    leaves, cut, files, sizes, offsets = columns
    boxes = OlderBoxes(file=files, nbytes=sizes, offset=offsets, file_bytes=file_bytes)
    return OlderCheckpoint(path=path, index=index, leaf=leaves, box=cut, boxes=boxes)


class _OlderData:
    """What is known of the bytes of an older checkpoint, which is open.

    Args:
        older: the checkpoint.
        store: its place.
        files: closes what is opened there.
    """

    def __init__(self, older: OlderCheckpoint, store: Store, files: contextlib.ExitStack) -> None:
        self._older = older
        self._store = store
        self._files = files
        self._readers: dict[int, Reader] = {}
        self._known: dict[int, tuple[bytes, array[int]]] = {}
        self._starts = older.index.chunks.first_blocks()

    def is_same(self, number: int, found: bytes) -> bool:
        """Tell whether a box has that digest."""
        if table := self._older.index.digests:
            return table[DIGEST_BYTES * number : DIGEST_BYTES * number + DIGEST_BYTES] == found
        with contextlib.suppress(TreeringError):  # then it is written
            return self.facts_of(number)[0] == found
        return False

    def facts_of(self, number: int) -> tuple[bytes, array[int]]:
        """Return the digest and the checksums of a box; where no digest was noted, it is read.

        Raises:
            TreeringError: it cannot be read.
        """
        index, boxes = self._older.index, self._older.boxes
        if index.digests:
            start = DIGEST_BYTES * number
            checksums = index.checksums[self._starts[number] : self._starts[number + 1]]
            return index.digests[start : start + DIGEST_BYTES], checksums
        file = boxes.file[number]
        if file not in self._readers:
            self._readers[file] = self._files.enter_context(self._store.open_file(index.files[file].name))
        if number not in self._known:
            data = self._readers[file].read(boxes.offset[number], boxes.nbytes[number])
            self._known[number] = xxhash.xxh3_128_digest(data), block_checksums(memoryview(data))
        return self._known[number]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrittenShare:
    """What a process has written and shared."""

    share: Share
    """Its boxes."""
    layout: SaveLayout
    """Where they lie; the chunks are its boxes, in their order."""
    checksums: array[int]
    """Those of their blocks."""
    digests: bytes
    """Theirs, 16 bytes each."""


def write_changed(
    folder: AttemptFiles,
    own: OwnBoxes,
    older: OlderCheckpoint | None,
    options: SaveOptions,
    watch: Watch,
    *,
    process: int = 0,
    first: int = 0,
    count: int | None = None,
) -> WrittenShare:
    """Write the boxes that an older checkpoint does not have, durable but for their names, and share its other files.

    Args:
        folder: where to.
        own: the boxes of this process.
        older: the older checkpoint, if there is one.
        options: what the caller asks for.
        watch: watches the save.
        process: this process.
        first: the number of its first file.
        count: how many files there are at most; None where this process is alone.

    Raises:
        StoreError: the system refused.
    """
    rows, leaves = own.rows, own.leaves
    same = [-1] * len(rows)
    facts: dict[int, tuple[bytes, array[int]]] = {}
    found: dict[int, tuple[DataFile, bytes]] = {}
    boxes = OlderBoxes(file=(), nbytes=(), file_bytes=()) if older is None else older.boxes
    sizes = shares.row_bytes(rows, leaves.types, leaves.leaf_types)
    # Should it be removed meanwhile, or be damaged, what it has is written.
    with contextlib.ExitStack() as files:
        if older is not None and (store := _open_older(older, files)) is not None:
            data = _OlderData(older, store, files)
            with phase("save/compare"):
                same = _compare(own, older, data, sizes, watch)
            facts = {row: data.facts_of(number) for row, number in enumerate(same) if number >= 0}
            wanted = shares.choose_shared(same, boxes)
            planned = len(wanted) + len(shares.gather_files(shares.states_of(same, boxes, wanted), sizes))
            found = _link_files(folder, store, older, wanted, (first, count or planned))
    states = shares.states_of(same, boxes, found)
    linked = _with_digests(found, same, boxes, facts)
    share = Share(process=process, first=first, rows=rows, states=states, numbers=same, linked=linked)
    count = count or len(linked) + len(shares.gather_files(states, sizes))
    layout = lay_out(folder.attempt, own, [share], boxes, count)
    digests = {row: facts[row][0] for row, state in enumerate(states) if state == SHARED}
    checksums, starts = write_data(layout, folder, options, digests), layout.chunks.first_blocks()
    for row, state in enumerate(states):
        if state == SHARED:
            checksums[starts[row] : starts[row + 1]] = facts[row][1]
    table = b"".join(map(digests.__getitem__, range(len(rows))))
    return WrittenShare(share=share, layout=layout, checksums=checksums, digests=table)


def _open_older(older: OlderCheckpoint, files: contextlib.ExitStack) -> Store | None:
    """Return the place of an older checkpoint, None where it is gone or cannot be opened."""
    with contextlib.suppress(TreeringError):
        return files.enter_context(OpenFolder(older.path)).store
    return None


def _compare(own: OwnBoxes, older: OlderCheckpoint, data: _OlderData, sizes: Sequence[int], watch: Watch) -> list[int]:
    """Return the number of the box in the older checkpoint that has the bytes of each; -1 for none."""
    same, places, nbytes = [-1] * len(own.rows), older.places_of(own), older.boxes.nbytes
    wanted = [at for at, number in enumerate(places) if number >= 0 and nbytes[number] == sizes[at]]
    for at, found in _digests_of(own, wanted, sizes):
        watch.move()
        if data.is_same(places[at], found):
            same[at] = places[at]
    return same


def _digests_of(own: OwnBoxes, wanted: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the digests of some boxes: of small ones, many are read together."""
    small = [at for at in wanted if sizes[at] <= SMALLEST_BLOCK]
    alone = [at for at in wanted if sizes[at] > SMALLEST_BLOCK]
    for run in map(small.__getitem__, cut_by_bytes([sizes[at] for at in small], _RUN_BYTES)):
        arrays = own.leaves.data_of_all(*zip(*map(own.rows.__getitem__, run), strict=True))
        ends = list(itertools.accumulate(map(sizes.__getitem__, run), initial=0))
        if (joined := join_arrays(arrays, ends[-1])) is None:
            alone += run
            continue
        parts = map(memoryview(joined).__getitem__, map(slice, ends, ends[1:]))
        yield from zip(run, map(xxhash.xxh3_128_digest, parts), strict=True)

    def read(at: int) -> bytes:
        array_, state = own.leaves.data_of(*own.rows[at]), xxhash.xxh3_128()
        for piece in host_blocks(array_, 0, array_.size):
            state.update(piece)
        return state.digest()

    others = 1 if sum(map(sizes.__getitem__, alone)) >= _TWO_THREADS_FROM else 0
    yield from zip(alone, map_together(read, alone, others), strict=True)


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
    linked: Mapping[int, tuple[DataFile, bytes]],
    same: Sequence[int],
    boxes: OlderBoxes,
    facts: Mapping[int, tuple[bytes, array[int]]],
) -> dict[int, DataFile]:
    """Return shared files with the digests that they have here: over the header, and the checksums of what is used."""
    used: dict[int, list[tuple[int, int, int]]] = {file: [] for file in linked}
    for row, number in enumerate(same):
        if number >= 0 and (places := used.get(boxes.file[number])) is not None:
            places.append((boxes.offset[number], boxes.nbytes[number], row))
    found: dict[int, DataFile] = {}
    for file, (entry, header) in linked.items():
        table = b"".join(pack_checksums(facts[row][1]) for _, _, row in sorted(used[file]))
        found[file] = dataclasses.replace(entry, digest=digest([header, table]))
    return found


def lay_out(attempt: str, own: OwnBoxes, parts: Sequence[Share], older: OlderBoxes, count: int) -> SaveLayout:
    """Lay out the files of some processes that share files."""
    leaves = own.leaves
    found = shares.lay_out_shares(attempt, own.keys, leaves.types, leaves.leaf_types, parts, older=older, count=count)
    return SaveLayout(
        leaves=leaves, chunks=found.chunks, headers=found.headers, names=found.names, writers=found.writers,
        linked=found.linked,
    )  # fmt: skip


def with_digests(index: Index, digests: bytes, older: OlderCheckpoint | None, layout: SaveLayout) -> Index:
    """Return the index of a checkpoint that later ones may share files with."""
    before = 0 if older is None or not layout.linked else max(1, older.index.saves)
    sizes = [file.header for file in index.files]
    for file, nbytes in zip(index.chunks.file, index.chunks.nbytes, strict=True):
        sizes[file] += nbytes
    gapped = sizes != [file.nbytes for file in index.files]
    return dataclasses.replace(index, digests=digests, saves=min(before + 1, LIMIT - 1), gapped=gapped)


def begin_call(options: SaveOptions, processes: Processes) -> Call:
    """Count a joint save: on the caller's thread, because the first one of a job is a collective."""
    doing = f"save {os.fspath(options.path)!r}"
    return next_sequence(options.path, processes, timeout=options.timeout, doing=doing)


def write_share(call: Call, plan: TreePlan | Exception, options: SaveOptions, watch: Watch = UNWATCHED) -> None:
    """Do this process's part of a counted save, in any thread: it talks to the others through the folder alone.

    Args:
        call: the save.
        plan: the tree, planned; or why it cannot be saved, which the others are told before it is raised.
        options: what the caller asks for.
        watch: watches the save.
    """
    save_jointly(
        call, options.path, lambda call: _CheckpointShare(call, require_value(plan), options, watch), pause=watch.pause
    )


class _CheckpointShare(JointShare):
    """The files that this process writes; on process 0 also the folder, which it has entered."""

    def __init__(self, call: Call, plan: TreePlan, options: SaveOptions, watch: Watch) -> None:
        self._plan = plan.divided()
        super().__init__(
            call, plan.flat, self._plan.leaves, compares_local=options.compares_local, states=options.states
        )
        self._options = options
        self._own = plan.states
        self._metadata: dict[str, Any] = {}
        self._watch = watch
        self._folder: CheckpointFolder | JoinedFolder | None = None
        self._layout: SaveLayout | None = None
        self._older: OlderCheckpoint | None = None

    def signature(self) -> bytes:
        found = super().signature()
        if (increment := self._options.increment) is None:
            return found
        self._older = OlderCheckpoint.find(increment)
        # All share files with the one that process 0 has found, or write everything.
        return found + _BASE + (_NO_ATTEMPT if self._older is None else self._older.index.attempt).encode("ascii")

    def check(self, signature: bytes) -> None:
        increment = self._options.increment
        at = len(signature) - len(_BASE) - len(_NO_ATTEMPT)
        theirs = signature[at : at + len(_BASE)] == _BASE and bool(len(signature) % 8)
        if theirs != (increment is not None):
            which = ("process 0 saves", "this one does not") if theirs else ("this process saves", "process 0 does not")
            what = f"{which[0]} with base= or incremental=True, {which[1]}"
            raise MismatchError(what, hint="pass the same on all processes")
        super().check(signature[:at] if theirs else signature)
        attempt = signature[at + len(_BASE) :].decode("ascii", "replace")
        if increment is not None and attempt != _NO_ATTEMPT:
            self._older = OlderCheckpoint.find(dataclasses.replace(increment, required=False, full_every=None), attempt)

    def plan(self) -> None:
        self._plan = divide_save(self._flat.keys, self._leaves, self._call.processes.count)

    def enter(self, held: contextlib.ExitStack) -> MessageBoard:
        call, options = self._call, self._options
        self._metadata = options.json_metadata()
        path, live = options.path, call.live_attempts
        folder = CheckpointFolder(
            path, overwrite=options.overwrite, names_in=read_names, attempt=call.attempt, live=live
        )
        held.enter_context(contextlib.closing(folder))
        self._folder = held.enter_context(folder)
        return folder.board

    def join(self, folder: JoinedFolder, held: contextlib.ExitStack) -> None:
        del held
        self._folder = folder

    def prepare(self) -> bytes:
        folder = self._folder
        if folder is None:
            raise RuntimeError("the folder comes before the data")
        payload = self._write(folder)
        if isinstance(folder, JoinedFolder):
            folder.make_durable()
            self._watch.claim()  # what is handed in may be committed at any moment
        elif self._options.increment is None:
            # Now, while the others are still writing: between their last byte and the commit is as little as can be.
            self._layout = self._plan.files(self._call.attempt, range(self._call.processes.count))
        return payload

    def _write(self, folder: AttemptFiles) -> bytes:
        """Write the own files, durable but for their names; return what process 0 has to know of them."""
        this = self._call.processes.this
        if self._options.increment is not None:
            payload = self._write_changed(folder, this)
        else:
            layout = self._plan.files(self._call.attempt, [this])
            payload = self.hand_in(write_data(layout, folder, self._options))
        return pack([payload, *self._own.values()]) if self._own else payload

    def _write_changed(self, folder: AttemptFiles, this: int) -> bytes:
        """Write the own boxes that changed, and share the files of the others; return what process 0 has to know."""
        firsts = _first_files(self._plan)
        part = write_changed(
            folder, _boxes_of(self._plan, this), self._older, self._options, self._watch,
            process=this, first=firsts[this], count=firsts[-1],
        )  # fmt: skip
        digests = [entry.digest or "" for entry in part.share.linked.values()]
        linked = b"".join(bytes.fromhex(text.rpartition(":")[2]) for text in digests)
        states = array("Q", part.share.states)
        return self.hand_in(part.checksums, unpack_checksums(part.digests), states, unpack_checksums(linked))

    def commit(self, payloads: Sequence[bytes]) -> None:
        layout, folder = self._layout, self._folder
        if self._options.increment is not None and isinstance(folder, CheckpointFolder):
            self._commit_shares(folder, payloads)
            return
        if layout is None or not isinstance(folder, CheckpointFolder):
            raise RuntimeError("a commit comes after the data")
        call = self._call
        told, states = self._unpacked(payloads)
        checksums = merge_checksums(layout, [found for (found,) in self.handed_in(told, 1)])
        if states:
            layout, checksums, _ = self._put_states(layout, checksums, states, folder)
        index = make_index(
            self._flat, layout, checksums, self._metadata, attempt=call.attempt, processes=call.processes.count
        )
        commit_index(folder, index, layout.headers, self._watch)

    def _unpacked(self, payloads: Sequence[bytes]) -> tuple[list[bytes], dict[str, bytes]]:
        """Return what the processes handed in of their data, and the states of all by the keys of the leaves."""
        if not (count := len(self._own)):
            return list(payloads), {}
        handed = [unpack(payload, 1 + count) for payload in payloads]
        return [one[0] for one in handed], {
            key: pack([one[1 + at] for one in handed]) for at, key in enumerate(self._own)
        }

    def _put_states(
        self,
        layout: SaveLayout,
        checksums: array[int],
        states: Mapping[str, bytes],
        folder: CheckpointFolder,
        *,
        number: int | None = None,
        digests: bytes = b"",
    ) -> tuple[SaveLayout, array[int], bytes]:
        """Return a layout with the states of all processes in it; what of them is large is in one file more.

        Args:
            layout: the layout without them.
            checksums: those of its chunks.
            states: what all have, by the keys of the leaves.
            folder: where the file goes.
            number: that of the file; None: that behind the files of the plan.
            digests: those of the chunks, where there are any.

        Returns:
            The layout, the checksums and the digests of its chunks.
        """
        found = {self._flat.keys.index(key): data for key, data in states.items()}
        values = layout.leaves.values | {leaf: data for leaf, data in found.items() if len(data) <= LARGE_VALUE}
        layout = dataclasses.replace(layout, leaves=dataclasses.replace(layout.leaves, values=values))
        if not (large := {leaf: data for leaf, data in found.items() if len(data) > LARGE_VALUE}):
            return layout, checksums, digests
        more = self._plan.file_of(self._call.attempt, layout.leaves, large, number)
        own: dict[int, bytes] = {}
        written = write_data(more, folder, dataclasses.replace(self._options, progress=None), own)
        layout, checksums, rows = join_layouts(layout, checksums, more, written)
        if digests:
            tables = _halves(digests), [own[row] for row in range(len(own))]
            digests = b"".join(tables[at][row] for at, row in rows)
        return layout, checksums, digests

    def _commit_shares(self, folder: CheckpointFolder, payloads: Sequence[bytes]) -> None:
        """Commit what all have written and shared."""
        call, older = self._call, self._older
        told, states = self._unpacked(payloads)
        handed = self.handed_in(told, 4)
        firsts = _first_files(self._plan)
        parts = [_share_of(self._plan, call, process, columns, older) for process, columns in enumerate(handed)]
        boxes = OlderBoxes(file=(), nbytes=(), file_bytes=()) if older is None else older.boxes
        own = OwnBoxes(keys=self._flat.keys, leaves=self._leaves, rows=())
        layout = lay_out(call.attempt, own, parts, boxes, firsts[-1])
        checksums = merge_checksums(layout, [columns[0] for columns in handed])
        tables = [iter(_halves(pack_checksums(columns[1]))) for columns in handed]
        digests = b"".join(next(tables[layout.writers[file]]) for file in layout.chunks.file)
        if states:
            layout, checksums, digests = self._put_states(
                layout, checksums, states, folder, number=firsts[-1], digests=digests
            )
        count = call.processes.count
        index = make_index(self._flat, layout, checksums, self._metadata, attempt=call.attempt, processes=count)
        commit_index(folder, with_digests(index, digests, older, layout), layout.headers, self._watch)

    def finish(self) -> None:
        if self._options.increment is not None:
            self._options.increment.note(self._options.path)

    def roll_back(self) -> None:
        if isinstance(self._folder, CheckpointFolder):
            self._folder.others_are_done()
        elif self._folder is not None:
            self._folder.abort()


_BASE: Final = b"+base:"
_NO_ATTEMPT: Final = "-" * 16


def _boxes_of(plan: DividedSave, process: int) -> OwnBoxes:
    leaves = plan.leaves
    rows = shares.cut_rows(plan.rows_of(process), leaves.types, leaves.leaf_types)
    return OwnBoxes(keys=plan.keys, leaves=leaves, rows=rows)


def _first_files(plan: DividedSave) -> list[int]:
    """Return the number of the first file of each process, and how many there are at most."""
    return list(itertools.accumulate(map(shares.most_files, plan.plan.loads), initial=0))


def _halves(table: bytes) -> list[bytes]:
    return [table[start : start + DIGEST_BYTES] for start in range(0, len(table), DIGEST_BYTES)]


def _share_of(
    plan: DividedSave, call: Call, process: int, columns: Sequence[array[int]], older: OlderCheckpoint | None
) -> Share:
    """Return what a process has written and shared, as it handed it in.

    Raises:
        ProcessFailedError: it handed in something that does not fit the plan.
    """
    _, digests, states, linked = columns
    own, firsts = _boxes_of(plan, process), _first_files(plan)
    rows, first, count = own.rows, firsts[process], firsts[-1]
    same, found = [-1] * len(rows), list[int]()
    if older is not None:
        there = zip(older.places_of(own), states, strict=False)
        same = [number if state == SHARED else -1 for number, state in there]
        found = sorted({older.boxes.file[number] for number in same if number >= 0})
    wrong = [number < 0 for number, state in zip(same, states, strict=False) if state == SHARED]
    if len(states) != len(rows) or len(digests) != 2 * len(rows) or any(wrong) or len(linked) != 2 * len(found):
        hint = "run the same version of treering on all processes, with the same tree"
        error = ProcessFailedError(f"{format_processes([process])} shares other boxes than planned here", hint=hint)
        error.processes = (process,)
        raise error
    texts = [f"xxh3-128:{half.hex()}" for half in _halves(pack_checksums(linked))]
    entries = {
        file: dataclasses.replace(
            older.index.files[file], name=data_name(call.attempt, first + at, count), digest=texts[at]
        )
        for at, file in enumerate(found)
        if older is not None
    }
    return Share(process=process, first=first, rows=rows, states=list(states), numbers=same, linked=entries)


def find_losses(source: Source, part: Selection, metadata: Mapping[str, Any]) -> Iterator[Loss]:
    """Yield the leaves that only msgpack knows."""
    del metadata
    index = source.index
    for key, leaf in zip(part.keys, part.leaves, strict=True):
        if index.type_of(leaf).kind == "opaque" and not isinstance(index.values[leaf], OpaqueLeaf):
            yield Loss("objects", key, f"leaf {key!r:.200}: {kind_of(index.values[leaf])}")


def write(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> None:
    """Write the folder, which has checksums of its own."""
    flat = flatten_source(source, part)
    with closing(CheckpointFolder(save.path, overwrite=save.overwrite, names_in=read_names)) as folder, folder:
        layout = divide_save(flat.keys, describe_source(source, part), 1).files(folder.attempt, [0])
        checksums = write_data(layout, folder, save)
        index = make_index(flat, layout, checksums, save.json_metadata(), attempt=folder.attempt)
        commit_index(folder, index, layout.headers, watch)


def flatten_source(source: Source, part: Selection) -> Flattened:
    """Return a part of an opened tree as what a save takes, without its leaves; what is thinned becomes a dict."""
    kinds = [source.index.type_of(leaf).kind for leaf in part.leaves]
    tokens = thinned_as_dicts(part.structure)
    # The keys of a foreign tree may be other texts.
    return Flattened(
        tokens=tokens, keys=key_texts(tokens), kinds=kinds, structured=source.structured, part=source.index.part
    )
