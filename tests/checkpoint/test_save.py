"""save: what stays untouched, what is refused before a byte is written, and that nothing given to it matters later."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes, warm
from tests.compat.golden_files import dtype_named
from tests.folders import listing, open_descriptors
from tests.properties.strategies import EXTENDED_DTYPES, NUMPY_DTYPES
from tests.trees import assert_same
from treering.errors import BusyError, ExistsError, NotFoundError, StoreError, TreeringError, UnsupportedError

TREE: dict[str, Any] = {"w": np.arange(50_000, dtype="f4"), "step": 1}
NAMES = ("ckpt", "ckpt.msgpack", "ckpt.safetensors")


# -------------------------------------------------------------------------------------------- every dtype, every layout

LONG_DOUBLES = ["float128", "complex256"]
ALL_DTYPES = [*NUMPY_DTYPES, *EXTENDED_DTYPES, *LONG_DOUBLES, "timedelta64[D]"]


def array_of(name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array with many different bits, all of them values of its dtype."""
    dtype = dtype_named(name)
    count = int(np.prod(shape))
    values = np.arange(count) % 3
    if "64[" in name:
        return values.astype("i8").view(dtype).reshape(shape)
    if name in LONG_DOUBLES:
        # Their padding is stray memory, which no two arrays share: 1.0 and 2.0 with nothing beside.
        items = np.zeros((count, dtype.itemsize // 2), np.uint16)
        items[:, 3], items[:, 4] = 0x8000 * (values > 0), np.array([0, 0x3FFF, 0x4000])[values]
        return items.reshape(-1).view(dtype).reshape(shape)
    return values.astype(np.float32).astype(dtype).reshape(shape)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype_in_every_layout(name: str, tmp_path: Path) -> None:
    cube = array_of(name, (4, 6, 5))
    tree = {
        "zero": array_of(name, ()),
        "empty": array_of(name, (0,)),
        "empty too": array_of(name, (3, 0, 2)),
        "plain": cube,
        "fortran": np.asfortranarray(cube),
        "turned": cube.T,
        "strided": cube[::2, 1:, ::-1],
        "spread": np.broadcast_to(cube[:1], (3, 6, 5)),
        "scalar": cube[1, 2, 2],
        "read only": cube.copy(),
    }
    tree["read only"].flags.writeable = False
    if name in LONG_DOUBLES:
        del tree["scalar"]  # numpy itself leaves stray bytes in those
    treering.save(tmp_path / "c", tree)
    found = treering.load(tmp_path / "c")
    assert_same(found, tree)
    for leaf in found.values():
        if isinstance(leaf, np.ndarray):
            assert leaf.flags.c_contiguous
            assert leaf.flags.writeable
    assert_same(treering.load(tmp_path / "c", tree), tree)
    assert_same(treering.load(tmp_path / "c", mapped=True), tree)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["int16", "int64", "uint32", "float16", "float64", "complex64", "complex128", "M8[s]"])
def test_big_endian_arrays(name: str, tmp_path: Path) -> None:
    big = np.arange(12).astype(name).astype(np.dtype(name).newbyteorder(">")).reshape(3, 4)
    large = (np.arange(300_000) % 1000).astype(name).astype(np.dtype(name).newbyteorder(">"))
    treering.save(tmp_path / "c", {"a": big, "t": big.T, "large": large})
    found = treering.load(tmp_path / "c")
    want = {"a": big, "t": big.T, "large": large}
    assert_same(found, want)
    assert [leaf.dtype for leaf in found.values()] == [np.dtype(name)] * 3
    for like, wide in (
        (want, False),
        (found, False),
        ({"a": want["a"], "t": found["t"], "large": found["large"]}, True),
    ):
        again = treering.load(tmp_path / "c", like, cast=wide)
        assert_same(again, want)
        # assert_same does not look at the byte order.
        assert [leaf.dtype for leaf in again.values()] == [leaf.dtype for leaf in like.values()]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [n for n in ALL_DTYPES if n not in {"int1", "uint1"}])
