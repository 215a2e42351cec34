"""What stands at a path, saved to another one in another form."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import treering
from tests import faults, limits
from tests.command import here
from tests.trees import assert_same_arrays
from treering import KeyMap, KeyRule
from treering._arrays import source_arrays
from treering._arrays.source import Source
from treering._checkpoint import forms
from treering._checkpoint.forms import LOSSES
from treering._store import resolve
from treering.errors import BusyError, CorruptError, ExistsError, MismatchError, UnsupportedError

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


TARGETS: dict[str, Any] = {
    **dict.fromkeys(("b", "b.safetensors", "b.msgpack", "b.npz")),
    "hf": "hf",
    "leaves": "leaves",
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_callback_may_change_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    treering.export("a", ARRAYS, to="hf", max_file_size="100KB")

    def move(done: int, total: int) -> None:
        monkeypatch.chdir(tmp_path / "elsewhere")

    treering.convert("a", target, to=TARGETS[target], progress=move)
    monkeypatch.chdir(tmp_path)
    assert_same_arrays(treering.load("a", progress=move), ARRAYS)
    assert_same_arrays(treering.load(tmp_path / target), ARRAYS)


def _read_as_peers_do(path: Path) -> dict[str, Any]:
    """Read a file, or what is in a folder, with the library whose form it is."""
    if path.suffix == ".msgpack":
        return dict(flax.serialization.msgpack_restore(path.read_bytes()))
    if path.suffix == ".npz":
        return dict(np.load(io.BytesIO(path.read_bytes()), allow_pickle=False))
    files = [path] if path.suffix else sorted(path.glob("*.safetensors"))
    return {name: array for file in files for name, array in safetensors.numpy.load(file.read_bytes()).items()}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("form", ["", ".safetensors", ".msgpack", ".npz", ".leaves"])
@pytest.mark.parametrize("target", TARGETS)
def test_every_array_is_the_same_in_every_form(
    form: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.lower(monkeypatch, converted_piece=100_000)
    source = _write(form, tmp_path)
    treering.convert(source, tmp_path / target, to=TARGETS[target], lose="metadata")
    assert_same_arrays(treering.load(tmp_path / target), ARRAYS)
    assert treering.verify(tmp_path / target).findings == ()
    if target not in ("b", "leaves"):
        assert_same_arrays(_read_as_peers_do(tmp_path / target), ARRAYS)
    with pytest.raises(ExistsError):
        treering.convert(source, tmp_path / target, to=TARGETS[target], lose="metadata")


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
    assert_same_arrays({"w": found["h"]["w"], "n": found["n"]}, {"w": stacked.astype(jnp.bfloat16), "n": np.arange(3)})
    treering.convert(tmp_path / "b", tmp_path / "c.safetensors", at="h")
    assert list(treering.load(tmp_path / "c.safetensors")) == ["w"]
    treering.save(tmp_path / "big", {"w": np.array([1e30])})
    with pytest.raises(MismatchError, match="1e\\+30 does not fit float16"):
        treering.convert(tmp_path / "big", tmp_path / "d", dtype="float16")


def test_an_array_without_axes_is_cast_and_mapped(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", {"scale": jnp.float32(1.5), "host": np.array(2.5), "rows": np.arange(3.0)})
    treering.convert(tmp_path / "a", tmp_path / "b", dtype="bfloat16")
    found = treering.load(tmp_path / "b")
    assert [(found[key].dtype, found[key].shape, float(found[key])) for key in ("scale", "host")] == [
        (jnp.bfloat16, (), 1.5),
        (jnp.bfloat16, (), 2.5),
    ]
    apart = treering.KeyMap(
        [treering.KeyRule("rows", "row{i}", unstack={"i": 0}), treering.KeyRule("{x}", "{x}", rest=True)]
    )
    found = treering.load(tmp_path / "a", key_map=apart)
    assert [(found[f"row{i}"].shape, float(found[f"row{i}"])) for i in range(3)] == [((), 0.0), ((), 1.0), ((), 2.0)]
    assert not (tmp_path / "d" / "treering.json").exists()


def test_what_the_form_cannot_hold_is_listed_before_anything_is_written(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", {"w": np.ones(3), "step": 7, "name": "n", "rng": jax.random.key(0)})
    with pytest.raises(UnsupportedError) as caught:
        treering.convert(tmp_path / "a", tmp_path / "b.safetensors")
    assert all(f"leaf '{key}'" in str(caught.value) for key in ("step", "name", "rng"))
    assert not (tmp_path / "b.safetensors").exists()
    treering.save(tmp_path / "c", {"w": np.ones(3)}, metadata={"format": "x"})
    with pytest.raises(UnsupportedError, match="the member 'format' of the metadata"):
        treering.convert(tmp_path / "c", tmp_path / "b.safetensors")
    treering.convert(tmp_path / "c", tmp_path / "b.safetensors", lose="metadata")
    with treering.open(tmp_path / "b.safetensors") as opened:
        assert opened.metadata == {}


NESTED: dict[str, Any] = {
    "opt": [(np.arange(3.0), np.float32(2.5)), {}, ()],
    "p": {"w": np.arange(6, dtype=np.int16).reshape(2, 3), "half": jnp.ones(2, jnp.bfloat16)},
    "step": 7, "rate": 0.5, "flag": True, "none": None, "name": "a", "long": "y" * 9000, "raw": b"z", "z": 2j,
}  # fmt: skip


def test_flax_gets_the_bytes_that_it_writes_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    treering.save(tmp_path / "a", NESTED)
    treering.convert(tmp_path / "a", tmp_path / "b.msgpack", to="flax")
    assert (tmp_path / "b.msgpack").read_bytes() == flax.serialization.to_bytes(NESTED)
    treering.save(tmp_path / "leaf", np.arange(3))
    treering.convert(tmp_path / "leaf", tmp_path / "leaf.msgpack")
    assert treering.load(tmp_path / "leaf.msgpack").tolist() == [0, 1, 2]
    # Large arrays are in chunks, and are read again from them, a piece at a time.
    limits.lower(monkeypatch, chunk_of_flax_files=1000, converted_piece=700)
    wide = {"w": np.arange(3 * 5 * 77).reshape(3, 5, 77)}
    treering.save(tmp_path / "wide", wide)
    treering.convert(tmp_path / "wide", tmp_path / "wide.msgpack")
    assert_same_arrays(_read_as_peers_do(tmp_path / "wide.msgpack"), wide)
    treering.convert(tmp_path / "wide.msgpack", tmp_path / "again")
    assert_same_arrays(treering.load(tmp_path / "again"), wide)


def test_what_is_lost_is_named_and_accepted(tmp_path: Path) -> None:
    tree = {
        **NESTED,
        "rng": jax.random.key(3),
        "f": abs,
        "odd": {5: np.ones(1)},
        "a/b": np.ones(2),
        "a": {"b": np.ones(2)},
    }
    treering.save(tmp_path / "s", tree, metadata={"loss": 0.5})
    for target, kinds in {
        "b.npz": "arrays keys metadata names none objects scalars strings structure",
        "b.msgpack": "keys metadata objects structure",
        "b.safetensors": "keys objects scalars strings",
        "hf": "keys metadata none objects scalars strings structure",
        "leaves": "metadata",
    }.items():
        with pytest.raises(UnsupportedError, match="cannot hold") as caught:
            treering.convert(tmp_path / "s", tmp_path / target, to=TARGETS[target])
        assert [kind for kind in LOSSES if f"'{kind}' (" in str(caught.value)] == kinds.split()
        assert not list(tmp_path.glob(f"{target}*"))
        treering.convert(tmp_path / "s", tmp_path / target, to=TARGETS[target], lose=kinds.split())
    found = treering.load(tmp_path / "b.npz")
    assert sorted(found) == ["a/b", "odd/5", "opt/0/0", "opt/0/1", "p/w", "rng"]
    assert found["rng"].tolist() == jax.random.key_data(tree["rng"]).tolist()
    held = treering.load(tmp_path / "b.safetensors")
    assert sorted(held) == ["a", "a/b", "none", "odd", "opt", "p", "rng"]
    assert held["opt"][1:] == [{}, ()]
    assert sorted(treering.load(tmp_path / "hf")) == [
        "a.b",
        "a/b",
        "odd.5",
        "opt.0.0",
        "opt.0.1",
        "p.half",
        "p.w",
        "rng",
    ]
    state = treering.load(tmp_path / "b.msgpack")
    assert state["odd"].keys() == {"5"}
    assert "f" not in state
    assert treering.load(tmp_path / "leaves", only="step") == {"step": 7}
    globs = ["opt/**", "odd", "p/half", "flag", "[ab]", "metadata", "**"]
    with pytest.raises(UnsupportedError, match=r"leaf 'rate': a float\n"):
        treering.convert(tmp_path / "s", tmp_path / "c.npz", lose=globs[:-1])
    treering.convert(tmp_path / "s", tmp_path / "c.npz", lose=globs)
    with pytest.raises(UnsupportedError, match="nothing would be left"):
        treering.convert(tmp_path / "s", tmp_path / "d.npz", only="step", lose=["scalars", "metadata"])
    treering.save(tmp_path / "huge", {"n": 1 << 70, "m": 3})
    with pytest.raises(UnsupportedError, match=r"leaf 'n': an int of more than 64 bits"):
        treering.convert(tmp_path / "huge", tmp_path / "huge.msgpack")


def test_a_list_that_loses_items_comes_back_as_a_dict(tmp_path: Path) -> None:
    tree = {"l": [1, np.ones(2), [2, 3]], "n": {"x": 1.5, "w": np.zeros(1)}, "t": (np.ones(1), None)}
    treering.save(tmp_path / "s", tree)
    treering.convert(tmp_path / "s", tmp_path / "b.safetensors", lose="scalars")
    found = treering.load(tmp_path / "b.safetensors")
    assert found["l"].keys() == {1, 2}
    assert (found["l"][2], found["n"].keys(), found["t"][1]) == ({}, {"w"}, None)
    treering.convert(tmp_path / "s", tmp_path / "b", only="l/2/*")
    assert treering.load(tmp_path / "b") == {"l": {2: [2, 3]}}


@pytest.mark.parametrize("target", ["b.npz", "b.msgpack", "hf"])
def test_a_result_that_is_not_what_was_read_is_an_error(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    treering.save(tmp_path / "a", {"w": np.arange(50_000)})
    wanted = bytes(np.arange(40_000, 40_008).data)
    written = resolve.write_file

    def damage(path: Any, buffers: Any, size: int, **options: bool) -> None:
        written(path, [b"".join(buffers).replace(wanted, bytes(len(wanted)))], size, **options)

    for module in ("_checkpoint.save_files", "_foreign.write_huggingface"):
        monkeypatch.setattr(f"treering.{module}.write_file", damage)
    with pytest.raises(CorruptError, match=r"leaf 'w'.* not the one that was read|other checksum .*leaf 'w'"):
        treering.convert(tmp_path / "a", tmp_path / target, to=TARGETS[target])


def test_a_folder_of_shards(tmp_path: Path) -> None:
    layers = {f"h.{i}": {"w": np.full((10, 10), i, np.float32)} for i in range(5)}
    treering.save(tmp_path / "a", layers, metadata={"by": "me"})
    treering.convert(tmp_path / "a", tmp_path / "hf", to="hf", max_file_size=900)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3
    wanted = {f"{name}.w": layer["w"] for name, layer in layers.items()}
    assert_same_arrays(_read_as_peers_do(tmp_path / "hf"), wanted)
    # Back, and to a folder of other shards.
    treering.convert(tmp_path / "hf", tmp_path / "b")
    assert_same_arrays(treering.load(tmp_path / "b"), wanted)
    treering.convert(tmp_path / "hf", tmp_path / "c", to="hf", dtype="float16")
    assert {array.dtype.name for array in _read_as_peers_do(tmp_path / "c").values()} == {"float16"}
    with treering.open(tmp_path / "c") as opened:
        assert opened.metadata["by"] == "me"


def test_archives_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"a{number}": np.full(number * 40, number, np.int16) for number in range(9)}
    treering.save(tmp_path / "a", arrays)
    limits.lower(monkeypatch, large_npz_array=300, many_npz_arrays=4)
    treering.convert(tmp_path / "a", tmp_path / "b.npz")
    assert_same_arrays(_read_as_peers_do(tmp_path / "b.npz"), arrays)
    assert_same_arrays(treering.load(tmp_path / "b.npz"), arrays)
    assert zipfile.ZipFile(io.BytesIO((tmp_path / "b.npz").read_bytes())).testzip() is None
    treering.save(tmp_path / "leaf", np.arange(3))
    treering.convert(tmp_path / "leaf", tmp_path / "leaf.npz")
    assert _read_as_peers_do(tmp_path / "leaf.npz")["arr_0"].tolist() == [0, 1, 2]


def test_the_rest_keeps_its_keys(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", {"p": {"w": np.ones(2), "b": np.zeros(1)}, "step": 7})
    names = KeyMap([KeyRule("p/w", "model/kernel"), KeyRule("{k**}", "{k**}", rest=True)])
    treering.convert(tmp_path / "a", tmp_path / "b", key_map=names)
    found = treering.load(tmp_path / "b")
    assert (found["model"]["kernel"].tolist(), found["p"].keys(), found["step"]) == ([1, 1], {"b"}, 7)
    assert names.inverse().inverse() == names
    with pytest.raises(UnsupportedError, match="copy= and rest= exclude each other"):
        KeyRule("a", "b", copy=True, rest=True)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    treering.save(path, {"w": np.ones(3)})
    for target, given, problem in [
        ("b", {"to": "zip"}, "is not a form that can be written"),
        ("b", {"to": "safetensors"}, "is not a path of the form safetensors"),
        ("b.msgpack", {"to": "treering"}, "is not a path of the form treering"),
        ("b.npz", {"to": "leaves"}, "is not a path of the form leaves"),
        ("b.npz", {"to": "hf"}, "is not a path of the form hf"),
        ("b", {"max_file_size": 5}, "max_file_size= needs a form that has it"),
        ("b", {"dtype": "int8"}, "is not a dtype of floats"),
        ("b", {"key_map": "a"}, "key_map= is a treering.KeyMap"),
        ("a", {"overwrite": True}, "is, or lies in, the source"),
    ]:
        with pytest.raises(UnsupportedError, match=problem):
            treering.convert(path, tmp_path / target, **given)  # type: ignore[arg-type]
    treering.save(tmp_path / "b", {})
    with pytest.raises(ExistsError):
        treering.convert(path, tmp_path / "b")
    with treering.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(3)})
    with pytest.raises(UnsupportedError, match="is a run, and"):
        treering.convert(tmp_path / "run", tmp_path / "d.safetensors")


def test_a_damaged_source_is_not_converted(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", ARRAYS)
    (data,) = (tmp_path / "a").glob("*.safetensors")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(CorruptError, match="leaf 'w' is damaged"):
        treering.convert(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b" / "treering.json").exists()


def test_a_source_that_is_replaced_meanwhile_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(".npz", tmp_path)
    opened = forms.stream_source

    def replaced(*given: Any, **named: Any) -> Source:
        source = opened(*given, **named)
        source.is_current, source.opened = lambda: False, None
        return source

    monkeypatch.setattr("treering._runs.convert_run.stream_source", replaced)
    with pytest.raises(BusyError, match="was replaced while it was being converted"):
        treering.convert(path, tmp_path / "b")
    assert not (tmp_path / "b" / "treering.json").exists()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("form", "target"), [("", target) for target in TARGETS] + [(".msgpack", "b")])
def test_memory_holds_a_piece_of_a_leaf(
    form: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.lower(monkeypatch, converted_piece=100_000)
    sizes: list[int] = []

    faults.before(
        monkeypatch,
        source_arrays.SourceArray,
        "_read",
        lambda self, boxes: sizes.append(
            sum(int(np.prod([stop - start for start, stop in box])) for box in boxes) * self.dtype.itemsize
        ),
    )
    source = _write(form, tmp_path)
    treering.convert(source, tmp_path / target, to=TARGETS[target])
    if target == "b":
        treering.convert(source, tmp_path / "cast", dtype="float64")
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
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "c.npz"), "--rename", "p/{n}=m/{n}"]
    assert "'scalars' (Python numbers are left out)" in here(*arguments, code=2).stderr
    here(*arguments, "--lose", "scalars", code=0)
    assert sorted(_read_as_peers_do(tmp_path / "c.npz")) == ["m/v", "m/w"]
    assert "exclude each other" in here(*arguments, "--map", str(rules), code=2).stderr
    assert "is not OLD=NEW" in here(*arguments, "--rename", "a", code=2).stderr
    here(
        "convert",
        str(tmp_path / "a"),
        str(tmp_path / "hf"),
        "--to",
        "hf",
        "--at",
        "p",
        "--max-file-size",
        "1KB",
        code=0,
    )
    assert sorted(_read_as_peers_do(tmp_path / "hf")) == ["v", "w"]
