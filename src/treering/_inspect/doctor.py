"""A folder -> what is committed in it, which attempts to save are in flight or dead, what to do. Nothing is changed.

Neither jax nor numpy is needed, and no array is read: that is `verify`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from treering._checkpoint.detect import detect
from treering._codec.key_document import find_attempts
from treering._codec.zarr import chunk_name, zarray_bytes
from treering._format.document import parse_index
from treering._format.findings import Committed, Diagnosis, RunDiagnosis, StepDiagnosis
from treering._inspect.doctor_attempts import Known, judge_attempts, read_messages
from treering._leaves.branches import judge_branch
from treering._leaves.commit import unfinished_update
from treering._leaves.documents.index import parse_leaves_index
from treering._leaves.documents.record import OpenBranch
from treering._runs.folder import RunFolder
from treering._runs.leases import held_steps
from treering._runs.steps import records_of, step_path
from treering._store.api import Reader, Store
from treering._store.failures import naming, naming_file
from treering._store.leaves_places import open_leaves
from treering._store.open_folder import OpenFolder, find_index_at, is_removed, key_content, shown_names
from treering._store.orphans import scan_folder
from treering._store.resolve import find_at, is_folder, is_seen, located, opened_store
from treering._store.waiting import describe_waiting, listed_names
from treering._values import checkpoint_names, leaves_names, timing
from treering._values.checkpoint_names import INDEX, is_message
from treering._values.human import duration_text, pluralize, steps_text
from treering._values.processes import Life
from treering.errors import (
    CorruptError,
    FormatError,
    LinkRefusedError,
    NotFoundError,
    StoreError,
    TreeringError,
    UnsupportedError,
)

_BROKEN: Final = (CorruptError, FormatError, UnsupportedError)
# A save that is committed while we look makes files of the index before vanish.
_TRIES: Final = 5

_State: TypeAlias = tuple[Committed | None, Known, list[str]]
"""What is committed, what its index names, and what is wrong."""
_Opener: TypeAlias = Callable[[], Reader]
_WantedFile: TypeAlias = tuple[str, int, _Opener]
"""What messages call a file, how many bytes it has, and what opens it."""


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
    diagnosis, traces = _diagnose_once(shown)
    for _ in range(_TRIES):
        if diagnosis.ok:
            break
        again, now = _diagnose_once(shown)
        if now == traces:
            break
        diagnosis, traces = again, now
    return diagnosis


def _diagnose_once(path: str) -> tuple[Diagnosis, object]:
    """Look at a folder; return what was found, and what differs the next time where a process works there."""
    with naming(os.fspath(located(path)), "read"), opened_store(path) as store:
        scan = scan_folder(store)
        messages, waiting = read_messages(store, scan.names)
        removed, superseded, stays = _read_superseded(store, scan.names)
    names = set(scan.names) - ({INDEX} if removed else set())
    tombstones = [name for name in scan.names if checkpoint_names.attempt_of_tombstone(name)]
    has_lock_file = checkpoint_names.LOCK_FILE in names
    committed, known, problems, notes = None, Known(), list[str](), list[str]()
    if not names.isdisjoint({INDEX, leaves_names.INDEX}):
        committed, known, problems = _read_state(path, names)
    else:
        signs = scan.orphans, messages, waiting, has_lock_file, scan.trouble, tombstones, removed
        is_ours = any(signs) or any(map(checkpoint_names.is_message_folder, names))
        notes.append(_describe_nothing(path, names, is_ours=is_ours))
    if stays is not None:
        notes.append(stays)
    if tombstones:
        notes.append(f"the removal of a checkpoint here was interrupted: {shown_names(tombstones)} is removed last")
    if scan.trouble is not None:
        problems.append(f"staged files cannot be inspected: {scan.trouble}")
    known = dataclasses.replace(known, files={*known.files, *superseded})
    attempts = judge_attempts(scan, messages, known, time.time())
    if has_lock_file:
        lives = any(attempt.life is Life.IN_FLIGHT for attempt in attempts)
        what = f"{checkpoint_names.LOCK_FILE} is there, which stands for the lock of the folder"
        (notes if lives else problems).append(what if lives else f"{what}; if no process is saving here, remove it")
    notes.extend(_describe_waiting_processes(waiting))
    is_alone = not (attempts or problems or tombstones or messages or waiting)
    diagnosis = Diagnosis(
        path=path, committed=committed, attempts=attempts, problems=tuple(problems), notes=tuple(notes),
        waits_for_readers=removed and stays is not None and is_alone,
    )  # fmt: skip
    votes = {attempt: len(told.votes) for attempt, told in messages.items()}
    return diagnosis, (scan.names, scan.saver, [(each.attempt, each.holder) for each in scan.orphans], votes)


def _read_superseded(store: Store, names: Collection[str]) -> tuple[bool, Sequence[str], str | None]:
    """Read what is in the place of the index of a checkpoint.

    Returns:
        Whether it is a tombstone; the data files that stay for readers who began before they were superseded; and what
        is to be said of them.
    """
    index = store.find(INDEX) if INDEX in names else None
    if index is None or not index.is_file:
        return False, (), None
    removed = is_removed(store, index)
    # What cannot be read lists nothing; the reader of the index says what is wrong with it.
    with contextlib.suppress(LinkRefusedError, *_BROKEN, NotFoundError):
        key = key_content(store).data
        return removed, listed_names(key), describe_waiting(store, key)
    return removed, (), None


def _describe_nothing(path: str, names: Collection[str], *, is_ours: bool) -> str:
    """Say that nothing is committed.

    Raises:
        NotFoundError: nothing there is treering's.
    """
    if is_ours:
        return "nothing is committed here"
    if not names:
        return "the folder is empty"
    if leaves_names.ATTEMPTS in names:
        return "nothing was saved here"
    detect(path)  # says what it is, where it is well known
    raise NotFoundError(f"there are no files of treering in {path!r}", hint=f"it holds {shown_names(sorted(names))}")


def _describe_waiting_processes(waiting: Mapping[int, float]) -> Iterator[str]:
    for process, changed in waiting.items():
        age = max(time.time() - changed, 0.0)
        if age < timing.current.heartbeat_stale:
            yield f"process {process} of a job is waiting for others"
        else:
            since = f"process {process} of a job waited for others {duration_text(age)} ago"
            yield f"{since} and sends no heartbeat now: it was killed or sleeps; a later save removes its message"


def _describe_passing(store: Store, names: Sequence[str]) -> Iterator[str]:
    """Say what processes have, or left, in a run's own folder for moments only."""
    _, waiting = read_messages(store, names)
    yield from _describe_waiting_processes(waiting)
    for name in names:
        found = None if is_message(name) else store.find(name)
        if found is not None and time.time() - found.modified > timing.current.heartbeat_stale:
            who = "a process that was killed while it began to hold a step, or sleeps; a later save removes it"
            yield f"{name} was written {duration_text(time.time() - found.modified)} ago by {who}"


