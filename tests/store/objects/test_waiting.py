"""In a bucket superseded and removed data wait for readers, are listed meanwhile, and go when the grace is over."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import treering as tr
from tests import faults, limits
from tests.buckets import DAY, HOUR, MemoryBucket, install, store_in
from tests.command import ended
from torture.bucket_programs import fence
from treering._codec.key_document import attempts_in, encode_tombstone, fenced, is_tombstone, placeholder, superseded_in
from treering._format.document import parse_index, read_names
from treering._inspect.doctor import diagnose
from treering._store.objects.requests import Answer, Delete, Get, Head, List, Put, Range, Request, Status, drive
from treering._store.waiting import sweep_old
from treering._values.checkpoint_names import is_data, journal_of
from treering._values.processes import Life
from treering.errors import (
    BusyError,
    CorruptError,
    ExistsError,
    NotFoundError,
    NotRemovedWarning,
    PermissionDeniedError,
    StoreError,
)

PATH = "memory://ckpt"
KEY = "ckpt/treering.json"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    return install(monkeypatch)


def tree(number: float) -> dict[str, object]:
    return {"w": np.full(100, number, np.float32)}


def data_in(bucket: MemoryBucket, prefix: str = "ckpt/") -> list[str]:
    return [name for name in bucket.names(prefix) if is_data(name.rsplit("/", 1)[-1])]


def markers_in(bucket: MemoryBucket, prefix: str = "ckpt/") -> list[str]:
    return [name for name in bucket.names(prefix) if name.endswith(".treering-tmp")]


def load() -> float:
    found = tr.load(PATH)["w"]
    assert (np.asarray(found) == found[0]).all()
    return float(found[0])


# ---------------------------------------------------------------------------------------------------- overwriting


def test_what_an_overwrite_supersedes_waits_and_is_listed(bucket: MemoryBucket) -> None:
    tr.save(PATH, tree(1))
    first = parse_index(bucket.data(KEY))
    bucket.wait(10)
    tr.save(PATH, tree(2), overwrite=True)
    index = parse_index(bucket.data(KEY))
    assert len(data_in(bucket)) == 2
    assert [(one.attempt, one.since) for one in index.superseded] == [(first.attempt, None)]
    assert index.replaces == [file.name for file in first.files]
    assert not markers_in(bucket)
    assert load() == 2


def test_it_is_removed_by_the_commit_after_the_grace_and_forgotten_by_the_next(bucket: MemoryBucket) -> None:
    attempts = []
    for number in range(4):
        tr.save(PATH, tree(number), overwrite=True)
        attempts.append(parse_index(bucket.data(KEY)).attempt)
        bucket.wait(HOUR / 2 + 1)
    # At the last commit the second had been superseded for half an hour, the first for an hour.
    index = parse_index(bucket.data(KEY))
    assert [one.attempt for one in index.superseded] == [attempts[2], attempts[1]]
    assert len(data_in(bucket)) == 3
    assert {name[5:21] for name in index.replaces} == set(attempts[:3])
    bucket.wait(2 * HOUR)
    tr.save(PATH, tree(4), overwrite=True)
    assert [one.attempt for one in superseded_in(bucket.data(KEY))] == [attempts[3]]
    assert attempts_in(bucket.data(KEY))[1] == attempts[3]
    assert len(data_in(bucket)) == 2
    fifth = parse_index(bucket.data(KEY)).attempt
    tr.save(PATH, tree(5), overwrite=True)
    assert {name[5:21] for name in parse_index(bucket.data(KEY)).replaces} == {attempts[3], fifth}


def test_without_a_grace_it_goes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = install(monkeypatch, grace=0.0)
    for number in range(3):
        tr.save(PATH, tree(number), overwrite=True)
    assert len(data_in(bucket)) == 1
    assert b"superseded" not in bucket.data(KEY)


def test_a_save_over_a_tombstone_takes_over_what_it_lists(bucket: MemoryBucket) -> None:
    tr.save(PATH, tree(1))
    index = parse_index(bucket.data(KEY))
    store = store_in(bucket, "ckpt")
    found = store.find("treering.json")
    assert found is not None
    assert store.transaction().delete(found.version, "").name == "DONE"
    with pytest.raises(NotFoundError, match="says so"):
        tr.load(PATH)
    bucket.wait(10)
    tr.save(PATH, tree(2))  # what was removed need not be overwritten
    new = parse_index(bucket.data(KEY))
    assert [(one.attempt, list(one.files)) for one in new.superseded] == [(index.attempt, [index.files[0].name])]
    assert new.superseded[0].since is not None
    assert new.replaces == [index.files[0].name]
    with pytest.raises(ExistsError):
        tr.save(PATH, tree(3))
    assert load() == 2


def test_a_damaged_tombstone_or_index_keeps_the_data_that_it_may_list(bucket: MemoryBucket) -> None:
    tr.save(PATH, tree(1))
    store = store_in(bucket, "ckpt")
    store.put("treering.json", bucket.data(KEY)[:-9])
    tr.save(PATH, tree(2), overwrite=True)
    assert len(data_in(bucket)) == 2
    assert parse_index(bucket.data(KEY)).replaces == []
    store.put("treering.json", encode_tombstone([])[:-9] + b"garbage}\n")
    tr.save(PATH, tree(3))
    assert len(data_in(bucket)) == 3
    assert load() == 3


def test_saving_works_where_nothing_may_be_listed_or_deleted(bucket: MemoryBucket) -> None:
    bucket.denied = lambda request: isinstance(request, List | Delete)
    for number in range(2):
        tr.save(PATH, tree(number), overwrite=number > 0)
        bucket.wait(HOUR + 1)
    with pytest.warns(NotRemovedWarning, match="cannot be removed"):
        tr.save(PATH, tree(2), overwrite=True)
    for number in (3, 4):  # warnings are errors in tests
        bucket.wait(HOUR + 1)
        tr.save(PATH, tree(number), overwrite=True)
    bucket.denied = lambda _: False
    assert load() == 4
    assert len(data_in(bucket)) == 5
    # What is past the grace is listed once more, by the index whose commit could not remove it.
    assert len(parse_index(bucket.data(KEY)).replaces) <= 2


def test_a_dead_attempt_that_may_not_be_removed_holds_up_no_save(bucket: MemoryBucket) -> None:
    tr.save(PATH, tree(1))
    dead_attempt(bucket, "ckpt")
    tr.save(PATH, tree(2), overwrite=True)
    bucket.denied = lambda request: isinstance(request, Delete)
    tr.save(PATH, tree(3), overwrite=True)
    assert len(data_in(bucket)) == 4
    bucket.denied = lambda _: False
    tr.save(PATH, tree(4), overwrite=True)
    assert len(data_in(bucket)) == 4
    assert not any("d" * 16 in name for name in bucket.names())
    assert load() == 4


def test_an_overwrite_takes_few_requests(bucket: MemoryBucket) -> None:
    tr.save(PATH, tree(1))
    begun = len(bucket.requests)
    tr.save(PATH, tree(2), overwrite=True)
    made = bucket.requests[begun:]
    beside = [request for request in made if not (isinstance(request, Put) and "data-" in request.name)]
    assert len(beside) <= 9, beside


# ---------------------------------------------------------------------------------------------------- runs


def test_a_removed_step_is_a_tombstone_until_its_data_are_gone(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run", keep=tr.KeepLast(1)) as run:
        run.save(1, tree(1)).result()
        run.save(2, tree(2)).result()
        run.wait()
        assert run.steps() == [2]
        key = "run/step_00000001/treering.json"
        assert is_tombstone(bucket.data(key))
        assert len(data_in(bucket, "run/step_00000001/")) == 1
        bucket.wait(HOUR / 2)
        run.gc(dry_run=False)
        assert len(data_in(bucket, "run/step_00000001/")) == 1
        bucket.wait(HOUR)
        run.gc(dry_run=False)
        assert bucket.names("run/step_00000001/") == [key]
        assert bucket.size(key) == 192
        assert attempts_in(bucket.data(key))[0] == ""
        assert run.steps() == [2]
        bucket.wait(DAY + 1)
        run.gc(dry_run=False)
        assert bucket.names("run/step_00000001/") == []
        assert float(run.load()["w"][0]) == 2


def test_the_saves_of_a_run_remove_what_waited(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.is_clock_of_runs(monkeypatch)
    with tr.Run("memory://run", keep=tr.KeepLast(1)) as run:
        for step in range(1, 8):
            run.save(step, tree(step)).result()
            run.wait()
            assert run.steps() == [step]
            bucket.wait(HOUR / 2 + 1)
        assert len(data_in(bucket, "run/")) <= 4
        for number in (70, 7):
            bucket.wait(DAY + HOUR)
            run.save(7, tree(number), rollback=True).result()
            run.wait()
        assert {name.split("/")[1] for name in bucket.names("run/step_")} == {"step_00000007"}  # no tombstone stays
        # A new process finds what waits.
    with tr.Run("memory://run", keep=tr.KeepLast(1)) as run:
        bucket.wait(2 * HOUR)
        run.save(8, tree(8)).result()
        run.wait()
        assert len(data_in(bucket, "run/")) == 2


def test_closing_a_run_can_remove_what_waited(bucket: MemoryBucket) -> None:
    run = tr.Run("memory://run", keep=tr.KeepLast(1))
    for step in (1, 2):
        run.save(step, tree(step))
    run.close(sweep=True)
    assert len(data_in(bucket, "run/")) == 2
    bucket.wait(HOUR + 1)
    run = tr.Run("memory://run", keep=tr.KeepLast(1))
    run.close(sweep=True)
    assert len(data_in(bucket, "run/")) == 1
    assert run.steps() == [2]


def test_going_back_empties_the_list_of_what_is_left_behind_another_way_each_time(bucket: MemoryBucket) -> None:
    emptied: list[bytes] = []
    with tr.Run("memory://run") as run:
        for step in (1, 2, 3):
            run.save(step, tree(step))
        run.save(1, tree(10), rollback=True).result()
        run.wait()
        assert run.steps() == [1]
        emptied.append(bucket.data("run/.run.json.left"))
        for step in (2, 3):
            run.save(step, tree(step)).result()
        run.save(2, tree(20), rollback=True).result()
        run.wait()
        assert run.steps() == [1, 2]
        emptied.append(bucket.data("run/.run.json.left"))
        assert float(run.load()["w"][0]) == 20
    assert all(re.fullmatch(rb"[0-9a-f]{32}\n", left) for left in emptied)
    assert emptied[0] != emptied[1]
    assert not any(isinstance(request, Delete) and "run/.run.json.left" in request.names for request in bucket.requests)


def test_a_branch_in_a_bucket_has_names_of_its_own(bucket: MemoryBucket, tmp_path: Path) -> None:
    with tr.Run("memory://run", keep=tr.KeepLast(1)) as run:
        run.save(1, tree(1)).result()
        for _ in range(2):  # the data of the first one wait under its names
            with run.branch(1, "memory://branch") as branch:
                assert float(branch.load()["w"][0]) == 1
            step = store_in(bucket, "branch/step_00000001")
            found = step.find("treering.json")
            assert found is not None
            step.transaction().delete(found.version, "")
        assert len(data_in(bucket, "branch/")) == 2
        with run.branch(1, tmp_path / "branch") as branch:
            assert float(branch.load()["w"][0]) == 1
            with branch.branch(1, "memory://back") as back:
                assert float(back.load()["w"][0]) == 1
                assert tr.verify("memory://back/step_00000001")


def test_steps_are_told_from_tombstones_by_one_listing(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run") as run:
        run.save(7, tree(7)).result()
    index = bucket.data("run/step_00000007/treering.json")
    for step in range(100, 600):
        bucket.perform(Put(f"run/step_{step:08d}/treering.json", index + b" " * (len(index) % 1024 == 0)))
    for step in range(1000, 11_000):
        bucket.perform(Put(f"run/step_{step:08d}/treering.json", placeholder()))
    run = tr.Run("memory://run")
    wanted = [7, *range(100, 600)]
    assert run.steps() == wanted
    assert bucket.counted(run.steps) <= 8
    assert bucket.counted(run.latest) <= 16
    assert run.latest() == 599


# ---------------------------------------------------------------------------------------------------- the doubtful


def dead_attempt(bucket: MemoryBucket, place: str = "run/step_00000001") -> None:
    """Leave what a saver leaves that was killed before its commit, on the version that is there."""
    attempt = "d" * 16
    store = store_in(bucket, place)
    found = store.find("treering.json")
    store.transaction().begin(journal_of(attempt), None if found is None else found.version)
    store.create(f"data-{attempt}-00000-of-00001.safetensors", [b"lost"], 4)


def test_an_attempt_in_doubt_is_swept_by_gc_after_a_day(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run") as run:
        run.save(1, tree(1)).result()
        dead_attempt(bucket)
        before = bucket.data("run/step_00000001/treering.json")
        bucket.wait(DAY - 60)
        run.gc(dry_run=False)
        assert bucket.data("run/step_00000001/treering.json") == before
        run.save(2, tree(2)).result()
        assert len(data_in(bucket, "run/step_00000001/")) == 2
        bucket.wait(61)
        run.save(3, tree(3)).result()
        assert len(data_in(bucket, "run/step_00000001/")) == 2
        run.gc(dry_run=False)
        assert len(data_in(bucket, "run/step_00000001/")) == 1
        assert not markers_in(bucket, "run/")
        after = bucket.data("run/step_00000001/treering.json")
        assert b'"fence": "' in after
        assert parse_index(after) == parse_index(before)
        assert float(run.load(step=1)["w"][0]) == 1
        assert run.steps() == [1, 2, 3]


def test_an_attempt_in_doubt_is_swept_by_the_first_save_of_a_process_and_then_daily(
    bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.is_clock_of_runs(monkeypatch)
    key = "run/step_00000001/treering.json"
    tr.Run("memory://run").save(1, tree(1)).result()
    dead_attempt(bucket)
    before = parse_index(bucket.data(key))
    bucket.wait(DAY + 1)
    with tr.Run("memory://run") as run:
        for step, left in ((2, 1), (3, 2), (4, 1)):
            run.save(step, tree(step)).result()
            run.wait()
            assert len(data_in(bucket, "run/step_00000001/")) == left
            assert len(markers_in(bucket, "run/")) == left - 1
            if step == 2:
                dead_attempt(bucket)
            bucket.wait(DAY / 2 + 1)
        assert parse_index(bucket.data(key)) == before
        assert float(run.load(step=1)["w"][0]) == 1
    dead_attempt(bucket)
    bucket.wait(DAY + 1)
    tr.Run("memory://run").close(sweep=True)
    assert len(data_in(bucket, "run/step_00000001/")) == 1


def test_a_save_fences_nothing_where_nothing_old_is_left_over(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run") as run:
        for step in (1, 2):
            run.save(step, tree(step)).result()
    keys = {name: bucket.data(name) for name in bucket.names() if name.endswith("treering.json")}
    dead_attempt(bucket)
    bucket.wait(DAY - 60)
    for step in (3, 4):
        begun = len(bucket.requests)
        with tr.Run("memory://run") as run:
            run.save(step, tree(step)).result()
        deep = [one for one in bucket.requests[begun:] if isinstance(one, List) and one.prefix == "run/step_"]
        assert len(deep) == 1
    assert {name: bucket.data(name) for name in keys} == keys
    assert len(markers_in(bucket, "run/")) == 1


def test_a_save_that_removes_a_step_takes_few_requests(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run", keep=tr.KeepLast(2)) as run:
        for step in range(1, 4):
            run.save(step, tree(step)).result()
        for step in (4, 5):
            assert bucket.counted(lambda step=step: run.save(step, tree(step)).result()) <= 19  # type: ignore[misc]
        assert run.steps() == [4, 5]


def test_nothing_is_written_where_no_run_is(bucket: MemoryBucket) -> None:
    run = tr.Run("memory://nothing", keep=tr.KeepLast(1))
    assert run.gc(dry_run=False) == []
    run.close(sweep=True)
    assert not any(isinstance(request, Put) for request in bucket.requests)


def test_one_whose_data_are_younger_than_a_day_is_not(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run") as run:
        run.save(1, tree(1)).result()
        dead_attempt(bucket)
        bucket.wait(DAY + 1)
        store_in(bucket, "run/step_00000001").put(f"data-{'d' * 16}-00001-of-00002.safetensors", b"still at it")
        run.gc(dry_run=False)
        assert len(data_in(bucket, "run/step_00000001/")) == 3
        assert b"fence" not in bucket.data("run/step_00000001/treering.json")


def test_data_without_a_marker_go_after_a_day_and_a_fence(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run") as run:
        run.save(1, tree(1)).result()
        store = store_in(bucket, "run/step_00000001")
        store.put(f"data-{'d' * 16}-00000-of-00001.safetensors", b"of a late request")
        run.gc(dry_run=False)
        bucket.wait(DAY + 1)
        run.save(2, tree(2)).result()
        assert len(data_in(bucket, "run/step_00000001/")) == 2
        run.gc(dry_run=False)
        assert len(data_in(bucket, "run/step_00000001/")) == 1
        assert b'"fence": "' in bucket.data("run/step_00000001/treering.json")
        assert float(run.load(step=1)["w"][0]) == 1


def test_data_without_a_key_go_after_a_day_and_a_fence(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run") as run:
        run.save(1, tree(1)).result()
        store_in(bucket, "run/step_00000000").put(f"data-{'d' * 16}-00000-of-00001.safetensors", b"of a copy")
        run.gc(dry_run=False)
        assert len(data_in(bucket, "run/step_00000000/")) == 1
        bucket.wait(DAY + 1)
        run.gc(dry_run=False)
        assert data_in(bucket, "run/step_00000000/") == []
        assert run.steps() == [1]


def key_request(request: Request) -> tuple[str, str] | None:
    """Return the kind of a request for the key, and that of its condition."""
    if getattr(request, "name", None) != KEY:
        return None
    return type(request).__name__, type(getattr(request, "condition", None)).__name__


@pytest.fixture(params=[True, False], ids=["over an index", "where no key is"])
def lone(request: pytest.FixtureRequest, bucket: MemoryBucket) -> str:
    """Old data that no marker explains and no key lists."""
    if request.param:
        tr.save(PATH, tree(1))
    name = f"data-{'d' * 16}-00000-of-00001.safetensors"
    store_in(bucket, "ckpt").put(name, b"of a late request")
    bucket.wait(2 * DAY)
    return name


def sweep_place(bucket: MemoryBucket) -> bool:
    store = store_in(bucket, "ckpt")
    return sweep_old(store, store.transaction(), (), read_names)


def test_the_key_is_fenced_as_in_the_simulation(bucket: MemoryBucket, lone: str) -> None:
    before = dict(bucket._objects)
    bucket.requests.clear()
    drive(bucket, fence(KEY, lambda: True))
    simulated = list(filter(None, map(key_request, bucket.requests)))
    bucket._objects.clear()
    bucket._objects.update(before)
    bucket.requests.clear()
    assert sweep_place(bucket)
    assert list(filter(None, map(key_request, bucket.requests))) == simulated
    assert f"ckpt/{lone}" not in bucket.names()


@pytest.mark.parametrize("kinds", [["Get", "Put"], ["Get", "Put", "Get"]], ids=["before the fence", "after it"])
def test_nothing_is_swept_by_age_where_the_key_changes_meanwhile(
    bucket: MemoryBucket, lone: str, kinds: list[str]
) -> None:
    asked: list[str] = []

    def change(request: Request) -> None:
        if (found := key_request(request)) is not None:
            asked.append(found[0])
            if asked == kinds:
                bucket.put(KEY, fenced(bucket.data(KEY)) if KEY in bucket.names() else placeholder())

    bucket.meet = change
    assert not sweep_place(bucket)
    assert asked[: len(kinds)] == kinds
    assert f"ckpt/{lone}" in bucket.names()


def test_nothing_is_swept_by_age_where_the_index_is_damaged(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run") as run:
        run.save(1, tree(1)).result()
        dead_attempt(bucket)
        store_in(bucket, "run/step_00000001").put("treering.json", bucket.data("run/step_00000001/treering.json")[:-5])
        bucket.wait(2 * DAY)
        run.gc(dry_run=False)
        assert len(data_in(bucket, "run/step_00000001/")) == 2


def test_the_rest_of_a_first_save_that_died_goes_with_its_placeholder(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run") as run:
        run.save(5, tree(5)).result()
        dead_attempt(bucket)
        assert run.steps() == [5]
        bucket.wait(DAY + 1)
        run.gc(dry_run=False)
        assert bucket.names("run/step_00000001/") == ["run/step_00000001/treering.json"]
        bucket.wait(DAY + 1)
        run.gc(dry_run=False)
        assert bucket.names("run/step_00000001/") == []


# -------------------------------------------------------------------------------------------------------------- readers


def large(number: float) -> dict[str, object]:
    """A tree that is not read with the request that opens its file."""
    return {"w": np.full(1 << 18, number, np.float32)}


def at_reading(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> list[str]:
    """Do something before each read of data by position; return the names that were read."""
    read: list[str] = []

    def note(_: MemoryBucket, request: Range) -> None:
        read.append(request.name)
        action()

    faults.before(monkeypatch, MemoryBucket, "read_range", note)
    return read


def once(action: Callable[[], object]) -> Callable[[], object]:
    """Return what does something the first time that it is called."""
    left = [action]
    return lambda: left.pop()() if left else None


def overwrite_and_forget(bucket: MemoryBucket, number: float) -> None:
    """Overwrite it twice, so that its data, whose grace is over, are gone."""
    tr.save(PATH, large(number), overwrite=True)
    bucket.wait(2 * HOUR)
    tr.save(PATH, large(number), overwrite=True)


def test_a_load_in_the_grace_reads_what_it_opened(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    tr.save(PATH, large(1))
    at_reading(monkeypatch, once(lambda: tr.save(PATH, large(2), overwrite=True)))
    assert load() == 1
    assert load() == 2


def test_a_load_whose_data_are_gone_reads_the_newer_ones(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    tr.save(PATH, large(1))
    read = at_reading(monkeypatch, once(lambda: overwrite_and_forget(bucket, 2)))
    assert load() == 2
    assert len(read) == 2


def test_a_load_that_is_overtaken_each_time_is_busy(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    tr.save(PATH, large(1))
    read = at_reading(monkeypatch, lambda: overwrite_and_forget(bucket, 2))
    with pytest.raises(BusyError, match="replaced 4 times"):
        load()
    assert len(read) == 4


def test_a_load_whose_checkpoint_is_removed_finds_nothing(
    bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    tr.save(PATH, large(1))
    store = store_in(bucket, "ckpt")

    def remove() -> None:
        found = store.find("treering.json")
        assert found is not None
        store.transaction().delete(found.version, "")
        store.remove(data_in(bucket)[0].removeprefix("ckpt/"))

    at_reading(monkeypatch, remove)
    with pytest.raises(NotFoundError, match="no checkpoint"):
        load()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_data_that_the_index_names_and_that_are_gone_are_damage(
    bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    tr.save(PATH, large(1))
    (name,) = data_in(bucket)
    store = store_in(bucket, "ckpt")
    if when == "before":
        store.remove(name.removeprefix("ckpt/"))
    else:
        at_reading(monkeypatch, lambda: store.remove(name.removeprefix("ckpt/")))
    with pytest.raises(CorruptError, match=r"is missing|was replaced or removed"):
        load()
    found = tr.verify(PATH)
    assert not found
    assert "missing" in found.findings[0].problem


def test_a_lazy_read_of_what_is_gone_is_busy(bucket: MemoryBucket) -> None:
    tr.save(PATH, large(1))
    with tr.open(PATH) as opened:
        tr.save(PATH, large(2), overwrite=True)
        assert float(opened["w"][0]) == 1
        bucket.wait(2 * HOUR)
        tr.save(PATH, large(3), overwrite=True)
        with pytest.raises(BusyError, match="saved again"):
            opened["w"][200_000:200_010]


def test_verifying_reads_the_newer_data_where_the_older_are_gone(
    bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    tr.save(PATH, large(1))
    at_reading(monkeypatch, once(lambda: overwrite_and_forget(bucket, 2)))
    assert tr.verify(PATH)


# --------------------------------------------------------------------------------------------------------- what is told


def test_what_waits_is_told(bucket: MemoryBucket, capsys: pytest.CaptureFixture[str]) -> None:
    bucket.time = time.time() - HOUR / 2
    for number in range(3):
        tr.save(PATH, tree(number), overwrite=True)
    found = diagnose(PATH)
    assert found.ok
    assert not found.attempts
    (note,) = found.notes
    assert "superseded data stay here: 2 files" in note
    assert "the first of them for another 29 min" in note or "for another 30 min" in note
    assert note in str(tr.inspect(PATH))
    for more in ([], ["--json"]):
        ended("du", PATH, *more)
        assert "superseded data stay here: 2 files" in capsys.readouterr().out
    assert bucket.counted(lambda: tr.inspect(PATH)) <= 4


def test_what_waits_is_told_where_listings_are_denied(bucket: MemoryBucket) -> None:
    bucket.time = time.time()
    for number in range(2):
        tr.save(PATH, tree(number), overwrite=True)
    bucket.denied = lambda request: isinstance(request, List)
    assert "superseded data stay here: 1 file" in str(tr.inspect(PATH))
    bucket.denied = lambda request: isinstance(request, List | Head)
    with pytest.raises(PermissionDeniedError, match="could not read 'memory://"):
        tr.inspect(PATH)


def test_what_could_go_is_told_too(bucket: MemoryBucket) -> None:
    bucket.time = time.time() - 2 * HOUR
    for number in range(2):
        tr.save(PATH, tree(number), overwrite=True)
    assert "1 file, " in diagnose(PATH).notes[0]
    assert "their time for readers is over" in diagnose(PATH).notes[0]


def test_the_doctor_tells_attempts_apart(bucket: MemoryBucket) -> None:
    tr.save(PATH, tree(1))
    dead_attempt(bucket, "ckpt")
    before = bucket.names()
    (attempt,) = diagnose(PATH).attempts
    assert bucket.names() == before
    assert attempt.life is Life.UNKNOWN
    assert "may still be committed" in attempt.reason
    assert "treering gc" in attempt.advice
    tr.save(PATH, tree(2), overwrite=True)
    (attempt,) = diagnose(PATH).attempts
    assert attempt.life is Life.DEAD
    assert "can never be committed" in attempt.reason
    assert attempt.files == 2


def test_nothing_is_called_a_leftover_while_the_index_is_damaged(bucket: MemoryBucket) -> None:
    """An attempt whose base is gone may be the very one that the damaged index names."""
    tr.save(PATH, tree(1))
    dead_attempt(bucket, "ckpt")
    store = store_in(bucket, "ckpt")
    store.replace("treering.json", b"no index")
    found = diagnose(PATH)
    assert "the index cannot be used" in found.problems[0]
    assert {attempt.life for attempt in found.attempts} == {Life.OVER}
    assert all("keep them until" in attempt.advice for attempt in found.attempts)


def test_the_doctor_says_that_a_checkpoint_was_removed(bucket: MemoryBucket) -> None:
    tr.save(PATH, tree(1))
    store = store_in(bucket, "ckpt")
    found = store.find("treering.json")
    assert found is not None
    store.transaction().delete(found.version, "")
    said = diagnose(PATH)
    assert said.committed is None
    assert said.ok
    assert said.waits_for_readers
    assert [note.split(":")[0] for note in said.notes] == ["nothing is committed here", "superseded data stay here"]


def test_tombstones_whose_data_wait_are_read_at_the_same_time(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run", keep=tr.KeepLast(1)) as run:
        for step in range(12):
            run.save(step, tree(step)).result()
        run.wait()
        assert run.steps() == [11]
        assert [verdict.step for verdict in run.gc()] == [11]


def test_a_failed_read_of_one_tombstone_fails_the_listing(bucket: MemoryBucket) -> None:
    with tr.Run("memory://run", keep=tr.KeepLast(1)) as run:
        for step in range(4):
            run.save(step, tree(step)).result()
        run.wait()
        bucket.denied = lambda request: isinstance(request, Get) and "step_00000001/" in request.name
        with pytest.raises(StoreError):
            run.steps()


def test_an_index_that_is_replaced_while_it_is_read_is_read_again(
    bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    tr.save(PATH, tree(1))
    limits.lower(monkeypatch, first_read_of_objects=64)
    replaced: list[str] = []

    def replace_first(request: Range) -> None:
        if request.name == KEY and not replaced:
            replaced.append(request.name)
            tr.save(PATH, tree(2), overwrite=True)

    faults.before(monkeypatch, bucket, "read_range", replace_first)
    assert (load(), replaced) == (2, [KEY])


def test_more_never_waits_than_an_index_may_list(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, superseded_attempts=8, superseded_kept=3)
    for number in range(9):
        tr.save(PATH, tree(number), overwrite=True)
        bucket.wait(1)
        assert load() == number
    assert len(data_in(bucket)) == 4


def test_the_time_of_a_bucket_is_told_where_nothing_may_be_removed(bucket: MemoryBucket) -> None:
    bucket.denied = lambda request: isinstance(request, Delete)
    assert abs(store_in(bucket, "run").transaction().now() - bucket.time) < 1


def test_a_file_is_not_replaced_where_it_is_not_known_whether_one_is_there(bucket: MemoryBucket) -> None:
    path = f"{PATH}/model.safetensors"
    tr.save(path, tree(1))
    silent = [Answer(Status.NO_ANSWER, reason="reset")]
    bucket.meet = lambda request: silent.pop() if silent and isinstance(request, Head) else None
    with pytest.raises(StoreError, match="does not answer"):
        tr.save(path, tree(2))
    assert tr.load(path)["w"][0] == 1
