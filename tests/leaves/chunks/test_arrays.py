"""Reading leaves: any boxes from any chunks and codecs, checked, straight into place, and nothing more is opened."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import faults, meshes
from tests.compat.golden_files import dtype_named
from tests.leaves.folder.directories import fail_moves
from tests.leaves.saved import INDEX
from tests.properties.strategies import EXTENDED_DTYPES, NUMPY_DTYPES, quick
from treering.errors import CorruptError, FormatError, StoreError, UnsupportedError
from treering.leaves import tree_serialize_leaves

CODECS: list[dict[str, Any] | None] = [
    None,
    {"id": "zstd", "level": 1},
    {"id": "zlib", "level": 0},
    {"id": "gzip", "level": 1},
    {"id": "bz2", "level": 1},
    {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
]
SHAPE = (16, 24, 8)
ARRAY = np.arange(16 * 24 * 8, dtype="i4").reshape(SHAPE)
LAYOUTS = [
    ((8,), ()),
    ((8,), ("x",)),
    ((8,), (None, "x")),
    ((8,), (None, None, "x")),
    ((4, 2), ("x", "y")),
    ((4, 2), ("y", "x")),
    ((4, 2), (("x", "y"), None, None)),
    ((2, 4), (None, "y", "x")),
]


def codec_id(codec: object) -> str:
    return codec["id"] if isinstance(codec, dict) else "raw"


def sharding(number: int) -> NamedSharding:
    shape, spec = LAYOUTS[number]
    return NamedSharding(meshes.grid(*shape), PartitionSpec(*spec))


def read(path: Path, key: str, place: Any = ...) -> np.ndarray:
    """Read a part of a leaf, all of it if none is named."""
    with treering.open(path) as opened:
        return opened[key][place]


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every file of a leaf that is opened from now on: folder and name."""
    names: list[str] = []

    def note(descriptor: int, *_: object, **__: object) -> None:
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        if place.name == ".zarray" or place.name.replace(".", "").isdecimal():
            names.append("/".join(place.parts[-2:]))

    faults.after(monkeypatch, os, "open", note)
    return names


def write_foreign(path: Path, array: np.ndarray, **metadata: Any) -> None:
    """Write an array as another program would."""
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "file", "path": str(path)},
        "metadata": {"shape": list(array.shape), "compressor": None} | metadata,
        "recheck_cached_data": False,
    }
    if "dtype" not in metadata:
        spec["dtype"] = array.dtype.name
    tensorstore.open(spec, create=True).result().write(array).result()


def list_foreign(path: Path, folders: Sequence[str]) -> None:
    """Write the least index that lists these folders."""
    index = {"format": "tensorstore", "arrays": [{"path": folder} for folder in folders]}
    (path / INDEX).write_text(json.dumps(index))


# ---------------------------------------------------------------------------------------------------------- what comes


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", sorted({*NUMPY_DTYPES, *EXTENDED_DTYPES}))
@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, name: str, codec: dict[str, Any] | None) -> None:
    dtype = dtype_named(name)
    items = np.frombuffer(bytes(24 * dtype.itemsize), dtype).reshape(2, 3, 4).copy()
    items.view(np.uint8)[..., :1] = 1
    tree = {"w": items, "one": items[0, 0, 0].reshape(()), "none": items[:0]}
    try:
        tree_serialize_leaves(tmp_path, tree, compressor=codec)
    except UnsupportedError:
        assert dtype.itemsize > 16 or name == "float128"
        return
    with treering.open(tmp_path) as opened:
        for key, wanted in tree.items():
            found = opened[key][...]
            assert found.dtype == wanted.dtype == opened[key].dtype
            assert found.shape == wanted.shape
            assert found.tobytes() == wanted.tobytes()


