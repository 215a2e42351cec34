"""Reading leaves: any boxes from any chunks and codecs, checked, straight into place, and nothing more is opened."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.leaves.chunks.saved_leaves import Saved, foreign, foreign_branch, read, write_foreign
from tests.properties.strategies import EXTENDED_DTYPES, NUMPY_DTYPES, quick
from treering._arrays import incoming
from treering._arrays.buffers import aligned_empty
from treering._arrays.delivered import request_for
from treering._arrays.incoming import ReadRequest
from treering._leaves.chunks import arrays as chunk_arrays
from treering._leaves.chunks import decode as chunk_decode
from treering._leaves.chunks.arrays import LeavesArrays
from treering._leaves.documents.join import join_records
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._store.posix.reading import LocalFile
from treering._values.boxes import Box, box_of_slices, slices
from treering._values.dtypes import lookup, numpy_dtype
from treering.errors import Corrupt, Format, Unsupported

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
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(shape), ("x", "y")[: len(shape)]), PartitionSpec(*spec))


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every file that is opened."""
    names: list[str] = []
    opener = LeavesFolder.open

    def counted(self: LeavesFolder, folder: str, name: str, attempt: str | None) -> Any:
        names.append(f"{folder}/{name}")
        return opener(self, folder, name, attempt)

    small = LeavesFolder.read_small

    def small_counted(self: LeavesFolder, folder: str, files: Any, attempt: str | None) -> list[bytes]:
        names.extend(f"{folder}/{name}" for name, _ in files)
        return small(self, folder, files, attempt)

    monkeypatch.setattr(LeavesFolder, "open", counted)
    monkeypatch.setattr(LeavesFolder, "read_small", small_counted)
    return names


# ---------------------------------------------------------------------------------------------------------- what comes


@pytest.mark.parametrize("name", sorted({*NUMPY_DTYPES, *EXTENDED_DTYPES}))
@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, name: str, codec: dict[str, Any] | None) -> None:
    known = lookup(name)
    assert known is not None
    items = np.frombuffer(bytes(24 * known.itemsize), numpy_dtype(known)).reshape(2, 3, 4).copy()
    items.view(np.uint8)[..., :1] = 1
    tree = {"w": items, "one": items[0, 0, 0].reshape(()), "none": items[:0]}
    try:
        saved = Saved(tmp_path, tree, compressor=codec)
    except Unsupported:
        assert known.itemsize > 16 or name == "float128"
        return
    with saved:
        arrays = saved.opened()
        for leaf, wanted in enumerate(tree.values()):
            (found,) = read(arrays, leaf)
            assert found.dtype == wanted.dtype == arrays.dtype_of(leaf)
            assert found.shape == wanted.shape
            assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=codec_id)
@pytest.mark.parametrize("limit", [None, 1000])
def test_sharded_one_way_and_read_every_other_way(
    tmp_path: Path, codec: dict[str, Any] | None, limit: int | None
) -> None:
    tree = {str(number): jax.device_put(ARRAY, sharding(number)) for number in range(len(LAYOUTS))}
    with Saved(tmp_path, tree, compressor=codec, chunk_bytes=limit) as saved:
        arrays = saved.opened()
        requests = [request_for(leaf, SHAPE, sharding(n)) for leaf in range(len(LAYOUTS)) for n in range(len(LAYOUTS))]
        arrays.read(requests)
    for request in requests:
        for box, found in zip(request.boxes, request.arrays, strict=True):
            assert np.array_equal(found, ARRAY[slices(box)])
            assert found.ctypes.data % 64 == 0 or found.base is not None


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[LeavesArrays]]:
    """The array in chunks of many ways."""
    tree = {str(number): jax.device_put(ARRAY, sharding(number)) for number in range(len(LAYOUTS))}
    saves = [
        Saved(tmp_path_factory.mktemp("scene"), tree, compressor=codec, chunk_bytes=limit)
        for codec in CODECS[:3]
        for limit in (None, 777)
    ]
    yield [saved.opened() for saved in saves]
    for saved in saves:
        saved.staged.close()


