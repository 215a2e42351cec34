"""What attempts to save have in a folder, found by looking alone: nothing is locked, made, changed or removed.

Both forms are looked for: journals, data files and notes of a checkpoint, staged folders of a leaves directory. What
is met may be changing meanwhile, and may be hostile: links, pipes, a million names.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from treering._checkpoint.waiting import describe_waiting, listed_names
from treering._coordination.messages import DecisionMessage, PrepareMessage, VoteMessage
from treering._store.api import LARGEST_MESSAGE, Entry, Locks, Store
from treering._store.failures import LinkRefusedError, naming
from treering._store.leaves_folder.leaves_folder import list_attempts
from treering._store.objects.protocol import read_marker
from treering._store.open_folder import is_removed, key_content
from treering._store.posix.folder_tree import FOLDER, FolderTree, Parts
from treering._store.posix.store import PosixStore, entry_of
from treering._store.resolve import located, opened_store
from treering._values import checkpoint_names, leaves_names
from treering.errors import CorruptError, FormatError, NotFoundError, UnsupportedError

# The number of its process, where a note's name has one.
_OF_TREE: Final = re.compile(r"-(?:sum-\d+|signature)\Z")
_NOTE: Final = re.compile(
    r"\.treering-[0-9a-f-]*?(?:(?:here|part|left|waiting)-(\d{5,9})|sum-\d{5,9}|signature|begin|verdict)"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoteFile:
    """A note that processes of a job talk through."""

    changed: float
    """When it was put there, as seconds since 1970 by the clock of the file system."""
    process: int | None
    """The process that it is of, where its name says so."""
    attempt: str | None
    """The attempt that it is about; None where neither its name nor its content says so."""
    said: PrepareMessage | VoteMessage | DecisionMessage | None
    """What it says, without checksums; None for a sign of life, and where it cannot be read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """What one attempt has in the folder."""

    attempt: str
    """Its 16 hexadecimal digits."""
    files: Mapping[str, int]
    """Its files with their bytes; of a staged attempt the names in its own folder, with all that is below them."""
    count: int
    """How many files that are."""
    changed: float
    """When the newest of them was changed, as seconds since 1970 by the clock of the file system."""
    holder: int | None
    """The process of this machine that holds the lock of its journal or of its folder; None where none is seen."""
    journal: bool = False
    """Whether its journal is there, which proves that its data files are no checkpoint's."""
    is_index: bool = False
    """Whether that journal is the index under another name: a power cut came between two steps of the commit."""
    outdated: bool = False
    """Whether that journal is a marker in a bucket whose base is gone, so that the attempt can never be committed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FolderScan:
    """What is in a folder."""

    names: Sequence[str]
    """All names in it, sorted; a tombstone in the place of the index is none."""
    saved: Mapping[str, Leftovers]
    """Journals and data files, by attempt."""
    staged: Mapping[str, Leftovers]
    """Folders of attempts under ``.treering``, by attempt."""
    notes: Sequence[NoteFile]
    """Notes, by name."""
    saver: int | None
    """The process of this machine that holds the lock of the folder itself; None where none is seen."""
    locks: Locks
    """What is known of locks there."""
    trouble: str | None
    """Why the staged attempts could not be looked at."""
    flat: bool = False
    """Whether it is in a bucket, where versions decide and nothing tells whether a process lives."""
    removed: bool = False
    """Whether a tombstone is in the place of the index."""
    waiting: Collection[str] = ()
    """Data files that wait for readers who began before they were superseded."""
    waits: str | None = None
    """What is to be said of them."""


def looked_at(path: str) -> FolderScan:
    """Look at the folder at a path.

    Raises:
        NotFoundError: nothing is there.
        StoreError: a file is there, or the system refuses.

    Example:
        >>> import tempfile
        >>> found = looked_at(tempfile.mkdtemp())
        >>> found.names, found.saver
        ([], None)
    """
    with naming(os.fspath(located(path)), "read"), opened_store(path) as store:
        return _looked(store, path)


def _looked(store: Store, path: str) -> FolderScan:
    locks = store.locks()
    names = sorted(store.names())
    saver = locks.holder(store.find(""))
    known = {entry.name: entry for entry in store.list() if "/" not in entry.name} if store.flat else {}
    wanted = filter(checkpoint_names.is_data, names)
    data = {name: found for name in wanted if (found := known.get(name) or store.find(name)) is not None}
    staged, trouble = _staged(store, path, locks)
    saved = {remains.attempt: remains for remains in _saved(store, names, data, locks)}
    notes = list(_notes(store, names))
    scan = FolderScan(
        names=names, saved=saved, staged=staged, notes=notes, saver=saver, locks=locks, trouble=trouble, flat=store.flat
    )
    return _with_waiting(store, scan) if checkpoint_names.INDEX in names else scan


def _with_waiting(store: Store, scan: FolderScan) -> FolderScan:
    """Add what the index, or a tombstone in its place, says of data that wait."""
    if (index := store.find(checkpoint_names.INDEX)) is None or not index.is_file:
        return scan
    waiting: list[str] = []
    waits, removed = None, is_removed(store, index)
    # What cannot be read lists nothing; the reader of the index says what is wrong with it.
    with contextlib.suppress(LinkRefusedError, CorruptError, FormatError, UnsupportedError, NotFoundError):
        key = key_content(store).data
        waiting = listed_names(key)
        waits = describe_waiting(store, key)
    names = [name for name in scan.names if name != checkpoint_names.INDEX] if removed else scan.names
    return dataclasses.replace(scan, names=names, removed=removed, waiting=waiting, waits=waits)


def _saved(store: Store, names: Sequence[str], found: Mapping[str, Entry], locks: Locks) -> Iterator[Leftovers]:
    """Walk through the attempts that have a journal or data files in a checkpoint's folder."""
    index = store.find(checkpoint_names.INDEX)
    data: dict[str, dict[str, Entry]] = {}
    for name, entry in found.items():
        data.setdefault(name.split("-")[1], {})[name] = entry
    journals = {attempt: name for name in names if (attempt := checkpoint_names.attempt_of_journal(name))}
    for attempt in sorted({*data, *journals}):
        own = data.get(attempt, {})
        files = {name: entry.size if entry.is_file else 0 for name, entry in own.items()}
        journal = store.find(journals[attempt]) if attempt in journals else None
        same = journal is not None and index is not None and journal.version == index.version
        if journal is not None:
            own[journals[attempt]] = journal
            files[journals[attempt]] = 0 if same else journal.size
        if not files:
            continue
        newest = max(entry.modified for entry in own.values())
        holder, proved = locks.holder(journal), journal is not None
        outdated = store.flat and proved and _is_outdated(store, journals[attempt], index)
        yield Leftovers(
            attempt=attempt, files=files, count=len(files), changed=newest, holder=holder, journal=proved,
            is_index=same, outdated=outdated,
        )  # fmt: skip


