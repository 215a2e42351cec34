"""Files of a leaves directory written aside, among the staged files of one attempt.

Process 0, or a process alone, stages in `treering._store.leaves_folder.staged_leaves`, the other processes of a job in
`treering._store.leaves_folder.staged_files`. What was staged or moved is made durable by one call for the whole file
system, or by one for each file and folder.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from treering._store.api import Closable
from treering._store.crew import FirstError, work_together
from treering._store.failures import LinkRefusedError, naming
from treering._store.pieces import Buffer
from treering._store.posix import descriptors
from treering._store.posix.folder import Folder, resolved_folder
from treering._store.posix.folder_tree import FolderTree, Parts
from treering._store.posix.store import PosixStore
from treering._store.posix.writing import write_content
from treering._values import timing
from treering._values.leaves_names import ATTEMPTS, parts_of, staged_leaves
from treering.errors import UnsupportedError

# The disk begins with the end of such a file at once; all files are made durable together, before the commit.
_BEGUN_EARLY = 1 << 20
# No system that this is for takes a longer path, the name of a chunk included.
_LONGEST_PATH = 4095
_CHUNK_NAME_BYTES = 255


class StagedFiles(Closable):
    """The files that this process writes into the folder of an attempt. Any thread may write.

    Attributes:
        attempt: 16 hexadecimal digits, different for each save.
    """

    attempt: str

    def __init__(self, shown: str) -> None:
        """Nothing is open yet; `_open_at` says where."""
        self._shown = shown
        self._lock = threading.Lock()
        self._names: dict[Parts, list[str]] = {}
        self._folder: Folder | None = None

    def close(self) -> None:
        """Give everything back; the files stay. May be called twice."""
        folder, self._folder = self._folder, None
        if folder is not None:
            self._tree.close()
            folder.close()

    def _open_at(self, folder: Folder, tree: FolderTree, attempt: str) -> None:
        self._folder, self._tree, self.attempt = folder, tree, attempt
        self._staged = staged_leaves(attempt)
        self._room = _LONGEST_PATH - len(os.fsencode(folder.path)) - len("//".join(self._staged)) - _CHUNK_NAME_BYTES

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit.

        Raises:
            StoreError: the file system has fewer than ``size`` bytes free.
        """
        with naming(self._shown, "write"):
            self._open_folder.require_space(size)

    def write_small(self, folder: str, files: Sequence[tuple[str, bytes]]) -> None:
        """Make the folder of a leaf and its files, in few system calls: for thousands of small leaves.

        Raises:
            StoreError: the system refused.
            UnsupportedError: the folder's path is longer than the system takes.
        """
        with naming(self._shown, "write"):
            parts = self._note(folder, [name for name, _ in files])
            staged = self._staged + parts
            try:
                self._tree.fill(staged, files)
            except FileNotFoundError:
                self._tree.make(staged)
                self._tree.fill(staged, files)

    def write_file(self, folder: str, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """Write one file of a leaf as the concatenation of ``buffers``; from several threads if you like.

        Args:
            folder: the folder of the leaf, made if it is missing.
            name: a file in it that is not there yet.
            buffers: C-contiguous buffers of any item type, asked for one after the other.
            size: how many bytes they hold together.

        Raises:
            StoreError: the system refused, or the buffers hold another number of bytes.
            UnsupportedError: the folder's path is longer than the system takes.
        """
        with naming(self._shown, "write"):
            parts = self._note(folder, [name])
            self._tree.make((*self._staged, *parts))
            with self._tree.create((*self._staged, *parts), name) as opened:
                write_content(opened.number, buffers, size)
                if size >= _BEGUN_EARLY:
                    descriptors.start_writeback(opened.number, 0, size)

    @property
    def store(self) -> PosixStore:
        """The directory itself, for the messages of processes."""
        return PosixStore.over(self._open_folder)

    @property
    def _open_folder(self) -> Folder:
        if self._folder is None:
            raise RuntimeError("this save has ended")
        return self._folder

    def make_durable(self) -> None:
        """Make what this process has written durable, and the names of all folders on the way to it.

        Raises:
            StoreError: the system refused; it is not asked again.
        """
        with naming(self._shown, "write"):
            sync_written(self._open_folder, self._tree, self._staged, self._names)

    def _note(self, folder: str, names: list[str]) -> Parts:
        """Remember what is written, to see before the commit whether its place is free; return the folder's parts."""
        parts = self._parts_of(folder)
        with self._lock:
            self._names.setdefault(parts, []).extend(names)
        return parts

    def _parts_of(self, folder: str) -> Parts:
        _ = self._open_folder  # refuses a save that has ended
        parts = parts_of(folder)
        # No character takes more than four bytes.
        if len(folder) * 4 > self._room and len(os.fsencode(folder)) > self._room:
            shown = f"{folder[:80]}[{len(folder) - 120} characters left out]{folder[-40:]}"
            raise UnsupportedError(f"the folder {shown!r} of a leaf has a longer path than a system takes")
        return parts


class JoinedLeaves(StagedFiles):
    """What this process writes for an attempt whose folder process 0 has made and locked. A context manager.

    Args:
        path: the directory.
        attempt: the attempt.

    Raises:
        StoreError: the system refused, or the folder of the attempt is not there.
        LinkRefusedError: ``.treering`` there is a link.
    """

    def __init__(self, path: Path, attempt: str) -> None:
        super().__init__(os.fspath(path))
        with naming(self._shown, "write"), contextlib.ExitStack() as undo:
            folder = undo.enter_context(Folder(resolved_folder(self._shown)))
            tree = FolderTree(folder, self._shown)
            undo.callback(tree.close)
            self._open_at(folder, tree, attempt)
            self._found = self._await_attempt()
            undo.pop_all()

    def path_of(self, folder: str) -> str:
        """Return the absolute path of a leaf's staged folder, for a manager of jax to write to.

        Raises:
            UnsupportedError: the folder's path is longer than the system takes.
        """
        return os.path.join(self._open_folder.path, *self._staged, *self._parts_of(folder))

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

    def withdraw(self) -> None:
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


_THREADS = 4
_ONE_BY_ONE = 32
_CONTENT = (os.O_RDWR if os.name == "nt" else os.O_RDONLY) | getattr(os, "O_NONBLOCK", 0)


def sync_written(folder: Folder, tree: FolderTree, parts: Parts, written: Mapping[Parts, Sequence[str]]) -> None:
    """Make some files in a folder durable, and the names of that folder and of all folders on the way to them.

    Args:
        folder: the directory, open since before anything was written.
        tree: the same.
        parts: where in it.
        written: names of files by folder, below ``parts``.

    Raises:
        OSError: the system refused; it is not asked again.
    """
    if folder.descriptor is not None and descriptors.sync_file_system(folder.descriptor):
        return
    jobs: deque[tuple[Parts, str | None]] = deque()
    folders: dict[Parts, None] = {parts[:count]: None for count in range(len(parts), -1, -1)}
    for below, names in written.items():
        here = (*parts, *below)
        jobs.extend((here, name) for name in names)
        folders.update((here[:count], None) for count in range(len(here), -1, -1))
    jobs.extend((here, None) for here in folders)
    _sync(tree, jobs)


def sync_folders(folder: Folder, tree: FolderTree, folders: Iterable[Parts]) -> None:
    """Make the names in those folders durable.

    Raises:
        OSError: the system refused; it is not asked again.
    """
    jobs: deque[tuple[Parts, str | None]] = deque((parts, None) for parts in folders)
    if len(jobs) > _ONE_BY_ONE and folder.descriptor is not None and descriptors.sync_file_system(folder.descriptor):
        return
    _sync(tree, jobs)


def _sync(tree: FolderTree, jobs: deque[tuple[Parts, str | None]]) -> None:
    failure = FirstError()

    def work() -> None:
        while failure.error is None:
            with failure:
                try:
                    parts, name = jobs.popleft()
                except IndexError:
                    return
                if name is None:
                    tree.sync(parts)
                    continue
                with tree.open(parts, name, _CONTENT) as opened:
                    descriptors.sync(opened.number)

    work_together(work, _THREADS if len(jobs) > _ONE_BY_ONE else 0)
    failure.reraise()
