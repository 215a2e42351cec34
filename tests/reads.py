"""What loads ask the arrays of a checkpoint for, and what a process of a job would read of them."""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import treering as tr
from tests import faults
from treering._arrays import incoming, jobs
from treering._arrays.incoming import ReadRequest, StoredArrays
from treering._arrays.plan_cache import TreePlan
from treering._checkpoint.forms import open_source
from treering._checkpoint.load import LoadOptions
from treering._format.run_document import StepRecord
from treering._inspect import verify
from treering._runs import convert_run, leases, load_step, save_step
from treering._runs.folder import RunFolder
from treering._store.posix.reading import LocalFile
from treering._values.boxes import box_of_slices, slices

Index = tuple[slice, ...]


def act_before_reads(patch: pytest.MonkeyPatch, act: Callable[[Sequence[ReadRequest]], object]) -> None:
    """Do something with what is asked for, before each read of several leaves of a checkpoint."""
    faults.before(patch, StoredArrays, "read", lambda _, requests, *__, **___: act(requests))


def act_before_plans(patch: pytest.MonkeyPatch, act: Callable[[Sequence[ReadRequest]], object]) -> None:
    """Do something with what is asked for, before it is planned what is read for it."""
    faults.before(patch, StoredArrays, "plan_reads", lambda _, requests, *__: act(requests))


def act_before_steps(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something before each time that a run opens one of its steps, to load it."""
    faults.before(patch, load_step, "read_source", lambda *_, **__: act())


def fail_steps(patch: pytest.MonkeyPatch, error: BaseException, *, name: str) -> None:
    """Let each load of a step whose folder has this name raise an error."""
    faults.fail(patch, load_step, "read_source", error, when=lambda step, **_: step.name == name)


def act_before_looks(patch: pytest.MonkeyPatch, act: Callable[[Path, int], object]) -> None:
    """Do something with a run and a step before it is looked at whether that step, which was committed, is whole."""
    faults.before(patch, save_step, "require_whole", act)


def act_before_handed_steps_are_noted(patch: pytest.MonkeyPatch, act: Callable[..., object]) -> None:
    """Do something each time before it is noted for which steps ``on_commit`` was called."""
    faults.before(patch, leases, "encode_handed", act)


def act_before_list_is_put(patch: pytest.MonkeyPatch, act: Callable[[], object], *, gone: bool = False) -> None:
    """Do something each time before the list of the steps that a rollback leaves behind is put, or goes."""
    for name in ("_swap_left", "_create_left"):
        faults.before(patch, RunFolder, name, lambda _, data, *__: act() if gone is not bool(data) else None)


def wait_before_a_step_is_taken(
    patch: pytest.MonkeyPatch, step: int, held: threading.Event, go: threading.Event
) -> None:
    """Let who follows a run stop before a step that it has found, and say so."""

    def stop(record: StepRecord) -> None:
        if record.step == step and not held.is_set():
            held.set()
            assert go.wait(60)

    faults.before(patch, leases.StepWatch, "_take", lambda _, __, record: stop(record))


def act_before_conversions(patch: pytest.MonkeyPatch, act: Callable[[Path], object]) -> None:
    """Do something each time before a run converts one of its steps, with the path of that step."""
    faults.before(patch, convert_run, "convert_path", lambda source, *_: act(source))


def forbid_memory_of_blocks(patch: pytest.MonkeyPatch) -> None:
    """Let verifying fail where it remembers what it has read, for other steps that share the file."""
    faults.fail(patch, verify, "_content_of", AssertionError("it is remembered"))


def watch_in_a_job(run: tr.Run, broadcast: Callable[[Callable[[], int | None]], int | None]) -> Iterable[int]:
    """Return a watch of a run as process 0 of a job has it, which waits for 1.5 s in all and for the others 0.5 s."""
    shown = str(run.path)
    return leases.StepWatch(run.path, shown, after=None, timeout=1.5, hold=False, broadcast=broadcast, patience=0.5)


def act_on_snapshots(patch: pytest.MonkeyPatch, act: Callable[[TreePlan, list[int]], object]) -> None:
    """Do something with each plan of a tree whose snapshot was taken, and the numbers of the leaves that it copied."""

    def note(plan: TreePlan, *_: Any, **__: Any) -> None:
        sources = plan.leaves.sources
        act(plan, [leaf for leaf in sources if any(part.data is not None for part in sources[leaf])])

    faults.after(patch, TreePlan, "snapshot", note)


def defaults_of_loads() -> dict[str, object]:
    """Return what the options of a load are where they are not given."""
    return {field.name: field.default for field in dataclasses.fields(LoadOptions)}


def bytes_read(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that fills with the bytes of each read of a file on disk that does not begin at its start."""
    counts: list[int] = []
    faults.before(patch, LocalFile, "read", lambda _, offset, count: counts.append(count if offset else 0))
    return counts


def memory_held(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that fills with the bytes of all memory for reads at that time, each time that more is taken."""
    now, rooms = [0], []
    make, lock = jobs.aligned_bytes, threading.Lock()

    def counted(nbytes: int) -> Any:
        room = make(nbytes)
        with lock:
            now[0] += nbytes
            rooms.append(now[0])
        weakref.finalize(room, let_go, nbytes)
        return room

    def let_go(nbytes: int) -> None:
        now[0] -= nbytes

    patch.setattr(incoming, "aligned_bytes", counted)
    return rooms


def arrays_together(patch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that fills with how many arrays lie in one memory, each time that some is taken for several."""
    counts: list[int] = []
    faults.after(patch, incoming, "aligned_together", lambda arrays, _: counts.append(len(arrays)))
    return counts


def read_parts(path: Path, parts: Callable[[str], Sequence[Index]]) -> dict[str, list[tuple[Index, Any]]]:
    """Read parts of all leaves in one go, as a load of one process does.

    Args:
        path: where they are.
        parts: the indices of a leaf whose parts are read, by its key.

    Returns:
        The parts of each leaf, each with its index.
    """
    with ExitStack() as files:
        source = open_source(path, files, mapped=False)
        keys = source.index.keys
        shapes = [source.index.type_of(leaf).shape or () for leaf in range(len(keys))]
        boxes = [sorted({box_of_slices(i, shape) for i in parts(key)}) for key, shape in zip(keys, shapes, strict=True)]
        requests = [ReadRequest(leaf, wanted) for leaf, wanted in enumerate(boxes) if wanted]
        source.arrays.read(requests)
    return {
        keys[request.leaf]: [(slices(box), array) for box, array in zip(request.boxes, request.arrays, strict=True)]
        for request in requests
    }
