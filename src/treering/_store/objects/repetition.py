"""Requests that are made again until they are answered, and ranges of which several are under way."""

from __future__ import annotations

import dataclasses
import enum
import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from treering._printable import hide_secrets, printable
from treering._store.objects.obstore_stores import was_led_away
from treering._store.objects.requests import FIRST_PAUSE, PATIENCE, Answer, Status
from treering._values.telemetry import LOGGER, TRAFFIC
from treering._values.timing import growing_pauses
from treering.errors import UnsupportedError

_STATUS: Final = re.compile(r"status code: (\d{3})|^HTTP (\d{3})\b")
# What a server says in XML.
_TOLD: Final = re.compile(r"<Code>([^<]*)</Code>.*?<Message>([^<]*)</Message>", re.DOTALL)
_UNCONNECTED: Final = re.compile(r'\bkind: Connect,.*?(?:message|error): "([^"]*)"', re.DOTALL)
_LONGEST_REASON: Final = 400
# What is named: an object may be called like any of the words that are looked for.
_NAMED: Final = re.compile(
    r"https?://\S+|(?<=at location ).*?(?=: Error performing|$)|<(Key|Resource|BucketName)>.*?</\1>", re.DOTALL
)
# What some servers say with a status that stands for something else too.
_DENIED: Final = ("AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationFailed")
_DENIALS: Final = frozenset({"PermissionDeniedError", "UnauthenticatedError", "PermissionError"})
_FOREIGN: Final = re.compile(r'invalid path: .*?Path "(.*?)"(?:: Encountered| contained)', re.DOTALL)
_NO_BUCKET: Final = ("NoSuchBucket", "ContainerNotFound", "The specified bucket does not exist")
_SLOW: Final = ("SlowDown", "ServerBusy", "rateLimitExceeded", "TooManyRequests")
_PASSING: Final = frozenset({408, 425, 429})
_BUSY: Final = frozenset({429, 503})
_NOT_OBSTORE: Final = (OSError, ValueError)


class Cause(enum.Enum):
    """Why a request failed."""

    MISSING = "missing"
    REFUSED = "refused"
    CONFLICT = "conflict"
    """Two changes met, and neither is known to have failed."""
    DENIED = "denied"
    INVALID = "invalid"
    """The request can never succeed."""
    PASSING = "passing"
    """It may succeed when it is made again."""


class ShortAnswer(OSError):
    """An answer with fewer bytes than it should have, or other ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class RequestFailure:
    """Why a request failed, and what is said of it."""

    cause: Cause
    reason: str
    number: int
    """The errno of the error that says so."""
    slow_down: bool = False
    """Whether the bucket asks for fewer requests."""
    unconnected: bool = False
    """Whether there was no connection, so that the bucket has never seen the request."""
    foreign: str = ""
    """The name of another program's object, which obstore does not read."""

    def answer(self, shown: str, right: str = "", *, first: str = "") -> Answer:
        """Return the answer that it is; ``right`` is what the request needs, ``first`` what failed before any other.

        Raises:
            PermissionError: the bucket denies it.
            OSError: it can never succeed.
        """
        if self.cause is Cause.MISSING:
            return Answer(Status.MISSING)
        if self.cause is Cause.REFUSED:
            return Answer(Status.REFUSED)
        if self.cause in {Cause.PASSING, Cause.CONFLICT}:
            return Answer(Status.NO_ANSWER, reason=f"{first} failed first: {self.reason}" if first else self.reason)
        raise self.error(shown, right)

    def error(self, shown: str, right: str = "") -> OSError:
        """Return the error that says what is wrong with the bucket."""
        if self.unconnected:
            what = f"no connection to the server of {shown} can be made; check its URL and the network"
            return OSError(self.number, f"{what} ({self.reason})")
        if self.cause is Cause.DENIED:
            what = f"{shown} denies it to these credentials; check them and their rights{right and f', {right}'}"
            return PermissionError(errno.EACCES, f"{what} ({self.reason})")
        if self.foreign:
            what = f"{shown} has another program's object under a name that cannot be read, so that nothing is listed"
            return OSError(self.number, f"{what}; remove it: {how_to_remove(shown, self.foreign)}")
        what = "does not answer" if self.cause in {Cause.PASSING, Cause.CONFLICT} else "refuses it"
        return OSError(self.number, f"{shown} {what} ({self.reason})")


