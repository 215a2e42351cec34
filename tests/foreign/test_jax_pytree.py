"""Checkpoints of jax's own pytree_serialization, bit for bit, and ones that nobody should have written."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.experimental.array_serialization import tensorstore_impl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering
from tests.stores import copy_to_memory
from treering.errors import CorruptError, TreeringError, UnsupportedError

GOLDEN = Path(__file__).parent / "golden" / "jax"
LEAF, _NONE, _TUPLE, _LIST, DICT, _CUSTOM = range(6)


class Node(NamedTuple):
    """A node of a tree as jax's schema has it."""

    kind: int
    children: tuple[Any, ...] = ()
    names: tuple[bytes, ...] = ()
    name: bytes = b""
    aux: bytes = b""


def _flatbuffer(root: Node) -> bytearray:
    """Write a tree as a flatbuffer, front to back."""
    data = bytearray(4)

    def refer(at: int) -> None:
        struct.pack_into("<I", data, at, len(data) - at)

    waiting: list[tuple[int, Node | bytes]] = [(0, root)]
    while waiting:
        at, item = waiting.pop()
        if isinstance(item, bytes):
            refer(at)
            data += struct.pack("<I", len(item)) + item
            continue
        entries = len(data)
        there = (True, item.children, item.names, item.name, item.aux)
        data += struct.pack("<HH5H", 14, 24, *(4 * place + 4 if held else 0 for place, held in enumerate(there)))
        refer(at)
        table = len(data)
        data += struct.pack("<iI4I", table - entries, item.kind, 0, 0, 0, 0)
        for field, items in ((8, item.children), (12, item.names)):
            if items:
                refer(table + field)
                data += struct.pack("<I", len(items))
                waiting.extend((len(data) + 4 * number, below) for number, below in enumerate(items))
                data += bytes(4 * len(items))
        waiting.extend((table + field, text) for field, text in ((16, item.name), (20, item.aux)) if text)
    return data


def saved_as_jax(place: Path, tree: bytes | Node, arrays: list[Any]) -> Path:
    """Write a checkpoint as jax does."""
    data = bytes(_flatbuffer(tree)) if isinstance(tree, Node) else tree
    described: list[str | None] = []
    for number, array in enumerate(arrays):
        if array is None:
            described.append(None)
            continue
        described.append(f"Array({array.dtype.name}[{', '.join(map(str, array.shape))}])")
        grid = {"name": "regular", "configuration": {"chunk_shape": [max(1, length) for length in array.shape]}}
        base = {"driver": "file", "path": f"{place / 'array_store'}/"}
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "ocdbt", "base": base, "path": str(number)},
            "metadata": {"shape": array.shape, "data_type": array.dtype.name, "chunk_grid": grid, "codecs": []},
        }
        tensorstore.open(spec, create=True, open=True).result().write(array).result()
    place.mkdir(exist_ok=True)
    document = {"__jax_pytreedef_repr": base64.b64encode(data).decode(), "__jax_leaf_ids": described}
    (place / "pytreedef.json").write_text(json.dumps(document, indent=2))
    return place


def _replace_tree(place: Path, data: bytes) -> None:
    document = json.loads((place / "pytreedef.json").read_text())
    document["__jax_pytreedef_repr"] = base64.b64encode(data).decode()
    (place / "pytreedef.json").write_text(json.dumps(document))


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "0.12", tmp_path / "golden"))


def test_what_jax_wrote_bit_for_bit() -> None:
    tree = treering.load(GOLDEN / "0.12")
    with np.load(GOLDEN / "expected.npz") as expected:
        wanted = {name: expected[name] for name in expected if name != "__dtypes__"}
    found = {"b": tree["b"].view(np.uint16), "seq.0": tree["seq"][0], "seq.1.0": tree["seq"][1][0], "w": tree["w"]}
    assert tree == {**tree, "e": {}, "n": None}
    assert list(tree) == ["b", "e", "n", "seq", "w"]
    assert type(tree["seq"][1]) is tuple
    assert tree["b"].dtype == jnp.bfloat16
    for name, array in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), array)
        assert found[name].dtype == array.dtype


