"""The store in buckets keeps the contract on real servers, and refuses one that ignores conditions."""

import itertools
from typing import Any

import pytest

from tests.buckets import ObstoreClient, store_in
from torture import bucket_servers
from torture.bucket_servers import BucketServer
from treering.testing import StoreContract

pytestmark = pytest.mark.bucket


class _OnServer(StoreContract):
    """The contract on the server that a subclass names."""

    @pytest.fixture(autouse=True)
    def _ask(self, request: pytest.FixtureRequest, prefix: str) -> None:
        server: BucketServer = request.getfixturevalue(self.name)
        self.client = ObstoreClient(server.connect(), server.url)
        self.prefix = prefix
        self.numbers = itertools.count()

    name = ""

    def make_store(self) -> Any:
        return store_in(self.client, f"{self.prefix}/{next(self.numbers)}", grace=0)


class TestOnSeaweed(_OnServer):
    name = "seaweed"


class TestOnTheFakeOfGcs(_OnServer):
    name = "gcs"


@pytest.mark.skipif(bucket_servers.missing_azurite() is not None, reason=f"{bucket_servers.missing_azurite()}")
class TestOnAzurite(_OnServer):
    name = "azurite"


def test_a_server_that_ignores_conditions_is_refused(rclone: BucketServer, prefix: str) -> None:
    store = store_in(ObstoreClient(rclone.connect(), rclone.url), prefix)
    with pytest.raises(OSError, match="does not heed conditions"):
        store.transaction().begin(".treering.json.0123456789abcdef.treering-tmp", None)
    assert store.names() == ["treering.json"]
