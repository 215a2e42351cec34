"""The end of the program: saves in flight are waited for, and what is lost is said.

Not silently and not for ever: a save that makes progress is waited for, one that shows none for as long as its timeout
is given up. The program then ends with status 1, so that whoever started it knows.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Final

from treering._ops.background import writer
from treering._ops.late import error_text
from treering.errors import Timeout

__all__ = ["leave", "watch_for_end"]

_STATUS: Final = 1


class _Ending:
    """What is known of the end of this process.

    Attributes:
        pid: the process in which the end is watched for; a fork watches for its own.
        last: ends the process with a status of failure when the interpreter lets it go; None where all is well.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.lock = threading.Lock()
        self.last: _Last | None = None


class _Last:
    """Goes with the last modules, after all that the program wanted to do at its end; then the status is ours."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end  # held here, for names of modules may be gone by then

    def __del__(self) -> None:
        self._end()


_ending = _Ending()


def watch_for_end() -> None:
    """Let the end of the program wait for saves in flight; asked at the first one, hence before jax goes down."""
    if _ending.pid == os.getpid():
        return
    with _ending.lock:
        if _ending.pid != os.getpid():
            atexit.register(leave)
            _ending.pid = os.getpid()


def leave() -> None:
    """Wait for what is in flight, and tell of what is lost, or failed without anybody having been told."""
    saves = writer()
    lost = []
    try:
        saves.wait(None, None)
    except (Timeout, KeyboardInterrupt) as error:
        why = "the program was interrupted" if isinstance(error, KeyboardInterrupt) else "it shows no progress any more"
        lost = [f"gave up the save to {flight.shown!r}, which was not done: {why}" for flight in saves.flights]
    saves.leaving = True
    failed = saves.take_failed()
    lost += [
        f"the save to {flight.shown!r} failed, and nobody was told: {error_text(flight.error)}" for flight in failed
    ]
    for line in lost:
        _say(line)
    if lost:
        _ending.last = _Last(functools.partial(os._exit, _STATUS))


def _say(line: str) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # without stderr, or with one that is closed
        sys.stderr.write(f"treering: {line}\n")
        sys.stderr.flush()
