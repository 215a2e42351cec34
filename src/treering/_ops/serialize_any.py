"""A tree -> a leaves directory: by treering itself, or through a manager of the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from treering._arrays.incoming import Progress
from treering._ops.folder_path import folder_path
from treering._ops.managed_leaves import serialize_managed
from treering._ops.serialize_leaves import serialize_leaves
from treering.errors import Unsupported

__all__ = ["serialize"]


def serialize(
    path: str | os.PathLike[str],
    tree: Any,
    manager: Any,
    *,
    prefix: str | None,
    commit_callback: Callable[[], object] | None,
    write_index: bool,
    compressor: Mapping[str, Any] | None,
    chunk_bytes: int | None,
    progress: Progress | None,
) -> None:
    """Write ``tree`` into the directory ``path``; ``treering.leaves.tree_serialize_leaves`` says more."""
    place = folder_path(path)
    if manager is None:
        serialize_leaves(
            place, tree, prefix=prefix, commit_callback=commit_callback, write_index=write_index,
            compressor=compressor, chunk_bytes=chunk_bytes, progress=progress,
        )  # fmt: skip
        return
    for name, given in (("compressor", compressor), ("chunk_bytes", chunk_bytes), ("progress", progress)):
        if given is not None:
            hint = "leave it or the manager out"
            raise Unsupported(f"{name} is for saves by treering itself; a manager has its own way", hint=hint)
    serialize_managed(
        place, tree, manager, prefix=prefix, commit_callback=commit_callback, write_index=write_index
    )  # fmt: skip
