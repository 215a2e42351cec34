"""What the calls of a run take and give: objects that keep their own state, the answers of save and of load_or_init.

Nothing here imports jax, so that the door to runs can be imported without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

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
    """The path of its checkpoint."""
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

    def __bool__(self) -> bool:
        return self.pending is not None

    @property
    def saved(self) -> bool:
        """Whether the step is durable by now, without waiting; False where no save was begun, or where it failed."""
        return self.pending is not None and self.pending.saved()

    def result(self, timeout: float | None = None) -> None:
        """Wait until the step is durable, on process 0 also until every step is removed that has to go.

        It returns at once where nothing is saved. `Run.wait` waits for the removals on the other processes too.

        Raises:
            TimedOutError: it is not done in that time; it goes on.
            TreeringError: it failed.
        """
        if self.pending is not None:
            self.pending.result(timeout)
