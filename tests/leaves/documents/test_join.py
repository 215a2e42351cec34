"""Records as one index: of one tree, of several, and of a branch that another program wrote."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.indexes import keys_of
from tests.leaves.documents.test_record import F32, flat, records
from tests.properties.strategies import quick
from treering._codec.zarr import ZarrArray, chunk_count, parse_zarray
from treering._format.index import Container, Index, LeafType
from treering._format.listing import list_index
from treering._format.structure import build
from treering._leaves.documents.index import Entry, parse_leaves_index
from treering._leaves.documents.join import foreign_record, join_records
from treering._leaves.documents.record import UNMARKED, ChunkLayout, LeavesRecord, arrays_of, first_checksums
from treering.errors import CorruptError, TreeringError, UnsupportedError

ZSTD = '{"id":"zstd"}'


def tree_of(index: Index) -> Any:
    """The tree with the keys of the leaves in their places."""
    return build(index.structure, index.keys)


def foreign(**arrays: ZarrArray) -> LeavesRecord:
    return foreign_record(None, [Entry(name, {}) for name in arrays], list(arrays.values()))


def test_one_tree() -> None:
    record = flat({"w": (F32, None), "n": 7, "none": None})
    index = join_records([record], verified=True)
    assert (index.structure, index.keys, index.types) == (record.structure, record.keys, record.types)
    assert (index.leaf_types, index.values) == (record.leaf_types, record.values)
    assert (index.attempt, index.written, index.meshes) == (record.attempt, record.written, record.meshes)
    assert (index.verified, index.processes, index.metadata) == (True, 1, {})
    assert index.checksums == record.checksums


def test_rows_are_the_plain_chunk_files() -> None:
    record = flat(
        {
            "whole": (F32, None),
            "n": 7,
            "cut": (F32, ChunkLayout(chunks=(2, 3))),
            "ragged": (F32, ChunkLayout(chunks=(3, 6))),
            "packed": (F32, ChunkLayout(chunks=(4, 6), compressor=ZSTD)),
            "empty": (LeafType(kind="jax", dtype="float32", shape=(0, 6)), None),
            "scalar": (LeafType(kind="jax", dtype="float32", shape=()), None),
        },
        prefix="p",
    )
    index = join_records([record], verified=True)
    chunks = index.chunks
    assert chunks.leaf == [0, 2, 2, 2, 2, 6]
    assert chunks.box == [None, ((0, 2), (0, 3)), ((0, 2), (3, 6)), ((2, 4), (0, 3)), ((2, 4), (3, 6)), None]
    assert chunks.file == [0, 1, 2, 3, 4, 5]
    assert chunks.offset == [0] * 6
    assert chunks.nbytes == [96, 24, 24, 24, 24, 4]
    assert chunks.block == [65536] * 6
    names = ["p/whole/0.0", "p/cut/0.0", "p/cut/0.1", "p/cut/1.0", "p/cut/1.1", "p/scalar/0"]
    assert [file.name for file in index.files] == names
    assert [file.nbytes for file in index.files] == chunks.nbytes
    assert {file.header for file in index.files} == {0}
    assert index.files[-1].name == "p/scalar/0"
    assert [file.name for file in index.files[1:3]] == names[1:3]
    with pytest.raises(IndexError):
        index.files[6]
    # The checksums of those rows, in their order.
    starts = first_checksums(record)
    wanted = [record.checksums[n] for leaf in (0, 1, 5) for n in range(starts[leaf], starts[leaf + 1])]
    assert list(index.checksums) == wanted
    assert chunks.first_blocks()[-1] == len(wanted)


@quick(80)
@given(st.lists(records(), min_size=1, max_size=3, unique_by=lambda record: record.prefix))
def test_columns_fit_each_other(found: list[LeavesRecord]) -> None:
    index = join_records(found, verified=True)
    assert keys_of(index.structure) == list(index.keys)
    assert len(set(index.keys)) == len(index.keys) == len(index.leaf_types)
    assert {leaf for leaf, number in enumerate(index.leaf_types) if not index.types[number].stored} == set(index.values)
    assert index.chunks.first_blocks()[-1] == len(index.checksums)
    assert len(index.files) == len(index.chunks)
    # Every stored leaf of every record in turn: rows for all of its chunks, or for none.
    stored = iter([leaf for leaf, number in enumerate(index.leaf_types) if index.types[number].stored])
    for record in found:
        for folder, this in zip(record.folders, arrays_of(record), strict=True):
            leaf = next(stored)
            rows = [row for row, owner in enumerate(index.chunks.leaf) if owner == leaf]
            assert len(rows) in (0, chunk_count(this))
            assert all(index.files[row].name.startswith(f"{folder}/") for row in rows)
    assert list_index(index, form="leaves", files=[], file_bytes=0).verified


def test_branches_beside_each_other() -> None:
    plain, model, ema = flat({"w": (F32, None), "n": 7}), flat({"w": 1}, prefix="model"), flat({"w": 2}, prefix="a.b/c")
    index = join_records([plain, model], verified=True)
    assert tree_of(index) == {"w": "w", "n": "n", "model": {"w": "model/w"}}
    assert index.values == {1: 7, 2: 1}
    assert tree_of(join_records([model], verified=True)) == {"model": {"w": "model/w"}}
    index = join_records([model, ema, plain], verified=True)
    assert tree_of(index) == {"model": {"w": "model/w"}, "a.b/c": {"w": "a.b~1c/w"}, "w": "w", "n": "n"}
    assert index.values == {0: 1, 1: 2, 3: 7}


@pytest.mark.parametrize("keys", [("model", "w"), (5, "w"), (None, "w")], ids=str)
def test_a_tree_whose_keys_are_prefixes_has_a_branch_of_its_own(keys: tuple[Any, ...]) -> None:
    plain = flat({str(key): 1 for key in keys})
    plain = dataclasses.replace(plain, structure=[Container(node="dict", keys=keys), 2])
    index = join_records([plain, flat({"w": 2}, prefix=str(keys[0]))], verified=True)
    assert tree_of(index) == {"": {key: f"/{key}" for key in keys}, str(keys[0]): {"w": f"{keys[0]}/w"}}
    assert keys_of(index.structure) == index.keys


def test_bare_arrays_and_empty_names() -> None:
    bare = dataclasses.replace(flat({"w": (F32, None)}), structure=[1], keys=[""], folders=["%-"])
    assert tree_of(join_records([bare], verified=True)) == ""
    index = join_records([bare, flat({"": 1, "w": 2}, prefix="p")], verified=True)
    assert tree_of(index) == {"": "~", "p": {"": "p/", "w": "p/w"}}
    assert keys_of(index.structure) == index.keys
    listed = join_records([dataclasses.replace(bare, prefix="m", folders=["m"])], verified=True)
    assert (tree_of(listed), listed.files[0].name) == ({"m": "m"}, "m/0.0")


def test_nothing_at_all() -> None:
    index = join_records([], verified=True)
    assert tree_of(index) == {}
    assert len(index.chunks) == len(index.files) == 0


def test_the_latest_save_says_who_wrote_it() -> None:
    old, new = flat({"a": 1}, prefix="a"), flat({"b": 2}, prefix="b")
    new = dataclasses.replace(new, written={"by": "somebody", "at": "2027-01-01"}, meshes=["y=2", "x=2"])
    index = join_records([old, new], verified=True)
    assert (index.written["by"], index.meshes) == ("somebody", ["x=2", "y=2"])


def test_branches_without_checksums() -> None:
    whole = ZarrArray(shape=(4,), chunks=(2,), dtype="float32")
    other = foreign(a=whole, big=dataclasses.replace(whole, big_endian=True), f=dataclasses.replace(whole, order="F"))
    index = join_records([other], verified=False)
    assert (index.verified, index.checksums) == (False, array("Q"))
    assert [file.name for file in index.files] == ["a/0", "a/1"]
    to_slashed = foreign(a=ZarrArray(shape=(2, 2), chunks=(1, 2), dtype="int8", separator="/"))
    assert [file.name for file in join_records([to_slashed], verified=False).files] == ["a/0/0", "a/1/0"]
    mixed = join_records([flat({"w": (F32, None)}, prefix="ours"), other], verified=False)
    assert [file.name for file in mixed.files] == ["ours/w/0.0", "a/0", "a/1"]
    assert mixed.checksums == array("Q")
    root = foreign_record(None, [Entry("", {})], [whole])
    assert [file.name for file in join_records([root], verified=False).files] == ["0", "1"]


def test_absurd_numbers_of_chunks_take_no_memory() -> None:
    absurd = ZarrArray(shape=(1 << 50,), chunks=(1,), dtype="int8")
    many = ZarrArray(shape=(30_000,), chunks=(1,), dtype="int8")
    names = [f"m{number}" for number in range(50)]
    record = foreign(absurd=absurd, **dict.fromkeys(names, many), last=ZarrArray(shape=(2,), chunks=(2,), dtype="int8"))
    tracemalloc.start()
    index = join_records([record], verified=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
    assert 90_000 <= len(index.chunks) <= 100_000
    assert index.files[len(index.files) - 1].name == "last/0"


GOLDEN = Path(__file__).parents[2] / "compat" / "golden" / "eformer"
SMALL = ZarrArray(shape=(2,), chunks=(2,), dtype="int8")


def record_at(*paths: str, prefix: str | None = None) -> LeavesRecord:
    return foreign_record(prefix, [Entry(path, {"path": path}) for path in paths], [SMALL] * len(paths))


def tree_of_folders(record: LeavesRecord) -> object:
    return build(record.structure, record.folders)


def test_nested_dicts() -> None:
    record = record_at("a/w", "a/x/y", "b", "layers/0", "layers/10")
    assert record.keys == ["a/w", "a/x/y", "b", "layers/0", "layers/10"] == keys_of(record.structure)
    assert tree_of_folders(record) == {
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
    assert tree_of_folders(record) == {"a.b": {"50%": "a%2Eb/50%"}, "a~b": {"": "a~b/%-"}, "x/y": "x%2Fy"}


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
    assert tree_of_folders(record_at(deep)) is not None
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
