"""Saving through a manager of jax, or of anybody: early return, commit after the data, failures that leave nothing."""

from __future__ import annotations

import gc
import json
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import PartitionSpec as P

from tests.folders import listing
from tests.leaves.saved import INDEX, arrays_at, index_at, put, stored, visible
from tests.trees import assert_same
from treering.errors import CorruptError, MismatchError, UnsupportedError
from treering.leaves import tree_serialize_leaves

TREE: dict[str, Any] = {
    "w": put(np.arange(128, dtype="f4").reshape(16, 8), P("x", "y"), (2, 4), ("x", "y")),
    "parts": put(np.arange(64, dtype="f4"), P("x")),
    "whole": jnp.arange(300_000.0),
    "half": jnp.ones((3, 3), "bfloat16"),
    "scalar": jnp.int32(4),
    "none": jnp.zeros((0, 4)),
    "numpy": np.arange(200_000),
    "u4": jnp.ones(9, "uint4"),
    "key": jax.random.key(1),
    "text": "text " * 5000,
    "n": [None, 1.5, {}],
}


@pytest.fixture
def manager() -> Iterator[GlobalAsyncCheckpointManager]:
    yield GlobalAsyncCheckpointManager()
    gc.collect()


class Slow:
    """A manager with the two methods that are needed, which writes in a thread when it is told to."""

    def __init__(self, write: Callable[[Any, str], None] | None = None) -> None:
        self.go = threading.Event()
        self.go.set()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.write = write or self.by_tensorstore

    @staticmethod
    def by_tensorstore(array: Any, path: str, **metadata: Any) -> None:
        """Write as one chunk, raw."""
        host = np.asarray(array)
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": path},
            "metadata": {"compressor": None, "shape": host.shape, "chunks": [max(1, n) for n in host.shape]} | metadata,
            "dtype": host.dtype.name,
        }
        ts.open(spec, create=True, open=True).result().write(host).result()

    def serialize_with_paths(
        self, arrays: Sequence[Any], paths: Sequence[str], *, on_commit_callback: Callable[[], None]
    ) -> None:
        def work() -> None:
            try:
                self.go.wait()
                for array, path in zip(arrays, paths, strict=True):
                    self.write(array, path)
                on_commit_callback()
            except BaseException as error:  # noqa: BLE001 - wait_until_finished raises it
                self.error = error

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def wait_until_finished(self) -> None:
        thread, self.thread = self.thread, None
        if thread is not None:
            thread.join()
        error, self.error = self.error, None
        if error is not None:
            raise error


# -------------------------------------------------------------------------------------------------------- what is saved


def test_everything_survives_jaxs_manager(manager: GlobalAsyncCheckpointManager, tmp_path: Path) -> None:
    seen: list[Any] = []
    for prefix in (None, "model"):
        tree_serialize_leaves(
            tmp_path / "d", TREE, manager, prefix=prefix, commit_callback=lambda: seen.append(index_at(tmp_path / "d"))
        )
        manager.wait_until_finished()
        assert_same(stored(tmp_path / "d", prefix), TREE, restored=False)
    # Once for each save, and after its index.
    assert [len(index["prefixes"]) for index in seen] == [0, 1]
    # jax's way of writing them: zstd, a chunk for a shard.
    zarray = json.loads((tmp_path / "d/model/w/.zarray").read_text())
    assert (zarray["compressor"]["id"], zarray["chunks"], len(zarray["treering"])) == ("zstd", [8, 2], 16)
    assert json.loads((tmp_path / "d/model/numpy/.zarray").read_text())["compressor"] is None


def test_a_manager_with_two_methods_is_enough(tmp_path: Path) -> None:
    manager = Slow()
    tree_serialize_leaves(tmp_path / "d", TREE, manager)
    manager.wait_until_finished()
    assert_same(stored(tmp_path / "d"), TREE, restored=False)
    assert json.loads((tmp_path / "d/whole/.zarray").read_text())["compressor"] is None


@pytest.mark.parametrize(
    "metadata",
    [
        {"compressor": {"id": "blosc", "cname": "lz4"}},
        {"compressor": {"id": "zlib", "level": 1}, "chunks": [3]},
        {"chunks": [1]},
    ],
    ids=range(3),
)
def test_whatever_compressor_and_chunks_a_manager_chooses(metadata: dict[str, Any], tmp_path: Path) -> None:
    tree = {"w": jnp.arange(10.0), "mine": np.ones((3, 3)), "v": jnp.arange(5)}
    manager = Slow(lambda array, path: Slow.by_tensorstore(array, path, **metadata))
    for _ in range(2):
        tree_serialize_leaves(tmp_path / "d", tree, manager)
        manager.wait_until_finished()
    assert_same(stored(tmp_path / "d"), tree, restored=False)


