"""Small files by which the processes of a job tell each other how far they are: put, read by name, removed.

They lie in the folder that is saved into. A message is replaced at once: a reader gets the old one or the new one.
The folder is never listed to find them, because listings of network file systems are the last to become true.

In a large job the messages of each 256 processes lie in a folder of their own below it, those of the first 256 in the
folder itself. Such a folder comes with the first message in it, and goes with the last one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final, Protocol, Self

from treering._coordination.messages import PrepareMessage
from treering._store.api import LARGEST_MESSAGE, Store, open_below
from treering._store.crew import Latch
from treering._store.resolve import is_folder, opened_store
from treering._values import timing
from treering._values.checkpoint_names import (
    attempt_of_message,
    folder_of_message,
    heartbeat_name,
    is_message,
    is_message_folder,
    is_prepare,
)
from treering._values.human import pluralize
from treering._values.processes import Processes
from treering.errors import CorruptError, LinkRefusedError


class MessageBoard(Protocol):
    """Where the processes of a job put their messages."""

    def put(self, name: str, data: bytes) -> None:
        """Make ``data`` the content of the message ``name``, at once, in the place of what was there.

        Raises:
            OSError: the system refused, or its answer was lost; it may be done all the same.
        """

    def get(self, name: str) -> bytes | None:
        """Return the content of the message ``name``; None where there is none.

        Raises:
            OSError: the system refused.
        """

    def remove_all(self, names: Collection[str]) -> object:
        """Remove messages; one that is gone already is removed.

        Raises:
            OSError: the system refused some of them, or its answer was lost.
        """


class FolderMessageBoard:
    """Messages in an open store.

    Example:
        >>> from treering._store.objects.memory import MemoryStore
        >>> board = FolderMessageBoard(MemoryStore())
        >>> board.put(".treering-waiting-00003", b"here")
        >>> board.get(".treering-waiting-00003"), board.get(".treering-waiting-00004")
        (b'here', None)
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def _opened(self) -> contextlib.AbstractContextManager[Store]:
        """Return what opens the place that the messages are in, and closes it if it was not open before."""
        return contextlib.nullcontext(self._store)

    def put(self, name: str, data: bytes) -> None:
        """Put it there in one step.

        Nothing is made durable: only processes that are alive read messages, and a power cut ends them all. What has to
        outlive it is the commit.

        Raises:
            OSError: the system refused, or the message is too large.
            ValueError: it is no name of a message.
        """
        _require_message(name)
        if len(data) > LARGEST_MESSAGE:
            raise OSError(errno.EFBIG, f"a message of {pluralize(len(data), 'bytes')}, more than {LARGEST_MESSAGE}")
        with self._opened() as store:
            if (folder := _folder_of(name)) is None:
                store.put(name, data)
                return
            try:
                with open_below(store, folder) as below:
                    below.put(name, data)
            except FileNotFoundError:
                store.at(folder).transaction().make()
                with open_below(store, folder) as below:
                    below.put(name, data)

    def get(self, name: str) -> bytes | None:
        """Read it, up to the largest size; None where there is no folder.

        Raises:
            OSError: the system refused; a link, a pipe or something too large has that name.
        """
        with contextlib.suppress(FileNotFoundError), self._opened() as store:
            if (folder := _folder_of(name)) is not None:
                with contextlib.suppress(FileNotFoundError), open_below(store, folder) as below:
                    return _read(below, name)
            # Where the folder is not there, it cannot be here either; but a network file system is asked to look again.
            return _read(store, name)
        return None

    def remove_all(self, names: Collection[str]) -> None:
        """Remove them; gone with their folder is gone.

        Raises:
            OSError: the system refused.
            ValueError: one of them is no name of a message.
        """
        by_folder: dict[str | None, list[str]] = {}
        for name in names:
            _require_message(name)
            by_folder.setdefault(_folder_of(name), []).append(name)
        failed: OSError | None = None
        with contextlib.suppress(FileNotFoundError), self._opened() as store:
            for folder, some in by_folder.items():
                try:
                    if folder is None:
                        store.remove(*some)
                    else:
                        _remove_below(store, folder, some)
                except OSError as error:
                    failed = failed or error
        if failed is not None:
            raise failed


def _read(store: Store, name: str) -> bytes | None:
    """Return a message; None where there is none. Raises as `FolderMessageBoard.get` does."""
    try:
        found = store.read(name, LARGEST_MESSAGE + 1)
    except LinkRefusedError as error:
        raise OSError(errno.ELOOP, error.message) from error
    if found is not None and len(found.data) > LARGEST_MESSAGE:
        raise OSError(errno.EFBIG, f"{name!r} is larger than any message")
    return None if found is None else found.data


