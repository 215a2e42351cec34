"""What a run writes about its steps: a note in the metadata of each, and ``run.json``, which is made from those.

``docs/spec/run.md`` is the specification. The note is the truth; ``run.json`` is a cache that spares its readers the
steps' indexes, and says of which index each of its entries speaks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import itertools
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Self

from treering._codec.documents import (
    DIGEST,
    SignedForm,
    check_json,
    check_name,
    join_lines,
    json_text,
    member,
    member_line,
    show,
)
from treering._values.checkpoint_names import (
    ATTEMPT,
    HANDED_DOCUMENT,
    HIGHEST_STEP,
    LEFT_DOCUMENT,
    RESUMED_DOCUMENT,
    RUN_DOCUMENT,
)
from treering.errors import CorruptError, UnsupportedError

MEMBER: Final = "treering"
"""The member of a step's metadata that holds the note; a user's metadata has no such member."""

LATEST_TIME: Final = 253_402_300_799.0
"""The last second that the text of a time can say, in POSIX seconds."""

_FORM: Final = SignedForm("treering_run", 1, RUN_DOCUMENT, hint="remove it: it is rebuilt from the steps")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
_LIMIT: Final = 1 << 63
# A larger ``run.json``, of about 35,000 steps, takes too much memory to be kept after it was read.
_MOST_KEPT: Final = 8 << 20
_MOST_RESUMED: Final = 1000
# What JSON has no numbers for.
_NO_NUMBERS: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_LEFT_HINT: Final = "it lists the steps that were removed"
_LEFT_FORM: Final = SignedForm("treering_left", 1, LEFT_DOCUMENT, hint=_LEFT_HINT, also=(2,))
# Versions that know nothing of leases refuse it, and so remove no step.
_STAMPED_FORM: Final = SignedForm("treering_left", 2, LEFT_DOCUMENT, hint=_LEFT_HINT, also=(1,))
_LEASE_FORM: Final = SignedForm("treering_lease", 1, "the lease on a step", hint="it ends by itself")
_HANDED_FORM: Final = SignedForm(
    "treering_handed", 1, HANDED_DOCUMENT, hint="without it, only later steps are handed over"
)
_MOST_NOT_HANDED: Final = 1000
_RESUMED_FORM: Final = SignedForm(
    "treering_resumed", 1, RESUMED_DOCUMENT, hint="remove it; the next load with fallback= writes it again"
)


@dataclasses.dataclass(frozen=True, slots=True)
class StepOrigin:
    """Where a step was copied from."""

    run: str
    """The run's path, as the program that copied it called it."""
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Conversion:
    """What a step was converted from."""

    path: str
    """The folder of the run, or of another program's steps."""
    step: int
    digest: str
    """Of the save that was converted, and of the options: equal ones make an equal step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepNote:
    """What a step's checkpoint says of itself, beside the user's metadata."""

    step: int
    saved: float
    """When the save began, in POSIX seconds; kept to the microsecond."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    temporary: bool = False
    """Whether the step goes when a newer one is committed."""
    branch: StepOrigin | None = None
    converted: Conversion | None = None
    mark: str | None = None
    """Of a save that goes back to an earlier step: what the list of the steps that it leaves behind has as well."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The facts about a step that rules use.

    Example:
        >>> StepFacts(step=100, saved=1.5e9, metrics={"loss": 0.25}).temporary
        False
    """

    step: int
    """Its number."""
    saved: float
    """The time of the save, in POSIX seconds."""
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Metric -> value."""
    temporary: bool = False
    """Whether it is removed when a newer step is committed."""
    nbytes: int = 0
    """The bytes of its files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRecord(StepFacts):
    """What ``run.json`` says of a step, and of which index it says that."""

    attempt: str
    seconds: float | None
    """How long the save took; None when nobody noted it."""
    index_nbytes: int
    digest: str
    """The digest in the first line of its index; another one is another index, of which this record says nothing."""

    @functools.cached_property
    def text(self) -> str:
        """What ``run.json`` says of the step, as JSON. Made once, for thousands of steps would hold up other threads.

        Raises:
            UnsupportedError: something in it has no form in JSON.
        """
        node = {
            "step": self.step, "attempt": self.attempt, **_encode_facts(self), "nbytes": self.nbytes,
            "seconds": self.seconds, "index_nbytes": self.index_nbytes, "index_digest": self.digest,
        }  # fmt: skip
        check_json([node], "steps")
        return json_text(node)


