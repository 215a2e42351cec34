"""Meeting other processes, seen from one; ``tests/multiprocess`` has real ones."""

from __future__ import annotations

import _thread
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest

from tests import clocks, faults
from treering._arrays.host import this_processes
from treering._coordination import allgather
from treering._coordination.allgather import PAYLOAD_BYTES, allgather_in_order, allgather_with_deadline, run_in_order
from treering._coordination.message_board import Heartbeat, PathMessageBoard, stale_messages
from treering._store.crew import Latch
from treering._values import timing
from treering._values.checkpoint_names import heartbeat_name
from treering._values.processes import Processes
from treering.errors import MismatchError, ProcessFailedError, TimedOutError

ALONE = Processes(this=0, count=1)
OF_THREE = Processes(this=1, count=3)


class Memory:
    """Notes in memory; before each is read, ``others`` may write."""

    def __init__(self, others: Callable[[Memory], None] = lambda notes: None) -> None:
        self.content: dict[str, bytes] = {}
        self.put_names: list[str] = []
        self.works = True
        self._others = others

    def put(self, name: str, data: bytes) -> None:
        if not self.works:
            raise PermissionError
        self.put_names.append(name)
        self.content[name] = data

    def get(self, name: str) -> bytes | None:
        self._others(self)
        return self.content.get(name)

    def remove_all(self, names: Collection[str]) -> None:
        for name in names:
            self.content.pop(name, None)


class Counting:
    """Another process that gives signs of life."""

    def __init__(self, number: int) -> None:
        self._name = heartbeat_name(number)
        self._count = 0

    def __call__(self, notes: Memory) -> None:
        self._count += 1
        notes.content[self._name] = b"%d" % self._count


@pytest.fixture(autouse=True)
def _line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allgather, "_order", allgather._CollectiveOrder())


@pytest.fixture
def absent() -> Iterator[threading.Event]:
    """Another process that comes when this is set."""
    came = threading.Event()
    yield came
    came.set()


def waiting(came: threading.Event) -> Callable[[], str]:
    return lambda: "met" if came.wait(60) else "never"


def refused(notes: Any, came: threading.Event, timeout: float = 0.5) -> TimedOutError:
    with pytest.raises(TimedOutError) as raised:
        run_in_order(waiting(came), OF_THREE, timeout=timeout, board=notes, doing="save 'x'")
    return raised.value


def test_alone_nobody_is_waited_for() -> None:
    assert allgather_with_deadline(b"here", ALONE, timeout=1, board=None, doing="save 'x'") == [b"here"]
    main = threading.get_ident()
    assert run_in_order(threading.get_ident, ALONE, timeout=1, board=None, doing="save 'x'") == main


def test_a_payload_that_is_too_long_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="513 bytes, more than 512"):
        allgather_in_order(bytes(PAYLOAD_BYTES + 1), OF_THREE, "save 'x'")


def test_the_work_runs_in_another_thread_and_its_result_comes_back() -> None:
    notes = Memory()
    assert run_in_order(threading.get_ident, OF_THREE, timeout=60, board=notes, doing="x") != threading.get_ident()
    assert notes.put_names == []


def test_an_error_of_the_work_comes_as_it_is() -> None:
    def fail() -> None:
        raise KeyError("a mistake")

    with pytest.raises(KeyError, match="a mistake"):
        run_in_order(fail, OF_THREE, timeout=60, board=None, doing="x")