def failure_of(error: BaseException) -> RequestFailure:
    """Return what an error of obstore means; any other one is raised again.

    Example:
        >>> failure_of(FileNotFoundError("Object at location a not found")).cause
        <Cause.MISSING: 'missing'>
    """
    kind = type(error).__name__
    if kind == "PanicException":  # which is no ``Exception``
        return RequestFailure(Cause.INVALID, f"the client panicked: {_reason(str(error))}", errno.EINVAL)
    text, _, details = str(error).partition("\n\nDebug source")
    reason = _reason(text) or kind
    text = _NAMED.sub("", text)
    found = _STATUS.search(text)
    status = int(found[1] or found[2]) if found else 0
    if isinstance(error, ShortAnswer | TimeoutError | ConnectionError):
        return RequestFailure(Cause.PASSING, reason, error.errno or errno.EIO)
    if not isinstance(error, _NOT_OBSTORE) and not type(error).__module__.startswith("obstore"):
        raise error
    if any(word in text for word in _NO_BUCKET):
        # Not ENOENT: that is told of a place in which others came between.
        return RequestFailure(Cause.INVALID, f"the bucket does not exist; make it first: {reason}", errno.ENODEV)
    if status in {401, 403} or kind in _DENIALS or _says(text, _DENIED):
        return RequestFailure(Cause.DENIED, reason, errno.EACCES)
    if (foreign := _FOREIGN.search(text)) is not None:
        return RequestFailure(Cause.INVALID, reason, errno.EINVAL, foreign=foreign[1])
    if status == 409:  # noqa: PLR2004 - Azure says so of what is there; S3 where two changes met
        return RequestFailure(Cause.REFUSED if "BlobAlreadyExists" in text else Cause.CONFLICT, reason, errno.EAGAIN)
    if status == 412 or kind in {"AlreadyExistsError", "PreconditionError"}:  # noqa: PLR2004
        return RequestFailure(Cause.REFUSED, reason, errno.EEXIST)
    if status == 404 or isinstance(error, FileNotFoundError):  # noqa: PLR2004
        return RequestFailure(Cause.MISSING, reason, errno.ENOENT)
    if was_led_away(details):
        reason = f"its endpoint sends requests on to another host, and credentials are for one host alone: {reason}"
        return RequestFailure(Cause.INVALID, reason, errno.EINVAL)
    if (unconnected := _UNCONNECTED.search(details)) is not None:
        return RequestFailure(Cause.PASSING, f"{unconnected[1]}: {reason}", errno.EHOSTUNREACH, unconnected=True)
    return _other_failure(error, kind, text, status, reason)


def _other_failure(error: BaseException, kind: str, text: str, status: int, reason: str) -> RequestFailure:
    slow_down = status in _BUSY or _says(text, _SLOW)
    if slow_down or status in _PASSING or "RequestTimeout" in text:
        return RequestFailure(Cause.PASSING, reason, errno.EAGAIN, slow_down)
    if "builder error" in text:
        reason = f"http:// needs AWS_ALLOW_HTTP=true, or treering.bucket(url, endpoint=...): {reason}"
        return RequestFailure(Cause.INVALID, reason, errno.EINVAL)
    invalid = isinstance(error, ValueError) or kind == "InvalidPathError" or "Received redirect" in text
    if invalid or 300 <= status < 500:  # noqa: PLR2004
        return RequestFailure(Cause.INVALID, reason, errno.EINVAL)
    if status == 501 or kind in {"NotSupportedError", "NotImplementedError"}:  # noqa: PLR2004
        return RequestFailure(Cause.INVALID, reason, errno.ENOTSUP)
    if isinstance(error, OSError):
        return RequestFailure(Cause.PASSING, reason, error.errno or errno.EIO)
    return RequestFailure(Cause.PASSING, reason, errno.ETIMEDOUT if "timed out" in str(error) else errno.EIO)


def how_to_remove(shown: str, name: str) -> str:
    r"""Return the command that removes an object of that name, or all below a name that ends in a slash.

    Example:
        >>> how_to_remove("s3://bucket", "run//x"), how_to_remove("gs://bucket", "run/../")
        ("aws s3 rm 's3://bucket/run//x'", "gcloud storage rm --recursive 'gs://bucket/run/../'")
    """
    scheme, _, bucket = shown.partition("://")
    everything = " --recursive" if name.endswith("/") else ""
    if scheme in {"s3", "gs"}:
        return f"{'aws s3' if scheme == 's3' else 'gcloud storage'} rm{everything} {_quoted(f'{shown}/{name}')}"
    what = f"delete-batch --source {bucket} --pattern {_quoted(f'{name}*')}"
    return f"az storage blob {what if everything else f'delete --container-name {bucket} --name {_quoted(name)}'}"


def _quoted(text: str) -> str:
    """Return a word as shells take it."""
    plain = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'" if text.isprintable() and "'" not in text else f"$'{printable(plain)}'"


def _says(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)


def _reason(text: str) -> str:
    """Return the part of a message that says why, on one line."""
    _, found, after = text.partition("Server returned non-2xx ")
    if (told := _TOLD.search(after)) is not None:
        after = f"{after.partition('<')[0]}{told[1]}: {told[2]}"
    line = " ".join(((found and after) or text).split()).rstrip(" :")
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."


