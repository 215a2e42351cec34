"""Messages: replaced at once, read with suspicion, in folders for large jobs, swept when nobody needs them."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath

import pytest

import treering as tr
from tests import faults, limits
from tests.buckets import MemoryBucket
from treering import leaves
from treering._coordination.message_board import FolderMessageBoard, PathMessageBoard, stale_messages, sweep_messages
from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, SumMessage, VoteMessage, VoteStage
from treering._store.api import Store, open_below
from treering._store.objects.memory import MemoryStore
from treering._store.objects.requests import Answer, Delete, Request
from treering._store.objects.store import ObjectStore
from treering._store.posix import descriptors, folder
from treering._store.posix.folder import Folder
from treering._store.posix.store import PosixStore
from treering._values import checkpoint_names
from treering._values.checkpoint_names import (
    arrival_name,
    decision_name,
    departure_name,
    folder_of_message,
    heartbeat_name,
    prepare_name,
    signature_name,
    sum_name,
    vote_name,
)
from treering.errors import (
    CorruptError,
    ExistsError,
    IsDirectoryError,
    MismatchError,
    NotSharedError,
    PermissionDeniedError,
    ProcessFailedError,
    StoreError,
    TimedOutError,
    TreeringError,
)
from treering.testing import FaultyStore

JOB, ATTEMPT, OTHER = "0123456789abcdef", "fedcba9876543210", "00000000000000ff"
NAME = heartbeat_name(1)


@pytest.fixture(params=[True, False], ids=["from descriptors", "by paths"])
def opened(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    if not request.param:
        monkeypatch.setattr(folder, "FROM_DESCRIPTOR", False)
    with Folder(str(tmp_path)) as opened:
        yield opened


# ---------------------------------------------------------------------------------------------------------------- names


def test_names_of_notes_are_known_and_no_others() -> None:
    ours = [
        prepare_name(JOB),
        arrival_name(ATTEMPT, 3),
        vote_name(ATTEMPT, 3),
        vote_name(ATTEMPT, 123456),
        sum_name(ATTEMPT, 3),
        departure_name(ATTEMPT, 3),
        signature_name(ATTEMPT),
        decision_name(ATTEMPT),
        heartbeat_name(7),
    ]
    ours += [f"{name}.{JOB}.new" for name in ours]
    assert all(map(checkpoint_names.is_message, ours))
    others = ["treering.json", f".treering.json.{ATTEMPT}.treering-tmp", ".treering.lock", ".treering", "config.json"]
    others += [
        f".treering-{ATTEMPT}-part-3",
        f".treering-{ATTEMPT.upper()}-verdict",
        f"{NAME}.new",
        f"{NAME}\n",
        f"a{NAME}",
    ]
    assert not any(map(checkpoint_names.is_message, others))


def test_the_attempt_of_a_name() -> None:
    names = [vote_name(ATTEMPT, 3), decision_name(ATTEMPT), prepare_name(JOB), heartbeat_name(3), "config.json"]
    assert list(map(checkpoint_names.attempt_of_message, names)) == [ATTEMPT, ATTEMPT, None, None, None]
    aside = f"{decision_name(ATTEMPT)}.{OTHER}.new"
    assert checkpoint_names.attempt_of_message(aside) == ATTEMPT
    assert [checkpoint_names.is_prepare(name) for name in names] == [False, False, True, False, False]


# ------------------------------------------------------------------------------------------------------------ the files


def test_a_note_is_a_file_and_nothing_else_is_left(opened: Folder, tmp_path: Path) -> None:
    store = FolderMessageBoard(PosixStore.over(opened))
    store.put(NAME, b"one")
    store.put(NAME, b"two")
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == b"two"


def test_only_names_of_notes_are_written_and_removed(opened: Folder, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    store = FolderMessageBoard(PosixStore.over(opened))
    for name in ("config.json", "../x", "treering.json"):
        with pytest.raises(ValueError, match="not the name of a message"):
            store.put(name, b"")
        with pytest.raises(ValueError, match="not the name of a message"):
            store.remove_all([name])
    assert (tmp_path / "config.json").read_text() == "{}"


def test_links_pipes_and_folders_are_refused(opened: Folder, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / heartbeat_name(1)).symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / heartbeat_name(2))
    (tmp_path / heartbeat_name(3)).mkdir()
    store = FolderMessageBoard(PosixStore.over(opened))
    for number in (1, 2, 3):
        with pytest.raises(OSError, match=r"."):
            store.get(heartbeat_name(number))


def test_a_link_in_the_way_of_a_note_is_replaced_not_followed(opened: Folder, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / NAME).symlink_to(tmp_path / "secret")
    FolderMessageBoard(PosixStore.over(opened)).put(NAME, b"new")
    assert (tmp_path / "secret").read_bytes() == b"secret"
    assert FolderMessageBoard(PosixStore.over(opened)).get(NAME) == b"new"


def test_no_note_is_too_large(opened: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, largest_message=100, largest_message_of_stores=100)
    store = FolderMessageBoard(PosixStore.over(opened))
    store.put(NAME, bytes(100))
    assert store.get(NAME) == bytes(100)
    with pytest.raises(OSError, match="101 bytes") as caught:
        store.put(NAME, bytes(101))
    assert caught.value.errno == errno.EFBIG
    assert store.get(NAME) == bytes(100)
    (tmp_path / NAME).write_bytes(bytes(101))
    with pytest.raises(OSError, match="larger than any message"):
        store.get(NAME)


@pytest.mark.parametrize("call", ["replace", "open"])
def test_a_refusal_leaves_what_was_there(
    opened: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = FolderMessageBoard(PosixStore.over(opened))
    store.put(NAME, b"old")

    with monkeypatch.context() as patch:
        faults.fail(patch, os, call, OSError(errno.ENOSPC, "no room"))
        with pytest.raises(OSError, match="no room"):
            store.put(NAME, b"new")
    assert [path.name for path in tmp_path.iterdir()] == [NAME]
    assert store.get(NAME) == b"old"


@pytest.mark.parametrize("reason", [errno.ENOENT, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "pread"])
def test_a_note_that_is_replaced_while_it_is_read_is_not_there_yet(
    opened: Folder, monkeypatch: pytest.MonkeyPatch, reason: int, call: str
) -> None:
    store = FolderMessageBoard(PosixStore.over(opened))
    store.put(NAME, b"old")

    with monkeypatch.context() as patch:
        faults.fail(patch, os, call, OSError(reason, "gone"))
        assert store.get(NAME) is None
    assert store.get(NAME) == b"old"


def test_other_refusals_of_a_read_are_errors(opened: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderMessageBoard(PosixStore.over(opened))
    store.put(NAME, b"old")

    with monkeypatch.context() as patch:
        faults.fail(patch, os, "pread", OSError(errno.EIO, "broken"))
        with pytest.raises(OSError, match="broken"):
            store.get(NAME)


def test_who_waits_for_a_name_looks_at_the_folder_anew_each_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    opened: list[float] = []
    with Folder(str(tmp_path)) as folder:
        store = FolderMessageBoard(PosixStore.over(folder, lambda: now[0]))

        faults.before(monkeypatch, descriptors, "open_folder", lambda path: opened.append(now[0]))
        for tenth in range(35):
            now[0] = tenth / 10
            assert store.get(NAME) is None
        assert opened == [1.0, 2.0, 3.0]
        store.put(NAME, b"x")
        now[0] = 10.0
        assert store.get(NAME) == b"x"
        assert len(opened) == 3


def test_nothing_stays_open(opened: Folder) -> None:
    store = FolderMessageBoard(PosixStore.over(opened))
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        store.put(NAME, b"x")
        store.get(NAME)
        store.get(heartbeat_name(2))
        store.remove_all([NAME])
    assert len(list(Path("/dev/fd").iterdir())) == before


# ----------------------------------------------------------------------------------------------------- notes at a path


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    store = PathMessageBoard(str(path))
    assert store.get(NAME) is None
    store.remove_all([NAME])
    with pytest.raises(FileNotFoundError):
        store.put(NAME, b"x")
    path.mkdir()
    store.put(NAME, b"x")
    assert store.get(NAME) == b"x"
    (path / NAME).unlink()
    path.rmdir()
    assert store.get(NAME) is None
    path.mkdir()
    assert store.get(NAME) is None


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_bytes(b"")
    store = PathMessageBoard(str(tmp_path / "ckpt"))
    with pytest.raises(NotADirectoryError):
        store.get(NAME)


# ------------------------------------------------------------------------------------------------------------- sweeping


def begin(attempt: str) -> bytes:
    return PrepareMessage(number=1, attempt=attempt, signature=b"", who="host, pid 7", processes=2).encode()


def test_notes_of_the_dead_may_go_and_nothing_else() -> None:
    names = [
        "treering.json",
        "config.json",
        f"data-{OTHER}-00000-of-00001.safetensors",
        vote_name(ATTEMPT, 0),
        decision_name(ATTEMPT),
        vote_name(OTHER, 1),
        decision_name(OTHER),
        f"{decision_name(OTHER)}.{JOB}.new",
        heartbeat_name(4),
    ]
    assert stale_messages(names, ATTEMPT.__eq__, lambda name: None) == tuple(names[5:])


@pytest.mark.parametrize(
    ("content", "goes"), [(begin(ATTEMPT), False), (begin(OTHER), True), (b"damaged", True), (None, True)]
)
def test_the_note_of_a_job_goes_with_its_attempt(content: bytes | None, goes: bool) -> None:
    dead = stale_messages([prepare_name(JOB)], ATTEMPT.__eq__, lambda name: content)
    assert dead == ((prepare_name(JOB),) if goes else ())


def test_a_note_of_a_job_that_cannot_be_read() -> None:
    def refuse(name: str) -> bytes:
        raise OSError(errno.EIO, "broken")

    assert stale_messages([prepare_name(JOB)], ATTEMPT.__eq__, refuse) == (prepare_name(JOB),)


# ------------------------------------------------------------------------------------------------------- what they say


@pytest.mark.parametrize(
    "error",
    [
        ExistsError("differs from that of process 0", hint="pass overwrite=True"),
        MismatchError("leaf differs", path=("a", "b")),
        StoreError.of(OSError(errno.ENOSPC, "No space"), "x", "write"),
        StoreError.of(OSError(errno.EACCES, "No"), "x", "write"),
        StoreError.of(OSError(errno.EISDIR, "No"), "x", "write"),
        NotSharedError("elsewhere"),
        CorruptError("damaged", offset=7),
    ],
)
def test_an_error_travels(error: TreeringError) -> None:
    part = VoteMessage(stage=VoteStage.FAILED, who="host, pid 7", failure=Failure.of(error))
    read = VoteMessage.decode(part.encode())
    assert read == part
    assert read.failure is not None
    again = read.failure.to_error("could not save 'x'", (3,))
    assert type(again) is type(error)
    assert str(again) == f"could not save 'x': {error}"
    assert getattr(again, "errno", None) == getattr(error, "errno", None)


def test_those_that_are_missing_travel() -> None:
    error = TimedOutError("waited")
    error.missing = (2, 5)
    again = Failure.of(error).to_error("no", (0,))
    assert isinstance(again, TimedOutError)
    assert again.missing == (2, 5)


def test_classes_of_others_become_what_a_caller_can_catch() -> None:
    class Special(ExistsError, KeyError):
        pass

    assert Failure.of(Special("x")).name == "ExistsError"
    assert Failure.of(PermissionDeniedError("x")).name == "PermissionDeniedError"
    assert Failure.of(IsDirectoryError("x")).name == "IsDirectoryError"
    failed = Failure.of(MemoryError()).attribute_to("process 3").to_error("no", (3,))
    assert type(failed) is ProcessFailedError
    assert (str(failed), failed.processes) == ("no: process 3: MemoryError", (3,))

    namesake = type("ExistsError", (Exception,), {})
    assert str(Failure.of(namesake("x")).to_error("no", (3,))) == "no: ExistsError: x"
    assert type(Failure.of(namesake("x")).to_error("no", (3,))) is ProcessFailedError


def test_an_endless_message_is_cut() -> None:
    assert (
        len(
            VoteMessage(
                stage=VoteStage.FAILED, who="h", failure=Failure.of(CorruptError("x" * 10**6, hint="y" * 10**6))
            ).encode()
        )
        < 10**4
    )


GOOD_PART = VoteMessage(stage=VoteStage.PREPARED, who="host, pid 7", payload=b"abc").encode()
GOOD_VERDICT = DecisionMessage(who="host", failure=Failure.of(ExistsError("x")), processes=(1,)).encode()
GOOD_BEGIN = begin(ATTEMPT)
GOOD_SUM = SumMessage(payloads={1: b"abc"}, failures={2: Failure.of(ExistsError("x"))}).encode()


@pytest.mark.parametrize(
    ("read", "good", "old", "new"),
    [
        (VoteMessage.decode, GOOD_PART, b'"written"', b'"failed"'),
        (VoteMessage.decode, GOOD_PART, b'"written"', b'"writing"'),
        (VoteMessage.decode, GOOD_PART, b'"written"', b"1"),
        (VoteMessage.decode, GOOD_PART, b'"YWJj"', b'"YWJ"'),
        (VoteMessage.decode, GOOD_PART, b'"YWJj"', b'"YW Jj"'),
        (VoteMessage.decode, GOOD_PART, b'"who"', b'"whom"'),
        (VoteMessage.decode, GOOD_PART, b"host", b"h\xc3\xb6st"),
        (VoteMessage.decode, GOOD_PART, b"}", b'"failure":{}}'),
        (SumMessage.decode, GOOD_SUM, b'"1":', b'"-1":'),
        (SumMessage.decode, GOOD_SUM, b'"1":', b'"\xe0\xa5\xa7":'),
        (SumMessage.decode, GOOD_SUM, b'"YWJj"', b"7"),
        (SumMessage.decode, GOOD_SUM, b'"failures":{', b'"failures":{"3":{},'),
        (SumMessage.decode, GOOD_SUM, b'"payloads"', b'"payload"'),
        (DecisionMessage.decode, GOOD_VERDICT, b'"committed":false', b'"committed":true'),
        (DecisionMessage.decode, GOOD_VERDICT, b'"committed":false', b'"committed":null'),
        (DecisionMessage.decode, GOOD_VERDICT, b"[1]", b"[-1]"),
        (DecisionMessage.decode, GOOD_VERDICT, b"[1]", b"[true]"),
        (DecisionMessage.decode, GOOD_VERDICT, b'"kept":false', b'"kept":"no"'),
        (DecisionMessage.decode, GOOD_VERDICT, b'"hint":null', b'"hint":3'),
        (DecisionMessage.decode, GOOD_VERDICT, b'"errno":null', b'"errno":"x"'),
        (PrepareMessage.decode, GOOD_BEGIN, b'"number":1', b'"number":1.0'),
        (PrepareMessage.decode, GOOD_BEGIN, b'"signature"', b'"signatur"'),
        (PrepareMessage.decode, GOOD_BEGIN, b'"digest":""', b'"digest":"ab"'),
        # It becomes the name of a folder.
        (PrepareMessage.decode, GOOD_BEGIN, ATTEMPT.encode(), b"a\\u0000b"),
        (PrepareMessage.decode, GOOD_BEGIN, ATTEMPT.encode(), b"\\ud800"),
        (PrepareMessage.decode, GOOD_BEGIN, ATTEMPT.encode(), b"../../elsewhere"),
        (PrepareMessage.decode, b"[]", b"", b""),
        (DecisionMessage.decode, b"", b"", b""),
    ],
)
def test_a_damaged_note_is_never_believed(read: type, good: bytes, old: bytes, new: bytes) -> None:
    damaged = good.replace(old, new) if old else good
    if damaged == good and old:
        pytest.fail("nothing was damaged")
    with pytest.raises(CorruptError):
        read(damaged)


def test_every_shortened_note_is_damaged() -> None:
    for read, good in (
        (VoteMessage.decode, GOOD_PART),
        (DecisionMessage.decode, GOOD_VERDICT),
        (PrepareMessage.decode, GOOD_BEGIN),
        (SumMessage.decode, GOOD_SUM),
    ):
        for length in range(len(good)):
            with pytest.raises(CorruptError):
                read(good[:length])


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
    for name in folders:
        with open_below(store, name) as below:
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
