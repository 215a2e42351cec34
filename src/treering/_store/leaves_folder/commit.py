"""A leaves directory while one saver has it to itself: dead saves are finished first, then an index is changed.

The folder of each attempt under ``.treering`` is locked while its saver lives, and swept when that one is dead. Between
the two indexes of a save old leaves are cleared, and staged ones move to their key paths. Each step of that can be done
again: whoever finds a first index goes through all of them, whatever was done before. ``docs/design/store.md`` says why
each step is where it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import stat
import time
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence

from treering._codec.key_document import find_attempts
from treering._codec.zarr import marker_of, number_of_chunk, parse_zarray
from treering._store.api import Closable, Kind
from treering._store.crew import map_together
from treering._store.failures import busy_error, with_errno
from treering._store.leaves_api import Move, Unfinished, Update
from treering._store.leaves_folder.leaves_folder import AS_FOLDER, index_bytes, list_attempts, read_small
from treering._store.pieces import write_all
from treering._store.posix import descriptors
from treering._store.posix.descriptors import OpenDescriptor
from treering._store.posix.folder_tree import FolderTree, Parts
from treering._values import leaves_names, timing
from treering._values.checkpoint_names import LOCK_FILE
from treering._values.leaves_names import ATTEMPTS, RECORD, ZARRAY, attempt_folder, parts_of, staged_leaves
from treering.errors import CorruptError, ExistsError, LinkRefusedError, StoreError, TreeringError

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

    def __init__(self, tree: FolderTree, own: AttemptFolder, unfinished: Unfinished) -> None:
        self._tree = tree
        self._own = own
        self._unfinished = unfinished
        self._shown = tree.shown(())

    def close(self) -> None:
        """Give the lock back."""
        self._tree.root.unlock()

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
        sync_folders(self._tree, move_staged(self._tree, self._own.attempt))

    def _begin(self) -> bytes | None:
        """Take the lock, do what the index promises and its saver did not live to do, and return the index then."""
        self._take_lock()
        index = index_bytes(self._tree)
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
        sync_folders(self._tree, into)
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


_ABSENT = (FileNotFoundError, NotADirectoryError, LinkRefusedError)
_LARGEST_ZARRAY = 1 << 20
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
            text = read_small(tree, parts, ZARRAY, _LARGEST_ZARRAY)
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


_THREADS = 5  # that of the caller is one of them
_ONE_BY_ONE = 32
_CONTENT = (os.O_RDWR if os.name == "nt" else os.O_RDONLY) | getattr(os, "O_NONBLOCK", 0)


def sync_written(tree: FolderTree, parts: Parts, written: Iterable[tuple[Parts, Iterable[str]]]) -> None:
    """Make some files in a folder durable, and the names of that folder and of all folders on the way to them.

    Args:
        tree: the directory, open since before anything was written.
        parts: where in it.
        written: folders below ``parts``, each with names of files; not asked for where one call makes all durable.

    Raises:
        OSError: the system refused; it is not asked again.
    """
    if tree.root.sync_file_system():
        return
    jobs: list[tuple[Parts, str | None]] = []
    folders: dict[Parts, None] = {parts[:count]: None for count in range(len(parts), -1, -1)}
    for below, names in written:
        here = (*parts, *below)
        jobs.extend((here, name) for name in names)
        folders.update((here[:count], None) for count in range(len(here), -1, -1))
    jobs.extend((here, None) for here in folders)
    _sync(tree, jobs)


def sync_folders(tree: FolderTree, folders: Iterable[Parts]) -> None:
    """Make the names in those folders durable.

    Raises:
        OSError: the system refused; it is not asked again.
    """
    jobs: list[tuple[Parts, str | None]] = [(parts, None) for parts in folders]
    if len(jobs) > _ONE_BY_ONE and tree.root.sync_file_system():
        return
    _sync(tree, jobs)


def _sync(tree: FolderTree, jobs: Sequence[tuple[Parts, str | None]]) -> None:
    def sync(job: tuple[Parts, str | None]) -> None:
        parts, name = job
        if name is None:
            tree.sync(parts)
            return
        with tree.open(parts, name, _CONTENT) as opened:
            descriptors.sync(opened.number)

    map_together(sync, jobs, _THREADS if len(jobs) > _ONE_BY_ONE else 1)
