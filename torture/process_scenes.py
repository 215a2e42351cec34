"""What the processes of a job save and load together, and how an onlooker tells what became of it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Final, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treering
from torture.checkpoint_scenes import BUT, CheckpointScene
from torture.leaves_scenes import LeavesScene
from torture.run_scenes import RunScene
from torture.scenes import Scene, fingerprint
from treering._checkpoint import joint_load
from treering._values.checkpoint_names import is_message, is_message_folder
from treering.errors import MismatchError, NotFoundError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

__all__ = ["NEW", "OLD", "SCENES", "JointScene", "print_of", "values"]

OLD: Final = 1
"""The version that is there before."""
NEW: Final = 2
"""The version whose save is attacked."""

# How each array lies while it is saved, and how it may be wanted by a load.
_SAVED: Final = {"kernel": PartitionSpec("x"), "table": PartitionSpec(None, "x"), "bias": PartitionSpec()}
_ALONG: Final = dict.fromkeys(_SAVED, PartitionSpec("x"))
_ACROSS: Final = dict.fromkeys(_SAVED, PartitionSpec(None, "x"))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JointScene:
    """One kind of joint call."""

    name: str
    """What people call it."""
    form: Literal["checkpoint", "leaves", "run"]
    """Of which of them; a run's steps are saved in the background."""
    background: bool = False
    """A thread writes it, and the caller waits for that."""
    old: bool = True
    """Something was saved there already."""
    wanted: dict[str, PartitionSpec] | None = None
    """It is a load, onto these; None: a save."""
    rows: int = 32
    """How long one of the arrays is: only what has several blocks is read in parts and exchanged."""
    count: int = 2
    """Of how many processes, with two devices each: every array can be divided among them."""
    one_index: bool = False
    """It is a load of which process 0 reads the index for all, as in large jobs."""
    compares_first: bool = False
    """It is a load of which the processes compare what they read before they do, as of large trees."""

    @property
    def loads(self) -> bool:
        """Whether it is a load, which changes nothing."""
        return self.wanted is not None

    def prepared(self, base: Path) -> Path:
        """Make a fresh folder and return the path to save to or to load from."""
        if not self.loads:
            return self._alone.prepared(base)
        path = self._alone.prepared(base)
        tree = values(OLD, self.rows, self.count)
        treering.save(path, tree) if self.form == "checkpoint" else tree_serialize_leaves(path, tree)
        return path

    def save(self, path: Path, version: int, *, old: bool, timeout: float) -> None:
        """Save a version as one process of the job; ``old``: there is something already."""
        tree = _global_tree(version, self.rows, self.count)
        if self.form == "run":
            treering.Run(path, keep=treering.KeepLast(1), timeout=timeout).save(version, tree).result()
        elif self.background:
            treering.save_async(path, tree, overwrite=old, timeout=timeout).result()
        elif self.form == "checkpoint":
            treering.save(path, tree, overwrite=old, timeout=timeout)
        else:
            tree_serialize_leaves(path, tree, timeout=timeout)

    def load(self, path: Path, version: int, *, timeout: float) -> None:
        """Load a version as one process of the job, and compare what this process has got.

        Raises:
            AssertionError: something else came.
        """
        mesh = _mesh()
        wanted = self.wanted or _SAVED

        def sharding(key: str, _: Any) -> NamedSharding:
            return NamedSharding(mesh, wanted.get(key.replace(".", "/").rpartition("/")[2], PartitionSpec()))

        expected = values(version, self.rows, self.count)
        if self.compares_first:
            vars(joint_load)["_READ_FIRST_BYTES"] = 0  # in this process, which is one of the job
        if self.one_index:
            vars(joint_load)["_SHARED_FROM"] = 2
            params = {
                name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding(name, value))
                for name, value in expected["params"].items()
            }
            tree: Any = treering.load(path, expected | {"params": params}, timeout=timeout)
        elif self.form == "checkpoint":
            tree = treering.load(path, shardings=sharding, timeout=timeout)
        else:
            tree = tree_deserialize_leaves(path, shardings=sharding, structure="exact", timeout=timeout)
        for name, spec in wanted.items():
            array = tree["params"][name]
            if not array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim):
                raise AssertionError(f"{name} lies elsewhere: {array.sharding}")
            for shard in array.addressable_shards:
                if not np.array_equal(shard.data, expected["params"][name][shard.index]):
                    raise AssertionError(f"{name} holds something else in {shard.index}")
        if (tree["step"], tree["name"]) != (expected["step"], expected["name"]):
            raise AssertionError("another state")

    def ledger(self, version: int) -> str:
        """Return the fingerprint of what has to be found, made without a file."""
        # What was there before was saved by one process, with numpy arrays only: both prints are made in one way.
        return self._alone.ledger(OLD) if version == OLD and not self.loads else _ledger(version, self.rows, self.count)

    def found(self, path: Path) -> str | None:
        """Load and verify, which must agree; None when nothing is there."""
        if self.form == "run":
            step = treering.Run(path).latest()
            if step is None:
                return None
            path = path / f"step_{step:08d}"
        if self.form != "leaves":
            try:
                tree: Any = treering.load(path)
            except NotFoundError:
                if (path / "treering.json").exists():
                    raise
                return None
        else:
            try:
                tree = tree_deserialize_leaves(path, structure="exact")
            except (NotFoundError, MismatchError):
                if (path / "tensorstore_index.json").exists():
                    raise
                return None
        verified = treering.verify(path)
        return print_of(tree) if verified else f"{BUT} {verified}"

    def litter(self, path: Path) -> list[str]:
        """Return the names of our files there that no reader needs.

        In the folder of a step that was never saved notes may stay: nobody can tell them from those of processes that
        are about to meet there. The save of that step sweeps them. Notes in the folder of the run itself go when they
        are ten minutes old; on a slow machine a process that waits puts some.
        """
        left = self._alone.litter(path)
        if self.form != "run":
            return left
        inside = {name.partition("/")[0] for name in left if "/" in name and not _is_said(name.partition("/")[2])}
        noted = {name.partition("/")[0] for name in left if "/" in name} - inside
        return [name for name in left if name.partition("/")[0] not in noted and not is_message(name)]

    def harmed(self, path: Path) -> list[str]:
        """Say what is wrong with what stood there and is not ours."""
        return self._alone.harmed(path)

    @property
    def _alone(self) -> Scene:
        old = self.old and not self.loads
        if self.form == "run":
            return RunScene(name=self.name, old=old)
        if self.form == "checkpoint":
            return CheckpointScene(name=self.name, old=old)
        return LeavesScene(name=self.name, old=old)


