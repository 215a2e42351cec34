"""Requests for trees that lie in many boxes: as many as their bytes take, whatever reads them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering
from tests import limits, reads
from tests.buckets import MemoryBucket
from tests.checkpoint.together import Loading, loading
from tests.command import copy_path
from tests.reads import read_parts

__all__ = ["loading"]

MIB = 1 << 20
SPECS = [PartitionSpec(), PartitionSpec("a"), PartitionSpec("a", "b"), PartitionSpec(None, "b")]


def sharding(rows: int, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(rows, -1), ("a", "b")), spec)


@dataclasses.dataclass(frozen=True)
class Saved:
    """A tree in a bucket, in boxes of a mesh of 4 x 2."""

    bucket: MemoryBucket
    path: Any
    tree: dict[str, Any]
    spec: PartitionSpec

    @contextlib.contextmanager
    def few_requests(self, *, times: int = 1, share: int = 1, further: int = 0) -> Iterator[None]:
        """Require that no more is asked for, and received, than the arrays take.

        Args:
            times: how often all of them are read.
            share: which part of the bytes is wanted.
            further: requests beside 1 for 8 MiB of them, 4 for each of the two files, the index and the data, and 6.
        """
        self.bucket.start_over()
        yield
        needed = times * sum(leaf.nbytes for leaf in self.tree.values())
        most = needed / share / (8 * MIB) + 4 * times * 2 + 6 + further
        assert len(self.bucket.asked) <= most, self.bucket.asked
        assert self.bucket.received <= 1.05 * needed + times * self.described

    @property
    def described(self) -> int:
        """Bytes of the index, and of the header of the data, with what an open file is begun with."""
        kept = self.bucket._objects.items()
        own = {name: there.data for name, there in kept if name.startswith("saved/")}
        headers = (8 + int.from_bytes(data[:8], "little") for name, data in own.items() if name.endswith("tensors"))
        return sum(headers) + sum(len(data) for name, data in own.items() if name.endswith(".json")) + (1 << 19)


@pytest.fixture(scope="module", params=[*itertools.product(SPECS[:3], [(80, 64), (24, 768)])], ids=str)
def saved(request: pytest.FixtureRequest) -> Saved:
    spec, (count, side) = request.param
    bucket = MemoryBucket()
    rows = sharding(4, spec)
    tree = {f"n{n:03}": np.full((side, side), n, np.float32) for n in range(count)}
    treering.save(path := treering.bucket(bucket) / "saved", jax.device_put(tree, rows))
    return Saved(bucket, path, tree, spec)


def require_equal(found: Any, tree: Any) -> None:
    assert found.keys() == tree.keys()
    assert all(np.array_equal(found[name], leaf) for name, leaf in tree.items())


@pytest.mark.sampled(5)
def test_a_plain_load(saved: Saved) -> None:
    with saved.few_requests():
        found = treering.load(saved.path)
    require_equal(found, saved.tree)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows", [4, 2])
def test_a_load_over_a_mesh(saved: Saved, rows: int, spec: PartitionSpec) -> None:
    with saved.few_requests():
        found = treering.load(saved.path, shardings=sharding(rows, spec))
    require_equal(found, saved.tree)


@pytest.mark.sampled(5)
def test_a_load_like_a_tree(saved: Saved) -> None:
    one = sharding(2, SPECS[2])
    like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one) for name, leaf in saved.tree.items()}
    with saved.few_requests():
        found = treering.load(saved.path, like=like)
    require_equal(found, saved.tree)


@pytest.mark.sampled(5)
def test_a_checkpoint_that_a_run_resumes_from(saved: Saved) -> None:
    fresh = jax.device_put(saved.tree, sharding(2, SPECS[1]))
    with treering.Run(saved.path.parent / "run") as run:
        run.save(1, fresh, force=True)
    with saved.few_requests():
        found = treering.Run(saved.path.parent / "run").load_or_init(lambda: fresh)
    require_equal(found.tree, saved.tree)


@pytest.mark.sampled(5)
def test_leaf_by_leaf(saved: Saved) -> None:
    with saved.few_requests(), treering.open(saved.path) as opened:
        found = {name: opened[name][...] for name in opened}
    require_equal(found, saved.tree)


@pytest.mark.sampled(5)
def test_what_a_check_reads(saved: Saved) -> None:
    with saved.few_requests():
        assert treering.verify(saved.path).ok


@pytest.mark.sampled(5)
def test_what_a_comparison_reads(saved: Saved) -> None:
    with saved.few_requests(times=2):
        assert not treering.diff(saved.path, saved.path, values=True)


@pytest.mark.sampled(5)
def test_what_a_conversion_reads(saved: Saved, tmp_path: Path) -> None:
    with saved.few_requests():
        treering.convert(saved.path, tmp_path / "converted")
    require_equal(treering.load(tmp_path / "converted"), saved.tree)


@pytest.mark.sampled(5)
def test_what_a_copy_reads(saved: Saved, tmp_path: Path) -> None:
    with saved.few_requests():
        copy_path(saved.path, str(tmp_path / "copy"), overwrite=False)
    require_equal(treering.load(tmp_path / "copy"), saved.tree)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spec", SPECS[1:], ids=str)
def test_what_each_of_four_processes_reads(saved: Saved, spec: PartitionSpec) -> None:
    """Each has two devices, and reads what lies between its boxes, too, where that is little."""
    share = 4 if "a" in spec else 1
    # A fourth of a large leaf is more than 1 MiB away from that of the next one, and takes a request.
    is_apart = share > 1 and max(leaf.nbytes for leaf in saved.tree.values()) > 2 * MIB
    for process in range(4):
        few = saved.few_requests(share=share, further=len(saved.tree) if is_apart else 0)

        def parts(key: str, process: int = process) -> list[Any]:
            places: Any = sharding(4, spec).devices_indices_map(saved.tree[key].shape).items()
            return [index for device, index in places if device.id // 2 == process]

        with few:
            read = read_parts(saved.path, parts)
        assert read.keys() == saved.tree.keys()
        for key, found in read.items():
            assert all(np.array_equal(array, saved.tree[key][index]) for index, array in found)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_what_a_joint_load_reads(saved: Saved, spec: PartitionSpec, loading: Loading) -> None:
    """This process plays all four, which read each byte once, and exchange what they read for each other."""
    # The index is looked at once more at the end.
    with saved.few_requests(further=1):
        found = treering.load(saved.path, shardings=sharding(4, spec), timeout=20)
    require_equal(found, saved.tree)
    assert loading.meetings


@pytest.mark.sampled(5)
def test_through_a_map(saved: Saved) -> None:
    for order in (None, (1, 0)):
        names = treering.KeyMap([treering.KeyRule("{key}", "{key}", transpose=order)])
        with saved.few_requests():
            found = treering.load(saved.path, key_map=names)
        require_equal({key: array if order is None else array.T for key, array in found.items()}, saved.tree)


@pytest.mark.sampled(5)
def test_few_bytes_are_in_memory_beside_the_arrays(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read at once is bounded by the threads and the bytes of a group, however many leaves lie together."""
    limits.lower(monkeypatch, far_group=256 << 10, slab=128 << 10)
    rooms = reads.memory_held(monkeypatch)
    found = treering.load(saved.path, shardings=sharding(2, SPECS[3]))
    require_equal(found, saved.tree)
    assert max(rooms, default=0) <= 16 * (256 << 10)
