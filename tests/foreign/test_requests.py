"""Requests for trees of other programs in a bucket: as many as their bytes and files take."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering
from tests.buckets import MemoryBucket
from tests.command import copy_path
from tests.reads import read_parts
from treering.leaves import tree_serialize_leaves

MIB = 1 << 20
DRAW = np.random.default_rng(0)
TREES = {
    name: {f"n{n:03}": DRAW.random((side, side), np.float32) for n in range(count)}
    for name, count, side in (("many", 80, 64), ("large", 12, 768))
}


def write_file(path: Path, tree: dict[str, Any]) -> None:
    safetensors.numpy.save_file(tree, path)


def write_own(path: Path, tree: dict[str, Any]) -> None:
    treering.save(path, tree)


def write_folder(path: Path, tree: dict[str, Any]) -> None:
    path.mkdir()
    safetensors.numpy.save_file(tree, path / "model.safetensors")


def write_npz(path: Path, tree: dict[str, Any]) -> None:
    np.savez(path, **tree)


def over_mesh(rows: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(rows, -1), ("a", "b")), PartitionSpec("a", "b"))


def write_orbax(path: Path, tree: dict[str, Any]) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(path, jax.device_put(tree, over_mesh(4)))


def write_leaves(path: Path, tree: dict[str, Any]) -> None:
    tree_serialize_leaves(path, jax.device_put(tree, over_mesh(4)))


FORMS = {
    "foreign.safetensors": write_file,
    "own.safetensors": write_own,
    "a.msgpack": write_own,
    "a.npz": write_npz,
    "hf": write_folder,
    "orbax": write_orbax,
    "leaves": write_leaves,
}


def load(path: Any) -> Any:
    return treering.load(path)


def load_sharded(path: Any) -> Any:
    return treering.load(path, shardings=over_mesh(2))


def load_like(path: Any, tree: dict[str, Any]) -> Any:
    like = {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=over_mesh(2)) for key, leaf in tree.items()}
    return treering.load(path, like)


def load_renamed(path: Any) -> Any:
    found = treering.load(path, key_map=treering.KeyMap([treering.KeyRule("{key}", "in/{key}")]))
    return found["in"]


def load_transposed(path: Any) -> Any:
    found = treering.load(path, key_map=treering.KeyMap([treering.KeyRule("{key}", "{key}", transpose=(1, 0))]))
    return {key: array.T for key, array in found.items()}


def read_each(path: Any) -> Any:
    with treering.open(path) as opened:
        return {name: opened[name][...] for name in opened}


def read_a_share(path: Any, tree: dict[str, Any]) -> None:
    """Read what one of four processes with two devices each reads."""
    places: Any = over_mesh(4).devices_indices_map(tree["n000"].shape).items()
    for key, found in read_parts(path, lambda _: [index for device, index in places if device.id // 2 == 1]).items():
        assert all(np.array_equal(array, tree[key][index]) for index, array in found)


def check(path: Any) -> Any:
    assert treering.verify(path).ok


def compare(path: Any) -> Any:
    assert not treering.diff(path, path, values=True)


def convert(path: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        treering.convert(path, Path(folder, "converted"))
        return treering.load(Path(folder, "converted"))


def copy(path: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        copy_path(path, f"{folder}/{path.name}", overwrite=False)
        return treering.load(f"{folder}/{path.name}")


CALLS = [
    load, load_sharded, load_like, load_renamed, load_transposed, read_each, read_a_share, check, compare, convert,
    copy,
]  # fmt: skip
# Folders of other programs and leaves directories are converted, not copied.
CASES = [(form, call) for form in FORMS for call in CALLS if call is not copy or "." in form]


@functools.lru_cache(maxsize=len(TREES))
def written(form: str, size: str) -> dict[str, bytes]:
    """Return the files of a tree in a form; all calls of a form come one after the other, and it is written once."""
    with tempfile.TemporaryDirectory() as folder:
        FORMS[form](Path(folder, form), TREES[size])
        files = (file for file in Path(folder).rglob("*") if file.is_file())
        return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def count_apart(form: str, call: Callable[..., Any], tree: dict[str, Any]) -> int:
    """Return how many stretches no other request brings: those that lie more than 1 MiB from all that is wanted."""
    large = sum(leaf.nbytes > MIB for leaf in tree.values())
    if call is read_a_share and form not in {"a.msgpack", "orbax", "leaves"}:
        return large * (2 if form == "a.npz" else 1)
    # Headers lie between the arrays; a copy needs none of them, and a load of msgpack reads all that lies there.
    between = call is not copy if form == "a.npz" else form == "a.msgpack" and call in {check, compare, convert}
    return large if between else 0


@pytest.mark.sampled(7)
@pytest.mark.parametrize("size", TREES)
@pytest.mark.parametrize(("form", "call"), CASES)
def test_requests_follow_the_bytes(form: str, call: Callable[..., Any], size: str) -> None:
    tree = TREES[size]
    bucket = MemoryBucket()
    for name, data in written(form, size).items():
        bucket.put(name, data)
    bucket.start_over()
    path = treering.bucket(bucket) / form
    found = call(path, tree) if call in {load_like, read_a_share} else call(path)
    if found is not None:
        assert all(np.array_equal(found[key], leaf) for key, leaf in tree.items())
    times = 2 if call is compare else 1
    needed = times * sum(leaf.nbytes for leaf in tree.values())
    part = needed // 4 if call is read_a_share else needed
    if call is read_a_share and form == "a.npz":
        part, needed = needed, needed + part  # a checksum is of a whole array, all of which is read for it
    most = part / (8 * MIB) + times * (4 * len(bucket.opened) + count_apart(form, call, tree)) + 6
    assert len(bucket.asked) <= most, bucket.asked
    # OCDBT puts the boxes of a leaf anywhere: those who read leaf by leaf receive what is between them, too.
    factor = 2 if form == "orbax" and call in {read_each, compare, convert} else 1.05
    # An object is opened by reading its start, and an archive ends with its directory.
    assert bucket.received <= factor * needed + bucket.asked.count("Get") * (320 << 10)


def test_an_archive_is_read_once_in_whatever_boxes(tmp_path: Path) -> None:
    """Its CRC-32 is of whole arrays: they are put together from the boxes, a few rows at a time."""
    bucket = MemoryBucket()
    tree: dict[str, Any] = {f"n{n}": DRAW.random((1024, 1024), np.float32) for n in range(4)}
    np.savez(tmp_path / "a.npz", **tree)
    bucket.put("a.npz", (tmp_path / "a.npz").read_bytes())
    mesh = over_mesh(4).mesh
    for spec in (("a", "b"), (None, "b"), ("b",), ()):
        bucket.start_over()
        found = treering.load(treering.bucket(bucket) / "a.npz", shardings=NamedSharding(mesh, PartitionSpec(*spec)))
        assert all(np.array_equal(found[key], leaf) for key, leaf in tree.items())
        assert bucket.received <= 1.2 * sum(leaf.nbytes for leaf in tree.values()) + (2 << 20)
