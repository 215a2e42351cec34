"""A tree -> a leaves directory, by this process alone, with others, or through a manager of the caller's.

In a joint save each process writes its own chunk files; process 0 makes the folder of the attempt, writes every
``.zarray``, and commits. The directory is durable when this returns on any of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from treering._arrays.host import this_processes
from treering._arrays.outgoing import ALONE, DescribedLeaves, describe_leaves
from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.writer import UNWATCHED, Watch
from treering._checkpoint.detect import refuse_other_form
from treering._checkpoint.forms import Loss, lost_leaves, lost_members
from treering._checkpoint.joint_driver import require_value, save_jointly, tell_of_end
from treering._checkpoint.save_folder import flatten_source
from treering._checkpoint.save_options import SaveOptions, require_one_of
from treering._checkpoint.signature import (
    check_local,
    local_digests,
    match_signature,
    pack_share,
    signature_of,
    unpack_share,
)
from treering._checkpoint.transaction import JoinedFolder
from treering._codec.zarr import stored_dtype
from treering._coordination.job_handshake import counted_save, next_sequence
from treering._coordination.message_board import FolderMessageBoard, MessageBoard
from treering._coordination.operations import Call
from treering._format.index import LeafType
from treering._format.selection import Selection
from treering._leaves.by_manager import ManagedSave, begin_writes, check_manager, managed_leaves, serialize_by_manager
from treering._leaves.chunks.write import write_leaves
from treering._leaves.commit import begin_save, commit_record
from treering._leaves.documents.index import LEAVES_INDEX
from treering._leaves.documents.record import MOST_AXES, LeavesRecord, arrays_of
from treering._leaves.plan import LeafShares, LeavesSaveOptions, PlannedLeaves, plan_leaves
from treering._store.leaves_api import LeafWriter, LeavesSave
from treering._store.leaves_places import join_leaves_save
from treering._store.resolve import find_at, leaves_path, require_paths, require_shared
from treering._tree.flatten import Flattened, flatten
from treering._values.human import pluralize
from treering._values.processes import Processes
from treering._values.telemetry import report
from treering._view.progress import showing
from treering.errors import ExistsError, MismatchError, UnsupportedError


def serialize(path: str | os.PathLike[str], tree: Any, options: LeavesSaveOptions) -> None:
    """Write ``tree`` into the directory ``path``; ``treering.leaves.tree_serialize_leaves`` says more."""
    place = leaves_path(path, new=True)
    refuse_other_form(place, "leaves")
    manager = options.manager
    require_one_of("processes", options.processes, ("all", "this"))
    require_one_of("host_local", options.host_local, ("first", "equal"))
    for name in ("compressor", "chunk_bytes", "progress") if manager is not None else ():
        if getattr(options, name) is not None:
            hint = "omit it or the manager"
            raise UnsupportedError(f"{name} is for saves by treering itself, not by a manager", hint=hint)
    if manager is not None:
        what = "a manager writes with requests of its own, which treering cannot make safe in a bucket"
        hint = "omit the manager; treering.save_async saves to a bucket in the background"
        require_paths(place, f"{what}; it is for folders on disk", hint)
    flat, job = _flatten(tree, ALONE if options.processes == "this" else None)
    with showing(options.progress):
        if job.count > 1:
            require_shared(place)
            with report("save", place):
                serialize_together(place, flat, options, processes=job)
        elif isinstance(flat, Exception):
            raise flat
        elif manager is None:
            with report("save", place):
                serialize_alone(place, flat, describe_leaves(flat), options)
        elif this_processes(flat.leaves).count > 1:
            hint = "omit the manager, or save on all processes"
            raise UnsupportedError(
                "a manager works with all processes of a job, but this save is of one process", hint=hint
            )
        else:
            serialize_by_manager(place, flat, manager, options)


def _flatten(tree: Any, job: Processes | None) -> tuple[Flattened | Exception, Processes]:
    """Return the flat tree, or why there is none, and the processes that save it: ``job``, or all that there are."""
    try:
        flat = flatten(tree)
    except Exception as error:  # noqa: BLE001 - other processes would wait for this one: they are told first
        return error, job or this_processes(())
    return flat, job or this_processes(flat.leaves)


def serialize_alone(
    path: Path,
    flat: Flattened,
    leaves: DescribedLeaves,
    options: LeavesSaveOptions,
    *,
    watch: Watch = UNWATCHED,
    new: bool = False,
) -> None:
    """Plan, write the chunks, make the record, and commit it; ``new``: only if no index lists any then."""
    plan = plan_leaves(flat, leaves, options)
    with begin_save(path, nbytes=plan.nbytes) as staged:
        record = plan.record(staged.attempt)
        sizes, checksums = write_leaves(
            staged, record.folders, plan.leaves, arrays_of(record), progress=options.progress
        )
        record = dataclasses.replace(record, sizes=sizes, checksums=checksums)
        watch.claim()
        commit_record(path, staged, record, write_index=options.write_index, new=new)
    if options.commit_callback is not None:
        options.commit_callback()


_DIGEST_BYTES: Final = 8


def serialize_together(
    path: Path, flat: Flattened | Exception, options: LeavesSaveOptions, *, processes: Processes
) -> None:
    """Write this process's part of a tree into the directory ``path``; all processes call it.

    Args:
        path: the directory.
        flat: the tree; or why it cannot be saved, which is told to the others before it is raised.
        options: the options of the save.
        processes: those of the job, more than one.
    """
    call = next_sequence(path, processes, timeout=options.timeout, doing=f"save leaves into {os.fspath(path)!r}")
    share = save_jointly(call, path, lambda call: _LeavesShare(call, path, require_value(flat), options))
    if share is not None and not share.managed and options.commit_callback is not None:
        options.commit_callback()


def counted_leaves(path: Any, processes: object) -> contextlib.AbstractContextManager[None]:
    """Count what a caller asks for as a joint save, if it is one, whatever ends it: `counted_save` says why."""
    return counted_save(
        ALONE if processes == "this" else this_processes(()),
        lambda: leaves_path(path, new=True),
        doing=f"save leaves into {path!r:.1000}",
        tell=tell_of_end,
    )


class _LeavesShare:
    """The chunks that this process writes; a manager of the caller's writes those that it takes afterwards.

    Attributes:
        managed: the leaves that a manager writes, and their folders.
    """

    def __init__(self, call: Call, path: Path, flat: Flattened, options: LeavesSaveOptions) -> None:
        if options.manager is not None:
            check_manager(options.manager)
            options.manager.wait_until_finished()  # saves through one manager are committed in the order of their calls
        self._call = call
        self._path = path
        self._options = options
        self._flat = flat
        self._staged: LeavesSave | None = None
        self._writer: LeafWriter | None = None
        self._agreed: LeavesRecord | None = None
        self._plan(describe_leaves(flat, call.processes))

    def _plan(self, leaves: DescribedLeaves) -> None:
        options, call = self._options, self._call
        plan = plan_leaves(self._flat, leaves, options, processes=call.processes.count)
        self._leaves = leaves
        self._record: LeavesRecord = plan.record(call.attempt)
        self.managed: dict[int, str] = {} if options.manager is None else _managed(plan)
        self._own, self._arrays = plan.without(self.managed, arrays_of(self._record))
        self._shares = LeafShares(self._own, self._arrays, call.processes.count)
        self._share = self._shares.of(call.processes.this)

    def signature(self) -> bytes:
        return self._options.digest() + signature_of(self._flat, self._leaves)

    def check(self, signature: bytes) -> None:
        if signature[:_DIGEST_BYTES] != self._options.digest():
            hint = "prefix, write_index, compressor, chunk_bytes and host_local must be the same on all processes"
            raise MismatchError("the processes passed different arguments", hint=hint)
        leaves = match_signature(self._flat, self._leaves, signature[_DIGEST_BYTES:], self._call.processes.this)
        if leaves is not self._leaves:
            self._plan(leaves)

    def enter(self, held: contextlib.ExitStack) -> MessageBoard:
        call = self._call
        nbytes = self._shares.nbytes(self._share)
        self._writer = self._staged = begin_save(self._path, call.attempt, live=call.live_attempts, nbytes=nbytes)
        held.callback(self._close)
        return FolderMessageBoard(self._staged.store)

    def join(self, folder: JoinedFolder, held: contextlib.ExitStack) -> None:
        del folder
        nbytes = self._shares.nbytes(self._share)
        self._writer = held.enter_context(join_leaves_save(self._path, self._call.attempt, nbytes))

    def prepare(self) -> bytes:
        """Write the own files; return what process 0 has to know of them."""
        writer = self._writer
        if writer is None:
            raise RuntimeError("the directory comes before the data")
        sizes, checksums = write_leaves(
            writer, self._own.folders, self._own.leaves, self._arrays,
            progress=self._options.progress, chunks=self._share, headed=not self._call.processes.this,
        )  # fmt: skip
        digests = local_digests(self._flat, self._leaves) if self._options.host_local == "equal" else b""
        if self._staged is None or not self.managed:  # else all is made durable when the manager has written
            writer.make_durable()
        return pack_share([array("Q", sizes), checksums], digests)

    def commit(self, payloads: Sequence[bytes]) -> None:
        read = [unpack_share(payload, 2) for payload in payloads]
        if self._options.host_local == "equal":
            check_local(self._flat.keys, self._leaves, [digests for _, digests in read])
        sizes, checksums = self._shares.merge([(sizes, checksums) for (sizes, checksums), _ in read])
        record = dataclasses.replace(self._record, sizes=sizes, checksums=checksums)
        if self.managed:
            self._agreed = record  # that all are ready is all that is agreed on
        elif self._staged is not None:
            commit_record(self._path, self._staged, record, write_index=self._options.write_index)

    def roll_back(self) -> None:
        if self._writer is not None:
            self._writer.roll_back()

    def finish(self) -> None:
        """Let the manager write what is its to write; process 0 commits when it has."""
        writer, staged, manager = self._writer, self._staged, self._options.manager
        if manager is None or writer is None or not self.managed:
            return
        if staged is None:
            begin_writes(manager, self._flat, self.managed, writer, lambda: None)
        elif self._agreed is not None:
            staged.roll_back()  # if this fails, what others write is swept by the next save
            save = ManagedSave(self._path, staged, self._agreed, self.managed, self._options)
            # It is called on process 0 when all processes have written.
            begin_writes(manager, self._flat, self.managed, staged, save.finish)
            self._staged = None

    def _close(self) -> None:
        if self._staged is not None:  # else the manager has it
            self._staged.close()


def _managed(plan: PlannedLeaves) -> dict[int, str]:
    """Return the leaves that a manager gets, and their folders: those that lie with several processes.

    Of all others each process would write its own, in the same place.
    """
    return {
        number: folder
        for number, folder in managed_leaves(plan).items()
        if (held := plan.leaves.shared_by(number)) and len({owner for _, owners in held for owner in owners}) > 1
    }


def find_losses(source: Source, part: Selection, metadata: Mapping[str, Any]) -> Iterator[Loss]:
    """Yield the metadata, and arrays that zarr v2 does not have."""
    yield from lost_members(metadata)
    yield from lost_leaves(source, part, _refuse)


def write(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> None:
    """Write the directory, whose record has checksums of its own."""
    if not save.overwrite and find_at(save.path / LEAVES_INDEX) is not None:
        raise ExistsError(f"{save.shown!r} is a leaves directory", hint="overwrite=True replaces its leaves")
    refuse_other_form(save.path, "leaves")
    options = LeavesSaveOptions(progress=save.progress)
    flat, leaves = flatten_source(source, part), describe_source(source, part)
    serialize_alone(save.path, flat, leaves, options, watch=watch, new=not save.overwrite)


def _refuse(kind: LeafType) -> str | None:
    if not kind.stored:
        return None
    try:
        stored_dtype(kind.dtype or "")
    except UnsupportedError:
        return f"an array of {kind.dtype}"
    axes = len(kind.shape or ())
    return f"an array of {pluralize(axes, 'axes')}" if axes > MOST_AXES else None
