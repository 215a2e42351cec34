"""load with ``like``: what is missing, unexpected or of another shape, all at once; nothing cast, nothing guessed."""

from __future__ import annotations

import functools
import pickle
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.system_calls import spans_read
from tests.trees import assert_same, assert_same_structure
from treering.errors import MismatchError, StaticFieldsDifferWarning, TreeringError, UnsupportedError

IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ckpt"


def abstract(tree: Any) -> Any:
    return jax.eval_shape(lambda: tree)


def differences(path: Path, like: Any, **options: Any) -> tuple[str, ...]:
    with pytest.raises(MismatchError) as caught:
        treering.load(path, like, **options)
    for line in caught.value.differences[:20]:
        assert line in str(caught.value)
    return caught.value.differences


# ------------------------------------------------------------------------------------------------------ what goes where


def test_a_leaf_becomes_what_like_has_there(path: Path) -> None:
    saved = {
        "to_jax": np.arange(3, dtype="f4"),
        "to_numpy": jnp.arange(3),
        "scalar": np.float32(2),
        "zero": jnp.ones(()),
    }
    like = {"to_jax": jnp.zeros(3), "to_numpy": np.zeros(3, "i4"), "scalar": jnp.float32(0), "zero": np.float32(0)}
    treering.save(path, saved)
    found = treering.load(path, like)
    want = {
        "to_jax": jnp.arange(3, dtype="f4"),
        "to_numpy": np.arange(3, dtype="i4"),
        "scalar": jnp.float32(2),
        "zero": np.float32(1),
    }
    assert_same(found, want, restored=False)


def test_like_is_left_as_it_was(path: Path) -> None:
    treering.save(path, {"a": {"x": np.arange(3)}, "b": [1]})
    like = {"a": {"x": np.zeros(3, int)}, "b": [0]}
    inner, items = like["a"], like["b"]
    found = treering.load(path, like)
    assert like["a"] is inner
    assert like["b"] is items
    assert_same(like, {"a": {"x": np.zeros(3, int)}, "b": [0]})
    assert found["a"] is not inner
    assert_same(found, {"a": {"x": np.arange(3)}, "b": [1]})


def test_the_order_of_like_counts_not_the_saved_one(path: Path) -> None:
    treering.save(path, {"b": 1, "a": 2})
    assert list(treering.load(path, {"a": 0, "b": 0}).items()) == [("a", 2), ("b", 1)]
    assert list(treering.load(path)) == ["b", "a"]


def test_no_abstract_array_ever_comes_back(path: Path) -> None:
    mesh = meshes.line()
    rows = NamedSharding(mesh, PartitionSpec("x"))
    state: dict[str, Any] = {
        "a": jnp.arange(8.0),
        "n": np.arange(8),
        "k": jax.random.key(3),
        "ks": jax.random.split(jax.random.key(3), 8),
        "z": jnp.zeros((0, 3)),
        "s": np.int32(4),
        "x": np.arange(8, dtype="f4"),
    }
    treering.save(path, state)
    like = {
        "a": jax.ShapeDtypeStruct((8,), "float32"),
        "n": jax.ShapeDtypeStruct((8,), np.int64),
        "k": abstract(state["k"]),
        "ks": jax.ShapeDtypeStruct((8,), state["ks"].dtype, sharding=rows),
        "z": jax.ShapeDtypeStruct((0, 3), "float32"),
        "s": jax.ShapeDtypeStruct((), "int32"),
        "x": jax.ShapeDtypeStruct((8,), "float32", sharding=rows),
    }
    found = treering.load(path, like)
    assert not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(found))
    assert isinstance(found["n"], np.ndarray), "this process has x64 off, and nothing is cast"
    assert found["ks"].sharding == found["x"].sharding == rows
    want = dict(state, s=jnp.int32(4), x=jnp.arange(8, dtype="f4"))
    assert_same(found, want, restored=False)


