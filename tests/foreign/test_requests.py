"""Requests for trees of other programs in a bucket: as many as their bytes take, and those for a tree of one leaf."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering
from tests.store.objects.memory_bucket import CountingBucket
from treering._store.objects.requests import Put

MIB = 1 << 20
DRAW = np.random.default_rng(0)
TREE = {f"n{n:03}": DRAW.standard_normal((64, 64)).astype(np.float32) for n in range(600)}
ONE = {"n000": TREE["n000"]}


def write_file(path: Path, tree: dict[str, Any]) -> None:
    safetensors.numpy.save_file(tree, path)


def write_msgpack(path: Path, tree: dict[str, Any]) -> None:
    treering.save(path, tree)


def write_folder(path: Path, tree: dict[str, Any]) -> None:
    path.mkdir()
    safetensors.numpy.save_file(tree, path / "model.safetensors")


def write_npz(path: Path, tree: dict[str, Any]) -> None:
    np.savez(path, **tree)


def write_orbax(path: Path, tree: dict[str, Any]) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    rows = NamedSharding(Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b")), PartitionSpec("a", "b"))
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(path, jax.device_put(tree, rows))


FORMS = {
    "a.safetensors": write_file,
    "a.msgpack": write_msgpack,
    "a.npz": write_npz,
    "hf": write_folder,
    "orbax": write_orbax,
}


def load(path: Any) -> Any:
    return treering.load(path)


def read_each(path: Any) -> Any:
    with treering.open(path) as opened:
        return {name: opened[name][...] for name in opened}


def check(path: Any) -> Any:
    assert treering.verify(path).ok


def compare(path: Any) -> Any:
    assert not treering.diff(path, path, values=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", [load, read_each, check, compare])
def test_requests_follow_the_bytes(form: str, call: Callable[[Any], Any], tmp_path: Path) -> None:
    asked: list[int] = []
    for name, tree in (("one", ONE), ("all", TREE)):
        bucket = CountingBucket()
        (tmp_path / name).mkdir()
        FORMS[form](tmp_path / name / form, tree)
        for file in (tmp_path / name).rglob("*"):
            if file.is_file():
                bucket.perform(Put(str(file.relative_to(tmp_path / name)), file.read_bytes()))
        bucket.start_over()
        found = call(treering.at(bucket) / form)
        asked.append(len(bucket.asked))
        if found is not None:
            assert all(np.array_equal(found[key], leaf) for key, leaf in tree.items())
    times = 2 if call is compare else 1
    needed = times * sum(leaf.nbytes for leaf in TREE.values())
    # Each time that a file is opened is a GET; that of an archive is opened to see what it is, too.
    assert asked[1] <= needed / (8 * MIB) + 4 * bucket.asked.count("Get") + asked[0]
    assert bucket.asked.count("Range") <= 40 * times
    assert bucket.received <= 1.5 * needed + 8 * MIB
