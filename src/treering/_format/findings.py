"""What a check of a checkpoint found, in terms of leaves, and what a look at its folder found out."""

from __future__ import annotations

import dataclasses
import errno
import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter, ne
from typing import Final

from treering._format.index import Index
from treering._printable import LONGEST_LINE, cut_middle, printable, show_path
from treering._values.human import bytes_text, pluralize
from treering._values.keys import key_name
from treering._values.outline import InNotebook, Outline, OutlineRow
from treering._values.processes import Life
from treering.errors import CorruptError, LinkRefusedError, StoreError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """How far one process of a joint save is, as its message says."""

    process: int
    """Its number in the job."""
    stage: str
    """"at work", "written", "failed" or "seen"; "missing" where it has left no message, "unreadable" where its message
    cannot be read."""
    who: str | None
    """Host and number of the process, as in "node7, pid 4711"; None where that is not known."""
    age: float | None
    """Seconds since it said so, by the clocks of this machine and of the file system."""
    problem: str | None = None
    """Why it failed."""
    late: float | None = None
    """Seconds since the save began, of a process that has not voted and did not fail."""
    nbytes: int | None = None
    """Bytes in data files of its own, where their names tell the process."""
    through: int | None = None
    """The process that collects its vote; None where it is process 0."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt to save that is not, or not only, the committed state."""

    attempt: str
    """Its 16 hexadecimal digits."""
    form: str
    """"checkpoint", "leaves", or "notes" where nothing but messages is left of it."""
    life: Life
    """Whether a process works on it."""
    reason: str
    """Why that is known, or what it is, as the end of a sentence that begins with the attempt."""
    advice: str
    """What to do."""
    files: int
    """How many files of it lie there that no index needs."""
    nbytes: int
    """Their bytes."""
    age: float | None
    """Seconds since the last of them was changed, by the clocks of this machine and of the file system."""
    who: str | None = None
    """Host and number of the process that leads it; None where that is not known."""
    number: int | None = None
    """Which joint save of its job it is, from 1 on."""
    processes: Sequence[ProcessState] = ()
    """What the processes of a joint save say."""
    outcome: str | None = None
    """What process 0 says became of it."""

    @property
    def needs_attention(self) -> bool:
        """Whether it holds bytes that nobody works with."""
        return self.nbytes > 0 and self.life in {Life.DEAD, Life.UNKNOWN}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A state that can be loaded."""

    form: str
    """"checkpoint" or "leaves"."""
    attempts: Sequence[str]
    """The save that it is of; in a leaves directory those of its prefixes, as far as treering wrote them."""
    at: str | None
    """When it was saved, as its index says."""
    by: str | None
    """Which program saved it, as its index says."""
    processes: int
    """How many processes saved it."""
    files: int
    """How many files its index names, itself included."""
    nbytes: int
    """Their bytes together, as the index says."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What stands in a folder.

    Example:
        >>> found = Diagnosis(path="ckpt", committed=None, attempts=(), problems=("a file is missing",), notes=())
        >>> found.ok
        False
    """

    path: str
    """The folder, as it was given."""
    committed: Committed | None
    """What can be loaded; None where nothing can."""
    attempts: Sequence[Attempt]
    """Other attempts, those in flight first."""
    problems: Sequence[str]
    """What is wrong, a sentence each."""
    notes: Sequence[str]
    """What is good to know, a sentence each."""
    waits_for_readers: bool = False
    """Whether it is a removed checkpoint whose data stay for readers, and nothing else."""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return not self.problems and not any(attempt.needs_attention for attempt in self.attempts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepDiagnosis:
    """What stands in the folder of one step of a run."""

    step: int
    """Its number."""
    found: Diagnosis
    """What is in it."""

    @property
    def has_something_to_tell(self) -> bool:
        """Whether there is more in it than a checkpoint."""
        return bool(self.found.problems or self.found.attempts) or self.found.committed is None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunDiagnosis:
    """What stands in a run's folder."""

    path: str
    """The folder, as it was given."""
    steps: Sequence[int]
    """The steps that can be loaded, ascending."""
    nbytes: int
    """Bytes of their files together."""
    saved: float | None
    """When the latest was saved, in seconds since 1970; None where there is none."""
    folders: Sequence[StepDiagnosis]
    """What is in each step's folder, also in those that cannot be loaded."""
    notes: Sequence[str]
    """What is good to know, a sentence each."""

    @property
    def ok(self) -> bool:
        """Whether nothing has to be done."""
        return all(folder.found.ok for folder in self.folders)


