"""Programs of two versions of treering and what each reads of the other's: checkpoints, runs, leaves directories.

    alias programs='python -c "from tests.compat.old_programs import main; main()"'
    programs against OLD/src [PART...]    # both ways, with the treering that is imported here; OLD/src reads no PART
    programs keep OLD/src NAME            # keeps what OLD/src writes as golden/programs/NAME.tar.gz
    programs write FOLDER                 # writes with the treering that is imported here, on 8 devices
    programs check FOLDER [PART...]       # reads that but for each PART, compares every value, and writes there again

Old versions run this module too, so it uses only public names, which all of them have.
"""

from __future__ import annotations

import gzip
import inspect
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests.compat.golden_checkpoints import METADATA, bits
from tests.compat.old_trees import arrays, checkpoints, leaves, states
from tests.multiprocess.jobs import results, run_job
from treering import serialization
from treering.leaves import index_leaves, tree_deserialize_leaves, tree_serialize_leaves

__all__ = ["GOLDEN", "MAIN", "PARTS", "Part", "main", "unpack"]

# As each version calls it.
BACK: Final[Mapping[str, Any]] = {
    "rollback" if "rollback" in inspect.signature(tr.Run.save).parameters else "overwrite": True
}
NOT_FOUND: Final[type[Exception]] = getattr(
    tr.errors, "NotFoundError" if hasattr(tr.errors, "NotFoundError") else "NotFound"
)

GOLDEN = Path(__file__).parent / "golden" / "programs"
_ROOT: Final = Path(__file__).parents[2]
_CALL: Final = f"import sys; sys.path.append({str(_ROOT)!r}); from {__name__} import main; main()"
MAIN: Final = (sys.executable, "-c", _CALL)
_KILLED: Final = 9


class Part(NamedTuple):
    """Something that a program writes into a folder of its own, which is the current one meanwhile."""

    write: Callable[[], None]
    """Write it."""
    check: Callable[[], None]
    """Read it, and compare every value."""
    go_on: Callable[[], None]
    """Write there once more, and compare again."""


def require_same(found: Any, want: Any) -> None:
    """Fail unless two trees have the same containers, and leaves of the same types and bits."""
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(want))
    pairs = zip(_leaves(found), _leaves(want), strict=True)
    differ = [path for (path, leaf), (_, other) in pairs if bits(leaf) != bits(other)]
    assert not differ, differ


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in pairs]


def _names(folder: str) -> list[str]:
    return sorted(entry.name for entry in Path(folder).iterdir())


# ------------------------------------------------------------------------------------------------------- checkpoints


def _write_checkpoints() -> None:
    for name, tree in checkpoints().items():
        tr.save(name, tree, metadata=METADATA)
    tr.save("overwritten", {"old": np.arange(7)})
    tr.save("overwritten", checkpoints()["arrays"], overwrite=True, metadata=METADATA)
    tr.save_async("background", checkpoints()["divided"], metadata=METADATA).result()


def _check_checkpoints() -> None:
    trees = checkpoints()
    for name, tree in {**trees, "overwritten": trees["arrays"], "background": trees["divided"]}.items():
        assert tr.verify(name), name
        require_same(tr.load(name, like=tree), tree)
        with tr.open(name) as opened:
            assert opened.metadata == METADATA
            assert len(opened) == len(_leaves(tree))
    for name in ("arrays", "divided", "bare"):
        require_same(tr.load(name), trees[name])
    found = jax.tree.leaves(tr.load("divided", like=trees["divided"]))
    assert [leaf.sharding for leaf in found] == [leaf.sharding for leaf in jax.tree.leaves(trees["divided"])]


def _go_on_with_checkpoints() -> None:
    for name in (*checkpoints(), "overwritten"):
        tr.save(name, {"new": jnp.arange(5)}, overwrite=True)
        require_same(tr.load(name), {"new": jnp.arange(5)})
        assert tr.verify(name)
        assert len(_names(name)) == 2, _names(name)  # the index and one data file: the old ones are swept


# ------------------------------------------------------------------------------------------------------- single files