def _is_outdated(store: Store, marker: str, index: Entry | None) -> bool:
    """Tell whether a marker names another version than the one that is there, which was looked at after it."""
    found = store.read(marker)
    base = None if found is None else read_marker(found.data)
    now = None if index is None else store.find(index.name)
    return base is not None and now is not None and now.version != base


def _staged(store: Store, path: str, locks: Locks) -> tuple[dict[str, Leftovers], str | None]:
    """Return the attempts under ``.treering``, and why they could not be looked at."""
    if store.flat:
        return _staged_in_bucket(store), None
    if not isinstance(store, PosixStore):
        return {}, None
    found: dict[str, Leftovers] = {}
    with contextlib.closing(FolderTree(store.folder, path)) as tree:
        try:
            for attempt in list_attempts(tree):
                with contextlib.suppress(FileNotFoundError):  # it ended meanwhile
                    found[attempt] = _staged_one(tree, attempt, locks)
        except (LinkRefusedError, OSError) as error:
            return {}, str(error)
    return found, None


def _staged_in_bucket(store: Store) -> dict[str, Leftovers]:
    """Return the attempts under ``.treering`` where nothing is moved: committed ones are among them."""
    of: dict[str, list[Entry]] = {}
    for entry in store.list(f"{leaves_names.ATTEMPTS}/"):
        if leaves_names.is_attempt(attempt := entry.name.split("/")[1]):
            of.setdefault(attempt, []).append(entry)
    index = store.find(leaves_names.INDEX) if of else None
    found: dict[str, Leftovers] = {}
    for attempt, entries in of.items():
        files: dict[str, int] = {}
        for entry in entries:
            within = entry.name.split("/")[2]
            files[within] = files.get(within, 0) + entry.size
        marker = "/".join((*leaves_names.attempt_folder(attempt), leaves_names.MARKER))
        proved = leaves_names.MARKER in files
        found[attempt] = Leftovers(
            attempt=attempt, files=files, count=len(entries), changed=max(entry.modified for entry in entries),
            holder=None, journal=proved, outdated=proved and _is_outdated(store, marker, index),
        )  # fmt: skip
    return found