_MOST_LINES = 50


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Example:
        >>> print(Finding(key="params/w", file="data.safetensors", start=4096, stop=8192, problem="is damaged"))
        leaf 'params/w' is damaged: bytes 4096 to 8192 of data.safetensors
        >>> print(Finding(key=None, file="treering.json", start=None, stop=None, problem="is a link"))
        treering.json is a link
    """

    key: str | None
    """Key text of the leaf; None where no leaf alone is concerned."""
    file: str
    """Name of the file, in the folder that was checked; its path where it is the only one."""
    start: int | None
    """First byte of the file that is concerned, if that is known."""
    stop: int | None
    """Byte behind the last one."""
    problem: str
    """What is wrong, as the end of a sentence that begins with the leaf or the file."""

    def __str__(self) -> str:
        place = f"byte {self.start}" if self.stop is None else f"bytes {self.start} to {self.stop}"
        place = "" if self.start is None else place
        file, problem = printable(self.file), printable(self.problem)
        if self.key is None:
            return f"{file} {problem}" + (f": {place}" if place else "")
        key = repr(cut_middle(self.key, LONGEST_LINE)) if self.key else key_name(self.key)
        return f"leaf {key} {problem}: {place} of {file}" if place else f"leaf {key} {problem}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Verification(InNotebook):
    """The outcome of a check; true where nothing is wrong.

    Example:
        >>> good = Verification(path="ckpt", findings=(), leaves=3, nbytes=1 << 20, checked=True)
        >>> bool(good), str(good)
        (True, "'ckpt' is whole: 3 leaves, 1.00 MiB, every byte checked")
    """

    path: str
    """What was checked, as it was given."""
    findings: tuple[Finding, ...]
    """What is wrong: first the files as a whole, then leaves in the order in which they lie in them."""
    leaves: int
    """How many leaves there are; 0 where the index cannot be read."""
    nbytes: int
    """Bytes of arrays that were read and compared with their checksums."""
    checked: bool
    """Whether there were checksums to compare with."""
    note: str | None = None
    """What the check could not say, or saw beside what it checked, if anything."""
    steps: int | None = None
    """How many steps of a run were checked; None where it was no run."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as there was something to check against."""
        return not self.findings

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        return f"<Verification: {str(self).splitlines()[0]}>"

    def _outline(self) -> Outline:
        found = self.findings[:_MOST_LINES]
        places = [["" if byte is None else str(byte) for byte in (each.start, each.stop)] for each in found]
        rows = [[each.key or "", each.file, *place, each.problem] for each, place in zip(found, places, strict=True)]
        rows += [[f"and {len(self.findings) - len(found)} more", "", "", "", ""]] * (len(self.findings) > len(found))
        return Outline(
            title="Verification",
            detail=str(self).splitlines()[0],
            notes=[("note", self.note)] if self.note and self.findings else [],
            heads=("key", "file", "first byte", "up to byte", "problem") if rows else (),
            rows=[OutlineRow(1, cells) for cells in rows],
            right=(2, 3),
        )

    def __str__(self) -> str:
        note = printable(self.note or "")
        size = f"{pluralize(self.leaves, 'leaves')}, {bytes_text(self.nbytes)}"
        if self.steps is not None:
            size = f"{pluralize(self.steps, 'steps')}, {size}"
        if not self.findings:
            if not self.checked:
                sound = f"is sound as far as it has checksums ({size})" if self.nbytes else "has sound headers"
                return f"{show_path(self.path)!r} {sound}, and {note}"
            more = f"; note: {note}" if note else ""
            return f"{show_path(self.path)!r} is whole: {size}, every byte checked{more}"
        lines = [f"{show_path(self.path)!r} is damaged: {pluralize(len(self.findings), 'findings')}"]
        lines += [f"  {finding}" for finding in self.findings[:_MOST_LINES]]
        if len(self.findings) > _MOST_LINES:
            lines.append(f"  and {len(self.findings) - _MOST_LINES} more")
        if note:
            lines.append(f"  note: {note}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class BadBlock:
    """A stretch of a chunk, of whole blocks, that is not what it was."""

    chunk: int
    """Number of the chunk."""
    start: int
    """First byte in the chunk."""
    stop: int
    """Byte behind the last one."""
    problem: str
    """As in ``Finding``."""


def merge_blocks(index: Index, blocks: Iterable[BadBlock], names: list[str]) -> Iterator[Finding]:
    """Yield a finding for each stretch of bad blocks of one chunk.

    Args:
        index: the checkpoint's.
        blocks: what was found, in any order.
        names: of the data files.
    """
    merged: list[BadBlock] = []
    for block in sorted(blocks):
        last = merged[-1] if merged else None
        if last and (last.chunk, last.stop, last.problem) == (block.chunk, block.start, block.problem):
            merged[-1] = dataclasses.replace(last, stop=block.stop)
        else:
            merged.append(block)
    chunks = index.chunks
    for block in merged:
        offset, key = chunks.offset[block.chunk], index.keys[chunks.leaf[block.chunk]]
        start, stop, file = offset + block.start, offset + block.stop, names[chunks.file[block.chunk]]
        yield Finding(key=key, file=file, start=start, stop=stop, problem=block.problem)


_NO_DAMAGE: Final = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.EAGAIN, errno.EHOSTUNREACH, errno.ETIMEDOUT),
    }
)


