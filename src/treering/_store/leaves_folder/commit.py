"""A leaves directory while one saver has it to itself: dead saves are finished first, then an index is changed.

``docs/design/store.md`` says why each step is where it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Self

from treering._codec.key_document import find_attempts
from treering._store.failures import naming, with_errno
from treering._store.leaves_folder import attempts, moves
from treering._store.leaves_folder.leaves_folder import index_bytes
from treering._store.leaves_folder.staged_files import sync_folders
from treering._store.posix.folder import Folder, FolderLock, resolved_folder
from treering._store.posix.folder_tree import FOLDER, FolderTree, Parts
from treering._values import leaves_names, timing
from treering._values.checkpoint_names import LOCK_FILE
from treering.errors import BusyError, StoreError


class LeavesCommit:
    """The lock of a leaves directory, a context manager. Inside, ``index`` is the present index, without moves.

    Raises:
        BusyError: others kept saving, or the directory is no longer at its path.
        LinkRefusedError: the index is a link.
        OSError: the system refused, also to finish what a dead saver had begun.
    """

    index: bytes | None

    def __init__(
        self, folder: Folder, tree: FolderTree, own: attempts.AttemptFolder, unfinished: moves.Unfinished, shown: str
    ):
        self._folder = folder
        self._tree = tree
        self._own = own
        self._unfinished = unfinished
        self._shown = shown
        self._lock = FolderLock(folder)

    def __enter__(self) -> Self:
        try:
            self._take_lock()
            self.index = index_bytes(self._tree)
            if self.index is not None:
                self._finish_dead(self.index)
        except BaseException:  # an interrupt too: the lock must not stay; raised again below
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the lock back. ``with contextlib.closing(commit), commit:`` does so whenever an interrupt comes."""
        self._lock.give_back()

    def change(
        self,
        update: Callable[[bytes | None], moves.Update | None],
        wanted: Callable[[moves.Update], Mapping[Parts, Sequence[str]]],
    ) -> None:
        """Change the index, and do what the change promises.

        Args:
            update: gets the present index; None leaves it as it is.
            wanted: gives the files that would be moved, as names by folder.

        Raises:
            ExistsError: something stands where they would go. Nothing has changed.
            StoreError: the new index is in place, and what the message says is not done.
            OSError: the system refused. Nothing has changed.
        """
        change = update(self.index)
        if change is None:
            return
        going = moves.survey(self._tree, change.moves)
        moves.TargetPaths(self._tree, going).require_free(wanted(change))
        self._commit(change.moving)
        try:
            self._finish(change, going)
        except OSError as error:
            hint = "the new content is in place: treering reads it, and the next save or index_leaves moves the rest"
            raise StoreError.of(error, self._shown, "move all files to their key paths in", hint=hint) from error
        self._sweep(change.settled, change.dropped)

    def move_unindexed(self, wanted: Mapping[Parts, Sequence[str]]) -> None:
        """Move the own files to their key paths without an index, if nothing is there.

        Raises:
            LinkRefusedError: a folder on the way is a link.
            OSError: the system refused.
        """
        if moves.TargetPaths(self._tree, moves.ReplacedFiles()).are_bare(wanted):
            sync_folders(self._folder, self._tree, moves.move_staged(self._tree, self._own.attempt))

    def _take_lock(self) -> None:
        deadline = time.monotonic() + timing.current.directory_lock
        pause = timing.current.directory_lock_first
        while not self._lock.take():
            if time.monotonic() >= deadline:
                hint = None if self._folder.find(LOCK_FILE) is None else f"remove {LOCK_FILE!r} there if none is"
                raise self._busy("other processes keep saving there", hint)
            time.sleep(pause)
            pause = min(2 * pause, timing.current.directory_lock_longest)
        if not self._folder.is_there():
            raise self._busy("another process moved or removed the folder")

    def _finish_dead(self, index: bytes) -> None:
        """Do what the index promises and its saver did not live to do."""
        change = self._unfinished(index)
        if change is None:
            self._take_up(index)
            return
        self.index = change.settled
        before = self._own.kept
        try:
            self._finish(change, moves.survey(self._tree, change.moves))
        finally:
            self._own.kept = before  # that index names the dead one's, not this save's

    def _finish(self, change: moves.Update, going: moves.ReplacedFiles) -> None:
        """Clear, move, make that durable, and say so in the index."""
        into: set[Parts] = set()
        moves.clear(self._tree, going)
        for move in change.moves:
            if leaves_names.is_attempt(move.attempt):
                into.update(moves.move_staged(self._tree, move.attempt))
        sync_folders(self._folder, self._tree, into)
        self._replace(self._prepared(change.settled))
        self._tree.sync(())
        self._take_up(change.settled)

    def _take_up(self, index: bytes) -> None:
        """What an index names waits for none: else a later save would leave it to be listed again."""
        for attempt in find_attempts(index).intersection(attempts.list_attempts(self._tree)):
            self._tree.remove(leaves_names.attempt_folder(attempt), leaves_names.PENDING)

    def _commit(self, index: bytes) -> None:
        """Put the index there that sends readers to the staged files, and make it durable."""
        new = self._prepared(index)
        self._own.kept = True  # until it is known that nothing was done
        try:
            self._replace(new)
        except OSError:
            self._own.kept = self._is_index(new)
            raise
        try:
            self._tree.sync(())
        except OSError as error:
            hint = "the new content is in place, but a power cut may undo it: save again when the disk works"
            raise StoreError.of(error, self._shown, "make durable", hint=hint) from error

    def _prepared(self, index: bytes) -> os.stat_result | None:
        """Write an index beside the one that is there, durably, and return what is known of it."""
        self._own.write(leaves_names.NEXT_INDEX, index, self._tree.find((), leaves_names.INDEX))
        return self._tree.find(self._own.parts, leaves_names.NEXT_INDEX)

    def _replace(self, new: os.stat_result | None) -> None:
        """Put that index in the place of the one that is there."""
        try:
            self._tree.replace(self._own.parts, leaves_names.NEXT_INDEX, (), leaves_names.INDEX)
        except OSError:
            if not self._is_index(new):  # else it is done, and only the answer was lost
                raise

    def _is_index(self, new: os.stat_result | None) -> bool:
        found = self._tree.find((), leaves_names.INDEX)
        return new is not None and found is not None and os.path.samestat(new, found)

    def _sweep(self, index: bytes, dropped: Sequence[str]) -> None:
        """Remove what no index needs: superseded attempts, whose savers are done, and those of the dead."""
        named = find_attempts(index)
        done = find_attempts(self.index or b"").union(dropped)
        with contextlib.suppress(OSError):  # the save is done; the next one sweeps
            for attempt in attempts.list_attempts(self._tree):
                if attempt == self._own.attempt or attempt in named:
                    continue
                if attempt in done:
                    attempts.remove_attempt(self._tree, attempt)
                else:
                    attempts.remove_if_dead(self._tree, attempt, spared=self._is_spared)

    def _is_spared(self, names: Collection[str]) -> bool:
        """Whether an attempt that no index names may be needed: it waits for one, or it is of an index that is lost."""
        return leaves_names.PENDING in names or (
            self.index is None and leaves_names.RECORD in names and leaves_names.LEAVES not in names
        )

    def _busy(self, what: str, hint: str | None = None) -> BusyError:
        error = BusyError(f"could not write {self._shown!r}: {what}", hint=hint)
        return with_errno(error, errno.EBUSY, self._shown)


