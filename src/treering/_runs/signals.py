"""Signals that let the next step be saved, and jax's word that the machine goes away.

A handler only notes that its signal came. Once a step is durable the signal is sent again, and reaches whom it would
have reached without us: what was there before is called by this handler, for one that came later may call this one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, TypeAlias

import jax
from jax.experimental import multihost_utils

from treering.errors import Unsupported

_Before: TypeAlias = Callable[[int, FrameType | None], Any] | int


class Signals:
    """The signals that one run waits for.

    Attributes:
        noted: the signal that came first and has not had its way yet; None where there is none.

    Example:
        >>> signals = Signals()
        >>> signals.watch(signal.SIGUSR1)
        >>> signal.raise_signal(signal.SIGUSR1)
        >>> signal_text(signals.noted)
        'SIGUSR1'
        >>> before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        >>> signals.close()
    """

    def __init__(self) -> None:
        self.noted: int | None = None
        # Signal -> the handlers that were there each time that it was watched, the last one last.
        self._before: dict[int, list[_Before]] = {}
        # The same while a signal is passed on: those that it has not reached yet.
        self._onward: dict[int, list[_Before]] = {}
        self._pid = os.getpid()
        self._passing = False
        self._heard = _notice.heard

    @property
    def watching(self) -> bool:
        """Whether any signal is waited for."""
        return bool(self._before)

    def watch(self, signum: int) -> None:
        """Wait for a signal; another time for the same changes nothing.

        Raises:
            Unsupported: this is not the main thread, where Python sets handlers, or no such signal can be caught.
        """
        try:
            before = signal.getsignal(signum)
            if before not in (None, self._handle):
                signal.signal(signum, self._handle)
                self._before.setdefault(signum, []).append(before)
        except (ValueError, TypeError, OSError) as error:
            raise Unsupported(f"{signal_text(signum)} cannot be caught here: {error}") from error
        if before is None:
            hint = "catch it in a handler of your own, and save with force=True"
            raise Unsupported(f"{signal_text(signum)} has a handler that Python could not restore", hint=hint)
        self._passing = False
        self._pid = os.getpid()

    def hear_preemption(self) -> bool:
        """Tell whether jax has heard that a machine of the job goes away; True once for each time, on all processes.

        Every process asks as often as any other: jax lets all hear it at the same count.
        """
        _notice.ask()
        before, self._heard = self._heard, _notice.heard
        return self._heard != before

    def pass_signal_on(self, signum: int) -> None:
        """Restore all handlers and re-raise a signal."""
        self.noted = None
        self._passing = True
        signal.raise_signal(signum)

    def close(self) -> None:
        """Put all handlers back; a signal that came and waits for its way is sent again."""
        noted, self.noted = self.noted, None
        self._passing = True
        self._put_back()
        if noted is not None:
            signal.raise_signal(noted)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # A process that was forked off wants to end when it is told to; it has no step to save.
        if self._passing or os.getpid() != self._pid:
            self._pass_on(signum, frame)
        elif self.noted is None:
            self.noted = signum

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Call the handler that was there before; where that leads here again, the one before that."""
        outer = self._onward.get(signum)
        handlers = list(self._before.get(signum, ())) if outer is None else outer
        if not handlers:
            return
        self._onward[signum] = handlers[:-1]
        try:
            if outer is None:
                self._put_back()
            _call(handlers[-1], signum, frame)
        finally:
            if outer is None:
                del self._onward[signum]
            else:
                self._onward[signum] = outer

    def _put_back(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may; it does when the next signal comes
        for signum, handlers in list(self._before.items()):
            # A handler that was set in the meantime stays; it may call this one later.
            if signal.getsignal(signum) == self._handle:
                signal.signal(signum, handlers.pop())
            if not handlers:
                del self._before[signum]


def _call(handler: _Before, signum: int, frame: FrameType | None) -> None:
    """Do with a signal what a handler does, whichever one is set."""
    if callable(handler):
        handler(signum, frame)
    elif handler == signal.SIG_DFL:
        now = signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)
        signal.signal(signum, now)  # the default of some signals is to do nothing


def signal_text(signum: int) -> str:
    """Return the name of a signal.

    Example:
        >>> signal_text(15), signal_text(1000)
        ('SIGTERM', 'signal 1000')
    """
    return signal.Signals(signum).name if signum in list(signal.Signals) else f"signal {signum}"


class _PreemptionNotice:
    """jax's word of its own service, which all runs of this process ask together.

    Attributes:
        heard: how often it came.
    """

    def __init__(self) -> None:
        self.heard = 0
        self._count = itertools.count(1)

    def ask(self) -> None:
        """Ask jax once more; one of the runs asks at the moment when all processes are to hear it."""
        if jax.distributed.is_initialized():
            with contextlib.suppress(RuntimeError):  # the service is switched off
                if multihost_utils.reached_preemption_sync_point(next(self._count)):
                    self.heard += 1  # added after the answer: another run may ask meanwhile


_notice: Final = _PreemptionNotice()
