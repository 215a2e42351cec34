"""What the errors of obstore mean: it says the status of an answer in words only."""

from __future__ import annotations

import dataclasses
import enum
import errno
import re
from typing import Final

from treering._store.objects.foreign_names import how_to_remove
from treering._store.objects.obstore_stores import was_led_away
from treering._store.objects.requests import Answer, Status

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


def panic_of(error: BaseException) -> RequestFailure | None:
    """Return what a panic of obstore is, which is no ``Exception``; None for any other error."""
    if type(error).__name__ != "PanicException":
        return None
    return RequestFailure(Cause.INVALID, f"the client panicked: {_reason(str(error))}", errno.EINVAL)


def _other_failure(error: BaseException, kind: str, text: str, status: int, reason: str) -> RequestFailure:
    slow_down = status in _BUSY or _says(text, _SLOW)
    if slow_down or status in _PASSING or "RequestTimeout" in text:
        return RequestFailure(Cause.PASSING, reason, errno.EAGAIN, slow_down)
    if "builder error" in text:
        reason = f"http:// needs AWS_ALLOW_HTTP=true, or treering.at(url, endpoint=...): {reason}"
        return RequestFailure(Cause.INVALID, reason, errno.EINVAL)
    invalid = isinstance(error, ValueError) or kind == "InvalidPathError" or "Received redirect" in text
    if invalid or 300 <= status < 500:  # noqa: PLR2004
        return RequestFailure(Cause.INVALID, reason, errno.EINVAL)
    if status == 501 or kind in {"NotSupportedError", "NotImplementedError"}:  # noqa: PLR2004
        return RequestFailure(Cause.INVALID, reason, errno.ENOTSUP)
    if isinstance(error, OSError):
        return RequestFailure(Cause.PASSING, reason, error.errno or errno.EIO)
    return RequestFailure(Cause.PASSING, reason, errno.ETIMEDOUT if "timed out" in str(error) else errno.EIO)


def _says(text: str, words: tuple[str, ...]) -> bool:
    return any(word in text for word in words)


def _reason(text: str) -> str:
    """Return the part of a message that says why, on one line."""
    _, found, after = text.partition("Server returned non-2xx ")
    if (told := _TOLD.search(after)) is not None:
        after = f"{after.partition('<')[0]}{told[1]}: {told[2]}"
    line = " ".join(((found and after) or text).split()).rstrip(" :")
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."
