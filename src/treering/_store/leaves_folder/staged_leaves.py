"""Saving into a leaves directory: files staged under ``.treering``, then one index that sends readers there.

``docs/design/store.md`` says why each step is where it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from treering._store.failures import LinkRefusedError, missing_error, naming, with_errno
from treering._store.leaves_folder.attempts import AttemptFolder, SweepMessages, sweep_messages, sweep_unfinished
from treering._store.leaves_folder.commit import LeavesCommit
from treering._store.leaves_folder.leaves_folder import open_below
from treering._store.leaves_folder.moves import Unfinished, Update
from treering._store.leaves_folder.staged_files import StagedFiles, sync_written
from treering._store.posix.folder import Folder, make_folder, remove_folders, resolved_folder, sync_parent
from treering._store.posix.folder_tree import FolderTree, Parts
from treering._store.posix.reading import LocalFile
from treering._values.checkpoint_names import INDEX as CHECKPOINT
from treering._values.leaves_names import INDEX, PENDING, RECORD, parts_of, staged_leaves
from treering.errors import ExistsError, TreeringError

_TRIES = 20


class StagedLeaves(StagedFiles):
    """One save on its way into a leaves directory: left without `commit` or `leave`, nothing has changed.

    Staging takes no lock, so several saves may be under way; only their commits wait for each other. A context
    manager, or used without ``with`` and ended by `close`, as when another thread commits later.

    Args:
        path: the directory, made if it is missing; a link to a folder stays a link.
        unfinished: reads what an index promises that is not done.
        sweep: removes the messages of processes that may go.
        attempt: that of a joint save, on which its processes have agreed; None: a random one.
        live: the attempts whose messages stay, beside the own one.

    Raises:
        StoreError: the system refused. Nothing has changed.
        LinkRefusedError: ``.treering`` there is a link.
    """

    def __init__(
        self, path: Path, unfinished: Unfinished, sweep: SweepMessages, attempt: str | None, live: Iterable[str]
    ) -> None:
        super().__init__(os.fspath(path))
        self._unfinished = unfinished
        self._sweep_stale = sweep
        self._live = live
        self._made: list[str] = []
        self._given: set[Parts] = set()
        self._expected: dict[Parts, list[str]] = {}
        self._durable = False
        with naming(self._shown, "write"):
            target = resolved_folder(self._shown)
            for left in reversed(range(_TRIES)):
                try:
                    self._begin(target, attempt)
                    break
                except FileNotFoundError as error:
                    # A saver that failed removed the directory that it had made: begin again.
                    if isinstance(error, TreeringError) or not left:
                        raise

    def close(self) -> None:
        """Remove what was not committed or left, give everything back. May be called twice."""
        if self._folder is not None:
            self._own.end()
            super().close()
            if not self._own.kept:
                remove_folders(self._made)

    def expect(self, folder: str, names: Iterable[str]) -> None:
        """Note files of a leaf that other processes write; before the commit it is seen whether their places are free.

        Raises:
            UnsupportedError: the folder's path is longer than the system takes.
        """
        self._expected[self._parts_of(folder)] = list(names)

    def make_durable(self) -> None:
        """Make what this process has written durable now; the commit will not do it again.

        Of a joint save, in which each process does that for its own files.

        Raises:
            StoreError: the system refused; it is not asked again.
        """
        super().make_durable()
        self._durable = True

    def abandon(self) -> None:
        """End the save, but leave its folder as it is, unlocked: others may still be writing into it.

        Without a record it is whole to nobody, and the next save there sweeps it. What was committed stays, too.
        """
        if self._folder is not None and not self._own.kept:
            with contextlib.suppress(OSError, LinkRefusedError):  # then it is swept when an index forgets it
                self._tree.remove(self._own.parts, RECORD)
            self._own.kept = True
        self.close()

    def path_of(self, folder: str) -> str:
        """Return the absolute path of a leaf's staged folder, for a manager of jax to write to. Its parent is made.

        Raises:
            StoreError: the system refused.
            UnsupportedError: the folder's path is longer than the system takes.
        """
        with naming(self._shown, "write"):
            parts = self._note(folder, [])
            self._given.add(parts)
            self._tree.make((*self._staged, *parts[:-1]))
            return os.path.join(self._open_folder.path, *self._staged, *parts)

    def open(self, folder: str, name: str) -> LocalFile:
        """Open a staged file for reading; the caller closes it.

        Raises:
            DataFileMissingError: it is not there.
            LinkRefusedError: it, or a folder on the way, is a link.
            StoreError: the system refuses.
        """
        parts = (*self._staged, *parts_of(folder), *name.split("/"))
        with naming(self._shown, "read"):
            try:
                return open_below(self._tree, parts[:-1], parts[-1])
            except (FileNotFoundError, NotADirectoryError) as error:
                raise missing_error(self._tree.shown(parts[:-1], parts[-1]), parts[-1]) from error

    def names(self, folder: str) -> list[str]:
        """Return the names in a staged folder, sorted; none when it is not there.

        Raises:
            StoreError: the system refuses.
        """
        with naming(self._shown, "read"):
            try:
                return sorted(self._tree.scan((*self._staged, *parts_of(folder))))
            except FileNotFoundError:
                return []

    def rewrite(self, folder: str, name: str, data: bytes) -> None:
        """Put ``data`` in the place of a staged file.

        Raises:
            StoreError: the system refused.
        """
        with naming(self._shown, "write"):
            parts = (*self._staged, *parts_of(folder))
            self._tree.remove(parts, name)
            self._tree.fill(parts, [(name, data)])

    def remains(self) -> None:
        """Return nothing: files are moved to their key paths, and what was there goes at once."""

    def commit(self, record: bytes, update: Callable[[bytes | None], Update]) -> None:
        """Make everything durable, make ``update(index)`` the index, move the files to their key paths.

        Waits up to a minute for other savers. What a dead save left to be moved is moved first.

        Args:
            record: the copy of the record that is kept under ``.treering``.
            update: gets the present index, which promises no moves, or None when there is none, while nobody else can
                change it; what it raises is raised here, and then nothing has changed.

        Raises:
            BusyError: others kept saving, or the directory was moved away.
            ExistsError: files that no index lists stand where new ones would go.
            LinkRefusedError: the index, or a folder on the way of a leaf, is a link.
            StoreError: the system refused. Nothing has changed, except when the message says that the new content is
                in place: then readers get it, and the next save does what is left to do.
        """
        with naming(self._shown, "write"):
            self._make_durable(record)
            with self._committing() as saving, saving:
                saving.change(update, lambda _: self._wanted())

    def leave(self, record: bytes) -> None:
        """Make everything durable, and leave it to be indexed later (`commit_pending`).

        The files are moved to their key paths if nothing is there; else they stay staged until then.

        Raises:
            StoreError: the system refused. Nothing has changed.
        """
        with naming(self._shown, "write"):
            self._make_durable(record)
            self._own.write(PENDING, b"")
            self._tree.sync(self._own.parts)
            self._own.kept = True
            # It is saved. Whatever cannot be moved now is moved when an index takes it up.
            with contextlib.suppress(OSError, LinkRefusedError), self._committing() as saving, saving:
                saving.move_unindexed(self._wanted())

    def _begin(self, target: str, attempt: str | None) -> None:
        """Make the directory and the folder of this attempt in it."""
        with contextlib.ExitStack() as undo:
            made = make_folder(target)
            undo.callback(remove_folders, made)
            folder = Folder(target)
            undo.callback(folder.close)
            if folder.find(CHECKPOINT) is not None:  # a reader would see only one of two forms
                hint = "save to a directory of its own"
                error = ExistsError(f"a checkpoint of treering.save is at {self._shown!r} already", hint=hint)
                raise with_errno(error, errno.EEXIST, self._shown)
            tree = FolderTree(folder, self._shown)
            undo.callback(tree.close)
            own = AttemptFolder(tree, attempt)
            undo.callback(own.end)
            tree.make(staged_leaves(own.attempt))
            sweep_unfinished(tree)
            sweep_messages(tree, folder, {own.attempt, *self._live}, self._sweep_stale)
            undo.pop_all()
        self._made, self._own = made, own
        self._open_at(folder, tree, own.attempt)

    def _committing(self) -> contextlib.closing[LeavesCommit]:
        return contextlib.closing(LeavesCommit(self._open_folder, self._tree, self._own, self._unfinished, self._shown))

    def _make_durable(self, record: bytes) -> None:
        """Make the files durable, then the record: an attempt without one is whole to nobody."""
        folder = self._open_folder
        if not self._durable:
            sync_written(folder, self._tree, self._staged, self._wanted())
        self._own.write(RECORD, record)
        self._tree.sync(self._own.parts)
        if not self._made and self._tree.find((), INDEX) is None:
            with contextlib.suppress(PermissionError):  # a folder above that is not ours
                sync_parent(folder.path)

    def _wanted(self) -> Mapping[Parts, Sequence[str]]:
        self._names |= {parts: list(self._tree.scan((*self._staged, *parts))) for parts in self._given}
        if not self._expected:
            return self._names
        folders = dict.fromkeys((*self._names, *self._expected))
        return {parts: [*self._names.get(parts, ()), *self._expected.get(parts, ())] for parts in folders}
