"""StoredArrays: any boxes of a leaf, from any chunks, checked, with covering blocks read and nothing twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering
from tests.properties.strategies import quick
from treering._arrays import incoming, jobs
from treering._arrays.incoming import ReadRequest
from treering._checkpoint.open import Checkpoint
from treering._store.posix.reading import LocalFile
from treering._values.boxes import Box, slices
from treering.errors import Corrupt

SHAPE = (24, 40, 8)
ARRAY = np.arange(24 * 40 * 8, dtype="i4").reshape(SHAPE)
STEPS = st.none() | st.tuples(*(st.integers(1, length + 1) for length in SHAPE))
SPECS = [(), ("x",), (None, "x"), (None, None, "y"), ("y", "x"), (("x", "y"), None, None)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    """The array cut in chunks of many ways, and files that stay open as long as this module."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    folder = tmp_path_factory.mktemp("chunks")
    for number, spec in enumerate(SPECS):
        placed = jax.device_put(ARRAY, NamedSharding(mesh, PartitionSpec(*spec)))
        treering.save(folder / str(number), {"w": placed, "other": np.arange(3)})
    return [treering.open(folder / str(number)) for number in range(len(SPECS))]


def boxes() -> st.SearchStrategy[list[Box]]:
    def side(length: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda pair: (min(pair), max(pair)))

    return st.lists(st.tuples(*map(side, SHAPE)), min_size=1, max_size=4, unique=True)


@quick(150)
@given(boxes(), STEPS, st.integers(0, len(SPECS) - 1), st.sampled_from([64, 4096, 2 << 20]))
def test_any_boxes_from_any_chunks(
    opened: list[Checkpoint], wanted: list[Box], steps: tuple[int, ...] | None, number: int, slab: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(incoming, "_SLAB_BYTES", slab)
        patch.setattr(jobs, "_TWO_THREADS_FROM", 10_000)
        patch.setattr(incoming, "_SMALL_BYTES", 1000)
        request = ReadRequest(0, wanted, steps=steps)
        opened[number]._source.arrays.read([request], None)
    assert len(request.arrays) == len(wanted)
    for box, array in zip(wanted, request.arrays, strict=True):
        assert np.array_equal(array, ARRAY[slices(box, steps)])
        assert array.dtype == ARRAY.dtype


def test_large_arrays_are_aligned_for_jax(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {f"n{n}": np.arange(n) for n in (10_000, 100_000, 77_777)})
    with treering.open(tmp_path / "c") as ckpt:
        for key in ckpt:
            assert ckpt[key][...].ctypes.data % 64 == 0
            assert ckpt[key][5:].ctypes.data % 64 == 0


def test_neighbouring_small_arrays_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    treering.save(tmp_path / "c", {f"n{n}": np.full(32, n) for n in range(1000)})
    calls: list[int] = []
    read_into = LocalFile.read_into

    def counted(self: LocalFile, jobs: Any) -> None:
        calls.append(sum(len(view) for _, view in jobs))
        read_into(self, jobs)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    found = treering.load(tmp_path / "c")
    assert sum(calls) == 256_000
    assert len(calls) <= 4
    assert all((found[f"n{n}"] == n).all() for n in range(1000))
    calls.clear()
    treering.load(tmp_path / "c", only=["n10", "n500"])
    assert calls == [256, 256]


def test_every_block_is_checked(tmp_path: Path) -> None:
    array = np.arange(1_000_000, dtype="u1")
    treering.save(tmp_path / "c", {"w": array})
    (data,) = (tmp_path / "c").glob("*.safetensors")
    content = data.read_bytes()
    for at in random.Random(0).sample(range(1_000_000), 25):
        damaged = bytearray(content)
        damaged[4096 + at] ^= 128
        data.write_bytes(damaged)
        with treering.open(tmp_path / "c") as ckpt:
            with pytest.raises(Corrupt, match="'w'"):
                ckpt["w"][at]
            with pytest.raises(Corrupt, match="'w'"):
                ckpt["w"][...]
