"""A store with the troubles of a network file system or of a bucket, drawn from a seed."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

from treering._store.api import (
    ANY,
    LARGEST_DOCUMENT,
    Anything,
    Claim,
    Document,
    Entry,
    Held,
    Outcome,
    Reader,
    Store,
    Version,
)
from treering._store.pieces import Buffer

_Answer = TypeVar("_Answer")


class FaultyStore(Store):
    """Another store, with the troubles of a network file system: slow, stale and lost answers, drawn from a seed.

    A call that fails raises ``OSError``. Half of the time it was done all the same, as when an answer is lost on its
    way. A stale answer is an older content of the same name, or none.

    Args:
        inner: any store, or what keeps messages only.
        seed: the same seed makes the same trouble, given the same calls.
        slow: the share of calls that take up to ``delay`` seconds longer.
        stale: the share of reads that answer with what was there before.
        failing: the share of calls that fail.
        delay: seconds.
        sleep: waits so many seconds.

    Example:
        >>> from treering._store.memory import MemoryStore
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
        inner: Any,
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

    @property
    def path(self) -> PurePath:  # type: ignore[override]
        """The place of the store inside."""
        path: PurePath = self._inner.path
        return path

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
        found: bytes | None = self._inner.get(name)
        return found

    def remove(self, name: str, expected: Version | Anything = ANY) -> Outcome:
        """Remove ``name``; gone already is gone.

        Raises:
            OSError: trouble; it may be done.
        """
        if expected is ANY:
            self._change(name, lambda: self._inner.remove(name))
            return Outcome.DONE
        return self._decide(name, lambda: self._inner.remove(name, expected))

    def replace(
        self, name: str, data: bytes, expected: Version | Anything | None = ANY, *, sweep: bool = True
    ) -> Outcome:
        """Make ``data`` the content of a document; UNKNOWN for trouble."""
        return self._decide(name, lambda: self._inner.replace(name, data, expected, sweep=sweep))

    def create(self, name: str, buffers: Iterable[Buffer], size: int, *, like: Version | None = None) -> None:
        """Write data; OSError for trouble, and it may be done."""
        self._change(name, lambda: self._inner.create(name, buffers, size, like=like))

    def retire(self, name: str, new: str, expected: Version) -> Outcome:
        """Give a document another name; UNKNOWN for trouble."""
        return self._decide(name, lambda: self._inner.retire(name, new, expected))

    def read(self, name: str, most: int = LARGEST_DOCUMENT) -> Document | None:
        """Return a document; OSError for trouble."""
        found: Document | None = self._ask(name, lambda: self._inner.read(name, most))
        return found

    def find(self, name: str) -> Entry | None:
        """Return what is known of a name; OSError for trouble."""
        found: Entry | None = self._ask(name, lambda: self._inner.find(name))
        return found

    def names(self) -> list[str]:
        """Return the names; OSError for trouble."""
        return self._ask("the names", self._inner.names)

    def places(self) -> list[str]:
        """Return the places; OSError for trouble."""
        return self._ask("the places", self._inner.places)

    def open_file(self, name: str) -> Reader:
        """Open data; OSError for trouble."""
        file: Reader = self._ask(name, lambda: self._inner.open_file(name))
        return file

    def flush(self) -> None:
        """Make all of it durable; OSError for trouble."""
        self._ask("a flush", self._inner.flush)

    def open(self, *, quick: bool = False) -> None:
        """Begin to use the place."""
        self._inner.open(quick=quick)

    def make(self) -> None:
        """Make the place."""
        self._inner.make()

    def close(self) -> None:
        """Let go of it."""
        self._inner.close()

    def lock(self) -> bool:
        """Keep other writers out, as the store inside does."""
        held: bool = self._inner.lock()
        return held

    def unlock(self) -> None:
        """Let others in."""
        self._inner.unlock()

    def at(self, name: str) -> Store:
        """Return a place below without trouble."""
        store: Store = self._inner.at(name)
        return store

    def claim(self, marker: str, name: str, base: Version | None) -> Claim:
        """Return an attempt of the store inside."""
        claim: Claim = self._inner.claim(marker, name, base)
        return claim

    def sweep(self, marker: str, data: Sequence[str], name: str, current: Version | None) -> Held:
        """Remove what an attempt left; UNKNOWN for trouble."""
        try:
            life: Held = self._ask(marker, lambda: self._inner.sweep(marker, data, name, current))
        except OSError:
            return Held.UNKNOWN
        return life

    def held(self, marker: str) -> Held:
        """Whether the writer of a marker lives; UNKNOWN for trouble."""
        return Held.UNKNOWN if self._happens(self._failing) else self._inner.held(marker)

    def _decide(self, name: str, change: Callable[[], Outcome]) -> Outcome:
        """Make a conditional change whose answer may be lost."""
        answers: list[Outcome] = []
        try:
            self._change(name, lambda: answers.append(change()))
        except OSError:
            return Outcome.UNKNOWN
        return answers[0]

    def _ask(self, name: str, ask: Callable[[], _Answer]) -> _Answer:
        self._dawdle()
        if self._happens(self._failing):
            raise _lost(name)
        return ask()

    def _change(self, name: str, change: Callable[[], object]) -> None:
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
