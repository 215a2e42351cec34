"""Every public function under every setting of jax that a program may have switched on around it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import meshes
from tests.caches import clear_caches
from treering import checkpoint, leaves, serialization, sharding, tree
from treering.errors import LeavesInitialisedWarning, MismatchError, NotShardedWarning, UnsupportedError

AXES = ("x", "y")
MESHES = {
    kind: Mesh(np.array(jax.devices()[:8]).reshape(4, 2), AXES, axis_types=(getattr(AxisType, kind),) * 2)
    for kind in ("Auto", "Explicit")
}
AUTO = MESHES["Auto"]
ROWS = NamedSharding(AUTO, P("x"))


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[None]:
    """Set options for all threads, as ``jax.config.update`` at the top of a program does."""
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


@contextlib.contextmanager
def entered(mesh: Mesh) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)


def abstract(kind: str) -> Any:
    return jax.sharding.use_abstract_mesh(AbstractMesh((4, 2), AXES, axis_types=(getattr(AxisType, kind),) * 2))


CONTEXTS: dict[str, Callable[[], Any]] = {
    "nothing": contextlib.nullcontext,
    "set_mesh Auto": lambda: jax.set_mesh(MESHES["Auto"]),
    "set_mesh Explicit": lambda: jax.set_mesh(MESHES["Explicit"]),
    "with mesh": lambda: entered(AUTO),
    "abstract Auto": lambda: abstract("Auto"),
    "abstract Explicit": lambda: abstract("Explicit"),
    "abstract Manual": lambda: abstract("Manual"),
    "x64": lambda: configured(jax_enable_x64=True),
    "debug_nans": lambda: configured(jax_debug_nans=True, jax_debug_infs=True),
    "strict": lambda: configured(
        jax_numpy_dtype_promotion="strict", jax_numpy_rank_promotion="raise", jax_debug_key_reuse=True
    ),
    "transfer guards": lambda: configured(jax_transfer_guard="disallow"),
    "transfer guards here": lambda: jax.transfer_guard("disallow"),
    "explicit transfer guards": lambda: jax.transfer_guard("disallow_explicit"),
    "disable_jit": lambda: configured(jax_disable_jit=True),
    "default_device": lambda: jax.default_device(jax.devices()[3]),
    "checks": lambda: configured(jax_enable_checks=True, jax_check_tracer_leaks=True),
}
CHEAP = ("set_mesh Explicit", "explicit transfer guards")


@dataclasses.dataclass(frozen=True)
class Scene:
    """What was made before the setting was switched on."""

    path: Path
    tree: Any
    like: Any
    file: bytes


def arrays() -> dict[str, Any]:
    return {
        "rows": jax.device_put(np.arange(16, dtype=np.float32).reshape(8, 2), ROWS),
        "columns": jax.device_put(
            np.arange(1 << 15, dtype=np.float32).reshape(8, -1), NamedSharding(AUTO, P(None, "y"))
        ),
        "nan": jnp.array([np.nan, np.inf, 1.0]),
        "half": jax.device_put(jnp.ones((4, 2), jnp.bfloat16), jax.devices()[1]),
        "narrow": jnp.arange(4, dtype=jnp.int4),
        "scalar": jnp.float32(2.5),
        "numpy": np.arange(5),
        "big": np.float64(0.5),
        "step": 7,
    }


def keyed_arrays() -> dict[str, Any]:
    return arrays() | {"key": jax.random.key(3)}


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    path = tmp_path_factory.mktemp("scene")
    made = arrays()
    keyed = keyed_arrays()
    tr.save(path / "a", keyed)
    tr.save(path / "b.msgpack", made)
    tr.save(path / "c.safetensors", {"w": made["rows"]})
    leaves.tree_serialize_leaves(path / "leaves", keyed)
    with tr.Run(path / "run") as run:
        run.save(1, keyed, metrics={"loss": 0.5})
    like = jax.tree.map(abstract_of, keyed)
    return Scene(path, keyed, like, serialization.to_bytes(made))


def abstract_of(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


def plain(scene: Scene) -> dict[str, Any]:
    return {key: leaf for key, leaf in scene.tree.items() if key != "key"}


def saved_and_loaded(s: Scene, to: Path) -> Any:
    tr.save(to / "a", s.tree)
    tr.save(to / "a.msgpack", plain(s))
    tr.save(to / "a.safetensors", {"w": s.tree["rows"], "v": s.tree["columns"]})
    return [tr.load(to / name) for name in ("a", "a.msgpack", "a.safetensors")]


def saved_async(s: Scene, to: Path) -> Any:
    trees = {"a": s.tree, "a.msgpack": plain(s), "a.safetensors": {"w": s.tree["rows"], "v": s.tree["columns"]}}
    for name, saved in trees.items():
        tr.save_async(to / name, saved).result()
    tr.export(to / "weights", trees["a.safetensors"], to="hf")
    return [tr.load(to / name) for name in (*trees, "weights")]


def saved_by_run(s: Scene, to: Path) -> Any:
    with tr.Run(to / "run", keep=tr.KeepLast(1)) as run:
        for step in (1, 2):
            run.save(step, s.tree, metrics={"loss": 1.0 / step})
        run.wait()
        run.gc(dry_run=False)
        branched = run.branch(2, to / "other")
        return [run.load(like=s.like), run.steps(), run.latest(), run.best("loss"), run.metrics(2), branched.steps()]


def initialised(s: Scene, to: Path) -> Any:
    def fresh() -> Any:
        return {"rows": jnp.zeros((8, 2), jnp.float32), "new": jnp.ones(3, jnp.float32), "n": 1}

    with tr.Run(to / "run") as run:
        first = run.load_or_init(fresh)
        run.save(3, {"rows": s.tree["rows"]})
    with tr.Run(to / "run") as run, pytest.warns(LeavesInitialisedWarning):
        return [first[0], jax.tree.map(np.asarray, [first[1], run.load_or_init(fresh)[1]])]


def opened(s: Scene, to: Path) -> Any:
    with tr.open(s.path / "a") as saved:
        return [saved["rows"][1:3], np.asarray(saved["half"]), saved["step"], repr(saved), list(saved)]


def serialised(s: Scene, to: Path) -> Any:
    leaves.tree_serialize_leaves(to / "l", s.tree, prefix="m", compressor={"id": "zstd", "level": 1})
    (to / "l" / "tensorstore_index.json").unlink()
    leaves.index_leaves(to / "l")
    return leaves.tree_deserialize_leaves(to / "l", prefix="m", x64="numpy")


def as_file(s: Scene, to: Path) -> Any:
    serialization.save_to_file(plain(s), to / "f")
    return [
        serialization.load_from_file(plain(s), to / "f", strict=True),
        serialization.load_from_file({"rows": 0}, to / "f", mapped=True)["rows"],
        serialization.from_bytes({"rows": 0, "half": 0}, s.file, to_jax=False)["half"],
    ]


def on_devices(s: Scene, to: Path) -> Any:
    wanted = {"rows": s.tree["rows"], "half": s.tree["half"], "nan": s.tree["nan"]}
    data = serialization.to_bytes(wanted)
    packed = serialization.to_compressed_bytes(wanted)
    return [
        serialization.from_bytes(wanted, data, to_jax=True),
        serialization.from_compressed_bytes(wanted, packed, shardings={"rows": ROWS, "half": None, "nan": None}),
    ]


def sharded(s: Scene, to: Path) -> Any:
    places = sharding.create_sharding_tree_from_index(s.path / "leaves", AUTO)
    narrow = {key: leaf for key, leaf in s.tree.items() if key not in ("numpy", "big")}
    own = {key: places[key] for key in narrow}
    return [
        places,
        sharding.validate_sharding_tree(places, s.tree),
        sharding.apply_sharding_tree(narrow | {"host": np.ones(4, np.float32)}, own | {"host": P("x")}, AUTO),
        sharding.apply_sharding_tree({"w": s.tree["columns"]}, {"w": P("x")}, AUTO),
    ]


ACTIONS: dict[str, Callable[[Scene, Path], Any]] = {
    "save load": saved_and_loaded,
    "save_async PendingSave": saved_async,
    "load like": lambda s, to: tr.load(s.path / "a", s.like),
    "load like arrays": lambda s, to: tr.load(s.path / "a", s.tree),
    "load shardings": lambda s, to: tr.load(
        s.path / "a", only=["rows", "half"], shardings={"rows": ROWS, "half": None}
    ),
    "load_async": lambda s, to: tr.load_async(s.path / "a", s.like).result(),
    "load mesh": lambda s, to: tr.load(s.path / "a", only="rows", mesh=AUTO, shardings=[("rows", P("x"))]),
    "load cast": lambda s, to: tr.load(
        s.path / "a",
        {"half": jax.ShapeDtypeStruct((4, 2), "float32"), "step": s.tree["scalar"]},
        cast=True,
        only=["half", "step"],
    ),
    "open": opened,
    "uncompared": lambda s, to: checkpoint.uncompared(s.tree),
    "abstract": lambda s, to: str(tr.abstract(s.path / "a", only=["half", "scalar"])),
    "convert": lambda s, to: tr.convert(s.path / "a", to / "c", only=["half", "scalar"]),
    "export": lambda s, to: tr.export(to / "e", {"half": s.tree["half"], "rows": s.tree["rows"]}),
    "inspect": lambda s, to: str(tr.inspect(s.path / "a")) and None,
    "verify": lambda s, to: tr.verify(s.path / "a").ok,
    "diff": lambda s, to: str(tr.diff(s.path / "a", s.path / "a")),
    "Run StandIn KeepLast KeepBest KeepEvery KeepSteps SaveEvery Stateful": saved_by_run,
    "Run.load_or_init": initialised,
    "tree_serialize_leaves index_leaves tree_deserialize_leaves": serialised,
    "tree_deserialize_leaves target": lambda s, to: leaves.tree_deserialize_leaves(
        s.path / "leaves", target=s.tree, x64="numpy"
    ),
    "tree_deserialize_leaves rules": lambda s, to: leaves.tree_deserialize_leaves(
        s.path / "leaves", AUTO, partition_rules=[("rows", P("x")), ("columns|nan|half|narrow|key", P())], x64="numpy"
    ),
    "is_array_like join_key leaf_key_paths": lambda s, to: [
        leaves.leaf_key_paths(s.tree),
        leaves.is_array_like(s.tree["rows"]),
        leaves.join_key("a", "b"),
    ],
    "create_sharding_tree_from_index apply_sharding_tree validate_sharding_tree": sharded,
    "make_itsharded": lambda s, to: sharding.make_itsharded(
        {"w": s.tree["scalar"], "c": s.tree["columns"], "n": 1}, AUTO
    ),
    "match_partition_rules": lambda s, to: sharding.match_partition_rules([(".*", P())], s.tree),
    "to_bytes from_bytes to_compressed_bytes from_compressed_bytes compress_bytes decompress_bytes": on_devices,
    "save_to_file load_from_file": as_file,
    "msgpack_serialize msgpack_restore": lambda s, to: serialization.msgpack_restore(
        serialization.msgpack_serialize(plain(s))
    ),
    "to_state_dict from_state_dict register_serialization_state is_serializable current_path": lambda s, to: (
        serialization.from_state_dict(s.tree, serialization.to_state_dict(s.tree))
    ),
    "validate_serializable get_serialization_info": lambda s, to: [
        serialization.validate_serializable(s.tree),
        serialization.get_serialization_info(s.tree),
    ],
    "tree_size tree_bytes tree_map_with_path": lambda s, to: [
        tree.tree_size(s.tree),
        tree.tree_bytes(s.tree),
        tree.tree_map_with_path(lambda path, x: x, s.tree),
    ],
}


def facts(x: Any) -> Any:
    """Return all that has to be the same whatever was switched on: values, dtypes, places."""
    if isinstance(x, dict):
        return {key: facts(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [facts(value) for value in x]
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        with jax.transfer_guard("allow"):
            return ("key", str(jax.random.key_impl(x)), np.asarray(jax.random.key_data(x)).tobytes())
    if isinstance(x, jax.Array):
        place = x.sharding if x.committed else None
        return ("jax", x.dtype.name, x.shape, place, np.asarray(x).tobytes())
    if isinstance(x, np.ndarray | np.generic):
        return (type(x).__name__, x.dtype.name, x.shape, x.tobytes())
    return x


@pytest.fixture(scope="module")
def wanted(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {name: facts(action(scene, tmp_path_factory.mktemp("w"))) for name, action in ACTIONS.items()}


@pytest.mark.parametrize(
    "context", [pytest.param(name, marks=() if name in CHEAP else pytest.mark.slow) for name in CONTEXTS]
)
def test_every_public_function_does_the_same(
    scene: Scene, wanted: dict[str, Any], context: str, tmp_path: Path
) -> None:
    clear_caches()  # a first call under this setting
    wrong = []
    left_out = ("Run.load_or_init",) if context == "abstract Explicit" else ()  # jax itself runs no program there
    for number, (name, action) in enumerate(ACTIONS.items()):
        if name in left_out:
            continue
        to = tmp_path / str(number)
        to.mkdir()
        # jax keeps the copy of an array that numpy once got, and then no guard sees a transfer.
        fresh = dataclasses.replace(scene, tree=keyed_arrays())
        try:
            with CONTEXTS[context]():
                found = action(fresh, to)
        except Exception as error:  # noqa: BLE001 - all of them are told
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            if facts(found) != wanted[name]:
                wrong.append(f"{name}: {facts(found)!s:.400}\n    without: {wanted[name]!s:.400}")
    assert not wrong, "\n".join(wrong)


def test_every_public_function_is_called_here() -> None:
    doors = (tr, checkpoint, leaves, serialization, sharding, tree)
    public = {name for door in doors for name in door.__all__ if inspect.isroutine(getattr(door, name))}
    words = {word for name in ACTIONS for word in name.split()}
    assert public - words == {
        "register_node",
        "bucket",
        "each",
    }  # note a class, a bucket or an item, and ask jax nothing


# ---------------------------------------------------------------------------------------- shardings without devices

SPEC = P("x", "y")
ON_ABSTRACT = NamedSharding(MESHES["Explicit"].abstract_mesh, SPEC)
UNREDUCED = NamedSharding(MESHES["Explicit"], P("x", unreduced={"y"}))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tr.save(tmp_path / "a", {"w": jnp.ones((8, 2)), "b": jnp.ones(8)})
    return tmp_path / "a"


def like(sharding: Any) -> dict[str, Any]:
    return {"w": jax.ShapeDtypeStruct((8, 2), "float32", sharding=sharding), "b": jax.ShapeDtypeStruct((8,), "float32")}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_what_eval_shape_gives_in_a_mesh_is_loaded_there(saved: Path, kind: str) -> None:
    mesh = MESHES[kind]
    with jax.set_mesh(mesh):
        made = lambda: {"w": jax.device_put(jnp.zeros((8, 2)), NamedSharding(mesh, SPEC)), "b": jnp.zeros(8)}  # noqa: E731
        found = tr.load(saved, jax.eval_shape(made))
    if kind == "Explicit":
        assert found["w"].sharding == NamedSharding(mesh, SPEC)
        assert found["b"].sharding == NamedSharding(mesh, P(None))
    assert float(np.asarray(found["w"]).sum()) == 16.0


def test_a_spec_of_like_is_meant_for_the_mesh_that_is_given(saved: Path) -> None:
    for given in (ON_ABSTRACT, NamedSharding(MESHES["Explicit"], SPEC)):
        found = tr.load(saved, like(given), mesh=AUTO)
        assert found["w"].sharding == NamedSharding(AUTO, SPEC)
        assert found["b"].sharding == NamedSharding(AUTO, P())
    other = meshes.line(2, axis="d")
    with pytest.raises(MismatchError, match=r"w: float32\[8, 2\]: the mesh has no axis 'x'"):
        tr.load(saved, like(ON_ABSTRACT), mesh=other)


def test_the_current_mesh_is_the_mesh_of_specs_and_of_abstract_shardings(saved: Path) -> None:
    mesh = MESHES["Explicit"]
    with jax.set_mesh(mesh):
        assert tr.load(saved, like(ON_ABSTRACT))["w"].sharding == NamedSharding(mesh, SPEC)
        assert tr.load(saved, only="w", shardings={"w": ON_ABSTRACT})["w"].sharding == NamedSharding(mesh, SPEC)
        assert tr.load(saved, only="w", shardings=P("y"))["w"].sharding == NamedSharding(mesh, P("y"))
    turned = Mesh(mesh.devices.T, AXES)
    with (
        jax.set_mesh(turned),
        pytest.raises(MismatchError, match=r"w: float32.*'x': 4, 'y': 2.*current one has.*'x': 2"),
    ):
        tr.load(saved, like(ON_ABSTRACT))


def test_a_sharding_that_no_array_can_have_is_refused_by_its_leaf(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"abstract mesh of \{'x': 4, 'y': 2\}, which has no devices \(at leaf 'w'\)"
    ):
        tr.load(saved, like(ON_ABSTRACT))
    with pytest.raises(UnsupportedError, match=r"\(at leaf 'w'\)"):
        tr.load(saved, shardings={"w": ON_ABSTRACT, "b": None})
    for asked in ({"like": like(UNREDUCED)}, {"shardings": {"w": UNREDUCED, "b": None}}):
        with pytest.raises(MismatchError, match=r"w: float32\[8, 2\]: .*partial sums"):
            tr.load(saved, **asked)
    tree_ = {"w": jnp.ones((8, 2)), "b": jnp.ones(8)}
    leaves.tree_serialize_leaves(tmp_path / "l", tree_)
    for given, error in ((ON_ABSTRACT, UnsupportedError), (UNREDUCED, MismatchError)):
        with pytest.raises(error, match="w"):
            leaves.tree_deserialize_leaves(tmp_path / "l", target=like(given))
        with pytest.raises(error, match=r"'w'|w: float32"):
            serialization.from_bytes(tree_, serialization.to_bytes(tree_), shardings={"w": given, "b": None})
        with pytest.warns(NotShardedWarning, match="w"):
            sharding.apply_sharding_tree(tree_, {"w": given, "b": None})
    with jax.set_mesh(MESHES["Explicit"]):
        found = leaves.tree_deserialize_leaves(tmp_path / "l", target=like(ON_ABSTRACT))
    assert found["w"].sharding == NamedSharding(MESHES["Explicit"], SPEC)


def test_an_array_of_partial_sums_is_not_saved(tmp_path: Path) -> None:
    mesh = MESHES["Explicit"]
    with jax.set_mesh(mesh):
        left = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P(None, "x")))
        right = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P("x", None)))
        partial = P(None, None, unreduced={"x"})
        sums = jax.jit(lambda a, b: jnp.dot(a, b, out_sharding=partial))(left, right)
        for save in (
            lambda tree: tr.save(tmp_path / "a", tree),
            lambda tree: tr.save_async(tmp_path / "a", tree),
            lambda tree: leaves.tree_serialize_leaves(tmp_path / "l", tree),
            serialization.to_bytes,
        ):
            with pytest.raises(UnsupportedError, match=r"partial sums.*'w'|'?w'?: .*partial sums"):
                save({"w": sums})


def test_a_first_save_while_a_function_is_traced(tmp_path: Path) -> None:
    clear_caches()
    weights = {"w": jnp.ones(8)}

    def traced(x: Any) -> Any:
        tr.save_async(tmp_path / "a", weights).result()
        return x + tr.load(tmp_path / "a")["w"]

    assert float(jax.jit(traced)(1.0)[0]) == 2.0
    inside = jax.shard_map(traced, mesh=AUTO, in_specs=P("x"), out_specs=P("x"))
    tr.save(tmp_path / "a", {"w": jnp.ones(8)}, overwrite=True)
    with contextlib.suppress(tr.errors.ExistsError):
        inside(jnp.ones(32))
