"""Does anybody still work on an attempt? What locks and notes say about that."""

from __future__ import annotations

import platform
import re
from typing import Final

from treering._format.diagnosis import Life
from treering._store.api import Locks
from treering._store.posix.seen_locks import started

_WHO: Final = re.compile(r"(?s)(.*), pid (\d{1,10})")
# Clocks of file systems and of processes are read in other steps.
_CLOCK_STEP: Final = 2.0


def life_of(holder: int | None, locks: Locks, who: str | None, since: float) -> tuple[Life, str]:
    """Return whether an attempt that is not committed lives, and how that is known.

    Args:
        holder: the process that is seen to hold its lock.
        locks: what can be known of locks there.
        who: host and number of the process that leads it, as its note says.
        since: when that note, or the newest file, was written.

    Example:
        >>> life_of(4711, Locks(None, {}), None, 0.0)
        (<Life.IN_FLIGHT: 'in flight'>, 'process 4711 of this machine holds its lock')
        >>> life_of(None, Locks("on nfs4 some are not shown", {}), "node7, pid 4711", 0.0)[0]
        <Life.UNKNOWN: 'unknown'>
    """
    if holder is not None:
        # Linux gives no number for a process in another container.
        which = f"process {holder}" if holder > 0 else "a process"
        return Life.IN_FLIGHT, f"{which} of this machine holds its lock"
    if locks.gap is None:
        return Life.DEAD, "no process holds its lock"
    named = _WHO.fullmatch(who or "")
    if named is None:
        return Life.UNKNOWN, f"nobody is seen to hold its lock, but {locks.gap}"
    if named[1] != platform.node():
        return Life.UNKNOWN, f"it was begun on another machine, {named[1]}, by process {named[2]} there"
    return _on_this_machine(int(named[2]), since)


def _on_this_machine(process: int, since: float) -> tuple[Life, str]:
    try:
        start = started(process)
    except OSError:
        return Life.UNKNOWN, f"process {process} began it, and this system does not say whether that still runs"
    if start is None:
        return Life.DEAD, f"process {process}, which began it, runs no more"
    if start > since + _CLOCK_STEP:
        return Life.DEAD, f"process {process}, which began it, has ended; another one has its number now"
    return Life.IN_FLIGHT, f"process {process} of this machine, which began it, runs"
