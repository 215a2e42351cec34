"""Steps carried out on real notes: threads in place of processes, faulty stores, what is thrown where."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.store.joint_saves import JOB, SIGNATURE, call_of, check
from treering._checkpoint.joined_folder import JoinedFolder
from treering._checkpoint.transaction import CheckpointFolder
from treering._coordination.coordinator import leading
from treering._coordination.executor import driven
from treering._coordination.message_board import FolderNotes, Notes, PathNotes
from treering._coordination.participant import following
from treering._coordination.steps import Commit, Get, Now, Put, Remove, Sleep, Steps, Withdraw, Work, attempt_of
from treering._store.posix.folder import Folder
from treering._values.checkpoint_names import is_note, part_note, verdict_note, waiting_note
from treering.errors import StoreFailed, Timeout
from treering.testing import FaultyStore, MemoryStore

NAME = waiting_note(1)


class Deeds:
    """What one process does, written down."""

    def __init__(self, payload: bytes = b"payload") -> None:
        self.did: list[str] = []
        self.parts: Sequence[bytes] = ()
        self.payload = payload

    def work(self) -> bytes:
        self.did.append("work")
        return self.payload

    def commit(self, parts: Sequence[bytes]) -> None:
        self.did.append("commit")
        self.parts = parts

    def withdraw(self) -> None:
        self.did.append("withdraw")


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


def joint(stores: Sequence[Notes], deeds: Sequence[Deeds], *, timeout: float = 60.0) -> list[BaseException | None]:
    """Let as many processes as there are stores save together."""
    count = len(stores)

    def process(this: int) -> Callable[[], None]:
        call = call_of(this, count, timeout=timeout)
        steps = following(call, check) if this else leading(call, SIGNATURE)
        return lambda: driven(steps, stores[this], deeds[this])

    return together(*map(process, range(count)))


def test_threads_save_together_in_a_real_folder(tmp_path: Path) -> None:
    deeds = [Deeds(b"part %d" % this) for this in range(4)]
    with Folder(str(tmp_path)) as folder:
        stores: list[Notes] = [FolderNotes(folder), *(PathNotes(str(tmp_path)) for _ in range(3))]
        assert joint(stores, deeds) == [None] * 4
    assert deeds[0].parts == tuple(b"part %d" % this for this in range(4))
    assert [one.did for one in deeds] == [["work", "commit"], ["work"], ["work"], ["work"]]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(6))
def test_troubled_stores_only_make_it_slower(seed: int) -> None:
    inner = MemoryStore()
    stores = [
        FaultyStore(inner, seed=seed * 10 + this, slow=0.1, stale=0.2, failing=0.2, delay=0.01) for this in range(3)
    ]
    deeds = [Deeds() for _ in range(3)]
    assert joint(stores, deeds) == [None] * 3
    assert deeds[0].did == ["work", "commit"]


def test_a_process_that_never_comes(tmp_path: Path) -> None:
    deeds = Deeds()
    with Folder(str(tmp_path)) as folder, pytest.raises(Timeout, match=r"process 1 did not come within 0\.2 s"):
        driven(leading(call_of(0, 2, timeout=0.2), SIGNATURE), FolderNotes(folder), deeds)
    assert deeds.did == ["work"]
    assert (tmp_path / verdict_note(attempt_of(JOB, 1))).exists()


def test_process_0_hears_at_once_that_the_others_gave_up_before_it_made_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "run" / "step"
    joined = [JoinedFolder(path, attempt_of(JOB, 1)) for _ in range(2)]

    def given_up(this: int) -> Callable[[], None]:
        steps = following(call_of(this, 3, timeout=0.2), check)
        return lambda: driven(steps, joined[this - 1].notes, Deeds(), make=joined[this - 1].make)

    assert all(isinstance(error, Timeout) for error in together(given_up(1), given_up(2)))
    deeds, begun = Deeds(), time.monotonic()
    with (
        CheckpointFolder(path, overwrite=False, names_in=lambda index: [], attempt=attempt_of(JOB, 1)) as folder,
        pytest.raises(Timeout, match="process 0 did not come within") as error,
    ):
        driven(leading(call_of(0, 3), SIGNATURE), folder.notes, deeds)
    assert error.value.missing == (1,)
    assert time.monotonic() - begun < 10
    assert deeds.did == ["work", "withdraw"]
    assert not [entry.name for entry in path.iterdir() if is_note(entry.name)]


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
    *operations: object, notes: Notes | None = None, deeds: Deeds | None = None, time: Time | None = None
) -> list[object]:
    answers: list[object] = []
    time = time or Time()
    steps: Steps = one(*operations, answers)  # type: ignore[assignment]
    driven(steps, notes or MemoryStore(), deeds or Deeds(), clock=time.clock, sleep=time.sleep)
    return answers


def test_each_operation_is_done_and_answered() -> None:
    deeds, time, notes = Deeds(), Time(), MemoryStore()
    operations = [
        Put(NAME, b"x"), Get(NAME), Remove(NAME), Get(NAME), Now(), Sleep(3.0), Now(), Work(),
        Commit((b"a", b"b")), Withdraw(),
    ]  # fmt: skip
    answers = carried_out(*operations, notes=notes, deeds=deeds, time=time)
    assert answers == [None, b"x", None, None, 0.0, None, 3.0, b"payload", None, None]
    assert deeds.did == ["work", "commit", "withdraw"]
    assert deeds.parts == (b"a", b"b")
    assert time.slept == [3.0]


@pytest.mark.parametrize("operation", [Work(), Commit(()), Withdraw(), Sleep(1.0), Remove(NAME)])
@pytest.mark.parametrize("error", [StoreFailed("no space"), KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_what_an_operation_raises_goes_into_the_steps(
    operation: object, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    deeds, time, notes = Deeds(), Time(), MemoryStore()
    for place in (deeds, time, notes):
        for name in ("work", "commit", "withdraw", "sleep", "remove"):
            monkeypatch.setattr(place, name, refuse, raising=False)
    assert carried_out(operation, Now(), notes=notes, deeds=deeds, time=time) == [error, 0.0]


def test_a_note_that_cannot_be_put_is_tried_again_for_a_second() -> None:
    class Broken(MemoryStore):
        tries = 0
        fails = 3

        def put(self, name: str, data: bytes) -> None:
            self.tries += 1
            if self.tries <= self.fails:
                raise OSError(errno.EIO, "broken")
            super().put(name, data)

    broken, time = Broken(), Time()
    assert carried_out(Put(NAME, b"x"), Get(NAME), notes=broken, time=time) == [None, b"x"]
    assert broken.tries == 4
    broken, time = Broken(), Time()
    broken.fails = 1000
    (error,) = carried_out(Put(NAME, b"x"), notes=broken, time=time)
    assert isinstance(error, OSError)
    assert 0.3 < time.now <= 1.0
    assert 3 < broken.tries < 20


def test_a_note_that_cannot_be_read_is_not_there_yet_and_then_the_cause() -> None:
    class Broken(MemoryStore):
        fails = True

        def get(self, name: str) -> bytes | None:
            if self.fails:
                raise OSError(errno.EIO, "broken")
            return super().get(name)

    broken, time = Broken(), Time()
    steps = following(call_of(1, 2, timeout=9.0), check)
    with pytest.raises(Timeout, match="process 0 did not come within 9 s") as caught:
        driven(steps, broken, Deeds(), clock=time.clock, sleep=time.sleep)
    assert isinstance(caught.value.__cause__, OSError)
    assert str(caught.value.__cause__) == "[Errno 5] broken"
    broken.fails = False
    with pytest.raises(Timeout) as caught:
        driven(following(call_of(1, 2, timeout=9.0), check), broken, Deeds(), clock=time.clock, sleep=time.sleep)
    assert caught.value.__cause__ is None


def test_a_folder_that_takes_no_notes(tmp_path: Path) -> None:
    class Full(MemoryStore):
        def put(self, name: str, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    time, deeds = Time(), Deeds()
    with pytest.raises(StoreFailed, match="could not save 'ckpt': No space left on device") as caught:
        driven(leading(call_of(0, 2), SIGNATURE), Full(), deeds, clock=time.clock, sleep=time.sleep)
    assert caught.value.errno == errno.ENOSPC
    assert deeds.did == []
    assert time.now < 20


def test_an_interrupt_while_waiting_is_told_to_the_others() -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    notes, deeds = MemoryStore(), Deeds()
    with pytest.raises(KeyboardInterrupt):
        driven(following(call_of(1, 2), check), notes, deeds, sleep=interrupt)
    note = notes.get(part_note(attempt_of(JOB, 1), 1))
    assert note is not None
    assert b'"KeyboardInterrupt' in note