def test_shardings_of_like_are_kept(path: Path) -> None:
    mesh = meshes.grid(4, 2)
    treering.save(path, {"a": jnp.arange(16.0).reshape(8, 2), "b": jnp.ones(4), "c": jnp.ones(4)})
    like = {
        "a": jax.device_put(jnp.zeros((8, 2)), NamedSharding(mesh, PartitionSpec("y", None))),
        "b": jax.device_put(jnp.zeros(4), jax.devices()[5]),
        "c": jnp.zeros(4),
    }
    found = treering.load(path, like)
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda leaf: leaf.sharding, like)
    assert found["b"].committed
    assert not found["c"].committed, "an array that was nowhere in particular may be moved by jax"
    assert_same(jax.device_get(found["a"]), np.arange(16, dtype="f4").reshape(8, 2))
    assert float(jnp.sum(found["b"] + jax.device_put(found["c"], jax.devices()[5]))) == 8


def test_a_deleted_array_in_like_still_says_what_is_wanted(path: Path) -> None:
    state = {"w": jnp.arange(4.0)}
    treering.save(path, state)
    state["w"].delete()
    assert_same(treering.load(path, state)["w"], jnp.arange(4.0), restored=False)


# ---------------------------------------------------------------------------------------------------------- differences


def test_all_differences_at_once(path: Path) -> None:
    saved = {
        "same": 1,
        "shape": np.zeros((2, 3)),
        "dtype": np.zeros(2, "f4"),
        "kind": "text",
        "weight": jnp.ones(2),
        "n": None,
    }
    treering.save(path, saved)
    like = {"same": 0, "shape": np.zeros((3, 2)), "dtype": np.zeros(2, "f8"), "kind": 3, "weights": jnp.ones(2), "n": 0}
    lines = differences(path, like)
    assert [line.split(":")[0] for line in lines] == ["shape", "dtype", "kind", "weights", "n", "weight"]
    text = dict(line.split(": ", 1) for line in lines)
    assert text["shape"] == "wanted float64[3, 2], found float64[2, 3]"
    assert text["dtype"] == "wanted float64[2], found float32[2]"
    assert text["kind"] == "wanted int, found str"
    assert text["n"] == "wanted int, found None"
    assert text["weights"] == "missing, `like` has float32[2] (is it 'weight'?)"
    assert text["weight"] == "unexpected, the checkpoint has float32[2]"


class Names(list[str]):
    """A list that no program has told jax of."""


@pytest.mark.parametrize(
    ("like", "wanted"),
    [
        (Names(["a"]), "a Names"),
        ({1}, "a set"),
        (abs, "a function or setting"),
        (np.dtype("i1"), "a function or setting"),
    ],
    ids=repr,
)
def test_what_is_wanted_is_called_what_it_is(like: Any, wanted: str, path: Path) -> None:
    treering.save(path, {"n": 3})
    with pytest.raises(MismatchError, match=f"n: wanted {wanted}, found int"):
        treering.load(path, {"n": like})


def test_a_thousand_differences_are_all_there_and_the_message_is_short(path: Path) -> None:
    treering.save(path, {f"a{n}": n for n in range(1000)})
    with pytest.raises(MismatchError) as caught:
        treering.load(path, {f"b{n}": n for n in range(1000)})
    assert len(caught.value.differences) == 2000
    assert len(str(caught.value)) < 10_000
    assert "2000 differences" in str(caught.value)
    assert "and 1980 more" in str(caught.value)


