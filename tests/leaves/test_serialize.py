"""Saving into a leaves directory: everything survives, what other programs see, and what stays untouched."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from jax.sharding import PartitionSpec as P

import treering
from tests.compat.golden_files import dtype_named
from tests.folders import listing
from tests.leaves.saved import INDEX, arrays_at, index_at, put, stored, visible
from tests.properties.strategies import EXTENDED_DTYPES, NUMPY_DTYPES
from tests.trees import Point, assert_same
from treering.errors import CorruptError, ExistsError, FormatError, StoreError, TreeringError, UnsupportedError
from treering.leaves import index_leaves, tree_deserialize_leaves, tree_serialize_leaves

TREE: dict[str, Any] = {"w": np.arange(50_000, dtype="f4"), "b": jnp.ones(3), "step": 1}


def by_tensorstore(folder: Path) -> np.ndarray[Any, Any]:
    """An array as TensorStore reads it."""
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder)}}
    found: np.ndarray[Any, Any] = ts.open(spec, read=True).result().read().result()
    return found


# ----------------------------------------------------------------------------------------------------- what comes back


def test_every_kind_of_leaf_and_container_survives(tmp_path: Path) -> None:
    tree: dict[Any, Any] = {
        "none": None,
        "numbers": [True, 0, -(2**100), 2.5, math.inf, -0.0, 1 + 2j],
        "text": ["", "ä\udc80", "long " * 2000],
        "bytes": [b"", b"\0\xff", bytes(range(256)) * 40],
        "empty": [{}, [], ()],
        "point": Point(x=1, y=[None]),
        7: {True: "a key of another type", None: 0},
        "jax": [jnp.arange(6.0).reshape(2, 3), jnp.int32(4), jnp.zeros((0, 4)), jnp.bfloat16(1.5)],
        "numpy": [np.arange(3), np.float64(1e300), np.array(2**63 - 1), np.zeros((2, 0)), np.array(True)],
        "orders": [
            np.arange(6, dtype=">i4").reshape(2, 3),
            np.asfortranarray(np.ones((3, 4), "f4")),
            np.arange(9)[::-2],
        ],
        "times": np.array(["2024-01-01", "NaT"], "datetime64[s]"),
        "keys": [jax.random.key(1), jax.random.key(2, impl="rbg"), jax.random.split(jax.random.key(3), 4)],
    }
    tree_serialize_leaves(tmp_path / "d", tree)
    assert_same(stored(tmp_path / "d"), tree, restored=False)


NARROW = [name for name in EXTENDED_DTYPES if hasattr(ml_dtypes, name)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [*NUMPY_DTYPES, *NARROW, "timedelta64[D]"])
def test_every_dtype_of_numpy_survives(name: str, tmp_path: Path) -> None:
    values = np.arange(24) % 3
    full = values.view("m8[D]").astype(name) if "64[" in name else values.astype("f4").astype(dtype_named(name))
    tree = {"full": full.reshape(4, 6), "none": full[:0], "one": full[1], "turned": full.reshape(4, 6).T}
    tree_serialize_leaves(tmp_path / "d", tree)
    assert_same(stored(tmp_path / "d"), tree, restored=False)


# jax has no six-bit floats everywhere, nor ints of one bit.
JAX_NARROW = [name for name in NARROW if not name.startswith("float6") and not name.endswith("int1")]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", JAX_NARROW)
def test_every_narrow_dtype_of_jax_survives_in_shards(name: str, tmp_path: Path) -> None:
    full = (np.arange(32).reshape(16, 2) % 2).astype(dtype_named(name))
    tree = {"whole": jnp.asarray(full), "parts": put(full, P("x")), "scalar": jnp.asarray(full[1, 1])}
    tree_serialize_leaves(tmp_path / "d", tree)
    assert_same(stored(tmp_path / "d"), tree, restored=False)


def test_what_zarr_has_no_form_for_is_refused_by_name_before_anything_is_made(tmp_path: Path) -> None:
    if np.dtype(np.longdouble).itemsize != 16:
        pytest.skip("no long double here")
    with pytest.raises(UnsupportedError, match=r"float128.*'a/b'"):
        tree_serialize_leaves(tmp_path / "d", {"a": {"b": np.zeros(2, np.longdouble)}})
    with pytest.raises(UnsupportedError, match="w"):
        tree_serialize_leaves(tmp_path / "d", {"w": np.array([object()])})
    with pytest.raises(UnsupportedError, match=r"33 axes.*'w'"):
        tree_serialize_leaves(tmp_path / "d", {"w": np.zeros((1,) * 33)})
    deleted = jnp.ones(3)
    deleted.delete()
    with pytest.raises(UnsupportedError, match="deleted"):
        tree_serialize_leaves(tmp_path / "d", {"ok": jnp.ones(2), "w": deleted})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tree", [{}, [], None, 3, "text", {"a": None, "b": {"c": 1.5, "d": {}}}], ids=repr)
def test_trees_without_arrays_survive(tree: Any, tmp_path: Path) -> None:
    for prefix in (None, "model"):
        tree_serialize_leaves(tmp_path / "d", tree, prefix=prefix)
        assert_same(stored(tmp_path / "d", prefix), tree, restored=False)
        assert arrays_at(tmp_path / "d", prefix) == {}
    assert visible(tmp_path / "d") == {INDEX}


@pytest.mark.parametrize(("prefix", "folder"), [(None, "%-"), ("p", "p"), ("p.q", "p/q")])
def test_a_bare_array_survives(prefix: str | None, folder: str, tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", jnp.arange(3), prefix=prefix)
    assert_same(stored(tmp_path / "d", prefix), jnp.arange(3), restored=False)
    assert arrays_at(tmp_path / "d", prefix) == {folder: (3, "int32")}


def test_arrays_that_the_caller_changes_after_the_call_do_not_matter(tmp_path: Path) -> None:
    array, text = np.arange(100_000), bytearray(b"x" * 10_000)
    want: dict[str, Any] = {"array": array.copy(), "text": bytearray(text)}
    tree_serialize_leaves(tmp_path / "d", {"array": array, "text": text})
    array[:] = -1
    text[:] = b"y" * 10_000
    found = stored(tmp_path / "d")
    assert np.array_equal(found["array"], want["array"])
    assert found["text"] == want["text"]


# ------------------------------------------------------------------------------------------- what other programs see


def test_ordinary_keys_and_the_index_are_as_eformer_writes_them(tmp_path: Path) -> None:
    tree = {
        "a": {"b": jnp.ones((2, 3)), "c": jnp.int32(4)},
        "l": [jnp.zeros(2, "bfloat16"), None],
        "layer_0-x %": np.zeros(1),
    }
    tree_serialize_leaves(tmp_path / "d", tree)
    assert visible(tmp_path / "d") == {
        INDEX,
        *("a/b/.zarray", "a/b/0.0", "a/c/.zarray", "a/c/0", "l/0/.zarray", "l/0/0"),
        *("layer_0-x %/.zarray", "layer_0-x %/0"),
    }
    index = index_at(tmp_path / "d")
    assert (index["format"], index["version"], index["prefixes"]) == ("tensorstore", "1.0", {})
    assert index["arrays"] == [
        {"path": "a/b", "shape": [2, 3], "dtype": "float32"},
        {"path": "a/c", "shape": [], "dtype": "int32"},
        {"path": "l/0", "shape": [2], "dtype": "bfloat16"},
        {"path": "layer_0-x %", "shape": [1], "dtype": "float64"},
    ]
    text = (tmp_path / "d" / INDEX).read_text()
    assert text == json.dumps(index, indent=2)


@pytest.mark.parametrize(
    ("shape", "axes", "spec", "chunks"),
    [
        ((8,), ("x",), P("x"), (2, 8)),
        ((8,), ("x",), P(), (16, 8)),
        ((2, 4), ("x", "y"), P("x", "y"), (8, 2)),
        ((2, 4), ("x", "y"), P(("x", "y")), (2, 8)),
        ((2, 4), ("x", "y"), P(None, "y"), (16, 2)),
        ((1,), ("x",), P("x"), (16, 8)),
    ],
)
def test_a_chunk_is_a_shard(
    shape: tuple[int, ...], axes: tuple[str, ...], spec: P, chunks: tuple[int, ...], tmp_path: Path
) -> None:
    want = np.arange(128, dtype="f4").reshape(16, 8)
    tree_serialize_leaves(tmp_path / "d", {"w": put(want, spec, shape, axes)})
    zarray = (tmp_path / "d/w/.zarray").read_bytes()
    assert json.loads(zarray)["chunks"] == list(chunks)
    assert len(visible(tmp_path / "d")) == 2 + 128 // math.prod(chunks)
    assert np.array_equal(by_tensorstore(tmp_path / "d/w"), want)
    # What TensorStore writes, and our marker.
    document = json.loads(zarray)
    assert len(document.pop("treering")) == 16
    theirs = {
        "chunks": list(chunks),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": "<f4",
        "fill_value": None,
    }
    assert document == theirs | {"filters": None, "order": "C", "shape": [16, 8], "zarr_format": 2}


@pytest.mark.parametrize("name", ["uint4", "float8_e4m3", "key"])
def test_dtypes_that_tensorstore_lacks_are_raw_ints_to_others(name: str, tmp_path: Path) -> None:
    leaf = jax.random.key(7) if name == "key" else jnp.asarray([1, 2, 3], name)
    tree_serialize_leaves(tmp_path / "d", {"w": leaf})
    raw = by_tensorstore(tmp_path / "d/w")
    if name == "key":
        assert np.array_equal(raw, jax.random.key_data(leaf))
    else:
        assert (raw.dtype, raw.tobytes()) == (np.dtype("u1"), np.asarray(leaf).tobytes())
    assert arrays_at(tmp_path / "d") == {"w": (*raw.shape, raw.dtype.name)}


CODECS: list[dict[str, Any]] = [
    {"id": "zstd", "level": 1},
    {"id": "zstd"},
    {"id": "zlib", "level": 1},
    {"id": "gzip", "level": 5},
    {"id": "bz2", "level": 1},
    {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1},
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: str(codec["id"]) + str(len(codec)))
def test_any_compressor_on_request(codec: dict[str, Any], tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "w": put(np.arange(4096, dtype="f4").reshape(64, 64), P("x")),
        "ragged": np.arange(1000, dtype="i8"),
        "none": jnp.zeros((0, 3)),
        "u4": jnp.ones(9, "uint4"),
        "text": "text " * 5000,
    }
    tree_serialize_leaves(tmp_path / "d", tree, compressor=codec, chunk_bytes=1500)
    assert_same(stored(tmp_path / "d"), tree, restored=False)
    assert np.array_equal(by_tensorstore(tmp_path / "d/w"), tree["w"])
    assert np.array_equal(by_tensorstore(tmp_path / "d/ragged"), tree["ragged"])
    assert json.loads((tmp_path / "d/w/.zarray").read_text())["compressor"].items() >= codec.items()
    assert (tmp_path / "d/ragged/0").stat().st_size < 1500


@pytest.mark.parametrize(
    "codec", [{"id": "nothing like it"}, {}, {"id": 3}, "zstd", {"id": "zstd", "level": "high"}], ids=str
)
def test_a_compressor_that_nobody_knows_is_refused_and_nothing_changes(codec: Any, tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", TREE)
    before = listing(tmp_path)
    with pytest.raises(UnsupportedError):
        tree_serialize_leaves(tmp_path / "d", {"w": np.ones(3)}, compressor=codec)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("limit", [1, 4, 1000, 4096, 10**9])
def test_chunks_are_cut_to_their_limit(limit: int, tmp_path: Path) -> None:
    tree = {
        "w": np.arange(3000, dtype="f4").reshape(30, 100) if limit > 4 else np.arange(12, dtype="f4"),
        "s": jnp.ones(()),
    }
    tree_serialize_leaves(tmp_path / "d", tree, chunk_bytes=limit)
    assert_same(stored(tmp_path / "d"), tree, restored=False)
    sizes = [path.stat().st_size for path in (tmp_path / "d/w").iterdir() if path.name != ".zarray"]
    assert max(sizes) <= max(limit, 4)
    assert np.array_equal(by_tensorstore(tmp_path / "d/w"), tree["w"])


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1"], ids=repr)
def test_a_limit_that_is_none_is_refused(limit: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="chunk_bytes"):
        tree_serialize_leaves(tmp_path / "d", TREE, chunk_bytes=limit)
    assert list(tmp_path.iterdir()) == []


def test_a_callback_that_is_no_function_is_refused_before_the_save(tmp_path: Path) -> None:
    no_function: Any = 3
    with pytest.raises(UnsupportedError, match="commit_callback is 3"):
        tree_serialize_leaves(tmp_path / "d", TREE, commit_callback=no_function)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------------------- keys

UNSAFE = [
    {"a.b": 1.0, "a": {"b": 2.0}, "a/b": 3.0},
    {".a": 1.0, "a.": 2.0, "a": 3.0, "": 4.0, ".": 5.0, "..": 6.0},
    {"..": {"..": {"evil": 1.0}}, "/etc/passwd": 2.0, "//": 3.0, "C:\\x": 4.0},
    {"a.0": 1.0, "a": [2.0]},
    {"a": {"b": 1.0}, "a.b.c": 2.0},
    {"%2E": 1.0, ".": 2.0, "%": 3.0, "%-": 4.0, "": 5.0, "%252E": 6.0},
    {"a\0b": 1.0, "a\nb": 2.0, "ä": 3.0, "\udc80": 4.0, "日本": 5.0},
    {".zarray": 1.0, "0": {"0": 2.0, ".zarray": 3.0}, INDEX: 4.0, ".treering": {"x": 5.0}},
    {"": {"": 1.0, "x": 2.0}},
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("tree", UNSAFE, ids=range(len(UNSAFE)))
@pytest.mark.parametrize("prefix", [None, "model"])
def test_no_key_collides_or_leads_out(tree: Any, prefix: str | None, tmp_path: Path) -> None:
    arrays = jax.tree.map(jnp.float32, tree)
    tree_serialize_leaves(tmp_path / "x" / "d", arrays, prefix=prefix)
    assert_same(stored(tmp_path / "x" / "d", prefix), arrays, restored=False)
    assert [*tmp_path.iterdir(), *(tmp_path / "x").iterdir()] == [tmp_path / "x", tmp_path / "x" / "d"]
    folders = arrays_at(tmp_path / "x" / "d", prefix)
    assert len(folders) == len(jax.tree.leaves(arrays))
    assert not any(part in ("", ".", "..", ".zarray", ".treering") for path in folders for part in path.split("/"))
    for folder in folders:
        assert (tmp_path / "x" / "d" / folder / ".zarray").is_file()


def test_a_key_that_is_too_long_for_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="300 bytes"):
        tree_serialize_leaves(tmp_path / "d", {"ok": jnp.ones(2), "x" * 300: jnp.ones(2)})
    with pytest.raises(UnsupportedError, match="255"):
        tree_serialize_leaves(tmp_path / "d", {"." * 100: jnp.ones(2)})
    assert list(tmp_path.iterdir()) == []
    # Without an array no folder is needed.
    tree_serialize_leaves(tmp_path / "d", {"x" * 300: 1})
    assert stored(tmp_path / "d") == {"x" * 300: 1}


# -------------------------------------------------------------------------------------------------- overwriting, others


OTHERS: list[Any] = [
    {"w": np.arange(7, dtype="i8"), "b": jnp.ones((3, 3))},
    {"w": put(np.arange(64, dtype="f4"), P("x"))},
    {"w": np.arange(50_000, dtype="bfloat16")},
    {"w": {"deeper": jnp.ones(2)}, "b": [jnp.ones(1)]},
    {"z": 1},
    {},
    jnp.ones(3),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("tree", OTHERS, ids=range(len(OTHERS)))
@pytest.mark.parametrize("prefix", [None, "model"])
def test_an_overwrite_leaves_what_a_first_save_would_have_made(tree: Any, prefix: str | None, tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    tree_serialize_leaves(old, {**TREE, "u": {"v": {"w": put(np.ones((8, 8)), P("x"))}}}, prefix=prefix)
    tree_serialize_leaves(old, tree, prefix=prefix)
    tree_serialize_leaves(new, tree, prefix=prefix)
    assert_same(stored(old, prefix), tree, restored=False)
    assert visible(old) == visible(new)
    assert {path.name for path in old.iterdir()} == {path.name for path in new.iterdir()}


def test_the_files_of_the_user_stay(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", {"a": {"w": jnp.ones(3), "v": jnp.ones(2)}})
    mine = {
        "config.json": "{}",
        "a/notes.txt": "x",
        "a/w/notes.txt": "y",
        "a/w/1": "no chunk",
        "a/v/0.0": "no chunk",
        "z/0": "z",
    }
    for name, text in mine.items():
        (tmp_path / "d" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "d" / name).write_text(text)
    tree_serialize_leaves(tmp_path / "d", {"a": {"w": jnp.zeros(())}})
    assert {name: (tmp_path / "d" / name).read_text() for name in mine} == mine
    assert visible(tmp_path / "d") == {INDEX, "a/w/.zarray", "a/w/0", *mine}
    assert_same(stored(tmp_path / "d"), {"a": {"w": jnp.zeros(())}}, restored=False)


@pytest.mark.parametrize("name", ["w/.zarray", "w/0", "b/.zarray", "w"])
def test_files_of_others_in_the_way_are_refused_and_stay(name: str, tmp_path: Path) -> None:
    (tmp_path / "d" / name).parent.mkdir(parents=True)
    (tmp_path / "d" / name).write_text("mine")
    with pytest.raises(ExistsError):
        tree_serialize_leaves(tmp_path / "d", TREE)
    assert visible(tmp_path / "d") == {name}
    assert (tmp_path / "d" / name).read_text() == "mine"


def test_a_damaged_or_foreign_index_is_not_replaced(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", TREE)
    index = tmp_path / "d" / INDEX
    whole = index.read_text()
    for text, kind in [
        (whole[:-10], CorruptError),
        (whole.replace("xxh3-128:", "xxh3-128:0"), CorruptError),
        ("", CorruptError),
        ('{"format": "zarr3"}', FormatError),
        ("[]", CorruptError),
    ]:
        index.write_text(text)
        before = listing(tmp_path)
        with pytest.raises(kind) as caught:
            tree_serialize_leaves(tmp_path / "d", {"w": jnp.ones(2)})
        assert str(index) in str(caught.value)
        assert listing(tmp_path) == before
    index.write_text(whole)
    assert_same(stored(tmp_path / "d"), TREE, restored=False)


# ----------------------------------------------------------------------------------------------- callbacks and progress


def test_the_callback_runs_once_and_after_the_index(tmp_path: Path) -> None:
    seen: list[Any] = []
    tree_serialize_leaves(tmp_path / "d", TREE, commit_callback=lambda: seen.append(stored(tmp_path / "d")))
    assert len(seen) == 1
    assert_same(seen[0], TREE, restored=False)


def test_a_callback_that_fails_undoes_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        tree_serialize_leaves(tmp_path / "d", TREE, commit_callback=fail)
    assert_same(stored(tmp_path / "d"), TREE, restored=False)


def test_the_callback_does_not_run_when_the_save_fails(tmp_path: Path) -> None:
    seen: list[int] = []
    (tmp_path / "d/w").mkdir(parents=True)
    (tmp_path / "d/w/0").write_text("mine")
    with pytest.raises(ExistsError):
        tree_serialize_leaves(tmp_path / "d", TREE, commit_callback=lambda: seen.append(1))
    assert seen == []


def test_progress_grows_to_the_bytes_of_all_arrays(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    tree = {"big": np.arange(1 << 20), "parts": put(np.ones((64, 64), "f4"), P("x")), "small": jnp.ones(3), "n": 1}
    tree_serialize_leaves(tmp_path / "d", tree, progress=lambda done, total: seen.append((done, total)))
    total = (8 << 20) + 4 * 64 * 64 + 12
    assert {found for _, found in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


# --------------------------------------------------------------------------------------------------------------- paths


def test_paths_of_every_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    for path in ("a", "b/", Path("c") / "deep" / "er", "./e/../f", "link", tmp_path / "~", "there/g."):
        tree_serialize_leaves(path, {"w": jnp.ones(2)})
        assert_same(stored(Path(path)), {"w": jnp.ones(2)}, restored=False)
    assert (tmp_path / "~" / INDEX).is_file()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("path", ["s3n://b/x", "https://host/x", "file://host/x", "", 3, b"x", {"w": 1}], ids=repr)
def test_what_is_no_local_path_is_refused_and_makes_nothing(
    path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnsupportedError):
        tree_serialize_leaves(path, TREE)
    assert list(tmp_path.iterdir()) == []


def test_a_file_at_the_path_is_an_error_and_stays(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("mine")
    with pytest.raises(StoreError):
        tree_serialize_leaves(tmp_path / "d", TREE)
    assert (tmp_path / "d").read_text() == "mine"


# ---------------------------------------------------------------------------------------------------------- many savers


def test_prefixes_that_are_saved_at_once_never_lose_one_another(tmp_path: Path) -> None:
    trees = {f"p{number}": {"w": np.full(1000 + number, number), "n": number} for number in range(6)}
    failed: list[TreeringError] = []

    def save(prefix: str) -> None:
        try:
            for _ in range(3):
                tree_serialize_leaves(tmp_path / "d", trees[prefix], prefix=prefix)
        except TreeringError as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(prefix,)) for prefix in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for prefix, tree in trees.items():
        assert_same(stored(tmp_path / "d", prefix), tree, restored=False)


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    proc = Path("/proc/self/fd")
    if not proc.is_dir():
        pytest.skip("needs /proc")
    tree_serialize_leaves(tmp_path / "d", TREE)
    before = len(list(proc.iterdir()))
    tree_serialize_leaves(tmp_path / "d", {"w": {"x": jnp.ones(3)}})
    with pytest.raises(UnsupportedError):
        tree_serialize_leaves(tmp_path / "d", TREE, compressor={"id": "nothing like it"})
    assert len(list(proc.iterdir())) == before


def test_a_folder_that_holds_a_checkpoint_is_refused(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", TREE)
    before = listing(tmp_path / "ckpt")
    with pytest.raises(ExistsError, match=r"a checkpoint of treering.save is at .*; save to a directory of its own"):
        tree_serialize_leaves(tmp_path / "ckpt", TREE)
    assert listing(tmp_path / "ckpt") == before


def test_a_callback_may_change_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree_serialize_leaves("r", {"w": np.zeros(3)}, write_index=False)
    tree_serialize_leaves("other/r", {"q": np.ones(1)})
    tree_serialize_leaves("r", {"v": np.ones(3)}, progress=lambda *_: os.chdir(tmp_path / "other"))
    index_leaves(tmp_path / "r")
    assert list(tree_deserialize_leaves(tmp_path / "r")) == ["v"]
    os.chdir(tmp_path)
    tree_serialize_leaves("s", {"w": np.zeros(3)}, prefix="a", write_index=False)
    tree_serialize_leaves("s", {"v": np.ones(3)}, prefix="b", progress=lambda *_: os.chdir(tmp_path / "other"))
    assert list(tree_deserialize_leaves(tmp_path / "s", prefix="b")) == ["v"]
