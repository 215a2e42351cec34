"""The steps of a joint save, carried out on real notes and real data."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from treering._store.notes import Notes
from treering._store.rendezvous import Steps

__all__ = ["Deeds", "driven"]


class Deeds(Protocol):
    """What a process does for a joint save, beside talking."""

    def work(self) -> bytes:
        """Write the own data, make it durable, return what process 0 needs for the commit."""

    def commit(self, parts: Sequence[bytes]) -> None:
        """Commit, given what the work of each process has answered, in order. Only process 0 is asked."""

    def withdraw(self) -> None:
        """Remove the own data, if any was written.

        Process 0 is asked when all others have left: it may then remove whatever there is of the attempt, its proof
        too, unless the commit did happen after all. Where it is not asked, the proof that the attempt's data are
        leftovers has to stay.
        """


def driven(
    steps: Steps,
    notes: Notes,
    deeds: Deeds,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Carry out the steps, until they end or raise.

    Raises:
        Timeout: another process did not come.
        TreeringError: another process failed, or this one.
    """
    raise NotImplementedError
