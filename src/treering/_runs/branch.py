"""Branches: a step is copied into a new run, by hard links where the file system has them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from itertools import chain
from pathlib import Path

from treering._checkpoint.copy_checkpoint import checked_pieces, copy_opened
from treering._checkpoint.source import check_data_file, read_pieces
from treering._checkpoint.transaction import CheckpointFolder
from treering._format.document import INDEX_NAME, encode_index, parse_index, read_names
from treering._format.run_document import StepOrigin, add_note, note_of, remove_note
from treering._runs.open_run import open_run
from treering._runs.removal import tidy_step
from treering._runs.steps import missing_step, note_records, records_in, step_path, steps_in, steps_of
from treering._store.api import Store
from treering._store.failures import naming_file
from treering._store.open_folder import index_document
from treering._store.resolve import require_outside, store_at
from treering._store.run_folder import RunFolder
from treering.errors import Busy, Exists, NotFound


def branch_step(path: Path, step: int, new: Path, *, keep: str | None, save_every: str | None) -> None:
    """Copy a step into the new run at ``new``, durably; the step's note says where it came from.

    Data files are never rewritten: each gets a second name where the file system has hard links, else it is copied,
    and each block is compared with its checksum.

    Args:
        path: the run's folder.
        step: the step.
        new: the folder of the new run, made if it is missing.
        keep: text of the new run's policy of keeping.
        save_every: text of its policy of saving.

    Raises:
        NotFound: there is no such step; the message names those there are.
        Exists: there is a run at ``new`` already.
        Unsupported: ``new`` lies in the run.
        Corrupt: the step's index is damaged, or a data file has another size or header than it says.
        Busy: another process branches to the same path.
        StoreFailed: the system refused; no run was begun, unless it is ``run.json`` that is named.
    """
    there = steps_of(new)
    if there:
        raise Exists(f"{os.fspath(new)!r} is already a run: it has the step {there[-1]}", hint="branch to a new path")
    require_outside(path, new, os.fspath(new))
    with contextlib.suppress(NotFound), RunFolder(new) as begun:
        # A branch that was killed here used the same attempt.
        tidy_step(begun, step, read_names)
    with open_run(path) as run:
        source, written = run.open_step(step), run.modified(step)
        if source is None or written is None:
            raise missing_step(path, step, steps_in(run))
        try:
            with source:
                _copy(path, step, source, written, step_path(new, step))
        except (Busy, NotFound) as error:
            if run.modified(step) is None:  # removed meanwhile
                raise missing_step(path, step, steps_in(run)) from error
            raise
    with RunFolder(new) as begun:
        note_records(begun, dataclasses.replace(records_in(begun), keep=keep, save_every=save_every))


def _copy(path: Path, step: int, source: Store, written: float, target: Path) -> None:
    """Copy a step, whose folder is open and whose index was written then, to the folder ``target``."""
    old = step_path(path, step)
    with naming_file(old / INDEX_NAME):
        index = parse_index(index_document(source).data)
    note = note_of(index.metadata, step, written)
    origin = StepOrigin(os.fspath(path), step)
    note = dataclasses.replace(note, step=step, temporary=False, branch=origin, converted=None, mark=None)
    index = dataclasses.replace(index, metadata=add_note(remove_note(index.metadata), note), replaces=(), superseded=())
    if store_at(target).flat:
        # The data of an earlier branch that was removed may still wait there under the names of this attempt.
        copy_opened(source, index, target, overwrite=False)
        return
    folder = CheckpointFolder(target, overwrite=False, names_in=read_names, attempt=index.attempt)
    with contextlib.closing(folder) as saving, saving:
        saving.others_are_done()  # there are none
        for number, file in enumerate(index.files):
            with source.open_file(file.name) as data:
                check_data_file(index, number, data)
                if not saving.link_file(file.name, source):
                    header = read_pieces(data, file.header)
                    saving.write_file(file.name, chain(header, checked_pieces(index, number, data)), data.size)
        saving.commit(encode_index(index))
