"""What the client of a bucket makes of answers that are late, short, wrong or missing."""

from __future__ import annotations

import base64
import builtins
import contextlib
import datetime
import errno
import http.server
import itertools
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import obstore
import pytest
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    InvalidPathError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import AzureStore, MemoryStore, S3Store

import treering as tr
from tests import faults, limits
from treering._codec.key_document import placeholder
from treering._store.api import Outcome
from treering._store.objects import client as obstore_client
from treering._store.objects import protocol, repetition
from treering._store.objects.client import ObstoreClient
from treering._store.objects.obstore_stores import StoreVariants
from treering._store.objects.reading import read_ranges
from treering._store.objects.repetition import Cause, failure_of, requests_at_once
from treering._store.objects.requests import (
    Absent,
    Answer,
    Copy,
    Delete,
    Get,
    Head,
    List,
    Listed,
    ObjectVersion,
    Put,
    Request,
    Status,
)
from treering._store.objects.store import ObjectRoot
from treering._store.objects.url import bucket_path
from treering._values.telemetry import TRAFFIC
from treering.errors import NotFencedWarning, StoreError, UnsupportedError
from treering.leaves import tree_serialize_leaves

Ask = Callable[..., Any]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let no time pass between two tries, and return how much would have."""
    waited: list[float] = []
    now = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: sum(waited) + next(now) * 1e-6, sleep=waited.append)
    monkeypatch.setattr(repetition, "time", clock)
    return waited


@pytest.fixture
def client() -> ObstoreClient:
    return ObstoreClient(MemoryStore(), "s3://bucket", patience=60)


def says(status: str, body: str = "") -> str:
    url = "http://127.0.0.1:1/bucket/a"
    return (
        f"Generic S3 error: Error performing GET {url} in 1ms - Server returned non-2xx status code: {status}: {body}"
    )


def fail(monkeypatch: pytest.MonkeyPatch, name: str, *errors: Exception) -> list[Any]:
    """Let a function of obstore raise these errors, one for each call, before it works; return its calls."""
    real: Ask = getattr(obstore, name)
    left, calls = list(errors), []

    def ask(*given: Any, **options: Any) -> Any:
        calls.append((given[1:], options))
        if left:
            raise left.pop(0)
        return real(*given, **options)

    monkeypatch.setattr(obstore, name, ask)
    return calls


PASSING = (
    GenericError(says("503 Service Unavailable", "<Error><Code>SlowDown</Code></Error>")),
    GenericError(says("500 Internal Server Error")),
    GenericError(says("429 Too Many Requests")),
    GenericError(says("408 Request Timeout")),
    GenericError(says("400 Bad Request", "<Error><Code>RequestTimeout</Code></Error>")),
    GenericError(
        "Generic S3 error: Error performing GET http://127.0.0.1:1/b/k in 2ms - HTTP error: error sending request"
    ),
    AlreadyExistsError(says("409 Conflict", "<Error><Code>ConditionalRequestConflict</Code></Error>")),
)


@pytest.mark.parametrize("error", PASSING)
def test_what_may_pass_is_asked_again_where_nothing_is_compared(
    error: Exception, client: ObstoreClient, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    client.perform(Put("a", b"one"))
    calls = fail(monkeypatch, "get", error, error)
    before = TRAFFIC.counts
    assert client.perform(Get("a")).data == b"one"
    assert (len(calls), len(pauses)) == (3, 2)
    assert TRAFFIC.text_since(before) == ", 3 requests, 2 retries, 3 B received"


@pytest.mark.parametrize("error", PASSING)
def test_a_comparison_is_asked_for_once(
    error: Exception, client: ObstoreClient, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fail(monkeypatch, "put", error, error)
    assert client.perform(Put("a", b"one", Absent.ABSENT)).status is Status.NO_ANSWER
    assert client.perform(Put("a", b"one", ObjectVersion("1"))).status is Status.NO_ANSWER
    assert (len(calls), pauses) == (2, [])


def test_a_server_that_asks_for_it_gets_longer_pauses(
    client: ObstoreClient, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "head", *[PASSING[1]] * 4)
    client.perform(Head("a"))
    usual = pauses.copy()
    pauses.clear()
    fail(monkeypatch, "head", *[PASSING[0]] * 4)
    client.perform(Head("a"))
    assert 0.05 <= usual[0] <= 0.1
    assert usual == sorted(usual)
    assert all(slow >= 4 * fast for slow, fast in zip(pauses, usual, strict=True))


def test_asking_ends(client: ObstoreClient, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "get", *[PASSING[1]] * 1000)
    answer = client.perform(Get("a"))
    assert answer.status is Status.NO_ANSWER
    assert "500 Internal Server Error" in answer.reason
    assert "127.0.0.1" not in answer.reason
    assert 30 < sum(pauses) <= 60


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (AlreadyExistsError(says("412 Precondition Failed")), Status.REFUSED),
        (PreconditionError(says("412 Precondition Failed")), Status.REFUSED),
        (AlreadyExistsError(says("409 Conflict", "<Code>BlobAlreadyExists</Code>")), Status.REFUSED),
        (FileNotFoundError(says("404 Not Found")), Status.MISSING),
    ],
)
def test_refusals_are_answers(
    error: Exception, status: Status, client: ObstoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "put", error)
    assert client.perform(Put("a", b"one", ObjectVersion("1"))).status is status


@pytest.mark.parametrize("name", ["get", "head", "put", "delete", "list", "list_with_delimiter_async"])
def test_a_refusal_of_what_has_no_condition_is_an_error(
    name: str, client: ObstoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fail(monkeypatch, name, PreconditionError(says("412 Precondition Failed")))
    requests: dict[str, Request] = {"get": Get("a"), "head": Head("a"), "put": Put("a", b""), "delete": Delete(("a",))}
    with pytest.raises(OSError, match=r"s3://bucket refuses it .*412") as caught:
        client.perform(requests.get(name, List("", deep=name == "list")))
    assert (len(calls), isinstance(caught.value, FileExistsError)) == (1, False)


@pytest.mark.parametrize(
    ("error", "number", "match"),
    [
        (PermissionDeniedError(says("403 Forbidden", "<Code>AccessDenied</Code>")), errno.EACCES, "s3://bucket denies"),
        (UnauthenticatedError(says("401 Unauthorized")), errno.EACCES, "credentials"),
        (GenericError(says("400 Bad Request", "<Code>ExpiredToken</Code>")), errno.EACCES, "ExpiredToken"),
        (GenericError(says("403 Forbidden")), errno.EACCES, "403"),
        (FileNotFoundError(says("404 Not Found", "<Code>NoSuchBucket</Code>")), errno.ENODEV, "does not exist"),
        (GenericError(says("400 Bad Request", "<Code>KeyTooLongError</Code>")), errno.EINVAL, "KeyTooLong"),
        (GenericError(says("501 Not Implemented")), errno.ENOTSUP, "501"),
        (GenericError("Generic S3 error: Received redirect without LOCATION, wrong region"), errno.EINVAL, "region"),
        (NotSupportedError("Operation not supported"), errno.ENOTSUP, "not supported"),
        (ValueError("Could not parse path"), errno.EINVAL, "parse path"),
        (InvalidPathError('Encountered object with invalid path: Path "a//b"'), errno.EINVAL, "a//b"),
    ],
)
def test_what_can_never_succeed_is_an_error_at_once(
    error: Exception, number: int, match: str, client: ObstoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = fail(monkeypatch, "put", error)
    with pytest.raises(OSError, match=match) as caught:
        client.perform(Put("a", b"one"))
    assert caught.value.errno == number
    assert isinstance(caught.value, PermissionError) == (number == errno.EACCES)
    assert len(calls) == 1


def test_other_errors_are_not_hidden(client: ObstoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "head", KeyError("a mistake of ours"))
    with pytest.raises(KeyError):
        client.perform(Head("a"))


class Shortened:
    """An answer of obstore with fewer bytes than it says."""

    def __init__(self, real: Any) -> None:
        self.meta, self.range, self._data = real.meta, real.range, bytes(real.bytes())[:-1]

    def bytes(self) -> builtins.bytes:
        return self._data

    def stream(self, **_: Any) -> Iterator[builtins.bytes]:
        yield from (self._data[start : start + 1000] for start in range(0, len(self._data), 1000))


def shorten(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    real, left = obstore.get, itertools.count()

    def get(*given: Any, **options: Any) -> Any:
        found = real(*given, **options)
        return Shortened(found) if next(left) < times else found

    monkeypatch.setattr(obstore, "get", get)


def test_a_short_answer_is_asked_for_again(
    client: ObstoreClient, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    version = client.perform(Put("a", bytes(range(250)) * 100)).found
    assert version is not None
    shorten(monkeypatch, 2)
    assert client.perform(Get("a", 100)).data == bytes(range(100))
    shorten(monkeypatch, 2)
    room = bytearray(20_000)
    read_ranges(client, "a", version.version, [(250, memoryview(room))])
    assert bytes(room) == bytes(range(250)) * 80
    assert len(pauses) == 4
    shorten(monkeypatch, 1000)
    assert client.perform(Get("a")).status is Status.NO_ANSWER
    with pytest.raises(OSError, match="19999 bytes of 20000 came"):
        read_ranges(client, "a", version.version, [(250, memoryview(room))])


def test_another_version_is_not_read(client: ObstoreClient) -> None:
    old = client.perform(Put("a", bytes(1000))).found
    client.perform(Put("a", bytes(1000)))
    assert old is not None
    with pytest.raises(FileNotFoundError):
        read_ranges(client, "a", old.version, [(0, memoryview(bytearray(10)))])
    client.perform(Delete(("a",)))
    with pytest.raises(FileNotFoundError):
        read_ranges(client, "a", old.version, [(0, memoryview(bytearray(10)))])


def test_an_empty_object_and_one_that_ignores_ranges_are_read(
    client: ObstoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.perform(Put("empty", b""))
    assert client.perform(Get("empty")).data == b""
    client.perform(Put("a", bytes(range(200))))
    for most in (None, 7, 200, 300):
        fail(monkeypatch, "get", GenericError("Generic S3 error: Received non-partial response when range requested"))
        assert client.perform(Get("a", most)).data == bytes(range(200))[:most]


def test_requests_at_once_are_bounded(client: ObstoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def head(store: Any, name: str) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.005)
        with lock:
            running[0] -= 1
        raise FileNotFoundError(name)

    monkeypatch.setattr(obstore, "head", head)
    with ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda number: client.perform(Head(f"{number}")), range(120)))
    assert {answer.status for answer in answers} == {Status.MISSING}
    assert 1 < most[0] <= 16


def test_many_names_are_deleted_in_few_requests(client: ObstoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fail(monkeypatch, "delete")
    names = tuple(f"a/{number}" for number in range(2500))
    for name in names[:3]:
        client.perform(Put(name, b"x"))
    assert client.perform(Delete(names)).status is Status.DONE
    assert len(calls) == 3
    assert client.perform(List("a/")).listed == []
    # GCS and Azure tell of one that is gone, and may stop there.
    client.perform(Put("b", b"x"))
    fail(monkeypatch, "delete", FileNotFoundError("Object at location a not found"))
    assert client.perform(Delete(("a", "b"))).status is Status.DONE
    assert client.perform(Head("b")).status is Status.MISSING


def test_names_are_listed_by_any_prefix(client: ObstoreClient) -> None:
    for name in ("run/a", "run/ab", "run/b", "run/ab/c", "run/ab/d/e", "runs"):
        client.perform(Put(name, b"x"))
    answer = client.perform(List("run/a"))
    assert [found.name for found in answer.listed] == ["run/a", "run/ab"]
    assert answer.places == ["run/ab"]
    deep = client.perform(List("run/ab", deep=True))
    assert sorted(found.name for found in deep.listed) == ["run/ab", "run/ab/c", "run/ab/d/e"]
    assert client.perform(List("nothing/")).listed == []
    assert max(found.name for found in client.perform(List("", deep=True)).listed) == "runs"


def test_without_the_right_to_list_what_is_denied_is_absent(
    client: ObstoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    denied = PermissionDeniedError(says("403 Forbidden", "<Code>AccessDenied</Code>"))
    fail(
        monkeypatch,
        "get",
        denied,
        denied,
        PermissionDeniedError(says("403 Forbidden", "<Code>InvalidAccessKeyId</Code>")),
    )
    with pytest.raises(PermissionError):
        client.perform(Get("a"))
    fail(monkeypatch, "list_with_delimiter_async", denied)
    with pytest.raises(PermissionError):
        client.perform(List("a/"))
    assert client.perform(Get("a")).status is Status.MISSING
    with pytest.raises(PermissionError):
        client.perform(Get("a"))


def test_only_uploads_to_this_machine_or_by_https_are_unsigned(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)

    def unsigned(endpoint: str | None, **config: Any) -> Any:
        more: Any = {} if endpoint is None else {"endpoint": endpoint}
        store = S3Store("b", access_key_id="x", secret_access_key="y", **more, **config)
        return StoreVariants(store, 30).variant(16 << 20, parts=True).config.get("unsigned_payload", False)

    assert unsigned("http://127.0.0.1:9000") in {True, "true"}
    assert unsigned("https://example.org") in {True, "true"}
    assert unsigned(None) in {True, "true"}
    assert not unsigned("http://example.org")
    assert unsigned("https://example.org", unsigned_payload=False) in {False, "false"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://example.org")
    assert not unsigned(None)


def test_the_time_that_a_request_may_take_grows_with_its_size() -> None:
    store = S3Store("b", access_key_id="x", secret_access_key="y", client_options={"timeout": "7s", "user_agent": "t"})
    variants = StoreVariants(store, 30)
    small, large = variants.variant(1000), variants.variant(12 << 20)
    assert (small.client_options["timeout"], large.client_options["timeout"]) == ("30000ms", "94000ms")
    assert small.client_options["user_agent"] == "t"
    assert small.retry_config["max_retries"] == 0
    assert variants.variant(2000) is small
    assert variants.variant(16 << 20, parts=True).retry_config["max_retries"] > 0


def test_an_upload_whose_last_answer_was_lost_is_looked_at(
    client: ObstoreClient, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = FileNotFoundError(says("404 Not Found", "<Code>NoSuchUpload</Code>"))
    with monkeypatch.context() as patched:
        fail(patched, "put", lost)
        with pytest.raises(OSError, match="NoSuchUpload"):
            client.put_parts("a", [b"treering"], 8)
    client.perform(Put("a", b"treering"))
    with monkeypatch.context() as patched:
        fail(patched, "put", lost, lost)
        client.put_parts("a", [b"treering"], 8)
        with pytest.raises(OSError, match="NoSuchUpload"):
            client.put_parts("a", [b"treerings"], 9)


def test_an_upload_that_failed_is_not_taken_for_done_by_an_older_object_of_its_size(
    client: ObstoreClient, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.lower(monkeypatch, whole_object=4)
    files = ObjectRoot(lambda _: (client, "model.safetensors"))
    path = bucket_path("s3://bucket/model.safetensors")
    files.write_file(path, [b"treering"], 8)
    with monkeypatch.context() as patched:
        fail(patched, "put", GenericError(says("500 Internal Server Error")))
        with pytest.raises(StoreError, match="500"):
            files.write_file(path, [b"gnireert"], 8)
    assert client.perform(Get("model.safetensors")).data == b"treering"


def test_no_answer_does_not_say_that_nothing_is_there(
    client: ObstoreClient, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    places = ObjectRoot(lambda found: (client, "/".join(found.parts[2:])))
    path = bucket_path("s3://bucket/a")
    client.perform(Put("a/b", b"one"))
    for call in ("head", "list_with_delimiter_async"):
        with monkeypatch.context() as patched:
            fail(patched, call, *[PASSING[1]] * 100)
            with pytest.raises(StoreError, match="could not read 's3://bucket/a': s3://bucket does not answer"):
                places.find(path)
    assert places.find(path) is not None


@pytest.mark.parametrize("denied", [False, True])
def test_a_late_request_does_not_undo_the_file_that_was_saved_after_it(
    denied: bool, client: ObstoreClient, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ObjectRoot(lambda found: (client, "/".join(found.parts[2:])))
    path = bucket_path("s3://bucket/model.safetensors")
    real: Ask = obstore.put
    late: list[Callable[[], object]] = []

    def put(*given: Any, **options: Any) -> Any:
        if not late:
            late.append(lambda: real(*given, **options))
            raise GenericError(says("500 Internal Server Error"))
        return real(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(obstore, "put", put)
        if denied:
            fail(patched, "head", *[PermissionDeniedError(says("403 Forbidden"))] * 2)
        with pytest.warns(NotFencedWarning, match="without a condition") if denied else contextlib.nullcontext():
            files.write_file(path, [b"first"], 5)
            files.write_file(path, [b"second"], 6, unique=True)
    if not denied:
        with pytest.raises(AlreadyExistsError):
            late[0]()
    assert client.perform(Get("model.safetensors")).data == b"second"


@pytest.mark.parametrize("word", ["redirect", "NoSuchBucket", "AccessDenied", "builder%20error", "SlowDown"])
def test_the_name_of_an_object_does_not_say_why_a_request_failed(word: str) -> None:
    url = f"http://localhost:1/b/{word}/treering.json"
    lost = GenericError(f"Generic S3 error: Error performing PUT {url} in 1ms - HTTP error: error sending request")
    assert (failure_of(lost).cause, failure_of(lost).slow_down) == (Cause.PASSING, False)
    told = says("404 Not Found", f"<Code>NoSuchKey</Code><Key>{word}/treering.json</Key>")
    gone = FileNotFoundError(f"Object at location {word.replace('%20', ' ')}/treering.json not found: {told}")
    assert failure_of(gone).cause is Cause.MISSING


class Halt(BaseException):
    """What a signal handler raises."""


@pytest.mark.parametrize("error", [ValueError("a leaf cannot be read"), Halt()])
def test_an_error_of_what_makes_the_bytes_is_raised_as_it_is(error: BaseException, client: ObstoreClient) -> None:
    def make() -> Iterator[bytes]:
        yield bytes(1 << 20)
        raise error

    with pytest.raises(type(error)) as caught:
        client.put_parts("a", make(), 2 << 20)
    assert caught.value is error
    assert client.perform(Head("a")).status is Status.MISSING
    for count in (7, 9):
        with pytest.raises(OSError, match="announced"):
            client.put_parts("a", [b"treering"], count)
    assert obstore_client._SLOTS._value == obstore_client._SLOTS._initial_value  # type: ignore[attr-defined]


def test_data_get_their_storage_class_and_documents_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ObstoreClient(MemoryStore(), "s3://bucket", storage_class="STANDARD_IA")
    calls = fail(monkeypatch, "put")
    data = f"run/data-{'0' * 16}-00000-of-00001.safetensors"
    client.perform(Put(data, b"x"))
    client.perform(Put("run/treering.json", b"x"))
    client.perform(Put("single.msgpack", b"x"))
    client.put_parts(data, [b"x"], 1)
    classes = [options["attributes"].get("Storage-Class") for _, options in calls]
    assert classes == ["STANDARD_IA", None, "STANDARD_IA", "STANDARD_IA"]
    assert [options["attributes"].get("Cache-Control") for _, options in calls] == [*["no-store"] * 3, None]


def test_times_are_those_of_the_bucket() -> None:
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    meta = {"path": "a", "size": 1, "last_modified": moment, "e_tag": '"x"', "version": "17"}
    found = obstore_client.listed(meta)
    assert (found.modified, found.version) == (moment.timestamp(), ObjectVersion('"x"', "17"))
    # What S3 calls a version is the name of an old content, not a condition.
    assert obstore_client.version_of({**meta, "version": "null"}) == ObjectVersion('"x"')


UNCONNECTED = GenericError(
    "Generic S3 error: Error performing GET http://127.0.0.1:1/b/k?secret in 2ms - HTTP error: error sending request"
    '\n\nDebug source:\nHttpError {\n    kind: Connect,\n    source: Os {\n        message: "Connection refused",'
)


def test_a_server_that_was_never_reached_is_an_error_soon(
    client: ObstoreClient, pauses: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "treering")
    fail(monkeypatch, "get", *[UNCONNECTED] * 100)
    with pytest.raises(OSError, match=r"no connection to the server of s3://bucket can be made.*Connection refused"):
        client.perform(Get("a"))
    assert 3 < sum(pauses) <= 10  # each is up to half as long at random
    assert len(caplog.messages) == len(pauses)
    assert all("s3://bucket: Connection refused" in line and "secret" not in line for line in caplog.messages)
    client.perform(Put("a", b"x"))
    pauses.clear()
    assert client.perform(Get("a")).status is Status.NO_ANSWER  # it may come back
    assert sum(pauses) > 30


def test_the_right_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ObstoreClient(S3Store("b", access_key_id="x", secret_access_key="y"), "s3://b")
    denied = PermissionDeniedError(says("403 Forbidden", "<Code>AccessDenied</Code>"))
    for name, request, right in (
        ("get", Get("a"), "GetObject"),
        ("put", Put("a", b""), "PutObject"),
        ("delete", Delete(("a",)), "DeleteObject"),
        ("list_with_delimiter_async", List("a/"), "ListBucket"),
    ):
        fail(monkeypatch, name, *[denied] * 2)
        with pytest.raises(PermissionError, match=f"s3:{right}"):
            client.perform(request)


TOO_LARGE = GenericError(says("400 Bad Request", "<Error><Code>InvalidRequest</Code><Message>a copy source"))
MAY_NOT_COPY = PermissionDeniedError(says("403 Forbidden", "<Code>AccessDenied</Code>"))


@pytest.mark.parametrize("error", [TOO_LARGE, MAY_NOT_COPY, NotSupportedError("no copies")])
@pytest.mark.usefixtures("pauses")
def test_what_the_server_does_not_copy_is_refused_unless_an_earlier_try_may_yet_be_done(
    error: Exception, client: ObstoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.perform(Put("a", b"one"))
    fail(monkeypatch, "copy", error)
    assert client.perform(Copy("a", "b")).status is Status.REFUSED  # something else may be put there
    assert client.perform(Copy("none", "b")).status is Status.MISSING
    fail(monkeypatch, "copy", PASSING[5], error)
    assert client.perform(Copy("a", "b")).status is Status.NO_ANSWER
    assert client.perform(Head("b")).status is Status.MISSING
    fail(monkeypatch, "copy", PASSING[5], PASSING[0])
    assert client.perform(Copy("a", "b")).status is Status.DONE
    assert client.perform(Get("b")).data == b"one"


class CopyingServer(http.server.BaseHTTPRequestHandler):
    """Answers all PUTs with 200, and notes their headers."""

    seen: ClassVar[list[dict[str, str]]] = []
    answers: ClassVar[list[bytes]] = []

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.seen.append({name.lower(): value for name, value in self.headers.items()})
        body = self.answers.pop(0) if self.answers else b"<CopyObjectResult><ETag>1</ETag></CopyObjectResult>"
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def copying() -> Iterator[dict[str, Any]]:
    """Return the options that lead to a server that copies whatever it is asked for."""
    CopyingServer.seen.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), CopyingServer) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        options = {"endpoint": f"http://127.0.0.1:{server.server_port}", "region": "us-east-1"}
        yield options | {"access_key_id": "x", "secret_access_key": "y", "client_options": {"allow_http": True}}
        server.shutdown()


@pytest.mark.parametrize(
    ("key", "headers"),
    [
        ({}, {}),
        ({"server_side_encryption": "aws:kms", "sse_kms_key_id": "arn:k"}, {"": "aws:kms", "-aws-kms-key-id": "arn:k"}),
        (
            {"server_side_encryption": "sse-c", "sse_customer_key_base64": base64.b64encode(b"k" * 32).decode()},
            {"-customer-algorithm": "AES256", "-customer-key": base64.b64encode(b"k" * 32).decode()},
        ),
    ],
)
def test_a_copy_by_the_server_is_encrypted_with_the_key_of_what_is_sent(
    key: dict[str, Any], headers: dict[str, str], copying: dict[str, Any]
) -> None:
    client = ObstoreClient(S3Store("bucket", **copying, **key), "s3://bucket")
    client.perform(Put("a", b"one"))
    assert client.perform(Copy("a", "b")).status is Status.DONE
    put, copied = CopyingServer.seen
    assert copied["x-amz-copy-source"] == "bucket/a"
    encrypted = "x-amz-server-side-encryption"
    for seen in (put, copied):
        found = {name: value for name, value in seen.items() if name.startswith(encrypted) and "md5" not in name}
        assert found == {encrypted + name: value for name, value in headers.items()}


def test_azure_is_asked_for_no_copy_for_it_may_go_on_after_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = fail(monkeypatch, "copy")
    store = AzureStore("container", account_name="a", account_key=base64.b64encode(b"k").decode())
    assert ObstoreClient(store, "az://container").perform(Copy("a", "b")).status is Status.REFUSED
    assert calls == []


@pytest.mark.usefixtures("pauses")
def test_an_error_in_an_answer_that_begins_well_is_no_copy(copying: dict[str, Any]) -> None:
    client = ObstoreClient(S3Store("bucket", **copying), "s3://bucket")
    CopyingServer.answers[:] = [b"<Error><Code>InternalError</Code><Message>try again</Message></Error>"]
    assert client.perform(Copy("a", "b")).status is Status.DONE
    assert len(CopyingServer.seen) == 2


def test_a_denied_conditional_delete_is_made_once() -> None:
    version = ObjectVersion("1")
    steps = protocol.delete_tombstone("key", version, 1e9, lambda: False)
    assert next(steps) == Get("key")
    found = Listed("key", 192, 0.0, version)
    assert steps.send(Answer(Status.DONE, placeholder(), found)) == Delete(("key",), version)
    with pytest.raises(StopIteration) as ended:
        steps.throw(PermissionError(errno.EACCES, "HTTP 403"))
    assert ended.value.value is Outcome.LOST
    assert failure_of(PermissionError(errno.EACCES, "HTTP 403")).cause is Cause.DENIED


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_the_number_of_requests_is_a_number(text: str) -> None:
    with pytest.raises(UnsupportedError, match="TREERING_BUCKET_REQUESTS is"):
        requests_at_once({"TREERING_BUCKET_REQUESTS": text})


def test_a_forked_process_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = StoreVariants(S3Store("b", access_key_id="x", secret_access_key="y"), 30)
    variants.variant(0)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(OSError, match="forked from one that has used a bucket"):
        variants.variant(0)


def test_a_store_that_cannot_be_opened_again_is_not_tried_at_each_denial(monkeypatch: pytest.MonkeyPatch) -> None:
    variants = StoreVariants(S3Store("b", access_key_id="x", secret_access_key="y"), 30)
    before = variants.variant(1 << 30)
    faults.fail(monkeypatch, StoreVariants, "_open_longest", RuntimeError("no keys now"))
    with pytest.raises(RuntimeError, match="no keys now"):
        variants.renew()
    assert not variants.renew()
    assert variants.variant(1 << 30) is before


def test_credentials_are_asked_for_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def provide() -> Any:
        asked.append(1)
        return {"access_key_id": "x", "secret_access_key": "y", "expires_at": None}

    store = S3Store("b", region="r", endpoint="http://127.0.0.1:1", credential_provider=provide)
    client = ObstoreClient(store, "s3://b")
    stores: list[Any] = []

    def put(store: Any, *_: Any, **__: Any) -> Any:
        stores.append(store)
        raise PermissionDeniedError(says("403 Forbidden", "<Code>ExpiredToken</Code>"))

    monkeypatch.setattr(obstore, "put", put)
    for wanted in (2, 3):
        with pytest.raises(PermissionError, match="s3://b denies"):
            client.perform(Put("a", b"x", Absent.ABSENT))
        assert len(stores) == wanted
    assert stores[0] is not stores[1]
    assert stores[1] is stores[2]


def test_options_of_the_connection_in_the_environment_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_CONNECT_TIMEOUT", "7s")
    monkeypatch.setenv("GOOGLE_PROXY_URL", "http://127.0.0.1:1")
    given = S3Store("b", access_key_id="x", secret_access_key="y", client_options={"connect_timeout": "3s"})
    options = StoreVariants(given, 30).variant(0).client_options
    assert options["allow_http"] in {True, "true"}
    assert options["connect_timeout"] == "3s"
    assert "proxy_url" not in options


PATIENCE = 2.0
_VERBS = ("put", "put_async", "get", "head", "delete", "list", "list_with_delimiter_async")


class _Died(OSError):
    """What a server that was reached and is silent is."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ObstoreClient]:
    """Return what makes a client of a server that dies at the first request of a verb for such a name."""

    def make(verb: str, part: str) -> ObstoreClient:
        dead = False

        def dying(one: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(store: Any, name: Any = None, *more: Any, **options: Any) -> Any:
                nonlocal dead
                dead = dead or (one == verb and part in str(name))
                if dead:
                    raise _Died("the connection was reset")
                return real(store, name, *more, **options)

            return call

        for one in _VERBS:
            monkeypatch.setattr(obstore, one, dying(one, getattr(obstore, one)))
        return ObstoreClient(obstore.store.MemoryStore(), f"s3://dies-{secrets.token_hex(4)}", patience=PATIENCE)

    return make


@pytest.mark.parametrize(
    ("verb", "part", "size"),
    [
        ("put", "treering-tmp", 10), ("put", "data-", 10), ("put", "data-", 5_000_000), ("put", "treering.json", 10),
        ("list_with_delimiter_async", "", 10),
    ],
)  # fmt: skip
def test_a_save_tells_it_after_one_patience(
    kill: Callable[[str, str], ObstoreClient], verb: str, part: str, size: int
) -> None:
    client = kill(verb, part)
    path = tr.bucket(client) / "a"
    tr.save("memory://imports", {"w": np.zeros(1)}, overwrite=True)
    begun = time.monotonic()
    with pytest.raises(StoreError) as caught:
        tr.save(path, {"w": np.zeros(size, np.float32)})
    took = time.monotonic() - begun
    assert took < 1.5 * PATIENCE, caught.value
    assert f"{verb.partition('_')[0].upper()} 'a/" in str(caught.value)
    assert part in str(caught.value)


def _serialize(path: Any) -> None:
    tree_serialize_leaves(path / "leaves", {"w": np.zeros(3)}, prefix="x")


def _save_run(path: Any, *steps: int) -> None:
    with tr.Run(path / "run") as run:
        for step in steps:
            run.save(step, {"w": 1}, force=True)


ZEROS = {"w": np.zeros(10)}
HANGING: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "a commit": ("put", "a/treering.json", lambda path: tr.save(path / "a", {}, overwrite=True), "PUT 'treering.json'"),
    "a first commit": ("put", "b/treering.json", lambda path: tr.save(path / "b", ZEROS), "PUT 'b/treering.json'"),
    "a commit of leaves": ("put", "leaves/tensorstore_index.json", _serialize, "PUT 'tensorstore_index.json'"),
    "data": ("put", "b/data-.*", lambda path: tr.save(path / "b", ZEROS), "PUT 'b/data-"),
    "a marker": ("put", "b/.*tmp", lambda path: tr.save(path / "b", ZEROS), "PUT 'b/.treering.json."),
    "a file": ("put", "b.safetensors", lambda path: tr.save(path / "b.safetensors", ZEROS), "PUT 'b.safetensors'"),
    "run.json": ("put", "run/run.json", lambda path: _save_run(path, 2), "PUT 'run/run.json'"),
    "a removal": (
        "put", "run/step_00000000/treering.json",
        lambda path: tr.Run(path / "run", keep=tr.KeepLast(1)).gc(dry_run=False), "PUT 'treering.json'",
    ),
    "a listing": ("list_with_delimiter_async", "run/", lambda path: tr.Run(path / "run").steps(), "LIST 'run/'"),
    "a reading": ("get", "a/treering.json", lambda path: tr.load(path / "a"), "GET 'a/treering.json'"),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", HANGING)
def test_the_request_that_hangs_is_named_where_others_are_answered(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, name, call, told = HANGING[case]
    client = ObstoreClient(obstore.store.MemoryStore(), f"s3://hangs-{secrets.token_hex(4)}", patience=0.3)
    path = tr.bucket(client)
    tr.save(path / "a", ZEROS)
    _serialize(path)
    _save_run(path, 0, 1)
    real = getattr(obstore, verb)

    def hang(store: Any, asked: Any = None, *more: Any, **options: Any) -> Any:
        if re.fullmatch(name, str(asked)):
            raise _Died("operation timed out")
        return real(store, asked, *more, **options)

    monkeypatch.setattr(obstore, verb, hang)
    with pytest.raises(StoreError) as caught:
        call(path)
    assert told in str(caught.value)
    assert "refuses" not in str(caught.value)


def test_the_parts_of_an_upload_are_ended_by_time_alone() -> None:
    store = obstore.store.S3Store("b", access_key_id="x", secret_access_key="y")
    retries = StoreVariants(store, 30).variant(16 << 20, parts=True).retry_config
    assert retries["max_retries"] * retries["backoff"]["init_backoff"] >= retries["retry_timeout"]


def test_a_later_call_has_the_whole_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, client_made_anew_after=0.2)
    client = ObstoreClient(obstore.store.MemoryStore(), "s3://bucket", patience=PATIENCE)
    assert client.perform(Put("a", b"1")).status is Status.DONE
    tries: list[Request] = []

    def fail(*_: Any, **__: Any) -> None:
        tries.append(Head("a"))
        raise _Died("reset")

    monkeypatch.setattr(obstore, "head", fail)

    def asked(request: Request) -> tuple[Answer, int]:
        tries.clear()
        return client.perform(request), len(tries)

    answer, many = asked(Head("a"))
    assert answer.status is Status.NO_ANSWER
    assert answer.reason == "GET 'a' failed first: reset"
    assert many > 2
    assert client.patience < 0
    assert asked(Head("b")) == (Answer(Status.NO_ANSWER, reason="GET 'a' failed first: reset"), 1)
    assert client.perform(Delete(("a",))).status is Status.NO_ANSWER
    time.sleep(0.3)
    assert client.patience == PATIENCE
    assert asked(Head("b"))[1] > 2
    assert client.perform(Get("a")).data == b"1"
    assert client.patience == PATIENCE
