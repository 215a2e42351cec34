"""A store with the troubles of a network file system or of a bucket, drawn from a seed."""

from __future__ import annotations

import errno
import functools
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import Any

from treering._store.api import LARGEST_DOCUMENT, Document, Entry, Held, Outcome, Store, Transaction, Version
from treering._values.checkpoint_names import INDEX


def _forward(name: str, *, about: str | None = None, troubled: str | None = None, of: type = Store) -> Any:
    """Return a method that asks the store inside, by way of the method ``troubled`` if there is one.

    What it is about, for messages, is its first argument, or ``about``.
    """

    @functools.wraps(getattr(of, name), updated=())  # or it would be abstract
    def method(self: Any, *arguments: Any, **named: Any) -> Any:
        ask = functools.partial(getattr(self._inner, name), *arguments, **named)
        return getattr(self, troubled)(about or (arguments or tuple(named.values()))[0], ask) if troubled else ask()

    return method


class FaultyStore(Store):
    """Another store, with the troubles of a network file system: slow, stale and lost answers, drawn from a seed.

    A call that fails raises ``OSError``. Half of the time it was done all the same, as when an answer is lost on its
    way. A conditional change that fails answers UNKNOWN. A stale answer is an older content of the same name, or none.

    Args:
        inner: any store.
        seed: the same seed makes the same trouble, given the same calls.
        slow: the share of calls that take up to ``delay`` seconds longer.
        stale: the share of reads that answer with what was there before.
        failing: the share of calls that fail.
        delay: seconds.
        sleep: waits so many seconds.

    Example:
        >>> from treering._store.objects.memory import MemoryStore
        >>> store = FaultyStore(MemoryStore(), seed=1, stale=1.0)
        >>> store.put(".treering-waiting-00001", b"old")
        >>> store.put(".treering-waiting-00001", b"new")
        >>> found = store.read(".treering-waiting-00001")
        >>> found is None or found.data == b"old"
        True
        >>> FaultyStore(MemoryStore(), seed=1, failing=1.0).read(".treering-waiting-00001")
        Traceback (most recent call last):
        ...
        OSError: [Errno 5] the answer about '.treering-waiting-00001' is lost
    """

    def __init__(
        self,
        inner: Store,
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
        self._slow, self._stale, self._failing = slow, stale, failing
        self._delay, self._sleep = delay, sleep
        self._older: dict[str, list[Document | None]] = {}
        self._lock = threading.Lock()

    @property
    def path(self) -> PurePath:  # type: ignore[override]
        """The place of the store inside."""
        return self._inner.path

    open, close = map(_forward, ("open", "close"))
    find, open_file = (_forward(name, troubled="ask") for name in ("find", "open_file"))
    names = _forward("names", about="the names", troubled="ask")
    list = _forward("list", about="a listing", troubled="ask")
    places = _forward("places", about="the places", troubled="ask")
    flush = _forward("flush", about="a flush", troubled="ask")
    put, create = _forward("put", troubled="_change"), _forward("create", troubled="_change")
    replace = _forward("replace", troubled="decide")

    def at(self, name: str) -> FaultyStore:
        """Return the place ``name`` in this one, with the same troubles."""
        with self._lock:
            seed = self._random.getrandbits(32)
        return FaultyStore(
            self._inner.at(name), seed=seed, slow=self._slow, stale=self._stale, failing=self._failing,
            delay=self._delay, sleep=self._sleep,
        )  # fmt: skip

    def transaction(self, name: str = INDEX) -> Transaction:
        """Return a change of the place, with the same troubles."""
        return _FaultyTransaction(self, self._inner.transaction(name), name)

    def read(self, name: str, most: int = LARGEST_DOCUMENT) -> Document | None:
        """Return the content of ``name``, None where there is none.

        Raises:
            OSError: trouble.
        """
        self._require_answer(name)
        if self._happens(self._stale):
            with self._lock:
                older: list[Document | None] = [None, *self._older.get(name, ())]
                return self._random.choice(older)
        return self._inner.read(name, most)

    def remove(self, *names: str) -> None:
        """Remove names; gone already is gone.

        Raises:
            OSError: trouble; it may be done.
        """
        for name in names:
            remove = functools.partial(self._inner.remove, name)
            self._change(name, remove) if name else remove()

    def decide(self, name: str, change: Callable[[], Outcome]) -> Outcome:
        """Make a conditional change whose answer may be lost: UNKNOWN then."""
        try:
            outcome: Outcome = self._change(name, change)
        except OSError:
            return Outcome.UNKNOWN
        return outcome

    def ask(self, name: str, ask: Callable[[], Any]) -> Any:
        """Return an answer.

        Raises:
            OSError: trouble.
        """
        self._require_answer(name)
        return ask()

    def _change(self, name: str, change: Callable[[], Any]) -> Any:
        self._dawdle()
        fails = self._happens(self._failing)
        if not fails or self._happens(0.5):
            before = self._inner.read(name)
            answer = change()
            with self._lock:
                self._older.setdefault(name, []).append(before)
            if not fails:
                return answer
        raise _lost(name)

    def _require_answer(self, name: str) -> None:
        self._dawdle()
        if self._happens(self._failing):
            raise _lost(name)

    def _dawdle(self) -> None:
        if self._happens(self._slow):
            with self._lock:
                seconds = self._random.uniform(0.0, self._delay)
            self._sleep(seconds)

    def _happens(self, share: float) -> bool:
        with self._lock:
            return share > 0.0 and self._random.random() < share


class _FaultyTransaction(Transaction):
    def __init__(self, store: FaultyStore, inner: Transaction, name: str) -> None:
        self._store, self._inner, self._name = store, inner, name

    make, lock, begin, commit, committed, abort, close = (
        _forward(name, of=Transaction) for name in ("make", "lock", "begin", "commit", "committed", "abort", "close")
    )

    def sweep(self, marker: str, data: Sequence[str]) -> Held:
        try:
            life: Held = self._store.ask(marker, lambda: self._inner.sweep(marker, data))
        except OSError:
            return Held.UNKNOWN
        return life

    def delete(self, expected: Version, tombstone: str) -> Outcome:
        return self._store.decide(self._name, lambda: self._inner.delete(expected, tombstone))

    def delete_tombstone(self, found: Entry) -> bool:
        removed: bool = self._store.ask(self._name, lambda: self._inner.delete_tombstone(found))
        return removed


def _lost(name: str) -> OSError:
    return OSError(errno.EIO, f"the answer about {name!r} is lost")
