"""Signs of life: while a process waits for others it leaves messages, so that those that are missing can be named."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Final

from treering._coordination.message_board import MessageBoard
from treering._store.crew import Latch
from treering._values import timing
from treering._values.checkpoint_names import heartbeat_name
from treering._values.processes import Processes

# Messages of one process differ from those that an earlier run of it left.
_THIS_RUN: Final = secrets.token_hex(8)
_CROWD: Final = 256
"""In jobs of more processes than that, each puts heartbeats less often."""


class Heartbeat:
    """Those of one process, while it waits at one point.

    The first comes after a second, for mostly all come at once; with a short deadline earlier. The messages of others
    are only read when their silence counts: thousands of processes would else read millions of messages. While a
    process waits it puts its name less than once a second, because some buckets refuse more; of more than 256 processes
    each puts its own less often.

    Args:
        processes: those of the job.
        board: where signs are left; None where nothing can be written.
        doing: what the process waits for, for whoever reads the messages.
        timeout: seconds that it is going to wait.
        maker: the process that makes the folder of the messages, if it is not there, before it comes; None where nobody
            is sure to.
        number: that of the call, which all processes count alike.
        look: called with each sign, for whoever knows where else the others may be; what it raises ends the wait.
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
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self._look = look
        self._processes = processes
        self._board = board
        self._doing = doing
        self._maker = maker
        self._no_folder = False
        # Not a word of it differs between processes, but for the mark that process 0 may put behind it.
        self._parting = b"call %d ended here with an error of the others " % number
        of = timing.current
        # Not longer: within the window there are to be several, for a put may take long.
        self._crowd = min(max(1.0, processes.count / _CROWD), 2.0)
        self._every = min(of.heartbeat_every * self._crowd, timeout / 8)
        self._next = time.monotonic() + min(of.heartbeat_first, timeout / 8)
        self._left = 0
        self._works = self._worked = False
        self._before: dict[int, bytes | None] | None = None

    def wait(self, event: Latch, deadline: float) -> bool:
        """Wait for something of this process; whether it came before the deadline."""
        look = max(self._next, deadline - timing.current.heartbeat_window)
        while True:
            wake = min(self._next, look if self._before is None else deadline)
            if event.wait(max(0.0, min(wake, deadline) - time.monotonic())):
                return True
            if (now := time.monotonic()) >= deadline:
                return event.is_set()
            if now >= self._next:
                self._leave()
                self._look()
            if self._before is None and now >= look:
                self._before = self._seen(self._processes.others)

    def silent(self) -> tuple[int, ...] | None:
        """Return the processes that gave no sign while this one waited last; None where that cannot be told.

        Where the folder is not there, of the others only who should have made it can be told.
        """
        if self._board is None:
            return None
        if self._before is None:  # this process was kept from running while it waited
            return self.silent_after(2 * self._every / self._crowd)
        now = self._seen(self._before)
        # Where messages could be left once, the folder went with the process that had made it.
        if not self._works and not self._worked:
            return (self._maker,) if self._no_folder and self._maker is not None else None
        # A message that is gone is a sign as well: its process has left on its own feet. So is one that says so.
        parting, before = self._parting, self._before
        return tuple(
            number
            for number, after in now.items()
            if before[number] == after and not (after and after.startswith(parting))
        )

    def silent_after(self, seconds: float) -> tuple[int, ...] | None:
        """Wait for signs of the others for so long, less if all of them give one; return those that gave none.

        Of more than 256 processes it waits longer, for they give signs less often; and where reading takes long.
        """
        seconds *= self._crowd
        self._every = min(self._every, seconds / 2)
        self._leave()
        begun = time.monotonic()
        earlier, now = self._before or {}, self._seen(self._processes.others)
        # Each looks twice at all others, and puts a sign between the two.
        deadline = time.monotonic() + seconds + (time.monotonic() - begun)
        # Whoever knew it first has left by now, and has taken its message along. The dead leave theirs.
        self._before = {
            number: message for number, message in now.items() if message is not None or earlier.get(number) is None
        }
        while (silent := self.silent()) and time.monotonic() < deadline:
            # Whoever gave a sign may have left since as well, and is not looked at again.
            self._before = {number: self._before.get(number) for number in silent}
            time.sleep(min(self._every, timing.current.heartbeat_look))
            if time.monotonic() >= self._next:
                self._leave()
        return silent

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
        self._next = time.monotonic() + self._every

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

    def _seen(self, processes: Iterable[int]) -> dict[int, bytes | None]:
        """Return the messages of processes; this one gives signs meanwhile."""
        seen: dict[int, bytes | None] = {}
        for number in processes:
            if time.monotonic() >= self._next:
                self._leave()
            seen[number] = None
            with contextlib.suppress(OSError):  # being replaced, on a file system that cannot do it at once
                seen[number] = self._board.get(heartbeat_name(number)) if self._board is not None else None
        return seen
