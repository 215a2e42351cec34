"""What a newcomer writes by mistake: the error says which argument or call was meant; numbers are numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.extend.random import define_prng_impl
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import treering as tr
from tests import meshes
from tests.checkpoint.documents import rewrite
from treering.errors import MismatchError, UnsupportedError
from treering.leaves import tree_serialize_leaves
from treering.serialization import from_bytes, to_bytes

TREE = {"params": {"w": np.ones(2), "b": np.ones(2)}, "head": {"w": np.ones(2)}, "step": 7}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tr.save(tmp_path / "a", TREE)
    return tmp_path / "a"


def test_a_mesh_or_a_sharding_is_no_tree(path: Path, tmp_path: Path) -> None:
    mesh = meshes.line(1)
    run = tr.Run(tmp_path / "run")
    misplaced: dict[Any, str] = {
        mesh: "mesh",
        NamedSharding(mesh, PartitionSpec()): "shardings",
        SingleDeviceSharding(jax.devices()[0]): "shardings",
        PartitionSpec("x"): "shardings",
    }
    for given, meant in misplaced.items():
        for call in (lambda given=given: tr.load(path, given), lambda given=given: run.load(7, given)):
            with pytest.raises(
                UnsupportedError, match=rf"`like` is a \w+, not a tree of arrays; did you mean {meant}=\?"
            ):
                call()


def test_a_branch_of_an_opened_checkpoint_says_how_it_is_loaded(path: Path) -> None:
    with tr.open(path) as checkpoint:
        with pytest.raises(
            KeyError, match=r"has no leaf 'params'; 2 leaves lie below it; treering\.load\(.*, at='params'"
        ):
            checkpoint["params"]
        with pytest.raises(KeyError, match=r"1 leaf lies below it; treering\.load"):
            checkpoint["head"]
        with pytest.raises(KeyError, match=r"has no leaf 'params/x'; did you mean 'params/\w'\?$"):
            checkpoint["params/x"]
        with pytest.raises(KeyError, match="has no leaf"):
            checkpoint[3]  # type: ignore[index]


def test_what_only_the_checkpoint_has_can_be_left_out(path: Path) -> None:
    like: dict[str, Any] = {"params": {"w": np.zeros(2)}, "step": 0}
    with pytest.raises(MismatchError, match=r'extra="ignore" ignores leaves that only the checkpoint has') as caught:
        tr.load(path, like)
    assert len(caught.value.differences) == 2
    found = tr.load(path, like, extra="ignore")
    assert found["params"]["w"].tolist() == [1.0, 1.0]
    assert found["step"] == 7
    with pytest.raises(MismatchError, match="1 difference") as caught:
        tr.load(path, {**like, "new": 1}, extra="ignore")
    assert tr.load(path, {**like, "new": 1}, extra="ignore", missing="keep")["new"] == 1
    with pytest.raises(UnsupportedError, match=r"extra is .yes., but must be .error. or .ignore."):
        tr.load(path, like, extra="yes")  # type: ignore[call-overload]
    with pytest.raises(UnsupportedError, match="and there is none"):
        tr.load(path, extra="ignore")


def test_what_is_left_out_is_not_read(path: Path) -> None:
    data = next(path.glob("data-*"))
    content = bytearray(data.read_bytes())
    content[-1] ^= 1  # the last array
    data.write_bytes(bytes(content))
    assert not tr.verify(path).ok
    damaged = {finding.key for finding in tr.verify(path).findings}
    kept = {name: item for name, item in TREE.items() if not any(str(key).startswith(name) for key in damaged)}
    assert set(tr.load(path, kept, extra="ignore")) == set(kept)


NUMBERS = {
    "int64": (np.int64(3), 3),
    "float32": (np.float32(0.5), 0.5),
    "bool": (np.True_, True),
    "bfloat16": (ml_dtypes.bfloat16(1.5), 1.5),
    "an array without axes": (np.array(7), 7),
    "jax": (jnp.float32(2.0), 2.0),
    "jax int": (jnp.int32(2), 2),
    "jax bool": (jnp.asarray(True), True),
    "float64, a float itself": (np.float64(0.25), 0.25),
}


@pytest.mark.parametrize("how", ["a", "a.safetensors", "async", "run"])
def test_scalars_in_metadata_are_numbers(how: str, tmp_path: Path) -> None:
    given = {"deep": [{name: value for name, (value, _) in NUMBERS.items()}]}
    path = tmp_path / how
    if how == "run":
        with tr.Run(path) as run:
            run.save(1, TREE, metadata=given)
        path /= "step_00000001"
    elif how == "async":
        tr.save_async(path, TREE, metadata=given).result(60)
    else:
        tr.save(path, TREE["params"], metadata=given)
    with tr.open(path) as checkpoint:
        (found,) = checkpoint.metadata["deep"]
    assert {name: (type(value), value) for name, value in found.items()} == {
        name: (type(wanted), wanted) for name, (_, wanted) in NUMBERS.items()
    }
    assert isinstance(given["deep"][0]["int64"], np.int64)


@pytest.mark.parametrize(
    "value",
    [np.float32("nan"), np.inf, np.ones(1), jnp.ones(2), np.complex64(1), np.str_("a"), np.datetime64(0, "s"), (1,)],
    ids=repr,
)
def test_what_is_no_finite_number_is_refused_by_its_place(value: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"metadata\['a'\]\[0\] is "):
        tr.save(tmp_path / "a", TREE, metadata={"a": [value]})


def test_metadata_that_holds_itself_is_refused(tmp_path: Path) -> None:
    own: dict[str, Any] = {}
    own["a"] = own["b"] = own
    with pytest.raises(UnsupportedError, match="holds itself"):
        tr.save(tmp_path / "a", TREE, metadata=own)


@pytest.mark.parametrize(
    ("like", "arguments", "told"),
    [
        (TREE, {"cast": "bfloat16"}, "cast='bfloat16', but must be True or False"),
        (TREE, {"cast": jnp.bfloat16}, ", but must be True or False; `like` has the wanted dtypes"),
        (TREE, {"key_map": {("params", "w"): "head/w"}}, "key_map= has the key ('params', 'w'); a key is one text"),
        (TREE, {"key_map": {"params/w": 0}}, "key_map= has the key 0; a key is one text"),
        (TREE, {"key_map": {"params": "x", "params/w": "params/w", "params/b": "params/b"}}, "longer entries"),
        (TREE, {"key_map": {"nose": "head"}}, "key_map= has 'nose', but `like` has no such key"),
        (None, {"cast": True}, "pass like=, for example jax.eval_shape(init)"),
        (
            [("w", PartitionSpec()), (".*", None)],
            {},
            "a list of partition rules, not a tree of arrays; did you mean shar",
        ),
        (lambda: TREE, {}, "`like` is one leaf, not a tree; jax.eval_shape(init) makes a tree of a function"),
        ("params", {}, "at= loads a part"),
    ],
)
def test_a_wrong_argument_is_named_with_what_was_meant(path: Path, like: Any, arguments: Any, told: str) -> None:
    with pytest.raises(tr.errors.TreeringError) as caught:
        tr.load(path, like, **arguments)
    assert told in str(caught.value)


@pytest.mark.parametrize("keep", ["error", "keep"])
def test_no_hint_names_what_was_given_already(path: Path, keep: Any) -> None:
    like = {**TREE, "new": jax.ShapeDtypeStruct((2,), np.float32)}
    with pytest.raises(MismatchError) as caught:
        tr.load(path, like, missing=keep)
    assert ("missing=" in str(caught.value)) is (keep == "error")
    with pytest.raises(MismatchError) as caught:
        tr.load(path, {"params": {"w": np.ones(3)}}, extra="ignore")
    assert "extra=" not in str(caught.value)


def test_a_kept_leaf_that_was_renamed_is_named(path: Path) -> None:
    like = {**TREE, "params": {"w2": np.ones(2), "b": np.ones(2)}}
    with pytest.raises(MismatchError) as caught:
        tr.load(path, like, missing="keep")
    assert caught.value.differences == (
        "params/w: unexpected, the checkpoint has float64[2] (is it 'params/w2' of `like`?)",
    )
    assert "key_map={wanted: saved} maps renamed leaves" in str(caught.value)


def _keys_of(name: str) -> Any:
    """Return keys of an implementation that nothing leads to: it is not registered, even if another has its name."""
    impl = define_prng_impl(
        key_shape=(2,), seed=lambda seed: jnp.full(2, seed, "uint32"), split=lambda key, shape: jnp.zeros((*shape, 2)),
        random_bits=lambda key, width, shape: jnp.zeros(shape), fold_in=lambda key, data: key, name=name, tag="mi",
    )  # fmt: skip
    return jax.random.key(3, impl=impl)


@pytest.mark.parametrize("name", ["mine", "threefry2x32", "rbg", "<unnamed>"])
def test_keys_of_an_implementation_without_a_name_are_refused(name: str, tmp_path: Path) -> None:
    tree = {"seen": jax.random.key(3), "rng": _keys_of(name)}
    tr.save(tmp_path / "usual", {"seen": tree["seen"]})
    before = set(tmp_path.rglob("*"))
    calls: dict[str, Callable[[], object]] = {
        "folder": lambda: tr.save(tmp_path / "a", tree),
        "below": lambda: tr.save(tmp_path / "a", {"rng": jax.random.split(jax.random.key(0)), "x": [tree["rng"]]}),
        "file": lambda: tr.save(tmp_path / "a.safetensors", tree),
        "hf": lambda: tr.export(tmp_path / "a", tree, to="hf"),
        "mapped": lambda: tr.export(tmp_path / "a", tree, key_map=tr.KeyMap([tr.KeyRule("{k**}", "{k**}")])),
        "async": lambda: tr.save_async(tmp_path / "a", tree).result(),
        "async file": lambda: tr.save_async(tmp_path / "a.safetensors", tree).result(),
        "leaves": lambda: tree_serialize_leaves(tmp_path / "a", tree),
        "run": lambda: tr.Run(tmp_path / "a").save(1, tree, force=True),
    }
    for call in calls.values():
        with pytest.raises(UnsupportedError, match=r"key<mi> cannot be given back"):
            call()
    with pytest.raises(
        UnsupportedError, match=r"of the dtype key<mi> cannot be given back.*'rng'.*jax\.random\.key_data"
    ):
        tr.save(tmp_path / "a", tree)
    assert set(tmp_path.rglob("*")) == before


def test_the_target_says_of_which_implementation_the_keys_of_msgpack_are(tmp_path: Path) -> None:
    for rng in (_keys_of("mine"), jax.random.key(7, impl="unsafe_rbg")):
        tree = {"rng": rng}
        abstract = jax.eval_shape(lambda tree=tree: tree)
        tr.save(tmp_path / "a.msgpack", tree, overwrite=True)
        for found in (
            tr.load(tmp_path / "a.msgpack", tree),
            tr.load(tmp_path / "a.msgpack", abstract),
            from_bytes(tree, to_bytes(tree)),
            from_bytes(abstract, to_bytes(tree)),
        ):
            assert found["rng"].dtype == rng.dtype
            assert np.array_equal(jax.random.key_data(found["rng"]), jax.random.key_data(rng))
    other = {"rng": _keys_of("threefry2x32")}
    tr.save(tmp_path / "b.msgpack", other)
    with pytest.raises(MismatchError, match="wanted key<threefry2x32>"):
        tr.load(tmp_path / "b.msgpack", other)
    with pytest.raises(MismatchError, match="jax knows another implementation by its name"):
        from_bytes(other, to_bytes(other))


def test_keys_of_an_implementation_that_another_program_has(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", {"rng": jax.random.key(3)})
    rewrite(tmp_path / "a", lambda document: document["types"][0].update(impl="theirs"))
    with pytest.raises(
        UnsupportedError, match=r"this jax has no keys 'theirs' of uint32\[2\] \(at leaf 'rng'\); register"
    ):
        tr.load(tmp_path / "a")
    with pytest.raises(MismatchError, match=r"wanted key<threefry2x32>\[\], found key<theirs>"):
        tr.load(tmp_path / "a", {"rng": jax.random.key(0)})
    assert tr.verify(tmp_path / "a").ok
    with tr.open(tmp_path / "a") as opened:
        assert np.array_equal(opened["rng"][...], jax.random.key_data(jax.random.key(3)))
