"""What processes reply to each other in a collective, as JSON: an answer, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from treering._codec.documents import json_text
from treering._coordination.allgather import PAYLOAD_BYTES, allgather_with_deadline
from treering._coordination.message_board import MessageBoard
from treering._coordination.messages import Failure
from treering._values.processes import Processes
from treering.errors import TreeringError

T = TypeVar("T", bound=int | None)


def broadcast(
    work: Callable[[], T],
    processes: Processes,
    *,
    board: Callable[[], MessageBoard | None],
    timeout: float,
    doing: str,
    before: Callable[[], None] = lambda: None,
) -> T:
    """Return what ``work`` returns on process 0; all processes of the job call this, on the caller's thread.

    Args:
        work: what process 0 does; the answer has a form in JSON.
        processes: those of the job.
        board: returns where heartbeats are put; None where nothing can be written.
        timeout: seconds to wait for the others.
        doing: what for, as in ``"load the latest step of 'runs/a'"``.
        before: what each process does first; if it raises, all processes raise.

    Raises:
        TimedOutError, ProcessFailedError: other processes did not come, or broke off.
        TreeringError: what was raised on another process; this one raises its own.

    Example:
        >>> broadcast(lambda: 7, Processes(this=0, count=1), board=lambda: None, timeout=10, doing="look")
        7
    """
    said: dict[str, T] = {}
    failed: Exception | None = None
    try:
        before()
        if processes.is_coordinator:
            said["answer"] = work()
    except Exception as error:
        if processes.count == 1:
            raise
        failed = error
    if processes.count == 1:
        return said["answer"]
    payload = encode_reply(said, None if failed is None else Failure.of(failed))
    try:
        rows = allgather_with_deadline(payload, processes, timeout=timeout, board=board(), doing=doing)
    except TreeringError as error:
        raise failed or error from None
    if failed is not None:
        raise failed
    replies = [json.loads(row) for row in rows]
    raise_failures(replies, doing)
    answer: T = replies[0]["answer"]
    return answer


def encode_reply(said: dict[str, Any], failure: Failure | None) -> bytes:
    """Return what a process says; of a long error the hint and the end are left out."""
    if failure is None:
        return json_text(said).encode()
    return json_text({"failure": failure.fit(PAYLOAD_BYTES - len('{"failure":}')).to_node()}).encode()


def raise_failures(replies: Sequence[dict[str, Any]], doing: str) -> None:
    """Raise what the first process failed at, if any did."""
    if failed := tuple(number for number, reply in enumerate(replies) if "failure" in reply):
        first = Failure.from_node(replies[failed[0]]["failure"], "the message of a process")
        raise first.attribute_to(f"process {failed[0]}").to_error(f"could not {doing}", failed)
