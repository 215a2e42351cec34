"""Leaves on their way out: types once each, boxes once each, bytes in C order with the checksum of every block."""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import xxhash
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests import limits, meshes
from tests.checkpoint.test_aliased import KINDS, count_up, numbers, trees
from tests.compilations import compiled
from treering._arrays.host import OTHER_WRITERS, cut_box, only_jax_writes, read_checked, to_host
from treering._arrays.outgoing import describe_leaves
from treering._codec.array_bytes import wire_blocks
from treering._store.memory_pool import PIECE_BYTES, MemoryPool, lasting_pieces
from treering._tree.flatten import flatten
from treering._values.boxes import find_cover_error
from treering._values.checksums import block_bytes, block_checksums, block_count
from treering._values.processes import Processes
from treering.errors import UnsupportedError

__all__ = ["compiled"]

CUBE = np.arange(60 * 70 * 50, dtype="i4").reshape(60, 70, 50)


def little(given: Any) -> bytes:
    host = np.asarray(given)
    return host.astype(host.dtype.newbyteorder("<")).tobytes("C")


@pytest.mark.parametrize(
    "given",
    [
        np.zeros(0),
        np.zeros((3, 0, 2)),
        np.array(7),
        np.arange(10),
        np.arange(100_000),
        CUBE,
        CUBE.T,
        np.asfortranarray(CUBE),
        CUBE[::-2, 1:, ::3],
        CUBE.astype(">i4"),
        CUBE.astype(">i4").T[:10],
        np.broadcast_to(np.arange(50), (3000, 50)),
        np.arange(90_000).astype(ml_dtypes.bfloat16),
        jnp.arange(200_000),
    ],
    ids=lambda x: f"{x.dtype.str}{x.shape}{getattr(x, 'strides', '')}",
)
@pytest.mark.parametrize("block", [None, 4096, 100_000])
def test_bytes_and_checksums(given: Any, block: int | None) -> None:
    block = block or block_bytes(given.nbytes)
    if block < given.nbytes <= 64 << 10:
        block = 64 << 10  # a block is never smaller
    count = block_count(given.nbytes, block)
    checksums = array("Q", [1] * (count + 2))
    found = b"".join(map(bytes, read_checked(given, block, checksums, 1, MemoryPool())))
    want = little(given)
    assert found == want
    sums = [xxhash.xxh3_64_intdigest(want[at : at + block]) for at in range(0, len(want), block)]
    assert list(checksums) == [1, *sums, 1]


def test_types_are_told_once() -> None:
    tree = {f"a{n}": np.zeros((2, 3)) for n in range(50)} | {
        "b": jnp.zeros((2, 3)),
        "c": 1,
        "d": 2,
        "e": jax.random.key(0),
    }
    leaves = describe_leaves(flatten(tree))
    assert len(leaves.types) == 4
    assert leaves.leaf_types[:50] == [0] * 50
    assert leaves.types[leaves.leaf_types[-1]].impl == "threefry2x32"
    assert leaves.types[leaves.leaf_types[-1]].dtype == "uint32"
    assert leaves.values == {51: 1, 52: 2}


@pytest.mark.parametrize("spec", [(), ("x",), ("y",), ("x", "y"), (None, ("y", "x")), (("x", "y"),)], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (16, 24), (0, 8)], ids=str)
def test_boxes_cover_a_leaf_once_and_hold_it(spec: Any, shape: tuple[int, int]) -> None:
    mesh = meshes.grid(4, 2)
    whole = np.arange(shape[0] * shape[1], dtype="f4").reshape(shape)
    leaf = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))
    leaves = describe_leaves(flatten({"w": leaf}))
    boxes = [source.box for source in leaves.sources[0]]
    assert find_cover_error(shape, boxes) is None
    for source in leaves.sources[0]:
        part = whole[tuple(slice(*side) for side in source.box)]
        assert part.size == 0 or np.array_equal(np.asarray(source.data), part)
    assert "x=4, y=2" in str(leaves.types[0].sharding)
    assert leaves.meshes == ("x=4, y=2 on 8 cpu devices",)


@pytest.mark.parametrize(
    ("leaf", "stored"),
    [
        ("x" * 1024, False),
        ("x" * 4096, False),
        ("x" * 4097, True),
        ("ü" * 2049, True),
        (b"x" * 4097, True),
        (b"x", False),
    ],
)
def test_long_texts_lie_in_files(leaf: Any, stored: bool) -> None:
    leaves = describe_leaves(flatten([leaf]))
    assert bool(leaves.sources) == stored
    if stored:
        raw = leaf.encode() if isinstance(leaf, str) else leaf
        assert leaves.types[0].shape == (len(raw),)
        assert bytes(np.asarray(leaves.sources[0][0].data)) == raw


