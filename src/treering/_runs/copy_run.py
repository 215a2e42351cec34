"""Copies: ``treering cp`` of what stands at a path, and branches, which copy a step into a new run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from treering._arrays.jobs import Progress
from treering._checkpoint.copy_checkpoint import checked_pieces, copy_checkpoint, copy_file, copy_opened
from treering._checkpoint.detect import ForeignForm, Form, detect
from treering._checkpoint.source import check_data_file, read_pieces
from treering._checkpoint.transaction import CheckpointFolder
from treering._format.document import INDEX_NAME, encode_index, parse_index, read_names
from treering._format.run_document import StepOrigin, add_note, note_of, remove_note
from treering._runs.folder import NOT_READ, RunFolder
from treering._runs.gc import tidy_step
from treering._runs.steps import (
    Records,
    for_each_step,
    missing_step,
    note_records,
    open_run,
    read_run,
    records_in,
    step_path,
    steps_of,
)
from treering._store import resolve
from treering._store.api import Store
from treering._store.failures import naming_file
from treering._store.open_folder import index_document
from treering._values.arguments import require_folder_name
from treering.errors import BusyError, ExistsError, NotFoundError, UnsupportedError


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
        NotFoundError: there is no such step; the message names those there are.
        ExistsError: there is a run at ``new`` already.
        UnsupportedError: ``new`` lies in the run.
        CorruptError: the step's index is damaged, or a data file has another size or header than it says.
        BusyError: another process branches to the same path.
        StoreError: the system refused; no run was begun, unless it is ``run.json`` that is named.
    """
    there = steps_of(new)
    if there:
        what = f"{os.fspath(new)!r} is already a run: it has the step {there[-1]}"
        raise ExistsError(what, hint="branch to a new path")
    resolve.require_outside(path, new, os.fspath(new))
    with contextlib.suppress(NotFoundError), RunFolder(new) as begun:
        # A branch that was killed here used the same attempt.
        tidy_step(begun, step, read_names)
    with open_run(path) as run:
        source, written = run.open_step(step), run.find_index(step)
        if source is None or written is None:
            raise missing_step(path, step, run.steps())
        try:
            with source:
                _copy(path, step, source, written.modified, step_path(new, step))
        except (BusyError, NotFoundError) as error:
            if run.find_index(step) is None:  # removed meanwhile
                raise missing_step(path, step, run.steps()) from error
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
    if resolve.store_at(target).longest_delay:
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


def copy_path(source: str, target: str, *, overwrite: bool, progress: Progress | None = None) -> Form | ForeignForm:
    """Copy a checkpoint, a run step by step, or a single file, and return which it was.

    Args:
        source: what is copied.
        target: the path of the copy itself.
        overwrite: whether what is there may be replaced.
        progress: called with the bytes of each checkpoint or file that are copied.

    Raises:
        UnsupportedError: the source is a leaves directory, or the target cannot be written.
        ExistsError: something is at the target.
        TreeringError: as `copy_checkpoint` and `copy_file`.
    """
    place, to = resolve.located(resolve.kept(source)), resolve.kept(target)
    form = detect(place)
    resolve.require_outside(place, to, target)
    if form is Form.LEAVES or (isinstance(form, ForeignForm) and resolve.is_folder(place)):
        what = "a leaves directory" if form is Form.LEAVES else f"of the form {form.value}"
        hint = "treering convert writes it anew, in a form that --to names"
        raise UnsupportedError(f"{source!r} is {what}", hint=hint)
    if form is Form.CHECKPOINT:
        copy_checkpoint(place, _new_folder(to, target), overwrite=overwrite, progress=progress)
    elif form is Form.RUN:
        copy_run(place, _new_folder(to, target), overwrite=overwrite, progress=progress)
    else:
        is_safetensors = form is Form.SAFETENSORS
        copy_file(
            place, resolve.new_file_path(to), is_safetensors=is_safetensors, overwrite=overwrite, progress=progress
        )
    return form


