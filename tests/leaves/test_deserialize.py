"""Loading a branch of a leaves directory: what comes back, what callbacks see, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.leaves.saved import INDEX
from tests.trees import Point, assert_same
from treering.errors import CorruptError, FormatError, MismatchError, NotFoundError, TreeringError, UnsupportedError
from treering.leaves import index_leaves, tree_deserialize_leaves, tree_serialize_leaves

TREE: dict[Any, Any] = {
    "layers": [{"w": jnp.ones((2, 3)), "b": None}, {"w": jnp.zeros((2, 3)), "b": 1.5}],
    "pair": (jnp.int32(4), "text"),
    "point": Point(np.arange(3), {}),
    "key": jax.random.key(3),
    7: [],
    "layer.0": np.float32(2),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("leaves") / "ckpt"
    tree_serialize_leaves(path, TREE)
    tree_serialize_leaves(path, {"w": jnp.arange(3)}, prefix="model")
    tree_serialize_leaves(path, jnp.arange(4), prefix="optimizer.mu")
    return path


# ----------------------------------------------------------------------------------------------------- what comes back


def test_the_result_is_nested_dicts_with_text_keys(saved: Path) -> None:
    wanted = {
        "layers": {"0": {"w": TREE["layers"][0]["w"], "b": None}, "1": {"w": TREE["layers"][1]["w"], "b": 1.5}},
        "pair": {"0": TREE["pair"][0], "1": "text"},
        "point": {"x": TREE["point"].x, "y": {}},
        "key": TREE["key"],
        "7": {},
        "layer.0": TREE["layer.0"],
    }
    found = tree_deserialize_leaves(saved)
    assert list(found) == list(wanted)
    assert_same(found, wanted, restored=False)
    assert isinstance(found["layer.0"], np.float32)
    assert type(found["point"]["x"]) is np.ndarray
    assert isinstance(found["layers"]["0"]["w"], jax.Array)


def test_the_exact_containers_on_request(saved: Path) -> None:
    found = tree_deserialize_leaves(saved, structure="exact")
    assert type(found["layers"]) is list
    assert type(found["pair"]) is tuple
    assert found["point"]._fields == ("x", "y")
    assert list(found) == list(TREE)
    assert_same(found["layers"], TREE["layers"], restored=False)


@pytest.mark.parametrize("structure", ["dicts", "exact"])
def test_a_bare_array_is_a_bare_array(structure: Any, saved: Path) -> None:
    found = tree_deserialize_leaves(saved, prefix="optimizer.mu", structure=structure)
    assert_same(found, jnp.arange(4), restored=False)


def test_a_prefix_is_a_tree_of_its_own_and_the_empty_one_is_none(saved: Path) -> None:
    assert_same(tree_deserialize_leaves(saved, prefix="model"), {"w": jnp.arange(3)}, restored=False)
    assert list(tree_deserialize_leaves(saved, prefix="")) == list(tree_deserialize_leaves(saved))


def test_arrays_come_to_the_default_device_and_may_move(saved: Path) -> None:
    with jax.default_device(jax.devices()[5]):
        found = tree_deserialize_leaves(saved, prefix="model")["w"]
    assert found.devices() == {jax.devices()[5]}
    assert not found.committed


def test_paths_as_text_and_with_a_separator_at_the_end(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    for path in (str(saved), f"{saved}/", "ckpt"):
        assert tree_deserialize_leaves(path, prefix="model")["w"].shape == (3,)


# ------------------------------------------------------------------------------------------------------------ callbacks


def test_the_callback_gets_each_array_with_its_dotted_key_in_order(saved: Path) -> None:
    calls: list[tuple[str, Any]] = []

    def note(array: Any, key: str) -> Any:
        calls.append((key, array))
        return len(calls)

    found = tree_deserialize_leaves(saved, callback=note)
    assert [key for key, _ in calls] == ["layers.0.w", "layers.1.w", "pair.0", "point.x", "key", "layer.0"]
    assert found["layers"]["1"] == {"w": 2, "b": 1.5}
    assert found["pair"] == {"0": 3, "1": "text"}
    assert isinstance(calls[3][1], np.ndarray)
    assert calls[4][1].dtype == TREE["key"].dtype


def test_keys_of_callbacks_have_no_prefix(saved: Path) -> None:
    assert tree_deserialize_leaves(saved, prefix="model", callback=lambda _, key: key) == {"w": "w"}
    assert tree_deserialize_leaves(saved, prefix="optimizer.mu", callback=lambda _, key: key) == ""


def test_none_from_a_callback_is_the_leaf(saved: Path) -> None:
    assert tree_deserialize_leaves(saved, prefix="model", callback=lambda _array, _key: None) == {"w": None}


def test_what_a_callback_raises_goes_through(saved: Path) -> None:
    def fails(_array: Any, key: str) -> Any:
        raise ZeroDivisionError(key)

    with pytest.raises(ZeroDivisionError, match="w"):
        tree_deserialize_leaves(saved, prefix="model", callback=fails)


# ------------------------------------------------------------------------------------------------------- 64-bit numbers


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "ckpt"
    with jax.enable_x64(True):
        tree = {"i": jnp.array(2**40 + 1), "f": jnp.array([1e300]), "small": jnp.ones(2, "float32"), "n": np.arange(2)}
        tree_serialize_leaves(path, tree)
    return path


def test_64_bit_arrays_without_x64_are_an_error_that_names_them(wide: Path) -> None:
    with pytest.raises(
        UnsupportedError, match=r"i \(int64\), f \(float64\), and treering casts nothing.*x64=\"numpy\""
    ) as caught:
        tree_deserialize_leaves(wide)
    assert "small" not in str(caught.value)
    assert " n " not in str(caught.value), "what was numpy stays numpy: nothing is lost"


def test_64_bit_arrays_as_numpy_on_request(wide: Path) -> None:
    found = tree_deserialize_leaves(wide, x64="numpy")
    assert_same(found["i"], np.array(2**40 + 1))
    assert_same(found["f"], np.array([1e300]))
    assert isinstance(found["small"], jax.Array)


def test_a_64_bit_numpy_leaf_that_is_to_go_on_devices_is_named_too(wide: Path) -> None:
    device = {"n": jax.devices()[1], "small": jax.devices()[1]}
    with pytest.raises(UnsupportedError, match=r"n \(int64\)"):
        tree_deserialize_leaves(wide, shardings=device)
    found = tree_deserialize_leaves(wide, shardings=device, x64="numpy")
    assert_same(found["n"], np.arange(2))
    assert found["small"].devices() == {jax.devices()[1]}


def test_64_bit_arrays_with_x64_are_jax_arrays(wide: Path) -> None:
    with jax.enable_x64(True):
        found = tree_deserialize_leaves(wide)
    assert isinstance(found["i"], jax.Array)
    assert int(np.asarray(found["i"])) == 2**40 + 1
    assert found["f"].dtype == "float64"


# ------------------------------------------------------------------------------------------------------------- refusals


def test_an_unknown_prefix_lists_those_that_are_there(saved: Path) -> None:
    with pytest.raises(
        MismatchError, match=r"no prefix 'modle'; there are 'model', 'optimizer.mu'; did you mean 'model'"
    ):
        tree_deserialize_leaves(saved, prefix="modle")
    assert issubclass(MismatchError, ValueError)


def test_no_prefix_where_all_trees_have_one_lists_them(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(2)}, prefix="a")
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(2)}, prefix="b")
    with pytest.raises(MismatchError, match=r"only trees with prefixes: 'a', 'b'; for example prefix='a'"):
        tree_deserialize_leaves(tmp_path)


def test_a_prefix_where_the_only_tree_has_none(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(2)})
    with pytest.raises(MismatchError, match="no prefix 'a': its tree has none"):
        tree_deserialize_leaves(tmp_path, prefix="a")


@pytest.mark.parametrize("listed", [None, "a"])
def test_a_save_that_waits_for_its_index_is_told_of(listed: str | None, tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(2)}, prefix=listed)
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(2)}, prefix="new", write_index=False)
    with pytest.raises(MismatchError, match=r"waits for treering\.leaves\.index_leaves"):
        tree_deserialize_leaves(tmp_path, prefix="new")
    index_leaves(tmp_path)
    with pytest.raises(MismatchError) as caught:
        tree_deserialize_leaves(tmp_path, prefix="old")
    assert "index_leaves" not in str(caught.value)


def test_nothing_there_is_an_error_that_says_what_is(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError) as caught:
        tree_deserialize_leaves(tmp_path / "absent")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="empty"):
        tree_deserialize_leaves(tmp_path)
    tree_serialize_leaves(tmp_path, {"w": jnp.ones(2)}, write_index=False)
    with pytest.raises(FileNotFoundError, match="index_leaves"):
        tree_deserialize_leaves(tmp_path)


@pytest.mark.parametrize(
    ("index", "error", "words"),
    [
        ("{", CorruptError, "tensorstore_index.json"),
        ("[]", CorruptError, "tensorstore_index.json"),
        ('{"format": "zarr3", "arrays": []}', FormatError, "zarr3"),
        ('{"arrays": []}', FormatError, "format"),
        ('{"format": "tensorstore", "arrays": [{"shape": [1]}]}', CorruptError, "path"),
        ('{"format": "tensorstore", "arrays": {}}', CorruptError, "arrays"),
    ],
)
def test_an_index_that_is_none(index: str, error: type[TreeringError], words: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(error, match=words) as caught:
        tree_deserialize_leaves(tmp_path)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"mesh": "model"}, "mesh is a str"),
        ({"manager": object()}, "wait_until_finished"),
        ({"prefix": 3}, "prefix is an int"),
        ({"callback": "f"}, "callback is a str"),
        ({"chunk_size": 1.5}, "chunk_size=1.5"),
        ({"structure": "lists"}, "'dicts' or 'exact'"),
        ({"x64": "cast"}, "'error' or 'numpy'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_make_no_sense_are_named(arguments: dict[str, Any], words: str, saved: Path) -> None:
    with pytest.raises(UnsupportedError, match=words) as caught:
        tree_deserialize_leaves(saved, **arguments)
    assert isinstance(caught.value, TypeError)


def test_a_tree_in_place_of_the_path_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="path"):
        tree_deserialize_leaves({"w": 1})  # type: ignore[call-overload]


# --------------------------------------------------------------------------------------------------------------- damage


def damaged_copy(saved: Path, tmp_path: Path, name: str, data: bytes | None) -> Path:
    """A copy of the directory in which one file is another, or lost."""
    path = tmp_path / "copy"
    for file in saved.rglob("*"):
        if file.is_file():
            target = path / file.relative_to(saved)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    if data is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["layers/1/w/0.0", "layers/1/w/.zarray", "pair/0/0", "point/x/0"])
def test_a_lost_file_is_an_error_that_names_leaf_and_file(name: str, saved: Path, tmp_path: Path) -> None:
    path = damaged_copy(saved, tmp_path, name, None)
    with pytest.raises(CorruptError, match="missing") as caught:
        tree_deserialize_leaves(path)
    assert name in str(caught.value)
    assert_same(tree_deserialize_leaves(path, prefix="model"), {"w": jnp.arange(3)}, restored=False)


@pytest.mark.parametrize("name", ["layers/1/w/0.0", "pair/0/0", "point/x/0"])
def test_a_flipped_bit_and_a_short_file_are_errors(name: str, saved: Path, tmp_path: Path) -> None:
    data = (saved / name).read_bytes()
    flipped = bytes([data[0] ^ 1, *data[1:]])
    for number, changed in enumerate((flipped, data[:-1], data + b"\0", b"")):
        path = damaged_copy(saved, tmp_path / str(number), name, changed)
        with pytest.raises(CorruptError) as caught:
            tree_deserialize_leaves(path)
        assert name.rsplit("/", 1)[0] in str(caught.value)


def test_a_record_that_was_changed_is_damage_and_no_other_programs_tree(saved: Path, tmp_path: Path) -> None:
    index = json.loads((saved / INDEX).read_text())
    record = index["treering"][""]["record"]
    for changed in (record.replace("layers", "layerz"), record[:-3], "{}", ""):
        index["treering"][""]["record"] = changed
        path = damaged_copy(saved, tmp_path / str(len(changed)), INDEX, json.dumps(index).encode())
        with pytest.raises(CorruptError):
            tree_deserialize_leaves(path)
        assert tree_deserialize_leaves(path, prefix="model")["w"].shape == (3,), "another branch is whole"


def test_a_lost_record_is_damage(saved: Path, tmp_path: Path) -> None:
    index = json.loads((saved / INDEX).read_text())
    del index["treering"][""]
    path = damaged_copy(saved, tmp_path, INDEX, json.dumps(index).encode())
    with pytest.raises(CorruptError, match="lost the record of its tree"):
        tree_deserialize_leaves(path)


def test_entries_that_are_not_those_of_the_record_are_damage(saved: Path, tmp_path: Path) -> None:
    index = json.loads((saved / INDEX).read_text())
    for number in range(3):
        changed = json.loads(json.dumps(index))
        entries = changed["arrays"]
        if number == 0:
            del entries[1]
        elif number == 1:
            entries[0]["shape"] = [3, 2]
        else:
            entries.clear()
        path = damaged_copy(saved, tmp_path / str(number), INDEX, json.dumps(changed).encode())
        with pytest.raises(CorruptError):
            tree_deserialize_leaves(path)
