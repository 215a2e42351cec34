"""Steps that another program holds stay, whoever removes and however the two meet; leases end by themselves."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import treering as tr
from tests import faults
from tests.buckets import Answer, List, MemoryBucket, Request, install, use_for_memory
from tests.clocks import wait_at_most
from tests.command import inside
from tests.on_disk import LEFT_DOCUMENT, signed
from tests.run.failing_calls import refused
from tests.stores import read_file, store_at, write_file
from treering.errors import (
    BusyError,
    ClosedError,
    FormatError,
    LeaseLostError,
    NotFoundError,
    NotRemovedWarning,
    PermissionDeniedError,
    TreeringError,
    UnsupportedError,
)
from treering.rules import KeepLast

LEASES = ".leases"
BUCKETS: list[MemoryBucket] = []


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a run that does not exist yet."""
    if request.param == "disk":
        return str(tmp_path / "run")
    BUCKETS.append(install(monkeypatch))
    return "memory://bucket/run"


def fill(path: str, *steps: int, keep: KeepLast | None = None, rollback: bool = False) -> tr.Run:
    run = tr.Run(path, keep=keep)
    for step in steps:
        run.save(step, {"step": step}, rollback=rollback).result()
    return run


def let_expire(path: str) -> None:
    """Let every lease be older than it counts, by the clock of the store."""
    if "://" in path:
        BUCKETS[-1].wait(1000.0)
        return
    for lease in Path(path, LEASES).iterdir():
        os.utime(lease, (1e9, 1e9))


# ---------------------------------------------------------------------------------------------- who removes respects it


def test_a_held_step_stays_until_it_is_released(path: str) -> None:
    run = fill(path, 1, 2, keep=KeepLast(1))
    lease = run.hold(2)
    fill(path, 3, 4, keep=KeepLast(1))
    assert run.steps() == [2, 4]
    assert run.load(2) == {"step": 2}
    assert [(one.step, one.kept) for one in run.gc(dry_run=False)] == [(2, True), (4, True)]
    assert run.gc()[0].reasons[0].startswith("held by ")
    with pytest.raises(BusyError, match=rf"step 2 .* held by .*process {os.getpid()}\) until"):
        run.delete(2)
    lease.renew()
    lease.release()
    lease.release()
    with pytest.raises(ClosedError, match="was released"):
        lease.renew()
    run.gc(dry_run=False)
    assert run.steps() == [4]
    assert not store_at(path).at(LEASES).names() if "://" in path else not Path(path, LEASES).exists()


def test_a_held_step_is_listed_in_run_json_all_the_time(path: str) -> None:
    run = fill(path, 1, keep=KeepLast(1))
    with run.hold(1):
        for step in (2, 3, 4):
            run.save(step, {"step": step}).result()
            listed = json.loads(read_file(f"{path}/run.json"))["steps"]
            assert [one["step"] for one in listed] == [1, step]
        with tr.Run(path).hold(1):  # also for the next one who wants to hold it
            pass


def test_two_hold_a_step_and_the_last_one_lets_it_go(path: str) -> None:
    run = fill(path, 1, 2)
    first, second = run.hold(1), tr.Run(path).hold(1)
    first.release()
    with pytest.raises(BusyError):
        run.delete(1)
    second.release()
    run.delete(1)
    assert run.steps() == [2]


def test_steps_that_a_rollback_supersedes_stay_readable_while_they_are_held(path: str) -> None:
    run = fill(path, 10, 20, 30)
    lease = run.hold(30)
    run.save(10, {"step": 11}, rollback=True).result()
    assert run.steps() == [10]
    assert tr.load(f"{path}/step_00000030") == {"step": 30}
    lease.renew()
    run.save(15, {"step": 15}).result()
    assert tr.load(f"{path}/step_00000030") == {"step": 30}
    lease.release()
    run.save(16, {"step": 16}).result()
    assert run.steps() == [10, 15, 16]
    with pytest.raises(NotFoundError):
        tr.load(f"{path}/step_00000030")


