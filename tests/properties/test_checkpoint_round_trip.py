"""Every tree goes through a checkpoint bit for bit, kind for kind and node for node, onto any devices."""

from __future__ import annotations

import contextlib
import enum
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests.limits import lower
from tests.properties.strategies import JAX_DTYPES, arrays, jax_arrays, leaves, quick, trees, typed_keys
from tests.trees import assert_same, assert_same_structure, fingerprint
from treering._format.index import OpaqueLeaf
from treering._tree.flatten import flatten
from treering._tree.likeness import static_differences
from treering.tree import tree_map_with_path


@pytest.fixture(scope="module", autouse=True, params=["lists", "packed columns"])
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Indexes of both forms; only large trees have packed columns else."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "lists":
            lower(patch, packed_index_from=0)
        yield


@contextlib.contextmanager
def fresh(suffix: str = "") -> Iterator[Path]:
    """A path at which nothing stands yet."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / f"ckpt{suffix}"


# -------------------------------------------------------------------------------------------------------------- trees


def more_leaves() -> st.SearchStrategy[Any]:
    """Every leaf kind, and what only a checkpoint holds: long numbers, long texts, half surrogate pairs, bytearrays."""
    rare = st.one_of(
        st.integers(-(2**200), 2**200),
        st.sampled_from([2**53, 2**53 + 1, -(2**53) - 1, 0.1, -0.0, float("inf"), complex(-0.0, float("nan"))]),
        st.floats().map(lambda x: complex(x, -x)),
        st.text(st.characters(categories=["L", "Cs", "Cc"]), max_size=20),
        st.sampled_from(["x" * 5000, "\ud800" * 2000, "ü" * 3000, b"\0" * 5000, bytearray(4097), bytearray(b"ab")]),
        st.binary(max_size=20).map(bytearray),
        st.sampled_from([abs, math.sqrt, np.dtype("int8"), jax.nn.relu, jax.numpy.float32]),
    )
    return st.one_of(leaves(big_endian=True, keys=True), leaves(big_endian=True, keys=True), rare)


class Suit(enum.Enum):
    """Of which files hold the text."""

    HEARTS = 1


def more_trees(leaf: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Any]:
    """Trees with every container, and dicts of every type of key."""
    key = st.recursive(
        st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.none(), st.floats(), st.binary(max_size=4)),
        lambda inner: st.lists(inner, max_size=2).map(tuple),
        max_leaves=3,
    )
    inner = trees(leaf if leaf is not None else more_leaves(), max_leaves=8)
    odd = st.sampled_from(
        [Suit.HEARTS, (Suit.HEARTS, "é"), np.str_("é"), np.str_("0x0123456789"), np.str_("0x9876543210")]
    )
    keyed = st.dictionaries(key, inner, max_size=4).filter(_texts_differ)
    return st.one_of(inner, keyed, st.dictionaries(odd, inner, max_size=3))


def _texts_differ(tree: dict[Any, Any]) -> bool:
    return len(set(map(str, tree))) == len(tree)


def assert_stored(result: Any, tree: Any) -> None:
    """Without ``like``: the same keys, kinds and bits, and the same tree again if that were saved."""
    want, got = flatten(tree), flatten(result)
    assert got.keys == want.keys
    assert got.kinds == want.kinds
    assert fingerprint(got.tokens) == fingerprint(want.tokens)
    assert static_differences(want.tokens, got.tokens) == []
    for number, (expected, found) in enumerate(zip(want.leaves, got.leaves, strict=True)):
        assert fingerprint(found) == fingerprint(want.opaque.get(number, expected)), want.keys[number]


@quick(120)
@given(more_trees())
def test_a_tree_goes_round(tree: Any) -> None:
    before = fingerprint(tree)
    with fresh() as path:
        treering.save(path, tree)
        assert_stored(treering.load(path), tree)
        result = treering.load(path, tree)
        assert treering.verify(path).ok
    assert_same(result, tree, restored=False)
    assert_same_structure_where_jax_has_one(result, tree)
    assert fingerprint(tree) == before


def assert_same_structure_where_jax_has_one(result: Any, tree: Any) -> None:
    try:
        jax.tree.structure(tree)
    except (TypeError, ValueError):  # dict keys that jax cannot sort
        return
    assert_same_structure(result, tree)


@quick(40)
@given(more_trees())
def test_a_loaded_tree_is_saved_as_what_it_was(tree: Any) -> None:
    with fresh() as path:
        treering.save(path, tree)
        treering.save(path, treering.load(path), overwrite=True)
        assert_stored(treering.load(path), tree)
        assert_same(treering.load(path, tree), tree, restored=False)
        assert len(list(path.iterdir())) <= 2  # the index, and a data file where there are bytes for one


@quick(40)
@given(more_trees())
def test_an_open_checkpoint_has_every_leaf(tree: Any) -> None:
    flat = flatten(tree)
    with fresh() as path:
        treering.save(path, tree)
        with treering.open(path) as checkpoint:
            assert list(checkpoint) == flat.keys
            for number, (key, kind, leaf) in enumerate(zip(flat.keys, flat.kinds, flat.leaves, strict=True)):
                found = checkpoint[key]
                if kind == "key":
                    assert_same(np.asarray(found), jax.random.key_data(leaf))
                elif kind in ("jax", "numpy", "numpy scalar"):
                    assert found.kind == kind
                    assert_same(np.asarray(found), np.asarray(leaf))
                else:
                    assert_same(found, flat.opaque.get(number, leaf), restored=False)


@quick(40)
@given(trees(st.one_of(jax_arrays(), arrays(JAX_DTYPES), typed_keys())))
def test_an_abstract_target_is_enough(tree: Any) -> None:
    def abstract(_: tuple[str, ...], leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf

    like = tree_map_with_path(abstract, tree)  # jax would sort the dicts
    with fresh() as path:
        treering.save(path, tree)
        result = treering.load(path, like)
    assert_same(result, tree, restored=False)
    assert_same_structure(result, tree)


@quick(40)
@given(trees(arrays()), st.booleans())
def test_mapped_arrays_are_the_same(tree: Any, with_like: bool) -> None:
    with fresh() as path:
        treering.save(path, tree)
        result = treering.load(path, tree if with_like else None, mapped=True)
        if with_like:
            assert_same(result, tree, restored=False)
        else:
            assert_stored(result, tree)


@quick(60)
@given(trees(st.one_of(arrays(), jax_arrays())))
def test_one_safetensors_file_holds_it_all_or_says_what_it_cannot(tree: Any) -> None:
    with fresh(".safetensors") as path:
        try:
            treering.save(path, tree)
        except treering.errors.UnsupportedError:
            assert not path.exists()
            return
        assert_stored(treering.load(path), tree)
        assert_same(treering.load(path, tree), tree, restored=False)
        assert treering.verify(path).ok


@quick(30)
@given(more_trees(), more_trees())
def test_an_overwrite_leaves_the_new_tree_and_its_files_only(old: Any, new: Any) -> None:
    with fresh() as path:
        treering.save(path, old)
        (path / "config.json").write_text("{}")
        treering.save(path, new, overwrite=True)
        assert_stored(treering.load(path), new)
        assert (path / "config.json").read_text() == "{}"
        assert len(list(path.iterdir())) <= 3


# ------------------------------------------------------------------------------------------------------------- devices


@st.composite
def shardings(draw: st.DrawFn, shape: tuple[int, ...]) -> NamedSharding:
    """A sharding that divides ``shape``: any 1 to 8 devices in any order, in a mesh of one to three axes."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (2, 2), (2, 3), (4, 2), (2, 2, 2)]))
    devices = draw(st.permutations(jax.devices()))[: math.prod(sizes)]
    names = ("x", "y", "z")[: len(sizes)]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(sizes), names)
    free = dict(zip(names, sizes, strict=True))
    spec: list[Any] = []
    for length in shape:
        fitting = [name for name, size in free.items() if length % size == 0]
        pairs = [(a, b) for a in fitting for b in fitting if a != b and length % (free[a] * free[b]) == 0]
        chosen = draw(st.sampled_from([None, *fitting, *pairs]))
        for name in (chosen,) if isinstance(chosen, str) else chosen or ():
            del free[name]
        spec.append(chosen)
    return NamedSharding(mesh, PartitionSpec(*spec))


