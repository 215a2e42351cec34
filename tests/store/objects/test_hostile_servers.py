"""Servers and settings that are not what they should be: each ends in an error of ours, soon, that tells no secret."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.server
import io
import os
import pickle
import secrets
import signal
import threading
import time
import traceback
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any, ClassVar, cast

import hypothesis.strategies as st
import numpy as np
import obstore
import pytest
from hypothesis import given
from obstore.store import S3Store

import treering as tr
from tests import faults, limits
from tests.buckets import ask_once
from tests.command import inside
from tests.store.objects.web_server import serving
from treering._printable import hide_secrets
from treering._store.failures import naming, with_errno
from treering._store.objects import client as obstore_client
from treering._store.objects import https
from treering._store.objects.client import ObstoreClient
from treering._store.objects.connect import connect
from treering._store.objects.https import WebClient, sends_on_to
from treering._store.objects.requests import Answer, Get
from treering._store.objects.url import bucket_path, web_path
from treering.errors import NotFoundError, PermissionDeniedError, StoreError, TreeringError, UnsupportedError

Serve = Callable[[int, dict[str, str], bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return what makes a server give one answer to all, and returns its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        answer: ClassVar[tuple[int, dict[str, str], bytes]]

        def do_GET(self) -> None:
            status, headers, body = self.answer
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def do_HEAD(self) -> None:
            status, headers, _ = self.answer
            self.send_response(status)
            self.send_header("Content-Length", "0")
            if "Location" in headers:
                self.send_header("Location", headers["Location"])
            self.end_headers()

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.do_GET()

        def do_POST(self) -> None:
            self.do_PUT()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def begin(status: int, headers: dict[str, str], body: bytes) -> str:
        Handler.answer = status, headers, body
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield begin
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    ask_once(monkeypatch)


@pytest.mark.parametrize(
    ("status", "headers", "body"),
    [
        (416, {"Content-Range": "bytes */0", "Content-Length": "0"}, b""),
        (200, {"Content-Length": str(10**15)}, b"x"),
        (200, {"Content-Length": "2", "Last-Modified": "Mon, 1 Jan " + "9" * 4200 + " 00:00:00 GMT"}, b"{}"),
        (206, {"Content-Length": "1", "Content-Range": f"bytes 0-0/{10**30}"}, b"x"),
        (200, {"Content-Length": "-1"}, b"x"),
    ],
)
def test_an_answer_that_makes_no_sense_is_an_error(
    serve: Serve, status: int, headers: dict[str, str], body: bytes
) -> None:
    url = serve(status, headers, body)
    for path in ("a", "a.msgpack", "a.safetensors", "a/treering.json"):
        for verb in (tr.load, tr.inspect, tr.open):
            with pytest.raises(TreeringError):
                verb(f"{url}/{path}")


def test_a_listing_without_an_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def pages(*_: Any, **__: Any) -> Iterator[list[dict[str, str]]]:
        while True:
            yield [{"path": "a/b"}, {"path": "a/c"}]

    monkeypatch.setattr(obstore, "list", pages)
    with pytest.raises(OSError, match="lists the same names again and again"):
        obstore_client.list_names(None, "a/", deep=True)


_ENDLESS = b"""<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>
<Contents><Key>run/a</Key><LastModified>2024-01-01T00:00:00Z</LastModified><ETag>a</ETag><Size>1</Size></Contents>
</ListBucketResult>"""


def bucket_of(url: str) -> S3Store:
    """Return the bucket of a server."""
    return S3Store(
        "bucket", endpoint=url, access_key_id="k", secret_access_key="s", client_options={"allow_http": True}
    )


def steps_of(url: str) -> list[int]:
    """List a run in the bucket of a server."""
    path = tr.bucket(ObstoreClient(bucket_of(url), f"s3://names-{secrets.token_hex(4)}"), "run")
    return list(tr.Run(path).steps())


def test_a_level_whose_token_never_moves_ends(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, longest_listing=0.5)
    url = serve(200, {"Content-Length": str(len(_ENDLESS))}, _ENDLESS)
    with pytest.raises(StoreError, match="lists more and more names, without an end"):
        steps_of(url)


def test_a_level_is_listed_where_a_loop_runs(serve: Serve) -> None:
    page = _ENDLESS.replace(b"<NextContinuationToken>t</NextContinuationToken>", b"")
    url = serve(200, {"Content-Length": str(len(page))}, page)

    async def cell() -> Answer:
        return obstore_client.list_names(bucket_of(url), "run/", deep=False)

    assert [found.name for found in asyncio.run(cell()).listed] == ["run/a"]


@pytest.mark.parametrize("cut", ["Key", "LastModified", "Size"])
def test_a_page_that_is_read_here_and_lacks_something_is_no_key_error(cut: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = _ENDLESS.replace(b"<NextContinuationToken>t</NextContinuationToken>", b"").replace(
                b"run/a", b"run//a"
            )
            if "x-id" in self.path:  # the second time, when obstore has refused the name
                page = page.replace(b"run//a", b"run/a").replace(cut.encode(), b"Other")
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with contextlib.suppress(StoreError):  # what has no name is left out
            assert steps_of(f"http://127.0.0.1:{server.server_port}") == []
        server.shutdown()


@pytest.mark.skipif(os.name == "nt", reason="Windows sends no signal to one thread")
def test_an_interrupt_ends_a_level_without_an_end(serve: Serve) -> None:
    url = serve(200, {"Content-Length": str(len(_ENDLESS))}, _ENDLESS)
    interrupt = threading.Timer(0.5, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    interrupt.start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        steps_of(url)
    assert time.monotonic() - begun < 20


def test_an_endpoint_that_sends_requests_on_to_another_host_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = serve(307, {"Content-Length": "0", "Location": "http://localhost:1/stolen"}, b"")
    for name, value in {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"}.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    given = tr.bucket(f"s3://led-{secrets.token_hex(4)}", endpoint=url)
    with pytest.raises(UnsupportedError, match="sends requests on to 'localhost'"):
        tr.load(given / "a")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    with pytest.raises(UnsupportedError, match="sends requests on to 'localhost'"):
        tr.load(f"s3://led-{secrets.token_hex(4)}/a")


@pytest.mark.parametrize("given", [True, False], ids=["a store", "a URL"])
def test_an_endpoint_that_redirects_later_gets_no_request_to_another_host(
    given: bool, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(str(self.headers.get("x-amz-security-token")))
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    for name in list(os.environ):
        if name.startswith("AWS_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    url = serve(404, {"Content-Length": "0"}, b"")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        if given:
            options: Any = {"access_key_id": "k", "secret_access_key": "s", "session_token": "t", "endpoint": url}
            place: Any = S3Store(f"led-{secrets.token_hex(4)}", config=options, client_options={"allow_http": True})
        else:
            for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "SESSION_TOKEN": "t"}.items():
                monkeypatch.setenv(f"AWS_{name}", value)
            place = f"s3://led-{secrets.token_hex(4)}"
        path = tr.bucket(place, "a", endpoint=None if given else url)
        with pytest.raises(NotFoundError):
            tr.load(path)
        serve(307, {"Content-Length": "0", "Location": f"http://localhost:{other.server_address[1]}/stolen"}, b"")
        for call in (tr.load, tr.inspect, lambda path: tr.Run(path).steps(), lambda path: tr.save(path, {"w": 1})):
            with pytest.raises(StoreError, match="sends requests on to another host"):
                call(path)
        other.shutdown()
    assert asked == []


def test_the_endpoint_of_a_call_counts_more_than_those_of_the_environment(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "k")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        monkeypatch.setenv(name, "http://127.0.0.1:9\n")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    url = serve(404, {"Content-Length": "0"}, b"")
    with pytest.raises(NotFoundError):
        tr.load(tr.bucket(f"s3://said-{secrets.token_hex(4)}/a", endpoint=url))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"{url}\n")
    with pytest.raises(NotFoundError):
        tr.load(f"s3://said-{secrets.token_hex(4)}/a")


@pytest.mark.parametrize("location", ["/elsewhere", "http://127.0.0.1:1/other", "http://[::1", ""])
def test_an_endpoint_that_stays_on_its_host_is_none_of_those(serve: Serve, location: str) -> None:
    assert sends_on_to(serve(307, {"Content-Length": "0", "Location": location}, b"")) is None


class PanicException(BaseException):
    """What a panic of a Rust extension is."""


def test_a_panic_of_the_client_is_told_as_an_error() -> None:
    client = WebClient("https://host")

    def call() -> Answer:
        raise PanicException("called `Result::unwrap()` on an `Err` value")

    with pytest.raises(OSError, match="the client panicked: called"):
        client._repeat(call, "GET")
    with pytest.raises(KeyboardInterrupt):
        client._repeat(lambda: (_ for _ in ()).throw(KeyboardInterrupt), "GET")


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": float("inf")}, {"timeout": "3"}, {"timeout": 0}, {"timeout": float("nan")}, {"timeout": True},
        {"grace": float("nan")}, {"grace": -1}, {"grace": "1"}, {"storage_class": "COLD\r\nX: y"}, {"region": "a\n"},
        {"timeout": 1e30}, {"timeout": 10**400}, {"grace": 10**400},
        {"kms_key": ""}, {"endpoint": "http://host:99999"}, {"endpoint": "http://[::1"}, {"endpoint": "http://u:p@host"},
    ],
)  # fmt: skip
def test_options_without_sense_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        tr.bucket("s3://bucket-of-odd-options/a", **options)


def test_a_secret_that_ends_in_a_line_feed_is_stripped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key\n")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret\r\n")
    monkeypatch.setenv("AWS_REGION", "eu-central-1\n")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9\n")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    client: Any = connect(bucket_path("s3://bucket-of-mounted-secrets"))[0]
    config = client._stores.store.config
    said = {name: config[name] for name in config if "key" in name or "region" in name or "endpoint" in name}
    assert all(value == value.strip() for value in said.values()), said.keys()
    assert {"key", "secret", "eu-central-1"} <= set(said.values())
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sec\nret")
    with pytest.raises(UnsupportedError, match="AWS_SECRET_ACCESS_KEY has a line break") as caught:
        connect(bucket_path("s3://bucket-of-broken-secrets"))
    assert "sec" not in str(caught.value).replace("SECRET", "")


SIGNATURE = b"<Error><Code>SignatureDoesNotMatch</Code><Message>The signature does not match</Message></Error>"
DENIED: dict[str, Callable[[str], Any]] = {
    "save": lambda path: tr.save(path, {"w": 1}),
    "save_async": lambda path: tr.save_async(path, {"w": 1}).result(),
    "save, one file": lambda path: tr.save(f"{path}.safetensors", {"w": np.ones(3)}),
    "load": tr.load,
    "verify": tr.verify,
    "Run.save": lambda path: tr.Run(path).save(1, {"w": 1}).result(),
    "Run.load": lambda path: tr.Run(path).load(),
    "Run.steps": lambda path: tr.Run(path).steps(),
    "Run.gc": lambda path: tr.Run(path).gc(),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("body", [SIGNATURE, b""], ids=["a reason", "no reason"])
@pytest.mark.parametrize("call", DENIED)
def test_a_wrong_secret_ends_in_one_short_error(
    call: str, body: bytes, serve: Serve, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ENDPOINT_URL", serve(403, {"Content-Length": str(len(body))}, body))
    place = f"s3://bucket-of-a-wrong-secret-{zlib.crc32(request.node.name.encode())}/a"
    with pytest.raises(
        PermissionDeniedError, match="denies it to these credentials; check them and their rights"
    ) as caught:
        DENIED[call](place)
    told = "".join(traceback.format_exception(caught.value))
    assert "direct cause" not in told
    assert "During handling" not in told
    assert "Forbidden:)" not in told
    assert ".left" not in str(caught.value)
    if call in ("load", "verify"):
        err = inside("ls", place, code=2)[1]
        assert "(status code: 403 Forbidden)" in err  # a look has no body that could say more


def test_no_redirect_leads_to_what_is_not_encrypted() -> None:
    request = urllib.request.Request("https://host/a")
    redirects = https._Redirects()
    for url in ("http://host/a", "ftp://host/a", "http://127.0.0.1:1/a"):
        with pytest.raises(urllib.error.HTTPError, match="not encrypted"):
            redirects.redirect_request(request, None, 302, "Found", Message(), url)
    assert redirects.redirect_request(request, io.BytesIO(), 302, "Found", Message(), "https://other/a") is not None


def test_a_redirect_whose_body_has_no_end_is_followed(tmp_path: Path) -> None:
    tr.save(tmp_path / "a.msgpack", {"w": 1})

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"{files.url}{self.path}")
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(64):
                    self.wfile.write(bytes(1 << 20))
                read_all.append(True)

        def log_message(self, *_: Any) -> None:
            pass

    read_all: list[bool] = []
    with serving(tmp_path) as files, http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert tr.load(f"http://127.0.0.1:{server.server_port}/a.msgpack") == {"w": 1}
        server.shutdown()
    assert not read_all


def test_a_body_that_drips_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, seconds_of_web_reads=0.05, slowest_web_read=1 << 30)

    class Dripping:
        def read1(self, _: int) -> bytes:
            time.sleep(0.01)
            return b"x"

    assert len(list(https._read(cast("Any", Dripping()), 1000))) < 10


_SECRET = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789%+-_.~/=&", min_size=12, max_size=40)
_SCHEMES = st.sampled_from(["https", "HTTP", "s3", "az", "abfss"])


@given(scheme=_SCHEMES, secret=_SECRET, before=st.sampled_from(["", "'", '"', "(", "at "]))
def test_queries_and_logins_are_hidden(scheme: str, secret: str, before: str) -> None:
    told = hide_secrets(f"could not read {before}{scheme}://host/a?X-Amz-Signature={secret}' now")
    assert secret not in told
    login = secret.replace("/", "_")
    assert login not in hide_secrets(f"{before}{scheme}://user:{login}@host/a is gone")
    assert login not in hide_secrets(f"{before}https://{login}@host/a is gone")


@given(secret=_SECRET, odd=st.sampled_from(list(" '\"\t\n")), at=st.integers(0, 12))
def test_a_query_that_no_text_could_hide_is_refused(secret: str, odd: str, at: int) -> None:
    query = f"{secret[:at]}{odd}{secret[at:]}"
    for text in (f"https://host/a?sig={query}", f"az://container/a?sig={query}"):
        with pytest.raises(UnsupportedError) as caught:
            (web_path if text.startswith("https") else bucket_path)(text)
        for told in (str(caught.value), repr(caught.value), str(caught.value.args)):
            assert len(secret) - at < 12 or secret[at:] not in told
            assert at < 12 or secret[:at] not in told.partition("?")[2]


@given(
    scheme=st.sampled_from(["https", "s3", "az", "ftp", "hf"]), secret=_SECRET, odd=st.sampled_from(list(" '\"\t\n\\"))
)
def test_no_door_shows_a_query_whatever_is_in_it(scheme: str, secret: str, odd: str) -> None:
    url = f"{scheme}://host/a?sig={secret}{odd}{secret}"
    for door in (tr.load, tr.bucket, tr.Run, lambda path: tr.save(path, {"a": 1})):
        with pytest.raises(TreeringError) as caught:
            door(url)
        error: Any = caught.value
        assert secret not in f"{error} {error!r} {error.args} {getattr(error, 'filename', '')}"


def test_the_request_that_failed_first_is_named_without_its_query(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, WebClient, "_ask", ConnectionError("reset"))
    client = WebClient("https://host")
    client._patience, client._reached = 0.0, True
    answer = client.perform(Get("a?X-Amz-Signature=1f2e3d"))
    assert answer.reason == "GET 'https://host/a?X-Amz-Signature=1f2e3d' failed first: reset"
    error = StoreError.of(OSError(errno.EIO, answer.reason), "https://host/a", "read")
    assert "1f2e3d" not in _all_of(error)


def _all_of(error: Any) -> str:
    return f"{error} {error!r} {error.args} {error.filename} {error.strerror} {pickle.loads(pickle.dumps(error)).args}"


def test_no_attribute_of_an_error_has_a_signature() -> None:
    url = "https://host/a.safetensors?X-Amz-Signature=1f2e3d"
    errors: list[TreeringError] = [
        StoreError.of(OSError(errno.EIO, f"refused at {url}"), url, "read"),
        with_errno(NotFoundError(f"{url!r} is missing"), errno.ENOENT, url),
    ]
    with pytest.raises(StoreError) as caught, naming(url, "read"):
        raise OSError(errno.EIO, f"refused at {url}")
    assert caught.value.__cause__ is None
    for error in [*errors, caught.value]:
        assert "1f2e3d" not in _all_of(error), error


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_a_login_in_the_endpoint_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://me:hidden@127.0.0.1:9")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "k")
    with pytest.raises(UnsupportedError, match=f"{name} has a login before its host, '127.0.0.1'") as caught:
        tr.load("s3://bucket-with-login/a")
    assert "hidden" not in repr(caught.value)
