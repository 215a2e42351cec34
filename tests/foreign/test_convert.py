"""Checkpoints of other programs converted to every form, and read by the programs whose forms these are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import tensorstore

import treering
from tests.trees import assert_same_arrays, is_typed_key

GOLDEN = Path(__file__).parent / "golden" / "orbax"


def _data(array: Any) -> Any:
    return np.asarray(jax.random.key_data(array) if is_typed_key(array) else array)


def _arrays(place: Path, separator: str) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(treering.load(place))
    named = {separator.join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path): leaf for path, leaf in paths}
    return {name: leaf for name, leaf in named.items() if hasattr(leaf, "dtype")}


@pytest.mark.parametrize("name", ["ocdbt_zarr2", "plain_zarr3", "v1_state"])
def test_orbax_in_the_forms_of_peers(name: str, tmp_path: Path) -> None:
    source = GOLDEN / name
    lose = ["arrays", "items", "keys", "metadata", "names", "none", "objects", "scalars", "strings", "structure"]
    treering.convert(source, tmp_path / "a.msgpack", lose=lose)
    state = flax.serialization.msgpack_restore((tmp_path / "a.msgpack").read_bytes())
    for key, array in _arrays(source, "/").items():
        found: Any = state
        for part in key.split("/"):
            found = found[part]
        assert_same_arrays(found, _data(array))
    treering.convert(source, tmp_path / "hf", to="hf", lose=lose, max_file_size=200)
    files = [safetensors.deserialize(file.read_bytes()) for file in (tmp_path / "hf").glob("*.safetensors")]
    tensors = {key: tensor for file in files for key, tensor in file}
    for key, array in _arrays(source, ".").items():
        tensor, data = tensors.pop(key), _data(array)
        assert (tuple(tensor["shape"]), bytes(tensor["data"])) == (data.shape, data.tobytes())
    assert tensors == {}
    treering.convert(source, tmp_path / "a.npz", lose=lose)
    archive = np.load(tmp_path / "a.npz", allow_pickle=False)
    wanted = _arrays(source, "/")
    assert sorted(archive) == sorted(key for key, array in wanted.items() if _data(array).dtype.isbuiltin == 1)
    for key in archive:
        assert_same_arrays(archive[key], _data(wanted[key]))


def test_orbax_as_leaves_that_tensorstore_reads(tmp_path: Path) -> None:
    source = GOLDEN / "plain_zarr2"
    treering.convert(source, tmp_path / "leaves", to="leaves", lose="metadata")
    for key, array in _arrays(source, "/").items():
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(tmp_path / "leaves" / key)}}
        assert_same_arrays(tensorstore.open(spec).result().read().result(), _data(array))
    assert treering.diff(source, tmp_path / "leaves").differences == ()


def _numbers(tree: Any) -> Any:
    return jax.tree.map(_data, tree)


@pytest.mark.parametrize("target", ["checkpoint", "a.safetensors", "leaves"])
def test_a_state_dict_still_loads_like_a_tree_of_other_containers(target: str, tmp_path: Path) -> None:
    like: dict[str, Any] = {"pair": (jnp.arange(3), jnp.zeros(2)), "key": jax.random.key(3)}
    state = {"pair": {"0": like["pair"][0], "1": like["pair"][1]}, "key": jax.random.key_data(like["key"])}
    treering.save(tmp_path / "state.msgpack", state)
    to = "leaves" if target == "leaves" else None
    treering.convert(tmp_path / "state.msgpack", tmp_path / target, to=to)
    found: Any = treering.load(tmp_path / target, like)  # a warning is an error here
    assert type(found["pair"]) is tuple
    assert_same_arrays(*map(_numbers, (found, like)))
    treering.convert(tmp_path / target, tmp_path / "again")
    assert_same_arrays(*map(_numbers, (treering.load(tmp_path / "again", like), like)))


def test_leaves_have_the_chunks_that_a_save_writes(tmp_path: Path) -> None:
    tree = {
        "p": [np.arange(6.0).reshape(2, 3), np.zeros((0, 3))],
        "s": np.array(2),
        "n": 5,
        "half": jnp.ones(40_000, "bfloat16"),
    }
    treering.save(tmp_path / "a", tree)
    treering.convert(tmp_path / "a", tmp_path / "b", to="leaves")
    treering.leaves.tree_serialize_leaves(tmp_path / "c", tree)
    found, wanted = (
        {str(file.relative_to(at)): file for file in at.rglob("*")} for at in (tmp_path / "b", tmp_path / "c")
    )
    chunks = [name for name, file in wanted.items() if file.is_file() and file.name[0].isdigit()]
    assert len(chunks) >= 3
    assert [name for name in chunks if found[name].read_bytes() != wanted[name].read_bytes()] == []
