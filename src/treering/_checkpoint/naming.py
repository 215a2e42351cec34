"""Which file it was: put in front of what is wrong with its content."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from treering.errors import Corrupt, Format, TreeringError


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put a file's name in front of what is wrong with its content.

    Example:
        >>> with naming(Path("treering.json")):
        ...     raise Corrupt("it is cut short")
        Traceback (most recent call last):
            ...
        treering.errors.Corrupt: 'treering.json': it is cut short
    """
    try:
        yield
    except TreeringError as error:
        if isinstance(error, Corrupt | Format) and os.fspath(path) not in error.message:
            named = error.message.startswith(f"{path.name} ")
            rest = error.message.removeprefix(path.name) if named else f": {error.message}"
            error.message = f"{os.fspath(path)!r}{rest}"
        raise
