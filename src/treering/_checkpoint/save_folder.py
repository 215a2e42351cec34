"""A planned tree -> a checkpoint's folder, durable when this returns."""

from __future__ import annotations

import dataclasses
import datetime
import platform
from array import array
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import ml_dtypes
import numpy as np

from treering import __version__
from treering._arrays.written import SaveData, SaveLayout, content
from treering._background.save_job import UNWATCHED, Watch
from treering._checkpoint.plan_cache import TreePlan
from treering._checkpoint.save_options import SaveOptions
from treering._checkpoint.transaction import CheckpointFolder
from treering._format.blocks import file_digests
from treering._format.document import data_name, encode_index, read_names
from treering._format.index import DataFile, Index
from treering._tree.flatten import Flattened
from treering._values.telemetry import phase


@dataclasses.dataclass(frozen=True, slots=True)
class FolderSave:
    """A tree that this process alone saves into a folder."""

    plan: TreePlan

    @property
    def nbytes(self) -> int:
        """How much memory its snapshot takes."""
        return self.plan.nbytes

    def snapshot(self) -> FolderSave:
        """Return the same with its leaves in memory that nobody changes any more."""
        return FolderSave(self.plan.snapshot())

    def write(self, options: SaveOptions, watch: Watch = UNWATCHED) -> None:
        """Write the folder; ``treering.save`` says more."""
        metadata = options.json_metadata()
        watch.move()
        with (
            closing(CheckpointFolder(options.path, overwrite=options.overwrite, names_in=read_names)) as folder,
            folder,
        ):
            layout = self.plan.layout(folder.attempt)
            written = SaveData(layout, options.progress)
            files = _write(layout, written, folder)
            flat, attempt = self.plan.flat, folder.attempt
            index = make_index(flat, layout, written.checksums, files, metadata=metadata, attempt=attempt)
            document = encode_index(add_digests(index, layout.headers, replaces=folder.superseded))
            watch.claim()
            with phase("save/commit"):
                folder.commit(document)


@phase("save/write")
def _write(layout: SaveLayout, written: SaveData, folder: CheckpointFolder) -> list[DataFile]:
    """Write the data files; their content is durable then, their names are with the commit."""
    sizes = layout.sizes()
    folder.require_space(sum(sizes))
    files = []
    for number, (header, size) in enumerate(zip(layout.headers, sizes, strict=True)):
        name = data_name(folder.attempt, number, len(sizes))
        folder.write_file(name, content(header, written.data_of(number)), size)
        files.append(DataFile(name=name, nbytes=size, header=len(header), digest=None))
    return files


def make_index(
    flat: Flattened,
    layout: SaveLayout,
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


def add_digests(index: Index, headers: Sequence[bytes], *, replaces: Sequence[str]) -> Index:
    """Return the index with the digest of each file."""
    digests = file_digests(index, headers)
    files = [dataclasses.replace(file, digest=found) for file, found in zip(index.files, digests, strict=True)]
    return dataclasses.replace(index, files=files, replaces=replaces)


def versions() -> dict[str, str]:
    """Return who writes, with what, and when: nothing of the machine or its user."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {"by": f"treering {__version__}", "at": now, "python": platform.python_version()}
    # From the modules: importlib.metadata would read files, in the middle of a save.
    return found | {"jax": jax.__version__, "numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__}
