"""Trees of other programs in a leaves directory: read as they are, unverified; what is lost or hostile is an error."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering
from tests import meshes
from tests.leaves.saved import INDEX, index_at
from tests.trees import assert_same
from treering.errors import CorruptError, FormatError, MismatchError, TreeringError, UnsupportedError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

GOLDEN = Path(__file__).parents[1] / "compat" / "golden" / "eformer"
LINE = meshes.line(axis="d")


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A tree that eformer wrote, of small arrays."""
    shutil.copytree(GOLDEN / "plain", tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tree that eformer wrote, of arrays in several chunks."""
    shutil.copytree(GOLDEN / "sharded_2x4", tmp_path / "sharded")
    return tmp_path / "sharded"


def written(path: Path, arrays: dict[str, Any], **metadata: Any) -> Path:
    """A leaves directory by TensorStore alone, with the least index that eformer reads."""
    for name, array in arrays.items():
        spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path / name)}, "metadata": metadata}
        store = ts.open(spec, create=True, shape=array.shape, dtype=ts.dtype(array.dtype)).result()
        store.write(array).result()
    index = {"format": "tensorstore", "arrays": [{"path": name} for name in arrays]}
    (path / INDEX).write_text(json.dumps(index))
    return path


def verified(path: Path) -> dict[str | None, bool]:
    """Which branches have checksums."""
    listing = treering.inspect(path)
    return {prefix or None: prefix not in listing.unverified for prefix in listing.prefixes}


# -------------------------------------------------------------------------------------------------------- read as it is


def test_all_arrays_are_jax_arrays_and_unverified(plain: Path) -> None:
    found = tree_deserialize_leaves(plain)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(found))
    assert list(found["layers"]) == [str(number) for number in range(12)]
    assert verified(plain) == {None: False}


def test_structure_exact_is_the_same_for_it(plain: Path) -> None:
    assert_same(tree_deserialize_leaves(plain, structure="exact"), tree_deserialize_leaves(plain), restored=False)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("metadata", "array"),
    [
        ({"chunks": [3, 5], "compressor": None}, np.arange(96, dtype="f4").reshape(8, 12)),
        ({"chunks": [3, 5], "order": "F"}, np.arange(96, dtype="f4").reshape(8, 12)),
        ({"chunks": [3, 5], "order": "F", "compressor": None}, np.arange(96, dtype="i2").reshape(8, 12)),
        ({"chunks": [3, 5], "dimension_separator": "/"}, np.arange(96, dtype="f4").reshape(8, 12)),
        ({"dtype": ">f4", "compressor": None, "chunks": [8]}, np.arange(96, dtype=">f4")),
        ({"compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1}}, np.arange(96, dtype="f4")),
        ({"compressor": {"id": "zlib", "level": 1}, "chunks": [50]}, np.arange(96, dtype="u1")),
        ({"compressor": {"id": "bz2", "level": 1}}, np.arange(96, dtype="i4")),
    ],
    ids=["ragged", "F", "raw F", "slash", "big endian", "blosc", "zlib", "bz2"],
)
def test_arrays_of_any_layout(metadata: dict[str, Any], array: Any, tmp_path: Path) -> None:
    written(tmp_path, {"a/w": array}, **metadata)
    wanted = array.astype(array.dtype.newbyteorder("="))
    assert_same(np.asarray(tree_deserialize_leaves(tmp_path)["a"]["w"]), wanted)
    if len(array) % 8 == 0:
        found = tree_deserialize_leaves(tmp_path, shardings=NamedSharding(LINE, P("d")))["a"]["w"]
        assert_same(np.asarray(found), wanted)


def test_entries_need_only_their_path_and_others_say_nothing(plain: Path) -> None:
    wanted = tree_deserialize_leaves(plain)
    index = index_at(plain)
    for number, entry in enumerate(index["arrays"]):
        if number % 2:
            del entry["shape"], entry["dtype"]
        else:
            entry |= {"shape": [99], "dtype": "int8", "colour": "red"}
    (plain / INDEX).write_text(json.dumps(index))
    assert_same(tree_deserialize_leaves(plain), wanted, restored=False)


def test_the_oldest_index_has_no_prefixes(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "index_v1", tmp_path / "old")
    assert sorted(tree_deserialize_leaves(tmp_path / "old")) == ["a", "b"]
    with pytest.raises(MismatchError, match="no prefix 'a': its tree has none"):
        tree_deserialize_leaves(tmp_path / "old", prefix="a")


def test_a_prefix_with_a_slash_is_taken_off_the_keys(tmp_path: Path) -> None:
    written(tmp_path, {"a/b/w": np.ones(2, "f4"), "a/b/l/0": np.ones(2, "f4")})
    index = index_at(tmp_path)
    for prefix in ("a/b", "a.b"):
        (tmp_path / INDEX).write_text(json.dumps({"format": "tensorstore", "prefixes": {prefix: index["arrays"]}}))
        found = tree_deserialize_leaves(tmp_path, prefix=prefix, callback=lambda _, key: key)
        assert found == {"w": "w", "l": {"0": "l.0"}}


# ------------------------------------------------------------------------------------------------------- what is lost


def test_a_missing_chunk_is_no_zeros(sharded: Path) -> None:
    (sharded / "s" / "vec" / "2").unlink()
    for arguments in ({}, {"mesh": LINE}, {"callback": lambda array, _: array}):
        with pytest.raises(CorruptError, match="s/vec/2") as caught:
            tree_deserialize_leaves(sharded, prefix=None, **arguments)
        assert "s/vec" in str(caught.value)


@pytest.mark.parametrize("keep", [0, 5])
def test_a_short_chunk_is_an_error(keep: int, sharded: Path) -> None:
    for name in ("vec/2", "both/1.3"):
        chunk = sharded / "s" / name
        data = chunk.read_bytes()
        chunk.write_bytes(data[:keep])
        with pytest.raises(CorruptError, match="s/"):
            tree_deserialize_leaves(sharded)
        chunk.write_bytes(data)
    tree_deserialize_leaves(sharded)


@pytest.mark.parametrize("nbytes", [0, 31, 33])
def test_a_raw_chunk_of_another_size_is_an_error(nbytes: int, tmp_path: Path) -> None:
    written(tmp_path, {"w": np.arange(16, dtype="f4")}, chunks=[8], compressor=None)
    (tmp_path / "w" / "1").write_bytes(bytes(nbytes))
    with pytest.raises(CorruptError, match="w/1"):
        tree_deserialize_leaves(tmp_path)


def test_a_missing_zarray_names_the_leaf(plain: Path) -> None:
    (plain / "layers" / "3" / ".zarray").unlink()
    with pytest.raises(CorruptError, match=r"layers/3/.zarray is missing.*at leaf 'layers/3'"):
        tree_deserialize_leaves(plain)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (b"{", CorruptError),
        (b"[]", CorruptError),
        (b"", CorruptError),
        (b'{"zarr_format": 3}', FormatError),
        (b"{" + b" " * (2 << 20), CorruptError),
    ],
    ids=["cut", "list", "empty", "three", "huge"],
)
def test_a_zarray_that_is_none_names_the_leaf(change: bytes, error: type[TreeringError], plain: Path) -> None:
    (plain / "step" / ".zarray").write_bytes(change)
    with pytest.raises(error, match="step"):
        tree_deserialize_leaves(plain)


def test_filters_are_refused(plain: Path) -> None:
    document = json.loads((plain / "step" / ".zarray").read_text())
    (plain / "step" / ".zarray").write_text(json.dumps(document | {"filters": [{"id": "delta"}]}))
    with pytest.raises(UnsupportedError, match=r"filters.*step"):
        tree_deserialize_leaves(plain)


def test_keys_that_met_in_one_folder_are_told(tmp_path: Path) -> None:
    written(tmp_path, {"a/b": np.ones(2, "f4")})
    index = index_at(tmp_path)
    index["arrays"] *= 2
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CorruptError, match="two keys were saved"):
        tree_deserialize_leaves(tmp_path)


# ------------------------------------------------------------------------------------------------------------- hostile


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "path", ["/etc", "../out", "a/../../out", "a//b", "./a", "a\0b", "", "a/"],
    ids=range(8),
)  # fmt: skip
def test_an_index_leads_nowhere_else(path: str, tmp_path: Path) -> None:
    inside = tmp_path / "in"
    written(tmp_path / "out", {"w": np.ones(2, "f4")})
    written(inside, {"a": np.ones(2, "f4")})
    entry = path.replace("/etc", str(tmp_path / "out" / "w")).replace("out", "out/w")
    (inside / INDEX).write_text(json.dumps({"format": "tensorstore", "arrays": [{"path": entry}]}))
    with pytest.raises(CorruptError, match=r"leads out|none"):
        tree_deserialize_leaves(inside)


@pytest.mark.parametrize("which", ["folder", "zarray", "chunk", "folder above", "index"])
def test_links_inside_are_not_followed(which: str, tmp_path: Path) -> None:
    outside, inside = tmp_path / "out", tmp_path / "in"
    for path in (outside, inside):
        written(path, {"a/w": np.ones(2, "f4"), "b": np.ones(2, "f4")})
    name = {"folder": "a/w", "zarray": "a/w/.zarray", "chunk": "a/w/0", "folder above": "a", "index": INDEX}[which]
    target = inside / name
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    target.symlink_to(outside / name)
    with pytest.raises(TreeringError, match="link"):
        tree_deserialize_leaves(inside)


def test_the_directory_itself_may_be_a_link(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(plain)
    assert tree_deserialize_leaves(tmp_path / "link")["step"].shape == ()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes in folders")
def test_a_pipe_in_place_of_a_chunk_does_not_hang(plain: Path) -> None:
    (plain / "step" / "0").unlink()
    os.mkfifo(plain / "step" / "0")
    with pytest.raises(TreeringError, match="step"):
        tree_deserialize_leaves(plain)


# ---------------------------------------------------------------------------------------------------- whose tree it is


def rewritten(path: Path, name: str, array: Any) -> None:
    """Let another program write the array anew, in its own way."""
    shutil.rmtree(path / name)
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path / name)}}
    ts.open(spec, create=True, shape=array.shape, dtype=ts.dtype(array.dtype)).result().write(array).result()


def test_a_tree_that_another_program_replaced_is_that_programs(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(4), "b": jnp.ones(2), "n": 3})
    index = index_at(tmp_path)
    for name, array in (("w", np.arange(5, dtype="f4")), ("c", np.arange(2, dtype="f4"))):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        (tmp_path / name).mkdir(exist_ok=True)
        rewritten(tmp_path, name, array)
    index["arrays"] = [{"path": "w", "shape": [5], "dtype": "float32"}, {"path": "c", "shape": [2], "dtype": "float32"}]
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert verified(tmp_path) == {None: False}
    assert_same(
        tree_deserialize_leaves(tmp_path),
        {"w": jnp.arange(5, dtype="float32"), "c": jnp.arange(2, dtype="float32")},
        restored=False,
    )


def test_also_where_names_shapes_and_dtypes_are_the_same(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(4), "b": jnp.ones(2)})
    assert verified(tmp_path) == {None: True}
    rewritten(tmp_path, "w", np.full(4, 7, "f4"))
    rewritten(tmp_path, "b", np.full(2, 8, "f4"))
    assert verified(tmp_path) == {None: False}
    assert_same(tree_deserialize_leaves(tmp_path), {"w": jnp.full(4, 7.0), "b": jnp.full(2, 8.0)}, restored=False)


@pytest.mark.parametrize("name", ["w", "b"])
def test_one_array_of_another_program_among_ours_is_damage(name: str, tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(4), "b": jnp.ones(4)})
    rewritten(tmp_path, name, np.full(4, 7, "f4"))
    assert verified(tmp_path) == {None: True}
    with pytest.raises(CorruptError, match=f"{name}/.zarray"):
        tree_deserialize_leaves(tmp_path)


def test_branches_are_judged_each_by_itself(plain: Path) -> None:
    tree_serialize_leaves(plain, {"w": jnp.ones(2), "n": 3}, prefix="ours")
    assert verified(plain) == {None: False, "ours": True}
    assert tree_deserialize_leaves(plain, prefix="ours")["n"] == 3
    (plain / "step" / "0").unlink()
    with pytest.raises(CorruptError, match="step"):
        tree_deserialize_leaves(plain)
    assert tree_deserialize_leaves(plain, prefix="ours")["n"] == 3
