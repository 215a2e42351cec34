"""What process 0 knows of a run, told to all processes of the job; where one fails, all do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from treering._arrays.processes import this_processes
from treering._checkpoint.joint_load import encode_reply
from treering._coordination.allgather import assembled
from treering._coordination.message_board import PathNotes
from treering._coordination.messages import Failure
from treering.errors import TreeringError

T = TypeVar("T", bound=int | None)


def said_by_first(
    work: Callable[[], T], *, path: Path, doing: str, timeout: float, before: Callable[[], None] = lambda: None
) -> T:
    """Return what ``work`` returns on process 0; all processes of the job call this, on the caller's thread.

    Args:
        work: what process 0 does; the answer has a form in JSON.
        path: the folder of the run, where signs of life are left.
        doing: what for, as in ``"load the latest step of 'runs/a'"``.
        timeout: seconds to wait for the others.
        before: what each process does first; where it raises, all do.

    Raises:
        Timeout, ProcessFailed: others did not come, or broke off.
        TreeringError: what was raised on another process; this one raises its own.

    Example:
        >>> said_by_first(lambda: 7, path=Path("runs/a"), doing="look", timeout=10)
        7
    """
    processes = this_processes(())
    said: dict[str, T] = {}
    failed: Exception | None = None
    try:
        before()
        if processes.leads:
            said["answer"] = work()
    except Exception as error:
        if processes.count == 1:
            raise
        failed = error
    if processes.count == 1:
        return said["answer"]
    notes = PathNotes(os.fspath(path)) if path.is_dir() else None
    payload = encode_reply(said, None if failed is None else Failure.of(failed))
    try:
        rows = assembled(payload, processes, timeout=timeout, notes=notes, doing=doing)
    except TreeringError as error:
        raise failed or error from None
    if failed is not None:
        raise failed
    heard = [json.loads(row) for row in rows]
    failures = tuple(number for number, one in enumerate(heard) if "failure" in one)
    if failures:
        first = Failure.from_node(heard[failures[0]]["failure"], "what a process said")
        raise first.blamed_on(f"process {failures[0]}").error(f"could not {doing}", failures)
    answer: T = heard[0]["answer"]
    return answer
