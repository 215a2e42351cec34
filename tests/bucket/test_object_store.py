"""What the store in a bucket does on a real server."""

from __future__ import annotations

import os
from pathlib import PurePath

import pytest

from torture.bucket_servers import BucketServer
from treering._store.objects.client import ObstoreClient
from treering._store.objects.requests import Absent, Delete, Get, List, Put, Status
from treering._store.objects.signed_requests import list_past
from treering._store.objects.store import ObjectStore

pytestmark = pytest.mark.bucket


def test_large_objects_are_written_in_parts_and_read_by_ranges(seaweed: BucketServer, prefix: str) -> None:
    client = ObstoreClient(seaweed.connect(), seaweed.url)
    store = ObjectStore(client, f"{prefix}/", PurePath(prefix))
    data = os.urandom(40 << 20)
    views = [memoryview(data)[start : start + 700_001] for start in range(0, len(data), 700_001)]
    store.create("large", views, len(data))
    room = bytearray(len(data))
    with store.open_file("large") as file:
        assert file.size == len(data)
        file.read_into([(0, memoryview(room)[: 30 << 20]), (30 << 20, memoryview(room)[30 << 20 :])])
        assert bytes(room) == data
        assert file.read(20 << 20, 100) == data[20 << 20 :][:100]
    with pytest.raises(OSError, match="announced"):
        store.create("short", [data], len(data) + 1)
    assert store.names() == ["large"]


def test_a_version_is_deleted_only_if_it_is_there(seaweed: BucketServer, prefix: str) -> None:
    client, name = ObstoreClient(seaweed.connect(), seaweed.url), f"{prefix}/a b%41#+é"
    first = client.perform(Put(name, b"one", Absent.ABSENT)).found
    assert first is not None
    second = client.perform(Put(name, b"two", first.version)).found
    assert second is not None
    assert client.perform(Delete((name,), first.version)).status is Status.REFUSED
    assert client.perform(Get(name)).data == b"two"
    assert client.perform(Delete((name,), second.version)).status is Status.DONE
    assert client.perform(Get(name)).status is Status.MISSING


def test_a_listing_that_is_read_here_says_what_that_of_obstore_says(seaweed: BucketServer, prefix: str) -> None:
    client = ObstoreClient(seaweed.connect(), seaweed.url)
    for number in range(5):
        client.perform(Put(f"{prefix}/a b+%41é&{number}/{number}", b"one"))
        client.perform(Put(f"{prefix}/{number}~", b"one"))
    for deep in (False, True):
        wanted = client.perform(List(f"{prefix}/", deep))
        stores = client._stores
        found = list_past(stores.variant(0), stores.at_url, f"{prefix}/", deep=deep, seconds=60.0)
        assert found is not None
        assert sorted(found.listed, key=str) == sorted(wanted.listed, key=str)
        assert sorted(found.places) == sorted(wanted.places)
