"""A tree -> a leaves directory: by treering itself, or through a manager of the caller's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

from treering._arrays.host import this_processes
from treering._arrays.jobs import Progress
from treering._arrays.outgoing import ALONE
from treering._checkpoint.folder_path import new_folder_path
from treering._checkpoint.save_options import HostLocal, require_one_of
from treering._leaves.by_manager import serialize_by_manager
from treering._leaves.joint_serialize import LeavesSaveOptions, serialize_together
from treering._leaves.serialize import serialize_leaves
from treering._tree.flatten import Flattened, flatten
from treering._values.processes import Processes, timeout_seconds
from treering._values.telemetry import report
from treering._view.progress import reporter, showing
from treering.errors import Unsupported


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
    progress: Progress | bool | None,
    processes: Literal["all", "this"],
    host_local: HostLocal,
    timeout: float | None,
) -> None:
    """Write ``tree`` into the directory ``path``; ``treering.leaves.tree_serialize_leaves`` says more."""
    place = new_folder_path(path)
    seconds = timeout_seconds(timeout)
    require_one_of("processes", processes, ("all", "this"))
    require_one_of("host_local", host_local, ("first", "equal"))
    if manager is not None:
        for name, given in (("compressor", compressor), ("chunk_bytes", chunk_bytes), ("progress", progress)):
            if given is not None:
                hint = "leave it or the manager out"
                raise Unsupported(f"{name} is for saves by treering itself; a manager has its own way", hint=hint)
    told = reporter(progress, "saving")
    flat, job = _flattened(tree, ALONE if processes == "this" else None)
    if job.count > 1:
        wishes = LeavesSaveOptions(
            prefix=prefix, write_index=write_index, compressor=compressor, chunk_bytes=chunk_bytes,
            host_local=host_local, commit_callback=commit_callback, progress=told,
            manager=manager,
        )  # fmt: skip
        with report("save", place), showing(told):
            serialize_together(place, flat, wishes, processes=job, timeout=seconds)
    elif isinstance(flat, Exception):
        raise flat
    elif manager is not None and this_processes(flat.leaves).count > 1:
        hint = "leave the manager out, or let all processes save"
        raise Unsupported("a manager works with all processes of a job, and this one is to save alone", hint=hint)
    elif manager is None:
        with report("save", place), showing(told):
            serialize_leaves(
                place, flat, prefix=prefix, commit_callback=commit_callback, write_index=write_index,
                compressor=compressor, chunk_bytes=chunk_bytes, progress=told,
            )  # fmt: skip
    else:
        serialize_by_manager(
            place, flat, manager, prefix=prefix, commit_callback=commit_callback, write_index=write_index
        )  # fmt: skip


def _flattened(tree: Any, job: Processes | None) -> tuple[Flattened | Exception, Processes]:
    """Return the tree flat, or why that cannot be, and the processes that save it: ``job``, or all that there are."""
    try:
        flat = flatten(tree)
    except Exception as error:  # noqa: BLE001 - a process that is not alone tells the others, who would wait for it
        return error, job or this_processes(())
    return flat, job or this_processes(flat.leaves)
