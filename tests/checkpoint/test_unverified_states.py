"""Trees without checksums that somebody writes anew while they are read: what is loaded is one state of them."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager
from safetensors.numpy import save_file

import treering as tr
from tests import faults, limits, meshes
from tests.checkpoint.together import Loading, loading
from tests.command import copy_path
from tests.foreign.test_jax_pytree import DICT, LEAF, Node, saved_as_jax
from tests.leaves.test_foreign import written
from treering._arrays import delivered
from treering._arrays.source import Source
from treering._checkpoint import copy_checkpoint, joint_load, save_folder
from treering._checkpoint.source import read_pieces
from treering._foreign.foreign_tree import FolderFiles
from treering.errors import BusyError, CorruptError, NotSharedError
from treering.serialization import to_bytes

__all__ = ["loading"]

MESH = meshes.line()
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


def _write_compressed(path: Path, generation: int) -> None:
    path.write_bytes(gzip.compress(to_bytes(_tree(generation))))


def _write_orbax(path: Path, generation: int, *, ocdbt: bool) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint")
    with checkpoint.Checkpointer(checkpoint.PyTreeCheckpointHandler(use_ocdbt=ocdbt)) as writer:
        writer.save(path, _tree(generation), force=True)


def _write_of_jax(path: Path, generation: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    tree = _tree(generation)
    names = tuple(name.encode() for name in tree)
    saved_as_jax(path, Node(DICT, tuple(Node(LEAF) for _ in tree), names), list(tree.values()))


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
    "array.npy": lambda path, generation: np.save(path, _tree(generation)["a"]),
    "compressed.msgpack": _write_compressed,
    "ocdbt": functools.partial(_write_orbax, ocdbt=True),
    "orbax": functools.partial(_write_orbax, ocdbt=False),
    "jax": _write_of_jax,
}


def _generation_of(found: Any) -> int:
    """Which state it is, all of it; of a single array as well."""
    found = found if isinstance(found, dict) else {"a": found}
    generation = round(float(np.asarray(found["a"])[0, 0] - WIDE[0, 0]) / 10)
    for name in found:
        array = _tree(generation)[name]
        np.testing.assert_array_equal(np.asarray(found[name]), array, err_msg=f"{name} of state {generation}")
    return generation


def _after_writing(path: Path) -> None:
    """Let the files have another time, however coarse the clock of the file system is."""
    for place in (path, *path.rglob("*")):
        stat = place.stat()
        os.utime(place, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**9))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", WRITERS)
def test_written_anew_while_one_process_reads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / name
    WRITERS[name](path, 0)
    read = delivered.read_batches
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


@pytest.mark.sampled(5)
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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", WRITERS)
def test_copies_are_alike_and_other_states_are_not(name: str, loading: Loading, tmp_path: Path) -> None:
    states = []
    for number, generation in enumerate((0, 0, 1)):
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        if number == 1:
            (shutil.copytree if (tmp_path / "0" / name).is_dir() else shutil.copy)(tmp_path / "0" / name, path)
        else:
            WRITERS[name](path, generation)
        loading.meetings.clear()
        tr.load(path, mesh=MESH, shardings=lambda *_: SPEC)
        states.append(loading.meetings[0]["state"])
    assert states[0] == states[1] != states[2]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", WRITERS)
def test_states_of_hosts_that_share_nothing(name: str, loading: Loading, tmp_path: Path) -> None:
    WRITERS[name](tmp_path / name, 0)
    loading.others = lambda meeting, said: [said, said, {**said, "state": "another"} if "state" in said else said]
    with pytest.raises(NotSharedError, match="process 3 found another state"):
        tr.load(tmp_path / name, mesh=MESH, shardings=lambda *_: SPEC)


@pytest.mark.parametrize("name", ["state.msgpack", "compressed.msgpack"])
def test_python_values_that_differ_on_hosts_that_share_nothing(name: str, loading: Loading, tmp_path: Path) -> None:
    states = []
    for step in (1, 1, 2):
        data = to_bytes({"w": WIDE, "step": step, "name": "a", "none": None})
        (tmp_path / name).write_bytes(gzip.compress(data) if name.startswith("compressed") else data)
        loading.meetings.clear()
        tr.load(tmp_path / name, mesh=MESH, shardings=lambda _, leaf: SPEC if getattr(leaf, "shape", ()) else None)
        states.append(loading.meetings[0]["state"])
    assert states[0] == states[1] != states[2]


def test_one_of_hundreds_of_leaves_that_differs_on_hosts_that_share_nothing(loading: Loading, tmp_path: Path) -> None:
    states = []
    for changed in (None, None, 200):
        tree = {f"w{number:03}": WIDE + (number == changed) for number in range(300)}
        (tmp_path / "state.msgpack").write_bytes(to_bytes(tree))
        loading.meetings.clear()
        tr.load(tmp_path / "state.msgpack", mesh=MESH, shardings=lambda *_: SPEC)
        states.append(loading.meetings[0]["state"])
    assert states[0] == states[1] != states[2]


SAVERS: dict[str, Callable[[Path, dict[str, Any]], object]] = {
    "state.msgpack": lambda path, tree: path.write_bytes(to_bytes(tree)),
    "model.safetensors": lambda path, tree: save_file(tree, path),
    "arrays.npz": lambda path, tree: np.savez(path, **tree),
}


def _says_of(loading: Loading, path: Path, tree: dict[str, Any], spec: Any) -> tuple[Any, Any]:
    """Load a tree, and return what this process says of its state first, and of what it has read at the end."""
    SAVERS[path.name](path, tree)
    loading.meetings.clear()
    found = tr.load(path, mesh=MESH, shardings=lambda *_: spec)
    assert all(np.array_equal(found[name], array) for name, array in tree.items())
    return loading.meetings[0]["state"], loading.meetings[-1]["read"]


@pytest.mark.parametrize("name", SAVERS)
def test_every_item_of_a_small_leaf_counts_on_hosts_that_share_nothing(
    name: str, loading: Loading, tmp_path: Path
) -> None:
    states = []
    for place in (None, None, (0, 0), (63, 127), (40, 1)):
        tree = {"a": WIDE.copy(), "b": WIDE}
        if place is not None:
            tree["a"][place] += 1
        states.append(_says_of(loading, tmp_path / name, tree, SPEC)[0])
    assert states[0] == states[1]
    assert len(set(states)) == 4


LARGE = np.arange(1 << 18, dtype=np.float32).reshape(512, 512)


def test_all_that_every_process_reads_counts_on_hosts_that_share_nothing(loading: Loading, tmp_path: Path) -> None:
    """Arrays of msgpack are exchanged by nobody: where all processes want all of one, each reads it."""
    path = tmp_path / "state.msgpack"
    said = []
    for place in (None, None, (0, 0), (511, 511)):
        tree = {"a": LARGE.copy(), "b": LARGE}
        if place is not None:
            tree["a"][place] += 1
        said.append(_says_of(loading, path, tree, jax.sharding.PartitionSpec()))
    assert len({state for state, _ in said}) == 1  # of a large array some numbers are compared before it is read
    assert said[0] == said[1]
    assert len({read for _, read in said}) == 3
    loading.others = lambda meeting, said: [said, said, said | {"read": "another"} if "read" in said else said]
    with pytest.raises(NotSharedError, match="process 3 read other numbers of it than process 0"):
        tr.load(path, mesh=MESH, shardings=lambda *_: jax.sharding.PartitionSpec())


@pytest.mark.parametrize("name", SAVERS)
def test_what_each_process_reads_for_itself_is_not_compared(name: str, loading: Loading, tmp_path: Path) -> None:
    rows = jax.sharding.PartitionSpec("x")
    first, second = ({"a": LARGE + number} for number in range(2))
    one, other = (_says_of(loading, tmp_path / name, tree, rows) for tree in (first, second))
    assert one[0] != other[0]
    assert one[1] == other[1]


SINGLE = ("state.msgpack", "model.safetensors", "arrays.npz", "packed.npz", "array.npy", "compressed.msgpack")


@pytest.fixture(params=SINGLE)
def written_into(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[], None]]:
    """A single file, and what writes other numbers into it, as no save of treering does."""
    path, other = tmp_path / request.param, tmp_path / "other" / request.param
    other.parent.mkdir()
    WRITERS[request.param](path, 0)
    WRITERS[request.param](other, 1)

    def write() -> None:
        path.write_bytes(other.read_bytes())
        _after_writing(path)

    return path, write


def test_a_handle_of_a_file_that_is_written_into_is_busy(written_into: tuple[Path, Callable[[], None]]) -> None:
    path, write = written_into
    with tr.open(path) as opened:
        view = next(iter(opened.values()))
        np.testing.assert_array_equal(view[:5], WIDE[:5])
        write()
        with pytest.raises(BusyError, match=r"was (written into|saved again) after it was opened"):
            np.asarray(view)


def test_a_handle_of_a_file_that_is_replaced_reads_the_old_one(tmp_path: Path) -> None:
    for name in SINGLE:
        WRITERS[name](tmp_path / name, 0)
        WRITERS[name](tmp_path / f"new-{name}", 1)
        with tr.open(tmp_path / name) as opened:
            (tmp_path / f"new-{name}").replace(tmp_path / name)
            np.testing.assert_array_equal(np.asarray(next(iter(opened.values()))), WIDE)


def test_a_copy_of_a_file_that_is_written_into_is_busy(
    written_into: tuple[Path, Callable[[], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = written_into
    read = read_pieces

    def write_between(*given: Any) -> Iterator[bytes]:
        yield from read(*given)
        write()

    monkeypatch.setattr(copy_checkpoint, "read_pieces", write_between)
    with pytest.raises(BusyError, match="was written into while it was being copied"):
        copy_path(str(path), str(tmp_path / f"copy-{path.name}"), overwrite=False)
    assert [found.name for found in tmp_path.iterdir() if found.is_file()] == [path.name]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", WRITERS)
def test_what_is_written_anew_while_it_is_converted_is_busy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    WRITERS[name](path, 0)

    def write_anew(*given: Any, **named: Any) -> None:
        WRITERS[name](path, 1)
        _after_writing(path)

    faults.before(monkeypatch, save_folder, "write", write_anew)
    if name in {"state.msgpack", "model.safetensors"}:  # replaced, not written into
        tr.convert(path, tmp_path / "converted")
        assert _generation_of(tr.load(tmp_path / "converted")) == 0
        return
    with pytest.raises(BusyError, match="replaced while"):
        tr.convert(path, tmp_path / "converted")
    assert not (tmp_path / "converted" / "treering.json").exists()


def test_a_file_that_is_opened_again_has_to_be_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, foreign_files_held_open=0)
    (tmp_path / "a").write_bytes(b"first")
    with contextlib.ExitStack() as stack:
        files = FolderFiles(tmp_path, stack)
        assert files.read("a", 0, 5) == b"first"
        shutil.copy(tmp_path / "a", tmp_path / "b")
        (tmp_path / "b").replace(tmp_path / "a")
        with pytest.raises(CorruptError, match="was replaced while the tree was being read"):
            files.read("a", 0, 5)


def test_in_a_bucket_one_listing_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory it is as in a bucket: versions are numbers, and no file is asked for alone."""
    from treering._store import open_folder
    from treering._store.resolve import located, open_file, write_file

    paths = [located(f"memory://states/many/{number}") for number in range(20)]
    for path in paths:
        write_file(path, [b"first"], 5)
    opened = open_folder.OpenedFiles(folder=located("memory://states/many"))
    for path in paths:
        with open_file(path) as file:
            opened.add(path, file)
    monkeypatch.setattr(open_folder, "find_at", lambda path: pytest.fail(f"{path} was asked for"))
    assert opened.is_current()
    write_file(paths[7], [b"other"], 5)
    assert not opened.is_current()
