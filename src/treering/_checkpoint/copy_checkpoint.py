"""Copies of checkpoints and single files from one store to another: streamed, and checked on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from treering._arrays.jobs import Progress, Tally, spans_of_file
from treering._checkpoint.source import check_data_file, is_attempt_there, read_pieces
from treering._checkpoint.transaction import CheckpointFolder
from treering._format.document import INDEX_NAME, data_name, encode_index, parse_index, read_names
from treering._format.index import DataFile, Index, damage_error, damaged_pieces, sign_files, span_range
from treering._format.safetensors import of_attempt, parse_safetensors
from treering._store.api import Reader, Store
from treering._store.failures import naming_file
from treering._store.open_folder import OpenedFiles, OpenFolder
from treering._store.resolve import is_taken, located, open_file, write_file
from treering.errors import BusyError, CorruptError, ExistsError, NotFoundError

_PIECE_BYTES: Final = 16 << 20
"""Less than twice so much of a file is in memory."""


def copy_checkpoint(source: Path, target: Path, *, overwrite: bool, progress: Progress | None = None) -> None:
    """Copy a checkpoint to another folder, which may be in another store. The copy is an attempt of its own.

    Args:
        source: the folder of the checkpoint.
        target: the folder of the copy, made if it is missing.
        overwrite: whether a checkpoint there may be replaced.
        progress: called with the bytes that are copied.

    Raises:
        NotFoundError: there is no checkpoint.
        CorruptError: a byte of it is not the one that was saved; nothing is at the target then.
        BusyError: it was replaced or removed meanwhile, and its data are gone; or as for a save.
        ExistsError, StoreError: as for a save.
    """
    with OpenFolder(source) as folder:
        data = folder.read_index()
        with naming_file(source / INDEX_NAME):
            index = parse_index(data)
        copy_opened(folder.store, index, target, overwrite=overwrite, progress=progress)


def copy_opened(
    source: Store, index: Index, target: Path, *, overwrite: bool, progress: Progress | None = None
) -> None:
    """Copy the checkpoint in an open store, whose index was read; as `copy_checkpoint`."""
    count = len(index.files)
    tally = Tally(sum(file.nbytes for file in index.files), progress)
    folder = CheckpointFolder(target, overwrite=overwrite, names_in=read_names)
    with _telling_loss(source, index.attempt), contextlib.closing(folder) as saving, saving:
        saving.require_space(sum(file.nbytes for file in index.files))
        files: list[DataFile] = []
        headers: list[bytes] = []
        for number, file in enumerate(index.files):
            with source.open_file(file.name) as data:
                check_data_file(index, number, data)
                header = of_attempt(data.read(0, file.header), saving.attempt)
                files.append(dataclasses.replace(file, name=data_name(saving.attempt, number, count), digest=None))
                pieces = itertools.chain([header], checked_pieces(index, number, data))
                saving.write_file(files[-1].name, tally.counted(pieces), file.nbytes)
            headers.append(header)
        copy = dataclasses.replace(
            index,
            attempt=saving.attempt,
            files=files,
            replaces=saving.superseded,
            superseded=saving.waiting,
            origin={"path": os.fspath(source.path), "attempt": index.attempt},
        )
        saving.commit(encode_index(sign_files(copy, headers)))


@contextlib.contextmanager
def _telling_loss(source: Store, attempt: str) -> Iterator[None]:
    """Raise BusyError for data that are gone, or damaged, because another checkpoint replaced theirs."""
    try:
        yield
    except (CorruptError, NotFoundError) as error:
        if is_attempt_there(located(source.path), attempt):
            raise
        what = f"{os.fspath(source.path)!r} was replaced or removed while it was being copied"
        raise BusyError(what, hint="try again") from error


def checked_pieces(index: Index, number: int, file: Reader) -> Iterator[bytes]:
    """Yield the bytes of a data file behind its header, each block compared with its checksum.

    Raises:
        CorruptError: a block is not what was saved.
    """
    starts, at = index.chunks.first_blocks(), index.files[number].header
    for span in spans_of_file(index, number, _PIECE_BYTES):
        begin, count = span_range(index, span)
        yield from read_pieces(file, begin, start=at)  # of no leaf any more: nothing says what they have to be
        data, at = file.read(begin, count), begin + count
        for (chunk, start, _), found, wanted in damaged_pieces(index, starts, span, memoryview(data)):
            block = next(n for n, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other)
            raise damage_error(index, chunk, start // index.chunks.block[chunk] + block, found[block])
        yield data
    yield from read_pieces(file, index.files[number].nbytes, start=at)


def copy_file(
    source: Path, target: Path, *, is_safetensors: bool, overwrite: bool, progress: Progress | None = None
) -> None:
    """Copy a single file as it is; the blocks of one with checksums are compared with them: safetensors has some.

    Raises:
        NotFoundError: nothing is at the source.
        ExistsError: something is at the target.
        CorruptError: a byte is not the one that was saved; nothing has changed at the target then.
        BusyError: it has no checksums, and somebody wrote into it meanwhile; nothing has changed at the target then.
        StoreError: a store refuses.
    """
    if not overwrite and is_taken(target):
        raise ExistsError(f"{os.fspath(target)!r} exists", hint="--overwrite replaces it")
    with open_file(source) as file:
        with naming_file(source):
            index = parse_safetensors(file.size, file.read) if is_safetensors else None
        pieces = _unchanged_pieces(file)
        if index is not None and index.verified:
            pieces = itertools.chain([file.read(0, index.files[0].header)], checked_pieces(index, 0, file))
        write_file(target, Tally(file.size, progress).counted(pieces), file.size, new=not overwrite)


def _unchanged_pieces(file: Reader) -> Iterator[bytes]:
    """Yield the bytes of a file without checksums.

    Raises:
        BusyError: somebody has written into it meanwhile.
    """
    yield from read_pieces(file, file.size)
    if OpenedFiles(file).is_written_into():
        raise BusyError(f"{os.fspath(file.path)!r} was written into while it was being copied", hint="try again")
