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
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import closing
from typing import Any, Final

from treering._arrays.outgoing import DividedSave, SaveData, SaveLayout, divide_save, join_layouts, merge_checksums
from treering._arrays.plan_cache import TreePlan
from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.writer import UNWATCHED, Watch
from treering._checkpoint.compare import Held, OlderCheckpoint, OwnBoxes, remember_index, split_digests
from treering._checkpoint.forms import Loss, key_texts
from treering._checkpoint.increment import Begun, SharedFiles, Write, hold_arrays, lay_out, note_arrays, share_files
from treering._checkpoint.joint_driver import JointShare, save_jointly
from treering._checkpoint.save_options import Increment, SaveOptions, require_value, versions
from treering._checkpoint.transaction import AttemptFiles, CheckpointFolder, JoinedFolder
from treering._coordination.job_handshake import next_sequence
from treering._coordination.message_board import MessageBoard
from treering._coordination.operations import Call
from treering._format.document import data_name, encode_index, read_names
from treering._format.index import DIGEST_BYTES, LARGE_VALUE, LIMIT, DataFile, Index, OpaqueLeaf, sign_files
from treering._format.selection import Selection, thinned_as_dicts
from treering._plan import increment as shares
from treering._plan.increment import NO_BOXES, SHARED, Share
from treering._printable import kind_of
from treering._store.resolve import refuse_linked, require_shared
from treering._tree.each import pack, unpack
from treering._tree.flatten import Flattened
from treering._values.checksums import pack_checksums, unpack_checksums
from treering._values.keys import quoted_key
from treering._values.processes import Processes, failure_of
from treering._values.telemetry import phase
from treering.errors import MismatchError


def write_folder(plan: TreePlan, options: SaveOptions, watch: Watch, held: Held | None = None) -> None:
    """Write the folder as this process alone; ``treering.save`` says more.

    Args:
        plan: the tree, planned.
        options: what the caller asks for.
        watch: watches the save.
        held: what was known of the arrays before they were copied; None where nothing was copied.
    """
    metadata, increment = options.json_metadata(), options.increment
    watch.move()
    older, own = None, own_boxes(plan) if increment else None
    if increment is not None and own is not None:
        older = OlderCheckpoint.find(increment)
        own = dataclasses.replace(own, held=held or hold_arrays(plan.flat, own, increment))
    with closing(CheckpointFolder(options.path, overwrite=options.overwrite, names_in=read_names)) as folder, folder:
        if increment is None or own is None:
            layout = plan.layout(folder.attempt)
            checksums = write_data(layout, folder, options)
            index = make_index(plan.flat, layout, checksums, metadata, attempt=folder.attempt)
        else:
            part = share_files(folder, own, older, increment, watch, write=writer(folder, options))
            layout = part.layout
            checksums, digests = write_changed(part, folder, options)
            index = make_index(plan.flat, layout, checksums, metadata, attempt=folder.attempt)
            index = with_digests(index, digests, older, layout)
        commit_index(folder, index, layout.headers, watch)
    if increment is not None and own is not None:
        increment.note(options.path)
        note_arrays(options.path, index, own.held)


def own_boxes(plan: TreePlan) -> OwnBoxes:
    """Return the boxes that this process writes, in which a tree is compared with an older checkpoint."""
    return OwnBoxes(keys=plan.flat.keys, leaves=plan.leaves, rows=plan.boxes())


def writer(folder: AttemptFiles, options: SaveOptions) -> Write:
    """Return what writes the files of a layout into a folder."""
    return lambda layout, digests: write_data(layout, folder, options, digests)


def write_changed(part: SharedFiles, folder: AttemptFiles, options: SaveOptions) -> tuple[array[int], bytes]:
    """Write what is not written or shared yet, durable but for its names; return all checksums, and all digests."""
    numbers, states, begun, digests = part.share.numbers, part.share.states, part.begun, dict[int, bytes]()
    checksums, starts = write_data(part.layout, folder, options, digests, begun), part.layout.chunks.first_blocks()
    table = bytearray(DIGEST_BYTES * len(states))
    shared = [row for row, state in enumerate(states) if state == SHARED]
    if facts := part.facts:
        for row, number, count in shares.find_stretches(shared, [numbers[row] for row in shared]):
            checksums[starts[row] : starts[row + count]] = facts.checksums_of(number, count)
            table[DIGEST_BYTES * row : DIGEST_BYTES * (row + count)] = facts.digests_of(number, count)
    if begun is not None:
        there = begun.layout.chunks.first_blocks()
        for chunk, row in enumerate(begun.rows):
            digests[row] = begun.digests[chunk]
            checksums[starts[row] : starts[row + 1]] = begun.checksums[there[chunk] : there[chunk + 1]]
    for row, found in digests.items():
        table[DIGEST_BYTES * row : DIGEST_BYTES * (row + 1)] = found
    return checksums, bytes(table)


