"""A checkpoint or a safetensors file, opened for reading leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from treering._arrays.incoming import StoredArrays
from treering._arrays.source import Source
from treering._codec.key_document import attempts_in
from treering._format.document import parse_index
from treering._format.index import Index, describe_lost, describe_size, file_digest
from treering._format.safetensors import parse_safetensors
from treering._store.api import Reader
from treering._store.failures import naming_file
from treering._store.open_folder import OpenedFiles, OpenFolder
from treering._store.resolve import located, open_file
from treering._values.processes import Processes
from treering.errors import BusyError, CorruptError, DataFileMissingError, NotFoundError, TreeringError

COPY_ALL: Final = "copy the whole folder, every file that treering.json names"
"""What to do where a file is lost."""


def is_attempt_there(path: Path, attempt: str, *, opened: bool = True) -> bool:
    """Tell whether the checkpoint at a path is still the one of an attempt; True also where nothing can be said.

    Where nothing that is open keeps them, its data go when it was superseded for as long as the grace.

    Args:
        path: the checkpoint.
        attempt: the one that was opened.
        opened: whether all its files were opened before they were read.
    """
    try:
        with OpenFolder(path) as folder:
            return (opened and folder.store.keeps_open) or attempts_in(folder.read_index())[0] == attempt
    except NotFoundError:
        return False
    except TreeringError:
        return True


def require_no_loss(error: Exception) -> None:
    """Raise damage where data are missing that the index still names: not found would say that nothing is there.

    Raises:
        CorruptError: they are.
    """
    if isinstance(error, DataFileMissingError):
        raise CorruptError(error.message, hint=COPY_ALL) from error


# Each try needs a whole overwrite between reading the index and opening the files that it names.
_TRIES: Final = 100
# Where data go while they are read, each one needs that their grace was over.
_MOST_TRIES: Final = 4
_PIECE_BYTES: Final = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SharedIndex:
    """The bytes of an index that process 0 read for all processes that load its checkpoint."""

    data: bytes
    processes: Processes


def open_checkpoint(
    path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool, shared: SharedIndex | None = None
) -> Source:
    """Open a checkpoint; its files stay open until ``files`` closes them.

    Args:
        path: the checkpoint.
        files: closes its files.
        mapped: whether arrays may be maps of the files.
        shared: its index, if it was read for all; a process whose folder lacks the files of this index reads its own.

    Raises:
        NotFoundError: there is no index.
        CorruptError, FormatError, UnsupportedError: the index is damaged, or of another version.
        StoreError: the system refuses.
    """
    place = located(path)
    opened: Sequence[Reader | None]
    if (found := _open_share(place, files, shared) if shared is not None else None) is not None:
        index, opened, lasts = found
    else:
        index, opened, lasts = _open_files(place, files)

    def check_header(number: int) -> None:
        if (data := opened[number]) is None:
            what = f"{index.files[number].name!r} is missing in {os.fspath(place)!r}{describe_lost(index, number)}"
            raise CorruptError(what, hint=COPY_ALL)
        check_data_file(index, number, data)

    own = opened.own if isinstance(opened, _FilesOnDemand) else range(len(opened))
    threads = max((data.threads for data in map(opened.__getitem__, own) if data is not None), default=Reader.threads)
    arrays = StoredArrays(index, opened, check_header, mapped=mapped, threads=threads, checked=own)
    source = _source(index, arrays, mapped=mapped)
    if not lasts or isinstance(opened, _FilesOnDemand):
        source.is_current = lambda: is_attempt_there(place, index.attempt, opened=False)
        source.most_tries = source.most_tries if lasts else _MOST_TRIES
    return source


def open_safetensors(path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool) -> Source:
    """Open a safetensors file; it stays open until ``files`` closes it.

    Raises:
        CorruptError, FormatError, UnsupportedError: its header is damaged, or has a dtype that treering does not know.
        StoreError: the system refuses.
    """
    file = files.enter_context(open_file(path))
    with naming_file(located(path)):
        index = parse_safetensors(file.size, file.read)
    arrays = StoredArrays(index, [file], lambda _: None, mapped=mapped, threads=file.threads)
    return _source(index, arrays, mapped=mapped, opened=None if index.verified else OpenedFiles(file))


def _source(index: Index, arrays: StoredArrays, *, mapped: bool, opened: OpenedFiles | None = None) -> Source:
    exact = index.is_exact
    return Source(index, arrays, structured=exact, raw_keys=not exact, mapped=mapped, opened=opened)


def check_data_file(index: Index, number: int, file: Reader) -> None:
    """Compare a data file's size and header with what the index says.

    Raises:
        CorruptError: they differ.
    """
    entry = index.files[number]
    if (wrong := describe_size(file.size, entry.nbytes)) is not None:
        raise CorruptError(f"{os.fspath(file.path)!r} {wrong[1]}")
    if entry.digest is not None and file_digest(index, number, read_pieces(file, entry.header)) != entry.digest:
        hint = "use another copy; `treering verify` lists all damage"
        raise CorruptError(f"the header of {os.fspath(file.path)!r} is damaged: bytes 0 to {entry.header}", hint=hint)


def read_pieces(file: Reader, end: int, *, start: int = 0) -> Iterator[bytes]:
    """Yield the bytes of a file up to ``end``, a piece at a time: how many they are, the file says."""
    for at in range(start, end, _PIECE_BYTES):
        yield file.read(at, min(_PIECE_BYTES, end - at))


def _open_files(path: Path, files: contextlib.ExitStack) -> tuple[Index, list[Reader | None], bool]:
    """Read the index and open every file that it names, all of one commit; None for one that is lost.

    Also return whether they stay whole while they are read, whatever becomes of their names. Of a damaged checkpoint
    leaves in the files that are left can still be read.
    """
    attempt = ""
    for _ in range(_TRIES):
        with OpenFolder(path) as folder:
            lasts = folder.store.keeps_open
            with naming_file(path / "treering.json"):
                index = parse_index(folder.read_index())
            names = [file.name for file in index.files]
            try:
                found = folder.open_files(names)
            except DataFileMissingError:
                if index.attempt == attempt:
                    return index, [_open_if_there(folder, name, files) for name in names], lasts
                # Perhaps an overwrite committed meanwhile, and its index is there now.
                attempt = index.attempt
                continue
            return index, [files.enter_context(found[name]) for name in names], lasts
    raise BusyError(f"{os.fspath(path)!r} was replaced {_TRIES} times while it was being opened", hint="try again")


class _FilesOnDemand(Sequence["Reader | None"]):
    """The data files of an index that was read for all processes: each is opened when it is first asked for.

    Args:
        folder: the checkpoint's folder.
        names: the data files.
        files: closes them.
        processes: those that load it.

    Attributes:
        own: numbers of the files that this process opens and checks, whatever it reads.
    """

    def __init__(
        self, folder: OpenFolder, names: Sequence[str], files: contextlib.ExitStack, processes: Processes
    ) -> None:
        self._folder = folder
        self._names = names
        self._files = files
        self._opened: dict[int, Reader | None] = {}
        # One at least, so that another folder is found.
        self.own = range(processes.this % max(1, len(names)), len(names), processes.count)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, number: Any) -> Any:
        if number not in self._opened:
            self._opened[number] = _open_if_there(self._folder, self._names[number], self._files)
        return self._opened[number]


def _open_share(
    path: Path, files: contextlib.ExitStack, shared: SharedIndex
) -> tuple[Index, Sequence[Reader | None], bool] | None:
    """Open the files of this process's share; None where one is not there: another folder, a newer state, or damage."""
    folder = files.enter_context(OpenFolder(path))
    with naming_file(path / "treering.json"):
        index = parse_index(shared.data)
    found = _FilesOnDemand(folder, [file.name for file in index.files], files, shared.processes)
    return None if any(found[number] is None for number in found.own) else (index, found, folder.store.keeps_open)


def _open_if_there(folder: OpenFolder, name: str, files: contextlib.ExitStack) -> Reader | None:
    """Open a file, which ``files`` closes; None where it is lost."""
    with contextlib.suppress(DataFileMissingError):
        return files.enter_context(folder.open_files([name])[name])
    return None
