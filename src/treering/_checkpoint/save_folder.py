"""A planned tree -> a checkpoint's folder, durable when this returns; the steps that a joint save takes too."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import platform
from array import array
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import jax
import ml_dtypes
import numpy as np

from treering import __version__
from treering._arrays.written import SaveData, SaveLayout
from treering._background.save_job import Watch
from treering._checkpoint.joined_folder import AttemptFiles
from treering._checkpoint.plan_cache import TreePlan
from treering._checkpoint.save_options import SaveOptions
from treering._checkpoint.transaction import CheckpointFolder
from treering._format.blocks import file_digests
from treering._format.document import encode_index, read_names
from treering._format.index import DataFile, Index
from treering._tree.flatten import Flattened
from treering._values.telemetry import phase


def write_folder(plan: TreePlan, options: SaveOptions, watch: Watch) -> None:
    """Write the folder as this process alone; ``treering.save`` says more."""
    metadata = options.json_metadata()
    watch.move()
    with closing(CheckpointFolder(options.path, overwrite=options.overwrite, names_in=read_names)) as folder, folder:
        layout = plan.layout(folder.attempt)
        checksums = write_data(layout, folder, options)
        index = make_index(plan.flat, layout, checksums, metadata, attempt=folder.attempt)
        commit_index(folder, index, layout.headers, watch)


@phase("save/write")
def write_data(layout: SaveLayout, folder: AttemptFiles, options: SaveOptions) -> array[int]:
    """Write the data files, durable but for their names, and return the checksums of their blocks."""
    sizes = layout.sizes()
    folder.require_space(sum(sizes))
    written = SaveData(layout, options.progress)
    for number, (name, header, size) in enumerate(zip(layout.names, layout.headers, sizes, strict=True)):
        folder.write_file(name, itertools.chain([header], written.data_of(number)), size)
    return written.checksums


def commit_index(folder: CheckpointFolder, index: Index, headers: Sequence[bytes], watch: Watch) -> None:
    """Commit what the index says was written."""
    digests = file_digests(index, headers)
    files = [dataclasses.replace(file, digest=found) for file, found in zip(index.files, digests, strict=True)]
    document = encode_index(dataclasses.replace(index, files=files, replaces=folder.superseded))
    watch.claim()
    with phase("save/commit"):
        folder.commit(document)


def make_index(
    flat: Flattened,
    layout: SaveLayout,
    checksums: array[int],
    metadata: Mapping[str, Any],
    *,
    attempt: str,
    processes: int = 1,
) -> Index:
    """Return the index of what was written, without the digests of its files."""
    leaves = layout.leaves
    writers = layout.writers if processes > 1 else [None] * len(layout.names)
    files = zip(layout.names, layout.sizes(), layout.headers, writers, strict=True)
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
        files=[
            DataFile(name=name, nbytes=size, header=len(header), digest=None, process=process)
            for name, size, header, process in files
        ],
        replaces=(),
        metadata=metadata,
    )


def versions() -> dict[str, str]:
    """Return who writes, with what, and when: nothing of the machine or its user."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {"by": f"treering {__version__}", "at": now, "python": platform.python_version()}
    # From the modules: importlib.metadata would read files, in the middle of a save.
    return found | {"jax": jax.__version__, "numpy": np.__version__, "ml_dtypes": ml_dtypes.__version__}
