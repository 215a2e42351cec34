"""Threads that wait for each other, and are woken."""

from __future__ import annotations

import threading

from treering._store.crew import Latch, Waiters

LONG = 30.0


def test_a_latch_wakes_all_who_wait_for_it_without_a_limit() -> None:
    latch = Latch()
    waiting = [threading.Thread(target=latch.wait, daemon=True) for _ in range(3)]
    for thread in waiting:
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
    latch.set()
    for thread in waiting:
        thread.join(LONG)
        assert not thread.is_alive()


def test_a_notice_of_something_else_does_not_end_the_wait() -> None:
    waiters, ready = Waiters(), threading.Event()
    thread = threading.Thread(target=waiters.wait, args=(ready.is_set,), daemon=True)
    thread.start()
    waiters.notify()
    thread.join(0.05)
    assert thread.is_alive()
    ready.set()
    while thread.is_alive():  # it may have asked just before, and wait again only now
        waiters.notify()
        thread.join(0.01)


def test_who_waits_with_a_limit_waits_until_it_is_ready_or_the_limit_is_over() -> None:
    waiters, ready = Waiters(), threading.Event()
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(waiters.wait(ready.is_set, LONG)), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    ready.set()
    while thread.is_alive():
        waiters.notify()
        thread.join(0.01)
    assert found == [True]
    assert not Waiters().wait(lambda: False, 0.01)
