"""The store on a file system: one folder, opened once, so that everything happens in it whatever is put at its path."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Final

from treering._store import api
from treering._store.api import ANY, Document, Entry, Held, Kind, Outcome, Store, Transaction, Version
from treering._store.failures import naming
from treering._store.pieces import Buffer, write_all
from treering._store.posix import descriptors
from treering._store.posix.descriptors import OpenDescriptor
from treering._store.posix.folder import NO_LINKS, Folder, make_folder, resolved_folder, sync_parent
from treering._store.posix.reading import READING, FileVersion, LocalFile, open_in
from treering._store.posix.writing import StagedFile, write_content
from treering._values import timing
from treering._values.checkpoint_names import INDEX

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

    above: PosixStore | None = None
    """The open folder that this one is looked up in; None for one that is known by its path."""

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
            OSError: a file is there, or, in the place of a folder in another one, a link; or the system refuses.
        """
        if self.above is None:
            self._opened = Folder(os.fspath(self.path) if quick else self.resolved())
        else:
            self._opened = self.above.folder.below(self.path.name)
            self._target = self._opened.path

    def close(self) -> None:
        """Close the folder."""
        if self._opened is not None:
            self._opened.close()
        self._opened = None

    def at(self, name: str) -> PosixStore:
        """Return the folder ``name`` in it, which is looked up in the open folder; a link is refused there."""
        store = PosixStore(self.path / name, self._clock)
        store.above = self
        return store

    def transaction(self, name: str = INDEX) -> PosixTransaction:
        """Return what changes the folder by way of a journal."""
        return PosixTransaction(self, name)

    def names(self) -> list[str]:
        """Return all names in the folder."""
        return self.folder.names()

    def places(self) -> list[str]:
        """Return the names of the folders in it; a link to one is none."""
        return [name for name, kind in self.folder.scan().items() if kind is Kind.PLACE]

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Walk through all that begins with ``prefix``, at any depth; no link is followed."""
        return _walk(self.folder, "", prefix)

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
        """Return a file, at most its first ``most`` bytes; None where there is none.

        Then a network file system is asked to look again, once a second: others may wait for it.
        """
        try:
            with self._open_at_once(name) as file:
                data = file.read(0, min(file.size, most))
                return Document(data, FileVersion(file.found, data))
        except OSError as error:
            if error.errno not in _REPLACED:
                raise
        self._refresh()
        return None

    def _open_at_once(self, name: str) -> LocalFile:
        """Open a file as `open_file` does; where there is none, without the time that an error with a message takes."""
        try:
            opened = self.folder.open(name, READING)
        except OSError as error:
            if error.errno in _REPLACED:
                raise
            return self.open_file(name)
        return LocalFile(self.path / name, lambda _: opened)

    def create(self, name: str, buffers: Iterable[Buffer], size: int, *, like: Version | None = None) -> None:
        """Write a new file, durable but for its name."""
        old = _stat_of(like)
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
        return self.change(name, expected, lambda: self._put_in_place(name, data, sweep=sweep), gone=Outcome.LOST)

    def change(self, name: str, expected: Version, change: Callable[[], object], *, gone: Outcome) -> Outcome:
        """Change a file of the expected version, under its lock; ``gone`` is the answer where there is none.

        Raises:
            BlockingIOError: another process has had the lock for long.
        """
        try:
            try:
                current = self.folder.open(name, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
            except PermissionError:  # another user's, in a folder in which both may replace files
                current = self.folder.open(name, READING)
        except FileNotFoundError:
            return gone
        with current:
            # Each who swaps locks the file that goes; after the rename another one is there.
            _await_lock(current, name)
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
                try:
                    self.folder.link(aside, name)
                except FileNotFoundError:  # this process stood still for so long that a sweeper took it for dead
                    return Outcome.LOST
        except FileExistsError:
            return Outcome.LOST
        with contextlib.suppress(OSError):
            self.folder.remove(aside)
        self.folder.sync()
        return Outcome.DONE

    @contextlib.contextmanager
    def _aside(self, name: str, data: bytes, *, durable: bool = False) -> Iterator[str]:
        """Write a file beside ``name``, which an error in the block removes; yield what it is called."""
        aside = f"{name}.{os.urandom(8).hex()}.new"
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

    def remove(self, *names: str) -> None:
        """Remove files one after the other; an error is raised once all were tried."""
        failed: OSError | None = None
        for name in names:
            try:
                self.folder.remove(name) if name else self._remove_itself()
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _remove_itself(self) -> None:
        with contextlib.suppress(OSError):  # something is in it
            if self.above is None:
                os.rmdir(self.resolved())
            else:
                self.above.folder.remove_folder(self.path.name)

    def flush(self) -> None:
        """Make the names in the folder durable."""
        self.folder.sync()

    def resolved(self) -> str:
        """Return where the path leads, links followed to their end; found out once for all that follows.

        Raises:
            OSError: it leads to no folder, or cannot be followed.
        """
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
            descriptors.open_folder(self.folder.path)
        self._refreshed = self._clock()


def _await_lock(current: OpenDescriptor, name: str) -> None:
    end = time.monotonic() + timing.current.swap_patience
    while current.lock() is False:
        if time.monotonic() >= end:
            raise BlockingIOError(errno.EAGAIN, f"another process has locked {name!r} for long")
        time.sleep(timing.current.swap_pause)


def _stat_of(version: Version | None) -> os.stat_result | None:
    """Return what the system knew of the file of a version; None where there was none."""
    return version.found if isinstance(version, FileVersion) else None


def entry_of(name: str, found: os.stat_result) -> Entry:
    """Return what the system knows of a name."""
    kind = _KINDS.get(stat.S_IFMT(found.st_mode), Kind.OTHER)
    return Entry(name, found.st_size, found.st_mtime, FileVersion(found), kind, found.st_ino)


def _walk(folder: Folder, above: str, prefix: str) -> Iterator[Entry]:
    for name, kind in folder.scan().items():
        whole = above + name
        if kind is Kind.PLACE and f"{whole}/".startswith(prefix[: len(whole) + 1]):
            with folder.below(name) as place:
                yield from _walk(place, f"{whole}/", prefix)
        elif kind is Kind.FILE and whole.startswith(prefix):
            found = folder.find(name)
            if found is not None and stat.S_ISREG(found.st_mode):  # it may have gone, or become a link, since
                yield entry_of(whole, found)


class PosixTransaction(Transaction):
    """A change of a folder. Its marker is a journal, whose lock says that its writer lives; it becomes the document.

    Args:
        store: the folder.
        name: the document.
    """

    def __init__(self, store: PosixStore, name: str) -> None:
        self._store = store
        self._name = name
        self._made: list[str] = []
        self._locked: Folder | None = None
        self._marker = ""
        self._base: Version | None = None
        self._identity: os.stat_result | None = None
        self._done = False
        self._file = OpenDescriptor()

    @property
    def _folder(self) -> Folder:
        return self._store.folder

    def make(self) -> list[str]:
        """Make the folder and those above it; the name of each is durable before the next one is made.

        One in another open folder is made with the same rights, not durably, and is none of those that are returned.
        """
        self._made = []
        if self._store.above is None:
            with naming(os.fspath(self._store.path), "write"):  # named here: it is nothing that went meanwhile
                target = self._store.resolved()
            self._made = make_folder(target)
        else:
            self._store.above.folder.make_folder(self._store.path.name)
        return self._made

    def lock(self) -> bool:
        """Take the lock of the folder without waiting; False when another saver holds it."""
        self._locked = self._folder
        if not self._locked.lock():
            self._locked = None  # it is that of another change
            return False
        self._require_current()
        return True

    def now(self) -> float:
        """Return the time by which the file system dates files: that of one made for it, where one can be made."""
        name = f".treering-waiting-99999.{os.urandom(8).hex()}.new"  # a name that sweeps know, should it stay
        try:
            with self._folder.create(name) as opened:
                return os.fstat(opened.number).st_mtime
        except OSError:
            return time.time()
        finally:
            with contextlib.suppress(OSError):
                self._folder.remove(name)

    def begin(self, marker: str, base: Version | None) -> None:
        """Make and lock the journal; its name is durable before any data file's.

        Raises:
            OSError: the system refused, or a sweeper on another machine took it for a leftover.
        """
        self._marker, self._base, self._identity, self._done = marker, base, None, False
        if base is not None:
            self._folder.require_writable(self._name)
        old = _stat_of(base)
        self._folder.create(marker, 0o600 if old else 0o666, into=self._file)
        with contextlib.ExitStack() as undo:
            undo.callback(self.abort)  # no journal without its writer
            # Locked for as long as we live: folders of network file systems are locked for one machine only.
            if self._file.lock() is False or self._folder.find(marker) is None:
                raise FileNotFoundError(errno.ENOENT, "another machine removed it before it was locked")
            if old:
                descriptors.take_over(self._file.number, old)
            undo.pop_all()
        if base is None and not self._made:  # the names of those that were made are durable
            with contextlib.suppress(PermissionError):  # a folder above that is not ours
                sync_parent(self._store.resolved())
        self._folder.sync()

    def commit(self, data: bytes) -> Outcome:
        """Write the document into the journal, durably; then link that where nothing was, else rename it over the old.

        The names of the data are durable before the document has its own.
        """
        self._require_current()
        self._prepare(data)
        self._identity = os.fstat(self._file.number)
        if descriptors.fcntl is None:  # Windows renames only what is closed
            self._file.close()
        try:
            self._become_first() if self._base is None else self._rename()
        except FileExistsError:
            return Outcome.LOST
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "another process removed the new files") from error
        return Outcome.DONE

    def committed(self) -> bool:
        """Whether the journal has become the document of the folder.

        Raises:
            OSError: that cannot be known now.
        """
        if self._done or self._identity is None:
            return self._done
        found = self._folder.find(self._name)
        return found is not None and os.path.samestat(found, self._identity)

    def abort(self) -> None:
        """Remove the journal, if it can be, and let go of it."""
        if descriptors.fcntl is None:  # Windows removes only what is closed
            self._file.close()
        if self._marker:
            with contextlib.suppress(OSError):
                self._folder.remove(self._marker)
        self._file.close()

    def close(self) -> None:
        """Let go of the journal and of its lock; give the lock of the folder back."""
        self._file.close()
        if self._locked is not None:
            self._locked.unlock()
            self._locked = None

    def sweep(self, marker: str, data: Sequence[str]) -> Held:
        """Remove what a dead attempt left: its data files, then its journal, which is the proof that they may go.

        What cannot be removed stays, and does not stand in the way of a save.
        """
        folder = self._folder
        # Opened for writing because NFS locks nothing else; without waiting, should it be a pipe.
        flags = os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)
        with contextlib.suppress(OSError), folder.open(marker, flags) as opened:
            if opened.lock() is False:
                return Held.YES
            index = folder.find(self._name)
            # A power cut between the two steps of a commit leaves both names on one file: then it is no leftover.
            if index is None or not os.path.samestat(index, os.fstat(opened.number)):
                for one in data:
                    folder.remove(one)
            if descriptors.fcntl is None:  # Windows removes only what is closed
                opened.close()
            folder.remove(marker)
        return Held.NO

    def delete(self, expected: Version, tombstone: str) -> Outcome:
        """Rename the document."""
        # Two names of one file would both stay, whatever a rename reports.
        self._folder.remove(tombstone)
        try:
            self._folder.replace(self._name, tombstone)
        except OSError:
            # On a network file system it may be done, and only the answer lost.
            if (found := self._store.find(tombstone)) is None or found.version != expected:
                raise
        return Outcome.DONE

    def delete_tombstone(self, found: Entry) -> bool:
        """Remove it under the lock of the file: no request comes late."""
        removed = functools.partial(self._folder.remove, self._name)
        return self._store.change(self._name, found.version, removed, gone=Outcome.DONE) is Outcome.DONE

    def _require_current(self) -> None:
        if not self._folder.is_there():
            raise FileNotFoundError(errno.ENOENT, "another process moved or removed the folder")

    def _prepare(self, data: bytes) -> None:
        write_all(self._file.number, memoryview(data))
        descriptors.sync(self._file.number)
        self._folder.sync()

    def _become_first(self) -> None:
        """Commit where no document is.

        Raises:
            FileExistsError: there is one now.
            OSError: the system refused.
        """
        try:
            self._folder.link(self._marker, self._name)
            self._done = True
        except OSError as error:
            if self.committed():  # done, and only the answer was lost
                pass
            elif error.errno not in NO_LINKS:
                raise
            elif self._folder.find(self._name) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            else:
                # Without hard links the lock alone keeps a second saver out between that look and this step.
                self._rename()
                return
        with contextlib.suppress(OSError):  # as another name of the document it proves nothing any more
            self._folder.remove(self._marker)

    def _rename(self) -> None:
        try:
            self._folder.replace(self._marker, self._name)
            self._done = True
        except OSError:
            if not self.committed():
                raise
