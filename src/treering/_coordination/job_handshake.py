"""Joint saves are counted: all processes know the name of the next one without a word.

At the first one the processes agree on a random name of the job, and that they all see the same folder. After that
call number 7 of one process is call number 7 of every other. Where one has missed a call, it takes the number of
process 0 when both next save to a path for the first time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, Self, TypeVar

import jax

from treering._codec.documents import json_text, parse_json
from treering._coordination.allgather import PAYLOAD_BYTES, allgather_in_order, give_up, look_for_saves, run_in_order
from treering._coordination.message_board import MessageBoard, PathMessageBoard
from treering._coordination.messages import Failure, VoteMessage, VoteStage
from treering._coordination.operations import Call, derive_attempt
from treering._store.failures import naming
from treering._store.resolve import located, opened_store, remove_made, resolved, store_at
from treering._values import timing
from treering._values.checkpoint_names import arrival_name, attempt_of_message, heartbeat_name, step_of_name
from treering._values.processes import Processes, format_processes
from treering.errors import (
    CorruptError,
    MismatchError,
    NotSharedError,
    ProcessFailedError,
    TimedOutError,
    TreeringError,
)

T = TypeVar("T")

_TRIES: Final = 5
_REMOVALS: Final = 50
_TOLD_SECONDS: Final = 2.0
"""Twice the seconds that process 0 stays for the others to read that it was interrupted."""

_LOOKS: Final = 3

_UNSEEN: Final = b"unseen"
_GIVEN_UP: Final = re.compile(rb"call (\d{1,18}) is given up ")
# What any message of these meetings ends with: whose it is, in which call.
_OF_CALL: Final = re.compile(rb"([0-9a-f]{16}) (\d{1,18})\Z")


class _Job:
    """What this process knows of its job.

    Attributes:
        device: one of jax's; another one stands for another job.
        processes: which one this is, of how many.
        own_name: what this process is called; the job is called as its process 0 is.
        names: what each process is called; empty until all have told.
        name: what all have agreed to call it; None until they have.
        shared: whether all have seen the same folder.
        number: how many joint saves this process has begun.
        ahead: by how much more process 0 has counted; less than nothing where it has missed some.
        places: of each path that this process has saved to, the hash.
        open: the save that was counted, until somebody else sees to it that the others hear of its end.
        told: the folder and the attempt of each save that ended here before it was counted, of which messages may lie.
        tell: tells the others of a save that this process takes no part in it.
        lock: held while those are changed.
    """

    def __init__(self, device: jax.Device, processes: Processes) -> None:
        self.device = device
        self.processes = processes
        self.own_name = secrets.token_hex(8)
        self.names: list[bytes] = []
        self.name: str | None = None
        self.shared = False
        self.number = 0
        self.ahead = 0
        self.places: set[int] = set()
        self.open: Call | None = None
        self.told: list[tuple[Path, str]] = []
        self.tell: Callable[[Path, Call, BaseException], None] = lambda *_: None
        self.lock = threading.Lock()

    def begin(self, place: Path | None, *, timeout: float, doing: str) -> Call:
        """Count a joint save to a place, if that is known, and return it, though the job may have no name yet."""
        key = hash(place)  # where two have one, the second is not known to be a first save: that is safe
        with self.lock:
            begun = self.number + 1
            fresh = place is not None and key not in self.places
            call = Call(
                job=self.name or "", number=begun + self.ahead, processes=self.processes, timeout=timeout,
                doing=doing, begun=begun, fresh=fresh,
            )  # fmt: skip
            self.places.add(key)
            self.open = call if self.shared else None  # else the meeting tells the others
            self.number = begun  # last: an interrupt before it is one before the save was counted
            return call

    def agree(self, failure: bytes, doing: str) -> bytes:
        """Agree on the name, if that is not done; return what process 0 failed at."""
        if self.name is not None:
            return b""
        said = allgather_in_order(self.own_name.encode() + failure, self.processes, doing)
        self.names = [name[: len(self.own_name)] for name in said]
        self.name = self.names[0].decode()
        return said[0][len(self.own_name) :]

    def compare(self, seen: bytes, doing: str) -> list[bytes]:
        """Bring together who sees the folder; return what each process says."""
        said = allgather_in_order(seen, self.processes, doing)
        self.shared = not any(said)
        return said

    def look_for_save(self, board: MessageBoard, doing: str) -> Callable[[], None]:
        """Return what looks, while this process waits for others, whether they are in a save that it has not begun.

        Before it believes that it is asked more than once: who has just ended this call may be in that save already.

        Args:
            board: the messages of this process's call.
            doing: what that is.
        """
        found = 0

        def look() -> None:
            nonlocal found
            if self.name is None or not isinstance(board, PathMessageBoard):
                return
            this, number = self.processes.this, self.number + self.ahead + 1
            note = find_note(located(board.path), derive_attempt(self.name, number), this)
            found = 0 if note is None else found + 1
            if note is not None and found >= _LOOKS:
                saver, path = note
                what = f"process {saver} came to save {path.name!r}, process {this} came to {doing}"
                hint = "all processes must make the same calls in the same order"
                error = MismatchError(f"could not {doing}: the calls differ: {what}", hint=hint)
                call = self.begin(resolved(path), timeout=_TOLD_SECONDS, doing=f"save {os.fspath(path)!r}")
                self.open = None
                self.tell(path, call, MismatchError(f"the calls differ: {what}", hint=hint))
                raise error

        return look


_latest_job = functools.lru_cache(maxsize=1)(_Job)
_lock: Final = threading.Lock()


def next_sequence(path: Path, processes: Processes, *, timeout: float, doing: str) -> Call:
    """Count a joint save of this process and return it; the first one lets all processes agree on the job's name.

    Args:
        path: the folder that is saved into. Process 0 makes it, if it is missing, at the first call.
        processes: those of the job, more than one.
        timeout: seconds to wait for the others.
        doing: what the caller is about to do, as in ``"save '/runs/7'"``.

    Raises:
        TimedOutError: others did not come in time.
        ProcessFailedError: another process broke off.
        NotSharedError: not all processes see the same folder at the path; ``processes`` holds those that do not see
            what process 0 writes.
        StoreError: process 0 cannot write there.
        MismatchError: others are about to do something else.
    """
    job = _job_of(processes)
    look_for_saves(job.look_for_save)
    call = job.begin(resolved(path), timeout=timeout, doing=doing)
    if job.name is None or not job.shared:
        try:
            with _JobHandshake(job, call.number, path, timeout, doing) as meeting:
                meeting.agree()
                if not job.shared:
                    meeting.compare()
        except MismatchError:  # of other calls of the others, which have not counted it
            with job.lock:
                job.ahead -= 1
            raise
    if job.name is None:
        raise RuntimeError("the job has no name")
    job.open = call = dataclasses.replace(call, job=job.name)
    return call


def release(call: Call) -> None:
    """Leave it to the caller to tell the others how a counted save ends: `counted_save` does so until then."""
    job = _job_of(call.processes)
    found = job.open  # read once: another thread may end its own save meanwhile
    if found is not None and found.begun == call.begun:
        job.open = None


def renumber(call: Call, number: int) -> Call:
    """Return a save of this process as process 0 counts it, and count those that follow as it does."""
    job = _job_of(call.processes)
    with job.lock:
        job.ahead = number - call.begun
    return dataclasses.replace(call, number=number)


def _job_of(processes: Processes) -> _Job:
    with _lock:  # after ``jax.distributed`` was begun anew, it is another job
        return _latest_job(jax.devices()[0], processes)


@contextlib.contextmanager
def counted_save(
    processes: Processes,
    path: Callable[[], Path],
    *,
    doing: str,
    tell: Callable[[Path, Call, BaseException], None],
    saves: Callable[[], bool] = lambda: True,
) -> Iterator[None]:
    """Count a joint save that ends before `next_sequence` has counted it, and tell the others how it ended.

    The others have counted theirs: without that all later saves of this process would have another number. Once a
    save is counted, its end is told here until `release`.

    Args:
        processes: those that save; where it is one alone, nothing is counted.
        path: returns the folder that is saved into, as far as the caller's arguments say.
        doing: what the caller is about to do.
        tell: tells the others what ended it.
        saves: tells whether the others save here, as far as this process knows when it fails.
    """
    if processes.count == 1:
        yield
        return
    job = _job_of(processes)
    job.tell = tell
    before = job.number
    try:
        yield
    except BaseException as error:  # an interrupt too: no later save would meet those of the others
        was_counted = job.number != before
        if not was_counted and not saves():
            raise
        # Where an argument has no meaning, the others mostly have an error of their own: no time is lost with it.
        seconds = 0.0 if isinstance(error, Exception) else _TOLD_SECONDS
        place: Path | None = None
        with contextlib.suppress(Exception):  # it is no path, and `error` says so
            place = resolved(path())
        call = job.open if was_counted else job.begin(place, timeout=seconds, doing=doing)
        job.open = None
        if not was_counted and not job.shared:
            give_up()  # the others may wait in the meeting that the first save begins with
        elif (
            call is not None and call.begun > before and place is not None
            and not isinstance(error, TimedOutError | ProcessFailedError | MismatchError)  # they know of those
        ):  # fmt: skip
            call = dataclasses.replace(call, timeout=seconds)
            job.told.append((place, call.attempt))
            tell(place, call, error)
        raise


def remove_told(processes: Processes) -> None:
    """Remove what this process told the others of saves that ended early: a later one has ended, so all have heard."""
    job = _job_of(processes)
    while job.told:
        place, attempt = job.told.pop()
        with contextlib.suppress(OSError, TreeringError), opened_store(place) as store:
            names = store.names()
            store.remove(*(mine := [name for name in names if attempt_of_message(name) == attempt]))
            if len(mine) == len(names):
                store.remove("")  # it was made for them


class _JobHandshake:
    """The first call of a job: on its name, and on the folder."""

    def __init__(self, job: _Job, number: int, path: Path, timeout: float, doing: str) -> None:
        self._job = job
        self._number = number
        self._path = path
        self._shown = os.fspath(path)
        self._timeout = timeout
        self._look_seconds = min(timeout, timing.current.handshake_look)
        self._doing = doing
        self._is_coordinator = job.processes.is_coordinator
        self._transaction = store_at(path).transaction()
        self._made: Sequence[str] = ()
        self._failed: TreeringError | None = None
        self._board = _SignedMessageBoard(path)
        if not self._is_coordinator:
            self._sign()

    def __enter__(self) -> Self:
        if self._is_coordinator:
            try:
                with naming(self._shown, "write"):
                    self._begin()
            except TreeringError as error:
                remove_made(self._made)
                self._failed = error
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._failed is not None:
            return
        name = heartbeat_name(self._job.processes.this)
        jax_gave_up = not self._is_coordinator and isinstance(error, TimedOutError) and error.__cause__ is not None
        if jax_gave_up or isinstance(error, ProcessFailedError):
            return  # this process has left a message that says so, for those that hear of it later
        if isinstance(error, TimedOutError) or not isinstance(error, Exception | None):
            # Whoever comes late finds it and does not wait for this process; the next save sweeps it.
            self._sign()
            with contextlib.suppress(OSError):
                self._transaction.make()
                self._board.put(name, b"call %d is given up " % self._number)
            return
        with contextlib.suppress(OSError):
            PathMessageBoard(self._path).remove_all((name,))
        if error is not None:
            # Once those who have seen the folders have taken their signs of life along.
            for _ in range(_REMOVALS):
                if remove_made(self._made):
                    return
                time.sleep(timing.current.handshake_pause)

    def agree(self) -> None:
        """Agree on the job's name.

        Raises:
            TreeringError: another process did not come, or process 0 cannot write.
        """
        work = functools.partial(self._job.agree, self._failure(), self._doing)
        self._raise(self._in_step(work, self._timeout))

    def compare(self) -> None:
        """Make sure that all processes see what process 0 writes.

        Raises:
            NotSharedError: some do not.
            TreeringError: another process did not come, or process 0 cannot write.
        """
        if self._is_coordinator:
            own = self._failure()
            if self._failed is None:
                self._require_others()
                self._sign()  # from here on its message is the mark
                with contextlib.suppress(OSError):  # the sign of life that follows tries again
                    self._mark()
        else:
            own = b"" if self._sees_mark() else _UNSEEN
        work = functools.partial(self._job.compare, own, self._doing)
        # Those that see nothing come when they have looked long enough.
        failed, *others = self._in_step(work, self._timeout + self._look_seconds)
        self._raise(failed)
        if unseen := tuple(number for number, said in enumerate(others, 1) if said):
            verb = "does" if len(unseen) == 1 else "do"
            what = f"{format_processes(unseen)} {verb} not see what process 0 writes"
            hint = "use a file system that all processes share"
            error = NotSharedError(f"could not {self._doing}: {what}", hint=hint)
            error.processes = unseen
            raise error

    def _in_step(self, work: Callable[[], T], timeout: float) -> T:
        # Where the others find no folder, it is process 0 that has not come.
        job, maker = self._job, None if self._is_coordinator else 0
        return run_in_order(work, job.processes, timeout=timeout, board=self._board, doing=self._doing, maker=maker)

    def _raise(self, failed: bytes) -> None:
        """Raise what process 0 failed at, if it did."""
        if failed and self._failed is not None:
            raise self._failed
        if failed:
            what = "the message of process 0"
            failure = Failure.from_node(parse_json(failed.decode(), what), what)
            raise failure.to_error(f"process 0 could not {self._doing}", (0,))

    def _failure(self) -> bytes:
        """Return what this process failed at, if it did, as it fits beside a name."""
        failure = None if self._failed is None else Failure.of(self._failed).fit(PAYLOAD_BYTES - 16)
        return b"" if failure is None else json_text(failure.to_node()).encode()

    def _begin(self) -> None:
        """Make the folder and leave the mark in it."""
        for tries_left in reversed(range(_TRIES)):
            self._made = self._transaction.make()
            try:
                self._mark()
            except FileNotFoundError:  # another saver failed, and has removed what it had made
                if not tries_left:
                    raise
            else:
                return

    def _require_others(self) -> None:
        """See that no other process had given up this call, when this one came to it.

        Raises:
            TimedOutError: some had.
        """
        gone: list[int] = []
        for number in self._job.processes.others:
            with contextlib.suppress(OSError):  # not to be read is not to be known
                said = self._board.get(heartbeat_name(number)) or b""
                of = _OF_CALL.search(said)
                left = self._number + (_GIVEN_UP.match(said) is None)
                if of is not None and of[1] == self._job.names[number] and int(of[2]) >= left:
                    gone.append(number)
        if gone:
            give_up()
            what = f"{format_processes(gone)} had given up before this process arrived"
            raise TimedOutError(f"could not {self._doing}: {what}", missing=tuple(gone))

    def _sign(self) -> None:
        """Tag the messages from here on with this process and the call."""
        self._board.signature = b"%s %d" % (self._job.own_name.encode(), self._number)

    def _mark(self) -> None:
        self._board.put(heartbeat_name(0), b"")

    def _sees_mark(self) -> bool:
        """Look for the mark of process 0; whether it is there.

        Raises:
            TimedOutError: process 0 has given up this call.
        """
        mark = (self._job.name or "").encode()
        deadline = time.monotonic() + self._look_seconds
        refreshed = time.monotonic()
        while True:
            found = None
            with contextlib.suppress(OSError):  # not to be read is not to be seen
                found = self._board.get(heartbeat_name(0))
            if found is not None and mark in found:
                if (given_up := _GIVEN_UP.match(found)) is None:
                    return True
                if int(given_up[1]) >= self._number:  # else it is of an earlier call, and process 0 is on its way
                    give_up()
                    raise TimedOutError(f"could not {self._doing}: process 0 had given up before this process arrived")
            if (now := time.monotonic()) >= deadline:
                return False
            if now >= refreshed + timing.current.refresh:
                # Whereupon the client of a network file system forgets that a name was not there.
                with contextlib.suppress(OSError):
                    opened_store(self._path.parent, quick=True).close()
                refreshed = now
            time.sleep(timing.current.handshake_pause)


class _SignedMessageBoard(PathMessageBoard):
    """Messages tagged with the job and the call, so that signs of life of process 0 are its mark as well.

    Attributes:
        signature: what they end with.
    """

    signature = b""

    def put(self, name: str, data: bytes) -> None:
        """Put the message with the signature."""
        super().put(name, data + self.signature)

    def remove_all(self, names: Collection[str]) -> None:
        """Leave it until the call's end: process 0 may yet have to read in it which call that is."""


