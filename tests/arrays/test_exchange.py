"""Devices exchange what processes read: every bit arrives, no device ever has a whole leaf that it does not want."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests import limits, meshes
from treering._arrays import delivered
from treering._arrays import exchange as room
from treering._arrays.exchange import LeafForm, PartedLeaf, can_exchange, exchange_parts, grid_of, part_boxes
from treering._arrays.host import jax_holds
from treering._plan.load import Parts, StoredChunk, plan_parts
from treering._values.boxes import slices, whole

T = TypeVar("T")
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _as_many_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each two of the eight devices belong to a process of their own, as far as plans know."""
    monkeypatch.setattr(delivered, "process_of", lambda device: device.id // 2)
    yield
    room._reading_mesh.cache_clear()
    room._own_places.cache_clear()


def mesh_of(*shape: int, order: Callable[[Any], Any] = lambda devices: devices, **kwargs: Any) -> Mesh:
    count = math.prod(shape)
    return Mesh(np.array(order(jax.devices()[:count])).reshape(shape), ("x", "y", "z")[: len(shape)], **kwargs)


def shuffled(devices: list[Any]) -> list[Any]:
    return [devices[n] for n in (5, 2, 7, 0, 1, 6, 3, 4)]


def run(work: Callable[[], T], /) -> T:
    return work()


def parts_for(array: np.ndarray, sharding: NamedSharding, **kwargs: Any) -> Parts:
    grid = grid_of(sharding, array.ndim)
    assert grid is not None
    if not kwargs:
        chunk = StoredChunk(box=whole(array.shape), block=64)
        return plan_parts(array.shape, array.itemsize, [chunk], grid)
    axis = kwargs.pop("axis", 0)
    return Parts(axis=axis, length=array.shape[axis], owners=grid.owners_along(axis), **kwargs)


def read(array: np.ndarray, sharding: NamedSharding, parts: Parts) -> PartedLeaf:
    boxes = part_boxes(array.shape, sharding, parts)
    arrays = [np.ascontiguousarray(array[slices(box)]) for box in boxes]
    return PartedLeaf(LeafForm(array.shape, array.dtype, sharding, parts), arrays)


def assert_bits(found: jax.Array, array: np.ndarray, sharding: Any) -> None:
    assert found.sharding == sharding
    assert found.dtype == array.dtype
    for shard in found.addressable_shards:
        assert np.asarray(shard.data).tobytes() == array[shard.index].tobytes()


def random_bits(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return RNG.integers(0, 2, shape).astype(bool)
    if dtype.name in ("int4", "uint4"):
        return RNG.integers(-8 if dtype.name == "int4" else 0, 8, shape).astype(dtype)
    return RNG.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


WANTED = {
    "columns": NamedSharding(mesh_of(8), P(None, "x")),
    "columns, backwards": NamedSharding(mesh_of(8, order=lambda devices: devices[::-1]), P(None, "x")),
    "columns, shuffled": NamedSharding(mesh_of(8, order=shuffled), P(None, "x")),
    "rows": NamedSharding(mesh_of(8), P("x")),
    "both": NamedSharding(mesh_of(4, 2), P("x", "y")),
    "both, turned": NamedSharding(mesh_of(4, 2), P("y", "x")),
    "columns over two axes": NamedSharding(mesh_of(2, 4), P(None, ("y", "x"))),
    "partly replicated columns": NamedSharding(mesh_of(4, 2), P(None, "y")),
    "partly replicated, the other axis": NamedSharding(mesh_of(2, 4), P(None, "x")),
    "partly replicated rows": NamedSharding(mesh_of(2, 4, order=shuffled), P("y")),
    "three axes": NamedSharding(mesh_of(2, 2, 2), P("z", ("x", "y"))),
    "replicated": NamedSharding(mesh_of(8), P()),
    "four devices of eight": NamedSharding(mesh_of(4), P(None, "x")),
    "axes of a mesh that XLA leaves alone": NamedSharding(
        mesh_of(8, axis_types=(jax.sharding.AxisType.Explicit,)), P(None, "x")
    ),
}
CUTS: dict[str, dict[str, Any]] = {
    "along the columns": {"axis": 1, "rows": 2},
    "one reader": {"rows": 24, "first": 3},
    "two readers": {"rows": 13, "first": 1},
    "longer than need be": {"rows": 5, "first": 0},
}


EVERY_WAY = [(name, "planned") for name in WANTED] + [
    (name, cut) for name in ("rows", "both, turned", "partly replicated columns") for cut in CUTS
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "cut"), EVERY_WAY)
def test_every_way_arrives_bit_for_bit(name: str, cut: str) -> None:
    sharding = WANTED[name]
    array = random_bits((24, 16), np.float32)
    parts = parts_for(array, sharding, **CUTS.get(cut, {}))
    leaf = read(array, sharding, parts)
    (found,) = exchange_parts([leaf], run)
    assert_bits(found, array, sharding)
    assert leaf.arrays == []


@pytest.mark.parametrize("length", [9, 15, 1000])
def test_rows_that_no_number_of_devices_divides(length: int) -> None:
    sharding = NamedSharding(mesh_of(8), P(None, "x"))
    array = random_bits((length, 8, 3), np.uint16)
    (found,) = exchange_parts([read(array, sharding, parts_for(array, sharding))], run)
    assert_bits(found, array, sharding)


DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64",
    "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3b11fnuz", "int4", "uint4",
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_keeps_its_bits(name: str) -> None:
    """NaNs of any payload, denormals and negative zeros are among random bits."""
    dtype = jnp.dtype(name)
    assert can_exchange(dtype)
    array = random_bits((16, 512), dtype)
    if dtype.itemsize <= 2 and name not in ("bool", "int4", "uint4"):
        array.reshape(-1).view(f"u{dtype.itemsize}")[:] = np.arange(array.size)  # each pattern of a byte at least
    (found,) = exchange_parts([read(array, WANTED["columns"], parts_for(array, WANTED["columns"]))], run)
    assert_bits(found, array, WANTED["columns"])


@pytest.mark.parametrize("name", ["int64", "uint64", "float64", "complex128"])
def test_wide_dtypes_where_jax_holds_them(name: str) -> None:
    with jax.enable_x64(True):
        array = random_bits((16, 16), name)
        (found,) = exchange_parts([read(array, WANTED["both"], parts_for(array, WANTED["both"]))], run)
        assert_bits(found, array, WANTED["both"])


def test_floats_of_less_than_a_byte_are_not_carried() -> None:
    assert not can_exchange(np.dtype(ml_dtypes.float4_e2m1fn))
    assert not can_exchange(np.dtype(ml_dtypes.float6_e2m3fn))
    assert all(
        can_exchange(np.dtype(name)) for name in ("int64", "float64", "complex128") if not jax_holds(np.dtype(name))
    )


def test_many_leaves_are_awaited_once_for_each_set_of_devices() -> None:
    ran = 0

    def counting(work: Callable[[], T], /) -> T:
        nonlocal ran
        ran += 1
        return work()

    arrays = [random_bits((16, 8 * n), dtype) for n, dtype in enumerate(("uint8", "float32", "bfloat16"), 1)]
    places = [WANTED["columns"], WANTED["columns, shuffled"], WANTED["columns"]]
    leaves = [read(array, place, parts_for(array, place)) for array, place in zip(arrays, places, strict=True)]
    for found, array, place in zip(exchange_parts(leaves, counting), arrays, places, strict=True):
        assert_bits(found, array, place)
    assert ran == 2


def test_what_is_alike_is_compiled_once_and_runs_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever leaves come together, in whichever order: else each run of leaves would be compiled anew."""
    limits.lower(monkeypatch, exchanged_together=4)
    room._program.cache_clear()
    place = WANTED["columns"]
    for count in (11, 10, 5):
        arrays = [random_bits((16, 8 * (1 + n % 2)), np.uint8) for n in range(count)]
        leaves = [read(array, place, parts_for(array, place)) for array in arrays]
        for found, array in zip(exchange_parts(leaves, run), arrays, strict=True):
            assert_bits(found, array, place)
    info = room._program.cache_info()
    # Two forms, each four together and alone; 6 and 5, 5 and 5, 3 and 2 leaves of them in 14 calls.
    assert (info.misses, info.hits + info.misses) == (4, 3 + 2 + 2 + 2 + 3 + 2)


def shapes_in(text: str) -> dict[str, list[int]]:
    """Return the bytes of each result of each collective in a compiled program."""
    found: dict[str, list[int]] = {}
    for line in text.splitlines():
        match = re.search(r"= (.*?) (all-to-all|all-gather|all-reduce|collective-permute)\(", line)
        if match:
            for shape in re.findall(r"u32\[([\d,]*)\]", match[1]):
                found.setdefault(match[2], []).append(4 * math.prod(map(int, shape.split(","))))
    return found


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("columns", {"all-to-all"}),
        ("columns, shuffled", {"all-to-all"}),
        ("both", {"all-to-all"}),
        ("both, turned", {"all-to-all"}),
        ("partly replicated columns", {"all-to-all", "all-gather"}),
        ("partly replicated, the other axis", {"all-to-all", "all-gather"}),
    ],
)
@pytest.mark.parametrize("length", [1024, 1000])
def test_no_device_has_more_than_its_part_or_what_it_wants(name: str, kinds: set[str], length: int) -> None:
    sharding = WANTED[name]
    array = np.zeros((length, 1024), np.uint32)
    parts = parts_for(array, sharding, rows=-(-length // 8))
    program: Any = room._program(LeafForm(array.shape, array.dtype, sharding, parts), 1)
    wanted = math.prod(sharding.shard_shape(array.shape)) * 4
    collectives = shapes_in(program.as_text())
    assert set(collectives) == kinds
    assert max(max(sizes) for sizes in collectives.values()) <= wanted
    assert program.memory_analysis().temp_size_in_bytes <= 2.2 * max(wanted, array.nbytes // 8)


@pytest.mark.parametrize("name", ["columns", "rows", "both", "partly replicated columns", "partly replicated rows"])
def test_one_reader_of_a_small_leaf_costs_each_device_a_few_times_the_leaf(name: str) -> None:
    """Not as many times as there are devices: the padding of all others is cut off first."""
    array = np.zeros((1024, 256), np.uint32)
    for first in (0, 5):
        parts = parts_for(array, WANTED[name], rows=1024, first=first)
        program: Any = room._program(LeafForm(array.shape, array.dtype, WANTED[name], parts), 1)
        assert program.memory_analysis().temp_size_in_bytes <= 2.2 * array.nbytes


def test_what_cannot_be_exchanged_has_no_grid() -> None:
    unconstrained = NamedSharding(mesh_of(8), P(P.UNCONSTRAINED))
    host = NamedSharding(mesh_of(8), P("x"), memory_kind="unpinned_host")
    for sharding in (SingleDeviceSharding(jax.devices()[0]), unconstrained, host, None):
        usual = sharding is host and host.memory_kind == jax.devices()[0].default_memory().kind
        assert (grid_of(sharding, 2) is None) is not usual


@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P("model", "data")])
def test_axes_with_names_of_several_letters(spec: P) -> None:
    mesh = meshes.grid(2, 4, axes=("data", "model"))
    sharding = NamedSharding(mesh, spec)
    array = random_bits((24, 16), np.int8)
    (found,) = exchange_parts([read(array, sharding, parts_for(array, sharding, rows=24, first=3))], run)
    assert_bits(found, array, sharding)
