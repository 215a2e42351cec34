"""What the processes of a job write into their messages: strict JSON, and never believed where it is damaged."""

from __future__ import annotations

import base64
import dataclasses
import enum
import functools
import re
from collections.abc import Mapping
from typing import Any, Final

from treering import errors
from treering._codec.documents import json_text, member, parse_json
from treering._values.checkpoint_names import ATTEMPT
from treering.errors import CorruptError, NotSharedError, ProcessFailedError, TimedOutError, TreeringError

# What another process raised is raised here as the same class where a caller would do the same about it.
_CLASSES: Final[dict[str, type[TreeringError]]] = {
    name: known
    for name, known in vars(errors).items()
    if isinstance(known, type) and issubclass(known, TreeringError) and known is not TreeringError
}
_LONGEST_TEXT: Final = 4000
_PROCESS: Final = re.compile(r"0|[1-9]\d{0,8}")


class VoteStage(enum.StrEnum):
    """How far a process is with an attempt."""

    PREPARING = "at work"
    """It knows of the attempt and writes its data."""
    PREPARED = "written"
    """Its data is durable; it is not withdrawn unless process 0 says that the attempt failed."""
    FAILED = "failed"
    """It will not take part."""
    LEFT = "seen"
    """It has left: of the attempt it only removes the messages of those that hand in to it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a process, or an attempt, failed."""

    name: str
    """Name of the error's class in `treering.errors`; ``ProcessFailedError`` for a class that is none of ours."""
    message: str
    """What it says."""
    hint: str | None = None
    """What it says to do."""
    errno: int | None = None
    """The number of the system's refusal."""
    missing: tuple[int, ...] = ()
    """Processes that did not come."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an error.

        Example:
            >>> Failure.of(KeyError("a"))
            Failure(name='ProcessFailedError', message="KeyError: 'a'", hint=None, errno=None, missing=())
        """
        for known in type(error).__mro__:
            if isinstance(error, TreeringError) and _CLASSES.get(known.__name__) is known:
                text = str(error).removesuffix(f"; {error.hint}") if error.hint else str(error)  # its place is in it
                hint = error.hint[:_LONGEST_TEXT] if error.hint else None
                number = number if type(number := getattr(error, "errno", None)) is int else None
                missing = error.missing if isinstance(error, TimedOutError) else ()
                return cls(name=known.__name__, message=text[:_LONGEST_TEXT], hint=hint, errno=number, missing=missing)
        message = ": ".join(filter(None, (type(error).__name__, str(error)[:_LONGEST_TEXT])))
        return cls(name=ProcessFailedError.__name__, message=message)

    def attribute_to(self, who: str) -> Failure:
        """Return the same with the process that it happened to, in wire form.

        Example:
            >>> Failure.of(KeyError("a")).attribute_to("process 3 (host, pid 7)").message
            "process 3 (host, pid 7): KeyError: 'a'"
        """
        return dataclasses.replace(self, message=f"{who}: {self.message}")

    def to_error(self, undone: str, processes: tuple[int, ...]) -> TreeringError:
        """Return the error to raise where it did not happen.

        Args:
            undone: what could not be done.
            processes: the numbers of those that failed.

        Example:
            >>> Failure.of(errors.ExistsError("it is there")).attribute_to("process 0").to_error("no", (0,))
            ExistsError('no: process 0: it is there')
        """
        error = _CLASSES.get(self.name, ProcessFailedError)(f"{undone}: {self.message}", hint=self.hint)
        if isinstance(error, OSError) and self.errno is not None:
            error.errno = self.errno
        if isinstance(error, TimedOutError):
            error.missing = self.missing
        if isinstance(error, ProcessFailedError | NotSharedError):
            error.processes = processes
        return error

    def fit(self, most: int) -> Failure:
        """Return the same, or with no hint and with as much of the message as has a JSON of ``most`` bytes.

        Example:
            >>> Failure.of(ValueError("no" * 1000)).fit(110).message
            'ValueError: nonon...'
        """
        short, length = self, most
        while len(json_text(short.to_node())) > most and length:
            length = length * 3 // 4
            cut = f"{self.message[:length]}..." if len(self.message) > length else self.message
            short = dataclasses.replace(self, message=cut, hint=None, missing=())
        return short

    def to_node(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        node = dataclasses.asdict(self)
        return {"class": node.pop("name"), **node}

    @classmethod
    def from_node(cls, node: dict[str, Any], what: str) -> Failure:
        """Rebuild a failure from its document.

        Raises:
            CorruptError: it is not the document of a failure.
        """
        hint, number = node.get("hint"), node.get("errno")
        if type(hint) not in (str, type(None)) or type(number) not in (int, type(None)):
            raise CorruptError(f"{what} has a hint or an errno of another type")
        name, message = member(node, "class", str, what), member(node, "message", str, what)
        return cls(name=name, message=message, hint=hint, errno=number, missing=_read_numbers(node, "missing", what))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrepareMessage:
    """Process 0 has begun with a call."""

    number: int
    """Which joint save of the job it is."""
    attempt: str
    """Its attempt."""
    signature: bytes | None
    """What process 0 is saving, for comparison; None where a message of its own holds it."""
    digest: str = ""
    """The SHA-256 of the signature in that message, if there is one."""
    who: str
    """Where process 0 runs."""
    processes: int
    """How many processes the job has: `treering doctor` tells which of them have said nothing."""
    fresh: bool = False
    """Whether process 0 has made no other save there."""

    def encode(self) -> bytes:
        """Return the content of the message.

        Example:
            >>> message = PrepareMessage(number=1, attempt="0123456789abcdef", signature=b"ab", who="host", processes=2)
            >>> PrepareMessage.decode(message.encode()) == message
            True
        """
        node = dataclasses.asdict(self)
        node["signature"] = None if self.signature is None else base64.b64encode(self.signature).decode()
        return json_text(node).encode()

    @classmethod
    @functools.lru_cache(maxsize=8)  # a process that polls reads the same few bytes again and again
    def decode(cls, data: bytes) -> PrepareMessage:
        """Return what a message says.

        Raises:
            CorruptError: it is damaged.
        """
        what = "the message of process 0"
        node = _read_object(data, what, number=int, attempt=str, digest=str, who=str, processes=int)
        if not ATTEMPT.fullmatch(node["attempt"]):  # it becomes the name of a folder
            raise CorruptError(f"{what} names no attempt")
        fields: dict[str, Any] = {field.name: node.get(field.name) for field in dataclasses.fields(cls)}
        fields["fresh"] = fields["fresh"] is True
        if fields["digest"]:
            if fields["signature"] is not None:
                raise CorruptError(f"{what} holds a signature and the digest of another")
        else:
            fields["signature"] = _decode_bytes(member(node, "signature", str, what), what)
        return cls(**fields)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VoteMessage:
    """What a process says of its part of an attempt."""

    stage: VoteStage
    """How far it is."""
    who: str
    """Where it runs."""
    payload: bytes = b""
    """What process 0 needs for the commit, once it is written."""
    failure: Failure | None = None
    """Why it failed."""

    def encode(self) -> bytes:
        """Return the content of the message.

        Example:
            >>> message = VoteMessage(stage=VoteStage.PREPARED, who="host, pid 7", payload=b"checksums")
            >>> VoteMessage.decode(message.encode()) == message
            True
        """
        node: dict[str, Any] = {"stage": self.stage.value, "who": self.who}
        if self.payload:
            node["payload"] = base64.b64encode(self.payload).decode()
        if self.failure:
            node["failure"] = self.failure.to_node()
        return json_text(node).encode()

    @classmethod
    def decode(cls, data: bytes) -> VoteMessage:
        """Return what a message says.

        Raises:
            CorruptError: it is damaged.
        """
        what = "the message of a process"
        node = _read_object(data, what, stage=str, who=str)
        try:
            stage = VoteStage(node["stage"])
        except ValueError as error:
            raise CorruptError(f"{what} is of no stage: {error}"[:_LONGEST_TEXT]) from None
        failure = Failure.from_node(member(node, "failure", dict, what), what) if "failure" in node else None
        if (failure is None) is (stage is VoteStage.FAILED):
            raise CorruptError(f"{what} says {stage.value!r} and not why, or why and not that")
        payload = _decode_bytes(member(node, "payload", str, what), what) if "payload" in node else b""
        return cls(stage=stage, who=node["who"], payload=payload, failure=failure)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SumMessage:
    """What a process hands on for those whose votes it collects, and for itself."""

    payloads: Mapping[int, bytes] = dataclasses.field(default_factory=dict)
    """What process 0 needs for the commit, by process; none where there are failures, or where it is too much."""
    failures: Mapping[int, Failure] = dataclasses.field(default_factory=dict)
    """Why processes failed, with their names."""

    def encode(self) -> bytes:
        """Return the content of the message.

        Example:
            >>> message = SumMessage(payloads={1: b"one", 33: b"more"})
            >>> SumMessage.decode(message.encode()) == message
            True
        """
        node = {
            "payloads": {str(this): base64.b64encode(payload).decode() for this, payload in self.payloads.items()},
            "failures": {str(this): failure.to_node() for this, failure in self.failures.items()},
        }
        return json_text(node).encode()

    @classmethod
    def decode(cls, data: bytes) -> SumMessage:
        """Return what a message says.

        Raises:
            CorruptError: it is damaged.
        """
        what = "the message of a process that collects votes"
        node = _read_object(data, what, payloads=dict, failures=dict)
        if not all(_PROCESS.fullmatch(this) for this in (*node["payloads"], *node["failures"])):
            raise CorruptError(f"{what} names a process that is not a number")
        payloads, failures = node["payloads"], node["failures"]
        return cls(
            payloads={int(this): _decode_bytes(member(payloads, this, str, what), what) for this in payloads},
            failures={int(this): Failure.from_node(member(failures, this, dict, what), what) for this in failures},
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionMessage:
    """What became of an attempt."""

    who: str
    """Where process 0 runs."""
    failure: Failure | None = None
    """Why nothing was committed; None when it was."""
    processes: tuple[int, ...] = ()
    """Those that failed."""
    in_doubt: bool = False
    """Whether the data has to stay although it failed: the commit may have happened."""

    def encode(self) -> bytes:
        """Return the content of the message.

        Example:
            >>> message = DecisionMessage(who="host, pid 7", failure=Failure.of(ValueError("no")), processes=(3,))
            >>> DecisionMessage.decode(message.encode()) == message
            True
        """
        node: dict[str, Any] = {"committed": self.failure is None, "who": self.who}
        if self.failure:
            node |= {"failure": self.failure.to_node(), "processes": list(self.processes), "kept": self.in_doubt}
        return json_text(node).encode()

    @classmethod
    def decode(cls, data: bytes) -> DecisionMessage:
        """Return what a message says.

        Raises:
            CorruptError: it is damaged.
        """
        what = "the decision of process 0"
        node = _read_object(data, what, who=str, committed=bool)
        if node["committed"]:
            if "failure" in node:
                raise CorruptError(f"{what} says both that it is committed and that it failed")
            return cls(who=node["who"])
        failure = Failure.from_node(member(node, "failure", dict, what), what)
        processes, in_doubt = _read_numbers(node, "processes", what), member(node, "kept", bool, what)
        return cls(who=node["who"], failure=failure, processes=processes, in_doubt=in_doubt)


def _read_object(data: bytes, what: str, **kinds: type[Any]) -> dict[str, Any]:
    """Return the object that a message is, which has at least those members, each of that kind."""
    try:
        node = parse_json(data.decode("ascii"), what)
    except UnicodeDecodeError as error:
        raise CorruptError(f"{what} is not JSON in ASCII", offset=error.start) from None
    for name, kind in kinds.items():
        member(node, name, kind, what)
    return dict(node)


def _read_numbers(node: dict[str, Any], name: str, what: str) -> tuple[int, ...]:
    numbers = member(node, name, list, what)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise CorruptError(f"{what} names a process that is not a number")
    return tuple(numbers)


def _decode_bytes(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:  # not in ASCII, too
        raise CorruptError(f"{what} holds bytes that are not base64") from None
