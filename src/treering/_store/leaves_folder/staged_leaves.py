"""Saving into a leaves directory on disk: files staged under ``.treering``, then one index that sends readers there.

Process 0, or a process alone, begins the save, the other processes of a job join it. ``docs/design/store.md`` says why
each step is where it is.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from treering._store.api import Kind
from treering._store.failures import checkpoint_error, naming
from treering._store.leaves_api import LeafFile, LeafWriter, LeavesSave, MakeUpdate, Unfinished
from treering._store.leaves_folder.commit import AttemptFolder, LeavesCommit, sweep_unfinished, sync_written
from treering._store.posix import descriptors
from treering._store.posix.folder import Folder, make_folder, remove_folders, resolved_folder, sync_parent
from treering._store.posix.folder_tree import FolderTree, Parts
from treering._store.posix.store import PosixStore
from treering._store.posix.writing import write_content
from treering._values import timing
from treering._values.checkpoint_names import INDEX as CHECKPOINT
from treering._values.leaves_names import ATTEMPTS, INDEX, PENDING, RECORD, parts_of, staged_leaves
from treering.errors import LinkRefusedError, TreeringError, UnsupportedError

# Files of up to so many bytes are written one after the other, whichever thread has made them.
_SMALL = 1 << 17
_SIZE = operator.itemgetter(2)
# Writeback is started when the file is closed; all files are made durable together, before the commit.
_BEGUN_EARLY = 1 << 20
# No system that this is for takes a longer path, the name of a chunk included.
_LONGEST_PATH = 4095
_CHUNK_NAME_BYTES = 255
_TRIES = 20


class _StagedFiles(LeafWriter):
    """The files that this process writes into the folder of an attempt."""

    def __init__(self, path: Path) -> None:
        """Nothing is open yet; `_open_at` says where."""
        self._shown = os.fspath(path)
        self._lock = threading.Lock()
        self._names: dict[Parts, list[str]] = {}
        self._ended = True

    def close(self) -> None:
        """Give everything back; the files stay."""
        if not self._ended:
            self._ended = True
            self._tree.close()

    def _open_at(self, tree: FolderTree, attempt: str) -> None:
        self._tree, self.attempt, self._ended = tree, attempt, False
        self.store = PosixStore.over(tree.root)
        self._staged = staged_leaves(attempt)
        around = "/".join([tree.root.path, *self._staged, "", ""])  # one slash before the folder, and one behind it
        self._room = _LONGEST_PATH - len(os.fsencode(around)) - _CHUNK_NAME_BYTES

    def write(self, folder: str, files: Sequence[LeafFile]) -> None:
        """Make the folder of a leaf and files in it, small ones in few system calls."""
        with naming(self._shown, "write"):
            parts = self._note(folder, [name for name, _, _ in files])
            staged = self._staged + parts
            if sum(map(_SIZE, files)) <= _SMALL:
                try:
                    self._tree.fill(staged, files)
                except FileNotFoundError as error:
                    # What gives the bytes has raised it, perhaps a callback of the user's: a file was begun. The
                    # folder does not tell, for another thread may have made it meanwhile.
                    begun = bool(files) and self._tree.find(staged, files[0][0]) is not None
                    if begun or isinstance(error, TreeringError):
                        raise
                else:
                    return
            self._tree.make(staged)
            for name, buffers, size in files:
                with self._tree.create(staged, name) as opened:
                    write_content(opened.number, buffers, size)
                    if size >= _BEGUN_EARLY:
                        descriptors.start_writeback(opened.number, 0, size)

    def require_room(self, folder: str) -> None:
        """Refuse a folder whose path, with the name of a chunk, is longer than the system takes."""
        self._parts_of(folder)

    def make_durable(self) -> None:
        """Make what this process has written durable, and the names of all folders on the way to it."""
        with naming(self._shown, "write"):
            sync_written(self._open_tree, self._staged, self._names.items())

    @property
    def _open_tree(self) -> FolderTree:
        if self._ended:
            raise RuntimeError("this save has ended")
        return self._tree

    def _note(self, folder: str, names: list[str]) -> Parts:
        """Remember what is written, to remove it or to make it durable; return the folder's parts."""
        parts = self._parts_of(folder)
        with self._lock:
            self._names.setdefault(parts, []).extend(names)
        return parts

    def _parts_of(self, folder: str) -> Parts:
        _ = self._open_tree  # refuses a save that has ended
        parts = parts_of(folder)
        # No character takes more than four bytes.
        if len(folder) * 4 > self._room and len(os.fsencode(folder)) > self._room:
            shown = f"{folder[:80]}[{len(folder) - 120} characters left out]{folder[-40:]}"
            raise UnsupportedError(f"the folder {shown!r} of a leaf has a longer path than a system takes")
        return parts


