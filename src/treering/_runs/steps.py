"""The steps of a run and what is known of each: the opened folder, and ``run.json``, made again where it is behind.

``run.json`` is believed of a step only while the first line of the step's index has the digest that it noted, so that
it never lies about a step that another program has saved anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

from treering._checkpoint.detect import FOLDER_NAMES, find_foreign_folder, name_folder
from treering._codec.key_document import HEAD_BYTES
from treering._format.document import INDEX_NAME, read_digest, read_summary
from treering._format.run_document import RunDocument, StepRecord, encode_run, find_note, note_of, parse_run
from treering._runs.folder import AT_ONCE, NOT_READ, RunFolder, unless_denied
from treering._store.crew import map_together
from treering._store.failures import naming_file
from treering._store.open_folder import find_index_at
from treering._store.resolve import find_at, located, open_file, places_at, store_at
from treering._values.checkpoint_names import INDEX, RUN_DOCUMENT, step_name, step_of_name
from treering._values.human import shown_names, steps_text
from treering._view.plain import members_of
from treering.errors import BusyError, FormatError, NotFoundError, TreeringError

T = TypeVar("T")

# A number, alone or after a word such as step or checkpoint; gpt2 and era5 are not steps.
_NUMBERED: Final = re.compile(
    r"(?:[a-z_.-]*(?:step|checkpoint|ckpt|epoch|iter|iteration|save|run)s?[_.=-]?)?([0-9]{1,18})", re.IGNORECASE
)
_FLAX: Final = re.compile(r"checkpoint_[0-9]+")
_OWN: Final = "a checkpoint of treering"
_FLAX_FILE: Final = "a file of flax.training.checkpoints"
_LOOKED_AT: Final = 3
_ITEMS: Final = 16
_TRIES: Final = 100
_ANEW: Final = "the next save rebuilds it from the steps"


@contextlib.contextmanager
def open_run(path: Path) -> Iterator[RunFolder]:
    """Open a run's folder, which need not have steps yet, for as long as the block runs.

    Raises:
        NotFoundError: nothing is there.
        FormatError: it is a checkpoint, or holds numbered steps of another library.
        StoreError: a file is there, or the system refuses.
    """
    with RunFolder(path) as run:
        run.listed = names_in(run)
        require_run(run, run.listed)
        yield run


def require_run(run: RunFolder, names: Collection[str] | None) -> None:
    """Refuse a folder that is open and is no run, nor could be one.

    Args:
        run: the run's folder.
        names: what lies in it; None where a bucket denies to list it.

    Raises:
        FormatError: it is a checkpoint, or holds numbered steps of another library.
        StoreError: the system refuses.
    """
    shown = os.fspath(run.path)
    if (names is None or INDEX in names) and run.holds_index():
        hint = f"treering.load({shown!r}) loads it; use another folder for the run"
        raise FormatError(f"{shown!r} is a checkpoint, not a run", hint=hint)
    if names is None or RUN_DOCUMENT in names or run.has_steps():
        return
    if (named := next((other for name, other in FOLDER_NAMES.items() if name in names), None)) is not None:
        raise _other_form(shown, named)
    numbered = sorted((int(found[1]), name) for name in names if (found := _NUMBERED.fullmatch(name)))
    # An index under a step's own name belongs to a step, or to no checkpoint.
    for number, name in reversed(numbered[-_LOOKED_AT:]):
        other = _other(run.path / name)
        hint = "use another folder for the run; `treering convert` makes a run of Orbax's steps"
        if other == _FLAX_FILE:
            hint = "use another folder for the run; treering.load reads one such file"
        if other == _OWN:
            hint = f"name the folders as a run does, {step_name(number)!r} for {name!r}, or use another folder"
        if other is not None:
            others = shown_names([each for _, each in numbered])
            what = f"it holds other numbered steps, {others}; {name!r} is {other}"
            raise FormatError(f"{shown!r} is not a run: {what}", hint=hint)
    if (form := find_foreign_folder(run.path)) is not None:
        raise _other_form(shown, f"of the form {form.value}")


def _other_form(shown: str, what: str) -> FormatError:
    return FormatError(f"{shown!r} is {what}, and a folder holds one form alone", hint="use another folder for the run")


def names_in(run: RunFolder) -> set[str] | None:
    """Return what lies in a run's folder; None where a bucket denies to list it."""
    return unless_denied(run.store, run.names, lambda: None)


