"""When a run saves, decided once for all processes: by the clock of process 0, and by what any of them was told.

Rules that only count steps decide the same on all processes without messages. If a clock or a signal decides, all
processes meet; not at each step, but where process 0 said at the last meeting that they should.

Signals, and jax's word that the machine goes away, let the next step be saved. A handler only notes that its signal
came. Once a step is durable the signal is sent again, and reaches whom it would have reached without us: what was there
before is called by this handler, for one that came later may call this one.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, NamedTuple, TypeAlias

import jax
from jax.experimental import multihost_utils

from treering._runs.results import Preemption
from treering._values import timing
from treering._values.processes import Processes
from treering.errors import UnsupportedError
from treering.rules import Cadence, Decision, LastSave

# Steps may become slower than they were when the next meeting was agreed on.
_MOST_STEPS: Final = 100


class SaveSchedule:
    """When one run saves.

    Args:
        save_every: the rules; None saves each step that is offered.
        signals: those that let the next step be saved.
        gather: returns what all processes say, given what this one says and what for.
        shown: the run, for messages.

    Attributes:
        unsaved: the first and the last of the steps that were offered since the last save; None if there is none.

    Example:
        >>> from treering.rules import SaveEvery
        >>> schedule = SaveSchedule(SaveEvery(steps=100), Signals(), gather=lambda said, doing: [said], shown="runs/a")
        >>> alone = Processes(this=0, count=1)
        >>> [step for step in range(1, 300) if schedule.decide(step, alone, latest=lambda: None).save]
        [100, 200]
    """

    def __init__(
        self, save_every: Cadence | None, signals: Signals, *, gather: Callable[[bytes, str], list[bytes]], shown: str
    ) -> None:
        self._cadence = save_every
        self._seconds = None if save_every is None else save_every.seconds
        self._signals = signals
        self._gather = gather
        self._shown = shown
        self._clock: Callable[[], float] = time.monotonic
        self.unsaved: tuple[int, int] | None = None
        self._step: int | None = None
        self._since = 0.0
        self._before: tuple[int | None, float] = None, 0.0
        self._met_at = _SyncPoint(step=0, ask=0, time=0.0)
        self._preemption: Preemption | None = None
        self._is_due = False
        self._asked: tuple[int, int] | None = None

    def preempted(self, step: int, batch: int, processes: Processes) -> Preemption | None:
        """Return what the job was told, alike on all processes that ask at the same places; None where nothing was.

        The step that is saved next is then the last one. Nobody is waited for.

        Args:
            step: its number.
            batch: where in the step; at a place that was asked about already the answer is the same.
            processes: those of the job.

        Raises:
            UnsupportedError: jax cannot tell the others of a signal.
        """
        if processes.count > 1 and self._asked == (step, batch):
            return self._preemption
        self._asked = step, batch
        if processes.count > 1:
            self._signals.tell_jax()
        told = self._signals.hear_preemption()
        if processes.count > 1 and _notice.is_off:
            hint = "leave the setting jax_enable_preemption_service of jax on"
            raise UnsupportedError("run.preempted goes by jax's preemption service, which is switched off", hint=hint)
        signum = self._signals.noted if processes.count == 1 else None
        if self._preemption is None and (told or signum is not None):
            self._note_preemption(_reason(signum))
        return self._preemption

    def seconds_left(self) -> float | None:
        """Return for how long this process is still there; None where that is not known."""
        return None if self._preemption is None else self._preemption.seconds_left

    def _note_preemption(self, reason: str) -> None:
        self._preemption = Preemption(reason=reason, deadline=self._signals.deadline())
        self._is_due = True

    def decide(
        self, step: int, processes: Processes, *, latest: Callable[[], int | None], force: bool = False
    ) -> Decision:
        """Return whether a step is saved; what is to be saved counts as saved from then on.

        All processes call this, at the same steps.

        Args:
            step: its number.
            processes: those of the job.
            latest: returns the latest step that the run has, alike on all processes; asked once, if there are rules.
            force: whether it is saved whatever the rules say.

        Raises:
            MismatchError: the processes are at different steps.
            TimedOutError, ProcessFailedError: others did not come, or broke off.
        """
        if self._step is None:
            counted_from = None if self._cadence is None else latest()
            self._step = step - 1 if counted_from is None else counted_from
            self._since = self._clock()
        before = self._step, self._since
        if step < self._step:  # the loop goes back: what is saved from here on counts
            self._step = step - 1
        told = (self._signals.watching and self._signals.hear_preemption()) or self._is_due
        passed: float = 0.0
        signum: int | None = None
        if processes.count == 1:
            passed, signum = self._clock() - self._since, self._signals.noted
        elif self._is_due:
            # All know that they save, and ask each other which signal goes on.
            signum = self._meet(step, processes)[1] if self._signals.watching else None
        elif (self._signals.watching or self._seconds is not None) and not told:
            by_steps = self._apply_rules(step, 0.0, force=force)
            if not by_steps.save and self._met_at.step <= step < self._met_at.ask:
                reason = f"{self._cadence!r}: all processes check again at step {self._met_at.ask}"
                return dataclasses.replace(by_steps, reason=reason)
            passed, signum = self._meet(step, processes)
        decision = self._apply_signals(self._apply_rules(step, passed, force=force), signum, told=told)
        if decision.final:
            if not self._is_due:
                self._note_preemption(decision.reason)
            self._is_due = False
        self.unsaved = None if decision.save else ((self.unsaved or (step, step))[0], step)
        if decision.save:
            self._before = before
            self._step, self._since = step, self._clock()
        return decision

    def saves(self, step: int | None, *, force: bool) -> bool:
        """Tell whether all processes save a step, as far as that is known before they decide."""
        if self._signals.watching or self._seconds is not None:
            return False  # they meet first, and where one fails none saves
        return (
            self._is_due
            or self._cadence is None
            or force
            or (step is not None and self._apply_rules(step, 0.0, force=force).save)
        )

    def pass_over(self, step: int) -> None:
        """Count a step that could not be saved, where nothing has been counted yet: else each would be tried."""
        if self._step is None:
            self._step, self._since = step, self._clock()

    def take_back(self) -> None:
        """Count the step that was to be saved last as not saved: the next one that is offered makes up for it.

        For a process that is alone: others of a job would not know of it.
        """
        self._step, self._since = self._before

    def _apply_rules(self, step: int, passed: float, *, force: bool) -> Decision:
        """Return what the rules say, so many seconds after the last save."""
        if self._cadence is None:
            return Decision(save=True, reason="no save_every: each step is saved")
        last = LastSave(step=step - 1 if self._step is None else self._step, time=0.0)
        decision = self._cadence.decide(step, passed, last)
        if force and (decision.temporary or not decision.save):
            return Decision(save=True, reason="force=True")
        return decision

    def _apply_signals(self, decision: Decision, signum: int | None, *, told: bool) -> Decision:
        """Return a decision with what the job was told: it saves, and has to be waited for."""
        if signum is None and not told:
            return decision
        reason = _reason(signum)
        # Out of turn, where there are such steps at all: it goes when the next one is there.
        temporary = decision.temporary if decision.save else self._seconds is not None
        return Decision(save=True, temporary=temporary, reason=reason, final=True, signum=signum)

    # ------------------------------------------------------------------------------------------------------ meetings

    def _meet(self, step: int, processes: Processes) -> tuple[float, int | None]:
        """Return how many seconds have passed since the last save, by process 0, and the signal that came to anyone."""
        said: dict[str, Any] = {"signum": self._signals.noted}
        if processes.is_coordinator:
            now = self._clock()
            said |= {"passed": now - self._since, "ahead": self._ahead(step, now)}
        rows = self._gather(json.dumps(said).encode(), f"decide whether to save step {step} of {self._shown!r}")
        heard = [json.loads(row) for row in rows]
        self._met_at = _SyncPoint(step=step, ask=step + heard[0]["ahead"], time=self._clock())
        return heard[0]["passed"], next((one["signum"] for one in heard if one["signum"] is not None), None)

    def _ahead(self, step: int, now: float) -> int:
        """Return after how many steps all meet again, by the time that steps took since the last meeting."""
        seconds = timing.current.decide_longest
        if self._seconds is not None:
            seconds = min(seconds, self._seconds * timing.current.decide_share)
        steps, passed = step - self._met_at.step, now - self._met_at.time
        if self._met_at.ask == 0 or steps <= 0:
            return 1
        return max(1, min(int(seconds * steps / passed) if passed > 0 else _MOST_STEPS, _MOST_STEPS))


def _reason(signum: int | None) -> str:
    return "jax was told that a machine is going away" if signum is None else f"{signal_text(signum)} came"


class _SyncPoint(NamedTuple):
    """When all processes met last."""

    step: int
    """At which step."""
    ask: int
    """At which step they meet again; 0 before the first meeting."""
    time: float
    """When it ended, by the own clock."""


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
        self._grace: float | None = None
        self._noted_at: float | None = None
        self._has_told = False

    @property
    def watching(self) -> bool:
        """Whether any signal is waited for."""
        return bool(self._before)

    def watch(self, signum: int, grace: object = None) -> None:
        """Wait for a signal; another time for the same changes nothing but ``grace``.

        Args:
            signum: the signal.
            grace: how many seconds after it this process is still there; None where that is not known.

        Raises:
            UnsupportedError: this is not the main thread, where Python sets handlers, or no such signal can be caught.
        """
        if grace is not None:
            if isinstance(grace, bool) or not isinstance(grace, int | float) or not 0 < grace < math.inf:
                raise UnsupportedError(f"grace is {grace!r:.100}, but must be a positive number of seconds")
            self._grace = float(grace)
        jax_sigterm = _c_handler(signal.SIGTERM)
        try:
            before = signal.getsignal(signum)
            if before not in (None, self._handle):
                signal.signal(signum, self._handle)
                self._before.setdefault(signum, []).append(before)
        except (ValueError, TypeError, OSError) as error:
            raise UnsupportedError(f"{signal_text(signum)} cannot be caught here: {error}") from error
        if before is None:
            hint = "catch it in a handler of your own, and save with force=True"
            raise UnsupportedError(f"{signal_text(signum)} has a handler that Python could not restore", hint=hint)
        self._passing = False
        self._pid = os.getpid()
        _jax_sigterm.note(jax_sigterm, of_python=_c_handler(signum))

    def deadline(self) -> float | None:
        """Return when this process is to be gone, by the monotonic clock; None where that is not known.

        One that got no signal itself counts from now on.
        """
        if self._grace is None:
            return None
        return (time.monotonic() if self._noted_at is None else self._noted_at) + self._grace

    def tell_jax(self) -> None:
        """Let jax tell the other processes of the signal that came, once; without a collective.

        Raises:
            UnsupportedError: it cannot: its handler is not there.
        """
        if self.watching and not _jax_sigterm.is_there():
            hint = "call save_on_signal after jax.distributed.initialize, and before other handlers of SIGTERM are set"
            what = "run.preempted tells the other processes of a signal by jax's handler of SIGTERM, which is not there"
            raise UnsupportedError(what, hint=hint)
        if self.noted is not None and not self._has_told:
            self._has_told = True
            _jax_sigterm.call()

    def hear_preemption(self) -> bool:
        """Tell whether jax has heard that a machine of the job goes away; True once for each time, on all processes.

        Every process asks as often as any other: jax lets all hear it at the same count.
        """
        _notice.ask()
        before, self._heard = self._heard, _notice.heard
        return self._heard != before

    def pass_signal_on(self, signum: int) -> None:
        """Restore all handlers and re-raise a signal."""
        self.noted = self._noted_at = None
        self._has_told = False
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
            self._noted_at, self.noted = time.monotonic(), signum

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
        is_off: whether jax has no such service.
    """

    def __init__(self) -> None:
        self.heard = 0
        self.is_off = False
        self._count = itertools.count(1)

    def ask(self) -> None:
        """Ask jax once more; one of the runs asks at the moment when all processes are to hear it."""
        if jax.distributed.is_initialized():
            try:
                reached = multihost_utils.reached_preemption_sync_point(next(self._count))
                self.is_off = False
            except RuntimeError:
                reached, self.is_off = False, True
            if reached:
                self.heard += 1  # added after the answer: another run may ask meanwhile


