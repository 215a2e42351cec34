"""How a single file in a bucket is replaced so that no late request undoes it, without I/O: as ``protocol``."""

from __future__ import annotations

from treering._store.api import Outcome
from treering._store.objects.protocol import Expired, answered, swap
from treering._store.objects.requests import Head, Steps


def put_file(name: str, data: bytes, expired: Expired, *, new: bool = False) -> Steps[Outcome]:
    """Make ``data`` the content of a single file, on condition that what it replaces is still what was read before.

    So no request of this save can be done once a later save has replaced that, if the version never recurs: it recurs
    where it says no more than the content does, and the bytes are those of an earlier save.

    Args:
        name: the name.
        data: its bytes.
        expired: when to stop asking again.
        new: whether nothing may be there.

    Returns:
        DONE; LOST where it was to be new and is not, or where others replace it again and again; UNKNOWN where it may
        have been put, or may yet be.

    Raises:
        OSError: the bucket refused, or did not answer: nothing has happened.
    """
    while True:
        found = None if new else (yield from answered(Head(name), expired)).found
        base = None if found is None else found.version
        outcome = yield from swap(name, data, base, expired)
        # After a sure refusal these bytes were never there, so they may replace what is there now. Those that may have
        # been there are not put once more: their version would recur.
        if new or outcome is not Outcome.LOST or expired():
            return outcome
