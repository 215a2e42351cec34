"""Signals that let the next step be saved, and then have their way."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import multihost_utils

from tests import faults, warm
from treering._runs.schedule import Signals
from treering.errors import UnsupportedError


@pytest.fixture(autouse=True)
def heard() -> Iterator[list[int]]:
    """The signals that reach the handler that was there before."""
    heard: list[int] = []
    kinds = (signal.SIGUSR1, signal.SIGUSR2)
    before = [signal.signal(kind, lambda signum, frame: heard.append(signum)) for kind in kinds]
    yield heard
    for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)


def test_nothing_is_set_before_it_is_asked_for(heard: list[int]) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals = Signals()
    assert (signals.watching, signals.noted) == (False, None)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_signal_is_noted_and_reaches_nobody_until_it_has_its_way(heard: list[int]) -> None:
    signals = Signals()
    before = signal.getsignal(signal.SIGUSR1)
    signals.watch(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert (signals.watching, signals.noted, heard) == (True, signal.SIGUSR1, [])
    signals.pass_signal_on(signal.SIGUSR1)
    assert (signals.watching, signals.noted, heard) == (False, None, [signal.SIGUSR1])
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_first_of_several_signals_counts(heard: list[int]) -> None:
    signals = Signals()
    signals.watch(signal.SIGUSR1)
    signals.watch(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR1)
    assert signals.noted == signal.SIGUSR2
    signals.pass_signal_on(signal.SIGUSR2)
    assert heard == [signal.SIGUSR2]
    assert not signals.watching


def test_a_process_that_got_no_signal_itself_lets_it_go_with_the_others(heard: list[int]) -> None:
    signals = Signals()
    signals.watch(signal.SIGUSR1)
    signals.pass_signal_on(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_closing_puts_handlers_back_and_sends_what_waited(heard: list[int]) -> None:
    signals = Signals()
    before = signal.getsignal(signal.SIGUSR1)
    signals.watch(signal.SIGUSR1)
    signals.close()
    assert (signal.getsignal(signal.SIGUSR1), heard) == (before, [])
    signals.watch(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    signals.close()
    signals.close()
    assert heard == [signal.SIGUSR1]


def test_waiting_twice_for_a_signal_is_waiting_once(heard: list[int]) -> None:
    signals = Signals()
    signals.watch(signal.SIGUSR1)
    signals.watch(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    signals.pass_signal_on(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    signals.watch(signal.SIGUSR1)  # and once more afterwards
    signal.raise_signal(signal.SIGUSR1)
    assert signals.noted == signal.SIGUSR1
    signals.close()
    assert len(heard) == 2


def test_a_handler_that_came_later_stays(heard: list[int]) -> None:
    signals, later = Signals(), []
    signals.watch(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda signum, frame: later.append(signum))
    signals.pass_signal_on(signal.SIGUSR1)
    signals.close()
    signal.raise_signal(signal.SIGUSR1)
    assert (heard, later) == ([], [signal.SIGUSR1] * 2)


def test_a_handler_that_came_later_and_calls_what_was_there(heard: list[int]) -> None:
    signals, later = Signals(), []
    signals.watch(signal.SIGUSR1)
    ours = signal.getsignal(signal.SIGUSR1)
    assert callable(ours)

    def chained(signum: int, frame: Any) -> None:
        later.append(signum)
        ours(signum, frame)

    signal.signal(signal.SIGUSR1, chained)
    signal.raise_signal(signal.SIGUSR1)
    assert (signals.noted, heard) == (signal.SIGUSR1, [])
    signals.pass_signal_on(signal.SIGUSR1)
    assert (len(later), heard) == (2, [signal.SIGUSR1])
    signals.watch(signal.SIGUSR1)  # once more, over the one that calls this
    signal.raise_signal(signal.SIGUSR1)
    signals.close()
    assert len(heard) == 2
    signal.raise_signal(signal.SIGUSR1)
    assert len(heard) == 3


@given(layers=st.lists(st.sampled_from(["run", "again", "chain"]), min_size=1, max_size=7), closed=st.booleans())
def test_a_signal_reaches_the_first_handler_once_whatever_lies_above(layers: list[str], closed: bool) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: heard.append(signum))
    runs: list[Signals] = []
    try:
        for layer in layers:
            if layer == "chain":
                below: Any = signal.getsignal(signal.SIGUSR1)
                signal.signal(signal.SIGUSR1, functools.partial(lambda below, *given: below(*given), below))
            elif layer == "run" or not runs:
                runs.append(Signals())
                runs[-1].watch(signal.SIGUSR1)
            else:
                runs[0].watch(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [] or not runs
        for _ in layers:
            for run in runs:
                if run.noted is not None:
                    run.close() if closed else run.pass_signal_on(run.noted)
        assert heard == [signal.SIGUSR1]
        for run in runs:
            run.close()
        assert heard == [signal.SIGUSR1]
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("forks", [False, True])
def test_what_chains_to_the_default_ends_the_process(forks: bool) -> None:
    program = f"""
import os, signal
from treering._runs.schedule import Signals
signals = Signals()
signals.watch(signal.SIGTERM)
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda signum, frame: ours(signum, frame))
if {forks} and os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]) + 100)
if not {forks}:
    signal.raise_signal(signal.SIGTERM)
    assert signals.noted == signal.SIGTERM
    signals.pass_signal_on(signal.SIGTERM)
