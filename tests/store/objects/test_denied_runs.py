"""A document of a run that may not be read is told by an error of treering's that names it."""

import errno
import secrets

import pytest

import treering
from tests.store.objects.memory_bucket import MemoryBucket
from treering._store.objects.requests import Answer, Get, Request
from treering.errors import StoreFailed


class DenyingBucket(MemoryBucket):
    """Denies to read what is called so."""

    denied = ""

    def perform(self, request: Request) -> Answer:
        if self.denied and isinstance(request, Get) and request.name.endswith(self.denied):
            raise PermissionError(errno.EACCES, "denied")
        return super().perform(request)


@pytest.mark.parametrize("name", ["run.json", ".run.json.left"])
def test_what_may_not_be_read_is_named(name: str) -> None:
    bucket = DenyingBucket(f"s3://{secrets.token_hex(6)}")
    path = treering.at(bucket) / "run"
    with treering.Run(path) as run:
        for step in (1, 2):
            run.save(step, {"step": step}).result()
    bucket.denied = f"/{name}"
    with pytest.raises(StoreFailed, match=name):
        treering.Run(path, keep=treering.KeepLast(1)).gc(dry_run=False)
    bucket.denied = ""
    assert treering.Run(path).steps() == [1, 2]
