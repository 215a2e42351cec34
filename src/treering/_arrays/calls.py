"""Joint saves are counted: all processes know the name of the next one without a word.

At the first one the processes agree on a random name of the job, and that they all see the same folder. After that
call number 7 of one process is call number 7 of every other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from treering._values.processes import Processes

if TYPE_CHECKING:
    from treering._store.rendezvous import Call

__all__ = ["next_call", "out_of_step"]


def next_call(path: Path, processes: Processes, *, timeout: float, doing: str) -> Call:
    """Count a joint save of this process and return it; the first one lets all processes agree on the job's name.

    Args:
        path: the folder that is saved into. Process 0 makes it, if it is missing, at the first call.
        processes: those of the job, more than one.
        timeout: seconds to wait for the others.
        doing: what the caller is about to do, as in ``"save '/runs/7'"``.

    Raises:
        Timeout: others did not come in time.
        ProcessFailed: another process broke off.
        NotShared: not all processes see the same folder at the path; ``processes`` holds those that do not see what
            process 0 writes.
        StoreFailed: process 0 cannot write there.
    """
    raise NotImplementedError


def out_of_step(call: Call, number: int) -> None:
    """Take ``number`` for that of this process's last call, as process 0 is there already; the next ones match again."""
    raise NotImplementedError
