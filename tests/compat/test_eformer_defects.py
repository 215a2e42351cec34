"""What goes wrong in eformer 0.0.101, one test for each case: the same call here, and what it does instead.

The numbers are those of ``docs/guides/coming-from-eformer.md``.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import clocks, meshes, warm
from tests.compat.golden_files import EFORMER
from tests.trees import assert_unchanged
from treering import serialization
from treering.errors import CorruptError, MismatchError, NotFoundError, NotShardedWarning, UnsupportedError
from treering.leaves import index_leaves, leaf_key_paths, tree_deserialize_leaves, tree_serialize_leaves
from treering.sharding import (
    apply_sharding_tree,
    create_sharding_tree_from_index,
    make_itsharded,
    match_partition_rules,
)

INDEX = "tensorstore_index.json"
ONE = meshes.line(1)
ROW = meshes.line(axis="d")
GRID = meshes.grid(2, 4, axes=("dp", "tp"))
ROWS = NamedSharding(ROW, P("d"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def exact(path: Path, prefix: str | None = None) -> Any:
    return tree_deserialize_leaves(path, prefix=prefix, structure="exact")


def entries(path: Path) -> Any:
    return json.loads((path / INDEX).read_text(encoding="utf-8"))


# --------------------------------------------------------------------------------------------------- data that was lost


def test_01_none_numbers_text_and_empty_containers_come_back(path: Path) -> None:
    tree = {"a": jnp.ones(2), "i": 3, "f": 2.5, "b": True, "s": "hi", "y": b"\0", "n": None, "e": {}, "l": [], "t": ()}
    tree_serialize_leaves(path, tree)
    assert_unchanged(exact(path), tree)
    others: list[Any] = [{}, {"n": None, "i": 1}, [], None, 5]
    for alone in others:
        tree_serialize_leaves(path, alone)
        assert_unchanged(exact(path), alone)


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from treering.leaves import tree_serialize_leaves

def progress(done, total):
    if done * 3 >= total:
        os.kill(os.getpid(), signal.SIGKILL)

tree = {str(n): jnp.full(1 << 16, 2.0) for n in range(24)}
tree_serialize_leaves(sys.argv[1], tree, progress=progress)
"""


def kill_a_save(path: Path) -> None:
    done = warm.run("-c", KILLED, str(path))
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_02_a_save_that_is_killed_mixes_nothing(path: Path) -> None:
    tree_serialize_leaves(path, {str(n): jnp.full(1 << 16, 1.0) for n in range(24)})
    kill_a_save(path)
    assert {float(leaf[0]) for leaf in exact(path).values()} == {1.0}
    assert tr.verify(path).ok
    tree_serialize_leaves(path, {"w": jnp.ones(2)})
    assert list(exact(path)) == ["w"]


def test_03_a_tree_of_shardings_is_made_of_a_prefixed_index(path: Path) -> None:
    tree_serialize_leaves(path, {"w": jnp.ones(8)}, prefix="model")
    assert create_sharding_tree_from_index(path, ROW, "model", P("d")) == {"w": ROWS}
    with pytest.raises(ValueError, match="there are 'model'"):
        create_sharding_tree_from_index(path, ROW, "other")


class Later:
    """A manager that writes when it is waited for."""

    def __init__(self) -> None:
        self.waiting: list[Any] = []

    def serialize_with_paths(self, arrays: Any, paths: Any, *, on_commit_callback: Any) -> None:
        self.waiting.append((list(arrays), list(paths), on_commit_callback))

    def wait_until_finished(self) -> None:
        import tensorstore

        for arrays, paths, commit in self.waiting:
            for array, folder in zip(arrays, paths, strict=True):
                spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder)}}
                options = {"dtype": array.dtype.name, "shape": array.shape, "create": True}
                tensorstore.open(spec, **options).result().write(np.asarray(array)).result()
            commit()
        self.waiting = []


def test_04_the_index_is_written_after_the_data(path: Path) -> None:
    manager = Later()
    tree_serialize_leaves(path, {"w": jnp.ones(8)}, manager)
    assert not (path / INDEX).exists()
    manager.wait_until_finished()
    assert exact(path)["w"].tolist() == [1.0] * 8