def _write_safetensors() -> None:
    tr.save("arrays.safetensors", arrays(), metadata={"run": "a", "n": 1})


def _check_safetensors() -> None:
    assert tr.verify("arrays.safetensors")
    require_same(tr.load("arrays.safetensors", like=arrays()), arrays())
    with tr.open("arrays.safetensors") as opened:
        assert opened.metadata == {"run": "a", "n": 1}


def _go_on_with_safetensors() -> None:
    _save_anew("arrays.safetensors")


def _write_msgpack() -> None:
    tr.save("state.msgpack", states()["msgpack"])
    serialization.save_to_file(states()["msgpack"], "flax.msgpack")
    for name, tree in states().items():
        Path(f"{name}.bytes").write_bytes(serialization.to_bytes(tree))
        Path(f"{name}.bytes.gz").write_bytes(serialization.to_compressed_bytes(tree))


def _check_msgpack() -> None:
    like = states()["msgpack"]
    require_same(tr.load("state.msgpack", like=like), like)
    require_same(
        serialization.load_from_file(like, "flax.msgpack"), serialization.load_from_file(like, "state.msgpack")
    )
    for name, tree in states().items():
        data, packed = Path(f"{name}.bytes").read_bytes(), Path(f"{name}.bytes.gz").read_bytes()
        assert serialization.to_bytes(tree) == data
        assert serialization.to_compressed_bytes(tree) == packed
        assert serialization.to_bytes(serialization.from_bytes(tree, data)) == data
        assert serialization.to_bytes(serialization.from_compressed_bytes(tree, packed)) == data


def _go_on_with_msgpack() -> None:
    _save_anew("state.msgpack")


def _save_anew(name: str) -> None:
    tr.save(name, {"new": np.arange(5)}, overwrite=True)
    require_same(tr.load(name, like={"new": np.zeros(5, int)}), {"new": np.arange(5)})


# --------------------------------------------------------------------------------------------------------------- runs


class Numbers:
    """An iterator with a state, as those over data have it."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def get_state(self) -> dict[str, Any]:
        """Return where it is."""
        return {"at": self.at, "key": np.arange(self.at, self.at + 3)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go there."""
        assert np.array_equal(state["key"], np.arange(state["at"], state["at"] + 3))
        self.at = state["at"]


_KEEP: Final = tr.KeepLast(2) | tr.KeepBest("loss")
_TIMED: Final = tr.SaveEvery(steps=100) | tr.SaveEvery(interval=1e-6)


def _state(step: int) -> dict[str, Any]:
    return {"w": jnp.arange(6, dtype=jnp.bfloat16) + step, "opt": states()["optax"], "n": step}


def _save_step(run: tr.Run, step: int, loss: float, **options: Any) -> None:
    items = {"state": _state(step), "data": Numbers(step), "config": {"rate": 3e-4}}
    run.save(step, items, metrics={"loss": loss, "norm": np.inf}, metadata={"git": f"g{step}"}, **options)


def _require_step(run: tr.Run, step: int, loss: float) -> None:
    numbers = Numbers()
    found = run.load(step, like={"state": _state(0), "data": numbers, "config": {"rate": 0.0}})
    require_same(found["state"], _state(step))
    assert (numbers.at, found["config"]) == (step, {"rate": 3e-4})
    assert run.metrics(step) == {"loss": loss, "norm": np.inf}
    with tr.open(f"{run.path}/step_{step:08}") as opened:
        assert opened.metadata["git"] == f"g{step}"
    assert tr.verify(f"{run.path}/step_{step:08}")


def _write_runs() -> None:
    with tr.Run("run", keep=_KEEP) as run:
        for step, loss in ((10, 0.5), (20, 0.125), (30, 0.25), (40, 0.5), (50, 0.75)):
            _save_step(run, step, loss)
        _save_step(run, 40, 0.625, **BACK)
        _save_step(run, 60, 0.5)
        run.wait()
        run.branch(20, "branch").close()
    with tr.Run("timed", save_every=_TIMED) as run:
        _save_step(run, 100, 0.5)
        _save_step(run, 101, 0.5)


