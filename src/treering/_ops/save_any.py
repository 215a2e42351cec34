"""Where a tree is saved to: the suffix of the path chooses the form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from treering._arrays.incoming import Progress
from treering._ops.save import save_checkpoint
from treering._ops.save_file import save_msgpack
from treering._ops.save_safetensors import save_safetensors
from treering._ops.state_file import local_path

__all__ = ["save"]


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
    progress: Progress | None,
) -> None:
    """Write ``tree`` to ``path``; ``treering.save`` says more."""
    place = local_path(path)
    write = {".msgpack": save_msgpack, ".safetensors": save_safetensors}.get(place.suffix, save_checkpoint)
    write(place, tree, metadata=metadata or {}, overwrite=overwrite, progress=progress)
