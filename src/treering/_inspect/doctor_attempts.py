"""What lies in a folder of attempts to save -> what they are, and what to do about each."""

from __future__ import annotations

import collections
import dataclasses
import platform
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, VoteMessage, VoteStage
from treering._coordination.votes import parent_of
from treering._format.findings import Attempt, Life, ProcessState
from treering._inspect.attempts import FolderScan, Leftovers, NoteFile
from treering._store.api import Locks
from treering._store.posix.store import started
from treering._values import leaves_names, timing
from treering._values.checkpoint_names import attempt_of_tombstone, process_of_data
from treering._values.processes import format_processes
from treering.errors import ProcessFailedError

_ORDER: Final = (Life.IN_FLIGHT, Life.UNKNOWN, Life.DEAD, Life.OVER)
_SWEPT: Final = "the next save removes it: nothing to do"
_NOTES_GO: Final = (
    "its messages are removed when all its processes have seen the decision, or by the next save: nothing to do"
)
_WAIT: Final = "wait: it ends by itself"
_GOES_ON: Final = "the next save to this folder, or treering gc of its run with --yes, removes the rest: nothing to do"
_LOOK: Final = "check there whether it still runs; if not, the next save removes it"
_AGES: Final = (
    "if no process is saving there, save there once more, which ends it; treering gc --yes of its run removes it"
    " when it is a day old"
)
_MISSING: Final = "missing"
_MOST_PROCESSES: Final = 100_000
_STAGES: Final = (VoteStage.PREPARING, VoteStage.PREPARED, VoteStage.LEFT, VoteStage.FAILED)
_WHO: Final = re.compile(r"(?s)(.*), pid (\d{1,10})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the indexes in a folder say."""

    files: Collection[str] = ()
    """Data files that the index of the checkpoint names."""
    replaced: Collection[str] = ()
    """Data files that it superseded."""
    attempts: Collection[str] = ()
    """Attempts that an index names."""
    moving: Collection[str] = ()
    """Those of them whose files are not all moved to their places."""
    damaged: bool = False
    """Whether there is an index that cannot be read, so that nobody can tell what it names."""


_Judgement: TypeAlias = tuple[Life, str, str]
"""Whether an attempt lives, why that is known, what to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Notes:
    """What the messages of one attempt say."""

    begin: PrepareMessage | None = None
    verdict: DecisionMessage | None = None
    parts: Mapping[int, NoteFile] = dataclasses.field(default_factory=dict)
    changed: float = 0.0
    began: float | None = None
    most: int = 0
    """For how many processes it is said how far they are."""

    @property
    def leader(self) -> str | None:
        """Where process 0 runs."""
        said = self.begin or self.verdict or self.vote(0)
        return None if said is None else said.who

    def vote(self, process: int) -> VoteMessage | None:
        """Return what a process has handed in."""
        said = self.parts[process].said if process in self.parts else None
        return said if isinstance(said, VoteMessage) else None


def judge_attempts(looked: FolderScan, known: Known, now: float) -> list[Attempt]:
    """Return the attempts that left something there, those in flight first, the newest first.

    Args:
        looked: what is there.
        known: what the indexes say.
        now: the time, as seconds since 1970.
    """
    notes = _notes_by_attempt(looked.notes)
    found = [*_of_checkpoints(looked, known, notes, now), *_of_leaves(looked, known, notes, now)]
    told = {attempt.attempt for attempt in found}
    for attempt, said in notes.items():
        if attempt not in told:
            nothing = Leftovers(attempt=attempt, files={}, count=0, changed=said.changed, holder=None)
            judged = _judge_messages(attempt, said, looked, known)
            found.append(_attempt(nothing, "notes", judged, said=said, now=now))
    return sorted(found, key=lambda each: (_ORDER.index(each.life), each.age or 0.0, each.attempt))


def _notes_by_attempt(files: Sequence[NoteFile]) -> dict[str, _Notes]:
    of: dict[str, list[NoteFile]] = {}
    for file in files:
        if file.attempt is not None:
            of.setdefault(file.attempt, []).append(file)
    return {
        attempt: _Notes(
            begin=next((note.said for note in notes if isinstance(note.said, PrepareMessage)), None),
            verdict=next((note.said for note in notes if isinstance(note.said, DecisionMessage)), None),
            parts={note.process: note for note in sorted(notes, key=_progress) if note.process is not None},
            changed=max(note.changed for note in notes),
            most=_MOST_PROCESSES // len(of),
            began=next((note.changed for note in notes if isinstance(note.said, PrepareMessage)), None),
        )
        for attempt, notes in of.items()
    }


def _progress(note: NoteFile) -> int:
    """Return how far a process is that has left this message; of several the last counts, of failures the first."""
    stage = note.said.stage if isinstance(note.said, VoteMessage) else None
    return _STAGES.index(stage) if stage else -1


# ---------------------------------------------------------------------------------------------------------- checkpoints


def _of_checkpoints(looked: FolderScan, known: Known, notes: Mapping[str, _Notes], now: float) -> Iterator[Attempt]:
    removed = {attempt_of_tombstone(name) for name in looked.names}
    for remains in looked.saved.values():
        listed = {*known.files, *looked.waiting}
        files = {name: size for name, size in remains.files.items() if name not in listed}
        if not files:
            continue
        said = notes.get(remains.attempt, _Notes())
        if remains.journal:
            judged = _judge_journaled(remains, looked, known, said)
        else:
            judged = _judge_unproved(files, looked, known, removed=remains.attempt in removed)
        lying = dataclasses.replace(remains, files=files, count=len(files))
        yield _attempt(lying, "checkpoint", judged, said=said, now=now)


def _judge_journaled(remains: Leftovers, looked: FolderScan, known: Known, said: _Notes) -> _Judgement:
    if remains.is_index or remains.attempt in known.attempts:
        reason = "it is the committed one; its journal is a second name or a copy of the index"
        return Life.OVER, reason, "the next save removes that name: nothing to do"
    if remains.outdated:
        return Life.DEAD, "the checkpoint was changed since it began, so it can never be committed", _SWEPT
    if looked.flat and said.leader is None:
        return Life.UNKNOWN, "it may still be committed: a bucket does not tell whether its process runs", _AGES
    life, reason = life_of(remains.holder, looked.locks, said.leader, remains.changed)
    return life, reason, {Life.IN_FLIGHT: _WAIT, Life.DEAD: _SWEPT}.get(life, _LOOK)


def _judge_unproved(files: Mapping[str, int], looked: FolderScan, known: Known, *, removed: bool) -> _Judgement:
    """Judge data files that no journal proves to be leftovers, perhaps those of an index that became a tombstone."""
    if removed and looked.saver is not None:
        who = f"process {looked.saver} of this machine is at work in this folder"
        return Life.IN_FLIGHT, f"it was removed; {who}", _WAIT
    if removed:
        return Life.DEAD, "its removal was interrupted", _GOES_ON
    if known.damaged:
        reason = "the index is damaged: it is unknown whether it names these files"
        return Life.OVER, reason, "keep them until the index is replaced, or restored from a copy"
    if looked.saver is not None:
        return Life.IN_FLIGHT, _saving(looked.saver), _WAIT
    if set(files) <= set(known.replaced):
        return Life.DEAD, "it was superseded, and its files could not be removed then", _SWEPT
    reason = "no index names these files, and no journal proves that they are leftovers"
    if looked.flat:
        return Life.DEAD, reason, "treering gc --yes of its run removes them when they are a day old"
    return Life.DEAD, reason, "no save removes them; if no process is saving here, remove them yourself"


# ------------------------------------------------------------------------------------------------------------ leaves


def _of_leaves(looked: FolderScan, known: Known, notes: Mapping[str, _Notes], now: float) -> Iterator[Attempt]:
    for remains in looked.staged.values():
        # What is committed and in its place is no attempt any more; its folder keeps the copy of its record.
        if remains.attempt in known.attempts and remains.attempt not in known.moving and remains.holder is None:
            continue
        said = notes.get(remains.attempt, _Notes())
        yield _attempt(remains, "leaves", _judge_staged(remains, looked, known, said), said=said, now=now)


def _judge_staged(remains: Leftovers, looked: FolderScan, known: Known, said: _Notes) -> _Judgement:
    if looked.flat:
        return _judge_unmoved(remains, known)
    if leaves_names.PENDING in remains.files and remains.holder is None:
        advice = "treering.leaves.index_leaves adds it to the index"
        return Life.OVER, "it was saved without an index, and waits for one", advice
    life, reason = life_of(remains.holder, looked.locks, said.leader, remains.changed)
    if life is Life.IN_FLIGHT:
        return life, reason, _WAIT
    if remains.attempt in known.moving:
        reason = f"it is committed, but not all of its files are moved to their key paths; {reason}"
        advice = "treering can read it; the next save, or treering.leaves.index_leaves, moves the rest"
        return life, reason, advice
    if leaves_names.RECORD in remains.files and (known.damaged or leaves_names.INDEX not in looked.names):
        reason = f"there is no readable index, so it is unknown whether it named this save; {reason}"
        return life, reason, "treering.leaves.index_leaves rebuilds the index from the files"
    return life, reason, _SWEPT if life is Life.DEAD else _LOOK


def _judge_unmoved(remains: Leftovers, known: Known) -> _Judgement:
    """Judge an attempt that the index of leaves in a bucket does not name."""
    if known.damaged:
        reason = "the index is damaged: it is unknown whether it names these files"
        return Life.OVER, reason, "keep them until the index is restored from a copy"
    if remains.outdated:
        return Life.DEAD, "the index was changed since it began, so it can never be committed", _SWEPT
    if remains.journal:
        reason = "it may still be committed: a bucket does not tell whether its process runs"
        return Life.UNKNOWN, reason, "if its process is gone, the next save removes its files"
    reason = "the index does not name these files, and no marker proves that they are leftovers"
    return Life.DEAD, reason, "no save removes them; if no index was lost that named them, remove them yourself"


# ---------------------------------------------------------------------------------------------------------- messages


def _judge_messages(attempt: str, said: _Notes, looked: FolderScan, known: Known) -> _Judgement:
    """Judge an attempt of which only messages are there."""
    if attempt in known.attempts:
        return Life.OVER, "it is the committed one", _NOTES_GO
    if said.verdict is not None:
        return Life.OVER, "process 0 has ended it", _NOTES_GO
    if looked.saver is not None:
        return Life.IN_FLIGHT, _saving(looked.saver), _WAIT
    locks = dataclasses.replace(looked.locks, gap="only messages are there, which have no lock")
    life, reason = life_of(None, locks, said.leader, said.changed)
    return life, reason, {Life.IN_FLIGHT: _WAIT, Life.DEAD: _NOTES_GO}.get(life, _LOOK)


def _saving(saver: int) -> str:
    return f"process {saver} of this machine is saving to this folder"


def _attempt(remains: Leftovers, form: str, judged: _Judgement, *, said: _Notes, now: float) -> Attempt:
    life, reason, advice = judged
    states, vote = list(_states(said, remains, now)), said.vote(0)
    silent = [state for state in states if state.stage in {_MISSING, VoteStage.PREPARING}]
    if life is Life.UNKNOWN and silent:
        advice = f"{format_processes(state.process for state in silent)} did not vote: {advice}"
    elif life is Life.IN_FLIGHT and silent and vote and vote.stage is VoteStage.PREPARED:
        late = format_processes(state.process for state in silent)
        advice = f"wait: it ends at its deadline at the latest; waited for: {late}"
    return Attempt(
        attempt=remains.attempt,
        form=form,
        life=life,
        reason=reason,
        advice=advice,
        files=remains.count,
        nbytes=sum(remains.files.values()),
        age=max(now - max(remains.changed, said.changed), 0.0),
        who=said.leader,
        number=said.begin.number if said.begin else None,
        processes=states,
        outcome=_outcome(said.verdict) if said.verdict else None,
    )


def _outcome(verdict: DecisionMessage) -> str:
    if verdict.failure is None:
        return "committed"
    by = f" because of {format_processes(verdict.processes)}" if verdict.processes else ""
    return f"failed{by}: {verdict.failure.message}"


def _states(said: _Notes, remains: Leftovers, now: float) -> Iterator[ProcessState]:
    """Walk through the processes that have left a message, and those of the job that have not."""
    count = min(said.begin.processes, said.most) if said.begin is not None else 0
    written = collections.Counter[int]()
    for name, size in remains.files.items():
        if (writer := process_of_data(name)) is not None:
            written[writer] += size
    for process in sorted({*said.parts, *range(1, count)}):
        note, part = said.parts.get(process), said.vote(process)
        stage, who = (part.stage.value, part.who) if part else ("unreadable" if note else _MISSING, None)
        age = max(now - note.changed, 0.0) if note else None
        problem = _problem(part.failure) if part and part.failure else None
        is_late = said.verdict is None and said.began is not None and stage in {_MISSING, VoteStage.PREPARING}
        yield ProcessState(
            process=process,
            stage=stage,
            who=who,
            age=age,
            problem=problem,
            late=max(now - (said.began or now), 0.0) if is_late else None,
            nbytes=written.get(process),
            through=parent_of(process, timing.current.fan_in) or None,
        )


def _problem(failure: Failure) -> str:
    # Of an error that is none of treering's the message names the class.
    return failure.message if failure.name == ProcessFailedError.__name__ else f"{failure.name}: {failure.message}"


# ----------------------------------------------------------------------------------------------------------- liveness


def life_of(holder: int | None, locks: Locks, who: str | None, since: float) -> tuple[Life, str]:
    """Return whether an attempt that is not committed lives, and how that is known.

    Args:
        holder: the process that is seen to hold its lock.
        locks: what can be known of locks there.
        who: host and number of its coordinator, as the prepare message says.
        since: when that message, or the newest file, was written.

    Example:
        >>> life_of(4711, Locks(None, {}), None, 0.0)
        (<Life.IN_FLIGHT: 'in flight'>, 'process 4711 of this machine holds its lock')
        >>> life_of(None, Locks("on nfs4 some are not shown", {}), "node7, pid 4711", 0.0)[0]
        <Life.UNKNOWN: 'unknown'>
    """
    if holder is not None:
        # Linux gives no number for a process in another container.
        which = f"process {holder}" if holder > 0 else "a process"
        return Life.IN_FLIGHT, f"{which} of this machine holds its lock"
    if locks.gap is None:
        return Life.DEAD, "no process holds its lock"
    if (named := _WHO.fullmatch(who or "")) is None:
        return Life.UNKNOWN, f"no process is seen to hold its lock, but {locks.gap}"
    if named[1] != platform.node():
        return Life.UNKNOWN, f"it was begun on another machine, {named[1]}, by process {named[2]} there"
    return _on_this_machine(int(named[2]), since)


def _on_this_machine(process: int, since: float) -> tuple[Life, str]:
    try:
        start = started(process)
    except OSError:
        return Life.UNKNOWN, f"process {process} began it, and this system does not show whether it still runs"
    if start is None:
        return Life.DEAD, f"process {process}, which began it, no longer runs"
    if start > since + timing.current.clock_step:
        return Life.DEAD, f"process {process}, which began it, has ended; another process has its number now"
    return Life.IN_FLIGHT, f"process {process} of this machine, which began it, runs"
