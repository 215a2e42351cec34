"""Checkpoints that four processes wrote: read for ever, and written today as they were then, every byte of the data.

python -c "from tests.compat.test_golden_processes import main; main()"    # writes them anew, on 8 devices
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering
from tests.checkpoint.together import job_of
from tests.compat import independent_reader
from tests.compat.golden_checkpoints import METADATA, bits

GOLDEN = Path(__file__).parent / "golden" / "processes" / "four"
EACH = GOLDEN.with_name("each")


def tree() -> dict[str, Any]:
    """Leaves of every way to lie over processes."""
    devices = np.array(jax.devices())
    mesh, turned = Mesh(devices.reshape(4, 2), ("x", "y")), Mesh(devices[::-1], ("z",))

    def put(array: Any, on: Mesh, *spec: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(on, P(*spec)))

    array = np.arange(96, dtype=np.float32).reshape(8, 12)
    return {
        "rows": put(array, mesh, "x"),
        "columns": put(array, mesh, None, "y"),
        "both": put(array.astype(jnp.bfloat16), mesh, "y", "x"),
        "turned": put(array, turned, "z"),
        "everywhere": put(np.arange(700, dtype=np.int16), mesh),
        "few": put(array, Mesh(devices[2:4], ("q",)), "q"),
        "empty": put(np.zeros((0, 8)), turned, None, "z"),
        "keys": put(jax.random.split(jax.random.key(4), 8), mesh, "x"),
        "numpy": np.arange(5),
        "int": 3,
    }


def save(path: Path) -> None:
    """Write it by four processes."""
    saved = tree()
    with pytest.MonkeyPatch.context() as patch:
        assert job_of(4, patch).save(path, lambda process: saved, metadata=METADATA) == [None] * 4


def state_of(process: int) -> dict[str, Any]:
    """Return the state of one process, of every kind of leaf."""
    rows = np.arange(process * 1100, dtype=">i4")
    plain = {"position": (process, None), "seed": 10**30, "loss": float("nan"), "name": "é" * process, "raw": b"\0\xff"}
    return {**plain, "rows": rows, "last": np.float32(process / 3)}


def save_each(path: Path) -> None:
    """Write by two processes what each has a state of its own for: one that is small, and one that lies in a file."""

    def tree_of(process: int) -> dict[str, Any]:
        small = treering.each({"process": process})
        return {"w": np.arange(5), "data": {"train": treering.each(state_of(process)), "eval": small}, "step": 3}

    with pytest.MonkeyPatch.context() as patch:
        assert job_of(2, patch).save(path, tree_of, metadata=METADATA) == [None] * 2


def main() -> None:
    """Write the golden files."""
    shutil.rmtree(EACH, ignore_errors=True)
    save_each(EACH)
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    save(GOLDEN)


def document(path: Path) -> dict[str, Any]:
    """An index without what differs from save to save."""
    members: dict[str, Any] = json.loads((path / "treering.json").read_text(encoding="ascii"))
    del members["digest"], members["written"]
    return members


def same(found: dict[str, Any], process: int) -> bool:
    """Tell whether a state is that of a process, to the last bit."""
    want = state_of(process)
    rows, want["rows"] = found["rows"], want["rows"].astype("<i4")
    return bits(rows) == bits(want["rows"]) and repr({**found, "rows": 0}) == repr({**want, "rows": 0})


def read_states(node: dict[str, Any]) -> list[Any]:
    """Return the states of all processes that a node "each" holds, read by the specification alone."""
    data, at, found = node["states"], 8 * node["processes"], []
    for (size,) in struct.iter_unpack("<Q", data[:at]):
        state, at = data[at : at + size], at + size
        (end,) = struct.unpack("<Q", state[:8])
        document, place = json.loads(state[8 : 8 + end]), 8 + end
        values, leaves = iter(document["values"]), []
        for of in document["leaves"]["type"]:
            kind = document["types"][of]
            if "dtype" not in kind:
                leaves.append(independent_reader.value(kind["kind"], next(values)))
                continue
            array = np.frombuffer(
                state, independent_reader.numpy_dtype(kind["dtype"]), int(np.prod(kind["shape"])), place
            )
            leaves.append(array.reshape(kind["shape"]))
            place += array.nbytes
        assert place == size
        tree, keys = independent_reader.build(document["structure"], leaves)
        assert keys == document["leaves"]["key"]
        found.append(tree)
    assert at == len(data)
    return found


def test_states_of_processes_are_read() -> None:
    found = treering.load(EACH)
    assert treering.verify(EACH)
    assert [same(state, process) for process, state in enumerate(found["data"]["train"])] == [True, True]
    assert list(found["data"]["eval"]) == [{"process": 0}, {"process": 1}]
    tree, leaves = independent_reader.read(EACH)
    assert leaves["w"].tolist() == list(range(5))
    for process, state in enumerate(read_states(tree["data"]["train"])):
        assert np.array_equal(state["rows"], state_of(process)["rows"])
        assert (state["position"], state["seed"]) == ((process, None), 10**30)


def test_states_of_processes_are_written_as_they_were(tmp_path: Path) -> None:
    save_each(tmp_path / "ckpt")
    check_written(tmp_path / "ckpt", EACH)


def test_they_are_read() -> None:
    want = tree()
    found = treering.load(GOLDEN)
    assert {key: bits(leaf) for key, leaf in found.items()} == {key: bits(leaf) for key, leaf in want.items()}
    assert treering.verify(GOLDEN)


def test_a_stranger_reads_them() -> None:
    _, found = independent_reader.read(GOLDEN)
    for key in ("rows", "columns", "turned", "everywhere", "few"):
        assert np.array_equal(found[key], np.asarray(tree()[key]))


def test_they_are_written_as_they_were(tmp_path: Path) -> None:
    save(tmp_path / "ckpt")
    check_written(tmp_path / "ckpt", GOLDEN)


def check_written(path: Path, golden: Path) -> None:
    """Compare a checkpoint with a golden one, but for what differs from save to save."""
    assert document(path) == document(golden)
    names = sorted(entry.name for entry in golden.iterdir())
    assert sorted(entry.name for entry in path.iterdir()) == names
    for name in names:
        if name.startswith("data-"):
            assert (path / name).read_bytes() == (golden / name).read_bytes()