def test_what_an_older_jax_wrote_of_every_kind_of_node() -> None:
    tree = treering.load(GOLDEN / "0.10")
    assert treering.verify(GOLDEN / "0.10").ok
    assert type(tree["ordered"]) is OrderedDict
    assert list(tree["ordered"]) == ["z", "a"]
    assert (type(tree["moments"]).__name__, tree["moments"]._fields) == ("Moments", ("mu", "nu"))
    assert isinstance(tree["layer"], treering.checkpoint.StandIn)
    assert (tree["layer"].class_name, tree["layer"].static) == ("golden.Layer", {"aux": b"\x00relu"})
    assert tree["none"] is None
    assert tree["empty"] == [{}, (), []]
    items = np.arange(24).reshape(4, 6)
    for dtype, array in tree["dtypes"].items():
        assert array.dtype == jnp.dtype(dtype), dtype
        np.testing.assert_array_equal(np.asarray(array), (items % 2).astype(jnp.dtype(dtype)))
    np.testing.assert_array_equal(tree["sharded"], items.astype(np.float32))
    np.testing.assert_array_equal(tree["ordered"]["z"], np.zeros((0, 3)))
    np.testing.assert_array_equal(tree["moments"].nu, np.zeros(5))
    np.testing.assert_array_equal(tree["layer"]["1"], items[0])


def test_the_verbs_know_it() -> None:
    listing = treering.inspect(GOLDEN / "0.12")
    assert (listing.form, len(listing.leaves)) == ("jax pytree", 5)
    assert "format: jax.experimental.array_serialization" in str(listing)
    assert treering.abstract(GOLDEN / "0.12")["w"].shape == (16, 8)
    with treering.open(GOLDEN / "0.12") as opened:
        np.testing.assert_array_equal(opened["w"][3:9, ::3], np.asarray(treering.load(GOLDEN / "0.12")["w"])[3:9, ::3])


def test_parts_of_it_onto_a_mesh_and_into_a_target() -> None:
    rows = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))
    found = treering.load(GOLDEN / "0.12", only="w", shardings={"w": rows})
    assert list(found) == ["w"]
    assert found["w"].sharding == rows
    like = treering.abstract(GOLDEN / "0.12")
    assert str(jax.tree.structure(treering.load(GOLDEN / "0.12", like=like))) == str(jax.tree.structure(like))


def test_it_becomes_a_checkpoint_that_does_not_differ(tmp_path: Path) -> None:
    treering.convert(GOLDEN / "0.12", tmp_path / "ckpt")
    assert treering.diff(GOLDEN / "0.12", tmp_path / "ckpt", values=True).differences == ()


def test_in_memory_as_on_disk(tmp_path: Path) -> None:
    copy_to_memory(GOLDEN / "0.12", f"memory://{tmp_path.name}/0.12")
    assert jax.tree.map(np.asarray, treering.load(f"memory://{tmp_path.name}/0.12"))["w"].shape == (16, 8)


def test_a_bare_leaf_an_empty_tree_and_an_array_without_items(tmp_path: Path) -> None:
    leaf = treering.load(saved_as_jax(tmp_path / "leaf", Node(LEAF), [np.arange(3)]))
    np.testing.assert_array_equal(leaf, np.arange(3))
    assert treering.load(saved_as_jax(tmp_path / "none", Node(LEAF), [None])) is None
    assert treering.load(saved_as_jax(tmp_path / "empty", Node(DICT), [])) == {}
    assert treering.load(saved_as_jax(tmp_path / "node", Node(_LIST, (Node(_NONE), Node(LEAF))), [None])) == [
        None,
        None,
    ]
    assert treering.load(saved_as_jax(tmp_path / "zero", Node(LEAF), [np.zeros((0, 2), np.int8)])).shape == (0, 2)


