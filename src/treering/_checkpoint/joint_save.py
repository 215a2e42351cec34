"""A tree that several processes hold -> one checkpoint's folder, durable when this returns on any of them.

The corridor is that of a save by one process. Each process walks it with its own part of the plan; process 0 enters the
folder and commits, the others join it. ``docs/design/processes.md`` says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, TypeAlias

from treering._arrays.divided import Divided, FilesOfProcesses, divided, merged
from treering._arrays.jobs import Progress
from treering._arrays.written import Written, content
from treering._background.save_job import UNWATCHED, Watch
from treering._checkpoint.joined_folder import JoinedFolder, TellingFolder
from treering._checkpoint.plan_cache import Planned
from treering._checkpoint.save import index_of, names_in, signed
from treering._checkpoint.signature import check_local, check_signature, claimed, leaf_text, local_digests, signature_of
from treering._checkpoint.transaction import CheckpointFolder
from treering._codec.documents import check_json
from treering._coordination.coordinator import leading, refused
from treering._coordination.executor import driven
from treering._coordination.job_handshake import next_call
from treering._coordination.participant import following
from treering._coordination.steps import Call
from treering._format.document import encode_index
from treering._format.index import DataFile
from treering._store.pieces import Buffer
from treering._tree.flatten import Flattened
from treering._values.checksums import packed, unpacked
from treering._values.processes import Processes, named
from treering.errors import Mismatch, TreeringError

HostLocal: TypeAlias = Literal["first", "equal"]
"""Leaves that each process holds alone come from process 0: as they are, or only if all others have the same."""

_COUNT: Final = struct.Struct("<Q")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the caller of a joint save asks for."""

    metadata: Mapping[str, Any]
    """JSON to keep beside the tree; that of process 0 is kept."""
    overwrite: bool
    """Whether a checkpoint that is there may be replaced."""
    host_local: HostLocal
    """Where leaves come from that each process holds alone."""
    progress: Progress | None
    """Called with the bytes of this process."""


def save_together(
    path: Path, plan: Planned | Exception, wishes: Wishes, *, processes: Processes, timeout: float
) -> None:
    """Write this process's part of a tree into the folder ``path``; all processes call it.

    Args:
        path: the folder.
        plan: the tree, planned; or why it cannot be saved, which is told to the others before it is raised.
        wishes: what the caller asks for.
        processes: those of the job, more than one.
        timeout: seconds to wait at one point for others.
    """
    take_part(counted(path, processes, timeout), path, plan, wishes)


def counted(path: Path, processes: Processes, timeout: float) -> Call:
    """Count a joint save: on the caller's thread, for the first one of a job is a collective."""
    return next_call(path, processes, timeout=timeout, doing=f"save {os.fspath(path)!r}")


def take_part(call: Call, path: Path, plan: Planned | Exception, wishes: Wishes, watch: Watch = UNWATCHED) -> None:
    """Do this process's part of a counted save, in any thread: it talks to the others through the folder alone."""
    if call.processes.leads:
        _lead(call, path, plan, wishes, watch)
    else:
        _follow(call, path, plan, wishes, watch)


def _lead(call: Call, path: Path, plan: Planned | Exception, wishes: Wishes, watch: Watch) -> None:
    with contextlib.ExitStack() as stack, stack:  # left twice, so that an interrupt cannot keep the lock
        try:
            share = _share_of(call, plan, wishes, watch)
            signature = signature_of(share.flat, share.plan.leaves)
            check_json(wishes.metadata, "metadata")
            folder = CheckpointFolder(
                path, overwrite=wishes.overwrite, names_in=names_in, attempt=call.attempt, live=call.live_attempts
            )
            stack.enter_context(contextlib.closing(folder))
            stack.enter_context(folder)
        except BaseException as error:  # an interrupt too: the others would wait in vain; raised again below
            with contextlib.suppress(TreeringError), TellingFolder(path) as telling:
                driven(refused(call, error), telling.notes, _Nothing(), sleep=watch.pause)
            raise
        driven(leading(call, signature), folder.notes, _Leader(share, folder), sleep=watch.pause)


def _follow(call: Call, path: Path, plan: Planned | Exception, wishes: Wishes, watch: Watch) -> None:
    share: _Share | Exception
    try:
        share = _share_of(call, plan, wishes, watch)
    except Exception as error:  # noqa: BLE001 - raised when the others can be told
        share = error
    with JoinedFolder(path, call.attempt) as folder:
        follower = _Follower(share, folder)
        driven(following(call, follower.check), folder.notes, follower, make=folder.make, sleep=watch.pause)


