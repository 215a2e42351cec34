"""A tree that several processes load together: they open the same, read their parts, exchange them, or all fail.

Nobody is waited for without a deadline, and who fails tells the others before it raises. ``docs/design/reading.md``
says at which points they meet.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import jax

from treering._arrays.delivered import Delivery, finish, take_parts
from treering._arrays.divided_reading import divide, plan_digest, rounds, spans, state_digest
from treering._arrays.exchange import exchange_parts
from treering._arrays.source import Source
from treering._checkpoint.read_leaves import BATCH_BYTES, ReadProgress, read_batches
from treering._checkpoint.retry_on_overwrite import Reopen
from treering._coordination.allgather import allgather_with_deadline, give_up, run_in_order
from treering._coordination.broadcast import encode_reply, raise_failures
from treering._coordination.message_board import MessageBoard, PathMessageBoard
from treering._coordination.messages import Failure
from treering._tree.placement import current_mesh, is_placement
from treering._tree.rules import spec_of
from treering._values.processes import Processes, format_processes, timeout_seconds
from treering.errors import Busy, Mismatch, NotFound, NotShared, TreeringError

T = TypeVar("T")

_SHARE: Final = "use one folder for all processes, on a file system that they share"


class GivenShardings:
    """The shardings that the caller names, looked at only where a process fails before leaves have theirs.

    Args:
        shardings: ``shardings=``.
        mesh: ``mesh=``.
        like: ``like=`` or ``target=``.
    """

    def __init__(self, shardings: Any, mesh: Any, like: Any) -> None:
        self._shardings = shardings
        self._mesh = mesh
        self._like = like

    def span(self) -> bool:
        """Tell whether one of them lies over several processes; what a function would return is not known."""
        # Whatever cannot be looked at is what the caller is told of anyway, by the error that led here.
        with contextlib.suppress(Exception):
            return any(map(spans, self._all()))
        return False

    def _all(self) -> Iterator[Any]:
        if isinstance(self._mesh, jax.sharding.Mesh):
            yield jax.sharding.NamedSharding(self._mesh, spec_of())
        given = jax.tree_util.tree_leaves(self._shardings, is_leaf=is_placement)
        if self._mesh is None and self._shardings is None:
            given = [getattr(leaf, "sharding", None) for leaf in jax.tree_util.tree_leaves(self._like)]
        current = current_mesh()
        for one in dict.fromkeys(one for one in given if is_placement(one)):
            if isinstance(one, jax.sharding.PartitionSpec) or isinstance(
                getattr(one, "mesh", None), jax.sharding.AbstractMesh
            ):
                if current is not None:
                    yield jax.sharding.NamedSharding(current, spec_of())
            elif isinstance(one, jax.sharding.Sharding):
                yield one


class LoadGroup:
    """The processes that load a tree together; this one alone until a leaf lies over several.

    Args:
        path: the tree.
        timeout: seconds to wait for others at one point; None for what the environment says.
        named: the shardings that the caller names.
        repeats: whether reading may begin again when a save came between; not where the caller saw some of it.

    Attributes:
        path: the tree.
        joined: whether others load it too.
        over: whether the others know of this process's end, or cannot be told any more.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, timeout: float | None, given: GivenShardings, repeats: bool = True
    ) -> None:
        self.joined = False
        self.path = Path(path)
        self._timeout = timeout_seconds(timeout)
        self._given = given
        self._repeats = repeats
        self._processes = Processes(this=0, count=1)
        self.over = False

    # ------------------------------------------------------------------------------------------------------ meeting

    def agree(self, source: Source, batches: Sequence[Sequence[Delivery]]) -> None:
        """Divide the reading of leaves that lie over several processes, if any do, and see that all do the same.

        Args:
            source: the opened tree.
            batches: what is to be read, one batch after the other.

        Raises:
            Reopen: the processes opened different states of the tree.
            Mismatch: they want different things.
            TreeringError: another process failed, or did not come.
        """
        deliveries = list(itertools.chain.from_iterable(batches))
        if not self.joined and not self._join(delivery.sharding for delivery in deliveries):
            return
        divide(source, deliveries, self._processes.count)
        said = self._met(state=state_digest(source), plan=plan_digest(batches))
        others = _differing(said, "state")
        if others:
            error = NotShared(
                f"could not {self._doing}: {format_processes(others)} found another state of it than process 0",
                hint=_SHARE,
            )
            error.processes = others
            raise Reopen(error)
        others = _differing(said, "plan")
        if others:
            self.over = True
            text = f"{format_processes(others)} wants other leaves, dtypes, shardings or batches than process 0"
            raise Mismatch(f"could not {self._doing}: {text}", hint="all processes must request the same")

    def end(self) -> None:
        """Meet for the last time: each process has what it wanted, or all fail."""
        if self.joined:
            self._met()

    def replaced(self) -> None:
        """Tell the others that a save replaced the tree while it was being read.

        Raises:
            Reopen: all heard it.
            TreeringError: what another process raised, or Busy where reading cannot begin again.
        """
        self._met(again=True)

    def tell(self, error: Exception) -> None:
        """Tell the others that this process fails, unless they know.

        Raises:
            NotShared: it found nothing, and others did.
        """
        if not self.joined and self._given.span():
            self._join_all()
        if self.joined and not self.over:
            try:
                self._met(failure=Failure.of(error))
            except NotShared as heard:
                if isinstance(error, NotFound):
                    raise heard from error
            except (TreeringError, Reopen):
                pass  # what becomes of the others is their concern: this process raises its own error

    def leave(self) -> None:
        """Go without a word, for an interrupt does not wait: the next call here is none of those that others are in."""
        if self.joined and not self.over:
            self.over = True
            give_up()

    def _join(self, shardings: Iterable[Any]) -> bool:
        placed = dict.fromkeys(sharding for sharding in shardings if sharding is not None)
        # A sharding has devices, so jax runs, and may be asked.
        if placed and any(map(spans, placed)):
            self._join_all()
        return self.joined

    def _join_all(self) -> None:
        self._processes = _job()
        self.joined = True

    @property
    def _doing(self) -> str:
        return f"load {os.fspath(self.path)!r}"

    @property
    def _board(self) -> MessageBoard | None:
        return PathMessageBoard.of(self.path)

    def _met(self, *, failure: Failure | None = None, **said: Any) -> list[dict[str, Any]]:
        """Say something and hear what all processes say.

        Raises:
            Reopen: somebody found that the tree had been replaced.
            TreeringError: somebody failed, or did not come.
        """
        payload = encode_reply(said, failure)
        try:
            rows = allgather_with_deadline(
                payload, self._processes, timeout=self._timeout, board=self._board, doing=self._doing
            )
        except BaseException:  # an interrupt too: the call is counted as given up
            self.over = True
            raise
        heard: list[dict[str, Any]] = [json.loads(row) for row in rows]
        if any("failure" in one for one in heard):
            self.over = True
            self._require_one_folder(heard)
            raise_failures(heard, self._doing)
        if any("again" in one for one in heard):
            if not self._repeats:
                self.over = True
            error = Busy(f"{os.fspath(self.path)!r} was replaced while it was being read", hint="load it again")
            raise Reopen(error) if self._repeats else error
        return heard

    def _require_one_folder(self, heard: Sequence[dict[str, Any]]) -> None:
        """Refuse that some found nothing where others opened a tree: whoever hears NotFound may begin a new run there.

        Raises:
            NotShared: they did.
        """
        nothing = tuple(n for n, one in enumerate(heard) if one.get("failure", {}).get("class") == NotFound.__name__)
        if nothing and any("state" in one for one in heard):
            error = NotShared(
                f"could not {self._doing}: {format_processes(nothing)} did not find what the others found", hint=_SHARE
            )
            error.processes = nothing
            raise error

    # ------------------------------------------------------------------------------------------------------ reading

    def read_batches(
        self, source: Source, deliveries: Sequence[Delivery], report: ReadProgress | None = None
    ) -> list[Any]:
        """Return the leaves of some deliveries, in their order: read here, or exchanged with the others.

        Raises:
            TreeringError: as `_checkpoint.arrivals.read_batches`; Timeout and ProcessFailed where others are missing.
        """
        if not self.joined:
            return read_batches(source, deliveries, report)
        own = [delivery for delivery in deliveries if delivery.parts is None]
        leaves = {id(delivery): leaf for delivery, leaf in zip(own, read_batches(source, own, report), strict=True)}
        shared = [delivery for delivery in deliveries if delivery.parts is not None]
        for some in rounds(shared, self._processes.count, BATCH_BYTES):
            source.arrays.read([one.request for one in some if one.request.boxes], report.step if report else None)
            if report:
                report.add(sum(one.nbytes for one in some))
            parted = [take_parts(one) for one in some]
            # Twice: who comes late to the first finds the others' half of it, though they have given up and left; it
            # then waits in the second, as it can do without harm. Left alone in an exchange it would be stuck there.
            self._met()
            self._met()
            try:
                arrays = exchange_parts(parted, self._run)
            except BaseException:  # an interrupt too: the others are in the midst of it, and hear nothing
                self.over = True
                raise
            leaves |= {id(one): finish(array, one) for one, array in zip(some, arrays, strict=True)}
        return [leaves.pop(id(delivery)) for delivery in deliveries]

    def _run(self, work: Callable[[], T], /) -> T:
        return run_in_order(work, self._processes, timeout=self._timeout, board=self._board, doing=self._doing)


def _job() -> Processes:
    """Return the processes of the job; asked where jax is sure to run."""
    return Processes(this=jax.process_index(), count=jax.process_count())


def _differing(said: Sequence[dict[str, Any]], member: str) -> tuple[int, ...]:
    """Return the processes that say something else than process 0."""
    return tuple(number for number, one in enumerate(said) if one.get(member) != said[0].get(member))
