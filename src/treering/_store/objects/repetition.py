"""Requests that are made again until they are answered, and ranges of which several are under way."""

from __future__ import annotations

import abc
import dataclasses
import errno
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from treering._printable import hide_secrets, printable
from treering._store.crew import FirstError, work_together
from treering._store.objects.reading import Span, plan_spans
from treering._store.objects.request_failures import Cause, failure_of, panic_of
from treering._store.objects.requests import PATIENCE, Answer, ObjectVersion, require_answer
from treering._values.telemetry import LOGGER, TRAFFIC
from treering.errors import Unsupported

_THREADS: Final = 8
_FIRST_PAUSE: Final = 0.1
_FIRST_SLOW_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 15.0
_FIRST_CONTACT: Final = 10.0
"""Seconds in which a server must be reached that never was: its URL may be wrong."""

_ANEW: Final = 5.0

PASSING: Final = frozenset({Cause.PASSING, Cause.CONFLICT})
"""Why a request is made again."""


def requests_at_once(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many requests this process makes at once: more would only wait for each other in the network.

    Raises:
        Unsupported: the environment has no number of them.

    Example:
        >>> requests_at_once({}), requests_at_once({"TREERING_BUCKET_REQUESTS": "4"})
        (16, 4)
    """
    text = environment.get("TREERING_BUCKET_REQUESTS") or "16"
    if not (text.isascii() and text.isdigit() and int(text)):
        raise Unsupported(f"TREERING_BUCKET_REQUESTS is {text!r:.100}, but must be a number of requests")
    return int(text)


_SLOTS = threading.BoundedSemaphore(requests_at_once())
"""Of this process, beside the parts of uploads."""
if hasattr(os, "register_at_fork"):
    # The requests that were under way are not those of a fork.
    os.register_at_fork(after_in_child=lambda: globals().update(_SLOTS=threading.BoundedSemaphore(requests_at_once())))


@dataclasses.dataclass(slots=True)
class _Silence:
    """What is known of a server that does not answer: since when, and what was asked first."""

    since: float
    first: str
    last: float
    over: bool = False
    """Whether a request was given up."""


class RepeatingClient(abc.ABC):
    """A client that makes a request again until it is answered, or its patience is over.

    The patience is that with the server, not with each request: it is counted from the first one that was not answered
    to the next answer. What is asked after it is over, as a save that failed does to remove its data, is asked once. A
    call that begins later than that has the whole patience again.

    Args:
        shown: the bucket or server, as messages call it.
        patience: seconds after which nothing is asked again that was not answered.
    """

    def __init__(self, shown: str, patience: float = PATIENCE) -> None:
        self.shown = shown
        self._patience = patience
        self._reached = False
        self._silence: _Silence | None = None

    @property
    def patience(self) -> float:
        """Seconds after which nothing is asked again that was not answered; below 0 where that is so already."""
        silence = self._silence
        if silence is None or (silence.over and time.monotonic() - silence.last > _ANEW):
            return self._patience
        return -1.0 if silence.over else self._patience - (time.monotonic() - silence.since)

    def read_into(self, name: str, version: ObjectVersion, jobs: Sequence[tuple[int, memoryview]]) -> None:
        """Fill each buffer with the bytes from its offset on, by several requests at once.

        Raises:
            FileNotFoundError: that version is gone.
            PermissionError: the server denies it.
            OSError: it cannot be read.
        """
        todo = deque(plan_spans(jobs))
        failure = FirstError()

        def work() -> None:
            while failure.error is None:
                with failure:
                    try:
                        span = todo.popleft()
                    except IndexError:
                        return
                    answer = require_answer(self.shown, self._fetch(name, version, span))
                    TRAFFIC.add(received=span.stop - span.start)
                    if answer.found is None or answer.found.version != version:
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

        work_together(work, max(0, min(len(todo), _THREADS) - 1))
        failure.reraise()

    @abc.abstractmethod
    def _fetch(self, name: str, version: ObjectVersion, span: Span) -> Answer:
        """Fill the buffers of a span, if it is of that version; the answer says which one it is of."""

    def _renew(self) -> bool:
        """Forget credentials that were denied; False where there are no others."""
        return False

    def _note_silence(self, begun: float, what: str) -> _Silence:
        """Note that a request that began then was not answered; return what is known since the last answer."""
        self._silence = silence = self._silence or _Silence(begun, what, begun)
        silence.last = time.monotonic()
        return silence

    def _repeat(self, call: Callable[[], Answer], what: str, right: str = "", *, once: bool = False) -> Answer:
        """Make a request, called ``what``, once, or until it is answered; ``right`` is what it needs."""
        if self.patience == self._patience:
            self._silence = None
        begun = time.monotonic()
        pauses = _pauses()
        while True:
            try:
                with _SLOTS:
                    TRAFFIC.add(requests=1)
                    answer = call()
                    self._reached, self._silence = True, None
                    return answer
            except BaseException as error:  # noqa: BLE001 - a panic is no Exception; what is none of the server's is raised again there
                failure = panic_of(error) or failure_of(error)
            self._reached = self._reached or not failure.unconnected
            patience = self._patience if self._reached else min(self._patience, _FIRST_CONTACT)
            if failure.cause is Cause.DENIED and self._renew():
                continue  # with new credentials; what was denied has not happened
            if failure.cause not in PASSING:
                self._silence = None
                return failure.answer(self.shown, right)
            silence = self._note_silence(begun, what)
            pause = next(pauses) * (_FIRST_SLOW_PAUSE / _FIRST_PAUSE if failure.slow_down else 1)
            pause = min(pause, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            # Where others are answered, this one has its own time.
            if once or silence.over or time.monotonic() + pause > min(begun, silence.since) + patience:
                silence.over = silence.over or not once
                if not (once or self._reached):
                    raise failure.error(self.shown)
                return failure.answer(self.shown, first=silence.first)
            TRAFFIC.add(retries=1)
            LOGGER.info("%s: %s; next try in %.1f s", self.shown, printable(hide_secrets(failure.reason)), pause)
            time.sleep(pause)


def _pauses() -> Iterator[float]:
    pause = _FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)
