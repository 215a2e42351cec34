"""What attempts to save have in a folder, and what their processes told each other -> what to do about each attempt."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from treering._coordination.messages import DecisionMessage, Failure, PrepareMessage, VoteMessage, VoteStage
from treering._coordination.operations import parent_of
from treering._format.findings import Attempt, ProcessState
from treering._store.api import LARGEST_MESSAGE, Store, open_below
from treering._store.orphans import FolderScan, Orphan, find_life
from treering._values import checkpoint_names, leaves_names, timing
from treering._values.processes import Life, format_processes
from treering.errors import CorruptError, LinkRefusedError, ProcessFailedError

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