class JoinedLeaves(_StagedFiles):
    """What this process writes for an attempt whose folder process 0 has made and locked. A context manager.

    Args:
        path: the directory.
        attempt: the attempt.
        nbytes: how many bytes this process will write.

    Raises:
        StoreError: the system refused, or the folder of the attempt is not there.
        LinkRefusedError: ``.treering`` there is a link.
    """

    def __init__(self, path: Path, attempt: str, nbytes: int = 0) -> None:
        super().__init__(path)
        with naming(self._shown, "write"), contextlib.ExitStack() as undo:
            tree = undo.enter_context(FolderTree(Folder(resolved_folder(self._shown)), self._shown))
            self._open_at(tree, attempt)
            self._found = self._await_attempt()
            tree.root.require_space(nbytes)
            undo.pop_all()

    def make_durable(self) -> None:
        """Make what this process has written durable, and see that it lies where process 0 will look for it.

        Raises:
            StoreError: the system refused, or the folder of the attempt was removed meanwhile: process 0 is dead or
                has given up, and another saver swept what it left.
        """
        super().make_durable()
        with naming(self._shown, "write"):
            self._tree.forget(())
            found = self._attempt_found()
            if found is None or not os.path.samestat(found, self._found):
                raise _removed_error()

    def roll_back(self) -> None:
        """Remove the files that this process has written, as far as that goes.

        Folders are left to process 0, or to the next save: others may be about to write into them.
        """
        for parts, names in self._names.items():
            with contextlib.suppress(OSError, LinkRefusedError):
                self._tree.remove((*self._staged, *parts), *names)

    def _await_attempt(self) -> os.stat_result:
        deadline = time.monotonic() + timing.current.staged_folder
        while (found := self._attempt_found()) is None:
            if time.monotonic() >= deadline:
                raise _removed_error()
            time.sleep(timing.current.staged_folder_pause)
        return found

    def _attempt_found(self) -> os.stat_result | None:
        return self._tree.find((ATTEMPTS,), self.attempt)


def _removed_error() -> OSError:
    return OSError(errno.ESTALE, "the folder of this save was removed while it was written: process 0 gave up or died")