@pytest.mark.parametrize("rollback", [False, True])
def test_a_training_that_comes_to_a_superseded_step_again_ends_its_lease(path: str, *, rollback: bool) -> None:
    run = fill(path, 10, 20, 30)
    lease = run.hold(30)
    run.save(10, {"step": 11}, rollback=True).result()
    run.save(30, {"step": 31}, rollback=rollback).result()
    assert (run.steps(), run.load()) == ([10, 30], {"step": 31})
    with pytest.raises(LeaseLostError, match=r"step 30 .* is lost"):
        lease.renew()
    assert lease.lost


def test_a_step_that_is_superseded_or_gone_is_not_held(path: str) -> None:
    run = fill(path, 10, 20)
    with run.hold(20):
        run.save(10, {"step": 11}, rollback=True).result()
        with pytest.raises(NotFoundError, match="has no step 20"):
            run.hold(20)
    with pytest.raises(NotFoundError, match="has no step 99"):
        run.hold(99)


def test_a_step_that_is_saved_anew_is_another_one(path: str) -> None:
    run = fill(path, 10)
    lease = run.hold(10)
    run.save(10, {"step": 11}, rollback=True).result()
    with pytest.raises(LeaseLostError, match="saved anew"):
        lease.renew()


def test_who_holds_a_step_is_shown(path: str) -> None:
    run = fill(path, 1, 2)
    with run.hold(1):
        by = f"held by .*process {os.getpid()}.* until .* UTC"
        assert re.search(rf"all are kept; {by}", str(run))
        if "://" not in path:
            for verb in ("log", "ls", "doctor"):
                assert re.search(by, inside(verb, path, code=0)[0])
            assert re.search(rf"keep *1 .*{by}", inside("gc", path, "--keep-last", "1", "--yes", code=0)[0])
            assert re.search(by, inside("rm", path, "1", code=2)[1])
    assert run.steps() == [1, 2]


# ------------------------------------------------------------------------------------------------- it ends by itself


def test_a_lease_that_is_not_renewed_ends(path: str) -> None:
    run = fill(path, 1, 2, keep=KeepLast(1))
    lease = run.hold(2)
    let_expire(path)
    run.save(3, {"step": 3}).result()
    assert run.steps() == [3]
    with pytest.raises(LeaseLostError, match="expired"):
        lease.renew()
    with pytest.raises(LeaseLostError, match="ended"):
        lease.renew()


def test_a_lease_that_was_late_but_not_ended_counts_again(path: str) -> None:
    run = fill(path, 1, 2, keep=KeepLast(1))
    lease = run.hold(2)
    let_expire(path)
    lease.renew()
    run.save(3, {"step": 3}).result()
    assert run.steps() == [2, 3]


