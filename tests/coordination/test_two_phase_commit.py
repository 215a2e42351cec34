"""The steps of a joint save: who waits for whom, what each is told, what is removed and what is not."""

from __future__ import annotations

import dataclasses
import errno
import itertools
from typing import NoReturn

import pytest

from tests.coordination.joint_saves import JOB, Killed, Meeting, call_of
from treering._coordination.messages import PrepareMessage, VoteMessage, VoteStage
from treering._coordination.operations import (
    Commit,
    Get,
    Operation,
    OutOfStep,
    PrepareData,
    Put,
    Renumbered,
    Sleep,
    derive_attempt,
)
from treering._coordination.two_phase_commit import coordinate, refuse
from treering._values.checkpoint_names import arrival_name, decision_name, departure_name, prepare_name, vote_name
from treering.errors import (
    BusyError,
    ExistsError,
    MismatchError,
    ProcessFailedError,
    StoreError,
    TimedOutError,
    TreeringError,
    UnsupportedError,
)

ATTEMPT = derive_attempt(JOB, 1)


def no_space() -> NoReturn:
    error = StoreError("could not write 'data': no space left", hint="free some space")
    error.errno = errno.ENOSPC
    raise error


def die_before(kind: type) -> object:
    def before(step: Operation) -> None:
        if isinstance(step, kind):
            raise Killed

    return before


def interrupt_before(kind: type, times: int = 1) -> object:
    left = [times]

    def before(step: Operation) -> None:
        if isinstance(step, kind) and left[0]:
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt

    return before


def message(error: BaseException | None) -> str:
    assert isinstance(error, TreeringError)
    return str(error)


# ------------------------------------------------------------------------------------------------------------ it works


@pytest.mark.parametrize("count", [2, 3, 7])
def test_process_0_commits_what_all_have_written(count: int) -> None:
    meeting = Meeting()
    meeting.lead(count)
    for this in range(1, count):
        meeting.follow(this, count, at=0.1 * this)
    assert set(meeting.run().values()) == {None}
    assert meeting.parts == tuple(b"part %d" % this for this in range(count))
    assert sorted(meeting.who("prepare")) == list(range(count))
    assert meeting.who("commit") == [0]
    assert meeting.who("roll back") == []
    assert meeting.notes == {}


def test_nothing_is_committed_before_the_last_has_written() -> None:
    meeting = Meeting()
    meeting.lead(3)
    meeting.follow(1, 3)
    meeting.follow(2, 3, at=50.0)
    meeting.run()
    assert meeting.done.index((2, vote_name(ATTEMPT, 2))) < meeting.done.index((0, "commit"))
    assert meeting.now >= 50


def test_one_process_alone_waits_for_nobody() -> None:
    meeting = Meeting()
    meeting.lead(1)
    assert meeting.run() == {0: None}
    assert (meeting.parts, meeting.now, meeting.notes) == ((b"part 0",), 0.0, {})


def test_calls_follow_each_other() -> None:
    meeting = Meeting()
    for number in (1, 2, 3):
        meeting.lead(2, number=number)
        meeting.follow(1, 2, number=number)
        assert meeting.run() == {0: None, 1: None}
    assert meeting.who("commit") == [0, 0, 0]


def test_a_verdict_that_somebody_swept_is_said_again() -> None:
    meeting = Meeting()
    meeting.lead(2)

    def before(step: Operation) -> None:
        if isinstance(step, Sleep) and (0, decision_name(ATTEMPT)) in meeting.done and len(swept) < 2:
            swept.append(meeting.notes.pop(decision_name(ATTEMPT), None))

    swept: list[bytes | None] = []
    meeting.processes[0].before = before
    meeting.follow(1, 2)
    assert meeting.run() == {0: None, 1: None}
    assert swept
    assert meeting.who(decision_name(ATTEMPT)) == [0, 0]


# ------------------------------------------------------------------------------------------------- somebody is missing


