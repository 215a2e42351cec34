"""A tree -> a checkpoint's folder, durable when this returns."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from treering._arrays.jobs import Progress
from treering._arrays.written import Layout, Written, content
from treering._background.save_job import UNWATCHED, Watch
from treering._checkpoint.plan_cache import TreePlan
from treering._checkpoint.transaction import CheckpointFolder
from treering._checkpoint.versions import versions
from treering._codec.documents import check_json
from treering._format.blocks import file_digests
from treering._format.document import data_name, encode_index, parse_index
from treering._format.index import DataFile, Index
from treering._tree.flatten import Flattened


def save_checkpoint(
    path: Path,
    plan: TreePlan,
    *,
    metadata: Mapping[str, Any],
    overwrite: bool,
    progress: Progress | None,
    watch: Watch = UNWATCHED,
) -> None:
    """Write a planned tree into the folder ``path``, by this process alone; ``treering.save`` says more."""
    check_json(metadata, "metadata")
    watch.move()
    with closing(CheckpointFolder(path, overwrite=overwrite, names_in=names_in)) as folder, folder:
        layout = plan.layout(folder.attempt)
        written = Written(layout, progress)
        files = _write(layout, written, folder)
        index = index_of(plan.flat, layout, written.checksums, files, metadata=metadata, attempt=folder.attempt)
        document = encode_index(signed(index, layout.headers, replaces=folder.superseded))
        watch.claim()
        folder.commit(document)


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
