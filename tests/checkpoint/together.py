"""Threads of this process as the processes of a job, which share jax's eight devices among them."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import treering
from treering._arrays import outgoing
from treering._arrays.outgoing import ALONE
from treering._checkpoint import joint_save, plan_cache
from treering._checkpoint import save as saving
from treering._coordination.operations import Call
from treering._values.processes import Processes
from treering._values.timing import Timing

__all__ = ["Together", "job_of", "together", "two"]


SOON = Timing(linger=0.3)


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
    monkeypatch.setattr(joint_save, "next_sequence", lambda *_, **__: calls.call)
    for module in (saving, plan_cache):
        monkeypatch.setattr(module, "this_processes", lambda leaves: calls.call.processes if calls.call else ALONE)
    return Together(count)


def fail_snapshots(monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """Let one process have no memory for its snapshot, and be interrupted where a part of it is enough."""
    snapshot = plan_cache.TreePlan.snapshot

    def fail(plan: plan_cache.TreePlan, **wanted: Any) -> plan_cache.TreePlan:
        if plan.processes.this == bad:
            raise KeyboardInterrupt if wanted else MemoryError("not enough memory")
        return snapshot(plan, **wanted)

    monkeypatch.setattr(plan_cache.TreePlan, "snapshot", fail)
