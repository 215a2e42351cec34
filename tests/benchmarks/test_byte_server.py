"""The server that moves bytes keeps what it is given, honours conditions, and says what it was asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, PreconditionError
from obstore.store import S3Store

from benchmarks import bucket_peers, workloads
from benchmarks.byte_bucket import BUCKET, Request, ask_server, in_sequence, remove_objects, start_server, taken_log

pytestmark = pytest.mark.benchmark

PART = 5 << 20


@pytest.fixture
def store() -> Iterator[S3Store]:
    yield S3Store(
        BUCKET, endpoint=start_server(), access_key_id="k", secret_access_key="s", client_options={"allow_http": True}
    )
    remove_objects("")


def test_bytes_come_back_in_ranges_and_from_parts(store: S3Store) -> None:
    data = np.random.default_rng(0).bytes(2 * PART + 1000)
    obstore.put(store, "a/parts", data, use_multipart=True, chunk_size=PART)
    assert sum(request.method == "PUT" for request in taken_log()) == 3
    obstore.put(store, "a/small", data[:5000])
    for name, whole in (("a/parts", data), ("a/small", data[:5000])):
        assert bytes(obstore.get(store, name).bytes()) == whole
        assert obstore.head(store, name)["size"] == len(whole)
        for start, end in ((0, 1), (1, 4000), (PART - 5, PART + 5), (len(data) - 7, len(data))):
            if end <= len(whole):
                assert bytes(obstore.get_range(store, name, start=start, end=end)) == whole[start:end]


def test_conditions_are_honoured(store: S3Store) -> None:
    first = obstore.put(store, "key", b"one", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "key", b"two", mode="create")
    second = obstore.put(store, "key", b"one", mode={"e_tag": first["e_tag"]})
    assert second["e_tag"] != first["e_tag"]
    with pytest.raises(PreconditionError):
        obstore.put(store, "key", b"three", mode={"e_tag": first["e_tag"]})
    with pytest.raises(PreconditionError):
        obstore.get(store, "key", options={"if_match": first["e_tag"]})
    obstore.delete(store, "key")
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "key")


def test_listings_are_paged_and_have_places(store: S3Store) -> None:
    names = [f"top/{place}/{number:04d}" for place in "ab c&<".replace(" ", "") for number in range(700)]
    for name in [*names, "top/z", "top-not"]:
        ask_server("PUT", f"/{BUCKET}/{name.replace('<', '%3C')}", b"x")
    listed = [each["path"] for batch in obstore.list(store, "top") for each in batch]
    assert sorted(listed) == sorted([*names, "top/z"])
    found: Any = obstore.list_with_delimiter(store, "top")
    assert sorted(found["common_prefixes"]) == ["top/&", "top/<", "top/a", "top/b", "top/c"]
    assert [each["path"] for each in found["objects"]] == ["top/z"]
    obstore.delete(store, names[:3])
    assert {each["path"] for batch in obstore.list(store, "top") for each in batch} == {*names[3:], "top/z"}


def test_the_chain_of_requests_is_counted() -> None:
    spans = [(0.0, 1.0), (0.5, 1.5), (1.2, 2.0), (2.0, 3.0), (0.1, 2.9)]
    requests = [Request("GET", "key", "", 200, *span) for span in spans]
    assert in_sequence(requests) == 3
    assert in_sequence([]) == 0


@pytest.mark.parametrize("peer", bucket_peers.PEERS, ids=lambda peer: peer.name)
def test_each_peer_brings_a_tree_back(peer: type[bucket_peers.Peer]) -> None:
    work = workloads.build("A", 2e-4)
    flat = dict(workloads.flat(work.tree))
    one = peer()
    if one.raw:
        data = b"".join(leaf.reshape(-1).view(np.uint8).data for leaf in flat.values())
        room = np.ones(len(data), np.uint8)
        one.save("tree", data)
        one.load("tree", room)
        assert room.tobytes() == data
    else:
        one.save("tree", workloads.to_jax(work.tree))
        found = one.load("tree", work.tree)
        assert workloads.same_leaves(found, flat, jax.Array) is None
    remove_objects("")
