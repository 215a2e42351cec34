"""All processes of a job meet: each brings a few bytes and gets those of all, or an error before long.

A collective whose peer does not come blocks the thread that asked for it, for ever. So it runs in a thread of its own,
while the caller's thread stands still (the collective keeps its place in the caller's order) and waits with a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeVar

from treering._values.processes import Processes

if TYPE_CHECKING:
    from treering._store.notes import Notes

__all__ = ["PAYLOAD_BYTES", "assembled", "in_step"]

T = TypeVar("T")

PAYLOAD_BYTES: Final = 512
"""What a process can bring to an assembly, at most."""


def assembled(payload: bytes, processes: Processes, *, timeout: float, notes: Notes | None, doing: str) -> list[bytes]:
    """Return what each process brought, in their order; all processes have to call this.

    Args:
        payload: what this one brings, up to ``PAYLOAD_BYTES``.
        processes: those of the job; for one alone its own payload comes back.
        timeout: seconds to wait for the others.
        notes: where signs of life are left and looked for; None where nothing can be written.
        doing: what the caller is about to do, as in ``"load '/runs/7'"``.

    Raises:
        Timeout: others did not come in time; ``missing`` holds those that gave no sign of life.
        ProcessFailed: another process broke off.
    """
    raise NotImplementedError


def in_step(work: Callable[[], T], processes: Processes, *, timeout: float, notes: Notes | None, doing: str) -> T:
    """Return what ``work`` returns: something that needs all processes, such as a collective.

    It runs in a thread of its own, which is left behind when the deadline passes. Later work begins after it has
    ended, so that all processes do the same things in the same order.

    Args:
        work: what is done; all processes have to do the same.
        processes: those of the job.
        timeout: seconds to wait for it.
        notes: where signs of life are left and looked for; None where nothing can be written.
        doing: what the caller is about to do, as in ``"load '/runs/7'"``.

    Raises:
        Timeout: others did not come in time; ``missing`` holds those that gave no sign of life.
        ProcessFailed: another process broke off.
    """
    raise NotImplementedError
