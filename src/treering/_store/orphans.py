"""What attempts to save have at a place, found by looking alone: nothing is locked, made, changed or removed.

What is met may be changing meanwhile, and may be hostile: links, pipes, a million names. This is all that a diagnosis
asks a store: whose files they are, whether their attempt can still be committed, whether its process lives, and what
will remove them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from treering._store.api import Entry, Kind, Store, open_below
from treering._store.posix.store import PosixStore
from treering._values import checkpoint_names, leaves_names, timing
from treering._values.processes import Life
from treering.errors import LinkRefusedError

_WHO: Final = re.compile(r"(?s)(.*), pid (\d{1,10})")
_AT_A_DAY: Final = "treering gc --yes of its run removes it when it is a day old"

# File systems that this machine has to itself, and whose lock table has the numbers that ``stat`` gives.
_OF_THIS_MACHINE: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs"})
# Type, access, pid, device and inode of https://man7.org/linux/man-pages/man5/proc_locks.5.html, not of those who wait.
_LOCK: Final = re.compile(
    r"^\d+: (?:FLOCK|POSIX|OFDLCK) +\S+ +WRITE +(-?\d+) ([0-9a-f]+):([0-9a-f]+):(\d+) ", re.MULTILINE
)
# Of https://man7.org/linux/man-pages/man5/proc_pid_mountinfo.5.html: number, device, type of the file system.
_MOUNT: Final = re.compile(r"^(\d+) \d+ (\d+):(\d+) .*? - (\S+) ", re.MULTILINE)
_MOUNT_OF: Final = re.compile(r"^mnt_id:\s*(\d+)$", re.MULTILINE)
# The first namespace of process numbers has this number on every Linux; in others the locks of the rest are hidden.
_ALL_PROCESSES: Final = "pid:[4026531836]"
_STARTED: Final = 19  # the 22nd field of /proc/PID/stat, counted behind the name and the one before it

_UNSHOWN: Final = "this system does not show its locks"
_BUCKET: Final = "a bucket does not tell whether its process runs"


@dataclasses.dataclass(frozen=True, slots=True)
class Locks:
    """The locks of one place, as they were at one moment.

    Example:
        >>> Locks("this store has no locks", {}).holder(None) is None
        True
    """

    gap: str | None
    """Which locks are not shown, as a sentence; None where all are, so that what is not among them is free."""
    holders: Mapping[Any, int]
    """What was locked, by ``Entry.key``, and the number of the process that holds it."""

    def holder(self, found: Entry | None) -> int | None:
        """Return the process of this machine that holds the lock of what was found; None where none is seen."""
        return None if found is None else self.holders.get(found.key)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """Files of one attempt. An index may name them all the same: the store does not read it."""

    attempt: str
    """Its 16 hexadecimal digits."""
    form: str
    """"checkpoint", "leaves" where they are in the folder of the attempt, or "notes" where there are only messages."""
    files: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Their bytes by name, in the folder of the attempt by their path below it."""
    changed: float
    """When the newest of them was changed, as seconds since 1970 by the clock of the store."""
    holder: int | None = None
    """The process of this machine that is seen to hold the lock of the attempt."""
    proved: bool = True
    """Whether its journal, marker or folder proves that an attempt, and no committed state, made these files."""
    is_index: bool = False
    """Whether its journal is the index under another name: a power cut came between two steps of the commit."""
    outdated: bool = False
    """Whether the version that it would replace is gone, so that it can never be committed."""
    recorded: bool = False
    """Whether its record is there, from which an index that was lost is made again."""
    removal: str
    """What removes them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FolderScan:
    """What is at a place."""

    names: Sequence[str]
    """All names in it, sorted."""
    orphans: Sequence[Orphan]
    """What attempts have there."""
    saver: int | None
    """The process of this machine that holds the lock of the place itself; None where none is seen."""
    gap: str | None
    """What hides whether a process lives, as a sentence; None where no lock means that it is dead."""
    trouble: str | None
    """Why the folders of attempts could not be looked at."""


def scan_folder(store: Store) -> FolderScan:
    """Look at an open place.

    Raises:
        OSError: the store refused.

    Example:
        >>> import tempfile
        >>> from treering._store.resolve import opened_store
        >>> with opened_store(tempfile.mkdtemp()) as store:
        ...     found = scan_folder(store)
        >>> found.names, found.orphans, found.saver
        ([], [], None)
    """
    # Locks before names: a process that came between the two would seem dead otherwise.
    descriptor = store.folder.descriptor if isinstance(store, PosixStore) else None
    locks = seen_locks(descriptor) if not store.asks_by_request else Locks(_BUCKET, {})
    names = sorted(store.names())
    trouble, staged = None, list[Entry]()
    if leaves_names.ATTEMPTS in names and not store.asks_by_request:
        try:
            staged = list(_in_folders(store))
        except (OSError, LinkRefusedError, RecursionError) as error:
            trouble = str(error)
    attempts: dict[tuple[str, str], list[Entry]] = {}
    beside = store.list() if store.asks_by_request else map(store.find, filter(_owner, names))
    for entry in (*beside, *staged):
        if entry is not None and (owner := _owner(entry.name)) is not None:
            attempts.setdefault(owner, []).append(entry)
    orphans = [_describe(store, *owner, attempts[owner], locks) for owner in sorted(attempts)]
    return FolderScan(names=names, orphans=orphans, saver=locks.holder(store.find("")), gap=locks.gap, trouble=trouble)


def _owner(name: str) -> tuple[str, str] | None:
    """Return form and attempt that a name tells; None for a name that tells none."""
    parts = name.split("/")
    if len(parts) > 1:
        is_staged = parts[0] == leaves_names.ATTEMPTS and leaves_names.is_attempt(parts[1])
        return ("leaves", parts[1]) if is_staged else None
    attempt = name.split("-")[1] if checkpoint_names.is_data(name) else checkpoint_names.attempt_of_journal(name)
    return None if attempt is None else ("checkpoint", attempt)


def _in_folders(store: Store) -> Iterator[Entry]:
    """Yield the folders of attempts, and all files in them, with their paths below the place."""
    with open_below(store, leaves_names.ATTEMPTS) as attempts:
        for attempt in filter(leaves_names.is_attempt, attempts.places()):
            above = "/".join(leaves_names.attempt_folder(attempt))
            # Its files are moved while it is committed, and it may end meanwhile.
            with contextlib.suppress(FileNotFoundError), open_below(attempts, attempt) as folder:
                if (itself := folder.find("")) is not None:
                    yield itself._replace(name=above)
                for entry in folder.list():
                    yield entry._replace(name=f"{above}/{entry.name}")


def _describe(store: Store, form: str, attempt: str, entries: Sequence[Entry], locks: Locks) -> Orphan:
    above = "" if form == "checkpoint" else "/".join(leaves_names.attempt_folder(attempt))
    index, marker = checkpoint_names.INDEX, checkpoint_names.journal_of(attempt)
    if above:
        index, marker = leaves_names.INDEX, f"{above}/{leaves_names.MARKER}" if store.asks_by_request else above
    proof = next((entry for entry in entries if entry.name == marker), None)
    committed = store.find(index) if proof is not None else None
    is_index = proof is not None and committed is not None and proof.version == committed.version
    files = {
        entry.name.removeprefix(f"{above}/"): entry.size if entry.is_file and not (is_index and entry is proof) else 0
        for entry in entries
        if entry.kind is not Kind.PLACE
    }
    return Orphan(
        attempt=attempt,
        form=form,
        files=files,
        changed=max(entry.modified for entry in entries),
        holder=locks.holder(proof),
        proved=proof is not None,
        is_index=is_index,
        outdated=store.asks_by_request and committed is not None and _is_outdated(store, marker, committed),
        recorded=not store.asks_by_request and leaves_names.RECORD in files,
        removal=_removal(by_age=store.asks_by_request and not above, proved=proof is not None),
    )


def _removal(*, by_age: bool, proved: bool) -> str:
    """Say what removes the files of an attempt; in a bucket those of a checkpoint go by their age."""
    if by_age:
        return f"the next save there ends it, and {_AT_A_DAY}" if proved else _AT_A_DAY
    if proved:
        return "the next save removes it"
    return "no save removes its files; if no process is saving here and no index was lost, remove them yourself"


def _is_outdated(store: Store, marker: str, index: Entry) -> bool:
    """Tell whether a marker names another version than the one that is there, which is looked at after it."""
    from treering._store.objects.protocol import read_marker

    found = store.read(marker)
    base = None if found is None else read_marker(found.data)
    now = store.find(index.name)
    return base is not None and now is not None and now.version != base


def seen_locks(folder: int | None) -> Locks:
    """Look which files of the file system of an open folder are locked.

    Args:
        folder: its descriptor; None where the platform opens none.

    Example:
        >>> seen_locks(None)
        Locks(gap='this system does not show its locks', holders={})
    """
    proc = Path("/proc")
    try:
        mount = _MOUNT_OF.search((proc / "self" / "fdinfo" / str(folder)).read_text())
        mounts = _MOUNT.findall((proc / "self" / "mountinfo").read_text(errors="replace"))
        locks = _LOCK.findall((proc / "locks").read_text())
        all_seen = os.readlink(proc / "self" / "ns" / "pid") == _ALL_PROCESSES
    except OSError:
        return Locks(_UNSHOWN, {})
    here = next((found for found in mounts if mount is not None and found[0] == mount[1]), None)
    if here is None:
        return Locks(_UNSHOWN, {})
    _, major, minor, kind = here
    device = int(major), int(minor)
    # The device of the mount, not the one of ``stat``: btrfs shows another one there.
    holders = {
        int(inode): int(pid) for pid, first, second, inode in locks if (int(first, 16), int(second, 16)) == device
    }
    gap = None if all_seen else "locks of other containers are not shown here"
    if kind not in _OF_THIS_MACHINE:
        gap = f"on {kind} locks of other machines are not shown here"
    return Locks(gap, holders)


def started(process: int) -> float | None:
    """Return when a process of this machine started, as seconds since 1970; None where it does not run.

    Raises:
        OSError: the system does not show processes.

    Example:
        >>> import sys
        >>> sys.platform != "linux" or started(os.getpid()) > 1e9
        True
    """
    if (boot := re.search(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)) is None:
        raise OSError("the system does not show when it was started")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # The name of the program stands in brackets, and may hold any text.
        fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(boot[1]) + int(fields[_STARTED]) / os.sysconf("SC_CLK_TCK")
    return None


def find_life(holder: int | None, gap: str | None, who: str | None, since: float) -> tuple[Life, str]:
    """Return whether the process of an attempt that is not committed lives, and how that is known.

    Args:
        holder: the process that is seen to hold its lock.
        gap: what hides whether a process lives.
        who: host and number of its coordinator, as the prepare message says.
        since: when that message, or the newest file, was written.

    Example:
        >>> find_life(4711, None, None, 0.0)
        (<Life.IN_FLIGHT: 'in flight'>, 'process 4711 of this machine holds its lock')
        >>> find_life(None, "on nfs4 some are not shown", "node7, pid 4711", 0.0)[0]
        <Life.UNKNOWN: 'unknown'>
    """
    if holder is not None:
        # Linux gives no number for a process in another container.
        which = f"process {holder}" if holder > 0 else "a process"
        return Life.IN_FLIGHT, f"{which} of this machine holds its lock"
    if gap is None:
        return Life.DEAD, "no process holds its lock"
    if (named := _WHO.fullmatch(who or "")) is None:
        return Life.UNKNOWN, f"no process is seen to hold its lock, so it may still be committed: {gap}"
    if named[1] != platform.node():
        return Life.UNKNOWN, f"it was begun on another machine, {named[1]}, by process {named[2]} there"
    process = int(named[2])
    try:
        start = started(process)
    except OSError:
        return Life.UNKNOWN, f"process {process} began it, and this system does not show whether it still runs"
    if start is None:
        return Life.DEAD, f"process {process}, which began it, no longer runs"
    if start > since + timing.current.clock_step:
        return Life.DEAD, f"process {process}, which began it, has ended; another process has its number now"
    return Life.IN_FLIGHT, f"process {process} of this machine, which began it, runs"
