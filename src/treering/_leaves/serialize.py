"""A tree -> zarr v2 arrays in a leaves directory, durable when this returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from treering._arrays.jobs import Progress
from treering._arrays.outgoing import outgoing
from treering._leaves.chunks.write import write_leaves
from treering._leaves.commit import commit_record
from treering._leaves.documents.record import arrays_of
from treering._leaves.documents.update import LEAVES_RULES
from treering._leaves.folder.staged_leaves import StagedLeaves
from treering._leaves.plan import plan_leaves
from treering._tree.flatten import Flattened


def serialize_leaves(
    path: Path,
    flat: Flattened,
    *,
    prefix: str | None,
    commit_callback: Callable[[], object] | None,
    write_index: bool,
    compressor: Mapping[str, Any] | None,
    chunk_bytes: int | None,
    progress: Progress | None,
) -> None:
    """Write a tree into the directory ``path``, alone; ``treering.leaves.tree_serialize_leaves`` says more."""
    plan = plan_leaves(flat, outgoing(flat), prefix=prefix, compressor=compressor, chunk_bytes=chunk_bytes)
    with StagedLeaves(path, LEAVES_RULES) as staged:
        staged.require_space(plan.nbytes)
        record = plan.record(staged.attempt)
        sizes, checksums = write_leaves(staged, record.folders, plan.leaves, arrays_of(record), progress=progress)
        commit_record(
            path, staged, dataclasses.replace(record, sizes=sizes, checksums=checksums), write_index=write_index
        )
    if commit_callback is not None:
        commit_callback()
