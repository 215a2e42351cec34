"""Reading a folder: its index, the data files that it names, from nowhere else, and which versions were opened."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Final

from treering._codec.documents import is_whole
from treering._codec.key_document import HEAD_BYTES, SMALL_TOMBSTONE, is_tombstone, is_tombstone_size
from treering._store.api import LARGEST_DOCUMENT, Closable, Document, Entry, Reader, Store, Version, open_below
from treering._store.failures import missing_error, naming, with_errno
from treering._store.posix.reading import LocalFile
from treering._store.posix.store import PosixStore
from treering._store.resolve import absolute, find_at, is_on_disk, open_file, opened_store
from treering._values.checkpoint_names import INDEX, attempt_of_tombstone
from treering._values.human import pluralize, shown_names
from treering.errors import BusyError, CorruptError, DataFileMissingError, FormatError, LinkRefusedError, NotFoundError

_TRIES = 20
_NO_NAMES = frozenset({"", ".", ".."})


class OpenFolder(Closable):
    """A checkpoint's folder open for reading, a context manager. It takes no lock.

    Everything is looked up in the folder that was opened, links there are refused, and files once open stay whole
    whatever a later save does.

    Attributes:
        path: the folder.
        store: the place that was opened.

    Raises:
        NotFoundError: nothing is at the path.
        StoreError: a file is there, or the system refuses.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (path / "treering.json").write_bytes(b"{}")
        >>> with OpenFolder(path) as folder:
        ...     folder.read_index()
        b'{}'
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with naming(os.fspath(path), "read"):
            self.store = opened_store(path)

    def close(self) -> None:
        """Close the folder; files opened from it stay open."""
        self.store.close()

    def read_index(self) -> bytes:
        """Return the bytes of the index.

        Raises:
            NotFoundError: there is none; the hint says what is there instead.
            LinkRefusedError: it is a link.
            FormatError: it is larger than any index.
            StoreError: the system refuses.
        """
        try:
            return index_document(self.store).data
        except NotFoundError as error:
            says = f"its {INDEX!r} says so" if isinstance(error, IndexRemovedError) else f"it has no {INDEX!r}"
            message = f"there is no checkpoint in {os.fspath(self.path)!r}: {says}"
            raise with_errno(NotFoundError(message, hint=self._what_is_there()), errno.ENOENT, self.path) from error

    def open_files(self, names: Iterable[str]) -> dict[str, Reader]:
        """Open files by name, all or none; the caller closes them.

        Raises:
            DataFileMissingError: one is not there.
            LinkRefusedError: one is a link.
            CorruptError: a name leads elsewhere.
            StoreError: the system refuses.
        """
        with contextlib.ExitStack() as undo:
            files = {name: undo.enter_context(self._open(name)) for name in dict.fromkeys(names)}
            undo.pop_all()
        return files

    def _open(self, name: str) -> Reader:
        if name in _NO_NAMES or not {"/", "\\", "\0", ":"}.isdisjoint(name):
            raise CorruptError(f"{os.fspath(self.path)!r} names a file outside of it: {name!r}")
        try:
            return self.store.open_file(name)
        except NotFoundError as error:
            what = f"{name!r} is missing in {os.fspath(self.path)!r}"
            raise missing_error(os.fspath(self.path / name), name, what) from error

    def _holds_index(self, name: str) -> bool:
        with contextlib.suppress(OSError):
            return find_index(self.store, name) is not None
        return False

    def _what_is_there(self) -> str:
        """Say what is in the folder, checkpoints first."""
        try:
            names = sorted(self.store.names())
        except OSError as error:
            return f"the content cannot be read: {error.strerror}"
        if not names:
            return "it is empty"
        if checkpoints := [name for name in names if self._holds_index(name)]:
            return f"there are checkpoints in it: {shown_names(checkpoints)}"
        if any(attempt_of_tombstone(name) for name in names):
            return "it holds the remains of one that was removed"
        if any(name.startswith(f".{INDEX}.") for name in names):
            return "it holds the files of a save that is running or was interrupted; try again"
        if INDEX in names:
            return "it holds the remains of one that was removed, or of a save that was interrupted"
        return f"it holds {shown_names(names)}"


class IndexRemovedError(NotFoundError):
    """A tombstone is in the place of the index."""


def find_index(store: Store, place: str = "") -> Entry | None:
    """Return what is known of the index in an open store; None where there is none, or a tombstone in its place.

    Args:
        store: the store.
        place: the name of a place in it, whose index is meant.

    Raises:
        OSError: the system refuses.
    """
    found = store.find(f"{place}/{INDEX}" if place else INDEX)
    return None if found is None or is_removed(store, found, place) else found


def index_heads(store: Store, places: Sequence[str]) -> list[tuple[int, bytes] | None]:
    """Return the sizes and the first bytes of many indexes in an open store; None where opening each has to say it.

    A place that was a folder when the caller listed it, and became a link since, is read where the link leads.
    """
    if not isinstance(store, PosixStore):
        return [None] * len(places)
    found = store.folder.read_each([f"{place}/{INDEX}" for place in places], HEAD_BYTES)
    return [None if each is None or is_tombstone(each[1]) else each for each in found]


