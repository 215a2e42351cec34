"""Indexes of checkpoints that were removed, until the files that they list are gone too.

A step is removed by giving its index the name of a tombstone. From then on it is gone; the tombstone proves which files
were its own, and goes after them.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

from treering._store.open_folder import index_bytes
from treering._store.posix.folder import Folder
from treering._values.checkpoint_names import attempt_of_tombstone, is_data
from treering.errors import Corrupt, Format, NotFound, Unsupported


def listed_by_tombstones(
    folder: Folder, shown: str, names: Iterable[str], names_in: Callable[[bytes], Sequence[str]]
) -> Iterator[tuple[str, list[str]]]:
    """Yield each tombstone that can be read, with the names that it lists, those of data files only.

    A tombstone that is damaged, or of a newer version, proves nothing: it stays, and so does what it may list.

    Args:
        folder: the folder.
        shown: what the caller calls it.
        names: names in it, of any kind.
        names_in: gives the names of all data files that an index mentions.

    Raises:
        OSError: the system refused.
    """
    for name in names:
        if attempt_of_tombstone(name) is None:
            continue
        found = folder.find(name)
        if found is None or not stat.S_ISREG(found.st_mode):
            continue
        try:
            listed = names_in(index_bytes(folder, Path(shown, name), name))
        except (NotFound, Corrupt, Format, Unsupported):
            continue
        yield name, [data for data in listed if is_data(data)]


def finish_removals(
    folder: Folder,
    shown: str,
    names: Collection[str],
    names_in: Callable[[bytes], Sequence[str]],
    live: Collection[str],
) -> None:
    """Remove what tombstones list, then the tombstones. The caller has the lock of the folder.

    Args:
        folder: the folder.
        shown: what the caller calls it.
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
    folder.sync()
    for tombstone, listed in listed_by_tombstones(folder, shown, names, names_in):
        data = [name for name in listed if name in names and name not in live]
        for name in data:
            folder.remove(name)
        if data:
            # As durable as the tombstone's own end, or nobody would know any more whose they are.
            folder.sync()
        folder.remove(tombstone)
