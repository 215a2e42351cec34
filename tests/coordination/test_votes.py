"""Votes that come in through a tree: its shape, what is handed on, and what happens where a process in it is gone."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import pytest

from tests.coordination.joint_saves import JOB, SIGNATURE, Killed, Meeting, call_of
from treering._coordination.messages import PrepareMessage, SumMessage, VoteMessage, VoteStage
from treering._coordination.operations import (
    Get,
    Now,
    Operation,
    OutOfStep,
    PrepareData,
    Put,
    Sleep,
    await_departures,
    children_of,
    derive_attempt,
    subtree_of,
)
from treering._values.checkpoint_names import (
    decision_name,
    departure_name,
    prepare_name,
    signature_name,
    sum_name,
    vote_name,
)
from treering.errors import ProcessFailedError, StoreError, TimedOutError

ATTEMPT = derive_attempt(JOB, 1)


def save(meeting: Meeting, count: int, fan_in: int = 2, *, without: tuple[int, ...] = (), **more: Any) -> None:
    """Let all processes of a job save, but for some; ``at_3`` is for process 3, ``at_all`` for each."""
    for this in range(count):
        given = more.get("at_all", {}) | more.get(f"at_{this}", {})
        if this == 0:
            meeting.lead(count, fan_in=fan_in, timeout=20.0, **given)
        elif this not in without:
            meeting.follow(this, count, fan_in=fan_in, timeout=20.0, **given)


def no_space() -> NoReturn:
    raise StoreError("no space left")


def die_at(kind: type[Any], needle: str = "") -> dict[str, Any]:
    def before(step: Operation) -> None:
        if isinstance(step, kind) and needle in getattr(step, "name", ""):
            raise Killed

    return {"before": before}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 33, 34, 100, 1057, 4096])
@pytest.mark.parametrize("fan_in", [1, 2, 32])
def test_each_process_but_the_first_hands_in_to_one(count: int, fan_in: int) -> None:
    below = [child for process in range(count) for child in children_of(process, count, fan_in)]
    assert below == list(range(1, count))
    assert sorted(subtree_of(0, count, fan_in)) == list(range(count))
    tops = children_of(0, count, fan_in)
    assert sorted(one for top in tops for one in subtree_of(top, count, fan_in)) == list(range(1, count))


@pytest.mark.parametrize(("count", "fan_in"), [(3, 1), (4, 2), (12, 2), (40, 3), (100, 32)])
def test_process_0_commits_what_all_have_written(count: int, fan_in: int) -> None:
    meeting = Meeting()
    save(meeting, count, fan_in)
    assert set(meeting.run().values()) == {None}
    assert meeting.parts == tuple(b"part %d" % this for this in range(count))
    assert meeting.who("roll back") == []
    assert meeting.notes == {}


def test_a_process_reads_few_messages_of_many_processes() -> None:
    meeting = Meeting()
    save(meeting, 200, 8)
    assert set(meeting.run().values()) == {None}
    assert max(meeting.reads.values()) < 80
    assert sum(meeting.reads.values()) / 200 < 25


def test_a_long_signature_is_read_once() -> None:
    signature = b"leaf " * 1000
    read: list[Operation] = []
    meeting = Meeting()
    meeting.lead(3, signature=signature)

    def before(step: Operation) -> None:
        if getattr(step, "name", "") == signature_name(ATTEMPT):
            read.append(step)

    for this in (1, 2):
        meeting.follow(this, 3, check=lambda found: found == signature or no_space(), before=before)
    assert set(meeting.run().values()) == {None}
    assert len(read) == 2
    assert meeting.notes == {}


def test_a_signature_that_does_not_fit_is_not_believed() -> None:
    meeting = Meeting()
    meeting.lead(2, signature=b"leaf " * 1000, before=die_at(PrepareData)["before"])
    meeting.notes[signature_name(ATTEMPT)] = b"another"

    def before(step: Operation) -> None:
        meeting.notes[signature_name(ATTEMPT)] = b"another"

    meeting.follow(1, 2, before=before)
    assert "the signature of process 0 (host 0, pid 70) cannot be read" in str(meeting.run()[1])


def test_those_who_did_not_come_are_named_wherever_they_are_in_the_tree() -> None:
    meeting = Meeting()
    save(meeting, 12, without=(4, 9, 1))  # 1 collects for 4, and 4 for 9
    errors = meeting.run()
    for error in errors.values():
        assert isinstance(error, TimedOutError)
        assert error.missing == (1, 4, 9)
        assert "processes 1, 4 and 9 did not arrive within 20 s" in str(error)
    assert sorted(meeting.who("roll back")) == sorted(set(errors) - {0})


def test_a_failure_far_down_is_told_to_all_at_once() -> None:
    meeting = Meeting()
    save(meeting, 12, at_9={"prepare": no_space})
    errors = meeting.run()
    assert {type(error) for error in errors.values()} == {StoreError}
    assert all("process 9 (host 9, pid 79): no space left" in str(errors[this]) for this in errors if this != 9)
    assert meeting.notes == {}
    assert meeting.now < 1


def test_a_failure_of_a_process_that_collects_names_it_alone() -> None:
    meeting = Meeting()
    save(meeting, 12, at_1={"prepare": no_space})
    errors = meeting.run()
    assert all("process 1 (host 1, pid 71): no space left" in str(errors[this]) for this in errors if this != 1)
    assert not any("as well" in str(error) for error in errors.values())
    assert meeting.who("roll back")[-1] == 0
    assert meeting.notes == {}


def test_a_process_that_dies_after_it_voted_holds_nothing_up_but_time() -> None:
    meeting = Meeting()
    save(meeting, 12, at_1=die_at(Put, "-sum-"))
    errors = meeting.run()
    assert isinstance(errors.pop(1), Killed)
    # Process 0 looks at the votes themselves at its deadline: all are there.
    assert set(errors.values()) == {None}
    assert meeting.parts == tuple(b"part %d" % this for this in range(12))


def test_a_process_that_dies_while_it_works_is_named_and_those_below_are_not() -> None:
    meeting = Meeting()
    save(meeting, 12, at_1=die_at(PrepareData))
    errors = meeting.run()
    assert isinstance(errors.pop(1), Killed)
    for error in errors.values():
        assert isinstance(error, TimedOutError)
        assert error.missing == (1,)
        assert "process 1 (host 1, pid 71) has not finished its part within 20 s" in str(error)


def test_an_interrupt_after_the_votes_were_handed_on_leaves_the_decision_to_those_below() -> None:
    def before(step: Operation) -> None:
        if isinstance(step, Sleep) and (1, sum_name(ATTEMPT, 1)) in meeting.done:
            raise KeyboardInterrupt

    meeting = Meeting()
    save(meeting, 12, at_1={"before": before}, at_2={"at": 2.0}, at_9={"at": 0.01})
    errors = meeting.run()
    assert isinstance(errors.pop(1), KeyboardInterrupt)
    assert {type(error) for error in errors.values()} <= {type(None), ProcessFailedError}
    assert len({type(error) for error in errors.values()}) == 1


def test_a_sum_that_speaks_for_others_is_not_believed() -> None:
    meeting = Meeting()
    save(meeting, 4, without=(1, 3))
    meeting.notes[sum_name(ATTEMPT, 1)] = SumMessage(payloads={1: b"", 2: b"", 3: b""}).encode()
    error = meeting.run()[0]
    assert isinstance(error, TimedOutError)
    assert error.missing == (1, 3)


def test_payloads_that_are_too_many_are_read_from_the_votes() -> None:
    meeting = Meeting()
    save(meeting, 12, at_all={"call": {"most_payloads": 10}})
    assert set(meeting.run().values()) == {None}
    assert meeting.parts == tuple(b"part %d" % this for this in range(12))


def test_each_message_is_put_once() -> None:
    meeting = Meeting()
    save(meeting, 12)
    meeting.run()
    puts = [did for _, did in meeting.done if did.startswith(".treering-")]
    assert len(puts) == len(set(puts))
    assert {vote_name(ATTEMPT, 9), departure_name(ATTEMPT, 9), decision_name(ATTEMPT)} <= set(puts)


def test_the_signature_is_compared_by_all() -> None:
    checked: list[bytes] = []

    def check(signature: bytes) -> None:
        checked.append(signature)

    meeting = Meeting()
    save(meeting, 5, at_1={"check": check}, at_2={"check": check}, at_3={"check": check}, at_4={"check": check})
    meeting.run()
    assert checked == [SIGNATURE] * 4


def test_a_vote_that_cannot_be_read_below_an_empty_sum_is_waited_for_until_the_deadline() -> None:
    def before(step: Operation) -> None:
        if isinstance(step, Sleep) and vote_name(ATTEMPT, 4) in meeting.notes:
            meeting.notes[vote_name(ATTEMPT, 4)] = b"{}"

    meeting = Meeting()
    save(meeting, 12, at_all={"call": {"most_payloads": 1}}, at_0={"before": before})
    errors = meeting.run()
    assert all(isinstance(error, TimedOutError) and error.missing == (4,) for error in errors.values())
    assert "the message of process 4 cannot be read" in str(errors[0])
    assert max(meeting.reads.values()) < 3000


def test_a_failure_is_told_while_those_between_are_at_work() -> None:
    meeting = Meeting()
    save(meeting, 12, at_9={"prepare": no_space}, at_4=die_at(PrepareData))
    errors = meeting.run()
    assert isinstance(errors.pop(4), Killed)
    assert all("process 9 (host 9, pid 79): no space left" in str(errors[this]) for this in errors if this != 9)
    assert meeting.now < 15


def test_all_who_have_left_when_the_time_is_over_are_seen() -> None:
    call, now = call_of(0, 33), 0.0
    answer: Any = None
    left = VoteMessage(stage=VoteStage.LEFT, who="host").encode()
    steps = await_departures(call, call.processes.others)
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as ended:
            seen = ended.value
            break
        now += step.seconds if isinstance(step, Sleep) else 0.0
        answer = now if isinstance(step, Now) else left if now > call.linger - 1e-6 else None
    assert seen == tuple(call.processes.others)


def test_a_sum_that_cannot_be_put_fails_nothing() -> None:
    def before(step: Operation) -> None:
        if isinstance(step, Put) and step.name == sum_name(ATTEMPT, 1):
            raise PermissionError("denied")

    meeting = Meeting()
    save(meeting, 12, at_1={"before": before})
    assert set(meeting.run().values()) == {None}
    assert meeting.parts == tuple(b"part %d" % this for this in range(12))


def test_one_look_that_fails_names_nobody() -> None:
    failed: list[Operation] = []

    def before(step: Operation) -> None:
        if isinstance(step, Get) and step.name == vote_name(ATTEMPT, 9) and not failed:
            failed.append(step)
            meeting.notes["aside"] = meeting.notes.pop(step.name)
        elif "aside" in meeting.notes and isinstance(step, Sleep):
            meeting.notes[vote_name(ATTEMPT, 9)] = meeting.notes.pop("aside")

    meeting = Meeting()
    save(meeting, 12, at_0={"before": before}, at_1=die_at(Put, "-sum-"))
    errors = meeting.run()
    assert failed
    assert isinstance(errors.pop(1), Killed)
    assert set(errors.values()) == {None}


def test_many_that_have_not_finished_are_counted() -> None:
    meeting = Meeting()
    dead: dict[str, Any] = {f"at_{this}": die_at(PrepareData) for this in range(1, 60)}
    save(meeting, 60, 32, **dead)
    error = meeting.run()[0]
    assert isinstance(error, TimedOutError)
    assert error.missing == tuple(range(1, 60))
    assert "process 20 (host 20, pid 720) has not finished its part within 20 s" in str(error)
    assert "nor did processes 21-59 hand in a vote; nothing was saved" in str(error)


def test_a_process_that_is_late_to_the_signature_hears_that_process_0_has_gone_on() -> None:
    meeting = Meeting()
    meeting.lead(2, signature=b"leaf " * 1000, before=die_at(PrepareData)["before"])

    def before(step: Operation) -> None:
        if getattr(step, "name", "") == signature_name(ATTEMPT) and meeting.notes.pop(signature_name(ATTEMPT), None):
            begin = PrepareMessage.decode(meeting.notes[prepare_name(JOB)])
            meeting.notes[prepare_name(JOB)] = dataclasses.replace(begin, number=2).encode()

    meeting.follow(1, 2, before=before)
    assert isinstance(meeting.run()[1], OutOfStep)
    assert meeting.now < 1


def test_the_messages_below_a_process_that_gave_up_are_removed() -> None:
    def before(step: Operation) -> None:
        if isinstance(step, Sleep) and (0, "commit") in meeting.done:
            raise KeyboardInterrupt

    meeting = Meeting()
    save(meeting, 12, at_1={"before": before})
    errors = meeting.run()
    assert {type(error) for error in errors.values()} <= {type(None), KeyboardInterrupt}
    if errors[1] is None:
        pytest.fail("it was not interrupted")
    assert not [name for name in meeting.notes if vote_name(ATTEMPT, 9) == name]
