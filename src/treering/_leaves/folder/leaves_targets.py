"""Whether the key paths that staged files would go to are free, looked at before anything is committed.

A name is free when nothing is there, or when it goes with the leaves that the save replaces. Files of others that lie
beside stay; one that stands in the way is refused.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from treering._leaves.folder.moves import Cleared
from treering._store.posix.folder_tree import FILE, FOLDER, OTHER, FolderTree, Parts
from treering._values.leaves_names import ARRAY, ATTEMPTS
from treering.errors import Exists


class Targets:
    """The key paths of a directory, while nobody else saves there."""

    def __init__(self, tree: FolderTree, cleared: Cleared) -> None:
        """Look at a directory in which ``cleared`` goes."""
        self._tree = tree
        self._cleared = cleared.files
        self._replaced = cleared.replaced
        self._found = dict(cleared.found)

    def require_free(self, wanted: Mapping[Parts, Sequence[str]]) -> None:
        """Refuse what stands in the way of files, given as names by folder.

        Raises:
            Exists: something does.
            LinkRefused: a folder on the way is a link.
            OSError: the system refused.
        """
        for parts, names in wanted.items():
            if self._is_folder(parts):
                for name in names:
                    self._require_free(parts, name)

    def are_bare(self, wanted: Iterable[Parts]) -> bool:
        """Whether nothing at all is at those folders, and none of them is inside an array.

        Raises:
            LinkRefused: a folder on the way is a link.
            OSError: the system refused.
        """
        with contextlib.suppress(Exists):
            return not any(self._is_folder(parts) for parts in wanted)
        return False

    def _is_folder(self, parts: Parts) -> bool:
        """Whether a folder is there and stays; refuse anything else on the way to it.

        Raises:
            Exists: something else is on the way, or an array that stays.
        """
        for count in range(len(parts)):
            above, name = parts[:count], parts[count]
            found = self._names(above)
            if found.get(ARRAY) is not None and ARRAY not in self._cleared.get(above, ()):
                self._refuse(above, ARRAY, "an array that no index lists")
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
                self._refuse(parts, name, "a folder with files that are no part of what is replaced")
        # Where the .zarray of a replaced leaf is lost, nothing tells its chunks from others: they are what is replaced.
        elif name not in self._cleared.get(parts, ()) and not (
            parts in self._replaced and ARRAY not in self._cleared.get(parts, ())
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
        hint = "move it away, or save to another place; treering.leaves.index_leaves lists arrays that no index does"
        error = Exists(f"{what} stands at {shown!r}, where a leaf would go", hint=hint)
        error.errno = errno.EEXIST
        error.strerror = os.strerror(errno.EEXIST)
        error.filename = shown
        raise error


def _folded(name: str) -> str:
    return unicodedata.normalize("NFD", name).casefold()
