"""Another program's objects whose names obstore refuses, with the whole page of a listing on which they stand."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator

import numpy as np
import pytest
from obstore.store import S3Store

import treering as tr
from tests.buckets import List, ObstoreClient, without_settings
from torture import gcs_fake
from torture.bucket_servers import BucketServer
from torture.gcs_fake import GcsFake
from treering._store.objects.signed_requests import how_to_remove
from treering.errors import StoreError

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


@pytest.mark.parametrize("most", [1, 2, 1000])
@pytest.mark.parametrize("keys", [*([key] for key in KEYS), KEYS], ids=ascii)
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
