"""Workers of `test_shared_index`: loads of which process 0 reads the index for all."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import limits
from tests.multiprocess.meetings import told
from treering._checkpoint import joint_load
from treering._coordination import allgather
from treering._store.open_folder import OpenFolder

_GENEROUS = 60.0
_SHAPE = (256, 512)


def _whole(number: int) -> np.ndarray[Any, Any]:
    return np.arange(number, number + 256 * 512, dtype=np.float32).reshape(_SHAPE)


def _sharding(*spec: str | None) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P(*spec))


def _like(*spec: str | None) -> dict[str, Any]:
    return {"w": jax.ShapeDtypeStruct(_SHAPE, np.float32, sharding=_sharding(*spec)), "n": 0}


def _save(path: Path, number: int) -> None:
    rows = _sharding("x")
    whole = _whole(number)
    tr.save(path, {"w": jax.make_array_from_callback(_SHAPE, rows, lambda index: whole[index]), "n": number})


def _loads(path: Path, load: Callable[[Path], Any]) -> dict[str, Any]:
    """Load; return which tree it was, and which documents and data files this process opened."""
    indexes: list[str] = []
    files: list[str] = []
    read_index, open_files = OpenFolder.read_index, OpenFolder.open_files

    def count_index(folder: OpenFolder) -> bytes:
        indexes.append(folder.path.name)
        return read_index(folder)

    def count_files(folder: OpenFolder, names: Any) -> Any:
        found = open_files(folder, names)
        files.extend(found)
        return found

    def work() -> int:
        tree = load(path)
        number = int(tree["n"])
        for shard in tree["w"].addressable_shards:
            assert np.array_equal(shard.data, _whole(number)[shard.index])
        return number

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OpenFolder, "read_index", count_index)
        patch.setattr(OpenFolder, "open_files", count_files)
        return told(work) | {"indexes": len(indexes), "files": len(files)}


def shares(folder: str) -> dict[str, dict[str, Any]]:
    """Load in every way in which the index is shared, or cannot be."""
    base, this = Path(folder), jax.process_index()
    here, other, lost, swapped, later = (base / name for name in ("here", "other/here", "lost", "swapped", "later"))
    for number, path in enumerate((here, other, lost, swapped, later), 1):
        _save(path, number)
    found: dict[str, dict[str, Any]] = {}

    def load(path: Path, **wishes: Any) -> Any:
        return tr.load(path, _like(None, "x"), timeout=_GENEROUS, **wishes)

    with pytest.MonkeyPatch.context() as patch:
        found["own"] = _loads(here, load)
        limits.lower(patch, shared_index_from=2)
        found["columns"] = _loads(here, load)
        found["rows"] = _loads(here, lambda path: tr.load(path, _like("x"), timeout=_GENEROUS))
        found["run"] = _loads(here, lambda path: _in_run(base / "run", path))
        found["another folder"] = _loads(other if this == 1 else here, load)
        found["no folder"] = _loads(base / "nothing" / "here" if this == 1 else here, load)
        found["some are not sure"] = _loads(
            here, lambda path: load(path, shardings=(lambda *_: _sharding(None, "x")) if this == 3 else None)
        )
        if this == 0:
            next(lost.glob("*00001*")).unlink()
            (base / "removed").touch()
        _wait_for(base / "removed")
        found["a file is lost"] = _loads(lost, load)
        with patch.context() as inner:
            _swap_after_broadcast(inner, swapped, later)
            found["replaced"] = _loads(swapped, load)
        with patch.context() as inner:
            broadcast = allgather.broadcast_bytes
            step = -1 if this == 2 else 1
            inner.setattr(joint_load, "broadcast_bytes", lambda *given: broadcast(*given)[::step])
            found["other bytes arrive"] = _loads(here, load)
        found["again"] = _loads(here, load)
    return found


def _in_run(run: Path, path: Path) -> Any:
    del path
    with tr.Run(run, keep=None, timeout=_GENEROUS) as opened:
        rows = _sharding("x")
        whole = _whole(3)
        opened.save(3, {"w": jax.make_array_from_callback(_SHAPE, rows, lambda index: whole[index]), "n": 3})
        opened.wait()
        return opened.load(3, _like(None, "x"))


def _swap_after_broadcast(patch: pytest.MonkeyPatch, path: Path, later: Path) -> None:
    """Let process 0 put another state in the place of a checkpoint once it has sent the index of the first."""
    flag = path.with_name("flag")
    broadcast = allgather.broadcast_bytes

    def replaced(data: bytes | None, nbytes: int) -> bytes:
        found = broadcast(data, nbytes)
        if data is not None and not flag.exists():
            path.rename(path.with_name("gone"))
            shutil.copytree(later, path)
            shutil.rmtree(path.with_name("gone"))
            flag.touch()
        _wait_for(flag)
        return found

    patch.setattr(joint_load, "broadcast_bytes", replaced)


def _wait_for(flag: Path) -> None:
    deadline = time.monotonic() + _GENEROUS
    while not flag.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
