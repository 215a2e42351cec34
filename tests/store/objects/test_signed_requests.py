"""Requests that treering signs: one version is deleted, and names that obstore refuses are listed and removed."""

from __future__ import annotations

import http.server
import logging
import secrets
import threading
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

import treering as tr
from tests.buckets import List, ObstoreClient, without_settings
from torture import gcs_fake
from torture.bucket_servers import BucketServer
from torture.gcs_fake import GcsFake
from treering._store.objects.obstore_stores import StoreVariants
from treering._store.objects.repetition import how_to_remove
from treering._store.objects.requests import ObjectVersion, Status
from treering._store.objects.signed_requests import delete_version
from treering.errors import StoreError

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


@pytest.mark.sampled(5)
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


KEYS = [
    "run//x",
    "run/../x",
    "run/./x",
    "run/a\tb",
    "run/a\tb/c",
    "run/\x7f",
    "run/step_00000001//x",
    "run/z\x1b\u202e&<x>",
]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsFake]:
    """Return a server with a run of two steps, which speaks as S3 does where something is read."""
    with without_settings(monkeypatch), GcsFake() as server:
        for name, value in BucketServer("gs", f"http://127.0.0.1:{server.port}").environment().items():
            monkeypatch.setenv(name, value)
        with tr.Run("gs://bucket/run") as run:
            for step in (1, 2):
                run.save(step, {"w": np.arange(5)}, force=True)
        yield server


def client_of(fake: GcsFake) -> ObstoreClient:
    store = S3Store(
        "bucket", endpoint=f"http://127.0.0.1:{fake.port}", access_key_id="k", secret_access_key="s",
        client_options={"allow_http": True},
    )  # fmt: skip
    return ObstoreClient(store, f"s3://bucket-{secrets.token_hex(4)}")


# Each key alone on pages of one name, and all of them on pages of each length; the rest is slow.
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("keys", "most"),
    [
        pytest.param(keys, most, marks=[] if most == 1 or keys is KEYS else pytest.mark.slow)
        for keys in (*([key] for key in KEYS), KEYS)
        for most in (1, 2, 1000)
    ],
    ids=ascii,
)
def test_a_listing_goes_on_past_them(
    keys: list[str], most: int, fake: GcsFake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gcs_fake, "_MOST_LISTED", most)
    client = client_of(fake)
    before = {
        (deep, prefix): client.perform(List(prefix, deep)) for deep in (False, True) for prefix in ("run/", "run/st")
    }
    for key in keys:
        fake.put(f"bucket/{key}", b"")
    for (deep, prefix), wanted in before.items():
        found = client.perform(List(prefix, deep))
        readable = [one for one in found.listed if one.name.isprintable()]
        assert sorted(readable, key=str) == sorted(wanted.listed, key=str)
        assert set(found.places) == set(wanted.places)
    run = tr.Run(tr.bucket(client, "run"))
    with caplog.at_level(logging.WARNING, logger="treering"):
        assert list(run.steps()) == [1, 2]
    assert np.array_equal(run.load()["w"], np.arange(5))
    assert tr.verify(tr.bucket(client, "run") / "step_00000001")


def test_they_are_told_once(fake: GcsFake, caplog: pytest.LogCaptureFixture) -> None:
    client = client_of(fake)
    name = f"run/{secrets.token_hex(4)}\t\u202e{'x' * 900}"
    fake.put(f"bucket/{name}", b"")
    with caplog.at_level(logging.WARNING, logger="treering"):
        for _ in range(3):
            client.perform(List("run/"))
    (told,) = caplog.messages
    assert told.startswith(f"s3://bucket has '{name[:12]}\\t\\u202exxx")
    assert len(told) < 350
    assert told.isprintable()


@pytest.mark.parametrize("key", ["run//x", "run/../x", "run/a\tb"])
def test_where_no_listing_can_be_signed_the_key_and_the_command_are_told(key: str, fake: GcsFake) -> None:
    fake.put(f"bucket/{key}", b"")
    with pytest.raises(StoreError, match="another program's object under a name that cannot be read") as caught:
        tr.Run("gs://bucket/run").steps()
    there = {"run//x": "run//", "run/../x": "run/../"}.get(key, key)
    assert how_to_remove("gs://bucket", there) in str(caught.value)


def test_an_account_of_another_environment_signs_no_listing(fake: GcsFake, monkeypatch: pytest.MonkeyPatch) -> None:
    client = client_of(fake)
    fake.put("bucket/run//x", b"")
    monkeypatch.setenv("AWS_REGION", "elsewhere")
    with pytest.raises(OSError, match=r"remove it: aws s3 rm --recursive 's3://bucket-\w+/run//'"):
        client.perform(List("run/"))


def test_commands_are_those_of_a_shell() -> None:
    assert how_to_remove("s3://b", "it's/a\tb\\") == r"aws s3 rm $'s3://b/it\'s/a\tb\\'"
    assert how_to_remove("az://c", "a//b") == "az storage blob delete --container-name c --name 'a//b'"
    assert how_to_remove("az://c", "a//") == "az storage blob delete-batch --source c --pattern 'a//*'"
