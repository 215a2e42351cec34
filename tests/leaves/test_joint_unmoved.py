"""Several processes save one tree into a bucket: threads stand for them, each with some of the devices."""

from __future__ import annotations

import json
import re

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import treering
from tests.buckets import NO_ANSWER, MemoryBucket, Put, install
from tests.jobs import be_process
from tests.leaves.jobs_of_threads import Job
from tests.leaves.saved import put, stored
from tests.leaves.test_joint import all_failed, all_well, tree_of
from tests.stores import located
from tests.trees import assert_same_arrays
from treering.errors import BusyError, MismatchError, ProcessFailedError, StoreError, TimedOutError, UnsupportedError
from treering.leaves import tree_serialize_leaves

INDEX = "a/leaves/tensorstore_index.json"
PATH = located("memory://a/leaves")
OTHER = {"m": jnp.ones(3)}


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    return install(monkeypatch)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, bucket: MemoryBucket) -> Job:
    return Job(monkeypatch, 2)


def files(bucket: MemoryBucket, attempt: str = "") -> list[str]:
    """The names of what is in the folders of attempts, or of one."""
    above = f"a/leaves/.treering/{attempt}"
    return [name.removeprefix(above) for name in bucket.names(above)]


def others(bucket: MemoryBucket) -> list[str]:
    """The names of what is in no folder of an attempt."""
    return [name for name in bucket.names() if "/.treering/" not in name]


def content(bucket: MemoryBucket) -> dict[str, bytes]:
    """The files of all leaves, without attempts."""
    found = {name.split("/leaves/")[-1]: bucket.data(name) for name in bucket.names("a/leaves/.treering/")}
    return {name: re.sub(rb'"[0-9a-f]{16}"', b"", data) for name, data in found.items() if "record" not in name}


def test_what_is_saved_is_what_one_process_saves(monkeypatch: pytest.MonkeyPatch, bucket: MemoryBucket) -> None:
    tree = tree_of()
    called: list[str] = []
    all_well(Job(monkeypatch, 4).save(PATH, tree, commit_callback=lambda: called.append("once")))
    assert called == ["once"]
    assert others(bucket) == [INDEX]  # no message is left
    assert_same_arrays(stored(PATH), tree)
    assert treering.verify(PATH).ok
    together = content(bucket)
    entries = json.loads(bucket.data(INDEX))["arrays"]
    assert all(re.match(r"\.treering/[0-9a-f]{16}/leaves/", entry["path"]) for entry in entries)
    bucket._objects.clear()
    tree_serialize_leaves(PATH, tree)
    assert together == content(bucket)


def test_prefixes_overwrites_and_what_they_supersede(pair: Job, bucket: MemoryBucket) -> None:
    tree = tree_of()
    all_well(pair.save(PATH, tree, chunk_bytes=16, compressor={"id": "zstd", "level": 1}))
    first = pair.attempt
    all_well(pair.save(PATH, {"w": tree["grid"]}, prefix="model"))
    all_well(pair.save(PATH, {"w": tree["columns"]}))
    assert_same_arrays(stored(PATH), {"w": tree["columns"]})
    assert_same_arrays(stored(PATH, "model"), {"w": tree["grid"]})
    assert files(bucket, first)  # readers may need it
    bucket.wait(3601)
    all_well(pair.save(PATH, {"w": tree["halves"]}, prefix="model"))
    assert not files(bucket, first)
    assert treering.verify(PATH).ok


@pytest.mark.parametrize("prefix", [None, "model"])
def test_a_save_in_between_makes_it_busy_on_all(pair: Job, bucket: MemoryBucket, prefix: str | None) -> None:
    tree = tree_of()
    all_well(pair.save(PATH, OTHER))
    won: list[None] = []

    def save_another(done: int, total: int) -> None:
        if pair.this == 0 and not won:
            won.append(None)
            tree_serialize_leaves(PATH, {"m": jnp.zeros(3)}, prefix=prefix)

    all_failed(
        pair.save(PATH, tree, progress=save_another), (BusyError, ProcessFailedError), "another save changed the index"
    )
    assert_same_arrays(stored(PATH, prefix), {"m": jnp.zeros(3)})
    assert not files(bucket, pair.attempt)
    all_well(pair.save(PATH, tree))
    assert_same_arrays(stored(PATH), tree)


