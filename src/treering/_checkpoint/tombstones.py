"""Indexes of checkpoints that were removed, until the files that they list are gone too.

A step is removed by giving its index the name of a tombstone. From then on it is gone; the tombstone proves which files
were its own, and goes after them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from treering._store.api import Store
from treering._store.open_folder import index_document
from treering._values.checkpoint_names import attempt_of_tombstone, is_data
from treering.errors import Corrupt, Format, NotFound, Unsupported


def listed_by_tombstones(
    store: Store, names: Iterable[str], names_in: Callable[[bytes], Sequence[str]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield each tombstone that can be read, with the names that it lists, those of data files only.

    A tombstone that is damaged, or of a newer version, proves nothing: it stays, and so does what it may list.

    Args:
        store: the place.
        names: names in it, of any kind.
        names_in: gives the names of all data files that an index mentions.

    Raises:
        OSError: the system refused.
    """
    for name in names:
        if attempt_of_tombstone(name) is None:
            continue
        found = store.find(name)
        if found is None or not found.is_file:
            continue
        try:
            listed = names_in(index_document(store, name).data)
        except (NotFound, Corrupt, Format, Unsupported):
            continue
        yield name, [data for data in listed if is_data(data)]


def finish_removals(
    store: Store, names: Collection[str], names_in: Callable[[bytes], Sequence[str]], live: Collection[str]
) -> None:
    """Remove what tombstones list, then the tombstones. The caller has the lock of the folder.

    Args:
        store: the place.
        names: the names in it.
        names_in: gives the names of all data files that an index mentions.
        live: names that the index lists that is there now; they stay.

    Raises:
        OSError: the system refused; a tombstone is left for whoever comes next.
    """
    if not any(map(attempt_of_tombstone, names)):
        return
    # That the index is gone must be durable before the first of its files goes: whoever gave it this name may have died
    # before that.
    store.flush()
    for tombstone, listed in listed_by_tombstones(store, names, names_in):
        data = [name for name in listed if name in names and name not in live]
        for name in data:
            store.remove(name)
        if data:
            # As durable as the tombstone's own end, or nobody would know any more whose they are.
            store.flush()
        store.remove(tombstone)