@dataclasses.dataclass(frozen=True, slots=True)
class RunDocument:
    """The content of ``run.json``."""

    keep: str | None = None
    """Text of the policy that says what is kept; None when everything is, or when it is not known."""
    save_every: str | None = None
    """Text of the policy that says when to save."""
    steps: Sequence[StepRecord] = ()


# ----------------------------------------------------------------------------------------------------------- the note


def add_note(metadata: Mapping[str, Any], note: StepNote) -> dict[str, Any]:
    """Return a step's metadata: the user's, with the note.

    Raises:
        UnsupportedError: the user's has the note's member, or the time is no time.

    Example:
        >>> node = add_note({"git": "abc"}, StepNote(step=3, saved=0.5, metrics={"loss": float("nan")}))["treering"]
        >>> node["saved"], node["metrics"]
        ('1970-01-01T00:00:00.500000Z', {'loss': 'nan'})
    """
    if MEMBER in metadata:
        raise UnsupportedError(f"the metadata of a step must not have the member {MEMBER!r}, which the run reserves")
    branch = None if note.branch is None else dataclasses.asdict(note.branch)
    node = {"step": note.step, **_encode_facts(note), "branch": branch}
    if note.converted is not None:
        node["converted"] = dataclasses.asdict(note.converted)
    if note.mark is not None:
        node["mark"] = note.mark
    return {MEMBER: node, **metadata}


def find_note(metadata: Mapping[str, Any]) -> StepNote | None:
    """Return the note in a checkpoint's metadata; None when it has none, or something else in its place.

    Example:
        >>> find_note(add_note({}, StepNote(step=3, saved=0.5))).saved
        0.5
        >>> find_note({"treering": "a user's"}) is None
        True
    """
    try:
        return _note(metadata.get(MEMBER))
    except CorruptError:
        return None


def note_of(metadata: Mapping[str, Any], step: int, written: float) -> StepNote:
    """Return the note of a step; one that has only its number and when it was written, where it has none."""
    return find_note(metadata) or StepNote(step=step, saved=min(max(written, 0.0), LATEST_TIME))