def _staged_one(tree: FolderTree, attempt: str, locks: Locks) -> Leftovers:
    top = leaves_names.attempt_folder(attempt)
    itself = tree.find(top[:-1], top[-1])
    files = dict.fromkeys(tree.scan(top), 0)
    newest = itself.st_mtime if itself is not None else 0.0
    count = 0
    waiting: list[Parts] = [top]
    while waiting:
        here = waiting.pop()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, LinkRefusedError):  # it is changing
            for name, kind in tree.scan(here).items():
                within = here[len(top)] if len(here) > len(top) else name
                if kind == FOLDER:
                    waiting.append((*here, name))
                elif (found := tree.find(here, name)) is not None and stat.S_ISREG(found.st_mode):
                    files[within] = files.get(within, 0) + found.st_size
                    count += 1
                    newest = max(newest, found.st_mtime)
    holder = locks.holder(itself and entry_of(attempt, itself))
    return Leftovers(attempt=attempt, files=files, count=count, changed=newest, holder=holder)


def _notes(store: Store, names: Sequence[str]) -> Iterator[NoteFile]:
    """Walk through the notes and read them; those that are being written are left out."""
    for name in names:
        if checkpoint_names.is_message_folder(name):
            with contextlib.suppress(OSError, LinkRefusedError), store.below(name) as below:
                yield from _notes(below, [one for one in below.names() if checkpoint_names.is_message(one)])
        if (kind := _NOTE.fullmatch(name)) is None or not checkpoint_names.is_message(name):
            continue
        found = store.find(name)
        if found is None:  # it was taken away meanwhile
            continue
        said: PrepareMessage | VoteMessage | DecisionMessage | None = None
        # No message, a link or a damaged one says nothing. Readers that wait touch the folder; this one must not.
        with contextlib.suppress(OSError, CorruptError, LinkRefusedError), store.open_file(name) as file:
            said = _said(name, file.read(0, file.size)) if file.size <= LARGEST_MESSAGE else None
        process = int(kind[1]) if kind[1] else None
        attempt = said.attempt if isinstance(said, PrepareMessage) else checkpoint_names.attempt_of_message(name)
        yield NoteFile(changed=found.modified, process=process, attempt=attempt, said=said)


def _said(name: str, data: bytes) -> PrepareMessage | VoteMessage | DecisionMessage | None:
    if checkpoint_names.is_prepare(name):
        return dataclasses.replace(PrepareMessage.decode(data), signature=b"")
    if name.endswith("-verdict"):
        return DecisionMessage.decode(data)
    is_vote = checkpoint_names.attempt_of_message(name) is not None and not _OF_TREE.search(name)
    return dataclasses.replace(VoteMessage.decode(data), payload=b"") if is_vote else None