def test_05_a_missing_chunk_is_an_error(path: Path) -> None:
    tree_serialize_leaves(path, {"a": jax.device_put(jnp.arange(8.0), ROWS)})
    (path / "a" / "3").unlink()
    with pytest.raises(CorruptError, match="'a'"):
        tree_deserialize_leaves(path)
    assert not tr.verify(path)


def test_06_a_flipped_byte_is_an_error(path: Path) -> None:
    tree_serialize_leaves(path, {"a": np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8)})
    data = bytearray((path / "a" / "0").read_bytes())
    data[2000] ^= 0xFF
    (path / "a" / "0").write_bytes(data)
    with pytest.raises(CorruptError, match="a/0"):
        tree_deserialize_leaves(path)
    [finding] = tr.verify(path).findings
    assert finding.key == "a"


def test_07_wide_arrays_are_never_narrowed(path: Path) -> None:
    with jax.enable_x64(True):
        tree = {"i": jnp.asarray([2**40 + 1]), "f": jnp.asarray([1e300])}
        tree_serialize_leaves(path, tree)
    with pytest.raises(UnsupportedError, match=r"i \(int64\)"):
        tree_deserialize_leaves(path, ONE)
    found = tree_deserialize_leaves(path, ONE, x64="numpy")
    assert (int(found["i"][0]), float(found["f"][0])) == (2**40 + 1, 1e300)


def test_08_keys_that_look_alike_stay_apart(path: Path) -> None:
    tree = {"a.b": jnp.ones(1), "a": {"b": jnp.full(1, 2.0), "": jnp.full(1, 3.0)}, ".a": jnp.zeros(1), "a.": {}, "": 1}
    tree_serialize_leaves(path, tree)
    assert_unchanged(exact(path), tree)
    listed = [entry["path"] for entry in entries(path)["arrays"]]
    assert "a/b" in listed
    assert len(set(listed)) == len(listed) == 4


def test_09_prefixes_cannot_lie_over_one_another(path: Path) -> None:
    tree_serialize_leaves(path, {"ema": {"w": jnp.ones(1)}}, prefix="model")
    for tree, prefix in (({"w": jnp.zeros(1)}, "model/ema"), ({"model": {"ema": {"w": jnp.zeros(1)}}}, None)):
        with pytest.raises(MismatchError, match="ema/w"):
            tree_serialize_leaves(path, tree, prefix=prefix)
    assert exact(path, "model")["ema"]["w"][0] == 1
    tree_serialize_leaves(path, {"w": jnp.zeros(1)}, prefix="a/b")
    assert list(exact(path, "a/b")) == ["w"]