@pytest.mark.parametrize("this", [0, 1])
def test_a_process_that_cannot_write(
    this: int, pair: Job, bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"rows": put(jnp.arange(64.0).reshape(8, 8), P("x"))}
    all_well(pair.save(PATH, OTHER))
    before = bucket.names()
    # Process 0 has the first rows.
    names = ("/rows/0.0",) if this == 0 else ("/rows/7.0",)
    bucket.denied = lambda request: isinstance(request, Put) and request.name.endswith(names)
    all_failed(pair.save(PATH, tree), (StoreError, ProcessFailedError), "AccessDenied")
    assert bucket.names() == before
    bucket.denied = lambda _: False
    all_well(pair.save(PATH, tree))
    assert_same_arrays(stored(PATH), tree)


def test_other_trees_and_arguments_are_refused(pair: Job, bucket: MemoryBucket) -> None:
    tree = tree_of()
    all_well(pair.save(PATH, OTHER))
    before = bucket.names()
    all_failed(pair.save(PATH, tree, trees={1: {"w": 1}}), MismatchError, "leaves, this process 1")
    all_failed(pair.save(PATH, tree, asked={1: {"chunk_bytes": 8}}), MismatchError, "different arguments")
    different = {1: {**tree, "step": 8}}
    all_failed(pair.save(PATH, tree, trees=different, host_local="equal"), MismatchError, "leaf 'step' differs")
    assert bucket.names() == before


def test_what_is_left_when_a_process_does_not_come(pair: Job, bucket: MemoryBucket) -> None:
    """Others may still be writing, so files and marker stay; the next save proves that they can go."""
    tree = {"rows": put(jnp.arange(64.0).reshape(8, 8), P("x"))}
    all_well(pair.save(PATH, OTHER))
    all_failed(pair.save(PATH, tree, absent=(1,), timeout=1), TimedOutError, "process 1")
    left = files(bucket, f"{pair.attempt}/")
    assert "marker" in left
    assert "record.json" not in left
    assert_same_arrays(stored(PATH), OTHER)
    bucket.put(f"a/leaves/.treering-{pair.attempt}-verdict", b"{}")
    bucket.put("a/leaves/.treering-waiting-00001", b"{}")
    tree_serialize_leaves(PATH, OTHER, prefix="other")
    assert not files(bucket, pair.attempt)
    tree_serialize_leaves(PATH, OTHER, prefix="other")
    assert others(bucket) == [INDEX]


def test_process_0_does_not_come(pair: Job, bucket: MemoryBucket) -> None:
    all_failed(pair.save(PATH, tree_of(), absent=(0,), timeout=0.5), TimedOutError, "process 0")
    assert files(bucket) == []
    all_well(pair.save(PATH, OTHER))
    assert others(bucket) == [INDEX]


def test_where_nothing_tells_what_became_of_the_commit_all_stays(pair: Job, bucket: MemoryBucket) -> None:
    tree = {"rows": put(jnp.arange(64.0).reshape(8, 8), P("x"))}
    all_well(pair.save(PATH, OTHER))
    patience, bucket.patience = bucket.patience, 1e-9
    bucket.meet = lambda request: NO_ANSWER if isinstance(request, Put) and request.name == INDEX else None
    errors = pair.save(PATH, tree)
    bucket.patience, bucket.meet = patience, lambda _: None
    all_failed(errors, (StoreError, ProcessFailedError), "may yet be in place")
    assert {"marker", "record.json", "leaves/rows/0.0", "leaves/rows/7.0"} <= set(files(bucket, f"{pair.attempt}/"))
    assert_same_arrays(stored(PATH), OTHER)
    # The next save proves that it can never be committed.
    tree_serialize_leaves(PATH, OTHER)
    assert not files(bucket, pair.attempt)


@pytest.mark.parametrize("this", [0, 1])
def test_in_the_memory_of_each_process_it_is_refused(this: int, monkeypatch: pytest.MonkeyPatch) -> None:
    be_process(monkeypatch, this, 2)
    path = "memory://joint-leaves/a"
    with pytest.raises(UnsupportedError, match="another place in each process"):
        tree_serialize_leaves(path, OTHER)
    tree_serialize_leaves(path, OTHER, processes="this")
    assert_same_arrays(stored(located(path)), OTHER)
