"""Data that are gone while they are read: replaced or removed in a bucket, or lost."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from treering._codec.key_document import attempts_in
from treering._store.failures import DataFileMissing
from treering._store.open_folder import OpenFolder
from treering.errors import Corrupt, NotFound, TreeringError

COPY_ALL: Final = "copy the whole folder, every file that treering.json names"
"""What to do where a file is lost."""


def is_attempt_there(path: Path, attempt: str, *, opened: bool = True) -> bool:
    """Tell whether the checkpoint at a path is still the one of an attempt; True also where nothing can be said.

    In a bucket its data go when it was superseded for as long as the grace; elsewhere open files stay whole.

    Args:
        path: the checkpoint.
        attempt: the one that was opened.
        opened: whether all its files were opened before they were read.
    """
    try:
        with OpenFolder(path) as folder:
            return (opened and not folder.store.flat) or attempts_in(folder.read_index())[0] == attempt
    except NotFound:
        return False
    except TreeringError:
        return True


def require_no_loss(error: Exception) -> None:
    """Raise damage where data are missing that the index still names: not found would say that nothing is there.

    Raises:
        Corrupt: they are.
    """
    if isinstance(error, DataFileMissing):
        raise Corrupt(error.message, hint=COPY_ALL) from error
