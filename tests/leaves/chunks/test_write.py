"""Writing leaves: the bytes of every file, checksums in order, few calls for small ones, two threads for large."""

from __future__ import annotations

import base64
import errno
import itertools
import json
import math
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import PartitionSpec

from tests import faults
from tests.compat.golden_files import dtype_named
from tests.compat.independent_leaves_reader import read_record
from tests.folders import names
from tests.leaves.saved import arrays_at, put
from tests.on_disk import block_checksums
from tests.properties.strategies import EXTENDED_DTYPES, NUMPY_DTYPES
from treering.errors import StoreError, UnsupportedError
from treering.leaves import tree_serialize_leaves

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


def record_at(path: Path) -> dict[str, Any]:
    (record,) = path.glob(".treering/*/record.json")
    return read_record(record.read_text())


def watch_writes(monkeypatch: pytest.MonkeyPatch, seen: Callable[[str, Path, int], None]) -> None:
    """Call ``seen`` with each file of a leaf that is created or written to: which of it, folder and name, and bytes."""

    def tell(what: str, descriptor: int, nbytes: int) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        if "leaves" in place.parts:
            seen(what, Path(*place.parts[-2:]), nbytes)

    def opened(descriptor: int, path: Any, flags: int, *_: Any, **__: Any) -> None:
        if flags & os.O_CREAT:
            tell("open", descriptor, 0)

    faults.after(monkeypatch, os, "open", opened)
    faults.before(monkeypatch, os, "write", lambda descriptor, data: tell("write", descriptor, len(data)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", sorted({*NUMPY_DTYPES, *EXTENDED_DTYPES}))
def test_the_bytes_of_every_dtype(tmp_path: Path, name: str) -> None:
    dtype = dtype_named(name)
    items = np.frombuffer(bytes(24 * dtype.itemsize), dtype).reshape(2, 3, 4).copy()
    items.view(np.uint8)[..., :1] = 1
    try:
        tree_serialize_leaves(tmp_path, {"w": items, "one": items[0, 0, 0], "none": items[:0]})
    except UnsupportedError as error:
        assert dtype.itemsize > 16 or name == "float128"
        assert error.path == ("w",)  # noqa: PT017 - both ways are right, each for its dtypes
        return
    assert (tmp_path / "w" / "0.0.0").read_bytes() == items.tobytes()
    assert (tmp_path / "one" / "0").read_bytes() == items[0, 0, 0].tobytes()
    assert set(names(tmp_path / "none")) == {".zarray"}
    assert by_tensorstore(tmp_path / "w").dtype.name == arrays_at(tmp_path)["w"][-1]
    assert by_tensorstore(tmp_path / "w").tobytes() == items.tobytes()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec["id"] if codec else "raw")
@pytest.mark.parametrize("limit", [None, 40_000])
def test_sizes_and_checksums_are_those_of_the_files_in_order(
    tmp_path: Path, codec: dict[str, Any] | None, limit: int | None
) -> None:
    tree: dict[str, Any] = {
        "large": numbers(300, 500),
        "small": numbers(7),
        "sharded": put(numbers(64, 512), PartitionSpec("x", "y"), (4, 2), ("x", "y")),
        "empty": numbers(0, 4),
        "turned": numbers(200, 300).T,
        "other": numbers(9, 9, dtype=">i4"),
        "point": jnp.float32(3),
    }
    tree_serialize_leaves(tmp_path, tree, compressor=codec, chunk_bytes=limit)
    record = record_at(tmp_path)
    sizes: list[int] = []
    checksums: list[int] = []
    for key, layout in zip(record["leaves"]["key"], record["layout"], strict=True):
        chunks = record["layouts"][layout]["chunks"]
        grid = [math.ceil(length / side) for length, side in zip(np.shape(tree[key]), chunks, strict=True)]
        files = [".".join(map(str, place)) or "0" for place in itertools.product(*map(range, grid))]
        assert set(names(tmp_path / key)) == {".zarray", *files}
        for file in files:
            content = (tmp_path / key / file).read_bytes()
            sizes.append(len(content))
            checksums += block_checksums(content)
    (found,) = zip(*struct.iter_unpack("<Q", base64.b64decode(record["checksums"]["table"])), strict=True)
    assert list(found) == checksums
    assert record["sizes"] == (sizes if codec else [])
    for key, leaf in tree.items():
        stored = by_tensorstore(tmp_path / key)
        assert stored.dtype == np.asarray(leaf).dtype.newbyteorder("=")
        assert np.array_equal(stored, leaf)


def test_a_chunk_is_a_shard_and_replicas_are_written_once(tmp_path: Path) -> None:
    tree = {
        "both": put(numbers(8, 8), PartitionSpec("x", "y"), (4, 2), ("x", "y")),
        "one": put(numbers(8, 8), PartitionSpec(None, "y"), (4, 2), ("x", "y")),
        "none": put(numbers(8, 8), PartitionSpec()),
    }
    tree_serialize_leaves(tmp_path, tree)
    chunks = {key: json.loads((tmp_path / key / ".zarray").read_bytes())["chunks"] for key in tree}
    assert chunks == {"both": [2, 4], "one": [8, 4], "none": [8, 8]}
    assert set(names(tmp_path / "one")) == {".zarray", "0.0", "0.1"}
    for key, leaf in tree.items():
        assert np.array_equal(by_tensorstore(tmp_path / key), leaf)


def test_the_end_of_a_padded_chunk_is_zeros(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": np.full((5, 1000), 7, np.int16)}, chunk_bytes=4000)
    last = np.frombuffer((tmp_path / "w" / "2.0").read_bytes(), np.int16).reshape(2, 1000)
    assert (last[0] == 7).all()
    assert not last[1].any()


def test_the_files_of_a_small_leaf_are_made_together_and_a_large_one_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, list[str]] = {}
    streamed: list[int] = []

    def seen(what: str, file: Path, nbytes: int) -> None:
        calls.setdefault(file.parts[0], []).append(f"{what} {file.name}")
        if what == "write" and file.parts == ("b", "0.0"):
            streamed.append(nbytes)

    with monkeypatch.context() as patch:
        watch_writes(patch, seen)
        tree_serialize_leaves(tmp_path, {"a": numbers(10), "b": numbers(2000, 1000), "c": jnp.ones(3)})
    together = ["open .zarray", "open 0", "write .zarray", "write 0"]
    assert calls["a"] == calls["c"] == together
    assert calls["b"][:3] == ["open .zarray", "write .zarray", "open 0.0"]
    assert len(streamed) > 1
    assert max(streamed) <= 2 << 20


def test_large_leaves_are_written_in_two_threads_and_small_ones_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: dict[str, set[int]] = {"small": set(), "large": set()}
    begun: set[Path] = set()
    meet = threading.Barrier(2, timeout=20)

    def seen(what: str, file: Path, nbytes: int) -> None:
        large = file.parts[0].startswith("large") and file.name != ".zarray"
        threads["large" if large else "small"].add(threading.get_ident())
        if large and what == "write" and file not in begun:
            begun.add(file)
            meet.wait()

    tree = {f"large{number}": numbers(700, 1000) for number in range(4)} | {f"n{n}": numbers(n) for n in range(300)}
    with monkeypatch.context() as patch:
        watch_writes(patch, seen)
        tree_serialize_leaves(tmp_path, tree)
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
    tree_serialize_leaves(tmp_path, tree, compressor=codec, progress=progress)
    total = sum(leaf.nbytes for leaf in tree.values())
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)
    assert callers == {threading.get_ident()}


def test_the_first_error_ends_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(what: str, file: Path, nbytes: int) -> None:
        if what == "write" and file.name != ".zarray":
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    threads = threading.active_count()
    tree = {f"w{number}": numbers(1000, 1000) for number in range(5)}
    with monkeypatch.context() as patch:
        watch_writes(patch, refuse)
        with pytest.raises(StoreError, match="Input/output error"):
            tree_serialize_leaves(tmp_path / "d", tree)
    assert threading.active_count() == threads
    assert not (tmp_path / "d").exists()


def test_nothing_is_written_for_a_tree_without_arrays(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"a": 1, "b": None})
    assert set(names(tmp_path)) == {".treering", "tensorstore_index.json"}
    record = record_at(tmp_path)
    assert (record["checksums"]["table"], record["layout"]) == ("", [])
