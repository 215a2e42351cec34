"""Tuples and namedtuples that Orbax recorded, and arrays that lie raw in its files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorstore

import treering
from tests.system_calls import spans_read
from treering.errors import CorruptError, MismatchError, TreeringError, UnsupportedError

GOLDEN = Path(__file__).parent / "golden" / "orbax"
LEAF = {"category": "custom", "clazz": "ValueMetadataEntry", "data": {"value_type": "jax.Array"}}


def _named(module: str, name: str, **fields: Any) -> dict[str, Any]:
    entries = [{"key": key, "value": value} for key, value in fields.items()]
    return {"category": "namedtuple", "module": module, "clazz": name, "entries": entries}


def _pair(*entries: Any) -> dict[str, Any]:
    return {"category": "custom", "clazz": "tuple", "entries": entries}


def _entry(*path: tuple[str, int], kind: str = "jax.Array") -> dict[str, Any]:
    keys = [{"key": key, "key_type": number} for key, number in path]
    skipped = kind in ("Tuple", "NamedTuple", "None")
    return {"key_metadata": keys, "value_metadata": {"value_type": kind, "skip_deserialize": skipped}}


def _rich(place: Path, tree: Any, *entries: Any) -> Path:
    node = json.loads((place / "_METADATA").read_bytes())
    node["tree_metadata"] = {str(number): entry for number, entry in enumerate(entries)}
    node["value_metadata_tree"] = json.dumps(tree)
    (place / "_METADATA").write_text(json.dumps(node))
    return place


@pytest.fixture
def item(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "plain_zarr2", tmp_path / "item"))


def test_tuples_and_namedtuples_come_back_without_a_target(item: Path) -> None:
    shutil.copytree(item / "opt.0", item / "opt.1")
    shutil.copytree(item / "opt.0", item / "category")
    entries = [
        _entry(("opt", 2), ("0", 1)),
        _entry(("opt", 2), ("1", 1)),
        _entry(("state", 2), ("nu", 2), kind="None"),
        _entry(("state", 2), ("mu", 2), kind="Tuple"),
        _entry(("empty", 2), kind="NamedTuple"),
        _entry(("category", 2)),
    ]
    state = _named("optax", "ScaleByAdamState", mu=LEAF, nu=LEAF)
    tree = {"opt": _pair(LEAF, LEAF), "state": state, "empty": LEAF, "category": LEAF}
    found = treering.load(_rich(item, tree, *entries))
    assert type(found["opt"]) is tuple
    assert [leaf.tolist() for leaf in found["opt"]] == [[1, 2], [1, 2]]
    assert (type(found["state"]).__module__, type(found["state"]).__name__) == ("optax", "ScaleByAdamState")
    assert found["state"]._asdict() == {"mu": (), "nu": None}
    assert isinstance(found["empty"], tuple)
    assert found["category"].tolist() == [1, 2]
    assert "ScaleByAdamState" in str(treering.inspect(item))


def test_with_a_target_nothing_changes(item: Path) -> None:
    found = treering.load(_rich(item, {"opt": _pair(LEAF)}, _entry(("opt", 2), ("0", 1))), {"opt": [np.zeros(2, "f4")]})
    assert type(found["opt"]) is list
    assert found["opt"][0].tolist() == [1, 2]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "tree",
    [
        {"opt": _pair()},
        {"opt": _pair(LEAF, LEAF)},
        {"opt": _named("m", "N", a=LEAF)},
        {"opt": 3},
        {"opt": _named("m", "N") | {"entries": [3]}},
        {"opt": _named("m", "N") | {"module": 3}},
        {"opt": _pair() | {"entries": None}},
    ],
    ids=str,
)
def test_records_that_are_not_those_of_the_leaves(item: Path, tree: Any) -> None:
    with pytest.raises(CorruptError):
        treering.load(_rich(item, tree, _entry(("opt", 2), ("0", 1))))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested too deep"),
        ("{", "not JSON"),
        ('{"a":' * 900 + "[" + ",".join(["{}"] * 60_000) + "]" + "}" * 900, "nested too deep"),
    ],
    ids=["deep", "cut", "wide"],
)
def test_hostile_records(item: Path, text: str, problem: str) -> None:
    _rich(item, {}, _entry(("opt", 2), ("0", 1)))
    node = json.loads((item / "_METADATA").read_bytes())
    (item / "_METADATA").write_text(json.dumps(node | {"value_metadata_tree": text}))
    with pytest.raises((UnsupportedError, CorruptError), match=f"value_metadata_tree.*{problem}"):
        treering.load(item)


# ------------------------------------------------------------------------------------------------------------------ raw


def _raw_item(place: Path, arrays: dict[str, Any], chunks: dict[str, tuple[int, ...]], *, ocdbt: bool) -> Path:
    place.mkdir()
    base: Any = {"driver": "file", "path": f"{place}/"}
    if ocdbt:
        base = {"driver": "ocdbt", "base": base, "config": {"max_inline_value_bytes": 100}}
    for name, array in arrays.items():
        kvstore = {**base, "path": f"{name}/" if ocdbt else f"{place}/{name}/"}
        metadata = {"shape": array.shape, "chunks": chunks[name], "dtype": array.dtype.str, "compressor": None}
        spec = {"driver": "zarr", "kvstore": kvstore, "metadata": metadata, "create": True}
        tensorstore.open(spec | {"store_data_equal_to_fill_value": True}).result()[...] = array
    entries = {name: _entry((name, 2), kind="np.ndarray") for name in arrays}
    document = {"tree_metadata": entries, "use_ocdbt": ocdbt, "use_zarr3": False}
    (place / "_METADATA").write_text(json.dumps(document | {"store_array_data_equal_to_fill_value": True}))
    return place


ARRAYS = {
    "whole": np.arange(600, dtype=np.float32).reshape(20, 30),
    "grid": np.arange(2400, dtype=np.int16).reshape(40, 60),
    "edge": np.arange(35, dtype=np.int32).reshape(5, 7),
    "flags": np.arange(300) % 3 == 0,
    "tiny": np.arange(4, dtype=np.int8),
}
CHUNKS = {"whole": (20, 30), "grid": (20, 15), "edge": (2, 7), "flags": (300,), "tiny": (4,)}


@pytest.mark.parametrize("ocdbt", [True, False])
def test_raw_chunks_are_rows_that_no_codec_touches(
    tmp_path: Path, ocdbt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their bytes are read into the memory of the array, and what a codec makes is not."""
    place = _raw_item(tmp_path / "item", ARRAYS, CHUNKS, ocdbt=ocdbt)
    raw = ["whole", "grid"] if ocdbt else ["whole", "grid", "tiny"]
    spans = spans_read(monkeypatch)
    for mapped in (False, True):
        spans.clear()
        found = treering.load(place, only=raw, mapped=mapped)
        for name in raw:
            np.testing.assert_array_equal(found[name], ARRAYS[name])
        assert sum(count for _, count in spans) == sum(ARRAYS[name].nbytes for name in raw)
    spans.clear()
    with treering.open(place) as opened:
        np.testing.assert_array_equal(opened["grid"][3:33, ::7], ARRAYS["grid"][3:33, ::7])
    assert sum(count for _, count in spans) == ARRAYS["grid"].nbytes
    everything = treering.load(place)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(everything[name], array)
    assert treering.verify(place).ok


