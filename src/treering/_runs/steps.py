"""The steps of a run and what is known of each; ``run.json`` read, made again where it is behind, and replaced.

``run.json`` is believed of a step only while the first line of the step's index has the digest that it noted, so that
it never lies about a step that another program has saved anew.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from treering._format.document import INDEX_NAME, read_digest, read_summary
from treering._format.run_document import RunDocument, StepRecord, encode_run, find_note, note_of, parse_run
from treering._runs.open_run import open_run
from treering._runs.superseded import NOT_READ, superseded_steps
from treering._store.crew import map_together
from treering._store.failures import naming_file
from treering._store.resolve import is_on_disk, located
from treering._store.run_folder import AT_ONCE, RUN_DOCUMENT, RunFolder, step_name
from treering._values.human import steps_text
from treering._view.json_lines import members_of
from treering.errors import NotFound, PermissionDenied, TreeringError
from treering.retention import Policy, StepFacts, Verdict, retained

T = TypeVar("T")

_TRIES: Final = 100
_ANEW: Final = "the next save rebuilds it from the steps"


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
    """All that is known of a run's steps.

    Attributes:
        keep: text of the policy that the last program kept steps by; None if it kept all, or if none was noted.
        save_every: text of the policy that said when to save.
        steps: the steps that can be read, ascending.
        unreadable: those whose index is damaged, or of a newer version, with why; nothing is known of them, they are
            never kept in another one's place, and never removed.
    """

    keep: str | None
    save_every: str | None
    steps: tuple[StepRecord, ...]
    unreadable: Mapping[int, TreeringError]


def step_path(path: Path, step: int) -> Path:
    """Return the path of a step's checkpoint, whether it is there or not.

    Example:
        >>> step_path(Path("run"), 1200).name
        'step_00001200'
    """
    return path / step_name(step)


def read_run(path: Path, read: Callable[[RunFolder], T], missing: T) -> T:
    """Return what is read in a run's folder; ``missing`` where no run is yet.

    Raises:
        StoreFailed: a file is there, or the system refuses.
    """
    try:
        with open_run(path) as run:
            return read(run)
    except NotFound:
        return missing


def steps_of(path: Path) -> list[int]:
    """Return the steps that are there, ascending; none where no run is yet. Raises as `read_run` does."""
    return read_run(path, steps_in, [])


def steps_in(run: RunFolder) -> list[int]:
    """Return the steps of a run that is open, ascending, without those that were left behind.

    Raises:
        Format: a newer version wrote which steps are left behind.
        StoreFailed: the system refuses.
    """
    there = run.steps()
    left = superseded_steps(run)
    return [step for step in there if step not in left] if left else there


def latest_of(path: Path) -> int | None:
    """Return the latest step; None where there is none. Earlier steps are not looked at.

    Raises:
        Format: a newer version wrote which steps are left behind.
        StoreFailed: a file is there, or the system refuses.
    """
    return read_run(path, lambda run: run.latest(without=superseded_steps(run)), None)


def noted_steps(path: Path) -> list[int]:
    """Return the steps that ``run.json`` names: all that is known where a bucket denies to list them.

    Raises:
        StoreFailed: the system refuses.
    """
    with RunFolder(path) as run:
        return [record.step for record in document_in(run.read_document()).steps]


def latest_known(path: Path) -> int | None:
    """Return the latest step, as `latest_of`; where a bucket denies to list them, the latest that is noted."""
    try:
        return latest_of(path)
    except PermissionDenied:
        if is_on_disk(path):
            raise
        return max(noted_steps(path), default=None)


def steps_from(path: Path, step: int) -> list[int]:
    """Return the steps that are there, ascending; where a bucket denies to list them, those noted from ``step`` on."""
    try:
        return steps_of(path)
    except PermissionDenied:
        if is_on_disk(path):
            raise
    noted = {each for each in noted_steps(path) if each >= step} | {step}
    with RunFolder(path) as run:
        left = superseded_steps(run)
        return sorted(each for each in noted - left if run.index_nbytes(each) is not None)


def missing_step(path: str | os.PathLike[str], step: int, steps: Sequence[int]) -> NotFound:
    """Return the error that a step is not there, which names those that are.

    Example:
        >>> print(missing_step("run", 7, range(0, 30, 10)))
        the run 'run' has no step 7; it has steps 0, 10 and 20
    """
    found = steps_text(steps) if steps else "no step yet"
    return NotFound(f"the run {os.fspath(path)!r} has no step {step}; it has {found}")


def facts_of(path: Path) -> list[StepFacts]:
    """Return what a policy asks of each step that can be read, ascending; none where no run is yet.

    Raises:
        StoreFailed: a file is there, or the system refuses.
    """
    return [facts(record) for record in records_of(path).steps]


def judge(records: Records, keep: Policy | None) -> list[Verdict]:
    """Return what becomes of each step that can be read, ascending."""
    return retained(keep, list(map(facts, records.steps)))


def facts(one: StepRecord) -> StepFacts:
    """Return what a policy asks of one step."""
    return StepFacts(step=one.step, saved=one.saved, metrics=one.metrics, temporary=one.temporary, nbytes=one.nbytes)


def records_of(path: Path) -> Records:
    """Return all that is known of the steps, as ``run.json`` has it where it is up to date, else as the steps say.

    Raises:
        StoreFailed: a file is there, or the system refuses.
    """
    return read_run(path, records_in, Records(None, None, (), {}))


def records_in(run: RunFolder) -> Records:
    """Return all that is known of the steps of a run that is open.

    Raises:
        StoreFailed: the system refuses.
    """
    document = document_in(run.read_document())
    known = {record.step: record for record in document.steps}

    def look(step: int) -> StepRecord | TreeringError | None:
        try:
            old = known.get(step)
            return old if old is not None and is_current(run, old) else read_record(run, step)
        except NOT_READ as error:
            return error

    there = steps_in(run)
    found = map_together(look, there, AT_ONCE) if run.flat else list(map(look, there))
    unreadable = {step: one for step, one in zip(there, found, strict=True) if isinstance(one, TreeringError)}
    steps = tuple(one for one in found if isinstance(one, StepRecord))
    return Records(document.keep, document.save_every, steps, unreadable)


def note_records(run: RunFolder, records: Records) -> None:
    """Replace ``run.json`` by one that says what is known of the steps that are there; where it does so, leave it.

    Where neither is, nothing is written: there may be no run.

    Raises:
        StoreFailed: the system refuses; the old ``run.json`` is there.
        LinkRefused: ``run.json`` is a link.
    """
    there = set(steps_in(run))
    steps = [record for record in records.steps if record.step in there]
    data, old = encode_run(RunDocument(records.keep, records.save_every, steps)), run.read_document()
    if data != old and (steps or old is not None):
        run.replace_document(data)


def cache_trouble(path: Path) -> str | None:
    """Say why ``run.json`` cannot be used; None where it can.

    Raises:
        NotFound: there is no such folder.
        StoreFailed: the system refuses.

    Example:
        >>> import pathlib, tempfile
        >>> cache_trouble(pathlib.Path(tempfile.mkdtemp()))
        'there is no run.json; the next save rebuilds it from the steps'
    """
    with RunFolder(path) as run:
        data = run.read_document()
    if data is None:
        return f"there is no {RUN_DOCUMENT}; {_ANEW}"
    try:
        parse_run(data)
    except NOT_READ as error:
        return f"{RUN_DOCUMENT} cannot be used ({error.message}); {_ANEW}"
    return None


def document_in(data: bytes | None) -> RunDocument:
    """Return what a ``run.json`` says; nothing when it is not there, damaged, or of a newer version."""
    try:
        return RunDocument() if data is None else parse_run(data)
    except NOT_READ:
        return RunDocument()


def is_current(run: RunFolder, record: StepRecord) -> bool:
    """Whether a record speaks of the index that is there, by the first line of it.

    Raises:
        LinkRefused: the index is a link.
        StoreFailed: the system refuses.
    """
    head = run.read_head(record.step)
    return head is not None and (head[0], read_digest(head[1])) == (record.index_nbytes, record.digest)


def read_record(run: RunFolder, step: int) -> StepRecord | None:
    """Return what a step's own index says; None when there is no such step.

    Raises:
        Corrupt, Format, Unsupported: the index cannot be read.
        StoreFailed: the system refuses.
    """
    if (data := run.read_index(step)) is None:
        return None
    with naming_file(step_path(run.path, step) / INDEX_NAME):
        found = read_summary(data)
    # A checkpoint that was saved here by hand has no note: it counts from when it was written. The folder's name says
    # which step it is: to rename or copy a folder is to renumber the step.
    if (note := find_note(found.metadata)) is None:
        if (written := run.modified(step)) is None:
            return None
        note = note_of(found.metadata, step, written)
    known = members_of(found, "attempt", "nbytes", "digest") | members_of(note, "saved", "metrics", "temporary")
    return StepRecord(step=step, seconds=None, index_nbytes=len(data), **known)


# ----------------------------------------------------------------------------------------------------- the latest step


def latest_step(path: str | os.PathLike[str]) -> Path:
    """Return the path of a run's latest step.

    Raises:
        NotFound: it has none yet.
        StoreFailed: the system refuses.

    Example:
        >>> import os, tempfile
        >>> import treering as tr
        >>> run = os.path.join(tempfile.mkdtemp(), "run")
        >>> tr.save(os.path.join(run, "step_00000007"), {"w": 1.5})
        >>> latest_step(run).name
        'step_00000007'
    """
    latest = latest_of(located(path))
    if latest is None:
        raise NotFound(f"the run {os.fspath(path)!r} has no step yet", hint="treering doctor shows what is there")
    return step_path(located(path), latest)


def of_latest(path: str | os.PathLike[str], read: Callable[[str | os.PathLike[str]], T]) -> T:
    """Read the latest step of a run; one that goes meanwhile has a newer one beside it.

    Raises:
        NotFound: the run has no step; and whatever ``read`` raises.
    """
    tried = tries(path)
    while True:
        next(tried)
        step = latest_step(path)
        try:
            return read(step)
        except NotFound:
            if step == latest_step(path):
                raise


def tries(path: str | os.PathLike[str]) -> Iterator[None]:
    """Yield a few times, for those who read steps that may all go meanwhile.

    Raises:
        NotFound: they went each time.
    """
    for _ in range(_TRIES):
        yield
    raise NotFound(f"the steps of the run {os.fspath(path)!r} were removed {_TRIES} times during the read")