def write_data(
    layout: SaveLayout,
    folder: AttemptFiles,
    options: SaveOptions,
    digests: MutableMapping[int, bytes] | None = None,
    begun: Begun | None = None,
) -> array[int]:
    """Write the data files, durable but for their names, and return the checksums of their blocks.

    Files that are shared, or were begun before, are there already, and their checksums are left out. ``digests`` gets
    that of each chunk.
    """
    sizes, there = layout.sizes(), {*layout.linked, *range(0 if begun is None else len(begun.layout.names))}
    with phase("save/write") as moved:
        moved.nbytes = sum(size for number, size in enumerate(sizes) if number not in there)
        folder.require_space(moved.nbytes)
        written = SaveData(
            layout, options.progress, digests=digests, done=0 if begun is None else begun.layout.data_bytes
        )
        for number, (name, header, size) in enumerate(zip(layout.names, layout.headers, sizes, strict=True)):
            if number not in there:
                folder.write_file(name, itertools.chain([header], written.data_of(number)), size)
    return written.checksums


def commit_index(folder: CheckpointFolder, index: Index, headers: Sequence[bytes], watch: Watch) -> None:
    """Commit what the index says was written."""
    index = dataclasses.replace(sign_files(index, headers), replaces=folder.superseded, superseded=folder.waiting)
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


def with_digests(index: Index, digests: bytes, older: OlderCheckpoint | None, layout: SaveLayout) -> Index:
    """Return the index of a checkpoint that later ones may share files with."""
    before = 0 if older is None or not layout.linked else max(1, older.index.saves)
    filled = sum(index.chunks.nbytes) + sum(file.header for file in index.files)
    gapped = filled != sum(file.nbytes for file in index.files)
    return dataclasses.replace(index, digests=digests, saves=min(before + 1, LIMIT - 1), gapped=gapped)


def begin_call(options: SaveOptions, processes: Processes) -> Call:
    """Count a joint save: on the caller's thread, because the first one of a job is a collective.

    A place where it cannot be is refused before that, on all processes, before one of them writes a message there.
    """
    require_shared(options.path)
    refuse_linked(options.path)
    doing = f"save {os.fspath(options.path)!r}"
    return next_sequence(options.path, processes, timeout=options.timeout, doing=doing)


def write_share(
    call: Call, plan: TreePlan | Exception, options: SaveOptions, watch: Watch = UNWATCHED, held: Held | None = None
) -> None:
    """Do this process's part of a counted save, in any thread: it talks to the others through the folder alone.

    Args:
        call: the save.
        plan: the tree, planned; or why it cannot be saved, which the others are told before it is raised.
        options: what the caller asks for.
        watch: watches the save.
        held: what was known of the arrays before they were copied; None where nothing was copied.
    """
    save_jointly(
        call,
        options.path,
        lambda call: _CheckpointShare(call, require_value(plan), options, watch, held),
        pause=watch.pause,
    )


