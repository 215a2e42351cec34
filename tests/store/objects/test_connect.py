"""How a bucket is reached: the environment, the options of `treering.bucket`, and what is said where nothing fits."""

from __future__ import annotations

import copy
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import pytest

import treering
from tests import limits
from tests.buckets import MemoryBucket, install, without_settings
from tests.store.objects.web_server import serving
from treering._store.objects import connect
from treering._store.objects.client import ObstoreClient
from treering._store.objects.store import GRACE
from treering._store.objects.url import bucket_path
from treering._store.resolve import names_at, places_at, store_at
from treering.errors import MissingExtraError, NotFoundError, PermissionDeniedError, TreeringError, UnsupportedError

stores: Any = pytest.importorskip("obstore.store")


LOCKS = """
import os, signal, threading
from treering._store.objects import connect, repetition

held = [repetition._SLOTS.acquire(blocking=False) for _ in range(repetition.requests_at_once())]
assert all(held) and connect._LOCK.acquire()
child = os.fork()
if not child:
    signal.alarm(20)
    with repetition._SLOTS, connect._LOCK:
        os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1])
"""


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Forget all buckets and credentials."""
    monkeypatch.setenv("HOME", str(tmp_path))
    # A port of this machine where nothing listens.
    limits.lower(monkeypatch, metadata_server="http://127.0.0.1:9")
    with without_settings(monkeypatch):
        yield


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def store_of(place: str | PurePath) -> Any:
    client, _ = connect.connect(bucket_path(place) if isinstance(place, str) else place)
    assert isinstance(client, ObstoreClient)
    return client._stores.store


@pytest.mark.parametrize(
    ("url", "lines"),
    [
        ("s3://b/a", ("export AWS_ACCESS_KEY_ID=", "export AWS_SECRET_ACCESS_KEY=", "export AWS_REGION=")),
        ("gs://b/a", ("gcloud auth application-default login", "GOOGLE_SERVICE_ACCOUNT=")),
        ("az://b/a", ("export AZURE_STORAGE_ACCOUNT_NAME=", "export AZURE_STORAGE_ACCOUNT_KEY=")),
        ("abfss://b@acc.dfs.core.windows.net/a", ("export AZURE_STORAGE_ACCOUNT_KEY=",)),
    ],
)
def test_without_credentials_the_lines_to_set_are_said(url: str, lines: tuple[str, ...]) -> None:
    for door in (treering.load, lambda path: treering.save(path, {"a": 1})):
        with pytest.raises(TreeringError, match="no credentials for") as caught:
            door(url)
        assert isinstance(caught.value, PermissionError)
        assert all(line in str(caught.value) for line in lines)


def test_a_machine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as deaf:
        limits.lower(monkeypatch, metadata_server=f"http://127.0.0.1:{deaf.getsockname()[1]}", seconds_of_metadata=0.2)
        start = time.monotonic()
        with pytest.raises(TreeringError, match="no credentials"):
            treering.load("s3://b/a")
        assert time.monotonic() - start < 1.0


@pytest.mark.parametrize("address", ["http://host:abc", "http://host:99999", "http://[::1", "http://a..b"])
def test_an_address_that_is_none_gives_no_credentials(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", address)
    with pytest.raises(PermissionDeniedError, match="no credentials"):
        treering.load("s3://b/a")


@pytest.mark.skipif(os.name == "nt" or os.geteuid() != 0, reason="becomes another user")
def test_the_home_of_another_user_has_no_credentials(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    try:
        os.seteuid(65534)
        with pytest.raises(PermissionDeniedError, match="no credentials"):
            connect.require_credentials("gs", "gs://b", {"HOME": str(tmp_path)})
    finally:
        os.seteuid(0)


def test_the_environment_is_read(keys: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serving(tmp_path) as files:
        monkeypatch.setenv("AWS_ENDPOINT_URL", files.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        with pytest.raises(NotFoundError):
            treering.load("s3://b/a b.msgpack")
    assert "/b/a%20b.msgpack" in [path for path, _ in files.asked]


def test_one_client_for_a_bucket(keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(connect.connect(bucket_path("s3://b/a"))[0])) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert connect.connect(bucket_path("s3a://b/other")) == (found[0], "other")
    assert connect.connect(bucket_path("s3://c/a"))[0] is not found[0]
    monkeypatch.setenv("AWS_REGION", "eu-west-3")
    assert connect.connect(bucket_path("s3://b/a"))[0] is not found[0]


def test_an_account_of_before_is_not_used_where_the_next_one_cannot_be(
    keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect.connect(bucket_path("s3://b/a"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of\nanother")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="AWS_SECRET_ACCESS_KEY has a line break"):
            connect.connect(bucket_path("s3://b/a"))


@pytest.mark.parametrize("name", ["AWS_PROXY_URL", "AWS_ALLOW_HTTP", "AWS_READ_TIMEOUT"])
def test_a_variable_that_obstore_does_not_take_is_told(name: str, keys: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "%zz")
    with pytest.raises(UnsupportedError, match="'s3://b' cannot be opened so"):
        treering.load("s3://b/a")


def test_options_of_s3() -> None:
    path = treering.bucket(
        "s3://b/runs",
        "a",
        region="eu-west-1",
        endpoint="http://127.0.0.1:9",
        kms_key="arn:k",
        storage_class="STANDARD_IA",
        requester_pays=True,
        anonymous=True,
        timeout=7,
        grace=5,
    )
    assert str(path) == "s3://b/runs/a"
    store = store_of(path)
    config = store.config
    said = ("region", "endpoint_url_s3", "sse_kms_key_id", "server_side_encryption")
    assert {name: config[name] for name in said} == {
        "region": "eu-west-1",
        "endpoint_url_s3": "http://127.0.0.1:9",
        "sse_kms_key_id": "arn:k",
        "server_side_encryption": "aws:kms",
    }
    assert config["request_payer"] == "true"
    assert config["skip_signature"] == "true"
    client: Any = connect.connect(path)[0]
    assert (client._storage_class, client._stores._timeout) == ("STANDARD_IA", 7)
    assert store_at(path / "x").grace == 5
    assert store_at(treering.bucket("s3://other", anonymous=True)).grace == GRACE


@pytest.mark.parametrize("url", ["127.0.0.1:9", "", "http://", "ftp://host", "https://a b"])
def test_what_is_no_url_of_a_server_is_refused_by_name(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(f"endpoint is {url!r}, which is no URL of a server")):
        treering.bucket("s3://b", endpoint=url)
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        with monkeypatch.context() as patched:
            patched.setenv(name, url)
            with pytest.raises(UnsupportedError, match=re.escape(f"{name} is {url!r}")) as found:
                treering.load("s3://b/a")
            assert "http://HOST:PORT" in str(found.value)


def test_options_of_other_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    path = treering.bucket("gs://b", endpoint="http://127.0.0.1:9", anonymous=True)
    assert store_of(path).config["base_url"] == "http://127.0.0.1:9"
    path = treering.bucket("abfss://c@acc.dfs.core.windows.net", anonymous=True)
    config = store_of(path / "x").config
    assert (config["account_name"], config["container_name"]) == ("acc", "c")
    path = treering.bucket("az://c", anonymous=True)
    with pytest.raises(UnsupportedError, match="AZURE_STORAGE_ACCOUNT_NAME"):
        store_of(path)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "acc")
    assert store_of(path).config["container_name"] == "c"
    with pytest.raises(UnsupportedError, match="kms_key is an option of s3://"):
        treering.bucket("gs://c", kms_key="k")


def test_each_path_carries_its_own_options(keys: None) -> None:
    west = treering.bucket("s3://b/a", region="eu-west-1", anonymous=True)
    north = treering.bucket("s3://b", "a", region="eu-north-1", grace=7)
    assert (str(west), str(north)) == ("s3://b/a", "s3://b/a")
    assert (store_of(west / "x").config["region"], store_of(north).config["region"]) == ("eu-west-1", "eu-north-1")
    assert (store_at(west / "x").grace, store_at(north / "x").grace, store_at("s3://b/a").grace) == (GRACE, 7, GRACE)
    assert "region" not in store_of("s3://b/a").config


def test_the_same_options_share_one_client() -> None:
    path = treering.bucket("s3://b/a", region="eu-west-1", anonymous=True)
    same = treering.bucket("s3://b", region="eu-west-1", anonymous=True)
    assert connect.connect(path)[0] is connect.connect(same)[0] is connect.connect(same / "other")[0]
    store = stores.S3Store("b", region="eu-west-1", skip_signature=True)
    again = stores.S3Store("b", region="eu-west-1", skip_signature=True)
    assert connect.connect(treering.bucket(store))[0] is connect.connect(treering.bucket(again))[0]


def test_options_are_said_once() -> None:
    path = treering.bucket("s3://b/a", region="eu-west-1", anonymous=True)
    assert connect.connect(treering.bucket(path, "c")) == (connect.connect(path)[0], "a/c")
    with pytest.raises(UnsupportedError, match="'s3://b/a' has options already; pass its URL with all options"):
        treering.bucket(path, region="eu-west-3")


def test_no_path_of_a_bucket_leads_to_the_disk(tmp_path: Path) -> None:
    path = treering.bucket("s3://b/a", anonymous=True)
    assert str(treering.bucket(path, "/c")) == str(treering.bucket("s3://b/a", "/c")) == "s3://b/a/c"
    assert connect.connect(treering.bucket(path, "/c")) == (connect.connect(path)[0], "a/c")
    with pytest.raises(UnsupportedError, match=r"'\.\.'"):
        treering.bucket(path, "../c")
    for joined in (path / str(tmp_path / "c"), bucket_path("s3://b/a") / str(tmp_path / "c")):
        with pytest.raises(UnsupportedError, match="was made of a URL, and is none"):
            treering.save(joined, {"a": 1})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda path: pickle.loads(pickle.dumps(path))])
def test_a_copy_of_a_path_keeps_its_options(again: Callable[[Any], Any]) -> None:
    path = treering.bucket("s3://b/a", region="eu-west-1", anonymous=True)
    assert connect.connect(again(path)) == connect.connect(path)
    begun = connect.frozen(path)
    assert connect.connect(again(begun)) == connect.connect(begun) == connect.connect(path)


def test_the_name_of_before_says_what_to_call() -> None:
    with pytest.raises(AttributeError, match=r"treering\.bucket\(url, \.\.\.\)"):
        treering.at  # type: ignore[attr-defined]  # noqa: B018


def test_stores_of_obstore() -> None:
    store = stores.S3Store("b", prefix="runs", region="eu-west-1", skip_signature=True)
    path = treering.bucket(store, "a/b")
    assert str(path) == "s3://b/runs/a/b"
    assert (store_of(path).prefix, store_of(path).config["region"]) == (None, "eu-west-1")
    assert str(treering.bucket(store)) == "s3://b/runs"
    azure = stores.AzureStore("c", account_name="acc", skip_signature=True)
    assert str(treering.bucket(azure, "x")) == "abfss://c@acc.dfs.core.windows.net/x"
    assert str(treering.bucket(stores.GCSStore("g", skip_signature=True))) == "gs://g"
    with pytest.raises(UnsupportedError, match="has its own region"):
        treering.bucket(stores.S3Store("d", skip_signature=True), region="eu-west-1")
    with pytest.raises(UnsupportedError, match="no place in a bucket"):
        treering.bucket(stores.MemoryStore())
    with pytest.raises(UnsupportedError, match="no place in a bucket"):
        treering.bucket(3)
    with pytest.raises(UnsupportedError, match="no place in a bucket"):
        treering.bucket(None)
    for other in ("runs/a", "memory://runs/a", "file:///runs/a", "https://host/a"):
        with pytest.raises(UnsupportedError, match=r"is not in a bucket that has options; .*as it is"):
            treering.bucket(other)


def test_options_of_a_given_client() -> None:
    bucket = MemoryBucket("s3://given")
    path = treering.bucket(bucket, "a", grace=0)
    assert str(path) == "s3://given/a"
    assert connect.connect(path / "b") == (bucket, "a/b")
    assert store_at(path).grace == 0


def test_without_obstore(monkeypatch: pytest.MonkeyPatch, keys: None) -> None:
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(MissingExtraError, match="obstore is not installed") as caught:
        treering.load("s3://b/a")
    assert caught.value.hint == "pip install 'treering[cloud]'"
    assert isinstance(caught.value, ImportError)


def test_paths_on_disk_import_nothing_of_buckets(tmp_path: Path) -> None:
    program = f"""
import sys, treering
treering.save({str(tmp_path / "a")!r}, {{"a": 1}})
treering.load({str(tmp_path / "a")!r})
loaded = [name for name in sys.modules if name.startswith(("obstore", "treering._store.objects."))]
assert loaded == ["treering._store.objects.url"], loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_what_lies_in_memory_is_listed_by_the_url_of_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    treering.save("memory://a/b", {"w": 1})
    assert list(names_at("memory://")) == places_at("memory://") == ["a"]


def test_a_fork_does_not_wait_for_requests_of_threads_that_it_does_not_have() -> None:
    assert subprocess.run([sys.executable, "-c", LOCKS], timeout=60, check=False).returncode == 0
