"""A tree -> a save in flight: looked at, planned and copied on the caller's thread, written on ours.

Whatever needs the caller's tree, jax or a collective of the job happens before `begin` returns. What is left holds
numpy arrays, and talks to other processes through the folder alone.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from treering._arrays.jobs import Progress
from treering._arrays.outgoing import outgoing
from treering._arrays.snapshot import snapshot
from treering._background import shutdown
from treering._background.deferred_errors import reword
from treering._background.pending_save import PendingSave
from treering._background.save_job import SaveJob
from treering._background.saves import raise_unreported, resolved, writer
from treering._checkpoint.folder_path import absolute
from treering._checkpoint.joint_save import HostLocal, Wishes, counted, save_share
from treering._checkpoint.plan_cache import TreePlan, plan_tree
from treering._checkpoint.save import save_checkpoint
from treering._checkpoint.save_request import Asked, planned_together
from treering._checkpoint.save_safetensors import require_holdable, write_safetensors
from treering._codec.documents import check_json
from treering._codec.msgpack.write import Block, Piece, pieces_size
from treering._format.blocks import leaf_bytes
from treering._tree.flatten import flatten
from treering._values.processes import Processes
from treering._view.progress import showing
from treering._wire.save_file import msgpack_pieces, write_msgpack

Around: TypeAlias = AbstractContextManager[None] | None
Write: TypeAlias = Callable[[Asked], None]


def begin(
    path: str | os.PathLike[str],
    tree: Any,
    *,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
    progress: Progress | bool | None,
    processes: Literal["all", "this"],
    host_local: HostLocal,
    timeout: float | None,
    run: Path | None = None,
    around: Around = None,
    refusal: Exception | None = None,
) -> PendingSave:
    """Begin to save ``tree`` to ``path``; ``treering.save_async`` says what the other arguments mean.

    Args:
        path: where to.
        tree: what is saved.
        metadata: see there.
        overwrite: see there.
        progress: see there.
        processes: see there.
        host_local: see there.
        timeout: see there.
        run: the run that it is a step of: errors of its saves are raised at whatever is done next with the run.
        around: entered around the writing, on the thread that does it: it is told of an error, and does what follows
            the commit. What it raises is the save's error.
        refusal: why this process cannot save after all: raised once the others of the job are told, who wait for it.

    Raises:
        Timeout: the saves in flight leave no room and show no progress.
        TreeringError: the tree cannot be saved, or an earlier save to the path failed and nobody was told.
    """
    asked = Asked.of(
        path,
        metadata=metadata,
        overwrite=overwrite,
        progress=progress,
        processes=processes,
        host_local=host_local,
        timeout=timeout,
    )
    shutdown.watch_for_end()
    # The folder of the program may be another one when the save's turn comes.
    begun = _Begun(
        asked=dataclasses.replace(asked, place=absolute(asked.place)),
        shown=os.fspath(path),
        run=None if run is None else resolved(run),
        around=around,
        refusal=refusal,
    )
    if asked.together:
        return begun.folder(tree)
    begun.require_clear()
    if asked.file_form is None:
        return begun.alone(plan_tree(tree, Processes(this=0, count=1)), asked.kept())
    return begun.msgpack(tree) if asked.place.suffix.lower() == ".msgpack" else begun.safetensors(tree)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Begun:
    """A save on its way out of the caller's hands.

    What was copied lies in a list, out of which the one who writes it takes it: the functions here live as long as an
    error that was raised in them.
    """

    asked: Asked
    """What the caller asks for; the path is absolute."""
    shown: str
    """The path, as the caller named it."""
    run: Path | None
    """The run that it is a step of."""
    around: Around
    """What is done around the writing."""
    refusal: Exception | None
    """Why this process cannot save."""

    # ---------------------------------------------------------------------------------------------------- the forms

    def folder(self, tree: Any) -> PendingSave:
        """Begin with a folder: with the other processes of the job, if there are any."""
        asked = self.asked
        plan, wishes, processes = planned_together(asked, tree, self.require_clear)
        if processes.count > 1:
            return self._together(plan, wishes, processes)
        return self.alone(_unless_failed(plan), wishes.metadata)

    def require_clear(self) -> None:
        """Raise what stands against saving: why this process cannot, or an earlier error that nobody was told."""
        if self.refusal is not None:
            raise self.refusal
        raise_unreported(self.asked.place)

    def alone(self, plan: TreePlan, metadata: Mapping[str, Any]) -> PendingSave:
        """Begin with a folder that this process writes alone."""
        check_json(metadata, "metadata")
        metadata = copy.deepcopy(metadata)
        job = self._job(_held_bytes(plan))
        with writer().reserve(job) as room, room:
            room.take()
            held = [plan.snapshot()]

            def write(asked: Asked) -> None:
                progress = job.progress(asked.progress)
                save_checkpoint(
                    asked.place,
                    held.pop(),
                    metadata=metadata,
                    overwrite=asked.overwrite,
                    progress=progress,
                    watch=job,
                )

            return self._handed_over(job, write)

    def _together(self, plan: TreePlan | Exception, wishes: Wishes, processes: Processes) -> PendingSave:
        """Begin with a folder that several processes write.

        Whatever goes wrong here after the save was counted, the others are told of it, on the writing thread: they
        wait for this process on theirs.
        """
        place = self.asked.place
        call = counted(place, processes, self.asked.timeout)
        job = self._job(0 if isinstance(plan, Exception) else _held_bytes(plan))
        wishes = dataclasses.replace(wishes, progress=job.progress(wishes.progress))
        try:
            if processes.leads:  # what the others have counts for nothing
                check_json(wishes.metadata, "metadata")
                wishes = dataclasses.replace(wishes, metadata=copy.deepcopy(wishes.metadata))
            with writer().reserve(job) as room, room:
                room.take()
                held = [_unless_failed(plan).snapshot(host_local=wishes.host_local == "equal")]

                def write(asked: Asked) -> None:
                    save_share(call, asked.place, held.pop(), wishes, job)

                return self._handed_over(job, write)
        except BaseException as error:  # an interrupt too: the others would wait in vain; raised again below
            if writer().has_taken(job):  # an interrupt, after all; the save goes on
                raise
            why = error if isinstance(error, Exception) else reword(error, f"could not {job.doing}")
            telling = self._job(0)
            telling.told = True  # by the error that is raised here
            writer().hand_over(telling, functools.partial(save_share, call, place, why, wishes, telling))
            raise

    def msgpack(self, tree: Any) -> PendingSave:
        """Begin with a msgpack file."""
        pieces = msgpack_pieces(tree, self.asked.kept())
        job = self._job(pieces_size(pieces))
        with writer().reserve(job) as room, room:
            room.take()
            held = [_held_pieces(pieces)]

            def write(asked: Asked) -> None:
                progress = job.progress(asked.progress)
                write_msgpack(asked.place, held.pop(), overwrite=asked.overwrite, progress=progress, watch=job)

            return self._handed_over(job, write)

    def safetensors(self, tree: Any) -> PendingSave:
        """Begin with a safetensors file."""
        flat, metadata = flatten(tree), self.asked.kept()
        leaves = outgoing(flat)
        require_holdable(flat, leaves, metadata)
        metadata = copy.deepcopy(metadata)
        rows = [(number, source.box) for number, sources in leaves.sources.items() for source in sources]
        job = self._job(sum(leaf_bytes(leaves.types[leaves.leaf_types[number]]) for number in leaves.sources))
        with writer().reserve(job) as room, room:
            room.take()
            held = [snapshot(leaves, rows)]
            flat = dataclasses.replace(flat, leaves=[])

            def write(asked: Asked) -> None:
                write_safetensors(
                    asked.place,
                    flat,
                    held.pop(),
                    metadata=metadata,
                    overwrite=asked.overwrite,
                    progress=job.progress(asked.progress),
                    watch=job,
                )

            return self._handed_over(job, write)

    # ---------------------------------------------------------------------------------------------------- handing over

    def _job(self, nbytes: int) -> SaveJob:
        asked = self.asked
        return SaveJob(resolved(asked.place), shown=self.shown, run=self.run, timeout=asked.timeout, nbytes=nbytes)

    def _handed_over(self, job: SaveJob, write: Write) -> PendingSave:
        asked, around = self.asked, self.around

        def write_and_more() -> None:
            with around or contextlib.nullcontext(), showing(asked.progress):
                write(asked)

        writer().hand_over(job, write_and_more)
        return PendingSave(job)


def _unless_failed(plan: TreePlan | Exception) -> TreePlan:
    if isinstance(plan, Exception):
        raise plan
    return plan


def _held_bytes(plan: TreePlan) -> int:
    """Return how much memory the snapshot of a plan will hold on to."""
    leaves = plan.leaves
    nbytes = list(map(leaf_bytes, leaves.types))
    own: int = sum(source.data.nbytes for leaf in leaves.spread for source in leaves.sources[leaf])
    return own + sum(nbytes[leaves.leaf_types[leaf]] for leaf in leaves.sources if leaf not in leaves.spread)


def _held_pieces(pieces: list[Piece]) -> list[Piece]:
    """Return pieces whose arrays nobody changes any more."""
    held: dict[int, Any] = {}
    for piece in pieces:
        if isinstance(piece, Block) and id(piece.array) not in held:
            held[id(piece.array)] = np.array(piece.array)
    return [
        dataclasses.replace(piece, array=held[id(piece.array)]) if isinstance(piece, Block) else piece
        for piece in pieces
    ]
