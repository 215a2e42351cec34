"""A tree that is loaded where it is stored, and initialised where it is not."""

from __future__ import annotations

import enum
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import treering as tr
from tests.on_disk import step_path
from treering.errors import CorruptError, LeavesInitialisedWarning, MismatchError, UnsupportedError


class Made:
    """An ``init_fn`` whose arrays tell when they are really made."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.shapes = shapes
        self.arrays: list[str] = []
        self.traces = 0

    def __call__(self) -> dict[str, jax.Array]:
        self.traces += 1
        return {name: self._made(name, shape) for name, shape in self.shapes.items()}

    def _made(self, name: str, shape: tuple[int, ...]) -> jax.Array:
        def note(value: np.ndarray) -> np.ndarray:
            self.arrays.append(name)
            return np.full_like(value, 7)

        return jax.pure_callback(note, jax.ShapeDtypeStruct(shape, jnp.float32), jnp.zeros(shape))


def resumed(path: Path | None, init_fn: Any, *, shardings: Any = None, mesh: Any = None) -> tuple[Any, tuple[str, ...]]:
    """Resume a run that has one step, or none."""
    run = tr.Run(Path(tempfile.gettempdir(), "no run is here") if path is None else path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", LeavesInitialisedWarning)
        found = run.load_or_init(init_fn, shardings=shardings, mesh=mesh)
    named = [line.strip() for one in told for line in str(one.message).splitlines()[1:]]
    assert named == (list(found.initialised) if found.step is not None else [])
    return found.tree, found.initialised


def mesh_of(*shape: int) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))


def test_without_a_checkpoint_everything_is_initialised() -> None:
    init_fn = Made(w=(2, 3), b=(3,))
    tree, initialised = resumed(None, init_fn)
    np.testing.assert_array_equal(tree["w"], np.full((2, 3), 7, np.float32))
    assert initialised == ("w", "b")
    assert sorted(init_fn.arrays) == ["b", "w"]


def test_what_is_stored_is_loaded_and_never_made(tmp_path: Path) -> None:
    tr.save(step_path(tmp_path / "a", 1), {"w": jnp.full((2, 3), 1.5), "b": jnp.arange(3.0)})
    init_fn = Made(w=(2, 3), b=(3,))
    tree, initialised = resumed(tmp_path / "a", init_fn)
    assert initialised == ()
    assert init_fn.arrays == []
    assert init_fn.traces == 1
    np.testing.assert_array_equal(tree["w"], np.full((2, 3), 1.5))
    assert isinstance(tree["w"], jax.Array)


def test_only_what_is_missing_is_made(tmp_path: Path) -> None:
    tr.save(step_path(tmp_path / "a", 1), {"w": jnp.full((2, 3), 1.5)})
    init_fn = Made(w=(2, 3), b=(3,), c=(4,))
    tree, initialised = resumed(tmp_path / "a", init_fn)
    assert initialised == ("b", "c")
    assert sorted(init_fn.arrays) == ["b", "c"]
    np.testing.assert_array_equal(tree["w"], np.full((2, 3), 1.5))
    np.testing.assert_array_equal(tree["c"], np.full(4, 7))


def test_every_array_lies_on_its_sharding_loaded_or_initialised(tmp_path: Path) -> None:
    mesh = mesh_of(4, 2)
    tr.save(step_path(tmp_path / "a", 1), {"params": {"w": jnp.ones((8, 2))}})
    rules = [("moment", PartitionSpec("x")), ("w$|v$", PartitionSpec("x", "y"))]
    init_fn = lambda: {"params": {"w": jnp.zeros((8, 2))}, "moment": jnp.zeros(8), "v": jnp.zeros((4, 4))}  # noqa: E731
    tree, initialised = resumed(tmp_path / "a", init_fn, shardings=rules, mesh=mesh)
    assert initialised == ("moment", "v")
    both = NamedSharding(mesh, PartitionSpec("x", "y"))
    assert tree["params"]["w"].sharding.is_equivalent_to(both, 2)
    assert tree["v"].sharding.is_equivalent_to(both, 2)
    assert tree["moment"].sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec("x")), 1)


def test_shardings_may_lead_to_different_devices_and_to_the_default_one(tmp_path: Path) -> None:
    first, second = jax.devices()[2], jax.devices()[3]
    mesh = mesh_of(2)
    shardings = {"a": first, "b": second, "c": NamedSharding(mesh, PartitionSpec("x")), "d": None}
    init_fn = lambda: {name: jnp.full(4, number) for number, name in enumerate("abcd")}  # noqa: E731
    tree, _ = resumed(None, init_fn, shardings=shardings)
    assert [tree[name].devices() for name in "abd"] == [{first}, {second}, {jax.devices()[0]}]
    assert tree["c"].sharding == NamedSharding(mesh, PartitionSpec("x"))
    assert not tree["d"].committed
    assert [int(tree[name][3]) for name in "abcd"] == [0, 1, 2, 3]


def test_meshes_with_the_devices_in_another_order_are_calls_of_their_own() -> None:
    devices = np.array(jax.devices()[:2])
    there, back = (jax.sharding.Mesh(order, ("x",)) for order in (devices, devices[::-1]))
    shardings = {"a": NamedSharding(there, PartitionSpec("x")), "b": NamedSharding(back, PartitionSpec("x"))}
    tree, _ = resumed(None, lambda: {"a": jnp.arange(4), "b": jnp.arange(4)}, shardings=shardings)
    assert [shard.device for shard in tree["b"].addressable_shards] == [devices[1], devices[0]]
    np.testing.assert_array_equal(tree["b"], np.arange(4))


def test_explicit_axes_say_where_an_array_goes(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    spec = PartitionSpec("x", "y")
    tr.save(step_path(tmp_path / "a", 1), {"w": jnp.ones((8, 2))})
    with jax.set_mesh(mesh):
        init_fn = lambda: {name: jnp.zeros((8, 2), out_sharding=spec) for name in "wv"}  # noqa: E731
        tree, initialised = resumed(tmp_path / "a", init_fn)
    assert initialised == ("v",)
    assert [tree[name].sharding == NamedSharding(mesh, spec) for name in "wv"] == [True, True]


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    tr.save(step_path(tmp_path / "a", 1), {"w": jnp.ones((2, 3)), "b": jnp.ones(3), "old": jnp.ones(1)})
    init_fn = lambda: {"w": jnp.zeros((3, 2)), "b": jnp.zeros(3, jnp.bfloat16), "new": jnp.zeros(9)}  # noqa: E731
    with pytest.raises(MismatchError) as caught:
        resumed(tmp_path / "a", init_fn)
    assert caught.value.differences == (
        "w: wanted float32[3, 2], found float32[2, 3]",
        "b: wanted bfloat16[3], found float32[3]",
        "old: unexpected, the checkpoint has float32[1]",
    )
    assert "between `init_fn` and the checkpoint" in str(caught.value)
    assert 'extra="ignore" ignores leaves that only the checkpoint has; with run.load(like=...): cast=True' in str(
        caught.value
    )


def test_a_leaf_that_was_renamed_is_named(tmp_path: Path) -> None:
    tr.save(step_path(tmp_path / "a", 1), {"dense": {"w": jnp.ones((2, 3))}})
    with pytest.raises(MismatchError) as caught:
        resumed(tmp_path / "a", lambda: {"dense1": {"w": jnp.zeros((2, 3))}})
    assert caught.value.differences == (
        "dense/w: unexpected, the checkpoint has float32[2, 3] (is it 'dense1/w' of `init_fn`?)",
    )
    assert "with run.load(like=...): key_map={wanted: saved} maps renamed leaves" in str(caught.value)


class State(NamedTuple):
    count: Any
    params: Any


class Act(enum.Enum):
    RELU = 1


def test_what_jax_does_not_trace_is_taken_as_it_is(tmp_path: Path) -> None:
    table = np.arange(3)
    init_fn = lambda: State(0, {"w": jnp.zeros(2), "table": table, "act": jax.nn.relu, "name": "a", "kind": Act.RELU})  # noqa: E731
    tree, initialised = resumed(None, init_fn)
    assert tree.count == 0
    assert type(tree.count) is int
    assert tree.params["table"] is table
    assert tree.params["act"] is jax.nn.relu
    assert tree.params["kind"] is Act.RELU
    assert initialised == ("count", "params/w", "params/table", "params/act", "params/name", "params/kind")

    tr.save(step_path(tmp_path / "a", 1), State(9, {**tree.params, "table": table + 1, "name": "b"}))
    again, initialised = resumed(tmp_path / "a", init_fn)
    assert initialised == ()
    assert isinstance(again, State)
    assert (again.count, again.params["name"]) == (9, "b")
    np.testing.assert_array_equal(again.params["table"], [1, 2, 3])
    assert isinstance(again.params["table"], np.ndarray)


def test_python_values_that_are_missing_are_initialised_too(tmp_path: Path) -> None:
    tr.save(step_path(tmp_path / "a", 1), {"w": jnp.ones(2)})
    tree, initialised = resumed(tmp_path / "a", lambda: {"w": jnp.zeros(2), "epoch": 3, "note": None})
    assert (tree["epoch"], tree["note"], initialised) == (3, None, ("epoch", "note"))


def test_a_count_that_jax_has_taken_over_is_loaded_where_init_fn_has_an_int(tmp_path: Path) -> None:
    tr.save(step_path(tmp_path / "a", 1), {"step": jnp.int32(7)})
    tree, initialised = resumed(tmp_path / "a", lambda: {"step": 0})
    assert (int(tree["step"]), initialised) == (7, ())


def test_typed_keys(tmp_path: Path) -> None:
    init_fn = lambda: {"key": jax.random.key(1), "keys": jax.random.split(jax.random.key(2), 3)}  # noqa: E731
    tr.save(step_path(tmp_path / "a", 1), {"key": jax.random.key(5)})
    tree, initialised = resumed(tmp_path / "a", init_fn)
    assert initialised == ("keys",)
    assert jax.random.key_data(tree["key"]).tolist() == jax.random.key_data(jax.random.key(5)).tolist()
    assert jax.random.key_data(tree["keys"]).tolist() == jax.random.key_data(init_fn()["keys"]).tolist()


def test_a_bare_array_and_an_empty_tree(tmp_path: Path) -> None:
    assert resumed(None, dict) == ({}, ())
    tree, initialised = resumed(None, lambda: jnp.arange(3))
    assert tree.tolist() == [0, 1, 2]
    assert initialised == ("",)
    tr.save(step_path(tmp_path / "a", 1), jnp.arange(4, 7))
    assert resumed(tmp_path / "a", lambda: jnp.arange(3))[0].tolist() == [4, 5, 6]


def test_what_is_initialised_is_what_the_function_gives() -> None:
    init_fn = lambda: {"a": jax.random.normal(jax.random.key(3), (4,)), "b": jax.random.uniform(jax.random.key(4))}  # noqa: E731
    tree, _ = resumed(None, init_fn)
    wanted = jax.jit(init_fn)()
    assert {name: np.asarray(x).tobytes() for name, x in tree.items()} == {
        name: np.asarray(x).tobytes() for name, x in wanted.items()
    }


def test_no_tracer_is_left_behind(tmp_path: Path) -> None:
    with jax.checking_leaks():
        tree, _ = resumed(None, lambda: {"w": jnp.zeros(2), "s": State(1, jnp.ones(1))})
    assert not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("init_fn", "told"),
    [
        ({"w": 1}, "init_fn is a dict"),
        (lambda: {"a": {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}}, "jax.ShapeDtypeStruct at 'a/w'"),
    ],
)
def test_what_is_no_init_fn_is_refused(init_fn: Any, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        resumed(None, init_fn)


def test_shardings_that_do_not_fit_are_told_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match=r"a: float32.* not divisible by 4"):
        resumed(tmp_path / "nothing there", lambda: {"a": jnp.zeros(3)}, shardings=PartitionSpec("x"), mesh=mesh_of(4))
    with pytest.raises(MismatchError, match="shardings has 'b'"):
        resumed(None, lambda: {"a": jnp.zeros(3)}, shardings={"a": None, "b": None})


def test_a_function_that_makes_another_tree_each_time_is_refused() -> None:
    names = iter(["a", "b"])
    with pytest.raises(MismatchError, match="another tree each time"):
        resumed(None, lambda: {next(names): jnp.zeros(2)})


def test_errors_of_the_function_and_of_the_checkpoint_pass(tmp_path: Path) -> None:
    def broken() -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        resumed(None, broken)
    tr.save(step_path(tmp_path / "a", 1), {"w": jnp.ones(1000)})
    (data,) = step_path(tmp_path / "a", 1).glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-8] + b"\x01" * 8)
    with pytest.raises(CorruptError):
        resumed(tmp_path / "a", lambda: {"w": jnp.zeros(1000)})


@pytest.mark.parametrize(
    "use", [int, bool, np.asarray, lambda one: [1, 2][one.astype(int)], lambda one: jnp.ones(2)[one > 0]]
)
def test_a_value_that_a_trace_lacks_is_explained(tmp_path: Path, use: Callable[[jax.Array], Any]) -> None:
    run = tr.Run(tmp_path / "r")
    with pytest.raises((TypeError, IndexError)) as caught:
        run.load_or_init(lambda: {"w": jnp.zeros(3), "i": use(jnp.ones(()))})
    assert any("treering traces the function that `load_or_init` is given" in note for note in caught.value.__notes__)


def test_values_that_are_needed_while_tracing_are_computed_below_a_context_of_jax(tmp_path: Path) -> None:
    def init() -> dict[str, Any]:
        with jax.ensure_compile_time_eval():
            count = int(jnp.ones(()))
        return {"w": jnp.zeros(count), "i": count}

    with tr.Run(tmp_path / "r") as run:
        assert run.load_or_init(init)[1]["i"] == 1
        run.save(1, init())
        assert run.load_or_init(init).step == 1