_THREADS: Final = 8
_FIRST_SLOW_PAUSE: Final = 1.0
_LONGEST_PAUSE: Final = 15.0
_FIRST_CONTACT: Final = 10.0
"""Seconds in which a server must be reached that never was: its URL may be wrong."""

_ANEW: Final = 5.0

PASSING: Final = frozenset({Cause.PASSING, Cause.CONFLICT})
"""Why a request is made again."""


def requests_at_once(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many requests this process makes at once: more would only wait for each other in the network.

    Raises:
        UnsupportedError: the environment has no number of them.

    Example:
        >>> requests_at_once({}), requests_at_once({"TREERING_BUCKET_REQUESTS": "4"})
        (16, 4)
    """
    text = environment.get("TREERING_BUCKET_REQUESTS") or "16"
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UnsupportedError(f"TREERING_BUCKET_REQUESTS is {text!r:.100}, but must be a number of requests")
    return int(text)


_SLOTS = threading.BoundedSemaphore(requests_at_once())
"""Of this process, beside the parts of uploads."""
if hasattr(os, "register_at_fork"):
    # The requests that were under way are not those of a fork.
    os.register_at_fork(after_in_child=lambda: globals().update(_SLOTS=threading.BoundedSemaphore(requests_at_once())))


@dataclasses.dataclass(slots=True)
class _Silence:
    """What is known of a server that does not answer: since when, and what was asked first."""

    since: float
    first: str
    last: float
    over: bool = False
    """Whether a request was given up."""


class RepeatingClient:
    """A client that makes a request again until it is answered, or its patience is over.

    The patience is that with the server, not with each request: it is counted from the first one that was not answered
    to the next answer. What is asked after it is over, as a save that failed does to remove its data, is asked once. A
    call that begins later than that has the whole patience again.

    Args:
        shown: the bucket or server, as messages call it.
        patience: seconds after which nothing is asked again that was not answered.
    """

    def __init__(self, shown: str, patience: float = PATIENCE) -> None:
        self.shown = shown
        self._patience = patience
        self._reached = False
        self._silence: _Silence | None = None

    @property
    def patience(self) -> float:
        """Seconds after which nothing is asked again that was not answered; below 0 where that is so already."""
        silence = self._silence
        if silence is None or (silence.over and time.monotonic() - silence.last > _ANEW):
            return self._patience
        return -1.0 if silence.over else self._patience - (time.monotonic() - silence.since)

    def _renew(self) -> bool:
        """Forget credentials that were denied; False where there are no others."""
        return False

    def _note_silence(self, begun: float, what: str) -> _Silence:
        """Note that a request that began then was not answered; return what is known since the last answer."""
        self._silence = silence = self._silence or _Silence(begun, what, begun)
        silence.last = time.monotonic()
        return silence

    def _repeat(self, call: Callable[[], Answer], what: str, right: str = "", *, once: bool = False) -> Answer:
        """Make a request, called ``what``, once, or until it is answered; ``right`` is what it needs."""
        if self.patience == self._patience:
            self._silence = None
        begun = time.monotonic()
        pauses = growing_pauses(FIRST_PAUSE, _LONGEST_PAUSE)
        while True:
            try:
                with _SLOTS:
                    TRAFFIC.add(requests=1)
                    answer = call()
                    self._reached, self._silence = True, None
                    return answer
            except BaseException as error:  # noqa: BLE001 - a panic is no Exception; what is none of the server's is raised again there
                failure = failure_of(error)
            self._reached = self._reached or not failure.unconnected
            patience = self._patience if self._reached else min(self._patience, _FIRST_CONTACT)
            if failure.cause is Cause.DENIED and self._renew():
                continue  # with new credentials; what was denied has not happened
            if failure.cause not in PASSING:
                self._silence = None
                if failure.cause is Cause.REFUSED and not once:  # it says nothing about what is there
                    failure = dataclasses.replace(failure, cause=Cause.INVALID, number=errno.EPROTO)
                return failure.answer(self.shown, right)
            silence = self._note_silence(begun, what)
            pause = next(pauses) * (_FIRST_SLOW_PAUSE / FIRST_PAUSE if failure.slow_down else 1)
            pause = min(pause, _LONGEST_PAUSE) * random.uniform(0.5, 1.0)  # noqa: S311 - no secret
            # Where others are answered, this one has its own time.
            if once or silence.over or time.monotonic() + pause > min(begun, silence.since) + patience:
                silence.over = silence.over or not once
                if not (once or self._reached):
                    raise failure.error(self.shown)
                return failure.answer(self.shown, first=silence.first)
            TRAFFIC.add(retries=1)
            LOGGER.info("%s: %s; next try in %.1f s", self.shown, printable(hide_secrets(failure.reason)), pause)
            time.sleep(pause)
