"""Requests for trees that lie in many boxes: as many as their bytes take, whatever reads them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering
from tests.store.objects.memory_bucket import CountingBucket

MIB = 1 << 20
SPECS = [PartitionSpec(), PartitionSpec("a"), PartitionSpec("a", "b"), PartitionSpec(None, "b")]


def sharding(rows: int, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(rows, -1), ("a", "b")), spec)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A tree in a bucket, in boxes of a mesh of 4 x 2."""

    bucket: CountingBucket
    path: Any
    tree: dict[str, Any]
    spec: PartitionSpec

    @contextlib.contextmanager
    def few_requests(self, *, share: float = 1.0, times: int = 1) -> Iterator[None]:
        """Require that no more is asked for, and received, than a part of the arrays takes."""
        self.bucket.start_over()
        yield
        needed = share * times * sum(leaf.nbytes for leaf in self.tree.values())
        files = sum(name.endswith(".safetensors") for name in self.bucket._objects if name.startswith("saved/"))
        assert len(self.bucket.asked) <= needed / (8 * MIB) + 4 * files + 6, self.bucket.asked
        # What a file and its index say of its boxes is read too.
        assert self.bucket.received <= 1.05 * needed + times * self.described

    @property
    def described(self) -> int:
        """Bytes of the index, and of the header of the data."""
        kept = self.bucket._objects.items()
        own = {name: there.data for name, there in kept if name.startswith("saved/")}
        headers = (8 + int.from_bytes(data[:8], "little") for name, data in own.items() if name.endswith("tensors"))
        return sum(headers) + sum(len(data) for name, data in own.items() if name.endswith(".json")) + (1 << 18)


@pytest.fixture(scope="module", params=[*itertools.product(SPECS[:3], [(600, 64), (24, 768)])], ids=str)
def saved(request: pytest.FixtureRequest) -> Saved:
    spec, (count, side) = request.param
    bucket = CountingBucket()
    rows = sharding(4, spec)
    tree = {f"n{n:03}": np.full((side, side), n, np.float32) for n in range(count)}
    treering.save(path := treering.at(bucket) / "saved", jax.device_put(tree, rows))
    return Saved(bucket, path, tree, spec)


def require_equal(found: Any, tree: Any) -> None:
    assert found.keys() == tree.keys()
    assert all(np.array_equal(found[name], leaf) for name, leaf in tree.items())


def test_a_plain_load(saved: Saved) -> None:
    with saved.few_requests():
        found = treering.load(saved.path)
    require_equal(found, saved.tree)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows", [4, 2])
def test_a_load_over_a_mesh(saved: Saved, rows: int, spec: PartitionSpec) -> None:
    with saved.few_requests():
        found = treering.load(saved.path, shardings=sharding(rows, spec))
    require_equal(found, saved.tree)


def test_a_load_like_a_tree(saved: Saved) -> None:
    one = sharding(2, SPECS[2])
    like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one) for name, leaf in saved.tree.items()}
    with saved.few_requests():
        found = treering.load(saved.path, like=like)
    require_equal(found, saved.tree)