# ---------------------------------------------------------------------------------------------------- what is committed


def _read_state(path: str, names: Collection[str]) -> _State:
    """Read the index and look at the files that it names; raises StoreError where the system refuses that."""
    try:
        return _checkpoint_state(path) if INDEX in names else _leaves_state(path)
    except _BROKEN as error:
        return None, Known(damaged=True), [f"the index cannot be used: {error}"]


def _checkpoint_state(path: str) -> _State:
    with OpenFolder(located(path)) as folder:
        data = folder.read_index()
        with naming_file(located(path) / INDEX):
            index = parse_index(data)
        wanted: list[_WantedFile] = []
        for file in index.files:
            whose = "" if file.process is None else f", which process {file.process} wrote,"
            wanted.append((file.name + whose, file.nbytes, functools.partial(_open_data, folder, file.name)))
        nbytes, problems = _measure(wanted, "the checkpoint")
    known = Known(files={file.name for file in index.files}, replaced=set(index.replaces), attempts={index.attempt})
    committed = Committed(
        form="checkpoint", attempts=[index.attempt], processes=index.processes, files=1 + len(wanted),
        nbytes=len(data) + nbytes, **_origin(index.written),
    )  # fmt: skip
    return committed, known, problems


def _open_data(folder: OpenFolder, name: str) -> Reader:
    return folder.open_files([name])[name]


def _leaves_state(path: str) -> _State:
    with open_leaves(path) as folder:
        data = folder.read_index()
        with naming_file(located(path) / leaves_names.INDEX):
            index = parse_leaves_index(data)
        problems: list[str] = []
        branches: list[OpenBranch] = []
        for branch in index.branches.values():
            try:
                branches.append(judge_branch(folder, branch))
            except TreeringError as error:
                problems.append(str(error))
        wanted = [
            (f"{name}/{file}".removeprefix("/"), nbytes, functools.partial(folder.open, name, file, branch.attempt))
            for branch in branches
            for name, file, nbytes in _files_of(branch)
        ]
        nbytes, missing = _measure(wanted, "the directory")
    unfinished = unfinished_update(data)
    moving = {move.attempt for move in unfinished.moves} if unfinished is not None else set()
    known = Known(attempts=find_attempts(data), moving=moving)
    written = max((each.record.written for each in branches), key=lambda one: str(one.get("at", "")), default={})
    processes = written.get("processes")
    committed = Committed(
        form="leaves", attempts=sorted(known.attempts), files=1 + len(wanted), nbytes=len(data) + nbytes,
        processes=processes if type(processes) is int and processes > 0 else 1, **_origin(written),
    )  # fmt: skip
    return committed, known, problems + missing


