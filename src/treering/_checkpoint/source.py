"""A checkpoint or a safetensors file, opened for reading leaves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from treering._arrays.incoming import StoredArrays
from treering._arrays.source import Source
from treering._checkpoint.missing_data import COPY_ALL, is_attempt_there
from treering._format.blocks import file_digest
from treering._format.document import parse_index
from treering._format.findings import describe_lost, describe_size
from treering._format.index import Index
from treering._format.safetensors import parse_safetensors
from treering._store.api import Reader
from treering._store.failures import DataFileMissing, naming_file
from treering._store.open_folder import OpenFolder
from treering._store.resolve import located, open_file
from treering.errors import Busy, Corrupt

# Each try needs a whole overwrite between reading the index and opening the files that it names.
_TRIES: Final = 100
# There each one needs that data go whose grace was over.
_TRIES_IN_BUCKETS: Final = 4
_PIECE_BYTES: Final = 1 << 20


def open_checkpoint(path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool) -> Source:
    """Open a checkpoint; its files stay open until ``files`` closes them.

    Raises:
        NotFound: there is no index.
        Corrupt, Format, Unsupported: the index is damaged, or of another version.
        StoreFailed: the system refuses.
    """
    place = located(path)
    index, opened, flat = _open_files(place)
    for data in opened:
        if data is not None:
            files.enter_context(data)

    def check_header(number: int) -> None:
        if (data := opened[number]) is None:
            raise _lost(index, number, place)
        check_data_file(index, number, data)

    threads = max((data.threads for data in opened if data is not None), default=Reader.threads)
    arrays = StoredArrays(index, opened, check_header, mapped=mapped, threads=threads)
    source = _source(index, arrays, mapped=mapped)
    if flat:
        source.is_current, source.most_tries = lambda: is_attempt_there(place, index.attempt), _TRIES_IN_BUCKETS
    return source


def open_safetensors(path: str | os.PathLike[str], files: contextlib.ExitStack, *, mapped: bool) -> Source:
    """Open a safetensors file; it stays open until ``files`` closes it.

    Raises:
        Corrupt, Format, Unsupported: its header is damaged, or has a dtype that treering does not know.
        StoreFailed: the system refuses.
    """
    file = files.enter_context(open_file(path))
    with naming_file(located(path)):
        index = parse_safetensors(file.size, file.read)
    arrays = StoredArrays(index, [file], lambda _: None, mapped=mapped, threads=file.threads)
    return _source(index, arrays, mapped=mapped)


def _source(index: Index, arrays: StoredArrays, *, mapped: bool) -> Source:
    return Source(index, arrays, structured=index.is_exact, raw_keys=not index.is_exact, mapped=mapped)


def check_data_file(index: Index, number: int, file: Reader) -> None:
    """Compare a data file's size and header with what the index says.

    Raises:
        Corrupt: they differ.
    """
    entry = index.files[number]
    if (wrong := describe_size(file.size, entry.nbytes)) is not None:
        raise Corrupt(f"{os.fspath(file.path)!r} {wrong[1]}")
    if entry.digest is not None and file_digest(index, number, read_pieces(file, entry.header)) != entry.digest:
        hint = "use another copy; `treering verify` lists all damage"
        raise Corrupt(f"the header of {os.fspath(file.path)!r} is damaged: bytes 0 to {entry.header}", hint=hint)


def read_pieces(file: Reader, end: int) -> Iterator[bytes]:
    """Yield the bytes of a file up to ``end``, a piece at a time: how many they are, the file says."""
    for start in range(0, end, _PIECE_BYTES):
        yield file.read(start, min(_PIECE_BYTES, end - start))


def _open_files(path: Path) -> tuple[Index, list[Reader | None], bool]:
    """Read the index and open every file that it names, all of one commit; None for one that is lost.

    Also return whether they are in a bucket, where they may go while they are read.
    """
    attempt = ""
    for _ in range(_TRIES):
        with OpenFolder(path) as folder:
            flat = folder.store.flat
            with naming_file(path / "treering.json"):
                index = parse_index(folder.read_index())
            names = [file.name for file in index.files]
            try:
                found = folder.open_files(names)
            except DataFileMissing:
                if index.attempt == attempt:
                    return index, _those_there(folder, names), flat
                # Perhaps an overwrite committed meanwhile, and its index is there now.
                attempt = index.attempt
                continue
            return index, [found[name] for name in names], flat
    raise Busy(f"{os.fspath(path)!r} was replaced {_TRIES} times while it was being opened", hint="try again")


def _those_there(folder: OpenFolder, names: Sequence[str]) -> list[Reader | None]:
    """Open what is left of a damaged checkpoint: leaves in other files can still be read."""
    with contextlib.ExitStack() as undo:
        files: list[Reader | None] = []
        for name in names:
            try:
                files.append(undo.enter_context(folder.open_files([name])[name]))
            except DataFileMissing:
                files.append(None)
        undo.pop_all()
    return files


def _lost(index: Index, number: int, path: Path) -> Corrupt:
    what = f"{index.files[number].name!r} is missing in {os.fspath(path)!r}{describe_lost(index, number)}"
    return Corrupt(what, hint=COPY_ALL)
