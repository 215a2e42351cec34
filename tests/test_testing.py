"""The stores for tests: the contract on each of them, and the trouble that the faulty one makes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from treering._coordination.message_board import FolderMessageBoard, MessageBoard, PathMessageBoard
from treering._store.api import Document, Held, Outcome, Store
from treering._store.objects.store import ObjectTransaction
from treering._store.posix.folder import Folder
from treering._store.posix.store import PosixStore
from treering.testing import FaultyStore, MemoryStore, MessageBoardContract, StoreContract

NAME = ".treering-waiting-00001"


class TestMemoryStore(StoreContract):
    def make_store(self) -> Store:
        return MemoryStore()


class TestFaultyStoreWithoutFaults(StoreContract):
    def make_store(self) -> Store:
        return FaultyStore(MemoryStore(), seed=1)


def test_a_faulty_store_takes_names_by_keyword() -> None:
    store = FaultyStore(MemoryStore(), seed=1)
    store.put(name="a", data=b"x")
    store.replace(name="a", data=b"y")
    found = store.read(name="a")
    assert found is not None
    assert (found.data, store.find(name="b")) == (b"y", None)


class TestPosixStore(StoreContract):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make_store(self) -> Store:
        store = PosixStore(self.path)
        store.open()
        return store

    def open_again(self, store: Store) -> Store:
        return self.make_store()


class TestMemoryStoreBelow(StoreContract):
    def make_store(self) -> Store:
        store = MemoryStore().at("run").at("step")
        store.transaction().make()
        return store


class TestFolderNotes(MessageBoardContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> Iterator[None]:
        with Folder(str(tmp_path)) as self.folder:
            yield

    def make_board(self) -> MessageBoard:
        return FolderMessageBoard(PosixStore.over(self.folder))


class TestPathNotes(MessageBoardContract):
    @pytest.fixture(autouse=True)
    def _path(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make_board(self) -> MessageBoard:
        return PathMessageBoard(str(self.path))


class Forgetful(MemoryStore):
    def remove(self, *names: str) -> None:
        return


class Appending(MemoryStore):
    def put(self, name: str, data: bytes) -> None:
        found = self.read(name)
        super().put(name, (found.data if found else b"") + data)


class InTwoSteps(MemoryStore):
    def __init__(self) -> None:
        super().__init__()
        self.between = threading.Event()
        self.seen = threading.Event()

    def put(self, name: str, data: bytes) -> None:
        if len(data) > 40_000 and self.read(name):
            super().put(name, data[:10])
            self.between.set()
            self.seen.wait(1)
        super().put(name, data)

    def read(self, name: str, most: int = 1 << 40) -> Document | None:
        if self.between.is_set():
            self.seen.set()
        return super().read(name, most)


class Lying(MemoryStore):
    def read(self, name: str, most: int = 1 << 40) -> Document | None:
        return super().read(name, most) or Document(b"", None)


def all_tests_of(contract: MessageBoardContract) -> list[Callable[[], None]]:
    return [getattr(contract, name) for name in dir(contract) if name.startswith("test_")]


def run_all(tests: list[Callable[[], None]]) -> None:
    for test in tests:
        test()


@pytest.mark.parametrize("broken", [Forgetful, Appending, InTwoSteps, Lying])
def test_the_contract_finds_a_broken_store(broken: type[MemoryStore]) -> None:
    class Contract(MessageBoardContract):
        def make_board(self) -> MessageBoard:
            return FolderMessageBoard(broken())

    tests = all_tests_of(Contract())
    assert len(tests) == 6
    with pytest.raises(AssertionError, match=r"the store holds|a reader got"):
        run_all(tests)


def content(store: Store, name: str) -> bytes | None:
    found = store.read(name)
    return found and found.data


def trouble(seed: int) -> list[object]:
    store = FaultyStore(MemoryStore(), seed=seed, stale=0.3, failing=0.3)
    seen: list[object] = []
    for number in range(100):
        try:
            store.put(NAME, b"%d" % number)
            seen.append(content(store, NAME))
        except OSError as error:
            seen.append(str(error))
    return seen


def test_the_same_seed_makes_the_same_trouble() -> None:
    assert trouble(7) == trouble(7)
    assert trouble(7) != trouble(8)


def test_a_failing_call_may_be_done() -> None:
    done = 0
    for seed in range(200):
        inner = MemoryStore()
        with pytest.raises(OSError, match="lost"):
            FaultyStore(inner, seed=seed, failing=1.0).put(NAME, b"new")
        done += inner.find(NAME) is not None
    assert 50 < done < 150


def test_a_failing_removal_may_be_done() -> None:
    done = 0
    for seed in range(200):
        inner = MemoryStore()
        inner.put(NAME, b"old")
        with pytest.raises(OSError, match="lost"):
            FaultyStore(inner, seed=seed, failing=1.0).remove(NAME)
        done += inner.find(NAME) is None
    assert 50 < done < 150


def test_stale_answers_are_older_ones_of_that_name() -> None:
    store = FaultyStore(MemoryStore(), seed=3, stale=0.5)
    store.put(".treering-waiting-00002", b"of another")
    for data in (b"first", b"second", b"third"):
        store.put(NAME, data)
    store.remove(".treering-waiting-00002")
    assert {content(store, NAME) for _ in range(100)} == {None, b"first", b"second", b"third"}
    assert {content(store, ".treering-waiting-00002") for _ in range(100)} == {None, b"of another"}


def test_slow_calls_wait_as_told() -> None:
    waits: list[float] = []
    store = FaultyStore(MemoryStore(), seed=4, slow=0.5, delay=3.0, sleep=waits.append)
    for _ in range(100):
        store.put(NAME, b"x")
        store.read(NAME)
        store.remove(NAME)
    assert 100 < len(waits) < 200
    assert 2 < max(waits) <= 3
    assert min(waits) >= 0


def test_shares_are_kept() -> None:
    store = FaultyStore(MemoryStore(), seed=5, failing=0.25)
    answers = 0
    for _ in range(1000):
        with contextlib.suppress(OSError):
            store.read(NAME)
            answers += 1
    assert 650 < answers < 850


class Unconditional(MemoryStore):
    def replace(self, name: str, data: bytes, expected: object = None, *, sweep: bool = True) -> Outcome:
        return super().replace(name, data)


class Cutting(MemoryStore):
    def read(self, name: str, most: int = 1 << 40) -> Document | None:
        found = super().read(name, most)
        return found and found._replace(data=found.data[: 1 << 20])


class Sweeping(ObjectTransaction):
    def sweep(self, marker: str, data: Sequence[str]) -> Held:
        self._store.remove(*data, marker)
        return Held.NO


class Unproved(MemoryStore):
    def transaction(self, name: str = "treering.json") -> ObjectTransaction:
        return Sweeping(self, name)


@pytest.mark.parametrize("broken", [Forgetful, Appending, Unconditional, Cutting, Unproved])
def test_the_contract_of_stores_finds_a_broken_one(broken: type[MemoryStore]) -> None:
    class Contract(StoreContract):
        def make_store(self) -> Store:
            return broken()

    failures = []
    for test in all_tests_of(Contract()):
        try:
            test()
        except (AssertionError, OSError) as error:
            failures.append(error)
    assert failures


def test_a_lost_answer_is_told_as_such() -> None:
    inner = MemoryStore()
    store = FaultyStore(inner, seed=3, failing=1.0)
    outcomes = [store.replace("document", b"%d" % number, None) for number in range(10)]
    assert set(outcomes) == {Outcome.UNKNOWN}
    assert inner.read("document") is not None
    assert store.transaction("document").sweep("marker", []) is Held.UNKNOWN
    with pytest.raises(OSError, match="is lost"):
        store.find("document")


def test_versions_decide_where_nothing_proves_life() -> None:
    store = MemoryStore()
    asleep = store.transaction("document")
    asleep.begin("asleep", None)
    store.create("data", [b"x"], 1)
    assert store.replace("document", b"one", None) is Outcome.DONE
    store.remove("document")
    assert store.transaction("document").sweep("asleep", ["data"]) is Held.UNKNOWN
    # It based its attempt on an absence that has passed, though nothing is there again.
    assert asleep.commit(b"late") is Outcome.LOST
