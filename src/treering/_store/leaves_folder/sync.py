"""Making what was staged or moved durable: one call for the whole file system, or one for each file and folder."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from treering._store.crew import FirstError, work_together
from treering._store.posix import descriptors
from treering._store.posix.folder import Folder
from treering._store.posix.folder_tree import FolderTree, Parts

_THREADS = 4
_ONE_BY_ONE = 32
_CONTENT = (os.O_RDWR if os.name == "nt" else os.O_RDONLY) | getattr(os, "O_NONBLOCK", 0)


def sync_written(folder: Folder, tree: FolderTree, parts: Parts, written: Mapping[Parts, Sequence[str]]) -> None:
    """Make some files in a folder durable, and the names of that folder and of all folders on the way to them.

    Args:
        folder: the directory, open since before anything was written.
        tree: the same.
        parts: where in it.
        written: names of files by folder, below ``parts``.

    Raises:
        OSError: the system refused; it is not asked again.
    """
    if folder.descriptor is not None and descriptors.sync_file_system(folder.descriptor):
        return
    jobs: deque[tuple[Parts, str | None]] = deque()
    folders: dict[Parts, None] = {parts[:count]: None for count in range(len(parts), -1, -1)}
    for below, names in written.items():
        here = (*parts, *below)
        jobs.extend((here, name) for name in names)
        folders.update((here[:count], None) for count in range(len(here), -1, -1))
    jobs.extend((here, None) for here in folders)
    _sync(tree, jobs)


def sync_folders(folder: Folder, tree: FolderTree, folders: Iterable[Parts]) -> None:
    """Make the names in those folders durable.

    Raises:
        OSError: the system refused; it is not asked again.
    """
    jobs: deque[tuple[Parts, str | None]] = deque((parts, None) for parts in folders)
    if len(jobs) > _ONE_BY_ONE and folder.descriptor is not None and descriptors.sync_file_system(folder.descriptor):
        return
    _sync(tree, jobs)


def _sync(tree: FolderTree, jobs: deque[tuple[Parts, str | None]]) -> None:
    failure = FirstError()

    def work() -> None:
        while failure.error is None:
            with failure:
                try:
                    parts, name = jobs.popleft()
                except IndexError:
                    return
                if name is None:
                    tree.sync(parts)
                    continue
                with tree.open(parts, name, _CONTENT) as opened:
                    descriptors.sync(opened.number)

    work_together(work, _THREADS if len(jobs) > _ONE_BY_ONE else 0)
    failure.reraise()
