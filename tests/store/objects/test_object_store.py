"""The store in a bucket keeps the contract of stores, over a bucket in memory and over obstore."""

from __future__ import annotations

import dataclasses
import errno
import time
from pathlib import PurePath

import numpy as np
import obstore.store
import pytest

import treering as tr
from tests.buckets import MemoryBucket, install
from treering._codec.key_document import INDEX_FORM, attempts_in, placeholder
from treering._store.api import Entry, Held, Kind, Outcome, Store
from treering._store.failures import naming
from treering._store.objects.client import ObstoreClient
from treering._store.objects.requests import Answer, Copy, Delete, Get, ObjectVersion, Put, Request, Status
from treering._store.objects.store import ObjectRoot, ObjectStore, copy_object
from treering._values.checkpoint_names import journal_of
from treering.errors import StoreError
from treering.testing import StoreContract


class TestObjectStoreInMemory(StoreContract):
    def make_store(self) -> Store:
        return ObjectStore(MemoryBucket(), "runs/a/", PurePath("runs/a"))


class TestObjectStoreAtTheTop(StoreContract):
    def make_store(self) -> Store:
        return ObjectStore(MemoryBucket(), "", PurePath("bucket"))


class TestObjectStoreByObstore(StoreContract):
    def make_store(self) -> Store:
        client = ObstoreClient(obstore.store.MemoryStore(), "memory://bucket")
        return ObjectStore(client, "runs/a/", PurePath("runs/a"))


def test_what_stands_for_a_folder_is_no_name() -> None:
    bucket = MemoryBucket()
    for name in ("runs/a/", "runs/a/step/", "runs/a/data", "runs/ab"):
        bucket.perform(Put(name, b""))
    store = ObjectStore(bucket, "runs/a/", PurePath("runs/a"))
    assert (store.names(), store.places()) == (["data", "step"], ["step"])
    assert [entry.name for entry in store.list()] == ["data"]


def test_a_name_is_a_place_too() -> None:
    store = ObjectStore(MemoryBucket(), "", PurePath("bucket"))
    store.put("a", b"x")
    store.at("a").put("b", b"y")
    assert (store.names(), store.places()) == (["a"], ["a"])
    root = ObjectRoot(lambda path: (store.client, str(path)))
    found = root.find(PurePath("a"))
    assert found is not None
    assert found.is_file


def test_a_place_is_what_others_begin_with() -> None:
    bucket = MemoryBucket()
    bucket.perform(Put("runs/a/data", b"x"))
    root = ObjectRoot(lambda path: (bucket, "" if str(path) == "." else str(path)))
    kinds = {name: root.find(PurePath(name)) for name in (".", "runs", "runs/a", "runs/b", "run")}
    assert {name: found and found.kind for name, found in kinds.items()} == {
        ".": Kind.PLACE,
        "runs": Kind.PLACE,
        "runs/a": Kind.PLACE,
        "runs/b": None,
        "run": None,
    }
    root.write_file(PurePath("runs/file"), [b"tree", b"ring"], 8)
    with root.open_file(PurePath("runs/file")) as file:
        assert file.read(0, 8) == b"treering"


def test_the_marker_of_another_attempt_stays() -> None:
    store = ObjectStore(MemoryBucket(), "", PurePath("bucket"))
    store.put("marker", b"of another one")
    transaction = store.transaction("document")
    with pytest.raises(FileExistsError):
        transaction.begin("marker", None)
    transaction.abort()
    assert content(store, "marker") == b"of another one"


def test_an_attempt_on_nothing_begins_again_where_another_was_faster() -> None:
    store = ObjectStore(MemoryBucket(), "", PurePath("bucket"))
    store.put("document", b"an index")
    transaction = store.transaction("document")
    with pytest.raises(FileNotFoundError):
        transaction.begin("marker", None)
    transaction.abort()
    assert store.names() == ["document"]


def test_the_time_is_that_of_the_bucket() -> None:
    bucket = MemoryBucket()
    bucket.time = 5000.0
    store = ObjectStore(bucket, "", PurePath("bucket"))
    assert 5000.0 <= store.transaction().now() < 5060.0
    assert store.names() == []
    # A marker that was put just now saves the rest.
    bucket = MemoryBucket()
    bucket.time = 7000.0
    store = ObjectStore(bucket, "", PurePath("bucket"))
    store.transaction("document").begin("marker", None)
    assert 7000.0 <= store.transaction().now() < 7060.0