def _is_said(path: str) -> bool:
    """Whether a path below a step is that of a message, or of a folder of messages."""
    return all(is_message(name) or is_message_folder(name) for name in path.split("/"))


def values(version: int, rows: int, count: int) -> dict[str, Any]:
    """Return the state of a version, whole, on the host."""
    noise = np.random.default_rng(version)
    least, rows, columns = (-(-length // (2 * count)) * 2 * count for length in (32, rows, 96))
    shapes = dict.fromkeys(_SAVED, (least, columns)) | {"kernel": (rows, columns)}
    params = {name: noise.integers(0, 1 << 30, shape, np.int32) for name, shape in shapes.items()}
    return {"step": version, "params": params, "host": np.full(5, version, np.float32), "name": "s" * version}


def _global_tree(version: int, rows: int, count: int) -> dict[str, Any]:
    """Return the state of a version as arrays that lie over all devices of the job."""
    tree = values(version, rows, count)
    mesh = _mesh()
    for name, value in tree["params"].items():
        sharding = NamedSharding(mesh, _SAVED[name])
        tree["params"][name] = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
    return tree


def _mesh() -> Mesh:
    return Mesh(np.array(jax.devices()), ("x",))


@functools.lru_cache(maxsize=8)
def _ledger(version: int, rows: int, count: int) -> str:
    return fingerprint(values(version, rows, count))


def print_of(tree: Any) -> str:
    """Return the fingerprint of what was loaded, wherever its arrays lie."""
    return fingerprint(_on_host(tree))


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_host(inner) for key, inner in value.items()}
    return np.asarray(value) if hasattr(value, "dtype") else value


SCENES = (
    JointScene(name="save checkpoint, first", form="checkpoint", old=False),
    JointScene(name="save checkpoint, overwrite", form="checkpoint"),
    JointScene(name="save leaves, first", form="leaves", old=False),
    JointScene(name="save leaves, overwrite", form="leaves"),
    JointScene(name="background, first", form="checkpoint", old=False, background=True),
    JointScene(name="background, overwrite", form="checkpoint", background=True),
    JointScene(name="run, first step", form="run", old=False),
    JointScene(name="run, next step", form="run"),
    JointScene(name="load checkpoint, direct", form="checkpoint", wanted=_ALONG),
    JointScene(name="load checkpoint, exchange", form="checkpoint", wanted=_ACROSS, rows=1 << 15),
    JointScene(
        name="load checkpoint, one index, exchange", form="checkpoint", wanted=_ACROSS, rows=1 << 15, one_index=True
    ),
    JointScene(name="load leaves, direct", form="leaves", wanted=_ALONG),
    JointScene(name="load leaves, direct, compared first", form="leaves", wanted=_ALONG, compares_first=True),
    JointScene(name="load leaves, exchange", form="leaves", wanted=_ACROSS, rows=1 << 15),
)
