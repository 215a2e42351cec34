"""Files of other formats that nobody should have written: found by ``python -m torture fuzz``, each kept small here."""

from __future__ import annotations

import io
import json
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from treering.errors import CorruptError, TreeringError, UnsupportedError


def _npy(place: Path, header: bytes, data: bytes = b"") -> Path:
    place.write_bytes(b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + data)
    return place


def _item(place: Path, document: dict[str, Any], *, sparse: bool = False) -> Path:
    """Make a folder an item of Orbax whose one leaf is a zarr 2 array without files."""
    (place / "w").mkdir(parents=True)
    leaf = {"key_metadata": [{"key": "w", "key_type": 2}], "value_metadata": {"value_type": "np.ndarray"}}
    tree = {"tree_metadata": {"w": leaf}, "use_ocdbt": False, "use_zarr3": False}
    tree["store_array_data_equal_to_fill_value"] = not sparse
    (place / "_METADATA").write_text(json.dumps(tree))
    whole = {
        "zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "compressor": None, "filters": None,
        "order": "C", "fill_value": None,
    }  # fmt: skip
    (place / "w" / ".zarray").write_text(json.dumps(whole | document))
    return place


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"1" * 60 + b"x), }",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",), }",
        b"{'descr': '<f" + b"9" * 5000 + b"', 'fortran_order': False, 'shape': (1,), }",
        b"{'descr': '<U" + b"9" * 5000 + b"', 'fortran_order': False, 'shape': (), }",
    ],
    ids=["in time", "length", "item", "text"],
)
def test_endless_numbers_in_the_header_of_an_npy(tmp_path: Path, header: bytes) -> None:
    start = time.process_time()
    with pytest.raises(TreeringError):
        treering.load(_npy(tmp_path / "a.npy", header))
    assert time.process_time() - start < 1


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 5)])
def test_every_shape_that_numpy_writes_is_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    np.save(tmp_path / "a.npy", np.ones(shape, np.float32))
    assert treering.load(tmp_path / "a.npy").shape == shape


def test_entries_of_an_archive_on_top_of_each_other(tmp_path: Path) -> None:
    """Each of them is a whole array: a file of a megabyte would hold gigabytes."""
    packed = io.BytesIO()
    np.save(packed, np.zeros(1000, np.float32))
    data = packed.getvalue()
    head = struct.pack("<HHHHLLLHH", 0, 0, 0, 0, zlib.crc32(data), len(data), len(data), 5, 0)
    directory = b"".join(b"PK\1\2\x14\0\x14\0" + head + bytes(10) + bytes(4) + f"{n}.npy".encode() for n in range(3))
    body = b"PK\3\4\x14\0" + head + b"0.npy" + data
    end = struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, 3, 3, len(directory), len(body), 0)
    (tmp_path / "a.npz").write_bytes(body + directory + end)
    with pytest.raises(CorruptError, match=r"'0\.npy' and '1\.npy' lie on top of each other"):
        treering.load(tmp_path / "a.npz")


def test_an_array_in_more_chunks_than_any_has(tmp_path: Path) -> None:
    place = _item(tmp_path / "item", {"shape": [1 << 24], "chunks": [1]}, sparse=True)
    assert treering.abstract(place)["w"].shape == (1 << 24,)
    for door in (treering.load, treering.verify, lambda path: treering.convert(path, tmp_path / "other")):
        with pytest.raises(UnsupportedError, match="lies in 16777216 chunks"):
            door(place)
