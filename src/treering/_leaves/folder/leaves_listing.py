"""What lies in a leaves directory whose index is missing: arrays, and a word to whoever looked for the index."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from treering._store.open_folder import shown_names
from treering._store.posix.folder_tree import FILE, FOLDER, FolderTree, Parts
from treering._values.checkpoint_names import INDEX as CHECKPOINT
from treering._values.checkpoint_names import is_note
from treering._values.leaves_names import ARRAY, ATTEMPTS, INDEX
from treering.errors import TreeringError

# No path that a program can name is deeper.
_DEEPEST = 2048
_LOOKED_AT = 200
# Names in a folder that make it a leaves directory of its own, or a group of arrays that another program has there.
_OF_OTHERS = frozenset({INDEX, ATTEMPTS, ".zgroup"})


def array_folders(tree: FolderTree) -> Iterator[Parts]:
    """Yield the way to every folder that holds a ``.zarray``, sorted by its parts; not in other directories or groups.

    Raises:
        OSError: the system refuses.
    """
    return (parts for parts in _folders(tree) if parts is not None)


def _folders(tree: FolderTree) -> Iterator[Parts | None]:
    """Yield the way to each array that is met, None for each other folder."""
    waiting: list[Parts] = [()]
    while waiting:
        here = waiting.pop()
        try:
            found = tree.scan(here)
        except (FileNotFoundError, NotADirectoryError):  # it was removed meanwhile
            continue
        if here and not _OF_OTHERS.isdisjoint(found):
            continue  # what is in it is not this directory's to list, nor to replace
        if found.get(ARRAY) == FILE:
            yield here
            continue
        yield None
        if len(here) < _DEEPEST:
            below = sorted((name for name, kind in found.items() if kind == FOLDER), reverse=True)
            waiting += [(*here, name) for name in below if here or name != ATTEMPTS]


def what_is_there(tree: FolderTree) -> str:
    """Say what a directory without an index holds, and what to do about it."""
    try:
        found = tree.scan(())
        if CHECKPOINT in found:
            return f"it holds {CHECKPOINT!r}: that is a checkpoint, which treering.load reads"
        folders = sorted(name for name, kind in found.items() if kind == FOLDER)
        if ATTEMPTS in folders or any(one is not None for one in itertools.islice(_folders(tree), _LOOKED_AT)):
            return "it holds arrays: treering.leaves.index_leaves makes an index of them"
        others = [name for name in folders if tree.find((name,), INDEX) is not None]
    except (OSError, TreeringError) as error:
        return f"what is there cannot be read: {error}"
    if others:
        return f"there are leaves directories in it: {shown_names(others)}"
    names = sorted(name for name in found if not is_note(name))
    return f"it holds {shown_names(names)}" if names else "it is empty"