@pytest.mark.parametrize("tree", [{}, {"n": 1, "numpy": np.arange(3)}], ids=["empty", "no jax"])
def test_without_a_jax_array_nothing_is_left_to_wait_for(tree: Any, tmp_path: Path) -> None:
    manager = Slow()
    seen: list[int] = []
    tree_serialize_leaves(tmp_path / "d", tree, manager, commit_callback=lambda: seen.append(1))
    assert_same(stored(tmp_path / "d"), tree, restored=False)
    assert (seen, manager.thread) == ([1], None)


def test_an_overwrite_through_a_manager_replaces_what_it_should(
    manager: GlobalAsyncCheckpointManager, tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    tree_serialize_leaves(old, {"w": {"x": jnp.ones(3)}, "parts": np.ones((3, 4)), "gone": np.ones(2)})
    (old / "mine.txt").write_text("mine")
    for path in (old, new):
        tree_serialize_leaves(path, TREE, manager)
        manager.wait_until_finished()
    assert visible(old) == visible(new) | {"mine.txt"}
    tree_serialize_leaves(old, {"w": jnp.ones(2)})
    assert visible(old) == {INDEX, "w/.zarray", "w/0", "mine.txt"}


# ------------------------------------------------------------------------------------------------------- early return


def test_the_call_returns_early_and_readers_see_the_old_tree_until_then(tmp_path: Path) -> None:
    manager = Slow()
    old = {"w": jnp.zeros(5), "n": 1}
    tree_serialize_leaves(tmp_path / "d", old, manager)
    manager.wait_until_finished()
    manager.go.clear()
    seen: list[int] = []
    tree_serialize_leaves(tmp_path / "d", {"w": jnp.ones(7)}, manager, commit_callback=lambda: seen.append(1))
    try:
        assert_same(stored(tmp_path / "d"), old, restored=False)
        assert seen == []
    finally:
        manager.go.set()
    manager.wait_until_finished()
    assert seen == [1]
    assert_same(stored(tmp_path / "d"), {"w": jnp.ones(7)}, restored=False)


def test_a_save_is_committed_where_it_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    manager = Slow()
    manager.go.clear()
    tree_serialize_leaves("here", {"w": jnp.ones(3)}, manager)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    manager.go.set()
    manager.wait_until_finished()
    assert {path.name for path in tmp_path.iterdir()} == {"here", "there"}
    assert list(index_at(tmp_path / "here")["treering"]) == [""]


def test_what_the_caller_does_to_arrays_after_the_call_does_not_matter(
    manager: GlobalAsyncCheckpointManager, tmp_path: Path
) -> None:
    want = np.arange(1 << 20, dtype="f4")
    tree: dict[str, Any] = {
        "donated": jnp.asarray(want),
        "parts": put(want, P("x")),
        "deleted": jnp.asarray(want),
        "host": want.copy(),
    }
    overwrite = jax.jit(lambda array: array * 0 - 1, donate_argnums=0)
    tree_serialize_leaves(tmp_path / "d", tree, manager)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # where a buffer cannot be donated, jax says so
        jax.block_until_ready([overwrite(tree["donated"]), overwrite(tree["parts"])])
    tree["deleted"].delete()
    tree["host"][:] = -1
    manager.wait_until_finished()
    found = stored(tmp_path / "d")
    for name in tree:
        assert np.array_equal(found[name], want), name


def test_one_manager_saves_two_prefixes_in_a_row(manager: GlobalAsyncCheckpointManager, tmp_path: Path) -> None:
    trees: dict[str | None, Any] = {
        prefix: {"w": jnp.full(100_000, number), "host": np.arange(number), "n": number}
        for number, prefix in enumerate(["model", "optimizer", None])
    }
    for prefix, tree in trees.items():
        tree_serialize_leaves(tmp_path / "d", tree, manager, prefix=prefix)
    tree_serialize_leaves(tmp_path / "d", trees["model"], manager, prefix="model")
    manager.wait_until_finished()
    for prefix, tree in trees.items():
        assert_same(stored(tmp_path / "d", prefix), tree, restored=False)
    assert set(index_at(tmp_path / "d")["prefixes"]) == {"model", "optimizer"}


def test_without_an_index_the_callback_runs_after_the_data(
    manager: GlobalAsyncCheckpointManager, tmp_path: Path
) -> None:
    seen: list[set[str]] = []
    tree_serialize_leaves(
        tmp_path / "d", {"w": jnp.ones(3)}, manager, write_index=False,
        commit_callback=lambda: seen.append(visible(tmp_path / "d")),
    )  # fmt: skip
    manager.wait_until_finished()
    assert seen == [{"w/.zarray", "w/0"}]


# ------------------------------------------------------------------------------------------------------------- failures


def test_a_manager_that_refuses_at_once_leaves_nothing(tmp_path: Path) -> None:
    class Refuses(Slow):
        def serialize_with_paths(self, *args: Any, **named: Any) -> None:
            Path(args[1][0]).mkdir(parents=True)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        tree_serialize_leaves(tmp_path / "new", TREE, Refuses())
    assert visible(tmp_path) == set()
    assert not any((tmp_path / "new").rglob("leaves"))
    tree_serialize_leaves(tmp_path / "d", TREE)
    before = listing(tmp_path / "d")
    with pytest.raises(RuntimeError, match="no"):
        tree_serialize_leaves(tmp_path / "d", {"w": jnp.ones(2)}, Refuses())
    assert listing(tmp_path / "d") == before


def test_no_manager_gets_a_folder_whose_path_is_too_long(tmp_path: Path) -> None:
    given: list[str] = []

    class Refuses(Slow):
        def serialize_with_paths(self, arrays: Sequence[Any], paths: Sequence[str], **options: Any) -> None:
            given.extend(paths)
            raise ZeroDivisionError

    def is_refused(length: int) -> bool:
        *above, last = [("n" * 200)] * (length // 201) + ["n" * (length % 201 + 1)]
        tree: Any = {last: jnp.ones(2)}
        for name in above:
            tree = {name: tree}
        with pytest.raises((ZeroDivisionError, UnsupportedError)) as caught:
            tree_serialize_leaves(tmp_path / "d", tree, Refuses())
        return caught.type is UnsupportedError

    # Of the last part alone, or of what is above it, too much.
    taken = [length for length in range(3500, 4095, 20) if not is_refused(length)]
    assert taken
    assert max(taken) + 20 < 4095
    assert {is_refused(length) for length in range(max(taken), max(taken) + 21)} == {False, True}
    assert max(map(len, given)) + len("/") + 255 == 4095
    assert listing(tmp_path) == {}


def test_a_manager_that_fails_in_the_middle_leaves_the_old_tree_and_nothing_else(tmp_path: Path) -> None:
    def fail_at_the_second(array: Any, path: str) -> None:
        if path.endswith("second"):
            raise OSError("disk on fire")
        Slow.by_tensorstore(array, path)

    old = {"first": jnp.zeros(3), "second": np.zeros(3)}
    tree_serialize_leaves(tmp_path / "d", old)
    before = listing(tmp_path / "d")
    manager = Slow(fail_at_the_second)
    seen: list[int] = []
    tree = {"first": jnp.ones(4), "second": jnp.ones(4), "third": np.ones(5)}
    tree_serialize_leaves(tmp_path / "d", tree, manager, commit_callback=lambda: seen.append(1))
    with pytest.raises(OSError, match="disk on fire"):
        manager.wait_until_finished()
    gc.collect()
    assert (seen, listing(tmp_path / "d")) == ([], before)
    assert_same(stored(tmp_path / "d"), old, restored=False)


def test_jaxs_manager_that_fails_lets_the_next_save_through(
    manager: GlobalAsyncCheckpointManager, tmp_path: Path
) -> None:
    old = {"w": jnp.zeros(3)}
    tree_serialize_leaves(tmp_path / "d", old)
    tree_serialize_leaves(tmp_path / "d", {"model": {"w": jnp.ones(1)}}, manager, prefix=None, write_index=False)
    manager.wait_until_finished()
    tree_serialize_leaves(tmp_path / "d", {"x": jnp.ones(3)}, manager, prefix="w")  # inside a leaf
    with pytest.raises(MismatchError, match="'w'"):
        manager.wait_until_finished()
    assert_same(stored(tmp_path / "d"), old, restored=False)
    tree_serialize_leaves(tmp_path / "d", {"x": jnp.ones(3)}, manager, prefix="v")
    manager.wait_until_finished()
    assert_same(stored(tmp_path / "d", "v"), {"x": jnp.ones(3)}, restored=False)


def test_an_error_of_an_earlier_save_reaches_the_caller_of_the_next(
    manager: GlobalAsyncCheckpointManager, tmp_path: Path
) -> None:
    tree_serialize_leaves(tmp_path / "d", {"w": jnp.zeros(3)})
    tree_serialize_leaves(tmp_path / "d", {"x": jnp.ones(3)}, manager, prefix="w")
    with pytest.raises(MismatchError):
        tree_serialize_leaves(tmp_path / "d", {"x": jnp.ones(3)}, manager, prefix="v")
    assert set(arrays_at(tmp_path / "d")) == {"w"}


def _spoil(path: str, name: str, data: bytes | None) -> None:
    file = Path(path) / name
    if data is None:
        file.unlink()
    else:
        file.write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "kind", "says"),
    [
        (lambda path: _spoil(path, "0", None), CorruptError, "no chunk '0'"),
        (lambda path: _spoil(path, "0", b"short"), CorruptError, "the file has 5"),
        (lambda path: _spoil(path, ".zarray", None), UnsupportedError, "zarr v2"),
        (lambda path: _spoil(path, ".zarray", b"{"), CorruptError, "zarray"),
        (lambda path: _spoil(path, "mine.txt", b"x"), UnsupportedError, "mine.txt"),
    ],
    ids=["no chunk", "short chunk", "no zarray", "bad zarray", "more"],
)
def test_what_a_manager_wrote_is_checked_before_it_counts(
    spoil: Callable[[str], None], kind: type[Exception], says: str, tmp_path: Path
) -> None:
    def write(array: Any, path: str) -> None:
        Slow.by_tensorstore(array, path)
        spoil(path)

    tree_serialize_leaves(tmp_path / "d", {"w": jnp.zeros(3)})
    before = listing(tmp_path / "d")
    manager = Slow(write)
    tree_serialize_leaves(tmp_path / "d", {"w": jnp.ones(4)}, manager)
    with pytest.raises(kind, match=f"{says}.*leaf 'w'"):
        manager.wait_until_finished()
    assert listing(tmp_path / "d") == before


