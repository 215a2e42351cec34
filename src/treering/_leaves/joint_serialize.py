"""A tree that several processes hold -> a leaves directory, durable when this returns on any of them.

The corridor is that of a save by one process. Each process walks it with its own chunk files; process 0 makes the
folder of the attempt, writes every ``.zarray``, and commits. ``docs/design/processes.md`` says why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import xxhash

from treering._arrays.jobs import Progress
from treering._arrays.outgoing import Outgoing, outgoing
from treering._checkpoint.joined_folder import JoinedFolder, TellingFolder
from treering._checkpoint.joint_save import HostLocal
from treering._checkpoint.signature import check_local, check_signature, claimed, leaf_text, local_digests, signature_of
from treering._codec.zarr import ZarrArray
from treering._coordination.coordinator import leading, refused
from treering._coordination.executor import driven
from treering._coordination.job_handshake import next_call
from treering._coordination.participant import following
from treering._coordination.steps import Call
from treering._leaves.chunks.leaf_writer import write_leaves
from treering._leaves.documents.leaves_record import LeavesRecord, arrays_of
from treering._leaves.documents.leaves_update import LEAVES_RULES
from treering._leaves.folder.leaves_folder import StagedLeaves
from treering._leaves.folder.leaves_joined import JoinedLeaves
from treering._leaves.folder.staged_files import StagedFiles
from treering._leaves.leaf_shares import LeafShares, part_of, read_part
from treering._leaves.planned_leaves import PlannedLeaves, held_together, planned_leaves
from treering._leaves.save_by_manager import ArrayManager, ManagedSave, check_manager, managed_leaves
from treering._leaves.serialize import acknowledge
from treering._tree.flatten import Flattened
from treering._values.processes import Processes
from treering.errors import Mismatch, TreeringError

_DIGEST_BYTES: Final = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavesWishes:
    """What the caller asks for."""

    prefix: str | None
    """Name of the tree."""
    write_index: bool
    """Whether the index is to name it."""
    compressor: Mapping[str, Any] | None
    """The compressor of the chunks."""
    chunk_bytes: int | None
    """The largest chunk."""
    host_local: HostLocal
    """Where leaves come from that each process holds alone."""
    commit_callback: Callable[[], object] | None
    """Called by process 0."""
    progress: Progress | None
    """Told about this process's bytes."""
    manager: ArrayManager | None = None
    """What writes the jax arrays that lie with several processes, if it is not treering."""

    def digest(self) -> bytes:
        """Return a few bytes that are the same on all processes which ask for the same files."""
        compressor = None if self.compressor is None else sorted(self.compressor.items(), key=repr)
        asked = (
            self.prefix or None,
            self.write_index,
            compressor,
            self.chunk_bytes,
            self.host_local,
            self.manager is None,
        )
        return xxhash.xxh3_64_digest(repr(asked).encode("utf-8", "surrogatepass"))


def serialize_together(
    path: Path, flat: Flattened | Exception, wishes: LeavesWishes, *, processes: Processes, timeout: float
) -> None:
    """Write this process's part of a tree into the directory ``path``; all processes call it.

    Args:
        path: the directory.
        flat: the tree; or why it cannot be saved, which is told to the others before it is raised.
        wishes: what the caller asks for.
        processes: those of the job, more than one.
        timeout: seconds to wait at one point for others.
    """
    call = next_call(path, processes, timeout=timeout, doing=f"save leaves into {os.fspath(path)!r}")
    if processes.leads:
        _lead(call, path, flat, wishes)
    else:
        _follow(call, path, flat, wishes)


def _lead(call: Call, path: Path, flat: Flattened | Exception, wishes: LeavesWishes) -> None:
    try:
        joint = _joint_of(call, flat, wishes)
        signature = joint.signature()
        staged = StagedLeaves(path, LEAVES_RULES, call.attempt, live=call.live_attempts)
    except BaseException as error:  # an interrupt too: the others would wait in vain; raised again below
        with contextlib.suppress(TreeringError), TellingFolder(path) as telling:
            driven(refused(call, error), telling.notes, _Nothing())
        raise
    leader = _Leader(path, joint, staged)
    try:
        driven(leading(call, signature), staged.notes, leader)
        leader.hand_over()
    finally:
        leader.close()
    if not joint.managed and wishes.commit_callback is not None:
        wishes.commit_callback()