_LEAVING: Final = (0, 1)
"""The processes that leave notes: whoever looks reads one or two, however many there are."""


@contextlib.contextmanager
def leave_note(call: Call, path: Path, pause: Callable[[float], None]) -> Iterator[Callable[[float], None]]:
    """Give what sleeps in place of ``pause`` while a process waits for others in the save of a step.

    Args:
        call: the save.
        path: the folder of the step; where it is that of no run, no note is left.
        pause: sleeps.
    """
    if call.processes.this not in _LEAVING or step_of_name(path.name) is None:
        yield pause
        return
    board, name = PathMessageBoard(path.parent), arrival_name(call.attempt, call.processes.this)
    due: float | None = time.monotonic() + min(timing.current.heartbeat_first, call.timeout / 8)

    def sleep(seconds: float) -> None:
        nonlocal due
        if due is not None and time.monotonic() >= due:
            due = None
            message = VoteMessage(stage=VoteStage.PREPARING, who=call.who, payload=path.name.encode())
            with contextlib.suppress(OSError):
                board.put(name, message.encode())
        pause(seconds)

    try:
        yield sleep
    finally:
        if due is None:
            with contextlib.suppress(OSError):
                board.remove_all((name,))


def find_note(folder: Path, attempt: str, this: int) -> tuple[int, Path] | None:
    """Return which process waits in a save of an attempt, and where; None if none says so.

    Args:
        folder: that of a run, or of a step.
        attempt: the attempt.
        this: the process that asks.
    """
    run = folder if step_of_name(folder.name) is None else folder.parent
    for saver in _LEAVING:
        data = None
        with contextlib.suppress(OSError):
            data = PathMessageBoard(run).get(arrival_name(attempt, saver)) if saver != this else None
        with contextlib.suppress(CorruptError, UnicodeDecodeError):
            if data is not None and step_of_name(name := VoteMessage.decode(data).payload.decode()) is not None:
                return saver, run / name
    return None