def _share_of(call: Call, plan: Planned | Exception, wishes: Wishes, watch: Watch) -> _Share:
    if isinstance(plan, Exception):
        raise plan
    return _Share(call=call, flat=plan.flat, wishes=wishes, watch=watch, plan=plan.divided())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """A save, and what this process knows of it before a byte is written."""

    call: Call
    flat: Flattened
    wishes: Wishes
    watch: Watch
    plan: Divided

    def files(self, processes: Iterable[int]) -> FilesOfProcesses:
        return self.plan.files(self.call.attempt, processes)

    def write(self, folder: _Room) -> bytes:
        """Write the own files, durable but for their names; return what process 0 has to know of them."""
        files = self.files([self.call.processes.this])
        layout = files.layout
        sizes = layout.sizes()
        folder.require_space(sum(sizes))
        written = Written(layout, self.wishes.progress)
        for number, (name, header, size) in enumerate(zip(files.names, layout.headers, sizes, strict=True)):
            folder.write_file(name, content(header, written.data_of(number)), size)
        digests = local_digests(self.flat, self.plan.leaves) if self.wishes.host_local == "equal" else b""
        return _COUNT.pack(len(written.checksums)) + packed(written.checksums) + digests


class _Room(Protocol):
    """A folder as those see it who write their own files into it."""

    def require_space(self, size: int) -> None: ...

    def write_file(self, name: str, buffers: Iterable[Buffer], size: int) -> None: ...


class _Leader:
    """What process 0 does."""

    def __init__(self, share: _Share, folder: CheckpointFolder) -> None:
        self._share = share
        self._folder = folder
        self._files: FilesOfProcesses | None = None

    def work(self) -> bytes:
        payload = self._share.write(self._folder)
        # Now, while the others are still writing: between their last byte and the commit is as little as can be.
        self._files = self._share.files(range(self._share.call.processes.count))
        return payload

    def commit(self, parts: Sequence[bytes]) -> None:
        share, files = self._share, self._files
        if files is None:
            raise RuntimeError("a commit comes after the work")
        opened = list(map(_opened, parts))
        leaves = share.plan.leaves
        if share.wishes.host_local == "equal":
            check_local(share.flat.keys, leaves, [digests for _, digests in opened])
        elif strict := [process for process, (_, digests) in enumerate(opened) if digests]:
            raise Mismatch(f'{named(strict)} passed host_local="equal", and process 0 did not')
        checksums = merged(files, [found for found, _ in opened])
        layout = files.layout
        columns = zip(files.names, layout.sizes(), layout.headers, files.writers, strict=True)
        index = index_of(
            share.flat,
            layout,
            checksums,
            [
                DataFile(name=name, nbytes=size, header=len(header), digest=None, process=process)
                for name, size, header, process in columns
            ],
            metadata=share.wishes.metadata,
            attempt=share.call.attempt,
            processes=share.call.processes.count,
        )
        document = encode_index(signed(index, layout.headers, replaces=self._folder.superseded))
        share.watch.claim()
        self._folder.commit(document)

    def withdraw(self) -> None:
        self._folder.others_are_done()


class _Follower:
    """What every other process does."""

    def __init__(self, share: _Share | Exception, folder: JoinedFolder) -> None:
        self._share = share
        self._folder = folder

    def check(self, signature: bytes) -> None:
        """Compare the tree with that of process 0."""
        share = self._known()
        this = share.call.processes.this
        leaves = claimed(share.flat, share.plan.leaves, signature, this)
        if leaves is not share.plan.leaves:
            plan = divided(share.flat.keys, leaves, share.call.processes.count)
            self._share = share = dataclasses.replace(share, plan=plan)
        mine = signature_of(share.flat, leaves)
        check_signature(mine, share.flat.keys, lambda leaf: leaf_text(leaves, leaf))(signature)

    def work(self) -> bytes:
        share = self._known()
        payload = share.write(self._folder)
        self._folder.make_durable()
        share.watch.claim()  # what is handed in may be committed at any moment
        return payload

    def commit(self, parts: Sequence[bytes]) -> None:
        raise RuntimeError(f"process 0 commits the parts of all {len(parts)}")

    def withdraw(self) -> None:
        self._folder.withdraw()

    def _known(self) -> _Share:
        if isinstance(self._share, Exception):
            raise self._share
        return self._share


class _Nothing:
    """What process 0 does when it was refused."""

    def work(self) -> bytes:
        return b""

    def commit(self, parts: Sequence[bytes]) -> None:
        pass

    def withdraw(self) -> None:
        pass


def _opened(payload: bytes) -> tuple[array[int], bytes]:
    """Return the checksums and the digests that a process handed in."""
    (count,) = _COUNT.unpack(payload[: _COUNT.size])
    stop = _COUNT.size * (1 + count)
    return unpacked(payload[_COUNT.size : stop]), payload[stop:]
