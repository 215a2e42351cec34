"""What happens between the two indexes of a save: old leaves are cleared, staged ones move to their key paths.

Every step can be done again: whoever finds a first index goes through all of them, whatever was done before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
from collections.abc import Callable

from treering._leaves.folder.rules import IndexRules, Move
from treering._store.failures import LinkRefused
from treering._store.posix.folder_tree import FILE, FOLDER, FolderTree, Parts
from treering._values.leaves_names import ARRAY, parts_of, staged_leaves
from treering.errors import Corrupt

_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.EPERM})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """What goes with the leaves that a save replaces."""

    files: dict[Parts, list[str]] = dataclasses.field(default_factory=dict)
    """Names of files by folder, in the order in which they go."""
    found: dict[Parts, dict[str, str]] = dataclasses.field(default_factory=dict)
    """Everything that is in those folders, and what it is."""
    replaced: set[Parts] = dataclasses.field(default_factory=set)
    """The folders of the leaves themselves, whether something of them is there or not."""

    def add(self, other: Cleared) -> None:
        """Let go what goes there as well."""
        self.files.update(other.files)
        self.found.update(other.found)
        self.replaced.update(other.replaced)


def surveyed(tree: FolderTree, move: Move, rules: IndexRules) -> Cleared:
    """Return which files of the leaves that a save replaces are to go: chunks, and last the ``.zarray`` that proves it.

    A folder that is not there, or that has a link on its way, holds nothing of a leaf; one whose ``.zarray`` names the
    attempt itself was moved there already.

    Raises:
        OSError: the system refused.
    """
    cleared = Cleared()
    for folder in move.cleared:
        try:
            parts = parts_of(folder)
            cleared.replaced.add(parts)
            found = cleared.found[parts] = tree.scan(parts)
            if found.get(ARRAY) != FILE:
                continue
            text = tree.read_small(parts, ARRAY)
        except (FileNotFoundError, NotADirectoryError, LinkRefused, Corrupt):
            continue
        if rules.marker(text) != move.attempt:
            _survey_chunks(tree, parts, functools.partial(rules.is_chunk, text), cleared)
            cleared.files.setdefault(parts, []).append(ARRAY)
    return cleared


def _survey_chunks(tree: FolderTree, parts: Parts, is_chunk: Callable[[str], bool], cleared: Cleared) -> None:
    """Note the chunk files of one array, those in folders of their own too."""
    waiting = [parts]
    while waiting:
        here = waiting.pop()
        found = cleared.found[here]
        start = "".join(f"{part}/" for part in here[len(parts) :])
        chunks = [name for name, kind in found.items() if kind == FILE and is_chunk(start + name)]
        if chunks:
            cleared.files[here] = chunks
        for name, kind in found.items():
            if kind == FOLDER and name.isdecimal():
                cleared.found[(*here, name)] = tree.scan((*here, name))
                waiting.append((*here, name))


def clear(tree: FolderTree, cleared: Cleared) -> None:
    """Remove those files, then the folders that this has emptied.

    Raises:
        OSError: the system refused.
    """
    for parts, names in cleared.files.items():
        tree.remove(parts, *names)
    # Also where nothing is left to remove: whoever cleared them may have died before this.
    listed = cleared.replaced.union(cleared.files)
    emptied = {parts[:count] for parts in listed for count in range(1, len(parts) + 1)}
    for parts in sorted(emptied, key=len, reverse=True):
        with contextlib.suppress(NotADirectoryError, LinkRefused):
            tree.remove_empty(parts)


def moved(tree: FolderTree, attempt: str) -> list[Parts]:
    """Move the staged files of an attempt to their key paths: whole folders, or file by file into those that are there.

    Returns:
        The folders that names were put into, which are not yet durable.

    Raises:
        OSError: the system refused; what is left to move is staged still.
    """
    source = staged_leaves(attempt)
    waiting: list[Parts] = [()]
    into: list[Parts] = []
    while waiting:
        below = waiting.pop()
        try:
            found = tree.scan((*source, *below))
        except FileNotFoundError:  # nothing is staged (any more)
            continue
        into.append(below)
        # An array without its .zarray is missing to everybody; one without its chunks would be read as zeros.
        waiting += [
            (*below, name)
            for name in sorted(found, key=ARRAY.__eq__)
            if not _moved(tree, (*source, *below), name, below, folder=found[name] == FOLDER)
        ]
    for below in reversed(into):
        tree.remove_empty((*source, *below))
    return into


def _moved(tree: FolderTree, parts: Parts, name: str, to: Parts, *, folder: bool) -> bool:
    """Rename one thing; False for a folder where one with something in it is there already."""
    try:
        tree.replace(parts, name, to, name)
    except OSError as error:
        if tree.find(parts, name) is None and tree.find(to, name) is not None:
            return True  # done, and only the answer was lost
        if folder and error.errno in _OCCUPIED and tree.kind(to, name) == FOLDER:
            return False
        raise
    return True
