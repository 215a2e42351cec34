"""What is written for Orbax, as it lies on disk and as treering reads it; Orbax itself reads it in tests/compat."""

from __future__ import annotations

import collections
import errno
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore

import treering
from tests import faults
from tests.stores import copy_to_memory
from tests.trees import assert_same_arrays
from treering.errors import ExistsError, StoreError, TreeringError, UnsupportedError

Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024
Empty = collections.namedtuple("Empty", "")  # noqa: PYI024


def _tree() -> dict[str, Any]:
    return {
        "params": {
            "w": jnp.arange(12, dtype="float32").reshape(3, 4),
            "b": jnp.ones(4, "bfloat16"),
            "a/b": jnp.ones(2),
        },
        "opt": [Pair(np.arange(3), 1.5), Empty(), (np.zeros((0, 3), "int8"),), {}, [], ()],
        "key": jax.random.key(3),
        "none": None,
        "step": 7,
        "done": True,
        "name": "text ä",
        "in": {"x/y": "nested", "long": "x" * 5000},
        "scalar": np.float16(2.5),
    }


def test_an_item_as_orbax_lays_it_out(tmp_path: Path) -> None:
    treering.export(tmp_path / "item", _tree(), to="orbax", metadata={"note": 1, "custom_metadata": {"by": "me"}})
    item = tmp_path / "item"
    assert sorted(file.name for file in item.iterdir()) == [
        "_CHECKPOINT_METADATA", "_METADATA", "_sharding", "_strings.json", "array_metadatas", "commit_success.txt",
        "d", "manifest.ocdbt",
    ]  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["item"]
    # The files of the chunks count too, which a listing does not open.
    assert treering.inspect(item).nbytes == sum(file.stat().st_size for file in item.rglob("*") if file.is_file())
    rows = json.loads((item / "_METADATA").read_bytes())["tree_metadata"]
    assert {key: row["value_metadata"]["value_type"] for key, row in rows.items()} == {
        "('params', 'w')": "jax.Array", "('params', 'b')": "jax.Array", "('params', 'a/b')": "jax.Array",
        "('opt', '0', 'left')": "np.ndarray", "('opt', '0', 'right')": "scalar", "('opt', '1')": "NamedTuple",
        "('opt', '2', '0')": "np.ndarray", "('opt', '3')": "Dict", "('opt', '4')": "List", "('opt', '5')": "Tuple",
        "('key',)": "jax.Array", "('none',)": "None", "('step',)": "scalar", "('done',)": "scalar",
        "('name',)": "string", "('in', 'x/y')": "string", "('in', 'long')": "string", "('scalar',)": "np.ndarray",
    }  # fmt: skip
    assert rows["('opt', '0', 'left')"]["key_metadata"] == [
        {"key": "opt", "key_type": 2}, {"key": "0", "key_type": 1}, {"key": "left", "key_type": 2}
    ]  # fmt: skip
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
    assert store.read("step/0").result().value == (7).to_bytes(8, "little")
    assert json.loads((item / "_strings.json").read_bytes())["in.x"] == {"y": "nested"}
    assert json.loads((item / "_CHECKPOINT_METADATA").read_bytes())["custom_metadata"] == {"note": 1, "by": "me"}


def test_treering_reads_it_back(tmp_path: Path) -> None:
    treering.export(tmp_path / "item", _tree(), to="orbax")
    found = treering.load(tmp_path / "item", like=_tree())
    wanted = _tree()
    assert jax.random.key_data(found.pop("key")).tolist() == jax.random.key_data(wanted.pop("key")).tolist()
    assert_same_arrays(found, wanted)
    assert treering.verify(tmp_path / "item").ok


