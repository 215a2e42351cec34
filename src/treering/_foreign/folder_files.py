"""Where the arrays of another program lie: in which bytes of which files, all inside of one folder."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from treering._codec.documents import decode_text, parse_json
from treering._codec.zarr import ZarrArray
from treering._format.index import DataFile, LeafType
from treering._store.api import remembered, require_range
from treering._store.failures import naming
from treering._store.open_folder import OpenedFiles
from treering._store.resolve import find_at, is_seen, names_at, open_file, opened_store, resolved
from treering._values.boxes import Box
from treering._values.human import pluralize
from treering.errors import CorruptError, NotFoundError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from treering._store.api import Reader

ANOTHER_COPY: Final = "use another copy of the checkpoint"
"""What to do about one that is damaged or incomplete."""

_MOST_OPEN: Final = 128
_LARGEST_DOCUMENT: Final = 256 << 20


class ByteRange(NamedTuple):
    """Bytes that can be read by place: those of a file, a part of one, or some in memory."""

    size: int
    """How many there are."""
    read: Callable[[int, int], bytes]
    """Returns so many bytes from an offset on; ``CorruptError`` where there are fewer. Any thread may call it."""
    file: str | None = None
    """Name of the file in which they lie as they are, if there is one."""
    offset: int = 0
    """Where they begin in it."""


Fetch: TypeAlias = "Callable[[int], bytes | ByteRange | None]"
"""Returns the bytes of a chunk by its number, or where they are; None where there is none. Any thread may call it."""


class GridLeaf(NamedTuple):
    """A leaf whose chunks have to be decoded."""

    layout: ZarrArray
    """Its shape, the shape of a chunk, and how the bytes of a chunk are encoded, in the terms of zarr v2."""
    fetch: Fetch
    """Returns the bytes of a chunk by its number in the grid."""
    absent_is_zero: bool = False
    """Whether a chunk that is not there is one of zeros, and not lost."""
    located: bool = False
    """Whether it is known where the chunks lie, without a look at any file."""


class ForeignLeaf(NamedTuple):
    """One leaf of a foreign tree."""

    type: LeafType
    """What it is."""
    value: Any = None
    """Its value, of a kind that is no array."""
    pieces: Sequence[tuple[Box | None, int, int]] = ()
    """Box, number of the file and offset of each part that lies raw; a leaf that has a grid has none."""
    grid: GridLeaf | None = None
    """How its chunks are decoded."""
    crc: tuple[int, int] | None = None
    """The CRC-32 of what is before a leaf that lies raw in one piece, and the CRC-32 of that and the leaf."""


class FolderFiles:
    """The files below a folder by their names, which are relative and lead nowhere else, by no link either.

    Args:
        place: the folder.
        files: closes those that stay open.

    Attributes:
        opened: those that were opened.
        threads: how many threads read faster than fewer.
        nbytes: bytes of the files that stayed open.
    """

    def __init__(self, place: Path, files: contextlib.ExitStack) -> None:
        self.place = place
        self._inside = resolved(place)
        self._open: dict[str, Reader] = {}
        self._files = files
        self._lock = threading.Lock()
        self._rows: dict[str, tuple[int, int]] = {}
        self._listed: dict[str, frozenset[str]] = {}
        self.opened = OpenedFiles(folder=place)
        self.threads = 2
        self.nbytes = 0

    def has(self, name: str) -> bool:
        """Tell whether anything is known to be there under a name; raises as `find`, but for the store."""
        return not self._is_unlisted(name) and is_seen(self._place(name))

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, sorted; none where it is not there."""
        place = self._place(folder) if folder else self.place
        found = remembered((FolderFiles.names, place), lambda: sorted(names_at(place)))
        if found:  # else perhaps nobody may list it
            self._listed[folder] = frozenset(found)
        return found

    def list_names(self, folder: str = "") -> list[str]:
        """Return the names in a folder, sorted; none in a file.

        Raises:
            NotFoundError: it is not there, where the store can tell.
            CorruptError: the name leads out of the folder.
            StoreError: the store refuses.
        """
        place = self._place(folder) if folder else self.place
        is_file = contextlib.suppress(NotADirectoryError)
        with naming(os.fspath(place), "read"), is_file, opened_store(place, quick=True) as store:
            return sorted(store.names())
        return []

    def find(self, name: str) -> ByteRange | None:
        """Return the bytes of a file; None where there is none.

        Raises:
            CorruptError: the name leads out of the folder.
            StoreError: the store refuses.
        """
        try:
            with self.open_file(name) as file:
                return ByteRange(file.size, functools.partial(self.read, name), name)
        except NotFoundError:
            return None

    def read(self, name: str, offset: int, count: int) -> bytes:
        """Return bytes of a file.

        Raises:
            NotFoundError: it is not there.
            CorruptError: it is shorter, or the name leads out of the folder.
            StoreError: the store refuses.
        """
        with self.open_file(name) as file:
            return file.read(offset, count)

    def modified(self, name: str) -> float:
        """Return when a file was written, in POSIX seconds; 0 where there is none.

        Raises:
            StoreError: the store refuses.
        """
        found = find_at(self._place(name))
        return 0.0 if found is None else found.modified

    def document(self, name: str, *, finite: bool = True) -> Any:
        """Return the value of a JSON file; None where there is none. ``finite`` is as for ``parse_json``.

        Raises:
            CorruptError: it is no JSON, or too large.
            StoreError: the store refuses.
        """
        try:
            opened = self.open_file(name)
        except NotFoundError:
            return None
        with opened as file:
            if file.size > _LARGEST_DOCUMENT:
                raise CorruptError(f"{name} has {pluralize(file.size, 'bytes')}, more than any tree needs")
            data = file.read(0, file.size)
        return parse_json(decode_text(data, name), name, finite=finite)

    def number_of(self, found: ByteRange) -> int:
        """Return the number that the file of a range has in `data_files`."""
        number, end = self._rows.get(found.file or "", (len(self._rows), 0))
        self._rows[found.file or ""] = number, max(end, found.offset + found.size)
        return number

    def data_files(self) -> tuple[list[DataFile], list[FolderFile]]:
        """Return the files that have a number: as an index has them, up to the last range, and what reads them."""
        ends = [(name, end) for name, (_, end) in self._rows.items()]
        rows = [DataFile(name=name, nbytes=end, header=0, digest=None) for name, end in ends]
        return rows, [FolderFile(self, name, end) for name, end in ends]

    def open_file(self, name: str) -> contextlib.AbstractContextManager[Reader]:
        """Open a file for a block; the first ones stay open behind it.

        Raises:
            NotFoundError: it is not there.
            CorruptError: the name leads out of the folder, or another file had it before.
            StoreError: the store refuses.
        """
        if (kept := self._open.get(name)) is not None:
            return contextlib.nullcontext(kept)
        if self._is_unlisted(name):
            raise NotFoundError(f"there is no {name!r:.200} in {os.fspath(self.place)!r}")
        place = self._place(name)
        file = open_file(place)
        try:
            self.opened.add(place, file)
        except CorruptError:
            file.close()
            raise
        with self._lock:
            if len(self._open) >= _MOST_OPEN or name in self._open:
                return file
            self._open[name] = self._files.enter_context(file)
            self.threads = max(self.threads, file.threads)
            self.nbytes += file.size
        return contextlib.nullcontext(file)

    def _is_unlisted(self, name: str) -> bool:
        """Tell whether the names in its folder were listed, and it is none of them."""
        folder, _, last = name.rpartition("/")
        return folder in self._listed and last not in self._listed[folder]

    def _place(self, name: str) -> Path:
        parts = name.split("/")
        if "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
            raise CorruptError(f"the name {name!r:.200} leads out of the folder")
        place = self.place.joinpath(*parts)
        if not resolved(place).is_relative_to(self._inside):
            hint = "treering follows no link out of a checkpoint"
            raise CorruptError(f"{name!r:.200} is a link that leads out of the folder", hint=hint)
        return place


class FolderFile:
    """A file of a folder with arrays that lie raw in it; it is opened when one is read."""

    def __init__(self, files: FolderFiles, name: str, end: int) -> None:
        self._files = files
        self._name = name
        self._end = end

    def read_into(self, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes from its offset on."""
        with self._files.open_file(self._name) as file:
            file.read_into(jobs)

    def refetch(self, _jobs: Sequence[tuple[int, memoryview]]) -> bool:
        """Return False: there are no checksums."""
        return False

    def map(self) -> ReadableBuffer:
        """Map the whole file, read-only."""
        with self._files.open_file(self._name) as file:
            require_range(file, 0, self._end)
            return file.map()
