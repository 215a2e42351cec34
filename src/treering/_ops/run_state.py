"""A run, as its recipes see it: where it lies, its policies, what is in flight, and whether it is closed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from treering._ops.folder_path import folder_path
from treering._values.processes import timeout_seconds

if TYPE_CHECKING:
    from treering.cadence import Cadence
    from treering.retention import Policy

__all__ = ["RunState"]


class RunState:
    """A run of this process.

    Args:
        path: its folder.
        keep: which steps stay.
        save_every: when to save.
        timeout: seconds to wait for other processes; None for what the environment says.

    Attributes:
        path: its folder.
        keep: which steps stay.
        save_every: when to save.
        timeout: seconds to wait for other processes.
        closed: whether it saves no more.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: Policy | None,
        save_every: Cadence | None,
        timeout: float | None,
    ) -> None:
        self.path: Path = folder_path(path)
        self.keep = keep
        self.save_every = save_every
        self.timeout = timeout_seconds(timeout)
        self.closed = False

    def wait(self, timeout: float | None) -> None:
        """Wait until nothing of the run is in flight; raise what failed."""

    def close(self) -> None:
        """Wait, and save no more."""

    def leave(self, error: BaseException | None) -> None:
        """Close at the end of a block; where that ended with an error, it passes, with a note of what failed here."""

    def save_on_signal(self, signum: int) -> None:
        """Let a signal save the next step."""

    @property
    def policies(self) -> str:
        """The policies, as they follow the path in a ``repr``."""
        return "".join(
            f", {name}={policy!r}"
            for name, policy in (("keep", self.keep), ("save_every", self.save_every))
            if policy is not None
        )
