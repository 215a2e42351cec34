"""Other ways to save, as controls of the power cut: what they acknowledge, and whether it is there afterwards.

Run as ``python -m torture.peers save NAME PATH``, it saves, says so, and then stands still.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

__all__ = ["PEERS", "Peer"]

_TREE = {"w": np.arange(300, dtype=np.float32), "b": np.ones(7, np.float32)}
_BYTES = _TREE["w"].tobytes()


class Peer(NamedTuple):
    """One way to save."""

    needs: str | None
    """A package that it needs."""
    save: Callable[[Path], None]
    """Save, and return when it says that it is done."""
    there: Callable[[Path], bool]
    """Whether what was saved can be read."""


def _careless(path: Path) -> None:
    _write(path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _careful(path: Path) -> None:
    _careless(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _write(path: Path) -> None:
    with path.open("wb") as file:
        file.write(_BYTES)
        file.flush()
        os.fsync(file.fileno())


def _same_bytes(path: Path) -> bool:
    return path.read_bytes() == _BYTES


def _save_safetensors(path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(_TREE, path)


def _load_safetensors(path: Path) -> bool:
    from safetensors.numpy import load_file

    return _same(load_file(path))


def _save_orbax(path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, _TREE)
        checkpointer.wait_until_finished()


def _load_orbax(path: Path) -> bool:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        return _same(checkpointer.restore(path, _TREE))


def _save_manager(path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(path) as manager:
        manager.save(1, args=ocp.args.StandardSave(_TREE))
        manager.wait_until_finished()


def _load_manager(path: Path) -> bool:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(path) as manager:
        return manager.latest_step() == 1 and _same(manager.restore(1, args=ocp.args.StandardRestore(_TREE)))


def _same(tree: Any) -> bool:
    return set(tree) == set(_TREE) and all(np.array_equal(np.asarray(tree[key]), _TREE[key]) for key in _TREE)


PEERS = {
    "write, fsync, rename, fsync of the folder": Peer(None, _careful, _same_bytes),
    "write, fsync, rename": Peer(None, _careless, _same_bytes),
    "safetensors.numpy.save_file": Peer("safetensors", _save_safetensors, _load_safetensors),
    "orbax StandardCheckpointer": Peer("orbax", _save_orbax, _load_orbax),
    "orbax CheckpointManager": Peer("orbax", _save_manager, _load_manager),
}


def main(what: str, name: str, path: Path) -> int:
    """Save and stand still, or look; 3 when the package is not installed."""
    peer = PEERS[name]
    if peer.needs is not None and importlib.util.find_spec(peer.needs) is None:
        return 3
    if what == "save":
        peer.save(path)
        print("saved", flush=True)
        sys.stdin.read()
        return 0
    try:
        there = peer.there(path)
    except Exception as error:  # noqa: BLE001 - however it fails, nothing is there
        print(f"lost: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return 1
    print("there" if there else "lost: not what was saved")
    return 0 if there else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