def test_the_time_is_asked_of_the_bucket_once_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = MemoryBucket()
    bucket.time = 5000.0
    transaction = ObjectStore(bucket, "", PurePath("bucket")).transaction()
    first = transaction.now()
    count = len(bucket.requests)
    assert count
    assert first <= transaction.now() < first + 60
    assert len(bucket.requests) == count
    later = time.monotonic() + 90_000
    monkeypatch.setattr(time, "monotonic", lambda: later)
    transaction.now()
    assert len(bucket.requests) > count


def old_tombstone(bucket: MemoryBucket) -> tuple[ObjectStore, Entry]:
    """Leave a tombstone in an empty bucket for more than a day, and begin an attempt beside it."""
    bucket.time = 1000.0
    store = ObjectStore(bucket, "", PurePath("bucket"))
    store.replace("treering.json", placeholder())
    found = found_in(store)
    bucket.time += 90_000
    store.transaction("document").begin("marker", None)
    return store, found


def deletes(bucket: MemoryBucket) -> int:
    return sum(isinstance(asked, Delete) and asked.names == ("treering.json",) for asked in bucket.requests)


def test_a_tombstone_goes_though_an_answer_is_lost() -> None:
    bucket = MemoryBucket()
    store, found = old_tombstone(bucket)
    bucket.meet = lambda asked: (
        Answer(Status.NO_ANSWER, reason="reset") if isinstance(asked, Delete) and deletes(bucket) == 1 else None
    )
    assert store.transaction().delete_tombstone(found)
    assert deletes(bucket) == 2
    assert "treering.json" not in store.names()


def test_a_tombstone_that_may_not_go_is_asked_for_once() -> None:
    bucket = MemoryBucket()
    store, found = old_tombstone(bucket)
    bucket.meet = lambda asked: Answer(Status.REFUSED) if isinstance(asked, Delete) else None
    assert not store.transaction().delete_tombstone(found)
    assert deletes(bucket) == 1


def test_a_tombstone_stays_where_a_refusal_says_nothing_of_versions() -> None:
    bucket = MemoryBucket()
    bucket.meet = lambda asked: (
        Answer(Status.REFUSED, sure=False) if isinstance(asked, Delete) and asked.condition is not None else None
    )
    store, found = old_tombstone(bucket)
    assert not store.transaction().delete_tombstone(found)
    assert deletes(bucket) == 0


def test_after_an_interrupt_the_document_tells_that_it_was_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = install(monkeypatch)
    tr.save("memory://bucket/run", {"step": 1})
    data = bucket.data("bucket/run/treering.json")
    other = MemoryBucket()
    store = ObjectStore(other, "", PurePath("bucket"))
    store.replace("treering.json", placeholder())
    transaction = store.transaction("treering.json")
    transaction.begin(journal_of(attempts_in(data)[0]), found_in(store).version)

    def interrupt(asked: Request) -> None:
        if isinstance(asked, Put) and asked.name == "treering.json":
            other.answer(asked)
            other.meet = lambda _: None
            raise KeyboardInterrupt

    other.meet = interrupt
    with pytest.raises(KeyboardInterrupt):
        transaction.commit(data)
    assert transaction.committed()


def test_a_tombstone_is_deleted_only_a_day_later_and_where_that_was_tried() -> None:
    first, second = MemoryBucket(), MemoryBucket()
    first.time = second.time = 1000.0
    store = ObjectStore(first, "", PurePath("bucket"))
    store.replace("treering.json", placeholder())
    assert not store.transaction().delete_tombstone(found_in(store))
    store.transaction("document").begin("marker", None)
    assert not store.transaction().delete_tombstone(found_in(store))
    later = ObjectStore(second, "", PurePath("bucket"))
    later.replace("treering.json", placeholder())
    old = found_in(later)
    second.time += 90_000
    later.transaction("document").begin("marker", None)
    assert later.transaction().delete_tombstone(old)
    assert later.transaction().delete_tombstone(old)
    later.replace("treering.json", b"an index")
    assert not later.transaction().delete_tombstone(old)
    second.time += 90_000
    assert not later.transaction().delete_tombstone(found_in(later))


