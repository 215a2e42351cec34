"""A branch of another program as a record: nested dicts of arrays, in their order, and nothing that was lost unseen."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import pytest

from tests.format.indexes import keys_of
from treering._codec.zarr import ZarrArray, parse_zarray
from treering._format.index import Container
from treering._format.structure import build
from treering._leaves.documents.foreign import foreign_record
from treering._leaves.documents.index import Entry, parse_leaves_index
from treering._leaves.documents.record import UNMARKED, LeavesRecord, arrays_of, first_checksums
from treering.errors import CorruptError, TreeringError, UnsupportedError

GOLDEN = Path(__file__).parents[2] / "compat" / "golden" / "eformer"
SMALL = ZarrArray(shape=(2,), chunks=(2,), dtype="int8")


def record_at(*paths: str, prefix: str | None = None) -> LeavesRecord:
    return foreign_record(prefix, [Entry(path, {"path": path}) for path in paths], [SMALL] * len(paths))


def tree_of(record: LeavesRecord) -> object:
    return build(record.structure, record.folders)


def test_nested_dicts() -> None:
    record = record_at("a/w", "a/x/y", "b", "layers/0", "layers/10")
    assert record.keys == ["a/w", "a/x/y", "b", "layers/0", "layers/10"] == keys_of(record.structure)
    assert tree_of(record) == {
        "a": {"w": "a/w", "x": {"y": "a/x/y"}},
        "b": "b",
        "layers": {"0": "layers/0", "10": "layers/10"},
    }
    assert (record.attempt, list(record.checksums), record.sizes) == (UNMARKED, [], ())
    assert first_checksums(record) == [0] * 6


def test_leaves_follow_the_tree_where_entries_do_not() -> None:
    paths = ["b/1", "a", "b/0", "c/x/y", "b/2", "c/x/z"]
    arrays = [ZarrArray(shape=(number,), chunks=(1,), dtype="int8") for number in range(6)]
    record = foreign_record(None, [Entry(path, {}) for path in paths], arrays)
    assert record.folders == ["b/1", "b/0", "b/2", "a", "c/x/y", "c/x/z"]
    assert arrays_of(record) == [arrays[paths.index(folder)] for folder in record.folders]
    assert keys_of(record.structure) == record.keys


def test_prefixes_are_left_out_of_keys() -> None:
    assert record_at("model/w", prefix="model").keys == ["w"]
    assert record_at("a/b/w", prefix="a.b").keys == ["w"]
    assert record_at("a/b/w", prefix="a/b").keys == ["w"]
    bare = record_at("model", prefix="model")
    assert (bare.keys, bare.structure, bare.folders) == ([""], [1], ["model"])
    root = record_at("")
    assert (root.keys, root.structure, root.folders) == ([""], [1], [""])


def test_escapes_are_read_back() -> None:
    record = record_at("a%2Eb/50%", "a~b/%-", "x%2Fy")
    assert record.keys == ["a.b/50%", "a~0b/", "x~1y"]
    assert tree_of(record) == {"a.b": {"50%": "a%2Eb/50%"}, "a~b": {"": "a~b/%-"}, "x/y": "x%2Fy"}


def test_how_the_arrays_lie_there_is_kept() -> None:
    arrays = [
        ZarrArray(shape=(4, 4), chunks=(2, 4), dtype="float32", order="F", separator="/", big_endian=True),
        ZarrArray(shape=(4, 4), chunks=(2, 4), dtype="float32", compressor='{"id":"zstd","level":1}'),
        ZarrArray(shape=(), chunks=(), dtype="bfloat16"),
    ]
    record = foreign_record(None, [Entry(name, {}) for name in "abc"], arrays)
    assert arrays_of(record) == arrays
    assert [kind.kind for kind in record.types] == ["jax", "jax"]


@pytest.mark.parametrize("name", ["plain", "prefixed", "mixed_index", "dtypes", "x64", "sharded_2x4", "index_v1"])
def test_golden_directories(name: str) -> None:
    index = parse_leaves_index((GOLDEN / name / "tensorstore_index.json").read_bytes())
    assert index.branches
    for prefix, branch in index.branches.items():
        arrays = [parse_zarray((GOLDEN / name / path / ".zarray").read_bytes()) for path, _ in branch.entries]
        record = foreign_record(prefix, branch.entries, arrays)
        assert record.folders == [path for path, _ in branch.entries]
        assert arrays_of(record) == arrays
        assert keys_of(record.structure) == record.keys
        head = f"{prefix}/" if prefix else ""
        assert [head + key for key in record.keys] == record.folders
        shapes = [list(record.types[number].shape or ()) for number in record.leaf_types]
        assert shapes == [node["shape"] for _, node in branch.entries]
        assert [record.types[n].dtype for n in record.leaf_types] == [node["dtype"] for _, node in branch.entries]


@pytest.mark.parametrize(
    "paths",
    [
        ("a", "a"),
        ("a/b", "c", "a/b"),
        ("a", "a/b"),
        ("a/b", "a"),
        ("a/b/c/d", "a/b"),
        ("a", "a/b/c"),
        ("", "a"),
        ("", ""),
    ],
    ids=json.dumps,
)
def test_two_arrays_in_one_folder(paths: tuple[str, ...]) -> None:
    with pytest.raises(CorruptError, match="is lost: save them again under other keys"):
        record_at(*paths)


@pytest.mark.parametrize(
    ("array", "error"),
    [
        (ZarrArray(shape=(1 << 40, 1 << 40), chunks=(1, 1), dtype="float32"), CorruptError),
        (ZarrArray(shape=(1 << 61,), chunks=(1,), dtype="float64"), CorruptError),
    ],
    ids=["square", "line"],
)
def test_arrays_larger_than_any_memory_are_named(array: ZarrArray, error: type[TreeringError]) -> None:
    with pytest.raises(error, match="larger than any memory") as caught:
        foreign_record("p", [Entry("p/a/w", {})], [array])
    assert caught.value.path == ("a", "w")


def test_deep_paths() -> None:
    deep = "/".join("x" * 1000)
    assert tree_of(record_at(deep)) is not None
    with pytest.raises(UnsupportedError, match="folders deep"):
        record_at("/".join("x" * 2000))


def test_many_deep_paths_take_memory_in_proportion() -> None:
    paths = [f"{'/'.join('x' * 500)}/{number}" for number in range(500)]
    tracemalloc.start()
    record = record_at(*paths)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(record.structure) == 502
    assert isinstance(record.structure[0], Container)
    assert peak < 100 * sum(map(len, paths)) + (1 << 20)
