"""What ``save_pytree`` of eformer 0.0.101 wrote: arrays, and a file of pickles that are never unpickled.

The golden tree, under the prefix ``model`` with the extras ``{"epoch": 3}``, is ``{"layers": [{"kernel": arange(6) as
(2, 3) of float32, "bias": None}, {"kernel": ones((2, 3), bfloat16)}], "step": 70000, "rate": 0.5, "small": 7, "wide":
2**40, "minus": -3, "on": True, "name": "adam", "shape": (1, 2), "kind": {"a": b"x"}}``; under ``opt`` it is
``{"mu": zeros(4)}``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering
from treering.checkpoint import OpaqueLeaf
from treering.errors import CorruptError, TreeringError

GOLDEN = Path(__file__).parent / "golden" / "eformer_structured"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "structured"))


def change(folder: Path, **members: Any) -> None:
    file = folder / "model_structure.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | members))


def test_leaves_that_are_no_arrays_come_from_the_structure_file() -> None:
    found = treering.load(GOLDEN)
    assert found["opt"].keys() == {"mu"}
    model = found["model"]
    np.testing.assert_array_equal(model["layers"]["0"].pop("kernel"), np.arange(6, dtype=np.float32).reshape(2, 3))
    np.testing.assert_array_equal(model["layers"]["1"].pop("kernel"), np.ones((2, 3), jnp.bfloat16))
    unknown = "20 bytes, which treering does not unpickle"
    assert model.pop("wide") == OpaqueLeaf("pickle", unknown)
    assert isinstance(model.pop("kind")["a"], OpaqueLeaf)
    assert model == {
        "layers": {"0": {"bias": None}, "1": {}}, "step": 70000, "rate": 0.5, "small": 7, "minus": -3, "on": True,
        "name": "adam", "shape": {"0": 1, "1": 2},
    }  # fmt: skip


def test_the_verbs_say_what_it_is() -> None:
    listing = treering.inspect(GOLDEN)
    assert listing.written == {"by": "eformer 0.0.101"}
    assert "70000" in str(listing)
    assert listing.metadata == {"model": {"epoch": 3}}
    assert treering.verify(GOLDEN).ok
    with treering.open(GOLDEN) as opened:
        assert opened.metadata == {"model": {"epoch": 3}}
        assert opened["model/layers/0/kernel"][1, 2] == 5
    assert treering.abstract(GOLDEN, only="model/layers/**") == {
        "model": {
            "layers": {
                "0": {"kernel": jax.ShapeDtypeStruct((2, 3), "float32"), "bias": None},
                "1": {"kernel": jax.ShapeDtypeStruct((2, 3), "bfloat16")},
            }
        }
    }


def test_the_containers_come_from_like() -> None:
    kernel = jax.ShapeDtypeStruct((2, 3), "float32")
    like = {"layers": [{"kernel": kernel, "bias": None}, {"kernel": jax.ShapeDtypeStruct((2, 3), "bfloat16")}]}
    found: Any = treering.load(GOLDEN, {**like, "shape": (0, 0), "step": 0}, at="model", extra="ignore")
    assert (found["shape"], found["step"], found["layers"][0]["bias"]) == ((1, 2), 70000, None)


def test_a_structure_file_of_another_save_says_nothing(folder: Path) -> None:
    change(folder, array_relpaths=["model/layers/0/kernel"])
    assert treering.load(folder)["model"].keys() == {"layers"}
    change(folder, format="another")
    assert treering.load(folder)["model"].keys() == {"layers"}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("arr_mask", lambda mask: mask[1:]),
        ("arr_mask", lambda mask: [1, *mask[1:]]),
        ("leaf_keys_full", lambda keys: [3, *keys[1:]]),
        ("leaf_keys_full", lambda keys: ["model.layers.0.kernel.x", *keys[1:]]),
        ("leaf_keys_full", lambda keys: ["../x", *keys[1:]]),
        ("nonarray_payload", lambda _: {}),
        ("nonarray_payload", lambda payload: payload | {"0": "%%"}),
        ("array_relpaths", lambda _: None),
        ("extras", lambda _: 3),
    ],
)
def test_a_damaged_structure_file_is_an_error(folder: Path, name: str, make: Callable[[Any], Any]) -> None:
    change(folder, **{name: make(json.loads((folder / "model_structure.json").read_bytes())[name])})
    with pytest.raises(CorruptError):
        treering.load(folder)


def test_what_is_cut_off_or_a_link_is_an_error(folder: Path, tmp_path: Path) -> None:
    file = folder / "model_structure.json"
    moved = file.rename(tmp_path / "outside.json")
    file.symlink_to(moved)
    with pytest.raises(TreeringError):
        treering.load(folder)
    file.unlink()
    file.write_bytes(moved.read_bytes()[:-30])
    with pytest.raises(CorruptError, match=r"model_structure\.json"):
        treering.load(folder)


class _Attack:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (_Attack, "ran", True)


def test_nothing_is_unpickled(folder: Path) -> None:
    attack = base64.b64encode(pickle.dumps(_Attack())).decode()
    node = json.loads((folder / "model_structure.json").read_bytes())
    change(folder, treedef_b64=attack, nonarray_payload=dict.fromkeys(node["nonarray_payload"], attack))
    assert isinstance(treering.load(folder)["model"]["step"], OpaqueLeaf)
    assert not _Attack.ran


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path_factory.mktemp("shared") / "structured"))


def loaded_pickle(folder: Path, data: bytes) -> Any:
    """Load a leaf whose pickle has these bytes."""
    node = json.loads((folder / "model_structure.json").read_bytes())
    change(folder, nonarray_payload=dict.fromkeys(node["nonarray_payload"], base64.b64encode(data).decode()))
    return treering.load(folder, at="model/step")


@hypothesis.given(
    st.none() | st.booleans() | st.integers(-(2**33), 2**33) | st.floats(allow_nan=False) | st.text(max_size=80),
    st.integers(2, pickle.HIGHEST_PROTOCOL),
)
@hypothesis.example(0x94, 4)
@hypothesis.example(0x2E, 4)
@hypothesis.example("\x94.", 4)
def test_a_value_is_the_one_that_was_pickled_or_unknown(shared: Path, value: Any, protocol: int) -> None:
    found = loaded_pickle(shared, pickle.dumps(value, protocol))
    if isinstance(found, OpaqueLeaf):
        assert protocol < 4 or (type(value) is int and not -(2**31) <= value < 2**31) or type(value) is str
    else:
        assert (type(found), found) == (type(value), value)


@hypothesis.given(st.binary(max_size=20).map(lambda tail: b"\x80\x04" + tail))
def test_any_bytes_are_a_value_or_unknown(shared: Path, data: bytes) -> None:
    with contextlib.suppress(CorruptError):
        assert isinstance(loaded_pickle(shared, data), None | bool | int | float | str | OpaqueLeaf)
