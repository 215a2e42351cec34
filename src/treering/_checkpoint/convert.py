"""A tree in memory, or what is at a path in any form that treering reads, saved in a form that it writes.

Arrays go from file to file a piece at a time. What the new form cannot hold is refused by name before anything is
written, and the result is read back: it is verified by its own checksums, or compared with what was read.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from treering._arrays.derived_source import cast_floats, map_source, unmap_source
from treering._arrays.host import this_processes
from treering._arrays.source import Source
from treering._arrays.source_arrays import SourceArray, tree_source
from treering._background.saves import finish_saves
from treering._background.writer import UNWATCHED, Watch
from treering._checkpoint.forms import (
    FORMS,
    SUFFIXES,
    TargetWriter,
    Where,
    accept_losses,
    find_writer,
    is_run,
    key_texts,
    left_out,
    paths_of,
    stream_source,
    verify_bytes,
)
from treering._checkpoint.save_options import SaveOptions
from treering._format.index import Index, LeafType
from treering._format.selection import drop_leaves, select
from treering._keymap.key_map import KeyMap, check_key_map
from treering._store.api import asking
from treering._store.resolve import absolute, require_outside, require_path, resolved
from treering._tree.flatten import flatten
from treering._values.arguments import require_part
from treering._values.telemetry import report
from treering._view.progress import Progress, showing
from treering.errors import BusyError, CorruptError, NotFoundError, UnsupportedError

_FILE_MEMBERS: Final = ("format", "total_size")
"""Members that say how a file of another program was written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What the caller of a conversion asks for; ``treering.convert`` says what each means."""

    to: str | None = None
    only: str | Sequence[str] | None = None
    at: str | None = None
    key_map: KeyMap | None = None
    dtype: Any = None
    lose: str | Sequence[str] = ()
    items: Mapping[str, str] | None = None
    """Name of an item -> what is in it; None: the result has none."""
    describe: Callable[[Index], Mapping[str, Any]] | None = None
    """Makes the metadata of the result; None: they are those of the source."""

    def __post_init__(self) -> None:
        require_part(self.at, self.only)
        lose, items = cast("object", self.lose), cast("object", {} if self.items is None else self.items)
        if not isinstance(lose, Collection) or not all(isinstance(name, str) for name in lose):
            raise UnsupportedError(f"lose= is a kind of losses or a glob, or a list of them, found {lose!r:.100}")
        if not isinstance(items, Mapping) or not all(isinstance(text, str) for text in (*items, *items.values())):
            raise UnsupportedError(f"items= is a dict: name of an item -> key text, found {items!r:.100}")


def save_options(
    target: str | os.PathLike[str],
    *,
    to: str | None,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool,
    progress: Progress | bool | None,
    max_file_size: int | str | None,
) -> SaveOptions:
    """Return how the result of a conversion is saved; raises as ``SaveOptions.of`` does."""
    require_path(target)
    if max_file_size is not None and to != "hf":
        raise UnsupportedError("max_file_size= needs a form that has it", hint="to='hf', a Hugging Face folder, has it")
    others = () if to in (None, *FORMS) else (Path(target).suffix.lower(),)
    return SaveOptions.of(
        target, metadata=metadata, overwrite=overwrite, progress=progress, processes="this", timeout=None,
        max_file_size=max_file_size, suffixes=(*SUFFIXES, *others),
    )  # fmt: skip


def convert_path(source: Where, save: SaveOptions, options: ConvertOptions) -> None:
    """Convert ``source``, which is no run; ``treering.convert`` says more."""
    paths = paths_of(source)
    writer, *_ = [require_target(one, save, options) for one in paths]
    with contextlib.ExitStack() as files:
        with asking(once=True):
            for one in filter(is_run, paths):
                raise UnsupportedError(f"{os.fspath(one)!r} is a run", hint="convert its steps, one at a time")
            opened = stream_source(paths if len(paths) > 1 else paths[0], files)
        convert_opened(opened, " + ".join([os.fspath(one) for one in paths]), writer, save, options)


def require_target(source: str | os.PathLike[str], save: SaveOptions, options: ConvertOptions) -> TargetWriter:
    """Return what writes the result, when no save of the source or of the result is under way any more.

    Raises:
        UnsupportedError: there is no such form, the path is not one of it, or lies in the source.
    """
    check_key_map(options.key_map)
    writer = find_writer(save.path, save.shown, options.to)
    if not writer.suffix or resolved(save.path) == resolved(source):  # a file may lie beside those of a folder
        require_outside(source, save.path, save.shown)
    finish_saves(source)
    finish_saves(save.path)
    return writer


def convert_opened(
    opened: Source, source: str, writer: TargetWriter, save: SaveOptions, options: ConvertOptions
) -> None:
    """Convert what was opened at ``source``; ``treering.convert`` says more."""
    with showing(save.progress):
        mapped = opened if options.key_map is None else map_source(opened, options.key_map)
        metadata = dict(options.describe(opened.index)) if options.describe else _metadata_of(opened.index)
        save = dataclasses.replace(save, metadata=metadata)
        watch, there = _StillThere(opened, source), absolute(save.path)  # a callback may change the current folder
        try:
            written = _write(mapped, writer, save, options, watch)
        except (CorruptError, NotFoundError):
            watch.claim()  # what was replaced is neither damaged nor lost
            raise
    if written is not None:
        _require_equal(dataclasses.replace(save, path=there), written)
    elif (found_damage := verify_bytes(there, None)).findings:
        raise CorruptError(f"{save.shown!r} was written and does not verify: {found_damage.findings[0].problem}")


def export_tree(tree: Any, save: SaveOptions, options: ConvertOptions) -> None:
    """Save a tree in memory; ``treering.export`` says more.

    Raises:
        UnsupportedError: this is not process 0 of its job, or the form cannot hold the tree.
    """
    check_key_map(options.key_map)
    if (this := this_processes(()).this) != 0:
        hint = "call it under `if jax.process_index() == 0:`"
        raise UnsupportedError(f"process {this} cannot export {save.shown!r}: process 0 does, alone", hint=hint)
    writer = find_writer(save.path, save.shown, options.to)
    finish_saves(save.path)
    source = tree_source(flatten(tree))
    if options.key_map is not None:
        source = unmap_source(source, options.key_map)
    save = dataclasses.replace(save, metadata=save.python_metadata())
    with report("save", save.path), showing(save.progress):
        _write(source, writer, save, options, UNWATCHED)


def _write(
    source: Source, writer: TargetWriter, save: SaveOptions, options: ConvertOptions, watch: Watch
) -> Mapping[str, Any] | None:
    """Write the part of an opened tree that is asked for; return what was written, or None where checksums tell."""
    module = importlib.import_module(writer.module) if options.items is None else step_writer(writer, options.items)
    source = source if options.dtype is None else cast_floats(source, options.dtype)
    part = select(source.index.structure, source.index.keys, at=options.at, only=options.only)
    losses = accept_losses(writer.form, list(module.find_losses(source, part, save.metadata)), options.lose)
    if dropped := left_out(losses):
        if len(dropped) == len(part.keys):
            raise UnsupportedError("nothing would be left of the tree", hint="choose another form")
        part = drop_leaves(part, dropped)
    if any(loss.kind == "keys" for loss in losses):
        source = _lose_keys(source)
    members = {loss.name for loss in losses if loss.kind == "metadata"}
    save = dataclasses.replace(save, metadata={n: value for n, value in save.metadata.items() if n not in members})
    written: Mapping[str, Any] | None = module.write(source, part, save, watch)
    return written


def step_writer(writer: TargetWriter, items: Mapping[str, str]) -> Any:
    """Return what writes several items into one folder.

    Raises:
        UnsupportedError: the form has no items, or one has no name.
    """
    if not writer.steps:
        raise UnsupportedError(f"the form {writer.form} has no items", hint="to='orbax' has them")
    return importlib.import_module(writer.steps).StepWriter(items)


class _StillThere(Watch):
    """Refuses the commit where what was read does not stand at its path any more."""

    def __init__(self, source: Source, shown: str) -> None:
        super().__init__()
        self._source = source
        self._shown = shown

    def claim(self) -> None:
        """Look once more, before the result gets its name."""
        if not self._source.is_consistent(joint=False):
            raise BusyError(f"{self._shown!r} was replaced while it was being converted", hint="convert it again")


def _metadata_of(index: Index) -> dict[str, Any]:
    hidden = () if index.verified else _FILE_MEMBERS
    return {name: value for name, value in index.metadata.items() if name not in hidden}


def _lose_keys(source: Source) -> Source:
    """Return an opened tree whose PRNG keys are their data."""
    index = source.index
    types = [LeafType(kind="jax", dtype=k.dtype, shape=k.shape) if k.kind == "key" else k for k in index.types]
    lost = copy.copy(source)
    lost.index = dataclasses.replace(index, types=types)
    return lost


# --------------------------------------------------------------------------------------------------------- verification


def _require_equal(save: SaveOptions, written: Mapping[str, Any]) -> None:
    """Read the result, and compare each leaf with what was read of the source.

    Raises:
        CorruptError: they are not the same.
    """
    with contextlib.ExitStack() as files:
        found = stream_source(save.path, files)
        numbers = {key: number for number, key in enumerate(key_texts(found.index.structure))}
        wrong = sorted(numbers.keys() ^ written.keys())
        for key in [] if wrong else written:
            if not _is_equal(found, numbers[key], written[key]):
                wrong.append(key)
    if wrong:
        raise CorruptError(f"{save.shown!r} was written, and its leaf {wrong[0]!r:.200} is not the one that was read")


def _is_equal(found: Source, leaf: int, wanted: Any) -> bool:
    if not found.index.type_of(leaf).stored:
        value = found.index.values[leaf]
        return type(value) is type(wanted) and repr(value) == repr(wanted)
    array = SourceArray(found, leaf)
    if isinstance(wanted, SourceArray):
        for _ in array.blocks(0, array.size):
            pass
        like = (array.shape, array.dtype) == (wanted.shape, wanted.dtype)
        return like and array.checksum.digest() == wanted.checksum.digest()
    data = wanted.encode() if isinstance(wanted, str) else wanted
    return b"".join(array.blocks(0, array.size)) == data
