"""Joint saves are counted, seen from one process; ``tests/multiprocess`` has real ones."""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import treering
from tests import clocks, faults, limits
from treering._codec.documents import json_text
from treering._coordination import allgather, job_handshake
from treering._coordination.job_handshake import counted_save, find_note, leave_note, next_sequence, renumber
from treering._coordination.message_board import PathMessageBoard
from treering._coordination.messages import Failure, VoteMessage, VoteStage
from treering._coordination.operations import Call, derive_attempt
from treering._store.posix.folder import make_folder
from treering._values.checkpoint_names import arrival_name, heartbeat_name, is_message, vote_name
from treering._values.processes import Processes
from treering.errors import (
    MismatchError,
    NotDirectoryError,
    NotFoundError,
    NotSharedError,
    PermissionDeniedError,
    StoreError,
    TimedOutError,
    TreeringError,
)
from treering.leaves import tree_serialize_leaves

LEADER = Processes(this=0, count=3)
FOLLOWER = Processes(this=1, count=3)
JOB = "0123456789abcdef"


class Others:
    """What the other processes bring, one list after the other; None stands for what this one brings."""

    def __init__(self) -> None:
        self.rows: list[list[bytes | None]] = []
        self.brought: list[bytes] = []
        self.doing: Callable[[], object] = lambda: None

    def __call__(self, payload: bytes, processes: Processes, doing: str) -> list[bytes]:
        self.brought.append(payload)
        self.doing()
        return [payload if row is None else row for row in self.rows.pop(0)]


@pytest.fixture(autouse=True)
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    found = Others()
    monkeypatch.setattr(job_handshake, "allgather_in_order", found)
    job_handshake._latest_job.cache_clear()
    monkeypatch.setattr(allgather, "_order", allgather._CollectiveOrder())
    return found


def call(path: Path, processes: Processes, timeout: float = 60) -> Call:
    return next_sequence(path, processes, timeout=timeout, doing=f"save {str(path)!r}")


def refusal(path: Path, processes: Processes, timeout: float = 60) -> TreeringError:
    with pytest.raises(TreeringError) as raised:
        call(path, processes, timeout)
    return raised.value


