"""Workers of `test_joint_manager`: what each process of a job does with jax's own manager."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from treering.leaves import tree_serialize_leaves

__all__ = ["tree_of", "with_managers"]

_GENEROUS = 60.0
_SHORT = 2


def _spread(array: Any, spec: P) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()), ("x",))
    found: jax.Array = jax.make_array_from_callback(
        array.shape, NamedSharding(mesh, spec), lambda index: array[index]
    )  # fmt: skip
    return found


def tree_of() -> dict[str, Any]:
    """Leaves for the manager, and others."""
    arrays: dict[str, Any] = {
        "rows": np.arange(64, dtype="f4").reshape(8, 8),
        "whole": np.arange(10, dtype="f4"),
        "step": 7,
        "host": np.arange(5),
    }
    return arrays


def _placed() -> dict[str, Any]:
    tree = tree_of()
    spread = {"rows": _spread(tree["rows"], P("x")), "whole": _spread(tree["whole"], P())}
    return (
        tree | spread | {"own": jax.numpy.arange(3) + jax.process_index(), "uint4": _spread(np.ones(8, "uint4"), P())}
    )


def with_managers(folder: str) -> dict[str, Any]:
    """Save, save anew, without an index, and where that is refused at the very end."""
    base = Path(folder)
    manager = GlobalAsyncCheckpointManager(timeout_secs=60)
    called: list[str] = []
    said: dict[str, Any] = {}
    for prefix in (None, None, "model"):
        tree_serialize_leaves(
            base / "ckpt", _placed(), manager, prefix=prefix, timeout=_GENEROUS,
            commit_callback=functools.partial(called.append, str(prefix)),
        )  # fmt: skip
    manager.wait_until_finished()
    tree_serialize_leaves(base / "later", _placed(), manager, write_index=False, timeout=_GENEROUS)
    manager.wait_until_finished()
    said["alone"] = _error(
        lambda: tree_serialize_leaves(base / "ckpt", {"w": jax.numpy.ones(3)}, manager, processes="this")
    )
    said["compressor"] = _error(
        lambda: tree_serialize_leaves(base / "ckpt", _placed(), manager, compressor={"id": "zstd"})
    )
    other = "mine" if jax.process_index() else None
    said["arguments"] = _error(lambda: tree_serialize_leaves(base / "ckpt", _placed(), manager, prefix=other))
    # The places are looked at when all have written, and process 0 refuses. The others hear of it from the manager.
    failing = GlobalAsyncCheckpointManager(timeout_secs=_SHORT)
    tree_serialize_leaves(base / "taken", _placed(), failing, timeout=_GENEROUS)
    said["taken"] = _error(failing.wait_until_finished)
    tree_serialize_leaves(base / "ckpt", {"w": np.ones(3)}, GlobalAsyncCheckpointManager(), prefix="last")
    return said | {"called": called}


def _error(work: Any) -> str:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "nothing"
