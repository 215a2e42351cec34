"""What a call knows already while it finds out what stands at a path and opens that: nothing is asked twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any, Final, TypeVar

T = TypeVar("T")

_KNOWN: Final[ContextVar[dict[Hashable, Any] | None]] = ContextVar("_KNOWN", default=None)
# The first 256 KiB of an object may be one of them.
_MOST_KNOWN: Final = 64


@contextlib.contextmanager
def asking(*, once: bool) -> Iterator[None]:
    """Within, let this thread take what it was told as the answer to the same question; or not, inside of that.

    Only for what looks at a place and opens it: who asks whether something has changed has to ask anew.

    Example:
        >>> with asking(once=True):
        ...     remembered("size", lambda: 1), remembered("size", lambda: 2)
        (1, 1)
    """
    known = _KNOWN.get()
    token = _KNOWN.set(None if not once else {} if known is None else known)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def known_answers() -> dict[Hashable, Any] | None:
    """Return what is known, by question; None where everything is asked anew."""
    return _KNOWN.get()


def remembered(question: Hashable, ask: Callable[[], T]) -> T:
    """Return the answer that is known to a question, or that ``ask`` returns; inside of `asking` it is known then."""
    if (known := _KNOWN.get()) is None:
        return ask()
    if question in known:
        found: T = known[question]
        return found
    answer = ask()
    if len(known) < _MOST_KNOWN:
        known[question] = answer
    return answer
