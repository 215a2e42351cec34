"""What the arguments of public functions may be, where several functions share one."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from typing import Final

from treering._values.timing import DEFAULT_TIMEOUT
from treering.errors import UnsupportedError

_VARIABLE: Final = "TREERING_TIMEOUT_S"
_BOOLS: Final = ("bool", "bool_")
"""What numpy 2 and 1 call their bool, which may come from a comparison; numpy is not imported for it."""


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
