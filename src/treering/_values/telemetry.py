"""What treering reports of its own work: one logger, events for listeners of ``jax.monitoring``, and warnings.

The logger is called ``treering`` and is silent until the program configures ``logging``. INFO has one line for each
save, load and removal; DEBUG also has a line for each phase. The lines at INFO have the bytes that were written or
read, the requests to buckets, their retries and the bytes in them; operations that run at the same time each count the
requests of the other too. Where the program has imported jax, `EVENTS` are told to the listeners of ``jax.monitoring``,
under ``/treering/`` and their name; a duration or a size only of what succeeded.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from treering._printable import hide_secrets, list_lines, printable
from treering._values.human import bytes_text, duration_text, pluralize, rate_text


class EventKind(NamedTuple):
    """What one event of ``jax.monitoring`` means."""

    how: str
    """``duration``, ``scalar`` or ``event``: which listeners of jax hear it."""
    unit: str
    """What its value counts; nothing for a bare event."""
    meaning: str
    """What it says."""


EVENTS: Final[Mapping[str, EventKind]] = {
    "save": EventKind("duration", "seconds", "a save, on the thread that writes it"),
    "save/blocked": EventKind("duration", "seconds", "how long a call that saves held up its caller"),
    "save/plan": EventKind("duration", "seconds", "blocking: the tree is flattened, and divided among the processes"),
    "save/admit": EventKind("duration", "seconds", "blocking: waiting for room beside the saves in flight"),
    "save/snapshot": EventKind("duration", "seconds", "blocking: arrays are taken from the devices, or copied"),
    "save/queue": EventKind("duration", "seconds", "in the background: waiting for the turn of this save"),
    "save/compare": EventKind("duration", "seconds", "with `base` or `incremental`: what has changed is found out"),
    "save/write": EventKind("duration", "seconds", "the data of this process are written"),
    "save/commit": EventKind("duration", "seconds", "the index takes the place of the old one; on process 0"),
    "save/bytes": EventKind("scalar", "bytes", "what this process wrote in `save/write`"),
    "save/throughput": EventKind("scalar", "bytes per second", "these bytes, divided by the time of `save/write`"),
    "save/in_flight": EventKind("scalar", "saves", "how many are written or wait, when one is admitted or ends"),
    "save/in_flight_bytes": EventKind("scalar", "bytes", "the memory that their snapshots hold"),
    "save/failed": EventKind("event", "", "a save of a run failed"),
    "run/step": EventKind("scalar", "step", "a step of a run is durable"),
    "run/step_age": EventKind(
        "scalar", "seconds", "how old the newest durable step was when the next save of the run ended, well or not"
    ),
    "load": EventKind("duration", "seconds", "a load"),
    "load/plan": EventKind("duration", "seconds", "what is stored is compared with `like`"),
    "load/read": EventKind("duration", "seconds", "the data are read, checked and put on devices"),
    "load/bytes": EventKind("scalar", "bytes", "what this process got in `load/read`"),
    "load/throughput": EventKind("scalar", "bytes per second", "these bytes, divided by the time of `load/read`"),
    "remove": EventKind("duration", "seconds", "the removal of a step"),
    "requests": EventKind("scalar", "requests", "requests to buckets in one save, load or removal, failed ones too"),
    "retries": EventKind("scalar", "requests", "how many of these requests were repetitions"),
    "sent": EventKind("scalar", "bytes", "the bytes sent in these requests"),
    "received": EventKind("scalar", "bytes", "the bytes received in these requests"),
}
"""The events that treering tells of, by the name that follows ``/treering/``."""


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

    def since(self, earlier: tuple[int, int, int, int]) -> tuple[int, ...]:
        """Return what has come since an earlier moment: requests, retries, bytes sent and received."""
        return tuple(map(int.__sub__, self.counts, earlier))

    def text_since(self, earlier: tuple[int, int, int, int]) -> str:
        """Return the same for the end of a line; empty where nothing has come."""
        requests, retries, sent, received = self.since(earlier)
        texts = [pluralize(requests, "requests"), pluralize(retries, "retries")] if requests else []
        texts += [f"{bytes_text(count)} {what}" for count, what in ((sent, "sent"), (received, "received")) if count]
        return "".join(f", {text}" for text in texts)


TRAFFIC = Traffic()
"""That of all buckets."""


class Amount(threading.local):
    """How many bytes an operation or a phase has moved; of operations each thread has its own.

    Example:
        >>> Amount().text(1.0)
        ''
    """

    nbytes = 0

    def text(self, seconds: float) -> str:
        """Return them, and how many a second, for the end of a line; empty where nothing was moved."""
        return f", {bytes_text(self.nbytes)} ({rate_text(self.nbytes, seconds)})" if self.nbytes else ""


_moved: Final = Amount()


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
    start, before, moved = time.perf_counter(), TRAFFIC.counts, _moved.nbytes
    _moved.nbytes, end = 0, "done in"
    try:
        yield
    except BaseException as error:
        end = f"{type(error).__name__} after"
        raise
    else:
        note_duration(operation, start)
    finally:
        _log(logging.INFO, f"{operation} {os.fspath(path)!r}: {end}", start, _moved, before)
        if TRAFFIC.counts != before:
            for name, count in zip(("requests", "retries", "sent", "received"), TRAFFIC.since(before), strict=True):
                note_value(name, count)
        _moved.nbytes = moved


@contextlib.contextmanager
def phase(name: str) -> Iterator[Amount]:
    """Report one phase of an operation: one line at DEBUG, one duration event, and two of the bytes that it moved.

    Args:
        name: the operation and the phase, as ``save/write``.

    Example:
        >>> with phase("save/write") as written:
        ...     written.nbytes = 7
    """
    start, amount = time.perf_counter(), Amount()
    yield amount
    seconds = time.perf_counter() - start
    _log(logging.DEBUG, f"{name}:", start, amount)
    note_duration(name, start)
    if amount.nbytes:
        _moved.nbytes += amount.nbytes
        operation = name.partition("/")[0]
        note_value(f"{operation}/bytes", amount.nbytes)
        note_value(f"{operation}/throughput", amount.nbytes / max(seconds, sys.float_info.epsilon))


def _log(level: int, text: str, start: float, moved: Amount, before: tuple[int, int, int, int] | None = None) -> None:
    if LOGGER.isEnabledFor(level):  # of most programs not, and the texts take longer than all else here
        seconds = time.perf_counter() - start
        more = moved.text(seconds) + (TRAFFIC.text_since(before) if before is not None else "")
        LOGGER.log(level, "%s %s%s", printable(hide_secrets(text)), duration_text(seconds), more)


def note_duration(name: str, start: float) -> None:
    """Tell listeners of jax how long something took, since ``start`` of ``time.perf_counter``."""
    _tell("record_event_duration_secs", name, time.perf_counter() - start)


def note_value(name: str, value: float) -> None:
    """Tell listeners of jax a number.

    Example:
        >>> note_value("save/in_flight", 2)
    """
    _tell("record_scalar", name, value)


def note_event(name: str) -> None:
    """Tell listeners of jax that something happened."""
    _tell("record_event", name)


def _tell(how: str, name: str, *value: float) -> None:
    jax = sys.modules.get("jax")
    if (record := getattr(getattr(jax, "monitoring", None), how, None)) is not None:
        try:
            record(f"/treering/{name}", *value)
        except Exception:  # a listener of the program's: the work that it hears of is done
            LOGGER.warning("a listener of jax.monitoring raised for /treering/%s", name, exc_info=True)
