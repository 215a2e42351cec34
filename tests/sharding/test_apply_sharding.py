"""apply_sharding_tree, validate_sharding_tree and make_itsharded: what eformer documents, and what it gets wrong."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests import meshes, warm
from tests.trees import Pair
from treering.errors import NotShardedWarning, UnsupportedError
from treering.sharding import apply_sharding_tree, make_itsharded, validate_sharding_tree

MESH = meshes.line(axis="d")
GRID = meshes.grid(2, 4, axes=("dp", "tp"))
ROWS = NamedSharding(MESH, P("d"))
EVERYWHERE = NamedSharding(MESH, P())


def eight() -> jax.Array:
    return jnp.arange(8, dtype=jnp.float32)


# -------------------------------------------------------------------------------------------------- what a leaf may say


@pytest.mark.parametrize(
    ("place", "want"),
    [
        (ROWS, ROWS),
        (P("d"), ROWS),
        (None, EVERYWHERE),
        (SingleDeviceSharding(jax.devices()[3]), SingleDeviceSharding(jax.devices()[3])),
        (jax.devices()[3], SingleDeviceSharding(jax.devices()[3])),
        (NamedSharding(GRID, P("tp")), NamedSharding(GRID, P("tp"))),
        (lambda array: ROWS if array.ndim else None, ROWS),
        (lambda array: P("d"), ROWS),
        (lambda array: None, EVERYWHERE),
    ],
    ids=["sharding", "spec", "none", "single", "device", "other mesh", "function", "function: spec", "function: none"],
)
@pytest.mark.parametrize("kind", ["jax", "numpy"])
def test_an_array_goes_where_its_place_says(place: Any, want: Any, kind: str) -> None:
    array = eight() if kind == "jax" else np.arange(8, dtype=np.float32)
    placed = apply_sharding_tree({"a": array}, {"a": place}, MESH)["a"]
    assert placed.sharding == want
    assert isinstance(placed, jax.Array)
    assert np.array_equal(placed, array)


def test_without_a_mesh_none_is_the_first_device() -> None:
    placed = apply_sharding_tree({"a": jax.device_put(eight(), ROWS)}, {"a": None})
    assert placed["a"].sharding == SingleDeviceSharding(jax.local_devices()[0])


def test_a_function_may_return_the_leaf_itself() -> None:
    placed = apply_sharding_tree({"a": eight(), "b": eight()}, {"a": lambda x: x * 2, "b": lambda x: "gone"}, MESH)
    assert np.array_equal(placed["a"], 2 * eight())
    assert placed["b"] == "gone"


def test_a_partial_is_a_function_too() -> None:
    place = jax.tree_util.Partial(lambda sharding, array: sharding, ROWS)
    assert apply_sharding_tree({"a": eight()}, {"a": place}, MESH)["a"].sharding == ROWS


@pytest.mark.parametrize("failure", [ValueError, TypeError, ZeroDivisionError, UnsupportedError])
def test_what_a_function_raises_is_not_hidden(failure: type[Exception]) -> None:
    def place(array: Any) -> Any:
        raise failure("mine")

    with pytest.raises(failure, match="mine"):
        apply_sharding_tree({"a": eight()}, {"a": place}, MESH)


# -------------------------------------------------------------------------------------------------- what stays as it is


def test_no_tree_does_nothing() -> None:
    arrays = {"a": eight()}
    assert apply_sharding_tree(arrays, None, MESH) is arrays


def test_leaves_that_are_no_arrays_stay_and_no_function_sees_them() -> None:
    def place(array: Any) -> Any:
        raise AssertionError(array)

    tree = {"i": 3, "n": None, "s": "text", "f": 2.5, "aval": jax.ShapeDtypeStruct((8,), "float32")}
    assert apply_sharding_tree(tree, dict.fromkeys(tree, place), MESH) == tree
    assert apply_sharding_tree(tree, dict.fromkeys(tree, ROWS), MESH) == tree


def test_every_container_comes_back_with_its_type_and_order() -> None:
    tree = {
        "pair": Pair(eight(), [eight(), (eight(), 3)]),
        "ordered": collections.OrderedDict(b=eight(), a=eight()),
        "empty": [],
        1: eight(),
    }
    places = jax.tree.map(lambda _: ROWS, {key: value for key, value in tree.items() if key != 1}) | {1: ROWS}
    placed = apply_sharding_tree(tree, places, MESH)
    assert list(placed) == list(tree)
    assert list(placed["ordered"]) == ["b", "a"]
    assert type(placed["ordered"]) is collections.OrderedDict
    assert type(placed["pair"]) is Pair
    assert type(placed["pair"].right[1]) is tuple
    assert placed["pair"].right[1][1] == 3
    assert placed["empty"] == []
    arrays = [
        placed["pair"].left,
        placed["pair"].right[0],
        placed["pair"].right[1][0],
        placed["ordered"]["a"],
        placed[1],
    ]
    assert [array.sharding for array in arrays] == [ROWS] * 5


def test_dicts_made_by_an_index_stand_for_lists() -> None:
    placed = apply_sharding_tree({"l": [eight(), eight()]}, {"l": {"0": ROWS, "1": None}}, MESH)
    assert [array.sharding for array in placed["l"]] == [ROWS, EVERYWHERE]


def test_a_bare_array_takes_a_bare_sharding() -> None:
    assert apply_sharding_tree(eight(), ROWS).sharding == ROWS


@pytest.mark.parametrize(
    ("places", "line"),
    [
        ({"a": ROWS}, "b: it has no place"),
        ({"a": ROWS, "b": ROWS, "c": ROWS}, "c: no leaf is there"),
        ({"a": ROWS, "b": {"x": ROWS}}, "b: a leaf, and its place is a dict"),
        (ROWS, r"\(the root\): a dict, and its place is a leaf"),
    ],
)
def test_trees_that_differ_warn_and_nothing_moves(places: Any, line: str) -> None:
    arrays = {"a": eight(), "b": eight()}
    with pytest.warns(NotShardedWarning, match=line) as warned:
        assert apply_sharding_tree(arrays, places, MESH) is arrays
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("array", "place", "line"),
    [
        (jnp.float32(1), ROWS, r"bad: float32\[\] has 0 axes"),
        (jnp.ones(3), ROWS, r"bad: float32\[3\]: axis 0 of length 3 is not divisible by 8"),
        (jnp.ones(8), P("nope"), r"bad: float32\[8\]: the mesh has no axis 'nope'"),
        (jnp.ones(8), "rows", "bad: a str is not a sharding"),
        (jnp.ones(8), ["d"], "a leaf, and its place is a list"),
        (np.array(["a"] * 8), ROWS, "bad: .*not a valid JAX array type"),
        (np.zeros(8, "M8[s]"), ROWS, "bad: .*not a valid JAX array type"),
    ],
    ids=["no axes", "indivisible", "axis", "text", "list", "strings", "times"],
)
def test_one_bad_leaf_harms_no_other(array: Any, place: Any, line: str) -> None:
    arrays = {"good": eight(), "bad": array, "also": eight()}
    with pytest.warns(NotShardedWarning, match=line):
        placed = apply_sharding_tree(arrays, {"good": ROWS, "bad": place, "also": lambda _: ROWS}, MESH)
    assert placed["bad"] is array
    if isinstance(place, list):  # that is another tree
        assert placed is arrays
    else:
        assert placed["good"].sharding == placed["also"].sharding == ROWS


def test_a_spec_needs_a_mesh() -> None:
    array = eight()
    with pytest.warns(NotShardedWarning, match=r"a: .*needs a mesh"):
        assert apply_sharding_tree({"a": array}, {"a": P("d")})["a"] is array


# ---------------------------------------------------------------------------------------------------------------- numpy


def test_wide_numpy_is_refused_by_name_and_not_cast() -> None:
    arrays = {"a": np.arange(8) * 2**40, "b": [np.float64(1e300), np.zeros(8, np.complex128)], "c": np.ones(8, "f4")}
    places = {"a": ROWS, "b": [None, lambda x: ROWS], "c": ROWS}
    with pytest.raises(UnsupportedError, match=r"a \(int64\), b/0 \(float64\), b/1 \(complex128\)") as caught:
        apply_sharding_tree(arrays, places, MESH)
    assert isinstance(caught.value, ValueError)
    assert "'c" not in str(caught.value)
    with jax.enable_x64(True):
        placed = apply_sharding_tree(arrays, places, MESH)
    assert placed["a"].dtype == np.int64
    assert int(placed["a"][1]) == 2**40
    assert float(placed["b"][0]) == 1e300


def test_a_function_may_cast_wide_numpy_itself() -> None:
    placed = apply_sharding_tree({"a": np.arange(8)}, {"a": lambda x: jnp.asarray(x, jnp.int32)}, MESH)
    assert placed["a"].dtype == np.int32


def test_numpy_of_the_other_byte_order_keeps_its_values() -> None:
    placed = apply_sharding_tree({"a": np.arange(8, dtype=">f4")}, {"a": ROWS}, MESH)
    assert np.array_equal(placed["a"], np.arange(8))


def test_the_caller_s_memory_is_not_taken() -> None:
    held = np.zeros(1 << 20, np.uint8)
    start = -held.ctypes.data % 64
    array = held[start : start + (1 << 19)].view(np.float32)  # aligned: jax's device_put would take it as it is
    placed = apply_sharding_tree({"a": array}, {"a": None})
    array[:] = 7
    assert not np.any(np.asarray(placed["a"]))


def test_typed_keys_shard() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    placed = apply_sharding_tree({"k": keys, "one": jax.random.key(1)}, {"k": ROWS, "one": None}, MESH)
    assert placed["k"].sharding == ROWS
    assert jnp.array_equal(jax.random.key_data(placed["k"]), jax.random.key_data(keys))
    assert placed["one"].sharding.is_fully_replicated


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="mesh is a str"):
        apply_sharding_tree({}, {}, "mesh")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------------- validate


@pytest.mark.parametrize(
    ("tree", "expected", "want"),
    [
        ({"a": None}, {"a": 1}, True),
        ({"a": None}, {"a": None}, True),
        ({"a": ROWS}, {"a": P()}, True),
        ({"a": {"0": ROWS}}, {"a": [1]}, True),
        ({"a": [ROWS]}, {"a": (1,)}, False),
        ({"a": ROWS}, {"a": 1, "b": 2}, False),
        ({1: ROWS, "a": ROWS}, {1: 1, "a": 2}, True),
        ({1: ROWS, "1": ROWS}, {"1": 1}, False),
        ({}, {}, True),
        (None, {}, False),
        (ROWS, 1, True),
    ],
)
def test_validate_compares_structures_and_nothing_else(tree: Any, expected: Any, want: bool) -> None:
    assert validate_sharding_tree(tree, expected) is want


def test_validate_promises_what_apply_needs() -> None:
    arrays = {"a": [eight(), Pair(eight(), None)]}
    for places in ({"a": {"0": ROWS, "1": {"left": None, "right": None}}}, {"a": [ROWS, Pair(None, None)]}):
        assert validate_sharding_tree(places, arrays)
        assert apply_sharding_tree(arrays, places, MESH)["a"][0].sharding == ROWS


# ------------------------------------------------------------------------------------------------------- make_itsharded


def test_jax_arrays_are_replicated_and_all_else_stays() -> None:
    plain = np.ones(2)
    tree = {"b": eight(), "a": [plain, 3, None, Pair(jax.random.key(0), "s")]}
    moved = make_itsharded(tree, MESH)
    assert list(moved) == ["b", "a"]
    assert moved["b"].sharding == EVERYWHERE
    assert moved["a"][0] is plain
    assert moved["a"][1:3] == [3, None]
    assert moved["a"][3].left.sharding.is_fully_replicated
    assert moved["a"][3].right == "s"


@pytest.mark.parametrize(
    "sharding",
    [
        SingleDeviceSharding(jax.devices()[0]),
        SingleDeviceSharding(jax.devices()[5]),
        ROWS,
        NamedSharding(GRID, P("tp")),
    ],
    ids=["first device", "another", "divided", "other mesh"],
)
@pytest.mark.parametrize("mesh", [MESH, GRID, meshes.line(2)], ids=["8", "2x4", "2"])
def test_arrays_are_replicated_wherever_they_were(sharding: Any, mesh: Mesh) -> None:
    array = jax.device_put(eight(), sharding)
    moved = make_itsharded(array, mesh)
    assert moved.sharding == NamedSharding(mesh, P())
    assert np.array_equal(moved, array)


@pytest.mark.parametrize("mesh", [None, "mesh"])
def test_make_itsharded_needs_a_mesh(mesh: Any) -> None:
    with pytest.raises(UnsupportedError, match="mesh is"):
        make_itsharded({}, mesh)


@pytest.mark.parametrize("x64", ["0", "1"])
def test_the_width_is_asked_when_it_counts(x64: str) -> None:
    program = (
        "import numpy as np, jax\n"
        "from treering.sharding import apply_sharding_tree\n"
        "print(apply_sharding_tree({'a': np.int64(2**40)}, {'a': None})['a'].dtype)\n"
    )
    done = warm.run("-c", program, environment={"JAX_ENABLE_X64": x64})
    assert (done.stdout.strip() == "int64") is (x64 == "1")
    assert ("a (int64)" in done.stderr) is (x64 == "0")


def test_what_jax_cannot_lay_out_stays_and_the_others_move() -> None:
    mesh = meshes.grid(2, 4)
    tree = {"w": jnp.ones((8, 8)), "v": jnp.ones(8)}
    for wrong in (P("x", "x"), P(P.UNCONSTRAINED, "x"), mesh):
        with pytest.warns(NotShardedWarning, match=r"(?s)stay as they are:.*\bw: "):
            found = apply_sharding_tree(tree, {"w": wrong, "v": P("x")}, mesh)
        assert found["w"] is tree["w"]
        assert found["v"].sharding == NamedSharding(mesh, P("x"))