@pytest.mark.parametrize(
    "metadata",
    [
        {"order": "F"},
        {"dimension_separator": "/"},
        {"shape": [3, 5], "chunks": [3, 5]},
        {"dtype": "<f8"},
        {"chunks": [4, 4]},
    ],
    ids=["order", "separator", "shape", "dtype", "chunks"],
)
def test_another_array_than_the_leaf_is_refused(metadata: dict[str, Any], tmp_path: Path) -> None:
    def write(array: Any, path: str) -> None:
        host = np.ones(metadata.get("shape", array.shape), metadata.get("dtype", "<f4"))
        Slow.by_tensorstore(host, path, **{name: value for name, value in metadata.items() if name != "dtype"})

    manager = Slow(write)
    tree_serialize_leaves(tmp_path / "d", {"a": {"w": jnp.ones((3, 4))}}, manager)
    with pytest.raises((CorruptError, UnsupportedError), match="leaf 'a/w'"):
        manager.wait_until_finished()
    assert visible(tmp_path / "d") == set()


def test_a_manager_without_the_methods_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="serialize_with_paths"):
        tree_serialize_leaves(tmp_path / "d", TREE, object())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", [{"compressor": {"id": "zstd"}}, {"chunk_bytes": 9}, {"progress": print}], ids=str)
def test_what_a_manager_cannot_be_told_is_refused(option: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(option))):
        tree_serialize_leaves(tmp_path / "d", TREE, Slow(), **option)
    assert list(tmp_path.iterdir()) == []


def test_a_save_under_way_holds_no_array(tmp_path: Path) -> None:
    class Forgets(Slow):
        def serialize_with_paths(
            self, arrays: Sequence[Any], paths: Sequence[str], *, on_commit_callback: Callable[[], None]
        ) -> None:
            hosts = [np.array(array) for array in arrays]
            super().serialize_with_paths(hosts, paths, on_commit_callback=on_commit_callback)

    manager = Forgets()
    manager.go.clear()
    array, host = jnp.arange(1000.0), np.arange(1000)
    alive: list[weakref.ref[Any]] = [weakref.ref(array), weakref.ref(host)]
    tree_serialize_leaves(tmp_path / "d", {"w": array, "host": host}, manager)
    del array, host
    gc.collect()
    try:
        assert [held() for held in alive] == [None, None]
    finally:
        manager.go.set()
    manager.wait_until_finished()
    assert np.array_equal(stored(tmp_path / "d")["host"], np.arange(1000))
