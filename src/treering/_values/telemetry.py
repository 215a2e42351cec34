"""What treering reports of its own work: one logger, and durations that listeners of ``jax.monitoring`` receive.

The logger is called ``treering`` and is silent until the program configures ``logging``. INFO has one line for each
save, load and removal; DEBUG also has a line for each phase. Each operation and each phase that succeeds is also one
duration event of ``jax.monitoring``, in seconds, where the program has imported jax: ``/treering/save``,
``/treering/save/write`` and so on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterator

from treering._printable import printable
from treering._values.human import duration_text

LOGGER = logging.getLogger("treering")
LOGGER.addHandler(logging.NullHandler())


@contextlib.contextmanager
def report(operation: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Report the operation that the block carries out: one line at INFO and one duration event.

    Args:
        operation: ``save``, ``load`` or ``remove``.
        path: where, as the user called it.

    Example:
        >>> with report("save", "ckpt"):
        ...     pass
    """
    start = time.perf_counter()
    try:
        yield
    except BaseException as error:
        _log(logging.INFO, f"{operation} {os.fspath(path)!r}: {type(error).__name__} after", start)
        raise
    _log(logging.INFO, f"{operation} {os.fspath(path)!r}: done in", start)
    _record(operation, start)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Report one phase of an operation: one line at DEBUG and one duration event.

    Args:
        name: the operation and the phase, as ``save/write``.

    Example:
        >>> with phase("save/write"):
        ...     pass
    """
    start = time.perf_counter()
    yield
    _log(logging.DEBUG, f"{name}:", start)
    _record(name, start)


def _log(level: int, text: str, start: float) -> None:
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, "%s %s", printable(text), duration_text(time.perf_counter() - start))


def _record(name: str, start: float) -> None:
    jax = sys.modules.get("jax")
    if (record := getattr(getattr(jax, "monitoring", None), "record_event_duration_secs", None)) is not None:
        try:
            record(f"/treering/{name}", time.perf_counter() - start)
        except Exception:  # a listener of the program's: the work that it hears of is done
            LOGGER.warning("a listener of jax.monitoring raised for /treering/%s", name, exc_info=True)