def names_in(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def never() -> None:
    raise TimedOutError("could not save: process 2 did not come")


def test_process_0_names_the_job_and_shows_the_folder(tmp_path: Path, others: Others) -> None:
    path = tmp_path / "a" / "ckpt"
    others.rows = [[None, b"", b""], [None, b"", b""]]
    marks: list[bytes] = []
    others.doing = lambda: marks.append((path / heartbeat_name(0)).read_bytes())
    first = call(path, LEADER)
    assert (first.number, first.attempt) == (1, derive_attempt(first.job, 1))
    assert others.brought == [first.job.encode(), b""]
    assert marks == [b"", first.job.encode() + b" 1"]
    assert list(path.iterdir()) == []
    # From then on nobody has to meet, and no folder is made.
    second = call(tmp_path / "b", LEADER)
    assert (second.job, second.number) == (first.job, 2)
    assert second.attempt != first.attempt
    assert not (tmp_path / "b").exists()


def test_a_save_is_the_first_at_its_path_once_and_takes_the_number_of_process_0(tmp_path: Path, others: Others) -> None:
    (tmp_path / heartbeat_name(0)).write_bytes(JOB.encode())
    others.rows = [[JOB.encode(), None, b""], [b"", None, b""]]
    first = call(tmp_path, FOLLOWER)
    (tmp_path / "link").symlink_to(tmp_path)
    assert [first.fresh, call(tmp_path / "link", FOLLOWER).fresh, call(tmp_path / "a", FOLLOWER).fresh] == [
        True, False, True,
    ]  # fmt: skip
    begun = call(tmp_path / "b", FOLLOWER)
    later = call(tmp_path / "c", FOLLOWER)
    # Saves in the background may have begun before the first of them hears of it.
    for number in (7, 2):
        known = renumber(begun, number)
        assert (known.number, known.attempt, known.begun) == (number, derive_attempt(JOB, number), begun.begun)
        assert renumber(later, number + 1).number == number + 1
        assert call(tmp_path / f"{number}", FOLLOWER).number == number + (2 if number == 7 else 3)


@pytest.mark.parametrize("this", [0, 1, 2])
def test_who_waits_elsewhere_finds_a_save_that_it_has_not_begun_and_counts_it(
    this: int, tmp_path: Path, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = Processes(this=this, count=3)
    clocks.wait_at_most(monkeypatch, heartbeat_first=0.01)
    name = JOB.encode()
    (tmp_path / heartbeat_name(0)).write_bytes(name)
    others.rows = [[name, name, name], [b"", b"", b""]]
    told: list[tuple[Path, int, str]] = []

    def tell(path: Path, of: Call, error: BaseException) -> None:
        told.append((path, of.number, str(error)))

    with counted_save(processes, lambda: tmp_path, doing="save", tell=tell):
        call(tmp_path, processes)
    saver, path = int(this == 0), tmp_path / "run" / "step_00000007"
    path.mkdir(parents=True)
    missed = Call(job=JOB, number=2, processes=Processes(this=saver, count=3), timeout=60, doing="save")
    board = PathMessageBoard(path.parent)
    with leave_note(missed, path, lambda _: None) as pause:
        pause(0.0)
        assert names_in(path.parent) == [path.name]
        time.sleep(0.02)
        pause(0.0)
        assert names_in(path.parent) == [arrival_name(missed.attempt, saver), path.name]
        look = allgather._order.look
        assert look is not None
        waiting = look(PathMessageBoard(path if this == 2 else path.parent), "gc")
        waiting()
        waiting()
        with pytest.raises(
            MismatchError, match=f"process {saver} came to save 'step_00000007', process {this} came to gc"
        ):
            waiting()
        # It is counted, so nothing is missed any more.
        for _ in range(5):
            look(board, "gc")()
    assert names_in(path.parent) == [path.name]
    assert [(where, number) for where, number, _ in told] == [(path, 2)]
    assert call(tmp_path / "next", processes).number == 3


def test_no_note_is_left_beside_a_checkpoint_of_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks.wait_at_most(monkeypatch, heartbeat_first=0.0)
    for this, name in ((0, "ckpt"), (2, "step_00000001")):
        processes = Processes(this=this, count=3)
        waits = Call(job=JOB, number=1, processes=processes, timeout=60, doing="save")
        with leave_note(waits, tmp_path / name, lambda _: None) as pause:
            pause(0.0)
            assert names_in(tmp_path) == []
    damaged = arrival_name(derive_attempt(JOB, 1), 0)
    for content in (b"{", VoteMessage(stage=VoteStage.PREPARING, who="", payload=b"../step_00000001").encode()):
        (tmp_path / damaged).write_bytes(content)
        assert find_note(tmp_path, derive_attempt(JOB, 1), 2) is None


def test_the_others_take_the_name_and_look_for_the_mark(tmp_path: Path, others: Others) -> None:
    (tmp_path / heartbeat_name(0)).write_bytes(f"sign of life\n{JOB}".encode())
    others.rows = [[JOB.encode(), None, b""], [b"", None, b""]]
    assert call(tmp_path, FOLLOWER).job == JOB
    assert others.brought[1] == b""


def test_who_sees_no_mark_says_so(tmp_path: Path, others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.shorten(monkeypatch, handshake_look=0.1)
    (tmp_path / heartbeat_name(0)).write_bytes(b"the mark of another job")
    others.rows = [[JOB.encode(), None, b""], [b"", None, b"unseen"]]
    error = refusal(tmp_path, FOLLOWER)
    assert isinstance(error, NotSharedError)
    assert error.processes == (1, 2)
    assert f"could not save {str(tmp_path)!r}: processes 1 and 2 do not see" in str(error)


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_is_not_shared_is_removed_where_it_was_made(tmp_path: Path, others: Others, there: bool) -> None:
    path = tmp_path / "a" / "ckpt"
    if there:
        path.mkdir(parents=True)
    others.rows = [[None, b"", b""], [None, b"unseen", b""]]
    assert isinstance(refusal(path, LEADER), NotSharedError)
    assert (tmp_path / "a").exists() == there
    # The name is agreed on; the folder is looked at again.
    others.rows = [[None, b"", b""]]
    assert call(path, LEADER).number == 2
    assert others.rows == []


def test_process_0_that_cannot_write_tells_the_others(
    tmp_path: Path, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    path = tmp_path / "file" / "ckpt"
    others.rows = [[None, b"", b""]]
    assert isinstance(refusal(path, LEADER), NotDirectoryError)
    said = others.brought[0]
    assert len(said) <= allgather.PAYLOAD_BYTES
    others.rows = [[said, None, b""]]
    job_handshake._latest_job.cache_clear()
    error = refusal(path, FOLLOWER)
    assert isinstance(error, NotDirectoryError)
    assert str(error).startswith(f"process 0 could not save {str(path)!r}: could not write")
    # A second call, when the name is known: it is told when all come together.
    others.rows = [[said[16:], None, b"unseen"]]
    limits.shorten(monkeypatch, handshake_look=0.1)
    assert isinstance(refusal(path, FOLLOWER), NotDirectoryError)


def test_an_error_fits_into_what_can_be_brought() -> None:
    long = StoreError("ä" * 5000, hint="h" * 5000)
    for failure in (long, PermissionDeniedError("no", hint="ask"), ValueError("ä" * 90)):
        told = Failure.of(failure)
        fitting = told.fit(100)
        assert len(json_text(fitting.to_node())) <= 100 or not fitting.message.removesuffix("...")
        whole = told.fit(allgather.PAYLOAD_BYTES)
        assert len(json_text(whole.to_node())) <= allgather.PAYLOAD_BYTES
        assert whole.name == told.name
        assert whole.message.startswith(told.message[:20])


def test_process_0_that_gives_up_leaves_word_for_those_that_come_late(
    tmp_path: Path, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    others.rows = [[None, b"", b""]]
    others.doing = never
    refusal(tmp_path, LEADER)
    name = others.brought[0]
    assert (tmp_path / heartbeat_name(0)).read_bytes() == b"call 1 is given up " + name + b" 1"
    job_handshake._latest_job.cache_clear()
    others.doing = lambda: None
    others.rows = [[name, None, b""]]
    error = refusal(tmp_path, FOLLOWER)
    assert isinstance(error, TimedOutError)
    assert "process 0 had given up" in str(error)
    # It does not meet the others for the second time: they are not there.
    assert len(others.brought) == 2
    assert allgather._order.given_up == 1
    # That word is not meant for its next call, to which process 0 may be on its way.
    others.rows = [[b"", None, b"unseen"]]
    limits.shorten(monkeypatch, handshake_look=0.1)
    assert isinstance(refusal(tmp_path, FOLLOWER), NotSharedError)


def given_up(path: Path, others: Others) -> bytes:
    """Let process 1 of a job give up the first call, whose folder is not there; return what it is called."""
    others.doing = never
    others.rows = [[None, b"", b""]]
    refusal(path, FOLLOWER)
    others.doing = lambda: None
    job_handshake._latest_job.cache_clear()
    allgather._order.given_up = 0
    return others.brought[-1]


def test_the_others_that_give_up_leave_word_for_process_0(tmp_path: Path, others: Others) -> None:
    path = tmp_path / "deep" / "ckpt"
    name = given_up(path, others)
    assert (path / heartbeat_name(1)).read_bytes() == b"call 1 is given up " + name + b" 1"
    others.rows = [[None, name, b"f" * 16]]
    error = refusal(path, LEADER)
    assert isinstance(error, TimedOutError)
    assert error.missing == (1,)
    assert str(error).startswith(f"could not save {str(path)!r}: process 1 had given up before this process arrived")
    # As many as process 1, which takes no part in a second meeting.
    assert (allgather._order.given_up, others.rows) == (1, [])
    assert (path / heartbeat_name(0)).read_bytes().startswith(b"call 1 is given up ")
    others.rows = [[None, b"", b""]]
    assert call(path, LEADER).number == 2


@pytest.mark.parametrize(
    ("note", "heard"),
    [
        (b"call 1 is given up %s 1", True),
        (b"call 2 is given up %s 2", True),
        (b"3 waits to save\n%s 2", True),
        (b"3 waits to save\n%s 1", False),
        (b"call 1 is given up aaaaaaaaaaaaaaaa 1", False),
        (b"call 1 is given up ", False),
        (b"", False),
    ],
)
def test_process_0_hears_only_those_of_its_job_that_are_past_its_call(
    note: bytes, heard: bool, tmp_path: Path, others: Others
) -> None:
    name = b"0123456789abcdef"
    (tmp_path / heartbeat_name(2)).write_bytes(note.replace(b"%s", name))
    others.rows = [[None, b"e" * 16, name], [None, b"", b""]]
    if heard:
        error = refusal(tmp_path, LEADER)
        assert isinstance(error, TimedOutError)
        assert error.missing == (2,)
    else:
        assert call(tmp_path, LEADER).number == 1


def test_a_sign_of_life_stays_between_the_meetings(tmp_path: Path, others: Others) -> None:
    (tmp_path / heartbeat_name(0)).write_bytes(JOB.encode())
    seen: list[bool] = []

    def slowly() -> None:
        if seen:  # the second meeting has begun, and its own first sign comes later
            seen.append((tmp_path / heartbeat_name(1)).exists())
        else:
            seen.append(False)
            time.sleep(0.3)

    others.doing = slowly
    others.rows = [[JOB.encode(), None, b""], [b"", None, b""]]
    assert call(tmp_path, FOLLOWER, 0.8).number == 1
    assert seen == [False, True]
    assert not (tmp_path / heartbeat_name(1)).exists()


@pytest.mark.parametrize("form", ["checkpoint", "leaves", "run", "job"])
def test_what_is_left_where_process_0_never_came_is_in_nobody_s_way(form: str, tmp_path: Path, others: Others) -> None:
    path, tree = tmp_path / "run" / "step_00000001", {"w": jnp.arange(3.0)}
    given_up(path, others)
    part = VoteMessage(
        stage=VoteStage.FAILED, who="host, pid 1", failure=Failure.of(TimedOutError("process 0 did not come"))
    )
    (path / vote_name(derive_attempt(JOB, 2), 1)).write_bytes(part.encode())
    if form == "job":
        others.rows = [[None, b"e" * 16, b"f" * 16], [None, b"", b""]]
        assert call(path, LEADER).number == 1
        return
    if form == "run":
        with treering.Run(path.parent) as run:
            assert (run.steps(), run.latest()) == ([], None)
            run.save(1, tree)
            run.wait()
            assert run.steps() == [1]
    elif form == "leaves":
        tree_serialize_leaves(str(path), tree)
    else:
        with pytest.raises(NotFoundError):
            treering.load(path)
        treering.save(path, tree)
    assert not any(is_message(entry.name) for entry in path.iterdir())
    assert treering.verify(path).ok


def test_a_folder_that_another_saver_removes_is_made_again(
    tmp_path: Path, others: Others, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ckpt"
    left = [None, None]

    def made_and_removed(folder: str) -> list[str]:
        made = make_folder(folder)
        if left:
            left.pop()
            shutil.rmtree(folder)
        return made

    monkeypatch.setattr("treering._store.posix.store.make_folder", made_and_removed)
    others.rows = [[None, b"", b""], [None, b"", b""]]
    assert call(path, LEADER).number == 1
    assert path.exists()


def test_a_job_that_was_begun_anew_agrees_anew(tmp_path: Path, others: Others, monkeypatch: pytest.MonkeyPatch) -> None:
    def agreed(processes: Processes) -> Call:
        others.rows = [[None] * processes.count, [None] * processes.count]
        return call(tmp_path, processes)

    first = agreed(LEADER)
    assert call(tmp_path, LEADER).number == 2
    more = agreed(Processes(this=0, count=4))
    assert (more.number, more.job == first.job) == (1, False)
    devices = jax.devices()
    faults.answer(monkeypatch, jax, "devices", devices[1:])
    assert agreed(Processes(this=0, count=4)).job != more.job


def test_late_agreement_is_kept(tmp_path: Path, others: Others) -> None:
    came = threading.Event()

    others.rows = [[None, b"", b""], [None, b"", b""]]
    others.doing = lambda: came.wait(60)
    error = refusal(tmp_path, LEADER, 0.3)
    assert isinstance(error, TimedOutError)
    assert error.missing == (1, 2)
    came.set()
    second = call(tmp_path, LEADER)
    assert (second.number, others.brought) == (2, [second.job.encode(), b""])


def test_a_save_of_another_thread_may_end_while_one_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(job="", number=1, processes=LEADER, timeout=1.0, doing="save", begun=1)

    class Ending:
        """A job whose other save ends between any two looks at it."""

        looks = iter((dataclasses.replace(call, begun=2), None))

        @property
        def open(self) -> Call | None:
            return next(self.looks)

    monkeypatch.setattr(job_handshake, "_job_of", lambda _: Ending())
    job_handshake.release(call)