def test_the_thread_renews_it_and_says_when_it_is_lost(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = fill(path, 1, 2)
    renewed = threading.Event()
    wait_at_most(monkeypatch, lease_share=0.0)
    renew = tr.run.Lease.renew

    def noted(lease: tr.run.Lease) -> None:
        try:
            renew(lease)
        finally:
            renewed.set()

    monkeypatch.setattr(tr.run.Lease, "renew", noted)
    lease = run.hold(1)
    assert renewed.wait(60)
    lease.release()


def test_one_that_nobody_refers_to_is_not_renewed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fill(path, 1)
    before = set(threading.enumerate())
    wait_at_most(monkeypatch, lease_share=0.001)
    run.hold(1)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seconds", [0, -1, 86_401, float("nan"), True, "60"])
def test_other_times_are_refused(path: str, seconds: float) -> None:
    with pytest.raises(UnsupportedError, match="1 to 86400 seconds"):
        fill(path, 1).hold(1, seconds=seconds)


# --------------------------------------------------------------------------------------------------------- the stamp


def test_a_run_with_leases_is_stamped_for_versions_that_do_not_know_them(path: str) -> None:
    run = fill(path, 1, 2)
    lease = run.hold(1)
    stamp = read_file(f"{path}/{LEFT_DOCUMENT}")
    assert stamp.startswith(b'{"treering_left": 2, ')
    run.save(1, {"step": 1}, rollback=True).result()
    assert read_file(f"{path}/{LEFT_DOCUMENT}").startswith(b'{"treering_left": 2, ')
    lease.release()
    run.save(3, {"step": 3}).result()
    run.gc(dry_run=False)
    if "://" in path:
        assert len(read_file(f"{path}/{LEFT_DOCUMENT}")) == 33
    else:
        assert not Path(path, LEFT_DOCUMENT).exists()


def test_a_golden_stamp_is_read(tmp_path: Path) -> None:
    run = fill(str(tmp_path), 1, 2)
    document = signed("treering_left", '"leases": true, "nonce": "0123456789abcdef"}', version="2")
    (tmp_path / LEFT_DOCUMENT).write_bytes(document)
    assert run.steps() == [1, 2]
    run.save(3, {"step": 3}).result()  # no lease is left
    assert not (tmp_path / LEFT_DOCUMENT).exists()


def test_a_stamp_of_a_newer_version_keeps_all_steps(tmp_path: Path) -> None:
    run = fill(str(tmp_path), 1, 2)
    (tmp_path / LEFT_DOCUMENT).write_bytes(signed("treering_left", '"leases": true}', version="3"))
    for change in (lambda: run.delete(1), lambda: run.gc(dry_run=False), lambda: run.hold(1)):
        with pytest.raises(FormatError):
            change()
    assert (tmp_path / "step_00000001" / "treering.json").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["notes", "step_1", "step_1-0-" + "0" * 16, "step_1-100000-" + "0" * 16, "step_x-1-y"])
def test_other_names_among_the_leases_hold_nothing(path: str, name: str) -> None:
    run = fill(path, 1, 2)
    with run.hold(2):
        write_file(f"{path}/{LEASES}/{name}", b"x" * 100)
        run.delete(1)
    assert run.steps() == [2]


def test_a_lease_with_hostile_content_holds_all_the_same(path: str) -> None:
    run = fill(path, 1, 2)
    with run.hold(2):
        write_file(f"{path}/{LEASES}/step_1-60-{'0' * 16}", b"\x1b[31m" * 2000)
        with pytest.raises(BusyError, match="held by somebody until"):
            run.delete(1)


def test_a_link_in_the_place_of_the_leases_is_not_followed(tmp_path: Path) -> None:
    run = fill(str(tmp_path / "run"), 1, 2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"step_1-60-{'0' * 16}").write_bytes(b"x" * 100)
    (tmp_path / "run" / LEASES).symlink_to(elsewhere)
    run.delete(1)
    assert run.steps() == [2]


# ------------------------------------------------------------------------------------------------------- what it costs


def test_a_save_that_removes_nothing_asks_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = install(monkeypatch, grace=0.0)
    run = fill("memory://b/run", 1, 2, 3)
    bucket.requests.clear()
    run.save(4, {"step": 4}).result()
    assert not [request for request in bucket.requests if LEASES in repr(request)]


def test_one_that_removes_a_step_makes_one_listing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = install(monkeypatch, grace=0.0)
    run = fill("memory://b/run", 1, 2, 3, keep=KeepLast(2))
    bucket.requests.clear()
    run.save(4, {"step": 4}).result()
    assert run.steps() == [3, 4]
    assert [type(request).__name__ for request in bucket.requests if LEASES in repr(request)] == ["List"]


def test_without_the_right_to_list_leases_nothing_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = install(monkeypatch, grace=0.0)
    run = fill("memory://b/run", 1, keep=KeepLast(1))
    bucket.denied = lambda request: LEASES in repr(request)
    with pytest.warns(NotRemovedWarning):
        run.save(2, {"step": 2}).result()
    assert run.steps() == [1, 2]


# ---------------------------------------------------------------------------------------------------------- the race


