"""A flipped bit where a format of another program has a checksum: an error or the right numbers at every door."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tensorstore
import zstandard
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering as tr
from tests.buckets import MemoryBucket
from tests.checkpoint.together import Loading, loading
from tests.command import copy_path
from tests.store.objects.web_server import serving
from tests.stores import write_file
from treering.errors import TreeringError

__all__ = ["loading"]

TREE: dict[str, Any] = {"a": np.arange(48, dtype=np.float32).reshape(8, 6) - 7, "b": np.arange(11, dtype=np.int16) * 5}
FLIPS = 6


def _document(place: Path, *, ocdbt: bool, zarr3: bool) -> None:
    def entry(key: str) -> dict[str, Any]:
        return {"key_metadata": [{"key": key, "key_type": 2}], "value_metadata": {"value_type": "np.ndarray"}}

    document = {"tree_metadata": {key: entry(key) for key in TREE}, "use_ocdbt": ocdbt, "use_zarr3": zarr3}
    (place / "_METADATA").write_text(json.dumps(document | {"store_array_data_equal_to_fill_value": True}))


def _zarr(identity: str, pack: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    """Write an item of zarr 2, its chunks by somebody else's compressor."""

    def write(place: Path) -> Path:
        place.mkdir()
        _document(place, ocdbt=False, zarr3=False)
        for key, array in TREE.items():
            (place / key).mkdir()
            layout = {"shape": array.shape, "chunks": array.shape, "dtype": array.dtype.str, "order": "C"}
            more = {"zarr_format": 2, "fill_value": None, "filters": None, "compressor": {"id": identity, "level": 1}}
            (place / key / ".zarray").write_text(json.dumps(layout | more))
            (place / key / ".".join("0" * array.ndim)).write_bytes(pack(array.tobytes()))
        return place

    return write


def _zarr3(*codecs: dict[str, Any], shard: bool = False) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        place.mkdir()
        _document(place, ocdbt=False, zarr3=True)
        for key, array in TREE.items():
            inner = [{"name": "bytes", "configuration": {"endian": "little"}}, *codecs]
            shards = {"chunk_shape": array.shape, "codecs": inner}
            chain = [{"name": "sharding_indexed", "configuration": shards}] if shard else inner
            metadata = {"shape": array.shape, "data_type": array.dtype.name, "codecs": chain}
            spec = {"driver": "zarr3", "kvstore": f"file://{place}/{key}/", "metadata": metadata, "create": True}
            tensorstore.open(spec).result()[...] = array
        return place

    return write


def _ocdbt(place: Path) -> Path:
    """Write an item whose documents and chunks all lie in nodes of the database, which have a CRC-32C."""
    place.mkdir()
    _document(place, ocdbt=True, zarr3=False)
    for key, array in TREE.items():
        base = {"driver": "ocdbt", "base": f"file://{place}/", "config": {"max_inline_value_bytes": 1024}}
        metadata = {"shape": array.shape, "dtype": array.dtype.str, "compressor": None}
        spec = {"driver": "zarr", "kvstore": base | {"path": f"{key}/"}, "metadata": metadata, "create": True}
        tensorstore.open(spec).result()[...] = array
    for file in sorted((place / "d").iterdir()):  # nodes of earlier commits, whose damage nobody could tell
        data = file.read_bytes()
        file.unlink()
        with contextlib.suppress(TreeringError):
            tr.load(place)
            continue
        file.write_bytes(data)
    return place


def _npz(save: Callable[..., None]) -> Callable[[Path], Path]:
    def write(place: Path) -> Path:
        save(place.with_suffix(".npz"), **TREE)
        return place.with_suffix(".npz")

    return write


def _gzip(place: Path) -> Path:
    path = place.with_suffix(".msgpack")
    path.write_bytes(gzip.compress(tr.serialization.to_bytes(TREE)))
    return path


def _checked_zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


FORMS: dict[str, Callable[[Path], Path]] = {
    "ocdbt": _ocdbt,
    "zarr 2, zstd": _zarr("zstd", _checked_zstd),
    "zarr 2, gzip": _zarr("gzip", gzip.compress),
    "zarr 2, zlib": _zarr("zlib", zlib.compress),
    "zarr 2, bz2": _zarr("bz2", bz2.compress),
    "zarr 3, zstd": _zarr3({"name": "zstd", "configuration": {"level": 1, "checksum": True}}),
    "zarr 3, gzip": _zarr3({"name": "gzip", "configuration": {"level": 1}}),
    "zarr 3, crc32c": _zarr3({"name": "crc32c"}),
    "zarr 3, shards": _zarr3({"name": "crc32c"}, shard=True),
    "npz": _npz(np.savez),
    "npz, deflated": _npz(np.savez_compressed),
    "gzip": _gzip,
}
UNCHECKED = frozenset({"_METADATA", ".zarray", "zarr.json"})
"""Documents that have no checksum."""