def test_what_several_processes_wrote_and_one_merged(tmp_path: Path) -> None:
    items = np.random.default_rng(0).standard_normal((8, 600)).astype(np.float32)
    store = saved_as_jax(tmp_path / "a", Node(LEAF), [None]) / "array_store"
    grid = {"name": "regular", "configuration": {"chunk_shape": [4, 600]}}
    metadata = {"shape": items.shape, "data_type": "float32", "chunk_grid": grid, "codecs": []}
    parts = []
    for process in range(2):
        spec = tensorstore_impl.get_tensorstore_spec(store / "0", process_idx=process) | {"metadata": metadata}
        rows = slice(4 * process, 4 * process + 4)
        tensorstore.open(spec, create=True, open=True).result()[rows].write(items[rows]).result()
        parts.append(spec["kvstore"] | {"path": ""})
    merged = tensorstore_impl.get_tensorstore_spec(store / "0")["kvstore"] | {"path": ""}
    asyncio.run(tensorstore_impl.combine_kvstores(merged, parts))
    document = json.loads((tmp_path / "a" / "pytreedef.json").read_text())
    (tmp_path / "a" / "pytreedef.json").write_text(
        json.dumps(document | {"__jax_leaf_ids": ["Array(float32[8, 600])"]})
    )
    np.testing.assert_array_equal(treering.load(tmp_path / "a"), items)


def test_arrays_without_data_are_zeros_and_said_to_be_without(tmp_path: Path) -> None:
    """jax stores no zeros, and nothing says that a save came to its end."""
    place = saved_as_jax(tmp_path / "a", Node(_LIST, (Node(LEAF),) * 3), [np.zeros(4), np.ones(4), np.zeros(0)])
    assert [array.tolist() for array in treering.load(place)] == [[0] * 4, [1] * 4, []]
    assert "2 of 3 arrays have no data" in str(treering.inspect(place))
    assert "2 of 3 arrays have no data" in str(treering.verify(place))


def test_a_class_whose_data_is_no_list_of_names_keeps_it(tmp_path: Path) -> None:
    two = (Node(LEAF), Node(LEAF))
    for number, aux in enumerate([b"", b"\xff", b'["a"]', b'["a", "a"]', b'["a", 1]', b'["a b", "c"]', b"[" * 5000]):
        found = treering.load(
            saved_as_jax(tmp_path / str(number), Node(_CUSTOM, two, name=b"m.C", aux=aux), [None, None])
        )
        assert found == treering.checkpoint.StandIn("m.C", {"0": None, "1": None}, {"aux": aux} if aux else {})
    unnamed = treering.load(saved_as_jax(tmp_path / "unnamed", Node(_CUSTOM, two), [None, None]))
    assert unnamed == treering.checkpoint.StandIn("", {"0": None, "1": None})


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        (Node(7), "nodes of the kind 7 are unknown"),
        (Node(DICT, (Node(LEAF),)), "a dict of 1 child has the keys"),
        (Node(DICT, (Node(LEAF), Node(LEAF)), (b"a", b"a")), "a dict of 2 children has the keys"),
        (Node(DICT, (Node(LEAF),), (b"\xff",)), "a key is not UTF-8"),
        (Node(_LIST, (Node(LEAF), Node(LEAF))), "the tree has 2 leaves, 1 are described"),
        (Node(_NONE), "the tree has 0 leaves, 1 are described"),
    ],
)
def test_trees_that_make_no_sense(tmp_path: Path, tree: Node, problem: str) -> None:
    with pytest.raises((CorruptError, UnsupportedError), match=problem):
        treering.load(saved_as_jax(tmp_path / "a", tree, [None]))


@pytest.mark.parametrize("depth", [1024, 1025])
def test_a_tree_that_is_too_deep(tmp_path: Path, depth: int) -> None:
    tree = Node(LEAF)
    for _ in range(depth):
        tree = Node(_LIST, (tree,))
    place = saved_as_jax(tmp_path / "a", tree, [None])
    if depth == 1024:
        assert len(treering.inspect(place).leaves) == 1
    else:
        with pytest.raises(CorruptError, match="more than 1024 containers deep"):
            treering.load(place)