def test_a_deleted_array_is_named() -> None:
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(UnsupportedError, match="deleted") as caught:
        describe_leaves(flatten({"a": {"b": gone}}))
    assert caught.value.path == ("a", "b")


def test_a_traced_array_is_refused_inside_jit() -> None:
    with pytest.raises(UnsupportedError, match="traced"):
        jax.jit(lambda x: describe_leaves(flatten({"a": x})) and x)(jnp.ones(2))


def on(platform: str, memory: str | None = "device") -> Any:
    """Stand for an array on a device that is not here."""
    sharding = SimpleNamespace(device_set=[SimpleNamespace(platform=platform)], memory_kind=memory)
    return SimpleNamespace(sharding=sharding)


def test_where_it_is_certain_that_only_jax_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, other_writers=OTHER_WRITERS)
    for name in OTHER_WRITERS["gpu"]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not only_jax_writes(jnp.zeros(3))
    assert only_jax_writes(on("tpu"))
    assert only_jax_writes(on("gpu"))
    assert not only_jax_writes(on("gpu", "pinned_host"))
    assert not only_jax_writes(on("tpu", "unpinned_host"))
    assert not only_jax_writes(on("another"))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace())
    assert not only_jax_writes(on("gpu"))
    assert only_jax_writes(on("tpu"))


# ---------------------------------------------------------------------------------------------------- several processes


