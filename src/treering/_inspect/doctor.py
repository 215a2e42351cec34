"""A folder -> what is committed in it, which attempts to save are in flight or dead, what to do. Nothing is changed.

Neither jax nor numpy is needed, and no array is read: that is `verify`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from treering._checkpoint.detect import detect
from treering._codec.key_document import find_attempts
from treering._codec.zarr import chunk_name, zarray_bytes
from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, VoteMessage, VoteStage
from treering._coordination.operations import parent_of
from treering._format.document import parse_index
from treering._format.findings import Attempt, Committed, Diagnosis, ProcessState, RunDiagnosis, StepDiagnosis
from treering._leaves.branches import judge_branch
from treering._leaves.commit import unfinished_update
from treering._leaves.documents.index import parse_leaves_index
from treering._leaves.documents.record import OpenBranch
from treering._runs.folder import RunFolder, has_run
from treering._runs.leases import held_steps
from treering._runs.steps import records_of, step_path
from treering._store.api import LARGEST_MESSAGE, Reader, Store, open_below
from treering._store.failures import naming, naming_file
from treering._store.open_folder import OpenFolder, find_index_at, is_removed, key_content
from treering._store.orphans import FolderScan, Orphan, find_life, scan_folder
from treering._store.resolve import find_at, is_folder, is_seen, located, open_leaves, opened_store
from treering._store.waiting import describe_waiting, listed_names
from treering._values import checkpoint_names, leaves_names, timing
from treering._values.checkpoint_names import INDEX, is_message
from treering._values.human import duration_text, pluralize, shown_names, steps_text
from treering._values.processes import Life, format_processes
from treering.errors import (
    CorruptError,
    FormatError,
    LinkRefusedError,
    NotFoundError,
    ProcessFailedError,
    StoreError,
    TreeringError,
    UnsupportedError,
)

_BROKEN: Final = (CorruptError, FormatError, UnsupportedError)
# A save that is committed while we look makes files of the index before vanish.
_TRIES: Final = 5

_State: TypeAlias = "tuple[Committed | None, Known, list[str]]"
"""What is committed, what its index names, and what is wrong."""
_WantedFile: TypeAlias = tuple[str, int, Callable[[], Reader]]
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
        try:
            committed, known, problems = _checkpoint_state(path) if INDEX in names else _leaves_state(path)
        except _BROKEN as error:
            known, problems = Known(damaged=True), [f"the index cannot be used: {error}"]
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
        what = "is waiting for others"
        if age >= timing.current.heartbeat_stale:
            what = f"waited for others {duration_text(age)} ago and sends no heartbeat now"
            what += ": it was killed or sleeps; a later save removes its message"
        yield f"process {process} of a job {what}"


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
                size = opened.size
            problem = None if size == nbytes else f"has {pluralize(size, 'bytes')} instead of {nbytes}"
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
    """Tell whether a folder is that of a run, also of one whose first save never ended, or whose last step was removed.

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
        return bool(run.folders()) or has_run(place)


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
    what = f"{steps_text(sorted(steps))} {'was' if len(steps) == 1 else 'were'} left behind when step {document.step}"
    return f"{what} was saved; the next save, or treering gc --yes, removes what is left of them"


# ----------------------------------------------------------------------------------------------- attempts, and messages


_ORDER: Final = (Life.IN_FLIGHT, Life.UNKNOWN, Life.DEAD, Life.OVER)
_SWEPT: Final = "the next save removes it: nothing to do"
_MESSAGES_GO: Final = (
    "its messages are removed when all its processes have seen the decision, or by the next save: nothing to do"
)
_WAIT: Final = "wait: it ends by itself"
_MISSING: Final = "missing"
_MOST_PROCESSES: Final = 100_000
_STAGES: Final = (VoteStage.PREPARING, VoteStage.PREPARED, VoteStage.LEFT, VoteStage.FAILED)
# The number of its process, where the name of a message has one.
_MESSAGE: Final = re.compile(
    r"\.treering-[0-9a-f-]*?(?:(?:here|part|left|waiting)-(\d{5,9})|sum-\d{5,9}|signature|begin|verdict)"
)
_OF_TREE: Final = re.compile(r"-(?:sum-\d+|signature)\Z")


