"""Who follows a run sees each new step once, in order, and what a look costs does not grow with the steps."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import treering as tr
from tests.buckets import MemoryBucket, install
from tests.clocks import wait_at_most
from tests.on_disk import step_path
from tests.reads import wait_before_a_step_is_taken, watch_in_a_job
from tests.stores import read_file, write_file
from treering.errors import StoreError, UnsupportedError
from treering.rules import KeepLast


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    return install(monkeypatch, grace=0.0)


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path, bucket: MemoryBucket) -> str:
    """The path of a run that does not exist yet."""
    return str(tmp_path / "run") if request.param == "disk" else "memory://bucket/run"


def fill(path: str, *steps: int, keep: KeepLast | None = None) -> tr.Run:
    run = tr.Run(path, keep=keep)
    for step in steps:
        run.save(step, {"step": step}).result()
    return run


def test_each_step_comes_once_and_in_order(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_at_most(monkeypatch, watch_first=0.001, watch_longest=0.002)
    seen: list[int] = []
    follower = tr.Run(path).watch()  # nothing is there yet

    def follow() -> None:
        seen.extend(itertools.islice(follower, 20))

    thread = threading.Thread(target=follow)
    thread.start()
    run = fill(path, *range(0, 200, 10))
    thread.join(60)
    assert seen == run.steps() == list(range(0, 200, 10))


def test_it_ends_when_no_step_came_for_so_long(path: str) -> None:
    run = fill(path, 1, 2)
    watch = run.watch(timeout=0)
    assert list(watch) == [1, 2]
    fill(path, 3)
    assert list(watch) == []  # it has ended
    assert list(run.watch(timeout=0, after=2)) == [3]
    assert list(run.watch(timeout=0, after=3)) == []
    assert list(tr.Run(f"{path}-elsewhere").watch(timeout=0)) == []


def test_what_is_saved_after_the_training_has_gone_back_is_new(path: str) -> None:
    run = fill(path, 10, 20, 30)
    watch = run.watch(after=20)
    assert next(watch) == 30
    run.save(10, {"step": 11}, rollback=True).result()
    assert next(watch) == 10
    fill(path, 20, 30, 40)
    assert list(itertools.islice(watch, 3)) == [20, 30, 40]
    assert list(run.watch(after=20, timeout=0)) == [30, 40]


def test_going_back_to_a_step_that_was_never_saved(path: str) -> None:
    run = fill(path, 10, 20, 30)
    watch = run.watch(after=20)
    assert next(watch) == 30
    run.save(15, {"step": 15}, rollback=True).result()
    fill(path, 20)
    assert list(itertools.islice(watch, 2)) == [15, 20]


def test_steps_that_were_superseded_before_their_turn_are_left_out(path: str) -> None:
    run = fill(path, 10, 20, 30)
    watch = run.watch()
    assert next(watch) == 10
    run.save(20, {"step": 21}, rollback=True).result()
    assert next(watch) == 20
    fill(path, 40)
    assert next(watch) == 40


def test_a_step_that_its_training_did_not_live_to_note_comes_too(path: str) -> None:
    run = fill(path, 1, 2)
    noted = read_file(f"{path}/run.json")
    fill(path, 3, 4)
    write_file(f"{path}/run.json", noted)
    assert list(run.watch(timeout=0)) == [1, 2, 3, 4]


def test_a_run_without_run_json_is_followed_by_its_names(tmp_path: Path) -> None:
    run = fill(str(tmp_path), 1, 2)
    (tmp_path / "run.json").unlink()
    watch = run.watch()
    assert list(itertools.islice(watch, 2)) == [1, 2]
    tr.save(step_path(tmp_path, 3), {"step": 3})
    assert next(watch) == 3


def test_a_step_that_is_held_is_not_removed_before_the_next_one(path: str) -> None:
    run = fill(path, 1, 2, keep=KeepLast(1))
    watch = tr.Run(path).watch(hold=True)
    assert next(watch) == 2
    fill(path, 3, 4, 5, keep=KeepLast(1))
    assert run.load(2) == {"step": 2}
    assert run.steps() == [2, 5]
    assert next(watch) == 5
    watch.close()
    fill(path, 6, keep=KeepLast(1))
    assert run.steps() == [6]
    assert list(watch) == []


def test_leaving_the_loop_releases_the_step(path: str) -> None:
    run = fill(path, 1, 2, 3)
    with run.watch(hold=True) as watch:
        for step in watch:
            if step == 2:
                break
    run.delete(2)
    assert run.steps() == [1, 3]


def test_it_is_awaited(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_at_most(monkeypatch, watch_first=0.001, watch_longest=0.002)
    run = fill(path, 1, 2)

    async def follow() -> list[int]:
        seen = []
        async for step in run.watch(hold=True):
            seen.append(step)
            if step == 2:
                await asyncio.to_thread(fill, path, 3)
            if step == 3:
                break
        return [*seen, *[step async for step in run.watch(timeout=0)]]

    assert asyncio.run(follow()) == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize("timeout", [-1, "60", float("nan")])
def test_other_timeouts_are_refused(path: str, timeout: float) -> None:
    with pytest.raises(UnsupportedError, match="timeout is"):
        tr.Run(path).watch(timeout=timeout)


def test_an_error_of_the_store_is_raised(bucket: MemoryBucket) -> None:
    watch = fill("memory://bucket/run", 1, 2).watch()
    assert next(watch) == 1
    bucket.denied = lambda _: True
    with pytest.raises(StoreError):
        next(watch)
    bucket.denied = lambda _: False
    assert next(watch) == 2  # nothing is lost


@pytest.mark.parametrize("hold", [False, True])
def test_what_a_look_costs_does_not_grow_with_the_steps(
    bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch, *, hold: bool
) -> None:
    def costs(path: str, count: int) -> tuple[int, ...]:
        run = fill(path, 1)
        index = read_file(f"{path}/step_00000001/treering.json")
        for step in range(2, count):
            write_file(f"{path}/step_{step:08d}/treering.json", index)
        run.gc(dry_run=False)
        run = fill(path, count)
        watch = run.watch(after=count - 2, hold=hold)
        first = bucket.counted(lambda: next(watch)), bucket.counted(lambda: next(watch))
        looks = [bucket.counted(watch._look) for _ in range(3)]
        fill(path, count + 1)
        new = bucket.counted(lambda: next(watch))
        watch.close()
        return (*first, *looks, new, bucket.counted(lambda: list(run.watch(after=count + 1, timeout=0))))

    few, many = costs("memory://bucket/few", 10), costs("memory://bucket/many", 300)
    assert few == many
    assert few[3] == few[4] == 1
    assert few[0] <= (17 if hold else 6), few


# ------------------------------------------------------------------------------------------------- several processes

_EVALUATOR = """
import sys, treering as tr
for step in tr.Run(sys.argv[1]).watch(hold=True):
    print(step, flush=True)
    sys.stdin.readline()