def test_10_no_key_or_prefix_leads_out_of_the_folder(path: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    tree = {f"{outside}/evil": jnp.ones(1), "../x": jnp.ones(1), "..": {"..": jnp.ones(1)}, "/y": jnp.ones(1)}
    tree_serialize_leaves(path, tree)
    assert_unchanged(exact(path), tree)
    with pytest.raises(UnsupportedError, match="not a path of folders"):
        tree_serialize_leaves(path, {"w": jnp.ones(1)}, prefix=f"{outside}/evil")
    assert not list(outside.iterdir())
    assert {entry.name for entry in tmp_path.iterdir()} == {"ckpt", "outside"}


def test_11_a_hostile_index_reads_nothing_outside(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "out" / "s"
    shutil.copytree(EFORMER / "plain" / "step", secret)
    shutil.copytree(EFORMER / "plain", path)
    index = entries(path)
    for outside in (str(secret), "../out/s", "a/../../out/s"):
        index["arrays"][0]["path"] = outside
        (path / INDEX).write_text(json.dumps(index), encoding="utf-8")
        with pytest.raises(CorruptError, match="leads out"):
            tree_deserialize_leaves(path)
    (path / "link").symlink_to(secret)
    index["arrays"][0]["path"] = "link"
    (path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(tr.errors.TreeringError, match="link"):
        tree_deserialize_leaves(path)


def test_12_a_prefix_beside_the_oldest_index_loses_nothing(path: Path) -> None:
    shutil.copytree(EFORMER / "index_v1", path)
    before = entries(path)["arrays"]
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, prefix="model")
    assert entries(path)["arrays"] == before
    assert sorted(tree_deserialize_leaves(path)) == ["a", "b"]


def test_13_one_bad_leaf_and_a_list_do_not_stop_the_others() -> None:
    arrays = {"a": jnp.ones(8), "s": jnp.float32(1), "l": [jnp.ones(8)]}
    with pytest.warns(NotShardedWarning, match="s: "):
        placed = apply_sharding_tree(arrays, {"a": ROWS, "s": ROWS, "l": [ROWS]})
    assert placed["a"].sharding == placed["l"][0].sharding == ROWS
    assert placed["s"] is arrays["s"]

    def mine(array: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        apply_sharding_tree(arrays, {"a": mine, "s": None, "l": [None]})


def test_14_nested_shardings_count(path: Path) -> None:
    tree_serialize_leaves(path, {"x": {"a": jnp.ones(8)}})
    for shardings in ({"x": {"a": ROWS}}, {"x.a": ROWS}, create_sharding_tree_from_index(path, ROW, None, P("d"))):
        assert tree_deserialize_leaves(path, ROW, shardings=shardings)["x"]["a"].sharding == ROWS
    both = create_sharding_tree_from_index(path, GRID, None, P("dp"))
    assert tree_deserialize_leaves(path, GRID, shardings=both)["x"]["a"].sharding == NamedSharding(GRID, P("dp"))
    with pytest.raises(MismatchError, match=r"'x\.b' \(did you mean 'x\.a'\?\)"):
        tree_deserialize_leaves(path, ROW, shardings={"x": {"b": ROWS}})


def test_16_big_endian_arrays_keep_their_values() -> None:
    array = np.arange(3, dtype=">f4")
    assert serialization.from_bytes(None, serialization.to_bytes({"a": array}))["a"].tolist() == [0, 1, 2]


def test_17_a_strict_target_is_compared() -> None:
    data = serialization.to_bytes({"w": np.zeros(5, np.int32), "more": 1})
    with pytest.raises(MismatchError) as caught:
        serialization.from_bytes({"w": np.zeros((2, 2), np.float32)}, data, strict=True)
    assert len(caught.value.differences) == 2


def test_18_a_key_that_means_chunks_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="__msgpack_chunked_array__"):
        serialization.to_bytes({"__msgpack_chunked_array__": True})


# -------------------------------------------------------------------------------------------------------------- crashes


def test_19_numpy_leaves_are_stored(path: Path) -> None:
    tree = {"a": np.ones(2), "s": np.float32(1), "big": np.arange(3, dtype=">i8")}
    tree_serialize_leaves(path, tree)
    found = exact(path)
    assert type(found["a"]) is np.ndarray
    assert type(found["s"]) is np.float32
    assert found["big"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "after",
    [((3, 5), "float32", None), (8, "int8", None), (8, "float32", ROWS), ((), "bfloat16", None)],
    ids=["shape", "dtype", "shards", "axes"],
)
def test_20_a_save_over_other_shapes_dtypes_and_shards(path: Path, after: Any) -> None:
    shape, dtype, sharding = after
    after = jax.device_put(np.ones(shape, jnp.dtype(dtype)), sharding)
    tree_serialize_leaves(path, {"w": jax.device_put(jnp.zeros(8), NamedSharding(ROW, P()))})
    tree_serialize_leaves(path, {"w": after})
    assert_unchanged(np.asarray(exact(path)["w"]), np.asarray(after))
    tree_serialize_leaves(path, {"w": after}, compressor={"id": "zlib", "level": 1})
    assert_unchanged(np.asarray(exact(path)["w"]), np.asarray(after))


def test_21_no_mesh_is_the_default_device(path: Path) -> None:
    tree_serialize_leaves(path, {"w": jax.device_put(jnp.ones(8), ROWS)})
    assert tree_deserialize_leaves(path, None)["w"].sharding.device_set == {jax.devices()[0]}


def test_24_rules_leave_arrays_without_axes_alone(path: Path) -> None:
    tree_serialize_leaves(path, {"w": jnp.ones(8), "scale": jnp.float32(1)})
    found = tree_deserialize_leaves(path, ROW, partition_rules=[(".*", P("d"))])
    assert found["w"].sharding == ROWS
    assert found["scale"].sharding.is_fully_replicated


@pytest.mark.parametrize(
    "tree",
    [{"a.0": jnp.ones(1), "a": jnp.zeros(1)}, {"a": {"b": jnp.ones(1)}, "a.b.c": jnp.zeros(1)}],
    ids=["chunk file", "folder in folder"],
)
def test_25_no_folder_of_a_leaf_is_in_the_way_of_another(path: Path, tree: Any) -> None:
    tree_serialize_leaves(path, tree)
    assert_unchanged(exact(path), tree)


def test_26_keys_and_narrow_types_are_stored(path: Path) -> None:
    tree = {"key": jax.random.key(3), "u4": jnp.arange(8).astype(jnp.uint4), "f8": jnp.ones(3, jnp.float8_e4m3)}
    tree_serialize_leaves(path, tree)
    found = exact(path)
    assert jnp.array_equal(jax.random.key_data(found["key"]), jax.random.key_data(tree["key"]))
    for name in ("u4", "f8"):
        assert_unchanged(np.asarray(found[name]), np.asarray(tree[name]))


def test_29_an_index_of_nothing_is_a_clear_error(path: Path) -> None:
    path.mkdir()
    (path / INDEX).write_text('{"format": "tensorstore", "version": "2.0", "prefixes": {}}', encoding="utf-8")
    for read in (create_sharding_tree_from_index, tree_deserialize_leaves):
        with pytest.raises(ValueError, match="lists no tree"):
            read(path)


def test_30_python_numbers_are_counted_and_committed_arrays_move() -> None:
    assert serialization.get_serialization_info({"s": 3})["num_leaves"] == 1
    committed = jax.device_put(jnp.ones(8), jax.devices()[0])
    assert make_itsharded({"a": committed}, ROW)["a"].sharding == NamedSharding(ROW, P())


# ------------------------------------------------------------------------------------------------------------ structure


def test_31_containers_come_back_as_they_were(path: Path) -> None:
    tree: dict[str, Any] = {"l": [jnp.ones(1), (jnp.ones(1), {5: jnp.ones(1)})], "o": {"a": {"": jnp.ones(1)}}}
    tree_serialize_leaves(path, tree)
    assert_unchanged(exact(path), tree)
    assert tree_deserialize_leaves(path, target=tree)["l"][1][1].keys() == {5}
    found = tree_deserialize_leaves(path)
    assert list(found["l"]) == ["0", "1"]
    assert list(found["o"]["a"]) == [""]
    for prefix in (None, "p"):
        tree_serialize_leaves(path / "bare", jnp.ones(3), prefix=prefix)
        assert tree_deserialize_leaves(path / "bare", prefix=prefix).tolist() == [1, 1, 1]


def test_32_a_missing_index_is_an_error_and_can_be_made(path: Path) -> None:
    with pytest.raises(NotFoundError):
        tree_deserialize_leaves(path)
    tree_serialize_leaves(path, {"w": jnp.ones(2)}, write_index=False)
    with pytest.raises(FileNotFoundError, match="index_leaves"):
        tree_deserialize_leaves(path)
    index_leaves(path)
    assert exact(path)["w"].tolist() == [1, 1]


def test_33_what_the_new_tree_lacks_is_gone(path: Path) -> None:
    tree_serialize_leaves(path, {"a": jnp.ones(2), "b": {"c": jnp.ones(2)}})
    tree_serialize_leaves(path, {"b": jnp.ones(2)})
    assert not (path / "a").exists()
    assert not (path / "b" / "c").exists()
    tree_serialize_leaves(path, {})
    assert exact(path) == {}
    assert {entry.name for entry in path.iterdir()} <= {INDEX, ".treering"}


def test_34_a_first_save_that_is_killed_is_no_tree(path: Path) -> None:
    kill_a_save(path)
    with pytest.raises(NotFoundError):
        tree_deserialize_leaves(path)
    tree_serialize_leaves(path, {"w": jnp.ones(2)})
    assert list(exact(path)) == ["w"]
    assert tr.verify(path).ok
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 1 << 16


def test_35_the_callback_comes_after_the_index(path: Path) -> None:
    def callback() -> None:
        assert exact(path) == {"step": 7}
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        tree_serialize_leaves(path, {"step": 7}, commit_callback=callback)
    assert exact(path) == {"step": 7}


def test_37_gzip_is_reproducible_and_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = {"w": np.ones(100)}
    first = serialization.to_compressed_bytes(tree)
    clocks.stop_clock(monkeypatch, 1.0)
    assert serialization.to_compressed_bytes(tree) == first
    file = tmp_path / "tree.msgpack"
    serialization.save_to_file(tree, file)
    before = file.stat().st_ino
    serialization.save_to_file(tree, file)
    assert file.stat().st_ino != before  # another file took the name


def test_38_what_cannot_be_saved_is_told() -> None:
    assert not serialization.validate_serializable({"f": object()})[0]
    assert not serialization.validate_serializable({"f": lambda: 0})[0]


# ------------------------------------------------------------------------------------------- what is other on purpose


def test_39_dicts_keep_the_order_in_which_they_were_filled(path: Path) -> None:
    tree = {"z": {"b": jnp.ones((2, 2)), "a": jnp.ones(2)}, "y": jnp.ones(1)}
    order = ["z.b", "z.a", "y"]
    tree_serialize_leaves(path, tree)
    assert [entry["path"].replace("/", ".") for entry in entries(path)["arrays"]] == order
    called: list[str] = []

    def callback(array: Any, key: str) -> Any:
        called.append(key)
        return array

    def keys(found: Any) -> list[str]:
        return [f"{name}.{inner}" for name in list(found)[:1] for inner in found[name]] + list(found)[1:]

    for target in (None, tree):
        called.clear()
        assert keys(tree_deserialize_leaves(path, callback=callback, target=target)) == order
        assert called == order
    shardings = create_sharding_tree_from_index(path, ROW)
    assert keys(shardings) == keys(match_partition_rules([("", P())], tree)) == order
    assert keys(apply_sharding_tree(tree, shardings)) == order
    assert jax.tree.leaves(leaf_key_paths(tree)) == sorted(order)  # what jax and eformer go by


def test_40_a_prefix_with_a_slash_is_taken_off_the_keys(path: Path) -> None:
    tree = {"w": jnp.ones(2)}
    for prefix in ("run/model", "run.ema"):
        tree_serialize_leaves(path, tree, prefix=prefix)
        assert_unchanged(tree_deserialize_leaves(path, prefix=prefix), tree)


def test_41_a_mesh_has_devices(path: Path) -> None:
    tree_serialize_leaves(path, {"w": jnp.ones(8)})
    abstract = jax.sharding.AbstractMesh((8,), ("d",))
    with pytest.raises(UnsupportedError, match="mesh is an AbstractMesh, not a jax"):
        tree_deserialize_leaves(path, abstract, shardings={"w": ROWS})  # type: ignore[call-overload]
    assert tree_deserialize_leaves(path, shardings={"w": ROWS})["w"].sharding == ROWS


def test_42_an_escape_in_a_tree_of_others_is_undone(path: Path) -> None:
    (path / "a%2Eb").mkdir(parents=True)
    document = {"chunks": [2], "compressor": None, "dtype": "|u1", "fill_value": None, "filters": None}
    (path / "a%2Eb" / ".zarray").write_text(json.dumps(document | {"order": "C", "shape": [2], "zarr_format": 2}))
    (path / "a%2Eb" / "0").write_bytes(b"\1\2")
    index = {
        "format": "tensorstore",
        "version": "0.0.101",
        "arrays": [{"path": "a%2Eb", "shape": [2], "dtype": "uint8"}],
    }
    (path / INDEX).write_text(json.dumps(index))
    assert list(tree_deserialize_leaves(path)) == ["a.b"]