@pytest.mark.parametrize("code", ["UNKNOWN: Gloo AllGather failed", "UNAVAILABLE: gone", "INTERNAL: no"])
def test_a_connection_that_breaks_names_those_that_are_gone(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks.wait_at_most(monkeypatch, after_error=0.3)

    def fail() -> None:
        raise ValueError(code)

    with pytest.raises(ProcessFailedError, match=r"could not save 'x': process 0 broke off \(" + code) as raised:
        run_in_order(fail, OF_THREE, timeout=60, board=Memory(Counting(2)), doing="save 'x'")
    assert raised.value.processes == (0,)


def test_a_connection_that_breaks_is_named_too_where_nobody_is_known_to_be_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks.wait_at_most(monkeypatch, after_error=0.3)

    def fail() -> None:
        raise ValueError("UNAVAILABLE: gone")

    def all_give_signs(notes: Memory) -> None:
        for other in (first, second):
            other(notes)

    first, second = Counting(0), Counting(2)
    for notes in (None, Memory(all_give_signs)):
        with pytest.raises(ProcessFailedError, match=r"could not load 'x': another process broke off \(UNAV") as raised:
            run_in_order(fail, OF_THREE, timeout=60, board=notes, doing="load 'x'")
        assert raised.value.processes == ()


def test_jax_that_gives_up_first_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks.wait_at_most(monkeypatch, after_error=0.3)

    def fail() -> None:
        raise ValueError("UNKNOWN: Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out")

    with pytest.raises(TimedOutError, match="process 2 did not arrive before jax gave up") as raised:
        run_in_order(fail, OF_THREE, timeout=60, board=Memory(Counting(0)), doing="save 'x'")
    assert raised.value.missing == (2,)


def test_memory_that_is_short_is_no_failure_of_others() -> None:
    def fail() -> None:
        raise ValueError("RESOURCE_EXHAUSTED: out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        run_in_order(fail, OF_THREE, timeout=60, board=Memory(), doing="x")


def test_who_gives_no_sign_of_life_is_missing(absent: threading.Event) -> None:
    notes = Memory(Counting(2))
    notes.content[heartbeat_name(0)] = b"of an earlier run"
    error = refused(notes, absent)
    assert error.missing == (0,)
    assert str(error).startswith("could not save 'x': process 0 did not arrive within 0.5 s; find out what happened to")
    assert isinstance(error, TimeoutError)
    # Its own sign was there, and is gone.
    assert set(notes.put_names) == {heartbeat_name(1)}
    assert heartbeat_name(1) not in notes.content


def test_signs_of_life_differ_and_say_what_is_waited_for(absent: threading.Event) -> None:
    seen: list[bytes] = []
    refused(Memory(lambda notes: seen.append(notes.content[heartbeat_name(1)])), absent)
    assert len(set(seen)) > 1
    assert all(b"waits to save 'x'" in note for note in seen)


def test_all_wait_and_yet_do_not_meet(absent: threading.Event) -> None:
    def both(notes: Memory) -> None:
        for other in others:
            other(notes)

    others = [Counting(0), Counting(2)]
    error = refused(Memory(both), absent)
    assert error.missing == ()
    assert "all send heartbeats" in str(error)


def test_who_has_left_is_not_missing(absent: threading.Event) -> None:
    notes = Memory()
    notes.content[heartbeat_name(0)] = b"soon gone"
    others = iter([None, None])

    def leave(notes: Memory) -> None:
        if next(others, 0) == 0:
            notes.content.pop(heartbeat_name(0), None)

    notes._others = leave
    assert refused(notes, absent).missing == (2,)


@pytest.mark.parametrize("read_only", [False, True])
def test_without_notes_nobody_can_be_named(read_only: bool, absent: threading.Event) -> None:
    notes = Memory()
    notes.works = False
    error = refused(notes if read_only else None, absent)
    assert error.missing == ()
    assert "which, cannot be told: no messages can be left there" in str(error)


def test_what_was_left_behind_ends_before_anything_else_begins(absent: threading.Event) -> None:
    order: list[str] = []

    def first() -> None:
        absent.wait(60)
        order.append("first")

    with pytest.raises(TimedOutError):
        run_in_order(first, OF_THREE, timeout=0.2, board=None, doing="x")
    with pytest.raises(TimedOutError):
        run_in_order(lambda: order.append("never"), OF_THREE, timeout=0.2, board=None, doing="x")
    absent.set()
    run_in_order(lambda: order.append("last"), OF_THREE, timeout=60, board=None, doing="x")
    assert order == ["first", "last"]


def test_another_thread_waits_for_its_turn(absent: threading.Event) -> None:
    found: list[Any] = []
    begun = threading.Event()

    def first() -> None:
        begun.set()
        absent.wait(60)

    other = threading.Thread(
        target=lambda: found.append(run_in_order(first, OF_THREE, timeout=60, board=None, doing="x"))
    )
    other.start()
    assert begun.wait(60)
    with pytest.raises(TimedOutError):
        run_in_order(list, OF_THREE, timeout=0.2, board=None, doing="x")
    absent.set()
    other.join()
    assert found == [None]


def test_an_interrupt_ends_the_wait_at_once(absent: threading.Event) -> None:
    def interrupt() -> str:
        _thread.interrupt_main()
        return waiting(absent)()

    notes = Memory()
    with pytest.raises(KeyboardInterrupt):
        run_in_order(interrupt, OF_THREE, timeout=60, board=notes, doing="x")
    assert heartbeat_name(1) not in notes.content


def test_dtypes_are_those_of_the_caller() -> None:
    def dtype() -> Any:
        return jnp.asarray(1 << 40).dtype

    with jax.enable_x64(True):
        assert run_in_order(dtype, OF_THREE, timeout=60, board=None, doing="x") == "int64"


def let_meet(monkeypatch: pytest.MonkeyPatch, gathered: Callable[[bytes], list[bytes]]) -> None:
    """Let this function bring processes together from now on."""
    monkeypatch.setattr(allgather, "allgather", gathered)


def rows(*given_up: int, label: bytes = b"load 'x'") -> Callable[[bytes], list[bytes]]:
    """Return what brings these processes together, which have given up so many calls; the last is at ``label``."""

    def gathered(row: bytes) -> list[bytes]:
        labels = [b"load 'x'"] * (len(given_up) - 1) + [label]
        header = allgather._HEADER.pack
        return [header(count, len(at), 3) + at + b"abc" for count, at in zip(given_up, labels, strict=True)]

    return gathered


def test_processes_at_different_calls_are_told_and_meet_again(monkeypatch: pytest.MonkeyPatch) -> None:
    let_meet(monkeypatch, rows(2, 0, 2))
    with pytest.raises(TimedOutError, match="process 1 arrived at a call that the others had given up"):
        allgather_with_deadline(b"abc", OF_THREE, timeout=60, board=None, doing="load 'x'")
    assert allgather._order.given_up == 2
    let_meet(monkeypatch, rows(2, 2, 2))
    assert allgather_with_deadline(b"abc", OF_THREE, timeout=60, board=None, doing="load 'x'") == [b"abc"] * 3


def load(doing: str = "load '/mnt/a/x'", timeout: float = 60) -> list[bytes]:
    return allgather_with_deadline(b"abc", OF_THREE, timeout=timeout, board=None, doing=doing)


def test_calls_that_differ_are_told_and_counted_as_met(monkeypatch: pytest.MonkeyPatch) -> None:
    let_meet(monkeypatch, rows(0, 0, 0, label=b"remove steps of 'x'"))
    wanted = (
        r"could not load '/mnt/a/x': the calls differ: processes 0 and 1 came to load 'x', process 2 came to remove"
        r" steps of 'x'; all processes must make the same calls in the same order"
    )
    with pytest.raises(MismatchError, match=f"^{wanted}$"):
        load()
    assert allgather._order.given_up == 0
    let_meet(monkeypatch, rows(0, 0, 0))
    assert load() == [b"abc"] * 3
    assert load("load '/mnt/b/x'") == [b"abc"] * 3


def test_many_calls_that_differ_are_not_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(row: bytes) -> list[bytes]:
        header = allgather._HEADER.pack
        return [header(0, len(at), 3) + at + b"abc" for at in (b"load '%d'" % number for number in range(300))]

    let_meet(monkeypatch, gathered)
    with pytest.raises(
        MismatchError, match=r"process 3 came to load '3', others came to 296 other calls; all"
    ) as raised:
        allgather_with_deadline(b"abc", Processes(this=1, count=300), timeout=60, board=None, doing="load '1'")
    assert len(str(raised.value)) < 400


def test_a_long_name_counts_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []

    def gathered(row: bytes) -> list[bytes]:
        sent.append(row)
        return [row, sent[0], row]

    let_meet(monkeypatch, gathered)
    load(f"load '{'a' * 600}'")
    with pytest.raises(MismatchError, match=r"^could not load 'a+b': the calls differ"):
        load(f"load '{'a' * 599}b'")


@pytest.mark.parametrize("again", ["load 'x'", "load 'y'"])
def test_a_call_that_met_another_one_after_its_deadline_is_made_up_for(
    monkeypatch: pytest.MonkeyPatch, absent: threading.Event, again: str
) -> None:
    """What was left behind met the load of the others: this process's load of the same fails at once, as theirs did."""

    def late(row: bytes) -> list[bytes]:
        absent.wait(60)
        return [*rows(0, 0)(row), row]

    let_meet(monkeypatch, late)
    with pytest.raises(TimedOutError):
        load("remove steps of 'x'", timeout=0.2)
    assert allgather._order.given_up == 1
    absent.set()
    label = again.encode()
    let_meet(monkeypatch, lambda row: [allgather._HEADER.pack(0, len(label), 1) + label + b"+"])
    if again == "load 'x'":
        with pytest.raises(MismatchError, match="the calls differ"):
            load(again)
    assert load(again) == [b"+"]
    assert allgather._order.given_up == 0


def test_the_first_sign_comes_late_where_there_is_time() -> None:
    notes = Memory()
    soon = Latch()
    threading.Timer(0.3, soon.set).start()
    signs = Heartbeat(OF_THREE, notes, "x", 600)
    assert signs.wait(soon, float("inf"))
    signs.end()
    assert notes.put_names == []


def test_who_was_kept_from_running_looks_a_little_longer() -> None:
    signs = Heartbeat(OF_THREE, Memory(Counting(2)), "x", 0.8)
    assert not signs.wait(Latch(), 0.0)
    assert signs.silent() == (0,)


def test_where_no_folder_is_who_makes_it_has_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks.wait_at_most(monkeypatch, after_error=0.3)
    notes = PathMessageBoard(str(tmp_path / "ckpt"))

    def fail() -> None:
        raise ValueError("UNKNOWN: Gloo AllGather failed")

    with pytest.raises(ProcessFailedError, match="process 0 broke off") as failed:
        run_in_order(fail, OF_THREE, timeout=60, board=notes, doing="save 'x'", maker=0)
    assert failed.value.processes == (0,)
    absent = threading.Event()
    with pytest.raises(TimedOutError, match=r"process 0 did not arrive within 0\.2 s") as late:
        run_in_order(absent.wait, OF_THREE, timeout=0.2, board=notes, doing="save 'x'", maker=0)
    absent.set()
    assert late.value.missing == (0,)
    # Nobody is sure to make it, or it is there: nothing is said of process 0 that is not known.
    unsure = Heartbeat(OF_THREE, notes, "x", 0.8)
    assert not unsure.wait(Latch(), 0.0)
    assert unsure.silent() is None
    (tmp_path / "ckpt").mkdir()
    there = Heartbeat(OF_THREE, Memory(Counting(0)), "x", 0.8, maker=0)
    assert not there.wait(Latch(), 0.0)
    assert there.silent() == (2,)


def test_who_knew_first_and_left_is_not_the_one_who_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    notes = PathMessageBoard(str(folder))
    notes.put(heartbeat_name(0), b"here")
    signs = Heartbeat(OF_THREE, notes, "x", 0.8, maker=0)
    threading.Timer(0.3, notes.remove_all, [[heartbeat_name(0)]]).start()
    assert not signs.wait(Latch(), time.monotonic() + 0.6)
    assert signs.silent_after(0.2) == (2,)
    # Process 0 takes the folder along that it had made, if nothing is in it.
    signs.end()
    folder.rmdir()
    assert signs.silent_after(0.2) == (0, 2)


def test_a_folder_that_comes_late_hides_nobody_who_is_gone(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    notes = PathMessageBoard(str(folder))

    def make() -> None:
        folder.mkdir()
        notes.put(heartbeat_name(0), b"here")

    signs = Heartbeat(OF_THREE, notes, "x", 0.8, maker=0)
    timer = threading.Timer(0.2, make)
    timer.start()
    assert signs.silent_after(1.0) == (2,)
    timer.join()


def broken_for(this: int, notes: Any, monkeypatch: pytest.MonkeyPatch) -> ProcessFailedError:
    """What one of three processes raises, whose connection breaks; it is at its first call."""

    def fail() -> None:
        raise ValueError("UNKNOWN: Gloo AllGather failed")

    monkeypatch.setattr(allgather, "_order", allgather._CollectiveOrder())
    with pytest.raises(ProcessFailedError) as failed:
        run_in_order(fail, Processes(this=this, count=3), timeout=60, board=notes, doing="save 'x'")
    return failed.value


def test_those_that_heard_of_it_first_are_not_blamed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks.wait_at_most(monkeypatch, after_error=0.2)
    notes = PathMessageBoard(str(tmp_path))
    first = broken_for(1, notes, monkeypatch)
    assert first.processes == (0, 2)  # process 2 has not heard of it, and is elsewhere
    assert "one of processes 0 and 2 broke off: none sent a heartbeat" in str(first)
    second = broken_for(2, notes, monkeypatch)
    assert second.processes == (0,)
    assert "process 0 broke off (" in str(second)


def test_a_parting_word_of_another_call_is_no_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks.wait_at_most(monkeypatch, after_error=0.2)
    notes = PathMessageBoard(str(tmp_path))
    Heartbeat(Processes(this=1, count=3), notes, "x", 60, number=2).part()
    assert broken_for(2, notes, monkeypatch).processes == (0, 1)


def test_a_parting_word_stays_until_the_next_call(tmp_path: Path) -> None:
    notes = PathMessageBoard(str(tmp_path))
    signs = Heartbeat(OF_THREE, notes, "x", 60, number=1)
    assert signs.silent_after(0.0) == (0, 2)
    signs.part()
    signs.end()
    assert notes.get(heartbeat_name(1)) is not None
    assert stale_messages([heartbeat_name(1)], lambda attempt: True, notes.get) == (heartbeat_name(1),)


class Clock:
    """A clock that only sleeping moves, and when messages were put by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.put_at: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pauses(self) -> list[float]:
        return [later - sooner for sooner, later in itertools.pairwise(self.put_at)]

    def wait(self, seconds: float) -> bool:
        """Wait as a latch does that is never set."""
        self.now += seconds
        return False

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize(("count", "every"), [(2, 1.25), (256, 1.25), (512, 2.5), (4096, 2.5)])
def test_no_name_is_put_twice_a_second_and_many_put_theirs_rarely(
    monkeypatch: pytest.MonkeyPatch, count: int, every: float
) -> None:
    clock = Clock(monkeypatch)
    notes = Memory()
    monkeypatch.setattr(notes, "put", lambda name, data: clock.put_at.append(clock.now))
    signs = Heartbeat(Processes(this=1, count=count), notes, "x", 600)
    assert not signs.wait(cast("Latch", clock), 60.0)
    assert clock.pauses() == pytest.approx([every] * len(clock.pauses()))
    assert 59 / every - 2 < len(clock.pauses()) < 59 / every
    clock.now += every
    assert signs.silent_after(timing.current.after_error) is not None
    assert min(clock.pauses()) >= 1.0


def test_slow_messages_make_nobody_silent() -> None:
    """Eight living processes look at each other after an error, and reading the messages of all takes long."""

    class Slow(Memory):
        def put(self, name: str, data: bytes) -> None:
            time.sleep(0.02)
            super().put(name, data)

        def get(self, name: str) -> bytes | None:
            time.sleep(0.02)
            return super().get(name)

    notes = Slow()
    named: dict[int, tuple[int, ...] | None] = {}
    meeting = threading.Barrier(8)

    def look(this: int) -> None:
        signs = Heartbeat(Processes(this=this, count=8), notes, "x", 600)
        meeting.wait()
        named[this] = signs.silent_after(0.2)
        signs.end()

    threads = [threading.Thread(target=look, args=(this,)) for this in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert named == dict.fromkeys(range(8), ())


def test_a_process_that_gave_a_sign_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error each process looks at those that are silent, not ten times a second at all of them."""
    clock = Clock(monkeypatch)
    living = [Counting(number) for number in range(2, 100)]
    looked: list[str] = []

    class Watched(Memory):
        def get(self, name: str) -> bytes | None:
            looked.append(name)
            for alive in living:
                alive(self)
            return super().get(name)

    notes = Watched()
    signs = Heartbeat(Processes(this=1, count=100), notes, "x", 600)
    assert signs.silent_after(2.0) == (0,)
    assert clock.now >= 2.0
    assert max(looked.count(heartbeat_name(number)) for number in range(2, 100)) == 2
    assert looked.count(heartbeat_name(0)) > 10


def test_trees_without_jax_arrays_ask_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.answer(monkeypatch, jax, "process_count", 7)
    assert this_processes([1, "a", None, [], object()]) == ALONE
    assert this_processes([1, jnp.ones(2)]).count == 7
    assert this_processes([jax.random.key(0)]).count == 7
    faults.answer(monkeypatch, jax.distributed, "is_initialized", True)
    assert this_processes([]).count == 7