# Each way onto each other one, raw and compressed, and of each codec and limit some of them: a chunk is decoded as a
# whole before anything is cut out of it.
EVERY = range(len(LAYOUTS))
WAYS = [
    (codec, limit, EVERY if codec in CODECS[:2] and (codec is None) == (limit is None) else EVERY[number % 3 :: 3])
    for number, (codec, limit) in enumerate(itertools.product(CODECS, (None, 1000)))
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("codec", "limit", "wanted"), WAYS, ids=codec_id)
def test_sharded_one_way_and_read_every_other_way(
    tmp_path: Path, codec: dict[str, Any] | None, limit: int | None, wanted: Sequence[int]
) -> None:
    tree = {str(number): jax.device_put(ARRAY, sharding(number)) for number in EVERY}
    tree_serialize_leaves(tmp_path, tree, compressor=codec, chunk_bytes=limit)
    for number in wanted:
        for found in treering.load(tmp_path, shardings=sharding(number)).values():
            assert found.sharding == sharding(number)
            for shard in found.addressable_shards:
                assert np.array_equal(shard.data, ARRAY[shard.index])


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    """The array in chunks of many ways."""
    tree = {str(number): jax.device_put(ARRAY, sharding(number)) for number in range(len(LAYOUTS))}
    with contextlib.ExitStack() as opened:
        scenes = []
        for codec, limit in itertools.product(CODECS[:3], (None, 777)):
            path = tmp_path_factory.mktemp("scene")
            tree_serialize_leaves(path, tree, compressor=codec, chunk_bytes=limit)
            scenes.append(opened.enter_context(treering.open(path)))
        yield scenes


def places() -> st.SearchStrategy[tuple[slice, ...]]:
    def side(length: int) -> st.SearchStrategy[slice]:
        ends = st.tuples(st.integers(0, length), st.integers(0, length))
        step = st.none() | st.integers(1, length + 1)
        return st.tuples(ends, step).map(lambda drawn: slice(min(drawn[0]), max(drawn[0]), drawn[1]))

    return st.tuples(*map(side, SHAPE))


@quick(150)
@given(st.lists(places(), min_size=1, max_size=4), st.integers(0, 5), st.integers(0, len(LAYOUTS) - 1))
def test_any_boxes_from_any_chunks(scenes: list[Any], wanted: list[tuple[slice, ...]], scene: int, leaf: int) -> None:
    for place in wanted:
        assert np.array_equal(scenes[scene][str(leaf)][place], ARRAY[place])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
def test_large_and_small_leaves_in_one_reading(tmp_path: Path, codec: dict[str, Any] | None, *, mapped: bool) -> None:
    rng = np.random.default_rng(3)
    tree = {f"large{n}": rng.standard_normal(600_000 + n) for n in range(5)}  # more than is read at a time
    tree |= {f"n{n}": rng.standard_normal((n, 2)) for n in range(300)}
    calls: list[tuple[int, int]] = []
    tree_serialize_leaves(tmp_path, tree, compressor=codec)
    found = treering.load(tmp_path, mapped=mapped, progress=lambda done, total: calls.append((done, total)))
    for key, wanted in tree.items():
        assert np.array_equal(found[key], wanted)
        assert mapped or not key.startswith("large") or found[key].ctypes.data % 64 == 0
    assert calls == sorted(calls)
    assert calls[-1] == (sum(array.nbytes for array in tree.values()),) * 2


def test_a_map_is_the_file_itself_and_outlives_its_descriptor(tmp_path: Path) -> None:
    array = np.arange(100_000.0)
    tree_serialize_leaves(tmp_path, {"w": array})
    found = treering.load(tmp_path, mapped=True)["w"]
    assert not found.flags.writeable
    assert not found.flags.owndata
    (tmp_path / "w" / "0").unlink()
    assert np.array_equal(found, array)


# --------------------------------------------------------------------------------------------------- what is opened


@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
def test_only_covering_chunks_are_opened(tmp_path: Path, opens: list[str], codec: dict[str, Any] | None) -> None:
    array = np.arange(64 * 4096, dtype="f4").reshape(64, 4096)
    leaf = jax.device_put(array, NamedSharding(sharding(4).mesh, PartitionSpec("x", "y")))
    tree_serialize_leaves(tmp_path, {"w": leaf, "other": jnp.ones(3)}, compressor=codec)
    opens.clear()
    assert np.array_equal(read(tmp_path, "w", np.s_[17:20, :4000]), array[17:20, :4000])
    assert sorted(set(opens)) == ["w/.zarray", "w/1.0", "w/1.1"]
    opens.clear()
    assert np.array_equal(read(tmp_path, "w", np.s_[17:64:40, :4000]), array[17::40, :4000])
    assert sorted(set(opens)) == ["w/.zarray", "w/1.0", "w/1.1", "w/3.0", "w/3.1"]


