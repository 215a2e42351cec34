"""Leaves directories on a real server: what treering saves there TensorStore reads, and of two savers one wins."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import PartitionSpec

import treering as tr
from tests.leaves.jobs_of_threads import Job
from tests.leaves.saved import put
from tests.stores import located, store_at
from tests.trees import assert_unchanged
from torture.bucket_servers import BucketServer
from treering.errors import BusyError
from treering.leaves import index_leaves, tree_deserialize_leaves, tree_serialize_leaves

pytestmark = pytest.mark.bucket

INDEX = "tensorstore_index.json"
TREE = {"w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "layer.0": np.arange(40_000), "step": 7}


@pytest.fixture
def path(seaweed: BucketServer, prefix: str, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    return f"{seaweed.url}/{prefix}/leaves"


def index_of(path: str) -> Any:
    found = store_at(path).read(INDEX)
    assert found is not None
    return json.loads(found.data)


def read_by_tensorstore(path: str, seaweed: BucketServer, entry: Any) -> Any:
    """Return an array that the index lists, as another program reads it."""
    kvstore = {
        "driver": "s3",
        "bucket": seaweed.bucket,
        "path": f"{path.removeprefix(seaweed.url)[1:]}/{entry['path']}/",
        "endpoint": seaweed.endpoint,
        "aws_region": "us-east-1",
    }
    array = tensorstore.open({"driver": "zarr", "kvstore": kvstore}, open=True).result()
    return np.asarray(array.read().result())


def test_tensorstore_reads_what_was_saved(path: str, seaweed: BucketServer) -> None:
    tree_serialize_leaves(path, TREE, prefix="model", chunk_bytes=1 << 16)
    tree_serialize_leaves(path, {"m": jnp.ones(3)}, compressor={"id": "zstd", "level": 1})
    index = index_of(path)
    wanted = (TREE["w"], TREE["layer.0"], np.ones(3, np.float32))
    for entry, array in zip((*index["prefixes"]["model"], *index["arrays"]), wanted, strict=True):
        assert np.array_equal(read_by_tensorstore(path, seaweed, entry), np.asarray(array))


def test_processes_save_together(path: str, seaweed: BucketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, 4)
    rows = put(jnp.arange(64.0).reshape(8, 8), PartitionSpec("x"))
    large = put(jnp.arange(3 << 20, dtype=jnp.float32), PartitionSpec())
    for prefix in ("model", "model", "other"):
        tree = {"rows": rows, "large": large, **TREE}
        assert set(job.save(located(path), tree, prefix=prefix).values()) == {None}
    assert_unchanged(tree_deserialize_leaves(path, prefix="other", structure="exact")["layer.0"], TREE["layer.0"])
    assert tr.verify(path).ok
    entries = {entry["path"].split("/")[-1]: entry for entry in index_of(path)["prefixes"]["model"]}
    for name, array in (("rows", rows), ("large", large), ("w", TREE["w"])):
        assert np.array_equal(read_by_tensorstore(path, seaweed, entries[name]), np.asarray(array))
    assert {found.name for found in store_at(path).list() if "/" not in found.name} == {INDEX}


def test_save_load_and_overwrite(path: str) -> None:
    tree = {**TREE, **{str(number): np.full(3, number) for number in range(100)}, "large": np.zeros(5 << 20)}
    tree_serialize_leaves(path, tree)
    tree_serialize_leaves(path, TREE, prefix="other")
    tree_serialize_leaves(path, tree)
    assert_unchanged(tree_deserialize_leaves(path, structure="exact"), tree)
    assert_unchanged(tr.load(path, at="other"), TREE)
    assert tr.verify(path).ok
    assert len(index_of(path)["treering"][""]["superseded"]) == 1


def test_a_save_that_is_indexed_later(path: str) -> None:
    for number in range(3):
        tree_serialize_leaves(path, {"m": np.full(3, number)}, prefix="model", write_index=False)
        tree_serialize_leaves(path, TREE)
    index_leaves(path)
    assert_unchanged(tree_deserialize_leaves(path, prefix="model"), {"m": np.full(3, 2)})
    assert_unchanged(tree_deserialize_leaves(path, structure="exact"), TREE)
    assert tr.verify(path).ok


@pytest.mark.parametrize("prefix_of", [lambda saver: "same", lambda saver: f"prefix{saver}"], ids=["same", "different"])
def test_of_savers_at_once_none_is_lost(path: str, prefix_of: Callable[[int], str]) -> None:
    tree_serialize_leaves(path, TREE, prefix="first")
    ready = threading.Barrier(6)
    saved: list[int] = []
    refused: list[int] = []

    def save(saver: int) -> None:
        ready.wait()
        try:
            tree_serialize_leaves(path, {"m": jnp.full(3, saver)}, prefix=prefix_of(saver))
            saved.append(saver)
        except BusyError:
            refused.append(saver)

    threads = [threading.Thread(target=save, args=(saver,)) for saver in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(saved) + len(refused) == 6
    assert saved
    branches = {prefix: tree_deserialize_leaves(path, prefix=prefix) for prefix in index_of(path)["prefixes"]}
    assert_unchanged(branches.pop("first")["step"], 7)
    # Every acknowledged save is there, or one that came after it; nothing of the others is.
    assert set(branches) == {prefix_of(saver) for saver in saved}
    for prefix, tree in branches.items():
        assert int(tree["m"][0]) in [saver for saver in saved if prefix_of(saver) == prefix]
    named = {
        name.split("/")[1] for name in (one["path"] for some in index_of(path)["prefixes"].values() for one in some)
    }
    waits = {one["attempt"] for node in index_of(path)["treering"].values() for one in node.get("superseded", ())}
    there = {found.name.split("/")[1] for found in store_at(path).list(".treering/")}
    assert there == named | waits


def test_a_copy_on_disk_is_a_leaves_directory(path: str, tmp_path: Path) -> None:
    tree_serialize_leaves(path, TREE, prefix="model")
    store = store_at(path)
    for found in list(store.list()):
        (tmp_path / found.name).parent.mkdir(parents=True, exist_ok=True)
        with store.open_file(found.name) as file:
            (tmp_path / found.name).write_bytes(file.read(0, file.size))
    assert_unchanged(tree_deserialize_leaves(tmp_path, prefix="model", structure="exact"), TREE)
    assert tr.verify(tmp_path).ok
