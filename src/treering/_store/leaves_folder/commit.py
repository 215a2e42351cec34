"""A leaves directory while one saver has it to itself: dead saves are finished first, then an index is changed.

The folder of each attempt under ``.treering`` is locked while its saver lives, and swept when that one is dead.
``docs/design/store.md`` says why each step is where it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from collections.abc import Callable, Collection

from treering._codec.key_document import find_attempts
from treering._store.api import Closable
from treering._store.failures import with_errno
from treering._store.leaves_api import Unfinished, Update
from treering._store.leaves_folder import moves
from treering._store.leaves_folder.leaves_folder import AS_FOLDER, index_bytes, list_attempts
from treering._store.pieces import write_all
from treering._store.posix import descriptors
from treering._store.posix.descriptors import OpenDescriptor
from treering._store.posix.folder import Folder, FolderLock
from treering._store.posix.folder_tree import FolderTree, Parts
from treering._values import leaves_names, timing
from treering._values.checkpoint_names import LOCK_FILE
from treering._values.leaves_names import ATTEMPTS, RECORD, attempt_folder
from treering.errors import BusyError, LinkRefusedError, StoreError

_TRIES = 20


class AttemptFolder:
    """The folder of an attempt that this process has made and holds the lock of.

    Attributes:
        attempt: 16 hexadecimal digits, different for each save.
        parts: where it is.
        kept: an index names it, or it waits for one: `end` leaves it there.
    """

    def __init__(self, tree: FolderTree, attempt: str | None = None) -> None:
        """Make it, for an attempt that is known to others already, or for a new random one.

        Raises:
            LinkRefusedError: ``.treering`` is a link.
            OSError: the system refused; ENOENT when a saver that failed removed the directory meanwhile.
        """
        self._tree = tree
        self._opened: OpenDescriptor | None = None
        self.kept = False
        for _ in range(_TRIES):
            self.attempt = attempt or secrets.token_hex(8)
            self.parts = attempt_folder(self.attempt)
            try:
                tree.make(self.parts)
                if self._lock():
                    return
            except BaseException:  # an interrupt too: nothing half made stays; raised again below
                self.end()
                raise
            # A sweeper met it between its making and its lock, and took it for a leftover.
            self.end()
        raise OSError(errno.EAGAIN, "other processes keep removing its staged files")

    def write(self, name: str, data: bytes, old: os.stat_result | None = None) -> None:
        """Make a file in it, durable but for its name, with the rights of the file that it will replace, if any.

        Raises:
            OSError: the system refused.
        """
        self._tree.remove(self.parts, name)
        with self._tree.create(self.parts, name) as opened:
            if old is not None:
                descriptors.take_over(opened.number, old)
            write_all(opened.number, memoryview(data))
            descriptors.sync(opened.number)

    def end(self) -> None:
        """Let go of it. Unless it is kept it is removed, as far as that goes; so is ``.treering`` when it is empty."""
        if not self.kept:
            with contextlib.suppress(OSError, LinkRefusedError):  # what stays is swept by the next save
                remove_attempt(self._tree, self.attempt)
        if self._opened is not None:
            with contextlib.suppress(OSError):
                self._opened.close()
        if not self.kept:
            with contextlib.suppress(OSError, LinkRefusedError):
                self._tree.remove_empty((ATTEMPTS,))

    def _lock(self) -> bool:
        """Lock it, and look whether it still is there."""
        if descriptors.fcntl is None:  # Windows opens no folders, and sweeps nothing
            return True
        self._opened = self._tree.open((ATTEMPTS,), self.attempt, AS_FOLDER)
        if self._opened.lock() is False:
            return False
        found = self._tree.find((ATTEMPTS,), self.attempt)
        return found is not None and os.path.samestat(found, os.fstat(self._opened.number))


def remove_attempt(tree: FolderTree, attempt: str) -> None:
    """Remove the folder of an attempt: the record first, for what has none proves nothing.

    Raises:
        OSError: the system refused.
    """
    parts = attempt_folder(attempt)
    with contextlib.suppress(PermissionError):  # it may be empty, as one made under a umask that leaves no rights
        tree.remove(parts, RECORD)
    if not tree.remove_empty(parts):
        tree.remove_all(parts)


def remove_if_dead(tree: FolderTree, attempt: str, *, spared: Callable[[Collection[str]], bool]) -> None:
    """Remove the folder of an attempt that no index names, if its saver is dead.

    What cannot be removed stays, and does not stand in the way of a save. Where the lock of a folder cannot be
    asked for, whether a saver lives cannot be told, and nothing is removed.

    Args:
        tree: the directory.
        attempt: the attempt.
        spared: gets the names in that folder, and says whether somebody may need it yet.
    """
    with contextlib.suppress(OSError):
        try:
            opened = tree.open((ATTEMPTS,), attempt, AS_FOLDER)
        except PermissionError:  # made under a umask that leaves no rights: then nothing is in it
            tree.remove_empty(attempt_folder(attempt))
            return
        with opened:
            if opened.lock() and not spared(tree.scan(attempt_folder(attempt))):
                remove_attempt(tree, attempt)


def sweep_unfinished(tree: FolderTree) -> None:
    """Remove what died before it was durable, which nobody can need: else jobs that die again and again fill the disk.

    Raises:
        LinkRefusedError: ``.treering`` is a link.
    """
    with contextlib.suppress(OSError):
        for attempt in list_attempts(tree):
            remove_if_dead(tree, attempt, spared=lambda names: RECORD in names)


class LeavesCommit(Closable):
    """One change of a leaves directory by a saver that has it to itself; closed, it lets others in.

    Raises:
        BusyError: others kept saving, or the directory is no longer at its path.
        LinkRefusedError: the index is a link.
        OSError: the system refused, also to finish what a dead saver had begun.
    """

    def __init__(self, folder: Folder, tree: FolderTree, own: AttemptFolder, unfinished: Unfinished, shown: str):
        self._folder = folder
        self._tree = tree
        self._own = own
        self._unfinished = unfinished
        self._shown = shown
        self._lock = FolderLock(folder)

    def close(self) -> None:
        """Give the lock back."""
        self._lock.give_back()

    def change(self, update: Callable[[bytes | None], Update | None]) -> None:
        """Change the index, and do what the change promises.

        Args:
            update: gets the present index, without moves; None leaves it as it is.

        Raises:
            ExistsError: something stands where files would be moved to. Nothing has changed.
            StoreError: the new index is in place, and what the message says is not done.
            OSError: the system refused. Nothing has changed.
        """
        before = self._begin()
        change = update(before)
        if change is None:
            return
        replaced = moves.survey(self._tree, change.moves)
        for move in change.moves:
            moves.require_free(self._tree, move.attempt, replaced)
        self._commit(change.moving)
        try:
            self._finish(change, replaced)
        except OSError as error:
            hint = "the new content is in place: treering reads it, and the next save or index_leaves moves the rest"
            raise StoreError.of(error, self._shown, "move all files to their key paths in", hint=hint) from error
        self._sweep(before, change)

    def move_unindexed(self) -> None:
        """Move the own files to their key paths without an index.

        Raises:
            ExistsError: something is in their way.
            LinkRefusedError: a folder on the way is a link.
            OSError: the system refused.
        """
        self._begin()
        moves.require_free(self._tree, self._own.attempt, moves.ReplacedFiles())
        moves.sync_folders(self._folder, self._tree, moves.move_staged(self._tree, self._own.attempt))

    def _begin(self) -> bytes | None:
        """Take the lock, do what the index promises and its saver did not live to do, and return the index then."""
        self._take_lock()
        index = index_bytes(self._tree)
        if index is None:
            return None
        if (change := self._unfinished(index)) is None:
            self._take_up(index)
            return index
        self._finish(change, moves.survey(self._tree, change.moves))
        return change.moved

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

    def _finish(self, change: Update, replaced: moves.ReplacedFiles) -> None:
        """Clear, move, make that durable, and say so in the index."""
        into: set[Parts] = set()
        moves.clear(self._tree, replaced)
        for move in change.moves:
            into.update(moves.move_staged(self._tree, move.attempt))
        moves.sync_folders(self._folder, self._tree, into)
        self._replace(self._prepared(change.moved))
        self._tree.sync(())
        self._take_up(change.moved)

    def _take_up(self, index: bytes) -> None:
        """What an index names waits for none: else a later save would leave it to be listed again."""
        for attempt in find_attempts(index).intersection(list_attempts(self._tree)):
            self._tree.remove(leaves_names.attempt_folder(attempt), leaves_names.PENDING)

    def _commit(self, index: bytes) -> None:
        """Put the index there that sends readers to the staged files, and make it durable."""
        new = self._prepared(index)
        self._own.kept = named = self._own.attempt in find_attempts(index)  # until it is known that nothing was done
        try:
            self._replace(new)
        except OSError:
            self._own.kept = named and self._is_index(new)
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

    def _sweep(self, before: bytes | None, change: Update) -> None:
        """Remove what no index needs: superseded attempts, whose savers are done, and those of the dead."""
        done = find_attempts(before or b"").union(change.dropped)

        def is_spared(names: Collection[str]) -> bool:
            """Whether an attempt may be needed: it waits for an index, or it is of one that is lost."""
            is_whole = leaves_names.RECORD in names and leaves_names.LEAVES not in names
            return leaves_names.PENDING in names or (before is None and is_whole)

        kept = {self._own.attempt, *find_attempts(change.moved)}
        with contextlib.suppress(OSError):  # the save is done; the next one sweeps
            for attempt in list_attempts(self._tree):
                if attempt in done - kept:
                    remove_attempt(self._tree, attempt)
                elif attempt not in kept:
                    remove_if_dead(self._tree, attempt, spared=is_spared)

    def _busy(self, what: str, hint: str | None = None) -> BusyError:
        error = BusyError(f"could not write {self._shown!r}: {what}", hint=hint)
        return with_errno(error, errno.EBUSY, self._shown)