signal.raise_signal(signal.SIGTERM)
print("still there")
"""
    done = warm.run("-W", "ignore", "-c", program)
    assert (done.returncode, done.stdout, done.stderr) == (100 - signal.SIGTERM if forks else -signal.SIGTERM, "", "")


def test_two_runs_may_wait_for_one_signal(heard: list[int]) -> None:
    runs = [Signals(), Signals()]
    for run in runs:
        run.watch(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    assert [run.noted for run in runs] == [None, signal.SIGUSR1]
    runs[1].pass_signal_on(signal.SIGUSR1)  # to the other run
    assert (runs[0].noted, heard) == (signal.SIGUSR1, [])
    runs[0].pass_signal_on(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]


def test_runs_may_be_closed_in_any_order(heard: list[int]) -> None:
    first, second = Signals(), Signals()
    before = signal.getsignal(signal.SIGUSR1)
    first.watch(signal.SIGUSR1)
    second.watch(signal.SIGUSR1)
    first.close()
    second.close()
    signal.raise_signal(signal.SIGUSR1)
    assert heard == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_another_thread_lets_a_signal_go_too(heard: list[int]) -> None:
    signals = Signals()
    before = signal.getsignal(signal.SIGUSR1)
    signals.watch(signal.SIGUSR1)
    signal.raise_signal(signal.SIGUSR1)
    thread = threading.Thread(target=signals.pass_signal_on, args=(signal.SIGUSR1,))
    thread.start()
    thread.join()
    assert heard == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is before


def test_what_cannot_be_waited_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    signals = Signals()
    for signum, told in [(signal.SIGKILL, "SIGKILL cannot be"), (4000, "signal 4000 cannot be")]:
        with pytest.raises(UnsupportedError, match=told):
            signals.watch(signum)
    refused: list[Exception] = []

    def watch() -> None:
        try:
            signals.watch(signal.SIGUSR1)
        except UnsupportedError as error:
            refused.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert "main thread" in str(refused[0])
    faults.answer(monkeypatch, signal, "getsignal", None)
    with pytest.raises(UnsupportedError, match="Python could not restore"):
        signals.watch(signal.SIGUSR1)
    assert not signals.watching


def test_a_signal_that_interrupts_interrupts(heard: list[int]) -> None:
    signals = Signals()
    signals.watch(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert signals.noted == signal.SIGINT
    with pytest.raises(KeyboardInterrupt):
        signals.pass_signal_on(signal.SIGINT)
    assert not signals.watching


# ---------------------------------------------------------------------------------------------------- in a real process


def test_a_child_that_was_forked_off_ends_when_it_is_told_to() -> None:
    program = """
import os, signal, sys
from treering._runs.schedule import Signals
signals = Signals()
signals.watch(signal.SIGTERM)
child = os.fork()
if not child:
    signal.raise_signal(signal.SIGTERM)
    os._exit(7)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), signals.noted, flush=True)
signal.raise_signal(signal.SIGTERM)
print(signals.noted == signal.SIGTERM, flush=True)
signals.pass_signal_on(signal.SIGTERM)
print("never")
"""
    end = warm.run("-W", "ignore", "-c", program)
    assert (end.stdout.split(), end.returncode) == (["-15", "None", "True"], -signal.SIGTERM), end.stderr


def test_what_jax_has_heard_reaches_every_run_once() -> None:
    program = """
import os, signal, socket, threading
import jax
with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0)
from treering._runs.schedule import Signals
runs = [Signals(), Signals()]
print([run.hear_preemption() for run in runs], flush=True)
os.kill(os.getpid(), signal.SIGTERM)
pause = threading.Event()
told = [0, 0]
for _ in range(6000):
    for number, run in enumerate(runs):
        told[number] += run.hear_preemption()
    if all(told):
        break
    pause.wait(0.01)
for _ in range(20):
    for number, run in enumerate(runs):
        told[number] += run.hear_preemption()
print(told, flush=True)
"""
    end = warm.run("-W", "ignore", "-c", program)
    assert (end.stdout.splitlines(), end.returncode) == (["[False, False]", "[1, 1]"], 0), end.stderr


def test_jax_without_the_service_has_heard_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.answer(monkeypatch, jax.distributed, "is_initialized", True)
    faults.fail(
        monkeypatch,
        multihost_utils,
        "reached_preemption_sync_point",
        RuntimeError("Preemption sync manager has not been initialized."),
    )
    assert not Signals().hear_preemption()
    monkeypatch.undo()
    assert not Signals().hear_preemption()


def test_an_answer_that_comes_late_undoes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answered = threading.Event(), threading.Event()

    def reached(count: int) -> bool:
        if threading.current_thread() is threading.main_thread():
            return True
        asked.set()
        assert answered.wait(60)
        return False

    faults.answer(monkeypatch, jax.distributed, "is_initialized", True)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", reached)
    one, other, late = Signals(), Signals(), Signals()
    thread = threading.Thread(target=other.hear_preemption)
    thread.start()
    assert asked.wait(60)
    assert one.hear_preemption()
    answered.set()
    thread.join(60)
    faults.answer(monkeypatch, multihost_utils, "reached_preemption_sync_point", False)
    assert late.hear_preemption()
