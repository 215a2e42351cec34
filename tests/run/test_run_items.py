"""Items of a step: saved together or not at all, and objects that give their state away and take it back."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from treering.errors import CorruptError, MismatchError, UnsupportedError


class Data:
    """An iterator whose state is a pytree of all kinds; it counts how often it was set."""

    def __init__(self, seed: int = 0) -> None:
        self.position = 0
        self.random = np.random.default_rng(seed)
        self.order = np.arange(10)
        self.key = jax.random.key(seed)
        self.times_set = 0

    def __next__(self) -> float:
        self.position += 1
        self.key, key = jax.random.split(self.key)
        return float(self.random.random() + jax.random.uniform(key) + self.order[self.position % 10])

    def get_state(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "random": self.random.bit_generator.state["state"]["state"].to_bytes(16, "little"),
            "increment": self.random.bit_generator.state["state"]["inc"].to_bytes(16, "little"),
            "order": self.order,
            "key": self.key,
            "nothing": {},
        }

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["nothing"] == {}
        self.position = state["position"]
        inner = dict(self.random.bit_generator.state)
        inner["state"] = {name: int.from_bytes(state[key], "little") for name, key in PARTS.items()}
        self.random.bit_generator.state = inner
        self.order = state["order"]
        self.key = state["key"]
        self.times_set += 1


PARTS = {"state": "random", "inc": "increment"}


class Frail:
    """One that cannot take its state."""

    def get_state(self) -> int:
        return 1

    def set_state(self, state: int) -> None:
        raise OverflowError(state)


@pytest.fixture
def run(tmp_path: Path) -> tr.Run:
    return tr.Run(tmp_path / "run")


def items(step: int, data: Any) -> dict[str, Any]:
    return {"state": {"w": jnp.full(3, step)}, "data": data, "config": {"rate": 3e-4, "layers": (4, 2)}}


def saved(run: tr.Run) -> Data:
    """Save items with an iterator that has given some; return one that goes on from there."""
    data = Data(1)
    for _ in range(3):
        next(data)
    run.save(1, items(1, data)).result(60)
    return data


def test_an_iterator_goes_on_where_it_was(run: tr.Run) -> None:
    data = saved(run)
    other = Data(2)
    loaded = run.load(like=items(0, other))
    assert list(loaded) == ["state", "data", "config"]
    assert loaded["data"] is other
    assert (loaded["state"]["w"].tolist(), loaded["config"]) == ([1, 1, 1], {"rate": 3e-4, "layers": (4, 2)})
    assert [next(other) for _ in range(20)] == [next(data) for _ in range(20)]
    assert other.times_set == 1


def test_the_state_is_what_it_was_when_it_was_saved(run: tr.Run) -> None:
    data = Data()
    with run:
        run.save(1, {"data": data})
        data.order += 7
        next(data)
    assert run.load()["data"]["order"].tolist() == list(range(10))
    assert run.load()["data"]["position"] == 0


def test_without_like_it_is_its_state(run: tr.Run) -> None:
    data = saved(run)
    loaded = run.load()
    assert list(loaded) == ["state", "data", "config"]
    assert loaded["data"]["position"] == 3
    assert loaded["data"]["random"] == data.get_state()["random"]
    assert jnp.issubdtype(loaded["data"]["key"].dtype, jax.dtypes.prng_key)


def test_an_object_may_be_all_of_it(run: tr.Run) -> None:
    data = Data(5)
    next(data)
    run.save(1, data).result(60)
    other = Data(6)
    assert run.load(like=other) is other
    assert next(other) == next(data)


def test_an_object_may_be_loaded_by_itself(run: tr.Run) -> None:
    data = saved(run)
    one, two = Data(3), Data(4)
    assert run.load(like=one, at="data") is one
    assert run.load(like={"data": two}, only="data/**")["data"] is two
    assert next(one) == next(two) == next(data)


def test_a_part_beside_an_object(run: tr.Run) -> None:
    saved(run)
    data = Data(3)
    loaded = run.load(like={"data": data, "state": {"w": jnp.zeros(3, int)}}, only=["state/**", "data"])
    assert (list(loaded), data.position) == (["data", "state"], 3)
    with pytest.raises(MismatchError, match="config/rate: unexpected"):
        run.load(like={"data": Data(), "state": {"w": jnp.zeros(3, int)}})


def test_a_part_of_a_state_is_refused(run: tr.Run) -> None:
    saved(run)
    data = Data(3)
    with pytest.raises(MismatchError, match="only= selects a part of 'data'"):
        run.load(like={"data": data}, only=["data/order"])
    with pytest.raises(MismatchError, match="only= selects a part of the tree"):
        run.load(like=data, only=["data/**"])
    assert data.times_set == 0


def test_several_objects_and_names_that_need_escapes(run: tr.Run) -> None:
    objects = {"a/b": Data(1), "a": Data(2), 3: Data(3), "~": Data(4), None: Data(5)}
    for count, data in enumerate(objects.values(), 1):
        data.position = count
    run.save(1, {**objects, "w": 1.5}).result(60)
    others = {name: Data() for name in objects}
    loaded = run.load(like={**others, "w": 0.0})
    assert loaded["w"] == 1.5
    assert [data.position for data in others.values()] == [1, 2, 3, 4, 5]


def test_a_renamed_object(run: tr.Run) -> None:
    saved(run)
    other = Data(2)
    config = {"rate": 0.0, "layers": (0, 0)}
    like: dict[str, Any] = {"config": config, "model": {"w": jnp.zeros(3, int)}, "batches": other}
    loaded = run.load(like=like, key_map={"batches": "data", "model": "state"})
    assert (loaded["batches"] is other, other.position) == (True, 3)
    assert loaded["model"]["w"].tolist() == [1, 1, 1]


def test_an_object_that_was_not_saved(run: tr.Run) -> None:
    run.save(1, {"w": 1.5}).result(60)
    data = Data()
    with pytest.raises(MismatchError, match="nothing lies at 'data'"):
        run.load(like={"w": 0.0, "data": data})
    loaded = run.load(like={"w": 0.0, "data": data}, missing="keep")
    assert (loaded, data.times_set) == ({"w": 1.5, "data": data}, 0)


def test_a_state_that_is_empty_is_a_state(run: tr.Run) -> None:
    class Empty:
        given: Any = None

        def get_state(self) -> dict[str, int]:
            return {}

        def set_state(self, state: dict[str, int]) -> None:
            self.given = state

    run.save(1, {"w": 1.5, "data": Empty()}).result(60)
    for missing in ("error", "keep"):
        data = Empty()
        run.load(like={"w": 0.0, "data": data}, missing=missing)
        assert data.given == {}


def test_nothing_is_set_unless_all_fits(run: tr.Run) -> None:
    saved(run)
    data = Data(2)
    with pytest.raises(MismatchError, match="state/w"):
        run.load(like={**items(0, data), "state": {"w": jnp.zeros(4)}})
    file = next((run.path / "step_00000001").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptError):
        run.load(like=items(0, data))
    assert data.times_set == 0


def test_what_an_object_raises_reaches_the_caller(run: tr.Run) -> None:
    run.save(1, {"frail": Frail(), "w": 1.5}).result(60)
    with pytest.raises(OverflowError):
        run.load(like={"frail": Frail(), "w": 0.0})

    class Broken(Frail):
        def get_state(self) -> int:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.save(2, {"broken": Broken()})
    run.wait()
    assert run.steps() == [1]


def test_all_items_or_none(run: tr.Run) -> None:
    with pytest.raises(UnsupportedError, match="config/f"):
        run.save(1, {"state": {"w": jnp.zeros(3)}, "data": Data(), "config": {"f": object()}})
    run.wait()
    assert not run.path.exists()


def test_objects_in_dicts_at_any_depth_take_their_states_back(run: tr.Run) -> None:
    train, other, left = (np.random.RandomState(seed) for seed in (3, 4, 5))
    run.save(1, {"loaders": {"a/b": {"train": train}, "eval": other}, "w": np.ones(2)}).result(60)
    fresh: dict[str, np.random.RandomState] = {name: np.random.RandomState(9) for name in ("train", "eval")}
    like: dict[str, Any] = {"w": np.zeros(2), "loaders": {"eval": fresh["eval"], "a/b": {"train": fresh["train"]}}}
    loaded = run.load(like=like)
    assert loaded["loaders"] == like["loaders"]
    assert (list(loaded), list(loaded["loaders"])) == (["w", "loaders"], ["eval", "a/b"])
    assert (fresh["train"].random(), fresh["eval"].random()) == (train.random(), other.random())
    with pytest.raises(MismatchError, match="loaders/test"):
        run.load(like={**like, "loaders": {**like["loaders"], "test": left}})
    resumed: Any
    latest, resumed = run.load_or_init(lambda: {"loaders": {"a/b": {"train": left}, "eval": other}, "w": np.ones(2)})
    assert latest == 1
    assert resumed["loaders"]["a/b"]["train"] is left


def test_classes_and_objects_in_lists_are_no_items(run: tr.Run) -> None:
    with pytest.raises(UnsupportedError, match="deeper/0"):
        run.save(1, {"deeper": [Data()]})
    assert not isinstance(random.Random(), tr.run.Stateful)
    assert isinstance(np.random.RandomState(), tr.run.Stateful)
    run.save(1, {"kind": Data}).result(60)  # a class is a setting: noted by name, and comes from `like`
    assert run.load(like={"kind": Data}) == {"kind": Data}


def test_the_generator_of_numpy_is_one(run: tr.Run) -> None:
    first, second = np.random.RandomState(3), np.random.RandomState(4)
    run.save(1, {"random": first}).result(60)
    run.load(like={"random": second})
    assert first.random() == second.random()


def test_shardings_are_for_the_rest(run: tr.Run) -> None:
    saved(run)
    mesh = jax.make_mesh((len(jax.devices()),), ("x",))
    data = Data()
    loaded = run.load(like=items(0, data), mesh=mesh)
    assert loaded["state"]["w"].sharding.mesh == mesh
    assert type(data.order) is np.ndarray
    assert isinstance(data.key.sharding, jax.sharding.SingleDeviceSharding)
    places = {"state": jax.devices()[-1], "data": None, "config": None}
    loaded = run.load(like=items(0, data), shardings=places)
    assert loaded["state"]["w"].devices() == {jax.devices()[-1]}


def test_progress_counts_all_of_it_once(run: tr.Run) -> None:
    saved(run)
    steps: list[tuple[int, int]] = []
    run.load(like=items(0, Data()), progress=lambda done, total: steps.append((done, total)))
    assert steps[-1][0] == steps[-1][1]
    assert len({total for _, total in steps}) == 1


@dataclasses.dataclass
class Loaders:
    train: Any


jax.tree_util.register_dataclass(Loaders, ["train"], [])


@pytest.mark.parametrize("holder", [lambda one: [one], lambda one: (one,), Loaders, lambda one: [{"train": one}]])
def test_an_iterator_that_other_containers_hold_is_refused_with_where_it_may_be(
    holder: Callable[[Any], Any], tmp_path: Path
) -> None:
    with tr.Run(tmp_path / "run") as run:
        with pytest.raises(
            UnsupportedError, match=r"keeps its state to itself \(at leaf 'loaders/.*only dicts lead to it"
        ):
            run.save(1, {"loaders": holder(Data())})
        run.save(1, {"loaders": {"train": {"of": Data()}}})
    with pytest.raises(UnsupportedError, match=r"treering\.Run saves its state"):
        tr.save(tmp_path / "checkpoint", {"data": Data()})


def test_load_without_a_run_says_who_restores_iterators(run: tr.Run) -> None:
    run.save(1, {"data": Data()})
    with pytest.raises(MismatchError, match=r"run\.load\(like=\.\.\.\) of a `treering\.Run` gives iterators"):
        tr.load(run.path, like={"data": Data()})
    with pytest.raises(MismatchError) as caught:
        tr.load(run.path, like={"other": 1})
    assert "iterators" not in str(caught.value)
