"""A tree -> a leaves directory, by this process alone, with others, or through a manager of the caller's.

The plan follows from shapes and shardings, so each process of a job comes to the same shares by itself and hands in no
more than sizes and checksums. In a joint save each process writes its own chunk files; process 0 makes the folder of
the attempt, writes every ``.zarray``, and commits. The directory is durable when this returns on any of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from array import array
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import xxhash

from treering._arrays.host import this_processes
from treering._arrays.jobs import Progress
from treering._arrays.outgoing import ALONE, DescribedLeaves, describe_leaves
from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._background.writer import UNWATCHED, Watch
from treering._checkpoint.detect import refuse_other_form
from treering._checkpoint.forms import Loss, lost_leaves, lost_members
from treering._checkpoint.joint_driver import JointShare, save_jointly, tell_of_end
from treering._checkpoint.save_folder import flatten_source
from treering._checkpoint.save_options import HostLocal, SaveOptions, require_value, versions
from treering._checkpoint.transaction import JoinedFolder
from treering._codec.zarr import ZarrArray, chunk_bytes, chunk_count, stored_dtype
from treering._codec.zarr_chunks import require_known_compressor
from treering._coordination.job_handshake import counted_save, next_sequence
from treering._coordination.message_board import FolderMessageBoard, MessageBoard
from treering._coordination.operations import Call
from treering._format.index import LeafType
from treering._format.selection import Selection
from treering._leaves.chunks.write import write_leaves
from treering._leaves.commit import begin_save, commit_record
from treering._leaves.documents.index import LEAVES_INDEX
from treering._leaves.documents.record import MOST_AXES, ChunkLayout, LeavesRecord, arrays_of, folder_of, prefix_folder
from treering._leaves.managed import ManagedSave, begin_writes, check_manager, managed_leaves
from treering._plan.chunks import balanced_chunk, chunk_shape, plan_writers, shared_chunk_shape
from treering._printable import kind_of
from treering._store.leaves_api import LeafWriter, LeavesSave
from treering._store.resolve import find_at, join_leaves_save, leaves_path, require_paths, require_shared
from treering._tree.flatten import Flattened, flatten
from treering._values.arguments import require_flags, require_one_of
from treering._values.boxes import whole
from treering._values.checksums import block_count
from treering._values.dtypes import itemsize_of
from treering._values.human import pluralize
from treering._values.keys import naming_leaf
from treering._values.processes import Processes, failure_of
from treering._values.telemetry import report
from treering._view.progress import showing
from treering.errors import ExistsError, MismatchError, UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavesSaveOptions:
    """What a save goes by; ``treering.leaves.tree_serialize_leaves`` says what each option means."""

    prefix: str | None = None
    """Name of the tree."""
    write_index: bool = True
    """Whether the index is to name it."""
    compressor: Mapping[str, Any] | None = None
    """The compressor of the chunks."""
    chunk_bytes: int | None = None
    """The largest chunk."""
    host_local: HostLocal = "first"
    """Where leaves come from that each process holds alone."""
    commit_callback: Callable[[], object] | None = None
    """Called by process 0."""
    progress: Progress | None = None
    """Called with the bytes that this process has written."""
    manager: Any = None
    """What writes jax arrays, if it is not treering, such as jax's ``GlobalAsyncCheckpointManager``: its
    ``serialize_with_paths(arrays, paths, on_commit_callback=...)`` begins to write arrays, each into the folder of its
    path, and calls back when they are there; its ``wait_until_finished()`` waits for that."""
    processes: Literal["all", "this"] = "all"
    """Which processes of a job save the tree."""
    timeout: float = 600.0
    """Seconds to wait at one point for other processes."""

    def digest(self) -> bytes:
        """Return a few bytes that are the same on all processes that are given the same arguments."""
        codec = None if self.compressor is None else sorted(self.compressor.items(), key=repr)
        asked = (self.prefix or None, self.write_index, codec, self.chunk_bytes, self.host_local, self.manager is None)
        return xxhash.xxh3_64_digest(repr(asked).encode("utf-8", "surrogatepass"))


def serialize(path: str | os.PathLike[str], tree: Any, options: LeavesSaveOptions) -> None:
    """Write ``tree`` into the directory ``path``; ``treering.leaves.tree_serialize_leaves`` says more."""
    place = leaves_path(path, new=True)
    refuse_other_form(place, "leaves")
    manager = options.manager
    require_flags(write_index=options.write_index)
    require_one_of("processes", options.processes, ("all", "this"))
    require_one_of("host_local", options.host_local, ("first", "equal"))
    if not (options.commit_callback is None or callable(options.commit_callback)):
        raise UnsupportedError(f"commit_callback is {options.commit_callback!r:.100}, not a function without arguments")
    for name in ("compressor", "chunk_bytes", "progress") if manager is not None else ():
        if getattr(options, name) is not None:
            hint = "omit it or the manager"
            raise UnsupportedError(f"{name} is for saves by treering itself, not by a manager", hint=hint)
    if manager is not None:
        what = "a manager writes with requests of its own, which treering cannot make safe in a bucket"
        hint = "omit the manager; treering.save_async saves to a bucket in the background"
        require_paths(place, f"{what}; it is for folders on disk", hint)
    flat: Flattened | Exception
    try:
        flat = flatten(tree)
    except Exception as error:  # noqa: BLE001 - other processes would wait for this one: they are told first
        flat = error
    held = () if isinstance(flat, Exception) else flat.leaves
    job = ALONE if options.processes == "this" else this_processes(held)
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
    draft = plan_leaves(flat, leaves, options)
    with begin_save(path, nbytes=_stored_bytes(leaves)) as staged:
        record = _begun(draft, staged.attempt)
        sizes, checksums = write_leaves(staged, record, leaves, progress=options.progress)
        record = dataclasses.replace(record, sizes=sizes, checksums=checksums)
        watch.claim()
        commit_record(path, staged, record, write_index=options.write_index, new=new)
    if options.commit_callback is not None:
        options.commit_callback()


def _serialize_by_manager(path: Path, flat: Flattened, manager: Any, options: LeavesSaveOptions) -> None:
    """Begin to write a tree into the directory ``path``; the manager's ``wait_until_finished`` waits for its end.

    The manager gets the jax arrays whose dtype zarr v2 knows. Everything else is written before this returns.
    """
    check_manager(manager)
    leaves = describe_leaves(flat)
    draft = plan_leaves(flat, leaves, options)
    manager.wait_until_finished()  # saves through one manager are committed in the order of their calls
    staged = begin_save(path, nbytes=_stored_bytes(leaves))
    with contextlib.ExitStack() as undo:
        undo.callback(staged.close)
        managed, record = managed_leaves(flat, leaves, draft.folders), _begun(draft, staged.attempt)
        _, checksums = write_leaves(staged, record, leaves, without=managed)
        save = _managed_save(path, staged, dataclasses.replace(record, checksums=checksums), managed, options)
        if managed:
            begin_writes(manager, flat, managed, staged, save.finish)
        else:
            save.finish()
        undo.pop_all()


def _managed_save(
    path: Path, staged: LeavesSave, record: LeavesRecord, managed: Container[int], options: LeavesSaveOptions
) -> ManagedSave:
    return ManagedSave(
        path=path.absolute(), staged=staged, record=record, managed=managed,
        commit_callback=options.commit_callback, write_index=options.write_index,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the plan


def plan_leaves(
    flat: Flattened, leaves: DescribedLeaves, options: LeavesSaveOptions, *, processes: int = 1
) -> LeavesRecord:
    """Return the record of what will be written, without attempt, time, sizes and checksums.

    Args:
        flat: the tree.
        leaves: its leaves.
        options: the options of the save.
        processes: how many processes save it together.

    Raises:
        UnsupportedError: a leaf, a key, the prefix, the compressor or the limit of chunks is not possible.
    """
    prefix = options.prefix
    if not isinstance(prefix, str | None):
        raise UnsupportedError(f"a prefix is a str, found {kind_of(prefix)}")
    if prefix:
        prefix_folder(prefix)
    numbers: dict[ChunkLayout, int] = {}
    found = _plan_layouts(leaves, flat.keys, options, processes)
    leaf_layouts = [numbers.setdefault(layout, len(numbers)) for layout in found]
    return LeavesRecord(
        prefix=prefix or None,
        written={"processes": processes} if processes > 1 else {},
        meshes=leaves.meshes,
        structure=flat.tokens,
        keys=flat.keys,
        types=leaves.types,
        leaf_types=leaves.leaf_types,
        values=leaves.values,
        folders=[folder_of(prefix, flat.keys[number]) for number in leaves.sources],
        layouts=tuple(numbers),
        leaf_layouts=leaf_layouts,
        structured=flat.structured,
    )


def _begun(draft: LeavesRecord, attempt: str) -> LeavesRecord:
    """Return the record of a save that begins now; sizes and checksums come when the leaves are written."""
    # Saves are put in the order of their times, so seconds would be too coarse.
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    return dataclasses.replace(draft, attempt=attempt, written={**versions(), "at": now, **draft.written})


def _stored_bytes(leaves: DescribedLeaves) -> int:
    """Return the bytes of all stored leaves, before any compressor."""
    return sum(source.data.nbytes for sources in leaves.sources.values() for source in sources)


def _plan_layouts(
    leaves: DescribedLeaves, keys: Sequence[str], options: LeavesSaveOptions, processes: int
) -> Iterator[ChunkLayout]:
    """Yield the layout of each stored leaf; leaves of one type that are cut alike have the same one."""
    limit = options.chunk_bytes
    if limit is not None and (type(limit) is not int or limit < 1):
        raise UnsupportedError(f"chunk_bytes is {limit!r:.100}, but must be a number of bytes of at least 1")
    codec = None if options.compressor is None else require_known_compressor(options.compressor)
    # Chunks that several processes could write are small enough for them to share the work.
    balanced = limit
    if processes > 1:
        least = balanced_chunk([leaves.layout_of(number) for number in leaves.sources], processes)
        balanced = least if limit is None else min(least, limit)
    known: dict[tuple[int, object], ChunkLayout] = {}
    for number, sources in leaves.sources.items():
        kind, held = leaves.leaf_types[number], leaves.shared_by(number)
        boxes = tuple(source.box for source in sources)
        key = (kind, boxes if held is None else id(held))
        if key not in known:
            shape = leaves.types[kind].shape or ()
            with naming_leaf(keys[number]):
                itemsize = itemsize_of(stored_dtype(leaves.types[kind].dtype or ""))
                if len(shape) > MOST_AXES:
                    axes = pluralize(len(shape), "axes")
                    raise UnsupportedError(f"an array of {axes}; those of zarr v2 have at most {MOST_AXES}")
            if held is None:
                chunks = chunk_shape(shape, boxes, itemsize, limit)
            else:
                most = balanced if any(len(owners) > 1 for _, owners in held) else limit
                chunks = shared_chunk_shape(shape, [box for box, _ in held], itemsize, most)
            known[key] = ChunkLayout(chunks=chunks, compressor=codec)
        yield known[key]


# ------------------------------------------------------------------------------------------------------------- together


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


class _LeavesShare(JointShare):
    """The chunks that this process writes; a manager of the caller's writes those that it takes afterwards.

    Attributes:
        managed: the leaves that a manager writes, and their folders.
    """

    def __init__(self, call: Call, path: Path, flat: Flattened, options: LeavesSaveOptions) -> None:
        if options.manager is not None:
            check_manager(options.manager)
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
        draft = plan_leaves(self._flat, self._leaves, options, processes=call.processes.count)
        self._record: LeavesRecord = _begun(draft, call.attempt)
        self.managed: dict[int, str] = {}
        if options.manager is not None:
            self.managed = managed_leaves(self._flat, self._leaves, draft.folders, spread=True)
        layouts = zip(self._leaves.sources, arrays_of(self._record), strict=True)
        arrays = {number: layout for number, layout in layouts if number not in self.managed}
        self._shares = LeafShares(self._leaves, self._flat.keys, arrays, call.processes.count)
        self._share = self._shares.of(call.processes.this)
        self._nbytes = self._shares.nbytes(self._share)

    def signature(self) -> bytes:
        return self._options.digest() + super().signature()

    def check(self, signature: bytes) -> None:
        if signature[:_DIGEST_BYTES] != self._options.digest():
            hint = "prefix, write_index, compressor, chunk_bytes and host_local must be the same on all processes"
            raise MismatchError("the processes passed different arguments", hint=hint)
        super().check(signature[_DIGEST_BYTES:])

    def enter(self, held: contextlib.ExitStack) -> MessageBoard:
        call = self._call
        held.callback(self._close)  # first, so that an interrupt cannot come between the save and its end
        self._staged = begin_save(self._path, call.attempt, live=call.live_attempts, nbytes=self._nbytes)
        self._writer = self._staged
        return FolderMessageBoard(self._staged.store)

    def join(self, folder: JoinedFolder, held: contextlib.ExitStack) -> None:
        del folder
        self._writer = held.enter_context(join_leaves_save(self._path, self._call.attempt, self._nbytes))

    def prepare(self) -> bytes:
        writer = self._writer
        if writer is None:
            raise RuntimeError("the directory comes before the data")
        sizes, checksums = write_leaves(
            writer, self._record, self._leaves, without=self.managed, progress=self._options.progress,
            chunks=self._share, headed=not self._call.processes.this,
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
            begin_writes(manager, self._flat, self.managed, writer, lambda: None)
        elif self._agreed is not None:
            staged.roll_back()  # if this fails, what others write is swept by the next save
            save = _managed_save(self._path, staged, self._agreed, self.managed, self._options)
            # It is called on process 0 when all processes have written.
            begin_writes(manager, self._flat, self.managed, staged, save.finish)
            self._staged = None

    def _close(self) -> None:
        if self._staged is not None:  # else the manager has it
            self._staged.close()


class LeafShares:
    """Who writes what.

    Args:
        leaves: the leaves.
        keys: key texts of all leaves, for errors.
        arrays: leaf number -> the array, of each stored leaf that is shared out.
        processes: how many there are.

    Raises:
        UnsupportedError: nobody holds a whole chunk of some leaf.
    """

    def __init__(
        self, leaves: DescribedLeaves, keys: Sequence[str], arrays: Mapping[int, ZarrArray], processes: int
    ) -> None:
        self._arrays = arrays
        self._numbers = list(arrays)
        self._alone = {number: range(chunk_count(found)) for number, found in arrays.items()}
        layouts, chunks = [], []
        for number, found in arrays.items():
            layout, chunk = leaves.layout_of(number), found.chunks
            if leaves.shared_by(number):
                del self._alone[number]
            else:
                # The same everywhere, though processes may have other things in its place.
                layout = dataclasses.replace(layout, boxes=((whole(layout.shape), (0,)),))
                chunk = tuple(max(size, 1) for size in layout.shape)
            layouts.append(layout)
            chunks.append(chunk)
        self._writers = plan_writers(layouts, chunks, processes, [keys[number] for number in arrays])

    def of(self, process: int) -> dict[int, Sequence[int]]:
        """Return what one process writes: leaf number -> which of its chunks, ascending."""
        chunks: dict[int, Any] = {}
        for place, chunk in self._writers.parts_of(process):
            chunks.setdefault(self._numbers[place], []).append(chunk)
        return chunks if process else dict(sorted((chunks | self._alone).items()))

    def nbytes(self, share: Mapping[int, Sequence[int]]) -> int:
        """Return how many bytes a share is, before any compressor."""
        return sum(len(numbers) * chunk_bytes(self._arrays[number]) for number, numbers in share.items())

    def merge(self, parts: Sequence[Sequence[array[int]]]) -> tuple[list[int], array[int]]:
        """Return the sizes and checksums of all chunk files, in the order of a record.

        Args:
            parts: for each process, sizes of its compressed chunk files and the checksums of its blocks.

        Raises:
            ProcessFailedError: a process handed in another number of them than its share has.
        """
        found: dict[int, list[tuple[int, int, array[int]]]] = {number: [] for number in self._arrays}
        for process, (sizes, checksums) in enumerate(parts):
            sized, at = 0, 0
            for number, numbers in self.of(process).items():
                zarr = self._arrays[number]
                size, is_packed = chunk_bytes(zarr), zarr.compressor is not None
                for chunk in numbers:
                    if is_packed:
                        size = sizes[sized] if sized < len(sizes) else 0
                        sized += 1
                    count = block_count(size)
                    found[number].append((chunk, size, checksums[at : at + count]))
                    at += count
            if (sized, at) != (len(sizes), len(checksums)):
                raise failure_of([process], "did not write what the plan of process 0 assigned to it")
        every: list[int] = []
        table = array("Q")
        for number, pieces in found.items():
            pieces.sort(key=lambda piece: piece[0])
            for _, size, run in pieces:
                table += run
                if self._arrays[number].compressor is not None:
                    every.append(size)
        return every, table


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
        stored_dtype(kind.dtype or "")
    except UnsupportedError:
        return f"an array of {kind.dtype}"
    axes = len(kind.shape or ())
    return f"an array of {pluralize(axes, 'axes')}" if axes > MOST_AXES else None
