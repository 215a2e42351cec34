"""Where arrays of a leaves directory go: meshes, rules, shardings flat and nested, functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests import meshes
from tests.trees import assert_same
from treering.errors import MismatchError, UnsupportedError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves
from treering.sharding import create_sharding_tree_from_index

LINE = meshes.line(axis="d")
GRID = meshes.grid(2, 4, axes=("dp", "tp"))

TREE: dict[str, Any] = {
    "dense": {"kernel": jnp.arange(64.0).reshape(8, 8), "bias": jnp.arange(8.0)},
    "norm": [jnp.ones(8), jnp.float32(3)],
    "host": np.arange(8, dtype="i4"),
    "table": np.array([1, 2, 3], "f4"),
    "step": 3,
    "layer.0": jnp.zeros(8),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shardings") / "ckpt"
    tree_serialize_leaves(path, TREE)
    tree_serialize_leaves(path, TREE, prefix="model")
    return path


def placed(tree: Any) -> dict[str, Any]:
    """The spec of each jax array on a mesh, else its sharding; "host" for numpy arrays."""
    found = {}
    for key, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(key, simple=True, separator="/")
        if isinstance(leaf, jax.Array):
            found[name] = getattr(leaf.sharding, "spec", leaf.sharding)
        elif isinstance(leaf, np.ndarray):
            found[name] = "host"
    return found


REPLICATED = {
    "dense/kernel": P(),
    "dense/bias": P(),
    "norm/0": P(),
    "norm/1": P(),
    "host": "host",
    "table": "host",
    "layer.0": P(),
}


# --------------------------------------------------------------------------------------------------------------- meshes


def test_one_axis_replicates(saved: Path) -> None:
    found = tree_deserialize_leaves(saved, LINE)
    assert placed(found) == REPLICATED
    assert found["dense"]["kernel"].sharding == NamedSharding(LINE, P())
    assert_same(jax.device_get(found["dense"]), jax.device_get(TREE["dense"]))


def test_several_axes_without_a_sharding_name_the_keys(saved: Path) -> None:
    with pytest.raises(
        MismatchError, match=r"'dp', 'tp'.*dense/kernel, dense/bias, norm/0, norm/1, layer\.0;"
    ) as caught:
        tree_deserialize_leaves(saved, GRID)
    assert caught.value.differences == ("dense/kernel", "dense/bias", "norm/0", "norm/1", "layer.0")
    with pytest.raises(ValueError, match=r"norm/1, layer\.0;"):
        tree_deserialize_leaves(saved, GRID, shardings={"dense": P("dp"), "norm.0": P("tp")})


def test_no_mesh_is_the_default_device(saved: Path) -> None:
    found = tree_deserialize_leaves(saved, None, prefix="model")
    assert found["dense"]["kernel"].devices() == {jax.devices()[0]}


# ---------------------------------------------------------------------------------------------------------------- rules


def test_rules_are_found_in_keys_with_slashes_and_without_prefix(saved: Path) -> None:
    rules = [("^dense/kernel$", P("dp", "tp")), (re.compile("bias|layer.0"), P("tp")), ("^norm/0", P("dp"))]
    for prefix in (None, "model"):
        found = tree_deserialize_leaves(saved, GRID, prefix=prefix, partition_rules=rules)
        assert placed(found) == REPLICATED | {
            "dense/kernel": P("dp", "tp"),
            "dense/bias": P("tp"),
            "layer.0": P("tp"),
            "norm/0": P("dp"),
        }
        assert_same(jax.device_get(found["dense"]), jax.device_get(TREE["dense"]))


def test_a_rule_on_what_has_no_axes_replicates_it(saved: Path) -> None:
    rules = [("table", P()), (".*", P("d"))]
    found = tree_deserialize_leaves(saved, LINE, partition_rules=rules, report=lambda _: None)
    assert found["norm"]["1"].sharding == NamedSharding(LINE, P())
    assert found["norm"]["0"].sharding == NamedSharding(LINE, P("d"))


def test_a_rule_for_a_numpy_leaf_puts_it_on_devices(saved: Path) -> None:
    found = tree_deserialize_leaves(saved, LINE, partition_rules=[("host", P("d")), ("dense|norm|layer", P())])
    assert found["host"].sharding == NamedSharding(LINE, P("d"))
    assert type(found["table"]) is np.ndarray


def test_arrays_without_a_rule_are_all_named(saved: Path) -> None:
    with pytest.raises(
        MismatchError, match=r"Partition rule not found for param: dense/bias, and for 2 more: norm/0, layer\.0"
    ):
        tree_deserialize_leaves(saved, GRID, partition_rules=[("kernel", P("dp"))])


def test_rules_win_over_shardings_for_every_array(saved: Path) -> None:
    found = tree_deserialize_leaves(saved, LINE, partition_rules=[("", P())], shardings={"norm.0": P("d")})
    assert found["norm"]["0"].sharding == NamedSharding(LINE, P())


def test_rules_need_a_mesh(saved: Path) -> None:
    with pytest.raises(UnsupportedError, match="mesh"):
        tree_deserialize_leaves(saved, partition_rules=[(".*", P("d"))])


def test_a_shape_that_cannot_be_divided_so_is_named(saved: Path) -> None:
    with pytest.raises(MismatchError, match=r"table: float32\[3\]: axis 0 of length 3 is not divisible by 8"):
        tree_deserialize_leaves(saved, LINE, partition_rules=[(".*", P("d"))])


# ------------------------------------------------------------------------------------------------------------ shardings

ROWS = NamedSharding(LINE, P("d"))
FORMS: dict[str, Any] = {
    "flat": {"dense.kernel": ROWS, "norm.0": ROWS},
    "nested": {"dense": {"kernel": ROWS}, "norm": {"0": ROWS}},
    "lists as they were": {"dense": {"kernel": ROWS}, "norm": [ROWS, None]},
    "both": {"dense.kernel": ROWS, "norm": {"0": ROWS}},
    "specs": {"dense.kernel": P("d"), "norm.0": P("d")},
    "functions": {"dense.kernel": lambda key, aval: P("d") if key == "dense.kernel" and aval.shape == (8, 8) else None,
                  "norm.0": lambda _key, _aval: ROWS},
    "a function": lambda key, aval: P("d") if key in ("dense.kernel", "norm.0") and aval.shape[0] == 8 else None,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("prefix", [None, "model"])
@pytest.mark.parametrize("form", FORMS)
def test_shardings_of_every_form(form: str, prefix: str | None, saved: Path) -> None:
    found = tree_deserialize_leaves(saved, LINE, prefix=prefix, shardings=FORMS[form])
    assert placed(found) == REPLICATED | {"dense/kernel": P("d"), "norm/0": P("d")}
    assert_same(jax.device_get(found["dense"]), jax.device_get(TREE["dense"]))


def test_a_branch_counts_for_all_below_and_the_nearest_wins(saved: Path) -> None:
    given = {"dense": P("dp"), "dense.bias": P("tp"), "norm": P(), "layer.0": P()}
    found = tree_deserialize_leaves(saved, GRID, shardings=given)
    assert placed(found)["dense/kernel"] == P("dp")
    assert placed(found)["dense/bias"] == P("tp")


def test_one_for_all_is_for_numpy_too(saved: Path) -> None:
    found = tree_deserialize_leaves(saved, shardings=SingleDeviceSharding(jax.devices()[3]))
    arrays = [leaf for leaf in jax.tree.leaves(found) if hasattr(leaf, "dtype")]
    assert len(arrays) == 7
    assert all(leaf.devices() == {jax.devices()[3]} for leaf in arrays)
    assert tree_deserialize_leaves(saved, shardings=jax.devices()[2])["host"].devices() == {jax.devices()[2]}


def test_a_numpy_leaf_goes_on_devices_when_it_is_named(saved: Path) -> None:
    found = tree_deserialize_leaves(saved, LINE, shardings={"host": P("d")})
    assert found["host"].sharding == ROWS
    assert type(found["table"]) is np.ndarray


def test_a_key_with_a_dot_is_found_by_its_text(saved: Path) -> None:
    found = tree_deserialize_leaves(saved, LINE, shardings={"layer.0": P("d")})
    assert found["layer.0"].sharding == ROWS


@pytest.mark.parametrize(
    ("shardings", "words"),
    [
        ({"dense.kernl": ROWS}, r"'dense.kernl' \(did you mean 'dense.kernel'\?\)"),
        ({"dens": ROWS}, r"'dens' \(did you mean 'dense'\?\)"),
        ({"dense/kernel": ROWS}, "'dense/kernel'.*flat with dots"),
        ({"model.dense.kernel": ROWS}, "'model.dense.kernel'.*without the prefix"),
        ({"dense": {"kernel": {"w": ROWS}}, "x": ROWS}, "'dense.kernel.w'.*, 'x'"),
        ({"norm.2": ROWS}, "'norm.2'"),
        ({"": ROWS}, "''"),
    ],
    ids=["mistyped", "a mistyped branch", "slashes", "with the prefix", "below a leaf", "past the end", "empty"],
)
def test_a_key_that_fits_no_leaf_is_named(shardings: Any, words: str, saved: Path) -> None:
    with pytest.raises(MismatchError, match=words):
        tree_deserialize_leaves(saved, LINE, prefix="model", shardings=shardings)


def test_a_bare_array_takes_a_bare_sharding_or_the_empty_key(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, jnp.arange(8))
    for shardings in (ROWS, {"": ROWS}, lambda key, _aval: ROWS if key == "" else None):
        assert tree_deserialize_leaves(tmp_path, shardings=shardings).sharding == ROWS


@pytest.mark.parametrize(
    "given", ["d", 3, LINE, {"dense.kernel": "d"}, {"dense.kernel": 3}, lambda _key, _aval: "d"], ids=range(6)
)
def test_what_is_no_sharding_is_refused(given: Any, saved: Path) -> None:
    with pytest.raises(UnsupportedError, match="not a sharding"):
        tree_deserialize_leaves(saved, LINE, shardings=given)


def test_rules_in_place_of_shardings_are_refused_with_a_hint(saved: Path) -> None:
    with pytest.raises(UnsupportedError, match="partition_rules="):
        tree_deserialize_leaves(saved, LINE, shardings=[(".*", P("d"))])


def test_a_spec_needs_a_mesh(saved: Path) -> None:
    with pytest.raises(UnsupportedError, match="mesh"):
        tree_deserialize_leaves(saved, shardings={"norm.0": P("d")})


def test_what_a_function_raises_goes_through(saved: Path) -> None:
    def fails(_key: str, _aval: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tree_deserialize_leaves(saved, shardings=fails)


@pytest.mark.parametrize("prefix", [None, "model"])
def test_the_tree_made_from_the_index_goes_straight_in(prefix: str | None, saved: Path) -> None:
    replicated = create_sharding_tree_from_index(saved, LINE, prefix)
    assert placed(tree_deserialize_leaves(saved, LINE, prefix=prefix, shardings=replicated))["dense/kernel"] == P()
    unsaid = create_sharding_tree_from_index(saved, prefix=prefix)
    assert placed(tree_deserialize_leaves(saved, LINE, prefix=prefix, shardings=unsaid)) == REPLICATED


# --------------------------------------------------------------------------------------------------------- any grid


SPREAD = {
    "replicated": NamedSharding(GRID, P()),
    "rows": NamedSharding(GRID, P("dp")),
    "both": NamedSharding(GRID, P("dp", "tp")),
    "turned": NamedSharding(GRID, P("tp", "dp")),
    "flat": NamedSharding(GRID, P(("dp", "tp"))),
    "one": SingleDeviceSharding(jax.devices()[6]),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("compressor", [None, {"id": "zstd", "level": 1}], ids=["raw", "zstd"])
@pytest.mark.parametrize("before", SPREAD)
def test_any_grid_loads_into_any_sharding(before: str, compressor: Any, tmp_path: Path) -> None:
    array = np.arange(8 * 16, dtype="f4").reshape(8, 16)
    chunk = 64 if before == "rows" else None
    tree = {"w": jax.device_put(array, SPREAD[before])}
    tree_serialize_leaves(tmp_path, tree, compressor=compressor, chunk_bytes=chunk)
    for after in SPREAD.values():
        found = tree_deserialize_leaves(tmp_path, shardings={"w": after})["w"]
        assert found.sharding == after
        assert_same(np.asarray(found), array)
