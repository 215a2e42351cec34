"""For tests of stores: one in memory, one that is slow, stale and failing, and what each store must do.

A store keeps documents and data by name under one place: `treering._store.api.Store` is the contract, and
``docs/design/store.md`` says what the disk and buckets do for each method. The processes of a job talk through
messages in it.

For tests of readers and writers of formats: what each of them must do.

All of this is provisional: a later version may change it, and the changelog will say so.
"""

from treering._store.objects.memory import MemoryStore
from treering.testing.faulty import FaultyStore
from treering.testing.formats import ReaderContract, WriterContract
from treering.testing.stores import MessageBoardContract, StoreContract

__all__ = ["FaultyStore", "MemoryStore", "MessageBoardContract", "ReaderContract", "StoreContract", "WriterContract"]