@pytest.mark.parametrize("happens", [True, False])
def test_an_answer_that_is_lost_is_found_out(happens: bool) -> None:
    bucket = ForgetfulBucket(happens=happens)
    store = ObjectStore(bucket, "", PurePath("bucket"))
    store.create("data", [b"tree"], 4)
    store.put("document", b"base 0")
    assert store.replace("document", b"mine 1", store.read("document").version) is Outcome.DONE  # type: ignore[union-attr]
    assert store.replace("other", b"mine 2", None) is Outcome.DONE
    assert [content(store, name) for name in ("data", "document", "other")] == [b"tree", b"mine 1", b"mine 2"]
    transaction = store.transaction("treering.json")
    transaction.begin("marker", None)
    data = INDEX_FORM.encode([("attempt", "0" * 16), ("files", []), ("replaces", [])])
    assert transaction.commit(data) is Outcome.DONE
    assert sorted(store.names()) == ["data", "document", "other", "treering.json"]


def test_what_stays_unknown_is_said_and_nothing_is_removed() -> None:
    bucket = MemoryBucket()
    bucket.patience = -1.0
    store = ObjectStore(bucket, "", PurePath("bucket"))
    transaction = store.transaction("treering.json")
    transaction.begin(".treering.json.0000000000000000.treering-tmp", None)
    silent = ForgetfulBucket(happens=False, times=1000)
    transaction._client = silent
    assert transaction.commit(b"{}") is Outcome.UNKNOWN
    transaction._client = bucket
    with pytest.raises(OSError, match="may yet happen"):
        transaction.committed()


def test_a_bucket_that_cannot_compare_keeps_its_tombstones() -> None:
    client = ObstoreClient(obstore.store.MemoryStore(), "memory://bucket")
    store = ObjectStore(client, "", PurePath("bucket"))
    store.transaction("document").begin("marker", None)
    store.replace("treering.json", placeholder())
    old = found_in(store)._replace(modified=0.0)
    assert not store.transaction().delete_tombstone(old)
    assert store.find("treering.json") is not None


def test_a_refusal_names_the_bucket_and_no_folder() -> None:
    with pytest.raises(StoreError) as caught, naming("s3://bucket/a", "write"):
        raise PermissionError(errno.EACCES, "s3://bucket denies it to these credentials")
    assert str(caught.value) == "could not write 's3://bucket/a': s3://bucket denies it to these credentials"
    assert isinstance(caught.value, PermissionError)


def test_names_are_removed_together() -> None:
    bucket = MemoryBucket()
    store = ObjectStore(bucket, "a/", PurePath("a"))
    for name in ("one", "two", "three"):
        store.put(name, b"x")
    bucket.requests.clear()
    store.remove("one", "two", "four")
    assert bucket.requests == [Delete(("a/one", "a/two", "a/four"))]
    assert store.names() == ["three"]
    store.remove()
    assert len(bucket.requests) == 2


class ForgetfulBucket(MemoryBucket):
    """A bucket that does not answer the first time that a change by condition is asked for."""

    def __init__(self, *, happens: bool, times: int = 1) -> None:
        super().__init__()
        self._happens = happens
        self._left: dict[str, int] = {}
        self._times = times

    def perform(self, request: Request) -> Answer:
        if isinstance(request, Put) and request.condition is not None:
            left = self._left.setdefault(request.name, self._times)
            self._left[request.name] = left - 1
            if left > 0:
                if self._happens:
                    super().perform(request)
                return Answer(Status.NO_ANSWER, reason="reset")
        return super().perform(request)


def found_in(store: ObjectStore) -> Entry:
    found = store.find("treering.json")
    assert found is not None
    return found


def content(store: ObjectStore, name: str) -> bytes | None:
    found = store.read(name)
    return found and found.data


class WeakBucket(MemoryBucket):
    """A bucket behind a proxy that compresses what is read, and makes its version a weak one."""

    def perform(self, request: Request) -> Answer:
        answer = super().perform(request)
        if not isinstance(request, Get) or answer.found is None:
            return answer
        weak = ObjectVersion(f"W/{answer.found.version.e_tag}")
        return dataclasses.replace(answer, found=dataclasses.replace(answer.found, version=weak))


