"""Trees without checksums that somebody writes anew while they are read: what is loaded is one state of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from jax.sharding import Mesh
from safetensors.numpy import save_file

import treering as tr
from tests.checkpoint.together import Loading, loading
from tests.leaves.test_foreign import written
from treering._arrays.source import Source
from treering._checkpoint import joint_load, read_leaves
from treering._foreign.folder_files import FolderFiles
from treering.errors import Corrupt, NotShared

__all__ = ["loading"]

MESH = Mesh(np.array(jax.devices()), ("x",))
SPEC = jax.sharding.PartitionSpec(None, "x")
NAMES = ("a", "b", "c")
WIDE = np.random.default_rng(0).standard_normal((64, 128), np.float32)


def _tree(generation: int) -> dict[str, Any]:
    return {name: WIDE + number + 10 * generation for number, name in enumerate(NAMES)}


def _write_shards(path: Path, generation: int) -> None:
    path.mkdir(exist_ok=True)
    for name, array in _tree(generation).items():
        save_file({name: array}, path / f"model-{name}.safetensors")
    weight_map = {name: f"model-{name}.safetensors" for name in NAMES}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _write_levanter(path: Path, generation: int) -> None:
    path.mkdir(exist_ok=True)
    tree = _tree(generation)
    manager = GlobalAsyncCheckpointManager()
    arrays = [jax.device_put(array) for array in tree.values()]
    manager.serialize_with_paths(arrays, [str(path / name) for name in tree])
    manager.wait_until_finished()
    metadata = {"step": 3, "timestamp": "2025-11-03T12:30:00.123456", "is_temporary": False}
    (path / "metadata.json").write_text(json.dumps(metadata))


def _write_npz(path: Path, generation: int) -> None:
    np.savez(path, **_tree(generation))


def _write_packed(path: Path, generation: int) -> None:
    np.savez_compressed(path, **_tree(generation))


def _write_leaves(path: Path, generation: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    written(path, _tree(generation))


WRITERS: dict[str, Callable[[Path, int], object]] = {
    "state.msgpack": lambda path, generation: tr.save(path, _tree(generation), overwrite=True),
    "model.safetensors": lambda path, generation: save_file(_tree(generation), path),
    "arrays.npz": _write_npz,
    "packed.npz": _write_packed,
    "shards": _write_shards,
    "levanter": _write_levanter,
    "leaves": _write_leaves,
}


def _generation_of(found: Any) -> int:
    """Which state it is, all of it."""
    generation = round(float(np.asarray(found["a"])[0, 0] - WIDE[0, 0]) / 10)
    for name, array in _tree(generation).items():
        np.testing.assert_array_equal(np.asarray(found[name]), array, err_msg=f"{name} of state {generation}")
    return generation


def _after_writing(path: Path) -> None:
    """Let the files have another time, however coarse the clock of the file system is."""
    for place in (path, *path.rglob("*")):
        stat = place.stat()
        os.utime(place, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))


@pytest.mark.parametrize("name", WRITERS)
def test_written_anew_while_one_process_reads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    WRITERS[name](path, 0)
    read = read_leaves.read_batches
    acts = iter([1])

    def write_between(source: Source, deliveries: Any, report: Any) -> list[Any]:
        first = read(source, deliveries[:1], None)
        if (generation := next(acts, None)) is not None:
            WRITERS[name](path, generation)
            _after_writing(path)
        return first + read(source, deliveries[1:], None)

    monkeypatch.setattr(joint_load, "read_batches", write_between)
    found = tr.load(path)
    # A single file that another has replaced is read as it was.
    assert _generation_of(found) == (0 if name in {"state.msgpack", "model.safetensors"} else 1)


@pytest.mark.parametrize("name", WRITERS)
def test_written_anew_after_all_have_opened_it(name: str, loading: Loading, tmp_path: Path) -> None:
    path = tmp_path / name
    WRITERS[name](path, 0)

    def others(meeting: int, said: dict[str, Any]) -> list[dict[str, Any]]:
        if meeting == 1:
            WRITERS[name](path, 1)
            _after_writing(path)
        return [said] * 3

    loading.others = others
    found = tr.load(path, mesh=MESH, shardings=lambda *_: SPEC)
    assert _generation_of(found) == 1
    assert {"again": True} in loading.meetings


@pytest.mark.parametrize("name", WRITERS)
def test_copies_are_alike_and_other_states_are_not(name: str, loading: Loading, tmp_path: Path) -> None:
    states = []
    for number, generation in enumerate((0, 0, 1)):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        WRITERS[name](path, generation)
        loading.meetings.clear()
        tr.load(path, mesh=MESH, shardings=lambda *_: SPEC)
        states.append(loading.meetings[0]["state"])
    assert states[0] == states[1] != states[2]


@pytest.mark.parametrize("name", WRITERS)
def test_states_of_hosts_that_share_nothing(name: str, loading: Loading, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name, 0)
    loading.others = lambda meeting, said: [said, said, {**said, "state": "another"} if "state" in said else said]
    with pytest.raises(NotShared, match="process 3 found another state"):
        tr.load(tmp_path / name, mesh=MESH, shardings=lambda *_: SPEC)


def test_a_file_that_is_opened_again_has_to_be_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treering._foreign.folder_files._MOST_OPEN", 0)
    (tmp_path / "a").write_bytes(b"first")
    with contextlib.ExitStack() as stack:
        files = FolderFiles(tmp_path, stack)
        assert files.read("a", 0, 5) == b"first"
        shutil.copy(tmp_path / "a", tmp_path / "b")
        (tmp_path / "b").replace(tmp_path / "a")
        with pytest.raises(Corrupt, match="was replaced while the tree was being read"):
            files.read("a", 0, 5)


def test_in_a_bucket_one_listing_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory it is as in a bucket: versions are numbers, and no file is asked for alone."""
    from treering._store import opened_files
    from treering._store.resolve import located, open_file, write_file

    paths = [located(f"memory://states/many/{number}") for number in range(20)]
    for path in paths:
        write_file(path, [b"first"], 5)
    opened = opened_files.OpenedFiles(folder=located("memory://states/many"))
    for path in paths:
        with open_file(path) as file:
            opened.add(path, file)
    monkeypatch.setattr(opened_files, "find_at", lambda path: pytest.fail(f"{path} was asked for"))
    assert opened.is_current()
    write_file(paths[7], [b"other"], 5)
    assert not opened.is_current()
