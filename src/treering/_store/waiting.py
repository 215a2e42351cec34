"""Superseded data that wait: which of them are past the grace that a store gives to readers, and their removal.

A store without a grace lets nothing wait: its readers hold files open. ``docs/design/buckets.md`` says more.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

from treering._codec import key_document
from treering._codec.key_document import Superseded
from treering._store.api import Document, Entry, NamesIn, Outcome, Store, Transaction
from treering._values import checkpoint_names
from treering._values.checkpoint_names import INDEX
from treering._values.human import bytes_text, duration_text, pluralize
from treering._values.telemetry import warn_of
from treering.errors import CorruptError, FormatError, NotRemovedWarning, UnsupportedError

_MOST_KEPT: Final = key_document.MOST_SUPERSEDED // 2 - 1
"""No commit lets more attempts wait than this, the newest: what takes its place lists them, and what it removed."""

_DENIED: Final = frozenset({errno.EACCES, errno.EPERM})
_warned: Final[set[str]] = set()
_NOT_READ: Final = (CorruptError, FormatError, UnsupportedError)


class Waiting(NamedTuple):
    """What becomes of superseded data."""

    kept: tuple[Superseded, ...]
    """What still waits for readers."""
    past: tuple[str, ...]
    """The names that may go."""
    seconds: float | None
    """Seconds until more of them may go; None where nothing waits."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return (*self.past, *(name for one in self.kept for name in one.files))


NOTHING: Final = Waiting((), (), None)


def judge_waiting(
    grace: float, listed: Sequence[Superseded], modified: float | None, now: Callable[[], float]
) -> Waiting:
    """Tell which superseded data are past the grace of a store.

    Args:
        grace: the grace.
        listed: the data.
        modified: when those of no time ceased to be the checkpoint; None: only now.
        now: returns the time by the clock of the store, which may have to write for that; asked where it matters.
    """
    if not grace:
        return Waiting((), tuple(name for one in listed for name in one.files), None)
    dated = [one.since if one.since is not None else modified for one in listed]
    moment = now() if any(since is not None for since in dated) else 0.0
    lefts = [grace if since is None else since + grace - moment for since in dated]
    kept = tuple(one for one, left in zip(listed, lefts, strict=True) if left > 0)
    past = tuple(name for one, left in zip(listed, lefts, strict=True) if left <= 0 for name in one.files)
    return Waiting(kept, past, min((left for left in lefts if left > 0), default=None))


def supersede(grace: float, now: Callable[[], float], old: bytes, modified: float, names: Collection[str]) -> Waiting:
    """Return what a new index has to say of the data of the document that it replaces, in a store with a grace.

    Args:
        grace: the grace of the store.
        now: returns the time by its clock.
        old: an index or a tombstone.
        modified: when it was put there.
        names: the names in the place, listed before it was read; none where they are not known.

    Returns:
        Nothing where the document cannot be read: the data that it may list stay.
    """
    try:
        there, by = {*listed_names(old), *names}, key_document.superseded_by(old, modified)
    except _NOT_READ:
        return NOTHING
    found = [
        one if one.since is None else Superseded(one.attempt, one.since, [name for name in one.files if name in there])
        for one in by
    ]
    waiting = judge_waiting(grace, found, None, now)
    early = [name for one in waiting.kept[_MOST_KEPT:] for name in one.files]
    waiting = waiting._replace(kept=waiting.kept[:_MOST_KEPT], past=(*waiting.past, *early))
    # What waits is listed although it may have come after the names: no sweep may take it for what no document names.
    return waiting._replace(past=tuple(name for name in waiting.past if name in names)) if names else waiting


def listed_names(key: bytes) -> list[str]:
    """Return the data that a tombstone lists; raises as `superseded_in` does."""
    return [name for one in key_document.superseded_in(key) for name in one.files]


def listed_in(key: bytes, names_in: NamesIn) -> Collection[str]:
    """Return the data that an index or a tombstone lists; raises as ``names_in`` does."""
    return listed_names(key) if key_document.is_tombstone(key) else names_in(key)


def describe_waiting(store: Store, key: bytes) -> str | None:
    """Say what waits at a place and for how long, by the clock of this machine; None where nothing does.

    Args:
        store: the place.
        key: what is in the place of the index.

    Raises:
        OSError: the store refuses.
    """
    try:
        listed = key_document.superseded_in(key)
    except _NOT_READ:
        return None
    if not listed:
        return None
    wanted = {INDEX, *(name for one in listed for name in one.files)}
    there = {entry.name: entry for entry in _entries_of(store, wanted)}
    waiting = judge_waiting(store.grace, listed, there[INDEX].modified if INDEX in there else None, time.time)
    if not (sizes := [there[name].size for name in waiting.names if name in there]):
        return None
    what = f"superseded data stay here: {pluralize(len(sizes), 'files')}, {bytes_text(sum(sizes))}"
    end = "the next save there, or treering gc --yes of its run, removes them"
    if waiting.seconds is None:
        return f"{what}; their time for readers is over: {end}"
    return f"{what}; the first of them for another {duration_text(waiting.seconds)}, for readers; then {end}"


def _entries_of(store: Store, names: Collection[str]) -> Iterator[Entry]:
    """Yield what is there of some names, by one listing in a bucket that does not deny it."""
    if store.asks_by_request:
        with contextlib.suppress(PermissionError):
            yield from (entry for entry in store.list() if entry.name in names)
            return
    yield from filter(None, map(store.find, names))