def test_the_error_of_differences_can_be_sent_to_another_process(path: Path) -> None:
    treering.save(path, {"a": 1})
    with pytest.raises(MismatchError) as caught:
        treering.load(path, {"b": 1})
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.differences) == (str(caught.value), caught.value.differences)
    assert isinstance(again, ValueError)


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (jnp.float32(1), 1.0),
        (np.float32(1), 1.0),
        (np.array(3), 3),
        (jnp.array(True), False),
        (np.array(1j), 0j),
        (jnp.bfloat16(1), 1.0),
    ],
    ids=str,
)
def test_an_array_without_axes_may_stand_for_a_number_of_its_category(saved: Any, like: Any, path: Path) -> None:
    treering.save(path, {"n": saved})
    assert_same(treering.load(path, {"n": like})["n"], saved, restored=False)
    assert_same(treering.load(path, {"n": like}, cast=True)["n"], type(like)(saved), restored=False)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("saved", "like"),
    [
        (jnp.float32(1), 1),
        (jnp.int32(1), 1.0),
        (np.array(True), 1),
        (np.array([1.0]), 1.0),
        (1, jnp.int32(0)),
        (1.0, np.float64(0)),
        (1, True),
        (True, 1),
        (1, 1.0),
        (None, 1),
        (1, None),
        ("1", 1),
        (b"1", "1"),
        (np.zeros(2), [0.0, 0.0]),
        ([0.0, 0.0], np.zeros(2)),
        (np.zeros(2, "i4"), np.zeros(2, "u4")),
        (np.zeros(2, "f4"), np.zeros(2, ml_dtypes.bfloat16)),
        (np.zeros(2, "M8[s]"), np.zeros(2, "M8[D]")),
        (np.timedelta64(5, "s"), 5),
        (np.zeros(2, "uint32"), jax.random.key(0)),
        (jax.random.key(0), np.zeros(2, "uint32")),
        (jax.random.key(0), jnp.zeros(2, "uint32")),
        (np.zeros((2, 1)), np.zeros((1, 2))),
        (np.zeros((1,)), np.zeros(())),
        (np.zeros((0, 2)), np.zeros((0, 3))),
    ],
    ids=str,
)
def test_nothing_is_cast_unasked(saved: Any, like: Any, path: Path) -> None:
    treering.save(path, {"x": saved})
    assert differences(path, {"x": like})


# ----------------------------------------------------------------------------------------------------------------- cast


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float16"),
        ("float8_e4m3fn", "float32"),
        ("float64", "float32"),
        ("float16", "float64"),
        ("int64", "int8"),
        ("uint8", "int32"),
        ("int32", "float32"),
        ("bool", "int32"),
        ("float32", "complex64"),
        ("complex128", "complex64"),
        ("int4", "int32"),
        ("int4", "int8"),
        ("int8", "int4"),
        ("uint4", "int4"),
        ("uint8", "float8_e5m2"),
        ("float8_e8m0fnu", "float8_e5m2"),
        ("uint2", "uint4"),
    ],
)
@pytest.mark.parametrize("to", [np.zeros, jnp.zeros], ids=["numpy", "jax"])
def test_cast_within_a_category_or_to_a_wider_one(saved: str, wanted: str, to: Any, path: Path) -> None:
    values = np.array([2, 1, 1, 2], jnp.dtype(saved))
    treering.save(path, {"x": values})
    if to is jnp.zeros and wanted == "float64":
        like: Any = jax.ShapeDtypeStruct((4,), "float32")
        wanted = "float32"
    else:
        like = to((4,), wanted)
    found = treering.load(path, {"x": like}, cast=True)["x"]
    assert isinstance(found, type(like)) or isinstance(like, jax.ShapeDtypeStruct)
    assert found.dtype == wanted
    assert [complex(x) for x in np.asarray(found)] == [complex(x) for x in values]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        ("float32", "int32"),
        ("bfloat16", "int32"),
        ("bfloat16", "int4"),
        ("complex64", "float32"),
        ("int32", "bool"),
        ("float32", "bool"),
        ("datetime64[s]", "int64"),
        ("float32", "timedelta64[s]"),
        ("int32", "timedelta64[s]"),
        ("int64", "datetime64[s]"),
        ("timedelta64[s]", "int64"),
        ("int8", "uint8"),
        ("int4", "uint4"),
    ],
)
def test_cast_never_leaves_its_category(saved: str, wanted: str, path: Path) -> None:
    treering.save(path, {"x": np.ones(2, jnp.dtype(saved) if "64[" not in saved else saved)})
    assert differences(path, {"x": np.ones(2, jnp.dtype(wanted) if "64[" not in wanted else wanted)}, cast=True)


