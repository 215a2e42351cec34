"""create_sharding_tree_from_index: a place for every leaf of a leaves directory, before an array is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests import meshes
from tests.trees import Pair
from treering.errors import CorruptError, FormatError, MismatchError, NotFoundError, UnsupportedError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves
from treering.sharding import apply_sharding_tree, create_sharding_tree_from_index, validate_sharding_tree

MESH = meshes.line(axis="d")
GRID = meshes.grid(2, 4, axes=("dp", "tp"))
EVERYWHERE = NamedSharding(MESH, P())


def tree() -> dict[str, Any]:
    return {
        "w": jnp.ones((8, 2)),
        "l": [jnp.arange(8.0), jnp.float32(1)],
        "pair": Pair(jnp.ones(8), ()),
        "host": np.arange(3),
        "count": np.int64(3),
        "keys": jax.random.split(jax.random.key(0), 8),
        "layer.0": {"a/b": jnp.ones(8), "": jnp.ones(8)},
        "step": 7,
        "none": None,
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "ckpt"
    tree_serialize_leaves(folder, tree())
    return folder


def test_without_a_mesh_every_place_is_none(saved: Path) -> None:
    assert create_sharding_tree_from_index(saved) == {
        "w": None,
        "l": {"0": None, "1": None},
        "pair": {"left": None, "right": {}},
        "host": None,
        "count": None,
        "keys": None,
        "layer.0": {"a/b": None, "": None},
        "step": None,
        "none": None,
    }


def test_with_a_mesh_jax_arrays_are_replicated_and_numpy_stays(saved: Path) -> None:
    made = create_sharding_tree_from_index(saved, MESH)
    assert made["host"] is made["count"] is made["step"] is made["none"] is None
    places = [made["w"], *made["l"].values(), made["pair"]["left"], made["keys"], *made["layer.0"].values()]
    assert places == [EVERYWHERE] * 7


@pytest.mark.parametrize("default", [P("d", None), NamedSharding(MESH, P("d", None))], ids=["spec", "sharding"])
def test_a_spec_is_cut_to_the_axes_that_there_are(saved: Path, default: Any) -> None:
    made = create_sharding_tree_from_index(saved, MESH, default_sharding=default)
    assert made["w"] == NamedSharding(MESH, P("d", None))
    assert made["l"] == {"0": NamedSharding(MESH, P("d")), "1": EVERYWHERE}
    assert made["keys"] == NamedSharding(MESH, P("d"))  # the data of a key has an axis more
    assert made["host"] == NamedSharding(MESH, P("d"))
    assert made["count"] == EVERYWHERE
    assert made["step"] is None


def test_other_shardings_are_taken_as_they_are(saved: Path) -> None:
    for default in (SingleDeviceSharding(jax.devices()[2]), jax.devices()[2]):
        assert create_sharding_tree_from_index(saved, default_sharding=default)["l"]["1"] is default
    kept = NamedSharding(GRID, P("tp"), memory_kind="device")
    assert create_sharding_tree_from_index(saved, default_sharding=kept)["w"] is kept


def test_a_function_gets_path_shape_and_dtype_of_every_array(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    tree_serialize_leaves(folder, {**tree(), "narrow": jnp.ones(2, jnp.uint4)}, prefix="model")
    seen: list[Any] = []

    def default(info: Any) -> Any:
        seen.append(info)
        return info["path"]

    made = create_sharding_tree_from_index(folder, prefix="model", default_sharding=default)
    assert made["l"] == {"0": "model/l/0", "1": "model/l/1"}
    assert made["step"] is None
    by_path = {info["path"]: info for info in seen}
    assert len(by_path) == len(seen) == 10
    assert by_path["model/w"] == {"path": "model/w", "shape": [8, 2], "dtype": "float32"}
    assert by_path["model/l/1"] == {"path": "model/l/1", "shape": [], "dtype": "float32"}
    assert by_path["model/count"] == {"path": "model/count", "shape": [], "dtype": "int64"}
    assert by_path["model/layer%2E0/a%2Fb"]["shape"] == [8]
    assert by_path["model/narrow"]["dtype"] == "uint4"
    assert by_path["model/keys"]["shape"] == [8]


def test_what_a_function_raises_is_not_hidden(saved: Path) -> None:
    def default(info: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        create_sharding_tree_from_index(saved, default_sharding=default)


@pytest.mark.parametrize("mesh", [None, MESH, GRID], ids=["no mesh", "1-d", "2-d"])
@pytest.mark.parametrize("prefix", [None, "model", "runs/a"])
def test_the_tree_goes_straight_into_the_loader(tmp_path: Path, mesh: Mesh | None, prefix: str | None) -> None:
    folder = tmp_path / "ckpt"
    tree_serialize_leaves(folder, tree(), prefix=prefix)
    shardings = create_sharding_tree_from_index(folder, mesh, prefix)
    loaded = tree_deserialize_leaves(folder, mesh, prefix=prefix, shardings=shardings)
    assert validate_sharding_tree(shardings, loaded)
    assert validate_sharding_tree(shardings, tree())
    assert type(loaded["host"]) is np.ndarray
    assert loaded["step"] == 7
    if mesh is not None:
        assert loaded["w"].sharding == loaded["l"]["1"].sharding == NamedSharding(mesh, P())
    exact = tree_deserialize_leaves(folder, mesh, prefix=prefix, shardings=shardings, structure="exact")
    assert type(exact["l"]) is list
    assert validate_sharding_tree(shardings, exact)


def test_a_divided_tree_goes_into_the_loader_and_onto_arrays(saved: Path) -> None:
    def by_rows(info: Any) -> Any:
        return P("d") if info["shape"][:1] == [8] else None

    shardings = create_sharding_tree_from_index(saved, MESH, default_sharding=by_rows)
    loaded = tree_deserialize_leaves(saved, MESH, shardings=shardings)
    assert loaded["w"].sharding == NamedSharding(MESH, P("d"))
    assert loaded["keys"].sharding == NamedSharding(MESH, P("d"))
    assert loaded["l"]["1"].sharding == EVERYWHERE
    narrow = {key: leaf for key, leaf in tree().items() if key not in ("host", "count")}
    places = {key: place for key, place in shardings.items() if key in narrow}
    placed = apply_sharding_tree(narrow, places, MESH)
    assert placed["pair"].left.sharding == NamedSharding(MESH, P("d"))
    assert placed["step"] == 7


@pytest.mark.parametrize("prefix", [None, "p"])
def test_a_bare_array_has_a_bare_place(tmp_path: Path, prefix: str | None) -> None:
    folder = tmp_path / "ckpt"
    tree_serialize_leaves(folder, jnp.ones(8), prefix=prefix)
    made = create_sharding_tree_from_index(folder, MESH, prefix, P("d"))
    assert made == NamedSharding(MESH, P("d"))
    assert tree_deserialize_leaves(folder, MESH, prefix=prefix, shardings=made).sharding == made


def test_an_empty_tree_has_an_empty_tree(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "ckpt", {})
    assert create_sharding_tree_from_index(tmp_path / "ckpt", MESH) == {}


def test_prefixes_are_found_and_others_named(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    tree_serialize_leaves(folder, {"w": jnp.ones(8)}, prefix="model")
    tree_serialize_leaves(folder, {"mu": jnp.ones(8)}, prefix="runs.opt")
    assert create_sharding_tree_from_index(folder, prefix="model") == {"w": None}
    assert create_sharding_tree_from_index(folder, MESH, "runs.opt") == {"mu": EVERYWHERE}
    with pytest.raises(ValueError, match=r"'nope'; there are 'model', 'runs.opt'"):
        create_sharding_tree_from_index(folder, prefix="nope")
    with pytest.raises(MismatchError, match=r"only trees with prefixes: 'model', 'runs.opt'"):
        create_sharding_tree_from_index(folder)


@pytest.mark.parametrize("version", ["1.0", "2.0", "0.0.101", None])
def test_every_version_of_the_index_is_read(saved: Path, version: str | None) -> None:
    path = saved / "tensorstore_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    if version is None:
        del index["version"]
    else:
        index["version"] = version
    path.write_text(json.dumps(index), encoding="utf-8")
    assert create_sharding_tree_from_index(saved)["w"] is None


def test_an_index_of_nothing_is_no_tree(tmp_path: Path) -> None:
    index = tmp_path / "tensorstore_index.json"
    index.write_text('{"format": "tensorstore", "version": "2.0", "prefixes": {}}', encoding="utf-8")
    with pytest.raises(MismatchError, match="lists no tree"):
        create_sharding_tree_from_index(tmp_path)
    index.write_text('{"format": "something", "version": "2.0"}', encoding="utf-8")
    with pytest.raises(FormatError, match="something"):
        create_sharding_tree_from_index(tmp_path)
    index.write_text('{"format": "tensor', encoding="utf-8")
    with pytest.raises(CorruptError):
        create_sharding_tree_from_index(tmp_path)


def test_a_missing_index_is_not_found(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(NotFoundError) as caught:
            create_sharding_tree_from_index(folder)
        assert isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize("default", ["d", 3, {"w": EVERYWHERE}, ("d",)], ids=repr)
def test_what_is_no_sharding_is_refused(saved: Path, default: Any) -> None:
    with pytest.raises(UnsupportedError, match="default_sharding is a"):
        create_sharding_tree_from_index(saved, MESH, default_sharding=default)


def test_a_spec_of_other_axes_than_the_mesh_is_refused(saved: Path) -> None:
    with pytest.raises(MismatchError, match=r"default_sharding does not fit the mesh.*nope"):
        create_sharding_tree_from_index(saved, MESH, default_sharding=P("nope"))


def test_a_spec_without_a_mesh_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match="needs a mesh; pass mesh="):
        create_sharding_tree_from_index(saved, default_sharding=P("d"))
    with pytest.raises(UnsupportedError, match="mesh is a str"):
        create_sharding_tree_from_index(saved, "d")  # type: ignore[arg-type]


def test_defaults_that_are_no_sharding_are_refused(tmp_path: Path) -> None:
    mesh = meshes.grid(2, 4)
    tree_serialize_leaves(tmp_path / "a", {"w": jnp.ones((8, 8))})
    with pytest.raises(MismatchError, match="default_sharding does not fit the mesh"):
        create_sharding_tree_from_index(tmp_path / "a", mesh, default_sharding=P("x", "x"))
    with pytest.raises(UnsupportedError, match="default_sharding is a Mesh"):
        create_sharding_tree_from_index(tmp_path / "a", mesh, default_sharding=mesh)
    with pytest.raises(MismatchError, match=r"\bw: float32"):
        tree_deserialize_leaves(tmp_path / "a", mesh, partition_rules=[("w", P("x", "x"))])


def test_specs_that_name_reduced_axes(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = P("x", None, reduced={"y"})
    tree = {"w": jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, spec)), "v": jnp.ones(8)}
    tree_serialize_leaves(tmp_path / "a", tree)
    assert tree_deserialize_leaves(tmp_path / "a", target=tree)["w"].sharding == tree["w"].sharding
    places = create_sharding_tree_from_index(tmp_path / "a", mesh, default_sharding=spec)
    assert places["w"].spec == spec
    assert places["v"].spec == P("x", reduced={"y"})
    with pytest.raises(MismatchError, match=r"w: .*is for partial sums"):
        tree_deserialize_leaves(tmp_path / "a", mesh, partition_rules=[(".*", P("x", unreduced={"y"}))])