_SIDES = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 8, 12, 14, 24])


@st.composite
def placed(draw: st.DrawFn) -> tuple[jax.Array, NamedSharding]:
    """An array or keys on some devices, and where it is wanted."""
    shape = tuple(draw(st.lists(_SIDES, max_size=3)))
    if draw(st.integers(0, 5)) == 0:
        array: Any = jax.random.split(jax.random.key(draw(st.integers(0, 9))), shape)
    else:
        dtype = draw(st.sampled_from(JAX_DTYPES))
        bits = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, math.prod(shape), np.uint8)
        array = (bits % 2).astype(bool) if dtype == "bool" else bits.astype(jax.numpy.dtype(dtype))
        array = array.reshape(shape)
    return jax.device_put(array, draw(shardings(shape))), draw(shardings(shape))


def assert_placed(result: jax.Array, saved: jax.Array, sharding: NamedSharding) -> None:
    """The same bits on the wanted devices, each device its own part of them."""
    assert_same(result, saved, restored=False)
    assert result.sharding == sharding
    assert result.is_fully_addressable
    if jax.numpy.issubdtype(saved.dtype, jax.dtypes.prng_key):
        return
    whole = np.asarray(saved)
    for shard in result.addressable_shards:
        assert_same(np.asarray(shard.data), np.asarray(whole[shard.index]))


