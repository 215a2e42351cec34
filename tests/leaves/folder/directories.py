"""Small leaves directories whose index is JSON of these tests, and what is found of them.

An index is ``{"branches": {prefix: {"attempt": ..., "leaves": {folder: [names of chunks]}, "moving": [folders]}}}``.
"""

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import faults
from treering._codec.zarr import ZarrArray, chunk_names, parse_zarray, zarray_bytes
from treering._store.leaves_api import LeafFile, MakeUpdate, Move, OlderAttempts, Update
from treering._store.leaves_folder import staged_leaves
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._store.leaves_folder.staged_leaves import JoinedLeaves, StagedLeaves
from treering._store.posix.folder_tree import FolderTree
from treering.errors import DataFileMissingError

Staging = StagedLeaves
Joined = JoinedLeaves
Tree = Mapping[str, bytes]
"""The content of the leaves of one branch, by folder."""

INDEX = "tensorstore_index.json"
CHUNK = 4
"""Bytes of a chunk."""


def branches_of(index: bytes | None) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(index or b"{}").get("branches", {})
    except ValueError:
        return {}
    return found


def encoded(branches: Mapping[str, Any]) -> bytes:
    return json.dumps({"branches": branches}).encode()


def moved(index: bytes) -> bytes:
    """The index when everything is in its place."""
    branches = branches_of(index)
    return encoded(
        {prefix: {key: branch[key] for key in branch if key != "moving"} for prefix, branch in branches.items()}
    )


def unfinished(index: bytes) -> Update | None:
    """What such an index promises that is not done."""
    moves = tuple(
        Move(attempt=branch["attempt"], cleared=tuple(branch["moving"]))
        for branch in branches_of(index).values()
        if "moving" in branch
    )
    return Update(moving=index, moved=moved(index), moves=moves) if moves else None


def stage(path: Path, attempt: str | None = None, nbytes: int = 0) -> StagedLeaves:
    return StagedLeaves(path, unfinished, attempt=attempt, nbytes=nbytes)


def commit_pending(path: Path, update: Callable[[bytes | None], Update | None]) -> None:
    """Change the index by a save that writes nothing."""
    with stage(path) as saving:
        saving.commit(b"", lambda index, _: update(index))


def join(path: Path, attempt: str) -> JoinedLeaves:
    """Take part in the save of another process."""
    return JoinedLeaves(path, attempt)


def open_leaves(path: Path) -> LeavesFolder:
    return LeavesFolder(path)