def test_cast_turns_no_shape(path: Path) -> None:
    treering.save(path, {"x": np.ones((2, 1), "f4")})
    assert differences(path, {"x": np.ones((1, 2), "f8")}, cast=True)
    assert differences(path, {"x": np.ones(2, "f8")}, cast=True)


def test_a_difference_that_cast_would_mend_says_so(path: Path) -> None:
    treering.save(path, {"x": np.ones(2, "f4")})
    with pytest.raises(MismatchError, match="cast=True"):
        treering.load(path, {"x": np.ones(2, "f8")})


@pytest.mark.parametrize(
    ("saved", "like", "want"),
    [
        (3, 0.0, 3.0),
        (True, 0, 1),
        (2.5, 0j, 2.5 + 0j),
        (3, np.int32(0), np.int32(3)),
        (3, np.zeros((), "i8"), np.array(3)),
        (2.5, np.float32(0), np.float32(2.5)),
        (True, np.zeros((), bool), np.array(True)),
    ],
    ids=str,
)
def test_cast_of_numbers(saved: Any, like: Any, want: Any, path: Path) -> None:
    treering.save(path, {"n": saved})
    assert_same(treering.load(path, {"n": like}, cast=True)["n"], want)


def test_cast_of_a_number_into_a_jax_array(path: Path) -> None:
    treering.save(path, {"n": 3, "x": 2.5})
    found = treering.load(path, {"n": jnp.int32(0), "x": jnp.bfloat16(0)}, cast=True)
    assert_same(found, {"n": jnp.int32(3), "x": jnp.bfloat16(2.5)}, restored=False)


@pytest.mark.parametrize(
    ("saved", "like"), [(300, np.int8(0)), (2**70, np.int64(0)), (-1, np.uint8(0)), (2**40, jnp.int32(0))]
)
def test_a_number_that_does_not_fit_is_not_cut(saved: int, like: Any, path: Path) -> None:
    treering.save(path, {"n": saved})
    with pytest.raises(MismatchError, match=r"n: wanted uint8\[\], found int|does not fit int.*\(at leaf 'n'\)"):
        treering.load(path, {"n": like}, cast=True)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("saved", "like", "error"),
    [
        (2**60 + 1, 0.0, "the value 1152921504606846977 does not fit float"),
        (2**60 + 1, 0j, "the value 1152921504606846977 does not fit complex"),
        (2**5000, 0.0, "an int of 5001 bits does not fit float"),
        (2**5000, np.float32(0), "an int of 5001 bits does not fit float32"),
        (2**24 + 1, jnp.float32(0), "the value 16777217 does not fit float32"),
        (3, np.zeros((), jnp.float8_e8m0fnu), "the value 3 does not fit float8_e8m0fnu"),
        (500, np.zeros((), jnp.float8_e4m3fn), "the value 500 does not fit float8_e4m3fn"),
        (70_000, np.float16(0), "the value 70000 does not fit float16"),
        (2**2000, np.complex64(0), "an int of 2001 bits does not fit complex64"),
        (1e300, jnp.bfloat16(0), r"the value 1e\+300 does not fit bfloat16"),
        (
            np.array([[1.0, 2.0], [1e300, 2.0]]),
            np.zeros((2, 2), "f4"),
            r"value 1e\+300 at index \[1, 0\] does not fit f",
        ),
        (np.array([1, 2**53 + 1]), np.zeros(2), r"value 9007199254740993 at index \[1\] does not fit float64"),
        (np.array([2**24 + 1], "i4"), jnp.zeros(1), r"value 16777217 at index \[0\] does not fit float32"),
        (np.array([1 + 1e300j]), np.zeros(1, "c8"), r"value \(1\+1e\+300j\) at index \[0\] does not fit complex64"),
        (np.array(np.longdouble("1e4000")), 0.0, r"value 1e\+4000 does not fit float64"),
    ],
)
def test_a_cast_changes_no_value_beyond_rounding(saved: Any, like: Any, error: str, path: Path) -> None:
    treering.save(path, {"deep": {"n": saved}})
    with pytest.raises(MismatchError, match=rf"{error}.*\(at leaf 'deep/n'\)"):
        treering.load(path, {"deep": {"n": like}}, cast=True)


