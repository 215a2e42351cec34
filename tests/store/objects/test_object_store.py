"""The store in a bucket keeps the contract of stores, over a bucket in memory and over obstore."""

from __future__ import annotations

from pathlib import PurePath

import obstore.store

from treering._store.api import Store
from treering._store.objects.client import ObstoreClient
from treering._store.objects.memory_bucket import MemoryBucket
from treering._store.objects.store import ObjectStore
from treering.testing import StoreContract


class TestObjectStoreInMemory(StoreContract):
    def make_store(self) -> Store:
        return ObjectStore(MemoryBucket(), "runs/a/", PurePath("runs/a"))


class TestObjectStoreAtTheTop(StoreContract):
    def make_store(self) -> Store:
        return ObjectStore(MemoryBucket(), "", PurePath("bucket"))


class TestObjectStoreByObstore(StoreContract):
    def make_store(self) -> Store:
        client = ObstoreClient(obstore.store.MemoryStore(), "memory://bucket")
        return ObjectStore(client, "runs/a/", PurePath("runs/a"))