def require_damage(error: Exception) -> None:
    """Raise what says that reading was refused or not possible now, and nothing of the bytes.

    Raises:
        StoreError: there is no permission or connection, or too much is open.

    Example:
        >>> require_damage(CorruptError("the file is cut short"))
    """
    if isinstance(error, StoreError) and error.errno in _NO_DAMAGE:
        raise error


def describe_broken(file: str, error: CorruptError | LinkRefusedError, *prefixes: str) -> Finding:
    """Say what is wrong with a file as a whole; its name, which the finding has, and the prefixes are left out."""
    reason = error.message
    for known in (*prefixes, f"{file} is damaged: "):
        reason = reason.removeprefix(known)
    problem = f"is damaged ({reason})" if isinstance(error, CorruptError) else f"cannot be read ({error})"
    return Finding(key=None, file=file, start=error.offset, stop=None, problem=problem)


def differing_runs(found: array[int], wanted: array[int]) -> Iterator[tuple[int, int]]:
    """Yield where runs of numbers that differ begin and end.

    Example:
        >>> list(differing_runs(array("Q", [1, 2, 3, 4, 5]), array("Q", [1, 7, 7, 4, 7])))
        [(1, 3), (4, 5)]
    """
    if found != wanted:
        for differ, run in itertools.groupby(enumerate(map(ne, found, wanted)), itemgetter(1)):
            places = [place for place, _ in run]
            if differ:
                yield places[0], places[-1] + 1


def differing_span(found: bytes, wanted: bytes) -> tuple[int, int]:
    """Return the range in which two texts differ; all of it where they are not of one length, or do not differ."""
    if len(found) != len(wanted) or found == wanted:
        return 0, max(len(found), len(wanted))
    places = [place for place, (one, other) in enumerate(zip(found, wanted, strict=True)) if one != other]
    return places[0], places[-1] + 1
