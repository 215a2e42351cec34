"""Where a tree is saved to: the suffix of the path chooses the form."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from treering._arrays.incoming import Progress
from treering._ops.folder_path import folder_path
from treering._ops.save import save_checkpoint
from treering._ops.save_file import save_msgpack
from treering._ops.save_safetensors import save_safetensors
from treering._ops.source import require_path
from treering._ops.state_file import local_path
from treering.errors import Unsupported

__all__ = ["save"]

# Suffixes of files of others: a folder of such a name would not be what its user expects.
_OTHER_FORMS: Final = frozenset(
    {".bin", ".gguf", ".gz", ".h5", ".hdf5", ".json", ".npy", ".npz", ".onnx", ".pkl", ".pickle", ".pt", ".pth", ".zip"}
)

_FILES: Final = {".msgpack": save_msgpack, ".safetensors": save_safetensors}


def save(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
    progress: Progress | None,
) -> None:
    """Write ``tree`` to ``path``; ``treering.save`` says more."""
    require_path(path)
    place = _place(path)
    suffix = place.suffix.lower()
    if suffix in _OTHER_FORMS:
        hint = "a name without it becomes a folder; .safetensors and .msgpack become one file"
        raise Unsupported(f"{os.fspath(path)!r}: treering writes no {suffix} files", hint=hint)
    write = _FILES.get(suffix, save_checkpoint)
    if not isinstance(metadata, Mapping | None):
        raise Unsupported(f"metadata is a {type(metadata).__name__}, not a dict of JSON")
    write(place, tree, metadata=dict(metadata or {}), overwrite=overwrite, progress=progress)


def _place(path: str | os.PathLike[str]) -> Path:
    """Return the path; a folder's may end in a separator."""
    if isinstance(path, str) and Path(path).suffix.lower() in _FILES:
        return local_path(path)
    return folder_path(path)
