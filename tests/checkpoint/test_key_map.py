"""Checkpoints seen through a key map: what ``load`` and ``open`` give, and what they read for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import limits, reads
from treering import KeyMap, KeyRule
from treering.errors import CorruptError, MismatchError, UnsupportedError

NAMES = KeyMap([
    KeyRule("model.embed.weight", "embed/embedding"),
    KeyRule("model.layers.{i}.mlp.weight", "layers/mlp/kernel", stack={"i": 0}, transpose=(1, 0)),
    KeyRule(
        ("model.layers.{i}.q.weight", "model.layers.{i}.k.weight"), "layers/qk/kernel", stack={"i": 0},
        transpose=(1, 0), merge=1, sizes=(8, 4),
    ),
    KeyRule("model.rotary.{n}", None),
])  # fmt: skip


def _model() -> dict[str, Any]:
    random = np.random.default_rng(0)
    shapes = {"model.embed.weight": (16, 8), "model.rotary.freqs": (2,)}
    for i in range(3):
        shapes |= {f"model.layers.{i}.mlp.weight": (32, 8), f"model.layers.{i}.q.weight": (8, 8)}
        shapes |= {f"model.layers.{i}.k.weight": (4, 8)}
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def _mapped(model: dict[str, Any]) -> dict[str, Any]:
    layers = [{n: model[f"model.layers.{i}.{n}.weight"].T for n in ("mlp", "q", "k")} for i in range(3)]
    return {
        "embed": {"embedding": model["model.embed.weight"]},
        "layers": {
            "mlp": {"kernel": np.stack([layer["mlp"] for layer in layers])},
            "qk": {"kernel": np.stack([np.concatenate([layer["q"], layer["k"]], axis=1) for layer in layers])},
        },
    }


@pytest.fixture(params=["model.safetensors", "model"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    treering.save(tmp_path / request.param, _model())
    return tmp_path / str(request.param)


def _same(found: Any, wanted: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_load_gives_the_tree_of_the_map_and_save_brings_it_back(path: Path, tmp_path: Path) -> None:
    found = treering.load(path, key_map=NAMES)
    _same(found, _mapped(_model()))
    treering.save(tmp_path / "back", found)
    back = treering.load(tmp_path / "back", key_map=NAMES.inverse())
    _same(back, {name: array for name, array in _model().items() if "rotary" not in name})


def test_the_other_arguments_speak_of_the_new_tree(path: Path) -> None:
    wanted = _mapped(_model())
    kernel = jax.ShapeDtypeStruct((3, 8, 12), jnp.float32)
    _same(treering.load(path, only="**/mlp/*", key_map=NAMES), {"layers": {"mlp": wanted["layers"]["mlp"]}})
    found = treering.load(path, {"kernel": kernel}, at="layers/qk", key_map=NAMES)
    _same(found, {"kernel": wanted["layers"]["qk"]["kernel"]})
    with pytest.raises(
        MismatchError, match=r"kernel: wanted float32\[3,8,11\], found float32\[3,8,12\]|kernel: wanted"
    ):
        treering.load(path, {"kernel": jax.ShapeDtypeStruct((3, 8, 11), jnp.float32)}, at="layers/qk", key_map=NAMES)


def test_shards_of_the_new_tree_read_their_boxes_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    reads.act_before_plans(
        monkeypatch,
        lambda requests: asked.extend(
            int(np.prod([stop - start for start, stop in box])) for one in requests for box in one.boxes
        ),
    )
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    specs = {
        "embed": {"embedding": PartitionSpec("x")},
        "layers": {"mlp": {"kernel": PartitionSpec(None, None, "x")}, "qk": {"kernel": PartitionSpec(None, "x", None)}},
    }
    wanted = _mapped(_model())
    found = treering.load(path, key_map=NAMES, shardings=specs, mesh=mesh)
    _same(found, wanted)
    assert found["layers"]["mlp"]["kernel"].sharding == NamedSharding(mesh, PartitionSpec(None, None, "x"))
    assert sum(asked) == sum(array.size for array in jax.tree.leaves(wanted))


def test_open_shows_the_new_tree(path: Path) -> None:
    wanted = _mapped(_model())
    with treering.open(path, key_map=NAMES) as opened:
        assert sorted(opened) == ["embed/embedding", "layers/mlp/kernel", "layers/qk/kernel"]
        view = opened["layers/qk/kernel"]
        assert (view.shape, view.dtype) == ((3, 8, 12), np.float32)
        np.testing.assert_array_equal(view[1:, ::3, 5:11:2], wanted["layers"]["qk"]["kernel"][1:, ::3, 5:11:2])
        np.testing.assert_array_equal(opened["embed/embedding"][3], wanted["embed"]["embedding"][3])
        assert jax.tree.map(np.shape, opened.structure) == jax.tree.map(np.shape, wanted)


def test_large_leaves_pass_through_in_slabs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, slab_of_maps=128 << 10)
    big = np.arange(3 << 18, dtype=np.float32).reshape(1024, 768)
    treering.save(path, {"w": big}, overwrite=True)
    done: list[tuple[int, int]] = []
    found = treering.load(
        path, key_map=KeyMap([KeyRule("w", "w", transpose=(1, 0))]), progress=lambda *now: done.append(now)
    )
    _same(found, {"w": big.T})
    assert len(done) > 10
    assert done[-1] == (big.nbytes, big.nbytes)


def test_keys_and_python_values_get_other_keys(tmp_path: Path) -> None:
    state = {"rng": jax.random.key(7), "step": 3, "name": "x" * 10_000, "half": jnp.ones((2, 3), jnp.bfloat16)}
    treering.save(tmp_path / "a", state)
    rules = [KeyRule("half", "w", cast=("bfloat16", "float32"), transpose=(1, 0)), KeyRule("half", "v", copy=True)]
    names = KeyMap([KeyRule("rng", "state/rng"), KeyRule("{n}e", "state/{n}e"), KeyRule("step", "state/step"), *rules])
    found = treering.load(tmp_path / "a", key_map=names)
    assert (found["state"]["step"], found["state"]["name"]) == (3, state["name"])
    assert (found["state"]["rng"] == state["rng"]).all()
    assert (found["w"].dtype, found["w"].shape, found["v"].dtype) == (jnp.float32, (3, 2), jnp.bfloat16)
    assert isinstance(found["w"], jax.Array)


def test_a_cast_changes_no_number_by_more_than_rounding(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", {"w": np.array([1.0, 1e30], np.float32)})
    with pytest.raises(
        MismatchError, match=r"1e\+30 does not fit float16 \(at leaf 'v'\); the key map, or dtype=, casts it"
    ):
        treering.load(tmp_path / "a", key_map=KeyMap([KeyRule("w", "v", cast=("float32", "float16"))]))


def test_a_map_that_does_not_fit_is_refused_before_anything_is_read(path: Path) -> None:
    short = KeyMap(NAMES.rules[1:])
    with pytest.raises(MismatchError) as caught:
        treering.load(path, key_map=short)
    assert caught.value.differences == (
        "model.embed.weight: no rule names it; did you mean 'model.layers.{i}.mlp.weight'?",
    )
    with pytest.raises(MismatchError, match="no rule names it"):
        treering.open(path, key_map=short)
    with pytest.raises(
        UnsupportedError,
        match=r"key_map= is a KeyMap, or a dict of wanted to stored keys, found 'map.toml'; KeyMap.read reads",
    ):
        treering.load(path, key_map="map.toml")  # type: ignore[call-overload]


def test_damage_is_named_by_the_stored_key(tmp_path: Path) -> None:
    path = tmp_path / "a"
    treering.save(path, _model())
    (data,) = path.glob("*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CorruptError, match=r"leaf 'model\.layers\.\w+"):
        treering.load(path, key_map=NAMES)
