"""Plain URLs of a bucket that lead to a client of a test: the command line, for one, takes no other paths."""

from __future__ import annotations

from pathlib import PurePath

from treering._store.objects import connect
from treering._store.objects.requests import Client
from treering._store.objects.url import bucket_path


def lead_to(client: Client, *, grace: float | None = None) -> PurePath:
    """Let all plain URLs of the bucket of a client lead to that client, and return the path of the bucket."""
    options = connect.BucketOptions(grace=grace)
    connect._BUCKETS[client.shown] = connect.Connection(client.shown, options, client)
    return bucket_path(client.shown)
