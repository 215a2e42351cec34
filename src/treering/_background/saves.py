"""The saves of this process that are in flight, by their paths, and what became of those that were.

Each process has one `treering._background.writer.Writer`; a fork begins with a new one.

At the end of the program saves in flight are waited for, and what is lost is said. Not silently and not for ever: a
save that makes progress is waited for, one that shows none for as long as its timeout is given up. The program then
ends with status 1, so that whoever started it knows.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from treering._background.writer import PendingSave, SaveJob, Writer
from treering._coordination.messages import Failure
from treering._store.resolve import resolved
from treering.errors import MismatchError, TimedOutError, TreeringError


def reword(error: BaseException, said: str) -> TreeringError:
    """Return an error of the same class that says first where it comes from; ``error`` is its cause.

    Args:
        error: what was raised; of a class that is none of ours it becomes a plain ``TreeringError``.
        said: what to say first.

    Example:
        >>> reword(KeyError("a"), "could not do it")
        TreeringError("could not do it: KeyError: 'a'")
        >>> reword(TreeringError("no a"), "could not do it")
        TreeringError('could not do it: no a')
    """
    if type(error) is TreeringError:
        late = TreeringError(f"{said}: {error}")
    elif isinstance(error, TreeringError):
        late = Failure.of(error).to_error(said, getattr(error, "processes", ()))
        if isinstance(late, MismatchError) and isinstance(error, MismatchError):
            late.differences = error.differences
        if isinstance(late, OSError) and isinstance(error, OSError):
            late.errno, late.strerror, late.filename = error.errno, error.strerror, error.filename
    else:
        late = TreeringError(f"{said}: {error_text(error)}")
    late.__cause__ = error
    return late


def deferred_error(failed: Sequence[SaveJob]) -> TreeringError:
    """Return the error to raise for saves that failed earlier, at least one; of all but the first it has notes."""
    first, *others = failed
    late = reword(first.error or RuntimeError(), f"the earlier save to {first.shown!r} failed")
    for job in others:
        late.add_note(f"the earlier save to {job.shown!r} failed as well: {error_text(job.error)}")
    return late


def error_text(error: BaseException | None) -> str:
    """Return the class of an error and what it says, in one line."""
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))


_current: Final = {"writer": Writer()}
if hasattr(os, "register_at_fork"):
    # A fork has neither the thread nor the saves, and locks as somebody held them: it begins anew.
    os.register_at_fork(after_in_child=lambda: _current.update(writer=Writer()))


def writer() -> Writer:
    """Return what writes the saves of this process."""
    return _current["writer"]


def in_flight(path: str | os.PathLike[str]) -> list[PendingSave]:
    """Return the saves that are in flight to a path, or as steps of the run there, the oldest first.

    Example:
        >>> in_flight("/runs/7")
        []
    """
    return list(map(PendingSave, _current["writer"].of(resolved(path))))


def wait_for(path: str | os.PathLike[str], timeout: float | None = None) -> None:
    """Wait until nothing is in flight to a path, or of the run there; how it ended is not said.

    Args:
        path: the path.
        timeout: how many seconds to wait; None for as long as there is progress.

    Raises:
        TimedOutError: it did not end in that time, or shows no progress any more.
    """
    if _current["writer"].jobs:
        _current["writer"].wait(resolved(path), timeout)


def raise_unreported(path: str | os.PathLike[str]) -> None:
    """Raise the error of an earlier save to a path, or of the run there, that nobody was told.

    Raises:
        TreeringError: an earlier save failed; the message names it.
    """
    if _current["writer"].failed and (failed := _current["writer"].take_failed(resolved(path))):
        raise deferred_error(failed)


def finish_saves(path: str | os.PathLike[str]) -> None:
    """Wait for the saves to a path that are in flight; raise what one of them failed at, unless that was told.

    Raises:
        TimedOutError: one shows no progress any more.
        TreeringError: an earlier save failed; the message names it.
    """
    wait_for(path)
    raise_unreported(path)


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
    for job in saves.take_failed():
        what = "no later one of its run was saved" if job.forgiven else "its error was never raised"
        _ending.lines.append(f"the save to {job.shown!r} failed, and {what}: {error_text(job.error)}")
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
        except TimedOutError:
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