class Turns:
    """Lets two threads make their requests to a bucket in a given order."""

    def __init__(self, plan: list[tuple[str, int]]) -> None:
        self._plan = plan
        self._turn = threading.Condition()
        self._ended: set[str] = set()

    def meet(self, _: Request) -> Answer | None:
        me = "holder" if threading.current_thread().name == "holder" else "remover"
        with self._turn:
            assert self._turn.wait_for(lambda: self._is_next(me), 60)
            if self._plan:
                self._plan[0] = (me, self._plan[0][1] - 1)
            self._turn.notify_all()
        return None

    def end(self, who: str) -> None:
        with self._turn:
            self._ended.add(who)
            self._turn.notify_all()

    def _is_next(self, me: str) -> bool:
        while self._plan and (self._plan[0][1] <= 0 or self._plan[0][0] in self._ended):
            self._plan.pop(0)
        return not self._plan or self._plan[0][0] == me


def outcome(objects: dict[str, bytes], remove: Callable[[], object], plan: list[tuple[str, int]]) -> bool | None:
    """Hold step 1 while it is removed, in that order; return whether it was held, None where it was and is gone."""
    with pytest.MonkeyPatch.context() as patch:
        bucket = MemoryBucket("memory://")
        use_for_memory(patch, bucket)
        wait_at_most(patch, hold_patience=0.0)
        for name, data in objects.items():
            bucket.put(name, data)
        turns, held = Turns(plan), list[tr.run.Lease]()
        bucket.meet = turns.meet

        def hold() -> None:
            try:
                held.append(tr.Run("memory://b/run").hold(1))
            except (NotFoundError, BusyError):
                pass
            finally:
                turns.end("holder")

        def act() -> None:
            try:
                remove()
            except BusyError:
                pass
            finally:
                turns.end("remover")

        threads = [threading.Thread(target=hold, name="holder"), threading.Thread(target=act, name="remover")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        bucket.meet = lambda _: None
        there = 1 in tr.Run("memory://b/run").steps()
        for lease in held:
            lease.release()
        return None if held and not there else bool(held)


REMOVERS: dict[str, Callable[[], object]] = {
    "gc": lambda: tr.Run("memory://b/run", keep=KeepLast(1)).gc(dry_run=False),
    "delete": lambda: tr.Run("memory://b/run").delete(1),
    "save": lambda: tr.Run("memory://b/run", keep=KeepLast(1)).save(3, {"w": 3}).result(),
}


def outcomes(monkeypatch: pytest.MonkeyPatch, remover: str, *, stride: int) -> Iterator[bool | None]:
    """What comes of all orders in which one of the two is interrupted twice by the other; each has fewer requests."""
    bucket = install(monkeypatch, grace=0.0)
    fill("memory://b/run", 1, 2)
    objects = {name: bucket.data(name) for name in bucket.names()}
    for first, second in (("holder", "remover"), ("remover", "holder")):
        for number, (before, then) in enumerate(itertools.product(range(30), range(1, 45))):
            if number % stride == 0:
                yield outcome(objects, REMOVERS[remover], [(first, before), (second, then), (first, 1000)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("remover", REMOVERS)
def test_whoever_holds_a_step_has_it_however_the_two_meet(remover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(outcomes(monkeypatch, remover, stride=13)) == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("remover", REMOVERS)
def test_many_orders_of_the_two_are_safe(remover: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(outcomes(monkeypatch, remover, stride=3)) == {True, False}


@pytest.mark.parametrize("blind", ["treering._runs.save_step.end_leases", "treering._runs.leases.Lease._prove"])
def test_each_of_the_two_has_to_look(blind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blind, lambda *_, **__: {})
    assert None in outcomes(monkeypatch, "save", stride=13)


def test_a_training_without_the_right_to_list_goes_on_while_somebody_holds_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket = install(monkeypatch)
    lease = fill("memory://bucket/run", 1, 2).hold(1)
    bucket.denied = lambda request: isinstance(request, List)
    with pytest.warns(NotRemovedWarning, match="steps that `keep` does not keep cannot be removed"):
        fill("memory://bucket/run", 3, 4, keep=KeepLast(1)).close()
    # Whether the later steps are held cannot be known: they stay, and are hidden.
    saved = fill("memory://bucket/run", 2, rollback=True)
    with pytest.raises(PermissionDeniedError):
        saved.load(4)
    bucket.denied = lambda _: False
    assert saved.steps() == [1, 2]
    assert tr.load("memory://bucket/run/step_00000004") == {"step": 4}
    assert [one["step"] for one in json.loads(read_file("memory://bucket/run/run.json"))["steps"]] == [1, 2]
    lease.release()
    saved.gc(dry_run=False)
    with pytest.raises(NotFoundError):
        tr.load("memory://bucket/run/step_00000004")


def test_a_holder_that_is_stopped_while_it_renews_does_not_stop_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    wait_at_most(monkeypatch, swap_patience=0.1)
    run = fill(str(tmp_path / "run"), 1, keep=KeepLast(1))
    lease = run.hold(1)
    let_expire(str(tmp_path / "run"))
    [file] = (tmp_path / "run" / LEASES).iterdir()
    with file.open("r+b") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        run.save(2, {"step": 2}).result(60)
        assert run.steps() == [1, 2]
    run.save(3, {"step": 3}).result(60)
    assert run.steps() == [3]
    with pytest.raises(LeaseLostError):
        lease.renew()


def test_leases_and_the_stamp_of_another_user_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fill(str(tmp_path / "run"), 1, keep=KeepLast(1))
    lease = run.hold(1)
    let_expire(str(tmp_path / "run"))
    theirs = {LEFT_DOCUMENT, *(file.name for file in (tmp_path / "run" / LEASES).iterdir())}

    def is_theirs(name: object, flags: int = 0, *_: object, **__: object) -> bool:
        writes = flags & (os.O_WRONLY | os.O_RDWR) and not flags & os.O_CREAT
        return bool(writes) and os.path.basename(os.fsdecode(str(name))) in theirs  # noqa: PTH119 - as the system has it

    faults.fail(monkeypatch, os, "open", errno.EACCES, when=is_theirs)
    run.save(2, {"step": 2}).result()
    assert run.steps() == [2]
    assert not (tmp_path / "run" / LEFT_DOCUMENT).exists()
    with pytest.raises(LeaseLostError):
        lease.renew()


@pytest.mark.parametrize("dies", ["hold", "release"])
def test_of_a_holder_that_dies_at_any_call_no_lease_and_no_stamp_stays(tmp_path: Path, dies: str) -> None:
    for number in itertools.count():
        path = tmp_path / f"{number}"
        run = fill(str(path), 1)
        act = run.hold(1).release if dies == "release" else functools.partial(run.hold, 1)
        with refused(number, all_later=True) as failed:
            holder = threading.Thread(target=_try, args=[act])
            holder.start()
            holder.join()
        if not failed:
            break
        if (path / LEASES).exists():
            let_expire(str(path))
        run.gc(dry_run=False)
        # Of a stamp that was not written to its end a small file stays, which nobody reads.
        names = sorted(entry.name for entry in path.iterdir() if not entry.name.endswith(".new"))
        assert names == ["run.json", "step_00000001"], failed[0]
    assert number > 10


def _try(act: Callable[[], object]) -> None:
    with contextlib.suppress(TreeringError, OSError):
        act()


def test_a_lease_from_the_far_future_ends(tmp_path: Path) -> None:
    run = fill(str(tmp_path / "run"), 1, keep=KeepLast(1))
    lease = run.hold(1)
    [file] = (tmp_path / "run" / LEASES).iterdir()
    os.utime(file, (4e9, 4e9))
    run.save(2, {"step": 2}).result()
    assert run.steps() == [2]
    with pytest.raises(LeaseLostError):
        lease.renew()
