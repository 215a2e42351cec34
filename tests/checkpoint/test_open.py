"""open: a mapping of key texts, whose arrays are read when they are sliced, block by block."""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.folders import open_descriptors
from tests.reads import act_before_reads
from tests.system_calls import spans_read
from tests.trees import assert_same
from treering.errors import ClosedError, CorruptError, NotFoundError, TreeringError
from treering.leaves import tree_serialize_leaves

BIG = np.arange(400 * 1000, dtype="f4").reshape(400, 1000)
TREE: dict[str, Any] = {
    "big": BIG,
    "small": jnp.arange(6.0).reshape(2, 3),
    "zero": np.float32(1.5),
    "axisless": np.array(7),
    "empty": np.zeros((0, 3), "i2"),
    "bf16": jnp.ones(4, jnp.bfloat16),
    "key": jax.random.key(3),
    "python": {"int": 2**70, "none": None, "text": "t", "long": "x" * 5000, "bytes": b"y" * 5000, "list": [1.5, True]},
    "a/b": np.arange(2),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("open") / "ckpt"
    treering.save(path, TREE, metadata={"loss": 0.25})
    return path


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """What is read into arrays: offset and count."""
    return spans_read(monkeypatch)


# -------------------------------------------------------------------------------------------------------------- mapping


def test_it_is_a_mapping(path: Path) -> None:
    with treering.open(path) as ckpt:
        assert isinstance(ckpt, Mapping)
        keys = list(ckpt)
        assert keys[:3] == ["big", "small", "zero"]
        assert "python/list/1" in ckpt
        assert "python" not in ckpt
        assert "a~1b" in ckpt
        assert len(ckpt) == len(keys) == 15
        assert ckpt.get("nothing", 5) == 5
        assert ckpt["python/int"] == 2**70
        assert ckpt["python/none"] is None
        assert ckpt["python/long"] == "x" * 5000
        assert ckpt["python/bytes"] == b"y" * 5000
        assert ckpt["python/list/0"] == 1.5
        assert ckpt.metadata == {"loss": 0.25}


def test_views_say_what_they_are(path: Path) -> None:
    with treering.open(path) as ckpt:
        view = ckpt["big"]
        assert (view.key, view.kind, view.shape, view.dtype) == ("big", "numpy", (400, 1000), np.dtype("f4"))
        assert (view.ndim, view.size, view.nbytes, len(view)) == (2, 400_000, 1_600_000, 400)
        assert ckpt["small"].kind == "jax"
        assert ckpt["zero"].kind == "numpy scalar"
        assert ckpt["bf16"].dtype == ml_dtypes.bfloat16
        assert (ckpt["key"].kind, ckpt["key"].shape, ckpt["key"].dtype) == ("key", (2,), np.dtype("uint32"))
        assert ckpt["empty"].size == 0
        with pytest.raises(TypeError):
            len(ckpt["axisless"])
        assert repr(view) == "LeafView('big': float32[400, 1000], 1.53 MiB, numpy)"


def test_what_is_not_there(path: Path) -> None:
    with treering.open(path) as ckpt:
        with pytest.raises(KeyError, match="did you mean 'small'") as caught:
            ckpt["smal"]
        assert isinstance(caught.value, TreeringError)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        with pytest.raises(KeyError, match="7 leaves lie below it"):
            ckpt["python"]
    with pytest.raises(FileNotFoundError) as missing:
        treering.open(path / "nothing")
    assert isinstance(missing.value, NotFoundError)


def test_repr_for_people(path: Path, tmp_path: Path) -> None:
    with treering.open(path) as ckpt:
        text = repr(ckpt)
        assert "15 leaves" in text
        assert "big: float32[400, 1000] numpy" in text
        assert len(text) < 3000
    treering.save(tmp_path / "c", {"<b>": np.ones(2)})
    with treering.open(tmp_path / "c") as ckpt:
        assert "&lt;b&gt;" in ckpt._repr_html_()
        assert "<b><" not in ckpt._repr_html_()


def test_structure_holds_views(path: Path) -> None:
    with treering.open(path) as ckpt:
        tree = ckpt.structure
        assert list(tree) == list(TREE)
        assert tree["python"]["list"] == [1.5, True]
        assert_same(tree["a/b"][...], np.arange(2))
        assert_same(tree["big"][3:5], BIG[3:5])


# -------------------------------------------------------------------------------------------------------------- slicing

KEYS: list[Any] = [
    ...,
    0,
    -1,
    slice(2),
    (slice(None), 5),
    (slice(None), -1),
    (3, 999),
    (slice(10, 300, 7), slice(None, None, -3)),
    (slice(None, None, -1), ...),
    (..., slice(990, 2000)),
    (None, 3),
    (3, None, slice(2, 4)),
    (slice(5, 5),),
    (slice(9, 2), 4),
    (),
    (np.int64(3), np.uint8(4)),
    slice(-3, None),
    (Ellipsis, 3),
    (slice(0, 400, 399), slice(0, 1000, 999)),
]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("key", KEYS, ids=str)
def test_slices_are_those_of_numpy(key: Any, path: Path) -> None:
    with treering.open(path) as ckpt:
        found, want = ckpt["big"][key], BIG[key]
        assert_same(found, want)
        if isinstance(found, np.ndarray):
            assert found.flags.writeable
            found[...] = -1
            assert_same(ckpt["big"][key], want)


@pytest.mark.parametrize("key", [400, -401, (0, 0, 0), (..., ...), (0, 1000)], ids=str)
def test_indices_out_of_bounds(key: Any, path: Path) -> None:
    with treering.open(path) as ckpt, pytest.raises(IndexError):
        ckpt["big"][key]


@pytest.mark.parametrize("key", [[0, 1], True, np.array([1]), "a", 1.0, (0, [1])], ids=repr)
def test_other_indices_say_what_to_do(key: Any, path: Path) -> None:
    with treering.open(path) as ckpt, pytest.raises(TypeError, match="a leaf in a file"):
        ckpt["big"][key]


def test_a_view_is_an_array_for_numpy_and_jax(path: Path) -> None:
    with treering.open(path) as ckpt:
        assert_same(np.asarray(ckpt["big"]), BIG)
        assert_same(np.asarray(ckpt["small"], "f8"), np.arange(6.0).reshape(2, 3))
        assert_same(jnp.asarray(ckpt["small"]), TREE["small"], restored=False)
        assert float(np.sum(ckpt["small"])) == 15
        assert_same(np.asarray(ckpt["axisless"]), np.array(7))
        assert_same(ckpt["axisless"][()], np.int64(7))
        assert_same(ckpt["axisless"][...], np.array(7))
        assert_same(np.asarray(ckpt["empty"]), TREE["empty"])
        assert_same(ckpt["key"][...], np.asarray(jax.random.key_data(TREE["key"])))
        with pytest.raises(ValueError, match="copy"):
            np.asarray(ckpt["big"], copy=False)


def test_only_covering_blocks_are_read(path: Path, spans: list[tuple[int, int]]) -> None:
    block = 64 << 10  # of an array of 1.6 MB
    with treering.open(path) as ckpt:
        view = ckpt["big"]
        assert spans == []
        view[0]
        assert sum(count for _, count in spans) == block
        spans.clear()
        view[100:110]  # 40,000 bytes
        assert sum(count for _, count in spans) <= 2 * block
        spans.clear()
        view[:, 3]  # every row: all of it, but nothing twice
        assert sum(count for _, count in spans) == BIG.nbytes
        spans.clear()
        view[5:5]
        assert spans == []
        ckpt["small"][1]
        assert sum(count for _, count in spans) == 24


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", ["ckpt", "tree.safetensors", "tree.msgpack", "leaves"])
@pytest.mark.parametrize("step", [3, 1000, 16384, 50_000, -70_001, 399_999, 10**12])
def test_a_step_reads_the_blocks_that_hold_an_item(
    tmp_path: Path, spans: list[tuple[int, int]], form: str, step: int
) -> None:
    flat = BIG.reshape(-1)
    (tree_serialize_leaves if form == "leaves" else treering.save)(tmp_path / form, {"x": flat, "y": BIG})
    with treering.open(tmp_path / form) as ckpt:
        view, rows = ckpt["x"], ckpt["y"]
        spans.clear()
        assert_same(view[::step], flat[::step])
        places = np.arange(flat.size)[::step]
        block = (64 << 10) // flat.itemsize
        wanted = {place // block for place in places.tolist()}
        # msgpack files are read whole when they are opened.
        if form != "tree.msgpack":
            assert sum(count for _, count in spans) == sum(min(block, flat.size - n * block) * 4 for n in wanted)
        assert_same(rows[::step, 7::-2], BIG[::step, 7::-2])


def test_slices_of_a_sharded_array(tmp_path: Path, spans: list[tuple[int, int]]) -> None:
    mesh = meshes.grid(4, 2)
    treering.save(tmp_path / "c", {"w": jax.device_put(BIG, NamedSharding(mesh, PartitionSpec("x", "y")))})
    with treering.open(tmp_path / "c") as ckpt:
        assert "x" in str(ckpt["w"].sharding)
        for key in (..., (slice(90, 110), slice(490, 510)), (399, 999), slice(None, None, -1)):
            assert_same(ckpt["w"][key], BIG[key])
        spans.clear()
        ckpt["w"][:100, :500]
        assert sum(count for _, count in spans) == BIG.nbytes // 8


# --------------------------------------------------------------------------------------------------------- open, closed


def test_views_of_a_closed_checkpoint_say_so(path: Path) -> None:
    with treering.open(path) as ckpt:
        big, small = ckpt["big"], ckpt["small"]
    for read in (lambda: big[0], lambda: np.asarray(small), lambda: ckpt["big"][...], lambda: ckpt["python/long"]):
        with pytest.raises(ValueError, match="was closed") as caught:
            read()
        assert isinstance(caught.value, TreeringError)
    assert ckpt.metadata == {"loss": 0.25}
    assert len(ckpt) == 15
    assert ckpt["python/int"] == 2**70
    ckpt.close()


def test_no_descriptor_stays_open(path: Path) -> None:
    gc.collect()
    before = open_descriptors()
    with treering.open(path) as ckpt:
        ckpt["big"][0]
        assert open_descriptors() > before
    assert open_descriptors() == before
    ckpt = treering.open(path)
    ckpt.close()
    assert open_descriptors() == before
    with pytest.raises(ZeroDivisionError), treering.open(path):
        raise ZeroDivisionError
    assert open_descriptors() == before
    view = treering.open(path)["big"]
    assert view[0, 0] == BIG[0, 0]
    assert open_descriptors() > before
    del view, ckpt
    gc.collect()
    assert open_descriptors() == before


def test_an_overwrite_is_not_seen_by_who_has_it_open(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {"w": BIG, "n": 1})
    with treering.open(tmp_path / "c") as ckpt:
        treering.save(tmp_path / "c", {"w": BIG + 1, "n": 2}, overwrite=True)
        assert ckpt["n"] == 1
        assert_same(ckpt["w"][:2], BIG[:2])
        with treering.open(tmp_path / "c") as newer:
            assert newer["n"] == 2
            assert_same(newer["w"][:2], BIG[:2] + 1)


def test_many_threads_read_one_checkpoint(path: Path) -> None:
    wrong: list[Any] = []
    with treering.open(path) as ckpt:

        def work(first: int) -> None:
            rows = range(first, 400, 8)
            wrong.extend(row for row in rows if not np.array_equal(ckpt["big"][row], BIG[row]))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


@pytest.mark.parametrize("name", ["c", "c.safetensors", "foreign.safetensors"])
def test_what_is_closed_while_a_thread_reads_it_is_closed_to_that(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other = tmp_path / name, tmp_path / "other"
    (treering.export if name.startswith("foreign") else treering.save)(path, {"w": BIG})
    other.write_bytes(bytes(1 << 22))
    opened = treering.open(path)
    view = opened["w"]
    with contextlib.ExitStack() as files:

        def close(_: object) -> None:
            opened.close()
            for _ in range(8):  # one of them gets the number of the file that was closed
                files.enter_context(other.open("rb"))

        act_before_reads(monkeypatch, close)
        for key in (slice(None, None, 3), ...):
            with pytest.raises(ClosedError, match="was closed, and 'w' lies in it"):
                view[key]


def test_an_array_without_axes_has_no_rows(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {"z": np.array(3.0), "w": np.arange(6).reshape(3, 2)})
    with treering.open(tmp_path / "c") as ckpt:
        with pytest.raises(TypeError, match="0-d"):
            iter(ckpt["z"])
        assert_same(list(ckpt["w"]), list(np.arange(6).reshape(3, 2)))


def test_damage_is_found_where_it_is_read(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {"w": BIG, "fine": np.ones(3)})
    (data,) = (tmp_path / "c").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[4096 + 1_000_000] ^= 4
    data.write_bytes(content)
    with treering.open(tmp_path / "c") as ckpt:
        assert_same(ckpt["fine"][...], np.ones(3))
        assert_same(ckpt["w"][:100], BIG[:100])
        with pytest.raises(CorruptError, match="'w'") as caught:
            ckpt["w"][250]
        assert data.name in str(caught.value)
        assert_same(ckpt["w"][300:], BIG[300:])


def test_a_number_of_more_digits_than_python_writes_is_shown(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"n": 1 << 20_000})
    with treering.open(tmp_path / "ckpt") as file:
        assert "n: an int of 20001 bits" in repr(file)
        assert file["n"] == 1 << 20_000
    treering.inspect(tmp_path / "ckpt")
    assert not treering.diff(tmp_path / "ckpt", tmp_path / "ckpt")
