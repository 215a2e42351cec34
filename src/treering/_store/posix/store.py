"""The store on a file system: one folder, opened once, so that everything happens in it whatever is put at its path."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Final

from treering._store import api
from treering._store.api import ANY, Claim, Document, Entry, Held, Kind, Locks, Outcome, Store, Version
from treering._store.pieces import Buffer, write_all
from treering._store.posix import descriptors, open_descriptor
from treering._store.posix.folder import (
    NO_LINKS,
    Folder,
    FolderLock,
    make_folder,
    remove_folders,
    resolved_folder,
    sync_parent,
)
from treering._store.posix.open_descriptor import OpenDescriptor
from treering._store.posix.reading import FileVersion, LocalFile, open_in, stat_of
from treering._store.posix.stage import StagedFile
from treering._store.posix.writing import replace_file, write_content
from treering._store.root import Root
from treering._values import timing
from treering.errors import NotFoundError, StoreError

# File systems that this machine has to itself, and whose lock table has the numbers that ``stat`` gives.
_OF_THIS_MACHINE: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs"})
# Type, access, pid, device and inode of https://man7.org/linux/man-pages/man5/proc_locks.5.html, not of those who wait.
_LOCK: Final = re.compile(
    r"^\d+: (?:FLOCK|POSIX|OFDLCK) +\S+ +WRITE +(-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE
)
# Of https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html: number, device, type of the file system.
_MOUNT: Final = re.compile(r"^(\d+) \d+ (\d+):(\d+) .*? - (\S+) ", re.MULTILINE)
_MOUNT_OF: Final = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)
# The first namespace of process numbers has this number on every Linux; in others the locks of the rest are hidden.
_ALL_PROCESSES: Final = "pid:[4026531836]"
_STARTED: Final = 19  # the 22nd field of /proc/PID/stat, counted behind the name and the one before it

_UNSHOWN: Final = "this system does not show its locks"


def seen_locks(folder: int | None) -> Locks:
    """Look which files of the file system of an open folder are locked.

    Args:
        folder: its descriptor; None where the platform opens none.

    Example:
        >>> seen_locks(None)
        Locks(gap='this system does not show its locks', holders={})
    """
    proc = Path("/proc")
    try:
        mount = _MOUNT_OF.search((proc / "self" / "fdinfo" / str(folder)).read_text())
        mounts = _MOUNT.findall((proc / "self" / "mountinfo").read_text(errors="replace"))
        locks = _LOCK.findall((proc / "locks").read_text())
        all_seen = os.readlink(proc / "self" / "ns" / "pid") == _ALL_PROCESSES
    except OSError:
        return Locks(_UNSHOWN, {})
    here = next((found for found in mounts if mount is not None and found[0] == mount[1]), None)
    if here is None:
        return Locks(_UNSHOWN, {})
    _, major, minor, kind = here
    device = int(major), int(minor)
    # The device of the mount, not the one of ``stat``: btrfs shows another one there.
    holders = {
        int(inode): int(pid) for pid, first, second, inode in locks if (int(first, 16), int(second, 16)) == device
    }
    gap = None if all_seen else "locks of other containers are not shown here"
    if kind not in _OF_THIS_MACHINE:
        gap = f"on {kind} locks of other machines are not shown here"
    return Locks(gap, holders)


def started(process: int) -> float | None:
    """Return when a process of this machine started, as seconds since 1970; None where it does not run.

    Raises:
        OSError: the system does not show processes.

    Example:
        >>> import sys
        >>> sys.platform != "linux" or started(os.getpid()) > 1e9
        True
    """
    if (boot := re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)) is None:
        raise OSError("the system does not show when it was started")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # The name of the program stands in brackets, and may hold any text.
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(boot[1]) + int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return None


class Journal(Claim):
    """The journal of one attempt: its lock says that its writer lives, and it becomes the index by its name."""

    def __init__(self, store: PosixStore, name: str, index: str, base: Version | None) -> None:
        """Nothing is made yet; `make` does that.

        Args:
            store: where.
            name: its name.
            index: the name that it gets.
            base: the index that it will replace, whose rights it takes over; None for none.
        """
        self._store, self._folder = store, store.folder
        self._name, self._index = name, index
        self._base = base
        self._identity: os.stat_result | None = None
        self._done = False
        self._file = OpenDescriptor()

    def make(self) -> None:
        """Make and lock it; its name is durable before any data file's.

        Raises:
            OSError: the system refused, or a sweeper on another machine took it for a leftover.
        """
        old = stat_of(self._base)
        self._folder.create(self._name, 0o600 if old else 0o666, into=self._file)
        try:
            self._lock()
            if old:
                descriptors.take_over(self._file.number, old)
        except BaseException:  # an interrupt too: no journal without its writer; raised again below
            self.withdraw()
            raise
        if self._base is None:
            self._store.sync_above()
        self._folder.sync()

    def prepare(self, data: bytes) -> None:
        """Write the index into it, durably; the names of the data are durable before the index is."""
        write_all(self._file.number, memoryview(data))
        descriptors.sync(self._file.number)
        self._folder.sync()

    def commit(self) -> Outcome:
        """Link it where nothing was, else rename it over what was there."""
        self._identity = os.fstat(self._file.number)
        if descriptors.fcntl is None:  # Windows renames only what is closed
            self.close()
        try:
            self._become_first() if self._base is None else self._rename()
        except FileExistsError:
            return Outcome.LOST
        return Outcome.DONE

    def committed(self) -> bool:
        """Whether it has become the index of the folder.

        Raises:
            OSError: that cannot be known now.
        """
        if self._done or self._identity is None:
            return self._done
        found = self._folder.find(self._index)
        return found is not None and os.path.samestat(found, self._identity)

    def withdraw(self) -> None:
        """Remove it, if it can be, and let go of it."""
        if descriptors.fcntl is None:  # Windows removes only what is closed
            self.close()
        with contextlib.suppress(OSError):
            self._folder.remove(self._name)
        self.close()

    def close(self) -> None:
        """Let go of the file, and of its lock. May be called twice."""
        with contextlib.suppress(OSError):  # all that matters was synced
            self._file.close()

    def _lock(self) -> None:
        """Hold it as long as we live: folders of network file systems are locked for one machine only."""
        if self._file.lock() is False or self._folder.find(self._name) is None:
            raise FileNotFoundError(errno.ENOENT, "another machine removed it before it was locked")

    def _become_first(self) -> None:
        """Commit where no index is.

        Raises:
            FileExistsError: there is one now.
            OSError: the system refused.
        """
        try:
            self._folder.link(self._name, self._index)
            self._done = True
        except OSError as error:
            if self.committed():  # done, and only the answer was lost
                pass
            elif error.errno not in NO_LINKS:
                raise
            elif self._folder.find(self._index) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            else:
                # Without hard links the lock alone keeps a second saver out between that look and this step.
                self._rename()
                return
        with contextlib.suppress(OSError):  # as another name of the index it proves nothing any more
            self._folder.remove(self._name)

    def _rename(self) -> None:
        try:
            self._folder.replace(self._name, self._index)
            self._done = True
        except OSError:
            if not self.committed():
                raise


def remove_leftover(folder: Folder, journal: str, data: Sequence[str], name: str) -> bool:
    """Remove what a dead attempt left: its data files, then its journal, which is the proof that they may go.

    What cannot be removed stays, and does not stand in the way of a save.

    Args:
        folder: where.
        journal: the name of its journal.
        data: those of its data files.
        name: what the index is called.

    Returns:
        False when the attempt is not dead: its journal is locked.
    """
    # Opened for writing because NFS locks nothing else; without waiting, should it be a pipe.
    flags = os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)
    with contextlib.suppress(OSError), folder.open(journal, flags) as opened:
        if opened.lock() is False:
            return False
        index = folder.find(name)
        # A power cut between the two steps of a commit leaves both names on one file: then it is no leftover.
        if index is None or not os.path.samestat(index, os.fstat(opened.number)):
            for one in data:
                folder.remove(one)
        if descriptors.fcntl is None:  # Windows removes only what is closed
            opened.close()
        folder.remove(journal)
    return True


# Without waiting, should one be a pipe that nobody writes to; files ignore that flag.
_READING: Final = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
_PIECE: Final = 1 << 20
# The file was replaced between its being found and its being opened, in words of different file systems.
_REPLACED: Final = frozenset({errno.ENOENT, errno.ESTALE})

_KINDS: Final = {stat.S_IFREG: Kind.FILE, stat.S_IFDIR: Kind.PLACE, stat.S_IFLNK: Kind.LINK}


class PosixStore(Store):
    """A folder.

    Example:
        >>> import tempfile
        >>> with PosixStore(Path(tempfile.mkdtemp())) as store:
        ...     store.open()
        ...     store.create("data", [b"tree", b"ring"], 8)
        ...     store.read("data").data
        b'treering'
    """

    def __init__(self, path: PurePath, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is opened yet.

        Args:
            path: the folder; a link to one is followed.
            clock: tells when a network file system was last asked to look again.
        """
        self.path: Path = path if isinstance(path, Path) else Path(path)
        self._clock = clock
        self._refreshed = clock()
        self._target: str | None = None
        self._opened: Folder | None = None
        self._lock: FolderLock | None = None
        self._made: list[str] = []

    @classmethod
    def over(
        cls, folder: Folder, clock: Callable[[], float] = time.monotonic, *, path: PurePath | None = None
    ) -> PosixStore:
        """Return the store of a folder that is open, and that the caller closes; ``path`` is what messages call it."""
        store = cls(path or Path(folder.path), clock)
        store._opened, store._target = folder, folder.path
        return store

    @property
    def folder(self) -> Folder:
        """The open folder, for what only a local one can do."""
        if self._opened is None:
            raise RuntimeError("the store is not open")
        return self._opened

    def open(self, *, quick: bool = False) -> None:
        """Open the folder; ``quick`` without looking at where its path leads.

        Raises:
            FileNotFoundError: there is none.
            OSError: a file is there, or the system refuses.
        """
        self._opened = Folder(os.fspath(self.path) if quick else self._resolved())

    def resolve(self) -> None:
        """Follow the links at the path to their end."""
        self._resolved()

    def make(self) -> None:
        """Make the folder and those above it; the name of each is durable before the next one is made."""
        self._made = make_folder(self._resolved())

    def unmake(self) -> bool:
        """Remove the folders that were made, as far as they are empty; False where the last one is still there."""
        remove_folders(self._made)
        return not (self._made and os.path.lexists(self._made[-1]))

    def close(self) -> None:
        """Give the lock back and close the folder."""
        self.unlock()
        if self._opened is not None:
            self._opened.close()
        self._opened = None
        self._made = []

    def is_current(self) -> bool:
        """Whether the path still leads to the open folder."""
        return self.folder.is_there()

    def lock(self) -> bool:
        """Take the lock of the folder without waiting; False when another saver holds it."""
        self._lock = FolderLock(self.folder)
        return self._lock.take()

    def unlock(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            self._lock.give_back()
            self._lock = None

    def drop(self) -> None:
        """Remove the folder, if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.folder.path)

    def at(self, name: str) -> PosixStore:
        """Return the folder ``name`` in it, by its path."""
        return PosixStore(self.path / name, self._clock)

    def below(self, name: str) -> PosixStore:
        """Open the folder ``name`` in it.

        Raises:
            OSError: there is none; ENOTDIR or ELOOP when it is a link or no folder.
        """
        return PosixStore.over(self.folder.below(name), path=self.path / name)

    def make_below(self, name: str) -> None:
        """Make the folder ``name`` in it, with the same rights, if it is missing."""
        self.folder.make_folder(name)

    def drop_below(self, name: str) -> None:
        """Remove the folder ``name`` in it, if it is empty."""
        with contextlib.suppress(OSError):
            self.folder.remove_folder(name)

    def names(self) -> list[str]:
        """Return all names in the folder."""
        return self.folder.names()

    def places(self) -> list[str]:
        """Return the names of the folders in it; a link to one is none."""
        return self.folder.folders()

    def find(self, name: str) -> Entry | None:
        """Return what is known of ``name``; of the folder itself where that is empty."""
        folder = self.folder
        if not name and folder.descriptor is not None:
            return entry_of(name, os.fstat(folder.descriptor))
        try:
            found = folder.find(name or ".")
        except NotADirectoryError:
            if "/" not in name:
                raise
            return None
        return None if found is None else entry_of(name, found)

    def open_file(self, name: str) -> LocalFile:
        """Open a file in it.

        Raises:
            NotFoundError: it is not there.
            LinkRefusedError: it is a link that leads anywhere else than into the blobs of a hub snapshot.
            StoreError: the system refuses.
        """
        return open_in(self.folder, name, self.path / name)

    def read(self, name: str, most: int = api.LARGEST_DOCUMENT) -> Document | None:
        """Return a file, at most its first ``most`` bytes; None where there is none."""
        try:
            with self.open_file(name) as file:
                data = file.read(0, min(file.size, most))
                return Document(data, FileVersion(file.found, data))
        except NotFoundError:
            return None

    def get(self, name: str) -> bytes | None:
        """Read a message; where it is not there, a network file system is asked to look again once a second.

        Raises:
            OSError: the system refused; a link, a pipe or something too large has that name.
        """
        try:
            with self.folder.open(name, _READING) as opened:
                return _message(opened.number, name)
        except OSError as error:
            if error.errno not in _REPLACED:
                raise
        self._refresh()
        return None

    def create(self, name: str, buffers: Iterable[Buffer], size: int, *, like: Version | None = None) -> None:
        """Write a new file, durable but for its name."""
        old = stat_of(like)
        # Closed to others until it has the rights of what it belongs to, which may be as narrow.
        with self.folder.create(name, 0o600 if old else 0o666) as opened:
            if old:
                descriptors.take_over(opened.number, old)
            write_content(opened.number, buffers, size)
            descriptors.sync(opened.number)

    def replace(self, name: str, data: bytes, expected: Version = ANY, *, sweep: bool = True) -> Outcome:
        """Stage a file beside it, then rename, or link where nothing may be there."""
        if expected is ANY:
            return self._put_in_place(name, data, sweep=sweep)
        if expected is None:
            return self._link_in_place(name, data)
        return self._change(name, expected, lambda: self._put_in_place(name, data, sweep=sweep), gone=Outcome.LOST)

    def _change(self, name: str, expected: Version, change: Callable[[], object], *, gone: Outcome) -> Outcome:
        """Change a file of the expected version, under its lock; ``gone`` is the answer where there is none."""
        try:
            current = self.folder.open(name, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
        except FileNotFoundError:
            return gone
        with current:
            # Each who swaps locks the file that goes; after the rename another one is there.
            while current.lock() is False:
                time.sleep(timing.current.swap_pause)
            if (found := self.read(name)) is None:
                return gone
            if found.version != expected or found.version != FileVersion(os.fstat(current.number)):
                return Outcome.LOST
            change()
        return Outcome.DONE

    def _put_in_place(self, name: str, data: bytes, *, sweep: bool) -> Outcome:
        shown = os.fspath(self.path / name)
        with StagedFile(os.path.join(self.folder.path, name), shown, sweep=sweep) as staged:
            descriptors.require_space(staged.descriptor, len(data))
            write_all(staged.descriptor, memoryview(data))
            staged.commit()
        return Outcome.DONE

    def _link_in_place(self, name: str, data: bytes) -> Outcome:
        try:
            with self._aside(name, data, durable=True) as aside:
                self.folder.link(aside, name)
        except FileExistsError:
            return Outcome.LOST
        with contextlib.suppress(OSError):
            self.folder.remove(aside)
        self.folder.sync()
        return Outcome.DONE

    @contextlib.contextmanager
    def _aside(self, name: str, data: bytes, *, durable: bool = False) -> Iterator[str]:
        """Write a file beside ``name``, which an error in the block removes; yield what it is called."""
        aside = f"{name}.{secrets.token_hex(8)}.new"
        try:
            with self.folder.create(aside) as opened:
                write_all(opened.number, memoryview(data))
                if durable:
                    descriptors.sync(opened.number)
            yield aside
        except BaseException:  # an interrupt too: nothing half written stays; raised again below
            with contextlib.suppress(OSError):  # a sweeper knows it by its name
                self.folder.remove(aside)
            raise

    def put(self, name: str, data: bytes) -> None:
        """Write aside, then rename; nothing is fsynced."""
        with self._aside(name, data) as aside:
            self.folder.replace(aside, name)

    def remove(self, name: str, expected: Version = ANY) -> Outcome:
        """Remove a file; gone already is gone. Of a version, under the lock of the file."""
        if expected is not ANY:
            return self._change(name, expected, lambda: self.folder.remove(name), gone=Outcome.DONE)
        self.folder.remove(name)
        return Outcome.DONE

    def flush(self) -> None:
        """Make the names in the folder durable."""
        self.folder.sync()

    def claim(self, marker: str, name: str, base: Version | None) -> Journal:
        """Return an attempt to change the document ``name``: its journal."""
        return Journal(self, marker, name, base)

    def sweep(self, marker: str, data: Sequence[str], name: str, current: Version | None) -> Held:
        """Remove what a dead attempt left; its journal can be locked then."""
        return Held.NO if remove_leftover(self.folder, marker, data, name) else Held.YES

    def held(self, marker: str) -> Held:
        """Whether the lock of a marker is held, where this machine shows all locks."""
        if (found := self.find(marker)) is None:
            return Held.NO
        locks = self.locks()
        return Held.YES if locks.holder(found) is not None else Held.UNKNOWN if locks.gap else Held.NO

    def retire(self, name: str, new: str, expected: Version) -> Outcome:
        """Rename it."""
        folder = self.folder
        # Two names of one file would both stay, whatever a rename reports.
        folder.remove(new)
        try:
            folder.replace(name, new)
        except OSError:
            # On a network file system it may be done, and only the answer lost.
            if (found := self.find(new)) is None or found.version != expected:
                raise
        return Outcome.DONE

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit on the file system."""
        self.folder.require_space(size)

    def require_writable(self, name: str) -> None:
        """Refuse a file that this process may not write to."""
        self.folder.require_writable(name)

    def link_from(self, source: Store, name: str) -> bool:
        """Give a file of another folder the same name here; False where there can be no such link."""
        return isinstance(source, PosixStore) and self.folder.link_from(source.folder, name)

    def locks(self) -> Locks:
        """Return which files here are locked, found out by reading alone."""
        return seen_locks(self.folder.descriptor)

    def sync_above(self) -> None:
        """Make the name of the folder itself durable, unless it was made here: then it is."""
        if not self._made:
            with contextlib.suppress(PermissionError):  # a folder above that is not ours
                sync_parent(self._resolved())

    def _resolved(self) -> str:
        if self._target is None:
            self._target = resolved_folder(os.fspath(self.path))
        return self._target

    def _refresh(self) -> None:
        """Let a network file system look again, once a second.

        Its client may remember for a minute that a name was not there. Opening the folder anew makes it ask whether
        the folder has changed, and if so it forgets what it knew (NFS: close-to-open consistency).
        """
        if self._clock() - self._refreshed < timing.current.refresh:
            return
        with contextlib.suppress(OSError):  # only the wait gets longer
            open_descriptor.open_folder(self.folder.path)
        self._refreshed = self._clock()


def entry_of(name: str, found: os.stat_result) -> Entry:
    """Return what the system knows of a name."""
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), Kind.OTHER)
    return Entry(name, found.st_size, found.st_mtime, FileVersion(found), kind, found.st_ino)


