"""What a run can do where a bucket denies to list, to read or to remove, and what it says of the rest."""

import numpy as np
import pytest

import treering
from tests.buckets import DAY, Delete, Get, List, MemoryBucket, install
from treering.errors import ExistsError, NotRemovedWarning, PermissionDeniedError, StoreError


@pytest.mark.parametrize(("name", "told"), [("run.json", "/run/run.json'"), (".run.json.left", "/run'")])
def test_what_may_not_be_read_is_named_as_users_know_it(name: str, told: str) -> None:
    bucket = MemoryBucket()
    path = treering.bucket(bucket) / "run"
    with treering.Run(path) as run:
        for step in (1, 2):
            run.save(step, {"step": step}).result()
    bucket.denied = lambda request: isinstance(request, Get) and request.name.endswith(f"/{name}")
    with pytest.raises(StoreError, match=f"could not read 's3://tests-[0-9-]*{told}: AccessDenied"):
        treering.Run(path, keep=treering.KeepLast(1)).gc(dry_run=False)
    bucket.denied = lambda _: False
    assert treering.Run(path).steps() == [1, 2]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    """A bucket with the steps 1 and 2 of a run, which denies to list."""
    bucket = install(monkeypatch)
    with treering.Run("memory://run") as run:
        for step in (1, 2):
            run.save(step, {"step": step}).result()
    bucket.denied = lambda request: isinstance(request, List)
    return bucket


def test_a_step_is_saved_and_loaded_by_its_number_where_nothing_may_be_listed(bucket: MemoryBucket) -> None:
    with treering.Run("memory://run", save_every=treering.SaveEvery(steps=1)) as run:
        for step in (3, 4):
            run.save(step, {"step": step}, metrics={"loss": 1 / step}).result()
        assert run.load(4) == {"step": 4}
        assert treering.load("memory://run/step_00000003") == {"step": 3}
        with pytest.raises(ExistsError, match="step 4 of the run"):
            run.save(4, {"step": 0})
        with pytest.raises(ExistsError, match="older than its latest step, 4"):
            run.save(3, {"step": 0})
        with pytest.raises(PermissionDeniedError, match=r"step_00000007.*without the right to list"):
            run.load(7)  # whether it is absent is not known: a bucket says the same of what may not be read
    with treering.Run("memory://new") as run:
        run.save(1, {"step": 1}).result()
        assert run.load(1) == {"step": 1}
    bucket.denied = lambda _: False
    run = treering.Run("memory://run")
    assert run.steps() == [1, 2, 3, 4]
    assert run.best("loss") == 4


def test_going_back_works_where_nothing_may_be_listed(bucket: MemoryBucket) -> None:
    with treering.Run("memory://run") as run:
        run.save(3, {"step": 3}).result()
        saved = run.save(2, {"step": 20}, rollback=True)
        assert "it removes the later step 3" in saved.reason
        saved.result()
        with pytest.raises(PermissionDeniedError):
            run.load(3)
        assert run.load(2) == {"step": 20}
    bucket.denied = lambda _: False
    assert treering.Run("memory://run").steps() == [1, 2]


def test_what_needs_a_list_says_which_right_it_needs(bucket: MemoryBucket) -> None:
    run = treering.Run("memory://run", keep=treering.KeepLast(1))
    for ask in (run.steps, run.latest, run.load, run.gc, lambda: run.gc(dry_run=False), lambda: run.metrics(9)):
        with pytest.raises(PermissionDeniedError, match=r"'memory://run'.*without the right to list") as denied:
            ask()
        assert "one step by its number" in str(denied.value)
    assert isinstance(run.metrics(1), dict)
    with pytest.warns(NotRemovedWarning, match="steps that `keep` does not keep cannot be removed"):
        run.save(3, {"step": 3}).result()
    run.save(4, {"step": 4}).result()  # warnings are errors in tests
    bucket.denied = lambda _: False
    assert run.steps() == [1, 2, 3, 4]
    run.gc(dry_run=False)
    assert run.steps() == [4]


def test_a_run_is_saved_where_nothing_may_be_removed(bucket: MemoryBucket) -> None:
    bucket.denied = lambda request: isinstance(request, Delete)
    tree = {"w": np.zeros(3)}
    with treering.Run("memory://run", keep=treering.KeepLast(1)) as run:
        for step in (3, 4):
            run.save(step, tree).result()
        assert run.steps() == [4]
    kept = bucket.data("run/step_00000004/treering.json")
    bucket.wait(2 * DAY)
    with pytest.warns(NotRemovedWarning, match="data that nothing needs"):
        treering.Run("memory://run").save(5, tree).result()
    assert bucket.data("run/step_00000004/treering.json") == kept  # its marker stays, and is no reason for a fence
    bucket.denied = lambda _: False
    assert treering.Run("memory://run").steps() == [4, 5]