def _check_runs() -> None:
    run, branch, timed = tr.Run("run"), tr.Run("branch"), tr.Run("timed")
    assert (run.steps(), run.latest(), run.best("loss")) == ([20, 40, 60], 60, 20)
    for step, loss in ((20, 0.125), (40, 0.625), (60, 0.5)):
        _require_step(run, step, loss)
    assert branch.steps() == [20]
    _require_step(branch, 20, 0.125)
    with tr.open("branch/step_00000020") as opened:
        assert opened.metadata["treering"]["branch"]["step"] == 20
    assert timed.steps() == [100, 101]
    with tr.open("timed/step_00000101") as opened:
        assert opened.metadata["treering"]["temporary"]
    assert [verdict.kept for verdict in tr.Run("run", keep=_KEEP).gc()] == [True] * 3


def _go_on_with_runs() -> None:
    with tr.Run("run", keep=_KEEP) as run:
        _save_step(run, 70, 0.25)
    assert run.steps() == [20, 60, 70]
    with tr.Run("run", keep=_KEEP) as run:
        _save_step(run, 60, 0.0625, **BACK)
    assert run.steps() == [20, 60]
    _require_step(run, 60, 0.0625)
    assert _names("run") == ["run.json", "step_00000020", "step_00000060"]
    with tr.Run("branch") as branch:
        _save_step(branch, 21, 0.5)
    assert branch.steps() == [20, 21]
    with tr.Run("timed", save_every=_TIMED) as timed:
        _save_step(timed, 200, 0.5)
    assert timed.steps() == [100, 200]


# -------------------------------------------------------------------------------------------------- leaves directories


def _write_leaves() -> None:
    for name, (tree, options) in leaves().items():
        tree_serialize_leaves(name, tree, **options)
    for prefix, tree in (("model", {"w": np.arange(3)}), ("opt/adam", states()["optax"]), (None, {"x": [1, None]})):
        tree_serialize_leaves("several", tree, prefix=prefix)
    tree_serialize_leaves("several", {"w": jnp.arange(4)}, prefix="model")
    for name in ("indexed", "unindexed"):
        tree_serialize_leaves(name, {"w": jnp.arange(3)}, prefix="a")
        tree_serialize_leaves(name, {"w": jnp.arange(4)}, prefix="a", write_index=False)
        tree_serialize_leaves(name, {"w": jnp.arange(5)}, prefix="b", write_index=False)
    index_leaves("indexed")


def _require_leaves(folder: str, prefix: str | None, tree: Any) -> None:
    require_same(tree_deserialize_leaves(folder, prefix=prefix, target=tree), tree)


def _check_leaves() -> None:
    for name, (tree, options) in leaves().items():
        assert tr.verify(name), name
        _require_leaves(name, options.get("prefix"), tree)
    assert tr.verify("several")
    _require_leaves("several", "model", {"w": jnp.arange(4)})
    _require_leaves("several", "opt/adam", states()["optax"])
    require_same(tree_deserialize_leaves("several", structure="exact"), {"x": [1, None]})
    assert tr.verify("indexed")
    _require_leaves("indexed", "a", {"w": jnp.arange(4)})
    _require_leaves("indexed", "b", {"w": jnp.arange(5)})
    _require_leaves("unindexed", "a", {"w": jnp.arange(3)})


def _go_on_with_leaves() -> None:
    index_leaves("unindexed")
    _require_leaves("unindexed", "a", {"w": jnp.arange(4)})
    _require_leaves("unindexed", "b", {"w": jnp.arange(5)})
    assert tr.verify("unindexed")
    for name, prefix in {name: options.get("prefix") for name, (_, options) in leaves().items()}.items():
        tree_serialize_leaves(name, {"new": jnp.arange(5)}, prefix=prefix)
        _require_leaves(name, prefix, {"new": jnp.arange(5)})
        assert len(_files(name)) == 4, _files(
            name
        )  # the index, a record, .zarray and one chunk: the old ones are swept
    tree_serialize_leaves("several", {"w": jnp.arange(9)}, prefix="opt/adam")
    _require_leaves("several", "model", {"w": jnp.arange(4)})
    _require_leaves("several", "opt/adam", {"w": jnp.arange(9)})


