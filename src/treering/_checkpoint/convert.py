"""What stands at one path, of any form that treering reads, saved to another path in a form that it writes.

Arrays go from file to file a piece at a time. What the new form cannot hold is refused by name before anything is
written, and the result is read back and verified.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Final, TypeAlias

from treering._arrays.mapped_source import cast_floats, map_source
from treering._arrays.source import Source
from treering._arrays.source_arrays import describe_source
from treering._arrays.written import divide_save
from treering._background.save_job import Watch
from treering._background.saves import settle
from treering._checkpoint.forms import is_run, open_source, verify_bytes
from treering._checkpoint.save_files import SafetensorsSave
from treering._checkpoint.save_folder import commit_index, make_index, write_data
from treering._checkpoint.save_options import SaveOptions
from treering._checkpoint.transaction import CheckpointFolder
from treering._format.document import read_names
from treering._format.safetensors import check_single_file, check_single_metadata
from treering._format.selection import Selection, select
from treering._keymap.key_map import KeyMap, check_key_map
from treering._store.resolve import require_path, settled
from treering._tree.flatten import Flattened
from treering._view.progress import showing
from treering.errors import Busy, Corrupt, Unsupported

TARGETS: Final = ("treering", "safetensors")
"""The forms that can be written."""

_Writer: TypeAlias = "Callable[[Source, Selection, SaveOptions, Watch], None]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What the caller of a conversion asks for; ``treering.convert`` says what each means."""

    to: str | None = None
    only: str | Sequence[str] | None = None
    at: str | None = None
    key_map: KeyMap | None = None
    dtype: str | None = None


def convert_path(source: str | os.PathLike[str], save: SaveOptions, options: ConvertOptions) -> None:
    """Convert ``source``; ``treering.convert`` says more."""
    require_path(source)
    check_key_map(options.key_map)
    form = "safetensors" if save.path.suffix.lower() == ".safetensors" else "treering"
    if options.to not in (None, *TARGETS):
        raise Unsupported(f"to={options.to!r:.100} is not a form that can be written", hint=", ".join(TARGETS))
    if save.path.suffix.lower() == ".msgpack" or (options.to or form) != form:
        hint = "a path that ends in .safetensors becomes a file, any other a folder of treering"
        raise Unsupported(f"{save.shown!r} is not a path of the form {options.to or 'treering'}", hint=hint)
    if settled(save.path) == settled(source):
        raise Unsupported(f"{save.shown!r} is source and target", hint="convert to another path")
    if is_run(source):
        raise Unsupported(f"{os.fspath(source)!r} is a run", hint="convert its steps, one at a time")
    settle(source)
    settle(save.path)
    with showing(save.progress), contextlib.ExitStack() as files:
        opened = open_source(source, files, mapped=False)
        metadata = dict(opened.index.metadata)
        if form == "safetensors" and not opened.index.verified:
            metadata.pop("format", None)  # it says which program wrote the file
        save = dataclasses.replace(save, metadata=metadata)
        mapped = opened if options.key_map is None else map_source(opened, options.key_map)
        mapped = mapped if options.dtype is None else cast_floats(mapped, options.dtype)
        part = select(mapped.index.structure, mapped.index.keys, at=options.at, only=options.only)
        _WRITERS[form](mapped, part, save, _StillThere(opened, os.fspath(source)))
    found = verify_bytes(save.path, None)
    if found.findings:
        raise Corrupt(f"{save.shown!r} was written and does not verify: {found.findings[0].problem}")


class _StillThere(Watch):
    """Refuses the commit where what was read does not stand at its path any more."""

    def __init__(self, source: Source, shown: str) -> None:
        super().__init__()
        self._source = source
        self._shown = shown

    def claim(self) -> None:
        """Look once more, before the result gets its name."""
        if not self._source.index.verified and not self._source.is_current():
            raise Busy(f"{self._shown!r} was replaced while it was being converted", hint="convert it again")


def _flattened(source: Source, part: Selection) -> Flattened:
    kinds = [source.index.type_of(leaf).kind for leaf in part.leaves]
    return Flattened(tokens=list(part.structure), keys=list(part.keys), kinds=kinds)


def _write_folder(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> None:
    flat = _flattened(source, part)
    metadata = save.json_metadata()
    with closing(CheckpointFolder(save.path, overwrite=save.overwrite, names_in=read_names)) as folder, folder:
        layout = divide_save(flat.keys, describe_source(source, part), 1).files(folder.attempt, [0])
        checksums = write_data(layout, folder, save)
        index = make_index(flat, layout, checksums, metadata, attempt=folder.attempt)
        commit_index(folder, index, layout.headers, watch)


def _write_safetensors(source: Source, part: Selection, save: SaveOptions, watch: Watch) -> None:
    flat, leaves = _flattened(source, part), describe_source(source, part)
    check_single_file(flat.keys, leaves.types, leaves.leaf_types)
    check_single_metadata(save.json_metadata())
    SafetensorsSave(flat, leaves).write(save, watch)


_WRITERS: Final[Mapping[str, _Writer]] = {"treering": _write_folder, "safetensors": _write_safetensors}
