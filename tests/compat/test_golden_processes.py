"""Checkpoints that four processes wrote: read for ever, and written today as they were then, every byte of the data.

python -c "from tests.compat.test_golden_processes import main; main()"    # writes them anew, on 8 devices
"""

from __future__ import annotations

import json
import shutil
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


def main() -> None:
    """Write the golden files."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    save(GOLDEN)


def document(path: Path) -> dict[str, Any]:
    """An index without what differs from save to save."""
    members: dict[str, Any] = json.loads((path / "treering.json").read_text(encoding="ascii"))
    del members["digest"], members["written"]
    return members


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
    assert document(tmp_path / "ckpt") == document(GOLDEN)
    names = sorted(entry.name for entry in GOLDEN.iterdir())
    assert sorted(entry.name for entry in (tmp_path / "ckpt").iterdir()) == names
    for name in names:
        if name.startswith("data-"):
            assert (tmp_path / "ckpt" / name).read_bytes() == (GOLDEN / name).read_bytes()
