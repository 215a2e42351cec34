"""What a bucket is asked, and what it answers: the words that the protocol and the clients share.

``docs/design/buckets.md`` says what is done with them.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import errno
import itertools
import operator
import random
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Final, Protocol, TypeAlias, TypeVar

from treering._store.api import known_answers, remembered
from treering._store.pieces import Buffer

T = TypeVar("T")

FIRST_PAUSE: Final = 0.1
"""Seconds between the first try of a request and the second one."""

PATIENCE: Final = 120.0
"""The patience of a client, if nothing else is said."""


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectVersion:
    """The version of one content of an object: on S3 and Azure the ETag says it, on GCS the generation.

    Example:
        >>> ObjectVersion('"a1"').text(), ObjectVersion.of_text("a1 17")
        ('"a1"', ObjectVersion(e_tag='a1', generation='17'))
    """

    e_tag: str
    generation: str | None = None

    def text(self) -> str:
        """Return it as a marker holds it."""
        return self.e_tag if self.generation is None else f"{self.e_tag} {self.generation}"

    @classmethod
    def of_text(cls, text: str) -> ObjectVersion:
        """Return the version that a marker holds."""
        e_tag, _, generation = text.partition(" ")
        return cls(e_tag, generation or None)


class Absent(enum.Enum):
    """The condition that nothing is there."""

    ABSENT = "absent"


Condition: TypeAlias = ObjectVersion | Absent | None
"""What must be there for a change to happen: that version, nothing, or anything at all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Get:
    """Read an object, or the first ``most`` bytes of it."""

    name: str
    most: int | None = None


@dataclasses.dataclass(slots=True)
class Span:
    """Bytes of an object that one request fetches, and the memory that they go to."""

    start: int
    stop: int
    targets: list[tuple[int, memoryview]]
    """Offsets and flat buffers, ascending; they may leave gaps, and do not overlap."""

    def fill(self, position: int, data: memoryview) -> None:
        """Copy what was received from ``position`` on to where it belongs."""
        end = position + len(data)
        first = max(bisect.bisect_right(self.targets, position, key=operator.itemgetter(0)) - 1, 0)
        for offset, buffer in itertools.islice(self.targets, first, None):
            if offset >= end:
                break
            start, stop = max(offset, position), min(offset + len(buffer), end)
            if start < stop:
                buffer[start - offset : stop - offset] = data[start - position : stop - position]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Range:
    """Fill the buffers of a span with bytes of that version of an object; the answer says which version there is."""

    name: str
    version: ObjectVersion
    span: Span


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """Ask for the size, version and time of an object."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Put:
    """Make ``data`` the content of an object, if the condition holds."""

    name: str
    data: bytes
    condition: Condition = None


@dataclasses.dataclass(frozen=True, slots=True)
class Delete:
    """Remove objects; with a condition there is one of them."""

    names: tuple[str, ...]
    condition: ObjectVersion | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class List:
    """List the objects whose names begin so; not those below a further slash, which count as places."""

    prefix: str
    deep: bool = False
    """Whether those below a further slash are listed too."""


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """Let the server copy an object; REFUSED where it cannot, as for one of more than 5 GB."""

    name: str
    """The object."""
    new: str
    """The name that its copy gets."""


Request: TypeAlias = Get | Range | Head | Put | Delete | List | Copy


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Let about so many seconds pass: no request, and whatever it is sent means nothing."""

    seconds: float


class Status(enum.Enum):
    """How a request ended."""

    DONE = "done"
    REFUSED = "refused"
    """The condition does not hold."""
    MISSING = "missing"
    """Nothing is there."""
    NO_ANSWER = "no answer"
    """It may have happened, and it may yet happen."""


@dataclasses.dataclass(frozen=True, slots=True)
class Listed:
    """What a listing, or `Head`, says of an object."""

    name: str
    size: int
    modified: float
    """When it was put, in POSIX seconds by the clock of the bucket."""
    version: ObjectVersion


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came back. A refusal of rights, or of the whole request, is no answer but an ``OSError``."""

    status: Status
    data: bytes = b""
    """What `Get` read."""
    found: Listed | None = None
    """Of `Get`, `Range`, `Head` and `Put`: the object; a time of 0.0 where the answer has none."""
    listed: Sequence[Listed] = ()
    places: Sequence[str] = ()
    """Of `List`: the names that a further slash follows, without it."""
    sure: bool = True
    """Of REFUSED: whether nothing can have repeated the request, so that this is what became of it."""
    reason: str = ""
    """Of NO_ANSWER: what the client says."""


Steps: TypeAlias = Generator[Request | Wait, Answer, T]
"""A part of the protocol: it yields requests, is sent their answers, and returns a value."""

_NOTHING: Final = Answer(Status.DONE)


class Client(Protocol):
    """What performs requests at one bucket. Names are whole keys; ``OSError`` where the bucket refuses."""

    shown: str
    """The bucket, as messages call it: ``s3://bucket``."""

    @property
    def patience(self) -> float:
        """Seconds after which nothing is asked again that was not answered; below 0 where that is so already."""
        ...

    def perform(self, request: Request) -> Answer:
        """Make one request. One with a condition is made once; others are repeated as the client sees fit."""
        ...

    def put_parts(self, name: str, buffers: Iterable[Buffer], size: int, *, new: bool = True) -> None:
        """Write an object in parts; the memory of a buffer may be used again once the next one is asked for.

        ``new`` says that nothing was ever at that name.
        """
        ...


def require_answer(shown: str, answer: Answer) -> Answer:
    """Return what a bucket answered; no answer is an error, and never the answer that nothing is there."""
    if answer.status is Status.NO_ANSWER:
        raise OSError(errno.ETIMEDOUT, f"{shown} does not answer ({answer.reason})")
    return answer


def unanswered(shown: str, name: str) -> OSError:
    """Return the error for an object that was put again and again, with answers to all that was asked but to that."""
    return OSError(errno.ETIMEDOUT, f"{shown} does not answer (PUT {name!r}); it may have been put, or may yet be")


def ask(client: Client, request: Request) -> Answer:
    """Return what a bucket answers; no answer is an error. Inside of `asking`, nothing is looked at twice."""

    def answer() -> Answer:
        return require_answer(client.shown, client.perform(request))

    match request:
        case Head() | Get(most=int()) | List(deep=False):
            return _listed_answer(client, request) or remembered((client, request), answer)
        case _:
            return answer()


def _listed_answer(client: Client, request: Head | Get | List) -> Answer | None:
    """Return the answer that follows from what was listed of the place above, if that was listed and says it."""
    name = request.prefix[:-1] if isinstance(request, List) else request.name
    above: Answer | None = (known_answers() or {}).get((client, List(name[: name.rfind("/") + 1])))
    if above is None:
        return None
    if isinstance(request, List):
        return None if name in above.places else _NOTHING
    found = next((one for one in above.listed if one.name == name), None)
    if found is None:
        return Answer(Status.MISSING)
    return Answer(Status.DONE, found=found) if isinstance(request, Head) else None


def drive(client: Client, steps: Steps[T]) -> T:
    """Perform what a part of the protocol asks for, and return what it returns."""
    try:
        request = next(steps)
        while True:
            try:
                answer = _wait(request.seconds) if isinstance(request, Wait) else client.perform(request)
            except BaseException as error:  # noqa: BLE001 - goes into the protocol, which ends or raises it again
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as stop:
        found: T = stop.value
        return found


def _wait(seconds: float) -> Answer:
    # Writers that were told to slow down together shall not come back together.
    time.sleep(seconds * random.uniform(0.5, 1.5))  # noqa: S311 - no secret
    return _NOTHING
