"""Notes on a real file system: replaced at once, read with suspicion, swept when nobody needs them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import faults, limits
from treering._coordination.message_board import FolderMessageBoard, PathMessageBoard, stale_messages
from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, SumMessage, VoteMessage, VoteStage
from treering._store.posix import descriptors, folder
from treering._store.posix.folder import Folder
from treering._store.posix.store import PosixStore
from treering._values import checkpoint_names
from treering._values.checkpoint_names import (
    arrival_name,
    decision_name,
    departure_name,
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
