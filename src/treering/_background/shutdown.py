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
from collections.abc import Callable
from typing import Final

from treering._background.saves import error_text, writer
from treering._background.writer import Writer
from treering.errors import Timeout

_STATUS: Final = 1
_FIRST: Final = 1000
_LAST: Final = -1000


class _Last:
    """Goes with the last modules, after all that the program wanted to do at its end; then the status is ours."""

    def __init__(self, end: Callable[[], object]) -> None:
        self._end = end  # held here, for names of modules may be gone by then

    def __del__(self) -> None:
        self._end()


class _Ending:
    """What is known of the end of this process.

    Attributes:
        pid: the process in which the end is watched for; a fork watches for its own.
        last: ends the process with a status of failure when the interpreter lets it go; None where all is well.
        waited: whether the wait is over, well or not.
        lines: what is still to be told.
    """

    def __init__(self) -> None:
        self.pid = 0
        self.last: _Last | None = None
        self.waited = False
        self.lines: list[str] = []


_ending: Final = _Ending()


def watch_for_end() -> None:
    """Let the end of the program wait for saves in flight; asked at the first one, hence before jax goes down."""
    if _ending.pid != os.getpid():  # by two threads at once does no harm: nothing is in flight the second time
        _ending.pid = os.getpid()
        _ending.waited = False
        atexit.register(leave)
        atexit.register(leave)  # where the handler of a signal ends the first one, the second one does the rest
        if "multiprocessing.util" in sys.modules:
            _watch_for_end_of_child()


def leave() -> None:
    """Wait for what is in flight, and tell of what is lost, or failed without anybody having been told.

    What the handler of a signal raises meanwhile, as ``sys.exit(0)`` does, does not end the wait, but a second time it
    does; and Ctrl-C ends it at once.
    """
    saves = writer()
    if not _ending.waited:
        why = _wait(saves)
        lost = f"is not done, and was abandoned: {why}"
        _ending.lines += [f"the save to {job.shown!r} {lost}" for job in saves.jobs if why]
        _ending.waited = True
    _ending.lines += [
        f"the save to {job.shown!r} failed, and its error was never raised: {error_text(job.error)}"
        for job in saves.take_failed()
    ]
    if _ending.lines:
        _ending.last = _Last(functools.partial(os._exit, _STATUS))
    while _ending.lines:
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no stderr, or one that is closed
            sys.stderr.write(f"treering: {_ending.lines[0]}\n")
            sys.stderr.flush()
        del _ending.lines[0]


def _wait(saves: Writer) -> str | None:
    """Wait for what is in flight; return why it was given up, None where all of it ended."""
    raised = False
    while True:
        try:
            saves.wait(None, None)
        except Timeout:
            return "it makes no more progress"
        except KeyboardInterrupt:
            return "the program was interrupted"
        except BaseException as error:  # noqa: BLE001 - it is the end already: there is nothing more to end
            if raised:
                return f"{type(error).__name__} was raised twice during the wait for it"
            raised = True
        else:
            return None


def _watch_for_end_of_child() -> None:
    """Do the same in a child of multiprocessing: it ends by ``os._exit``, before Python 3.13 without asking atexit."""
    from multiprocessing import parent_process, util

    if parent_process() is not None:
        util.Finalize(None, leave, exitpriority=_FIRST)
        util.Finalize(None, _end_child, exitpriority=_LAST)


def _end_child() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    _ending.last = None