def test_those_who_did_not_come_are_named_to_all() -> None:
    meeting = Meeting()
    meeting.lead(5, timeout=20.0)
    meeting.follow(1, 5, timeout=20.0)
    meeting.follow(4, 5, timeout=20.0)
    errors = meeting.run()
    for error in errors.values():
        assert isinstance(error, TimedOutError)
        assert error.missing == (2, 3)
        assert "could not save 'ckpt': processes 2 and 3 did not arrive within 20 s; nothing was saved" in str(error)
        assert "not be shared" in (error.hint or "")
        assert "TREERING_TIMEOUT_S" in (error.hint or "")
    assert meeting.who("commit") == []
    # What proves that the attempt's files are leftovers stays: the others may yet come and write.
    assert sorted(meeting.who("roll back")) == [1, 4]
    assert 20 <= meeting.now < 27
    meeting.follow(2, 5)
    late = meeting.run()[2]
    assert isinstance(late, TimedOutError)
    assert late.missing == (2, 3)
    assert meeting.who("prepare") == [0, 1, 4]


def test_who_is_still_at_work_is_told_from_those_who_never_came() -> None:
    meeting = Meeting()
    meeting.lead(3, timeout=20.0)
    meeting.follow(1, 3, before=die_before(PrepareData))
    error = meeting.run()[0]
    assert "process 2 did not arrive within 20 s; process 1 (host 1, pid 71) has not finished its part" in message(
        error
    )


def test_process_0_never_comes() -> None:
    meeting = Meeting()
    meeting.follow(1, 2, timeout=20.0)
    error = meeting.run()[1]
    assert isinstance(error, TimedOutError)
    assert error.missing == (0,)
    assert "process 0 did not arrive within 20 s; nothing was saved, and the path is unchanged" in str(error)
    assert meeting.who("prepare") == meeting.who("roll back") == []
    assert 20 <= meeting.now < 21
    # Should it come after all, it learns at once that nobody waits.
    meeting.lead(2)
    assert "process 1 (host 1, pid 71): could not save 'ckpt': process 0 did not arrive" in message(meeting.run()[0])
    assert meeting.now < 21


def test_process_0_dies_before_it_has_written() -> None:
    meeting = Meeting()
    meeting.lead(2, before=die_before(PrepareData))
    meeting.follow(1, 2, timeout=20.0)
    error = meeting.run()[1]
    assert isinstance(error, TimedOutError)
    assert error.missing == (0,)
    assert "process 0 (host 0, pid 70) has not finished its part within 20 s" in str(error)
    assert "not known" in str(error)
    assert meeting.who("roll back") == []


def test_process_0_dies_before_it_commits() -> None:
    meeting = Meeting()
    meeting.lead(2, before=die_before(Commit))
    meeting.follow(1, 2, timeout=20.0)
    error = meeting.run()[1]
    assert "process 0 (host 0, pid 70) has not announced its decision" in message(error)
    assert "whether it was saved is not known" in message(error)
    # Process 0 may be asleep, and commit when it wakes up.
    assert meeting.who("roll back") == []
    for name in (vote_name(ATTEMPT, 1), departure_name(ATTEMPT, 1)):
        assert VoteMessage.decode(meeting.notes[name]).stage is VoteStage.FAILED


def test_notes_of_process_0_are_gone_when_the_work_is_done() -> None:
    meeting = Meeting()

    def prepare() -> bytes:
        meeting.notes.clear()
        return b""

    meeting.lead(2, before=die_before(PrepareData))
    meeting.follow(1, 2, prepare=prepare)
    assert "process 0 (host 0, pid 70) has left this save; nothing was saved" in message(meeting.run()[1])
    assert meeting.who("roll back") == [1]


# ---------------------------------------------------------------------------------------------------- somebody failed


def test_an_error_of_another_is_raised_by_all_as_what_it_is() -> None:
    meeting = Meeting()
    meeting.lead(3)
    meeting.follow(1, 3)
    meeting.follow(2, 3, prepare=no_space)
    errors = meeting.run()
    assert str(errors[2]) == "could not write 'data': no space left; free some space"
    for this in (0, 1):
        error = errors[this]
        assert type(error) is StoreError
        assert error.errno == errno.ENOSPC
        assert error.message == (
            "could not save 'ckpt': process 2 (host 2, pid 72): could not write 'data': no space left"
        )
        assert error.hint == "free some space"
    assert meeting.who("commit") == []
    # All have left: process 0 too may remove everything, its proof last.
    assert sorted(meeting.who("roll back")[:-1]) == [1, 2]
    assert meeting.who("roll back")[-1] == 0
    assert meeting.notes == {}
    assert meeting.now < 1