def _follow(call: Call, path: Path, flat: Flattened | Exception, wishes: LeavesWishes) -> None:
    joint: _Joint | Exception
    try:
        joint = _joint_of(call, flat, wishes)
    except Exception as error:  # noqa: BLE001 - raised when the others can be told
        joint = error
    with _Follower(path, call, joint) as follower:
        joined = JoinedFolder(path, call.attempt)
        driven(following(call, follower.check), joined.notes, follower, make=joined.make)
        follower.hand_over()


def _joint_of(call: Call, flat: Flattened | Exception, wishes: LeavesWishes) -> _Joint:
    if isinstance(flat, Exception):
        raise flat
    if wishes.manager is not None:
        check_manager(wishes.manager)
        wishes.manager.wait_until_finished()  # saves through one manager are committed in the order of their calls
    return _Joint(call, flat, outgoing(flat, call.processes), wishes)


class _Joint:
    """A save, and what this process knows of it before a byte is written."""

    def __init__(self, call: Call, flat: Flattened, leaves: Outgoing, wishes: LeavesWishes) -> None:
        self.call = call
        self.wishes = wishes
        self._flat = flat
        self._leaves = leaves
        plan = planned_leaves(
            flat, leaves, prefix=wishes.prefix, compressor=wishes.compressor, chunk_bytes=wishes.chunk_bytes,
            processes=call.processes.count,
        )  # fmt: skip
        self.record: LeavesRecord = plan.record(call.attempt)
        self.managed: dict[int, str] = {} if wishes.manager is None else _managed(plan)
        arrays = dict(zip(leaves.sources, arrays_of(self.record), strict=True))
        self._own: PlannedLeaves = plan.without(self.managed)
        self._arrays: list[ZarrArray] = [arrays[number] for number in self._own.leaves.sources]
        self.shares = LeafShares(self._own, self._arrays, call.processes.count)
        self.share = self.shares.of(call.processes.this)

    def signature(self) -> bytes:
        """Return what all processes have to have in common."""
        return self.wishes.digest() + signature_of(self._flat, self._leaves)

    def checked(self, signature: bytes) -> _Joint:
        """Compare with the signature of process 0; return the save as it is then known.

        Raises:
            Mismatch: this process is saving something else.
        """
        if signature[:_DIGEST_BYTES] != self.wishes.digest():
            hint = "prefix, write_index, compressor, chunk_bytes and host_local have to be the same everywhere"
            raise Mismatch("the processes were given different arguments", hint=hint)
        theirs = signature[_DIGEST_BYTES:]
        flat = self._flat
        leaves = claimed(flat, self._leaves, theirs, self.call.processes.this)
        check_signature(signature_of(flat, leaves), flat.keys, lambda leaf: leaf_text(leaves, leaf))(theirs)
        return self if leaves is self._leaves else _Joint(self.call, flat, leaves, self.wishes)

    def write(self, staged: StagedFiles) -> bytes:
        """Write the own files; return what process 0 has to know of them."""
        staged.require_space(self.shares.nbytes(self.share))
        sizes, checksums = write_leaves(
            staged, self._own.folders, self._own.leaves, self._arrays,
            progress=self.wishes.progress, share=self.share,
        )  # fmt: skip
        digests = local_digests(self._flat, self._leaves) if self.wishes.host_local == "equal" else b""
        return part_of(sizes, checksums, digests)

    def whole_record(self, parts: Sequence[bytes]) -> LeavesRecord:
        """Return the record, given what all processes handed in.

        Raises:
            Mismatch: leaves that each process holds alone differ, and they must not.
        """
        read = list(map(read_part, parts))
        if self.wishes.host_local == "equal":
            check_local(self._flat.keys, self._leaves, [digests for _, _, digests in read])
        sizes, checksums = self.shares.merged([(sizes, checksums) for sizes, checksums, _ in read])
        return dataclasses.replace(self.record, sizes=sizes, checksums=checksums)

    def begin_managed(self, path_of: Callable[[str], str], finish: Callable[[], None]) -> None:
        """Give the manager its leaves; it calls ``finish`` on process 0 when all processes have written."""
        if self.wishes.manager is not None:
            arrays = [self._flat.leaves[number] for number in self.managed]
            paths = [path_of(folder) for folder in self.managed.values()]
            self.wishes.manager.serialize_with_paths(arrays, paths, on_commit_callback=finish)