def _files_of(branch: OpenBranch) -> Iterator[tuple[str, str, int]]:
    """Walk through the files of a branch: folder, name, bytes.

    Other programs may leave out chunks that are full of one value, and no record says how large theirs are.
    """
    for name, array, sizes in zip(branch.record.folders, branch.arrays, branch.chunk_sizes(), strict=True):
        if branch.verified:
            yield name, leaves_names.ZARRAY, len(zarray_bytes(array))
        yield from ((name, chunk_name(array, number), nbytes) for number, nbytes in enumerate(sizes))


def _measure(wanted: Iterable[_WantedFile], what: str) -> tuple[int, list[str]]:
    """Return how many bytes files have together, as their index says, and what is wrong with them."""
    total, problems = 0, list[str]()
    for name, nbytes, opener in wanted:
        total += nbytes
        try:
            with opener() as opened:
                problem = (
                    None if opened.size == nbytes else f"has {pluralize(opened.size, 'bytes')} instead of {nbytes}"
                )
        except NotFoundError:
            problem = "is missing"
        except CorruptError as error:
            problem = f"cannot be opened ({error})"
        except (LinkRefusedError, StoreError) as error:  # which is no damage, and says what to do
            problems.append(f"{name} cannot be opened: {error}")
            continue
        if problem is not None:
            problems.append(f"{name} {problem}; use another copy of {what}")
    return total, problems


def _origin(written: Mapping[str, object]) -> dict[str, str | None]:
    """Return when a state was saved, and by which program."""
    return {name: text if isinstance(text := written.get(name), str) else None for name in ("at", "by")}


# ----------------------------------------------------------------------------------------------------------- of a run


def holds_run(path: str) -> bool:
    """Tell whether a folder is that of a run, also of one whose first save never ended.

    Raises:
        StoreError: the system refuses.

    Example:
        >>> import os
        >>> os.makedirs("run/step_00000001")
        >>> holds_run("run"), holds_run("run/step_00000001"), holds_run("nowhere")
        (True, False, False)
    """
    place = located(path)
    if not is_folder(place) or find_index_at(place) is not None:
        return False
    with RunFolder(place) as run:
        return bool(run.folders())


def diagnose_run(path: str) -> RunDiagnosis:
    """Look at every step's folder of a run, also at those that have no index.

    Args:
        path: the run's folder.

    Raises:
        NotFoundError: nothing is there.
        StoreError: the system refuses.
    """
    place = located(path)
    with RunFolder(place) as run:
        folders = run.folders()
        left = _left_text(run)
        held = [f"step {step} is {by}" for step, by in held_steps(run).items()]
        held += _describe_passing(run.store, list(filter(checkpoint_names.is_passing, run.names())))
    records = records_of(place)
    found: list[StepDiagnosis] = []
    for step in folders:
        with contextlib.suppress(NotFoundError):  # it was removed meanwhile, or holds nothing of ours
            found.append(StepDiagnosis(step=step, found=diagnose(step_path(place, step))))
    readable = records.readable
    steps, nbytes = [record.step for record in readable], sum(record.nbytes for record in readable)
    saved = readable[-1].saved if readable else None
    over = [record.step for record in records.passed]
    passed = f"passed over at a resume, and kept by no rule and by none removed: {steps_text(over)}" if over else None
    notes = (*(note for note in (records.trouble, left, passed) if note is not None), *held)
    return RunDiagnosis(path=path, steps=steps, nbytes=nbytes, saved=saved, folders=found, notes=notes)


def _left_text(run: RunFolder) -> str | None:
    """Say which steps wait to be removed because an earlier one was gone back to; None where none do."""
    document, steps = run.read_superseded(), run.superseded_steps()
    if document is None or not steps:
        return None
    what = f"{steps_text(sorted(steps))} {'was' if len(steps) == 1 else 'were'} left behind"
    end = "the next save, or treering gc --yes, removes what is left of them"
    return f"{what} when step {document.step} was saved; {end}"