def test_the_others_are_told_before_anything_is_removed() -> None:
    meeting = Meeting()
    meeting.lead(2)
    meeting.follow(1, 2, prepare=no_space)
    meeting.run()
    mine = [did for this, did in meeting.done if this == 1]
    names = arrival_name(ATTEMPT, 1), vote_name(ATTEMPT, 1), departure_name(ATTEMPT, 1)
    assert mine == [names[0], "prepare", names[1], "roll back", names[2]]


def test_an_error_that_is_none_of_ours() -> None:
    def prepare() -> bytes:
        raise ZeroDivisionError("oh")

    meeting = Meeting()
    meeting.lead(3)
    meeting.follow(1, 3, prepare=prepare)
    meeting.follow(2, 3)
    errors = meeting.run()
    assert type(errors[1]) is ZeroDivisionError
    for this in (0, 2):
        error = errors[this]
        assert type(error) is ProcessFailedError
        assert error.processes == (1,)
        assert str(error) == "could not save 'ckpt': process 1 (host 1, pid 71): ZeroDivisionError: oh"


def test_several_that_failed_are_counted() -> None:
    meeting = Meeting()
    meeting.lead(4)
    for this in (1, 2, 3):
        meeting.follow(this, 4, prepare=no_space)
    assert "process 1 (host 1, pid 71): could not write 'data': no space left (processes 2 and 3 failed as well)" in (
        message(meeting.run()[0])
    )


def test_an_error_of_process_0() -> None:
    meeting = Meeting()
    meeting.lead(3, prepare=no_space)
    meeting.follow(1, 3)
    meeting.follow(2, 3)
    errors = meeting.run()
    assert str(errors[0]) == "could not write 'data': no space left; free some space"
    for this in (1, 2):
        assert type(errors[this]) is StoreError
        assert "process 0 (host 0, pid 70): could not write" in message(errors[this])
    assert meeting.who("prepare") == meeting.who("roll back") == [0]
    assert meeting.notes == {}


def test_trees_that_differ() -> None:
    def check(signature: bytes) -> None:
        raise MismatchError(f"leaf 'a' differs ({signature.decode()})")

    meeting = Meeting()
    meeting.lead(2)
    meeting.follow(1, 2, check=check)
    errors = meeting.run()
    assert [type(error) for error in errors.values()] == [MismatchError, MismatchError]
    assert "process 1 (host 1, pid 71): leaf 'a' differs (signature)" in message(errors[0])
    assert meeting.who("prepare") == [0]


@pytest.mark.parametrize("error", [ExistsError("it is there"), BusyError("another job"), UnsupportedError("no")])
def test_process_0_could_not_enter(error: TreeringError) -> None:
    meeting = Meeting()
    meeting.add(0, refuse(call_of(0, 3), error))
    meeting.follow(1, 3)
    meeting.follow(2, 3, at=3.0)
    errors = meeting.run()
    assert errors[0] is None
    for this in (1, 2):
        assert type(errors[this]) is type(error)
        assert str(errors[this]) == f"could not save 'ckpt': process 0 (host 0, pid 70): {error.message}"
    assert meeting.who("prepare") == []
    assert meeting.notes == {}


def test_who_comes_much_later_is_told_as_well() -> None:
    meeting = Meeting()
    meeting.add(0, refuse(call_of(0, 2), ExistsError("it is there")))
    meeting.follow(1, 2, at=500.0)
    assert type(meeting.run()[1]) is ExistsError


def test_the_commit_failed_and_may_have_happened() -> None:
    def before(step: Operation) -> None:
        if isinstance(step, Commit):
            no_space()

    meeting = Meeting()
    meeting.lead(3, before=before)
    meeting.follow(1, 3)
    meeting.follow(2, 3)
    errors = meeting.run()
    assert {type(error) for error in errors.values()} == {StoreError}
    # Only process 0 can look whether it happened.
    assert meeting.who("roll back") == [0]


# ------------------------------------------------------------------------------------------------- interrupts, kills


