"""``treering convert`` of whole runs: the steps of a run, or of another program's folder, one by one into a run.

The note of each new step says what it was made of, so that a second call goes on where the first one ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from treering import errors
from treering._background.saves import finish_saves, reword
from treering._checkpoint.convert import ConvertOptions, convert_opened, convert_path, require_target, step_writer
from treering._checkpoint.detect import ForeignForm, Form, detect
from treering._checkpoint.forms import Loss, TargetWriter, Where, accept_losses, find_writer, paths_of, stream_source
from treering._checkpoint.save_options import SaveOptions
from treering._foreign.foreign_tree import ForeignSteps, find_steps, reading_partly
from treering._format.document import INDEX_NAME, read_summary
from treering._format.index import Index
from treering._format.run_document import LATEST_TIME, Conversion, StepNote, add_note, find_note, note_of, remove_note
from treering._runs.folder import RunFolder
from treering._runs.steps import for_each_step, note_records, open_run, read_run, records_in, step_path
from treering._store.api import asking
from treering._store.failures import naming_file
from treering._store.resolve import absolute, located, require_outside, resolved
from treering._values.checksums import digest
from treering._values.human import steps_text

# Errors of one step, after which the others are converted all the same.
_STEP_ERRORS: Final = (errors.CorruptError, errors.FormatError, errors.MismatchError, errors.UnsupportedError)
_DEFAULT: Final[Mapping[str, str]] = {"default": ""}
"""The items of a step of Orbax where none are named: one that is the whole tree."""
# Options that do not change what is in a step: all that is lost of one has to be accepted.
_CALL_ONLY: Final = frozenset({"to", "lose", "describe"})


class _SourceStep(NamedTuple):
    """A step that is to be converted."""

    path: Path
    version: str
    """Another save of the same step has another one."""
    note: StepNote
    """What its new note says, but for the conversion."""
    describe: Callable[[Index], Mapping[str, Any]]
    """Returns its metadata without the note, when it is open."""
    losses: Sequence[Loss] = ()
    """What of it cannot be read."""


def convert_any(source: Where, save: SaveOptions, options: ConvertOptions) -> None:
    """Convert what stands at ``source``, of a run every step; ``treering.convert`` says more."""
    source, *others = paths_of(source)
    if others:
        convert_path([source, *others], save, options)
        return
    finish_saves(source)
    with contextlib.ExitStack() as files:
        with asking(once=True):
            form = detect(source)
            found = find_steps(source, form) if isinstance(form, ForeignForm) else None
            is_tree = form is not Form.RUN and found is None
            writer = require_target(source, save, options) if is_tree else None
            opened = stream_source(source, files) if is_tree else None
        if writer is not None and opened is not None:
            convert_opened(opened, os.fspath(source), writer, save, options)
            return
    if form is Form.RUN:
        with open_run(located(source)) as run:
            records = records_in(run)
            rules = {"keep": records.keep, "save_every": records.save_every}
            _convert_steps(source, run.steps, functools.partial(_look_at, run), save, options=options, rules=rules)
    elif isinstance(form, ForeignForm) and found is not None:
        numbers = functools.partial(_numbers_of, source, form)
        _convert_steps(source, numbers, functools.partial(_look_at_foreign, found), save, options=options, rules={})


def _look_at(run: RunFolder, step: int) -> _SourceStep:
    path = step_path(run.path, step)
    if (data := run.read_index(step)) is None:
        raise errors.NotFoundError(f"{os.fspath(path)!r} was removed")
    with naming_file(path / INDEX_NAME):
        found = read_summary(data)

    def describe(index: Index) -> Mapping[str, Any]:
        if index.attempt != found.attempt:
            raise errors.BusyError(
                f"{os.fspath(path)!r} was replaced while it was being converted", hint="convert it again"
            )
        return remove_note(index.metadata)

    written = run.find_index(step)
    note = note_of(found.metadata, step, 0.0 if written is None else written.modified)
    note = dataclasses.replace(note, step=step, mark=None)
    return _SourceStep(path, found.attempt, note, describe)


def _numbers_of(source: str | os.PathLike[str], form: ForeignForm) -> list[int]:
    found = find_steps(source, form)
    return [] if found is None else list(found.names)


def _look_at_foreign(steps: ForeignSteps, step: int) -> _SourceStep:
    found = steps.describe(step)

    def describe(index: Index) -> Mapping[str, Any]:
        metadata = {name: value for name, value in index.metadata.items() if name != "metrics"}
        for name, value in found.metadata.items():
            own = metadata.get(name, {})
            metadata[name] = value | own if type(value) is dict and type(own) is dict else value
        return metadata

    note = StepNote(step=step, saved=min(max(found.saved, 0.0), LATEST_TIME), metrics=found.metrics)
    losses = [Loss("items", name, text) for name, text in found.losses.items()]
    return _SourceStep(steps.path_of(step), found.version, note, describe, losses)


def _convert_steps(
    source: str | os.PathLike[str],
    steps: Callable[[], Sequence[int]],
    look: Callable[[int], _SourceStep],
    save: SaveOptions,
    *,
    options: ConvertOptions,
    rules: Mapping[str, Any],
) -> None:
    """Convert the steps that the run at ``save.path`` does not have yet; ``rules`` go into its ``run.json``.

    Args:
        source: what holds them.
        steps: returns those that are there, ascending.
        look: returns what is known of one; NotFoundError where it is gone.
        save: where to, and how.
        options: what is asked for.
        rules: what goes into ``run.json``.

    Raises:
        UnsupportedError: the target is no run, or lies in the source.
        ExistsError: it is another run, or a step of it was made in another way.
        TreeringError: a step could not be converted; the message names it.
    """
    shown, place = os.fspath(source), resolved(source)
    writer = find_writer(save.path, save.shown, options.to)
    if writer.steps or options.items is not None:
        options = dataclasses.replace(options, items=options.items or _DEFAULT)
        step_writer(writer, options.items or {})
    elif writer.form != "treering":
        hint = f"convert one of its steps: its folder is the source, below {shown!r}"
        raise errors.UnsupportedError(f"{shown!r} is a run, and {save.shown!r} would hold one step", hint=hint)
    require_outside(source, save.path, save.shown)
    save = dataclasses.replace(save, path=absolute(save.path))  # a callback may change the current folder
    if not (numbers := steps()):
        raise errors.NotFoundError(f"the run {shown!r} has no step yet")
    made_of: dict[int, Conversion | None] = {}
    if writer.steps:
        made_of = importlib.import_module(writer.steps).find_conversions(save)
    else:
        made_of = read_run(save.path, _read_conversions, made_of)
    there = _digests(made_of, save.path, os.fspath(place), numbers)
    failed: dict[int, errors.TreeringError] = {}

    def convert(step: int) -> None:
        try:
            origin = os.fspath(place), there.get(step)
            _convert_step(look(step), *origin, writer=writer, save=save, options=options)
        except _STEP_ERRORS as error:
            failed[step] = error
        except errors.TreeringError as error:
            raise reword(error, f"step {step} of {shown!r} was not converted") from error

    for_each_step(source, numbers, steps, convert)
    if not writer.steps:
        read_run(save.path, lambda run: note_records(run, dataclasses.replace(records_in(run), **rules)), None)
    for step, problem in failed.items():
        what = f"{steps_text(list(failed))} of {shown!r} could not be converted"
        raise reword(problem, what if len(failed) == 1 else f"{what}; step {step}") from problem


def _read_conversions(run: RunFolder) -> dict[int, Conversion | None]:
    """Return the steps of a run by their numbers, each with what it was converted from, if it was."""
    found: dict[int, Conversion | None] = {}
    for step in run.steps():
        if (data := run.read_index(step)) is None:
            continue
        with naming_file(step_path(run.path, step) / INDEX_NAME):
            note = find_note(read_summary(data).metadata)
        found[step] = None if note is None else note.converted
    return found


def _digests(there: Mapping[int, Conversion | None], path: Path, place: str, numbers: Sequence[int]) -> dict[int, str]:
    """Return the digests of what the steps that are there were made of.

    Raises:
        ExistsError: a step of it does not come from ``place``, or was left behind there by a save of an earlier one.
    """
    found: dict[int, str] = {}
    for step, origin in there.items():
        if origin is None or (step not in numbers and (origin.path != place or step > numbers[-1])):
            problem = f"{os.fspath(path)!r} is another run: its step {step} is none of the steps of {place!r}"
            raise errors.ExistsError(problem, hint="convert to another path")
        found[step] = origin.digest
    return found


def _texts_of(options: ConvertOptions) -> Iterator[str]:
    """Yield the options that change what is in a step; a text is the same as a list of it alone."""
    for name in (field.name for field in dataclasses.fields(options) if field.name not in _CALL_ONLY):
        value = getattr(options, name)
        value = dict(sorted(value.items())) if name == "items" and value else value  # in any order
        if value not in (None, (), []):
            yield f"{name}={list(value) if isinstance(value, list | tuple) else [value]!r}"


def _convert_step(
    found: _SourceStep, place: str, there: str | None, *, writer: TargetWriter, save: SaveOptions,
    options: ConvertOptions,
) -> None:  # fmt: skip
    """Convert a step; ``there`` is the digest of what the one that is there was made of, and None where none is."""
    made_of = digest([repr((found.version, *_texts_of(options))).encode("utf-8", "surrogatepass")])
    if there == made_of:
        return
    path = save.path / str(found.note.step) if writer.steps else step_path(save.path, found.note.step)
    if there is not None and (writer.steps or not save.overwrite):
        problem = f"{os.fspath(path)!r} was made of another save of the step, or with other options"
        replace = "remove its folder" if writer.steps else "overwrite=True replaces it"
        raise errors.ExistsError(problem, hint=f"convert to another path; {replace}")
    accept_losses(writer.form, found.losses, options.lose)
    note = dataclasses.replace(found.note, converted=Conversion(place, found.note.step, made_of))
    save = dataclasses.replace(save, path=path, shown=os.fspath(path), overwrite=there is not None)
    given = dataclasses.replace(options, to=writer.form, describe=lambda index: add_note(found.describe(index), note))
    with reading_partly():  # what is not read of it was accepted
        convert_path(found.path, save, given)
