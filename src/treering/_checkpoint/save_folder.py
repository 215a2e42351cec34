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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

from treering._arrays.outgoing import SaveData, SaveLayout, divide_save, join_layouts, merge_checksums
from treering._arrays.plan_cache import TreePlan
from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.writer import UNWATCHED, Watch
from treering._checkpoint.forms import Loss, key_texts
from treering._checkpoint.joint_driver import JointShare, save_jointly
from treering._checkpoint.save_options import SaveOptions, require_value, versions
from treering._checkpoint.transaction import AttemptFiles, CheckpointFolder, JoinedFolder
from treering._coordination.job_handshake import next_sequence
from treering._coordination.message_board import MessageBoard
from treering._coordination.operations import Call
from treering._format.document import encode_index, read_names
from treering._format.index import LARGE_VALUE, DataFile, Index, OpaqueLeaf, file_digests
from treering._format.selection import Selection, thinned_as_dicts
from treering._printable import kind_of
from treering._tree.each import pack, unpack
from treering._tree.flatten import Flattened
from treering._values.processes import Processes
from treering._values.telemetry import phase


def write_folder(plan: TreePlan, options: SaveOptions, watch: Watch) -> None:
    """Write the folder as this process alone; ``treering.save`` says more."""
    metadata = options.json_metadata()
    watch.move()
    with closing(CheckpointFolder(options.path, overwrite=options.overwrite, names_in=read_names)) as folder, folder:
        layout = plan.layout(folder.attempt)
        checksums = write_data(layout, folder, options)
        index = make_index(plan.flat, layout, checksums, metadata, attempt=folder.attempt)
        commit_index(folder, index, layout.headers, watch)


def write_data(layout: SaveLayout, folder: AttemptFiles, options: SaveOptions) -> array[int]:
    """Write the data files, durable but for their names, and return the checksums of their blocks."""
    sizes = layout.sizes()
    with phase("save/write") as moved:
        folder.require_space(sum(sizes))
        written = SaveData(layout, options.progress)
        for number, (name, header, size) in enumerate(zip(layout.names, layout.headers, sizes, strict=True)):
            folder.write_file(name, itertools.chain([header], written.data_of(number)), size)
        moved.nbytes = sum(sizes)
    return written.checksums


def commit_index(folder: CheckpointFolder, index: Index, headers: Sequence[bytes], watch: Watch) -> None:
    """Commit what the index says was written."""
    digests = file_digests(index, headers)
    files = [dataclasses.replace(file, digest=found) for file, found in zip(index.files, digests, strict=True)]
    document = encode_index(
        dataclasses.replace(index, files=files, replaces=folder.superseded, superseded=folder.waiting)
    )
    watch.claim()
    with phase("save/commit"):
        folder.commit(document)


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
        else:
            # Now, while the others are still writing: between their last byte and the commit is as little as can be.
            self._layout = self._plan.files(self._call.attempt, range(self._call.processes.count))
        return payload

    def _write(self, folder: AttemptFiles) -> bytes:
        """Write the own files, durable but for their names; return what process 0 has to know of them."""
        layout = self._plan.files(self._call.attempt, [self._call.processes.this])
        payload = self.hand_in(write_data(layout, folder, self._options))
        return pack([payload, *self._own.values()]) if self._own else payload

    def commit(self, payloads: Sequence[bytes]) -> None:
        layout, folder = self._layout, self._folder
        if layout is None or not isinstance(folder, CheckpointFolder):
            raise RuntimeError("a commit comes after the data")
        call, count = self._call, len(self._own)
        handed = [unpack(payload, 1 + count) for payload in payloads] if count else [[one] for one in payloads]
        checksums = merge_checksums(layout, [found for (found,) in self.handed_in([one[0] for one in handed], 1)])
        if count:
            every = {key: pack([one[1 + at] for one in handed]) for at, key in enumerate(self._own)}
            layout, checksums = self._put_states(layout, checksums, every, folder)
        index = make_index(
            self._flat, layout, checksums, self._metadata, attempt=call.attempt, processes=call.processes.count
        )
        commit_index(folder, index, layout.headers, self._watch)

    def _put_states(
        self, layout: SaveLayout, checksums: array[int], states: Mapping[str, bytes], folder: CheckpointFolder
    ) -> tuple[SaveLayout, array[int]]:
        """Return a layout with the states of all processes in it; what of them is large is in one file more."""
        found = {self._flat.keys.index(key): data for key, data in states.items()}
        values = layout.leaves.values | {leaf: data for leaf, data in found.items() if len(data) <= LARGE_VALUE}
        layout = dataclasses.replace(layout, leaves=dataclasses.replace(layout.leaves, values=values))
        if not (large := {leaf: data for leaf, data in found.items() if len(data) > LARGE_VALUE}):
            return layout, checksums
        more = self._plan.file_of(self._call.attempt, layout.leaves, large)
        written = write_data(more, folder, dataclasses.replace(self._options, progress=None))
        return join_layouts(layout, checksums, more, written)

    def roll_back(self) -> None:
        if isinstance(self._folder, CheckpointFolder):
            self._folder.others_are_done()
        elif self._folder is not None:
            self._folder.abort()


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
