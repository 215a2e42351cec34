"""A tree that several processes hold -> one checkpoint's folder, durable when this returns on any of them.

Each process writes the files of its own part of the plan; process 0 enters the folder and commits, the others join it.
"""

from __future__ import annotations

import contextlib
import os
import struct
from array import array
from collections.abc import Sequence
from typing import Any, Final

from treering._arrays.written import FilesOfProcesses, SaveData, content, divide_save, merge_checksums
from treering._background.save_job import UNWATCHED, Watch
from treering._checkpoint.joined_folder import JoinedFolder
from treering._checkpoint.joint_driver import save_jointly
from treering._checkpoint.plan_cache import TreePlan
from treering._checkpoint.save_folder import add_digests, make_index
from treering._checkpoint.save_options import SaveOptions
from treering._checkpoint.signature import (
    check_local,
    check_signature,
    claim_leaves,
    leaf_text,
    local_digests,
    signature_of,
)
from treering._checkpoint.transaction import CheckpointFolder
from treering._coordination.job_handshake import next_sequence
from treering._coordination.message_board import MessageBoard
from treering._coordination.operations import Call
from treering._format.document import encode_index, read_names
from treering._format.index import DataFile
from treering._values.checksums import pack_checksums, unpack_checksums
from treering._values.processes import Processes, format_processes
from treering._values.telemetry import phase
from treering.errors import Mismatch

_COUNT: Final = struct.Struct("<Q")


def save_together(plan: TreePlan | Exception, options: SaveOptions, processes: Processes) -> None:
    """Write this process's share of a tree into a folder; all processes call it.

    Args:
        plan: the tree, planned; or why it cannot be saved, which the others are told before it is raised.
        options: what the caller asks for.
        processes: those of the job, more than one.
    """
    write_share(begin_call(options, processes), plan, options)


def begin_call(options: SaveOptions, processes: Processes) -> Call:
    """Count a joint save: on the caller's thread, because the first one of a job is a collective."""
    doing = f"save {os.fspath(options.path)!r}"
    return next_sequence(options.path, processes, timeout=options.timeout, doing=doing)


def write_share(call: Call, plan: TreePlan | Exception, options: SaveOptions, watch: Watch = UNWATCHED) -> None:
    """Do this process's part of a counted save, in any thread: it talks to the others through the folder alone."""

    def make_share() -> _CheckpointShare:
        if isinstance(plan, Exception):
            raise plan
        return _CheckpointShare(call, plan, options, watch)

    save_jointly(call, options.path, make_share, pause=watch.pause)


class _CheckpointShare:
    """The files that this process writes; on process 0 also the folder, which it has entered."""

    def __init__(self, call: Call, plan: TreePlan, options: SaveOptions, watch: Watch) -> None:
        self._call = call
        self._flat = plan.flat
        self._plan = plan.divided()
        self._options = options
        self._metadata: dict[str, Any] = {}
        self._watch = watch
        self._folder: CheckpointFolder | None = None
        self._joined: JoinedFolder | None = None
        self._files: FilesOfProcesses | None = None

    def signature(self) -> bytes:
        return signature_of(self._flat, self._plan.leaves)

    def check(self, signature: bytes) -> None:
        this, flat = self._call.processes.this, self._flat
        leaves = claim_leaves(flat, self._plan.leaves, signature, this)
        if leaves is not self._plan.leaves:
            self._plan = divide_save(flat.keys, leaves, self._call.processes.count)
        check_signature(signature_of(flat, leaves), flat.keys, lambda leaf: leaf_text(leaves, leaf))(signature)

    def enter(self, held: contextlib.ExitStack) -> MessageBoard:
        call = self._call
        self._metadata = self._options.json_metadata()
        folder = CheckpointFolder(
            self._options.path,
            overwrite=self._options.overwrite,
            names_in=read_names,
            attempt=call.attempt,
            live=call.live_attempts,
        )
        held.enter_context(contextlib.closing(folder))
        self._folder = held.enter_context(folder)
        return folder.board

    def join(self, folder: JoinedFolder, held: contextlib.ExitStack) -> None:
        del held
        self._joined = folder

    def prepare(self) -> bytes:
        if self._folder is not None:
            payload = self._write(self._folder)
            # Now, while the others are still writing: between their last byte and the commit is as little as can be.
            self._files = self._plan.files(self._call.attempt, range(self._call.processes.count))
            return payload
        joined = self._joined
        if joined is None:
            raise RuntimeError("the folder comes before the data")
        payload = self._write(joined)
        joined.make_durable()
        self._watch.claim()  # what is handed in may be committed at any moment
        return payload

    @phase("save/write")
    def _write(self, folder: CheckpointFolder | JoinedFolder) -> bytes:
        """Write the own files, durable but for their names; return what process 0 has to know of them."""
        files = self._plan.files(self._call.attempt, [self._call.processes.this])
        layout = files.layout
        sizes = layout.sizes()
        folder.require_space(sum(sizes))
        written = SaveData(layout, self._options.progress)
        for number, (name, header, size) in enumerate(zip(files.names, layout.headers, sizes, strict=True)):
            folder.write_file(name, content(header, written.data_of(number)), size)
        digests = local_digests(self._flat, self._plan.leaves) if self._options.host_local == "equal" else b""
        return _COUNT.pack(len(written.checksums)) + pack_checksums(written.checksums) + digests

    def commit(self, payloads: Sequence[bytes]) -> None:
        files, folder = self._files, self._folder
        if files is None or folder is None:
            raise RuntimeError("a commit comes after the data")
        opened = list(map(_opened, payloads))
        if self._options.host_local == "equal":
            check_local(self._flat.keys, self._plan.leaves, [digests for _, digests in opened])
        elif strict := [process for process, (_, digests) in enumerate(opened) if digests]:
            raise Mismatch(f'{format_processes(strict)} passed host_local="equal", and process 0 did not')
        checksums = merge_checksums(files, [found for found, _ in opened])
        layout = files.layout
        columns = zip(files.names, layout.sizes(), layout.headers, files.writers, strict=True)
        index = make_index(
            self._flat,
            layout,
            checksums,
            [
                DataFile(name=name, nbytes=size, header=len(header), digest=None, process=process)
                for name, size, header, process in columns
            ],
            metadata=self._metadata,
            attempt=self._call.attempt,
            processes=self._call.processes.count,
        )
        document = encode_index(add_digests(index, layout.headers, replaces=folder.superseded))
        self._watch.claim()
        with phase("save/commit"):
            folder.commit(document)

    def roll_back(self) -> None:
        if self._folder is not None:
            self._folder.others_are_done()
        if self._joined is not None:
            self._joined.withdraw()

    def finish(self) -> None:
        pass


def _opened(payload: bytes) -> tuple[array[int], bytes]:
    """Return the checksums and the digests that a process handed in."""
    (count,) = _COUNT.unpack(payload[: _COUNT.size])
    stop = _COUNT.size * (1 + count)
    return unpack_checksums(payload[_COUNT.size : stop]), payload[stop:]