def _folder_of(name: str) -> str | None:
    return folder_of_message(name, timing.current.fan_out)


def _remove_below(store: Store, folder: str, names: Iterable[str] | None = None) -> None:
    """Remove messages from a folder of messages, all that are there if ``names`` is None; then the folder if empty."""
    with contextlib.suppress(FileNotFoundError):
        with open_below(store, folder) as below:
            below.remove(*(filter(is_message, below.names()) if names is None else names))
        store.at(folder).remove("")


def holds_messages(store: Store, name: str) -> bool:
    """Tell whether a name in a store is a folder with nothing but messages in it.

    Example:
        >>> from treering._store.objects.memory import MemoryStore
        >>> holds_messages(MemoryStore(), "config.json")
        False
    """
    if is_message_folder(name):
        with contextlib.suppress(OSError), open_below(store, name) as below:
            return all(map(is_message, below.names()))
    return False


def _require_message(name: str) -> None:
    if not is_message(name):
        raise ValueError(f"{name!r} is not the name of a message")


class PathMessageBoard(FolderMessageBoard):
    """Messages in the place that is at a path at that moment, if there is one.

    The processes that wait for process 0 to make the folder have none to open yet, and a saver that failed removes the
    one that it had made. A link at the path is followed.

    Attributes:
        path: the path.

    Example:
        >>> import tempfile
        >>> board = PathMessageBoard(tempfile.mkdtemp() + "/not there")
        >>> board.get(".treering-waiting-00003") is None
        True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Self | None:
        """Return the messages at a path; None where there is no place yet.

        Raises:
            StoreError: the system refuses to say.
        """
        return cls(path) if is_folder(path) else None

    def _opened(self) -> Store:
        return opened_store(self.path, quick=True)


def stale_messages(
    names: Iterable[str], is_live: Callable[[str], bool], get: Callable[[str], bytes | None]
) -> tuple[str, ...]:
    """Return those of the names in a folder that are messages, or folders of messages, and may go.

    Args:
        names: names in the folder, of any kind.
        is_live: whether an attempt has a saver that lives; the own attempt has one.
        get: reads a message, for the name of a job's message does not tell its attempt.

    Example:
        >>> names = [".treering-0123456789abcdef-verdict", ".treering-fedcba9876543210-verdict", "config.json"]
        >>> stale_messages(names, "0123456789abcdef".__eq__, lambda name: None)
        ('.treering-fedcba9876543210-verdict',)
    """
    messages = ((name, _attempt_of(name, get)) for name in names if is_message(name) or is_message_folder(name))
    # A sign of life is of no attempt; a process that still waits puts it again.
    return tuple(name for name, attempt in messages if attempt is None or not is_live(attempt))


def sweep_messages(store: Store, names: Iterable[str], is_live: Callable[[str], bool]) -> None:
    """Remove those messages that may go. What cannot be removed stays; it is in nobody's way.

    Args:
        store: the place, whose lock the caller has.
        names: names in it, of any kind.
        is_live: whether an attempt has a saver that lives.

    Raises:
        OSError: whether an attempt lives cannot be found out.

    Example:
        >>> from treering._store.objects.memory import MemoryStore
        >>> store = MemoryStore()
        >>> store.put(".treering-0123456789abcdef-verdict", b"{}")
        >>> sweep_messages(store, store.names(), lambda attempt: False)
        >>> store.names()
        []
    """
    stale = stale_messages(names, is_live, functools.partial(_read, store))
    with contextlib.suppress(OSError):
        store.remove(*(name for name in stale if not is_message_folder(name)))
    for folder in filter(is_message_folder, stale):
        with contextlib.suppress(OSError):
            _remove_below(store, folder)


def _attempt_of(name: str, get: Callable[[str], bytes | None]) -> str | None:
    """Return the attempt that a message is of; None where it is of none, or cannot be read."""
    if not is_prepare(name):
        return attempt_of_message(name)
    with contextlib.suppress(OSError, CorruptError):
        data = get(name)
        return None if data is None else PrepareMessage.decode(data).attempt
    return None


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
        self._worked = False
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
        if not self._worked:
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
            if self._worked:  # else the folder is not there yet, which tells nothing of those who do not make it
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
            self._no_folder = isinstance(error, FileNotFoundError)
            return False
        self._worked = True
        return True

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
