"""Messages of large jobs lie in folders of their own: they come with the first message, and go with the last one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

import pytest

import treering as tr
from tests.buckets import MemoryBucket
from treering import leaves
from treering._coordination.message_board import FolderMessageBoard, PathMessageBoard, sweep_messages
from treering._store.api import Store, open_below
from treering._store.objects.memory import MemoryStore
from treering._store.objects.requests import Answer, Delete, Request
from treering._store.objects.store import ObjectStore
from treering._store.posix.store import PosixStore
from treering._values.checkpoint_names import decision_name, departure_name, folder_of_message, vote_name
from treering.errors import ExistsError
from treering.testing import FaultyStore

ATTEMPT, OTHER = "fedcba9876543210", "00000000000000ff"
NEAR, FAR, FARTHER = (vote_name(ATTEMPT, process) for process in (255, 256, 1023))


def folder_of(name: str) -> str:
    folder = folder_of_message(name, 256)
    assert folder is not None
    return folder


@pytest.fixture(params=["posix", "memory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    place: Store
    if request.param == "posix":
        place = PosixStore(tmp_path)
    elif request.param == "memory":
        place = MemoryStore()
    else:
        place = ObjectStore(MemoryBucket(), "runs/a/", PurePath("runs/a"))
    with place:
        place.open()
        yield place


def test_messages_of_many_processes_are_divided_among_folders(store: Store) -> None:
    board = FolderMessageBoard(store)
    assert board.get(FAR) is None
    messages = [vote_name(ATTEMPT, process) for process in range(1024)]
    for name in (*messages, decision_name(ATTEMPT)):
        board.put(name, name.encode())
    assert all(board.get(name) == name.encode() for name in messages)
    folders = sorted({folder_of(name) for name in messages[256:]})
    assert len(folders) == 3
    assert sorted(store.names()) == sorted([*messages[:256], decision_name(ATTEMPT), *folders])
    for folder in folders:
        with open_below(store, folder) as below:
            assert len(below.names()) == 256


def test_a_folder_goes_with_its_last_message(store: Store) -> None:
    board = FolderMessageBoard(store)
    for name in (NEAR, FAR, departure_name(ATTEMPT, 256), FARTHER):
        board.put(name, b"{}")
    board.remove_all([NEAR, FAR])
    assert sorted(store.names()) == [folder_of(FAR), folder_of(FARTHER)]
    assert board.get(departure_name(ATTEMPT, 256)) == b"{}"
    board.remove_all([departure_name(ATTEMPT, 256), FARTHER, FAR])
    assert store.names() == []


def test_stale_folders_are_swept_and_those_of_the_living_stay(store: Store) -> None:
    board = FolderMessageBoard(store)
    dead = [vote_name(OTHER, process) for process in (1, 300, 301, 900)]
    for name in (*dead, FAR):
        board.put(name, b"{}")
    sweep_messages(store, store.names(), ATTEMPT.__eq__)
    assert store.names() == [folder_of(FAR)]
    assert board.get(FAR) == b"{}"


def test_a_bucket_removes_the_messages_of_a_folder_in_one_request() -> None:
    bucket = MemoryBucket()
    board = FolderMessageBoard(ObjectStore(bucket, "runs/a/", PurePath("runs/a")))
    names = [vote_name(ATTEMPT, process) for process in range(512)]
    for name in names:
        board.put(name, b"{}")
    asked: list[Request] = []
    perform: Callable[[Request], Answer] = bucket.perform

    def record(request: Request) -> Answer:
        asked.append(request)
        return perform(request)

    bucket.perform = record  # type: ignore[method-assign]
    board.remove_all(names)
    assert [len(request.names) for request in asked if isinstance(request, Delete)] == [256, 256]
    assert len(asked) == 2


def test_what_is_not_ours_in_such_a_folder_stays(tmp_path: Path) -> None:
    with PosixStore(tmp_path) as store:
        store.open()
        FolderMessageBoard(store).put(FAR, b"{}")
        (tmp_path / folder_of(FAR) / "mine").write_bytes(b"")
        sweep_messages(store, store.names(), lambda _: False)
    assert [path.name for path in (tmp_path / folder_of(FAR)).iterdir()] == ["mine"]


def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / FAR).write_bytes(b"not to be read")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / folder_of(FAR)).symlink_to(tmp_path / "elsewhere")
    board = PathMessageBoard(tmp_path / "ckpt")
    for act in (lambda: board.get(FAR), lambda: board.put(FAR, b"{}"), lambda: board.remove_all([FAR])):
        with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
            act()
    with PosixStore(tmp_path / "ckpt") as store:
        store.open()
        sweep_messages(store, store.names(), lambda _: False)
    assert (tmp_path / "elsewhere" / FAR).read_bytes() == b"not to be read"


def test_a_folder_that_others_remove_meanwhile_is_made_again(tmp_path: Path) -> None:
    """Another one may remove the folder between any two calls: a message that was put is there all the same."""
    ended = threading.Event()

    def remove() -> None:
        while not ended.is_set():
            try:
                (tmp_path / folder_of(FAR)).rmdir()
            except OSError:
                continue

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        board = PathMessageBoard(tmp_path)
        for number in range(300):
            while True:  # as the executor does
                try:
                    board.put(FAR, b"%d" % number)
                    break
                except FileNotFoundError:
                    continue
            assert board.get(FAR) == b"%d" % number
            board.remove_all([FAR])
            assert board.get(FAR) is None
    finally:
        ended.set()
        remover.join()


def test_a_checkpoint_that_was_removed_does_not_come_back_with_a_message(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step"
    path.mkdir(parents=True)
    with PosixStore(path) as store:
        store.open()
        shutil.rmtree(tmp_path / "run")
        with pytest.raises(FileNotFoundError):
            FolderMessageBoard(store).put(FAR, b"{}")
    assert not (tmp_path / "run").exists()


def test_folders_of_a_checkpoint_that_was_moved_are_removed_there(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    with PosixStore(tmp_path / "ckpt") as store:
        store.open()
        board = FolderMessageBoard(store)
        board.put(FAR, b"{}")
        (tmp_path / "ckpt").rename(tmp_path / "final")
        board.put(FARTHER, b"{}")
        board.remove_all([FAR, FARTHER])
    assert [*tmp_path.iterdir()] == [tmp_path / "final"]
    assert not [*(tmp_path / "final").iterdir()]


def test_whoever_may_remove_files_may_remove_messages_in_folders(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    PathMessageBoard(tmp_path).put(FAR, b"{}")
    assert (tmp_path / folder_of(FAR)).stat().st_mode & 0o777 == 0o770


@pytest.mark.parametrize("content", [None, "precious"])
def test_what_only_has_such_a_name_is_not_ours(tmp_path: Path, content: str | None) -> None:
    if content is None:
        (tmp_path / folder_of(FAR)).write_bytes(b"")
    else:
        (tmp_path / folder_of(FAR)).mkdir()
        (tmp_path / folder_of(FAR) / content).write_bytes(b"")
    with pytest.raises(ExistsError, match=f"it is not empty and holds no checkpoint \\('{folder_of(FAR)}' is there"):
        tr.save(tmp_path, {"w": 1.0})
    assert (tmp_path / folder_of(FAR)).exists()


def test_trouble_of_a_store_reaches_messages_in_folders() -> None:
    store = FaultyStore(MemoryStore(), seed=1, failing=1.0)
    with pytest.raises(OSError, match=r"the answer about .* is lost"):
        FolderMessageBoard(store).put(FAR, b"{}")
    sound = FaultyStore(MemoryStore(), seed=1)
    FolderMessageBoard(sound).put(FAR, b"{}")
    assert FolderMessageBoard(sound).get(FAR) == b"{}"


@pytest.mark.parametrize("folders", [True, False])
def test_a_save_sweeps_what_a_large_job_left(tmp_path: Path, folders: bool) -> None:
    """Leftover messages are in nobody's way, be it a folder of theirs, and a save of either form removes them."""
    for name, save in (("ckpt", tr.save), ("leaves", leaves.tree_serialize_leaves)):
        path = tmp_path / name
        path.mkdir()
        process = 700 if folders else 7
        PathMessageBoard(path).put(vote_name(OTHER, process), b"{}")
        assert len([*path.iterdir()]) == 1
        save(path, {"w": 1.0})
        assert not [*path.glob(".treering-*")]