def remove_note(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's metadata of a step.

    Example:
        >>> remove_note(add_note({"git": "abc"}, StepNote(step=3, saved=0.5)))
        {'git': 'abc'}
    """
    return {name: value for name, value in metadata.items() if name != MEMBER or find_note(metadata) is None}


def _note(node: Any) -> StepNote:
    what = "the note of a step"
    step = read_step(node, what)
    branch, converted, mark = node.get("branch"), node.get("converted"), node.get("mark")
    return StepNote(
        step=step,
        **_decode_facts(node, what),
        branch=None if branch is None else StepOrigin(member(branch, "run", str, what), read_step(branch, what)),
        converted=None if converted is None else _conversion(converted, what),
        mark=None if mark is None else check_name(ATTEMPT, member(node, "mark", str, what), "the mark"),
    )


def _conversion(node: Any, what: str) -> Conversion:
    path, digest = member(node, "path", str, what), member(node, "digest", str, what)
    return Conversion(path, read_step(node, what), check_name(DIGEST, digest, "a digest"))


# ------------------------------------------------------------------------------------------------------------ run.json


def encode_run(document: RunDocument) -> bytes:
    """Return ``run.json``.

    Raises:
        UnsupportedError: something in it has no form in JSON.
    """
    steps = ",".join([record.text for record in document.steps])
    rules = member_line("keep", document.keep), member_line("save_every", document.save_every)
    return _FORM.sign(join_lines([*rules, f'"steps": [{steps}]']))


def parse_run(data: bytes) -> RunDocument:
    """Return what a ``run.json`` says; nobody may change what is in it.

    Raises:
        CorruptError: it is damaged, or contradicts itself.
        FormatError: a newer version wrote it.

    Example:
        >>> print(encode_run(RunDocument(keep="KeepLast(3)")).decode(), end="")
        {"treering_run": 1, "digest": "xxh3-128:21ce4d4c7c4a145c457572d6bd584cd4",
        "keep": "KeepLast(3)",
        "save_every": null,
        "steps": []}
        >>> parse_run(encode_run(RunDocument(keep="KeepLast(3)")))
        RunDocument(keep='KeepLast(3)', save_every=None, steps=())
    """
    read = _read_run if len(data) <= _MOST_KEPT else _read_run.__wrapped__
    return read(data)


@functools.lru_cache(maxsize=1)  # that of thousands of steps is read again by each call, and seldom another one
def _read_run(data: bytes) -> RunDocument:
    return _FORM.read(data, _document)


def _document(document: Any) -> RunDocument:
    steps = tuple(map(_record, member(document, "steps", list, RUN_DOCUMENT)))
    if any(later.step <= record.step for record, later in itertools.pairwise(steps)):
        raise CorruptError("its steps do not ascend")
    return RunDocument(_text(document, "keep"), _text(document, "save_every"), steps)


def _text(document: dict[str, Any], name: str) -> str | None:
    return None if document.get(name) is None else member(document, name, str, RUN_DOCUMENT)


def _encode_facts(of: StepNote | StepRecord) -> dict[str, Any]:
    numbers = {name: float(value) for name, value in of.metrics.items()}
    metrics = {name: value if math.isfinite(value) else str(value) for name, value in numbers.items()}
    return {"saved": _time_text(of.saved), "metrics": metrics, "temporary": of.temporary}


def _decode_facts(node: dict[str, Any], what: str) -> dict[str, Any]:
    return {
        "saved": _time(member(node, "saved", str, what)),
        "metrics": _metrics(member(node, "metrics", dict, what)),
        "temporary": member(node, "temporary", bool, what),
    }


def _record(node: Any) -> StepRecord:
    what = "the record of a step"
    seconds = node.get("seconds") if type(node) is dict else None
    if seconds is not None and (type(seconds) not in (int, float) or not 0 <= seconds < _LIMIT):
        raise CorruptError(f"{what}: {show(seconds)} is not a number of seconds")
    return StepRecord(
        step=read_step(node, what),
        attempt=check_name(ATTEMPT, member(node, "attempt", str, what), "the attempt"),
        **_decode_facts(node, what),
        nbytes=_count(node, "nbytes", what, _LIMIT),
        seconds=None if seconds is None else float(seconds),
        index_nbytes=_count(node, "index_nbytes", what, _LIMIT),
        digest=check_name(DIGEST, member(node, "index_digest", str, what), "a digest"),
    )


# -------------------------------------------------------------------------------------------------------------- values


def read_step(node: Any, what: str) -> int:
    """Return the member ``step`` of an object that ``what`` names in errors.

    Raises:
        CorruptError: it has none, or it is no step.

    Example:
        >>> read_step({"step": 7}, "the note")
        7
    """
    return _count(node, "step", what, HIGHEST_STEP)


def _count(node: Any, name: str, what: str, highest: int) -> int:
    found = member(node, name, int, what)
    if not 0 <= found <= highest:
        raise CorruptError(f"{what}: {show(found)} cannot be its {name!r}")
    return found


def _metrics(node: dict[str, Any]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, value in node.items():
        if type(value) is str and value in _NO_NUMBERS:
            metrics[name] = _NO_NUMBERS[value]
        elif type(value) in (int, float) and abs(value) < math.inf:
            try:
                metrics[name] = float(value)
            except OverflowError:
                raise CorruptError(f"the metric {show(name)} is too large for a number") from None
        else:
            raise CorruptError(f"the metric {show(name)} is {show(value)}, which is not a number")
    return metrics


def _time_text(seconds: float) -> str:
    try:
        moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError) as error:
        raise UnsupportedError(f"{seconds!r} seconds cannot be written as a time ({error})") from None
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _time(text: str) -> float:
    with contextlib.suppress(ValueError, OverflowError):
        if _TIME.fullmatch(text):
            return datetime.datetime.fromisoformat(text).timestamp()
    raise CorruptError(f"{show(text)} is not a time")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SupersededSteps:
    """The content of ``.run.json.left``."""

    step: int = -1
    """The step that is gone back to; -1 where none is, and the document is there for the leases alone."""
    mark: str = ""
    """The save of it that this is about: its note has the same."""
    left: Mapping[int, str | None] = dataclasses.field(default_factory=dict)
    """The later steps, each with the attempt of its index; None where the index could not be read."""
    leases: bool = False
    """Whether there may be leases on steps of the run, so that versions that do not know them must not remove any."""


def encode_superseded(document: SupersededSteps) -> bytes:
    """Return ``.run.json.left``.

    Example:
        >>> superseded = SupersededSteps(step=3, mark="0" * 16, left={5: "f" * 16, 7: None})
        >>> print(encode_superseded(superseded).decode(), end="")
        {"treering_left": 1, "digest": "xxh3-128:03e9156b0086dbe9b143e1bdc34fb9f6",
        "step": 3,
        "mark": "0000000000000000",
        "left": [{"step":5,"attempt":"ffffffffffffffff"},{"step":7,"attempt":null}]}
    """
    left = [{"step": step, "attempt": attempt} for step, attempt in document.left.items()]
    members = [("step", document.step), ("mark", document.mark), ("left", left)]
    if not document.leases:
        return _LEFT_FORM.encode(members)
    # Random digits, for in a bucket a version may say no more than the content does.
    stamp = [("leases", True), ("nonce", secrets.token_hex(8))]
    return _STAMPED_FORM.encode(stamp if document.step < 0 else [*stamp, *members])


def parse_superseded(data: bytes) -> SupersededSteps:
    """Return what a ``.run.json.left`` says.

    Raises:
        CorruptError: it is damaged, or was not written to its end.
        FormatError: a newer version wrote it.

    Example:
        >>> document = SupersededSteps(step=3, mark="0" * 16, left={5: "f" * 16, 7: None})
        >>> parse_superseded(encode_superseded(document)) == document
        True
    """
    return _LEFT_FORM.read(data, _left_document)


def _left_document(document: Any) -> SupersededSteps:
    leases = document.get("leases") is True
    if leases and "step" not in document:
        return SupersededSteps(leases=True)
    step = read_step(document, LEFT_DOCUMENT)
    left = dict(map(_left, member(document, "left", list, LEFT_DOCUMENT)))
    if min(left, default=step + 1) <= step:
        raise CorruptError("it leaves steps behind that are not later")
    mark = check_name(ATTEMPT, member(document, "mark", str, LEFT_DOCUMENT), "the mark")
    return SupersededSteps(step=step, mark=mark, left=left, leases=leases)


def _left(node: Any) -> tuple[int, str | None]:
    what = "a step that is left behind, or was passed over"
    step = read_step(node, what)
    if node.get("attempt", "") is None:
        return step, None
    return step, check_name(ATTEMPT, member(node, "attempt", str, what), "the attempt")


def encode_lease(step: int, holder: str) -> bytes:
    """Return the content of a lease: each time another one, for a version may say no more than the content does."""
    return _LEASE_FORM.encode([("step", step), ("holder", holder), ("nonce", secrets.token_hex(8))])


def parse_lease(data: bytes) -> str:
    """Return who holds a step, for people.

    Raises:
        CorruptError: it is damaged.
        FormatError: a newer version wrote it.

    Example:
        >>> parse_lease(encode_lease(1200, "node-1, process 7"))
        'node-1, process 7'
    """
    return _LEASE_FORM.read(data, lambda node: str(member(node, "holder", str, "the lease on a step")))


@dataclasses.dataclass(frozen=True, slots=True)
class HandedSteps:
    """The content of ``.run.json.handed``: which steps ``on_commit`` was called for."""

    through: int
    """The highest step that it was called for, -1 for none; so it was for all lower ones but a few."""
    without: Mapping[int, str]
    """Those, each with the digest of its index: the function failed for them."""


def encode_handed(document: HandedSteps) -> bytes:
    """Return ``.run.json.handed``.

    Example:
        >>> document = HandedSteps(1200, {1000: "xxh3-128:" + "0" * 32})
        >>> parse_handed(encode_handed(document)) == document
        True
    """
    without = [{"step": step, "digest": digest} for step, digest in document.without.items()][-_MOST_NOT_HANDED:]
    nonce = ("nonce", secrets.token_hex(8))
    return _HANDED_FORM.encode([("through", document.through), ("without", without), nonce])


def parse_handed(data: bytes) -> HandedSteps:
    """Return what a ``.run.json.handed`` says.

    Raises:
        CorruptError: it is damaged.
        FormatError: a newer version wrote it.
    """
    return _HANDED_FORM.read(data, _handed)


def _handed(document: Any) -> HandedSteps:
    through = member(document, "through", int, HANDED_DOCUMENT)
    if not -1 <= through <= HIGHEST_STEP:
        raise CorruptError(f"{show(through)} is not a step")
    nodes = member(document, "without", list, HANDED_DOCUMENT)
    read = {read_step(node, HANDED_DOCUMENT): member(node, "digest", str, HANDED_DOCUMENT) for node in nodes}
    without = {step: check_name(DIGEST, digest, "a digest") for step, digest in sorted(read.items())}
    return HandedSteps(through, dict(list(without.items())[-_MOST_NOT_HANDED:]))


@dataclasses.dataclass(frozen=True, slots=True)
class Resumes:
    """The content of ``.run.json.resumed``.

    Example:
        >>> document = Resumes({7: None}, {(3, "f" * 16): 2})
        >>> print(document.encode().decode(), end="")
        {"treering_resumed": 1, "digest": "xxh3-128:1e88a0d6c5d1a645b9a66d8a1170453b",
        "passed": [{"step":7,"attempt":null}],
        "resumed": [{"step":3,"attempt":"ffffffffffffffff","count":2}]}
        >>> Resumes.parse(document.encode()) == document
        True
    """

    NAME: ClassVar[str] = RESUMED_DOCUMENT

    passed: Mapping[int, str | None] = dataclasses.field(default_factory=dict)
    """The steps that were passed over, each with the attempt of its index; None where the index could not be read."""
    counts: Mapping[tuple[int, str], int] = dataclasses.field(default_factory=dict)
    """Step and attempt -> how often the run was resumed from it."""

    def encode(self) -> bytes:
        """Return ``.run.json.resumed``; of very many steps the highest are written."""
        passed = [{"step": step, "attempt": attempt} for step, attempt in sorted(self.passed.items())]
        counts = [{"step": step, "attempt": of, "count": count} for (step, of), count in sorted(self.counts.items())]
        return _RESUMED_FORM.encode([("passed", passed[-_MOST_RESUMED:]), ("resumed", counts[-_MOST_RESUMED:])])

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return what a ``.run.json.resumed`` says.

        Raises:
            CorruptError: it is damaged.
            FormatError: a newer version wrote it.
        """
        return _RESUMED_FORM.read(data, cls._of)

    @classmethod
    def _of(cls, document: Any) -> Self:
        passed, resumed = (member(document, name, list, RESUMED_DOCUMENT) for name in ("passed", "resumed"))
        if max(len(passed), len(resumed)) > _MOST_RESUMED:
            raise CorruptError(f"it names more than {_MOST_RESUMED} steps")
        return cls(dict(map(_left, passed)), dict(map(_resumed, resumed)))


def _resumed(node: Any) -> tuple[tuple[int, str], int]:
    what = "a step that was resumed from"
    attempt = check_name(ATTEMPT, member(node, "attempt", str, what), "the attempt")
    return (read_step(node, what), attempt), _count(node, "count", what, _LIMIT)
