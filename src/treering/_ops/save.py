"""A tree -> a checkpoint's folder, durable when this returns."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import math
import platform
from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from treering import __version__
from treering._arrays.incoming import Progress
from treering._arrays.outgoing import Outgoing, Source, checked_bytes, outgoing
from treering._codec.documents import check_json
from treering._format.blocks import chunks_of_file, file_digest, first_blocks, leaf_bytes
from treering._format.document import data_name, encode_index, parse_index
from treering._format.index import Chunks, DataFile, Index
from treering._format.safetensors import Row, laid_out
from treering._plan.save import LeafLayout, plan_save
from treering._store.checkpoint_folder import CheckpointFolder
from treering._tree.flatten import Flattened, flatten
from treering._values.boxes import Box

__all__ = ["Counted", "index_of", "save_checkpoint"]

# A file is not begun beyond this many bytes: object stores and copies like files of moderate size.
_FILE_BYTES: Final = 32 << 30


def save_checkpoint(
    path: Path, tree: Any, *, metadata: Mapping[str, Any], overwrite: bool, progress: Progress | None
) -> None:
    """Write ``tree`` into the folder ``path``; ``treering.save`` says more."""
    flat = flatten(tree)
    leaves = outgoing(flat)
    check_json(metadata, "metadata")
    files = _split(leaves, _planned(leaves))
    with CheckpointFolder(path, overwrite=overwrite, names_in=_names_in) as folder:
        chunks, headers = laid_out(folder.attempt, flat.keys, leaves.types, leaves.leaf_types, files)
        sizes = _sizes(chunks, headers)
        folder.require_space(sum(sizes))
        starts = first_blocks(chunks)
        checksums = array("Q", bytes(8 * starts[-1]))
        report = Counted(progress, sum(chunks.nbytes))
        entries = []
        for number, (header, size) in enumerate(zip(headers, sizes, strict=True)):
            name = data_name(folder.attempt, number, len(files))
            folder.write_file(name, _content(header, number, chunks, leaves, (checksums, starts), report), size)
            entries.append(DataFile(name=name, nbytes=size, header=len(header), digest=None))
        index = index_of(flat, leaves, chunks, checksums, entries, folder.attempt, folder.superseded, metadata)
        folder.commit(encode_index(_with_digests(index, headers)))


def _names_in(old: bytes) -> list[str]:
    index = parse_index(old)
    return [*(file.name for file in index.files), *index.replaces]


def _versions() -> dict[str, str]:
    """Return who writes, with what, and when: nothing of the machine or its user."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {"by": f"treering {__version__}", "at": now, "python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in ("jax", "numpy", "ml_dtypes")}


def _planned(leaves: Outgoing) -> list[Row]:
    """Return the boxes that this process writes; a leaf that lies in one piece is written as one."""
    rows: list[Row] = [(number, None) for number, sources in leaves.sources.items() if len(sources) == 1]
    numbers = [number for number, sources in leaves.sources.items() if len(sources) > 1]
    (parts,) = plan_save([_layout(leaves, number) for number in numbers], 1).parts
    return rows + [(numbers[part.leaf], part.box) for part in parts]


def _layout(leaves: Outgoing, number: int) -> LeafLayout:
    leaf_type = leaves.types[leaves.leaf_types[number]]
    shape = leaf_type.shape or ()
    boxes = tuple((source.box, (0,)) for source in leaves.sources[number])
    itemsize = leaf_bytes(leaf_type) // math.prod(shape)
    return LeafLayout(nbytes_per_item=itemsize, shape=shape, boxes=boxes)


def _split(leaves: Outgoing, rows: Sequence[Row]) -> list[list[Row]]:
    """Share the rows out to files; one that is larger than a file's limit has a file of its own."""
    files: list[list[Row]] = [[]]
    held = 0
    for row in rows:
        nbytes = _source(leaves, row).data.nbytes
        if held and held + nbytes > _FILE_BYTES:
            files.append([])
            held = 0
        files[-1].append(row)
        held += nbytes
    return files if rows else []


def _source(leaves: Outgoing, row: tuple[int, Box | None]) -> Source:
    number, box = row
    sources = leaves.sources[number]
    return sources[0] if box is None else next(source for source in sources if source.box == box)


def _sizes(chunks: Chunks, headers: Sequence[bytes]) -> list[int]:
    sizes = list(map(len, headers))
    for file, nbytes in zip(chunks.file, chunks.nbytes, strict=True):
        sizes[file] += nbytes
    return sizes


def _content(
    header: bytes,
    file: int,
    chunks: Chunks,
    leaves: Outgoing,
    table: tuple[array[int], Sequence[int]],
    report: Counted,
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a data file; the checksums of its chunks are in the table when it is over."""
    yield header
    checksums, starts = table
    for chunk in chunks_of_file(chunks, file):
        data = _source(leaves, (chunks.leaf[chunk], chunks.box[chunk])).data
        for piece in checked_bytes(data, chunks.block[chunk], checksums, starts[chunk]):
            yield piece
            report(len(piece))


class Counted:
    """Counts bytes for the user's ``progress``."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0

    def __call__(self, count: int) -> None:
        self._done += count
        if self._progress is not None:
            self._progress(self._done, self._total)


def index_of(
    flat: Flattened,
    leaves: Outgoing,
    chunks: Chunks,
    checksums: array[int],
    files: Sequence[DataFile],
    attempt: str,
    replaces: Sequence[str],
    metadata: Mapping[str, Any],
) -> Index:
    """Return the index of what was written."""
    return Index(
        attempt=attempt,
        written=_versions(),
        processes=1,
        meshes=leaves.meshes,
        structure=flat.tokens,
        keys=flat.keys,
        types=leaves.types,
        leaf_types=leaves.leaf_types,
        values=leaves.values,
        chunks=chunks,
        checksums=checksums,
        files=files,
        replaces=replaces,
        metadata=metadata,
    )


def _with_digests(index: Index, headers: Sequence[bytes]) -> Index:
    files = [
        dataclasses.replace(file, digest=file_digest(index, number, header))
        for number, (file, header) in enumerate(zip(index.files, headers, strict=True))
    ]
    return dataclasses.replace(index, files=files)