@quick(100)
@given(st.dictionaries(st.sampled_from("abcd"), placed(), min_size=1, max_size=4), st.integers(0, 3))
def test_arrays_move_between_any_two_placements(tree: dict[str, tuple[jax.Array, NamedSharding]], way: int) -> None:
    saved = {key: array for key, (array, _) in tree.items()}
    wanted = {key: sharding for key, (_, sharding) in tree.items()}
    with fresh() as path:
        treering.save(path, saved)
        match way:
            case 0:
                result = treering.load(path, shardings=wanted)
            case 1:
                result = treering.load(path, saved, shardings=wanted)
            case 2:
                result = treering.load(path, {k: jax.device_put(a, wanted[k]) for k, a in saved.items()})
            case _:
                like = {k: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=wanted[k]) for k, a in saved.items()}
                result = treering.load(path, like)
        assert treering.verify(path).ok
        assert_same(treering.load(path), saved, restored=False)
    for key, array in saved.items():
        assert_placed(result[key], array, wanted[key])


@quick(60)
@given(placed(), st.data())
def test_a_slice_of_what_was_sharded(case: tuple[jax.Array, NamedSharding], data: st.DataObject) -> None:
    array, _ = case
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    index = tuple(data.draw(st.slices(length)) for length in array.shape)
    with fresh() as path:
        treering.save(path, [array])
        with treering.open(path) as checkpoint:
            assert_same(checkpoint["0"][index], np.asarray(array)[index])


@quick(30)
@given(placed())
def test_a_sharded_array_in_one_safetensors_file(case: tuple[jax.Array, NamedSharding]) -> None:
    array, wanted = case
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
        wanted = NamedSharding(wanted.mesh, PartitionSpec())
    with fresh(".safetensors") as path:
        if array.dtype.name in ("int4", "uint4"):
            with pytest.raises(treering.errors.UnsupportedError, match=array.dtype.name):
                treering.save(path, {"w": array})
            return
        treering.save(path, {"w": array})
        assert_placed(treering.load(path, shardings=wanted)["w"], array, wanted)


def test_opaque_leaves_without_like_are_named() -> None:
    with fresh() as path:
        treering.save(path, {"f": abs})
        assert treering.load(path) == {"f": OpaqueLeaf("builtins.builtin_function_or_method", "builtins.abs")}
