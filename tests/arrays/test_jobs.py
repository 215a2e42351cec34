"""Jobs in two threads: the first error ends all, progress comes from one thread and ends at its total."""

from __future__ import annotations

import itertools
import threading
from collections import deque

import pytest

from treering._arrays import jobs
from treering._arrays.jobs import Tally, Work, run_all
from treering.errors import Corrupt


def test_progress_ends_at_its_total_whoever_comes_in_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's thread runs out of work while the other one still reads."""
    started, finish = threading.Event(), threading.Event()
    main = threading.current_thread()

    def job() -> int:
        if threading.current_thread() is main:
            assert started.wait(10)
            finish.set()
        else:
            started.set()
            assert finish.wait(10)
        return 50

    monkeypatch.setattr(jobs, "_TWO_THREADS_FROM", 1)
    calls: list[tuple[int, int]] = []
    for _ in range(5):
        started.clear()
        finish.clear()
        calls.clear()
        run_all(Work(deque([job, job]), 100), Tally(100, lambda done, total: calls.append((done, total))))
        assert calls[-1] == (100, 100)
        assert calls == sorted(calls)


def test_the_first_error_stops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_TWO_THREADS_FROM", 1)
    ran: list[int] = []

    def bad() -> int:
        raise Corrupt("damaged")

    def good() -> int:
        ran.append(1)
        return 1

    todo = Work(deque([bad, bad, *itertools.repeat(good, 10_000)]), 10_002)
    threads = threading.active_count()
    with pytest.raises(Corrupt, match="damaged"):
        run_all(todo, Tally(10_002, None))
    assert len(ran) < 10_000
    assert threading.active_count() == threads


def test_own_jobs_run_in_this_thread_only_and_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_TWO_THREADS_FROM", 1)
    seen: set[int] = set()

    def mine() -> int:
        seen.add(threading.get_ident())
        return 1

    calls: list[tuple[int, int]] = []
    own = Work(deque(itertools.repeat(mine, 200)), 200)
    shared = Work(deque(itertools.repeat(lambda: 2, 100)), 200)
    run_all(shared, Tally(400, lambda done, total: calls.append((done, total))), own)
    assert seen == {threading.get_ident()}
    assert calls[-1] == (400, 400)


def test_an_error_of_its_own_jobs_leaves_the_shared_ones_undone() -> None:
    def bad() -> int:
        raise Corrupt("damaged")

    shared = Work(deque([lambda: 1]), 1)
    with pytest.raises(Corrupt, match="damaged"):
        run_all(shared, Tally(2, None), Work(deque([bad]), 1))
    assert len(shared.jobs) == 1