def test_every_dtype_of_jax(name: str, tmp_path: Path) -> None:
    array = array_of(name, (8, 3))
    with jax.enable_x64(True):
        try:
            tree = {"a": jax.device_put(array), "b": jax.device_put(array[0, 0]), "c": jax.device_put(array[:0])}
        except (TypeError, jax.errors.JaxRuntimeError):
            # This jax has no such dtype: it stays on the host, whatever is asked.
            treering.save(tmp_path / "c", {"a": array})
            assert_same(treering.load(tmp_path / "c", shardings=jax.devices()[1]), {"a": array})
            return
        assert tree["a"].dtype == array.dtype
        treering.save(tmp_path / "c", tree)
        assert_same(treering.load(tmp_path / "c"), tree, restored=False)
        assert_same(treering.load(tmp_path / "c", jax.eval_shape(lambda: tree)), tree, restored=False)


def test_bits_of_nan_and_of_minus_zero(tmp_path: Path) -> None:
    bits = np.array([0x7FF8000000000001, 0xFFF8000000000000, 0x7FF0000000000001, 1 << 63, 1], "u8").view("f8")
    narrow = np.array([0x7FC1, 0xFFC0, 0x7F81, 0x8000], "u2").view(ml_dtypes.bfloat16)
    tree = {"f8": bits, "bf16": narrow, "jax": jnp.asarray(narrow), "python": [float("nan"), -0.0, float(bits[1])]}
    treering.save(tmp_path / "c", tree)
    assert_same(treering.load(tmp_path / "c"), tree, restored=False)


X64 = """
import sys
import numpy as np, jax, jax.numpy as jnp
import treering
path, x64 = sys.argv[1], jax.config.jax_enable_x64
if x64:
    tree = {"f": jnp.arange(5.0), "i": jnp.arange(5), "c": jnp.ones(2, "complex128"), "n": np.arange(3)}
    assert tree["f"].dtype == "float64"
    treering.save(path, tree)
    found = treering.load(path, tree)
    assert all(a.dtype == b.dtype and type(a) is type(b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(tree)))
else:
    found = treering.load(path)
    assert isinstance(found["f"], np.ndarray) and found["f"].dtype == "float64", found
    assert isinstance(found["i"], np.ndarray) and found["i"].dtype == "int64"
    assert found["c"].dtype == "complex128" and found["f"].tolist() == [0, 1, 2, 3, 4]
    found = treering.load(path, dict(found, f=jnp.zeros(5)), cast=True)
    assert isinstance(found["f"], jax.Array) and found["f"].dtype == "float32"
    try:
        treering.load(path, dict(found, f=jnp.zeros(5)))
    except treering.errors.MismatchError as error:
        assert error.differences == ("f: wanted float32[5], found float64[5]",), error
    else:
        raise SystemExit("was cast")
"""


def test_processes_with_and_without_x64(tmp_path: Path) -> None:
    for x64 in ("1", "0"):
        done = warm.run("-W", "error", "-c", X64, str(tmp_path / "c"), environment={"JAX_ENABLE_X64": x64})
        assert done.returncode == 0, done.stderr[-2000:]


# -------------------------------------------------------------------------------------------------------- what is there