def _managed(plan: PlannedLeaves) -> dict[int, str]:
    """Return the leaves that a manager gets, and their folders: those that lie with several processes.

    Of all others each process would write its own, in the same place.
    """
    return {
        number: folder
        for number, folder in managed_leaves(plan).items()
        if (held := held_together(plan.leaves, number)) and len({owner for _, owners in held for owner in owners}) > 1
    }


class _Leader:
    """What process 0 does."""

    def __init__(self, path: Path, joint: _Joint, staged: StagedLeaves) -> None:
        self._path = path
        self._joint = joint
        self._staged = staged
        self._others_have_left = False
        self._handed_over = False
        self._record: LeavesRecord | None = None

    def work(self) -> bytes:
        part = self._joint.write(self._staged)
        if not self._joint.managed:  # else everything is made durable when the manager has written
            self._staged.make_durable()
        # Now, while the others are still writing: between their last byte and the commit is as little as can be.
        for folder, names in self._joint.shares.left_to_others(self._joint.share):
            self._staged.expect(folder, names)
        return part

    def commit(self, parts: Sequence[bytes]) -> None:
        record = self._joint.whole_record(parts)
        if self._joint.managed:
            self._record = record  # that all are ready is all that is agreed on
        else:
            acknowledge(self._path, self._staged, record, write_index=self._joint.wishes.write_index)

    def hand_over(self) -> None:
        """Let the manager write what is its to write; the save is committed when it has."""
        joint, record = self._joint, self._record
        if record is None:
            return
        self._others_have_left = True  # if this fails, what they write is swept by the next save
        save = ManagedSave(
            self._path.absolute(), self._staged, record, frozenset(joint.managed), joint.wishes.commit_callback,
            write_index=joint.wishes.write_index,
        )  # fmt: skip
        joint.begin_managed(self._staged.path_of, save.finish)
        self._handed_over = True

    def withdraw(self) -> None:
        self._others_have_left = True

    def close(self) -> None:
        """End it; where others may still be writing, what they write stays for the next save to sweep."""
        if self._handed_over:
            return
        if self._others_have_left:
            self._staged.close()
        else:
            self._staged.abandon()


class _Follower:
    """What every other process does."""

    def __init__(self, path: Path, call: Call, joint: _Joint | Exception) -> None:
        self._path = path
        self._call = call
        self._joint = joint
        self._opened = contextlib.ExitStack()
        self._joined: JoinedLeaves | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def check(self, signature: bytes) -> None:
        """Compare the tree with that of process 0."""
        self._joint = self._known().checked(signature)

    def work(self) -> bytes:
        joined = self._joined = self._opened.enter_context(JoinedLeaves(self._path, self._call.attempt))
        part = self._known().write(joined)
        joined.make_durable()
        return part

    def hand_over(self) -> None:
        """Let the manager write what is its to write; process 0 commits when it has."""
        joint = self._known()
        if joint.managed and self._joined is not None:
            joint.begin_managed(self._joined.path_of, _nothing)

    def commit(self, parts: Sequence[bytes]) -> None:
        raise RuntimeError(f"process 0 commits the parts of all {len(parts)}")

    def withdraw(self) -> None:
        if self._joined is not None:
            self._joined.withdraw()

    def _known(self) -> _Joint:
        if isinstance(self._joint, Exception):
            raise self._joint
        return self._joint


def _nothing() -> None:
    """What a manager calls on processes that do not commit, if it does."""


class _Nothing:
    """What process 0 does when it was refused."""

    def work(self) -> bytes:
        return b""

    def commit(self, parts: Sequence[bytes]) -> None:
        pass

    def withdraw(self) -> None:
        pass
