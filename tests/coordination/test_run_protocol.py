"""Steps carried out on real board: threads in place of processes, faulty stores, what is thrown where."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.coordination.joint_saves import JOB, SIGNATURE, call_of, check
from treering._checkpoint.transaction import CheckpointFolder, JoinedFolder
from treering._coordination.message_board import FolderMessageBoard, MessageBoard, PathMessageBoard
from treering._coordination.operations import (
    Commit,
    Get,
    Now,
    Operations,
    PrepareData,
    Put,
    Remove,
    Rollback,
    Sleep,
    derive_attempt,
    run_protocol,
)
from treering._coordination.two_phase_commit import coordinate, participate
from treering._store.posix.folder import Folder
from treering._store.posix.store import PosixStore
from treering._values.checkpoint_names import decision_name, heartbeat_name, is_message, vote_name
from treering.errors import StoreError, TimedOutError
from treering.testing import FaultyStore, MemoryStore

NAME = heartbeat_name(1)


class Recorder:
    """What one process does, written down."""

    def __init__(self, payload: bytes = b"payload") -> None:
        self.did: list[str] = []
        self.parts: Sequence[bytes] = ()
        self.payload = payload

    def prepare(self) -> bytes:
        self.did.append("prepare")
        return self.payload

    def commit(self, parts: Sequence[bytes]) -> None:
        self.did.append("commit")
        self.parts = parts

    def roll_back(self) -> None:
        self.did.append("roll back")


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def together(*calls: Callable[[], None]) -> list[BaseException | None]:
    """Run all of them at once; return what each raised."""
    raised: list[BaseException | None] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            calls[number]()
        except BaseException as error:  # noqa: BLE001 - tests look at it
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return raised


def joint(
    stores: Sequence[MessageBoard], recorder: Sequence[Recorder], *, timeout: float = 60.0
) -> list[BaseException | None]:
    """Let as many processes as there are stores save together."""
    count = len(stores)

    def process(this: int) -> Callable[[], None]:
        call = call_of(this, count, timeout=timeout)
        steps = participate(call, check) if this else coordinate(call, SIGNATURE)
        return lambda: run_protocol(steps, stores[this], recorder[this])

    return together(*map(process, range(count)))


def test_threads_save_together_in_a_real_folder(tmp_path: Path) -> None:
    recorder = [Recorder(b"part %d" % this) for this in range(4)]
    with Folder(str(tmp_path)) as folder:
        stores: list[MessageBoard] = [
            FolderMessageBoard(PosixStore.over(folder)),
            *(PathMessageBoard(str(tmp_path)) for _ in range(3)),
        ]
        assert joint(stores, recorder) == [None] * 4
    assert recorder[0].parts == tuple(b"part %d" % this for this in range(4))
    assert [one.did for one in recorder] == [["prepare", "commit"], ["prepare"], ["prepare"], ["prepare"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(6))
def test_troubled_stores_only_make_it_slower(seed: int) -> None:
    inner = MemoryStore()
    stores: list[MessageBoard] = [
        FolderMessageBoard(FaultyStore(inner, seed=seed * 10 + this, slow=0.1, stale=0.2, failing=0.2, delay=0.01))
        for this in range(3)
    ]
    recorder = [Recorder() for _ in range(3)]
    assert joint(stores, recorder) == [None] * 3
    assert recorder[0].did == ["prepare", "commit"]


def test_a_process_that_never_comes(tmp_path: Path) -> None:
    recorder = Recorder()
    with Folder(str(tmp_path)) as folder, pytest.raises(TimedOutError, match=r"process 1 did not arrive within 0\.2 s"):
        run_protocol(
            coordinate(call_of(0, 2, timeout=0.2), SIGNATURE), FolderMessageBoard(PosixStore.over(folder)), recorder
        )
    assert recorder.did == ["prepare"]
    assert (tmp_path / decision_name(derive_attempt(JOB, 1))).exists()


def test_process_0_hears_at_once_that_the_others_gave_up_before_it_made_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step"
    joined = [JoinedFolder(path, derive_attempt(JOB, 1)) for _ in range(2)]

    def given_up(this: int) -> Callable[[], None]:
        steps = participate(call_of(this, 3, timeout=0.2), check)
        return lambda: run_protocol(steps, joined[this - 1].board, Recorder(), make=joined[this - 1].make)

    assert all(isinstance(error, TimedOutError) for error in together(given_up(1), given_up(2)))
    recorder, begun = Recorder(), time.monotonic()
    with (
        CheckpointFolder(path, overwrite=False, names_in=lambda index: [], attempt=derive_attempt(JOB, 1)) as folder,
        pytest.raises(TimedOutError, match="process 0 did not arrive within") as error,
    ):
        run_protocol(coordinate(call_of(0, 3), SIGNATURE), folder.board, recorder)
    assert error.value.missing == (1,)
    assert time.monotonic() - begun < 10
    assert recorder.did == ["prepare", "roll back"]
    assert not [entry.name for entry in path.iterdir() if is_message(entry.name)]


# ---------------------------------------------------------------------------------------------------- single operations


def one(*steps: object) -> Iterator[object]:
    """Steps that write down their answers in the last list."""
    *operations, answers = steps
    for operation in operations:
        try:
            answers.append((yield operation))  # type: ignore[attr-defined]
        except BaseException as error:  # noqa: BLE001 - tests look at it
            answers.append(error)  # type: ignore[attr-defined]


def carried_out(
    *operations: object, board: MessageBoard | None = None, recorder: Recorder | None = None, time: Time | None = None
) -> list[object]:
    answers: list[object] = []
    time = time or Time()
    steps: Operations = one(*operations, answers)  # type: ignore[assignment]
    run_protocol(
        steps, board or FolderMessageBoard(MemoryStore()), recorder or Recorder(), clock=time.clock, sleep=time.sleep
    )
    return answers


def test_each_operation_is_done_and_answered() -> None:
    recorder, time, board = Recorder(), Time(), FolderMessageBoard(MemoryStore())
    operations = [
        Put(NAME, b"x"), Get(NAME), Remove((NAME,)), Get(NAME), Now(), Sleep(3.0), Now(), PrepareData(),
        Commit((b"a", b"b")), Rollback(),
    ]  # fmt: skip
    answers = carried_out(*operations, board=board, recorder=recorder, time=time)
    assert answers == [None, b"x", None, None, 0.0, None, 3.0, b"payload", None, None]
    assert recorder.did == ["prepare", "commit", "roll back"]
    assert recorder.parts == (b"a", b"b")
    assert time.slept == [3.0]


@pytest.mark.parametrize("operation", [PrepareData(), Commit(()), Rollback(), Sleep(1.0), Remove((NAME,))])
@pytest.mark.parametrize("error", [StoreError("no space"), KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_what_an_operation_raises_goes_into_the_steps(
    operation: object, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    recorder, time, board = Recorder(), Time(), FolderMessageBoard(MemoryStore())
    for place in (recorder, time, board):
        for name in ("prepare", "commit", "roll_back", "sleep", "remove_all"):
            monkeypatch.setattr(place, name, refuse, raising=False)
    assert carried_out(operation, Now(), board=board, recorder=recorder, time=time) == [error, 0.0]


def test_a_note_that_cannot_be_put_is_tried_again_for_a_second() -> None:
    class Broken(FolderMessageBoard):
        tries = 0
        fails = 3

        def put(self, name: str, data: bytes) -> None:
            self.tries += 1
            if self.tries <= self.fails:
                raise OSError(errno.EIO, "broken")
            super().put(name, data)

    broken, time = Broken(MemoryStore()), Time()
    assert carried_out(Put(NAME, b"x"), Get(NAME), board=broken, time=time) == [None, b"x"]
    assert broken.tries == 4
    broken, time = Broken(MemoryStore()), Time()
    broken.fails = 1000
    (error,) = carried_out(Put(NAME, b"x"), board=broken, time=time)
    assert isinstance(error, OSError)
    assert 0.3 < time.now <= 1.0
    assert 3 < broken.tries < 20


def test_a_note_that_cannot_be_read_is_not_there_yet_and_then_the_cause() -> None:
    class Broken(FolderMessageBoard):
        fails = True

        def get(self, name: str) -> bytes | None:
            if self.fails:
                raise OSError(errno.EIO, "broken")
            return super().get(name)

    broken, time = Broken(MemoryStore()), Time()
    steps = participate(call_of(1, 2, timeout=9.0), check)
    with pytest.raises(TimedOutError, match="process 0 did not arrive within 9 s") as caught:
        run_protocol(steps, broken, Recorder(), clock=time.clock, sleep=time.sleep)
    assert isinstance(caught.value.__cause__, OSError)
    assert str(caught.value.__cause__) == "[Errno 5] broken"
    broken.fails = False
    with pytest.raises(TimedOutError) as caught:
        run_protocol(
            participate(call_of(1, 2, timeout=9.0), check), broken, Recorder(), clock=time.clock, sleep=time.sleep
        )
    assert caught.value.__cause__ is None


def test_a_folder_that_takes_no_notes(tmp_path: Path) -> None:
    class Full(FolderMessageBoard):
        def put(self, name: str, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    time, recorder = Time(), Recorder()
    with pytest.raises(StoreError, match="could not save 'ckpt': No space left on device") as caught:
        run_protocol(
            coordinate(call_of(0, 2), SIGNATURE), Full(MemoryStore()), recorder, clock=time.clock, sleep=time.sleep
        )
    assert caught.value.errno == errno.ENOSPC
    assert recorder.did == []
    assert time.now < 20


def test_an_interrupt_while_waiting_is_told_to_the_others() -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    board, recorder = FolderMessageBoard(MemoryStore()), Recorder()
    with pytest.raises(KeyboardInterrupt):
        run_protocol(participate(call_of(1, 2), check), board, recorder, sleep=interrupt)
    note = board.get(vote_name(derive_attempt(JOB, 1), 1))
    assert note is not None
    assert b'"KeyboardInterrupt' in note