def boxes() -> st.SearchStrategy[list[Box]]:
    def side(length: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.tuples(st.integers(0, length), st.integers(0, length)).map(lambda pair: (min(pair), max(pair)))

    return st.lists(st.tuples(*map(side, SHAPE)), min_size=1, max_size=4, unique=True)


@quick(150)
@given(
    boxes(),
    st.none() | st.tuples(*(st.integers(1, length + 1) for length in SHAPE)),
    st.integers(0, 5),
    st.integers(0, len(LAYOUTS) - 1),
)
def test_any_boxes_from_any_chunks(
    scenes: list[LeavesArrays], wanted: list[Box], steps: tuple[int, ...] | None, scene: int, leaf: int
) -> None:
    request = ReadRequest(leaf, wanted, steps=steps)
    scenes[scene].read([request])
    for box, array in zip(wanted, request.arrays, strict=True):
        assert np.array_equal(array, ARRAY[slices(box, steps)])


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
def test_large_and_small_leaves_in_one_reading(
    tmp_path: Path, codec: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch, *, mapped: bool
) -> None:
    monkeypatch.setattr(incoming, "_SLAB_BYTES", 128 << 10)
    rng = np.random.default_rng(3)
    tree = {f"large{n}": rng.standard_normal(200_000 + n) for n in range(5)}
    tree |= {f"n{n}": rng.standard_normal((n, 2)) for n in range(300)}
    calls: list[tuple[int, int]] = []
    with Saved(tmp_path, tree, compressor=codec) as saved:
        arrays = saved.opened(mapped=mapped)
        requests = [request_for(leaf, array.shape, None) for leaf, array in enumerate(tree.values())]
        arrays.read(requests, lambda done, total: calls.append((done, total)))
    for request, wanted in zip(requests, tree.values(), strict=True):
        assert np.array_equal(request.arrays[0], wanted)
    assert calls == sorted(calls)
    assert calls[-1] == (sum(array.nbytes for array in tree.values()),) * 2


def test_a_map_is_the_file_itself_and_outlives_its_descriptor(tmp_path: Path) -> None:
    array = np.arange(100_000.0)
    with Saved(tmp_path, {"w": array}) as saved:
        (found,) = read(saved.opened(mapped=True), 0)
        assert not found.flags.writeable
        assert not found.flags.owndata
        (saved.folder("w") / "0").unlink()
    assert np.array_equal(found, array)


@pytest.mark.parametrize("codec", [{"id": "zstd", "level": 1}, CODECS[-1]], ids=codec_id)
def test_a_chunk_that_is_wanted_whole_is_undone_in_place(
    tmp_path: Path, codec: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the leaf nor the runs that devices want of it pass through memory of their own."""
    rooms: list[int] = []
    unset = aligned_empty

    def counted(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        array = unset(shape, dtype)
        rooms.append(array.nbytes)
        return array

    monkeypatch.setattr(chunk_decode, "aligned_empty", counted)
    array = np.random.default_rng(0).integers(0, 9, (64, 512)).astype("f4")
    with Saved(tmp_path, {"w": array}, compressor=codec) as saved:
        assert np.array_equal(read(saved.opened(), 0)[0], array)
        assert rooms == [array.nbytes]
        rooms.clear()
        request = request_for(0, array.shape, sharding(1))
        saved.opened().read([request])
        assert rooms == [array.nbytes]
    assert len(request.arrays) == 8
    for box, found in zip(request.boxes, request.arrays, strict=True):
        assert np.array_equal(found, array[slices(box)])
        assert found.ctypes.data % 64 == 0


# --------------------------------------------------------------------------------------------------- what is opened


@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
def test_only_covering_chunks_are_opened(tmp_path: Path, opens: list[str], codec: dict[str, Any] | None) -> None:
    array = np.arange(64 * 4096, dtype="f4").reshape(64, 4096)
    leaf = jax.device_put(array, NamedSharding(sharding(4).mesh, PartitionSpec("x", "y")))
    with Saved(tmp_path, {"w": leaf, "other": jnp.ones(3)}, compressor=codec) as saved:
        (found,) = read(saved.opened(), 0, ((17, 20), (0, 4000)))
        assert np.array_equal(found, array[17:20, :4000])
        assert sorted(set(opens)) == ["w/.zarray", "w/1.0", "w/1.1"]
        opens.clear()
        every = ReadRequest(0, [((17, 64), (0, 4000))], steps=(40, 1))
        saved.opened().read([every])
    assert np.array_equal(every.arrays[0], array[17::40, :4000])
    assert sorted(set(opens)) == ["w/.zarray", "w/1.0", "w/1.1", "w/3.0", "w/3.1"]


def test_each_file_of_a_small_leaf_is_opened_once(tmp_path: Path, opens: list[str]) -> None:
    tree = {f"n{n}": np.full(n, n) for n in range(1, 100)}
    with Saved(tmp_path, tree) as saved:
        arrays = saved.opened()
        requests = [request_for(leaf, array.shape, None) for leaf, array in enumerate(tree.values())]
        arrays.read(requests)
        assert sorted(opens) == sorted(f"{key}/{name}" for key in tree for name in (".zarray", "0"))
        opens.clear()
        arrays.read([ReadRequest(3, requests[3].boxes)])
        assert opens == ["n4/0"]


def test_thousands_of_large_leaves_need_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_arrays, "_SMALL_BYTES", 100)
    monkeypatch.setattr(chunk_arrays, "_CAREFUL_BYTES", 1)
    monkeypatch.setattr(incoming, "_SMALL_BYTES", 100)
    files: list[LocalFile] = []
    most = 0
    opener = LeavesFolder.open

    def noted(self: LeavesFolder, folder: str, name: str, attempt: str | None) -> LocalFile:
        nonlocal most
        files.append(opener(self, folder, name, attempt))
        most = max(most, sum(file._descriptor >= 0 for file in files))
        return files[-1]

    monkeypatch.setattr(LeavesFolder, "open", noted)
    tree = {f"n{n}": np.full(100, n) for n in range(200)}
    with Saved(tmp_path, tree) as saved:
        saved.opened().read([request_for(leaf, (100,), None) for leaf in range(200)])
    assert len(files) >= 400
    assert 0 < most < 40
    assert all(file._descriptor < 0 for file in files)


def test_several_threads_read_at_a_time(tmp_path: Path) -> None:
    tree = {f"n{n}": np.random.default_rng(n).standard_normal(20_000) for n in range(8)}
    wrong: list[int] = []
    with Saved(tmp_path, tree) as saved:
        arrays = saved.opened()

        def work(first: int) -> None:
            wrong.extend(
                leaf
                for leaf in itertools.islice(itertools.cycle(range(8)), first, first + 40)
                if not np.array_equal(read(arrays, leaf, ((leaf, 20_000),))[0], tree[f"n{leaf}"][leaf:])
            )

        threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


# ----------------------------------------------------------------------------------------------------------- damage


DAMAGED = {"small": np.arange(100.0), "large": np.arange(300_000.0), "empty": np.zeros((0, 2))}


@pytest.mark.parametrize("codec", CODECS, ids=codec_id)
@pytest.mark.parametrize("key", ["small", "large"])
@pytest.mark.parametrize("harm", ["missing", "short", "long", "empty", "flipped"])
def test_a_damaged_chunk_file_is_named_with_its_leaf(
    tmp_path: Path, codec: dict[str, Any] | None, key: str, harm: str
) -> None:
    with Saved(tmp_path, DAMAGED, compressor=codec) as saved:
        file = saved.folder(key) / "0"
        content = file.read_bytes()
        middle = len(content) // 2
        if harm == "missing":
            file.unlink()
        else:
            flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            file.write_bytes({"short": content[:-1], "long": content + b"\0", "empty": b"", "flipped": flipped}[harm])
        leaf = list(DAMAGED).index(key)
        with pytest.raises(Corrupt, match=f"leaf '{key}' is damaged.*{key}/0"):
            read(saved.opened(), leaf)
        assert np.array_equal(read(saved.opened(), 1 - leaf)[0], DAMAGED["large" if key == "small" else "small"])


@pytest.mark.parametrize("key", list(DAMAGED))
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("harm", ["missing", "changed", "short"])
def test_a_damaged_document_is_named_with_its_leaf(tmp_path: Path, key: str, harm: str, *, mapped: bool) -> None:
    with Saved(tmp_path, DAMAGED) as saved:
        file = saved.folder(key) / ".zarray"
        content = file.read_bytes()
        if harm == "missing":
            file.unlink()
        else:
            file.write_bytes(content[:-1] if harm == "short" else content.replace(b"<f8", b"<i8"))
        with pytest.raises(Corrupt, match=rf"leaf '{key}' is damaged.*{key}/\.zarray"):
            read(saved.opened(mapped=mapped), list(DAMAGED).index(key))


def test_every_block_of_a_mapped_leaf_is_checked(tmp_path: Path) -> None:
    with Saved(tmp_path, DAMAGED) as saved:
        file = saved.folder("large") / "0"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        with pytest.raises(Corrupt, match="leaf 'large' is damaged"):
            read(saved.opened(mapped=True), 1)


def test_damage_where_nobody_reads_does_no_harm(tmp_path: Path) -> None:
    array = np.arange(64 * 4096, dtype="f4").reshape(64, 4096)
    with Saved(tmp_path, {"w": array}, chunk_bytes=128 << 10) as saved:
        (saved.folder("w") / "7.0").unlink()
        arrays = saved.opened()
        assert np.array_equal(read(arrays, 0, ((0, 50), (0, 4096)))[0], array[:50])
        with pytest.raises(Corrupt, match=r"w/7\.0"):
            read(arrays, 0)


@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
@pytest.mark.parametrize("name", [".zarray", "0"])
def test_links_are_refused(tmp_path: Path, codec: dict[str, Any] | None, name: str) -> None:
    with Saved(tmp_path / "a", DAMAGED, compressor=codec) as saved:
        file = saved.folder("large") / name
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(Format, match="link"):
            read(saved.opened(), 1)


def test_compressed_bytes_are_checked_before_they_are_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[bytes] = []

    def decode(array: Any, take: Any, nbytes: int, into: np.ndarray) -> None:
        fed.append(take(nbytes))

    monkeypatch.setattr(chunk_decode, "decode", decode)
    array = np.random.default_rng(0).integers(0, 1 << 30, 500_000)
    with Saved(tmp_path, {"w": array}, compressor={"id": "zstd", "level": 1}) as saved:
        file = saved.folder("w") / "0"
        content = file.read_bytes()
        read(saved.opened(), 0)
        assert fed == [content]
        file.write_bytes(content[:1_000_000] + bytes([content[1_000_000] ^ 1]) + content[1_000_001:])
        with pytest.raises(Corrupt, match=r"bytes 983040 to 1048576 have the checksum"):
            read(saved.opened(), 0)
        assert len(fed) == 1


# ---------------------------------------------------------------------------------------------------- other writers


@pytest.mark.parametrize("codec", CODECS, ids=codec_id)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "bfloat16"])
def test_arrays_of_other_writers(
    tmp_path: Path, codec: dict[str, Any] | None, order: str, separator: str, dtype: str
) -> None:
    array = ARRAY.astype("float32" if dtype != "bfloat16" else jnp.bfloat16)
    for folder, chunks in (("whole", SHAPE), ("even", (4, 12, 8)), ("ragged", (5, 7, 3)), ("wide", (20, 30, 9))):
        metadata = {"chunks": list(chunks), "order": order, "compressor": codec}
        write_foreign(tmp_path / folder, array, dimension_separator=separator, dtype=dtype, **metadata)
    arrays = foreign(tmp_path, "whole", "even", "ragged", "wide")
    box = ((3, 9), (1, 23), (0, 8))
    for leaf in range(4):
        assert np.array_equal(read(arrays, leaf)[0], array)
        assert np.array_equal(read(arrays, leaf, box)[0], array[slices(box)])
        request = request_for(leaf, SHAPE, sharding(5))
        arrays.read([request])
        for index in sharding(5).addressable_devices_indices_map(SHAPE).values():
            place = request.boxes.index(box_of_slices(index or (), SHAPE))
            assert np.array_equal(request.arrays[place], array[index])


@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
@pytest.mark.parametrize("separator", [".", "/"])
def test_another_writers_lost_or_emptied_chunk(tmp_path: Path, codec: dict[str, Any] | None, separator: str) -> None:
    write_foreign(tmp_path / "w", ARRAY, chunks=[8, 8, 8], compressor=codec, dimension_separator=separator)
    file = tmp_path / "w" / separator.join("110")
    content = file.read_bytes()
    for harm in (b"", content[:-1], content + b"\0"):
        file.write_bytes(harm)
        with pytest.raises(Corrupt, match=rf"leaf 'w' is damaged.*w/1{separator}1{separator}0"):
            read(foreign(tmp_path, "w"), 0)
    file.unlink()
    with pytest.raises(Corrupt, match=rf"w/1{separator}1{separator}0.* is missing"):
        read(foreign(tmp_path, "w"), 0)


def test_a_claim_without_files_takes_no_memory(tmp_path: Path) -> None:
    write_foreign(tmp_path / "w", np.zeros((4, 4)), chunks=[2, 4])
    document = (tmp_path / "w" / ".zarray").read_text()
    for chunks, shape in (("2,4", "4611686018427387,4"), ("46116860184273,4", "46116860184273,4"), ("2,4", "400,4")):
        (tmp_path / "w" / ".zarray").write_text(
            document.replace('"chunks":[2,4]', f'"chunks":[{chunks}]').replace('"shape":[4,4]', f'"shape":[{shape}]')
        )
        with pytest.raises(Corrupt, match="leaf 'w' is damaged"):
            read(foreign(tmp_path, "w"), 0)


def test_chunks_in_folders_of_their_own_are_counted_before_they_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(*_: object) -> None:
        raise AssertionError("a table of all chunks that are claimed")

    write_foreign(tmp_path / "w", np.zeros((3, 3, 3), "u1"), chunks=[1, 1, 1], dimension_separator="/")
    for first, second in itertools.product(range(3), range(3)):
        if first and second:
            for file in (tmp_path / "w" / str(first) / str(second)).iterdir():
                file.unlink()
    monkeypatch.setattr(chunk_arrays, "find_chunks", noted)
    with pytest.raises(Corrupt, match=r"leaf 'w' is damaged: w/1/1/0 is missing"):
        read(foreign(tmp_path, "w"), 0)


def test_checksums_hold_beside_a_branch_without_any(tmp_path: Path) -> None:
    tree = {"small": np.arange(10.0), "large": np.arange(100_000.0), "cut": np.arange(300_000.0)}
    with Saved(tmp_path, tree, prefix="ours", chunk_bytes=1 << 20) as saved:
        write_foreign(tmp_path / "theirs", np.arange(100_000))
        other = foreign_branch(tmp_path, ["theirs"])
        record = dataclasses.replace(other.record, prefix="theirs")
        for records in ([saved.record, record], [record, saved.record]):
            index = join_records(records, verified=False)
            branches = [saved.branch if one is saved.record else other for one in records]
            arrays = LeavesArrays(index, branches, LeavesFolder(tmp_path))
            for key, wanted in {"ours/large": tree["large"], "ours/cut": tree["cut"]}.items():
                assert np.array_equal(read(arrays, index.keys.index(key))[0], wanted)
            theirs = next(leaf for leaf, key in enumerate(index.keys) if key.startswith("theirs"))
            assert np.array_equal(read(arrays, theirs)[0], np.arange(100_000))
        for key in tree:
            file = next(path for path in saved.folder(f"ours/{key}").iterdir() if path.name != ".zarray")
            content = bytearray(file.read_bytes())
            content[5] ^= 1
            file.write_bytes(content)
            with pytest.raises(Corrupt, match=f"'ours/{key}'"):
                read(arrays, index.keys.index(f"ours/{key}"))


# ------------------------------------------------------------------------------------------------ while files are moved


@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=codec_id)
@pytest.mark.parametrize("moved", [(".zarray",), ("0",), (".zarray", "0")], ids=["document", "chunk", "both"])
def test_files_are_found_in_either_place(tmp_path: Path, codec: dict[str, Any] | None, moved: tuple[str, ...]) -> None:
    with Saved(tmp_path, DAMAGED, compressor=codec) as saved:
        arrays = saved.opened()
        for key in ("small", "large"):
            (tmp_path / key).mkdir()
            for name in moved:
                (saved.folder(key) / name).rename(tmp_path / key / name)
        for leaf, key in enumerate(("small", "large")):
            assert np.array_equal(read(arrays, leaf)[0], DAMAGED[key])
        branch = dataclasses.replace(saved.branch, attempt=None)
        if len(moved) == 1:
            with pytest.raises(Corrupt, match="is missing"):
                read(LeavesArrays(saved.index, [branch], LeavesFolder(tmp_path)), 0)


def test_small_compressed_leaves_of_other_writers(tmp_path: Path, opens: list[str]) -> None:
    tree = {f"n{n}": np.random.default_rng(n).integers(0, 250, (n, 3), dtype="u1") for n in range(1, 40)}
    for number, (key, array) in enumerate(tree.items()):
        write_foreign(tmp_path / key, array, chunks=list(array.shape), compressor=CODECS[number % len(CODECS)])
    arrays = foreign(tmp_path, *tree)
    opens.clear()
    requests = [request_for(leaf, array.shape, None) for leaf, array in enumerate(tree.values())]
    arrays.read(requests)
    assert all(np.array_equal(request.arrays[0], array) for request, array in zip(requests, tree.values(), strict=True))
    assert opens == [f"{key}/0.0" for key in tree]
    assert len({request.arrays[0].ctypes.data % 64 for request in requests}) == 1
