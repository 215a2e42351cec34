"""What one of the two wrote, the other reads, bit for bit; also when both write into one folder."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh

import treering
from tests.compat.eformer import peer
from treering.errors import CorruptError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

meshes = st.sampled_from(peer.MESHES)
prefixes = st.sampled_from([None, "model", "a/b", "a.b"])
compressors = st.sampled_from(
    [
        None,
        {"id": "zstd", "level": 1},
        {"id": "gzip", "level": 1},
        {"id": "zlib", "level": 1},
        {"id": "bz2", "level": 1},
        {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
    ]
)


def _shardings(tree: Any, mesh: Mesh) -> dict[str, Any]:
    return {key: peer.sharding(leaf, mesh) for key, leaf in peer.flat(tree).items()}


@settings(max_examples=60)
@given(tree=peer.trees(), written=meshes, read=meshes, prefix=prefixes, compressor=compressors)
def test_eformer_reads_ours(tree: Any, written: Mesh, read: Mesh, prefix: str | None, compressor: Any) -> None:
    tree = peer.placed(tree, written)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ckpt")
        tree_serialize_leaves(path, tree, prefix=prefix, compressor=compressor)
        slashed = prefix == "a/b"  # such a prefix eformer does not take off the keys
        shardings = _shardings(tree, read)
        known = {f"a.b.{key}": value for key, value in shardings.items()} if slashed else shardings
        found = peer.load(path, read, prefix=prefix, shardings=known)
        peer.same(found["a"]["b"] if slashed else found, tree)


@settings(max_examples=60)
@given(tree=peer.trees(), written=meshes, read=meshes, prefix=prefixes)
def test_ours_reads_eformer(tree: Any, written: Mesh, read: Mesh, prefix: str | None) -> None:
    tree = peer.placed(tree, written)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ckpt")
        peer.save(path, tree, prefix=prefix)
        found = tree_deserialize_leaves(path, read, prefix=prefix, shardings=_shardings(tree, read))
        peer.same(found, tree)
        checked = treering.verify(path)
        assert checked.ok
        assert not checked.checked


@settings(max_examples=25)
@given(ours=peer.trees(), theirs=peer.trees(), plain=peer.trees(), first=st.booleans())
def test_both_write_into_one_folder(ours: Any, theirs: Any, plain: Any, first: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ckpt")
        if first:
            peer.save(path, theirs, prefix="theirs")
        tree_serialize_leaves(path, ours, prefix="ours")
        if not first:
            peer.save(path, theirs, prefix="theirs")
        tree_serialize_leaves(path, {"plain": plain})
        for mine in (peer.load, lambda where, **options: tree_deserialize_leaves(where, peer.one_device(), **options)):
            peer.same(mine(path, prefix="ours"), ours)
            peer.same(mine(path, prefix="theirs"), theirs)
            peer.same(mine(path), {"plain": plain})
        assert treering.verify(path).ok


def test_eformer_replaces_its_own_prefix_beside_ours(tmp_path: Path) -> None:
    peer.save(tmp_path, {"w": jnp.ones(3)}, prefix="theirs")
    tree_serialize_leaves(tmp_path, {"w": jnp.arange(4), "n": None}, prefix="ours")
    peer.save(tmp_path, {"w": jnp.zeros(3)}, prefix="theirs")
    mesh = peer.one_device()
    assert tree_deserialize_leaves(tmp_path, mesh, prefix="theirs")["w"].tolist() == [0, 0, 0]
    again = tree_deserialize_leaves(tmp_path, mesh, prefix="ours")
    assert again["w"].tolist() == [0, 1, 2, 3]
    assert again["n"] is None


def test_we_replace_what_eformer_wrote(tmp_path: Path) -> None:
    peer.save(tmp_path, {"w": jnp.ones((8, 8)), "old": jnp.ones(2)}, prefix="model")
    tree_serialize_leaves(tmp_path, {"w": jnp.zeros((3,), jnp.int32)}, prefix="model")
    assert not (tmp_path / "model" / "old").exists()
    found = peer.load(tmp_path, prefix="model")
    assert list(found) == ["w"]
    assert found["w"].tolist() == [0, 0, 0]


def test_eformer_over_our_prefix_is_never_taken_for_ours(tmp_path: Path) -> None:
    # Packed as it packs: where they are not, it fails while it writes, and when it stops is chance.
    packed = {"id": "zstd", "level": 1}
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(4), "b": jnp.ones(2)}, prefix="model", compressor=packed)
    tree_serialize_leaves(tmp_path, {"w": jnp.arange(4)}, prefix="other")
    peer.save(tmp_path, {"w": jnp.zeros(4)}, prefix="model")
    with pytest.raises(CorruptError, match="another program saved over"):
        tree_deserialize_leaves(tmp_path, prefix="model")
    assert not treering.verify(tmp_path).ok
    assert tree_deserialize_leaves(tmp_path, prefix="other")["w"].tolist() == [0, 1, 2, 3]
    tree_serialize_leaves(tmp_path, {"w": jnp.zeros(4)}, prefix="model")
    assert tree_deserialize_leaves(tmp_path, prefix="model")["w"].tolist() == [0, 0, 0, 0]
    assert treering.verify(tmp_path).ok


def test_eformer_sees_only_what_it_knows(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "a": jnp.ones(2),
        "n": None,
        "s": "text",
        "i": 3,
        "e": {},
        "np": np.arange(3, dtype=np.int16),
    }
    tree_serialize_leaves(tmp_path, tree)
    found = peer.load(tmp_path)
    assert sorted(found) == ["a", "np"]
    assert found["np"].tolist() == [0, 1, 2]


def test_eformer_loads_through_its_own_callback_and_rules(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones((8, 4)), "b": jnp.ones(8)})
    seen: list[str] = []

    def note(array: Any, key: str) -> Any:
        seen.append(key)
        return array

    peer.load(tmp_path, peer.MESHES[1], callback=note, chunk_size=1)
    assert sorted(seen) == ["b", "w"]


def test_our_index_is_one_that_eformer_takes_apart(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(2)}, prefix="model")
    index = json.loads((tmp_path / "tensorstore_index.json").read_text())
    assert index["format"] == "tensorstore"
    assert index["prefixes"] == {"model": [{"path": "model/w", "shape": [2], "dtype": "float32"}]}


@pytest.mark.parametrize("tree", [{"a": [jnp.ones(2), {"b": jnp.ones(1)}], "c": (jnp.ones(3),)}, jnp.ones(1), {}])
def test_leaf_key_paths_are_eformers(tree: Any) -> None:
    for prefix in ("", "p", "p.q"):
        assert treering.leaves.leaf_key_paths(tree, prefix) == peer.leaves.leaf_key_paths(tree, prefix)


ABSTRACT = jax.ShapeDtypeStruct((2,), "int8")


@pytest.mark.parametrize("x", [1, 2.0, None, "s", [1], np.float32(1), np.ones(2), jnp.ones(2), ABSTRACT], ids=repr)
def test_array_like_is_what_eformer_says(x: Any) -> None:
    assert treering.leaves.is_array_like(x) == peer.leaves.is_array_like(x)


@pytest.mark.parametrize(("prefix", "key"), [("", "a"), ("p", "a"), ("p", ""), ("", ""), (None, "a"), (None, None)])
def test_join_key_is_eformers(prefix: Any, key: Any) -> None:
    assert treering.leaves.join_key(prefix, key) == peer.leaves.join_key(prefix, key)