def find_index_at(path: Path, *, follow: bool = True) -> Entry | None:
    """Return what is known of the index in the folder at a path, as `find_index` does.

    Raises:
        StoreError: the store refuses to say.
    """
    found = find_at(path / INDEX, follow=follow)
    if found is None or not found.is_file or not is_tombstone_size(found.size):
        return found
    try:
        with open_file(path / INDEX) as file:
            return None if is_tombstone(file.read(0, min(HEAD_BYTES, file.size))) else found
    except NotFoundError:
        return None
    except (CorruptError, LinkRefusedError):  # it is changing, or none of ours: whoever reads it says so
        return found


def is_removed(store: Store, found: Entry, place: str = "") -> bool:
    """Tell whether what was found in the place of an index is a tombstone: most are known by their size.

    Args:
        store: the store.
        found: what was found.
        place: the name of a place in the store, in which it was found.

    Raises:
        OSError: the system refuses.
    """
    if not found.is_file or not is_tombstone_size(found.size):
        return False
    if store.longest_delay and found.size == SMALL_TOMBSTONE:  # no index there has this size
        return True
    with contextlib.suppress(LinkRefusedError):  # whoever reads it says so
        with open_below(store, place) if place else contextlib.nullcontext(store) as there:
            head = there.read(INDEX, HEAD_BYTES)
        return head is None or is_tombstone(head.data)
    return False


def index_document(store: Store, name: str = INDEX) -> Document:
    """Return the index in an open store.

    Args:
        store: the place.
        name: its name there; one that was removed has another.

    Raises:
        NotFoundError: there is none, or `IndexRemovedError`: there is a tombstone.
        LinkRefusedError: it is a link.
        FormatError: it is larger than any index.
        BusyError: it is replaced again and again.
        StoreError: the system refuses.
    """
    found = key_content(store, name)
    if is_tombstone(found.data) and is_whole(found.data):
        raise with_errno(IndexRemovedError("a tombstone is in the place of the index"), errno.ENOENT, store.path / name)
    return found


def key_content(store: Store, name: str = INDEX) -> Document:
    """Return the index in an open store, or the tombstone in its place; raises as `index_document` does."""
    for _ in range(_TRIES):
        # In a bucket a long one is read by several requests, and may be replaced between them.
        with contextlib.suppress(DataFileMissingError), store.open_file(name) as file:
            if file.size > LARGEST_DOCUMENT:
                shown = os.fspath(store.path / name)
                raise FormatError(f"{shown!r} has {pluralize(file.size, 'bytes')}: no index is that large")
            data = file.read(0, file.size)
            if not is_whole(data):
                room = bytearray(file.size)
                data = bytes(room) if file.refetch([(0, memoryview(room))]) else data
            return Document(data, file.version)
    shown = os.fspath(store.path / name)
    raise BusyError(f"{shown!r} was replaced {_TRIES} times while it was being read", hint="try again")


# So many requests for one file each are made before all are listed.
_ASKED_FOR: Final = 8


class OpenedFiles:
    """The files of an opened tree, and which versions of them were opened. Any thread may ask.

    Args:
        files: those that stay open.
        folder: where further ones lie, of which there may be thousands.

    Attributes:
        folder: the same.
    """

    def __init__(self, *files: Reader, folder: Path | None = None) -> None:
        self._only = files[0] if len(files) == 1 else None
        self.folder = folder
        self._versions: dict[PurePath, Version] = {}
        for file in files:
            self.add(file.path, file)

    def add(self, path: PurePath, file: Reader) -> None:
        """Note which version of a file was opened.

        Raises:
            CorruptError: it is another one than when the file was opened for the first time.
        """
        version = file.version
        path = absolute(path) if is_on_disk(path) else path  # the program may change its current folder
        if (known := self._versions.setdefault(path, version)) is not version and known != version:
            raise CorruptError(f"{os.fspath(path)!r} was replaced while the tree was being read", hint="read it again")

    def is_current(self) -> bool:
        """Tell whether each file is the one that was opened, and stands at its path; what cannot change counts as so.

        Raises:
            StoreError: the store refuses to say.
        """
        if self._only is not None and not is_on_disk(self._only.path):
            return True  # each request is for the version that was opened
        if self.folder is not None and not is_on_disk(self.folder) and len(self._versions) > _ASKED_FOR:
            # A web server lists nothing, and a bucket may deny it.
            with contextlib.suppress(OSError), opened_store(self.folder) as store:
                listed = {os.fspath(self.folder / found.name): found.version for found in store.list()}
                return all(listed.get(os.fspath(path)) == version for path, version in self._versions.items())
        for path, version in self._versions.items():
            entry = find_at(path)
            if entry is None or entry.version != version:
                return False
        return True

    def is_whole(self) -> bool:
        """Tell whether all was read from one open file, into which nobody has written, whatever has its name now."""
        return isinstance(self._only, LocalFile) and self._only.is_whole()

    def is_written_into(self) -> bool:
        """Tell whether all is read from one open file, into which somebody has written since."""
        return isinstance(self._only, LocalFile) and not self._only.is_whole()

    def tokens(self) -> list[str]:
        """Return a text for each file of which the store says on every host alike which version was opened."""
        texts = ((path, getattr(version, "text", None)) for path, version in self._versions.items())
        return sorted(f"{os.fspath(path)}\0{text()}" for path, text in texts if text is not None)