def test_each_file_of_a_small_leaf_is_opened_once(tmp_path: Path, opens: list[str]) -> None:
    tree = {f"n{n}": np.full(n, n) for n in range(1, 100)}
    tree_serialize_leaves(tmp_path, tree)
    opens.clear()
    treering.load(tmp_path)
    files = sorted(f"{key}/{name}" for key in tree for name in (".zarray", "0"))
    first = ["n1/.zarray"]  # it tells whether another program has replaced the tree
    assert sorted(opens) == sorted([*first, *files])
    opens.clear()
    with treering.open(tmp_path) as opened:
        assert opens == first
        opens.clear()
        for key, wanted in tree.items():
            assert np.array_equal(opened[key][...], wanted)
        assert sorted(opens) == files
        opens.clear()
        assert np.array_equal(opened["n4"][...], tree["n4"])
    assert opens == ["n4/0"]


def test_several_threads_read_at_a_time(tmp_path: Path) -> None:
    tree = {f"n{n}": np.random.default_rng(n).standard_normal(20_000) for n in range(8)}
    wrong: list[int] = []
    tree_serialize_leaves(tmp_path, tree)
    with treering.open(tmp_path) as opened:

        def work(first: int) -> None:
            wrong.extend(
                leaf
                for leaf in itertools.islice(itertools.cycle(range(8)), first, first + 40)
                if not np.array_equal(opened[f"n{leaf}"][leaf:], tree[f"n{leaf}"][leaf:])
            )

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


# ----------------------------------------------------------------------------------------------------------- damage


DAMAGED = {"small": np.arange(100.0), "large": np.arange(300_000.0), "empty": np.zeros((0, 2))}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """By codec, a directory that is saved once; what is to be damaged is a copy of it."""
    places: dict[str, Path] = {}

    def place_of(codec: Any) -> Path:
        name = codec_id(codec)
        if name not in places:
            places[name] = tmp_path_factory.mktemp(name)
            tree_serialize_leaves(places[name], DAMAGED, compressor=codec)
        return places[name]

    return place_of


@pytest.mark.sampled(7)
@pytest.mark.parametrize("codec", CODECS, ids=codec_id)
@pytest.mark.parametrize("key", ["small", "large"])
@pytest.mark.parametrize("harm", ["missing", "short", "long", "empty", "flipped"])
def test_a_damaged_chunk_file_is_named_with_its_leaf(
    tmp_path: Path, sound: Callable[[Any], Path], codec: dict[str, Any] | None, key: str, harm: str
) -> None:
    shutil.copytree(sound(codec), tmp_path, dirs_exist_ok=True)
    file = tmp_path / key / "0"
    content = file.read_bytes()
    middle = len(content) // 2
    if harm == "missing":
        file.unlink()
    else:
        flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        file.write_bytes({"short": content[:-1], "long": content + b"\0", "empty": b"", "flipped": flipped}[harm])
    for ask in (read, lambda path, key: treering.load(path, only=key)):
        with pytest.raises(CorruptError, match=f"leaf '{key}' is damaged.*{key}/0"):
            ask(tmp_path, key)
    other = "large" if key == "small" else "small"
    assert np.array_equal(read(tmp_path, other), DAMAGED[other])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("key", list(DAMAGED))
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("harm", ["missing", "changed", "short"])
def test_a_damaged_document_is_named_with_its_leaf(tmp_path: Path, key: str, harm: str, *, mapped: bool) -> None:
    tree_serialize_leaves(tmp_path, DAMAGED)
    file = tmp_path / key / ".zarray"
    content = file.read_bytes()
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(content[:-1] if harm == "short" else content.replace(b"<f8", b"<i8"))
    with pytest.raises(CorruptError, match=rf"leaf '{key}' is damaged.*{key}/\.zarray"):
        treering.load(tmp_path, mapped=mapped)
    with pytest.raises(CorruptError, match=rf"leaf '{key}' is damaged.*{key}/\.zarray"):
        read(tmp_path, key)