class _CheckpointShare(JointShare):
    """The files that this process writes; on process 0 also the folder, which it has entered."""

    def __init__(
        self, call: Call, plan: TreePlan, options: SaveOptions, watch: Watch, held: Held | None = None
    ) -> None:
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
        self._held = held
        self._written: Index | None = None

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
        if (increment := self._options.increment) is not None:
            payload = self._write_changed(folder, this, increment)
        else:
            layout = self._plan.files(self._call.attempt, [this])
            payload = self.hand_in(write_data(layout, folder, self._options))
        return pack([payload, *self._own.values()]) if self._own else payload

    def _write_changed(self, folder: AttemptFiles, this: int, increment: Increment) -> bytes:
        """Write the own boxes that changed, and share the files of the others; return what process 0 has to know."""
        firsts, own = _first_files(self._plan), _boxes_of(self._plan, this)
        held = self._held = self._held or hold_arrays(self._flat, own, increment, joint=True)
        own = dataclasses.replace(own, held=held)
        place = {"process": this, "first": firsts[this], "count": firsts[-1]}
        write = writer(folder, self._options)
        part = share_files(folder, own, self._older, increment, self._watch, write=write, **place)
        checksums, table = write_changed(part, folder, self._options)
        if held.arrays:
            index = make_index(self._flat, part.layout, checksums, {}, attempt=folder.attempt)
            self._written = with_digests(index, table, self._older, part.layout)
        digests = [entry.digest or "" for entry in part.share.linked.values()]
        linked = b"".join(bytes.fromhex(text.rpartition(":")[2]) for text in digests)
        states = array("Q", part.share.states)
        return self.hand_in(checksums, unpack_checksums(table), states, unpack_checksums(linked))

    def commit(self, payloads: Sequence[bytes]) -> None:
        layout, folder, digests = self._layout, self._folder, b""
        told, states = self._unpacked(payloads)
        handed = self.handed_in(told, 1 if self._options.increment is None else 4)
        if self._options.increment is not None:
            layout, digests = self._lay_out_shares(handed)
        if layout is None or not isinstance(folder, CheckpointFolder):
            raise RuntimeError("a commit comes after the data")
        checksums = merge_checksums(layout, [columns[0] for columns in handed])
        if states:
            layout, checksums, digests = self._put_states(layout, checksums, digests, states, folder)
        call = self._call
        count = call.processes.count
        index = make_index(self._flat, layout, checksums, self._metadata, attempt=call.attempt, processes=count)
        if self._options.increment is not None:
            index = with_digests(index, digests, self._older, layout)
        commit_index(folder, index, layout.headers, self._watch)

    def _lay_out_shares(self, handed: Sequence[list[array[int]]]) -> tuple[SaveLayout, bytes]:
        """Return where all lies that was written and shared, and the digests of the chunks."""
        call, older, firsts = self._call, self._older, _first_files(self._plan)
        parts = [_share_of(self._plan, call, process, columns, older) for process, columns in enumerate(handed)]
        boxes = NO_BOXES if older is None else older.boxes
        layout = lay_out(call.attempt, self._flat.keys, self._leaves, parts, older=boxes, count=firsts[-1])
        tables = [iter(split_digests(pack_checksums(columns[1]))) for columns in handed]
        return layout, b"".join(next(tables[layout.writers[file]]) for file in layout.chunks.file)

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
        digests: bytes,
        states: Mapping[str, bytes],
        to: CheckpointFolder,
    ) -> tuple[SaveLayout, array[int], bytes]:
        """Return a layout with the states of all processes in it; what of them is large is in one file more.

        Args:
            layout: the layout without them.
            checksums: those of its chunks.
            digests: those of the chunks, where there are any.
            states: what all have, by the keys of the leaves.
            to: where the file goes.

        Returns:
            The layout, the checksums and the digests of its chunks.
        """
        found = {self._flat.keys.index(key): data for key, data in states.items()}
        values = layout.leaves.values | {leaf: data for leaf, data in found.items() if len(data) <= LARGE_VALUE}
        layout = dataclasses.replace(layout, leaves=dataclasses.replace(layout.leaves, values=values))
        if not (large := {leaf: data for leaf, data in found.items() if len(data) > LARGE_VALUE}):
            return layout, checksums, digests
        number = None if self._options.increment is None else _first_files(self._plan)[-1]
        more = self._plan.file_of(self._call.attempt, layout.leaves, large, number)
        own: dict[int, bytes] = {}
        written = write_data(more, to, dataclasses.replace(self._options, progress=None), own)
        layout, checksums, rows = join_layouts(layout, checksums, more, written)
        if digests:
            tables = split_digests(digests), [own[row] for row in range(len(own))]
            digests = b"".join(tables[at][row] for at, row in rows)
        return layout, checksums, digests

    def finish(self) -> None:
        if self._options.increment is not None:
            self._options.increment.note(self._options.path)
        if self._written is not None and self._held is not None:
            note_arrays(self._options.path, self._written, self._held)

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
        raise failure_of([process], "shares other boxes than planned here", hint)
    texts = [f"xxh3-128:{half.hex()}" for half in split_digests(pack_checksums(linked))]
    after = first + shares.begun_files(states, shares.row_bytes(rows, own.leaves.types, own.leaves.leaf_types))
    entries = {
        file: dataclasses.replace(
            older.index.files[file], name=data_name(call.attempt, after + at, count), digest=texts[at]
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
            yield Loss("objects", key, f"leaf {quoted_key(key)}: {kind_of(index.values[leaf])}")


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
