"""A process that waits in a joint save tells those that make another joint call instead, and they tell it.

Saves after the first one use no collectives, and other calls no messages of saves: so each would wait for its whole
time. A process that has waited for a second in the save of a step leaves a note in the folder of the run. One that
waits in a collective looks there for a save that it has not begun.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from treering._coordination.message_board import PathMessageBoard
from treering._coordination.messages import VoteMessage, VoteStage
from treering._coordination.operations import Call
from treering._store.run_folder import step_of_name
from treering._values import timing
from treering._values.checkpoint_names import arrival_name
from treering.errors import Corrupt

_LEAVING: Final = (0, 1)
"""The processes that leave notes: whoever looks reads one or two, however many there are."""


@contextlib.contextmanager
def leave_note(call: Call, path: Path, pause: Callable[[float], None]) -> Iterator[Callable[[float], None]]:
    """Give what sleeps in place of ``pause`` while a process waits for others in the save of a step.

    Args:
        call: the save.
        path: the folder of the step; where it is that of no run, no note is left.
        pause: sleeps.
    """
    if call.processes.this not in _LEAVING or step_of_name(path.name) is None:
        yield pause
        return
    board, name = PathMessageBoard(path.parent), arrival_name(call.attempt, call.processes.this)
    due: float | None = time.monotonic() + min(timing.current.heartbeat_first, call.timeout / 8)

    def sleep(seconds: float) -> None:
        nonlocal due
        if due is not None and time.monotonic() >= due:
            due = None
            message = VoteMessage(stage=VoteStage.PREPARING, who=call.who, payload=path.name.encode())
            with contextlib.suppress(OSError):
                board.put(name, message.encode())
        pause(seconds)

    try:
        yield sleep
    finally:
        if due is None:
            with contextlib.suppress(OSError):
                board.remove_all((name,))


def find_note(folder: Path, attempt: str, this: int) -> tuple[int, Path] | None:
    """Return which process waits in a save of an attempt, and where; None if none says so.

    Args:
        folder: that of a run, or of a step.
        attempt: the attempt.
        this: the process that asks.
    """
    run = folder if step_of_name(folder.name) is None else folder.parent
    for saver in _LEAVING:
        data = None
        with contextlib.suppress(OSError):
            data = PathMessageBoard(run).get(arrival_name(attempt, saver)) if saver != this else None
        with contextlib.suppress(Corrupt, UnicodeDecodeError):
            if data is not None and step_of_name(name := VoteMessage.decode(data).payload.decode()) is not None:
                return saver, run / name
    return None
