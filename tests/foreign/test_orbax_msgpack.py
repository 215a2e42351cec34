"""Old items of Orbax: one file on flax's wire, with texts in place of the arrays that lie beside it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

import treering
from tests.compat.wire import array_ext, chunked, ext, keyed, packed
from treering import serialization
from treering.errors import CorruptError, NotFoundError, TreeringError, UnsupportedError

GOLDEN = Path(__file__).parent / "golden" / "orbax"
INLINE = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    """Arrays in folders of their own, without the document of a newer item."""
    place = Path(shutil.copytree(GOLDEN / "plain_zarr2", tmp_path / "item"))
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding", "commit_success.txt"):
        (place / name).unlink()
    return place


def _tree() -> dict[str, Any]:
    opt = ["PLACEHOLDER://opt.0", {"mu": "AGGREGATED://opt.1.mu", "none": None, "empty": {}, "list": []}]
    inline = {"array": INLINE, "scalar": np.float32(1.5), "rate": 0.25, "text": "a note", "long": "x" * 5000}
    return {"opt": opt, "step": 7, "big": "PLACEHOLDER://params.big", "inline": inline}


def test_values_in_the_file_and_arrays_beside_it(arrays: Path) -> None:
    data = serialization.msgpack_serialize(_tree())
    (arrays / "checkpoint").write_bytes(data)
    tree = treering.load(arrays)
    wanted = treering.load(GOLDEN / "plain_zarr2")
    np.testing.assert_array_equal(tree["big"], wanted["params"]["big"])
    np.testing.assert_array_equal(tree["opt"][1]["mu"], wanted["opt"][1]["mu"])
    assert tree["opt"][0].tolist() == [1, 2]
    assert {key: tree["opt"][1][key] for key in ("none", "empty", "list")} == {"none": None, "empty": {}, "list": []}
    assert tree["inline"]["array"].tobytes() == INLINE.tobytes()
    assert (tree["inline"]["scalar"], type(tree["inline"]["scalar"])) == (1.5, np.float32)
    assert (tree["step"], tree["inline"]["rate"], tree["inline"]["text"]) == (7, 0.25, "a note")
    assert tree["inline"]["long"] == "x" * 5000
    assert "format: Orbax v0 item, plain, msgpack" in str(treering.inspect(arrays))
    assert treering.verify(arrays).ok
    with treering.open(arrays) as opened:
        assert opened["inline/array"][1, 1:].tolist() == [4, 5]


def test_tuples_and_long_names(arrays: Path) -> None:
    shutil.copytree(arrays / "opt.0", arrays / ("n" * 200))
    (arrays / "checkpoint").write_bytes(
        b"\x83"
        + packed("pair")
        + ext(4, packed([1, [2, []]]))
        + packed("far")
        + packed("PLACEHOLDER://" + "n" * 200)
        + packed("none")
        + ext(4, packed([]))
    )
    tree = treering.load(arrays)
    assert (tree["pair"], tree["none"]) == ((1, [2, []]), ())
    assert tree["far"].tolist() == [1, 2]


def test_an_array_in_parts_is_refused_by_name(arrays: Path) -> None:
    parts = chunked({"0": 2, "1": 3}, [array_ext([4], "int8", b"\1\2\3\4"), array_ext([2], "int8", b"\5\6")])
    (arrays / "checkpoint").write_bytes(keyed("w", parts))
    with pytest.raises(UnsupportedError, match="in several parts"):
        treering.load(arrays)


def test_a_placeholder_that_is_longer_than_a_short_text_names_an_array_too(arrays: Path) -> None:
    (arrays / "checkpoint").write_bytes(packed({"far": "PLACEHOLDER://" + "n" * 400}))
    with pytest.raises((CorruptError, TreeringError), match=r"far"):
        treering.load(arrays)


def test_beside_a_document_the_file_gives_the_values_that_are_nowhere_else(tmp_path: Path) -> None:
    place = Path(shutil.copytree(GOLDEN / "plain_zarr2", tmp_path / "item"))
    node = json.loads((place / "_METADATA").read_bytes())
    keys = [{"key": "inline", "key_type": 2}]
    value = {"value_type": "jax.Array", "skip_deserialize": True}
    node["tree_metadata"]["('inline',)"] = {"key_metadata": keys, "value_metadata": value}
    (place / "_METADATA").write_text(json.dumps(node))
    with pytest.raises(UnsupportedError, match="no data"):
        treering.load(place)
    old = {"inline": INLINE, "step": "PLACEHOLDER://step", "unknown": 3}
    (place / "checkpoint").write_bytes(serialization.msgpack_serialize(old))
    tree = treering.load(place)
    assert tree["inline"].tolist() == INLINE.tolist()
    assert tree["step"] == 7
    assert "unknown" not in tree


def test_a_step_of_a_root_and_an_item_of_a_step(arrays: Path, tmp_path: Path) -> None:
    (arrays / "checkpoint").write_bytes(serialization.msgpack_serialize(_tree()))
    root = tmp_path / "root"
    shutil.copytree(arrays, root / "checkpoint_4")
    shutil.copytree(arrays, root / "checkpoint_12" / "default")
    assert "this is checkpoint_12" in str(treering.inspect(root))
    assert treering.load(root)["step"] == 7
    assert treering.load(root / "checkpoint_4")["step"] == 7


@pytest.mark.parametrize(
    "data",
    [b"", b'model_checkpoint_path: "a"\n', b"\x01", packed([1, 2])],
    ids=["empty", "TensorFlow", "number", "list"],
)
def test_other_files_of_that_name_make_no_item(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "checkpoint").write_bytes(data)
    with pytest.raises(NotFoundError):
        treering.load(tmp_path)


@pytest.mark.parametrize("name", ["../outside", "/etc", "a\0b", "opt.7", "opt.0/.."])
def test_names_that_lead_to_no_array(arrays: Path, name: str) -> None:
    (arrays / "checkpoint").write_bytes(packed({"w": f"PLACEHOLDER://{name}"}))
    with pytest.raises(CorruptError, match=r"leads out of the folder|is missing"):
        treering.load(arrays)


def test_two_leaves_with_one_array_are_refused_when_they_are_read(arrays: Path) -> None:
    (arrays / "checkpoint").write_bytes(packed({"a": "PLACEHOLDER://opt.0", "b": "PLACEHOLDER://opt.0", "c": 1}))
    assert treering.load(arrays, only="c") == {"c": 1}
    with pytest.raises(CorruptError, match="two leaves have the name"):
        treering.load(arrays)


def test_hostile_trees(arrays: Path) -> None:
    deep: bytes = packed(1)
    for _ in range(2000):
        deep = keyed("a", deep)
    wide = packed([1] * 60_000)
    for _ in range(1000):
        wide = keyed("a", wide)
    for data in (deep, wide, keyed("t", ext(-1, bytes(4))), keyed("t", b"\xc1")):
        (arrays / "checkpoint").write_bytes(data)
        with pytest.raises(TreeringError):
            treering.load(arrays)


def test_every_cut_and_many_flips_are_a_result_or_an_error_of_ours(arrays: Path) -> None:
    data = serialization.msgpack_serialize({"w": "PLACEHOLDER://opt.0", "x": np.arange(3), "n": [1, {"a": 2.5}]})
    refused = 0
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]):
            (arrays / "checkpoint").write_bytes(damaged)
            try:
                treering.load(arrays)
            except TreeringError:
                refused += 1
    assert refused > len(data)


def test_the_wire_that_orbax_wrote_then(arrays: Path) -> None:
    pair = msgpack.ExtType(4, msgpack.packb([1, 2]))
    (arrays / "checkpoint").write_bytes(msgpack.packb({"pair": pair, "w": "PLACEHOLDER://opt.0"}))
    like = {"pair": (0, 0), "w": np.zeros(2, np.float32)}
    found: Any = treering.load(arrays, like)
    assert found["pair"] == (1, 2)
    assert found["w"].tolist() == [1, 2]