def test_raw_files_that_were_cut_or_lost(tmp_path: Path) -> None:
    place = _raw_item(tmp_path / "item", ARRAYS, CHUNKS, ocdbt=False)
    (place / "grid" / "1.2").write_bytes(b"1")
    (place / "whole" / "0.0").unlink()
    for name, problem in (("grid", "a chunk has 600 bytes, the file has 1"), ("whole", "chunk 0 of 1 is missing")):
        with pytest.raises(CorruptError, match=problem):
            treering.load(place, only=name)
    assert treering.load(place, only="tiny")["tiny"].tolist() == [0, 1, 2, 3]
    store = _raw_item(tmp_path / "store", ARRAYS, CHUNKS, ocdbt=True)
    for file in (store / "d").iterdir():
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 3])
    for mapped in (False, True):
        with pytest.raises(TreeringError):
            treering.load(store, mapped=mapped)


def test_rows_of_many_files(tmp_path: Path) -> None:
    arrays = {f"a{number}": np.full(64, number, np.int64) for number in range(150)}
    place = _raw_item(tmp_path / "item", arrays, dict.fromkeys(arrays, (64,)), ocdbt=False)
    found = treering.load(place)
    assert [int(found[name][5]) for name in arrays] == list(range(150))


class _Empty(NamedTuple):
    """What a transformation without a state has, in optax."""


def test_none_is_an_empty_namedtuple_of_the_target(item: Path) -> None:
    node = json.loads((item / "_METADATA").read_bytes())
    entries = [_entry(("opt", 2), ("0", 1)), _entry(("opt", 2), ("1", 1), kind="None")]
    node["tree_metadata"] = {str(number): entry for number, entry in enumerate(entries)}
    (item / "_METADATA").write_text(json.dumps(node))
    found = treering.load(item, {"opt": (np.zeros(2, "f4"), _Empty())})
    assert found["opt"][1] == _Empty()
    assert treering.load(item, {"opt": (np.zeros(2, "f4"), None)})["opt"][1] is None
    with pytest.raises(MismatchError, match="opt/1"):
        treering.load(item, {"opt": (np.zeros(2, "f4"), {})})
