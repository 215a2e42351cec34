"""Joint saves laid out: each process comes to the files that process 0 gives it, byte for byte, without a word."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering
from tests import faults
from tests.checkpoint.together import Together, end_files_at, four
from treering.errors import ProcessFailedError

__all__ = ["four"]

LIMITS = [1 << 30, 5000, 700]


def tree_of(process: int) -> dict[str, Any]:
    """What a process holds; what it holds alone differs from process to process in all but its shape."""
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(4, 2), ("x", "y"))
    turned = Mesh(devices[::-1], ("z",))
    few = Mesh(devices[2:5], ("q",))

    def put(on: Mesh, *shape: int, spec: Any = ()) -> jax.Array:
        array = np.arange(np.prod(shape, dtype=int), dtype="f4").reshape(shape)
        return jax.device_put(array, NamedSharding(on, P(*spec)))

    local = Mesh(devices[2 * process : 2 * process + 1 + process % 2], ("l",))
    return {
        "numpy": np.full((10, 10), process),
        "cut here or not": put(local, 8, 6, spec=("l",)),
        "rows": put(mesh, 32, 9, spec=("x",)),
        "all": put(mesh, 100, 13),
        "also": put(turned, 77),
        "turned": put(turned, 64, 3, spec=("z",)),
        "same boxes": put(turned, 64, 3, spec=("z", None)),
        "few": put(few, 9, 5, spec=("q",)),
        "empty": put(turned, 0, 8, spec=(None, "z")),
        "empty on few": put(few, 3, 0, spec=("q",)),
        "text": f"{process}" * 5000,
    }


@pytest.fixture(params=LIMITS)
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes beyond which no file is begun."""
    nbytes: int = request.param
    end_files_at(monkeypatch, nbytes)
    return nbytes


def saved(four: Together, path: Path) -> dict[str, Any]:
    """Save the trees of all, and return the index."""
    assert four.save(path, tree_of) == [None] * 4
    document: dict[str, Any] = json.loads((path / "treering.json").read_bytes())
    return document


def test_what_all_write_is_one_checkpoint(four: Together, limit: int, tmp_path: Path) -> None:
    index = saved(four, tmp_path / "x")
    assert treering.verify(tmp_path / "x").ok
    found, wanted = treering.load(tmp_path / "x"), tree_of(0)
    assert found.keys() == wanted.keys()
    for key in wanted:
        np.testing.assert_array_equal(found[key], wanted[key])
    files = [file["name"] for file in index["files"]]
    assert len(set(files)) == len(files)
    assert [file["process"] for file in index["files"]] == sorted(file["process"] for file in index["files"])
    assert {file["process"] for file in index["files"]} == {0, 1, 2, 3}
    assert sorted(entry.name for entry in (tmp_path / "x").iterdir()) == sorted([*files, "treering.json"])
    assert len(files) > 4 or limit > LIMITS[-1]


def test_every_item_is_written_once(four: Together, limit: int, tmp_path: Path) -> None:
    index = saved(four, tmp_path / "x")
    tree = tree_of(0) | {"text": np.zeros(5000, np.uint8)}
    written = dict.fromkeys(range(len(tree)), 0)
    for leaf, nbytes in zip(index["chunks"]["leaf"], index["chunks"]["nbytes"], strict=True):
        written[leaf] += nbytes
    assert list(written.values()) == [np.asarray(leaf).nbytes for leaf in tree.values()]


def test_files_end_at_their_limit(four: Together, limit: int, tmp_path: Path) -> None:
    index = saved(four, tmp_path / "x")
    chunks = index["chunks"]
    for number, file in enumerate(index["files"]):
        held = [nbytes for nbytes, of in zip(chunks["nbytes"], chunks["file"], strict=True) if of == number]
        assert file["nbytes"] - file["header"] == sum(held) <= limit + max(held)


@pytest.mark.parametrize("more", [-1, 1])
def test_checksums_for_other_chunks_are_refused(
    four: Together, more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version of treering may have cut the tree in another way."""
    changed = []

    def tampering(name: Any, new: Any, *, src_dir_fd: int, **options: Any) -> None:
        if os.fspath(new).endswith("-part-00002"):
            descriptor = os.open(name, os.O_RDWR, dir_fd=src_dir_fd)
            with os.fdopen(descriptor, "r+") as file:
                vote = json.load(file)
                if vote["stage"] == "written":
                    payload = base64.b64decode(vote["payload"])
                    count = int.from_bytes(payload[:8], "little")
                    assert len(payload) == 8 * (1 + count)
                    content = payload[8 : 8 * (1 + count + more)] + bytes(8 * max(0, more))
                    vote["payload"] = base64.b64encode((count + more).to_bytes(8, "little") + content).decode()
                    file.seek(0)
                    file.truncate()
                    json.dump(vote, file)
                    changed.append(count)

    faults.before(monkeypatch, os, "replace", tampering)
    outcomes = four.save(tmp_path / "x", tree_of)
    assert len(changed) == 1
    error = outcomes[0]
    assert isinstance(error, ProcessFailedError)
    assert "process 2 sent checksums for other chunks" in str(error)
    assert error.processes == (2,)
    assert [type(outcome) for outcome in outcomes] == [ProcessFailedError] * 4
    assert not (tmp_path / "x" / "treering.json").exists()
