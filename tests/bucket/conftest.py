"""Servers that the tests here ask, one of each for the whole run, and a proxy that spoils what they answer."""

import secrets
from collections.abc import Iterator

import pytest

from torture.bucket_servers import BucketServer, open_azurite, open_gcs_fake, open_rclone
from torture.fault_proxy import FaultProxy


@pytest.fixture(scope="session")
def gcs() -> Iterator[BucketServer]:
    with open_gcs_fake() as server:
        yield server


@pytest.fixture(scope="session")
def rclone() -> Iterator[BucketServer]:
    with open_rclone() as server:
        yield server


@pytest.fixture(scope="session")
def azurite() -> Iterator[BucketServer]:
    """Start Azurite; tests that ask for it are skipped by `missing_azurite`, which says why."""
    with open_azurite() as server:
        yield server


@pytest.fixture
def prefix() -> str:
    """Return a name below which no other test puts anything."""
    return f"tests/{secrets.token_hex(8)}"


@pytest.fixture
def proxy(seaweed: BucketServer) -> Iterator[FaultProxy]:
    with FaultProxy(seaweed.port, whole=seaweed.sign_whole) as proxy:
        yield proxy
