"""Programs beside a training: leases that keep steps from being removed, and the steps one by one as they are saved.

A lease is a small document, and counts for some seconds after it was written, by the clock of the store alone. Who
removes says first that a step goes, then looks for leases; who holds writes the lease first, then looks whether the
step goes. So one of the two sees the other. ``docs/design/runs.md`` says it at length. jax is not needed here.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import math
import os
import secrets
import socket
import threading
import time
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from treering import errors
from treering._codec.key_document import HEAD_BYTES
from treering._format.document import read_digest
from treering._format.run_document import (
    HandedSteps,
    StepRecord,
    encode_handed,
    encode_lease,
    parse_handed,
    parse_lease,
)
from treering._printable import printable
from treering._runs.folder import NOT_READ, RunFolder
from treering._runs.results import StepCommit
from treering._runs.steps import document_in, missing_step, open_run, read_record, step_path, steps_of
from treering._store.api import Closable, Entry, Outcome, Store, open_below
from treering._store.crew import Latch, Waiters
from treering._store.failures import naming, with_errno
from treering._store.resolve import store_at
from treering._values import timing
from treering._values.checkpoint_names import HANDED_DOCUMENT, LEASES, is_message, lease_name, lease_of_name
from treering._values.telemetry import LOGGER
from treering._view.run_text import when_text

if TYPE_CHECKING:
    import asyncio

LONGEST_LEASE: Final = 86_400
"""No lease counts for more seconds after it was written."""

NOT_CALLED: Final = "on_commit was not called for it yet"
"""Why such a step stays."""

_MOST: Final = 10_000
_LARGEST: Final = 4096
_LARGEST_RECORD: Final = 1 << 20
_LONGEST_NAME: Final = 200
_TRIES: Final = 20
_SECONDS: Final = 60.0
_UNKNOWN: Final = "xxh3-128:" + "0" * 32
_ENDED: Final = "this lease has ended\n"


class _Found(NamedTuple):
    """A lease that is there."""

    step: int
    until: float
    entry: Entry


# ----------------------------------------------------------------------------------------------- who removes looks here


def held_steps(run: RunFolder, steps: Collection[int] | None = None) -> dict[int, str]:
    """Return the steps that somebody holds, of some or of all, each with who does, and until when; nothing changes.

    Leases that have expired and were not ended yet are among them: the clock of the store is not asked for it.
    """
    with _opened(run) as place:
        return {} if place is None else _describe(place, _leases(place), steps)


def held_in(path: Path) -> dict[int, str]:
    """Return the steps of the run at a path that somebody holds, as `held_steps`; none where no run is."""
    with contextlib.suppress(errors.NotFoundError), RunFolder(path) as run:
        return held_steps(run)
    return {}


def uncalled_steps(run: RunFolder, steps: Collection[int]) -> dict[int, str]:
    """Return those of the steps for which ``on_commit`` is yet to be called, as the run's folder says, each with why.

    Raises:
        FormatError: a newer version wrote for which steps it was called.
        StoreError: the system refuses.
    """
    with naming(os.fspath(run.path / HANDED_DOCUMENT), "read"), contextlib.suppress(errors.CorruptError):
        if steps and (found := run.store.read(HANDED_DOCUMENT, _LARGEST_RECORD)) is not None:
            through = parse_handed(found.data).through
            return {step: NOT_CALLED for step in steps if step > through}
    return {}


def end_leases(run: RunFolder, steps: Collection[int] = (), *, force: Collection[int] = ()) -> dict[int, str]:
    """Return those of the steps that are held, as `held_steps`; leases that have expired end for good.

    Args:
        run: the run's folder.
        steps: the steps; the leases on others that have not expired are not described.
        force: the steps whose leases end whether they have expired or not.

    Raises:
        StoreError: the system refuses, or more names are there than leases could be.
    """
    with _opened(run) as place:
        if place is None or not (found := _leases(place)):
            return {}
        now = place.transaction().now()
        live = []
        for lease in found:
            # Who renews it meanwhile wins or loses: both go by its version.
            # Of one from far ahead, the clock was wrong when it was written.
            over = not lease.entry.modified - LONGEST_LEASE <= now < lease.until or lease.step in force
            if not over or not _end(place, lease.entry):
                live.append(lease)
        return _describe(place, live, steps)


def leave_leases(run: RunFolder) -> None:
    """Take the stamp away where no lease is left, so that every version removes steps again."""
    with _opened(run) as place:
        if place is not None and _leases(place):
            return
        if place is not None:  # before the stamp, without which nobody would come by again
            place.remove(*(name for name in place.names() if is_message(name)))
            place.remove("")
    with naming(os.fspath(run.path), "look for leases in"):
        run.unstamp()
        with _opened(run) as place:
            if place is not None and _leases(place):  # somebody has begun to hold a step meanwhile
                run.stamp()


def held_error(step: int, by: str, shown: str) -> errors.BusyError:
    """Return the error that a step is not removed because somebody holds it."""
    what = f"step {step} of {shown!r} is not removed: it is {by}"
    return with_errno(errors.BusyError(what, hint="release it there, or wait until the lease ends"), errno.EBUSY, shown)


@contextlib.contextmanager
def _opened(run: RunFolder) -> Iterator[Store | None]:
    with (
        naming(os.fspath(run.path), "look for leases in"),
        run.open_folder(LEASES) or contextlib.nullcontext() as place,
    ):
        yield place


def _leases(place: Store) -> list[_Found]:
    found = []
    for entry in place.list():
        if (known := lease_of_name(entry.name)) is not None and entry.is_file:
            found.append(_Found(known[0], entry.modified + known[1], entry))
            if len(found) > _MOST:
                raise OSError(errno.EFBIG, f"more than {_MOST:,} leases are there; remove those that nobody needs")
    return found


def _describe(place: Store, leases: Collection[_Found], steps: Collection[int] | None) -> dict[int, str]:
    # Of several on a step the one that ends last.
    last = {lease.step: lease for lease in sorted(leases) if steps is None or lease.step in steps}
    return {step: f"held by {_holder(place, one)} until {when_text(one.until)}" for step, one in last.items()}


def _holder(place: Store, lease: _Found) -> str:
    try:
        document = place.read(lease.entry.name, _LARGEST)
        return "somebody" if document is None else printable(parse_lease(document.data))[:_LONGEST_NAME]
    except NOT_READ:
        return "somebody"


def _end(place: Store, entry: Entry) -> bool:
    """End a lease of that version; False where it was renewed meanwhile."""
    data = f"{secrets.token_hex(16)} {_ENDED}".encode()
    try:
        done = place.replace(entry.name, data, entry.version) is Outcome.DONE
    except FileNotFoundError:
        return True
    except BlockingIOError:  # its holder was stopped while it renewed it
        return False
    if done or place.find(entry.name) is None:
        place.remove(entry.name)
        return True
    return False


# --------------------------------------------------------------------------------------------------------- who holds


class Lease:
    """A lease on a step, which keeps it from being removed until it is released or expires: a context manager.

    ``Run.hold`` returns it. A thread renews it three times in its seconds. A process that is killed, or stands still
    for longer, loses it; ``renew`` tells.

    Attributes:
        step: the step.
        path: the path of its checkpoint.
        lost: whether the lease is known to have ended before it was released.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> with tr.Run(os.path.join(tempfile.mkdtemp(), "run"), keep=tr.KeepLast(1)) as run:
        ...     run.save(1, {"w": 1.5}).result()
        ...     with run.hold(1) as lease:
        ...         run.save(2, {"w": 1.25}).result()
        ...         lease.renew()
        ...         run.steps()
        ...     run.save(3, {"w": 1.0}).result()
        [1, 2]
        >>> run.steps()
        [3]
    """

    def __init__(self, run: Path, step: int, seconds: int, head: tuple[int, bytes]) -> None:
        self.step = step
        self.path = step_path(run, step)
        self.lost = False
        self._run = run
        self._seconds = seconds
        self._head = head
        self._name = lease_name(step, seconds, secrets.token_hex(8))
        self._said = b""
        self._version: object = None
        self._changing = threading.Lock()
        self._over = Latch()

    def renew(self) -> None:
        """Let the lease count for its seconds again, from now on.

        Raises:
            LeaseLostError: it has ended, and what it was for may be removed or was saved anew.
            ClosedError: it was released.
            StoreError: the system refuses; the lease counts as long as it did.
        """
        with self._changing, naming(os.fspath(self.path), "renew the lease on"):
            if self._over.is_set():
                raise errors.ClosedError(
                    f"the lease on step {self.step} was released", hint="run.hold(step) begins another"
                )
            if self.lost:
                raise self._lose("it has ended")
            with RunFolder(self._run) as run:
                try:
                    with open_below(run.store, LEASES) as place:
                        renewed = self._renew(place)
                except (errors.NotFoundError, FileNotFoundError):
                    renewed = False
                if not renewed:
                    raise self._lose("it expired before it was renewed, and was ended")
                if run.read_head(self.step) != self._head:
                    raise self._lose("the step was removed, or saved anew")
                run.stamp()

    def release(self) -> None:
        """End the lease. May be called twice; one that cannot be removed now ends by itself."""
        if self._over.is_set():
            return
        self._over.set()
        try:
            with self._changing, naming(os.fspath(self.path), "release"), RunFolder(self._run) as run:
                self._remove(run)
                leave_leases(run)
        except (errors.TreeringError, OSError) as error:
            LOGGER.warning("the lease on %s was not removed, and ends by itself: %s", self.path, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def begin(self, run: RunFolder) -> None:
        """Write the lease, and then prove that nobody who removes the step can have overlooked it.

        Raises:
            NotFoundError: the step has gone meanwhile.
            BusyError: it is about to go.
        """
        self._create(run)
        try:
            self._prove(run)
            pause = self._seconds * timing.current.lease_share
            # One call of C starts and counts it; `threading.Thread.start` hangs after an interrupt in it.
            _thread.start_new_thread(_renew_often, (weakref.ref(self), self._over, pause))
        except BaseException:  # an interrupt too: nobody would release it; raised again below
            with contextlib.suppress(OSError, errors.TreeringError):
                self._remove(run)
                leave_leases(run)
            raise

    def _create(self, run: RunFolder) -> None:
        self._said = encode_lease(self.step, _this_process())
        for _ in range(_TRIES):
            run.stamp()
            place = run.store.at(LEASES)
            place.transaction().make()
            with contextlib.suppress(FileNotFoundError):  # who released the last lease has removed the folder
                place.open()
                with place:
                    place.create(self._name, [self._said], len(self._said))
                    place.flush()
                    self._version = self._written(place)
                return
        raise OSError(errno.EAGAIN, f"others remove {LEASES!r} again and again")

    def _prove(self, run: RunFolder) -> None:
        end = time.monotonic() + timing.current.hold_patience
        while True:
            run.stamp()
            listed = {record.step: record.digest for record in document_in(run.read_document()).steps}
            gone = self.step in run.superseded_steps()
            if gone or run.read_head(self.step) != self._head:
                raise missing_step(self._run, self.step, run.steps())
            digest = read_digest(self._head[1])
            if listed.get(self.step) == digest or digest is None:
                return
            # Not noted yet, or about to be removed; the newest is never removed by a rule.
            if time.monotonic() >= end:
                if run.latest() == self.step:
                    return
                what = f"step {self.step} of {os.fspath(self._run)!r} is not in run.json: somebody may be removing it"
                raise errors.BusyError(what, hint="the next save, or `treering gc --yes`, notes or removes it")
            time.sleep(timing.current.hold_pause)

    def _renew(self, place: Store) -> bool:
        for _ in range(2):
            before, self._said = self._said, encode_lease(self.step, _this_process())
            outcome = place.replace(self._name, self._said, self._version)
            if outcome is Outcome.DONE:
                self._version = self._written(place)
                return True
            # The answer to an earlier try may have been lost, and that one counts.
            found = place.read(self._name, _LARGEST)
            if found is None or found.data not in (before, self._said):
                return False
            self._version = found.version
            if found.data == self._said:
                return True
            self._said = before
        raise OSError(errno.EIO, "no answer came")

    def _written(self, place: Store) -> object:
        found = place.read(self._name, _LARGEST)
        if found is None or found.data != self._said:
            raise self._lose("another process changed it")
        return found.version

    def _remove(self, run: RunFolder) -> None:
        with _opened(run) as place:
            if place is not None:
                place.remove(self._name)

    def _lose(self, why: str) -> errors.LeaseLostError:
        self.lost = True
        what = f"the lease on step {self.step} of {os.fspath(self._run)!r} is lost: {why}"
        return errors.LeaseLostError(what, hint="run.hold(step) begins another, if the step is still there")


def hold_step(path: Path, shown: str, step: int, seconds: Any) -> Lease:
    """Return a lease on a step; ``Run.hold`` says more."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 1 <= seconds <= LONGEST_LEASE:
        raise errors.UnsupportedError(f"seconds is {seconds!r:.100}", hint=f"leases last 1 to {LONGEST_LEASE} seconds")
    try:
        with naming(os.fspath(step_path(path, step)), "hold"), open_run(path) as run:
            if (head := run.read_head(step)) is None or step in run.superseded_steps():
                raise missing_step(shown, step, run.steps())
            lease = Lease(path, step, int(seconds), head)
            lease.begin(run)
            return lease
    except errors.NotFoundError as error:
        raise missing_step(shown, step, steps_of(path)) from error