class UnchangingBucket(MemoryBucket):
    """A bucket in which nothing can be replaced."""

    def perform(self, request: Request) -> Answer:
        if isinstance(request, Put) and isinstance(request.condition, ObjectVersion):
            return Answer(Status.REFUSED)
        return super().perform(request)


@pytest.mark.parametrize(
    ("bucket", "says"), [(WeakBucket(), "it may compress"), (UnchangingBucket(), "the right version")]
)
def test_an_endpoint_whose_versions_are_of_no_use_is_refused_before_any_data(bucket: MemoryBucket, says: str) -> None:
    store = ObjectStore(bucket, "a/", PurePath("a"))
    transaction = store.transaction("treering.json")
    with pytest.raises(OSError, match=says) as caught:
        transaction.begin(journal_of("0" * 16), None)
    assert caught.value.errno == errno.ENOTSUP
    transaction.abort()
    assert store.names() == ["treering.json"]


def test_a_key_that_may_not_be_read_lets_no_data_go() -> None:
    bucket = MemoryBucket()
    store = ObjectStore(bucket, "a/", PurePath("a"))
    marker, data = journal_of("0" * 16), f"data-{'0' * 16}-00000-of-00001.safetensors"
    store.transaction("treering.json").begin(marker, None)
    store.create(data, [b"x"], 1)

    def deny(request: Request) -> Answer | None:
        return Answer(Status.MISSING) if isinstance(request, Get) and request.name == "a/treering.json" else None

    bucket.meet = deny
    assert store.transaction().sweep(marker, [data]) is Held.UNKNOWN
    assert store.read(data) is not None


def two_places(bucket: MemoryBucket) -> tuple[ObjectStore, ObjectStore]:
    """A place with data, and one that is to have a copy of them."""
    bucket.put("old/data", b"one")
    return ObjectStore(bucket, "old/", PurePath("old")), ObjectStore(bucket, "new/", PurePath("new"))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("what", [b"two", b"longer", None])
def test_a_copy_of_data_that_change_meanwhile_is_none(when: str, what: bytes | None) -> None:
    bucket = MemoryBucket()
    old, new = two_places(bucket)

    def change(request: Request) -> Answer | None:
        if not isinstance(request, Copy):
            return None
        answer = bucket.answer(request) if when == "after" else None
        bucket.answer(Delete(("old/data",)) if what is None else Put("old/data", what))
        return answer

    bucket.meet = change
    assert not copy_object(old, new, "data", "copy")
    assert bucket.names("new/") == []
    bucket.meet = lambda _: None
    bucket.put("old/data", b"one")
    assert copy_object(old, new, "data", "copy")
    assert bucket.data("new/copy") == b"one"


def test_a_save_whose_base_changes_while_it_is_copied_writes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = install(monkeypatch)
    tree = {"w": np.arange(5000.0)}
    tr.save("memory://a/old", tree)
    [data] = [name for name in bucket.names("a/old/") if "data-" in name]
    before = bucket.data(data)

    def change(request: Request) -> Answer | None:
        if isinstance(request, Copy):
            bucket.put(data, before[:-8] + bytes(8))  # its header is as it was
        return None

    bucket.meet = change
    tr.save("memory://a/new", tree, base="memory://a/old")
    bucket.meet = lambda _: None
    assert np.array_equal(tr.load("memory://a/new")["w"], tree["w"])
    assert tr.verify("memory://a/new").ok
    assert not tr.verify("memory://a/old").ok


def test_a_copy_without_an_answer_is_an_error_for_it_may_yet_be_done() -> None:
    bucket = MemoryBucket()
    old, new = two_places(bucket)
    bucket.meet = lambda request: Answer(Status.NO_ANSWER) if isinstance(request, Copy) else None
    with pytest.raises(OSError, match=r"does not answer.*new/copy.*may yet be"):
        copy_object(old, new, "data", "copy")


def test_there_is_no_copy_from_another_bucket_or_with_other_options() -> None:
    (old, _), (_, new) = two_places(MemoryBucket()), two_places(MemoryBucket())
    assert not copy_object(old, new, "data", "copy")
