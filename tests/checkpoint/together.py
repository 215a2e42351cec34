"""Jobs of several processes that this one plays, sharing jax's eight devices among them.

For saves each process is a thread. For loads this is process 0, and plays the others: each two of its devices belong to
another one, as far as plans know, and the others say at each meeting what the test wants.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import treering
from tests import clocks, limits
from treering._arrays import delivered, exchange, outgoing, plan_cache
from treering._arrays.outgoing import ALONE
from treering._checkpoint import joint_load, save_folder
from treering._checkpoint import save as saving
from treering._checkpoint.save_options import SaveOptions
from treering._coordination import allgather
from treering._coordination.messages import Failure
from treering._coordination.operations import Call
from treering._values.processes import Processes
from treering._values.timing import Timing

__all__ = ["Loading", "Together", "four", "job_of", "loading", "save_as_step", "together", "two"]


SOON = Timing(linger=0.3)
PATIENT = Timing()
"""Process 0 stays until all have heard how it ended."""


@dataclasses.dataclass
class Together:
    """A job of ``count`` processes; save number n is the n-th call of `save`."""

    count: int
    """How many."""
    job: str = "0123456789abcdef"
    """Its name."""
    numbers: Iterator[int] = dataclasses.field(default_factory=lambda: itertools.count(1))
    """Of its saves."""
    timeout: float = 60.0
    """Seconds that they wait for each other."""
    timing: Timing = SOON
    """How often they look, and how long process 0 stays for those who are late."""

    def devices_of(self, process: int) -> list[Any]:
        """The devices of one process."""
        return [device for device in jax.devices() if outgoing.process_of(device) == process]

    def save(
        self,
        path: Path,
        tree_of: Callable[[int], Any],
        *,
        who: range | None = None,
        save: Callable[..., object] = treering.save,
        wishes_of: Callable[[int], dict[str, Any]] = lambda process: {},
        **wishes: Any,
    ) -> list[Exception | None]:
        """Let every process save what ``tree_of`` its number is; return what each raised.

        Args:
            path: the folder.
            tree_of: process -> its tree.
            who: those that come; default: all.
            save: what each of them calls.
            wishes_of: process -> further arguments of its save.
            **wishes: arguments of all.
        """
        number = next(self.numbers)
        outcomes: list[Exception | None] = [None] * self.count

        def run(process: int) -> None:
            processes = Processes(this=process, count=self.count)
            call = Call(
                job=self.job,
                number=number,
                processes=processes,
                timeout=self.timeout,
                doing=f"save '{path}'",
                timing=self.timing,
            )
            calls.call = call
            try:
                save(path, tree_of(process), **wishes, **wishes_of(process))
            except Exception as error:  # noqa: BLE001 - for the test to look at
                outcomes[process] = error

        threads = [threading.Thread(target=run, args=(process,)) for process in who or range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive()
        return outcomes


def save_as_step(path: Path, tree: Any) -> None:
    """Save a tree as a run saves a step that holds the state of an iterator, under "data"."""
    options = SaveOptions.of(path, metadata=None, overwrite=False, progress=None, timeout=60)
    saving.save_tree(tree, dataclasses.replace(options, states=("data",)))


class _Calls(threading.local):
    call: Call | None = None


calls = _Calls()


@pytest.fixture(params=[2, 4])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Together:
    """A job of two processes with four devices each, or of four with two each."""
    return job_of(request.param, monkeypatch)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Together:
    """A job of two processes with four devices each."""
    return job_of(2, monkeypatch)


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> Together:
    """A job of four processes with two devices each."""
    return job_of(4, monkeypatch)


def job_of(count: int, monkeypatch: pytest.MonkeyPatch) -> Together:
    """Return a job of so many processes, as long as the patches last."""
    monkeypatch.setattr(outgoing, "process_of", lambda device: device.id * count // 8)
    describe: Callable[..., Any] = outgoing.describe_leaves
    turn = threading.Lock()

    def described(*arguments: Any) -> Any:
        # Real processes have arrays of their own. These are threads, and share those that jax is asked about.
        with turn:
            return describe(*arguments)

    monkeypatch.setattr(plan_cache, "describe_leaves", described)
    monkeypatch.setattr(save_folder, "next_sequence", lambda *_, **__: calls.call)
    for module in (saving, plan_cache):
        monkeypatch.setattr(module, "this_processes", lambda leaves: calls.call.processes if calls.call else ALONE)
    return Together(count)


def end_files_at(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let joint saves begin no data file beyond so many bytes of the one before."""
    limits.lower(monkeypatch, data_file=nbytes)


