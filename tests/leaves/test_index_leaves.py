"""index_leaves: saves that were left without an index, and indexes that are lost or damaged."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tests import faults
from tests.folders import listing
from tests.leaves.folder.directories import cut_moves_short
from tests.leaves.saved import INDEX, arrays_at, index_at, put, stored, visible
from tests.trees import assert_same
from treering.errors import CorruptError, FormatError, MismatchError, NotFoundError, StoreError
from treering.leaves import index_leaves, tree_serialize_leaves

GOLDEN = Path(__file__).parents[1] / "compat" / "golden" / "eformer"
TREE: dict[str, Any] = {
    "w": put(np.arange(64, dtype="f4").reshape(8, 8), P("x")),
    "a.b": np.arange(50_000),
    "u": jnp.ones(3, "uint4"),
    "n": [None, 2.5, {}],
}
OTHER: dict[str, Any] = {"w": {"deeper": jnp.ones(2)}, "v": jnp.arange(3)}


def left(path: Path, tree: Any, prefix: str | None = None, **options: Any) -> None:
    """Save without the index."""
    tree_serialize_leaves(path, tree, prefix=prefix, write_index=False, **options)


# ----------------------------------------------------------------------------------------------- saves without an index


@pytest.mark.parametrize("prefix", [None, "model"])
@pytest.mark.parametrize("codec", [None, {"id": "zstd", "level": 1}], ids=["raw", "zstd"])
def test_a_save_without_an_index_is_taken_up(prefix: str | None, codec: Any, tmp_path: Path) -> None:
    seen: list[bool] = []
    left(tmp_path / "d", TREE, prefix, compressor=codec, commit_callback=lambda: seen.append(True))
    assert seen == [True]
    assert not (tmp_path / "d" / INDEX).exists()
    with pytest.raises(NotFoundError, match="index_leaves"):
        stored(tmp_path / "d", prefix)
    index_leaves(tmp_path / "d")
    assert_same(stored(tmp_path / "d", prefix), TREE, restored=False)
    tree_serialize_leaves(tmp_path / "same", TREE, prefix=prefix, compressor=codec)
    assert visible(tmp_path / "d") == visible(tmp_path / "same")


def test_what_is_indexed_already_stays_as_it_is(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", TREE)
    before = listing(tmp_path / "d")
    index_leaves(str(tmp_path / "d") + "/")
    assert listing(tmp_path / "d") == before


def test_the_old_tree_is_there_until_the_new_one_is_indexed(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", TREE)
    left(tmp_path / "d", OTHER)
    assert_same(stored(tmp_path / "d"), TREE, restored=False)
    index_leaves(tmp_path / "d")
    assert_same(stored(tmp_path / "d"), OTHER, restored=False)
    assert visible(tmp_path / "d") == {INDEX, "w/deeper/.zarray", "w/deeper/0", "v/.zarray", "v/0"}
    before = listing(tmp_path / "d")
    index_leaves(tmp_path / "d")
    assert listing(tmp_path / "d") == before


def test_the_newest_of_each_prefix_wins(tmp_path: Path) -> None:
    for number in range(4):
        left(tmp_path / "d", {"w": jnp.full(number + 1, number), f"only{number}": jnp.ones(1)}, "model")
        left(tmp_path / "d", {"x": number, "y": np.ones(number)}, f"p{number % 2}")
    index_leaves(tmp_path / "d")
    assert_same(stored(tmp_path / "d", "model"), {"w": jnp.full(4, 3), "only3": jnp.ones(1)}, restored=False)
    assert [stored(tmp_path / "d", prefix)["x"] for prefix in ("p0", "p1")] == [2, 3]
    listed = {entry["path"] for entries in index_at(tmp_path / "d")["prefixes"].values() for entry in entries}
    assert listed == {"model/w", "model/only3", "p0/y", "p1/y"}
    assert visible(tmp_path / "d") == {INDEX, *(f"{name}/{file}" for name in listed for file in (".zarray", "0"))}


def test_a_save_with_an_index_replaces_one_without(tmp_path: Path) -> None:
    left(tmp_path / "d", {"w": jnp.ones(5), "gone": jnp.ones(2)}, "model")
    left(tmp_path / "d", {"w": jnp.ones(6), "gone": jnp.ones(3)}, "model")
    left(tmp_path / "d", {"x": jnp.ones(1)}, "other")
    tree_serialize_leaves(tmp_path / "d", {"w": jnp.zeros(3)}, prefix="model")
    assert_same(stored(tmp_path / "d", "model"), {"w": jnp.zeros(3)}, restored=False)
    assert set(index_at(tmp_path / "d")["prefixes"]) == {"model"}
    assert visible(tmp_path / "d") == {INDEX, "model/w/.zarray", "model/w/0", "other/x/.zarray", "other/x/0"}
    # The older ones never come back; the one of another prefix is still to be taken up.
    index_leaves(tmp_path / "d")
    assert_same(stored(tmp_path / "d", "model"), {"w": jnp.zeros(3)}, restored=False)
    assert_same(stored(tmp_path / "d", "other"), {"x": jnp.ones(1)}, restored=False)


@pytest.mark.parametrize(
    "tree",
    [{"m": {"a": jnp.ones(2)}}, {"m": jnp.ones(2)}, {"m": {"a": {"w": {"x": [1.5, np.ones(1)]}}}}],
    ids=["above", "far above", "below"],
)
def test_a_save_without_an_index_is_not_buried_by_one_of_another_prefix(tree: Any, tmp_path: Path) -> None:
    left(tmp_path / "d", {"a": {"w": jnp.zeros(2)}}, "m")
    with pytest.raises(MismatchError, match="prefix 'm' that was saved without an index"):
        tree_serialize_leaves(tmp_path / "d", tree)
    index_leaves(tmp_path / "d")
    assert_same(stored(tmp_path / "d", "m"), {"a": {"w": jnp.zeros(2)}}, restored=False)


def test_saves_without_an_index_survive_saves_of_other_prefixes(tmp_path: Path) -> None:
    for prefix in ("a", "b"):
        left(tmp_path / "d", TREE, prefix)
    for number in range(3):
        tree_serialize_leaves(tmp_path / "d", {"n": number, "w": jnp.ones(number)}, prefix="c")
    index_leaves(tmp_path / "d")
    for prefix in ("a", "b"):
        assert_same(stored(tmp_path / "d", prefix), TREE, restored=False)
    assert stored(tmp_path / "d", "c")["n"] == 2


# ---------------------------------------------------------------------------------------------------- an index is lost


def remove(index: Path) -> None:
    index.unlink()


def cut(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:-20])


def empty(index: Path) -> None:
    index.write_bytes(b"")


def flip_a_bit_of_each_record(index: Path) -> None:
    document = json.loads(index.read_text())
    for node in document["treering"].values():
        text = node["record"]
        node["record"] = text[:200] + chr(ord(text[200]) ^ 1) + text[201:]
    index.write_text(json.dumps(document))


def drop_the_records(index: Path) -> None:
    document = json.loads(index.read_text())
    del document["treering"]
    index.write_text(json.dumps(document))


def drop_an_entry(index: Path) -> None:
    document = json.loads(index.read_text())
    for entries in [document.get("arrays"), *document["prefixes"].values()]:
        if entries:
            entries.pop()
    index.write_text(json.dumps(document))


LOSSES = [remove, cut, empty, flip_a_bit_of_each_record, drop_the_records, drop_an_entry]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("lose", LOSSES)
def test_an_index_is_made_anew_with_every_checksum(lose: Callable[[Path], None], tmp_path: Path) -> None:
    trees: dict[str | None, Any] = {None: TREE, "model": OTHER, "deep/er": {"w": jnp.ones(1), "n": "text"}}
    for prefix, tree in trees.items():
        tree_serialize_leaves(tmp_path / "d", {"old": jnp.ones(9)}, prefix=prefix)
        tree_serialize_leaves(tmp_path / "d", tree, prefix=prefix)
    whole = visible(tmp_path / "d")
    listed = {prefix: arrays_at(tmp_path / "d", prefix) for prefix in trees}
    lose(tmp_path / "d" / INDEX)
    index_leaves(tmp_path / "d")
    assert visible(tmp_path / "d") == whole
    for prefix, tree in trees.items():
        assert_same(stored(tmp_path / "d", prefix), tree, restored=False)
        assert arrays_at(tmp_path / "d", prefix) == listed[prefix]
    flip_last_byte(tmp_path / "d/v/0" if "v/0" in whole else tmp_path / "d/model/v/0")
    with pytest.raises(CorruptError):
        stored(tmp_path / "d", "model")
    # And saving goes on.
    tree_serialize_leaves(tmp_path / "d", OTHER, prefix="model")
    assert_same(stored(tmp_path / "d", "model"), OTHER, restored=False)


def flip_last_byte(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_who_meets_a_damaged_record_is_told_what_mends_it(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", TREE, prefix="a")
    index = tmp_path / "d" / INDEX
    index.write_text(index.read_text().replace("numpy", "mumpy", 1))
    for work in (lambda: stored(tmp_path / "d", "a"), lambda: tree_serialize_leaves(tmp_path / "d", {}, prefix="a")):
        with pytest.raises(CorruptError, match="index_leaves"):
            work()
    index_leaves(tmp_path / "d")
    assert_same(stored(tmp_path / "d", "a"), TREE, restored=False)


def test_a_lost_index_and_saves_that_were_waiting(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", {"w": jnp.ones(2), "old": jnp.ones(1)}, prefix="model")
    left(tmp_path / "d", {"w": jnp.ones(3)}, "model")
    left(tmp_path / "d", TREE)
    (tmp_path / "d" / INDEX).unlink()
    index_leaves(tmp_path / "d")
    assert_same(stored(tmp_path / "d", "model"), {"w": jnp.ones(3)}, restored=False)
    assert_same(stored(tmp_path / "d"), TREE, restored=False)
    assert not (tmp_path / "d/model/old").exists()


@pytest.mark.parametrize("name", ["plain", "index_v1", "sharded_2x4", "dtypes"])
def test_a_lost_index_of_eformer_is_made_anew(name: str, tmp_path: Path) -> None:
    path = tmp_path / "d"
    shutil.copytree(GOLDEN / name, path)
    want, listed = stored(path), arrays_at(path)
    (path / INDEX).unlink()
    index_leaves(path)
    assert arrays_at(path) == listed
    found = stored(path)
    assert_same(flat(found), flat(want), restored=False)


def flat(tree: Any, above: str = "") -> dict[str, Any]:
    """Leaves by path, sorted: the order of folders is not that of an index."""
    if not isinstance(tree, dict):
        return {above: tree}
    items = [item for key in tree for item in flat(tree[key], f"{above}/{key}").items()]
    return dict(sorted(items))


def test_arrays_of_others_beside_our_own_trees(tmp_path: Path) -> None:
    path = tmp_path / "d"
    shutil.copytree(GOLDEN / "prefixed", path)
    want = {prefix: stored(path, prefix) for prefix in ("model", "optimizer")}
    tree_serialize_leaves(path, TREE)
    (path / INDEX).unlink()
    index_leaves(path)
    assert_same(stored(path), TREE, restored=False)
    for prefix, tree in want.items():
        assert_same(flat(stored(path, prefix)), flat(tree), restored=False)
    # Nothing twice.
    index = index_at(path)
    paths = [entry["path"] for entries in [index["arrays"], *index["prefixes"].values()] for entry in entries]
    assert len(paths) == len(set(paths))
    before = listing(path)
    index_leaves(path)
    assert listing(path) == before


def test_leaves_directories_inside_are_neither_listed_nor_replaced(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "plain", tmp_path / "runs" / "theirs")
    tree_serialize_leaves(tmp_path / "runs" / "ours", TREE)
    before = listing(tmp_path / "runs")
    with pytest.raises(NotFoundError, match="there are leaves directories in it: 'ours', 'theirs'"):
        stored(tmp_path / "runs")
    with pytest.raises(NotFoundError, match=r"nothing in .* can be indexed"):
        index_leaves(tmp_path / "runs")
    assert listing(tmp_path / "runs") == before
    shutil.copytree(GOLDEN / "plain" / "params", tmp_path / "runs" / "params")
    index_leaves(tmp_path / "runs")
    tree_serialize_leaves(tmp_path / "runs", {"w": jnp.ones(1)})
    after = listing(tmp_path / "runs")
    assert {name: after[name] for name in before} == before


def test_what_is_no_leaf_is_not_listed(tmp_path: Path) -> None:
    path = tmp_path / "d"
    shutil.copytree(GOLDEN / "plain", path)
    listed = arrays_at(path)
    (path / INDEX).unlink()
    for name, text in {"v3/zarr.json": "{}", "bad/.zarray": "{", "mine/notes.txt": "x"}.items():
        (path / name).parent.mkdir()
        (path / name).write_text(text)
    index_leaves(path)
    assert arrays_at(path) == listed


def test_a_save_on_its_way_is_not_taken_for_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_serialize_leaves(tmp_path / "d", TREE, prefix="model")
    (tmp_path / "d" / INDEX).unlink()
    done: list[str] = []

    def note(name: Any, flags: int, *_: object, **__: object) -> None:
        if Path(name).name == "record.json" and flags & os.O_CREAT:  # the last file of a save before its index
            done.append("staged")

    def index_first(descriptor: int, operation: int) -> None:
        if done == ["staged"] and operation & fcntl.LOCK_EX:  # the lock of the index
            done.append("indexed")
            index_leaves(tmp_path / "d")
            assert_same(stored(tmp_path / "d", "model"), TREE, restored=False)

    faults.before(monkeypatch, os, "open", note)
    faults.before(monkeypatch, fcntl, "flock", index_first)
    tree_serialize_leaves(tmp_path / "d", OTHER, prefix="model")
    assert done == ["staged", "indexed"]
    assert_same(stored(tmp_path / "d", "model"), OTHER, restored=False)
    assert not (tmp_path / "d/model/u").exists()


# ----------------------------------------------------------------------------------------------- more is lost than that


def test_arrays_whose_record_is_lost_are_named_and_everything_else_is_indexed(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", {"lost": jnp.ones(2)}, prefix="one")
    (attempt,) = attempts_at(tmp_path / "d")
    tree_serialize_leaves(tmp_path / "d", OTHER, prefix="two")
    (tmp_path / "d" / INDEX).unlink()
    shutil.rmtree(tmp_path / "d" / ".treering" / attempt)
    with pytest.raises(CorruptError, match="'one/lost'"):
        index_leaves(tmp_path / "d")
    assert set(index_at(tmp_path / "d")["prefixes"]) == {"two"}
    assert_same(stored(tmp_path / "d", "two"), OTHER, restored=False)


def attempts_at(path: Path) -> set[str]:
    return {inner.name for inner in (path / ".treering").iterdir() if len(inner.name) == 16}


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), flip_last_byte], ids=["gone", "flipped"])
def test_a_tree_that_has_lost_a_leaf_is_not_taken_for_whole(damage: Callable[[Path], None], tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "d", OTHER, prefix="one")
    tree_serialize_leaves(tmp_path / "d", OTHER, prefix="two")
    (tmp_path / "d" / INDEX).unlink()
    damage(tmp_path / "d/one/v/.zarray")
    with pytest.raises(CorruptError, match="'one/w/deeper'"):
        index_leaves(tmp_path / "d")
    assert set(index_at(tmp_path / "d")["prefixes"]) == {"two"}


def test_a_waiting_save_whose_record_is_damaged_is_named(tmp_path: Path) -> None:
    left(tmp_path / "d", TREE, "one")
    (attempt,) = attempts_at(tmp_path / "d")
    flip_last_byte(tmp_path / "d/.treering" / attempt / "record.json")
    with pytest.raises(CorruptError, match=attempt):
        index_leaves(tmp_path / "d")
    assert not (tmp_path / "d" / INDEX).exists()
    left(tmp_path / "d", OTHER, "two")
    for _ in range(2):
        with pytest.raises(CorruptError, match=attempt):
            index_leaves(tmp_path / "d")
        assert_same(stored(tmp_path / "d", "two"), OTHER, restored=False)


def test_nothing_to_index_is_an_error_that_makes_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        index_leaves(tmp_path / "nothing")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "mine.txt").write_text("x")
    with pytest.raises(NotFoundError, match="nothing"):
        index_leaves(tmp_path / "d")
    assert not (tmp_path / "nothing").exists()
    assert visible(tmp_path / "d") == {"mine.txt"}
    with pytest.raises(StoreError):
        index_leaves(tmp_path / "d" / "mine.txt")


def test_an_index_of_another_format_is_not_replaced(tmp_path: Path) -> None:
    left(tmp_path / "d", TREE)
    (tmp_path / "d" / INDEX).write_text('{"format": "other"}')
    with pytest.raises(FormatError):
        index_leaves(tmp_path / "d")
    assert (tmp_path / "d" / INDEX).read_text() == '{"format": "other"}'


def test_links_are_no_arrays(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path / "outside", {"secret": jnp.ones(3)})
    left(tmp_path / "d", {"w": jnp.ones(2)})
    (tmp_path / "d" / "link").symlink_to(tmp_path / "outside")
    index_leaves(tmp_path / "d")
    assert arrays_at(tmp_path / "d") == {"w": (2, "float32")}


@pytest.mark.parametrize("separator", [".", "/"])
def test_an_array_that_an_index_lists_twice_is_replaced_by_two_saves_at_once(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "d"
    (path / "m" / "w").mkdir(parents=True)
    array = {"shape": [3], "chunks": [3], "dtype": "<f4", "order": "C", "fill_value": 0, "compressor": None}
    array |= {"filters": None, "zarr_format": 2, "dimension_separator": separator}
    (path / "m" / "w" / ".zarray").write_text(json.dumps(array))  # without chunks: tensorstore leaves zeros out
    entry = {"path": "m/w", "shape": [3], "dtype": "float32"}
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": [entry]}, "arrays": [entry]}
    (path / INDEX).write_text(json.dumps(index))
    left(path, {"x": np.ones(2)})
    left(path, {"y": np.ones(3)}, "m")
    index_leaves(path)
    assert_same(stored(path, None), {"x": np.ones(2)}, restored=False)
    assert_same(stored(path, "m"), {"y": np.ones(3)}, restored=False)
    assert not (path / "m" / "w").exists()


def test_two_saves_whose_moves_were_cut_short_do_not_clear_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "d"
    (path / "m" / "w").mkdir(parents=True)
    array = {"shape": [3], "chunks": [3], "dtype": "<f4", "order": "C", "fill_value": 0, "compressor": None}
    (path / "m" / "w" / ".zarray").write_text(json.dumps({**array, "filters": None, "zarr_format": 2}))
    entry = {"path": "m/w", "shape": [3], "dtype": "float32"}
    index = {"format": "tensorstore", "version": "2.0", "prefixes": {"m": [entry]}, "arrays": [entry]}
    (path / INDEX).write_text(json.dumps(index))
    left(path, {"x": np.ones(2)})
    left(path, {"w": np.full(3, 7.0)}, "m")

    with monkeypatch.context() as patch:
        cut_moves_short(patch)
        with pytest.raises(KeyboardInterrupt):
            index_leaves(path)
    tree_serialize_leaves(path, {"q": np.ones(1)}, prefix="z")
    assert_same(stored(path, "m"), {"w": np.full(3, 7.0)}, restored=False)
