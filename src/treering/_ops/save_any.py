"""Where a tree is saved to: the suffix of the path chooses the form."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

from treering._arrays.incoming import Progress
from treering._arrays.processes import this_processes
from treering._ops.folder_path import folder_path
from treering._ops.joint_save import HostLocal, Wishes, save_together
from treering._ops.save import save_checkpoint
from treering._ops.save_file import save_msgpack
from treering._ops.save_safetensors import save_safetensors
from treering._ops.source import require_path
from treering._ops.state_file import local_path
from treering._tree.flatten import Flattened, flatten
from treering._values.processes import timeout_seconds
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
    processes: Literal["all", "this"],
    host_local: HostLocal,
    timeout: float | None,
) -> None:
    """Write ``tree`` to ``path``; ``treering.save`` says more."""
    require_path(path)
    seconds = timeout_seconds(timeout)
    _require_one_of("processes", processes, ("all", "this"))
    _require_one_of("host_local", host_local, ("first", "equal"))
    place = _place(path)
    suffix = place.suffix.lower()
    if suffix in _OTHER_FORMS:
        hint = "a name without it becomes a folder; .safetensors and .msgpack become one file"
        raise Unsupported(f"{os.fspath(path)!r}: treering writes no {suffix} files", hint=hint)
    write = _FILES.get(suffix)
    if write is not None:
        write(place, tree, metadata=_kept(metadata), overwrite=overwrite, progress=progress)
    elif processes == "this":
        save_checkpoint(place, flatten(tree), metadata=_kept(metadata), overwrite=overwrite, progress=progress)
    else:
        wishes = Wishes(metadata={}, overwrite=overwrite, host_local=host_local, progress=progress)
        _save_folder(place, tree, metadata, wishes, seconds)


def _save_folder(place: Path, tree: Any, metadata: Mapping[str, Any] | None, wishes: Wishes, timeout: float) -> None:
    """Write ``tree`` into a folder: with the other processes of the job, if there are any."""
    flat: Flattened | Exception
    try:
        # Often only process 0 has metadata; were it to fail alone, its next save would go with this one of the others.
        wishes = dataclasses.replace(wishes, metadata=_kept(metadata))
        flat = flatten(tree)
    except Exception as error:
        # A process that is not alone tells the others, who would wait for it.
        processes = this_processes(())
        if processes.count == 1:
            raise
        flat = error
    else:
        processes = this_processes(flat.leaves)
    if processes.count > 1:
        save_together(place, flat, wishes, processes=processes, timeout=timeout)
    elif not isinstance(flat, Exception):
        save_checkpoint(place, flat, metadata=wishes.metadata, overwrite=wishes.overwrite, progress=wishes.progress)


def _kept(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    if not isinstance(metadata, Mapping | None):
        raise Unsupported(f"metadata is a {type(metadata).__name__}, not a dict of JSON")
    return dict(metadata or {})


def _require_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise Unsupported(f"{name} is {value!r:.100}, it has to be {' or '.join(map(repr, known))}")


def _place(path: str | os.PathLike[str]) -> Path:
    """Return the path; a folder's may end in a separator."""
    if isinstance(path, str) and Path(path).suffix.lower() in _FILES:
        return local_path(path)
    return folder_path(path)
