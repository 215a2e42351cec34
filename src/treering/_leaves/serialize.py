"""A tree -> a leaves directory, by this process alone, with others, or through a manager of the caller's."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from treering._arrays.host import this_processes
from treering._arrays.outgoing import ALONE, DescribedLeaves, describe_leaves
from treering._background.save_job import UNWATCHED, Watch
from treering._checkpoint.detect import refuse_other_form
from treering._checkpoint.save_options import require_one_of
from treering._leaves.by_manager import serialize_by_manager
from treering._leaves.chunks.write import write_leaves
from treering._leaves.commit import begin_save, commit_record
from treering._leaves.documents.record import arrays_of
from treering._leaves.joint_serialize import serialize_together
from treering._leaves.plan import LeavesSaveOptions, plan_leaves
from treering._store.resolve import is_on_disk, leaves_path, require_shared
from treering._tree.flatten import Flattened, flatten
from treering._values.processes import Processes
from treering._values.telemetry import report
from treering._view.progress import showing
from treering.errors import Unsupported


def serialize(path: str | os.PathLike[str], tree: Any, options: LeavesSaveOptions) -> None:
    """Write ``tree`` into the directory ``path``; ``treering.leaves.tree_serialize_leaves`` says more."""
    place = leaves_path(path, new=True)
    refuse_other_form(place, "leaves")
    manager = options.manager
    require_one_of("processes", options.processes, ("all", "this"))
    require_one_of("host_local", options.host_local, ("first", "equal"))
    for name in ("compressor", "chunk_bytes", "progress") if manager is not None else ():
        if getattr(options, name) is not None:
            hint = "omit it or the manager"
            raise Unsupported(f"{name} is for saves by treering itself, not by a manager", hint=hint)
    if manager is not None and not is_on_disk(place):
        what = "a manager writes with requests of its own, which treering cannot make safe in a bucket"
        hint = "omit the manager; treering.save_async saves to a bucket in the background"
        raise Unsupported(f"{what}; it is for folders on disk", hint=hint)
    flat, job = _flatten(tree, ALONE if options.processes == "this" else None)
    with showing(options.progress):
        if job.count > 1:
            require_shared(place)
            with report("save", place):
                serialize_together(place, flat, options, processes=job)
        elif isinstance(flat, Exception):
            raise flat
        elif manager is None:
            with report("save", place):
                serialize_alone(place, flat, describe_leaves(flat), options)
        elif this_processes(flat.leaves).count > 1:
            hint = "omit the manager, or save on all processes"
            raise Unsupported("a manager works with all processes of a job, but this save is of one process", hint=hint)
        else:
            serialize_by_manager(place, flat, manager, options)


def _flatten(tree: Any, job: Processes | None) -> tuple[Flattened | Exception, Processes]:
    """Return the flat tree, or why there is none, and the processes that save it: ``job``, or all that there are."""
    try:
        flat = flatten(tree)
    except Exception as error:  # noqa: BLE001 - other processes would wait for this one: they are told first
        return error, job or this_processes(())
    return flat, job or this_processes(flat.leaves)


def serialize_alone(
    path: Path,
    flat: Flattened,
    leaves: DescribedLeaves,
    options: LeavesSaveOptions,
    *,
    watch: Watch = UNWATCHED,
    new: bool = False,
) -> None:
    """Plan, write the chunks, make the record, and commit it; ``new``: only if no index lists any then."""
    plan = plan_leaves(flat, leaves, options)
    with begin_save(path) as staged:
        staged.require_space(plan.nbytes)
        record = plan.record(staged.attempt)
        sizes, checksums = write_leaves(
            staged, record.folders, plan.leaves, arrays_of(record), progress=options.progress
        )
        record = dataclasses.replace(record, sizes=sizes, checksums=checksums)
        watch.claim()
        commit_record(path, staged, record, write_index=options.write_index, new=new)
    if options.commit_callback is not None:
        options.commit_callback()
