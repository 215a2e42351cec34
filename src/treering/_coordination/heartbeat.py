"""Signs of life: while a process waits for others it leaves messages, so that those that are missing can be named."""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Final

from treering._coordination.message_board import MessageBoard
from treering._store.waiters import Latch
from treering._values import timing
from treering._values.checkpoint_names import heartbeat_name
from treering._values.processes import Processes

# Messages of one process differ from those that an earlier run of it left.
_THIS_RUN: Final = secrets.token_hex(8)


class Heartbeat:
    """Those of one process, while it waits at one point.

    The first comes after a second, for mostly all come at once; with a short deadline earlier. The messages of others
    are only read when their silence counts: thousands of processes would else read millions of messages.

    Args:
        processes: those of the job.
        board: where signs are left; None where nothing can be written.
        doing: what the process waits for, for whoever reads the messages.
        timeout: seconds that it is going to wait.
        maker: the process that makes the folder of the messages, if it is not there, before it comes; None where nobody
            is sure to.
        number: that of the call, which all processes count alike.
    """

    def __init__(
        self,
        processes: Processes,
        board: MessageBoard | None,
        doing: str,
        timeout: float,
        maker: int | None = None,
        *,
        number: int = 0,
    ) -> None:
        self._processes = processes
        self._board = board
        self._doing = doing
        self._maker = maker
        self._no_folder = False
        # Not a word of it differs between processes, but for the mark that process 0 may put behind it.
        self._parting = b"call %d ended here with an error of the others " % number
        self._every = min(timing.current.heartbeat_every, timeout / 8)
        self._next = time.monotonic() + min(timing.current.heartbeat_first, timeout / 8)
        self._left = 0
        self._works = self._worked = False
        self._before: list[bytes | None] | None = None

    def wait(self, event: Latch, deadline: float) -> bool:
        """Wait for something of this process; whether it came before the deadline."""
        while not event.wait(max(0.0, min(self._next, deadline) - time.monotonic())):
            if (now := time.monotonic()) >= deadline:
                return event.is_set()
            self._leave()
            self._next = time.monotonic() + self._every
            if self._before is None and now >= deadline - timing.current.heartbeat_window:
                self._before = self._seen()
        return True

    def silent(self) -> tuple[int, ...] | None:
        """Return the processes that gave no sign while this one waited last; None where that cannot be told.

        Where the folder is not there, of the others only who should have made it can be told.
        """
        if self._board is None:
            return None
        if self._before is None:  # this process was kept from running while it waited
            return self.silent_after(2 * self._every)
        now = self._seen()
        # Where messages could be left once, the folder went with the process that had made it.
        if not self._works and not self._worked:
            return (self._maker,) if self._no_folder and self._maker is not None else None
        others = zip(self._processes.others, self._before, now, strict=True)
        # A message that is gone is a sign as well: its process has left on its own feet. So is one that says so.
        parting = self._parting
        return tuple(
            number for number, before, after in others if before == after and not (after and after.startswith(parting))
        )

    def silent_after(self, seconds: float) -> tuple[int, ...] | None:
        """Wait for signs of the others for so long, less if all of them give one; return those that gave none."""
        self._leave()
        earlier, self._before = self._before, self._seen()
        # Whoever knew it first has left by now, and has taken its message along. The dead leave theirs.
        known = zip(self._processes.others, earlier or (), self._before, strict=earlier is not None)
        left = {number for number, before, now in known if before is not None and now is None}
        deadline = time.monotonic() + seconds
        silent = self._silent_but(left)
        while silent and time.monotonic() < deadline:
            time.sleep(min(self._every, timing.current.heartbeat_after_error))
            self._leave()
            # Whoever gave a sign may have left since as well.
            still = self._silent_but(left)
            silent = still and tuple(number for number in silent if number in still)
        return silent

    def _silent_but(self, left: set[int]) -> tuple[int, ...] | None:
        silent = self.silent()
        return silent and tuple(number for number in silent if number not in left)

    def part(self) -> None:
        """Leave a message for those that hear of the same error later: this process lives. The next save sweeps it."""
        if self._put(self._parting):
            self._left = 0

    def end(self) -> None:
        """Remove what this process left, but for a parting message."""
        if self._left and self._board is not None:
            with contextlib.suppress(OSError):  # whoever saves next sweeps it
                self._board.remove_all((heartbeat_name(self._processes.this),))

    def _leave(self) -> None:
        self._left += 1
        self._put(f"{_THIS_RUN} {self._left} waits to {self._doing}\n".encode("utf-8", "backslashreplace"))

    def _put(self, text: bytes) -> bool:
        if self._board is None:
            return False
        try:
            self._board.put(heartbeat_name(self._processes.this), text)
        except OSError as error:  # read-only, or not there
            self._works = False
            self._no_folder = isinstance(error, FileNotFoundError)
        else:
            self._works = self._worked = True
        return self._works

    def _seen(self) -> list[bytes | None]:
        """Return the messages of the others."""
        seen: list[bytes | None] = []
        for number in self._processes.others:
            message = None
            with contextlib.suppress(OSError):  # being replaced, on a file system that cannot do it at once
                message = self._board.get(heartbeat_name(number)) if self._board is not None else None
            seen.append(message)
        return seen