def fail_snapshots(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """Let one process have no memory for its snapshot, and be interrupted where a part of it is enough."""
    snapshot = plan_cache.TreePlan.snapshot

    def fail(plan: plan_cache.TreePlan, **wanted: Any) -> plan_cache.TreePlan:
        if plan.processes.this == bad:
            raise KeyboardInterrupt if wanted else MemoryError("not enough memory")
        return snapshot(plan, **wanted)

    monkeypatch.setattr(plan_cache.TreePlan, "snapshot", fail)


# --------------------------------------------------------------------------------------------------------------- loads

Said = dict[str, Any]
"""What a process says at a meeting."""


@dataclasses.dataclass
class Loading:
    """Four processes that load together, of which this is process 0."""

    meetings: list[Said] = dataclasses.field(default_factory=list)
    """What this process said at each."""
    others: Callable[[int, Said], list[Said]] = lambda meeting, said: [said] * 3
    """What the others say at a meeting, given what this one says."""
    exchanges: list[int] = dataclasses.field(default_factory=list)
    """How many leaves each exchange was of."""
    timeouts: list[float] = dataclasses.field(default_factory=list)
    """How long each meeting waits at most."""
    late: Exception | None = None
    """What a meeting fails with."""
    late_from: int = 1
    """The first meeting that does."""
    broken: Exception | None = None
    """What an exchange fails with."""

    def meet(self, payload: bytes, processes: Processes, *, timeout: float, **_: Any) -> list[bytes]:
        """Stand for a collective with a deadline."""
        assert processes == Processes(this=0, count=4)
        assert len(payload) <= allgather.PAYLOAD_BYTES == 512
        assert timeout > 0
        self.timeouts.append(timeout)
        if self.late is not None and len(self.timeouts) >= self.late_from:
            raise self.late
        said = json.loads(payload)
        self.meetings.append(said)
        return [payload, *(json.dumps(other).encode() for other in self.others(len(self.meetings), said))]

    def exchange(self, work: Callable[[], Any], processes: Processes, **_: Any) -> Any:
        """Stand for work that all processes do."""
        if self.broken is not None:
            raise self.broken
        done = work()
        self.exchanges.append(len(done))
        return done


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Loading]:
    """Four processes with two devices each."""
    playing = Loading()
    monkeypatch.setattr(delivered, "process_of", lambda device: device.id // 2)
    monkeypatch.setattr(joint_load, "job_processes", lambda: Processes(this=0, count=4))
    monkeypatch.setattr(joint_load, "allgather_with_deadline", playing.meet)
    monkeypatch.setattr(joint_load, "run_in_order", playing.exchange)
    clocks.wait_at_most(monkeypatch, reopen_first=0.0)
    yield playing
    exchange._reading_mesh.cache_clear()
    exchange._own_places.cache_clear()


def exchange_at_once(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let an exchange begin when a process gets so many bytes."""
    limits.lower(monkeypatch, joint_batch=nbytes)


def failing(error: Exception) -> Said:
    """Return what a process says that has failed."""
    return {"failure": Failure.of(error).to_node()}


def count_given_up() -> int:
    """Return how many calls of this process ended while others may still have been in them."""
    return allgather._order.given_up
