"""What happens between the two indexes of a save: old leaves are cleared, staged ones move to their key paths.

Every step can be done again: whoever finds a first index goes through all of them, whatever was done before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import stat
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from treering._codec.zarr import marker_of, number_of_chunk, parse_zarray
from treering._store.api import Kind
from treering._store.crew import map_together
from treering._store.failures import with_errno
from treering._store.leaves_api import Move
from treering._store.leaves_folder.leaves_folder import read_small
from treering._store.posix import descriptors
from treering._store.posix.folder import Folder
from treering._store.posix.folder_tree import FolderTree, Parts
from treering._values.leaves_names import ATTEMPTS, ZARRAY, parts_of, staged_leaves
from treering.errors import CorruptError, ExistsError, LinkRefusedError, TreeringError

_ABSENT = (FileNotFoundError, NotADirectoryError, LinkRefusedError)
_LARGEST_ZARRAY = 1 << 20
_OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, errno.EPERM})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedFiles:
    """What goes with the leaves that a save replaces, and what stays beside it."""

    files: dict[Parts, list[str]] = dataclasses.field(default_factory=dict)
    """Names of files by folder, in the order in which they go."""
    folders: set[Parts] = dataclasses.field(default_factory=set)
    """The folders of the leaves themselves, whether something of them is there or not."""
    staying: dict[Parts, dict[str, Kind]] = dataclasses.field(default_factory=dict)
    """What stays in each folder that was looked at, and what it is; `clear` removes folders in which nothing stays."""

    def emptied(self) -> list[Parts]:
        """Return the folders that may be empty when the files are gone, the deepest first."""
        ways = {parts[:count] for parts in self.folders.union(self.files) for count in range(1, len(parts) + 1)}
        return sorted(ways, key=len, reverse=True)


def survey(tree: FolderTree, moves: Sequence[Move]) -> ReplacedFiles:
    """Return which files of the leaves that saves replace are to go: chunks, and last the ``.zarray`` that proves it.

    A folder that is not there, or that has a link on its way, holds nothing of a leaf; one whose ``.zarray`` names an
    attempt that is moved was moved there already.

    Raises:
        OSError: the system refused.
    """
    replaced = ReplacedFiles()
    moving = {move.attempt for move in moves}
    # Two branches may list one array, as another program's index does.
    for folder in dict.fromkeys(folder for move in moves for folder in move.cleared):
        with contextlib.suppress(*_ABSENT, CorruptError):
            parts = parts_of(folder)
            replaced.folders.add(parts)
            if _staying(tree, replaced, parts).get(ZARRAY) is not Kind.FILE:
                continue
            text = read_small(tree, parts, ZARRAY, _LARGEST_ZARRAY)
            if marker_of(text) not in moving:
                _survey_chunks(tree, parts, text, replaced)
                replaced.files[parts] = [*replaced.files.pop(parts, ()), ZARRAY]
    for parts, names in replaced.files.items():
        for name in names:
            del replaced.staying[parts][name]
    for parts in replaced.emptied():
        with contextlib.suppress(*_ABSENT):
            above = _staying(tree, replaced, parts[:-1])
            if above.get(parts[-1]) is Kind.PLACE and not _staying(tree, replaced, parts):
                del above[parts[-1]]
    return replaced


def _staying(tree: FolderTree, replaced: ReplacedFiles, parts: Parts) -> dict[str, Kind]:
    if parts not in replaced.staying:
        replaced.staying[parts] = tree.scan(parts)
    return replaced.staying[parts]


def _survey_chunks(tree: FolderTree, parts: Parts, zarray: bytes, replaced: ReplacedFiles) -> None:
    """Note the chunk files of one array, those in folders of their own too."""
    try:
        array = parse_zarray(zarray)
    except TreeringError:
        return
    waiting = [parts]
    while waiting:
        here = waiting.pop()
        found = _staying(tree, replaced, here)
        start = "".join(f"{part}/" for part in here[len(parts) :])
        files = [name for name, kind in found.items() if kind is Kind.FILE]
        if chunks := [name for name in files if number_of_chunk(array, start + name) is not None]:
            replaced.files[here] = chunks
        waiting += [(*here, name) for name, kind in found.items() if kind is Kind.PLACE and name.isdecimal()]


def clear(tree: FolderTree, replaced: ReplacedFiles) -> None:
    """Remove those files, then the folders that this has emptied.

    Raises:
        OSError: the system refused.
    """
    for parts, names in replaced.files.items():
        tree.remove(parts, *names)
    # Also where nothing is left to remove: whoever cleared them may have died before this.
    for parts in replaced.emptied():
        with contextlib.suppress(NotADirectoryError, LinkRefusedError):
            tree.remove_empty(parts)


def _walk_staged(tree: FolderTree, attempt: str, is_done: Callable[[Parts, str, Kind], bool]) -> list[Parts]:
    """Walk through what an attempt has staged, and return the folders that were entered, as parts of key paths.

    Args:
        tree: the directory.
        attempt: the attempt.
        is_done: gets a folder, a name in it and what that is; False for a folder that is to be entered.
    """
    waiting: list[Parts] = [()]
    entered: list[Parts] = []
    while waiting:
        here = waiting.pop()
        try:
            found = tree.scan((*staged_leaves(attempt), *here))
        except FileNotFoundError:  # nothing is staged (any more)
            continue
        entered.append(here)
        # An array without its .zarray is missing to everybody; one without its chunks would be read as zeros.
        waiting += [(*here, name) for name in sorted(found, key=ZARRAY.__eq__) if not is_done(here, name, found[name])]
    return entered


def move_staged(tree: FolderTree, attempt: str) -> list[Parts]:
    """Move the staged files of an attempt to their key paths: whole folders, or file by file into those that are there.

    Returns:
        The folders that names were put into, which are not yet durable.

    Raises:
        OSError: the system refused; what is left to move is staged still.
    """
    source = staged_leaves(attempt)
    into = _walk_staged(
        tree, attempt, lambda to, name, kind: _rename(tree, (*source, *to), name, to, folder=kind is Kind.PLACE)
    )
    for to in reversed(into):
        tree.remove_empty((*source, *to))
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


def require_free(tree: FolderTree, attempt: str, replaced: ReplacedFiles) -> None:
    """Refuse what stands in the way of the staged files of an attempt, while nobody else saves there.

    It looks as deep as `move_staged` will go: only into folders that stay.

    Raises:
        ExistsError: something does.
        LinkRefusedError: a folder on the way is a link.
        OSError: the system refused.
    """
    folds = tree.find((), ATTEMPTS.upper()) is not None  # some systems take ``W`` and ``w`` for the same

    def is_free(here: Parts, name: str, kind: Kind) -> bool:
        try:
            there = _staying(tree, replaced, here)
        except FileNotFoundError:  # somebody removed it meanwhile
            return True
        found = there.get(name)
        # Where the .zarray of a replaced leaf is lost, nothing tells its chunks from others: they are replaced.
        lost = here in replaced.folders and ZARRAY not in replaced.files.get(here, ())
        what = None
        if ZARRAY in there:
            name, what = ZARRAY, "an array that no index lists"
        elif found is None:
            if folds and _folded(name) in map(_folded, there):
                what = "what has the same name in other letters"
        elif found is not kind:
            what = _IN_THE_WAY[found]
        elif kind is Kind.PLACE:
            return False
        elif not lost:
            what = "a file that no index lists"
        if what is not None:
            raise _in_the_way_error(tree, here, name, what)
        return True

    _walk_staged(tree, attempt, is_free)


_IN_THE_WAY = {
    Kind.FILE: "a file", Kind.PLACE: "a folder that is not replaced", Kind.OTHER: "a device, a pipe or a socket",
}  # fmt: skip


def _in_the_way_error(tree: FolderTree, parts: Parts, name: str, what: str) -> ExistsError:
    tree.refuse_link((*parts, name))
    shown = tree.shown(parts, name)
    hint = "move it away, or save to another path; treering.leaves.index_leaves lists arrays that no index does"
    return with_errno(ExistsError(f"{what} stands at {shown!r}, where a leaf would go", hint=hint), errno.EEXIST, shown)


def _folded(name: str) -> str:
    return unicodedata.normalize("NFD", name).casefold()


_THREADS = 5  # that of the caller is one of them
_ONE_BY_ONE = 32
_CONTENT = (os.O_RDWR if os.name == "nt" else os.O_RDONLY) | getattr(os, "O_NONBLOCK", 0)


def sync_written(
    folder: Folder, tree: FolderTree, parts: Parts, written: Iterable[tuple[Parts, Iterable[str]]]
) -> None:
    """Make some files in a folder durable, and the names of that folder and of all folders on the way to them.

    Args:
        folder: the directory, open since before anything was written.
        tree: the same.
        parts: where in it.
        written: folders below ``parts``, each with names of files; not asked for where one call makes all durable.

    Raises:
        OSError: the system refused; it is not asked again.
    """
    if folder.descriptor is not None and descriptors.sync_file_system(folder.descriptor):
        return
    jobs: list[tuple[Parts, str | None]] = []
    folders: dict[Parts, None] = {parts[:count]: None for count in range(len(parts), -1, -1)}
    for below, names in written:
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
    jobs: list[tuple[Parts, str | None]] = [(parts, None) for parts in folders]
    if len(jobs) > _ONE_BY_ONE and folder.descriptor is not None and descriptors.sync_file_system(folder.descriptor):
        return
    _sync(tree, jobs)


def _sync(tree: FolderTree, jobs: Sequence[tuple[Parts, str | None]]) -> None:
    def sync(job: tuple[Parts, str | None]) -> None:
        parts, name = job
        if name is None:
            tree.sync(parts)
            return
        with tree.open(parts, name, _CONTENT) as opened:
            descriptors.sync(opened.number)

    map_together(sync, jobs, _THREADS if len(jobs) > _ONE_BY_ONE else 1)