def _new_folder(to: str | os.PathLike[str], target: str) -> Path:
    path = resolve.new_folder_path(to)
    if not resolve.is_taken(path):
        require_folder_name(path, target, "the copy")
    elif not resolve.is_folder(path):
        # In a bucket a folder may have the name of an object, and readers would find the object.
        raise ExistsError(f"{target!r} is a file; the copy would be a folder", hint="copy to another path")
    return path


def copy_run(source: Path, target: Path, *, overwrite: bool, progress: Progress | None = None) -> None:
    """Copy the steps of a run that an earlier copy of it does not have yet, the earliest first, and its rules.

    Begun again after an interrupt, it goes on where it was. A step that is removed meanwhile is left out.

    Raises:
        NotFoundError: the run has no step.
        ExistsError: the other one is another run, or has such a step, which is no copy of it.
        TreeringError: as `copy_checkpoint`.
    """
    with open_run(source) as run:
        records = records_in(run)
        done = _copied_steps(source, records, target, overwrite=overwrite)

        def copy(step: int) -> None:
            if step in done:
                return
            if (opened := run.open_step(step)) is None:
                raise NotFoundError(f"step {step} of {os.fspath(source)!r} was removed")
            with opened:
                with naming_file(step_path(source, step) / INDEX_NAME):
                    index = parse_index(index_document(opened).data)
                copy_opened(opened, index, step_path(target, step), overwrite=overwrite, progress=progress)

        for_each_step(source, run.steps(), run.steps, copy)
    with RunFolder(target) as copied:
        note_records(copied, dataclasses.replace(records_in(copied), keep=records.keep, save_every=records.save_every))


def _copied_steps(source: Path, records: Records, target: Path, *, overwrite: bool) -> set[int]:
    """Return the steps of the target that are copies of those that the source has.

    The source may have removed others since they were copied: they say from where they are.

    Raises:
        ExistsError: a step of the target is none that the source has or had.
    """
    attempts = {record.step: record.attempt for record in records.readable}
    origins: dict[int, Mapping[str, Any]] = read_run(target, _origins_in, {})
    same = {step for step, origin in origins.items() if step in attempts and origin.get("attempt") == attempts[step]}
    # The same run may have been copied from another place, or under another name.
    runs = {os.fspath(resolve.resolved(source)), *(_run_of(origins[step]) for step in same)}
    newest = max((*attempts, *records.unreadable), default=-1)
    for step, origin in origins.items():
        if step in same or step in records.unreadable or (step in attempts and overwrite):
            continue
        if step in attempts:
            hint = "copy to another run, or pass --overwrite"
            raise ExistsError(f"{os.fspath(step_path(target, step))!r} is another step", hint=hint)
        shown = os.fspath(source)
        if (run := _run_of(origin)) is None or run not in runs:
            what = f"{os.fspath(target)!r} is another run: its step {step} is none of the steps of {shown!r}"
            raise ExistsError(what, hint="copy to another path")
        if step > newest:  # a resume from the copy would take it
            what = f"{os.fspath(target)!r} has step {step}, and {shown!r} has saved an earlier one since, or lost it"
            raise ExistsError(what, hint="remove the later steps from the copy, or copy to another path")
    return same


def _origins_in(run: RunFolder) -> dict[int, Mapping[str, Any]]:
    """Return the origin that each step of a run notes; it is empty for a step that is no copy, or cannot be read."""
    found: dict[int, Mapping[str, Any]] = {}
    for step in run.steps():
        found[step] = {}
        with contextlib.suppress(*NOT_READ):
            if (data := run.read_index(step)) is not None:
                found[step] = parse_index(data).origin or {}
    return found


def _run_of(origin: Mapping[str, Any]) -> str | None:
    """Return the run that a copied step comes from; None where nothing says it."""
    folder, mark, _ = str(origin.get("path", "")).rpartition("step_")
    if mark:
        with contextlib.suppress(UnsupportedError):  # a file may say anything
            return os.fspath(resolve.resolved(folder))
    return None
