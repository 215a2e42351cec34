"""A tree -> a checkpoint's folder, durable when this returns."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treering._arrays.incoming import Progress
from treering._arrays.outgoing import Outgoing, outgoing
from treering._arrays.written import Layout, Written, content
from treering._codec.documents import check_json
from treering._format.blocks import file_digests
from treering._format.document import data_name, encode_index, parse_index
from treering._format.index import DataFile, Index
from treering._format.safetensors import Row, laid_out
from treering._ops.versions import versions
from treering._plan.save import plan_save
from treering._plan.save_files import FILE_BYTES
from treering._store.checkpoint_folder import CheckpointFolder
from treering._tree.flatten import Flattened

__all__ = ["index_of", "names_in", "save_checkpoint", "signed"]


def save_checkpoint(
    path: Path, flat: Flattened, *, metadata: Mapping[str, Any], overwrite: bool, progress: Progress | None
) -> None:
    """Write a tree into the folder ``path``, by this process alone; ``treering.save`` says more."""
    check_json(metadata, "metadata")
    leaves = outgoing(flat)
    rows = _shared_out(leaves, _planned(leaves))
    with CheckpointFolder(path, overwrite=overwrite, names_in=names_in) as folder:
        chunks, headers = laid_out(folder.attempt, flat.keys, leaves.types, leaves.leaf_types, rows)
        layout = Layout(leaves=leaves, chunks=chunks, headers=headers)
        written = Written(layout, progress)
        files = _write(layout, written, folder)
        index = index_of(flat, layout, written.checksums, files, metadata=metadata, attempt=folder.attempt)
        folder.commit(encode_index(signed(index, headers, replaces=folder.superseded)))


def _planned(leaves: Outgoing) -> list[Row]:
    """Return the boxes that this process writes; a leaf that lies in one piece is written as one."""
    rows: list[Row] = [(number, None) for number, sources in leaves.sources.items() if len(sources) == 1]
    numbers = [number for number, sources in leaves.sources.items() if len(sources) > 1]
    (parts,) = plan_save(list(map(leaves.layout_of, numbers)), 1).parts
    return rows + [(numbers[part.leaf], part.box) for part in parts]


def _shared_out(leaves: Outgoing, rows: Sequence[Row]) -> list[list[Row]]:
    """Share the rows out to files; one that is larger than a file's limit has a file of its own."""
    files: list[list[Row]] = [[]]
    held = 0
    for row in rows:
        nbytes = leaves.source_of(*row).data.nbytes
        if held and held + nbytes > FILE_BYTES:
            files.append([])
            held = 0
        files[-1].append(row)
        held += nbytes
    return files if rows else []


def _write(layout: Layout, written: Written, folder: CheckpointFolder) -> list[DataFile]:
    """Write the data files; their content is durable then, their names are with the commit."""
    sizes = layout.sizes()
    folder.require_space(sum(sizes))
    files = []
    for number, (header, size) in enumerate(zip(layout.headers, sizes, strict=True)):
        name = data_name(folder.attempt, number, len(sizes))
        folder.write_file(name, content(header, written.data_of(number)), size)
        files.append(DataFile(name=name, nbytes=size, header=len(header), digest=None))
    return files


def index_of(
    flat: Flattened,
    layout: Layout,
    checksums: array[int],
    files: Sequence[DataFile],
    *,
    metadata: Mapping[str, Any],
    attempt: str,
    processes: int = 1,
) -> Index:
    """Return the index of what was written."""
    leaves = layout.leaves
    return Index(
        attempt=attempt,
        written=versions(),
        processes=processes,
        meshes=leaves.meshes,
        structure=flat.tokens,
        keys=flat.keys,
        types=leaves.types,
        leaf_types=leaves.leaf_types,
        values=leaves.values,
        chunks=layout.chunks,
        checksums=checksums,
        files=files,
        replaces=(),
        metadata=metadata,
    )


def signed(index: Index, headers: Sequence[bytes], *, replaces: Sequence[str]) -> Index:
    """Return the index with the digest of each file."""
    digests = file_digests(index, headers)
    files = [dataclasses.replace(file, digest=found) for file, found in zip(index.files, digests, strict=True)]
    return dataclasses.replace(index, files=files, replaces=replaces)


def names_in(old: bytes) -> list[str]:
    """Return the data files that an index mentions: its own, and those that it superseded."""
    index = parse_index(old)
    return [*(file.name for file in index.files), *index.replaces]
