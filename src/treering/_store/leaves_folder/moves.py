"""What happens between the two indexes of a save: old leaves are cleared, staged ones move to their key paths.

Every step can be done again: whoever finds a first index goes through all of them, whatever was done before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import stat
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn, TypeAlias

from treering._codec.zarr import number_of_chunk, parse_zarray
from treering._store.failures import LinkRefusedError, with_errno
from treering._store.posix.folder_tree import FILE, FOLDER, OTHER, FolderTree, Parts
from treering._values.leaves_names import ATTEMPTS, ZARRAY, parts_of, staged_leaves
from treering.errors import CorruptError, ExistsError, TreeringError

_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.EPERM})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One attempt's staged files on their way to their key paths.

    Example:
        >>> Move(attempt="0123456789abcdef", cleared=("layer/w",)).cleared
        ('layer/w',)
    """

    attempt: str
    """Whose staged files are moved: 16 hexadecimal digits."""
    cleared: tuple[str, ...]
    """Folders of leaves that this save replaces, below the directory, with ``/``. Those that are not there, that have a
    link on their way, or that belong to the attempt itself are left alone."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """A new index for a leaves directory, in two steps, and what to do between them.

    The first index is the commit: it sends readers to the staged files. Then old leaves are cleared, staged ones are
    moved to their key paths, and the second index says so.

    Example:
        >>> move = Move(attempt="0123456789abcdef", cleared=())
        >>> Update(moving=b"{1}", settled=b"{2}", moves=(move,)).dropped
        ()
    """

    moving: bytes
    """The index that is the commit: it names the attempts whose files are still staged, and what they clear."""
    settled: bytes
    """The index when everything is at its key path."""
    moves: tuple[Move, ...]
    """What ``moving`` promises."""
    dropped: tuple[str, ...] = ()
    """Saves without an index (`StagedLeaves.leave`) that this one replaces: their folders under ``.treering`` go. What
    they have at their key paths has to be in some move's ``cleared``."""


Unfinished: TypeAlias = Callable[[bytes], Update | None]
"""Reads what an index promises that its saver did not do; None for nothing, and for an index that cannot be read."""


def marker_of(zarray: bytes) -> str | None:
    """Return the attempt that a ``.zarray`` names; None for another program's, or a damaged one."""
    try:
        return parse_zarray(zarray).marker
    except TreeringError:
        return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedFiles:
    """What goes with the leaves that a save replaces."""

    files: dict[Parts, list[str]] = dataclasses.field(default_factory=dict)
    """Names of files by folder, in the order in which they go."""
    found: dict[Parts, dict[str, str]] = dataclasses.field(default_factory=dict)
    """Everything that is in those folders, and what it is."""
    replaced: set[Parts] = dataclasses.field(default_factory=set)
    """The folders of the leaves themselves, whether something of them is there or not."""


def survey(tree: FolderTree, moves: Iterable[Move]) -> ReplacedFiles:
    """Return which files of the leaves that saves replace are to go: chunks, and last the ``.zarray`` that proves it.

    A folder that is not there, or that has a link on its way, holds nothing of a leaf; one whose ``.zarray`` names the
    attempt itself was moved there already.

    Raises:
        OSError: the system refused.
    """
    cleared = ReplacedFiles()
    for attempt, folder in [(move.attempt, folder) for move in moves for folder in move.cleared]:
        try:
            parts = parts_of(folder)
            cleared.replaced.add(parts)
            found = cleared.found[parts] = tree.scan(parts)
            if found.get(ZARRAY) != FILE:
                continue
            text = tree.read_small(parts, ZARRAY)
        except (FileNotFoundError, NotADirectoryError, LinkRefusedError, CorruptError):
            continue
        if marker_of(text) != attempt:
            _survey_chunks(tree, parts, text, cleared)
            cleared.files.setdefault(parts, []).append(ZARRAY)
    return cleared


def _survey_chunks(tree: FolderTree, parts: Parts, zarray: bytes, cleared: ReplacedFiles) -> None:
    """Note the chunk files of one array, those in folders of their own too."""
    try:
        array = parse_zarray(zarray)
    except TreeringError:
        array = None
    waiting = [parts]
    while waiting:
        here = waiting.pop()
        found = cleared.found[here]
        start = "".join(f"{part}/" for part in here[len(parts) :])
        chunks = [
            name
            for name, kind in found.items()
            if kind == FILE and array and number_of_chunk(array, start + name) is not None
        ]
        if chunks:
            cleared.files[here] = chunks
        for name, kind in found.items():
            if kind == FOLDER and name.isdecimal():
                cleared.found[(*here, name)] = tree.scan((*here, name))
                waiting.append((*here, name))


def clear(tree: FolderTree, cleared: ReplacedFiles) -> None:
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
        with contextlib.suppress(NotADirectoryError, LinkRefusedError):
            tree.remove_empty(parts)


