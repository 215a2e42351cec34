"""Reading: any boxes of a leaf, from any chunks, checked, with nothing read twice; and leaves of any kind."""

from __future__ import annotations

import base64
import json
import random
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering
from tests import limits, meshes, reads
from tests.on_disk import INDEX, block_checksums, digest, signed_again
from tests.properties.strategies import quick
from tests.system_calls import spans_read
from treering.errors import CorruptError

SHAPE = (96, 160, 144)
"""More than two slabs and than what two threads read, in one chunk or in eight."""
ARRAY = np.arange(96 * 160 * 144, dtype="i4").reshape(SHAPE)
SPECS = [(), ("x",), (None, "x"), (None, None, "y"), ("y", "x"), (("x", "y"), None, None)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The array cut in chunks of many ways."""
    mesh = meshes.grid(4, 2)
    folder = tmp_path_factory.mktemp("chunks")
    for number, spec in enumerate(SPECS):
        placed = jax.device_put(ARRAY, NamedSharding(mesh, PartitionSpec(*spec)))
        treering.save(folder / str(number), {"w": placed, "other": np.arange(3)})
    return [folder / str(number) for number in range(len(SPECS))]


@pytest.fixture(scope="module")
def opened(saved: list[Path]) -> list[Any]:
    """Files that stay open as long as this module."""
    return list(map(treering.open, saved))


def sides(length: int) -> st.SearchStrategy[slice]:
    ends = st.tuples(st.integers(0, length), st.integers(0, length)).map(sorted)
    whole = st.just([0, length])
    return st.builds(
        lambda pair, step: slice(pair[0], pair[1], step), ends | whole, st.none() | st.integers(1, length + 1)
    )


@quick(120)
@given(st.tuples(*map(sides, SHAPE)), st.integers(0, len(SPECS) - 1))
def test_any_box_from_any_chunks(opened: list[Any], wanted: tuple[slice, ...], number: int) -> None:
    found = opened[number]["w"][wanted]
    assert np.array_equal(found, ARRAY[wanted])
    assert found.dtype == ARRAY.dtype


@pytest.mark.sampled(5)
@pytest.mark.parametrize("before", SPECS, ids=str)
def test_many_boxes_from_any_chunks(saved: list[Path], before: tuple[Any, ...]) -> None:
    mesh = Mesh(np.array(jax.devices()[::-1]).reshape(2, 2, 2), ("x", "y", "z"))
    path = saved[SPECS.index(before)]
    for spec in (("y", ("z", "x")), (None, None, ("x", "y", "z")), ("x", "y", "z")):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        found = treering.load(path, only="w", shardings=sharding)["w"]
        assert found.sharding == sharding
        for shard in found.addressable_shards:
            assert np.array_equal(shard.data, ARRAY[shard.index])


def test_large_arrays_are_aligned_for_jax(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {f"n{n}": np.arange(n) for n in (10_000, 100_000, 77_777)})
    with treering.open(tmp_path / "c") as ckpt:
        for key in ckpt:
            assert ckpt[key][...].ctypes.data % 64 == 0
            assert ckpt[key][5:].ctypes.data % 64 == 0


def test_neighbouring_arrays_share_large_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, shared_memory=1 << 20)
    rooms = reads.arrays_together(monkeypatch)
    # 400 KB each, but one of 1.6 MB, which has its own.
    tree = {f"n{n}": np.arange(100_000 if n != 3 else 400_000, dtype="i4") + n for n in range(7)}
    treering.save(tmp_path / "c", tree)
    found = treering.load(tmp_path / "c")
    assert rooms == [2, 1, 1, 2, 1]
    for key, array in found.items():
        assert np.array_equal(array, tree[key])
        array[:] = -1  # the neighbours do not change
        assert array.ctypes.data % 64 == 0
    assert all((array == -1).all() for array in found.values())


@pytest.mark.parametrize("width", [64, 12], ids=["side by side", "with gaps in memory"])
def test_small_leaves_of_many_boxes_are_checked_box_by_box(tmp_path: Path, width: int) -> None:
    over, turned = (NamedSharding(meshes.grid(*size), PartitionSpec("x", "y")) for size in ((4, 2), (2, 4)))
    tree = {f"n{n}": np.arange(16 * width, dtype="f4").reshape(16, width) + 10_000 * n for n in range(30)}
    treering.save(tmp_path / "c", jax.device_put(tree, over))
    for sharding in (over, turned):
        found = treering.load(tmp_path / "c", shardings=sharding)
        for key, array in found.items():
            assert array.sharding == sharding
            assert np.array_equal(array, tree[key])

    (data,) = (tmp_path / "c").glob("data-*")
    content = bytearray(data.read_bytes())
    at = content.find(np.ascontiguousarray(tree["n7"][8:12, width // 2 :]).tobytes())
    content[at + 20] ^= 1
    data.write_bytes(content)
    for sharding in (over, turned):
        with pytest.raises(CorruptError, match=rf"'n7'\[8:12,{width // 2}:{width}\]"):
            treering.load(tmp_path / "c", shardings=sharding)
        assert np.array_equal(treering.load(tmp_path / "c", only="n8", shardings=sharding)["n8"], tree["n8"])


def test_neighbouring_small_arrays_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    treering.save(tmp_path / "c", {f"n{n}": np.full(32, n) for n in range(1000)})
    spans = spans_read(monkeypatch)
    found = treering.load(tmp_path / "c")
    assert sum(count for _, count in spans) == 256_000
    assert len(spans) <= 4
    assert all((found[f"n{n}"] == n).all() for n in range(1000))
    spans.clear()
    treering.load(tmp_path / "c", only=["n10", "n500"])
    assert [count for _, count in spans] == [256, 256]


def test_arrays_without_items_part_no_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What wrote the file is another program: here arrays without items lie between the others, at their offsets.
    shapes: list[tuple[int, ...]] = [(5,), (0, 3), (7,), (20_000,)]
    tree = {f"{n:03}": np.full(shapes[n % 4], n, "f4") for n in range(80)}
    header: dict[str, Any] = {}
    at = 0
    for key, array in tree.items():
        header[key] = {"dtype": "F32", "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    data = b"".join(array.tobytes() for array in tree.values())
    path = tmp_path / "other.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    spans = spans_read(monkeypatch)
    loaded = treering.load(path)
    assert sum(count for _, count in spans) == len(data)
    assert len(spans) <= 2
    for key, array in tree.items():
        assert np.array_equal(loaded[key], array)  # shapes too


def test_neighbouring_boxes_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = meshes.grid(4, 2)
    tree = {f"n{n}": np.full((64, 64), n, "i4") for n in range(200)}
    treering.save(tmp_path / "c", jax.device_put(tree, NamedSharding(mesh, PartitionSpec("x", "y"))))
    for spec in (("x", "y"), ("y", "x"), (None, "x")):
        with monkeypatch.context() as patch:
            spans = spans_read(patch)
            found = treering.load(tmp_path / "c", shardings=NamedSharding(mesh, PartitionSpec(*spec)))
        assert sum(count for _, count in spans) == 200 * 64 * 64 * 4
        assert len(spans) <= 8
        assert all((np.asarray(found[f"n{n}"]) == n).all() for n in range(200))


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
            with pytest.raises(CorruptError, match="'w'"):
                ckpt["w"][at]
            with pytest.raises(CorruptError, match="'w'"):
                ckpt["w"][...]


# ---------------------------------------------------------------------------------------------------- of every kind

LONG = 5000
"""A text so long lies in a data file."""


@pytest.mark.parametrize("text", ["ring", "\ud800 half", "ü\0ñ", "𝄞"])
def test_long_texts(text: str, tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {"text": text * LONG})
    found = treering.load(tmp_path / "c")["text"]
    assert type(found) is str
    assert found == text * LONG


def test_a_long_text_that_is_none(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {"text": "a" * LONG})
    (file,) = (tmp_path / "c").glob("*.safetensors")
    text = b"aa\xff" + b"a" * (LONG - 3)
    content = file.read_bytes()
    assert content.count(b"a" * LONG) == 1
    file.write_bytes(content.replace(b"a" * LONG, text))
    index = tmp_path / "c" / INDEX
    document = index.read_bytes()
    before, after = (struct.pack("<Q", *block_checksums(data)) for data in (b"a" * LONG, text))
    header = content[:4096]
    for old, new in (
        (base64.b64encode(before), base64.b64encode(after)),
        (digest(header, before).encode(), digest(header, after).encode()),
    ):
        assert document.count(old) == 1
        document = document.replace(old, new)
    index.write_bytes(signed_again(document))
    with pytest.raises(CorruptError, match="UTF-8") as caught:
        treering.load(tmp_path / "c")
    assert caught.value.offset == 2
    assert caught.value.path == ("text",)


def test_long_bytes_of_both_kinds(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {"bytes": b"ab" * LONG, "bytearray": bytearray(b"ab" * LONG)})
    found = treering.load(tmp_path / "c")
    assert found == {"bytes": b"ab" * LONG, "bytearray": bytearray(b"ab" * LONG)}
    assert (type(found["bytes"]), type(found["bytearray"])) == (bytes, bytearray)
    found["bytearray"] += b"c"
    assert found["bytearray"][-2:] == b"bc"


def test_scalars_of_numpy(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", [np.int16(2)])
    (found,) = treering.load(tmp_path / "c")
    assert type(found) is np.int16
    assert found == 2


def test_arrays_in_memory_give_boxes(tmp_path: Path) -> None:
    """The leaves of a msgpack file are all read when it is opened."""
    array = np.arange(12).reshape(3, 4)
    treering.save(tmp_path / "c.msgpack", {"a": array, "b": 5, "c": np.float32(2)})
    with treering.open(tmp_path / "c.msgpack") as opened:
        assert opened["a"].shape == (3, 4)
        assert opened["a"].dtype == array.dtype
        part = opened["a"][1:3, :2]
        assert np.array_equal(part, array[1:, :2])
        assert part.flags.c_contiguous
        assert np.array_equal(opened["a"][...], array)
        assert opened["b"] == 5
    calls: list[tuple[int, int]] = []
    treering.load(tmp_path / "c.msgpack", progress=lambda done, total: calls.append((done, total)))
    assert calls[-1][0] == calls[-1][1] > 0
