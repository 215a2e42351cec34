"""Arrays of zarr 3 as TensorStore writes them, through every codec that has a reader here."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore

import treering
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

_LITTLE: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "little"}}
_BIG: dict[str, Any] = {"name": "bytes", "configuration": {"endian": "big"}}
_CRC: dict[str, Any] = {"name": "crc32c"}
_ITEMS = np.arange(7 * 10, dtype=np.float32).reshape(7, 10)


def _zstd(*, checksum: bool) -> dict[str, Any]:
    return {"name": "zstd", "configuration": {"level": 1, "checksum": checksum}}


def _sharded(*codecs: Any, place: str = "end", index: Any = (_LITTLE, _CRC)) -> dict[str, Any]:
    settings = {"chunk_shape": [2, 3], "codecs": codecs, "index_codecs": index, "index_location": place}
    return {"name": "sharding_indexed", "configuration": settings}


_GZIP: dict[str, Any] = {"name": "gzip", "configuration": {"level": 1}}
_BLOSC: dict[str, Any] = {
    "name": "blosc",
    "configuration": {"cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": 4, "blocksize": 0},
}
_CHAINS: dict[str, list[Any]] = {
    "raw": [_LITTLE],
    "big": [_BIG],
    "transposed": [{"name": "transpose", "configuration": {"order": [1, 0]}}, _LITTLE],
    "kept": [{"name": "transpose", "configuration": {"order": [0, 1]}}, _LITTLE],
    "zstd": [_LITTLE, _zstd(checksum=False)],
    "zstd checked": [_BIG, _zstd(checksum=True)],
    "gzip": [_LITTLE, _GZIP],
    "blosc": [_LITTLE, _BLOSC],
    "crc": [_LITTLE, _CRC],
    "packed crc": [_LITTLE, _zstd(checksum=False), _CRC],
    "shards": [_sharded(_LITTLE, _zstd(checksum=False))],
    "shards from the start": [_sharded(_LITTLE, _CRC, place="start")],
    "shards with a bare index": [_sharded(_LITTLE, index=[_BIG])],
}


def _item(place: Path, *, absent: bool = False) -> Path:
    """Make a folder into an item of Orbax whose one leaf is the array in ``w``."""
    leaf = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "np.ndarray"}}
    document = {"tree_metadata": {"w": leaf}, "use_ocdbt": False, "use_zarr3": True}
    document["store_array_data_equal_to_fill_value"] = not absent
    place.mkdir(exist_ok=True)
    (place / "_METADATA").write_text(json.dumps(document))
    return place


def _write(place: Path, array: Any, codecs: list[Any], **metadata: Any) -> Path:
    chunks = [4, 6] if array.ndim == 2 else list(array.shape)
    spec = {
        "driver": "zarr3",
        "kvstore": f"file://{place}/w/",
        "metadata": {
            "shape": list(array.shape),
            "data_type": array.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
            "codecs": codecs,
        }
        | metadata,
        "create": True,
        "store_data_equal_to_fill_value": True,
    }
    tensorstore.open(spec).result()[...] = array
    return _item(place)


def _documents(place: Path, change: dict[str, Any]) -> None:
    file = place / "w" / "zarr.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | change))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("codecs", _CHAINS.values(), ids=_CHAINS)
def test_what_tensorstore_wrote(tmp_path: Path, codecs: list[Any]) -> None:
    _write(tmp_path, _ITEMS, codecs)
    np.testing.assert_array_equal(treering.load(tmp_path)["w"], _ITEMS)
    with treering.open(tmp_path) as opened:
        np.testing.assert_array_equal(opened["w"][2:6, 1::4], _ITEMS[2:6, 1::4])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", ["bool", "int4", "uint16", "complex64", "bfloat16", "float8_e5m2"])
def test_other_dtypes(tmp_path: Path, dtype: str) -> None:
    array = (np.arange(70).reshape(7, 10) % 2).astype(getattr(ml_dtypes, dtype, dtype))
    _write(tmp_path, array, [_LITTLE])
    found = treering.load(tmp_path)["w"]
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize(
    "encoding",
    [
        {"name": "default", "configuration": {"separator": "."}},
        {"name": "v2"},
        {"name": "v2", "configuration": {"separator": "/"}},
    ],
    ids=str,
)
def test_other_names_of_chunks(tmp_path: Path, encoding: Any) -> None:
    _write(tmp_path, _ITEMS, [_LITTLE], chunk_key_encoding=encoding)
    np.testing.assert_array_equal(treering.load(tmp_path)["w"], _ITEMS)
    scalar = _write(tmp_path / "scalar", np.float32(3).reshape(()), [_LITTLE], chunk_key_encoding=encoding)
    assert treering.load(scalar)["w"] == 3


@pytest.mark.parametrize("codecs", [[_LITTLE], [_sharded(_LITTLE)]], ids=["files", "shards"])
def test_what_was_never_written_is_zero_where_that_was_left_out(tmp_path: Path, codecs: list[Any]) -> None:
    _write(tmp_path, _ITEMS, codecs)
    store = tensorstore.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/w/"}).result()
    store[:4, :6] = 0
    with pytest.raises(CorruptError, match="is missing"):
        treering.load(tmp_path)
    _item(tmp_path, absent=True)
    wanted = _ITEMS.copy()
    wanted[:4, :6] = 0
    np.testing.assert_array_equal(treering.load(tmp_path)["w"], wanted)
    _documents(tmp_path, {"fill_value": 1.0})
    with pytest.raises(CorruptError, match="is missing"):
        treering.load(tmp_path)


@pytest.mark.parametrize("name", ["crc", "packed crc", "zstd checked", "shards from the start"])
def test_a_changed_chunk_is_damaged(tmp_path: Path, name: str) -> None:
    _write(tmp_path, _ITEMS, _CHAINS[name])
    file = tmp_path / "w" / "c" / "0" / "0"
    data = bytearray(file.read_bytes())
    for at in (-1, len(data) // 2):
        file.write_bytes(bytes(data[:at]) + bytes([data[at] ^ 1]) + bytes(data[at:][1:]))
        with pytest.raises(CorruptError):
            treering.load(tmp_path)


def test_a_shard_that_is_cut_off_anywhere_is_damaged(tmp_path: Path) -> None:
    for name in ("shards", "shards with a bare index"):
        _write(tmp_path / name, _ITEMS, _CHAINS[name])
        file = tmp_path / name / "w" / "c" / "0" / "0"
        data = file.read_bytes()
        for length in range(0, len(data), 9):
            file.write_bytes(data[:length])
            with pytest.raises(TreeringError):
                treering.load(tmp_path / name)
        file.write_bytes(data)


_DOCUMENT: dict[str, Any] = {
    "zarr_format": 3,
    "node_type": "array",
    "shape": [4, 6],
    "data_type": "float32",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [2, 6]}},
    "chunk_key_encoding": {"name": "default"},
    "codecs": [_LITTLE],
    "fill_value": 0.0,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({"zarr_format": 2}, FormatError, "version 2"),
        ({"node_type": "group"}, CorruptError, "group"),
        ({"data_type": "r8"}, UnsupportedError, "r8"),
        ({"data_type": {"name": "string"}}, UnsupportedError, "dtype"),
        ({"data_type": "datetime64[ns]"}, UnsupportedError, "datetime64"),
        ({"shape": [4, -6]}, CorruptError, "length"),
        ({"shape": [1 << 40, 1 << 40]}, CorruptError, "larger than any memory"),
        ({"shape": [1, 1] * 40}, CorruptError, "axes"),
        ({"shape": [4]}, CorruptError, "chunks of"),
        ({"chunk_grid": {"name": "rectilinear"}}, UnsupportedError, "rectilinear"),
        ({"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [0, 6]}}}, CorruptError, "chunks of"),
        (
            {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 20, 99]}}},
            UnsupportedError,
            "padding",
        ),
        ({"chunk_key_encoding": {"name": "hashed"}}, UnsupportedError, "hashed"),
        ({"chunk_key_encoding": {"name": "v2", "configuration": {"separator": "../"}}}, CorruptError, "separator"),
        ({"codecs": []}, UnsupportedError, "codec"),
        ({"codecs": [_LITTLE, {"name": "numcodecs.lzma"}]}, UnsupportedError, "lzma"),
        ({"codecs": [_LITTLE, _CRC, _GZIP]}, UnsupportedError, "gzip"),
        ({"codecs": [{"name": "bytes", "configuration": {"endian": "middle"}}]}, CorruptError, "middle"),
        ({"codecs": [{"name": "transpose", "configuration": {"order": [1, 1]}}, _LITTLE]}, UnsupportedError, "order"),
        ({"codecs": [_sharded(_sharded(_LITTLE))]}, UnsupportedError, "sharding_indexed"),
        ({"codecs": [_sharded(_LITTLE, place="middle")]}, CorruptError, "middle"),
        (
            {
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [3, 6]}},
                "codecs": [_sharded(_LITTLE)],
            },
            CorruptError,
            "whole",
        ),
        ({"storage_transformers": [{}]}, UnsupportedError, "transformers"),
    ],
)
def test_what_has_no_reader_is_named(
    change: dict[str, Any], error: type[TreeringError], problem: str, tmp_path: Path
) -> None:
    document = json.dumps(copy.deepcopy(_DOCUMENT) | change)
    (tmp_path / "w").mkdir()
    place = _item(tmp_path)
    (tmp_path / "w" / "zarr.json").write_text(document)
    with pytest.raises(error, match=problem):
        treering.load(place)
    for cut in range(0, len(document), 40):
        (tmp_path / "w" / "zarr.json").write_text(document[:cut])
        with pytest.raises(TreeringError):
            treering.load(place)