def test_an_index_of_a_value_counts_from_the_start_of_the_leaf(path: Path) -> None:
    numbers = np.ones((16, 4))
    numbers[13, 2] = 1e200
    treering.save(path, {"w": numbers})
    mesh = meshes.grid(4, 2)
    spec = jax.sharding.PartitionSpec("x", "y")
    like = jax.ShapeDtypeStruct((16, 4), "float32", sharding=jax.sharding.NamedSharding(mesh, spec))
    with pytest.raises(MismatchError, match=r"1e\+200 at index \[13, 2\]"):
        treering.load(path, {"w": like}, cast=True)


def test_a_cast_rounds(path: Path) -> None:
    saved: dict[str, Any] = {"a": np.array([0.1, np.inf, np.nan, 1e-300]), "n": 0.1, "i": 2**70, "long": 2**60}
    treering.save(path, saved)
    like: dict[str, Any] = {"a": np.zeros(4, "f4"), "n": np.float16(0), "i": 0.0, "long": np.float32(0)}
    found = treering.load(path, like, cast=True)
    with np.errstate(over="ignore", under="ignore"):
        assert np.array_equal(found["a"], saved["a"].astype("f4"), equal_nan=True)
    assert found["n"] == np.float16(0.1)
    assert (found["i"], int(found["long"])) == (2.0**70, 2**60)


@pytest.mark.parametrize(
    ("saved", "like"),
    [(2.5, 1), (1, False), (1j, 1.0), ("1", 1), (None, 0), (2.0, np.int32(0)), (np.array(5, "m8[s]"), 5)],
)
def test_cast_of_numbers_never_leaves_its_category(saved: Any, like: Any, path: Path) -> None:
    treering.save(path, {"n": saved})
    assert differences(path, {"n": like}, cast=True)


# ----------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.sampled(5)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0)], ids=str)
def test_typed_keys_come_back_as_keys(impl: str, shape: tuple[int, ...], path: Path) -> None:
    keys = jax.random.split(jax.random.key(7, impl=impl), shape) if shape else jax.random.key(7, impl=impl)
    treering.save(path, {"k": keys})
    for like in (keys, abstract(keys), jax.ShapeDtypeStruct(shape, keys.dtype)):
        assert_same(treering.load(path, {"k": like}), {"k": keys}, restored=False)
    assert_same(treering.load(path), {"k": keys}, restored=False)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("other", IMPLS)
def test_keys_of_another_implementation_do_not_fit(impl: str, other: str, path: Path) -> None:
    treering.save(path, {"k": jax.random.key(7, impl=impl)})
    like = {"k": abstract(jax.random.key(7, impl=other))}
    if impl == other:
        assert str(jax.random.key_impl(treering.load(path, like)["k"])) == impl
    else:
        (line,) = differences(path, like, cast=True)
        assert line == f"k: wanted key<{other}>[], found key<{impl}>[]"


def test_keys_of_another_shape_do_not_fit(path: Path) -> None:
    treering.save(path, {"k": jax.random.split(jax.random.key(7), 3)})
    (line,) = differences(path, {"k": jax.random.key(0)})
    assert line == "k: wanted key<threefry2x32>[], found key<threefry2x32>[3]"


