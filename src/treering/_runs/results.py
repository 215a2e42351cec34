"""What the calls of a run take and give: objects that keep their own state, the answers of save and of load_or_init.

Nothing here imports jax, so that the door to runs can be imported without it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

from treering._printable import printable
from treering._values.human import bytes_text, duration_text, pluralize, require_count
from treering._values.outline import InNotebook, Outline

if TYPE_CHECKING:
    from treering._background.writer import PendingSave

T = TypeVar("T")


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state away and takes it back, such as an iterator over data.

    ``Run.save`` saves what ``get_state()`` returns: a pytree, as for ``treering.save``. ``Run.load`` gives it back to
    ``set_state``.

    Example:
        >>> class Counter:
        ...     position = 0
        ...     def get_state(self):
        ...         return {"position": self.position}
        ...     def set_state(self, state):
        ...         self.position = state["position"]
        >>> isinstance(Counter(), Stateful)
        True
    """

    def get_state(self) -> Any:
        """Return the state: a pytree that later steps of the object do not change."""

    def set_state(self, state: Any, /) -> Any:
        """Go on from a state."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """How a run is resumed where its newest step is damaged, or the program crashes each time that it resumes from it.

    ``fallback=True`` passes over damaged steps. ``fallback=Fallback(max_attempts=3)`` also passes over a step from
    which the run was resumed three times without a newer step since; `Run.attempts` tells how often it was.

    Example:
        >>> Fallback(max_attempts=5)
        Fallback(max_attempts=5)
    """

    max_attempts: int = 3
    """So often a run is resumed from one step, before an earlier one is tried."""

    def __post_init__(self) -> None:
        require_count(self.max_attempts, "max_attempts")


class Resumed(tuple[int | None, T]):  # noqa: SLOT001 - a tuple of Python has no room for slots
    """What ``Run.load_or_init`` gives: the pair of the step, or None where nothing was saved, and the tree.

    Attributes:
        initialised: key texts of the leaves that were initialised, not loaded.

    Example:
        >>> step, tree = Resumed(7, {"w": 1.5}, ())
        >>> step
        7
    """

    initialised: tuple[str, ...]

    def __new__(cls, step: int | None, tree: T, initialised: tuple[str, ...]) -> Self:
        pair = super().__new__(cls, (step, tree))
        pair.initialised = initialised
        return pair

    def __getnewargs__(self) -> tuple[int | None, T, tuple[str, ...]]:
        return (*self, self.initialised)

    @property
    def step(self) -> int | None:
        """The step that was loaded; None where nothing was saved."""
        return self[0]

    @property
    def tree(self) -> T:
        """The tree."""
        return self[1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCommit:
    """What ``Run(on_commit=function)`` calls the function with: a step that is durable.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> done = []
        >>> with tr.Run(os.path.join(tempfile.mkdtemp(), "run"), on_commit=done.append) as run:
        ...     saved = run.save(7, {"w": 1.5}, metrics={"loss": 0.25})
        >>> done[0].step, done[0].path.name, dict(done[0].metrics)
        (7, 'step_00000007', {'loss': 0.25})
    """

    step: int
    """Its number."""
    path: Path
    """The path of its checkpoint, absolute."""
    metrics: Mapping[str, float]
    """Metric -> value."""
    nbytes: int
    """The bytes of its files."""
    digest: str
    """That of its index; the same when the function is called again for this save, and for no other."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSave:
    """What ``Run.save`` did, and why. It is true where a save of the step was begun.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> with tr.Run(os.path.join(tempfile.mkdtemp(), "run"), save_every=tr.SaveEvery(steps=100)) as run:
        ...     first, second = run.save(100, {"w": 1.5}), run.save(101, {"w": 1.25})
        ...     first.result()
        ...     third = run.save(102, {"w": 1.25}, force=True)
        >>> bool(first), first.saved, bool(second), second.saved
        (True, True, False, False)
    """

    step: int
    """Its number."""
    reason: str
    """Why, in words for people."""
    temporary: bool = False
    """Whether it goes when a newer step is committed."""
    pending: PendingSave | None = None
    """The save in flight; None where nothing is saved."""
    error: Exception | None = None
    """Why the save could not begin, in a run that only warns of that; None where it was begun, or not due."""

    def __bool__(self) -> bool:
        return self.pending is not None

    @property
    def saved(self) -> bool:
        """Whether the step is durable by now, without waiting; False where no save was begun, or where it failed."""
        return self.pending is not None and self.pending.saved()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the step is durable, on process 0 also until every step is removed that has to go.

        It returns at once where no save was due. `Run.wait` waits for the removals on the other processes too.

        Raises:
            TimedOutError: it is not done in that time; it goes on.
            TreeringError: it failed, also in a run that only warns of that.
        """
        if self.error is not None:
            raise self.error
        if self.pending is not None:
            self.pending.result(timeout)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus(InNotebook):
    """What ``Run.status`` returns: how much a crash would cost now, as far as this process knows without looking.

    Example:
        >>> print(RunStatus(step=1200, seconds=34.6, saves_in_flight=1, bytes_in_flight=4096))
        newest durable step 1200, 34.6 s old; 1 save in flight, 4.00 KiB
        >>> error = OSError("no space left on device")
        >>> print(RunStatus(failures=2, last_error=error))
        no durable step yet; 2 failures in a row, the last: OSError: no space left on device; no save in flight
    """

    step: int | None = None
    """The newest durable step that this process saved or loaded; None where it has done neither."""
    seconds: float | None = None
    """How long ago it became durable; of a step that was loaded, how long ago its save began."""
    failures: int = 0
    """How many saves have failed since the last one that did not."""
    last_error: BaseException | None = None
    """Why the last of all failed saves failed; None where none has."""
    saves_in_flight: int = 0
    """How many saves are being written, or wait."""
    bytes_in_flight: int = 0
    """How much memory their snapshots hold. What a save left on its devices, as it shares the bytes, does not count."""

    def __str__(self) -> str:
        texts = ["no durable step yet"]
        if self.step is not None and self.seconds is not None:
            texts = [f"newest durable step {self.step}, {duration_text(self.seconds)} old"]
        if self.failures:
            why = f"{type(self.last_error).__name__}: {self.last_error}"
            texts.append(f"{pluralize(self.failures, 'failures')} in a row, the last: {' '.join(why.split())}")
        flying = f"{pluralize(self.saves_in_flight, 'saves')} in flight, {bytes_text(self.bytes_in_flight)}"
        return printable("; ".join([*texts, flying if self.saves_in_flight else "no save in flight"]))

    def _outline(self) -> Outline:
        return Outline(title="RunStatus", detail=str(self))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """What ``Run.preempted`` returns where the job is to end soon; it is true.

    Example:
        >>> preemption = Preemption(reason="SIGTERM came", deadline=time.monotonic() + 30)
        >>> bool(preemption), preemption.seconds_left is not None and 29 < preemption.seconds_left <= 30
        (True, True)
    """

    reason: str
    """What was heard, in words for people."""
    deadline: float | None = None
    """When the job is to be gone, on this process's clock of ``time.monotonic``; None where ``grace`` is not known."""

    @property
    def seconds_left(self) -> float | None:
        """How many seconds there are until then, 0.0 where it has passed; None where ``grace`` is not known."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())
