"""One version of an object is deleted by a request of our own, or it stays."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from treering._store.objects.obstore_stores import StoreVariants
from treering._store.objects.requests import ObjectVersion, Status
from treering._store.objects.signed_requests import delete_version

VERSION = ObjectVersion('"a1"')


class _Server(http.server.ThreadingHTTPServer):
    status = 204
    asked: list[tuple[str, str, str | None]]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_DELETE(self) -> None:
        server: Any = self.server
        server.asked.append((self.command, self.path.partition("?")[0], self.headers["If-Match"]))
        if server.status:
            self.send_response(server.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Server]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.asked = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def store_of(server: _Server, **options: Any) -> S3Store:
    endpoint, client_options = f"http://127.0.0.1:{server.server_port}", cast("Any", options)
    return S3Store("b", access_key_id="x", secret_access_key="y", endpoint=endpoint, client_options=client_options)


def test_the_store_of_a_client_can_delete_so(server: _Server) -> None:
    variant = StoreVariants(store_of(server), 30.0).variant(0)
    assert delete_version(variant, "a", VERSION).status is Status.DONE


@pytest.mark.parametrize(
    ("status", "wanted", "sure"),
    [
        (204, Status.DONE, True),
        (404, Status.MISSING, True),
        (412, Status.REFUSED, True),
        (400, Status.REFUSED, False),
        (307, Status.REFUSED, False),
        (501, Status.REFUSED, False),
        (409, Status.NO_ANSWER, True),
        (503, Status.NO_ANSWER, True),
        (0, Status.NO_ANSWER, True),
    ],
)
def test_what_a_server_answers(server: _Server, status: int, wanted: Status, sure: bool) -> None:
    server.status = status
    answer = delete_version(store_of(server, allow_http=True), "a b%41/é#+", VERSION)
    assert (answer.status, answer.sure) == (wanted, sure)
    assert server.asked == [("DELETE", "/b/a%20b%2541/%C3%A9%23%2B", '"a1"')]


def test_a_denial_is_an_error(server: _Server) -> None:
    server.status = 403
    with pytest.raises(PermissionError, match="may not be removed"):
        delete_version(store_of(server, allow_http=True), "a", VERSION)


def test_where_it_cannot_be_asked_for_nothing_happens(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    account = '{"gcs_base_url": "http://127.0.0.1:1", "disable_oauth": true, "client_email": "", "private_key": "", '
    stores: list[Any] = [
        MemoryStore(),
        GCSStore("b", service_account_key=account + '"private_key_id": ""}'),
        store_of(server, allow_http=True, proxy_url="http://127.0.0.1:1"),
        S3Store("b", access_key_id="x", secret_access_key="y", endpoint="http://127.0.0.1:1"),
    ]
    for store in stores:
        answer = delete_version(store, "a", VERSION)
        assert (answer.status, answer.sure) == (Status.REFUSED, False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert not delete_version(store_of(server, allow_http=True), "a", VERSION).sure
    assert server.asked == []


def test_what_cannot_sign_a_deletion_makes_none() -> None:
    by_token = AzureStore("c", account_name="a", sas_key="sv=2020-01-01&sig=x")
    unsigned = S3Store("b", endpoint="http://127.0.0.1:1", skip_signature=True)
    for store in (by_token, unsigned):
        answer = delete_version(store, "a", VERSION)
        assert (answer.status, answer.sure) == (Status.REFUSED, False)