def fail_moves(patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let savers fail after their commit, where staged files go to their places."""
    faults.fail(patch, staged_leaves, "move_staged", error)


def cut_moves_short(patch: pytest.MonkeyPatch) -> None:
    """Let an interrupt end savers when staged files are at their places, before these names are durable."""
    faults.fail(patch, FolderTree, "sync_folders", KeyboardInterrupt())


def chunks_of(content: bytes) -> list[tuple[str, bytes]]:
    return [(str(number), content[start : start + CHUNK]) for number, start in enumerate(range(0, len(content), CHUNK))]


def files(*named: tuple[str, bytes]) -> list[LeafFile]:
    return [(name, [data], len(data)) for name, data in named]


def array_text(attempt: str, content: bytes) -> bytes:
    return zarray_bytes(ZarrArray(shape=(len(content),), chunks=(CHUNK,), dtype="int8", marker=attempt))


def write(saving: StagedLeaves, tree: Tree) -> dict[str, list[str]]:
    """Stage a tree, its leaves by turns small and large; return what an index says of it."""
    for number, (folder, content) in enumerate(tree.items()):
        text = array_text(saving.attempt, content)
        if number % 2:
            saving.write(folder, files((".zarray", text), *chunks_of(content)))
        else:
            for name, chunk in chunks_of(content):
                saving.write(folder, [(name, [chunk[:1], memoryview(chunk[1:])], len(chunk))])
            saving.write(folder, files((".zarray", text)))
    return {folder: [name for name, _ in chunks_of(content)] for folder, content in tree.items()}


def update_for(
    attempts: Mapping[str, tuple[str, Mapping[str, list[str]]]], dropped: Mapping[str, Iterable[str]] = {}
) -> MakeUpdate:
    """Return what makes the index of those branches: prefix -> attempt and leaves.

    ``dropped``: saves without an index that go, with the folders of their leaves.
    """

    def update(old: bytes | None, older: OlderAttempts | frozenset[str] = frozenset()) -> Update:
        assert isinstance(older, frozenset)
        branches = branches_of(old)
        moves = []
        for prefix, (attempt, leaves) in attempts.items():
            cleared = [*branches.get(prefix, {}).get("leaves", {}), *itertools.chain(*dropped.values())]
            moves.append(Move(attempt=attempt, cleared=tuple(cleared)))
            branches[prefix] = {"attempt": attempt, "leaves": dict(leaves), "moving": cleared}
        moving = encoded(branches)
        return Update(moving=moving, moved=moved(moving), moves=tuple(moves), dropped=tuple(dropped))

    return update


def pending(path: Path) -> list[tuple[int, str, str, dict[str, list[str]]]]:
    """Return what was saved without an index: when, prefix, attempt, leaves; oldest first."""
    with LeavesFolder(path) as directory:
        waiting, kept, _ = directory.unlisted()
        records = {attempt: json.loads(text) for attempt, text in kept if attempt in waiting}
    return sorted((when, prefix, attempt, leaves) for attempt, (when, prefix, leaves) in records.items())


def save(path: Path, tree: Tree, *, prefix: str = "", leave: bool = False) -> str:
    """Save a tree and return the attempt."""
    with stage(path) as saving:
        leaves = write(saving, tree)
        record = json.dumps([time.time_ns(), prefix, leaves]).encode()
        if leave:
            saving.commit(record, update_for({}), listed=False)
        else:

            def update(old: bytes | None, older: OlderAttempts | frozenset[str]) -> Update | None:
                replaced = {attempt: below for _, other, attempt, below in pending(path) if other == prefix}
                return update_for({prefix: (saving.attempt, leaves)}, replaced)(old, older)

            saving.commit(record, update)
    return saving.attempt


def take_up(path: Path) -> None:
    """Put all pending saves into the index, the newest of each prefix."""

    def update(old: bytes | None) -> Update | None:
        found = pending(path)
        if not found:
            return None
        newest = {prefix: (attempt, leaves) for _, prefix, attempt, leaves in found}
        kept = {attempt for attempt, _ in newest.values()}
        older = {attempt: leaves for _, _, attempt, leaves in found if attempt not in kept}
        return update_for(newest, older)(old, frozenset())

    commit_pending(path, update)


def load(path: Path, prefix: str = "") -> dict[str, bytes] | None:
    """Return the tree that is saved there, None when there is none. Its parts are all of one attempt."""
    for _ in range(50):
        with LeavesFolder(path) as directory:
            branch = branches_of(directory.read_index()).get(prefix)
            if branch is None:
                return None
            found, missing = None, None
            try:
                found = whole(directory, branch)
            except DataFileMissingError as error:
                missing = error
            # Nothing is cleared or moved before the index says so: what was read under the same index is of one save.
            now = branches_of(directory.read_index()).get(prefix) or {}
            if {**branch, "moving": 0} == {**now, "moving": 0}:
                if missing is not None:
                    raise missing
                assert found is not None
                return found
    raise AssertionError("always on the way")


def whole(directory: LeavesFolder, branch: Mapping[str, Any]) -> dict[str, bytes] | None:
    """Return the leaves of a branch; None when some are of another attempt."""
    attempt = branch["attempt"] if "moving" in branch else None
    found = {}
    for folder, names in branch["leaves"].items():
        with directory.open(folder, ".zarray", attempt) as file:
            array = parse_zarray(file.read(0, file.size))
        if array.marker != branch["attempt"] or (list(chunk_names(array)) if array.shape != (0,) else []) != names:
            return None
        parts = []
        for name in names:
            with directory.open(folder, name, attempt) as file:
                parts.append(file.read(0, file.size))
        found[folder] = b"".join(parts)
    return found


def everything(path: Path, *, records: bool = False) -> list[str]:
    """All files there and all empty folders, with or without records."""
    return sorted(
        str(entry.relative_to(path)) + ("/" if entry.is_dir() and not entry.is_symlink() else "")
        for entry in path.rglob("*")
        if (not entry.is_dir() or entry.is_symlink() or not any(entry.iterdir()))
        and (records or entry.name != "record.json")
    )


def expected(branches: Mapping[str, Tree], others: Iterable[str] = ()) -> list[str]:
    """What `everything` gives after those branches were saved."""
    return sorted(
        [INDEX, *others]
        + [
            f"{folder}/{name}"
            for tree in branches.values()
            for folder, content in tree.items()
            for name in (".zarray", *dict(chunks_of(content)))
        ]
    )