# ------------------------------------------------------------------------------------------------------ missing, rename


def test_missing_leaves_are_kept_as_they_are(path: Path) -> None:
    treering.save(path, {"a": np.arange(3)})
    array, function = np.ones(2), functools.partial(max, 3)
    like = {"a": np.zeros(3, int), "b": array, "c": [None, 5, "t"], "f": function, "j": jnp.ones(2)}
    found = treering.load(path, like, missing="keep")
    assert_same(found["a"], np.arange(3))
    assert found["b"] is array
    assert found["c"] == [None, 5, "t"]
    assert found["f"] is function
    assert found["j"] is like["j"]


def test_an_abstract_leaf_has_nothing_to_keep(path: Path) -> None:
    treering.save(path, {"a": np.arange(3)})
    like = {"a": np.zeros(3, int), "b": jax.ShapeDtypeStruct((2,), "f4"), "k": abstract(jax.random.key(0))}
    lines = differences(path, like, missing="keep")
    assert [line.split(":")[0] for line in lines] == ["b", "k"]
    assert all("abstract" in line for line in lines)


def test_keeping_does_not_excuse_other_differences(path: Path) -> None:
    treering.save(path, {"a": np.arange(3), "old": 1})
    lines = differences(path, {"a": np.zeros(4, int), "new": 1}, missing="keep")
    assert [line.split(":")[0] for line in lines] == ["a", "old"]


def test_keeping_with_shardings_leaves_kept_arrays_where_they_are(path: Path) -> None:
    treering.save(path, {"a": np.arange(8.0, dtype="f4")})
    kept = jax.device_put(jnp.ones(3), jax.devices()[2])
    rows = NamedSharding(meshes.line(), PartitionSpec("x"))
    found = treering.load(path, {"a": jnp.zeros(8), "b": kept}, missing="keep", shardings=rows)
    assert found["b"] is kept
    assert found["a"].sharding == rows


def test_leaves_are_found_under_other_names(path: Path) -> None:
    treering.save(path, {"old": {"w": 1, "b": 2}, "x": 3, "list": [4, {"deep": 5}]})
    like = {"new": {"w": 0, "b": 0}, "y": 0, "tuple": (0, {"deeper": 0})}
    rename = {"new": "old", "y": "x", "tuple": "list", "tuple/1/deeper": "list/1/deep"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StaticFieldsDifferWarning)
        found = treering.load(path, like, key_map=rename)
    assert found == {"new": {"w": 1, "b": 2}, "y": 3, "tuple": (4, {"deeper": 5})}


def test_two_leaves_change_places(path: Path) -> None:
    treering.save(path, {"a": {"x": 1}, "b": {"x": 2}})
    like = {"a": {"x": 0}, "b": {"x": 0}}
    assert treering.load(path, like, key_map={"a": "b", "b": "a"}) == {"a": {"x": 2}, "b": {"x": 1}}


def test_the_longest_renaming_counts_and_parts_are_whole_names(path: Path) -> None:
    treering.save(path, {"a": {"x": 1, "y": 2}, "ab": 3, "other": 4})
    like = {"q": {"x": 0, "y": 0}, "ab": 0}
    assert treering.load(path, like, key_map={"q": "a", "q/y": "other"}, only=["a/x", "other", "ab"]) == {
        "q": {"x": 1, "y": 4},
        "ab": 3,
    }


def test_names_with_slashes_are_renamed(path: Path) -> None:
    treering.save(path, {"a/b": 1, "~": 2, "": 3})
    like = {"c/d": 0, "e~f": 0, "g": 0}
    rename = {"c~1d": "a~1b", "e~0f": "~0", "g": "~"}
    assert treering.load(path, like, key_map=rename) == {"c/d": 1, "e~f": 2, "g": 3}


