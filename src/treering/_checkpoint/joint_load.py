"""A tree that several processes load together: they open the same, read their parts, exchange them, or all fail.

Nobody is waited for without a deadline, and who fails tells the others before it raises. ``docs/design/reading.md``
says at which points they meet.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NoReturn, TypeVar

import jax
import xxhash

from treering._arrays.delivered import BATCH_BYTES, Deliveries, ReadProgress, finish, read_batches, read_leaves, spans
from treering._arrays.exchange import (
    digest_common,
    divide,
    exchange_parts,
    is_told_by_numbers,
    plan_digest,
    rounds,
    state_digest,
    take_parts,
)
from treering._arrays.host import job_processes, this_processes
from treering._arrays.source import Source
from treering._checkpoint.forms import read_checkpoint_index
from treering._checkpoint.source import SharedIndex, require_no_loss
from treering._coordination.allgather import (
    allgather_with_deadline,
    broadcast_bytes,
    encode_reply,
    give_up,
    last_allgather,
    name_both,
    raise_failures,
    run_in_order,
)
from treering._coordination.message_board import PathMessageBoard
from treering._coordination.messages import Failure
from treering._store.resolve import located
from treering._tree.flatten import flatten_like
from treering._tree.placement import current_mesh, is_placement, spec_of
from treering._values import timing
from treering._values.arguments import timeout_seconds
from treering._values.checksums import digest
from treering._values.processes import Processes, format_processes
from treering._values.telemetry import report
from treering.errors import (
    BusyError,
    CorruptError,
    MismatchError,
    NotFoundError,
    NotSharedError,
    ProcessFailedError,
    TimedOutError,
    TreeringError,
    UnsupportedError,
)

S = TypeVar("S", bound=Source)
T = TypeVar("T")

# So many processes let process 0 read the index for all; fewer read it faster than they synchronise.
_SHARED_FROM: Final = 16
_MOST_SHARED: Final = 64 << 20
# A load of so few bytes is read before the processes compare what they read: one meeting less, nearly as soon.
_READ_FIRST_BYTES: Final = 2 << 30
# The share of the time to wait after which others may have given up.
_NEARLY_ALL: Final = 0.9
# Several processes also try again where a network file system shows them different states for a while.
_TRIES_TOGETHER: Final = 16


class Reopen(Exception):
    """All processes have heard that the tree has to be opened again; the error is raised where that does not help."""

    def __init__(self, error: TreeringError) -> None:
        super().__init__(str(error))
        self.error = error


def spans_processes(shardings: Any, mesh: Any, like: Any) -> bool:
    """Tell whether one of the shardings that the caller names lies over several processes.

    Looked at only where a process fails before leaves have theirs; what a function would return is not known.

    Args:
        shardings: ``shardings=``.
        mesh: ``mesh=``.
        like: ``like=`` or ``target=``.
    """
    # Whatever cannot be looked at is what the caller is told of anyway, by the error that led here.
    with contextlib.suppress(Exception):
        return any(map(spans, _named_shardings(shardings, mesh, like)))
    return False


def _named_shardings(shardings: Any, mesh: Any, like: Any) -> Iterator[Any]:
    if isinstance(mesh, jax.sharding.Mesh):
        yield jax.sharding.NamedSharding(mesh, spec_of())
    given = jax.tree_util.tree_leaves(shardings, is_leaf=is_placement)
    if mesh is None and shardings is None:
        # jax would never come to the end of a tree that holds itself twice; this walk refuses it.
        given = [getattr(leaf, "sharding", None) for leaf in flatten_like(like).leaves]
    current = current_mesh()
    for one in dict.fromkeys(filter(is_placement, given)):
        abstract = isinstance(getattr(one, "mesh", None), jax.sharding.AbstractMesh)
        if isinstance(one, jax.sharding.PartitionSpec) or abstract:
            if current is not None:
                yield jax.sharding.NamedSharding(current, spec_of())
        elif isinstance(one, jax.sharding.Sharding):
            yield one


def not_shared(
    doing: str, processes: tuple[int, ...], what: str = "did not find what the others found"
) -> NotSharedError:
    """Return the error that some processes do not see what the others do.

    Args:
        doing: what could not be done.
        processes: those that see something else.
        what: what became of them.
    """
    hint = "use one folder for all processes, on a file system that they share"
    error = NotSharedError(f"could not {doing}: {format_processes(processes)} {what}", hint=hint)
    error.processes = processes
    return error


class LoadGroup:
    """The processes that load a tree together; this one alone until a leaf lies over several.

    Args:
        path: the tree.
        timeout: seconds to wait for others at one point; None for what the environment says.
        is_shared: tells of the shardings that the caller names whether they lie over several processes.
        repeats: whether reading may begin again when a save came between; not where the caller saw some of it.
        is_joint: tells whether an array is sure to be placed, where ``is_shared`` is true: then process 0 of a large
            job reads the index for all.
        alone: refuse what other processes would have to take part in: this is not the thread that meets them.

    Attributes:
        path: the tree.
        seen: whether the caller was given leaves already, so that reading cannot begin again unnoticed.
        joined: whether others load it too.
        over: whether the others know of this process's end, or cannot be told any more.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        timeout: float | None,
        is_shared: Callable[[], bool],
        repeats: bool = True,
        *,
        is_joint: Callable[[], bool] = lambda: False,
        alone: bool = False,
    ) -> None:
        self.seen = False
        self.joined = False
        self.path = located(path)
        self._doing = f"load {os.fspath(self.path)!r}"
        self._timeout = timeout_seconds(timeout)
        self._is_shared = is_shared
        self._repeats = repeats
        self._is_joint = is_joint
        self._alone = alone
        self._processes = Processes(this=0, count=1)
        # What the others have not been told yet of this process's tree.
        self._digests: dict[str, str] = {}
        # Of the bytes that all read; None where checksums or versions say more, or nothing is read yet.
        self._read: xxhash.xxh3_128 | None = None
        # What the meeting ended with to which others did not come.
        self._absent: TimedOutError | ProcessFailedError | None = None
        self.over = False

    # ------------------------------------------------------------------------------------------------------ meeting

    def agree(self, source: Source, batches: Sequence[Deliveries]) -> Sequence[Deliveries]:
        """Divide the reading of leaves that lie over several processes, if any do, and see that all do the same.

        Returns the batches of what this process reads.

        Args:
            source: the opened tree.
            batches: what is to be read, one batch after the other.

        Raises:
            Reopen: the processes opened different states of the tree.
            MismatchError: they want different things.
            TreeringError: another process failed, or did not come.
        """
        # A sharding has devices, so jax runs, and may be asked.
        if not self.joined and any(spans(sharding) for batch in batches for sharding in batch.shardings):
            self._join_all()
        if not self.joined:
            return batches
        nbytes = sum(batch.nbytes for batch in batches)
        batches = divide(source, batches, self._processes.count)
        self._digests = {"state": state_digest(source), "plan": plan_digest(source.index.keys, batches)}
        self._read = xxhash.xxh3_128() if is_told_by_numbers(source) and not source.mapped else None
        exchanges = any(way.parts is not None for batch in batches for way in batch.ways)
        # Where processes differ in this, they differ in a digest too, or say that they are not done (`end`). What has
        # no checksums may be replaced unnoticed: whether it was is asked when all have opened it.
        small = nbytes < _READ_FIRST_BYTES and self._processes.count < _SHARED_FROM
        if exchanges or not small or not self._repeats or not source.index.verified:
            self._compare(last=False)
        return batches

    def end(self) -> None:
        """Meet for the last time: each process has what it wanted, or all fail.

        Raises:
            Reopen, MismatchError, TreeringError: as `agree`, where they have not compared yet what they opened and
                want.
        """
        # Others may have compared before they read, or failed while they read: they meet once more.
        if self.joined and not (self._digests and self._compare(last=True)):
            said = self._met() if self._read is None else self._met(read=self._read.hexdigest())
            if all("read" in one for one in said) and (others := _differing(said, "read")):
                raise Reopen(not_shared(self._doing, others, "read other numbers of it than process 0"))

    def _compare(self, *, last: bool) -> bool:
        """Meet to compare what all opened and want; return whether it was the last time for all."""
        own: dict[str, Any] = {**self._digests, "last": last}
        self._digests = {}
        said = self._met(**own)
        while any("index" in one for one in said):
            # Others were sure of a joint load before they opened the tree, and offered to read the index for all.
            said = self._met(**own)
        if others := _differing(said, "state"):
            raise Reopen(not_shared(self._doing, others, "found another state of it than process 0"))
        if others := _differing(said, "plan"):
            self.over = True
            text = f"{format_processes(others)} wants other leaves, dtypes, shardings or batches than process 0"
            raise MismatchError(f"could not {self._doing}: {text}", hint="all processes must request the same")
        return all(one["last"] for one in said)

    def _compare_after(self, error: Exception) -> None:
        """Compare after reading failed: the others may have opened another tree, in which it would not have.

        Raises:
            Reopen: they did.
            NotSharedError: some found nothing.
            MismatchError: they make another call, or want something else.
        """
        try:
            self._compare(last=False)
        except (NotSharedError, MismatchError) as heard:
            raise heard from error
        except TreeringError:
            pass  # what becomes of the others is their concern: this process raises its own error

    def tell(self, error: Exception) -> None:
        """Tell the others that this process fails, unless they know.

        Raises:
            NotSharedError: it found nothing, and others did.
            MismatchError: it found nothing where others make another call.
        """
        if not self.joined and not self._alone and self._is_shared():
            self._join_all()
        if self.joined and not self.over:
            try:
                self._met(failure=Failure.of(error))
            except (NotSharedError, MismatchError) as heard:
                if isinstance(error, NotFoundError):
                    raise heard from error
            except (TreeringError, Reopen):
                pass  # what becomes of the others is their concern: this process raises its own error

    def refuse_others(self) -> NoReturn:
        """Refuse to load arrays that lie over several processes.

        Raises:
            UnsupportedError: always.
        """
        what = f"could not {self._doing} in the background: an array lies over several processes, which have to meet"
        raise UnsupportedError(what, hint="treering.load does, called by all of them")

    def _join_all(self) -> None:
        if self._alone:
            self.refuse_others()
        self._processes = job_processes()
        self.joined = True

    def _met(self, *, failure: Failure | None = None, **said: Any) -> list[dict[str, Any]]:
        """Say something and hear what all processes say.

        Raises:
            Reopen: somebody found that the tree had been replaced.
            TreeringError: somebody failed, or did not come.
        """
        payload, board = encode_reply(said, failure), PathMessageBoard.of(self.path)
        try:
            rows = allgather_with_deadline(
                payload, self._processes, timeout=self._timeout, board=board, doing=self._doing
            )
        except BaseException as end:  # an interrupt too: the call is counted as given up
            self.over = True
            if isinstance(end, TimedOutError | ProcessFailedError):
                self._absent = end
            raise
        heard: list[dict[str, Any]] = [json.loads(row) for row in rows]
        if any("failure" in one for one in heard):
            self.over = True
            self._require_one_folder(heard)
            raise_failures(heard, self._doing)
        if any("again" in one for one in heard):
            if not self._repeats:
                self.over = True
            error = BusyError(f"{os.fspath(self.path)!r} was replaced while it was being read", hint="load it again")
            raise Reopen(error) if self._repeats else error
        return heard

    def _meet_again(self) -> None:
        """Meet twice more, before something in which a process that is left alone would be stuck for ever.

        A process that comes late to a meeting finds what the others left there when they gave up; in the next one it
        then waits alone, without harm. If it stood still between two meetings it finds that of the next one as well: so
        all give up where one of the two takes nearly as long as they wait. Two, because of a process that stood still
        in the meeting before, the time is known only from its end.

        Raises:
            TreeringError: another process failed, or did not come in time.
        """
        for _ in range(2):
            before = last_allgather()
            self._met()
            if last_allgather() - before > _NEARLY_ALL * self._timeout:
                self.over = True
                give_up()
                what = f"the processes did not synchronise within {self._timeout:g} s"
                raise TimedOutError(f"could not {self._doing}: {what}", hint="give them more time (timeout=)")

    def _require_one_folder(self, heard: Sequence[dict[str, Any]]) -> None:
        """Refuse that some found nothing where others opened a tree: who hears `NotFoundError` may begin a new run.

        Raises:
            NotSharedError: they did.
        """
        nothing = tuple(
            n for n, one in enumerate(heard) if one.get("failure", {}).get("class") == NotFoundError.__name__
        )
        if nothing and any("state" in one for one in heard):
            raise not_shared(self._doing, nothing)

    def share_index(self) -> SharedIndex | None:
        """Return the index that process 0 reads for all now; None where each process has to read its own.

        Nothing depends on it: a process whose folder has other files opens what is there, and `agree` compares.

        Raises:
            TreeringError: another process failed, or did not come.
        """
        processes = this_processes(())
        if self._alone or processes.count < _SHARED_FROM or not (self._is_shared() and self._is_joint()):
            return None
        self._join_all()
        data = None
        if processes.is_coordinator:
            with contextlib.suppress(Exception):  # each process finds out what is wrong
                data = read_checkpoint_index(self.path)
        data = data if data is not None and len(data) <= _MOST_SHARED else None
        said = self._met(index=None if data is None else [len(data), digest([data])])
        offer = said[0].get("index")
        if offer is None or not all("index" in one for one in said):
            return None
        self._meet_again()
        try:
            data = self._run(functools.partial(broadcast_bytes, data, offer[0]))
        except BaseException:  # an interrupt too: the others are in the midst of it, and hear nothing
            self.over = True
            raise
        return SharedIndex(data=data, processes=processes) if digest([data]) == offer[1] else None

    # ------------------------------------------------------------------------------------------------------ reading

    def read_batches(self, source: Source, deliveries: Deliveries, report: ReadProgress | None = None) -> list[Any]:
        """Return the leaves of some deliveries, in their order: read here, or exchanged with the others.

        Raises:
            TreeringError: as `_arrays.delivered.read_batches`; TimedOutError and ProcessFailedError where others
                are missing.
        """
        if not self.joined:
            return read_batches(source, deliveries, report)
        own = [at for at, way in enumerate(deliveries.ways) if way.parts is None]
        look = self._read and functools.partial(digest_common, self._read, processes=self._processes.count)
        leaves = dict(zip(own, read_batches(source, deliveries.take(own), report, look), strict=True))
        places = [at for at, way in enumerate(deliveries.ways) if way.parts is not None]
        shared, keys = deliveries.take(places), source.index.keys
        for here in rounds(shared, self._processes.count, BATCH_BYTES):
            some = shared[here]
            found = read_leaves(source, some, report)[::-1]
            parted = [
                take_parts(way, found.pop(), keys[leaf]) for way, leaf in zip(some.ways, some.leaves, strict=True)
            ]
            self._met()
            self._meet_again()
            try:
                arrays = exchange_parts(parted, self._run)
            except BaseException:  # an interrupt too: the others are in the midst of it, and hear nothing
                self.over = True
                raise
            fits = [way.fit for way in some.ways]
            done = [finish(*one) for one in zip(arrays, fits, map(keys.__getitem__, some.leaves), strict=True)]
            leaves |= zip(places[here], done, strict=True)
        return [leaves.pop(at) for at in range(len(deliveries))]

    def _run(self, work: Callable[[], T], /) -> T:
        board = PathMessageBoard.of(self.path)
        return run_in_order(work, self._processes, timeout=self._timeout, board=board, doing=self._doing)

    # ------------------------------------------------------------------------------------------------------ again

    def retry_on_overwrite(self, opened: Callable[[], AbstractContextManager[S]], work: Callable[[S], T]) -> T:
        """Return ``work(source)``, done once more on the newer tree where a save replaced the older one meanwhile.

        Files that are gone, or have other bytes, are damage only as long as the tree that was opened is the one that
        stands there. Bytes without checksums may be another save's without looking damaged.

        Args:
            opened: opens the tree, each time anew.
            work: reads it; what it did is thrown away where it has to be done again.

        Raises:
            BusyError: the tree was replaced again and again, or once after the caller was given leaves.
            NotSharedError: the processes keep finding different states of it.
            Exception: whatever ``work`` raises on a tree that was not replaced, here or in another process.
        """
        with report("load", self.path):
            alone, together, most = 0, 0, 1
            while alone < most:
                try:
                    with opened() as source:
                        most = source.most_tries
                        done, result = self._try(source, work)
                except Reopen as again:
                    # Counted alike on all, so that all end at the same try.
                    together += 1
                    if together == _TRIES_TOGETHER:
                        raise again.error from None
                    now = timing.current
                    longest = min(now.reopen_longest, self._timeout / _TRIES_TOGETHER)
                    time.sleep(min(longest, now.reopen_first * 2**together))
                except Exception as error:
                    self.tell(error)
                    if self._absent is not None and self._absent is not error:
                        raise name_both(self._absent, error) from error
                    raise
                except BaseException:  # an interrupt does not wait for others
                    if self.joined and not self.over:
                        self.over = True
                        give_up()
                    raise
                else:
                    if done:
                        return result[0]
                    alone += 1
            raise BusyError(f"the tree was replaced {most} times while it was being read", hint="try again")

    def _try(self, source: S, work: Callable[[S], T]) -> tuple[bool, list[T]]:
        """Return whether the tree was there to the end, and if so ``work(source)``."""
        result: list[T] = []
        self._digests = {}
        try:
            result.append(work(source))
        except Exception as error:
            if self._digests:
                self._compare_after(error)
            if not isinstance(error, CorruptError | NotFoundError):
                raise
            if (self.over and not self.seen) or source.is_current():
                require_no_loss(error)
                raise
            self._require_unseen(error)
        else:
            if source.is_consistent(joint=self.joined):
                self.end()
                return True, result
            self._require_unseen(None)
        if self.joined:
            self._met(again=True)
        return False, []

    def _require_unseen(self, error: Exception | None) -> None:
        """Refuse to begin again where the caller was given leaves of a tree that was replaced meanwhile."""
        if self.seen:
            what = f"{os.fspath(self.path)!r} was replaced while it was being read, after `callback` had been called"
            raise BusyError(what, hint="load it again") from error


def _differing(said: Sequence[dict[str, Any]], member: str) -> tuple[int, ...]:
    """Return the processes that say something else than process 0."""
    return tuple(number for number, one in enumerate(said) if one.get(member) != said[0].get(member))
