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

from treering._store.api import ANY, Held, Outcome, Store, Version


def _forward(name: str, *, about: str | None = None, troubled: str | None = None) -> Any:
    """Return a method that asks the store inside, by way of the method ``troubled`` if there is one.

    What it is about, for messages, is its first argument, or ``about``.
    """

    @functools.wraps(getattr(Store, name), updated=())  # or it would be abstract
    def method(self: FaultyStore, *arguments: Any, **named: Any) -> Any:
        ask = functools.partial(getattr(self._inner, name), *arguments, **named)
        return getattr(self, troubled)(about or (arguments or tuple(named.values()))[0], ask) if troubled else ask()

    return method


class FaultyStore(Store):
    """Another store, with the troubles of a network file system: slow, stale and lost answers, drawn from a seed.

    A call that fails raises ``OSError``. Half of the time it was done all the same, as when an answer is lost on its
    way. A conditional change that fails answers UNKNOWN. A stale answer is an older content of the same name, or none.

    Args:
        inner: any store, or what keeps messages only.
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
        self._slow, self._stale, self._failing = slow, stale, failing
        self._delay, self._sleep = delay, sleep
        self._older: dict[str, list[bytes | None]] = {}
        self._lock = threading.Lock()

    @property
    def path(self) -> PurePath:  # type: ignore[override]
        """The place of the store inside."""
        path: PurePath = self._inner.path
        return path

    open, make, close = map(_forward, ("open", "make", "close"))
    lock, unlock, claim = map(_forward, ("lock", "unlock", "claim"))
    make_below, drop_below = (_forward(name, troubled="_ask") for name in ("make_below", "drop_below"))
    read, find, open_file = (_forward(name, troubled="_ask") for name in ("read", "find", "open_file"))
    names = _forward("names", about="the names", troubled="_ask")
    list = _forward("list", about="a listing", troubled="_ask")
    places = _forward("places", about="the places", troubled="_ask")
    flush = _forward("flush", about="a flush", troubled="_ask")
    put, create = _forward("put", troubled="_change"), _forward("create", troubled="_change")
    replace, retire = _forward("replace", troubled="_decide"), _forward("retire", troubled="_decide")

    def at(self, name: str) -> FaultyStore:
        """Return the place ``name`` in this one, with the same troubles."""
        with self._lock:
            seed = self._random.getrandbits(32)
        return FaultyStore(
            self._inner.at(name), seed=seed, slow=self._slow, stale=self._stale, failing=self._failing,
            delay=self._delay, sleep=self._sleep,
        )  # fmt: skip

    def get(self, name: str) -> bytes | None:
        """Return the content of ``name``, None where there is none.

        Raises:
            OSError: trouble.
        """
        self._require_answer(name)
        if self._happens(self._stale):
            with self._lock:
                older: list[bytes | None] = [None, *self._older.get(name, ())]
                return self._random.choice(older)
        found: bytes | None = self._inner.get(name)
        return found

    def remove(self, name: str, expected: Version = ANY) -> Outcome:
        """Remove ``name``; gone already is gone.

        Raises:
            OSError: trouble; it may be done. Of a version the answer is UNKNOWN.
        """
        if expected is not ANY:
            return self._decide(name, lambda: self._inner.remove(name, expected))
        self._change(name, lambda: self._inner.remove(name))
        return Outcome.DONE

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
        try:
            outcome: Outcome = self._change(name, change)
        except OSError:
            return Outcome.UNKNOWN
        return outcome

    def _ask(self, name: str, ask: Callable[[], Any]) -> Any:
        self._require_answer(name)
        return ask()

    def _change(self, name: str, change: Callable[[], Any]) -> Any:
        self._dawdle()
        fails = self._happens(self._failing)
        if not fails or self._happens(0.5):
            before = self._inner.get(name)
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


def _lost(name: str) -> OSError:
    return OSError(errno.EIO, f"the answer about {name!r} is lost")