def test_branches_under_the_empty_key_are_renamed(path: Path) -> None:
    treering.save(path, {"": {"b": 1, "": 2}, "a": {"c": 3, "": 4}})
    like = {"q": {"b": 0, "": 0}, "": {"c": 0, "": 0}}
    assert treering.load(path, like, key_map={"q": "~", "~": "a"}) == {"q": {"b": 1, "": 2}, "": {"c": 3, "": 4}}
    assert treering.load(path, {"": 0, "b": 0}, key_map={"": "~"}, extra="ignore") == {"": 2, "b": 1}
    treering.save(path, {"": 5}, overwrite=True)
    assert treering.load(path, {"q": {"": 0}}, key_map={"q": ""}) == {"q": {"": 5}}


def test_all_of_like_lies_below_a_branch(path: Path) -> None:
    treering.save(path, {"params": {"w": 1}, "step": 5})
    assert treering.load(path, {"w": 0}, key_map={"": "params"}, only="params") == {"w": 1}
    assert treering.load(path, {"model": {"w": 0}}, key_map={"model": ""}, at="params") == {"model": {"w": 1}}
    assert treering.load(path, 0, key_map={"": "step"}, only="step") == 5


@pytest.mark.parametrize("rename", [{"nothing": "a"}, {"a/b": "a"}, {"a": "nothing"}], ids=str)
def test_a_renaming_that_leads_nowhere_is_an_error(rename: dict[str, str], path: Path) -> None:
    treering.save(path, {"a": 1})
    with pytest.raises(MismatchError, match=r"nothing|a/b"):
        treering.load(path, {"a": 0}, key_map=rename)


@pytest.mark.parametrize(
    "options", [{"key_map": {"a": "b"}}, {"cast": True}, {"missing": "keep"}, {"missing": "ignore"}], ids=str
)
def test_what_needs_like_says_so(options: dict[str, Any], path: Path) -> None:
    treering.save(path, {"a": 1})
    with pytest.raises(UnsupportedError, match=r"like|missing"):
        treering.load(path, **options)


def test_an_unknown_missing_is_refused(path: Path) -> None:
    treering.save(path, {"a": 1})
    with pytest.raises(UnsupportedError, match="ignore"):
        treering.load(path, {"a": 1}, missing="ignore")  # type: ignore[call-overload]


# --------------------------------------------------------------------------------------------------- functions, classes


class Activation(NamedTuple):
    function: Any
    weight: Any


def test_functions_come_from_like(path: Path) -> None:
    treering.save(path, Activation(jax.nn.relu, jnp.ones(2)))
    found = treering.load(path, Activation(jax.nn.relu, jnp.zeros(2)))
    assert found.function is jax.nn.relu
    assert_same(found.weight, jnp.ones(2), restored=False)


def test_another_function_is_a_warning_that_names_both(path: Path) -> None:
    treering.save(path, Activation(jax.nn.relu, jnp.ones(2)))
    with pytest.warns(StaticFieldsDifferWarning, match=r"function.*relu.*gelu") as caught:
        found = treering.load(path, Activation(jax.nn.gelu, jnp.zeros(2)))
    assert found.function is jax.nn.gelu
    assert [Path(warning.filename).name for warning in caught] == [Path(__file__).name]


def test_a_function_is_no_array(path: Path) -> None:
    treering.save(path, Activation(jax.nn.relu, jnp.ones(2)))
    assert len(differences(path, Activation(jnp.ones(2), jax.nn.relu))) == 2


def test_what_is_no_leaf_of_a_file_is_called_by_its_class(path: Path) -> None:
    treering.save(path, {"w": jnp.ones(2), "n": 3})
    said = differences(path, {"w": {1, 2}, "n": iter(())})
    assert said[0] == "w: wanted a set, found float32[2]"
    assert said[1].startswith("n: wanted a tuple_iterator")