@pytest.mark.parametrize("name", NAMES)
def test_what_is_there_stays_unless_said(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    # So many that a file of msgpack in a bucket is never the same twice.
    tree, other = ({f"w{number}": np.arange(size) for number in range(9)} for size in (3, 4))
    treering.save(path, tree)
    before = listing(tmp_path)
    with pytest.raises(FileExistsError, match="overwrite=True") as caught:
        treering.save(path, other)
    assert isinstance(caught.value, ExistsError)
    assert listing(tmp_path) == before
    treering.save(path, other, overwrite=True)
    assert_same(treering.load(path), other)
    assert len(listing(tmp_path)) == len(before)


def test_files_of_the_user_stay(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    treering.save(path, TREE)
    mine = {
        "config.json": b"{}",
        "tokenizer.model": b"abc",
        "data-0123456789abcdef.txt": b"",
        "sub/model.safetensors": b"x",
    }
    for name, content in mine.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(content)
    for step in range(3):
        treering.save(path, TREE | {"step": step}, overwrite=True)
        found = listing(path)
        assert {name: found[name] for name in mine} == mine
        assert len(found) == len(mine) + 1 + 2
    assert treering.load(path)["step"] == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_of_somebody_else_is_refused(overwrite: bool, tmp_path: Path) -> None:
    path = tmp_path / "thesis"
    path.mkdir()
    (path / "chapter1.tex").write_text("It was a dark and stormy night")
    before = listing(tmp_path)
    with pytest.raises(FileExistsError, match=r"chapter1\.tex"):
        treering.save(path, TREE, overwrite=overwrite)
    assert listing(tmp_path) == before


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    treering.save(tmp_path / "c", TREE)
    assert_same(treering.load(tmp_path / "c"), TREE)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_or_folder_in_the_way(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if "." in name:
        path.mkdir()
        (path / "x").write_text("x")
    else:
        path.write_text("x")
    before = listing(tmp_path)
    for overwrite in (False, True):
        with pytest.raises((ExistsError, StoreError)):
            treering.save(path, {"w": np.arange(3)}, overwrite=overwrite)
        assert listing(tmp_path) == before


def test_a_file_where_a_folder_is_needed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name in NAMES:
        with pytest.raises(StoreError):
            treering.save(tmp_path / "file" / name, {"w": np.arange(3)})
    assert listing(tmp_path) == {"file": b"x"}


# ---------------------------------------------------------------------------------------------------------------- paths


class Elsewhere:
    """A path that is no pathlib.Path."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __fspath__(self) -> str:
        return self._path


@pytest.mark.parametrize("name", NAMES)
def test_paths(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tree = {"w": np.arange(3)}
    given: list[Any] = [name, f"./new/{name}", Path("deep/er") / name, Elsewhere(tmp_path / "e" / name), f"ü ñ/{name}"]
    for path in given:
        treering.save(path, tree)
        assert_same(treering.load(path), tree)
        with treering.open(path) as ckpt:
            assert_same(ckpt["w"][...], tree["w"])
    monkeypatch.chdir("/")
    assert_same(treering.load(tmp_path / name), tree)


def test_a_folders_path_may_end_in_a_separator(tmp_path: Path) -> None:
    treering.save(f"{tmp_path}/c/", TREE)
    assert_same(treering.load(f"{tmp_path}/c/"), TREE)
    assert_same(treering.load(tmp_path / "c"), TREE)


def test_a_link_to_the_folder(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "ckpt").symlink_to(tmp_path / "disk")
    treering.save(tmp_path / "ckpt", TREE)
    treering.save(tmp_path / "ckpt", TREE | {"step": 2}, overwrite=True)
    assert (tmp_path / "ckpt").is_symlink()
    assert treering.load(tmp_path / "disk")["step"] == 2


@pytest.mark.parametrize("url", ["gs://", "s3://a@bucket/a.safetensors", "hf://a/b.msgpack", "ftp://a/b"])
def test_urls_make_no_folders(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given: list[Any] = [url]
    if not url.endswith("//"):
        given.append(pathlib.PurePosixPath(url))  # which makes one slash of the two
    for path in given:
        for door in (lambda path=path: treering.save(path, TREE), lambda path=path: treering.load(path)):
            with pytest.raises(UnsupportedError, match="URL"):
                door()
        with pytest.raises(UnsupportedError, match="URL"):
            treering.open(path)
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("path", ["", "a\0b", b"bytes", 3, None, "x" * 300], ids=repr)
def test_what_is_no_path(path: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TreeringError, TypeError)):
        treering.save(path, TREE)
    with pytest.raises((TreeringError, TypeError)):
        treering.load(path)
    assert listing(tmp_path) == {}


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", NAMES)
def test_a_refused_tree_leaves_nothing_behind(name: str, tmp_path: Path) -> None:
    deleted = jnp.ones(3)
    deleted.delete()
    bad: dict[str, Any] = {
        "object": np.array([object()], object),
        "struct": np.zeros(2, [("a", "i4")]),
        "text": np.array(["a"]),
        "set": {1, 2},
        "deleted": deleted,
        "shape": jax.ShapeDtypeStruct((2,), "f4"),
    }
    for key, leaf in bad.items():
        with pytest.raises(TreeringError, match=key) as caught:
            treering.save(tmp_path / "new" / name, {"fine": np.ones(2), key: {"inner": leaf}})
        assert isinstance(caught.value, UnsupportedError)
        assert isinstance(caught.value, TypeError)
        assert isinstance(pickle.loads(pickle.dumps(caught.value)), UnsupportedError)
    assert listing(tmp_path) == {}


def test_all_refused_leaves_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        treering.save(tmp_path / "c", {"a": {1}, "b": [np.zeros(2, object)], "c": jax.ShapeDtypeStruct((), "f4")})
    for key in ("a:", "b/0:", "c:"):
        assert key in str(caught.value)


@pytest.mark.parametrize(
    "metadata",
    [{"a": float("nan")}, {"a": {1}}, {1: 2}, {"a": np.arange(2)}, {"a": b"x"}, ["a"], "text", {"a": object()}],
    ids=["nan", "set", "int key", "numpy", "bytes", "list", "text", "object"],
)
def test_metadata_is_json(metadata: Any, tmp_path: Path) -> None:
    for name in ("c", "c.safetensors"):
        with pytest.raises(TreeringError, match="metadata"):
            treering.save(tmp_path / name, {"w": np.ones(2)}, metadata=metadata)
    assert listing(tmp_path) == {}


@pytest.mark.parametrize("name", ["c", "c.safetensors"])
def test_metadata_comes_back(name: str, tmp_path: Path) -> None:
    metadata = {"loss": 0.25, "tags": ["a", None, True, {"deep": 2**70}], "": "\ud800é\n", "n": -1, "big": 1e300}
    treering.save(tmp_path / name, {"w": np.ones(2)}, metadata=metadata)
    with treering.open(tmp_path / name) as ckpt:
        assert ckpt.metadata == metadata
    treering.save(tmp_path / name, {"w": np.ones(2)}, overwrite=True)
    with treering.open(tmp_path / name) as ckpt:
        assert ckpt.metadata == {}


# ------------------------------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize("name", NAMES)
def test_progress_rises_to_the_total_on_the_callers_thread(name: str, tmp_path: Path) -> None:
    tree = {
        "a": np.arange(3_000_000, dtype="f4"),
        "t": np.zeros((900, 900)).T,
        "b": np.arange(10),
        "empty": np.zeros(0),
    }
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        calls.append((done, total))

    treering.save(tmp_path / name, tree, progress=progress)
    assert calls
    assert calls == sorted(calls)
    assert len({total for _, total in calls}) == 1
    assert calls[-1][0] == calls[-1][1] >= sum(leaf.nbytes for leaf in tree.values())
    calls.clear()
    treering.load(tmp_path / name, progress=progress)
    assert calls == sorted(calls)
    assert calls[-1] == (sum(leaf.nbytes for leaf in tree.values()),) * 2


class Stop(BaseException):
    """What a user's progress may raise, an interrupt for example."""


@pytest.mark.parametrize("name", ["ckpt", "ckpt.safetensors"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_exception_in_progress_leaves_nothing(name: str, overwrite: bool, tmp_path: Path) -> None:
    tree = {"a": np.arange(3_000_000, dtype="f4"), "b": np.ones(3)}
    path = tmp_path / "folder" / name
    if overwrite:
        treering.save(path, {"old": np.ones(2)})
    before, descriptors = listing(tmp_path), open_descriptors()

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise Stop(done)

    with pytest.raises(Stop):
        treering.save(path, tree, overwrite=overwrite, progress=progress)
    assert listing(tmp_path) == before or listing(tmp_path) == {"folder": None}
    assert open_descriptors() == descriptors
    treering.save(path, tree, overwrite=overwrite)
    with pytest.raises(Stop):
        treering.load(path, progress=progress)
    assert open_descriptors() == descriptors
    assert_same(treering.load(path), tree)


# ------------------------------------------------------------------------------------------------------- nothing shared


@pytest.mark.parametrize("name", NAMES)
def test_arrays_may_change_once_save_has_returned(name: str, tmp_path: Path) -> None:
    tree = {"w": np.arange(100_000, dtype="f4"), "s": np.arange(3), "l": [np.ones(2)]}
    want = jax.tree.map(np.copy, tree)
    treering.save(tmp_path / name, tree)
    for leaf in jax.tree.leaves(tree):
        leaf[:] = -1
    found = treering.load(tmp_path / name)
    assert_same({key: found[key] for key in "ws"}, {key: want[key] for key in "ws"})


def test_save_does_not_touch_its_tree(tmp_path: Path) -> None:
    tree = {"b": np.arange(5)[::-1], "a": jnp.ones(3), "k": jax.random.key(0), "t": (1, [2])}
    leaves = jax.tree.leaves(tree)
    treering.save(tmp_path / "c", tree)
    assert list(tree) == ["b", "a", "k", "t"]
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(tree), strict=True))
    assert tree["b"].flags.writeable  # type: ignore[attr-defined]


def test_saved_arrays_can_still_be_donated(tmp_path: Path) -> None:
    state = jax.device_put(jnp.arange(64.0), NamedSharding(meshes.line(), PartitionSpec("x")))
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    for number in range(3):
        treering.save(tmp_path / "c", {"w": state}, overwrite=number > 0)
        state = step(state)
    assert_same(np.asarray(treering.load(tmp_path / "c")["w"]), np.arange(64, dtype="f4") + 2)


def test_what_is_written_names_no_machine(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", TREE)
    text = (tmp_path / "c" / "treering.json").read_text()
    assert "written" in json.loads(text)
    for word in (str(tmp_path), os.uname().nodename, "/home", "/root"):
        assert word not in text


def test_files_have_the_rights_that_the_user_gives(tmp_path: Path) -> None:
    for umask, mode in ((0o022, 0o644), (0o077, 0o600), (0o002, 0o664)):
        before = os.umask(umask)
        try:
            treering.save(tmp_path / f"{umask}", TREE)
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in (tmp_path / f"{umask}").iterdir()} == {mode}


def test_few_files(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", {f"l{n}": jnp.ones(4) for n in range(500)})
    assert len(list((tmp_path / "c").iterdir())) == 2
    treering.save(tmp_path / "none", {"a": 1, "b": None})
    assert len(list((tmp_path / "none").iterdir())) <= 2


# ----------------------------------------------------------------------------------------------- several savers, errors


def test_of_savers_at_once_one_wins(tmp_path: Path) -> None:
    outcomes: list[Any] = []
    gate = threading.Barrier(4)

    def work(number: int) -> None:
        gate.wait()
        try:
            treering.save(tmp_path / "c", {"w": np.full(300_000, number), "n": number})
            outcomes.append(number)
        except (ExistsError, BusyError) as error:
            outcomes.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [outcome for outcome in outcomes if isinstance(outcome, int)]
    assert len(won) == 1
    assert len(outcomes) == 4
    found = treering.load(tmp_path / "c")
    assert found["n"] == won[0]
    assert (found["w"] == won[0]).all()
    assert len(listing(tmp_path / "c")) == 2


def test_readers_during_overwrites_see_one_state_whole(tmp_path: Path) -> None:
    path = tmp_path / "c"
    treering.save(path, {"a": np.full(20_000, 0), "b": [np.full(30_000, 0)]})
    over = threading.Event()
    seen: list[set[int]] = []

    def read() -> None:
        while not over.is_set():
            found = treering.load(path)
            seen.append({*found["a"].tolist(), *found["b"][0].tolist()})

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(1, 12):
        treering.save(path, {"a": np.full(20_000, number), "b": [np.full(30_000, number)]}, overwrite=True)
    over.set()
    for thread in threads:
        thread.join()
    assert seen
    assert all(len(values) == 1 for values in seen)


def test_descriptors_are_given_back_after_errors(tmp_path: Path) -> None:
    treering.save(tmp_path / "c", TREE)
    treering.save(tmp_path / "c.safetensors", {"w": TREE["w"]})
    (data,) = (tmp_path / "c").glob("*.safetensors")
    broken = bytearray(data.read_bytes())
    broken[-5] ^= 1
    before = open_descriptors()
    for _ in range(3):
        with pytest.raises(ExistsError):
            treering.save(tmp_path / "c", TREE)
        with pytest.raises(UnsupportedError):
            treering.save(tmp_path / "d", {"a": {1}})
        with pytest.raises(NotFoundError):
            treering.load(tmp_path / "nothing")
        with pytest.raises(TreeringError):
            treering.load(tmp_path / "c", {"w": 1})
        with pytest.raises(TreeringError):
            treering.load(tmp_path / "c.safetensors", only="nothing")
    data.write_bytes(broken)
    for _ in range(3):
        with pytest.raises(TreeringError):
            treering.load(tmp_path / "c")
        with treering.open(tmp_path / "c") as ckpt, pytest.raises(TreeringError):
            ckpt["w"][-3:]
    assert open_descriptors() == before
