"""Leaves directories for the tests of what reads and writes their arrays, without index and commit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import tensorstore

from treering._arrays.incoming import ReadRequest
from treering._arrays.jobs import Progress
from treering._arrays.outgoing import describe_leaves
from treering._codec.zarr import parse_zarray
from treering._format.index import Index
from treering._leaves.chunks.arrays import LeavesArrays
from treering._leaves.chunks.write import write_leaves
from treering._leaves.commit import stage_leaves
from treering._leaves.documents.foreign import foreign_record
from treering._leaves.documents.index import Entry
from treering._leaves.documents.join import join_records
from treering._leaves.documents.record import LeavesRecord, OpenBranch, arrays_of
from treering._leaves.plan import LeavesSaveOptions, plan_leaves
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._tree.flatten import flatten
from treering._values.boxes import Box, whole


class Saved:
    """A tree whose files are staged and stay so; a context manager."""

    def __init__(
        self,
        path: Path,
        tree: Any,
        *,
        compressor: Mapping[str, Any] | None = None,
        chunk_bytes: int | None = None,
        prefix: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        flat = flatten(tree)
        options = LeavesSaveOptions(prefix=prefix, compressor=compressor, chunk_bytes=chunk_bytes)
        plan = plan_leaves(flat, describe_leaves(flat), options)
        self.path = path
        self.staged = stage_leaves(path)
        try:
            record = plan.record(self.staged.attempt)
            sizes, checksums = write_leaves(
                self.staged, record.folders, plan.leaves, arrays_of(record), progress=progress
            )
        except BaseException:
            self.staged.close()
            raise
        self.record: LeavesRecord = dataclasses.replace(record, sizes=sizes, checksums=checksums)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.staged.close()

    @property
    def branch(self) -> OpenBranch:
        return OpenBranch(record=self.record, arrays=arrays_of(self.record), attempt=self.staged.attempt, verified=True)

    @property
    def index(self) -> Index:
        return join_records([self.record], verified=True)

    def folder(self, key: str) -> Path:
        """Where the files of a leaf lie."""
        return Path(self.staged.path_of(key))

    def opened(self, *, mapped: bool = False) -> LeavesArrays:
        return LeavesArrays(self.index, [self.branch], LeavesFolder(self.path), mapped=mapped)


def write_foreign(path: Path, array: np.ndarray, **metadata: Any) -> None:
    """Write an array as another program would."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {"shape": list(array.shape), "compressor": None} | metadata,
        "recheck_cached_data": False,
    }
    if "dtype" not in metadata:
        spec["dtype"] = array.dtype.name
    tensorstore.open(spec, create=True).result().write(array).result()


def foreign_branch(path: Path, folders: Sequence[str]) -> OpenBranch:
    """What an index without records says of these folders."""
    found = {folder: parse_zarray((path / folder / ".zarray").read_bytes()) for folder in folders}
    record = foreign_record(None, [Entry(folder, {}) for folder in folders], list(found.values()))
    return OpenBranch(record=record, arrays=[found[folder] for folder in record.folders], attempt=None, verified=False)


def foreign(path: Path, *folders: str, mapped: bool = False) -> LeavesArrays:
    branch = foreign_branch(path, folders)
    index = join_records([branch.record], verified=False)
    return LeavesArrays(index, [branch], LeavesFolder(path), mapped=mapped)


def read(arrays: LeavesArrays, leaf: int, *boxes: Box) -> list[np.ndarray]:
    """Read boxes of a leaf, all of it if none is named."""
    request = ReadRequest(leaf, boxes or (whole(arrays.index.type_of(leaf).shape or ()),))
    arrays.read([request])
    return request.arrays