class _JaxSigterm:
    """The handler that ``jax.distributed`` sets for SIGTERM, written in C: Python neither shows nor restores it.

    Called, it lets jax tell all processes, in a thread, at which of their questions they hear of it.
    """

    def __init__(self) -> None:
        self._address: int | None = None
        self._of_python: int | None = None

    def note(self, found: int | None, of_python: int | None) -> None:
        """Remember the handler that was found, unless it is the one by which Python calls its own."""
        self._of_python = of_python
        if found not in (None, of_python, int(signal.SIG_IGN)):
            self._address = found

    def is_there(self) -> bool:
        """Tell whether the handler is known."""
        if self._address is None:  # jax may have set it since
            self.note(_c_handler(signal.SIGTERM), self._of_python)
        return self._address is not None

    def call(self) -> None:
        """Do what the signal would have done."""
        if self._address is not None:
            ctypes.CFUNCTYPE(None, ctypes.c_int)(self._address)(int(signal.SIGTERM))


def _c_handler(signum: int) -> int | None:
    """Return the address of what the system calls for a signal; None for what it does by default."""
    ask = ctypes.pythonapi.PyOS_getsig
    ask.argtypes, ask.restype = [ctypes.c_int], ctypes.c_void_p
    address: int | None = ask(signum)
    return address


_jax_sigterm: Final = _JaxSigterm()
_notice: Final = _PreemptionNotice()
