"""What treering reports of its own work: one logger, durations for listeners of ``jax.monitoring``, and warnings.

The logger is called ``treering`` and is silent until the program configures ``logging``. INFO has one line for each
save, load and removal; DEBUG also has a line for each phase. The lines at INFO have the requests to buckets, their
retries and the bytes in them; operations that run at the same time each count those of the other too. Each operation
and each phase that succeeds is also one duration event of ``jax.monitoring``, in seconds, where the program has
imported jax: ``/treering/save``, ``/treering/save/write`` and so on.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence

from treering._printable import hide_secrets, list_lines, printable
from treering._values.human import bytes_text, duration_text, pluralize


def warn_of(what: str, lines: Sequence[str], category: type[UserWarning]) -> None:
    """Warn of several things at once, at the line outside of treering from which the call came.

    Args:
        what: what they have in common.
        lines: one for each.
        category: the class of the warning.
    """
    level = 1
    frame = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in ("treering", "contextlib"):
        frame = frame.f_back
        level += 1
    warnings.warn(f"{printable(what)}:{list_lines(lines)}", category, stacklevel=level)


LOGGER = logging.getLogger("treering")
LOGGER.addHandler(logging.NullHandler())


class Traffic:
    """Requests that this process has made to buckets, and the bytes in them.

    Example:
        >>> traffic = Traffic()
        >>> traffic.add(requests=2, retries=1, sent=7)
        >>> traffic.text_since((0, 0, 0, 0))
        ', 2 requests, 1 retry, 7 B sent'
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = (0, 0, 0, 0)

    def add(self, *, requests: int = 0, retries: int = 0, sent: int = 0, received: int = 0) -> None:
        """Count some more."""
        with self._lock:
            more = (requests, retries, sent, received)
            self.counts = tuple(map(int.__add__, self.counts, more))  # type: ignore[assignment]

    def text_since(self, earlier: tuple[int, int, int, int]) -> str:
        """Return what has come since an earlier moment, for the end of a line; empty where nothing has."""
        requests, retries, sent, received = map(int.__sub__, self.counts, earlier)
        texts = [pluralize(requests, "requests"), pluralize(retries, "retries")] if requests else []
        texts += [f"{bytes_text(count)} {what}" for count, what in ((sent, "sent"), (received, "received")) if count]
        return "".join(f", {text}" for text in texts)


TRAFFIC = Traffic()
"""That of all buckets."""


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
    start, before = time.perf_counter(), TRAFFIC.counts
    try:
        yield
    except BaseException as error:
        what = f"{operation} {os.fspath(path)!r}: {type(error).__name__} after"
        _log(logging.INFO, what, start, TRAFFIC.text_since(before))
        raise
    _log(logging.INFO, f"{operation} {os.fspath(path)!r}: done in", start, TRAFFIC.text_since(before))
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


def _log(level: int, text: str, start: float, more: str = "") -> None:
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, "%s %s%s", printable(hide_secrets(text)), duration_text(time.perf_counter() - start), more)


def _record(name: str, start: float) -> None:
    jax = sys.modules.get("jax")
    if (record := getattr(getattr(jax, "monitoring", None), "record_event_duration_secs", None)) is not None:
        try:
            record(f"/treering/{name}", time.perf_counter() - start)
        except Exception:  # a listener of the program's: the work that it hears of is done
            LOGGER.warning("a listener of jax.monitoring raised for /treering/%s", name, exc_info=True)
