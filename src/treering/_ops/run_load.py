"""A step of a run -> its tree; and what is known of the steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from treering._ops.run_state import RunState

if TYPE_CHECKING:
    from treering.retention import Verdict

__all__ = ["Resumed", "Wishes", "best_step", "branched", "collected", "load_or_init", "load_step", "metrics_of"]


class Resumed(tuple[int | None, Any]):  # noqa: SLOT001 - a tuple of Python has no room for slots
    """What ``Run.load_or_init`` gives: the pair of the step, or None where nothing was saved, and the tree.

    Attributes:
        initialised: key texts of the leaves that were initialised, not loaded.

    Example:
        >>> step, tree = Resumed(7, {"w": 1.5}, ())
        >>> step
        7
    """

    initialised: tuple[str, ...]

    def __new__(cls, step: int | None, tree: Any, initialised: tuple[str, ...]) -> Self:
        pair = super().__new__(cls, (step, tree))
        pair.initialised = initialised
        return pair

    @property
    def step(self) -> int | None:
        """The step that was loaded; None where nothing was saved."""
        return self[0]

    @property
    def tree(self) -> Any:
        """The tree."""
        return self[1]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the caller of a load asks for; ``treering.load`` says what each means."""

    only: str | Sequence[str] | None
    at: str | None
    shardings: Any
    mesh: Any
    rename: Mapping[str, str] | None
    missing: Literal["error", "keep"]
    cast: bool
    mapped: bool
    progress: Callable[[int, int], object] | None


def load_step(run: RunState, step: int | None, like: Any, wishes: Wishes) -> Any:
    """Return the tree of a step; ``Run.load`` says more."""
    raise NotImplementedError((run, step, like, wishes))


def load_or_init(run: RunState, init_fn: Callable[[], Any], *, shardings: Any, mesh: Any) -> Resumed:
    """Return the latest step, with what it lacks initialised; ``Run.load_or_init`` says more."""
    raise NotImplementedError((run, init_fn, shardings, mesh))


def best_step(run: RunState, metric: str, mode: Literal["min", "max"]) -> int | None:
    """Return the step whose metric is best."""
    raise NotImplementedError((run, metric, mode))


def metrics_of(run: RunState, step: int) -> dict[str, float]:
    """Return the metrics of a step."""
    raise NotImplementedError((run, step))


def collected(run: RunState, *, dry_run: bool) -> list[Verdict]:
    """Return what stays and what goes; ``Run.gc`` says more."""
    raise NotImplementedError((run, dry_run))


def branched(run: RunState, step: int, path: str | os.PathLike[str]) -> None:
    """Copy a step into a new run; ``Run.branch`` says more."""
    raise NotImplementedError((run, step, path))