def move_staged(tree: FolderTree, attempt: str) -> list[Parts]:
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
            for name in sorted(found, key=ZARRAY.__eq__)
            if not _rename(tree, (*source, *below), name, below, folder=found[name] == FOLDER)
        ]
    for below in reversed(into):
        tree.remove_empty((*source, *below))
    return into


def _rename(tree: FolderTree, parts: Parts, name: str, to: Parts, *, folder: bool) -> bool:
    """Rename one thing; False for a folder where one with something in it is there already."""
    try:
        tree.replace(parts, name, to, name)
    except OSError as error:
        if tree.find(parts, name) is None and tree.find(to, name) is not None:
            return True  # done, and only the answer was lost
        there = tree.find(to, name) if folder and error.errno in _OCCUPIED else None
        if there is not None and stat.S_ISDIR(there.st_mode):
            return False
        raise
    return True


class TargetPaths:
    """The key paths of a directory, while nobody else saves there."""

    def __init__(self, tree: FolderTree, cleared: ReplacedFiles) -> None:
        """Look at a directory in which ``cleared`` goes."""
        self._tree = tree
        self._cleared = cleared.files
        self._replaced = cleared.replaced
        self._found = dict(cleared.found)

    def require_free(self, wanted: Mapping[Parts, Sequence[str]]) -> None:
        """Refuse what stands in the way of files, given as names by folder.

        Raises:
            ExistsError: something does.
            LinkRefusedError: a folder on the way is a link.
            OSError: the system refused.
        """
        for parts, names in wanted.items():
            if self._is_folder(parts):
                for name in names:
                    self._require_free(parts, name)

    def are_bare(self, wanted: Iterable[Parts]) -> bool:
        """Whether nothing at all is at those folders, and none of them is inside an array.

        Raises:
            LinkRefusedError: a folder on the way is a link.
            OSError: the system refused.
        """
        with contextlib.suppress(ExistsError):
            return not any(self._is_folder(parts) for parts in wanted)
        return False

    def _is_folder(self, parts: Parts) -> bool:
        """Whether a folder is there and stays; refuse anything else on the way to it.

        Raises:
            ExistsError: something else is on the way, or an array that stays.
        """
        for count in range(len(parts)):
            above, name = parts[:count], parts[count]
            found = self._names(above)
            if found.get(ZARRAY) is not None and ZARRAY not in self._cleared.get(above, ()):
                self._refuse(above, ZARRAY, "an array that no index lists")
            kind = found.get(name)
            if kind is None:
                self._refuse_twin(above, name)
                return False
            if kind == FILE and name in self._cleared.get(above, ()):
                return False
            if kind != FOLDER:
                self._tree.refuse_link((*above, name))
                self._refuse(above, name, "a file")
        return True

    def _refuse_twin(self, parts: Parts, name: str) -> None:
        """Refuse a name that means what has another one: some systems take ``W`` and ``w`` for the same."""
        if self._folds and self._tree.find(parts, name) is not None:
            same = [other for other in self._names(parts) if _folded(other) == _folded(name)]
            if not (same and all(self._goes((*parts, other)) for other in same)):
                self._refuse(parts, name, "what has the same name in other letters")

    @functools.cached_property
    def _folds(self) -> bool:
        return self._tree.find((), ATTEMPTS.upper()) is not None

    def _require_free(self, parts: Parts, name: str) -> None:
        kind = self._names(parts).get(name)
        if kind is None:
            return
        if kind == OTHER:
            self._tree.refuse_link((*parts, name))
            self._refuse(parts, name, "a device, a pipe or a socket")
        if kind == FOLDER:
            if not self._goes((*parts, name)):
                self._refuse(parts, name, "a folder with files that are not part of what is replaced")
        # Where the .zarray of a replaced leaf is lost, nothing tells its chunks from others: they are what is replaced.
        elif name not in self._cleared.get(parts, ()) and not (
            parts in self._replaced and ZARRAY not in self._cleared.get(parts, ())
        ):
            self._refuse(parts, name, "a file that no index lists")

    def _goes(self, parts: Parts) -> bool:
        """Whether a folder will be empty when what is replaced has gone."""
        waiting, held = [parts], False
        while waiting:
            here = waiting.pop()
            for name, kind in self._names(here).items():
                if kind == FOLDER:
                    waiting.append((*here, name))
                elif name not in self._cleared.get(here, ()):
                    return False
                held = True
        return held

    def _names(self, parts: Parts) -> dict[str, str]:
        if parts not in self._found:
            self._found[parts] = self._tree.scan(parts)
        return self._found[parts]

    def _refuse(self, parts: Parts, name: str, what: str) -> NoReturn:
        shown = self._tree.shown(parts, name)
        hint = "move it away, or save to another path; treering.leaves.index_leaves lists arrays that no index does"
        error = ExistsError(f"{what} stands at {shown!r}, where a leaf would go", hint=hint)
        raise with_errno(error, errno.EEXIST, shown)


def _folded(name: str) -> str:
    return unicodedata.normalize("NFD", name).casefold()
