"""What the arguments of public functions may be, where several functions share one."""

from __future__ import annotations

import math
import numbers
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from treering._printable import kind_of
from treering._values.timing import DEFAULT_TIMEOUT
from treering.errors import UnsupportedError

_VARIABLE: Final = "TREERING_TIMEOUT_S"
_BOOLS: Final = ("bool", "bool_")
"""What numpy 2 and 1 call their bool, which may come from a comparison; numpy is not imported for it."""

FILE_SUFFIXES: Final = (".msgpack", ".safetensors")
"""Paths that end so become one file; all others become a folder."""

# Suffixes of files of others: a folder of such a name would not be what its user expects.
OTHER_FORMS: Final = frozenset(
    {".bin", ".gguf", ".gz", ".h5", ".hdf5", ".json", ".npy", ".npz", ".onnx", ".pkl", ".pickle", ".pt", ".pth", ".zip"}
)


def require_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    """Refuse an argument that is none of the values it may have.

    Raises:
        UnsupportedError: it is none of them.
    """
    if value not in known:
        raise UnsupportedError(f"{name} is {value!r:.100}, but must be {' or '.join(map(repr, known))}")


def require_flags(**given: object) -> None:
    """Refuse what is neither True nor False: by truth, ``overwrite="no"`` would replace what is there.

    Raises:
        UnsupportedError: one of them is something else.

    Example:
        >>> require_flags(overwrite=True, mapped=False)
    """
    for name, value in given.items():
        if not isinstance(value, bool) and type(value).__name__ not in _BOOLS:
            raise UnsupportedError(f"{name}={value!r:.100}, but must be True or False")


def require_part(at: object, only: object) -> None:
    """Refuse what is no key text or glob.

    Raises:
        UnsupportedError: one of them has no meaning.
    """
    globs = only if isinstance(only, list | tuple) else () if only is None else (only,)
    if odd := [glob for glob in globs if not isinstance(glob, str)]:
        raise UnsupportedError(f"only= is a glob or a list of globs, found {odd[0]!r:.100}")
    if not isinstance(at, str | None):
        hint = "the parts of a key are joined by '/', as in at='params/layers/0'"
        raise UnsupportedError(f"at= is one key text, found {at!r:.100}", hint=hint)


def view_of(name: str, given: Any, hint: str | None = None) -> memoryview:
    """Return a view of the bytes that an argument is.

    Raises:
        UnsupportedError: it is none.

    Example:
        >>> view_of("data", b"ab").nbytes
        2
    """
    try:
        return memoryview(given)
    except TypeError:
        what = f"{name} is {kind_of(given)}, but must be bytes, or a buffer as memoryview takes it"
        raise UnsupportedError(what, hint=hint) from None


def wait_seconds(timeout: object) -> float | None:
    """Return how many seconds a call waits for what goes on in the background; None for as long as it takes.

    Raises:
        UnsupportedError: it is no number.

    Example:
        >>> wait_seconds(2), wait_seconds(None)
        (2.0, None)
    """
    if timeout is None:
        return None
    if not isinstance(timeout, numbers.Real) or math.isnan(timeout):
        hint = "None waits for as long as it takes"
        raise UnsupportedError(f"timeout is {timeout!r:.100}, but must be a number of seconds", hint=hint)
    return min(float(timeout), threading.TIMEOUT_MAX)  # more than a lock can wait


def timeout_seconds(timeout: float | None, environment: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds to wait for other processes: as asked, else ``TREERING_TIMEOUT_S``, else 600.

    Raises:
        UnsupportedError: it is no positive number of seconds.

    Example:
        >>> timeout_seconds(2), timeout_seconds(None, {"TREERING_TIMEOUT_S": "90"}), timeout_seconds(None, {})
        (2.0, 90.0, 600.0)
    """
    given: object = timeout if timeout is not None else environment.get(_VARIABLE) or DEFAULT_TIMEOUT
    name = "timeout" if timeout is not None else _VARIABLE
    try:
        seconds = float(given) if isinstance(given, int | float | str) and not isinstance(given, bool) else math.nan
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UnsupportedError(f"{name} is {given!r:.100}, but must be a positive number of seconds")
    return min(seconds, threading.TIMEOUT_MAX)  # more than a lock can wait


def require_folder_name(place: Path, shown: str, what: str) -> None:
    """Require that the name of a new folder is not that of a file.

    Raises:
        UnsupportedError: it has the suffix of one.
    """
    if place.suffix.lower() in (*FILE_SUFFIXES, *OTHER_FORMS):
        problem = f"{shown!r} has the name of a {place.suffix} file, and {what} is a folder"
        raise UnsupportedError(problem, hint="choose a name without that suffix")