def remove_waiting(store: Store, transaction: Transaction, key: Document, names: Collection[str]) -> float | None:
    """Remove what an index or a tombstone lists as superseded and is past the grace; then shorten the tombstone.

    Args:
        store: the place.
        transaction: the change of it.
        key: what is in the place of the index.
        names: the names in it, listed before that was read.

    Returns:
        Seconds until more of them, or the tombstone, may go; None where nothing waits.

    Raises:
        OSError: the store refused.
    """
    try:
        listed, own = key_document.superseded_in(key.data), key_document.attempts_in(key.data)[0]
    except _NOT_READ:
        return None  # it proves nothing
    removed = key_document.is_tombstone(key.data)
    found = store.find(INDEX) if listed or removed else None
    if found is None or found.version != key.version:
        return None
    waiting = judge_waiting(store.grace, [one for one in listed if one.attempt != own], found.modified, transaction.now)
    if (removable := [name for name in waiting.past if name in names]) and not remove_data(store, removable):
        return waiting.seconds
    if removed and not waiting.kept:
        # Alone it is removed, where no late request could bring an older one back; else its small form is kept.
        alone = set(names) <= {INDEX, *removable}
        if alone and transaction.delete_tombstone(found):
            return None
        if len(key.data) == key_document.SMALL_TOMBSTONE:
            return None
        # The checkpoint that was removed is remembered: its saver may still ask what became of it.
        last = [Superseded(one.attempt, None, ()) for one in listed if one.since is None]
        store.replace(INDEX, key_document.encode_tombstone(last[:1]), key.version)
        return store.longest_delay or None if alone else None
    return waiting.seconds


def sweep_old(store: Store, transaction: Transaction, doubtful: Collection[str], names_in: NamesIn) -> bool:
    """Sweep by their age attempts that may yet commit, and data that no marker explains, where no lock decides.

    They are swept once the document is changed so that none of them can commit; ``docs/design/buckets.md`` says why the
    order of the steps is it.

    Args:
        store: the place.
        transaction: the change of it.
        doubtful: the attempts of which `Transaction.sweep` did not know.
        names_in: gives the data that a document lists.

    Returns:
        Whether the document was changed for that: what it says is the same.

    Raises:
        OSError: the store refused.
    """
    if not store.longest_delay:
        return False
    there = {entry.name: entry.modified for entry in store.list() if "/" not in entry.name}
    now = transaction.now()
    old = {name for name, modified in there.items() if modified + store.longest_delay < now}
    markers = {name: attempt for name in there if (attempt := checkpoint_names.attempt_of_journal(name)) is not None}
    swept = {
        marker: names
        for marker, attempt in markers.items()
        if attempt in doubtful and old.issuperset([marker, *(names := checkpoint_names.data_of(attempt, there))])
    }
    explained = {name for attempt in markers.values() for name in checkpoint_names.data_of(attempt, there)}
    lone = {name for name in old if checkpoint_names.is_data(name)} - explained
    try:
        key = store.read(INDEX)
        if not swept and lone.issubset(() if key is None else listed_in(key.data, names_in)):
            return False
        data = key_document.placeholder() if key is None else key_document.fenced(key.data)
        if key is None:
            store.create(INDEX, [data], len(data))  # it would replace a tombstone
        elif store.replace(INDEX, data, key.version) is not Outcome.DONE:
            return False
        # What it lists is read now: one of them may have committed just before.
        found = store.read(INDEX)
        live = () if found is None else listed_in(found.data, names_in)
    except (*_NOT_READ, FileExistsError):
        return False
    if found is None or found.data != data:
        return False
    for marker, names in swept.items():
        transaction.sweep(marker, [name for name in names if name not in live])
    remove_data(store, sorted(lone.difference(live)))
    return True


def remove_data(store: Store, names: Iterable[str]) -> bool:
    """Remove data that nothing needs; what cannot be removed is for the next one. False where something stays."""
    try:
        store.remove(*names)
    except OSError as error:
        if is_denied(store, error):
            warn_denied(store.path, error)
        return False
    return True


def is_denied(store: Store, error: OSError) -> bool:
    """Tell whether a store denies what was asked, where it may do so with one kind of request alone."""
    return store.separate_rights and error.errno in _DENIED


def warn_denied(path: PurePath, error: OSError, what: str = "data that nothing needs") -> None:
    """Warn once that what nothing needs stays where it is."""
    if what not in _warned:
        _warned.add(what)
        warn_of(f"{what} cannot be removed, so they stay", [f"{path}: {error}"], NotRemovedWarning)


def list_names(store: Store) -> list[str]:
    """Return the names in a place; none where a bucket denies to list them.

    Raises:
        OSError: the store refused.
    """
    try:
        return store.names()
    except OSError as error:
        if is_denied(store, error):
            return []
        raise


def has_waiting_names(names: Collection[str]) -> bool:
    """Tell from names alone whether data of more than one attempt are there.

    Example:
        >>> has_waiting_names({"data-0123456789abcdef-00000-of-00001.safetensors", "treering.json"})
        False
    """
    return len({name.split("-")[1] for name in filter(checkpoint_names.is_data, names)}) > 1
