"""A folder that is meant to be a run's: a checkpoint, and numbered steps of another library, are refused.

A run that began beside such steps would silently begin at step 0.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from treering._checkpoint.detect import find_foreign_folder
from treering._checkpoint.other_folders import FOLDER_NAMES, name_folder
from treering._codec.key_document import HEAD_BYTES
from treering._format.document import read_digest
from treering._store.open_folder import find_index_at
from treering._store.resolve import find_at, open_file, root_of
from treering._store.run_folder import RUN_DOCUMENT, RunFolder, step_name, step_of_name
from treering._values.checkpoint_names import INDEX
from treering.errors import Format, PermissionDenied

# A number, alone or after a word such as step or checkpoint; gpt2 and era5 are not steps.
_NUMBERED: Final = re.compile(
    r"(?:[a-z_.-]*(?:step|checkpoint|ckpt|epoch|iter|iteration|save|run)s?[_.=-]?)?([0-9]{1,18})", re.IGNORECASE
)
_FLAX: Final = re.compile(r"checkpoint_[0-9]+")
_OWN: Final = "a checkpoint of treering"
_LOOKED_AT: Final = 3
_ITEMS: Final = 16


def open_run(path: Path) -> RunFolder:
    """Open a run's folder, which need not have steps yet.

    Raises:
        NotFound: nothing is there.
        Format: it is a checkpoint, or holds numbered steps of another library.
        StoreFailed: a file is there, or the system refuses.
    """
    run = RunFolder(path)
    with contextlib.ExitStack() as undo:
        undo.enter_context(run)
        require_run(run)
        undo.pop_all()
    return run


def require_run(run: RunFolder) -> None:
    """Refuse a folder that is open and is no run, nor could be one.

    Raises:
        Format: it is a checkpoint, or holds numbered steps of another library.
        StoreFailed: the system refuses.
    """
    shown = os.fspath(run.path)
    names = _names_in(run)
    if (names is None or INDEX in names) and run.holds_index():
        hint = f"treering.load({shown!r}) loads it; use another folder for the run"
        raise Format(f"{shown!r} is a checkpoint, not a run", hint=hint)
    if names is None or RUN_DOCUMENT in names or run.latest() is not None:
        return
    if (named := next((other for name, other in FOLDER_NAMES.items() if name in names), None)) is not None:
        raise _other_form(shown, named)
    numbered = sorted((int(found[1]), name) for name in names if (found := _NUMBERED.fullmatch(name)))
    # An index under a step's own name belongs to a step, or to no checkpoint.
    for number, name in reversed(numbered[-_LOOKED_AT:]):
        other = _other(run.path / name)
        hint = "use another folder for the run; `treering convert` makes a run of Orbax's steps"
        if other == _OWN:
            hint = f"name the folders as a run does, {step_name(number)!r} for {name!r}, or use another folder"
        if other is not None:
            what = f"it holds other numbered steps, {_listed(numbered)}; {name!r} is {other}"
            raise Format(f"{shown!r} is not a run: {what}", hint=hint)
    if (form := find_foreign_folder(run.path)) is not None:
        raise _other_form(shown, f"of the form {form.value}")


def _other_form(shown: str, what: str) -> Format:
    return Format(f"{shown!r} is {what}, and a folder holds one form alone", hint="use another folder for the run")


def _names_in(run: RunFolder) -> set[str] | None:
    """Return what lies in a run's folder; None where a bucket denies to list it."""
    try:
        return set(run.names())
    except PermissionDenied:
        if run.flat:
            return None
        raise


def _other(place: Path) -> str | None:
    """Say what a numbered folder or file is; None where it may be anything."""
    with contextlib.suppress(OSError):
        found = find_at(place)
        if found is not None and found.is_file:
            return "a file of flax.training.checkpoints" if _FLAX.fullmatch(place.name) else None
        if find_index_at(place, follow=False) is not None:
            whole = step_of_name(place.name) is None and read_digest(_head(place / INDEX)) is not None
            return _OWN if whole else None
        items = sorted(root_of(place).places(place))[:_ITEMS]
        found_in = (name_folder(each) for each in (place, *(place / item for item in items)))
        return next((other for other in found_in if other), None)
    return None


def _head(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(0, min(HEAD_BYTES, file.size))


def _listed(numbered: Iterable[tuple[int, str]]) -> str:
    names = [repr(name) for _, name in numbered]
    return ", ".join(names if len(names) <= 2 * _LOOKED_AT else [*names[:2], "...", *names[-2:]])
