"""Work on a tree in one state of it, also while saves replace it: what began on one save does not end on the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Protocol, TypeVar

from treering._arrays.source import Source
from treering._values import timing
from treering._values.telemetry import report
from treering.errors import Busy, Corrupt, NotFound, TreeringError

S = TypeVar("S", bound=Source)
T = TypeVar("T")

# Each try needs a whole save while the tree is being read.
_TRIES: Final = 100
# Several processes also try again where a network file system shows them different states for a while.
_TRIES_TOGETHER: Final = 16


class Reopen(Exception):
    """All processes have heard that the tree has to be opened again; the error is raised where that does not help."""

    def __init__(self, error: TreeringError) -> None:
        super().__init__(str(error))
        self.error = error


class RetryGroup(Protocol):
    """Those who work on the tree with this process, if there are any."""

    path: Path
    """The tree."""
    joined: bool
    """Whether there are."""
    over: bool
    """Whether they know how it ended here."""

    def end(self) -> None:
        """Meet when the work is done."""

    def replaced(self) -> None:
        """Tell that a save replaced the tree; raises ``Reopen`` on all, unless some of it was given away."""

    def tell(self, error: Exception) -> None:
        """Tell of an error."""

    def leave(self) -> None:
        """Go without a word."""


def retry_on_overwrite(opened: Callable[[], AbstractContextManager[S]], work: Callable[[S], T], group: RetryGroup) -> T:
    """Return ``work(source)``, done once more on the newer tree where a save replaced the older one meanwhile.

    Files that are gone, or have other bytes, are damage only as long as the tree that was opened is the one that
    stands there. Bytes without checksums may be another save's without looking damaged.

    Args:
        opened: opens the tree, each time anew.
        work: reads it; what it did is thrown away where it has to be done again.
        group: those who do the same; all of them do it again, or none.

    Raises:
        Busy: the tree was replaced again and again.
        NotShared: the processes keep finding different states of it.
        Exception: whatever ``work`` raises on a tree that was not replaced, here or in another process.
    """
    with report("load", group.path):
        return _retry(opened, work, group)


def _retry(opened: Callable[[], AbstractContextManager[S]], work: Callable[[S], T], group: RetryGroup) -> T:
    alone = together = 0
    while alone < _TRIES:
        try:
            with opened() as source:
                done, result = _tried(source, work, group)
        except Reopen as again:
            # Counted alike on all, so that all end at the same try.
            together += 1
            if together == _TRIES_TOGETHER:
                raise again.error from None
            time.sleep(min(timing.current.reopen_longest, timing.current.reopen_first * 2**together))
        except Exception as error:
            group.tell(error)
            raise
        except BaseException:  # an interrupt does not wait for others
            group.leave()
            raise
        else:
            if done:
                return result[0]
            alone += 1
    raise Busy(f"the tree was replaced {_TRIES} times while it was being read", hint="try again")


def _tried(source: S, work: Callable[[S], T], group: RetryGroup) -> tuple[bool, list[T]]:
    """Return whether the tree was there to the end, and if so ``work(source)``."""
    result: list[T] = []
    try:
        result.append(work(source))
    except (Corrupt, NotFound):
        if group.over or source.is_current():
            raise
    else:
        if source.index.verified or source.is_current():
            group.end()
            return True, result
    if group.joined:
        group.replaced()
    return False, []