def _files_of(path: Path) -> list[Path]:
    """Return the files of a form, in an order that random names of files do not change."""
    found = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sorted(found, key=lambda file: (file.stat().st_size, file))


def _in_memory(path: Path) -> str:
    root = f"memory://flipped/{path}"
    for file in _files_of(path):
        write_file(f"memory://flipped/{file}", file.read_bytes())
    return root


def _in_bucket(path: Path) -> Any:
    bucket = MemoryBucket()
    for file in _files_of(path):
        bucket.put(file.relative_to(path.parent).as_posix(), file.read_bytes())
    return tr.bucket(bucket) / path.name


def _require_right(found: Any) -> None:
    assert sorted(found) == sorted(TREE)
    for key, array in TREE.items():
        assert np.asarray(found[key]).dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found[key]), array)


def _load(path: Any) -> None:
    _require_right(tr.load(path))


def _load_sharded(path: Any) -> None:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    spec = {"a": PartitionSpec("x"), "b": PartitionSpec()}
    _require_right(tr.load(path, shardings={key: NamedSharding(mesh, part) for key, part in spec.items()}))


def _slice(path: Any) -> None:
    with tr.open(path) as opened:
        np.testing.assert_array_equal(opened["a"][2:5, ::2], TREE["a"][2:5, ::2])
        np.testing.assert_array_equal(opened["b"][3:4], TREE["b"][3:4])


def _convert(path: Any) -> None:
    target = Path(str(path) + "-converted")
    tr.convert(path, target, overwrite=True)
    _load(target)


def _copy(path: Any) -> None:
    """A file without blocks is copied as it is, with the checksum that tells the damage."""
    if path.is_file():
        target = path.with_name(f"copy-{path.name}")
        copy_path(str(path), str(target), overwrite=True)
        _load(target)


def _load_mapped(path: Any) -> None:
    if path.suffix == ".npz" and path.name.startswith("raw"):
        return  # which is not compared, and the pages say so
    _require_right(tr.load(path, mapped=True))


DOORS = (
    _load, _load_sharded, _slice, _convert, _copy, _load_mapped,
    lambda path: _load(_in_memory(path)), lambda path: _load(_in_bucket(path)), lambda path: _slice(_in_bucket(path)),
)  # fmt: skip


def _flips(path: Path, count: int) -> Any:
    """Flip one of some bits at a time, spread over all bytes that have a checksum."""
    files = [(file, file.read_bytes()) for file in _files_of(path) if file.name not in UNCHECKED]
    total = sum(len(data) for _, data in files)
    draw = random.Random(0)
    for start in range(0, total, max(1, total // count)):
        at = start
        for file, data in files:
            if at < len(data):
                damaged = bytearray(data)
                damaged[at] ^= 1 << draw.randrange(8)
                file.write_bytes(damaged)
                yield f"byte {at} of {file.name}"
                file.write_bytes(data)
                break
            at -= len(data)


def _told(door: Callable[[Any], None], path: Any) -> bool:
    try:
        door(path)
    except TreeringError:
        return True
    return False


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_told_or_harmless_at_every_door(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path / ("raw" if form == "npz" else "other"))
    for door in DOORS:
        door(path)
    told = total = 0
    for _ in _flips(path, FLIPS):
        answers = [_told(door, path) for door in DOORS]
        try:
            is_sound = tr.verify(path).ok
        except TreeringError:
            is_sound = False
        assert is_sound is not answers[0]
        told, total = told + answers[0], total + 1
    assert told > total // 3


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
def test_it_is_told_or_harmless_to_a_job(form: str, tmp_path: Path, loading: Loading) -> None:
    path = FORMS[form](tmp_path / "other")
    _load_sharded(path)
    assert loading.meetings
    assert sum(_told(_load_sharded, path) for _ in _flips(path, FLIPS)) > FLIPS // 3


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["npz", "npz, deflated", "gzip"])
def test_it_is_told_or_harmless_over_the_web(form: str, tmp_path: Path) -> None:
    path = FORMS[form](tmp_path / "other")
    with serving(tmp_path) as server:
        for door in (_load, _slice, _load_sharded):
            door(f"{server.url}/{path.name}")
            assert sum(_told(door, f"{server.url}/{path.name}") for _ in _flips(path, FLIPS)) > FLIPS // 3


def test_mapped_arrays_of_an_archive_are_said_apart(tmp_path: Path) -> None:
    path = FORMS["npz"](tmp_path / "raw")
    data = bytearray(path.read_bytes())
    at = data.index(TREE["a"].tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    assert not np.array_equal(tr.load(path, mapped=True)["a"], TREE["a"])
    assert _told(_load, path)
    assert not tr.verify(path).ok