def test_without_like_a_placeholder_names_the_function(path: Path) -> None:
    treering.save(path, {"f": jax.nn.relu, "w": 1})
    found = treering.load(path)
    assert "relu" in repr(found["f"])
    again = path.with_name("again")
    treering.save(again, found)
    assert treering.load(again, {"f": jax.nn.relu, "w": 0})["f"] is jax.nn.relu


@flax.struct.dataclass
class State:
    weight: Any
    rate: float = flax.struct.field(pytree_node=False, default=0.5)


def test_a_static_field_that_differs_is_a_warning(path: Path) -> None:
    treering.save(path, {"s": State(jnp.ones(2), 0.25)})
    with pytest.warns(StaticFieldsDifferWarning, match=re.escape("rate of ")) as caught:
        found = treering.load(path, {"s": State(jnp.zeros(2))})
    assert len(caught) == 1
    assert "0.25" in str(caught[0].message)
    assert found["s"].rate == 0.5
    assert_same(found["s"].weight, jnp.ones(2), restored=False)


def test_warnings_may_be_made_errors(path: Path) -> None:
    treering.save(path, {"s": State(jnp.ones(2), 0.25)})
    with warnings.catch_warnings():
        warnings.simplefilter("error", StaticFieldsDifferWarning)
        with pytest.raises(StaticFieldsDifferWarning):
            treering.load(path, {"s": State(jnp.zeros(2))})


@pytest.mark.slow
def test_a_model_and_its_optimizer(path: Path) -> None:
    model = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(0))
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-3, 10))
    state = {
        "model": model,
        "opt": optimizer.init(eqx.filter(model, eqx.is_array)),
        "key": jax.random.key(1),
        "step": 3,
    }
    treering.save(path, state)
    fresh = eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(5))
    like = {"model": fresh, "opt": optimizer.init(eqx.filter(fresh, eqx.is_array)), "key": jax.random.key(0), "step": 0}
    found = treering.load(path, like)
    assert_same_structure(found, state)
    assert_same(found["model"](jnp.ones(2)), model(jnp.ones(2)), restored=False)
    assert_same(jax.tree.leaves(found["opt"]), jax.tree.leaves(state["opt"]), restored=False)


def test_one_tree_for_another_container(path: Path) -> None:
    """Keys decide; another container of the same keys is a warning."""
    treering.save(path, {"t": (1, 2), "d": {"0": 3, "1": 4}})
    with pytest.warns(StaticFieldsDifferWarning, match="t: saved as tuple, like has list"):
        found = treering.load(path, {"t": [0, 0], "d": {0: 0, 1: 0}})
    assert found == {"t": [1, 2], "d": {0: 3, 1: 4}}


@pytest.mark.parametrize(
    ("saved", "like"),
    [
        ({}, {"a": 1}),
        ({"a": {}}, {"a": 1}),
        ({"a": 1}, {}),
        ({"a": 1}, {"a": {"b": 1}}),
        ([1], []),
        ({"a": {"b": 1}}, {"a": 1}),
    ],
    ids=str,
)
def test_a_container_is_no_leaf(saved: Any, like: Any, path: Path) -> None:
    treering.save(path, saved)
    assert differences(path, like)


@pytest.mark.parametrize("tree", [{}, [], (), 5, "text", {"a": {}, "b": [(), None]}], ids=str)
def test_small_trees_with_like(tree: Any, path: Path) -> None:
    treering.save(path, tree)
    assert_same(treering.load(path, tree), tree)
    assert_same(treering.load(path), tree)


def test_errors_before_anything_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences are found from the index: no array is read for them."""
    treering.save(path, {"a": np.zeros(100_000), "b": 1})
    spans = spans_read(monkeypatch)
    with pytest.raises(TreeringError):
        treering.load(path, {"a": np.zeros(100_000), "b": 1.5})
    assert spans == []
    treering.load(path, {"a": np.zeros(100_000), "b": 1})
    assert sum(count for _, count in spans) == 800_000