def test_arrays_of_several_chunks(tmp_path: Path) -> None:
    tree: dict[str, Any] = {
        "rows": np.arange(3 * (5 << 20), dtype=np.float32).reshape(3, 5 << 20),
        "flat": np.arange(2_100_001, dtype=np.float64),
        "deep": np.arange(2 * 3 * 700_001, dtype=np.float64).reshape(2, 3, 700_001),
    }
    treering.save(tmp_path / "ckpt", tree)
    treering.convert(tmp_path / "ckpt", tmp_path / "item", to="orbax")
    for key, array in tree.items():
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": f"file://{tmp_path}/item/", "path": f"{key}/"}}
        assert_same_arrays(tensorstore.open(spec).result().read().result(), array)
    nbytes = sum(file.stat().st_size for file in (tmp_path / "item" / "d").iterdir())
    assert nbytes < 1.01 * sum(array.nbytes for array in tree.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": b"bytes"}, "leaf 'a': a bytes"),
        ({"a": 1j}, "leaf 'a': a complex"),
        ({"a": 1 << 63}, "leaf 'a': an int of more than 64 bits"),
        ({"a": np.array(["x"], "S1")}, None),
        ({"a": jnp.zeros(2, "uint4")}, "leaf 'a': an array of uint4"),
        ({"a": len}, "leaf 'a': "),
        ({1: np.ones(2)}, "its key 1 is no text"),
        ({"a": {"b": np.ones(1)}, "a.b": np.ones(2)}, "'a/b' has the name 'a.b' too"),
        ({"\ud800": np.ones(1)}, "is no name of a tensor"),
        ({"/a": np.ones(1)}, "is no name of a tensor"),
        ({"~": "text"}, "'~' is no name of a text"),
        ({"a": "text", "a/b": "text"}, "'a/b' is no name of a text"),
        ({"a/" * 9999 + "b": "text"}, "is no name of a text"),
        ({"a" * 65_530: np.ones(1)}, "is no name of a tensor"),
        ({"a": "half \ud800"}, "leaf 'a': a str with half of a surrogate pair"),
        ({"a": "long \ud800" * 99_999}, "leaf 'a': a str with half of a surrogate pair"),
    ],
)  # fmt: skip
def test_what_it_cannot_hold_is_refused_by_name(tree: Any, said: str | None, tmp_path: Path) -> None:
    with pytest.raises(TreeringError) as caught:
        treering.export(tmp_path / "item", {"w": np.ones(2), **tree}, to="orbax")
    assert said is None or said in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    if said is not None:
        lose = ["arrays", "names", "objects", "scalars", "strings", "structure"]
        treering.export(tmp_path / "item", {"w": np.ones(2), **tree}, to="orbax", lose=lose)
        assert treering.load(tmp_path / "item")["w"].tolist() == [1, 1]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_that_loses_items_becomes_a_dict_of_the_others(kind: Any, tmp_path: Path) -> None:
    tree = {"l": kind([print, np.ones(1), {"x": np.ones(2)}]), "w": np.zeros(2)}
    wanted = {"l": {"1": tree["l"][1], "2": tree["l"][2]}, "w": tree["w"]}
    treering.export(tmp_path / "lost", tree, to="orbax", lose="objects")
    assert_same_arrays(treering.load(tmp_path / "lost"), wanted)
    treering.save(tmp_path / "run", {"l": kind([np.zeros(1), *tree["l"][1:]]), "w": tree["w"]})
    treering.convert(tmp_path / "run", tmp_path / "part", to="orbax", only=["l/1", "l/2/*", "w"])
    assert_same_arrays(treering.load(tmp_path / "part"), wanted)


def test_an_empty_container_may_have_the_name_of_an_array(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"a.b": {}, "a": {"b": np.ones(2)}})
    treering.convert(tmp_path / "ckpt", tmp_path / "item", to="orbax")
    found = treering.load(tmp_path / "item")
    assert found["a.b"] == {}
    assert found["a"]["b"].tolist() == [1, 1]


