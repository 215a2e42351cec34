"""A tree -> a leaves directory, by this process alone, with others, or through a manager of the caller's.

In a joint save each process writes its own chunk files; process 0 makes the folder of the attempt, writes every
``.zarray``, and commits. The directory is durable when this returns on any of them. A manager writes jax arrays into
the staged folders of the save. When it has, what lies there is read back, compared with the tree, and committed: in the
manager's own commit callback, after the call returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from treering._arrays.host import this_processes
from treering._arrays.outgoing import ALONE, DescribedLeaves, describe_leaves
from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.writer import UNWATCHED, Watch
from treering._checkpoint.detect import refuse_other_form
from treering._checkpoint.forms import Loss, lost_leaves, lost_members
from treering._checkpoint.joint_driver import JointShare, save_jointly, tell_of_end
from treering._checkpoint.save_folder import flatten_source
from treering._checkpoint.save_options import SaveOptions, require_one_of, require_value
from treering._checkpoint.transaction import JoinedFolder
from treering._codec import zarr
from treering._codec.zarr_chunks import check_chunk_file
from treering._coordination.job_handshake import counted_save, next_sequence
from treering._coordination.message_board import FolderMessageBoard, MessageBoard
from treering._coordination.operations import Call
from treering._format.index import LeafType
from treering._format.selection import Selection
from treering._leaves.chunks.write import write_leaves
from treering._leaves.commit import begin_save, commit_record, list_later, unfinished_update
from treering._leaves.documents.index import LEAVES_INDEX
from treering._leaves.documents.record import MOST_AXES, ChunkLayout, LeavesRecord, arrays_of
from treering._leaves.plan import LeafShares, LeavesSaveOptions, PlannedLeaves, plan_leaves
from treering._printable import kind_of
from treering._store.api import Store
from treering._store.failures import naming
from treering._store.leaves_api import LeafWriter, LeavesSave, opened_at
from treering._store.resolve import (
    begin_leaves_save,
    find_at,
    join_leaves_save,
    leaves_path,
    require_paths,
    require_shared,
)
from treering._tree.flatten import Flattened, flatten
from treering._values.checksums import block_bytes, block_checksums, block_count
from treering._values.human import pluralize
from treering._values.keys import naming_leaf
from treering._values.leaves_names import ZARRAY, parts_of, staged_leaves
from treering._values.processes import Processes
from treering._values.telemetry import report
from treering._view.progress import showing
from treering.errors import CorruptError, ExistsError, MismatchError, UnsupportedError


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
            _serialize_by_manager(place, flat, manager, options)


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
_PIECE_BYTES: Final = 8 << 20


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


class _LeavesShare(JointShare):
    """The chunks that this process writes; a manager of the caller's writes those that it takes afterwards.

    Attributes:
        managed: the leaves that a manager writes, and their folders.
    """

    def __init__(self, call: Call, path: Path, flat: Flattened, options: LeavesSaveOptions) -> None:
        if options.manager is not None:
            _check_manager(options.manager)
            options.manager.wait_until_finished()  # saves through one manager are committed in the order of their calls
        leaves = describe_leaves(flat, call.processes)
        super().__init__(call, flat, leaves, compares_local=options.host_local == "equal")
        self._path = path
        self._options = options
        self._staged: LeavesSave | None = None
        self._writer: LeafWriter | None = None
        self._agreed: LeavesRecord | None = None
        self.plan()

    def plan(self) -> None:
        options, call = self._options, self._call
        plan = plan_leaves(self._flat, self._leaves, options, processes=call.processes.count)
        self._record: LeavesRecord = plan.record(call.attempt)
        self.managed: dict[int, str] = {} if options.manager is None else _managed(plan)
        self._own, self._arrays = plan.without(self.managed, arrays_of(self._record))
        self._shares = LeafShares(self._own, self._arrays, call.processes.count)
        self._share = self._shares.of(call.processes.this)

    def signature(self) -> bytes:
        return self._options.digest() + super().signature()

    def check(self, signature: bytes) -> None:
        if signature[:_DIGEST_BYTES] != self._options.digest():
            hint = "prefix, write_index, compressor, chunk_bytes and host_local must be the same on all processes"
            raise MismatchError("the processes passed different arguments", hint=hint)
        super().check(signature[_DIGEST_BYTES:])

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
        writer = self._writer
        if writer is None:
            raise RuntimeError("the directory comes before the data")
        sizes, checksums = write_leaves(
            writer, self._own.folders, self._own.leaves, self._arrays,
            progress=self._options.progress, chunks=self._share, headed=not self._call.processes.this,
        )  # fmt: skip
        handed_in = self.hand_in(array("Q", sizes), checksums)
        if self._staged is None or not self.managed:  # else all is made durable when the manager has written
            writer.make_durable()
        return handed_in

    def commit(self, payloads: Sequence[bytes]) -> None:
        sizes, checksums = self._shares.merge(self.handed_in(payloads, 2))
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
            _begin_writes(manager, self._flat, self.managed, writer, lambda: None)
        elif self._agreed is not None:
            staged.roll_back()  # if this fails, what others write is swept by the next save
            save = _ManagedSave(self._path, staged, self._agreed, self.managed, self._options)
            # It is called on process 0 when all processes have written.
            _begin_writes(manager, self._flat, self.managed, staged, save.finish)
            self._staged = None

    def _close(self) -> None:
        if self._staged is not None:  # else the manager has it
            self._staged.close()


# --------------------------------------------------------------------------------------------------------- by a manager


def _managed(plan: PlannedLeaves) -> dict[int, str]:
    """Return the leaves that a manager gets, and their folders: those that lie with several processes.

    Of all others each process would write its own, in the same place.
    """
    return {
        number: folder
        for number, folder in _managed_leaves(plan).items()
        if (held := plan.leaves.shared_by(number)) and len({owner for _, owners in held for owner in owners}) > 1
    }


def _serialize_by_manager(path: Path, flat: Flattened, manager: Any, options: LeavesSaveOptions) -> None:
    """Begin to write a tree into the directory ``path``; the manager's ``wait_until_finished`` waits for its end.

    The manager gets the jax arrays whose dtype zarr v2 knows. Everything else is written before this returns.
    """
    _check_manager(manager)
    plan = plan_leaves(flat, describe_leaves(flat), options)
    manager.wait_until_finished()  # saves through one manager are committed in the order of their calls
    staged = begin_leaves_save(path, unfinished_update, list_later, nbytes=plan.nbytes)
    with contextlib.ExitStack() as undo:
        undo.callback(staged.close)
        managed = _managed_leaves(plan)
        record = plan.record(staged.attempt)
        own, arrays = plan.without(managed, arrays_of(record))
        _, checksums = write_leaves(staged, own.folders, own.leaves, arrays)
        save = _ManagedSave(path, staged, dataclasses.replace(record, checksums=checksums), managed, options)
        if managed:
            _begin_writes(manager, flat, managed, staged, save.finish)
        else:
            save.finish()
        undo.pop_all()


def _begin_writes(
    manager: Any, flat: Flattened, managed: Mapping[int, str], writer: LeafWriter, finish: Callable[[], None]
) -> None:
    """Give a manager its leaves, and the folders where they are staged; it calls ``finish`` when they are written."""
    above = writer.store.path.joinpath(*staged_leaves(writer.attempt))
    for folder in managed.values():
        writer.require_room(folder)
        writer.write(folder.rpartition("/")[0], ())  # what a manager makes is its folder, not those on the way
    arrays = [flat.leaves[number] for number in managed]
    paths = [os.fspath(above.joinpath(*parts_of(folder))) for folder in managed.values()]
    manager.serialize_with_paths(arrays, paths, on_commit_callback=finish)


def _check_manager(manager: object) -> None:
    """Refuse what has not the methods of a manager."""
    for name in ("serialize_with_paths", "wait_until_finished"):
        if not callable(getattr(manager, name, None)):
            raise UnsupportedError(f"the manager, {kind_of(manager)}, has no method {name!r}")


def _managed_leaves(plan: PlannedLeaves) -> dict[int, str]:
    """Return the numbers of the leaves that a manager can be given, and their folders."""
    leaves, kinds = plan.leaves, plan.flat.kinds
    known = [kind.dtype is not None and zarr.stored_dtype(kind.dtype) == kind.dtype for kind in leaves.types]
    stored = zip(leaves.sources, plan.folders, strict=True)
    return {number: folder for number, folder in stored if kinds[number] == "jax" and known[leaves.leaf_types[number]]}


class _ManagedSave:
    """A save that waits for its manager.

    It holds no array and no manager: an array that the caller drops is freed, and where the manager fails, it drops
    this object, and the staged files are removed with it.
    """

    def __init__(
        self, path: Path, staged: LeavesSave, record: LeavesRecord, managed: Iterable[int], options: LeavesSaveOptions
    ) -> None:
        self._path = path.absolute()  # it is committed later, when the program may work in another folder
        self._staged = staged
        self._record = record
        self._managed = frozenset(managed)
        self._commit_callback = options.commit_callback
        self._write_index = options.write_index
        # Not at the end of the program: a forked child has that too, and the next save sweeps what is left.
        weakref.finalize(self, staged.close).atexit = False

    def finish(self) -> None:
        """Commit what the manager wrote."""
        with report("save", self._path), contextlib.closing(self._staged) as staged:
            record = _add_managed(self._record, self._managed, staged)
            commit_record(self._path, staged, record, write_index=self._write_index)
        if self._commit_callback is not None:
            self._commit_callback()


def _add_managed(record: LeavesRecord, managed: frozenset[int], staged: LeavesSave) -> LeavesRecord:
    """Return the whole record: with the layouts and checksums of what the manager wrote, which gets our marker."""
    layouts: dict[ChunkLayout, int] = {}
    leaf_layouts: list[int] = []
    sizes: list[int] = []
    checksums, own, done = array("Q"), record.checksums, 0
    for number, folder, planned in zip(record.stored_leaves(), record.folders, arrays_of(record), strict=True):
        if number in managed:
            with naming_leaf(record.keys[number]):
                written, lengths, blocks = _take_over(staged, folder, record.types[record.leaf_types[number]])
            found = dataclasses.replace(written, marker=record.attempt)
            marked = zarr.zarray_bytes(found)
            staged.write(folder, [(ZARRAY, [marked], len(marked))])
            checksums += blocks
            sizes += lengths if found.compressor is not None else ()
        else:
            found = planned
            count = zarr.chunk_count(found) * block_count(zarr.chunk_bytes(found))
            checksums += own[done : done + count]
            done += count
        layout = ChunkLayout(chunks=found.chunks, compressor=found.compressor)
        leaf_layouts.append(layouts.setdefault(layout, len(layouts)))
    return dataclasses.replace(
        record, layouts=tuple(layouts), leaf_layouts=leaf_layouts, sizes=sizes, checksums=checksums
    )


def _take_over(staged: LeavesSave, folder: str, leaf_type: LeafType) -> tuple[zarr.ZarrArray, list[int], array[int]]:
    """Read an array that another writer staged, to its last byte, and remove its ``.zarray``, in whose place ours goes.

    Returns:
        What its ``.zarray`` says, the bytes of each chunk file, and the checksums of the blocks, chunk after chunk.

    Raises:
        UnsupportedError: it is no zarr v2 array, or of a form in which leaves are not stored.
        CorruptError: it is not the leaf's array, or a chunk is missing or short.
        StoreError: the system refuses.
    """
    parts = (*staged_leaves(staged.attempt), *parts_of(folder))
    with (
        naming(os.fspath(staged.store.path), "read"),
        contextlib.suppress(FileNotFoundError),
        opened_at(staged.store, parts) as place,
    ):
        read = _read_back(place, leaf_type)
        place.remove(ZARRAY)
        return read
    raise UnsupportedError(
        "the manager wrote no zarr v2 array: there is no .zarray", hint="use one that writes zarr v2"
    )


def _read_back(place: Store, leaf_type: LeafType) -> tuple[zarr.ZarrArray, list[int], array[int]]:
    names = set(place.names())
    with place.open_file(ZARRAY) as file:
        found = zarr.parse_zarray(file.read(0, file.size))
    _check_form(found, leaf_type)
    sizes, checksums = [], array("Q")
    for name in zarr.chunk_names(found):
        if name not in names:
            raise CorruptError(f"the manager wrote no chunk {name!r}")
        with place.open_file(name) as file:
            check_chunk_file(found, file.size)
            sizes.append(file.size)
            for start in range(0, file.size, _PIECE_BYTES):  # it may be larger than memory
                piece = memoryview(file.read(start, min(_PIECE_BYTES, file.size - start)))
                checksums += block_checksums(piece, block_bytes(file.size))
    if len(names) > len(sizes) + 1:
        extra = min(names.difference(zarr.chunk_names(found), [ZARRAY]))
        raise UnsupportedError(f"the manager wrote {extra!r}, which is not a part of a zarr v2 array")
    return found, sizes, checksums


def _check_form(found: zarr.ZarrArray, leaf_type: LeafType) -> None:
    if (found.dtype, found.shape) != (zarr.stored_dtype(leaf_type.dtype or ""), leaf_type.shape):
        wanted = f"{leaf_type.dtype}{list(leaf_type.shape or ())}"
        raise CorruptError(f"the manager was given {wanted} and wrote {found.dtype}{list(found.shape)}")
    if (found.order, found.separator, found.big_endian) != ("C", ".", False):
        raise UnsupportedError(
            'the manager wrote an array in order F, big endian, or with "/" in the names of its chunks'
        )
    if any(chunk > max(length, 1) for chunk, length in zip(found.chunks, found.shape, strict=True)):
        raise UnsupportedError(f"the manager wrote chunks of {list(found.chunks)}, larger than the array")


# ---------------------------------------------------------------------------------------------- as a form to convert to


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
        zarr.stored_dtype(kind.dtype or "")
    except UnsupportedError:
        return f"an array of {kind.dtype}"
    axes = len(kind.shape or ())
    return f"an array of {pluralize(axes, 'axes')}" if axes > MOST_AXES else None