def _files(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).rglob("*") if path.is_file())


# --------------------------------------------------------------------------------------------- what the killed leave


def _die(calls: tuple[str, ...], names: Callable[[str], bool]) -> None:
    """End this process in front of the first of these calls of ``os`` whose last path has such a name."""

    def watched(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            if names(Path(os.fspath(arguments[-1])).name):
                os._exit(_KILLED)
            return real(*arguments, **options)

        return call

    for name in calls:
        setattr(os, name, watched(name))


_NAMING: Final = ("link", "rename", "replace")
_REMOVING: Final = ("unlink", "remove")


def _kill_save() -> None:
    _die(_NAMING, "treering.json".__eq__)
    tr.save("save", {"w": np.arange(9)})


def _kill_overwrite() -> None:
    _die(_NAMING, "treering.json".__eq__)
    tr.save("overwrite", {"w": np.arange(9)}, overwrite=True)


def _kill_sweep() -> None:
    _die(_REMOVING, lambda name: name.startswith("data-"))
    tr.save("sweep", {"w": np.arange(9)}, overwrite=True)


def _kill_removal() -> None:
    _die(_REMOVING, lambda name: name.startswith("data-"))
    tr.Run("removal", keep=tr.KeepLast(1)).gc(dry_run=False)


def _kill_going_back() -> None:
    _die(_NAMING, lambda name: name.endswith(".removed"))
    tr.Run("back").save(1, {"w": np.arange(9)}, **BACK).result()
    tr.Run("back").wait()


def _kill_leaves() -> None:
    _die(_NAMING, "tensorstore_index.json".__eq__)
    tree_serialize_leaves("leaves", {"w": np.arange(9), "v": np.arange(8)}, prefix="p")


def _kill_moving() -> None:
    _die(_NAMING, "v".__eq__)  # the index lists it, and the other leaf is moved
    tree_serialize_leaves("moving", {"w": np.arange(9), "v": np.arange(8)})


_VICTIMS: Final = {
    done.__name__: done
    for done in (_kill_save, _kill_overwrite, _kill_sweep, _kill_removal, _kill_going_back, _kill_leaves, _kill_moving)
}


def _write_killed() -> None:
    for name in ("overwrite", "sweep"):
        tr.save(name, {"w": np.arange(3)}, metadata=METADATA)
    for name in ("removal", "back"):
        with tr.Run(name) as run:
            for step in (1, 2, 3):
                run.save(step, {"w": np.arange(step)})
                run.wait()
    for name, prefix in (("leaves", "p"), ("moving", None)):
        tree_serialize_leaves(name, {"w": np.arange(3)}, prefix=prefix)
    for name in _VICTIMS:
        done = subprocess.run([*MAIN, "kill", name], check=False)
        assert done.returncode == _KILLED, name


def _check_killed() -> None:
    assert any(name.endswith(".treering-tmp") for name in _names("save"))
    assert any(name.endswith(".treering-tmp") for name in _names("overwrite"))
    assert len([name for name in _names("sweep") if name.startswith("data-")]) == 2
    assert any(name.endswith(".removed") for name in _names("removal/step_00000001"))
    assert ".run.json.left" in _names("back")
    assert [path.split("/")[-2:] for path in _files("leaves/.treering") if "/leaves/p/" in path]
    assert '"moving"' in Path("moving/tensorstore_index.json").read_text(encoding="utf-8")
    assert [Path(path).name for path in _files("moving/.treering") if "/leaves/v/" in path] == [".zarray", "0"]
    assert Path("moving/w/0").stat().st_size == np.arange(9).nbytes
    try:
        tr.load("save")
    except NOT_FOUND:
        pass
    else:
        raise AssertionError("a save that was killed is there")
    require_same(tr.load("overwrite"), {"w": np.arange(3)})
    require_same(tr.load("sweep"), {"w": np.arange(9)})
    assert tr.Run("removal").steps() == [2, 3]
    assert tr.Run("back").steps() == [1]
    require_same(tr.Run("back").load(), {"w": np.arange(9)})
    _require_leaves("leaves", "p", {"w": np.arange(3)})
    _require_leaves("moving", None, {"w": np.arange(9), "v": np.arange(8)})
    for name in ("overwrite", "sweep", "leaves", "moving", "removal/step_00000003", "back/step_00000001"):
        assert tr.verify(name), name


def _go_on_after_the_killed() -> None:
    for name in ("save", "overwrite", "sweep"):
        tr.save(name, {"w": np.arange(5)}, overwrite=True)
        require_same(tr.load(name), {"w": np.arange(5)})
        assert len(_names(name)) == 2, _names(name)
    for name in ("removal", "back"):
        with tr.Run(name, keep=tr.KeepLast(1)) as run:
            run.save(4, {"w": np.arange(4)})
            run.wait()
            run.gc(dry_run=False)
        assert _names(name) == ["run.json", "step_00000004"]
    for name, prefix in (("leaves", "p"), ("moving", None)):
        tree_serialize_leaves(name, {"new": np.arange(5)}, prefix=prefix)
        _require_leaves(name, prefix, {"new": np.arange(5)})
        assert len(_files(name)) == 4, _files(name)


# ---------------------------------------------------------------------------------------------------- many processes


def _joint_tree(factor: int = 1) -> dict[str, Any]:
    mesh = jax.make_mesh((len(jax.devices()),), ("x",), devices=jax.devices())

    def put(array: np.ndarray, *spec: Any) -> jax.Array:
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    array = np.arange(96, dtype=np.float32).reshape(8, 12) * factor
    return {
        "rows": put(array, "x"),
        "bf16": put(array.astype(jnp.bfloat16), "x"),
        "everywhere": put(array),
        "numpy": np.arange(5) * factor,
        "text": "ring",
    }


def write_jointly(folder: str) -> None:
    """Save together with the other processes of the job."""
    os.chdir(folder)
    tr.save("checkpoint", _joint_tree(), metadata=METADATA)
    tr.save("checkpoint", _joint_tree(2), metadata=METADATA, overwrite=True)
    tree_serialize_leaves("leaves", _joint_tree(), prefix="p")
    with tr.Run("run", keep=tr.KeepLast(2)) as run:
        for step in (1, 2, 3):
            run.save(step, _joint_tree(step), metrics={"loss": 1 / step})


def die_jointly(folder: str) -> None:
    """Save together with the other process; process 0 dies in front of the commit, and then jax ends the other one."""
    os.chdir(folder)
    if jax.process_index() == 0:
        _die(_NAMING, "treering.json".__eq__)
    tr.save("killed", _joint_tree(), overwrite=True)


def _write_jointly() -> None:
    here = str(Path.cwd())
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    results(run_job(write_jointly, 2, devices=4, arguments=[here], timeout=120, environment=environment))
    tr.save("killed", {"w": np.arange(3)})
    dead, other = run_job(die_jointly, 2, devices=4, arguments=[here], environment=environment)
    assert dead.code == _KILLED
    assert other.code != 0


def _check_jointly_written() -> None:
    require_same(tr.load("checkpoint", like=_joint_tree()), _joint_tree(2))
    with tr.open("checkpoint") as opened:
        assert opened.metadata == METADATA
    _require_leaves("leaves", "p", _joint_tree())
    run = tr.Run("run")
    assert run.steps() == [2, 3]
    for step in (2, 3):
        require_same(run.load(step, like=_joint_tree()), _joint_tree(step))
        assert run.metrics(step) == {"loss": 1 / step}
    require_same(tr.load("killed"), {"w": np.arange(3)})
    assert len(_names("killed")) > 4, _names("killed")
    for name in ("checkpoint", "leaves", "run/step_00000003", "killed"):
        assert tr.verify(name), name


def _go_on_after_processes() -> None:
    for name in ("checkpoint", "killed"):
        tr.save(name, _joint_tree(3), overwrite=True)
        require_same(tr.load(name, like=_joint_tree()), _joint_tree(3))
        assert len(_names(name)) == 2, _names(name)
    tree_serialize_leaves("leaves", {"new": np.arange(5)}, prefix="p")
    _require_leaves("leaves", "p", {"new": np.arange(5)})
    assert len(_files("leaves")) == 4, _files("leaves")
    with tr.Run("run", keep=tr.KeepLast(2)) as run:
        run.save(4, _joint_tree(4))
    assert run.steps() == [3, 4]


PARTS: Final = {
    "checkpoints": Part(_write_checkpoints, _check_checkpoints, _go_on_with_checkpoints),
    "safetensors": Part(_write_safetensors, _check_safetensors, _go_on_with_safetensors),
    "msgpack": Part(_write_msgpack, _check_msgpack, _go_on_with_msgpack),
    "runs": Part(_write_runs, _check_runs, _go_on_with_runs),
    "leaves": Part(_write_leaves, _check_leaves, _go_on_with_leaves),
    "killed": Part(_write_killed, _check_killed, _go_on_after_the_killed),
    "processes": Part(_write_jointly, _check_jointly_written, _go_on_after_processes),
}


# ---------------------------------------------------------------------------------------------------------- commands


def write(folder: Path) -> None:
    """Write all parts with the treering that is imported here."""
    for name, part in PARTS.items():
        (folder / name).mkdir(parents=True)
        os.chdir(folder / name)
        part.write()


def check(folder: Path, *without: str) -> None:
    """Read all parts but some with the treering that is imported here, and go on writing there."""
    for name, part in ((name, part) for name, part in PARTS.items() if name not in without):
        os.chdir(folder / name)
        part.check()
        part.go_on()
        print(f"{name}: read, compared, written over")  # noqa: T201 - a command


def unpack(name: str, folder: Path) -> None:
    """Put the golden files of one program into a folder."""
    with tarfile.open(GOLDEN / f"{name}.tar.gz") as file:
        file.extractall(folder, filter="data")


def _pack(folder: Path, target: Path) -> None:
    """Make an archive without the times and the owner of this machine."""

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = entry.mtime = 0
        entry.uname = entry.gname = ""
        return entry

    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as file:
        for part in sorted(folder.iterdir()):
            file.add(part, arcname=part.name, filter=plain)
    target.write_bytes(gzip.compress(content.getvalue(), mtime=0))


def _with_program(source: str, command: str, folder: Path, *arguments: str) -> None:
    """Run a command of this module with another treering."""
    paths = os.pathsep.join([str(Path(source).resolve()), str(_ROOT)])
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    told = {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    subprocess.run([*MAIN, command, str(folder), *arguments], env=inherited | told, cwd=_ROOT, check=True)


def keep(source: str, name: str) -> None:
    """Let a program write, and keep that as golden files."""
    with tempfile.TemporaryDirectory() as folder:
        _with_program(source, "write", Path(folder) / name)
        GOLDEN.mkdir(parents=True, exist_ok=True)
        _pack(Path(folder) / name, GOLDEN / f"{name}.tar.gz")


def against(source: str, *without: str) -> None:
    """Let each of two programs, the one that is imported here and another, read what the other writes.

    The other one reads all parts but those named: it refuses what is of a version that is newer than itself.
    """
    here = str(Path(tr.__file__).parents[1])
    for writer, reader in ((here, source), (source, here)):
        print(f"{writer} writes, {reader} reads", flush=True)  # noqa: T201 - a command
        with tempfile.TemporaryDirectory() as folder:
            _with_program(writer, "write", Path(folder) / "written")
            _with_program(reader, "check", Path(folder) / "written", *(without if reader == source else ()))


def main() -> None:
    """Run a command of the module's docstring."""
    commands: dict[str, Callable[..., None]] = {
        "write": lambda folder: write(Path(folder)),
        "check": lambda folder, *without: check(Path(folder), *without),
        "keep": keep,
        "against": against,
        "kill": lambda name: _VICTIMS[name](),
    }
    commands[sys.argv[1]](*sys.argv[2:])
