"""What is wrong with a run's ``run.json``, in words: never damage, for all that it says stands in the steps too."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from treering._format.run_document import parse_run
from treering._store.run_folder import RUN_DOCUMENT, RunFolder
from treering.errors import Corrupt, Format, Unsupported

_ANEW: Final = "the next save makes it anew from the steps"


def cache_trouble(path: Path) -> str | None:
    """Say why ``run.json`` cannot be used; None where it can.

    Raises:
        NotFound: there is no such folder.
        StoreFailed: the system refuses.

    Example:
        >>> import pathlib, tempfile
        >>> cache_trouble(pathlib.Path(tempfile.mkdtemp()))
        'there is no run.json; the next save makes it anew from the steps'
    """
    with RunFolder(path) as run:
        data = run.read_document()
    if data is None:
        return f"there is no {RUN_DOCUMENT}; {_ANEW}"
    try:
        parse_run(data)
    except (Corrupt, Format, Unsupported) as error:
        return f"{RUN_DOCUMENT} cannot be used ({error.message}); {_ANEW}"
    return None