def _renew_often(lease: weakref.ref[Lease], over: Latch, pause: float) -> None:
    """Renew a lease until it is over; one that nobody refers to any more ends by itself."""
    while not over.wait(pause):
        if (held := lease()) is None:
            return
        try:
            held.renew()
        except errors.ClosedError:
            return
        except (errors.TreeringError, OSError) as error:
            LOGGER.warning("%s", error)
            if isinstance(error, errors.LeaseLostError):
                return  # any other is tried again, and the lease counts until it expires
        del held


def _this_process() -> str:
    return f"{socket.gethostname()[:_LONGEST_NAME]} (process {os.getpid()})"


# --------------------------------------------------------------------------------------------------------- who watches


class StepWatch(Closable):
    """The steps of a run as they become durable: an iterator, also for ``async for``, and a context manager.

    ``Run.watch`` returns it, and says which steps it yields.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> with tr.Run(os.path.join(tempfile.mkdtemp(), "run")) as run:
        ...     saved = [run.save(step, {"w": 1.5}) for step in (1, 2)]
        >>> list(run.watch(timeout=0))
        [1, 2]
    """

    def __init__(
        self, path: Path, shown: str, *, after: int | None, timeout: float | None, hold: bool,
        broadcast: Callable[[Callable[[], int | None]], int | None] | None = None, patience: float = math.inf,
    ) -> None:  # fmt: skip
        self._path, self._shown, self._hold = path, shown, hold
        self._after = -1 if after is None else after
        self._timeout = timeout
        self._broadcast = broadcast
        self._together = min(timing.current.watch_together, patience / 2)
        self._head: bytes | None = None
        self._seen: dict[int, str] = {}
        self._waiting: list[StepRecord] = []
        self._there: Sequence[StepRecord] = ()
        self._lease: Lease | None = None
        self._told: list[StepRecord] = []
        self._since = time.monotonic()
        self._pause = timing.current.watch_first
        self._surveyed = False
        self._ended = False
        self._looking: asyncio.Future[int | None] | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> int:
        if self._broadcast is None:
            found = self._await_step(None)
        else:
            # Nobody can wait in a collective for hours: the others are told now and then that there is none yet.
            try:
                while (found := self._broadcast(lambda: self._await_step(self._together))) is None:
                    pass
            except BaseException:  # an interrupt too; raised again below
                # Some may not have heard of this step, nor, if this process came late to that call, of the one before.
                self._waiting[:0], self._told = self._told, []
                raise
            self._told = self._told[-1:]
        if found is None or found < 0:
            raise StopIteration
        return found

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        import asyncio  # slow, and seldom needed

        if self._broadcast is not None:
            hint = "iterate with a plain `for` on the thread that the other collectives run on"
            raise errors.UnsupportedError("a job of several processes cannot await the steps of a run", hint=hint)
        while True:
            if self._looking is None or self._looking.get_loop() is not asyncio.get_running_loop():
                self._looking = asyncio.ensure_future(asyncio.to_thread(self._look))
            looking = self._looking
            try:
                found = await asyncio.shield(looking)
            except Exception:  # but who is cancelled: its thread goes on, and what it finds is for the next call
                self._looking = None
                raise
            self._looking = None
            if found is not None:
                break
            await asyncio.sleep(self._next_pause())
        if found < 0:
            raise StopAsyncIteration
        return found

    def close(self) -> None:
        """End the iteration, and release the step that is held."""
        self._ended = True
        if self._lease is not None:
            self._lease.release()
            self._lease = None

    def _await_step(self, most: float | None) -> int | None:
        """Return the next step, -1 at the end; None where none came for ``most`` seconds."""
        begun = time.monotonic()
        while (found := self._look()) is None:
            rest = math.inf if most is None else begun + most - time.monotonic()
            if rest <= 0.0:
                return None
            time.sleep(min(self._next_pause(), rest))
        return found

    def _next_pause(self) -> float:
        pause = self._pause
        self._pause = min(pause * timing.current.watch_growth, timing.current.watch_longest)
        rest = pause if self._timeout is None else self._since + self._timeout - time.monotonic()
        return max(min(pause, rest), 0.0)

    def _look(self) -> int | None:
        """Return the next step, -1 at the end; None where there is none yet. What was held is released."""
        with contextlib.ExitStack() as held:  # until the next one is held, which may be the same
            if self._lease is not None:
                held.push(self._lease)
                self._lease = None
            return -1 if self._ended else self._next_step()

    def _next_step(self) -> int | None:
        """Return the next step, as `_look`."""
        over = self._timeout is not None and time.monotonic() - self._since >= self._timeout
        opened = open_run if self._head is None else RunFolder  # once is enough to see that it is one of a run
        with contextlib.suppress(errors.NotFoundError), opened(self._path) as run:
            if not self._waiting:
                self._find(run, thorough=over or self._pause >= timing.current.watch_longest)
            while self._waiting:
                taken = self._take(run, record := self._waiting[0])  # an error leaves it to the next call
                del self._waiting[0]
                if taken:
                    self._since, self._pause = time.monotonic(), timing.current.watch_first
                    self._told += [record] if self._broadcast is not None else []
                    return record.step
        if over:
            self.close()
            return -1
        return None

    def _find(self, run: RunFolder, *, thorough: bool) -> None:
        """Find steps that are new: by the first line of ``run.json``, and where that stays, once by their names."""
        head = run.read_document(HEAD_BYTES)
        if head is not None and head != self._head:
            data = run.read_document() or b""
            self._head, self._surveyed = data[:HEAD_BYTES], False
            self._add(document_in(data).steps)
        if self._waiting or self._surveyed or not (thorough or head is None):
            return
        # What saved the last ones may have died before it noted them; or nobody has noted any.
        newer = []
        for step in run.folders():
            if step > max(self._seen, default=-1):
                with contextlib.suppress(*NOT_READ):
                    newer += [record] if (record := read_record(run, step)) is not None else []
        self._surveyed = head is not None
        if newer:
            self._add([*self._there, *newer])

    def _add(self, records: Sequence[StepRecord]) -> None:
        """Let the steps wait that are new among all that are there, ascending."""
        there = {record.step: record.digest for record in records}
        newest = max(there, default=-1)
        # A step is another one once its index is: then the training has gone back, and all that follows is new.
        back = [step for step, digest in there.items() if self._seen.get(step, digest) != digest]
        if back or newest < max(self._seen, default=-1):
            self._after = min([self._after, *(step - 1 for step in (*back, *(there.keys() - self._seen.keys())))])
        self._waiting = [
            record for record in records if self._seen.get(record.step) != record.digest and record.step > self._after
        ]
        self._there = records
        self._seen = {step: digest for step, digest in self._seen.items() if step > newest} | there

    def _take(self, run: RunFolder, record: StepRecord) -> bool:
        """Whether a step is still there as it was noted; hold it where that is wanted."""
        head = run.read_head(record.step)
        if head is None or read_digest(head[1]) != record.digest or record.step in run.superseded_steps():
            return False
        if self._hold:
            try:
                self._lease = hold_step(self._path, self._shown, record.step, _SECONDS)
            except (errors.NotFoundError, errors.BusyError):
                return False
        return True


