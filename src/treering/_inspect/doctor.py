"""A folder -> what is committed in it, which attempts to save are in flight or dead, what to do. Nothing is changed.

Neither jax nor numpy is needed, and no array is read: that is `verify`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Final

from treering._checkpoint.detect import detect
from treering._codec.key_document import find_attempts
from treering._codec.zarr import chunk_name, zarray_bytes
from treering._format.document import parse_index
from treering._format.findings import Committed, Diagnosis, Life
from treering._format.index import Index
from treering._inspect.attempts import FolderScan, looked_at
from treering._inspect.doctor_attempts import Known, judge_attempts
from treering._leaves.branches import judge_branch
from treering._leaves.documents.index import LEAVES_INDEX, parse_leaves_index
from treering._leaves.documents.record import OpenBranch
from treering._leaves.documents.update import unfinished_update
from treering._store.failures import LinkRefusedError, naming_file
from treering._store.leaves_folder.open_leaves import OpenLeaves
from treering._store.leaves_places import open_leaves
from treering._store.open_folder import OpenFolder, shown_names
from treering._store.resolve import find_at, is_seen, located
from treering._values import checkpoint_names, leaves_names, timing
from treering._values.checkpoint_names import INDEX
from treering._values.human import duration_text, pluralize
from treering._values.leaves_names import ZARRAY
from treering.errors import CorruptError, FormatError, NotFoundError, StoreError, TreeringError, UnsupportedError

_BROKEN: Final = (CorruptError, FormatError, UnsupportedError)

State = tuple[Committed | None, Known, list[str]]
"""What is committed, what its index names, and what is wrong."""


def checkpoint_state(path: str) -> State:
    """Look at the checkpoint in a folder, which has an index.

    Raises:
        StoreError: the system refuses to read the index.
    """
    with OpenFolder(located(path)) as folder:
        try:
            data = folder.read_index()
            with naming_file(located(path) / INDEX):
                index = parse_index(data)
        except _BROKEN as error:
            return None, Known(damaged=True), [f"the index cannot be used: {error}"]
        problems = list(_checkpoint_problems(folder, index))
    known = Known(files={file.name for file in index.files}, replaced=set(index.replaces), attempts={index.attempt})
    size = len(data) + sum(file.nbytes for file in index.files)
    counts = {"processes": index.processes, "files": 1 + len(index.files), "nbytes": size}
    return _committed("checkpoint", known, index.written, **counts), known, problems


def _checkpoint_problems(folder: OpenFolder, index: Index) -> Iterator[str]:
    for file in index.files:
        whose = "" if file.process is None else f", which process {file.process} wrote,"
        try:
            with folder.open_files([file.name])[file.name] as opened:
                if opened.size != file.nbytes:
                    size = f"{pluralize(opened.size, 'bytes')} instead of {file.nbytes}"
                    yield f"{file.name}{whose} has {size}; use another copy"
        except NotFoundError:
            yield f"{file.name}{whose} is missing; use another copy of the checkpoint"
        except (LinkRefusedError, CorruptError, StoreError) as error:
            yield str(error)


def leaves_state(path: str) -> State:
    """Look at a leaves directory, which has an index.

    Raises:
        StoreError: the system refuses to read the index.
    """
    with open_leaves(path) as folder:
        try:
            data = folder.read_index()
            with naming_file(located(path) / LEAVES_INDEX):
                index = parse_leaves_index(data)
        except _BROKEN as error:
            return None, Known(damaged=True), [f"the index cannot be used: {error}"]
        problems: list[str] = []
        branches: list[OpenBranch] = []
        for branch in index.branches.values():
            try:
                branches.append(judge_branch(folder, branch))
            except TreeringError as error:
                problems.append(str(error))
        size, files = len(data), 1
        for each in branches:
            for name, nbytes, problem in _leaf_files(folder, each):
                files += 1
                size += nbytes
                if problem is not None:
                    problems.append(f"{name} {problem}; use another copy of the directory")
    unfinished = unfinished_update(data)
    moving = {move.attempt for move in unfinished.moves} if unfinished is not None else set()
    known = Known(attempts=find_attempts(data), moving=moving)
    written = max((each.record.written for each in branches), key=lambda one: str(one.get("at", "")), default={})
    processes = written.get("processes")
    counts = {"processes": processes if type(processes) is int and processes > 0 else 1, "files": files, "nbytes": size}
    return _committed("leaves", known, written, **counts), known, problems


def _leaf_files(folder: OpenLeaves, branch: OpenBranch) -> Iterator[tuple[str, int, str | None]]:
    """Walk through the files of a branch with their sizes, and what is wrong with them.

    Other programs may leave out chunks that are full of one value, and no record says how large theirs are.
    """
    for name, array, sizes in zip(branch.record.folders, branch.arrays, branch.chunk_sizes(), strict=True):
        wanted = [(ZARRAY, len(zarray_bytes(array)))] if branch.verified else []
        wanted += [(chunk_name(array, number), nbytes) for number, nbytes in enumerate(sizes)]
        for file, nbytes in wanted:
            yield f"{name}/{file}".removeprefix("/"), nbytes, _problem(folder, branch, (name, file), nbytes)


def _problem(folder: OpenLeaves, branch: OpenBranch, place: tuple[str, str], nbytes: int) -> str | None:
    try:
        with folder.open(*place, branch.attempt) as opened:
            return None if opened.size == nbytes else f"has {pluralize(opened.size, 'bytes')} instead of {nbytes}"
    except NotFoundError:
        return "is missing"
    except (LinkRefusedError, CorruptError, StoreError) as error:
        return f"cannot be opened ({error})"


def _committed(form: str, known: Known, written: Mapping[str, object], **counts: int) -> Committed:
    at, by = (text if isinstance(text, str) else None for text in (written.get("at"), written.get("by")))
    return Committed(form=form, attempts=sorted(known.attempts), at=at, by=by, **counts)


# A save that is committed while we look makes files of the index before vanish.
_TRIES: Final = 5


def diagnose(path: str | os.PathLike[str]) -> Diagnosis:
    """Look at a checkpoint's folder or a leaves directory, also at one that holds only what attempts left there.

    Nothing is locked, written or removed, so a saver that is at work does not notice.

    Raises:
        NotFoundError: nothing is there, or a folder with nothing of treering's in it.
        UnsupportedError: it is a file.
        StoreError: the system refuses.

    Example:
        >>> import os
        >>> os.mkdir("ckpt")
        >>> diagnose("ckpt").notes
        ('the folder is empty',)
    """
    shown = os.fspath(path)
    if not is_seen(shown):
        detect(shown)  # says what was probably meant
    if (found := find_at(shown)) is not None and found.is_file:
        raise UnsupportedError(f"{shown!r} is a file; doctor looks at folders", hint="treering verify checks files")
    before = looked_at(shown)
    for _ in range(_TRIES):
        diagnosis = _diagnose_once(shown, before)
        now = looked_at(shown)
        if diagnosis.ok or _still(now) == _still(before):
            return diagnosis
        before = now
    return _diagnose_once(shown, before)


def _still(looked: FolderScan) -> object:
    """Return what stays the same between two looks at a folder in which no process works."""
    # Locks are looked at before names: a process that came between the two would seem dead.
    holders = [(remains.attempt, remains.holder) for remains in (*looked.saved.values(), *looked.staged.values())]
    return looked.names, len(looked.notes), looked.saver, holders


def _diagnose_once(path: str, looked: FolderScan) -> Diagnosis:
    names = set(looked.names)
    has_lock_file = checkpoint_names.LOCK_FILE in names
    known, problems, notes = Known(), list[str](), list[str]()
    removed = [name for name in looked.names if checkpoint_names.attempt_of_tombstone(name)]
    committed, is_removed = None, looked.removed
    if not names.isdisjoint({checkpoint_names.INDEX, leaves_names.INDEX}):
        # Their readers take a moment to import, and a folder of leftovers needs none.

        state = checkpoint_state if checkpoint_names.INDEX in names else leaves_state
        committed, known, problems = state(path)
    elif not names and not is_removed:
        notes.append("the folder is empty")
    elif not (
        looked.saved
        or looked.staged
        or looked.notes
        or has_lock_file
        or looked.trouble
        or removed
        or is_removed
        or any(map(checkpoint_names.is_message_folder, names))
    ):
        if leaves_names.ATTEMPTS not in names:
            detect(path)  # says what it is, where it is well known
            raise NotFoundError(
                f"there are no files of treering in {path!r}", hint=f"it holds {shown_names(sorted(names))}"
            )
        notes.append("nothing was saved here")
    else:
        notes.append("nothing is committed here")
    if looked.waits is not None:
        notes.append(looked.waits)
    if removed:
        notes.append(f"the removal of a checkpoint here was interrupted: {shown_names(removed)} is removed last")
    if looked.trouble is not None:
        problems.append(f"staged files cannot be inspected: {looked.trouble}")
    attempts = judge_attempts(looked, known, time.time())
    if has_lock_file:
        lives = any(attempt.life is Life.IN_FLIGHT for attempt in attempts)
        what = f"{checkpoint_names.LOCK_FILE} is there, which stands for the lock of the folder"
        (notes if lives else problems).append(what if lives else f"{what}; if no process is saving here, remove it")
    notes.extend(_waiting(looked))
    waits = is_removed and looked.waits is not None and not (attempts or problems or removed or looked.notes)
    return Diagnosis(
        path=path, committed=committed, attempts=attempts, problems=tuple(problems), notes=tuple(notes),
        waits_for_readers=waits,
    )  # fmt: skip


def _waiting(looked: FolderScan) -> Iterator[str]:
    """Say which processes show that they wait for others."""
    for note in looked.notes:
        if note.attempt is None and note.process is not None:
            age = max(time.time() - note.changed, 0.0)
            if age < timing.current.heartbeat_stale:
                yield f"process {note.process} of a job is waiting for others"
            else:
                since = f"process {note.process} of a job waited for others {duration_text(age)} ago"
                yield f"{since} and sends no heartbeat now: it was killed or sleeps; the next save removes its message"
