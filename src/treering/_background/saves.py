"""The saves of this process that are in flight, by their paths, and what became of those that were; and its loads.

Each process has one `treering._background.writer.Writer`; a fork begins with a new one.

At the end of the program saves in flight are waited for, and what is lost is said. Not silently and not for ever: a
save that makes progress is waited for, one that shows none for as long as its timeout is given up. The program then
ends with status 1, so that whoever started it knows. A load in the background has a thread of its own, and is given up
at the end of the program.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import copy
import functools
import itertools
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final, Generic, TypeVar

from treering._background.writer import PendingSave, SaveJob, Writer, release_frames
from treering._printable import hide_secrets
from treering._store.crew import Latch
from treering._store.resolve import resolved
from treering._values.arguments import wait_seconds
from treering.errors import CancelledError, TimedOutError, TreeringError

T = TypeVar("T")


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
    if isinstance(error, TreeringError):
        late = copy.copy(error)
        late.message = hide_secrets(f"{said}: {error.message}")
        late.args = (late.message,)
        late.__dict__.pop("__notes__", None)  # it would share the list of them
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


class PendingLoad(Generic[T]):
    """A tree that is being loaded in the background; ``await`` gives it too.

    An error that nobody asks for is a line on stderr at the program's end, with status 1. A program that ends before
    the load has ended gives it up.

    Example:
        >>> import os, tempfile, treering
        >>> path = os.path.join(tempfile.mkdtemp(), "ckpt")
        >>> treering.save(path, {"step": 7})
        >>> pending = treering.load_async(path)
        >>> pending.result(), pending.done()
        ({'step': 7}, True)
    """

    def __init__(self, shown: str, timeout: float) -> None:
        from concurrent.futures import Future  # who loads in the foreground does without

        self._future: Future[T] = Future()  # for `await` alone: an interrupt in a wait for it could keep its lock
        self._future.set_running_or_notify_cancel()
        self._ended = Latch()
        self._trees: list[T] = []
        self._error: BaseException | None = None
        self._shown = shown
        self._timeout = timeout
        self._owner = os.getpid()
        self._given_up = False
        self._told = False

    def result(self, timeout: float | None = None) -> T:
        """Wait until it is loaded, and return the tree.

        Args:
            timeout: how many seconds to wait; None for as long as it takes.

        Raises:
            TimedOutError: it is not done in that time; it goes on.
            TreeringError: what ``load`` raises.
        """
        self._require_own()
        if not self._ended.wait(seconds := wait_seconds(timeout)):
            raise TimedOutError(f"the load of {self._shown!r} is not done within {seconds:g} s", hint="it goes on")
        if self._error is not None:
            self._told = True
            raise self._error
        return self._trees[0]

    def done(self) -> bool:
        """Tell whether it has ended, well or not; without waiting."""
        self._require_own()
        return self._ended.is_set()

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio

        self._require_own()
        try:
            return (yield from asyncio.wrap_future(self._future).__await__())
        finally:  # who was cancelled has heard nothing
            self._told = self._told or self._ended.is_set()

    def _require_own(self) -> None:
        """Refuse to answer in a fork, in which nothing goes on."""
        if os.getpid() != self._owner:
            what = f"the load of {self._shown!r} belongs to process {self._owner}, of which this process is a fork"
            raise TreeringError(what, hint="only that process has its result")

    def run(self, work: Callable[[Callable[[], None]], T]) -> None:
        """Do the work on this thread; it calls what it is given now and then, which raises when it is given up."""
        try:
            result = work(self._require_wanted)
        except BaseException as raised:  # noqa: BLE001 - whoever waits for the load gets it
            error = raised.with_traceback(raised.__traceback__ and raised.__traceback__.tb_next)
            release_frames(error)
            _loads.add(self)  # where there was no thread, nobody has
            self._error = error
            self._ended.set()
            self._future.set_exception(error)
        else:
            _loads.discard(self)
            self._trees.append(result)
            self._ended.set()
            self._future.set_result(result)

    def _require_wanted(self) -> None:
        if self._given_up:
            raise CancelledError(f"the load of {self._shown!r} was given up: the program ends")

    def give_up(self) -> None:
        """Let it end as soon as may be."""
        self._given_up = True

    def wait_for_end(self, since: float) -> None:
        """Wait until it has ended, for its timeout since a moment of the monotonic clock: jax goes down next."""
        if self._ended.wait(since + self._timeout - time.monotonic()):
            self._told = isinstance(self._error, CancelledError) or self._told

    def untold(self) -> str:
        """Return why it failed, where nobody was told; no text for any other."""
        error = None if self._told else self._error
        failed = f"the load of {self._shown!r} failed, and its error was never raised"
        return f"{failed}: {error_text(error)}" if error else ""


def begin_load(work: Callable[[Callable[[], None]], T], *, shown: str, timeout: float) -> PendingLoad[T]:
    """Let a thread of its own do some work, which calls what it is given now and then.

    Args:
        work: returns what was loaded.
        shown: what is loaded, as the caller named it.
        timeout: seconds that the end of the program waits for it.
    """
    watch_for_end()
    # One call of C each, which no other thread sees half done.
    _loads.difference_update([load for load in tuple(_loads) if load.done() and not load.untold()])
    pending = PendingLoad[T](shown, timeout)
    try:
        # One call of C starts and counts it; `threading.Thread.start` hangs after an interrupt in it, and the end of
        # the program would wait for what was counted and never began.
        _loads.update(itertools.compress([pending], map(_thread.start_new_thread, [pending.run], [(work,)])))
    except RuntimeError:  # the interpreter goes down, or the system has no more threads
        pending.run(work)
    return pending


_current: Final = {"writer": Writer()}
_loads: Final[set[PendingLoad[Any]]] = set()
"""The loads that are going on, and those that failed without anybody having been told."""
if hasattr(os, "register_at_fork"):
    # A fork has neither the thread nor the saves, and locks as somebody held them: it begins anew.
    os.register_at_fork(after_in_child=lambda: _current.update(writer=Writer()))
    os.register_at_fork(after_in_child=_loads.clear)


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
        since, loads = time.monotonic(), tuple(_loads)
        for load in loads:
            load.give_up()
        for load in loads:
            load.wait_for_end(since)
        why = _wait(saves)
        lost = f"is not done, and was abandoned: {why}"
        _ending.lines += [f"the save to {job.shown!r} {lost}" for job in saves.jobs if why]
        _ending.waited = True
    for job in saves.take_failed():
        what = "no later one of its run was saved" if job.forgiven else "its error was never raised"
        _ending.lines.append(f"the save to {job.shown!r} failed, and {what}: {error_text(job.error)}")
    _ending.lines += filter(None, [load.untold() for load in tuple(_loads)])
    _loads.clear()
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
