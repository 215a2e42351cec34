"""For tests of saves by many processes: stores that are slow, stale or failing, and what a store must do.

The processes of a job talk through small named notes in the folder that they save into. A *store* is what keeps them:
any object with ``put(name, data)``, ``get(name)`` and ``remove(name)``.
"""

from __future__ import annotations

import abc
import errno
import random
import threading
import time
from collections.abc import Callable

from treering._coordination.message_board import MessageBoard
from treering._values.checkpoint_names import heartbeat_name, vote_name

__all__ = ["FaultyStore", "MemoryStore", "StoreContract"]

_LARGE = 3 << 20
_REPLACED_SIZE = 50_000
_TIMES_REPLACED = 200


class MemoryStore:
    """A store in memory, for threads of one process.

    Example:
        >>> store = MemoryStore()
        >>> store.put(".treering-waiting-00001", b"here")
        >>> store.get(".treering-waiting-00001"), store.get(".treering-waiting-00002")
        (b'here', None)
    """

    def __init__(self) -> None:
        self._notes: dict[str, bytes] = {}

    def put(self, name: str, data: bytes) -> None:
        """Make ``data`` the content of ``name``."""
        self._notes[name] = bytes(data)

    def get(self, name: str) -> bytes | None:
        """Return the content of ``name``, None where there is none."""
        return self._notes.get(name)

    def remove(self, name: str) -> None:
        """Remove ``name``; gone already is gone."""
        self._notes.pop(name, None)