class StagedLeaves(_StagedFiles, LeavesSave):
    """One save on its way into a leaves directory: left without `commit`, nothing has changed.

    Staging takes no lock, so several saves may be under way; only their commits wait for each other. A context
    manager, or used without ``with`` and ended by `close`, as when another thread commits later.

    Args:
        path: the directory, made if it is missing; a link to a folder stays a link.
        unfinished: reads what an index promises that is not done.
        attempt: that of a joint save, on which its processes have agreed; None: a random one.
        nbytes: how many bytes this process will write.

    Raises:
        StoreError: the system refused. Nothing has changed.
        LinkRefusedError: ``.treering`` there is a link.
    """

    def __init__(self, path: Path, unfinished: Unfinished, *, attempt: str | None = None, nbytes: int = 0) -> None:
        super().__init__(path)
        self._unfinished = unfinished
        self._made: list[str] = []
        self._joint = attempt is not None
        self._durable = False
        with naming(self._shown, "write"):
            target = resolved_folder(self._shown)
            for left in reversed(range(_TRIES)):
                try:
                    self._begin(target, attempt, nbytes)
                    break
                except FileNotFoundError as error:
                    # A saver that failed removed the directory that it had made: begin again.
                    if isinstance(error, TreeringError) or not left:
                        raise

    def close(self) -> None:
        """Remove what was not committed or left, give everything back. Of a joint save nothing is removed.

        Its folder stays as it is, unlocked: others may still be writing into it. Without a record it is whole to
        nobody, and the next save there sweeps it.
        """
        if not self._ended:
            if self._joint and not self._own.kept:
                with contextlib.suppress(OSError, LinkRefusedError):  # then it is swept when an index forgets it
                    self._tree.remove(self._own.parts, RECORD)
                self._own.kept = True
            self._own.end()
            super().close()
            if not self._own.kept:
                remove_folders(self._made)

    def make_durable(self) -> None:
        """Make what this process has written durable now; the commit of a joint save will not do it again."""
        super().make_durable()
        self._durable = True

    def roll_back(self) -> None:
        """Let the end of a joint save remove everything: no other process will write anything of it any more."""
        self._joint = False

    def commit(self, record: bytes, update: MakeUpdate | None) -> None:
        """Make everything durable, make ``update`` the index, move the files to their key paths.

        Waits up to a minute for other savers. What a dead save left to be moved is moved first. Without an update, the
        files are moved if their key paths are free; else they stay staged until the save is listed.

        Raises:
            BusyError: others kept saving, or the directory was moved away.
            ExistsError: files that no index lists stand where new ones would go.
            LinkRefusedError: the index, or a folder on the way of a leaf, is a link.
            StoreError: the system refused. Nothing has changed, except when the message says that the new content is
                in place: then readers get it, and the next save does what is left to do.
        """
        with naming(self._shown, "write"):
            self._make_durable(record)
            if update is not None:
                with self._committing() as saving, saving:  # left twice, so that an interrupt cannot keep the lock
                    saving.change(lambda index: update(index, None))
                return
            self._own.write(PENDING, b"")
            self._tree.sync(self._own.parts)
            self._own.kept = True
            # It is saved. Whatever cannot be moved now is moved when an index takes it up.
            with contextlib.suppress(OSError, LinkRefusedError), self._committing() as saving, saving:
                saving.move_unindexed()

    def _begin(self, target: str, attempt: str | None, nbytes: int) -> None:
        """Make the directory and the folder of this attempt in it."""
        with contextlib.ExitStack() as undo:
            made = make_folder(target)
            undo.callback(remove_folders, made)
            tree = undo.enter_context(FolderTree(Folder(target), self._shown))
            if tree.root.find(CHECKPOINT) is not None:
                raise checkpoint_error(self._shown)
            own = AttemptFolder(tree, attempt)
            undo.callback(own.end)
            tree.make(staged_leaves(own.attempt))
            sweep_unfinished(tree)
            tree.root.require_space(nbytes)
            self._open_at(tree, own.attempt)
            undo.pop_all()
        self._made, self._own = made, own

    def _committing(self) -> LeavesCommit:
        return LeavesCommit(self._open_tree, self._own, self._unfinished)

    def _make_durable(self, record: bytes) -> None:
        """Make the files durable, then the record: an attempt without one is whole to nobody."""
        tree = self._open_tree
        if record:
            if not self._durable:
                # A manager and other processes write too.
                staged = (
                    (here[len(self._staged) :], [name for name, kind in found.items() if kind is not Kind.PLACE])
                    for here, found in tree.walk(self._staged)
                )
                sync_written(tree, self._staged, staged)
            self._own.write(RECORD, record)
            self._tree.sync(self._own.parts)
        if not self._made and tree.find((), INDEX) is None:
            with contextlib.suppress(PermissionError):  # a folder above that is not ours
                sync_parent(tree.root.path)
