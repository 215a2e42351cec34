"""The servers of the tests do what the tests rest on, whatever treering does."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from torture.bucket_servers import BucketServer, missing_azurite

pytestmark = pytest.mark.bucket


@pytest.fixture(
    params=[
        "seaweed",
        "gcs",
        pytest.param("azurite", marks=pytest.mark.skipif(missing_azurite() is not None, reason=f"{missing_azurite()}")),
    ]
)
def server(request: pytest.FixtureRequest) -> BucketServer:
    found: BucketServer = request.getfixturevalue(request.param)
    return found


def version_of(result: Any) -> Any:
    """Return the condition that what was put is still there."""
    return {name: value for name, value in result.items() if value is not None}


def wins(store: Any, name: str, mode: Any) -> int:
    """Put at once from many threads, and return how many were told that it is done."""

    def put(number: int) -> bool:
        try:
            obstore.put(store, name, b"%d" % number, mode=mode)
        except (AlreadyExistsError, PreconditionError):
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        return sum(pool.map(put, range(8)))


def test_versions_are_compared(server: BucketServer, prefix: str) -> None:
    store, name = server.connect(), f"{prefix}/a b/%é#+"
    first = version_of(obstore.put(store, name, b"one", mode="create"))
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, name, b"two", mode="create")
    obstore.put(store, name, b"three", mode=first)
    with pytest.raises(PreconditionError):
        obstore.put(store, name, b"four", mode=first)
    assert bytes(obstore.get(store, name).bytes()) == b"three"
    assert [one["path"] for one in obstore.list(store, prefix).collect()] == [name]


def test_one_of_many_wins(server: BucketServer, prefix: str) -> None:
    store = server.connect()
    for number in range(5):
        assert wins(store, f"{prefix}/{number}", "create") == 1
        current = version_of(obstore.put(store, f"{prefix}/{number}", b"base"))
        assert wins(store, f"{prefix}/{number}", current) == 1


def test_parts_ranges_and_many_names(server: BucketServer, prefix: str) -> None:
    store, data = server.connect(), os.urandom(12 << 20)
    obstore.put(store, f"{prefix}/large", [data[start : start + (1 << 20)] for start in range(0, len(data), 1 << 20)])
    assert obstore.head(store, f"{prefix}/large")["size"] == len(data)
    assert bytes(obstore.get_range(store, f"{prefix}/large", start=5 << 20, length=9)) == data[5 << 20 :][:9]
    names = [f"{prefix}/many/{number}" for number in range(20)]
    for name in names:
        obstore.put(store, name, b"x")
    assert obstore.list_with_delimiter(store, prefix)["common_prefixes"] == [f"{prefix}/many"]
    obstore.delete(store, names)
    assert [one["path"] for one in obstore.list(store, prefix).collect()] == [f"{prefix}/large"]


def test_some_may_not_list(seaweed: BucketServer, prefix: str) -> None:
    store = seaweed.as_unlisted().connect()
    obstore.put(store, f"{prefix}/a", b"x")
    assert bytes(obstore.get(store, f"{prefix}/a").bytes()) == b"x"
    with pytest.raises(BaseError):
        obstore.list(store, prefix).collect()


def test_rclone_ignores_conditions(rclone: BucketServer, prefix: str) -> None:
    store = rclone.connect()
    obstore.put(store, f"{prefix}/a", b"one", mode="create")
    obstore.put(store, f"{prefix}/a", b"two", mode="create")
    assert bytes(obstore.get(store, f"{prefix}/a").bytes()) == b"two"


def test_a_server_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    program = """
from torture.bucket_servers import open_rclone
with open_rclone() as server:
    print(server.port, flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None
        server = BucketServer("s3", f"http://127.0.0.1:{int(child.stdout.readline())}")
        obstore.put(server.connect(), "a", b"x")
        child.send_signal(signal.SIGKILL)
        child.wait()
    with pytest.raises(BaseError):
        obstore.get(server.connect(connect_timeout="1s", timeout="2s"), "a")
