"""Saving into a leaves directory on disk: files staged under ``.treering``, then one index that sends readers there.

Process 0, or a process alone, begins the save, the other processes of a job join it. While one saver has the directory
to itself, dead saves are finished first, then the index is changed. Between the two indexes of a save old leaves are
cleared, and staged ones move to their key paths. Each step of that can be done again: whoever finds a first index goes
through all of them, whatever was done before. ``docs/design/store.md`` says why each step is where it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import operator
import os
import stat
import threading
import time
import unicodedata
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from treering._codec.key_document import find_attempts, unindexed_attempts
from treering._codec.zarr import LONGEST_DOCUMENT, marker_of, number_of_chunk, parse_zarray
from treering._store.api import Closable, Kind
from treering._store.failures import busy_error, checkpoint_error, naming, with_errno
from treering._store.leaves_api import LeafFile, LeafWriter, LeavesSave, MakeUpdate, Move, Unfinished, Update
from treering._store.leaves_folder.attempts import (
    AttemptFolder,
    list_attempts,
    pending_attempts,
    remove_attempt,
    remove_if_dead,
    sweep_unfinished,
)
from treering._store.posix import descriptors
from treering._store.posix.folder import Folder, make_folder, remove_folders, resolved_folder, sync_parent
from treering._store.posix.folder_tree import FolderTree, Parts
from treering._store.posix.store import PosixStore
from treering._store.posix.writing import write_content
from treering._values import timing
from treering._values.checkpoint_names import INDEX as CHECKPOINT
from treering._values.checkpoint_names import LOCK_FILE
from treering._values.leaves_names import (
    ATTEMPTS,
    INDEX,
    LEAVES,
    NEXT_INDEX,
    PENDING,
    RECORD,
    ZARRAY,
    attempt_folder,
    parts_of,
    staged_leaves,
)
from treering.errors import CorruptError, ExistsError, LinkRefusedError, StoreError, TreeringError, UnsupportedError

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

    def __init__(self, tree: FolderTree, shown: str, attempt: str) -> None:
        """Write for an attempt below the open directory, which the caller calls ``shown`` and this closes."""
        self._tree, self._shown, self.attempt = tree, shown, attempt
        self._lock = threading.Lock()
        self._names: dict[Parts, list[str]] = {}
        self._ended = False
        self.store = PosixStore.over(tree.root)
        self._staged = staged_leaves(attempt)
        around = "/".join([tree.root.path, *self._staged, "", ""])  # one slash before the folder, and one behind it
        self._room = _LONGEST_PATH - len(os.fsencode(around)) - _CHUNK_NAME_BYTES

    def close(self) -> None:
        """Give everything back; the files stay."""
        if not self._ended:
            self._ended = True
            self._tree.close()

    def write(self, folder: str, files: Sequence[LeafFile]) -> None:
        """Make the folder of a leaf and files in it, small ones in few system calls."""
        with naming(self._shown, "write"):
            parts = self._parts_of(folder)
            with self._lock:  # remembered, to be removed or made durable
                self._names.setdefault(parts, []).extend(name for name, _, _ in files)
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
            self._open_tree.sync_written(self._staged, self._names.items())

    @property
    def _open_tree(self) -> FolderTree:
        if self._ended:
            raise RuntimeError("this save has ended")
        return self._tree

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
        shown = os.fspath(path)
        with naming(shown, "write"), contextlib.ExitStack() as undo:
            tree = undo.enter_context(FolderTree(Folder(resolved_folder(shown)), shown))
            super().__init__(tree, shown, attempt)
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
        self._unfinished = unfinished
        self._joint = attempt is not None
        self._durable = False
        shown = os.fspath(path)
        with naming(shown, "write"):
            target = resolved_folder(shown)
            for left in reversed(range(_TRIES)):
                try:
                    self._begin(target, shown, attempt, nbytes)
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

    def commit(self, record: bytes, update: MakeUpdate, *, listed: bool = True) -> None:
        """Make everything durable, make ``update`` the index, move the files to their key paths.

        Waits up to a minute for other savers. What a dead save left to be moved is moved first. Of a save that is not
        listed the files are moved if their key paths are free; else they stay staged until it is.

        Raises:
            BusyError: others kept saving, or the directory was moved away.
            ExistsError: files that no index lists stand where new ones would go.
            LinkRefusedError: the index, or a folder on the way of a leaf, is a link.
            StoreError: the system refused. Nothing has changed, except when the message says that the new content is
                in place: then readers get it, and the next save does what is left to do.
        """
        with naming(self._shown, "write"):
            self._make_durable(record)
            saving = LeavesCommit(self._tree, self._own, self._unfinished)
            if listed:
                with saving, saving:  # left twice, so that an interrupt cannot keep the lock
                    saving.change(update)
                return
            self._own.write(PENDING, b"")
            self._tree.sync(self._own.parts)
            self._own.kept = True
            # It is saved. Whatever cannot be moved now is moved when an index takes it up.
            with contextlib.suppress(OSError, LinkRefusedError), saving, saving:
                saving.move_unindexed()

    def _begin(self, target: str, shown: str, attempt: str | None, nbytes: int) -> None:
        """Make the directory and the folder of this attempt in it."""
        with contextlib.ExitStack() as undo:
            made = make_folder(target)
            undo.callback(remove_folders, made)
            tree = undo.enter_context(FolderTree(Folder(target), shown))
            if tree.root.find(CHECKPOINT) is not None:
                raise checkpoint_error(shown)
            own = AttemptFolder(tree, attempt)
            undo.callback(own.end)
            tree.make(staged_leaves(own.attempt))
            sweep_unfinished(tree)
            tree.root.require_space(nbytes)
            super().__init__(tree, shown, own.attempt)
            self._made, self._own = made, own
            undo.pop_all()

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
                tree.sync_written(self._staged, staged)
            self._own.write(RECORD, record)
            tree.sync(self._own.parts)
        if not self._made and tree.find((), INDEX) is None:
            with contextlib.suppress(PermissionError):  # a folder above that is not ours
                sync_parent(tree.root.path)


# ----------------------------------------------------------------------------------------------------------- the commit


class LeavesCommit(Closable):
    """One change of a leaves directory by a saver that has it to itself; closed, it lets others in.

    Raises:
        BusyError: others kept saving, or the directory is no longer at its path.
        LinkRefusedError: the index is a link.
        OSError: the system refused, also to finish what a dead saver had begun.
    """

    def __init__(self, tree: FolderTree, own: AttemptFolder, unfinished: Unfinished) -> None:
        self._tree = tree
        self._own = own
        self._unfinished = unfinished
        self._shown = tree.shown(())

    def close(self) -> None:
        """Give the lock back."""
        self._tree.root.unlock()

    def change(self, update: MakeUpdate) -> None:
        """Change the index, and do what the change promises.

        Args:
            update: gets the present index, without moves, and the attempts that wait for one.

        Raises:
            ExistsError: something stands where files would be moved to. Nothing has changed.
            StoreError: the new index is in place, and what the message says is not done.
            OSError: the system refused. Nothing has changed.
        """
        before = self._begin()
        waiting = pending_attempts(self._tree, list_attempts(self._tree)) | unindexed_attempts(before or b"")
        change = update(before, waiting)
        if change is None:
            return
        replaced = survey(self._tree, change.moves)
        for move in change.moves:
            require_free(self._tree, move.attempt, replaced)
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
        require_free(self._tree, self._own.attempt, ReplacedFiles())
        self._tree.sync_folders(move_staged(self._tree, self._own.attempt))

    def _begin(self) -> bytes | None:
        """Take the lock, do what the index promises and its saver did not live to do, and return the index then."""
        self._take_lock()
        index = self._tree.read_index(INDEX)
        if index is None:
            return None
        if (change := self._unfinished(index)) is None:
            self._take_up(index)
            return index
        self._finish(change, survey(self._tree, change.moves))
        return change.moved

    def _take_lock(self) -> None:
        deadline = time.monotonic() + timing.current.directory_lock
        pause = timing.current.directory_lock_first
        while not self._tree.root.lock():
            if time.monotonic() >= deadline:
                hint = None if self._tree.root.find(LOCK_FILE) is None else f"remove {LOCK_FILE!r} there if none is"
                raise busy_error(self._shown, "other processes keep saving there", hint)
            time.sleep(pause)
            pause = min(2 * pause, timing.current.directory_lock_longest)
        if not self._tree.root.is_there():
            raise busy_error(self._shown, "another process moved or removed the folder")

    def _finish(self, change: Update, replaced: ReplacedFiles) -> None:
        """Clear, move, make that durable, and say so in the index."""
        into: set[Parts] = set()
        clear(self._tree, replaced)
        for move in change.moves:
            into.update(move_staged(self._tree, move.attempt))
        self._tree.sync_folders(into)
        self._replace(self._prepared(change.moved))
        self._tree.sync(())
        self._take_up(change.moved)

    def _take_up(self, index: bytes) -> None:
        """What an index names waits for none: else a later save would leave it to be listed again."""
        for attempt in find_attempts(index).intersection(list_attempts(self._tree)):
            self._tree.remove(attempt_folder(attempt), PENDING)

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
        self._own.write(NEXT_INDEX, index, self._tree.find((), INDEX))
        return self._tree.find(self._own.parts, NEXT_INDEX)

    def _replace(self, new: os.stat_result | None) -> None:
        """Put that index in the place of the one that is there."""
        try:
            self._tree.replace(self._own.parts, NEXT_INDEX, (), INDEX)
        except OSError:
            if not self._is_index(new):  # else it is done, and only the answer was lost
                raise

    def _is_index(self, new: os.stat_result | None) -> bool:
        found = self._tree.find((), INDEX)
        return new is not None and found is not None and os.path.samestat(new, found)

    def _sweep(self, before: bytes | None, change: Update) -> None:
        """Remove what no index needs: superseded attempts, whose savers are done, and those of the dead."""
        done = find_attempts(before or b"").union(change.dropped)

        def is_spared(names: Collection[str]) -> bool:
            """Whether an attempt may be needed: it waits for an index, or it is of one that is lost."""
            is_whole = RECORD in names and LEAVES not in names
            return PENDING in names or (before is None and is_whole)

        kept = {self._own.attempt, *find_attempts(change.moved)}
        with contextlib.suppress(OSError):  # the save is done; the next one sweeps
            for attempt in list_attempts(self._tree):
                if attempt in done - kept:
                    remove_attempt(self._tree, attempt)
                elif attempt not in kept:
                    remove_if_dead(self._tree, attempt, spared=is_spared)


_ABSENT = (FileNotFoundError, NotADirectoryError, LinkRefusedError)
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.EPERM})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedFiles:
    """What goes with the leaves that a save replaces, and what stays beside it."""

    files: dict[Parts, list[str]] = dataclasses.field(default_factory=dict)
    """Names of files by folder, in the order in which they go."""
    folders: set[Parts] = dataclasses.field(default_factory=set)
    """The folders of the leaves themselves, whether something of them is there or not."""
    staying: dict[Parts, dict[str, Kind]] = dataclasses.field(default_factory=dict)
    """What stays in each folder that was looked at, and what it is; `clear` removes folders in which nothing stays."""

    def emptied(self) -> list[Parts]:
        """Return the folders that may be empty when the files are gone, the deepest first."""
        ways = {parts[:count] for parts in self.folders.union(self.files) for count in range(1, len(parts) + 1)}
        return sorted(ways, key=len, reverse=True)


def survey(tree: FolderTree, moves: Sequence[Move]) -> ReplacedFiles:
    """Return which files of the leaves that saves replace are to go: chunks, and last the ``.zarray`` that proves it.

    A folder that is not there, or that has a link on its way, holds nothing of a leaf; one whose ``.zarray`` names an
    attempt that is moved was moved there already.

    Raises:
        OSError: the system refused.
    """
    replaced = ReplacedFiles()
    moving = {move.attempt for move in moves}
    # Two branches may list one array, as another program's index does.
    for folder in dict.fromkeys(folder for move in moves for folder in move.cleared):
        with contextlib.suppress(*_ABSENT, CorruptError):
            parts = parts_of(folder)
            replaced.folders.add(parts)
            if _staying(tree, replaced, parts).get(ZARRAY) is not Kind.FILE:
                continue
            text = tree.read_small(parts, ZARRAY, LONGEST_DOCUMENT)
            if marker_of(text) not in moving:
                _survey_chunks(tree, parts, text, replaced)
                replaced.files[parts] = [*replaced.files.pop(parts, ()), ZARRAY]
    for parts, names in replaced.files.items():
        for name in names:
            del replaced.staying[parts][name]
    for parts in replaced.emptied():
        with contextlib.suppress(*_ABSENT):
            above = _staying(tree, replaced, parts[:-1])
            if above.get(parts[-1]) is Kind.PLACE and not _staying(tree, replaced, parts):
                del above[parts[-1]]
    return replaced


def _staying(tree: FolderTree, replaced: ReplacedFiles, parts: Parts) -> dict[str, Kind]:
    if parts not in replaced.staying:
        replaced.staying[parts] = tree.scan(parts)
    return replaced.staying[parts]


def _survey_chunks(tree: FolderTree, parts: Parts, zarray: bytes, replaced: ReplacedFiles) -> None:
    """Note the chunk files of one array, those in folders of their own too."""
    try:
        array = parse_zarray(zarray)
    except TreeringError:
        return
    waiting = [parts]
    while waiting:
        here = waiting.pop()
        found = _staying(tree, replaced, here)
        start = "".join(f"{part}/" for part in here[len(parts) :])
        files = [name for name, kind in found.items() if kind is Kind.FILE]
        if chunks := [name for name in files if number_of_chunk(array, start + name) is not None]:
            replaced.files[here] = chunks
        waiting += [(*here, name) for name, kind in found.items() if kind is Kind.PLACE and name.isdecimal()]


def clear(tree: FolderTree, replaced: ReplacedFiles) -> None:
    """Remove those files, then the folders that this has emptied.

    Raises:
        OSError: the system refused.
    """
    for parts, names in replaced.files.items():
        tree.remove(parts, *names)
    # Also where nothing is left to remove: whoever cleared them may have died before this.
    for parts in replaced.emptied():
        with contextlib.suppress(NotADirectoryError, LinkRefusedError):
            tree.remove_empty(parts)


def _walk_staged(tree: FolderTree, attempt: str, is_done: Callable[[Parts, str, Kind], bool]) -> list[Parts]:
    """Walk through what an attempt has staged, and return the folders that were entered, as parts of key paths.

    Args:
        tree: the directory.
        attempt: the attempt.
        is_done: gets a folder, a name in it and what that is; False for a folder that is to be entered.
    """
    waiting: list[Parts] = [()]
    entered: list[Parts] = []
    while waiting:
        here = waiting.pop()
        try:
            found = tree.scan((*staged_leaves(attempt), *here))
        except FileNotFoundError:  # nothing is staged (any more)
            continue
        entered.append(here)
        # An array without its .zarray is missing to everybody; one without its chunks would be read as zeros.
        waiting += [(*here, name) for name in sorted(found, key=ZARRAY.__eq__) if not is_done(here, name, found[name])]
    return entered


def move_staged(tree: FolderTree, attempt: str) -> list[Parts]:
    """Move the staged files of an attempt to their key paths: whole folders, or file by file into those that are there.

    Returns:
        The folders that names were put into, which are not yet durable.

    Raises:
        OSError: the system refused; what is left to move is staged still.
    """
    source = staged_leaves(attempt)
    into = _walk_staged(
        tree, attempt, lambda to, name, kind: _rename(tree, (*source, *to), name, to, folder=kind is Kind.PLACE)
    )
    for to in reversed(into):
        tree.remove_empty((*source, *to))
    return into


def _rename(tree: FolderTree, parts: Parts, name: str, to: Parts, *, folder: bool) -> bool:
    """Rename one thing; False for a folder where one with something in it is there already."""
    try:
        tree.replace(parts, name, to, name)
    except OSError as error:
        if tree.find(parts, name) is None and tree.find(to, name) is not None:
            return True  # done, and only the answer was lost
        there = tree.find(to, name) if folder and error.errno in _OCCUPIED else None
        if there is not None and stat.S_ISDIR(there.st_mode):
            return False
        raise
    return True


def require_free(tree: FolderTree, attempt: str, replaced: ReplacedFiles) -> None:
    """Refuse what stands in the way of the staged files of an attempt, while nobody else saves there.

    It looks as deep as `move_staged` will go: only into folders that stay.

    Raises:
        ExistsError: something does.
        LinkRefusedError: a folder on the way is a link.
        OSError: the system refused.
    """
    folds = tree.find((), ATTEMPTS.upper()) is not None  # some systems take ``W`` and ``w`` for the same

    def is_free(here: Parts, name: str, kind: Kind) -> bool:
        try:
            there = _staying(tree, replaced, here)
        except FileNotFoundError:  # somebody removed it meanwhile
            return True
        found = there.get(name)
        # Where the .zarray of a replaced leaf is lost, nothing tells its chunks from others: they are replaced.
        lost = here in replaced.folders and ZARRAY not in replaced.files.get(here, ())
        what = None
        if ZARRAY in there:
            name, what = ZARRAY, "an array that no index lists"
        elif found is None:
            if folds and _folded(name) in map(_folded, there):
                what = "what has the same name in other letters"
        elif found is not kind:
            what = _IN_THE_WAY[found]
        elif kind is Kind.PLACE:
            return False
        elif not lost:
            what = "a file that no index lists"
        if what is not None:
            tree.refuse_link((*here, name))
            shown = tree.shown(here, name)
            error = ExistsError(f"{what} stands at {shown!r}, where a leaf would go", hint=_LISTED)
            raise with_errno(error, errno.EEXIST, shown)
        return True

    _walk_staged(tree, attempt, is_free)


_IN_THE_WAY = {
    Kind.FILE: "a file", Kind.PLACE: "a folder that is not replaced", Kind.OTHER: "a device, a pipe or a socket",
}  # fmt: skip
_LISTED = "move it away, or save to another path; treering.leaves.index_leaves lists arrays that no index does"


def _folded(name: str) -> str:
    return unicodedata.normalize("NFD", name).casefold()
