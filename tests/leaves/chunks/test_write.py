"""Writing leaves: the bytes of every file, checksums in order, few calls for small ones, two threads for large."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.leaves.chunks.saved_leaves import Saved
from tests.properties.strategies import EXTENDED_DTYPES, NUMPY_DTYPES
from treering._arrays import outgoing, parted
from treering._codec.zarr import chunk_names, parse_zarray
from treering._leaves.chunks import write
from treering._store.leaves_folder.staged_leaves import StagedLeaves
from treering._values.checksums import block_bytes, block_checksums
from treering._values.dtypes import lookup, numpy_dtype
from treering.errors import TreeringError, Unsupported

CODECS: list[dict[str, Any] | None] = [
    None,
    {"id": "zstd", "level": 1},
    {"id": "zlib", "level": 0},
    {"id": "gzip", "level": 1},
    {"id": "bz2", "level": 1},
    {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
]


def by_tensorstore(folder: Path) -> np.ndarray:
    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder)}}
    return tensorstore.open(spec, open=True).result().read().result()


def numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(1).integers(0, 100, shape).astype(dtype)


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), ("x", "y")[: len(shape)])


@pytest.mark.parametrize("name", sorted({*NUMPY_DTYPES, *EXTENDED_DTYPES}))
def test_the_bytes_of_every_dtype(tmp_path: Path, name: str) -> None:
    known = lookup(name)
    assert known is not None
    items = np.frombuffer(bytes(24 * known.itemsize), numpy_dtype(known)).reshape(2, 3, 4).copy()
    items.view(np.uint8)[..., :1] = 1
    try:
        saved = Saved(tmp_path, {"w": items, "one": items[0, 0, 0], "none": items[:0]})
    except Unsupported as error:
        assert known.itemsize > 16 or name == "float128"
        assert error.path == ("w",)  # noqa: PT017 - both ways are right, each for its dtypes
        return
    with saved:
        assert (saved.folder("w") / "0.0.0").read_bytes() == items.tobytes()
        assert (saved.folder("one") / "0").read_bytes() == items[0, 0, 0].tobytes()
        assert [path.name for path in saved.folder("none").iterdir()] == [".zarray"]
        stored = parse_zarray((saved.folder("w") / ".zarray").read_bytes())
        assert by_tensorstore(saved.folder("w")).dtype.name == stored.dtype
        assert by_tensorstore(saved.folder("w")).tobytes() == items.tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["id"] if codec else "raw")
@pytest.mark.parametrize("limit", [None, 40_000])
def test_sizes_and_checksums_are_those_of_the_files_in_order(
    tmp_path: Path, codec: dict[str, Any] | None, limit: int | None
) -> None:
    tree = {
        "large": numbers(300, 500),
        "small": numbers(7),
        "sharded": jax.device_put(numbers(64, 512), NamedSharding(mesh(4, 2), PartitionSpec("x", "y"))),
        "empty": numbers(0, 4),
        "turned": numbers(200, 300).T,
        "other": numbers(9, 9, dtype=">i4"),
        "point": jnp.float32(3),
    }
    with Saved(tmp_path, tree, compressor=codec, chunk_bytes=limit) as saved:
        sizes: list[int] = []
        checksums: list[int] = []
        for folder, zarr in zip(saved.record.folders, saved.branch.arrays, strict=True):
            names = list(chunk_names(zarr))
            assert {path.name for path in saved.folder(folder).iterdir()} == {".zarray", *names}
            for name in names:
                content = (saved.folder(folder) / name).read_bytes()
                sizes.append(len(content))
                checksums += block_checksums(memoryview(content), block_bytes(len(content)))
        assert list(saved.record.checksums) == checksums
        assert list(saved.record.sizes) == (sizes if codec else [])
        for key, leaf in tree.items():
            found = by_tensorstore(saved.folder(key))
            assert found.dtype == np.asarray(leaf).dtype.newbyteorder("=")
            assert np.array_equal(found, leaf)


def test_a_chunk_is_a_shard_and_replicas_are_written_once(tmp_path: Path) -> None:
    tree = {
        "both": jax.device_put(numbers(8, 8), NamedSharding(mesh(4, 2), PartitionSpec("x", "y"))),
        "one": jax.device_put(numbers(8, 8), NamedSharding(mesh(4, 2), PartitionSpec(None, "y"))),
        "none": jax.device_put(numbers(8, 8), NamedSharding(mesh(8), PartitionSpec())),
    }
    with Saved(tmp_path, tree) as saved:
        chunks = {key: json.loads((saved.folder(key) / ".zarray").read_bytes())["chunks"] for key in tree}
        assert chunks == {"both": [2, 4], "one": [8, 4], "none": [8, 8]}
        assert sorted(path.name for path in saved.folder("one").iterdir()) == [".zarray", "0.0", "0.1"]
        for key, leaf in tree.items():
            assert np.array_equal(by_tensorstore(saved.folder(key)), leaf)


def test_the_end_of_a_padded_chunk_is_zeros(tmp_path: Path) -> None:
    array = np.full((5, 1000), 7, np.int16)
    with Saved(tmp_path, {"w": array}, chunk_bytes=4000) as saved:
        last = np.frombuffer((saved.folder("w") / "2.0").read_bytes(), np.int16).reshape(2, 1000)
        assert (last[0] == 7).all()
        assert not last[1].any()


def test_a_small_leaf_is_one_call_and_a_large_one_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[str]]] = []
    small, large = StagedLeaves.write_small, StagedLeaves.write_file

    def write_small(self: StagedLeaves, folder: str, files: Sequence[tuple[str, bytes]]) -> None:
        calls.append((folder, [name for name, _ in files]))
        small(self, folder, files)

    def write_file(self: StagedLeaves, folder: str, name: str, buffers: Iterable[Any], size: int) -> None:
        pieces = list(buffers)
        assert max(map(len, pieces)) <= 2 << 20
        large(self, folder, name, pieces, size)

    monkeypatch.setattr(StagedLeaves, "write_small", write_small)
    monkeypatch.setattr(StagedLeaves, "write_file", write_file)
    with Saved(tmp_path, {"a": numbers(10), "b": numbers(2000, 1000), "c": jnp.ones(3)}):
        assert sorted(calls) == [("a", [".zarray", "0"]), ("b", [".zarray"]), ("c", [".zarray", "0"])]


def test_large_leaves_are_written_in_two_threads_and_small_ones_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {"small": set(), "large": set()}
    meet = threading.Barrier(2, timeout=20)
    small, large = StagedLeaves.write_small, StagedLeaves.write_file

    def write_small(self: StagedLeaves, folder: str, files: Sequence[tuple[str, bytes]]) -> None:
        threads["small"].add(threading.get_ident())
        small(self, folder, files)

    def write_file(self: StagedLeaves, folder: str, name: str, buffers: Iterable[Any], size: int) -> None:
        threads["large"].add(threading.get_ident())
        meet.wait()
        large(self, folder, name, buffers, size)

    monkeypatch.setattr(StagedLeaves, "write_small", write_small)
    monkeypatch.setattr(StagedLeaves, "write_file", write_file)
    tree = {f"large{number}": numbers(700, 1000) for number in range(4)} | {f"n{n}": numbers(n) for n in range(300)}
    with Saved(tmp_path, tree):
        assert threads["small"] == {threading.get_ident()}
        assert len(threads["large"]) == 2


@pytest.mark.parametrize("codec", [None, {"id": "zlib", "level": 1}], ids=["raw", "zlib"])
def test_progress_comes_from_this_thread_and_ends_at_its_total(tmp_path: Path, codec: dict[str, Any] | None) -> None:
    calls: list[tuple[int, int]] = []
    callers: set[int] = set()

    def progress(done: int, total: int) -> None:
        calls.append((done, total))
        callers.add(threading.get_ident())

    tree = {"a": numbers(1000, 1000), "b": numbers(1500, 1000), "c": numbers(5), "d": numbers(0)}
    with Saved(tmp_path, tree, compressor=codec, progress=progress):
        total = sum(leaf.nbytes for leaf in tree.values())
        assert calls[-1] == (total, total)
        assert calls == sorted(calls)
        assert callers == {threading.get_ident()}


def test_the_first_error_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise Unsupported("no room for this")

    monkeypatch.setattr(StagedLeaves, "write_file", refuse)
    threads = threading.active_count()
    with pytest.raises(TreeringError, match="no room for this"):
        Saved(tmp_path, {f"w{number}": numbers(1000, 1000) for number in range(5)})
    assert threading.active_count() == threads


def test_a_shard_that_is_cut_into_chunks_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[int] = []

    def to_host(data: Any) -> np.ndarray:
        if isinstance(data, jax.Array):
            fetched.append(data.nbytes)
        return parted.to_host(data)

    monkeypatch.setattr("treering._leaves.chunks.pieces.to_host", to_host)
    monkeypatch.setattr("treering._leaves.chunks.write.to_host", to_host)
    with Saved(tmp_path, {"w": jnp.ones((64, 1024))}, chunk_bytes=16 << 10) as saved:
        assert len(list(saved.folder("w").iterdir())) == 17
    assert fetched == [256 << 10]


def test_nothing_is_written_for_a_tree_without_arrays(tmp_path: Path) -> None:
    with Saved(tmp_path, {"a": 1, "b": None}) as saved:
        assert list(saved.record.checksums) == []
        assert saved.record.folders == []


def test_small_is_what_it_says() -> None:
    assert write._SMALL_BYTES == outgoing._SMALL_BYTES