_Judgement: TypeAlias = tuple[Life, str, str]
"""Whether an attempt lives, why that is known, and what to do."""
_KEPT: Final[_Judgement] = (
    Life.OVER,
    "the index is damaged: it is unknown whether it names these files",
    "keep them until the index is replaced, or restored from a copy",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the index in a folder says."""

    files: Collection[str] = ()
    """Data files that it needs, or lists as superseded."""
    replaced: Collection[str] = ()
    """Data files that it superseded."""
    attempts: Collection[str] = ()
    """Attempts that it names."""
    moving: Collection[str] = ()
    """Those of them whose files are not all moved to their places."""
    damaged: bool = False
    """Whether it cannot be read, so that nobody can tell what it names."""


_Told: TypeAlias = PrepareMessage | VoteMessage | DecisionMessage


@dataclasses.dataclass(slots=True, kw_only=True)
class Messages:
    """What the processes of one attempt told each other."""

    prepare: PrepareMessage | None = None
    decision: DecisionMessage | None = None
    votes: dict[int, tuple[VoteMessage | None, float]] = dataclasses.field(default_factory=dict)
    """How far each process is, None where its message cannot be read, and when it said so."""
    began: float | None = None
    """When process 0 began it, as seconds since 1970."""
    changed: float = 0.0
    """When the newest message was written."""

    @property
    def leader(self) -> str | None:
        """Where process 0 runs."""
        said = self.prepare or self.decision or self.votes.get(0, (None,))[0]
        return None if said is None else said.who

    def add(self, told: _Told | None, process: int | None, changed: float) -> None:
        """Add a message; of several of one process the last stage counts, of failures the first."""
        self.changed = max(self.changed, changed)
        if isinstance(told, PrepareMessage):
            self.prepare, self.began = told, changed
        elif isinstance(told, DecisionMessage):
            self.decision = told
        elif process is not None and _stage(told) >= _stage(self.votes.get(process, (None,))[0]):
            self.votes[process] = told, changed


def _stage(vote: VoteMessage | None) -> int:
    return -1 if vote is None else _STAGES.index(vote.stage)


def read_messages(store: Store, names: Sequence[str]) -> tuple[dict[str, Messages], dict[int, float]]:
    """Read the messages at a place; those that are being written are left out.

    Args:
        store: the place.
        names: the names in it.

    Returns:
        The messages by attempt; and when each process that waits for others said so last.
    """
    found: dict[str, Messages] = {}
    waiting: dict[int, float] = {}
    for name, changed, told in _read(store, names):
        process = int(kind[1]) if (kind := _MESSAGE.fullmatch(name)) and kind[1] else None
        attempt = told.attempt if isinstance(told, PrepareMessage) else checkpoint_names.attempt_of_message(name)
        if attempt is not None:
            found.setdefault(attempt, Messages()).add(told, process, changed)
        elif process is not None:
            waiting[process] = changed
    return found, waiting


def _read(store: Store, names: Sequence[str]) -> Iterator[tuple[str, float, _Told | None]]:
    """Walk through messages: name, when it was written, and what it says without checksums, where that can be read."""
    for name in names:
        if checkpoint_names.is_message_folder(name):
            with contextlib.suppress(OSError, LinkRefusedError), open_below(store, name) as below:
                yield from _read(below, [one for one in below.names() if checkpoint_names.is_message(one)])
        if not checkpoint_names.is_message(name) or _MESSAGE.fullmatch(name) is None:
            continue
        if (found := store.find(name)) is None:  # it was taken away meanwhile
            continue
        told: _Told | None = None
        # No message, a link or a damaged one says nothing. Readers that wait touch the folder; this one must not.
        with contextlib.suppress(OSError, CorruptError, LinkRefusedError), store.open_file(name) as file:
            told = _decode(name, file.read(0, file.size)) if file.size <= LARGEST_MESSAGE else None
        yield name, found.modified, told


def _decode(name: str, data: bytes) -> _Told | None:
    if checkpoint_names.is_prepare(name):
        return dataclasses.replace(PrepareMessage.decode(data), signature=b"")
    if name.endswith("-verdict"):
        return DecisionMessage.decode(data)
    is_vote = checkpoint_names.attempt_of_message(name) is not None and not _OF_TREE.search(name)
    return dataclasses.replace(VoteMessage.decode(data), payload=b"") if is_vote else None


# ---------------------------------------------------------------------------------------------------------- judgements


def judge_attempts(scan: FolderScan, messages: Mapping[str, Messages], known: Known, now: float) -> list[Attempt]:
    """Return the attempts that left something there, those in flight first, the newest first.

    Args:
        scan: what is there.
        messages: what their processes told each other.
        known: what the index says.
        now: the time, as seconds since 1970.
    """
    found: dict[tuple[str, str], Attempt] = {}
    alone = set(messages)
    for orphan in scan.orphans:
        left = {name: size for name, size in orphan.files.items() if name not in known.files}
        if not _is_needed(orphan, left, known):
            alone.discard(orphan.attempt)
            orphan = dataclasses.replace(orphan, files=left)  # noqa: PLW2901 - the same one
            found[orphan.form, orphan.attempt] = _attempt(orphan, scan, messages, known, now)
    for attempt in alone:
        removal = "the next save removes its messages"
        orphan = Orphan(attempt=attempt, form="notes", changed=messages[attempt].changed, removal=removal)
        found["notes", attempt] = _attempt(orphan, scan, messages, known, now)
    return sorted(found.values(), key=lambda each: (_ORDER.index(each.life), each.age or 0.0, each.attempt))


def _is_needed(orphan: Orphan, left: Collection[str], known: Known) -> bool:
    """Tell whether all that an attempt has is part of the committed state."""
    if orphan.form == "checkpoint":
        return not left
    # The folder of an attempt of leaves keeps the copy of its record.
    return orphan.attempt in known.attempts and orphan.attempt not in known.moving and orphan.holder is None


def _judge(orphan: Orphan, scan: FolderScan, known: Known, said: Messages) -> _Judgement:
    is_alone = orphan.form == "notes"
    is_named = orphan.is_index or orphan.attempt in known.attempts
    if is_named and orphan.proved and orphan.holder is None and orphan.attempt not in known.moving:
        advice = _MESSAGES_GO if is_alone else "the next save removes its journal: nothing to do"
        return Life.OVER, "it is the committed one", advice
    if is_alone and said.decision is not None:
        return Life.OVER, "process 0 has ended it", _MESSAGES_GO
    if not orphan.proved:
        return _judge_unproved(orphan, scan, known)
    if orphan.outdated:
        if known.damaged:
            return _KEPT
        return Life.DEAD, "the index was changed since it began, so it can never be committed", _SWEPT
    if is_alone and scan.saver is not None:
        return Life.IN_FLIGHT, _saving(scan.saver), _WAIT
    if leaves_names.PENDING in orphan.files and orphan.holder is None:
        advice = "treering.leaves.index_leaves adds it to the index"
        return Life.OVER, "it was saved without an index, and waits for one", advice
    gap = "only messages are there, which have no lock" if is_alone else scan.gap
    life, reason = find_life(orphan.holder, gap, said.leader, orphan.changed)
    return _judge_by_life(orphan, scan, known, life, reason)


def _judge_unproved(orphan: Orphan, scan: FolderScan, known: Known) -> _Judgement:
    """Judge files that nothing proves to be leftovers, perhaps those of an index that became a tombstone."""
    if checkpoint_names.tombstone_of(orphan.attempt) in scan.names:
        if scan.saver is not None:
            return Life.IN_FLIGHT, f"it was removed; {_saving(scan.saver)}", _WAIT
        advice = "the next save to this folder, or treering gc of its run with --yes, removes the rest: nothing to do"
        return Life.DEAD, "its removal was interrupted", advice
    if known.damaged:
        return _KEPT
    if scan.saver is not None:
        return Life.IN_FLIGHT, _saving(scan.saver), _WAIT
    if set(orphan.files) <= set(known.replaced):
        return Life.DEAD, "it was superseded, and its files could not be removed then", _SWEPT
    return Life.DEAD, "no index names these files, and nothing proves that they are leftovers", orphan.removal


def _judge_by_life(orphan: Orphan, scan: FolderScan, known: Known, life: Life, reason: str) -> _Judgement:
    """Say what to do about an attempt that may be committed yet, and whose process lives or not."""
    if life is Life.IN_FLIGHT:
        return life, reason, _WAIT
    if orphan.attempt in known.moving:
        reason = f"it is committed, but not all of its files are moved to their key paths; {reason}"
        return life, reason, "treering can read it; the next save, or treering.leaves.index_leaves, moves the rest"
    if orphan.recorded and (known.damaged or leaves_names.INDEX not in scan.names):
        reason = f"there is no readable index, so it is unknown whether it named this save; {reason}"
        return life, reason, "treering.leaves.index_leaves rebuilds the index from the files"
    if life is Life.DEAD:
        return life, reason, f"{orphan.removal}: nothing to do"
    return life, reason, f"check there whether it still runs; if not, {orphan.removal}"


def _saving(process: int) -> str:
    return f"process {process} of this machine is saving to this folder"


def _attempt(orphan: Orphan, scan: FolderScan, messages: Mapping[str, Messages], known: Known, now: float) -> Attempt:
    said = messages.get(orphan.attempt) or Messages()
    life, reason, advice = _judge(orphan, scan, known, said)
    states = list(_states(said, orphan, now, _MOST_PROCESSES // (len(messages) or 1)))
    silent = [each.process for each in states if each.stage in {_MISSING, VoteStage.PREPARING}]
    leading = said.votes.get(0, (None,))[0]
    if life is Life.UNKNOWN and silent:
        advice = f"{format_processes(silent)} did not vote: {advice}"
    elif life is Life.IN_FLIGHT and silent and leading and leading.stage is VoteStage.PREPARED:
        advice = f"wait: it ends at its deadline at the latest; waited for: {format_processes(silent)}"
    return Attempt(
        attempt=orphan.attempt,
        form=orphan.form,
        life=life,
        reason=reason,
        advice=advice,
        files=len(orphan.files),
        nbytes=sum(orphan.files.values()),
        age=max(now - max(orphan.changed, said.changed), 0.0),
        who=said.leader,
        number=said.prepare.number if said.prepare else None,
        processes=states,
        outcome=_outcome(said.decision) if said.decision else None,
    )


def _outcome(decision: DecisionMessage) -> str:
    if decision.failure is None:
        return "committed"
    by = f" because of {format_processes(decision.processes)}" if decision.processes else ""
    return f"failed{by}: {decision.failure.message}"


def _states(said: Messages, orphan: Orphan, now: float, most: int) -> Iterator[ProcessState]:
    """Walk through the processes that have left a message, and those of the job that have not, up to a number."""
    count = min(said.prepare.processes, most) if said.prepare is not None else 0
    written = collections.Counter[int]()
    for name, size in orphan.files.items():
        if (writer := checkpoint_names.process_of_data(name)) is not None:
            written[writer] += size
    for process in sorted({*said.votes, *range(1, count)}):
        vote, changed = said.votes.get(process, (None, None))
        stage = vote.stage.value if vote else _MISSING if changed is None else "unreadable"
        is_late = said.decision is None and said.began is not None and stage in {_MISSING, VoteStage.PREPARING}
        yield ProcessState(
            process=process,
            stage=stage,
            who=vote.who if vote else None,
            age=None if changed is None else max(now - changed, 0.0),
            problem=_problem(vote.failure) if vote and vote.failure else None,
            late=max(now - (said.began or now), 0.0) if is_late else None,
            nbytes=written.get(process),
            through=parent_of(process, timing.current.fan_in) or None,
        )


def _problem(failure: Failure) -> str:
    # Of an error that is none of treering's the message names the class.
    return failure.message if failure.name == ProcessFailedError.__name__ else f"{failure.name}: {failure.message}"