def test_a_member_that_custom_metadata_have_too_is_refused(tmp_path: Path) -> None:
    metadata = {"by": "me", "note": 1, "custom_metadata": {"by": "you"}}
    with pytest.raises(UnsupportedError, match="the member 'by' of the metadata: custom_metadata have it too"):
        treering.export(tmp_path / "item", {"w": np.ones(2)}, to="orbax", metadata=metadata)
    assert list(tmp_path.iterdir()) == []
    treering.export(tmp_path / "item", {"w": np.ones(2)}, to="orbax", metadata=metadata, lose="metadata")
    facts = json.loads((tmp_path / "item" / "_CHECKPOINT_METADATA").read_bytes())
    assert facts["custom_metadata"] == {"note": 1, "by": "you"}


def test_a_tree_that_is_one_leaf_or_none(tmp_path: Path) -> None:
    treering.export(tmp_path / "leaf", np.arange(3), to="orbax")
    assert treering.load(tmp_path / "leaf").tolist() == [0, 1, 2]
    treering.export(tmp_path / "empty", {}, to="orbax")
    assert treering.load(tmp_path / "empty") == {}


def test_what_is_at_the_path_stays(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    treering.export(tmp_path / "made", {"a": np.ones(1)}, to="orbax")
    treering.save(tmp_path / "ckpt", {"a": np.ones(1)})
    for taken in ("made", "ckpt"):
        with pytest.raises(ExistsError):
            treering.export(tmp_path / taken, {"a": np.zeros(1)}, to="orbax", overwrite=True)
        assert treering.load(tmp_path / taken)["a"].tolist() == [1]
    assert sorted(place.name for place in tmp_path.iterdir()) == ["ckpt", "made"]


def test_a_path_that_is_no_utf_8_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"w\\udcff' leads to a path that is no UTF-8"):
        treering.export(f"{tmp_path}/w\udcff", {"w": np.ones(2)}, to="orbax")
    assert not list(tmp_path.iterdir())


def test_a_bucket_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "none")
    treering.save(tmp_path / "ckpt", {"a": np.ones(1)})
    copy_to_memory(tmp_path / "ckpt", "memory://orbax/ckpt")
    for url, copy in {
        "memory://orbax/item": "",
        "s3://bucket/item": "; aws s3 cp --recursive folder s3://bucket/item",
    }.items():
        with pytest.raises(UnsupportedError, match="is in a bucket") as caught:
            treering.export(url, {"a": np.ones(1)}, to="orbax")
        assert str(caught.value).endswith(f": treering convert SOURCE folder --to orbax{copy}")
    treering.convert("memory://orbax/ckpt", tmp_path / "item", to="orbax")
    assert treering.load(tmp_path / "item")["a"].tolist() == [1]


def test_what_a_dead_writer_left_is_removed_and_that_of_a_live_one_stays(tmp_path: Path) -> None:
    dead = tmp_path / f"item.orbax-checkpoint-tmp-{'1' * 20}"
    others = [tmp_path / "item.orbax-checkpoint-tmp", tmp_path / f"item2.orbax-checkpoint-tmp-{'1' * 20}"]
    for place in (dead, *others):
        (place / "d").mkdir(parents=True)
    treering.export(tmp_path / "item", {"a": np.ones(1)}, to="orbax")
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "item", *others])


def test_folders_above_do_not_stay_where_none_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(
        monkeypatch, os, "mkdir", errno.ENOSPC, when=lambda path, *_: ".orbax-checkpoint-tmp" in os.fspath(path)
    )
    with pytest.raises(StoreError, match="could not write"):
        treering.export(tmp_path / "new" / "item", {"a": np.ones(1)}, to="orbax")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_listed_is_not_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.fail(monkeypatch, os, "scandir", errno.EIO, when=lambda path: isinstance(path, str) and path.endswith("/d"))
    with pytest.raises(StoreError, match="could not write"):
        treering.export(tmp_path / "item", {"a": np.ones(1)}, to="orbax")
    assert not (tmp_path / "item").exists()


def test_nothing_is_left_of_a_save_that_fails(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt(f"at {done} of {total}")

    treering.save(tmp_path / "ckpt", {"a": np.ones(9)})
    with pytest.raises(KeyboardInterrupt):
        treering.convert(tmp_path / "ckpt", tmp_path / "new" / "item", to="orbax", progress=stop)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["ckpt"]
