"""load: what comes back is what was saved, belongs to the caller, and every damage is named."""

from __future__ import annotations

import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering
from tests import limits, reads
from tests.on_disk import signed_again
from tests.trees import Pair, assert_same, assert_same_structure
from treering.errors import CorruptError, FormatError, NotFoundError, TreeringError

TREE: dict[Any, Any] = {
    "large": np.arange(200_000, dtype="f8"),
    "small": [np.arange(5), np.arange(7, dtype="i2"), np.float16(2)],
    "jax": {"w": jnp.arange(100_000.0), "b": jnp.ones(3)},
    "pair": Pair((1, 2.5), "text"),
    "key": jax.random.key(0, impl="rbg"),
    7: None,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    treering.save(tmp_path / "ckpt", TREE)
    return tmp_path / "ckpt"


def test_kinds_and_containers_come_back(path: Path) -> None:
    found = treering.load(path)
    assert list(found) == list(TREE)
    assert {key: type(leaf) for key, leaf in found.items() if key != "pair"} == {
        key: type(leaf) for key, leaf in TREE.items() if key != "pair"
    }
    assert found["pair"]._fields == ("left", "right")
    assert type(found["pair"]).__name__ == "Pair"
    assert_same(found["pair"].left, (1, 2.5))
    for key in ("large", "small", "jax", "key"):
        assert_same(found[key], TREE[key], restored=False)


def test_the_same_namedtuple_class_for_the_same_name_and_fields(path: Path) -> None:
    one, two = treering.load(path), treering.load(path)
    assert type(one["pair"]) is type(two["pair"])
    assert_same_structure(one["pair"], two["pair"])


def test_loads_say_nothing(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        treering.load(path)
        treering.load(path, TREE)
        treering.load(path, mapped=True)
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------------------------- nothing shared


def all_numpy(tree: Any) -> list[np.ndarray[Any, Any]]:
    return [leaf for leaf in jax.tree.leaves({str(k): v for k, v in tree.items()}) if isinstance(leaf, np.ndarray)]


def test_a_loaded_array_is_the_callers_own(path: Path) -> None:
    found, again = treering.load(path), treering.load(path)
    for leaf in all_numpy(found):
        assert leaf.flags.writeable
        leaf[:] = 99
        others = [other for other in all_numpy(found) if other is not leaf]
        assert not any(np.shares_memory(leaf, other) for other in others)
    assert_same(again["large"], TREE["large"])
    assert_same(treering.load(path)["small"], TREE["small"])
    assert_same(found["jax"], TREE["jax"], restored=False)


def test_one_small_array_does_not_keep_its_neighbours(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {f"n{n}": np.arange(100) for n in range(100)})
    for leaf in treering.load(tmp_path / "c").values():
        base = leaf.base if leaf.base is not None else leaf
        assert getattr(base, "nbytes", leaf.nbytes) <= 4 * leaf.nbytes


def test_mapped_arrays_are_read_only(path: Path) -> None:
    found = treering.load(path, mapped=True)
    for leaf in all_numpy(found):
        assert not leaf.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            leaf[0] = 1
    assert_same(found["large"], TREE["large"])
    treering.save(path, {"w": 1}, overwrite=True)
    shutil.rmtree(path)
    assert_same(found["large"], TREE["large"])


def test_loaded_jax_arrays_survive_donation(path: Path) -> None:
    for mapped in (False, True):
        found = treering.load(path, mapped=mapped)["jax"]
        before = jax.tree.map(lambda leaf: leaf + 0, found)
        stepped = jax.jit(lambda tree: jax.tree.map(lambda x: x * 2, tree), donate_argnums=0)(found)
        assert_same(stepped, jax.tree.map(lambda x: x * 2, TREE["jax"]), restored=False)
        assert_same(before, jax.tree.map(lambda x: x, TREE["jax"]), restored=False)
    assert_same(treering.load(path)["jax"], TREE["jax"], restored=False)


def test_thousands_of_small_arrays(tmp_path: Path) -> None:
    tree = {f"j{n}": jnp.full((3,), n, "int32") for n in range(700)} | {f"n{n}": np.full(3, n) for n in range(700)}
    treering.save(tmp_path / "c", tree)
    found = treering.load(tmp_path / "c")
    assert_same(found, tree, restored=False)
    donated = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)([found[f"j{n}"] for n in range(50)])
    assert [int(x[0]) for x in donated] == list(range(1, 51))
    assert_same(found["j60"], tree["j60"], restored=False)


@pytest.mark.parametrize(
    ("dtype", "wanted", "counts"),
    [("float32", "float32", [3]), ("float32", "bfloat16", [1, 1, 1]), ("int4", "int4", [2, 1])],
)
def test_only_arrays_that_are_copied_come_in_batches(
    dtype: str, wanted: str, counts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = {name: jnp.ones((320, 256), dtype) for name in "abc"}
    treering.save(tmp_path / "ckpt", tree)
    seen: list[int] = []

    reads.act_before_reads(monkeypatch, lambda requests: seen.append(len(requests)))
    limits.lower(monkeypatch, delivered_batch=2 * tree["a"].size * tree["a"].dtype.itemsize)
    like = {name: jax.ShapeDtypeStruct((320, 256), wanted) for name in tree}
    found = treering.load(tmp_path / "ckpt", like, cast=True)
    assert_same(found, {name: array.astype(wanted) for name, array in tree.items()}, restored=False)
    assert seen == counts


def test_several_loads_at_once(path: Path) -> None:
    results: list[Any] = []

    def work() -> None:
        results.extend(treering.load(path, TREE) for _ in range(3))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 18
    for found in results:
        for key in ("large", "small", "jax"):
            assert_same(found[key], TREE[key], restored=False)


# ---------------------------------------------------------------------------------------------------- what is not there


def test_nothing_there(tmp_path: Path) -> None:
    for name in ("none", "none.safetensors", "none.msgpack"):
        with pytest.raises(FileNotFoundError, match=r"none") as caught:
            treering.load(tmp_path / name)
        assert isinstance(caught.value, NotFoundError)
    with pytest.raises(FileNotFoundError):
        treering.load(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_an_index_is_no_checkpoint(path: Path) -> None:
    (path / "treering.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"treering\.json"):
        treering.load(path)


def test_a_newer_version_says_so(path: Path) -> None:
    text = (path / "treering.json").read_bytes().replace(b'"treering": 1', b'"treering": 2', 1)
    (path / "treering.json").write_bytes(signed_again(text))
    with pytest.raises(FormatError, match="newer"):
        treering.load(path)


def test_a_moved_checkpoint_loads(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "copy")
    shutil.rmtree(path)
    assert_same(treering.load(tmp_path / "copy")["large"], TREE["large"])


# --------------------------------------------------------------------------------------------------------------- damage


def test_lost_and_short_files_are_named(path: Path) -> None:
    (data,) = path.glob("*.safetensors")
    content = data.read_bytes()
    for damaged in (content[:-1], content[: len(content) // 2], content[:100], b"", content + b"\0"):
        data.write_bytes(damaged)
        for mapped in (False, True):
            with pytest.raises(CorruptError, match=data.name):
                treering.load(path, mapped=mapped)
    data.unlink()
    with pytest.raises(CorruptError, match=data.name):
        treering.load(path)


def test_links_inside_are_refused(path: Path, tmp_path: Path) -> None:
    (data,) = path.glob("*.safetensors")
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TreeringError, match="link"):
        treering.load(path)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_flipped_bit_is_an_error_with_leaf_file_and_bytes(path: Path, mapped: bool) -> None:
    (data,) = path.glob("*.safetensors")
    content = data.read_bytes()
    with treering.open(path) as ckpt:
        chunks = ckpt.index.chunks
        keys = [ckpt.index.keys[leaf] for leaf in chunks.leaf]
    for key, offset, nbytes in zip(keys, chunks.offset, chunks.nbytes, strict=True):
        for at in {offset, offset + nbytes // 2, offset + nbytes - 1}:
            damaged = bytearray(content)
            damaged[at] ^= 1 << (at % 8)
            data.write_bytes(damaged)
            with pytest.raises(CorruptError) as caught:
                treering.load(path, mapped=mapped)
            assert repr(key) in str(caught.value)
            assert data.name in str(caught.value)
            first, last = _range_in(str(caught.value))
            assert first <= at < last
    data.write_bytes(content)
    treering.load(path, mapped=mapped)


def _range_in(message: str) -> tuple[int, int]:
    words = message.replace(",", " ").replace(")", " ").replace(";", " ").split()
    at = words.index("bytes")
    return int(words[at + 1]), int(words[at + 3])


def test_damage_in_what_is_not_wanted_does_not_matter(path: Path) -> None:
    (data,) = path.glob("*.safetensors")
    with treering.open(path) as ckpt:
        chunks = ckpt.index.chunks
        number = [ckpt.index.keys[leaf] for leaf in chunks.leaf].index("jax/w")
    damaged = bytearray(data.read_bytes())
    damaged[chunks.offset[number]] ^= 1
    data.write_bytes(damaged)
    assert_same(treering.load(path, only="large")["large"], TREE["large"])
    with pytest.raises(CorruptError):
        treering.load(path, at="jax")


def test_every_flip_in_the_index_is_noticed(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {"w": np.arange(3), "n": 5}, metadata={"a": "b"})
    index = tmp_path / "c" / "treering.json"
    content = index.read_bytes()
    for at in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[at] ^= 1 << (at % 7)
        index.write_bytes(damaged)
        with pytest.raises(TreeringError):
            treering.load(tmp_path / "c")
