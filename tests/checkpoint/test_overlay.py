"""load([base, adapter]): trees that lie over each other, in any forms; later ones win, and each leaf has an origin."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import meshes
from tests.drawn import drawn
from tests.trees import assert_unchanged
from treering.errors import CorruptError, MismatchError, NoSuchLeafError, NotFoundError, UnsupportedError

load: Any = tr.load  # what is loaded has the type of `like`, of `...` too


class Pair(NamedTuple):
    x: Any
    y: Any


class Other(NamedTuple):
    x: Any
    y: Any


def whole(number: float = 1.0) -> dict[str, Any]:
    return {
        "layers": [{"w": jnp.full(4, float(number)), "lora": jnp.full(2, -float(number))} for _ in range(3)],
        "pair": Pair(np.full(2, float(number)), 7),
        "key": jax.random.key(int(number)),
    }


@pytest.fixture(params=["disk", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "disk" else f"memory://{tmp_path.name}-over"


def test_later_ones_win(place: str) -> None:
    paths = [f"{place}/{name}" for name in ("base", "adapter", "one.safetensors")]
    tr.save(paths[0], whole(1), metadata={"a": 1, "b": 1})
    tr.save(paths[1], whole(2), only="**/lora", metadata={"b": 2})
    tr.save(paths[2], whole(3), only=["layers/1", "pair/x"])
    wanted = whole(1)
    for number, layer in enumerate(wanted["layers"]):
        layer["lora"] = jnp.full(2, -3.0 if number == 1 else -2.0)
    wanted["layers"][1]["w"] = jnp.full(4, 3.0)
    found = load(paths)
    assert_unchanged(found["layers"], wanted["layers"])
    assert found["pair"]._asdict() == {"x": pytest.approx([3, 3]), "y": 7}
    loaded = load(tuple(paths), whole(9))
    assert_unchanged(loaded, wanted | {"pair": Pair(np.full(2, 3.0), 7)})
    with tr.open(paths) as opened:
        assert {key: paths.index(opened.origin(key)) for key in opened} == {
            "layers/0/w": 0, "layers/0/lora": 1, "layers/1/w": 2, "layers/1/lora": 2, "layers/2/w": 0,
            "layers/2/lora": 1, "pair/x": 2, "pair/y": 0, "key": 0,
        }  # fmt: skip
        assert opened["layers/1/w"][1:3].tolist() == [3.0, 3.0]
        assert opened.metadata == {"a": 1, "b": 2}
        with pytest.raises(NoSuchLeafError, match="has no leaf 'layers/1/z'"):
            opened.origin("layers/1/z")
    shapes = tr.abstract(paths)
    assert shapes["layers"][1]["w"] == jax.ShapeDtypeStruct((4,), jnp.float32)
    assert shapes["pair"].y == 7


def test_one_path_in_a_list_is_that_path(place: str) -> None:
    tr.save(f"{place}/base", whole())
    assert_unchanged(load([f"{place}/base"]), load(f"{place}/base"))
    with tr.open([f"{place}/base"]) as opened, tr.open(f"{place}/base") as alone:
        assert opened.origin("pair/x") == alone.origin("pair/x") == f"{place}/base"


WRITERS: dict[str, Callable[[str, Any], object]] = {
    "hf": lambda path, tree: tr.export(path, tree, to="hf"),
    "orbax": lambda path, tree: tr.export(path, tree, to="orbax"),
    "leaves": tr.leaves.tree_serialize_leaves,
    "x.safetensors": tr.save,
    "x.msgpack": tr.save,
    "x.npz": tr.export,
    "ckpt": tr.save,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", WRITERS)
def test_every_form_that_is_read_may_lie_below(name: str, tmp_path: Path) -> None:
    base: dict[str, Any] = {"w": np.arange(6, dtype="f4").reshape(2, 3), "b": np.zeros(2, "f4")}
    paths = [str(tmp_path / name), str(tmp_path / "adapter")]
    WRITERS[name](paths[0], base)
    tr.save(paths[1], {"b": np.ones(2, "f4"), "lora": {"a": jnp.ones(3)}})
    found = load(paths, base | {"lora": {"a": jnp.zeros(3)}})
    assert found["w"].tolist() == base["w"].tolist()
    assert found["b"].tolist() == [1, 1]
    assert found["lora"]["a"].tolist() == [1, 1, 1]
    with tr.open(paths) as opened:
        assert [opened.origin(key) for key in ("w", "b", "lora/a")] == [paths[0], paths[1], paths[1]]
        assert opened["w"][1].tolist() == [3, 4, 5]
    assert load([paths[1], paths[0]])["b"].tolist() == [0, 0]


def test_names_of_a_flat_form_are_keys(tmp_path: Path) -> None:
    tr.export(tmp_path / "base.npz", {"a": {"w": np.ones(2), "v": np.ones(2)}})
    tr.save(tmp_path / "over", {"a": {"w": np.zeros(2)}})
    found = load([tmp_path / "base.npz", tmp_path / "over"])
    assert {key: array.tolist() for key, array in found["a"].items()} == {"w": [0, 0], "v": [1, 1]}
    assert load([tmp_path / "base.npz", tmp_path / "over"], {"a": ...})["a"].keys() == {"w", "v"}


def test_all_options_are_about_the_whole(place: str) -> None:
    paths = [f"{place}/base", f"{place}/adapter"]
    tr.save(paths[0], {"m": {"w": np.arange(8.0), "old": np.ones(3)}, "step": 1})
    tr.save(paths[1], {"m": {"w2": np.arange(8.0) + 100}, "lr": 0.5})
    assert list(load(paths, only="m/w*")["m"]) == ["w", "w2"]
    assert list(load(paths, at="m")) == ["w", "old", "w2"]
    split = NamedSharding(meshes.line(), P("x"))
    like = {"m": {"w": jnp.zeros(8), "new": jnp.zeros(8)}, "lr": 0.0, "more": 3}
    found = load(
        paths, like, key_map={"m/new": "m/w2"}, extra="ignore", missing="keep", cast=True,
        shardings=lambda key, aval: split if key.startswith("m") else None,
    )  # fmt: skip
    assert found["m"]["new"].tolist() == list(range(100, 108))
    assert found["m"]["new"].sharding == found["m"]["w"].sharding == split
    assert (found["lr"], found["more"]) == (0.5, 3)
    rename = tr.KeyMap([tr.KeyRule("m/{k}", "model/{k}"), tr.KeyRule("{k**}", "{k**}", rest=True)])
    assert list(load(paths, key_map=rename)["model"]) == ["w", "old", "w2"]
    joined = tr.KeyMap([tr.KeyRule(["m/w", "m/w2"], "both", merge=0), tr.KeyRule("{k**}", "{k**}", rest=True)])
    with tr.open(paths, key_map=joined) as opened:
        assert opened["both"][1::8].tolist() == [1, 101]
        assert opened.origin("lr") == paths[1]
        with pytest.raises(MismatchError, match=r"the key map makes 'both' of leaves of .*base.*adapter"):
            opened.origin("both")
    mapped = load(paths, at="m", mapped=place.startswith("/"))
    assert mapped["w2"][0] == 100


def test_a_leaf_found_nowhere_names_all_paths(place: str) -> None:
    paths = [f"{place}/base", f"{place}/adapter"]
    tr.save(paths[0], {"w": np.ones(2)})
    tr.save(paths[1], {"lora": np.ones(2)})
    with pytest.raises(MismatchError) as caught:
        load(paths, {"w": np.ones(2), "lora": np.ones(2), "other": np.ones(2)})
    assert f"between `like` and the checkpoints {paths[0]!r} and {paths[1]!r}:" in str(caught.value)
    assert "other: missing" in str(caught.value)
    for options in ({"only": "nothing"}, {"at": "nothing"}):
        with pytest.raises(MismatchError, match=rf"the checkpoints {paths[0]!r} and {paths[1]!r}"):
            load(paths, **options)
    with pytest.raises(NotFoundError, match="nowhere"):
        load([paths[0], f"{place}/nowhere"])
    with pytest.raises(UnsupportedError, match="found an int"):
        load([paths[0], 3])
    with tr.open(paths) as opened, pytest.raises(NoSuchLeafError, match="has no leaf 'other'"):
        opened["other"]


@pytest.mark.parametrize(
    ("below", "above", "said"),
    [
        ({"a": Pair(1, 2)}, {"a": Other(1, 2)}, r"at 'a': .*base' has .*Pair and .*over' has .*Other"),
        ({"a": [1]}, {"a": (1,)}, r"has list and .* has tuple"),
        ({"a": {"b": 1}}, {"a": 2}, r"has dict and .* has a leaf"),
        ({"a": {"b": 1}}, {"a": {"b": {"c": 1}}}, r"at 'a/b': .*base' has a leaf and .*over' has dict"),
        ([1], (1,), r"at the root"),
    ],
)
def test_what_does_not_fit_is_named(below: Any, above: Any, said: str, tmp_path: Path) -> None:
    tr.save(tmp_path / "base", below)
    tr.save(tmp_path / "over", above)
    with pytest.raises(MismatchError, match=said):
        load([tmp_path / "base", tmp_path / "over"])


def test_a_dict_takes_the_class_of_the_other(tmp_path: Path) -> None:
    def over(below: Any, above: Any) -> Any:
        tr.save(tmp_path / "base", below, overwrite=True)
        tr.save(tmp_path / "over", above, overwrite=True)
        return load([tmp_path / "base", tmp_path / "over"])

    assert over(Pair(1, 2), {"y": 3})._asdict() == {"x": 1, "y": 3}
    assert over({"y": 3}, Pair(1, 2))._asdict() == {"x": 1, "y": 2}
    assert over([1, 2], {1: 5}) == [1, 5]
    assert over([1, 2], {"2": 5}) == [1, 2, 5]
    assert over([1, 2], {5: 5}) == {0: 1, 1: 2, 5: 5}
    assert over([1, 2], [3]) == [3, 2]
    assert over(Pair(1, 2), {"z": 3}) == {"x": 1, "y": 2, "z": 3}
    assert over({"a": None}, {"a": {"b": 1}}) == {"a": {"b": 1}}
    assert over({1: "int"}, {"1": "text"}) == {1: "text"}
    assert over({"a": {}}, {"b": {}}) == {"a": {}, "b": {}}
    assert over(1, 2) == 2


def test_like_gives_fields_that_the_base_did_not_have(tmp_path: Path) -> None:
    tr.save(tmp_path / "base", {"m": Pair(np.ones(2), 3)})
    tr.save(tmp_path / "over", {"m": {"x": np.zeros(2), "lora": 4}, "n": 1}, only="m/lora")
    found = load([tmp_path / "base", tmp_path / "over"], {"m": {"x": np.zeros(2), "y": 0, "lora": 0}})
    assert (found["m"]["x"].tolist(), found["m"]["y"], found["m"]["lora"]) == ([1, 1], 3, 4)


def test_damage_in_any_of_them_is_told(tmp_path: Path) -> None:
    paths = [tmp_path / "base", tmp_path / "over"]
    tr.save(paths[0], {"w": np.arange(100.0)})
    tr.save(paths[1], {"v": np.arange(100.0)})
    for path, name in zip(paths, "wv", strict=True):
        (file,) = path.glob("data-*")
        good = file.read_bytes()
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(CorruptError, match=f"leaf '{name}'"):
            load(paths)
        file.unlink()
        with pytest.raises(CorruptError, match="missing"):
            load(paths)
        file.write_bytes(good)
    assert len(load(paths)) == 2


@pytest.mark.parametrize("which", [0, 1])
def test_an_overwrite_of_any_of_them_begins_again(which: int, place: str) -> None:
    paths = [f"{place}/base", f"{place}/over"]
    for number, name in enumerate("ab"):
        tr.save(paths[number], {name: np.zeros(100_000)})
    calls = 0

    def overwrite(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            tr.save(paths[which], {"ab"[which]: np.ones(100_000)}, overwrite=True)

    found = load(paths, progress=overwrite)
    assert {key: set(array.tolist()) for key, array in found.items()} in (
        {"a": {0.0}, "b": {0.0}},
        {"a": {0.0}, "b": {0.0}} | {"ab"[which]: {1.0}},
    )


def test_progress_counts_all_of_them(place: str) -> None:
    paths = [f"{place}/base", f"{place}/over"]
    tr.save(paths[0], {"a": np.zeros(300_000)})
    tr.save(paths[1], {"b": np.zeros(200_000)})
    told: list[tuple[int, int]] = []
    load(paths, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (4_000_000, 4_000_000)
    assert told == sorted(told)


def test_many_leaves_over_each_other(tmp_path: Path) -> None:
    base = {f"l{number}": np.full(3, number) for number in range(5000)}
    tr.save(tmp_path / "base", base)
    tr.save(tmp_path / "over", {key: array + 1 for key, array in list(base.items())[::7]})
    found = load([tmp_path / "base", os.fspath(tmp_path / "over")])
    assert list(found) == list(base)
    assert all(found[key][0] == number + (number % 7 == 0) for number, key in enumerate(base))


def test_a_merge_is_a_conversion(tmp_path: Path) -> None:
    base = {"w": np.ones((4, 2), "f4"), "lora": np.zeros(2, "f4")}
    tr.export(tmp_path / "hf", base, to="hf")
    tr.save(tmp_path / "adapter", base | {"lora": np.ones(2, "f4")}, only="lora")
    for name in ("merged", "merged.safetensors"):
        tr.convert([tmp_path / "hf", tmp_path / "adapter"], tmp_path / name)
        assert load(tmp_path / name)["lora"].tolist() == [1, 1]
        assert "part:" not in str(tr.inspect(tmp_path / name))
        assert tr.verify(tmp_path / name).ok
    with tr.Run(tmp_path / "run") as run:
        run.save(1, base)
    with pytest.raises(UnsupportedError, match="is a run"):
        tr.convert([tmp_path / "hf", tmp_path / "run"], tmp_path / "no")


def test_states_of_processes_take_the_place_of_one_state(tmp_path: Path) -> None:
    states: list[Any] = [{"n": 1, "seed": 2}, tr.each({"n": 3}), tr.each({"n": 4, "more": 5})]
    for number, state in enumerate(states):
        tr.save(tmp_path / str(number), {"data": state, "w": number})
    for lower, upper in itertools.permutations(range(len(states)), 2):
        paths = [tmp_path / str(lower), tmp_path / str(upper)]
        found: Any = load(paths, {"data": tr.each(None), "w": 0})
        assert found["data"].item == (states[upper].item if upper else states[upper])
        with tr.open(paths) as opened:
            assert {opened.origin(key) for key in opened} == {str(paths[1])}
    with pytest.raises(MismatchError, match=r"nothing lies at 'more' in the checkpoints .*/1' and .*/2'"):
        load([tmp_path / "1", tmp_path / "2"], {"data": tr.each(None), "more": tr.each(None), "w": 0})


_TREES = st.recursive(
    st.integers(0, 9) | st.builds(lambda n: np.full(2, n), st.integers(0, 9)),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "c/d", "~", "*", "0", 7]), inner, min_size=1, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.lists(inner, min_size=1, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


@settings(max_examples=drawn(10), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=_TREES.map(lambda tree: {"root": tree, "more": [1, {"x": 2}]}), data=st.data())
def test_the_parts_of_a_tree_give_the_tree_again(tree: Any, data: st.DataObject, tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}-parts"
    tr.save(f"{place}/whole", tree, overwrite=True)
    with tr.open(f"{place}/whole") as opened:
        keys = [key.replace("*", "~2") for key in opened]
    first = data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=len(keys), unique=True))
    second = [key for key in keys if key not in first] + data.draw(
        st.lists(st.sampled_from(keys), max_size=2, unique=True)
    )
    paths = [f"{place}/first"]
    tr.save(paths[0], tree, only=first, overwrite=True)
    if second:
        paths.append(f"{place}/second")
        tr.save(paths[1], tree, only=second, overwrite=True)
    assert_unchanged(load(paths, tree), load(f"{place}/whole", tree))
    merged = load(paths)
    assert_unchanged(load(paths, ...), merged)
    with tr.open(paths) as opened, tr.open(f"{place}/whole") as whole_tree:
        assert set(opened) == set(whole_tree)
        assert all(opened.origin(key) == paths[-1] for key in opened if key.replace("*", "~2") in second)
