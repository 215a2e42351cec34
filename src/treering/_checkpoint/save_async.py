"""A tree -> a save in the background: checked, planned and copied on the caller's thread, written on the writer thread.

What needs the caller's tree, jax or a collective of the job happens before `begin_save` returns. What is left holds
numpy arrays, and talks to other processes through the folder alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

from treering._background import shutdown
from treering._background.save_job import PendingSave, SaveJob
from treering._background.saves import raise_unreported, reword, writer
from treering._checkpoint.joint_driver import require_value
from treering._checkpoint.joint_save import begin_call, write_share
from treering._checkpoint.plan_cache import TreePlan
from treering._checkpoint.save import FolderSave, PreparedSave, plan_together, prepare_alone
from treering._checkpoint.save_options import SaveOptions
from treering._store.resolve import absolute, settled
from treering._values.processes import Processes
from treering._values.telemetry import phase, report
from treering._view.progress import showing

Around: TypeAlias = AbstractContextManager[None] | None


def begin_save(
    tree: Any, options: SaveOptions, *, run: Path | None = None, around: Around = None, refusal: Exception | None = None
) -> PendingSave:
    """Begin to save ``tree``; ``treering.save_async`` says more.

    Args:
        tree: what is saved.
        options: what the caller asks for.
        run: the run that it is a step of: errors of its saves are raised at whatever is done next with the run.
        around: entered around the writing, on the thread that does it: it sees an error, and does what follows the
            commit. What it raises is the save's error.
        refusal: why this process cannot save after all: raised once the others of the job are told, who wait for it.

    Raises:
        Timeout: the saves in flight leave no room and show no progress.
        TreeringError: the tree cannot be saved, or an earlier save to the path failed and its error was not raised yet.
    """
    shutdown.watch_for_end()
    # The program's current folder may be another one when the save's turn comes.
    options = dataclasses.replace(options, path=absolute(options.path))
    begun = _Beginning(options, None if run is None else settled(run), around, refusal)
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

    def require_clear(self) -> None:
        """Raise why this process cannot save, or the error of an earlier save that was not raised yet."""
        if self.refusal is not None:
            raise self.refusal
        raise_unreported(self.options.path)

    def hand_over(self, prepared: PreparedSave, options: SaveOptions, job: SaveJob | None = None) -> PendingSave:
        """Copy what is saved, and let the writer thread write it."""
        options = options.snapshot()
        job = job or self._job(prepared.nbytes)
        with writer().reserve(job) as room, room:
            room.take()
            # In a list, out of which the writer takes it: the function below lives as long as an error raised in it.
            with phase("save/snapshot"):
                held = [prepared.snapshot()]

            def write() -> None:
                with report("save", options.path), self.around or contextlib.nullcontext(), showing(options.progress):
                    progress = job.progress(options.progress)
                    held.pop().write(dataclasses.replace(options, progress=progress), job)

            writer().hand_over(job, write)
            return PendingSave(job)

    def together(self, plan: TreePlan | Exception, processes: Processes) -> PendingSave:
        """Begin with a folder that several processes write.

        Whatever goes wrong here after the save was counted, the others are told of it, on the writer thread: they wait
        for this process on theirs.
        """
        options = self.options
        call = begin_call(options, processes)
        job = self._job(0 if isinstance(plan, Exception) else plan.nbytes)
        try:
            prepared = FolderSave(require_value(plan), options.host_local == "equal", call)
            if not processes.is_coordinator:  # what the others have counts for nothing
                options = dataclasses.replace(options, metadata=None)
            return self.hand_over(prepared, options, job)
        except BaseException as error:  # an interrupt too: the others would wait in vain; raised again below
            if writer().has_taken(job):  # an interrupt, after all; the save goes on
                raise
            why = error if isinstance(error, Exception) else reword(error, f"could not {job.doing}")
            telling = self._job(0)
            telling.told = True  # by the error that is raised here
            writer().hand_over(telling, functools.partial(write_share, call, why, options, telling))
            raise

    def _job(self, nbytes: int) -> SaveJob:
        options = self.options
        path = settled(options.path)
        return SaveJob(path, shown=options.shown, run=self.run, timeout=options.timeout, nbytes=nbytes)