@pytest.mark.parametrize("kind", [Put, PrepareData, Sleep])
def test_an_interrupt_in_a_process_is_told_to_the_others(kind: type) -> None:
    meeting = Meeting()
    meeting.lead(3)
    meeting.follow(1, 3, before=interrupt_before(kind))
    meeting.follow(2, 3)
    errors = meeting.run()
    assert type(errors[1]) is KeyboardInterrupt
    for this in (0, 2):
        assert type(errors[this]) is ProcessFailedError
        assert "process 1 (host 1, pid 71): KeyboardInterrupt" in message(errors[this])
    assert meeting.who("commit") == []


@pytest.mark.parametrize("kind", [Put, PrepareData, Sleep])
def test_an_interrupt_in_process_0_is_told_to_the_others(kind: type) -> None:
    meeting = Meeting()
    meeting.lead(2, before=interrupt_before(kind))
    meeting.follow(1, 2, at=0.5)
    errors = meeting.run()
    assert type(errors[0]) is KeyboardInterrupt
    assert "process 0 (host 0, pid 70): KeyboardInterrupt" in message(errors[1])
    assert meeting.who("commit") == []


def test_an_interrupt_after_the_part_was_handed_in_removes_nothing() -> None:
    def before(step: Operation) -> None:
        if isinstance(step, Sleep) and (1, "prepare") in meeting.done:
            raise KeyboardInterrupt

    meeting = Meeting()
    meeting.follow(1, 3, before=before)
    meeting.lead(3)
    meeting.follow(2, 3, at=1.0)
    errors = meeting.run()
    assert type(errors[1]) is KeyboardInterrupt
    assert meeting.who("roll back")[0] != 1


def test_an_interrupt_after_the_commit_undoes_nothing() -> None:
    def before(step: Operation) -> None:
        if isinstance(step, Sleep) and (0, "commit") in meeting.done:
            raise KeyboardInterrupt

    meeting = Meeting()
    meeting.follow(1, 2)
    meeting.lead(2, before=before)
    errors = meeting.run()
    assert type(errors[0]) is KeyboardInterrupt
    assert errors[1] is None
    assert meeting.who("roll back") == []


def test_a_part_that_could_not_be_put_is_not_withdrawn() -> None:
    def before(step: Operation) -> None:
        if isinstance(step, Put) and b'"written"' in step.data:
            meeting.notes[step.name] = step.data  # done, and the answer is lost
            raise OSError(errno.EIO, "lost")

    meeting = Meeting()
    meeting.follow(1, 2, before=before)
    meeting.lead(2, at=1e-4)
    errors = meeting.run()
    error = errors[1]
    assert type(error) is StoreError
    assert error.errno == errno.EIO
    assert str(error) == (
        "could not save 'ckpt': lost; this process had voted, so whether it was saved is not known here"
    )
    assert meeting.who("roll back") in ([], [0])


def test_steps_that_nobody_carries_on_do_nothing() -> None:
    steps = coordinate(call_of(0, 2), b"")
    assert isinstance(next(steps), Put)
    steps.close()


# ---------------------------------------------------------------------------------------------------------- out of step


def test_process_0_has_gone_on() -> None:
    meeting = Meeting()
    meeting.lead(2, number=7, before=die_before(PrepareData))
    meeting.follow(1, 2, number=5)
    error = meeting.run()[1]
    assert isinstance(error, OutOfStep)
    assert error.number == 7
    assert "process 0 (host 0, pid 70) is at its joint save number 7, this process at number 5" in str(error)
    assert meeting.now == 0
    assert meeting.who("prepare") == []


@pytest.mark.parametrize("number", [5, 9])
def test_a_save_that_process_0_counts_otherwise_is_begun_anew_with_its_number(number: int) -> None:
    meeting = Meeting()
    meeting.lead(2, number=7, call={"fresh": True}, before=die_before(PrepareData))
    meeting.follow(1, 2, number=number, call={"fresh": True})
    error = meeting.run()[1]
    assert isinstance(error, Renumbered)
    assert error.number == 7
    # It has done nothing, not even said that it is there.
    assert [name for this, name in meeting.done if this == 1] == []