def _message(descriptor: int, name: str) -> bytes:
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(errno.EINVAL, f"{name!r} is not a file")
    pieces: list[bytes] = []
    left = api.LARGEST_MESSAGE
    while piece := os.read(descriptor, min(left, _PIECE) + 1):
        left -= len(piece)
        if left < 0:
            raise OSError(errno.EFBIG, f"{name!r} is larger than any message")
        pieces.append(piece)
    return b"".join(pieces)


class PosixRoot(Root):
    """Local paths."""

    on_disk = True

    def place(self, path: PurePath) -> PosixStore:
        """Return the store at a path."""
        return PosixStore(path)

    def open_file(self, path: PurePath) -> LocalFile:
        """Open a single file; a link is followed."""
        return LocalFile(Path(path))

    def write_file(
        self, path: PurePath, buffers: Iterable[Buffer], size: int, *, new: bool = False, unique: bool = False
    ) -> None:
        """Make a single file, or replace it as a whole, durably."""
        replace_file(Path(path), buffers, size, new=new)

    def find(self, path: PurePath, *, follow: bool = True) -> Entry | None:
        """Return what is at a path; None for nothing, and where there can be nothing.

        Raises:
            StoreError: the system refuses to say.
        """
        try:
            return entry_of(path.name, os.stat(path, follow_symlinks=follow))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        except OSError as error:
            raise StoreError.of(error, path, "read") from error

    def names(self, path: PurePath) -> Iterator[str]:
        """Walk through the names in a folder, if there is one that can be read."""
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                yield entry.name

    def places(self, path: PurePath, most: int | None = None) -> list[str]:
        """Return the folders among the first names in a folder; a link to one is none."""
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            return [entry.name for entry in itertools.islice(entries, most) if _is_folder(entry)]
        return []

    def absolute(self, path: PurePath) -> Path:
        """Return a path that holds when the program changes its current folder.

        Raises:
            StoreError: the path is relative, and the current folder was removed.
        """
        try:
            return Path(path).absolute()
        except OSError as error:
            gone = OSError(error.errno or errno.ENOENT, "it is relative, and the current folder was removed")
            raise StoreError.of(gone, path, "find", hint="change to another folder, or pass the whole path") from error

    def settled(self, path: PurePath) -> Path:
        """Return the path without links; itself where the system cannot say."""
        try:
            return Path(os.path.realpath(path))
        except (OSError, ValueError):  # the current folder is gone, or it can be no name
            return Path(path)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