def test_few_bytes_that_would_take_any_memory(tmp_path: Path) -> None:
    data = _flatbuffer(Node(_LIST, (Node(LEAF), Node(LEAF))))
    start = data.index(struct.pack("<I", 2), 30) + 4
    struct.pack_into("<I", data, start + 4, struct.unpack_from("<I", data, start)[0] - 4)
    with pytest.raises(CorruptError, match="two nodes refer to one"):
        treering.load(saved_as_jax(tmp_path / "shared", bytes(data), [None, None]))
    names = (b"a" * 5000, b"b" * 5000)
    data = _flatbuffer(Node(DICT, (Node(LEAF), Node(LEAF)), names))
    struct.pack_into("<I", data, data.index(struct.pack("<I", 5000) + b"a"), 9000)
    with pytest.raises(CorruptError, match="is longer than it can be"):
        treering.load(saved_as_jax(tmp_path / "overlapping", bytes(data), [None, None]))
    below = Node(_LIST, (Node(LEAF),) * 2000)
    with pytest.raises(CorruptError, match="its keys take far more memory than it has bytes"):
        treering.load(saved_as_jax(tmp_path / "keys", Node(DICT, (below,), (b"k" * (2 << 20),)), [None] * 2000))


def test_every_offset_of_the_tree_is_checked(golden: Path) -> None:
    """Cut off or changed anywhere, it is an error of ours, or a tree of as many leaves."""
    data = base64.b64decode(json.loads((golden / "pytreedef.json").read_text())["__jax_pytreedef_repr"])
    refused = 0
    for at in range(0, len(data), 2):
        for changed in (
            data[:at],
            *(data[:at] + word + data[at + 4 :] for word in (b"\xff" * 4, b"\0\0\0\x80", bytes(4))),
        ):
            _replace_tree(golden, changed)
            try:
                assert len(treering.inspect(golden).leaves) == 5
            except TreeringError:
                refused += 1
    assert refused > len(data)


def test_damage_is_an_error_of_ours(golden: Path) -> None:
    seen = total = 0
    for number, file in enumerate(sorted(path for path in golden.rglob("*") if path.is_file())):
        data = file.read_bytes()
        for at in {len(data) * part // 5 for part in range(5)}:
            cut = number % 2 == at % 2
            file.write_bytes(data[:at] if cut else data[:at] + bytes([data[at] ^ 0x14]) + data[at + 1 :])
            total += 1
            try:
                seen += not treering.verify(golden).ok
            except TreeringError:
                seen += 1
        file.write_bytes(data)
    assert total // 2 < seen <= total


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"__jax_leaf_ids": None}, "__jax_leaf_ids"),
        ({"__jax_pytreedef_repr": "?"}, "the tree is not base64"),
        ({"__jax_pytreedef_repr": ""}, "it refers to byte 0 of 0"),
        ({"__jax_leaf_ids": [None] * 6}, "the tree has 5 leaves, 6 are described"),
        (
            {"__jax_leaf_ids": ["Array(float32[8])"] + [None] * 4},
            r"describes 'Array\(float32\[8\]\)', the array is Array\(b",
        ),
        ({"__jax_leaf_ids": [7] + [None] * 4}, "describes 7, the array is"),
        ({"__jax_leaf_ids": [None, "Array(int8[])", None, None, None]}, r"its array is missing.*at leaf 'n'"),
    ],
)
def test_documents_that_make_no_sense(golden: Path, members: dict[str, Any], problem: str) -> None:
    document = json.loads((golden / "pytreedef.json").read_text())
    (golden / "pytreedef.json").write_text(json.dumps(document | members))
    with pytest.raises(CorruptError, match=problem):
        treering.load(golden)


def test_a_database_that_is_lost_and_links_out_of_the_folder(golden: Path) -> None:
    (golden / "array_store").rename(golden.parent / "outside")
    with pytest.raises(CorruptError, match=r"its array is missing.*at leaf 'b'"):
        treering.load(golden)
    (golden / "array_store").symlink_to(golden.parent / "outside")
    with pytest.raises(CorruptError, match="link that leads out"):
        treering.load(golden)
    (golden / "pytreedef.json").write_bytes(b"")
    with pytest.raises(CorruptError, match=r"pytreedef\.json is not JSON"):
        treering.load(golden)
