"""Checkpoints that Orbax wrote, bit for bit, and ones that nobody should have written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.stores import copy_to_memory
from treering.errors import CorruptError, NotFoundError, StoreError, TreeringError, UnsupportedError

GOLDEN = Path(__file__).parent / "golden" / "orbax"
ITEMS = ["ocdbt_zarr2", "ocdbt_zarr3", "plain_zarr2", "plain_zarr3", "v1_state"]


def _expected(file: str) -> dict[str, Any]:
    """Return the values by their dotted names; numpy has no form for ml_dtypes, so they are there as unsigned ints."""
    with np.load(GOLDEN / file) as archive:
        dtypes = json.loads(archive["__dtypes__"].tobytes())
        return {name: archive[name].view(getattr(ml_dtypes, dtype, dtype)) for name, dtype in dtypes.items()}


def _pick(tree: Any, name: str) -> Any:
    for key in name.split("."):
        tree = tree[int(key)] if isinstance(tree, list) else tree[key]
    return tree


def _same(found: Any, wanted: Any) -> bool:
    array = np.asarray(found)
    return bool(array.dtype == wanted.dtype and array.shape == wanted.shape and array.tobytes() == wanted.tobytes())


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "orbax"))


@pytest.fixture
def item(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "plain_zarr2", tmp_path / "item"))


def test_an_opened_item_is_the_same_wherever_the_program_goes(item: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(item.parent)
    with treering.open(item.name) as opened:
        monkeypatch.chdir("/")
        for key, array in _expected("expected.npz").items():
            if key not in ("step", "lr"):
                assert _same(opened[key.replace(".", "/")], array), key


def _change(place: Path, **members: Any) -> None:
    node = json.loads((place / "_METADATA").read_bytes())
    (place / "_METADATA").write_text(json.dumps(node | members))


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_bit_for_bit(name: str) -> None:
    tree = treering.load(GOLDEN / name)
    expected = _expected("expected.npz")
    assert (tree["step"], tree["lr"], type(tree["step"])) == (7, 0.125, int)
    del expected["step"], expected["lr"]
    for key, array in expected.items():
        assert _same(_pick(tree, key), array), key
    assert tree["opt"][1] == {"mu": tree["opt"][1]["mu"], "none": None, "empty": {}, "empty_list": []}
    assert list(tree) == ["lr", "opt", "params", "step"]
    assert treering.verify(GOLDEN / name).ok


def test_the_version_that_was_seen_is_said() -> None:
    seen = [
        "Orbax v0 item, OCDBT, zarr 2",
        "Orbax v0 item, OCDBT, zarr 3",
        "Orbax v0 item, plain, zarr 2",
        "Orbax v0 item, plain, zarr 3",
        "Orbax v1 checkpoint, OCDBT, zarr 3",
    ]
    for name, version in zip(ITEMS, seen, strict=True):
        assert f"note: format: {version}\n" in str(treering.inspect(GOLDEN / name))
    assert treering.inspect(GOLDEN / "v1_state").metadata == {"custom_metadata": {"note": "golden"}}


def test_sharded_arrays_and_a_typed_key() -> None:
    place = GOLDEN / "sharded_2x4"
    tree = treering.load(place)
    expected = _expected("expected_sharded_2x4.npz")
    assert _same(jax.random.key_data(tree.pop("key")), expected.pop("key"))
    assert all(_same(tree[name], array) for name, array in expected.items())
    leaves = treering.inspect(place).leaves
    assert leaves["both"].sharding == "P('data', 'model') over data=2, model=4"
    assert leaves["merged"].sharding == "P(('data', 'model'), None) over data=2, model=4"


def test_parts_of_it_onto_another_mesh_and_into_a_target() -> None:
    place = GOLDEN / "sharded_2x4"
    rows = NamedSharding(meshes.line(2), PartitionSpec("x"))
    found = treering.load(place, only="both", shardings={"both": rows})
    assert list(found) == ["both"]
    assert found["both"].sharding == rows
    assert _same(found["both"], _expected("expected_sharded_2x4.npz")["both"])
    with treering.open(place) as opened:
        assert _same(opened["merged"][3:11, ::3], _expected("expected_sharded_2x4.npz")["merged"][3:11, ::3])
    like: Any = {"opt": (np.zeros(2, np.float32), {"mu": np.zeros(1, np.float32), "none": None, "empty": {}})}
    target = treering.load(GOLDEN / "ocdbt_zarr2", only="opt/**", like=like)
    assert type(target["opt"]) is tuple
    assert target["opt"][0].tolist() == [1, 2]


def test_a_root_is_its_latest_step_and_lists_the_others(golden: Path) -> None:
    root = golden / "manager"
    assert treering.load(root)["n"] == 20
    listing = treering.inspect(root)
    assert "a root with the steps 10, 20; this is 20" in str(listing)
    assert listing.metadata == {
        "config": {"hidden": 4},
        "metrics": {"loss": 0.05},
        "custom_metadata": {"run": "golden"},
    }
    assert treering.load(root / "10")["w"].tolist() == [10, 10, 10]
    (root / "20").rename(root / "30.orbax-checkpoint-tmp")
    shutil.rmtree(root / "metadata")
    assert treering.load(root)["n"] == 10
    with pytest.raises(CorruptError, match="was not committed"):
        treering.load(root / "30.orbax-checkpoint-tmp")


def test_several_trees_of_a_step_are_a_dict_by_item(golden: Path) -> None:
    step = golden / "manager" / "20"
    shutil.copytree(golden / "manager" / "10" / "state", step / "ema")
    (step / "metrics" / "metrics").write_text('{"loss": NaN}')
    tree = treering.load(step)
    assert {name: int(part["n"]) for name, part in tree.items()} == {"ema": 10, "state": 20}
    listing = treering.inspect(step)
    assert listing.metadata == {"config": {"hidden": 4}}
    assert "note: metrics is left out" in str(listing)


def test_in_memory_as_on_disk(tmp_path: Path) -> None:
    copy_to_memory(GOLDEN / "sharded_2x4", f"memory://{tmp_path.name}/sharded_2x4")
    found = treering.load(f"memory://{tmp_path.name}/sharded_2x4")
    assert _same(found["both"], _expected("expected_sharded_2x4.npz")["both"])


def test_a_store_that_refuses_is_no_damage_of_the_shardings(item: Path) -> None:
    (item / "_sharding").unlink(missing_ok=True)
    (item / "_sharding").mkdir()
    with pytest.raises(StoreError, match="Is a directory"):
        treering.load(item)


def test_shardings_that_are_damaged_are_noted(item: Path) -> None:
    (item / "_sharding").write_bytes(b"{")
    assert "note: the shardings that were recorded cannot be read: _sharding is not JSON" in str(treering.inspect(item))


def test_a_missing_chunk_is_zero_only_where_orbax_left_zeros_out(item: Path) -> None:
    (item / "params.big" / "0.0").unlink()
    with pytest.raises(CorruptError, match=r"chunk 0 of 1 is missing.*params/big"):
        treering.load(item)
    assert [finding.key for finding in treering.verify(item).findings] == ["params/big"]
    _change(item, store_array_data_equal_to_fill_value=False)
    assert not np.asarray(treering.load(item)["params"]["big"]).any()
    document = item / "params.big" / ".zarray"
    document.write_bytes(document.read_bytes().replace(b'"fill_value":null', b'"fill_value":1.5'))
    with pytest.raises(CorruptError, match="is missing"):
        treering.load(item)


def test_strings_tuples_and_a_bare_leaf(item: Path) -> None:
    def entry(kind: str, *path: str, skipped: bool = False) -> dict[str, Any]:
        keys = [{"key": key, "key_type": 2} for key in path]
        return {"key_metadata": keys, "value_metadata": {"value_type": kind, "skip_deserialize": skipped}}

    _change(item, tree_metadata={"1": entry("string", "name"), "2": entry("Tuple", "none", skipped=True)})
    with pytest.raises(CorruptError, match="name"):
        treering.load(item)
    (item / "_strings.json").write_text('{"name": "hällo"}')
    assert treering.load(item) == {"name": "hällo", "none": ()}
    _change(item, tree_metadata={"1": entry("None", skipped=True)})
    assert treering.load(item) is None
    _change(item, tree_metadata={})
    assert treering.load(item) == {}
    _change(item, tree_metadata={"1": entry("Secret", "a", skipped=True)})
    with pytest.raises(UnsupportedError, match="Secret"):
        treering.load(item)


def test_a_database_that_is_lost_is_damage_where_there_were_arrays(golden: Path) -> None:
    place = golden / "ocdbt_zarr2"
    (place / "manifest.ocdbt").unlink()
    with pytest.raises(CorruptError, match="the array 'lr' is missing"):
        treering.load(place)
    leaf = {"key_metadata": [{"key": "n", "key_type": 2}], "value_metadata": {"value_type": "None"}}
    _change(place, tree_metadata={"n": leaf})
    assert treering.load(place) == {"n": None}


def test_two_leaves_of_one_name_are_refused_and_no_others(item: Path) -> None:
    node = json.loads((item / "_METADATA").read_bytes())["tree_metadata"]
    twin = {"key_metadata": [{"key": "opt.0", "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    _change(item, tree_metadata=node | {"('opt.0',)": twin})
    with pytest.raises(CorruptError, match=r"two leaves have the name 'opt\.0'"):
        treering.load(item)
    assert treering.load(item, only="step") == {"step": 7}


@pytest.mark.parametrize("key", ["..", "../../outside", "/etc", "a\0b", "."])
def test_no_name_leads_out_of_the_folder(item: Path, key: str) -> None:
    shutil.copytree(item / "opt.0", item.parent.parent / "outside", dirs_exist_ok=True)
    twin = {"key_metadata": [{"key": key, "key_type": 2}], "value_metadata": {"value_type": "jax.Array"}}
    _change(item, tree_metadata={"x": twin})
    with pytest.raises(CorruptError, match="leads out of the folder"):
        treering.load(item)


def test_no_link_leads_out_of_the_folder(item: Path) -> None:
    (item / "opt.0").rename(item.parent / "outside")
    (item / "opt.0").symlink_to(item.parent / "outside")
    with pytest.raises(CorruptError, match="link that leads out"):
        treering.load(item)


def test_a_step_that_is_a_link_out_is_refused_and_not_passed_over(golden: Path) -> None:
    root = golden / "manager"
    (root / "20").rename(golden / "outside")
    (root / "20").symlink_to(golden / "outside")
    with pytest.raises(CorruptError, match="link that leads out"):
        treering.load(root)
    shutil.rmtree(root / "10")
    shutil.rmtree(root / "metadata")
    with pytest.raises(NotFoundError):
        treering.load(root)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ([("a", 2), ("1", 1)], "has no item 0"),
        ([("opt", 2)], "does not fit beside the others"),
        ([("opt", 2), ("0", 1), ("x", 2)], "does not fit beside the others"),
        ([("opt", 2), ("0", 2)], "does not fit beside the others"),
        ([("a", 3)], "key type"),
        ([("a", 2)] * 2000, "nested"),
    ],
)
def test_paths_that_make_no_tree(item: Path, path: list[tuple[str, int]], problem: str) -> None:
    node = json.loads((item / "_METADATA").read_bytes())["tree_metadata"]
    keys = [{"key": key, "key_type": kind} for key, kind in path]
    twin = {"key_metadata": keys, "value_metadata": {"value_type": "None", "skip_deserialize": True}}
    _change(item, tree_metadata=node | {"x": twin})
    with pytest.raises(TreeringError, match=problem):
        treering.load(item)


def _damaged(place: Path) -> Iterator[None]:
    """Cut off and flip each file of a checkpoint in a few places, one at a time."""
    for number, file in enumerate(sorted(path for path in place.rglob("*") if path.is_file())):
        data = file.read_bytes()
        for at in {len(data) * part // 5 for part in range(5)} if data else ():
            cut = number % 2 == at % 2
            file.write_bytes(data[:at] if cut else data[:at] + bytes([data[at] ^ 0x14]) + data[at + 1 :])
            yield
        file.write_bytes(data)


@pytest.mark.parametrize("name", ["sharded_2x4", "v1_state"])
def test_damage_is_an_error_of_ours(golden: Path, name: str) -> None:
    seen = total = 0
    for _ in _damaged(golden / name):
        total += 1
        try:
            seen += not treering.verify(golden / name).ok
        except TreeringError:
            seen += 1
    assert total // 4 < seen <= total


def test_an_empty_folder_and_a_marker_alone_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    with pytest.raises(NotFoundError):
        treering.load(tmp_path)
    (tmp_path / "_CHECKPOINT_METADATA").touch()
    with pytest.raises(NotFoundError, match="an Orbax checkpoint"):
        treering.load(tmp_path)
    (tmp_path / "_METADATA").touch()
    with pytest.raises(CorruptError, match="_METADATA is not JSON"):
        treering.load(tmp_path)
