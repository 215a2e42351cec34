"""A tree -> a checkpoint's folder or one file, durable when this returns; the suffix of the path chooses the form.

In the background, what needs the caller's tree, jax or a collective of the job happens before `begin_save` returns.
What is left holds numpy arrays, and talks to other processes through the folder alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, TypeAlias

from treering._arrays.host import this_processes
from treering._arrays.outgoing import ALONE, SavedPart
from treering._arrays.plan_cache import TreePlan, held_bytes, plan_tree
from treering._background.saves import finish_saves, raise_unreported, reword, watch_for_end, writer
from treering._background.writer import UNWATCHED, Ended, PendingSave, SaveJob, Watch
from treering._checkpoint.compare import Held
from treering._checkpoint.increment import hold_arrays
from treering._checkpoint.joint_driver import tell_of_end
from treering._checkpoint.save_files import SafetensorsSave
from treering._checkpoint.save_folder import begin_call, own_boxes, write_folder, write_share
from treering._checkpoint.save_msgpack import MsgpackSave
from treering._checkpoint.save_options import SaveOptions, require_value
from treering._coordination.job_handshake import counted_save, release
from treering._coordination.operations import Call
from treering._store.resolve import absolute, new_folder_path, resolved
from treering._tree.each import hold_states
from treering._values.arguments import FILE_SUFFIXES
from treering._values.processes import Processes
from treering._values.telemetry import note_duration, phase, report
from treering._view.progress import showing
from treering.errors import UnsupportedError


@dataclasses.dataclass(frozen=True, slots=True)
class FolderSave:
    """A tree that this process saves into a folder, alone or as its share in a counted save."""

    plan: TreePlan
    call: Call | None = None
    """The save that other processes take part in."""
    held: Held | None = None
    """What was known of the arrays before they were copied."""
    copied: int | None = None
    """How much memory its snapshot takes; None before it is made."""

    @property
    def nbytes(self) -> int:
        """How much memory its snapshot takes, at most."""
        return self.plan.nbytes if self.copied is None else self.copied

    def snapshot(self, options: SaveOptions) -> FolderSave:
        """Return the same with its leaves in memory that nobody changes any more, but for those that will be shared."""
        plan, held = self.plan, Held()
        if options.increment is not None:
            held = hold_arrays(plan.flat, own_boxes(plan), options.increment, joint=plan.processes.count > 1)
        copied = plan.nbytes - (held_bytes(plan.leaves, held.left) if held.left else 0)
        plan = plan.snapshot(host_local=options.compares_local, left=held.left)
        return dataclasses.replace(self, plan=plan, held=held, copied=copied)

    def write(self, options: SaveOptions, watch: Watch = UNWATCHED) -> None:
        """Write the folder, or the share."""
        if self.call is None:
            write_folder(self.plan, options, watch, self.held)
        else:
            write_share(self.call, self.plan, options, watch, self.held)


PreparedSave: TypeAlias = FolderSave | MsgpackSave | SafetensorsSave
"""A tree that is ready to be saved in one form; nothing was copied or written yet."""

_FILES: Final[Mapping[str, Callable[[Any, Mapping[str, Any], SavedPart], PreparedSave]]] = {
    ".msgpack": MsgpackSave.of,
    ".safetensors": SafetensorsSave.of,
}


def save_tree(tree: Any, options: SaveOptions) -> None:
    """Save ``tree``; ``treering.save`` says more."""
    with phase("save/blocked"), report("save", options.path), showing(options.progress):
        if not options.together:
            _finish_earlier(options)
            prepare_alone(tree, options).write(options)
            return
        plan, processes = plan_together(tree, options, lambda: _finish_earlier(options))
        if processes.count > 1:
            write_share(begin_call(options, processes), plan, options)
        else:
            FolderSave(require_value(plan)).write(options)


def _finish_earlier(options: SaveOptions) -> None:
    """Wait for what is in flight to the path, and to the base, which has to be there before this one is written."""
    for path in (options.path, *(() if options.increment is None else options.increment.find())):
        finish_saves(path)


def counted(
    path: Any, processes: object = "all", *, saves: Callable[[], bool] = lambda: True
) -> AbstractContextManager[None]:
    """Count what a caller asks for as a joint save, if it is one, whatever ends it: `counted_save` says why.

    Of the arguments nothing is known yet.
    """
    is_file = isinstance(path, str | os.PathLike) and os.fsdecode(path).lower().endswith(FILE_SUFFIXES)
    is_joint = processes != "this" and not is_file
    return counted_save(
        this_processes(()) if is_joint else ALONE,
        lambda: absolute(new_folder_path(path)),
        doing=f"save {path!r:.1000}",
        tell=tell_of_end,
        saves=saves,
    )


def prepare_alone(tree: Any, options: SaveOptions) -> PreparedSave:
    """Prepare to save a tree into a file, or into a folder without the other processes of the job.

    Raises:
        UnsupportedError: the form cannot hold it.
    """
    prepare = _FILES.get(options.path.suffix.lower())
    held, _ = hold_states(tree, 1, options.part.only)
    if prepare is None:
        return FolderSave(plan_tree(held, ALONE, options.part))
    if held is not tree:
        what = f"a {options.path.suffix} file does not hold the states that treering.each marks"
        raise UnsupportedError(what, hint="save to a folder, or put the state itself into the tree")
    return prepare(tree, options.python_metadata(), options.part)


def plan_together(
    tree: Any, options: SaveOptions, finish_earlier: Callable[[], None]
) -> tuple[TreePlan | Exception, Processes]:
    """Plan to save a tree into a folder, with the other processes of the job if there are any.

    Args:
        tree: the tree.
        options: what the caller asks for.
        finish_earlier: looks at earlier saves to the path, and raises their errors.

    Returns:
        The plan, and the processes that save the tree. Where there are others, the plan may be the error why there is
        none: they wait for this process, and have to be told before it is raised.

    Raises:
        Exception: why this process, which is alone, cannot save the tree.
    """
    try:
        finish_earlier()
        options.python_metadata()
        held, own = hold_states(tree, count := this_processes(()).count, options.part.only)
        plan = plan_tree(held, part=options.part)
        if held is not tree and plan.processes.count != count:  # an array tells of a job that jax did not
            held, own = hold_states(tree, plan.processes.count, options.part.only)
            plan = plan_tree(held, part=options.part)
        if own:  # of a part of the tree, those that are in it
            own = {key: own[key] for key in plan.flat.keys if key in own}
            plan = dataclasses.replace(plan, states=own)
    except Exception as error:
        processes = this_processes(())
        if processes.count == 1:
            raise
        return error, processes
    return plan, plan.processes


Around: TypeAlias = AbstractContextManager[None] | None


def begin_save(
    tree: Any,
    options: SaveOptions,
    *,
    run: Path | None = None,
    around: Around = None,
    refusal: Exception | None = None,
    ended: Ended | None = None,
) -> PendingSave:
    """Begin to save ``tree``; ``treering.save_async`` says more.

    Args:
        tree: what is saved.
        options: what the caller asks for.
        run: the run that it is a step of: errors of its saves are raised at whatever is done next with the run.
        around: entered around the writing, on the thread that does it: it sees an error, and does what follows the
            commit. What it raises is the save's error.
        refusal: why this process cannot save after all: raised once the others of the job are told, who wait for it.
        ended: told how the save ended, once this function has returned it.

    Raises:
        TimedOutError: the saves in flight leave no room and show no progress.
        TreeringError: the tree cannot be saved, or an earlier save to the path failed and its error was not raised yet.
    """
    watch_for_end()
    # The program's current folder may be another one when the save's turn comes.
    options = dataclasses.replace(options, path=absolute(options.path))
    begun = _Beginning(options, None if run is None else resolved(run), around, refusal, ended)
    if not options.together:
        begun.require_clear()
        return begun.hand_over(prepare_alone(tree, options), options)
    plan, processes = plan_together(tree, options, begun.require_clear)
    if processes.count > 1:
        return begun.together(plan, processes)
    return begun.hand_over(FolderSave(require_value(plan)), options)


@dataclasses.dataclass(frozen=True, slots=True)
class _Beginning:
    """A save on its way from the caller to the writer thread."""

    options: SaveOptions
    run: Path | None
    around: Around
    refusal: Exception | None
    ended: Ended | None

    def require_clear(self) -> None:
        """Raise why this process cannot save, or the error of an earlier save that was not raised yet."""
        if self.refusal is not None:
            raise self.refusal
        raise_unreported(self.options.path)

    def hand_over(self, prepared: PreparedSave, options: SaveOptions, job: SaveJob | None = None) -> PendingSave:
        """Copy what is saved, and let the writer thread write it."""
        options = options.snapshot()
        job = job or self._job(prepared.nbytes, self.ended)
        saves = writer()
        with saves.handing_over(job), saves.handing_over(job):
            with phase("save/admit"):
                saves.admit(job)
            # In a list, out of which the writer takes it: the function below lives as long as an error raised in it.
            with phase("save/snapshot"):
                held = [prepared.snapshot(options)]
            job.nbytes = held[0].nbytes
            handed = time.perf_counter()

            def write() -> None:
                note_duration("save/queue", handed)
                with report("save", options.path), self.around or contextlib.nullcontext(), showing(options.progress):
                    progress = job.progress(options.progress)
                    held.pop().write(dataclasses.replace(options, progress=progress), job)

            saves.hand_over(job, write)
            return PendingSave(job)

    def together(self, plan: TreePlan | Exception, processes: Processes) -> PendingSave:
        """Begin with a folder that several processes write.

        Whatever goes wrong here after the save was counted, the others are told of it, on the writer thread: they wait
        for this process on theirs.
        """
        options = self.options
        job = self._job(0 if isinstance(plan, Exception) else plan.nbytes, self.ended)
        call = begin_call(options, processes)
        try:
            release(call)
            prepared = FolderSave(require_value(plan), call)
            if not processes.is_coordinator:  # what the others have counts for nothing
                options = dataclasses.replace(options, metadata=None)
            return self.hand_over(prepared, options, job)
        except BaseException as error:  # an interrupt too: the others would wait in vain; raised again below
            release(call)
            if writer().has_taken(job):  # an interrupt, after all; the save goes on
                raise
            why = error if isinstance(error, Exception) else reword(error, f"could not {job.doing}")
            telling = self._job(0)
            telling.told = True  # by the error that is raised here
            writer().hand_over(telling, functools.partial(write_share, call, why, options, telling))
            raise

    def _job(self, nbytes: int, ended: Ended | None = None) -> SaveJob:
        options = self.options
        path = resolved(options.path)
        return SaveJob(path, shown=options.shown, run=self.run, timeout=options.timeout, nbytes=nbytes, ended=ended)
