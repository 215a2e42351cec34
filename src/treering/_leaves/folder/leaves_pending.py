"""A new index for a leaves directory without a new save: for saves that were left without one, or a lost index."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from treering._leaves.folder.attempts import AttemptFolder, sweep_unfinished
from treering._leaves.folder.commit import LeavesCommit
from treering._leaves.folder.rules import IndexRules, Update
from treering._store.failures import naming
from treering._store.posix.folder import Folder
from treering._store.posix.folder_tree import FOLDER, FolderTree, Parts
from treering._store.posix.folders import resolved_folder
from treering._values.leaves_names import is_attempt, staged_leaves


def commit_pending(path: Path, rules: IndexRules, update: Callable[[bytes | None], Update | None]) -> None:
    """Make ``update(index)`` the index of the directory, and do the moves that it promises.

    Moved attempts are no longer pending. A damaged index is handed to ``update`` as it is; it may make a new one.

    Args:
        path: the directory; it must be there.
        rules: how to read an index.
        update: gets the present index, None when there is none, while nobody else can change it; None as its answer
            leaves everything as it is.

    Raises:
        NotFound: there is no such directory.
        Busy: others kept saving.
        Exists: files that no index lists stand where staged ones would go.
        LinkRefused: the index, or ``.treering``, is a link.
        StoreFailed: the system refused.
    """
    shown = os.fspath(path)
    with naming(shown, "write"), contextlib.ExitStack() as held:
        folder = held.enter_context(Folder(resolved_folder(shown)))
        tree = FolderTree(folder, shown)
        held.callback(tree.close)
        own = AttemptFolder(tree)
        sweep_unfinished(tree)
        held.callback(own.discard)
        with contextlib.closing(LeavesCommit(folder, tree, own, rules, shown)) as saving, saving:
            saving.change(update, lambda change: _staged(tree, change))


def _staged(tree: FolderTree, change: Update) -> Mapping[Parts, Sequence[str]]:
    """Return all staged files of the attempts that are to be moved, as names by folder."""
    found: dict[Parts, list[str]] = {}
    for move in change.moves:
        source = staged_leaves(move.attempt)
        waiting: list[Parts] = [()] if is_attempt(move.attempt) else []
        while waiting:
            below = waiting.pop()
            try:
                names = tree.scan((*source, *below))
            except FileNotFoundError:  # it was moved already
                continue
            waiting += [(*below, name) for name, kind in names.items() if kind == FOLDER]
            found.setdefault(below, []).extend(name for name, kind in names.items() if kind != FOLDER)
    return {parts: names for parts, names in found.items() if names}