def test_every_block_of_a_mapped_leaf_is_checked(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, DAMAGED)
    file = tmp_path / "large" / "0"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError, match="leaf 'large' is damaged"):
        treering.load(tmp_path, mapped=True)


def test_damage_where_nobody_reads_does_no_harm(tmp_path: Path) -> None:
    array = np.arange(64 * 4096, dtype="f4").reshape(64, 4096)
    tree_serialize_leaves(tmp_path, {"w": array}, chunk_bytes=128 << 10)
    (tmp_path / "w" / "7.0").unlink()
    assert np.array_equal(read(tmp_path, "w", np.s_[:50]), array[:50])
    with pytest.raises(CorruptError, match=r"w/7\.0"):
        read(tmp_path, "w")


@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
@pytest.mark.parametrize("name", [".zarray", "0"])
def test_links_are_refused(tmp_path: Path, codec: dict[str, Any] | None, name: str) -> None:
    tree_serialize_leaves(tmp_path / "a", DAMAGED, compressor=codec)
    file = tmp_path / "a" / "large" / name
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="link"):
        read(tmp_path / "a", "large")


# ---------------------------------------------------------------------------------------------------- other writers


# Any two of codec, dtype, order and separator meet.
FOREIGN = [
    (codec, dtype, "CF"[(first + second) % 2], "./"[(first // 2 + second) % 2])
    for (first, codec), (second, dtype) in itertools.product(enumerate(CODECS), enumerate(["<f4", ">f4", "bfloat16"]))
]


def test_any_two_choices_of_other_writers_meet() -> None:
    met = {(one, two) for case in FOREIGN for one, two in itertools.combinations([codec_id(case[0]), *case[1:]], 2)}
    assert len(met) == 6 * 3 + 6 * 2 + 6 * 2 + 3 * 2 + 3 * 2 + 2 * 2


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("codec", "dtype", "order", "separator"), FOREIGN, ids=codec_id)
def test_arrays_of_other_writers(
    tmp_path: Path, codec: dict[str, Any] | None, dtype: str, order: str, separator: str
) -> None:
    array = ARRAY.astype("float32" if dtype != "bfloat16" else jnp.bfloat16)
    layouts = {"whole": SHAPE, "even": (4, 12, 8), "ragged": (5, 7, 3), "wide": (20, 30, 9)}
    for folder, chunks in layouts.items():
        metadata = {"chunks": list(chunks), "order": order, "compressor": codec}
        write_foreign(tmp_path / folder, array, dimension_separator=separator, dtype=dtype, **metadata)
    list_foreign(tmp_path, list(layouts))
    with treering.open(tmp_path) as opened:
        for folder in layouts:
            assert np.array_equal(opened[folder][...], array)
            assert np.array_equal(opened[folder][3:9, 1:23], array[3:9, 1:23])
    for found in treering.load(tmp_path, shardings=sharding(5)).values():
        assert found.sharding == sharding(5)
        for shard in found.addressable_shards:
            assert np.array_equal(shard.data, array[shard.index])


@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
@pytest.mark.parametrize("separator", [".", "/"])
def test_another_writers_lost_or_emptied_chunk(tmp_path: Path, codec: dict[str, Any] | None, separator: str) -> None:
    write_foreign(tmp_path / "w", ARRAY, chunks=[8, 8, 8], compressor=codec, dimension_separator=separator)
    list_foreign(tmp_path, ["w"])
    file = tmp_path / "w" / separator.join("110")
    content = file.read_bytes()
    for harm in (b"", content[:-1], content + b"\0"):
        file.write_bytes(harm)
        with pytest.raises(CorruptError, match=rf"leaf 'w' is damaged.*w/1{separator}1{separator}0"):
            read(tmp_path, "w")
    file.unlink()
    with pytest.raises(CorruptError, match=rf"w/1{separator}1{separator}0.* is missing"):
        read(tmp_path, "w")


def test_a_claim_without_files_takes_no_memory(tmp_path: Path) -> None:
    write_foreign(tmp_path / "w", np.zeros((4, 4)), chunks=[2, 4])
    list_foreign(tmp_path, ["w"])
    document = (tmp_path / "w" / ".zarray").read_text()
    for chunks, shape in (("2,4", "4611686018427387,4"), ("46116860184273,4", "46116860184273,4"), ("2,4", "400,4")):
        (tmp_path / "w" / ".zarray").write_text(
            document.replace('"chunks":[2,4]', f'"chunks":[{chunks}]').replace('"shape":[4,4]', f'"shape":[{shape}]')
        )
        with pytest.raises(CorruptError, match="leaf 'w' is damaged"):
            read(tmp_path, "w")


@pytest.mark.parametrize("ours_first", [True, False])
def test_checksums_hold_beside_a_branch_without_any(tmp_path: Path, ours_first: bool) -> None:
    tree = {"small": np.arange(10.0), "large": np.arange(100_000.0), "cut": np.arange(300_000.0)}
    tree_serialize_leaves(tmp_path, tree, prefix="ours", chunk_bytes=1 << 20)
    write_foreign(tmp_path / "theirs", np.arange(100_000))
    index = json.loads((tmp_path / INDEX).read_text())
    theirs = {"theirs": [{"path": "theirs"}]}
    index["prefixes"] = index["prefixes"] | theirs if ours_first else theirs | index["prefixes"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with treering.open(tmp_path) as opened:
        assert np.array_equal(opened["ours/large"][...], tree["large"])
        assert np.array_equal(opened["ours/cut"][...], tree["cut"])
        (other,) = (key for key in opened if key.startswith("theirs"))
        assert np.array_equal(opened[other][...], np.arange(100_000))
        for key in tree:
            file = next(path for path in (tmp_path / "ours" / key).iterdir() if path.name != ".zarray")
            content = bytearray(file.read_bytes())
            content[5] ^= 1
            file.write_bytes(content)
            with pytest.raises(CorruptError, match=f"'ours/{key}'"):
                opened[f"ours/{key}"][...]


def test_small_compressed_leaves_of_other_writers(tmp_path: Path, opens: list[str]) -> None:
    tree = {f"n{n}": np.random.default_rng(n).integers(0, 250, (n, 3), dtype="u1") for n in range(1, 40)}
    for number, (key, array) in enumerate(tree.items()):
        write_foreign(tmp_path / key, array, chunks=list(array.shape), compressor=CODECS[number % len(CODECS)])
    list_foreign(tmp_path, list(tree))
    opens.clear()
    found = treering.load(tmp_path)
    assert all(np.array_equal(found[key], array) for key, array in tree.items())
    assert [name for name in opens if not name.endswith(".zarray")] == [f"{key}/0.0" for key in tree]


# ------------------------------------------------------------------------------------------------ while files are moved


@pytest.mark.sampled(5)
@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
@pytest.mark.parametrize("moved", [(".zarray",), ("0",), (".zarray", "0")], ids=["document", "chunk", "both"])
def test_files_are_found_in_either_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: dict[str, Any] | None, moved: tuple[str, ...]
) -> None:
    """As of a save that is committed, and dies while it moves its files."""
    with monkeypatch.context() as patch:
        fail_moves(patch, OSError(errno.EIO, os.strerror(errno.EIO)))
        with pytest.raises(StoreError, match="the new content is in place"):
            tree_serialize_leaves(tmp_path, DAMAGED, compressor=codec)
    (staged,) = tmp_path.glob(".treering/*/leaves")
    with treering.open(tmp_path) as opened:
        for key in ("small", "large"):
            (tmp_path / key).mkdir()
            for name in moved:
                (staged / key / name).rename(tmp_path / key / name)
        for key in ("small", "large"):
            assert np.array_equal(opened[key][...], DAMAGED[key])
    assert np.array_equal(treering.load(tmp_path)["large"], DAMAGED["large"])
    # Where nothing moves, what lies among the staged files is of no leaf.
    tree_serialize_leaves(tmp_path / "b", DAMAGED, compressor=codec)
    (attempt,) = (tmp_path / "b" / ".treering").iterdir()
    (attempt / "leaves" / "small").mkdir(parents=True)
    for name in moved:
        (tmp_path / "b" / "small" / name).rename(attempt / "leaves" / "small" / name)
    with pytest.raises(CorruptError, match="is missing"):
        read(tmp_path / "b", "small")