class FaultyStore:
    """Another store, with the troubles of a network file system: slow, stale and lost answers, drawn from a seed.

    A call that fails raises ``OSError``. Half of the time it was done all the same, as when an answer is lost on its
    way. A stale answer is an older content of the same name, or none.

    Args:
        inner: the store that keeps the notes.
        seed: the same seed makes the same trouble, given the same calls.
        slow: the share of calls that take up to ``delay`` seconds longer.
        stale: the share of reads that answer with what was there before.
        failing: the share of calls that fail.
        delay: seconds.
        sleep: waits so many seconds.

    Example:
        >>> store = FaultyStore(MemoryStore(), seed=1, stale=1.0)
        >>> store.put(".treering-waiting-00001", b"old")
        >>> store.put(".treering-waiting-00001", b"new")
        >>> store.get(".treering-waiting-00001") in (b"old", None)
        True
        >>> FaultyStore(MemoryStore(), seed=1, failing=1.0).get(".treering-waiting-00001")
        Traceback (most recent call last):
        ...
        OSError: [Errno 5] the answer about '.treering-waiting-00001' is lost
    """

    def __init__(
        self,
        inner: MessageBoard,
        *,
        seed: int,
        slow: float = 0.0,
        stale: float = 0.0,
        failing: float = 0.0,
        delay: float = 0.1,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._inner = inner
        self._random = random.Random(seed)  # noqa: S311 - no secret is made of it
        self._slow = slow
        self._stale = stale
        self._failing = failing
        self._delay = delay
        self._sleep = sleep
        self._older: dict[str, list[bytes | None]] = {}
        self._lock = threading.Lock()

    def put(self, name: str, data: bytes) -> None:
        """Make ``data`` the content of ``name``.

        Raises:
            OSError: trouble; it may be done.
        """
        self._change(name, lambda: self._inner.put(name, data))

    def get(self, name: str) -> bytes | None:
        """Return the content of ``name``, None where there is none.

        Raises:
            OSError: trouble.
        """
        self._dawdle()
        if self._happens(self._failing):
            raise _lost(name)
        if self._happens(self._stale):
            with self._lock:
                older: list[bytes | None] = [None, *self._older.get(name, ())]
                return self._random.choice(older)
        return self._inner.get(name)

    def remove(self, name: str) -> None:
        """Remove ``name``; gone already is gone.

        Raises:
            OSError: trouble; it may be done.
        """
        self._change(name, lambda: self._inner.remove(name))

    def _change(self, name: str, change: Callable[[], None]) -> None:
        self._dawdle()
        fails = self._happens(self._failing)
        if not fails or self._happens(0.5):
            before = self._inner.get(name)
            change()
            with self._lock:
                self._older.setdefault(name, []).append(before)
        if fails:
            raise _lost(name)

    def _dawdle(self) -> None:
        if self._happens(self._slow):
            with self._lock:
                seconds = self._random.uniform(0.0, self._delay)
            self._sleep(seconds)

    def _happens(self, share: float) -> bool:
        with self._lock:
            return share > 0.0 and self._random.random() < share


def _lost(name: str) -> OSError:
    return OSError(errno.EIO, f"the answer about {name!r} is lost")


class StoreContract(abc.ABC):
    """What a store must do, as tests: name a subclass ``Test...``, say how to make a store, and pytest runs them.

    Example:
        >>> class TestMemoryStore(StoreContract):
        ...     def make_store(self):
        ...         return MemoryStore()
        >>> TestMemoryStore().test_what_was_put_is_read()
    """

    @abc.abstractmethod
    def make_store(self) -> MessageBoard:
        """Return an empty store."""

    def test_what_was_put_is_read(self) -> None:
        """Content comes back, that of each name by itself, and may be empty."""
        store = self.make_store()
        contents = {heartbeat_name(1): b"one", heartbeat_name(2): b"", vote_name("0" * 16, 1): bytes(range(256))}
        for name, data in contents.items():
            store.put(name, data)
        for name, data in contents.items():
            _require_same(store.get(name), data)

    def test_what_was_not_put_is_not_there(self) -> None:
        """A name without content is None, not an error."""
        store = self.make_store()
        _require_same(store.get(heartbeat_name(1)), None)
        store.put(heartbeat_name(1), b"one")
        _require_same(store.get(heartbeat_name(2)), None)

    def test_the_last_put_counts(self) -> None:
        """Content is replaced as a whole, by shorter and by longer one."""
        store = self.make_store()
        for data in (b"one", b"a much longer one", b"x", b""):
            store.put(heartbeat_name(1), data)
            _require_same(store.get(heartbeat_name(1)), data)

    def test_what_was_removed_is_gone(self) -> None:
        """Removing is no error where nothing is; a name can be used again."""
        store = self.make_store()
        store.remove(heartbeat_name(1))
        store.put(heartbeat_name(1), b"one")
        store.put(heartbeat_name(2), b"two")
        store.remove(heartbeat_name(1))
        store.remove(heartbeat_name(1))
        _require_same(store.get(heartbeat_name(1)), None)
        _require_same(store.get(heartbeat_name(2)), b"two")
        store.put(heartbeat_name(1), b"again")
        _require_same(store.get(heartbeat_name(1)), b"again")

    def test_large_content(self) -> None:
        """A few megabytes are one note too."""
        store = self.make_store()
        data = bytes(range(256)) * (_LARGE // 256)
        store.put(heartbeat_name(1), data)
        _require_same(store.get(heartbeat_name(1)), data)

    def test_replacing_is_one_step(self) -> None:
        """Who reads while another replaces gets the old content or the new one, never nothing and never a mixture."""
        store = self.make_store()
        store.put(heartbeat_name(1), bytes(_REPLACED_SIZE))
        begun = threading.Event()
        failures: list[BaseException] = []

        def replace() -> None:
            begun.wait()
            try:
                for number in range(_TIMES_REPLACED):
                    store.put(heartbeat_name(1), bytes([number % 256]) * _REPLACED_SIZE)
            except OSError as error:
                failures.append(error)

        writer = threading.Thread(target=replace)
        writer.start()
        try:
            begun.set()
            while writer.is_alive():
                _require_uniform(store.get(heartbeat_name(1)))
        finally:
            writer.join()
        if failures:
            raise failures[0]
        _require_same(store.get(heartbeat_name(1)), bytes([(_TIMES_REPLACED - 1) % 256]) * _REPLACED_SIZE)


def _require_same(found: bytes | None, wanted: bytes | None) -> None:
    if found != wanted:
        raise AssertionError(f"the store holds {found!r:.80}, not {wanted!r:.80}")


def _require_uniform(found: bytes | None) -> None:
    if found is None or len(found) != _REPLACED_SIZE or len(set(found)) != 1:
        raise AssertionError(f"a reader got a mixture, or nothing: {found!r:.80}")
