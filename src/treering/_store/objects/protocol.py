"""How a document in a bucket is changed so that nothing is lost: requests and what their answers mean, without I/O.

``docs/design/buckets.md`` says why. The **key** is the object ``treering.json`` of a checkpoint: an index or a
tombstone. Each function here is a generator of `Steps`: `drive` performs its requests, and ``torture`` does so in a
simulation in which they are lost, late and repeated. ``expired`` tells when to stop asking again. Every generator
raises the ``OSError`` of a bucket that refuses, and ``OSError`` with EIO where no answer came until then.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from treering._codec.documents import SignedForm, is_whole
from treering._codec.key_document import (
    attempts_in,
    is_tombstone,
    placeholder,
    read_attempts,
    superseded_in,
    tombstone_of,
)
from treering._store.api import Held, Outcome
from treering._store.objects.requests import (
    FIRST_PAUSE,
    Absent,
    Answer,
    Condition,
    Delete,
    Get,
    Head,
    ObjectVersion,
    Put,
    Request,
    Status,
    Steps,
    Wait,
)
from treering._values.leaves_names import INDEX as LEAVES_INDEX
from treering._values.timing import growing_pauses
from treering.errors import CorruptError, FormatError, UnsupportedError

Expired: TypeAlias = Callable[[], bool]

LONGEST_DELAY: Final = 86400.0
"""Seconds after which no request arrives any more: servers refuse a signature long before that."""

_LONGEST_PAUSE: Final = 3.0


class Content(NamedTuple):
    """What stands at a name."""

    data: bytes
    version: ObjectVersion
    modified: float
    """When it was put, in POSIX seconds by the clock of the bucket."""


def find_base(key: str, expired: Expired, *, absent: bool = False) -> Steps[Content]:
    """Return what an attempt at the key is based on: the index or tombstone there, or a placeholder that it puts there.

    The caller compares it with what it saw before: another writer may have put an index there meanwhile. ``absent``
    says that it saw nothing there, so the placeholder can be put at once.
    """
    pauses = map(Wait, growing_pauses(FIRST_PAUSE, _LONGEST_PAUSE))
    found = None if absent else (yield from read(key, expired))
    while found is None:
        # A new nonce each time: were it put a second time, the version of an old placeholder would recur.
        data = placeholder()
        answer = yield Put(key, data, Absent.ABSENT)
        if answer.status is Status.DONE and answer.found is not None:
            return Content(data, answer.found.version, answer.found.modified)
        found = yield from read(key, expired)
        if found is None:
            if expired():
                raise _unanswered("the key could not be created", answer)
            yield next(pauses)
    return found


def make_marker(key: str, marker: str, base: ObjectVersion, expired: Expired, *, probe: bool) -> Steps[bool]:
    """Put the marker of an attempt there, before any of its data.

    Args:
        key: the key.
        marker: the name of the marker.
        base: the version of the key that the attempt is based on.
        expired: when to stop asking again.
        probe: whether to find out with it that the endpoint heeds conditions: at the first save to it.

    Returns:
        Whether the probe has seen that the endpoint refuses to delete another version.

    Raises:
        FileExistsError: another marker is there.
        FileNotFoundError: another writer changed the key and swept the marker: begin again.
        OSError: with ENOTSUP, the endpoint does not heed conditions; nothing may be saved there.
    """
    data, pauses = encode_marker(base), map(Wait, growing_pauses(FIRST_PAUSE, _LONGEST_PAUSE))
    told: ObjectVersion | None = None
    while True:
        answer = yield Put(marker, data, Absent.ABSENT)
        if answer.status is Status.DONE:
            told = None if answer.found is None else answer.found.version
            break
        found = yield from read(marker, expired)
        if found is not None and found.data == data:
            break
        if found is not None:
            raise FileExistsError(errno.EEXIST, f"the marker {marker!r} is there already")
        if expired():
            raise _unanswered("the marker could not be created", answer)
        yield next(pauses)
    return (yield from _probe(key, marker, data, base, expired, told=told)) if probe else False


def _probe(
    key: str, marker: str, data: bytes, base: ObjectVersion, expired: Expired, *, told: ObjectVersion | None
) -> Steps[bool]:
    """Try with the marker what the endpoint has to refuse, then what it has to do; ``told`` is its version."""
    # The base is a version of this bucket, and never that of the marker.
    wrong: tuple[tuple[Put | Delete, str], ...] = (
        (Put(marker, data, Absent.ABSENT), "replaced an object that had to be absent (If-None-Match)"),
        (Put(marker, data, base), "replaced an object of another version (If-Match)"),
        (Delete((marker,), base), "removed an object of another version (If-Match)"),
    )
    deletes = False
    for request, what in wrong:
        try:
            answer = yield from answered(request, expired)
        except PermissionError:
            if isinstance(request, Put):
                raise
            deletes = False  # nothing may be removed, so nothing of another version is
            continue
        deletes = answer.status is Status.REFUSED and answer.sure
        if answer.status is Status.DONE:
            unsafe = "it does not heed conditions, so two writers could overwrite each other"
            yield from _accuse(key, marker, base, expired, f"the server {what}: {unsafe}")
    found = yield from read(marker, expired)
    if found is None:
        raise _vanished()
    if told is not None and told.e_tag != found.version.e_tag and _bare(told) == _bare(found.version):
        # Something on the way changes it: a sweep would take each attempt for one that is based on an older version.
        what = f"the server says version {found.version.e_tag} of what was put as {told.e_tag}: it may compress answers"
        raise OSError(errno.ENOTSUP, what)
    # Where objects are retained or locked, this is refused: before any data.
    answer = yield from answered(Put(marker, data, found.version), expired)
    if answer.status is not Status.DONE:
        # A repetition meets the version that the first one made.
        now = yield from read(marker, expired)
        if now is None or now.data != data:
            raise _vanished()
        if now.version == found.version:
            what = "the server refuses to replace an object of the right version (If-Match)"
            yield from _accuse(key, marker, base, expired, what)
    return deletes


def _accuse(key: str, marker: str, base: ObjectVersion, expired: Expired, what: str) -> Steps[None]:
    """Raise for an endpoint that cannot be used, unless the marker may have been swept before."""
    found = yield from read(key, expired)
    yield Delete((marker,))
    if found is None or found.version != base:
        raise _vanished()
    raise OSError(errno.ENOTSUP, what)


def commit(key: str, index: bytes, base: ObjectVersion, attempt: str, expired: Expired) -> Steps[Outcome]:
    """Make ``index`` the document at the key if its base is still there; nothing but the key itself tells whether.

    Returns:
        UNKNOWN where no answer told until ``expired``: nothing of the attempt may be removed then.

    Raises:
        OSError: the bucket refused the first request: it is not committed.
    """
    return (yield from _swap(key, index, base, lambda found: _has_committed(found, attempt, key), expired))


def read_back(key: str, base: ObjectVersion, attempt: str, expired: Expired) -> Steps[Outcome]:
    """Find out, after a commit that was interrupted, what became of it; it may yet happen while the base is there."""
    found = yield from read(key, expired)
    if found is None or found.version == base:
        return Outcome.UNKNOWN
    return _has_committed(found, attempt, key) or Outcome.UNKNOWN


def _has_committed(found: Content, attempt: str, key: str = "") -> Outcome | None:
    """Tell from what replaced the base: DONE where the attempt is named as committed, None where that says nothing."""
    return Outcome.DONE if attempt in _attempts(found, key) else None


def sweep(key: str, marker: str, attempt: str, data: Sequence[str], expired: Expired) -> Steps[Held]:
    """Remove what an attempt left, if it can never commit: its data first, its marker last.

    Marker and data were listed before this is called. That order is the proof: whatever is read of the key now is newer
    than the base of an attempt whose marker was there, unless it is that base.

    Args:
        key: the key.
        marker: the name of the marker.
        attempt: the attempt.
        data: names of its data, none of which the key lists.
        expired: when to stop asking again.

    Returns:
        NO when it was swept; UNKNOWN where it may yet commit, or cannot be judged: nothing was removed then.
    """
    begun = yield from read(marker, expired)
    if begun is None:
        return Held.UNKNOWN
    found = yield from read(key, expired)
    if _may_commit(begun, found):
        return Held.UNKNOWN
    # An absent key proves nothing: to those who may not list, a bucket says so too of what it denies.
    committed = () if found is None else _attempts(found, key)
    if not committed:
        return Held.UNKNOWN
    # Of one that has committed the key lists the data, and only the marker is left over.
    names = () if attempt in committed else tuple(data)
    with contextlib.suppress(PermissionError):  # what may not be removed stays
        for some in filter(None, (names, (marker,))):
            yield from answered(Delete(some), expired)
    return Held.NO


def _may_commit(marker: Content, found: Content | None) -> bool:
    """Whether the attempt of a marker may be based on what stands at the key, as far as that is known."""
    base = read_marker(marker.data)
    if base is not None:
        return found is not None and found.version == base
    # Nothing can be read in it: it was copied from another kind of store, or is damaged. But its base is older than it.
    return found is None or found.modified < marker.modified + LONGEST_DELAY


def delete(key: str, expected: ObjectVersion, expired: Expired) -> Steps[Outcome]:
    """Replace the index of that version by a tombstone that lists its data: then there is no checkpoint any more."""
    found = yield from read(key, expired)
    if found is None or found.version != expected:
        return Outcome.LOST
    tombstone = tombstone_of(found.data, found.modified)
    gone = _attempts(found)[:1]

    def compare(now: Content) -> Outcome | None:
        if now.data == tombstone:
            return Outcome.DONE
        attempts = _attempts(now)
        if gone and gone == attempts[:1]:
            return Outcome.LOST  # it was fenced, so it is still there, and this tombstone can come no more
        # A fence, or another removal: the checkpoint is gone, and no other one took its place.
        return Outcome.DONE if gone and attempts[:1] == ("",) and gone[0] in attempts else None

    return (yield from _swap(key, tombstone, expected, compare, expired))


def delete_tombstone(key: str, expected: ObjectVersion, now: float, expired: Expired) -> Steps[Outcome]:
    """Delete the tombstone of that version, if it lists nothing and no request from before it can arrive any more.

    Only where the probe has proved that a conditional delete is one, and where nothing else is at the place.

    Args:
        key: the key.
        expected: the version of the tombstone.
        now: the time by the clock of the bucket.
        expired: when to stop asking again.

    Returns:
        LOST where it stays, for now or because another version is there.
    """
    found = yield from read(key, expired)
    if found is None:
        return Outcome.DONE
    if found.version != expected or now - found.modified < LONGEST_DELAY or not is_empty_tombstone(found):
        return Outcome.LOST
    pauses = map(Wait, growing_pauses(FIRST_PAUSE, _LONGEST_PAUSE))
    while True:
        try:
            answer = yield Delete((key,), expected)
        except PermissionError:
            return Outcome.LOST
        if answer.status in {Status.DONE, Status.MISSING}:
            return Outcome.DONE
        found = yield from read(key, expired)
        if found is None:
            return Outcome.DONE
        if found.version != expected or answer.status is Status.REFUSED:
            return Outcome.LOST  # where no version can be compared, it stays
        if expired():
            return Outcome.UNKNOWN
        yield next(pauses)


def swap(name: str, data: bytes, expected: ObjectVersion | None, expired: Expired) -> Steps[Outcome]:
    """Make ``data``, which has something random in it, the content of a small document of that version, or of none."""
    return (yield from _swap(name, data, expected or Absent.ABSENT, None, expired))


def read(name: str, expired: Expired, most: int | None = None) -> Steps[Content | None]:
    """Return what stands at a name, None where nothing does; its first ``most`` bytes where it is no document.

    Raises:
        OSError: the bucket refused, or no answer came.
    """
    answer = yield from answered(Get(name, most), expired)
    if most is None and answer.status is Status.DONE and not is_whole(answer.data):
        answer = yield from answered(Get(name), expired)  # a bit may have changed on the way
    if answer.status is Status.MISSING:
        return None
    if answer.status is not Status.DONE or answer.found is None:
        raise _unanswered(f"{name!r} could not be read", answer)
    return Content(answer.data, answer.found.version, answer.found.modified)


def _swap(
    name: str, data: bytes, condition: Condition, compare: Callable[[Content], Outcome | None] | None, expired: Expired
) -> Steps[Outcome]:
    """Put ``data`` under a condition, the same bytes again while that holds, until it is known what became of it.

    ``compare`` tells that from what has replaced the content that the condition names; None where that does not tell.
    Without one it is done where these bytes are there, unless a refusal says that another request put them there.
    """
    refused = True  # every answer so far was a sure refusal, so nothing of this can have happened, or can yet happen
    pauses = map(Wait, growing_pauses(FIRST_PAUSE, _LONGEST_PAUSE))
    most = len(data) + 1 if compare is None and not is_whole(data) else None  # a single file may be large
    while True:
        try:
            answer = yield Put(name, data, condition)
        except OSError as error:
            if refused:
                raise
            answer = Answer(Status.NO_ANSWER, reason=str(error))
        if answer.status is Status.DONE:
            return Outcome.DONE
        refused = refused and answer.status is not Status.NO_ANSWER and answer.sure
        try:
            found = yield from read(name, expired, most)
        except OSError:
            return Outcome.LOST if refused else Outcome.UNKNOWN
        if condition != (Absent.ABSENT if found is None else found.version):
            outcome = None
            if found is not None and compare is not None:
                outcome = compare(found)
            elif found is not None and found.data == data and not refused:
                outcome = Outcome.DONE
            return outcome or (Outcome.LOST if refused else Outcome.UNKNOWN)
        if expired():
            return Outcome.LOST if refused else Outcome.UNKNOWN
        yield next(pauses)


def answered(request: Request, expired: Expired) -> Steps[Answer]:
    """Make a request that does no harm when it is made twice, until it is answered.

    Raises:
        OSError: no answer came.
    """
    pauses = map(Wait, growing_pauses(FIRST_PAUSE, _LONGEST_PAUSE))
    while True:
        answer = yield request
        if answer.status is not Status.NO_ANSWER:
            return answer
        if expired():
            raise _unanswered("no answer came", answer)
        yield next(pauses)


def _attempts(found: Content, key: str = "") -> tuple[str, ...]:
    """Return the attempts that the key names, its own first; none where it is damaged or newer."""
    try:
        # The index of leaves names them in another way.
        return (read_attempts if key.rpartition("/")[2] == LEAVES_INDEX else attempts_in)(found.data)
    except (CorruptError, FormatError, UnsupportedError):
        return ()


def is_empty_tombstone(found: Content) -> bool:
    """Whether what stands at the key is a tombstone that lists no data; one that is damaged is none."""
    try:
        return is_tombstone(found.data) and not any(waiting.files for waiting in superseded_in(found.data))
    except (CorruptError, FormatError, UnsupportedError):
        return False


def _unanswered(what: str, answer: Answer) -> OSError:
    reason = f" ({answer.reason})" if answer.reason else ""
    return OSError(errno.EIO, f"{what}: the bucket does not answer{reason}")


def _bare(version: ObjectVersion) -> str:
    return version.e_tag.removeprefix("W/").strip('"')


def _vanished() -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "another writer changed the checkpoint and removed the marker")


def put_file(name: str, data: bytes, expired: Expired, *, new: bool = False) -> Steps[Outcome]:
    """Make ``data`` the content of a single file, on condition that what it replaces is still what was read before.

    So no request of this save can be done once a later save has replaced that, if the version never recurs: it recurs
    where it says no more than the content does, and the bytes are those of an earlier save.

    Args:
        name: the name.
        data: its bytes.
        expired: when to stop asking again.
        new: whether nothing may be there.

    Returns:
        DONE; LOST where it was to be new and is not, or where others replace it again and again; UNKNOWN where it may
        have been put, or may yet be.

    Raises:
        OSError: the bucket refused, or did not answer: nothing has happened.
    """
    while True:
        found = None if new else (yield from answered(Head(name), expired)).found
        base = None if found is None else found.version
        outcome = yield from swap(name, data, base, expired)
        # After a sure refusal these bytes were never there, so they may replace what is there now. Those that may have
        # been there are not put once more: their version would recur.
        if new or outcome is not Outcome.LOST or expired():
            return outcome


_FORM: Final = SignedForm("treering_marker", 1, "the marker", hint="only its age says whether its attempt can commit")


def encode_marker(base: ObjectVersion) -> bytes:
    """Return the marker of an attempt that is based on that version.

    Example:
        >>> read_marker(encode_marker(ObjectVersion("a1", "17")))
        ObjectVersion(e_tag='a1', generation='17')
    """
    return _FORM.encode([("base", base.text())])


def read_marker(data: bytes) -> ObjectVersion | None:
    """Return the base that a marker holds; None for what is damaged, newer, or the marker of another kind of store.

    Example:
        >>> read_marker(b"") is None
        True
    """
    try:
        return _FORM.read(data, _read_base)
    except (CorruptError, FormatError, UnsupportedError):
        return None


def _read_base(document: Any) -> ObjectVersion:
    base = document.get("base")
    if not isinstance(base, str) or not base:
        raise CorruptError("it names no base")
    return ObjectVersion.of_text(base)
