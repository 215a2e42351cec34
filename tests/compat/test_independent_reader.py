"""A reader written from the specification alone reads every kind of leaf and container bit for bit."""

from __future__ import annotations

import collections
import math
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering
from tests.compat import independent_reader
from tests.limits import lower
from tests.properties.strategies import EXTENDED_DTYPES, NUMPY_DTYPES
from tests.trees import Point


def saved(tree: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Save a tree and read it as a stranger would."""
    treering.save(folder, tree)
    return independent_reader.read(folder)


@pytest.fixture(autouse=True, params=["lists", "packed"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes of both forms: lists in columns, and packed ones, which else only large trees have."""
    if request.param == "packed":
        lower(monkeypatch, packed_index_from=0)


def bits(array: Any) -> tuple[tuple[int, ...], bytes]:
    host = np.asarray(array)
    return host.shape, host.tobytes()


def test_the_reader_is_small_and_uses_nothing_of_treering() -> None:
    text = Path(independent_reader.__file__).read_text(encoding="utf-8")
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 150
    imported = [line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert set(imported) == {"base64", "json", "re", "struct", "pathlib", "typing", "numpy", "xxhash"}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [*NUMPY_DTYPES, *EXTENDED_DTYPES])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4)])
def test_arrays_of_every_dtype(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    array = np.arange(math.prod(shape)).astype(np.uint8).astype(kind).reshape(shape)
    tree, by_key = saved({"a": array}, tmp_path / "ckpt")
    assert bits(by_key["a"]) == bits(array)
    assert bits(tree["a"]) == bits(array)
    # The dtype itself where numpy has it, else the same bits as unsigned ints.
    assert by_key["a"].dtype == (kind if dtype in NUMPY_DTYPES else np.dtype(f"u{kind.itemsize}"))


def test_arrays_of_many_blocks_and_several_kinds(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((70_001,))
    tree: dict[str, Any] = {
        "numpy": values,
        "jax": jnp.asarray(values, jnp.bfloat16),
        "scalar": np.float32(1.5),
        "key": jax.random.key(7),
    }
    _, found = saved(tree, tmp_path / "ckpt")
    assert bits(found["numpy"]) == bits(values)
    assert bits(found["jax"]) == bits(tree["jax"])
    assert bits(found["scalar"]) == bits(np.float32(1.5))
    assert bits(found["key"]) == bits(jax.random.key_data(tree["key"]))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("spec", [P("x"), P("x", "y"), P(None, "y"), P(("x", "y")), P()], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4"])
def test_sharded_arrays_lie_there_in_parts(tmp_path: Path, spec: P, dtype: str) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    array = jnp.arange(24 * 6).reshape(24, 6).astype(dtype)
    placed = jax.device_put(array, NamedSharding(mesh, spec))
    _, found = saved({"w": placed, "b": jnp.ones(3)}, tmp_path / "ckpt")
    assert bits(found["w"]) == bits(array)
    assert bits(found["b"]) == bits(np.ones(3, np.float32))


def float_bits(number: float) -> bytes:
    return struct.pack("<d", number)


ODD_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_1234))[0]


def test_python_leaves(tmp_path: Path) -> None:
    floats = [0.0, -0.0, 1.5, 1e308, 5e-324, math.inf, -math.inf, math.nan, ODD_NAN, 0.1]
    others = {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**53, 2**53 + 1, -(2**53) - 1, 10**40, -(10**40)],
        "complex": [1 + 2j, complex(math.inf, -0.0)],
        "text": ["", "tree", "ring é", "\ud800", "\U0001f332", "x" * 5000, "\ud800" * 5000],
        "bytes": [b"", b"\0\xff", b"y" * 5000, bytearray(b"z"), bytearray(b"z" * 5000)],
    }
    tree, by_key = saved({"floats": floats, **others}, tmp_path / "ckpt")
    assert list(map(float_bits, tree["floats"])) == list(map(float_bits, floats))
    found = {name: tree[name] for name in others}
    assert found == others
    assert [type(each) for each in found["bytes"]] == [bytes, bytes, bytes, bytearray, bytearray]
    assert by_key["ints/5"] == 10**40
    assert type(tree["bools"][0]) is bool


def test_containers_and_keys(tmp_path: Path) -> None:
    tree = {
        "dict": {"a/b": 1, "~": 2, "": 3, "a": {"b": 4}},
        "ints": {3: 1, -(2**70): 2},
        "tuples": {(1, "b", (None, 2.5)): 1},
        "bools": {True: 1, False: 2},
        "floats": {0.5: 1, math.inf: 2},
        "none": {None: 1},
        "bytes": {b"k": 1},
        "odd": {"\ud800": 1, "é": 2},
        "list": [1, [], (), {}, (2, [3])],
        "empty": {},
        "point": Point(1, [2]),
        "ordered": collections.OrderedDict(z=1, y=2),
    }
    found, by_key = saved(tree, tmp_path / "ckpt")
    assert found == tree | {"point": {"x": 1, "y": [2]}, "ordered": {"z": 1, "y": 2}}
    assert [type(each) for each in found["list"]] == [int, list, tuple, dict, tuple]
    assert by_key["dict/a~1b"] == 1
    assert by_key["odd/~ud800"] == 1
    assert list(found) == list(tree)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "tree", [{}, [], (), None, 7, np.arange(3)], ids=["dict", "list", "tuple", "none", "int", "array"]
)
def test_trees_of_one_thing(tmp_path: Path, tree: Any) -> None:
    found, _ = saved(tree, tmp_path / "ckpt")
    assert type(found) is type(tree)
    assert np.array_equal(found, tree) if isinstance(tree, np.ndarray) else found == tree


def test_functions_are_named(tmp_path: Path) -> None:
    _, found = saved({"f": jax.nn.relu, "a": 1}, tmp_path / "ckpt")
    assert isinstance(found["f"], tuple)
    assert "relu" in found["f"][1]


def test_a_flipped_bit_is_seen(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"a": np.arange(1000)})
    for file in (tmp_path / "ckpt").iterdir():
        good = file.read_bytes()
        for place in range(0, len(good), max(1, len(good) // 40)):
            file.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
            with pytest.raises((AssertionError, ValueError)):
                independent_reader.read(tmp_path / "ckpt")
        file.write_bytes(good)
    independent_reader.read(tmp_path / "ckpt")