"""


def test_the_lease_of_an_evaluator_that_is_killed_ends_by_itself(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run = fill(path, 1, keep=KeepLast(1))
    with subprocess.Popen(
        [sys.executable, "-c", _EVALUATOR, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as evaluator:
        assert evaluator.stdout is not None
        assert evaluator.stdout.readline() == "1\n"
        run.save(2, {"step": 2}).result()
        assert run.steps() == [1, 2]
        evaluator.send_signal(signal.SIGKILL)
    run.save(3, {"step": 3}).result()
    assert run.steps() == [1, 3]  # it may only stand still
    (lease,) = (tmp_path / "run" / ".leases").iterdir()
    os.utime(lease, (1e9, 1e9))  # a minute later
    run.save(4, {"step": 4}).result()
    assert run.steps() == [4]
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["run.json", "step_00000004"]


def test_in_a_job_the_others_hear_that_there_is_no_step_before_they_give_up(path: str) -> None:
    said: list[int | None] = []

    def broadcast(work: Callable[[], int | None]) -> int | None:
        said.append(work())
        return said[-1]

    run = fill(path, 1)
    assert list(watch_in_a_job(run, broadcast)) == [1]
    assert said[0] == 1
    assert said[-1] == -1
    assert said.count(None) >= 3  # at least each quarter of a second, but for the one that ends it


def test_a_look_that_nobody_waits_for_any_more_loses_no_step(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path, 1, 2, 3)
    held, go = threading.Event(), threading.Event()
    wait_before_a_step_is_taken(monkeypatch, 2, held, go)

    async def follow() -> list[int]:
        watch = tr.Run(path).watch(hold=True, timeout=30)
        found = [await anext(watch)]
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.to_thread(held.wait, 60)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        go.set()
        await asyncio.sleep(0.3)  # it ends, and nobody hears of it
        found += [await anext(watch), await anext(watch)]
        watch.close()
        return found

    assert asyncio.run(follow()) == [1, 2, 3]
