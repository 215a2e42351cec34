"""Reading a leaves directory: its index, and the files of its leaves wherever a save that is under way has them.

Files are opened below an open folder; links are refused.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from treering._codec.key_document import unindexed_attempts
from treering._store.api import LARGEST_DOCUMENT, Kind
from treering._store.failures import missing_error, naming, with_errno
from treering._store.leaves_api import OpenLeaves, SmallFiles, Unlisted
from treering._store.leaves_folder.attempts import has_saver, list_attempts, pending_attempts
from treering._store.posix import folder
from treering._store.posix.folder import Folder, resolved_folder
from treering._store.posix.folder_tree import AS_FOLDER, FolderTree, Parts, first_bytes
from treering._store.posix.reading import LocalFile
from treering._store.posix.store import PosixStore
from treering._values.checkpoint_names import INDEX as CHECKPOINT
from treering._values.checkpoint_names import is_message, is_message_folder
from treering._values.human import shown_names
from treering._values.leaves_names import (
    ATTEMPTS,
    INDEX,
    RECORD,
    ZARRAY,
    attempt_folder,
    is_attempt,
    parts_of,
    staged_leaves,
)
from treering.errors import CorruptError, DataFileMissingError, NotFoundError, StoreError, TreeringError

# Where a save turns a leaf into a branch or the reverse, a file is met where a folder was, or a folder in its place.
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_Content = TypeVar("_Content")


class LeavesFolder(OpenLeaves):
    """A leaves directory on disk, open for reading.

    Folders and files are looked up from the directory that was opened, one part of a path after the other; links are
    refused, but the directory itself may be one.

    Attributes:
        path: the directory as given.

    Raises:
        NotFoundError: nothing is at the path.
        StoreError: a file is there, or the system refuses.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp())
        >>> (path / "w").mkdir()
        >>> _ = (path / "w" / ".zarray").write_bytes(b"{}")
        >>> with LeavesFolder(path) as directory, directory.open("w", ".zarray", None) as file:
        ...     list(directory.unlisted().arrays), file.read(0, file.size)
        (['w'], b'{}')
    """

    rebuilds = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._shown = os.fspath(path)
        with naming(self._shown, "read"):
            self._tree = FolderTree(Folder(resolved_folder(self._shown)), self._shown)
        self.store = PosixStore.over(self._tree.root, path=path)

    def close(self) -> None:
        """Close the directory; files opened from it stay open."""
        self._tree.close()

    def read_index(self) -> bytes:
        """Return the bytes of the index."""
        with naming(self._shown, "read"):
            index = self._tree.read_index(INDEX)
        if index is not None:
            return index
        message = f"there is no leaves directory in {self._shown!r}: it has no {INDEX!r}"
        error = NotFoundError(message, hint=describe_folder(self._tree))
        raise with_errno(error, errno.ENOENT, os.path.join(self._shown, INDEX))

    def open(self, folder: str, name: str, attempt: str | None) -> LocalFile:
        """Open the file ``name`` of the leaf whose folder is ``folder``; the caller closes it."""
        if not name:
            raise CorruptError(f"a file without a name is wanted of {folder!r}")
        *below, name = parts_of(name)
        return self._read((*parts_of(folder), *below), name, attempt, lambda parts: self._tree.open_file(parts, name))

    def read_each(self, wanted: Sequence[SmallFiles]) -> list[list[bytes] | None]:
        """Return what is in some small files of each of several leaves, in half the time that `open` needs."""
        found: list[list[bytes] | None] = []
        for leaf, files, attempt in wanted:
            read = functools.partial(read_small_files, self._tree, files=files)
            some = None
            with contextlib.suppress(DataFileMissingError):
                some = self._read(parts_of(leaf), files[0][0], attempt, read)
            found.append(some)
        return found

    def unlisted(self) -> Unlisted:
        """Return what lies there that an index could list: also what an index that was copied from a bucket says."""
        with naming(self._shown, "read"):
            attempts, index = list_attempts(self._tree), self._tree.read_index(INDEX)
            found = pending_attempts(self._tree, attempts)
        waiting = found | unindexed_attempts(index or b"")
        return Unlisted(waiting, self._records(attempts, found), self._arrays())

    def _records(self, attempts: Sequence[str], pending: Collection[str]) -> Iterator[tuple[str, bytes]]:
        for attempt in attempts:
            with naming(self._shown, "read"), contextlib.suppress(FileNotFoundError):
                if attempt not in pending and has_saver(self._tree, attempt):
                    continue
                with self._tree.open_file(attempt_folder(attempt), RECORD) as file:
                    data = file.read(0, file.size) if file.size <= LARGEST_DOCUMENT else b""
                yield attempt, data

    def _arrays(self) -> Iterator[str]:
        with naming(self._shown, "read"):
            yield from ("/".join(parts) for parts in _folders(self._tree) if parts is not None)

    def _read(self, parts: Parts, name: str, attempt: str | None, read: Callable[[Parts], _Content]) -> _Content:
        """Read among the staged files of an attempt, then at the key path."""
        try:
            # Files only ever go from the first place to the second, so this order misses none.
            if attempt is not None:
                if not is_attempt(attempt):
                    raise CorruptError(f"{attempt!r} is not an attempt")
                with contextlib.suppress(*_ABSENT):
                    return self._read_again((*staged_leaves(attempt), *parts), read)
            return self._read_again(parts, read)
        except _ABSENT as error:
            raise missing_error(self._tree.shown(parts, name), name) from error
        except TreeringError:
            raise
        except OSError as error:
            raise StoreError.of(error, self._tree.shown(parts, name), "read") from error

    def _read_again(self, parts: Parts, read: Callable[[Parts], _Content]) -> _Content:
        try:
            return read(parts)
        except FileNotFoundError:
            # A folder that was opened before may be gone, and another one in its place.
            self._tree.forget(())
            return read(parts)


# No path that a program can name is deeper.
_DEEPEST = 2048
_LOOKED_AT = 200
# Names in a folder that make it a leaves directory of its own, or a group of arrays that another program has there.
_OTHER_ROOTS = frozenset({INDEX, ATTEMPTS, ".zgroup"})


def _folders(tree: FolderTree) -> Iterator[Parts | None]:
    """Yield the way to each array that is met, None for each other folder."""
    waiting: list[Parts] = [()]
    while waiting:
        here = waiting.pop()
        try:
            found = tree.scan(here)
        except (FileNotFoundError, NotADirectoryError):  # it was removed meanwhile
            continue
        if here and not _OTHER_ROOTS.isdisjoint(found):
            continue  # what is in it is not this directory's to list, nor to replace
        if found.get(ZARRAY) is Kind.FILE:
            yield here
            continue
        yield None
        if len(here) < _DEEPEST:
            below = sorted((name for name, kind in found.items() if kind is Kind.PLACE), reverse=True)
            waiting += [(*here, name) for name in below if here or name != ATTEMPTS]


def describe_folder(tree: FolderTree) -> str:
    """Say what a directory without an index holds, and what to do about it."""
    try:
        found = tree.scan(())
        if CHECKPOINT in found:
            return f"it holds {CHECKPOINT!r}: that is a checkpoint, which treering.load reads"
        folders = sorted(name for name, kind in found.items() if kind is Kind.PLACE)
        if ATTEMPTS in folders or any(one is not None for one in itertools.islice(_folders(tree), _LOOKED_AT)):
            return "it holds arrays: treering.leaves.index_leaves makes an index of them"
        others = [name for name in folders if tree.find((name,), INDEX) is not None]
    except (OSError, TreeringError) as error:
        return f"the content cannot be read: {error}"
    if others:
        return f"there are leaves directories in it: {shown_names(others)}"
    names = sorted(name for name in found if not is_message(name) and not is_message_folder(name))
    return f"it holds {shown_names(names)}" if names else "it is empty"


def read_small_files(tree: FolderTree, parts: Parts, files: Sequence[tuple[str, int]]) -> list[bytes]:
    """Return what is in some files of a folder.

    Args:
        tree: what the folder lies in.
        parts: the way to the folder.
        files: their names, each with how many bytes are wanted at most: of a longer file comes one byte more.

    Raises:
        LinkRefusedError: one of them, or a folder on the way, is a link.
        FileNotFoundError: one of them is not there.
        NotADirectoryError: a file is on the way.
        OSError: the system refuses.
    """
    if not (parts and hasattr(os, "O_NOFOLLOW") and folder.FROM_DESCRIPTOR):
        return [tree.read_small(parts, name, most) for name, most in files]
    names = [name for name, _ in files]
    # Opened beside those that the tree keeps: nobody comes back to it.
    with tree.open(parts[:-1], parts[-1], AS_FOLDER) as opened:
        opener = functools.partial(os.open, dir_fd=opened.number)
        try:
            numbers = opened.open_each(opener, names, itertools.repeat(folder.READ | folder.CAREFUL))
        except OSError:
            for name in names:
                tree.refuse_link((*parts, name))
            raise
        return [first_bytes(number, most) for number, (_, most) in zip(numbers, files, strict=True)]
