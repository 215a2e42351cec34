"""Sweeping what nothing proves to be dead: what is older than a day, once the key is changed so that it cannot commit.

Only stores where versions decide have such attempts. ``docs/design/buckets.md`` says why the order of the steps is it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from treering._checkpoint.waiting import DAY, listed_names, remove_data
from treering._codec.key_document import is_tombstone
from treering._store.api import Document, Store
from treering._store.open_folder import key_content
from treering._values.checkpoint_names import INDEX, attempt_of_journal, data_of, is_data
from treering.errors import NotFound, TreeringError


def read_key(folder: Store, names_in: Callable[[bytes], Sequence[str]]) -> tuple[Document | None, Collection[str]]:
    """Return what is in the place of the index, None for nothing, and all names that it lists.

    Raises:
        Corrupt, Format, Unsupported: it is damaged, or of a newer version.
        StoreFailed: the store refused.
    """
    try:
        key = key_content(folder)
    except NotFound:
        return None, ()
    return key, listed_names(key.data) if is_tombstone(key.data) else names_in(key.data)


def sweep_by_age(folder: Store, doubtful: Collection[str], names_in: Callable[[bytes], Sequence[str]]) -> bool:
    """Sweep attempts that may yet commit, and data without a marker, that are older than a day.

    Args:
        folder: the place.
        doubtful: the attempts whose markers name the version that is there.
        names_in: gives the names of all data files that an index mentions.

    Returns:
        Whether the key was changed for that.

    Raises:
        StoreFailed: the store refused.
    """
    there = {entry.name: entry.modified for entry in folder.list() if "/" not in entry.name}
    now = folder.now()
    old = {name for name, modified in there.items() if modified + DAY < now}
    markers = {name: attempt for name in there if (attempt := attempt_of_journal(name)) is not None}
    going = {
        marker: data_of(attempt, there)
        for marker, attempt in markers.items()
        if attempt in doubtful and old.issuperset([marker, *data_of(attempt, there)])
    }
    explained = {name for attempt in markers.values() for name in data_of(attempt, there)}
    lone = {name for name in old if is_data(name)} - explained
    try:
        if not going and lone.issubset(read_key(folder, names_in)[1]):
            return False
        version = folder.fence(INDEX)
        # What it lists is read now: one of them may have committed just before.
        key, live = read_key(folder, names_in)
    except TreeringError as error:
        if isinstance(error, OSError):
            raise
        return False
    if version is None or key is None or key.version != version:
        return False
    for marker, data in going.items():
        folder.sweep(marker, [name for name in data if name not in live], INDEX, version)
    remove_data(folder, sorted(lone.difference(live)))
    return True
