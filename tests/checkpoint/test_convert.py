"""What stands at a path, saved to another one in another form."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import treering
from tests.cli.command import here
from treering import KeyMap, KeyRule
from treering._arrays import source_arrays
from treering._arrays.source import Source
from treering._checkpoint import forms
from treering.errors import Busy, Corrupt, Exists, Mismatch, Unsupported

ARRAYS: dict[str, Any] = {
    "w": np.arange(200_000, dtype=np.float32).reshape(400, 500),
    "b": np.ones(3, np.int8),
    "empty": np.zeros((0, 3)),
    "scalar": np.array(2.5),
}


def _write(form: str, folder: Path) -> Path:
    path = folder / f"a{form}"
    if form == ".npz":
        file = io.BytesIO()
        np.savez(file, **ARRAYS)
        path.write_bytes(file.getvalue())
    elif form == ".leaves":
        treering.leaves.tree_serialize_leaves(path, ARRAYS)
    elif form == ".safetensors":
        path.write_bytes(safetensors.numpy.save(ARRAYS, {"format": "pt", "by": "someone"}))
    else:
        treering.save(path, ARRAYS)
    return path


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for key, array in wanted.items():
        here = np.asarray(found[key])
        assert (here.dtype, here.shape, here.tobytes()) == (array.dtype, array.shape, array.tobytes()), key


@pytest.mark.parametrize("form", ["", ".safetensors", ".msgpack", ".npz", ".leaves"])
@pytest.mark.parametrize("target", ["b", "b.safetensors"])
def test_every_array_is_the_same_in_every_form(
    form: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_arrays, "_PIECE_BYTES", 100_000)
    source = _write(form, tmp_path)
    treering.convert(source, tmp_path / target)
    _same(treering.load(tmp_path / target), ARRAYS)
    assert treering.verify(tmp_path / target).findings == ()
    if target.endswith(".safetensors"):
        _same(safetensors.numpy.load((tmp_path / target).read_bytes()), ARRAYS)


def test_a_checkpoint_keeps_all_that_it_has(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    spread = jax.device_put(jnp.arange(16.0), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    tree: dict[str, Any] = {
        "rng": jax.random.key(3),
        "w": [spread, (None, 7)],
        "text": "x" * 9000,
        "name": "a",
        "f": abs,
    }
    treering.save(tmp_path / "a", tree, metadata={"loss": 0.5})
    treering.convert(tmp_path / "a", tmp_path / "b", to="treering")
    found = treering.load(tmp_path / "b", tree)
    assert (found["w"][1], found["text"], found["name"], found["f"]) == ((None, 7), tree["text"], "a", abs)
    assert (found["rng"] == tree["rng"]).all()
    np.testing.assert_array_equal(found["w"][0], spread)
    with treering.open(tmp_path / "b") as opened:
        assert opened.metadata == {"loss": 0.5}
        assert opened["w/0"].sharding in {"PartitionSpec('x',) over x=4", "P('x',) over x=4"}
    assert treering.diff(tmp_path / "a", tmp_path / "b").differences == ()


def test_a_part_through_a_map_in_another_dtype(tmp_path: Path) -> None:
    layers = {f"h.{i}.w": np.full((2, 3), i + 0.1, np.float32) for i in range(3)}
    treering.save(tmp_path / "a.safetensors", {**layers, "n": np.arange(3), "x": np.ones(2)})
    names = KeyMap([KeyRule("h.{i}.w", "h/w", stack={"i": 0}, transpose=(1, 0)), KeyRule("{n}", "{n}")])
    treering.convert(tmp_path / "a.safetensors", tmp_path / "b", key_map=names, only=["h", "n"], dtype="bfloat16")
    found = treering.load(tmp_path / "b")
    stacked = np.stack([array.T for array in layers.values()])
    _same({"w": found["h"]["w"], "n": found["n"]}, {"w": stacked.astype(jnp.bfloat16), "n": np.arange(3)})
    treering.convert(tmp_path / "b", tmp_path / "c.safetensors", at="h")
    assert list(treering.load(tmp_path / "c.safetensors")) == ["w"]
    treering.save(tmp_path / "big", {"w": np.array([1e30])})
    with pytest.raises(Mismatch, match="1e\\+30 does not fit float16"):
        treering.convert(tmp_path / "big", tmp_path / "d", dtype="float16")
    assert not (tmp_path / "d" / "treering.json").exists()


def test_what_the_form_cannot_hold_is_listed_before_anything_is_written(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", {"w": np.ones(3), "step": 7, "name": "n", "rng": jax.random.key(0)})
    with pytest.raises(Unsupported) as caught:
        treering.convert(tmp_path / "a", tmp_path / "b.safetensors")
    assert all(f"leaf '{key}'" in str(caught.value) for key in ("step", "name", "rng"))
    assert not (tmp_path / "b.safetensors").exists()
    treering.save(tmp_path / "c", {"w": np.ones(3)}, metadata={"format": "x"})
    with pytest.raises(Unsupported, match="has the member 'format'"):
        treering.convert(tmp_path / "c", tmp_path / "b.safetensors")


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    treering.save(path, {"w": np.ones(3)})
    for target, given, problem in [
        ("b", {"to": "orbax"}, "is not a form that can be written"),
        ("b", {"to": "safetensors"}, "is not a path of the form safetensors"),
        ("b.msgpack", {}, "is not a path of the form treering"),
        ("b", {"dtype": "int8"}, "is not a dtype of floats"),
        ("b", {"key_map": "a"}, "key_map= is a treering.KeyMap"),
        ("a", {"overwrite": True}, "is source and target"),
    ]:
        with pytest.raises(Unsupported, match=problem):
            treering.convert(path, tmp_path / target, **given)  # type: ignore[arg-type]
    treering.save(tmp_path / "b", {})
    with pytest.raises(Exists):
        treering.convert(path, tmp_path / "b")
    with treering.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(3)})
    with pytest.raises(Unsupported, match="is a run; convert its steps"):
        treering.convert(tmp_path / "run", tmp_path / "d")


def test_a_damaged_source_is_not_converted(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", ARRAYS)
    (data,) = (tmp_path / "a").glob("*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(Corrupt, match="leaf 'w' is damaged"):
        treering.convert(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b" / "treering.json").exists()


def test_a_source_that_is_replaced_meanwhile_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(".npz", tmp_path)
    opened = forms.open_source

    def replaced(*given: Any, **named: Any) -> Source:
        source = opened(*given, **named)
        source.is_current = lambda: False
        return source

    monkeypatch.setattr("treering._checkpoint.convert.open_source", replaced)
    with pytest.raises(Busy, match="was replaced while it was being converted"):
        treering.convert(path, tmp_path / "b")
    assert not (tmp_path / "b" / "treering.json").exists()


def test_memory_holds_a_piece_of_a_leaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_arrays, "_PIECE_BYTES", 100_000)
    sizes: list[int] = []
    read = source_arrays.SourceArray._read

    def note(self: Any, boxes: Any) -> Any:
        sizes.append(sum(int(np.prod([stop - start for start, stop in box])) for box in boxes) * self.dtype.itemsize)
        return read(self, boxes)

    monkeypatch.setattr(source_arrays.SourceArray, "_read", note)
    treering.convert(_write("", tmp_path), tmp_path / "b")
    assert len(sizes) > 8
    assert max(sizes) <= 100_000


def test_the_verb(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", {"p": {"w": np.ones((2, 3)), "v": np.ones(2)}, "step": 3})
    rules = tmp_path / "map.toml"
    rules.write_text("[[rule]]\nfrom = 'p/{n}'\nto = '{n}'\n[[rule]]\nfrom = 'step'\ndrop = true\n")
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "b.safetensors"), "--map", str(rules)]
    here(*arguments, "--only", "w", "--dtype", "float32", "--to", "safetensors", code=0)
    found = safetensors.numpy.load((tmp_path / "b.safetensors").read_bytes())
    assert {key: array.dtype.name for key, array in found.items()} == {"w": "float32"}
    assert "--overwrite replaces it" in here(*arguments, code=2).stderr
    here(*arguments, "--overwrite", code=0)
    assert sorted(safetensors.numpy.load((tmp_path / "b.safetensors").read_bytes())) == ["v", "w"]