# ------------------------------------------------------------------------------------------------------- who is called


class CommitCalls:
    """Calls a function for each step that was committed, at least once, on a thread of its own. Process 0 has one.

    ``.run.json.handed`` says which steps are done. It is there before the first step is committed, so that a later
    program finds those for which this one did not live to call the function.

    Args:
        path: the run's folder.
        shown: what messages call it.
        function: what is called, with a `StepCommit`.
    """

    def __init__(self, path: Path, shown: str, function: Callable[[StepCommit], object]) -> None:
        self._path, self._shown, self._function = path, shown, function
        self._known: HandedSteps | None = None
        self._stale = False
        # Each with an object that stands for this save of the step: it may be saved anew while the function runs.
        self._todo: dict[int, object] = {}
        self._threads: list[int] = []
        self._lock = threading.RLock()
        self._changed = Waiters()

    def pending(self) -> frozenset[int]:
        """Return the steps that wait for the function, which no rule may remove."""
        with self._lock:
            return frozenset(self._todo)

    def is_here(self) -> bool:
        """Whether the function itself asks."""
        return threading.get_ident() in self._threads

    def prepare(self, step: int | None) -> None:
        """Find out which steps others have left to do; before ``step`` is committed, write down that it is not done.

        Raises:
            StoreError: the system refuses.
            FormatError: a newer version wrote what is done.
        """
        if self._known is None or self._stale:
            self._stale = False
            self._read(begins=step is not None)
        known = self._known
        if step is not None and known is not None and step <= known.through:  # the training goes back
            without = {one: digest for one, digest in known.without.items() if one < step}
            with self._lock:
                for one in list(filter(step.__le__, self._todo)):
                    del self._todo[one]
                self._note(HandedSteps(step - 1, without))
            self._changed.notify()

    def offer(self, step: int) -> None:
        """Let the function be called for a step that is committed, and again for those that it failed for."""
        with self._lock:
            self._todo |= self._new(() if self._known is None else self._known.without) | {step: object()}
            self._start()

    def forget(self) -> None:
        """Find out anew what is to be done, at the next `prepare`: the save that was prepared was not committed."""
        self._stale = True

    def _new(self, steps: Iterable[int]) -> dict[int, object]:
        return {step: object() for step in steps if step not in self._todo}

    def wait(self, end: float) -> None:
        """Wait until the function was called for all steps.

        Raises:
            TimedOutError: it was not, when the monotonic clock says ``end``.
        """
        if not self._changed.wait(lambda: not self.pending(), max(end - time.monotonic(), 0.0)):
            what = f"on_commit has not ended for step {min(self._todo, default=0)} of {self._shown!r}"
            raise errors.TimedOutError(what, hint="it is called again by the next program that saves with on_commit=")

    def _read(self, *, begins: bool) -> None:
        with naming(os.fspath(self._path / HANDED_DOCUMENT), "read"):
            if begins:
                store_at(self._path).transaction().make()
            with contextlib.suppress(errors.NotFoundError), open_run(self._path) as run:
                found = run.store.read(HANDED_DOCUMENT, _LARGEST_RECORD)
                steps = run.steps()
                try:
                    known = None if found is None else parse_handed(found.data)
                except errors.CorruptError as error:
                    LOGGER.warning("%s; only steps that are saved from now on are handed to on_commit", error)
                    known = None
                with self._lock:
                    if known is None:  # what was saved without on_commit is not handed over
                        if begins:
                            self._note(HandedSteps(max(steps, default=-1), {}))
                        return
                    self._known = known
                    self._todo |= self._new(filter(lambda one: one > known.through or one in known.without, steps))
                    if self._todo:
                        self._start()

    def _start(self) -> None:
        if not self._threads:
            with contextlib.suppress(RuntimeError):  # the interpreter goes down, or the system has no more threads
                # One call of C starts and counts it; `threading.Thread.start` hangs after an interrupt in it.
                self._threads.extend(map(_thread.start_new_thread, [self._work], [()]))

    def _work(self) -> None:
        threading.current_thread().name = "treering-on-commit"
        while True:
            with self._lock:
                if not self._todo:
                    self._threads.clear()
                    return
                step = min(self._todo)
                save = self._todo[step]
            failed = self._call(step)
            with self._lock:
                if self._todo.get(step) is save:  # else the training has gone back meanwhile
                    self._finish(step, failed)
            self._changed.notify()

    def _call(self, step: int) -> str | None:
        """Call the function for a step; return the digest of its index if that failed, None where nothing is left."""
        digest = None
        try:
            try:
                lease = hold_step(self._path, self._shown, step, _SECONDS)
            except errors.NotFoundError:  # it was removed by hand, or superseded
                return None
            with lease, RunFolder(self._path) as run:
                if (record := read_record(run, step)) is not None:
                    digest = record.digest
                    metrics = types.MappingProxyType(dict(record.metrics))
                    self._function(
                        StepCommit(
                            step=step, path=lease.path, metrics=metrics, nbytes=record.nbytes, digest=record.digest
                        )
                    )
        except BaseException:  # noqa: BLE001 - whatever it is, `sys.exit` too, no save fails and this thread goes on
            what = "on_commit failed for step %d of %s; it is called again after the next save"
            LOGGER.exception(what, step, self._shown)
            return digest or _UNKNOWN
        return None

    def _finish(self, step: int, failed: str | None) -> None:
        del self._todo[step]
        known = self._known or HandedSteps(-1, {})
        without = {one: digest for one, digest in known.without.items() if one != step}
        if failed is not None:
            without[step] = failed
        try:
            self._note(HandedSteps(max(known.through, step), dict(sorted(without.items()))))
        except (errors.TreeringError, OSError):  # it is called again
            LOGGER.exception("it was not noted that on_commit was called for step %d of %s", step, self._shown)

    def _note(self, document: HandedSteps) -> None:
        self._known = document
        with RunFolder(self._path) as run, naming(os.fspath(self._path / HANDED_DOCUMENT), "write"):
            run.store.replace(HANDED_DOCUMENT, encode_handed(document))
