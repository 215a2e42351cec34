"""What a call has asked a bucket already, while it finds out what stands at a path and opens that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, Final

_KNOWN: Final[ContextVar[dict[Any, Any] | None]] = ContextVar("_KNOWN", default=None)


@contextlib.contextmanager
def asking(*, once: bool) -> Iterator[None]:
    """Within, take what this thread has asked a bucket as the answer to the same question; or not, inside of that.

    Only for what looks at a place and opens it: who asks whether something has changed has to ask anew.
    """
    known = _KNOWN.get()
    token = _KNOWN.set(None if not once else {} if known is None else known)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def known_answers() -> dict[Any, Any] | None:
    """Return the answers that are known, by question; None where everything is asked anew."""
    return _KNOWN.get()