@pytest.mark.parametrize(("zero", "one"), [(True, False), (False, True), (False, False)])
def test_a_save_to_a_path_that_was_saved_to_before_keeps_its_number(zero: bool, one: bool) -> None:
    meeting = Meeting()
    meeting.lead(2, number=7, call={"fresh": zero}, before=die_before(PrepareData))
    meeting.follow(1, 2, number=5, call={"fresh": one})
    assert isinstance(meeting.run()[1], OutOfStep)


def test_who_comes_late_to_a_path_hears_what_became_of_its_own_save() -> None:
    """Process 0 has given it up, and saves there again: that is no first save."""
    meeting = Meeting()
    meeting.lead(2, number=7, timeout=20.0, call={"fresh": True})
    assert isinstance(meeting.run()[0], TimedOutError)
    meeting.add(0, coordinate(call_of(0, 2, number=8), b""), at=meeting.now, before=die_before(PrepareData))
    meeting.follow(1, 2, number=7, at=meeting.now, call={"fresh": True})
    error = meeting.run()[1]
    assert isinstance(error, TimedOutError)
    assert error.missing == (1,)


def test_process_0_goes_on_while_another_works() -> None:
    meeting = Meeting()

    def prepare() -> bytes:
        begin = PrepareMessage.decode(meeting.notes[prepare_name(JOB)])
        meeting.notes[prepare_name(JOB)] = dataclasses.replace(begin, number=2).encode()
        return b""

    meeting.lead(2, before=die_before(PrepareData))
    meeting.follow(1, 2, prepare=prepare)
    error = meeting.run()[1]
    assert isinstance(error, OutOfStep)
    assert "nothing was saved" in str(error)
    assert meeting.who("roll back") == [1]


def test_process_0_goes_on_while_another_waits() -> None:
    meeting = Meeting()
    meeting.follow(1, 2)
    meeting.lead(2, before=die_before(Commit))
    meeting.add(5, coordinate(call_of(0, 2, number=2), b""), at=10.0, before=die_before(PrepareData))
    error = meeting.run()[1]
    assert isinstance(error, OutOfStep)
    assert "not known" in str(error)
    assert meeting.who("roll back") == []
    assert meeting.now < 11


def test_a_note_of_an_earlier_call_is_not_taken_for_this_one() -> None:
    meeting = Meeting()
    meeting.lead(2, number=1, before=die_before(PrepareData))
    meeting.follow(1, 2, number=2, timeout=20.0)
    error = meeting.run()[1]
    assert isinstance(error, TimedOutError)
    assert not isinstance(error, OutOfStep)


# --------------------------------------------------------------------------------------------------------------- damage


def test_a_damaged_note_is_waited_out_and_then_named() -> None:
    meeting = Meeting()
    meeting.notes[vote_name(ATTEMPT, 1)] = b'{"stage":"written"'
    meeting.lead(2, timeout=20.0)
    error = meeting.run()[0]
    assert isinstance(error, TimedOutError)
    assert "the message of process 1 cannot be read (the message of a process is not JSON" in str(error)
    meeting = Meeting()
    meeting.notes[prepare_name(JOB)] = b"\xff"
    meeting.follow(1, 2, timeout=20.0)
    assert "its message cannot be read (the message of process 0 is not JSON in ASCII" in message(meeting.run()[1])


@pytest.mark.parametrize("note", [b"{}", rb'{"stage":"written","who":"h","payload":"\u00e9"}'])
def test_a_damaged_note_that_is_written_anew(note: bytes) -> None:
    meeting = Meeting()
    for name in (prepare_name(JOB), vote_name(ATTEMPT, 1), vote_name(ATTEMPT, 0), decision_name(ATTEMPT)):
        meeting.notes[name] = note
    meeting.follow(1, 2)
    meeting.lead(2, at=2.0)
    assert meeting.run() == {0: None, 1: None}


def test_looking_gets_rarer() -> None:
    looks: list[float] = []

    def before(step: Operation) -> None:
        if isinstance(step, Get) and step.name == prepare_name(JOB):
            looks.append(meeting.now)

    meeting = Meeting()
    meeting.follow(1, 2, timeout=5.0, before=before)
    meeting.run()
    pauses = [later - sooner for sooner, later in itertools.pairwise(looks)]
    assert pauses[0] == pytest.approx(0.001)
    assert max(pauses) == pytest.approx(0.05)
    assert pauses[:40] == sorted(pauses[:40])
    assert len(looks) < 150
