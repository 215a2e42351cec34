"""What a newcomer gets wrong, and what is said of it."""

import functools
import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import faults
from treering.errors import CorruptError, KeptOnHostWarning, MismatchError, StaticFieldsDifferWarning, UnsupportedError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "ckpt"
    treering.save(place, {"w": jnp.ones((6, 4)), "b": jnp.ones(7), "step": 3, "n": np.arange(3)})
    return place


@pytest.fixture(scope="module")
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((4, 2), ("data", "model"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (PartitionSpec("data"), "w: float32[6, 4]: axis 0 of length 6 is not divisible by 4, mesh axis 'data'"),
        (PartitionSpec(("data", "model")), "b: float32[7]: axis 0 of length 7 is not divisible by 8"),
        (PartitionSpec("model", "data"), "b: float32[7] has 1 axis"),
        (PartitionSpec("dat"), "the mesh has no axis 'dat' of"),
        (PartitionSpec("dat"), "did you mean 'data'?"),
    ],
)
def test_a_spec_that_does_not_fit(path: Path, mesh: jax.sharding.Mesh, spec: PartitionSpec, said: str) -> None:
    with pytest.raises(MismatchError) as caught:
        treering.load(path, only=["w", "b"], shardings=spec, mesh=mesh)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 400


def test_what_is_no_sharding(path: Path, mesh: jax.sharding.Mesh) -> None:
    with pytest.raises(UnsupportedError, match=r"a Mesh is not a sharding.*pass mesh="):
        treering.load(path, shardings=mesh)
    bad: Any = (4, 2)
    with pytest.raises(UnsupportedError, match=r"mesh is a tuple, not a jax\.sharding\.Mesh"):
        treering.load(path, mesh=bad)
    with pytest.raises(UnsupportedError, match="needs a mesh"):
        treering.load(path, shardings=PartitionSpec())
    with pytest.raises(UnsupportedError, match=r"is not a partition rule; write \(pattern, PartitionSpec\)"):
        treering.load(path, shardings=[("w", PartitionSpec(), None)], mesh=mesh)
    with pytest.raises(
        MismatchError, match=r"b: no partition rule matches; \(.\.\*., PartitionSpec\(\)\) as the last rule"
    ):
        treering.load(path, only=["w", "b"], shardings=[("w", PartitionSpec())], mesh=mesh)
    with pytest.raises(MismatchError, match=r"shardings has 'ww', which the tree does not have; did you mean 'w'\?"):
        treering.load(path, shardings={"ww": PartitionSpec()}, mesh=mesh)