def _other(place: Path) -> str | None:
    """Say what a numbered folder or file is; None where it may be anything."""
    with contextlib.suppress(OSError):
        found = find_at(place)
        if found is not None and found.is_file:
            return _FLAX_FILE if _FLAX.fullmatch(place.name) else None
        if find_index_at(place, follow=False) is not None:
            whole = step_of_name(place.name) is None and read_digest(_head(place / INDEX)) is not None
            return _OWN if whole else None
        items = sorted(places_at(place))[:_ITEMS]
        found_in = (name_folder(each) for each in (place, *(place / item for item in items)))
        return next((other for other in found_in if other), None)
    return None


def _head(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(0, min(HEAD_BYTES, file.size))


@dataclasses.dataclass(frozen=True, slots=True)
class Records(RunDocument):
    """All that is known of a run's steps: those that can be read, as ``run.json`` has them where it is up to date."""

    unreadable: Mapping[int, TreeringError] = dataclasses.field(default_factory=dict)
    """The steps whose index is damaged, or of a newer version, with why; nothing is known of them, they are never kept
    in another one's place, and never removed."""
    passed: Sequence[StepRecord] = ()
    """The steps that were passed over when the run was resumed: no rule counts them, and none of them is removed."""
    trouble: str | None = None
    """Why ``run.json`` cannot be used; None where it can."""

    @property
    def readable(self) -> list[StepRecord]:
        """The steps that can be read, ascending, those too that were passed over."""
        return sorted((*self.steps, *self.passed), key=operator.attrgetter("step"))


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
        StoreError: a file is there, or the system refuses.
    """
    try:
        with open_run(path) as run:
            return read(run)
    except NotFoundError:
        return missing


def steps_of(path: Path) -> list[int]:
    """Return the steps that are there, ascending; none where no run is yet. Raises as `RunFolder.steps`."""
    return read_run(path, RunFolder.steps, [])


def latest_of(path: Path) -> int | None:
    """Return the latest step; None where there is none. Earlier steps are not looked at. Raises as `steps_of`."""
    return read_run(path, RunFolder.latest, None)


def noted_steps(run: RunFolder) -> set[int]:
    """Return the steps that ``run.json`` names: all that is known where a bucket denies to list them."""
    return {record.step for record in document_in(run.read_document()).steps}


def latest_known(path: Path) -> int | None:
    """Return the latest step, as `latest_of`; where a bucket denies to list them, the latest that is noted."""

    def find() -> int | None:
        with RunFolder(path) as run:
            return max(noted_steps(run), default=None)

    return unless_denied(store_at(path), functools.partial(latest_of, path), find)


def steps_from(path: Path, step: int) -> list[int]:
    """Return the steps that are there, ascending; where a bucket denies to list them, those noted from ``step`` on."""

    def find() -> list[int]:
        with RunFolder(path) as run:
            noted = {each for each in noted_steps(run) if each >= step} | {step}
            noted -= run.superseded_steps()
            return sorted(each for each in noted if (index := run.find_index(each)) is not None and index.is_file)

    return unless_denied(store_at(path), functools.partial(steps_of, path), find)


def missing_step(path: str | os.PathLike[str], step: int, steps: Sequence[int]) -> NotFoundError:
    """Return the error that a step is not there, which names those that are.

    Example:
        >>> print(missing_step("run", 7, range(0, 30, 10)))
        the run 'run' has no step 7; it has steps 0, 10 and 20
    """
    found = steps_text(steps) if steps else "no step yet"
    return NotFoundError(f"the run {os.fspath(path)!r} has no step {step}; it has {found}")


def records_of(path: Path) -> Records:
    """Return all that is known of the steps, as ``run.json`` has it where it is up to date, else as the steps say.

    Raises:
        StoreError: a file is there, or the system refuses.
    """
    return read_run(path, records_in, Records())


def records_in(run: RunFolder) -> Records:
    """Return all that is known of the steps of a run that is open.

    Raises:
        StoreError: the system refuses.
    """
    data = run.read_document()
    document, trouble = RunDocument(), None if data is not None else f"there is no {RUN_DOCUMENT}; {_ANEW}"
    try:
        document = document if data is None else parse_run(data)
    except NOT_READ as error:
        trouble = f"{RUN_DOCUMENT} cannot be used ({error.message}); {_ANEW}"
    known = {record.step: record for record in document.steps}

    def look(step: int) -> StepRecord | TreeringError | None:
        try:
            old = known.get(step)
            return old if old is not None and is_current(run, old, there[step]) else read_record(run, step)
        except NOT_READ as error:
            return error

    there = run.heads()
    found = map_together(look, list(there), AT_ONCE) if run.store.asks_by_request else list(map(look, there))
    unreadable = {step: one for step, one in zip(there, found, strict=True) if isinstance(one, TreeringError)}
    steps = [one for one in found if isinstance(one, StepRecord)]
    over = run.passed_over()
    passed = tuple(one for one in steps if one.step in over)
    steps = [one for one in steps if one.step not in over]
    return Records(document.keep, document.save_every, tuple(steps), unreadable, passed, trouble)


def note_records(run: RunFolder, records: Records) -> None:
    """Replace ``run.json`` by one that says what is known of the steps that are there; where it does so, leave it.

    Where neither is, nothing is written: there may be no run.

    Raises:
        StoreError: the system refuses; the old ``run.json`` is there.
        LinkRefusedError: ``run.json`` is a link.
    """
    there = set(run.steps())
    steps = [record for record in records.readable if record.step in there]
    data, old = encode_run(dataclasses.replace(records, steps=steps)), run.read_document()
    if data != old and (steps or old is not None):
        run.replace_document(data)


def document_in(data: bytes | None) -> RunDocument:
    """Return what a ``run.json`` says; nothing when it is not there, damaged, or of a newer version."""
    try:
        return RunDocument() if data is None else parse_run(data)
    except NOT_READ:
        return RunDocument()


def is_current(run: RunFolder, record: StepRecord, head: tuple[int, bytes] | None = None) -> bool:
    """Whether a record speaks of the index that is there, by the first line of it, which may have been read already.

    Raises:
        LinkRefusedError: the index is a link.
        StoreError: the system refuses.
    """
    head = head or run.read_head(record.step)
    return head is not None and (head[0], read_digest(head[1])) == (record.index_nbytes, record.digest)


def read_record(run: RunFolder, step: int) -> StepRecord | None:
    """Return what a step's own index says; None when there is no such step.

    Raises:
        CorruptError, FormatError, UnsupportedError: the index cannot be read.
        StoreError: the system refuses.
    """
    if (data := run.read_index(step)) is None:
        return None
    with naming_file(step_path(run.path, step) / INDEX_NAME):
        found = read_summary(data)
    # A checkpoint that was saved here by hand has no note: it counts from when it was written. The folder's name says
    # which step it is: to rename or copy a folder is to renumber the step.
    if (note := find_note(found.metadata)) is None:
        if (index := run.find_index(step)) is None:
            return None
        note = note_of(found.metadata, step, index.modified)
    known = members_of(found, "attempt", "nbytes", "digest") | members_of(note, "saved", "metrics", "temporary")
    return StepRecord(step=step, seconds=None, index_nbytes=len(data), **known)


# ----------------------------------------------------------------------------------------------------- the latest step


def latest_step(path: str | os.PathLike[str]) -> Path:
    """Return the path of a run's latest step.

    Raises:
        NotFoundError: it has none yet.
        StoreError: the system refuses.

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
        raise NotFoundError(f"the run {os.fspath(path)!r} has no step yet", hint="treering doctor shows what is there")
    return step_path(located(path), latest)


def of_latest(path: str | os.PathLike[str], read: Callable[[str | os.PathLike[str]], T]) -> T:
    """Read the latest step of a run; one that goes meanwhile has a newer one beside it.

    Raises:
        NotFoundError: the run has no step; and whatever ``read`` raises.
    """
    tried = tries(path)
    while True:
        next(tried)
        step = latest_step(path)
        try:
            return read(step)
        except NotFoundError:
            if step == latest_step(path):
                raise


def for_each_step(
    path: str | os.PathLike[str], numbers: Sequence[int], steps: Callable[[], Sequence[int]], act: Callable[[int], None]
) -> None:
    """Do something with each step of a run, the earliest first. A step that is removed meanwhile is left out.

    Args:
        path: the run, for messages.
        numbers: the steps that are there, ascending.
        steps: returns them anew.
        act: what is done with a step; its BusyError or NotFoundError for a step that is gone then is no error.

    Raises:
        NotFoundError: the run has no step; and whatever ``act`` raises.
    """
    for _ in tries(path):
        if not numbers:
            raise NotFoundError(f"the run {os.fspath(path)!r} has no step yet")
        done = 0
        for step in numbers:
            try:
                act(step)
                done += 1
            except (BusyError, NotFoundError):
                if step in steps():
                    raise
        if done:  # else all have gone, and there are newer ones
            return
        numbers = steps()


def tries(path: str | os.PathLike[str]) -> Iterator[None]:
    """Yield a few times, for those who read steps that may all go meanwhile.

    Raises:
        NotFoundError: they went each time.
    """
    for _ in range(_TRIES):
        yield
    raise NotFoundError(f"the steps of the run {os.fspath(path)!r} were removed {_TRIES} times during the read")
