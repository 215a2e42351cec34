"""safetensors both ways: the real library reads our files, we read its, for every dtype that both know."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.flax
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering
from tests.on_disk import signed_again
from tests.properties.strategies import EXTENDED_DTYPES, NUMPY_DTYPES, quick
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

DTYPES = {
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""The dtypes that docs/spec/checkpoint.md says safetensors knows, under its names."""
# Versions of the library before 0.7 lack some; what it says of each is asked of it, not assumed.
SIZES = {name: np.dtype(getattr(ml_dtypes, name, name)).itemsize for name in DTYPES}
LACKING = [name for name in (*NUMPY_DTYPES, *EXTENDED_DTYPES) if name not in DTYPES]


def file_of(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def loaded(content: bytes) -> Any:
    """What treering loads from such a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        path.write_bytes(content)
        return treering.load(path)


def known_to_the_library(dtype: str) -> bool:
    content = file_of(
        {"a": {"dtype": DTYPES[dtype], "shape": [1], "data_offsets": [0, SIZES[dtype]]}}, bytes(SIZES[dtype])
    )
    try:
        safetensors.deserialize(content)
    except safetensors.SafetensorError:
        return False
    return True


KNOWN = [name for name in DTYPES if known_to_the_library(name)]


def of_dtype(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.arange(math.prod(shape)).astype(np.uint8).astype(kind).reshape(shape)


def raw(content: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """What the library finds in a file."""
    return {
        name: (each["dtype"], each["shape"], bytes(each["data"])) for name, each in safetensors.deserialize(content)
    }


def test_the_library_knows_nearly_all() -> None:
    assert len(KNOWN) >= len(DTYPES) - 3


# ---------------------------------------------------------------------------------------------------------------- ours


@pytest.mark.sampled(7)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)], ids=str)
@pytest.mark.parametrize("dtype", KNOWN)
def test_the_library_reads_ours(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = of_dtype(dtype, shape)
    treering.save(tmp_path / "a.safetensors", {"w": array, "other": np.arange(3, dtype=np.uint8), "none": None})
    found = raw((tmp_path / "a.safetensors").read_bytes())
    assert found["w"] == (DTYPES[dtype], list(shape), array.tobytes())
    assert set(found) == {"w", "other"}
    loaded = treering.load(tmp_path / "a.safetensors")
    assert loaded["w"].dtype == array.dtype
    assert loaded["w"].tobytes() == array.tobytes()
    assert loaded["none"] is None


def test_its_loaders_read_ours(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tree: dict[str, Any] = {
        "params": {"w": jnp.ones((3, 4), jnp.bfloat16)},
        "step": jnp.int32(3),
        "list": [np.arange(4.0)],
    }
    treering.save(path, tree)
    with safetensors.safe_open(path, framework="flax") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert set(file.metadata()) == {"format", "treering", "treering.index"}
    assert set(found) == {"params/w", "step", "list/0"}
    assert np.array_equal(np.asarray(found["params/w"]), np.asarray(tree["params"]["w"]))
    assert int(found["step"]) == 3
    arrays = {"a": np.arange(4.0), "b": np.arange(3)}
    treering.save(path, arrays, overwrite=True)
    assert all(np.array_equal(value, arrays[name]) for name, value in safetensors.numpy.load_file(path).items())


METADATA = {"license": "MIT", "steps": 3, "é": "größe", "half": "\ud800", "tags": ["a"], "treering.x": "y"}


def test_readers_of_torch_models_find_what_they_look_for(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    treering.save(path, {"w": jnp.ones(3)}, metadata=METADATA)
    with safetensors.safe_open(path, framework="np") as file:
        metadata = file.metadata()
    # accelerate's load_state_dict raises OSError unless it is pt, tf, flax or mlx.
    assert metadata["format"] == "pt"
    mine = {name: value for name, value in metadata.items() if name not in ("format", "treering", "treering.index")}
    assert mine == {"license": "MIT", "é": "größe", "treering.x": "y"}
    with treering.open(path) as opened:
        assert opened.metadata == METADATA
    assert treering.verify(path)


@pytest.mark.parametrize("name", ["format", "treering", "treering.index"])
def test_names_of_the_file_itself_are_refused_as_metadata(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"member '{name}'"):
        treering.save(tmp_path / "m.safetensors", {"w": np.ones(3)}, metadata={name: "np"})
    with pytest.raises(UnsupportedError, match=f"member '{name}'"):
        treering.save_async(tmp_path / "m.safetensors", {"w": np.ones(3)}, metadata={name: "np"}).result()
    assert not list(tmp_path.iterdir())
    treering.save(tmp_path / "folder", {"w": np.ones(3)}, metadata={name: "np"})


def with_index(content: bytes, change: Any) -> bytes:
    """A single file whose header follows from another index text."""
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    header["__metadata__"]["treering.index"] = change(header["__metadata__"]["treering.index"])
    return file_of(header, content[8 + struct.unpack("<Q", content[:8])[0] :])


def test_a_newer_version_of_single_files_is_called_newer(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    treering.save(path, {"w": np.ones(3)})

    def newer(text: str) -> str:
        return signed_again(text.replace('"treering": 2', '"treering": 3', 1).encode()).decode()

    with pytest.raises(FormatError, match="is of version 3; this treering reads version 2"):
        loaded(with_index(path.read_bytes(), newer))


def test_a_folder_of_version_2_is_newer_still(tmp_path: Path) -> None:
    treering.save(tmp_path / "m.safetensors", {"w": np.ones(3)})
    content = (tmp_path / "m.safetensors").read_bytes()
    header = json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]])
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "ckpt" / "treering.json").write_text(header["__metadata__"]["treering.index"], encoding="ascii")
    with pytest.raises(FormatError, match="is of version 2; this treering reads version 1"):
        treering.open(tmp_path / "ckpt")


def test_the_library_reads_the_data_files_of_a_checkpoint(tmp_path: Path) -> None:
    tree = {
        "a": np.arange(5.0),
        "__metadata__": np.ones(2),
        "k/ey": np.ones(3),
        "\ud800": np.ones(4),
        "": np.zeros((0, 2)),
    }
    treering.save(tmp_path / "ckpt", tree)
    (path,) = (tmp_path / "ckpt").glob("data-*")
    found = safetensors.numpy.load_file(path)
    assert set(found) == {"a", "~__metadata__", "k~1ey", "~ud800", "~"}
    assert np.array_equal(found["a"], tree["a"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", LACKING)
def test_dtypes_that_it_lacks_are_raw_in_a_checkpoint(tmp_path: Path, dtype: str) -> None:
    array = of_dtype(dtype, (3, 4))
    treering.save(tmp_path / "ckpt", {"w": array})
    (path,) = (tmp_path / "ckpt").glob("data-*")
    name, shape, data = raw(path.read_bytes())["w"]
    assert data == array.tobytes()
    assert name == {1: "U8", 2: "U16", 4: "U32", 8: "U64", 16: "U64"}[array.dtype.itemsize]
    assert shape == ([3, 4, 2] if array.dtype.itemsize == 16 else [3, 4])


def test_parts_of_a_divided_array_are_named_by_their_boxes(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("x", "y")))
    treering.save(tmp_path / "ckpt", {"w": array})
    (path,) = (tmp_path / "ckpt").glob("data-*")
    found = safetensors.numpy.load_file(path)
    assert len(found) == 8
    assert np.array_equal(found["w~[2:4,4:8]"], np.asarray(array)[2:4, 4:8])


def test_a_divided_array_is_whole_in_a_single_file(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("x", "y")))
    treering.save(tmp_path / "a.safetensors", {"w": array})
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "a.safetensors")["w"], np.asarray(array))


def test_what_it_cannot_hold_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    tree = {
        "fine": np.ones(3),
        "int": 3,
        "text": "x",
        "key": jax.random.key(0),
        "wide": np.ones(2, np.complex128),
        "narrow": of_dtype("int4", (3,)),
        "time": np.zeros(2, "datetime64[s]"),
        "function": jax.nn.relu,
    }
    with pytest.raises(UnsupportedError) as error:
        treering.save(tmp_path / "a.safetensors", tree)
    for name in ("int", "text", "key", "wide", "narrow", "time", "function"):
        assert f"'{name}'" in str(error.value)
    assert "'fine'" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_structure_and_kinds_come_back(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"a": [np.ones(2), (jnp.ones(3), None)], "ints": {5: np.float32(2)}, "empty": {}}
    treering.save(tmp_path / "a.safetensors", tree, metadata={"note": [1, 2.5, None]})
    found = treering.load(tmp_path / "a.safetensors")
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(tree))
    assert isinstance(found["a"][0], np.ndarray)
    assert isinstance(found["a"][1][0], jax.Array)
    assert type(found["ints"][5]) is np.float32
    with treering.open(tmp_path / "a.safetensors") as opened:
        assert opened.metadata == {"note": [1, 2.5, None]}


# -------------------------------------------------------------------------------------------------------------- theirs


@pytest.mark.sampled(7)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)], ids=str)
@pytest.mark.parametrize("dtype", KNOWN)
def test_we_read_theirs(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    array = of_dtype(dtype, shape)
    safetensors.numpy.save_file({"w": array, "b": np.arange(3.0)}, tmp_path / "a.safetensors", {"who": "them"})
    found = treering.load(tmp_path / "a.safetensors", like={"w": array, "b": np.zeros(3)})
    assert found["w"].dtype == array.dtype
    assert found["w"].shape == array.shape
    assert found["w"].tobytes() == array.tobytes()
    with treering.open(tmp_path / "a.safetensors") as opened:
        assert opened.metadata == {"who": "them"}
        assert set(opened) == {"w", "b"}


def test_we_read_what_its_flax_door_wrote(tmp_path: Path) -> None:
    arrays = {"a/b": jnp.ones((2, 3), jnp.bfloat16), "a.c": jnp.arange(5)}
    safetensors.flax.save_file(arrays, tmp_path / "a.safetensors")
    found = treering.load(tmp_path / "a.safetensors")
    assert set(found) == {"a/b", "a.c"}
    assert all(np.array_equal(np.asarray(found[name]), np.asarray(arrays[name])) for name in arrays)


def keys(path: Path, header: Any) -> list[str]:
    path.write_bytes(file_of(header))
    with treering.open(path) as opened:
        return list(opened)


def test_names_are_keys_as_they_are_where_they_can_be(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    assert keys(path, {"a/b": entry, "model.w": entry, "~0": entry}) == ["a/b", "model.w", "~0"]
    assert keys(path, {"a/b": entry, "~x": entry, "~0": entry}) == ["a/b", "~0x", "~00"]
    assert keys(path, {"": entry, "~": entry}) == ["~", "~0"]


def test_files_without_arrays(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    headers: list[Any] = [b"{}", b"{}   ", {"__metadata__": {}}, {"__metadata__": None}]
    for header in headers:
        assert keys(path, header) == []
        assert not treering.inspect(path).verified


ENTRY: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE: dict[str, tuple[bytes, bytes]] = {
    name: (header if isinstance(header, bytes) else json.dumps(header).encode(), bytes(size))
    for name, header, size in [
        ("not JSON", b"nonsense", 8),
        ("not an object", b"[]", 0),
        ("white space first", b"  {}", 0),
        ("not UTF-8", b'{"\xff": 1}', 0),
        ("half a surrogate", b'{"\\ud800": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
        ("a name twice", b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8"}}', 0),
        ("an entry that is a list", {"a": [1]}, 0),
        ("no dtype", {"a": {"shape": [2], "data_offsets": [0, 8]}}, 8),
        ("no shape", {"a": {"dtype": "F32", "data_offsets": [0, 8]}}, 8),
        ("no offsets", {"a": {"dtype": "F32", "shape": [2]}}, 8),
        ("an unknown dtype", {"a": ENTRY | {"dtype": "F128"}}, 8),
        ("our own name of a dtype", {"a": ENTRY | {"dtype": "float32"}}, 8),
        ("packed items", {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, 1),
        ("packed items of six bits", {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, 3),
        ("a negative length", {"a": ENTRY | {"shape": [-2]}}, 8),
        ("two negative lengths", {"a": ENTRY | {"shape": [-1, -2]}}, 8),
        ("a float length", {"a": ENTRY | {"shape": [2.0]}}, 8),
        ("a true length", {"a": ENTRY | {"shape": [2, True]}}, 8),
        ("a shape of text", {"a": ENTRY | {"shape": "2"}}, 8),
        ("a huge shape", {"a": ENTRY | {"shape": [2**62, 2**62]}}, 8),
        ("a shape that wraps around", {"a": ENTRY | {"shape": [2**32, 2**32, 2]}}, 8),
        ("a huge shape of nothing", {"a": {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]}}, 0),
        ("a shape of 65 axes", {"a": ENTRY | {"shape": [2] + [1] * 64}}, 8),
        ("another size", {"a": ENTRY | {"shape": [3]}}, 8),
        ("offsets backwards", {"a": ENTRY | {"data_offsets": [8, 0]}}, 8),
        ("three offsets", {"a": ENTRY | {"data_offsets": [0, 8, 8]}}, 8),
        ("float offsets", {"a": ENTRY | {"data_offsets": [0.0, 8.0]}}, 8),
        ("a true offset", {"a": {"dtype": "U8", "shape": [1], "data_offsets": [False, True]}}, 1),
        ("negative offsets", {"a": ENTRY | {"data_offsets": [-8, 0]}}, 8),
        ("huge offsets", {"a": ENTRY | {"data_offsets": [2**64, 2**64 + 8]}}, 8),
        ("an overlap", {"a": ENTRY, "b": ENTRY}, 8),
        ("half an overlap", {"a": ENTRY, "b": ENTRY | {"data_offsets": [4, 12]}}, 12),
        ("a gap", {"a": ENTRY, "b": ENTRY | {"data_offsets": [12, 20]}}, 20),
        ("a gap at the start", {"a": ENTRY | {"data_offsets": [4, 12]}}, 12),
        ("bytes that nobody owns", {"a": ENTRY}, 12),
        ("bytes that are not there", {"a": ENTRY}, 7),
        ("nothing inside something", {"a": ENTRY, "b": {"dtype": "U8", "shape": [0], "data_offsets": [4, 4]}}, 8),
        ("metadata that is a list", {"__metadata__": [], "a": ENTRY}, 8),
        ("metadata of numbers", {"__metadata__": {"n": 1}, "a": ENTRY}, 8),
        ("lists without end", b'{"a":' + b"[" * 100_000, 0),
        ("a number without end", b'{"a":' + b"9" * 100_000 + b"}", 0),
        ("NaN", b'{"a":NaN}', 0),
    ]
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers(tmp_path: Path, name: str) -> None:
    header, data = HOSTILE[name]
    path = tmp_path / "a.safetensors"
    path.write_bytes(file_of(header, data))
    with pytest.raises((CorruptError, UnsupportedError)) as error:
        treering.open(path)
    assert len(str(error.value)) < 1000
    for read in (treering.load, treering.inspect):
        with pytest.raises(type(error.value)):
            read(path)
    if isinstance(error.value, CorruptError):
        assert not treering.verify(path).ok
    else:
        with pytest.raises(UnsupportedError):
            treering.verify(path)


@pytest.mark.parametrize(
    "content", [b"", b"\x02", b"\x02\0\0\0\0\0\0\0", b"\x02\0\0\0\0\0\0\0{", struct.pack("<Q", 2**64 - 1)]
)
def test_files_that_end_too_early(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    for read in (treering.open, treering.load):
        with pytest.raises(CorruptError):
            read(path)
    assert not treering.verify(path).ok


def test_a_header_is_as_large_as_readers_take_at_most(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 100_000_001))
    os.truncate(path, 200_000_000)  # without a byte on the disk
    with pytest.raises(CorruptError, match="100000001"):
        treering.open(path)


NUMBERS = st.one_of(st.integers(-1, 20), st.sampled_from([2**31, 2**32, 2**61, 2**62, 2**63, 2**64]))
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F8_E4M3", "F4", "I64", "X"]),
        "shape": st.lists(NUMBERS, max_size=3),
        "data_offsets": st.lists(NUMBERS, min_size=1, max_size=3),
    }
)


@quick(300)
@given(
    entries=st.dictionaries(st.sampled_from(["a", "b", "c", "~", "__metadata__"]), ENTRIES, max_size=3),
    size=st.integers(0, 40),
)
def test_what_we_take_the_library_takes_alike(entries: dict[str, Any], size: int) -> None:
    content = file_of(entries, bytes(range(size)))
    with contextlib.suppress(TreeringError):
        ours = loaded(content)
        found = raw(content)
        assert set(found) == set(ours) == set(entries)
        for name, array in ours.items():
            assert found[name] == (DTYPES[array.dtype.name], list(array.shape), array.tobytes())


@st.composite
def sound_files(draw: st.DrawFn) -> bytes:
    """Files as the library would write them, with a byte changed now and then."""
    names = draw(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), unique=True, max_size=4))
    header: dict[str, Any] = {}
    at = 0
    for name in names:
        dtype, size = draw(st.sampled_from([("U8", 1), ("F32", 4), ("BF16", 2), ("C64", 8)]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        nbytes = size * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    return file_of(header, bytes(at))


@quick(200)
@given(content=sound_files())
def test_we_take_what_the_library_takes(content: bytes) -> None:
    found = raw(content)
    ours = loaded(content)
    assert {
        name: (DTYPES[array.dtype.name], list(array.shape), array.tobytes()) for name, array in ours.items()
    } == found


@quick(200)
@given(content=sound_files(), data=st.data())
def test_a_changed_byte_of_a_header_is_refused_or_meant(content: bytes, data: st.DataObject) -> None:
    size = 8 + struct.unpack("<Q", content[:8])[0]
    place = data.draw(st.integers(0, size - 1))
    bad = content[:place] + bytes([data.draw(st.integers(0, 255))]) + content[place + 1 :]
    with contextlib.suppress(TreeringError):
        loaded(bad)
        raw(bad)


def test_a_part_of_a_checkpoint_is_no_file_of_its_own(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"w": np.ones(3)})
    (path,) = (tmp_path / "ckpt").glob("data-*")
    with pytest.raises(FormatError, match="part of a checkpoint"):
        treering.load(path)


def test_a_long_name_takes_no_more_memory_than_its_header(tmp_path: Path) -> None:
    name = "~0" * 2_500_000
    header = json.dumps({name: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    tracemalloc.start()
    try:
        with treering.open(tmp_path / "x.safetensors") as opened:
            assert list(opened) == [name]
        assert tracemalloc.get_traced_memory()[1] < 20 * len(header)
    finally:
        tracemalloc.stop()
