"""The fault proxy does to requests what its words say."""

import os
import time
from typing import Any

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, BaseError, GenericError, PermissionDeniedError

from torture.bucket_servers import BucketServer
from torture.fault_proxy import Fault, FaultProxy, Rule

pytestmark = pytest.mark.bucket

DATA = os.urandom(100_000)


@pytest.fixture
def direct(seaweed: BucketServer) -> Any:
    return seaweed.connect()


@pytest.fixture
def struck(seaweed: BucketServer, proxy: FaultProxy) -> Any:
    """Return a client of the proxy that repeats nothing."""
    return seaweed.at(proxy.port).connect(timeout="2s", retries=0)


def put_struck(store: Any, proxy: FaultProxy, name: str, rule: Rule) -> Exception | None:
    """Create an object under a rule; return what the client said."""
    proxy.strike(rule)
    try:
        obstore.put(store, name, b"mine", mode="create")
    except BaseError as error:
        assert proxy.struck() == 1
        return error
    assert proxy.struck() == 1
    return None


def content(store: Any, name: str) -> bytes | None:
    try:
        return bytes(obstore.get(store, name).bytes())
    except FileNotFoundError:
        return None


@pytest.mark.parametrize(
    ("fault", "done"),
    [
        (Fault.DROP_ANSWER, True),
        (Fault.RESET_REQUEST, False),
        (Fault.RESET_ANSWER, True),
        (Fault.UNAVAILABLE, False),
        (Fault.UNAVAILABLE_DONE, True),
        (Fault.HANG, False),
        (Fault.HANG_DONE, True),
        (Fault.LATE, False),
    ],
)
def test_a_put_without_an_answer(
    direct: Any, struck: Any, proxy: FaultProxy, prefix: str, *, fault: Fault, done: bool
) -> None:
    error = put_struck(struck, proxy, f"{prefix}/a", Rule(fault, "PUT", seconds=3))
    assert isinstance(error, GenericError)
    assert content(direct, f"{prefix}/a") == (b"mine" if done else None)
    assert fault.keeps is (not done and fault is not Fault.LATE)


def test_other_answers_than_were_meant(direct: Any, struck: Any, proxy: FaultProxy, prefix: str) -> None:
    assert isinstance(put_struck(struck, proxy, f"{prefix}/a", Rule(Fault.DENIED)), PermissionDeniedError)
    proxy.heal()
    assert isinstance(put_struck(struck, proxy, f"{prefix}/a", Rule(Fault.CONFLICT)), AlreadyExistsError)
    assert content(direct, f"{prefix}/a") is None
    proxy.heal()
    assert isinstance(put_struck(struck, proxy, f"{prefix}/a", Rule(Fault.TWICE)), AlreadyExistsError)
    assert content(direct, f"{prefix}/a") == b"mine"


def test_a_late_request_arrives_after_its_successor(direct: Any, struck: Any, proxy: FaultProxy, prefix: str) -> None:
    proxy.strike(Rule(Fault.LATE, "PUT"))
    with pytest.raises(GenericError):
        obstore.put(struck, f"{prefix}/a", b"first")
    obstore.put(struck, f"{prefix}/b", b"another")
    assert content(direct, f"{prefix}/a") is None
    obstore.put(struck, f"{prefix}/a", b"second")
    assert content(direct, f"{prefix}/a") == b"first"
    assert proxy.deliver_late() == 0


@pytest.mark.parametrize(
    ("fault", "found"), [(Fault.SHORTEN, "shorter"), (Fault.FLIP, "other"), (Fault.SLOW, "same"), (Fault.TRUNCATE, "")]
)
def test_a_spoiled_body(direct: Any, struck: Any, proxy: FaultProxy, prefix: str, *, fault: Fault, found: str) -> None:
    obstore.put(direct, f"{prefix}/a", DATA)
    proxy.strike(Rule(fault, "GET", times=9, seconds=0.2))
    try:
        read = bytes(obstore.get(struck, f"{prefix}/a").bytes())
    except BaseError:
        assert found == ""
        return
    bits = sum((one ^ other).bit_count() for one, other in zip(read, DATA, strict=False))
    assert (len(read), bits) == {
        "shorter": (len(DATA) // 2, 0), "other": (len(DATA), 1), "same": (len(DATA), 0)
    }[found]  # fmt: skip


def test_a_range_is_ignored(direct: Any, struck: Any, proxy: FaultProxy, prefix: str) -> None:
    obstore.put(direct, f"{prefix}/a", DATA)
    proxy.strike(Rule(Fault.NO_RANGE, "GET"))
    with pytest.raises(GenericError, match="non-partial"):
        obstore.get_range(struck, f"{prefix}/a", start=5, length=10)
    assert proxy.seen[0].ranged
    assert proxy.seen[0].size == len(DATA)


def test_a_stale_answer(direct: Any, struck: Any, proxy: FaultProxy, prefix: str) -> None:
    for data in (b"old", b"new"):
        obstore.put(struck, f"{prefix}/a", data)
        assert content(struck, f"{prefix}/a") == data
    proxy.strike(Rule(Fault.STALE, "GET"))
    assert [content(struck, f"{prefix}/a") for _ in range(2)] == [b"old", b"new"]


def test_requests_are_chosen_and_counted(struck: Any, proxy: FaultProxy, prefix: str) -> None:
    proxy.strike(Rule(Fault.UNAVAILABLE, "PUT", r"/b$", conditional=True, first=2))
    obstore.put(struck, f"{prefix}/a", b"x", mode="create")
    for _ in range(2):
        obstore.put(struck, f"{prefix}/b", b"x")
    with pytest.raises(AlreadyExistsError):
        obstore.put(struck, f"{prefix}/b", b"x", mode="create")
    with pytest.raises(GenericError, match="503"):
        obstore.put(struck, f"{prefix}/b", b"x", mode="create")
    assert [one.fault for one in proxy.seen] == [None] * 4 + [Fault.UNAVAILABLE]
    assert [one.status for one in proxy.seen] == [200, 200, 200, 412, 0]
    assert proxy.seen[0].target == f"/bucket/{prefix}/a"


def test_each_request_takes_longer(seaweed: BucketServer, prefix: str) -> None:
    with FaultProxy(seaweed.port, wait=0.1) as proxy:
        store = seaweed.at(proxy.port).connect()
        begun = time.monotonic()
        obstore.put(store, f"{prefix}/a", b"x")
        assert time.monotonic() - begun >= 0.1
