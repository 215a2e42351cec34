"""Memory that its owner writes into while it is saved: every save that is acknowledged loads, with nothing damaged.

numpy arrays are the caller's, and jax on CPU takes aligned numpy memory as its own without a copy. So an array may
change between any two looks at it. Items count up all the time here, and each says its own number too: what is loaded
must be items that were there, at some time during the save.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import NamedSharding, PartitionSpec

import treering
from tests import meshes
from tests.drawn import drawn
from treering.errors import UnsupportedError
from treering.leaves import tree_serialize_leaves

ITEMS = 192 << 10
KINDS = ("numpy", "rows", "columns", "Fortran", "big-endian", "small", "put", "dlpack", "sharded")
COMPRESSORS: dict[str, Any] = {
    "raw": None,
    "zstd": {"id": "zstd", "level": 1},
    "zlib": {"id": "zlib", "level": 1},
    "gzip": {"id": "gzip", "level": 0},
    "bz2": {"id": "bz2", "level": 1},
    "blosc": {"id": "blosc", "cname": "zstd", "clevel": 1},
}
Save = Callable[[Path, Any], None]


def at_once(path: Path, tree: Any) -> None:
    treering.save(path, tree)


def in_background(path: Path, tree: Any) -> None:
    treering.save_async(path, tree).result()


def by_manager(path: Path, tree: Any) -> None:
    manager = GlobalAsyncCheckpointManager()
    tree_serialize_leaves(path, tree, manager)
    manager.wait_until_finished()


def compressed(name: str, chunk_bytes: int | None = None) -> Save:
    def save(path: Path, tree: Any) -> None:
        tree_serialize_leaves(path, tree, compressor=COMPRESSORS[name], chunk_bytes=chunk_bytes)

    return save


SAVES: dict[str, tuple[str, Save]] = {
    "folder": ("ckpt", at_once),
    "folder, async": ("ckpt", in_background),
    "safetensors": ("tree.safetensors", at_once),
    "safetensors, async": ("tree.safetensors", in_background),
    "msgpack": ("tree.msgpack", at_once),
    "msgpack, async": ("tree.msgpack", in_background),
    "leaves, by manager": ("leaves", by_manager),
    **{f"leaves, {name}": ("leaves", compressed(name)) for name in COMPRESSORS},
    "leaves, raw, cut": ("leaves", compressed("raw", 100_000)),
    "leaves, zstd, cut": ("leaves", compressed("zstd", 100_000)),
}


def numbers(count: int) -> Any:
    """Return aligned items that each say their number, in their upper bits."""
    raw = np.empty(4 * count + 64, np.uint8)
    start = -raw.ctypes.data % 64
    memory = raw[start : start + 4 * count].view("u4")
    memory[:] = np.arange(count, dtype="u4") << 14
    return memory


def trees(count: int) -> tuple[list[Any], dict[str, Any]]:
    """Return memory, and arrays of each kind that lie in it."""
    mesh = meshes.grid(4, 2)
    across = NamedSharding(mesh, PartitionSpec(("x", "y")))
    owned = [numbers(count).reshape(-1, 128) for _ in range(9)]
    tree = {
        "numpy": owned[0],
        "rows": owned[1][::2],
        "columns": owned[2][:, 3::2],
        "Fortran": owned[3].T,
        "big-endian": owned[4].view(">u4"),
        "small": owned[5][:8],
        "put": jax.device_put(owned[6], jax.devices()[0]),
        "dlpack": jnp.from_dlpack(owned[7]),
        "sharded": jax.device_put(owned[8], across),
    }
    jax.block_until_ready(tree)
    return owned, tree


def count_up(owned: list[Any]) -> None:
    """Let all items count up by one."""
    for memory in owned:
        np.add(memory, 1, out=memory)


@contextlib.contextmanager
def counting(owned: list[Any]) -> Iterator[list[int]]:
    """Let all items count up on another thread; the list has what they count at last."""
    stop, last = threading.Event(), [0]

    def work() -> None:
        while not stop.is_set():
            last[0] += 1
            count_up(owned)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield last
    finally:
        stop.set()
        thread.join()


def require_items(numbered: Any, found: Any, last: int) -> None:
    """Require that each item is the one of its place, as it was at some time."""
    for name, leaf in found.items():
        items, wanted = np.asarray(leaf), np.asarray(numbered[name])
        if name == "big-endian":
            items, wanted = items.astype(">u4").view("u4"), wanted.view("u4")
        assert (items - wanted).max() <= last, name


def saved_while_written(path: Path, save: Save, count: int = ITEMS) -> None:
    owned, tree = trees(count)
    numbered = {name: np.array(leaf) for name, leaf in tree.items()}
    with counting(owned) as last:
        try:
            save(path, tree)
        except UnsupportedError as error:
            # Of a safetensors file the checksums stand before the data.
            if path.suffix != ".safetensors" or path.exists() or error.path is None or error.path[0] not in tree:
                raise
            return
        end = last[0] + 1
    report = treering.verify(path)
    assert report.ok, report
    require_items(numbered, treering.load(path), end)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", [name for name in SAVES if not name.endswith(("zlib", "gzip", "bz2"))])
def test_an_acknowledged_save_loads(tmp_path: Path, name: str) -> None:
    form, save = SAVES[name]
    saved_while_written(tmp_path / form, save)


@pytest.mark.slow
@settings(max_examples=drawn(20))
@given(name=st.sampled_from(list(SAVES)), rows=st.integers(1, 3 << 10))
def test_an_acknowledged_save_of_any_size_loads(tmp_path_factory: pytest.TempPathFactory, name: str, rows: int) -> None:
    form, save = SAVES[name]
    saved_while_written(tmp_path_factory.mktemp("aliased") / form, save, 1024 * rows)