@pytest.mark.parametrize("spec", [PartitionSpec(None, "data", "model"), PartitionSpec(None, None, None)])
def test_a_rule_with_more_axes_than_the_array(path: Path, mesh: jax.sharding.Mesh, spec: PartitionSpec) -> None:
    # jax refuses it as well; it was cut to the axes there are, and the array was divided in another way than wanted.
    with pytest.raises(MismatchError, match=r"w: float32.* more entries than axes"):
        treering.load(path, only=["w", "step"], shardings=[(".*", spec)], mesh=mesh)
    fitting = [("w", PartitionSpec(None, "data")), (".*", spec)]
    assert treering.load(path, only=["w", "step"], shardings=fitting, mesh=mesh)["w"].sharding.spec[1] == "data"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"only": 5}, "only= is a glob or a list of globs, found 5"),
        ({"at": ["w"]}, "at= is one key text"),
        ({"like": {}, "key_map": [("a", "b")]}, "key_map= is a KeyMap, or a dict of wanted to stored keys"),
        ({"missing": "init"}, "missing is 'init', but must be 'error' or 'keep'"),
        ({"cast": True}, "there is none"),
    ],
)
def test_arguments_of_the_wrong_kind(path: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        treering.load(path, **arguments)


@pytest.mark.parametrize("other", ["no", "False", None, 2, []])
def test_a_flag_is_true_or_false(path: Path, other: Any) -> None:
    # By its truth, "no" would replace a checkpoint, or remove steps.
    new = path.with_name("new")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("overwrite", lambda: treering.save(path, {}, overwrite=other)),
        ("overwrite", lambda: treering.save_async(path, {}, overwrite=other)),
        ("overwrite", lambda: treering.export(path, {}, overwrite=other)),
        ("overwrite", lambda: treering.convert(path, new, overwrite=other)),
        ("mapped", lambda: treering.load(path, mapped=other)),
        ("anonymous", lambda: treering.bucket("s3://bucket-of-example", anonymous=other)),
        ("write_index", lambda: tree_serialize_leaves(new, {"w": 1}, write_index=other)),
    ]
    with treering.Run(path.with_name("run"), keep=treering.KeepLast(1)) as run:
        calls += [
            ("rollback", lambda: run.save(1, {}, rollback=other)),
            ("force", lambda: run.save(1, {}, force=other)),
            ("dry_run", lambda: run.gc(dry_run=other)),
            ("hold", lambda: run.watch(hold=other)),
            ("sweep", lambda: run.close(sweep=other)),
        ]
        for name, call in calls:
            with pytest.raises(UnsupportedError, match=f"{name}={re.escape(repr(other))}, but must be True or F"):
                call()
    assert not new.exists()
    treering.save(path, {"w": 1}, overwrite=np.bool_(True))  # type: ignore[arg-type] # of a comparison


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"only": 5}, "only= is a glob or a list of globs, found 5"),
        ({"only": ["w", None]}, "only= is a glob or a list of globs, found None"),
        ({"at": ("params", "w")}, r"at= is one key text, found \('params', 'w'\); .*joined by '/'"),
        ({"lose": ["scalars", 3]}, "lose= is a kind of losses or a glob"),
        ({"lose": 3}, "lose= is a kind of losses or a glob"),
        ({"items": ["w"]}, "items= is a dict"),
        ({"items": {"w": 1}}, "items= is a dict"),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_every_function(path: Path, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        treering.convert(path, path.with_name("b.npz"), **arguments)
    if not arguments.keys() & {"lose", "items"}:
        for call in (treering.abstract, treering.load):
            with pytest.raises(UnsupportedError, match=says):
                call(path, **arguments)
    if "lose" in arguments:
        with pytest.raises(UnsupportedError, match=says):
            treering.export(path.with_name("b.npz"), {"w": np.ones(2), "n": 1}, **arguments)


def test_a_tree_in_the_place_of_the_path(path: Path) -> None:
    tree: Any = {"w": 1}
    for call in (lambda: treering.save(tree, path), lambda: treering.load(tree), lambda: treering.open(tree)):
        with pytest.raises(UnsupportedError, match=r"the first argument is the path.*found a dict"):
            call()


@pytest.mark.parametrize("metadata", [[1], "xy", 5, False, 0])
def test_metadata_is_a_dict(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(UnsupportedError, match="not a dict of JSON"):
        treering.save(tmp_path / "c", {"a": 1}, metadata=metadata)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("name", ["m.npz", "m.PT", "m.h5", "m.pkl"])
def test_no_folder_is_called_like_a_file_of_others(tmp_path: Path, name: str) -> None:
    says = "treering.save writes no .npz files; treering.export does" if name == "m.npz" else "treering writes no"
    with pytest.raises(UnsupportedError, match=says):
        treering.save(tmp_path / name, {"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_suffixes_in_capitals(tmp_path: Path) -> None:
    treering.save(tmp_path / "m.SAFETENSORS", {"a": np.arange(3)})
    assert (tmp_path / "m.SAFETENSORS").is_file()
    assert treering.load(tmp_path / "m.SAFETENSORS")["a"].tolist() == [0, 1, 2]


def test_what_is_left_of_a_checkpoint_can_be_had(path: Path) -> None:
    (data,) = path.glob("data-*")
    data.unlink()
    assert treering.load(path, only="step") == {"step": 3}
    with pytest.raises(CorruptError, match=r"is missing in .*and with it 'w' and 2 more leaves"):
        treering.load(path)
    with treering.open(path) as checkpoint:
        assert checkpoint["step"] == 3
        with pytest.raises(CorruptError, match="is missing"):
            checkpoint["n"][:1]


@pytest.mark.parametrize("form", ["a", "a.safetensors", "a.msgpack", "zstd", "leaves"])
def test_an_array_that_is_larger_than_memory_is_named(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {"deep": {"w": np.zeros(1 << 18)}}
    if form in ("zstd", "leaves"):
        compressor = {"id": "zstd", "level": 1} if form == "zstd" else None
        treering.leaves.tree_serialize_leaves(tmp_path / form, tree, compressor=compressor)
    else:
        treering.save(tmp_path / form, tree)

    faults.fail(
        monkeypatch, np, "empty", MemoryError("no"), when=lambda shape, *more, **options: np.prod(shape) > 1 << 20
    )
    with pytest.raises(
        UnsupportedError, match=r"there is not enough memory for 2\.00 MiB \(at leaf 'deep/w'"
    ) as caught:
        treering.load(tmp_path / form)
    assert isinstance(caught.value, MemoryError)


def test_ints_are_never_wrapped_by_cast(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {"a": np.array([2**40, 1])})
    with pytest.raises(MismatchError, match=r"value 1099511627776 at index \[0\] does not fit int32 \(at leaf 'a'\)"):
        treering.load(tmp_path / "c", {"a": np.zeros(2, np.int32)}, cast=True)
    treering.save(tmp_path / "d", {"a": np.array([2**63 + 1], np.uint64)})
    with pytest.raises(MismatchError, match="does not fit int64"):
        treering.load(tmp_path / "d", {"a": np.zeros(1, np.int64)}, cast=True)


def test_wide_arrays_that_jax_cannot_hold_are_named(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    jax.config.update("jax_enable_x64", True)
    try:
        treering.save(tmp_path / "c", {"w": jnp.ones(8, jnp.float32), "wide": jnp.ones(8, jnp.float64)})
    finally:
        jax.config.update("jax_enable_x64", False)
    everywhere = NamedSharding(mesh, PartitionSpec())
    with pytest.warns(KeptOnHostWarning, match=r"jax_enable_x64 is off(.|\n)*wide \(float64\)"):
        result = treering.load(tmp_path / "c", shardings=everywhere)
    assert isinstance(result["wide"], np.ndarray)
    assert result["wide"].dtype == np.float64
    assert result["w"].sharding == everywhere
    assert isinstance(treering.load(tmp_path / "c")["wide"], np.ndarray)  # nobody asked for a device: no warning
    with pytest.warns(KeptOnHostWarning, match=r"\n  \(the root\) \(float64\)"):
        treering.load(tmp_path / "c", at="wide", shardings=everywhere)


def test_a_leaf_that_is_the_whole_tree_has_a_name(path: Path, tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: treering.load(path, at="w", shardings=PartitionSpec("data"), mesh=mesh),
            "(the root): float32[6, 4]: ax",
        ),
        (lambda: treering.load(path, jnp.ones(3), at="w"), "(the root): wanted float32[3], found float32[6, 4]"),
        (lambda: treering.convert(path, tmp_path / "a.safetensors", at="step"), "leaf (the root): an int"),
        (lambda: treering.save(tmp_path / "a.safetensors", 3), "leaf (the root): an int"),
    ]
    for call, said in calls:
        with pytest.raises(treering.errors.TreeringError) as caught:
            call()
        assert f"\n  {said}" in str(caught.value)


def test_another_function_in_like_is_said(path: Path) -> None:
    treering.save(path, {"f": jnp.sin}, overwrite=True)
    with pytest.warns(StaticFieldsDifferWarning, match=r"f: saved as jax\.numpy\.sin, like has jax\.numpy\.cos"):
        result = treering.load(path, {"f": jnp.cos})
    assert result == {"f": jnp.cos}


def test_a_hint_stands_where_it_helps(path: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        treering.load(path, {"step": jnp.int32(0)}, only="step")
    assert "cast=True" in str(caught.value)
    treering.save(path, {"key": jax.random.key(0)}, overwrite=True)
    with pytest.raises(MismatchError) as caught:
        treering.load(path, {"key": jax.random.PRNGKey(0)})
    assert "cast=True" not in str(caught.value)


def test_a_type_has_its_article() -> None:
    for wrong, named in ((3, "an int"), (None, "None"), ([3], "an int")):
        with pytest.raises(UnsupportedError, match=f"the path, a str or os.PathLike; found {named}$"):
            treering.load(wrong)  # type: ignore[arg-type]
    with pytest.raises(
        UnsupportedError, match=r"argument is an empty list; pass a path, or a list of one path or more$"
    ):
        treering.load([])
    for empty in (lambda: treering.Run(""), lambda: treering.save("", {})):
        with pytest.raises(UnsupportedError, match=r"^the path is empty; pass the name of a file or folder$"):
            empty()
    sources = Path(inspect.getfile(treering)).parent.rglob("*.py")
    assert not [path.name for path in sources if "a {type(" in path.read_text(encoding="utf-8")]


def test_a_damaged_index_is_named_once(path: Path) -> None:
    index = path / "treering.json"
    index.write_bytes(index.read_bytes()[:100])
    with pytest.raises(CorruptError) as caught:
        treering.load(path)
    assert str(caught.value).startswith(f"{str(index)!r} is damaged: its digest is not that of its bytes;")
    finding = "treering.json is damaged (its digest is not that of its bytes)"
    assert str(treering.verify(path).findings[0]) == finding


@pytest.mark.parametrize("form", ["a", "a.msgpack", "a.safetensors", "leaves"])
def test_every_call_refuses_a_spec_with_more_axes_than_the_array(
    form: str, tmp_path: Path, mesh: jax.sharding.Mesh
) -> None:
    tree = {"w": jnp.ones((8, 8)), "s": jnp.ones(())}
    if form == "leaves":
        tree_serialize_leaves(tmp_path / form, tree)
    else:
        treering.save(tmp_path / form, tree)
    with treering.Run(tmp_path / "run") as run:
        run.save(1, tree, force=True)
    long, none = PartitionSpec(None, "data", "model"), PartitionSpec()
    doors: list[Any] = [
        [("w", long), (".*", none)],
        lambda key, aval: long if key == "w" else none,
        lambda key, aval: NamedSharding(mesh, long if key == "w" else none),
        {"w": long, "s": none},
        NamedSharding(mesh, long),
        long,
        {"w": none, "s": PartitionSpec("data")},
        lambda key, aval: PartitionSpec("data"),
    ]
    calls: list[Callable[..., object]] = [
        functools.partial(treering.load, tmp_path / form),
        functools.partial(treering.load, tmp_path / form, tree),
        run.load,
        functools.partial(run.load_or_init, lambda: tree),
    ]
    for shardings, load in itertools.product(doors, calls):
        with pytest.raises(MismatchError, match=r"(w: float32\[8, 8\]|s: float32\[\])"):
            load(shardings=shardings, mesh=mesh)
    # What has no axes is replicated by rules, as eformer and others do.
    found = treering.load(tmp_path / form, shardings=[(".*", PartitionSpec("data"))], mesh=mesh)
    assert found["s"].sharding.is_fully_replicated
    assert found["w"].sharding.spec == PartitionSpec("data")


def test_the_door_of_eformer_cuts_a_spec_as_eformer_does(tmp_path: Path, mesh: jax.sharding.Mesh) -> None:
    tree_serialize_leaves(tmp_path / "a", {"w": jnp.ones((8, 8))})
    long = PartitionSpec(None, "data", "model")
    found: Any = tree_deserialize_leaves(tmp_path / "a", mesh, partition_rules=[("w", long)])
    assert found["w"].sharding.spec == PartitionSpec(None, "data")
