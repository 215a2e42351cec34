"""A step of a run: whether it is saved, as what, and what has to happen once it is durable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from treering._ops.pending import PendingSave
from treering._ops.run_state import RunState

__all__ = ["StepSave", "save_step"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSave:
    """What ``Run.save`` did, and why. It is true where the step is being saved."""

    step: int
    """Its number."""
    saved: bool
    """Whether it is being saved; False where ``save_every`` says that it is not its turn."""
    reason: str
    """Why, in words for people."""
    temporary: bool = False
    """Whether it goes when a newer step is committed."""
    pending: PendingSave | None = None
    """The save in flight; None where nothing is saved."""

    def __bool__(self) -> bool:
        return self.saved

    def result(self, timeout: float | None = None) -> None:
        """Wait until the step is durable, and every step removed that has to go; return at once where nothing is saved.

        Raises:
            Timeout: it is not done in that time; it goes on.
            TreeringError: it failed.
        """
        if self.pending is not None:
            self.pending.result(timeout)


def save_step(
    run: RunState,
    step: int,
    tree: Any,
    *,
    metrics: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None,
    overwrite: bool,
    force: bool,
) -> StepSave:
    """Save a step of ``run``; ``Run.save`` says more."""
    raise NotImplementedError((run, step, tree, metrics, metadata, overwrite, force))