def commit_pending(
    path: Path, unfinished: moves.Unfinished, update: Callable[[bytes | None], moves.Update | None]
) -> None:
    """Make ``update(index)`` the index of the directory, and do the moves that it promises.

    Moved attempts are no longer pending. A damaged index is handed to ``update`` as it is; it may make a new one.

    Args:
        path: the directory; it must be there.
        unfinished: reads what an index promises that is not done.
        update: gets the present index, None when there is none, while nobody else can change it; None as its answer
            leaves everything as it is.

    Raises:
        NotFoundError: there is no such directory.
        BusyError: others kept saving.
        ExistsError: files that no index lists stand where staged ones would go.
        LinkRefusedError: the index, or ``.treering``, is a link.
        StoreError: the system refused.
    """
    shown = os.fspath(path)
    with naming(shown, "write"), contextlib.ExitStack() as held:
        folder = held.enter_context(Folder(resolved_folder(shown)))
        tree = FolderTree(folder, shown)
        held.callback(tree.close)
        own = attempts.AttemptFolder(tree)
        attempts.sweep_unfinished(tree)
        held.callback(own.discard)
        with contextlib.closing(LeavesCommit(folder, tree, own, unfinished, shown)) as saving, saving:
            saving.change(update, lambda change: _list_staged(tree, change))


def _list_staged(tree: FolderTree, change: moves.Update) -> Mapping[Parts, Sequence[str]]:
    """Return all staged files of the attempts that are to be moved, as names by folder."""
    found: dict[Parts, list[str]] = {}
    for move in change.moves:
        source = leaves_names.staged_leaves(move.attempt)
        for here, kinds in tree.walk(source) if leaves_names.is_attempt(move.attempt) else ():
            if names := [name for name, kind in kinds.items() if kind != FOLDER]:
                found.setdefault(here[len(source) :], []).extend(names)
    return found