@pytest.fixture
def of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the eight devices be those of four processes."""
    monkeypatch.setattr("treering._arrays.outgoing.process_of", lambda device: device.id // 2)


@pytest.mark.usefixtures("of_four")
@pytest.mark.parametrize("spec", [(), ("x",), ("y",), ("x", "y"), (None, ("y", "x")), (("x", "y"),)], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (16, 24), (0, 8)], ids=str)
@pytest.mark.parametrize("order", [1, -1])
def test_all_see_the_same_boxes_and_each_has_its_own(spec: Any, shape: tuple[int, int], order: int) -> None:
    mesh = Mesh(np.array(jax.devices()[::order]).reshape(4, 2), ("x", "y"))
    whole = np.arange(shape[0] * shape[1], dtype="f4").reshape(shape)
    flat = flatten({"w": jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))})
    seen = [describe_leaves(flat, Processes(this=this, count=4)) for this in range(4)]
    held = seen[0].layout_of(0).boxes
    assert find_cover_error(shape, [box for box, _ in held]) is None
    for this, leaves in enumerate(seen):
        assert leaves.layout_of(0).boxes == held
        assert [source.box for source in leaves.sources[0]] == [box for box, owners in held if this in owners]
        for source in leaves.sources[0]:
            part = whole[tuple(slice(*side) for side in source.box)]
            assert part.size == 0 or np.array_equal(np.asarray(source.data), part)


@pytest.mark.usefixtures("of_four")
def test_threads_that_describe_an_array_at_once_see_all_of_it() -> None:
    """jax before 0.12 lists shards twice, or too few, if several threads ask for them first."""
    before = sys.getswitchinterval()
    mesh = meshes.grid(8)
    threads = 3
    try:
        sys.setswitchinterval(1e-6)
        for number in range(40):
            flat = flatten({"w": jax.device_put(np.arange(8) + number, NamedSharding(mesh, PartitionSpec("x")))})
            together = threading.Barrier(threads)
            with ThreadPoolExecutor(threads) as pool:

                def describe(count: int, flat: Any = flat, together: Any = together) -> Any:
                    together.wait()
                    return describe_leaves(flat, Processes(this=0, count=count))

                for count, leaves in zip([1, 4, 1], pool.map(describe, [1, 4, 1]), strict=True):
                    boxes = [source.box for source in leaves.sources[0]]
                    assert boxes == [((at, at + 1),) for at in range(8 // count)]
    finally:
        sys.setswitchinterval(before)


@pytest.mark.usefixtures("of_four")
def test_a_process_may_hold_nothing_of_an_array() -> None:
    few = Mesh(np.array(jax.devices()[2:5]), ("x",))
    flat = flatten({"w": jax.device_put(np.arange(9), NamedSharding(few, PartitionSpec("x")))})
    leaves = describe_leaves(flat, Processes(this=0, count=4))
    assert leaves.sources == {0: ()}
    assert leaves.layout_of(0).boxes == ((((0, 3),), (1,)), (((3, 6),), (1,)), (((6, 9),), (2,)))


@pytest.mark.usefixtures("of_four")
def test_leaves_that_lie_alike_share_one_object() -> None:
    mesh = meshes.line()
    specs = [PartitionSpec("x"), PartitionSpec("x", None), PartitionSpec(("x",))]
    tree = [jax.device_put(np.zeros((16, 2)), NamedSharding(mesh, spec)) for spec in specs]
    leaves = describe_leaves(flatten(tree), Processes(this=1, count=4))
    assert len({id(leaves.layout_of(number).boxes) for number in range(3)}) == 1


@pytest.mark.usefixtures("of_four")
def test_what_a_process_has_alone_is_of_process_0() -> None:
    tree = {"numpy": np.zeros((2, 3)), "jax": jax.device_put(np.arange(4), jax.devices()[5])}
    leaves = describe_leaves(flatten(tree), Processes(this=2, count=4))
    assert leaves.spread == {}
    assert leaves.layout_of(0).boxes == ((((0, 2), (0, 3)), (0,)),)
    assert leaves.layout_of(1).boxes == ((((0, 4),), (0,)),)


@pytest.mark.parametrize("dtype", ["f4", "bfloat16", "int4"])
def test_a_piece_of_a_shard_is_cut_out_of_it(dtype: str) -> None:
    mesh = meshes.line(2)
    whole = np.arange(32).reshape(8, 4) % 7
    leaf = jax.device_put(jnp.asarray(whole, dtype), NamedSharding(mesh, PartitionSpec("x")))
    leaves = describe_leaves(flatten([leaf]))
    piece = leaves.data_of(0, ((5, 7), (1, 3)))
    assert np.array_equal(np.asarray(piece).astype(int), whole[5:7, 1:3])
    if dtype == "f4":
        assert np.shares_memory(piece, np.asarray(leaves.sources[0][1].data))
    assert leaves.data_of(0, ((4, 8), (0, 4))) is leaves.sources[0][1].data


# ------------------------------------------------------------------------- memory that others write while it is read


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("count", [16 << 10, (1 << 20) + 1024])
def test_what_is_handed_out_is_what_was_checked(name: str, count: int) -> None:
    owned, tree = trees(count)
    given = tree[name]
    block = block_bytes(given.nbytes)
    checksums = array("Q", bytes(8 * -(-given.nbytes // block)))
    content = b""
    for piece in read_checked(given, block, checksums, 0, MemoryPool()):
        count_up(owned)
        content += piece
    assert block_checksums(memoryview(content), block) == checksums


@pytest.mark.parametrize("length", [1 << 10, 900 << 10, 1100 << 10])
def test_slabs_are_copies(length: int) -> None:
    memory = numbers(6 * length).reshape(6, length)
    for piece in wire_blocks(memory[::2], 0, 3 * length):
        before = bytes(piece)
        memory += 1
        assert piece == before


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


@pytest.mark.parametrize("held_back", [0, 1, 3, 100])
def test_memory_of_a_piece_is_used_again_only_once_it_is_let_go(held_back: int) -> None:
    whole = np.random.default_rng(0).bytes(5 * PIECE_BYTES + 1000)
    given = (bytearray(whole[start : start + 3_000_000]) for start in range(0, len(whole), 3_000_000))
    held: list[memoryview] = []
    sent, places = b"", set()
    for view in lasting_pieces(given, len(whole)):
        places.add(address(view))
        held.append(view[:])  # as obstore does: the view itself need not be kept
        del view
        while len(held) > held_back:
            sent += held.pop(0)
    sent += b"".join(held)
    assert sent == whole
    assert len(places) <= held_back + 2
    assert held_back < 100 or len(places) == 7


def test_a_leaf_is_copied_once() -> None:
    leaf = np.random.default_rng(0).integers(0, 256, 3 * PIECE_BYTES + 5, np.uint8)
    block = block_bytes(leaf.nbytes)
    checksums = array("Q", bytes(8 * block_count(leaf.nbytes, block)))
    made: list[int] = []

    def read() -> Iterator[bytes | memoryview]:
        for piece in read_checked(leaf, block, checksums, 0, MemoryPool()):
            made.append(address(memoryview(piece)))
            yield piece

    pieces = list(lasting_pieces(read(), leaf.nbytes))
    assert [address(piece) for piece in pieces][:3] == made[:3]
    given = leaf.tobytes()
    leaf[:] = 0
    assert b"".join(pieces) == given


def test_shares_of_one_size_are_cut_by_one_program(compiled: list[str]) -> None:
    rows, share = 4096, 512
    array = jax.device_put(np.arange(rows * 7).reshape(rows, 7).astype("int4"), jax.devices()[0])
    compiled.clear()
    with jax.transfer_guard("disallow"):
        cuts = [cut_box(array, ((0, rows), (0, 7)), ((n, n + share), (0, 7))) for n in range(0, rows, share)]
    assert len(compiled) <= 1
    assert (np.concatenate(list(map(to_host, cuts))) == np.asarray(array)).all()
