"""The harness times what it says it times, and pairs what it says it pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.measure import (
    Case,
    Group,
    ReadyMemory,
    Spread,
    Work,
    copy_bytes,
    equal_bytes,
    interleave,
    once,
    ratio,
    spread,
)


class Clock:
    """A clock that only goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log: list[str] = []

    def __call__(self) -> float:
        return self.now

    def case(self, name: str, seconds: float, fault: Callable[[Any], str | None] = lambda _: None) -> Case:
        def begin() -> Work:
            self.now += 100
            self.log.append(name)

            def work() -> str:
                self.now += seconds
                return name

            return work

        def check(result: Any) -> str | None:
            self.now += 100
            assert result == name
            return fault(result)

        return Case(name=name, begin=begin, check=check)


def test_only_the_work_is_timed() -> None:
    clock = Clock()
    group = Group(name="job", cases=(clock.case("ours", 2), clock.case("peer", 6)))
    rounds = interleave(group, 3, clock=clock)
    assert rounds.seconds == {"ours": [2, 2, 2], "peer": [6, 6, 6]}
    assert rounds.counts == {"ours": [], "peer": []}
    assert rounds.wrong == []


def test_what_a_case_counts_is_kept_and_not_timed() -> None:
    clock = Clock()

    def count(result: Any) -> float:
        clock.now += 100
        return len(result)

    cases = (dataclasses.replace(clock.case("ours", 2), count=count), clock.case("peer", 6))
    rounds = interleave(Group(name="job", cases=cases, unit="letters"), 2, clock=clock)
    assert rounds.counts == {"ours": [4, 4], "peer": []}
    assert rounds.seconds["ours"] == [2, 2]


def test_cases_take_turns_and_each_comes_first_once() -> None:
    clock = Clock()
    group = Group(name="job", cases=tuple(clock.case(name, 1) for name in "abc"))
    interleave(group, 3, clock=clock)
    assert "".join(clock.log) == "abc" + "bca" + "cab"


def test_what_lies_between_rounds_is_not_timed() -> None:
    clock = Clock()

    def between() -> None:
        clock.now += 1000
        clock.log.append("|")

    group = Group(name="job", cases=(clock.case("a", 1), clock.case("b", 1)), between=between)
    rounds = interleave(group, 2, clock=clock)
    assert "".join(clock.log) == "|ab|ba"
    assert rounds.seconds == {"a": [1, 1], "b": [1, 1]}


def test_a_wrong_result_is_named() -> None:
    clock = Clock()
    group = Group(name="job", cases=(clock.case("ours", 1), clock.case("peer", 1, lambda _: "it is bent")))
    rounds = interleave(group, 1, clock=clock)
    assert rounds.wrong == ["job, peer, round 1: it is bent"]


def test_ratios_are_taken_within_rounds() -> None:
    # The ratio of the medians would be 1.5: a machine that slows down in the middle must not show.
    assert ratio([2, 20, 3], [1, 10, 1.5]) == Spread(median=2, least=2, greatest=2)
    assert spread([3, 1, 2]) == Spread(median=2, least=1, greatest=3)
    with pytest.raises(ValueError, match="shorter"):
        ratio([1, 2], [1])


def test_bytes_are_compared_whole() -> None:
    array = np.arange(1000, dtype=np.float32)
    data = array.tobytes()
    assert equal_bytes(array, data)
    assert equal_bytes(array.reshape(10, 100), memoryview(data))
    assert not equal_bytes(array, data[:-1])
    assert not equal_bytes(array, data[:-1] + b"\xff")
    assert equal_bytes(b"", np.empty(0))
    with pytest.raises(ValueError, match="contiguous"):
        equal_bytes(array[::2], array[::2])


def test_copying_copies_all_and_no_more() -> None:
    room = np.zeros(12, np.uint8)
    copy_bytes(room, b"0123456789")
    assert room.tobytes() == b"0123456789\0\0"
    with pytest.raises(ValueError, match="do not fit"):
        copy_bytes(room, bytes(13))


def test_memory_is_held_until_the_clock_starts_and_free_while_it_runs() -> None:
    class Watched(ReadyMemory):
        def take(self) -> None:
            super().take()
            log.append("take")

        def release(self) -> None:
            super().release()
            log.append("release")

    log: list[str] = []

    def tick() -> float:
        log.append("clock")
        return 0.0

    def check(_: Any) -> None:
        log.append("check")

    once(Case(name="it", begin=lambda: lambda: log.append("work"), check=check), Watched(1 << 22), tick)
    assert log == ["take", "release", "clock", "work", "clock", "check"]
