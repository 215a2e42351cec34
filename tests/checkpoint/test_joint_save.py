"""Saves by several processes, which are threads here: what they write together, and how each learns what went wrong."""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering
from tests import faults
from tests.checkpoint.together import PATIENT, Together, together, two
from tests.compat import independent_reader
from tests.on_disk import attempt_of_journal, is_data_of, is_message
from tests.system_calls import fail_sync
from tests.trees import assert_unchanged
from treering.errors import (
    BusyError,
    ExistsError,
    FormatError,
    MismatchError,
    ProcessFailedError,
    StoreError,
    TimedOutError,
    UnsupportedError,
)

__all__ = ["together", "two"]

F4 = np.float32


class Pair(NamedTuple):
    """A container with names."""

    x: int
    y: int


def mesh(*shape: int, backwards: bool = False) -> Mesh:
    devices = np.array(jax.devices())
    return Mesh((devices[::-1] if backwards else devices).reshape(shape), tuple("xyz"[: len(shape)]))


def explicit() -> Mesh:
    devices = np.array(jax.devices())
    return Mesh(devices.reshape(2, 4).T, ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))


def put(array: Any, *spec: Any, on: Mesh | None = None) -> jax.Array:
    return jax.device_put(array, NamedSharding(on or mesh(4, 2), P(*spec)))


def numbers(*shape: int) -> np.ndarray[Any, Any]:
    return np.arange(np.prod(shape, dtype=int), dtype=F4).reshape(shape)


def mixed() -> dict[str, Any]:
    """Leaves of every way to lie over the devices of a job."""
    return {
        "rows": put(numbers(64, 32), "x"),
        "columns": put(numbers(16, 24) + 1, None, "y"),
        "both": put(numbers(8, 8) + 2, "y", "x"),
        "backwards": put(numbers(64, 3), "x", on=mesh(8, backwards=True)),
        "explicit": put(numbers(16, 6), "x", on=explicit()),
        "everywhere": put(numbers(1000, 37)),
        "also": put(numbers(1500) + 3),
        "scalar": put(F4(7)),
        "empty": put(numbers(0, 8), None, "x"),
        "bits": put(np.arange(40, dtype=np.int8).astype(jnp.int4), "x"),
        "key": put(jax.random.key(3)),
        "keys": put(jax.random.split(jax.random.key(4), 8), "x"),
        "numpy": numbers(5, 7),
        "strided": numbers(50, 7).T,
        "int": 3,
        "text": "ring" * 2000,
        "none": None,
    }


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir()) if path.exists() else []


def index(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / "treering.json").read_bytes())
    return document


def written_by(path: Path) -> dict[int, int]:
    """Bytes of data by process."""
    found: dict[int, int] = {}
    for file in index(path)["files"]:
        found[file["process"]] = found.get(file["process"], 0) + file["nbytes"] - file["header"]
    return found


def kinds(outcomes: list[Exception | None]) -> list[type]:
    return [type(outcome) for outcome in outcomes]


# -------------------------------------------------------------------------------------------------------- what is saved


def test_every_way_to_lie_over_processes_comes_back(together: Together, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    tree = mixed()
    assert together.save(path, lambda process: tree, metadata={"loss": 0.5}) == [None] * together.count
    assert_unchanged(treering.load(path, like=tree), tree)
    assert treering.verify(path)
    with treering.open(path) as opened:
        assert opened.metadata == {"loss": 0.5}
    assert names(path) == sorted([*(file["name"] for file in index(path)["files"]), "treering.json"])
    assert index(path)["processes"] == together.count
    assert sorted(written_by(path)) == list(range(together.count))
    _, found = independent_reader.read(path)
    assert np.array_equal(found["everywhere"], numbers(1000, 37))
    assert np.array_equal(found["backwards"], numbers(64, 3))


def test_the_busiest_writes_its_share_and_everything_once(together: Together, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    tree = {f"layer{n}": {"w": put(numbers(256, 256), "x"), "norm": put(numbers(3000 + n))} for n in range(6)}
    tree["table"] = {"w": put(numbers(1000, 257))}
    together.save(path, lambda process: tree)
    written = written_by(path)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert sum(written.values()) == total
    assert max(written.values()) <= 1.10 * total / together.count


def test_an_array_on_some_processes_only(together: Together, tmp_path: Path) -> None:
    last = together.count - 1
    few = Mesh(np.array(together.devices_of(last)), ("q",))
    first = Mesh(np.array(together.devices_of(0)), ("q",))
    tree = {
        "last": jax.device_put(numbers(16), NamedSharding(few, P("q"))),
        "last, replicated": jax.device_put(numbers(10), NamedSharding(few, P())),
        "first": jax.device_put(numbers(16) + 1, NamedSharding(first, P("q"))),
    }
    assert together.save(tmp_path / "ckpt", lambda process: tree) == [None] * together.count
    assert_unchanged(treering.load(tmp_path / "ckpt"), tree)
    assert written_by(tmp_path / "ckpt") == {0: 64, last: 104}


def test_what_each_process_holds_alone_is_that_of_process_0(together: Together, tmp_path: Path) -> None:
    def tree_of(process: int) -> dict[str, Any]:
        local = jax.device_put(numbers(6) + process, together.devices_of(process)[0])
        return {"jax": local, "numpy": numbers(3) * process, "int": process, "text": f"{process}" * 5000}

    assert together.save(tmp_path / "ckpt", tree_of) == [None] * together.count
    assert_unchanged(treering.load(tmp_path / "ckpt"), tree_of(0))
    assert list(written_by(tmp_path / "ckpt")) == [0]


def test_a_tree_without_arrays(together: Together, tmp_path: Path) -> None:
    assert together.save(tmp_path / "ckpt", lambda process: {"step": 7}) == [None] * together.count
    assert names(tmp_path / "ckpt") == ["treering.json"]
    assert treering.load(tmp_path / "ckpt") == {"step": 7}


def test_metadata_is_that_of_process_0(together: Together, tmp_path: Path) -> None:
    together.save(tmp_path / "ckpt", lambda process: {"a": 1}, wishes_of=lambda process: {"metadata": {"who": process}})
    assert index(tmp_path / "ckpt")["metadata"] == {"who": 0}


def test_progress_counts_the_own_bytes(together: Together, tmp_path: Path) -> None:
    told: dict[int, list[tuple[int, int]]] = {process: [] for process in range(together.count)}
    tree = mixed()
    together.save(
        tmp_path / "ckpt",
        lambda process: tree,
        wishes_of=lambda process: {"progress": lambda done, total: told[process].append((done, total))},
    )
    assert {process: calls[-1][0] for process, calls in told.items()} == written_by(tmp_path / "ckpt")
    assert all(calls[-1][0] == calls[-1][1] for calls in told.values())


def test_no_other_process_says_that_it_has_written_before_its_names_are_durable(
    together: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, str]] = []
    calls = {name: getattr(os, name) for name in ("open", "fsync", "replace")}

    def note(what: str) -> None:
        told.append((threading.get_ident(), what))

    def opens(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_CREAT and Path(path).name.startswith("data-"):
            note("create")
        return int(calls["open"](path, flags, *more, **named))

    def syncs(descriptor: int) -> None:
        calls["fsync"](descriptor)
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            note("sync")

    def replaces(name: Any, new: Any, *, src_dir_fd: int, **options: Any) -> None:
        if "-part-" in os.fspath(new):
            with os.fdopen(calls["open"](name, os.O_RDONLY, dir_fd=src_dir_fd)) as message:
                note(json.load(message)["stage"])
        calls["replace"](name, new, src_dir_fd=src_dir_fd, **options)

    for name, seen in (("open", opens), ("fsync", syncs), ("replace", replaces)):
        monkeypatch.setattr(os, name, seen)
    tree = mixed()
    threads: dict[int, int] = {}

    def tree_of(process: int) -> Any:
        threads[process] = threading.get_ident()
        return tree

    together.save(tmp_path / "ckpt", tree_of)
    for process in range(1, together.count):  # the commit of process 0 makes its own names durable
        mine = [what for found, what in told if found == threads[process]]
        assert "sync" in mine[mine.index("create") : mine.index("written")]
        assert "create" not in mine[mine.index("written") :]


# ------------------------------------------------------------------------------------------------ what was there before


def test_an_overwrite_replaces_all_files(together: Together, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    tree = mixed()
    together.save(path, lambda process: tree)
    old = names(path)
    (path / "config.json").write_text("{}")
    (path / "treering.json").chmod(0o640)
    assert together.save(path, lambda process: tree | {"int": 4}, overwrite=True) == [None] * together.count
    assert treering.load(path, only="int") == {"int": 4}
    assert set(names(path)) & set(old) == {"treering.json"}
    assert sorted([*index(path)["replaces"], "treering.json"]) == old
    assert (path / "config.json").exists()
    assert {entry.stat().st_mode & 0o777 for entry in path.iterdir() if entry.name != "config.json"} == {0o640}


def test_what_exists_is_refused_on_all(together: Together, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    treering.save(path, {"a": 1})
    before = names(path)
    outcomes = together.save(path, lambda process: {"a": 2})
    assert kinds(outcomes) == [ExistsError] * together.count
    assert "process 0" in str(outcomes[1])
    assert names(path) == before
    assert treering.load(path) == {"a": 1}


# ------------------------------------------------------------------------------------------------------ what goes wrong


@pytest.mark.sampled(5)
@pytest.mark.parametrize("leads_to", ["another step", "an empty folder", "nothing"])
def test_a_link_in_the_place_of_a_step_is_refused_on_all(together: Together, leads_to: str, tmp_path: Path) -> None:
    target = tmp_path / leads_to
    if leads_to == "another step":
        treering.save(target, {"w": 1})
    elif leads_to == "an empty folder":
        target.mkdir()
    before = sorted(tmp_path.rglob("*"))
    place = tmp_path / "step_00000009"
    place.symlink_to(target)
    modified = target.stat().st_mtime_ns if target.exists() else None
    errors = together.save(place, lambda _: mixed(), overwrite=True)
    assert all(isinstance(error, FormatError) for error in errors), errors
    assert all("is a link in the place of a step, and is not followed" in str(error) for error in errors)
    place.unlink()
    assert sorted(tmp_path.rglob("*")) == before
    assert modified is None or target.stat().st_mtime_ns == modified  # no message went through it


def test_another_tree_is_refused_by_name(together: Together, tmp_path: Path) -> None:
    last = together.count - 1
    outcomes = together.save(
        tmp_path / "ckpt", lambda process: {"a": 1, "b": {"w": numbers(2, 3 if process == last else 2)}}
    )
    assert kinds(outcomes) == [MismatchError] * together.count
    assert "leaf 'b/w'" in str(outcomes[last])
    assert "numpy float32 [2, 3]" in str(outcomes[last])
    assert f"process {last}" in str(outcomes[0])
    assert "'b/w'" in str(outcomes[0])
    assert names(tmp_path / "ckpt") == []


def test_more_leaves_are_refused_by_number(together: Together, tmp_path: Path) -> None:
    outcomes = together.save(tmp_path / "ckpt", lambda process: {"a": 1} if process == 1 else {"a": 1, "b": 2})
    assert kinds(outcomes) == [MismatchError] * together.count
    assert "process 0 has 2 leaves, this process 1" in str(outcomes[1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("first", "last"), [([1, 2], (1, 2)), ([], ()), ({}, []), (Pair(1, 2), {"x": 1, "y": 2})])
def test_other_containers_are_refused(together: Together, tmp_path: Path, first: Any, last: Any) -> None:
    odd = together.count - 1
    outcomes = together.save(tmp_path / "ckpt", lambda process: {"a": last if process == odd else first, "b": 3})
    assert kinds(outcomes) == [MismatchError] * together.count
    assert "the containers of the tree are not those of process 0" in str(outcomes[odd])
    assert f"process {odd}" in str(outcomes[0])
    assert names(tmp_path / "ckpt") == []


def test_equal_finds_the_leaf_and_the_process(together: Together, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    last = together.count - 1

    def tree_of(process: int) -> dict[str, Any]:
        local = jax.device_put(numbers(6), together.devices_of(process)[0])
        return {"same": local, "step": 5 + (process == last), "w": numbers(8) + (process == 1), "f": jax.nn.relu}

    outcomes = together.save(path, tree_of, host_local="equal")
    assert kinds(outcomes) == [MismatchError] * together.count
    for outcome in outcomes:
        assert f"leaf 'step' differs on process {last}" in str(outcome)
        assert "leaf 'w' differs on process 1" in str(outcome)
        assert "same" not in str(outcome)
    assert names(path) == []
    assert together.save(path, lambda process: tree_of(0), host_local="equal") == [None] * together.count


def test_equal_has_to_be_said_by_all(together: Together, tmp_path: Path) -> None:
    outcomes = together.save(
        tmp_path / "ckpt",
        lambda process: {"a": 1},
        wishes_of=lambda process: {"host_local": "first" if process == 1 else "equal"},
    )
    assert kinds(outcomes) == [MismatchError] * together.count
    assert "process 1 did not pass" in str(outcomes[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("error", "expected"),
    [(OSError(errno.ENOSPC, "No space left on device"), StoreError), (ValueError("a bug"), ProcessFailedError)],
    ids=["the disk", "a bug"],
)
def test_an_error_in_the_work_of_one_reaches_all(
    together: Together, failing: int, error: Exception, expected: type, tmp_path: Path
) -> None:
    together.timing = PATIENT  # all of them come: process 0 removes the notes when the last one has heard of the error
    path = tmp_path / "ckpt"
    treering.save(path, {"old": 1})
    before = names(path)

    def fail(done: int, total: int) -> None:
        raise error

    tree = mixed()
    outcomes = together.save(
        path,
        lambda process: tree,
        overwrite=True,
        wishes_of=lambda process: {"progress": fail} if process == failing else {},
    )
    own = outcomes.pop(failing)
    assert isinstance(own, StoreError if expected is StoreError else ValueError)
    for outcome in outcomes:
        assert isinstance(outcome, expected)
        assert f"process {failing}" in str(outcome)
        assert ("No space left" if expected is StoreError else "a bug") in str(outcome)
    assert names(path) == before
    assert treering.load(path) == {"old": 1}


@pytest.mark.parametrize("failing", [0, 1])
def test_an_array_that_is_gone_on_one_process_is_told_to_all(together: Together, failing: int, tmp_path: Path) -> None:
    def tree_of(process: int) -> dict[str, Any]:
        array = jax.device_put(numbers(6), together.devices_of(process)[0])
        if process == failing:
            array.delete()
        return {"w": array}

    outcomes = together.save(tmp_path / "ckpt", tree_of)
    assert kinds(outcomes) == [UnsupportedError] * together.count
    assert all("deleted" in str(outcome) and "'w'" in str(outcome) for outcome in outcomes)
    assert names(tmp_path / "ckpt") == []


@pytest.mark.parametrize("failing", [0, 1])
def test_a_leaf_that_no_file_holds_is_told_to_all(together: Together, failing: int, tmp_path: Path) -> None:
    outcomes = together.save(tmp_path / "ckpt", lambda process: {"bad": {1, 2} if process == failing else 1})
    assert kinds(outcomes) == [UnsupportedError] * together.count
    assert all("a set cannot be saved" in str(outcome) and "'bad'" in str(outcome) for outcome in outcomes)
    assert not (tmp_path / "ckpt").exists()


def test_a_comparison_that_one_process_asked_for_is_not_left_out(together: Together, tmp_path: Path) -> None:
    outcomes = together.save(
        tmp_path / "ckpt",
        lambda process: {"rng": numbers(3) + process},
        wishes_of=lambda process: {"host_local": "equal" if process == 1 else "first"},
    )
    assert kinds(outcomes) == [MismatchError] * together.count
    assert all('process 1 passed host_local="equal"' in str(outcome) for outcome in outcomes)
    assert names(tmp_path / "ckpt") == []


def test_metadata_that_is_no_dict_is_told_to_all(together: Together, tmp_path: Path) -> None:
    """Else the next save of process 0 would go with this one of the others."""
    together.timeout = 5
    outcomes = together.save(
        tmp_path / "ckpt", lambda process: {"a": 1}, wishes_of=lambda process: {} if process else {"metadata": ["x"]}
    )
    assert kinds(outcomes) == [UnsupportedError] * together.count
    assert all("metadata is a list" in str(outcome) for outcome in outcomes)


def test_metadata_that_is_no_json_is_told_to_all(together: Together, tmp_path: Path) -> None:
    outcomes = together.save(tmp_path / "ckpt", lambda process: {"a": 1}, metadata={"a": {1}})
    assert kinds(outcomes) == [UnsupportedError] * together.count
    assert not (tmp_path / "ckpt").exists()


def test_a_commit_that_fails_is_told_to_all(
    together: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_sync(patch, ".treering.json.")
        outcomes = together.save(tmp_path / "ckpt", lambda process: mixed())
    assert kinds(outcomes) == [StoreError] * together.count
    assert names(tmp_path / "ckpt") == []


# ---------------------------------------------------------------------------------------------------- who does not come


def check_left_and_swept(together: Together, path: Path, before: list[str], *, overwrite: bool) -> None:
    """After a save that the last process missed: its files are proved to be leftovers, the next save sweeps them."""
    left = set(names(path)) - set(before)
    (attempt,) = filter(None, map(attempt_of_journal, left))
    assert all(is_message(name) or attempt_of_journal(name) for name in left)
    # What the last process wrote before it died.
    (path / f"data-{attempt}-00001-of-00002.safetensors").write_bytes(b"half")
    tree = mixed()
    together.timeout = 60.0
    assert together.save(path, lambda process: tree, overwrite=overwrite) == [None] * together.count
    assert names(path) == sorted([*(file["name"] for file in index(path)["files"]), "treering.json"])
    assert_unchanged(treering.load(path, like=tree), tree)


@pytest.mark.parametrize("overwrite", [False, True])
def test_who_does_not_come_is_named_and_swept_by_the_next_save(
    together: Together, overwrite: bool, tmp_path: Path
) -> None:
    path = tmp_path / "ckpt"
    if overwrite:
        treering.save(path, {"old": 1})
    before = names(path)
    last = together.count - 1
    tree = mixed()
    together.timeout = 1.0
    outcomes = together.save(path, lambda process: tree, who=range(last), overwrite=overwrite)
    assert kinds(outcomes[:last]) == [TimedOutError] * last
    for outcome in outcomes[:last]:
        assert isinstance(outcome, TimedOutError)
        assert outcome.missing == (last,)
        assert f"process {last}" in str(outcome)
    if overwrite:
        assert treering.load(path) == {"old": 1}
    else:
        assert not (path / "treering.json").exists()
    check_left_and_swept(together, path, before, overwrite=overwrite)


def test_one_process_alone_sweeps_as_well(two: Together, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    two.timeout = 1.0
    two.save(path, lambda process: {"w": numbers(4)}, who=range(two.count - 1))
    assert names(path)
    treering.save(path, {"a": 1})
    assert treering.load(path) == {"a": 1}
    assert names(path) == ["treering.json"]


def test_process_0_missing_is_named(two: Together, tmp_path: Path) -> None:
    two.timeout = 1.0
    outcomes = two.save(tmp_path / "ckpt", lambda process: {"w": 1}, who=range(1, two.count))
    for outcome in outcomes[1:]:
        assert isinstance(outcome, TimedOutError)
        assert outcome.missing == (0,)
    # What stays is the word for process 0, and stands in the way of no first save.
    assert all(is_message(entry.name) for entry in (tmp_path / "ckpt").iterdir())
    treering.save(tmp_path / "ckpt", {"w": 2})
    assert not any(is_message(entry.name) for entry in (tmp_path / "ckpt").iterdir())


def test_process_0_hears_of_its_later_calls_that_they_are_given_up(two: Together, tmp_path: Path) -> None:
    path, tree = tmp_path / "ckpt", {"x": put(numbers(8), "x")}
    assert two.save(path, lambda process: tree) == [None, None]
    two.timeout = 0.2
    for _ in range(3):
        _, gave_up = two.save(path, lambda process: tree, who=range(1, 2), overwrite=True)
        assert isinstance(gave_up, TimedOutError)
    two.numbers = itertools.count(2)
    for _ in range(3):
        heard, _ = two.save(path, lambda process: tree, who=range(1), overwrite=True)
        assert isinstance(heard, TimedOutError)
        assert "process 0 did not arrive" in str(heard)  # as process 1 said, not that process 1 did not come
        assert heard.missing == (1,)
    two.timeout = 60.0
    assert two.save(path, lambda process: tree, overwrite=True) == [None, None]
    assert not any(is_message(entry.name) for entry in path.iterdir())


def test_of_two_jobs_one_wins(together: Together, tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    # The winner may sweep what the loser says to its own; it says it again after a second.
    jobs = [Together(together.count, job=16 * name, timing=PATIENT) for name in "ab"]
    found: list[list[Exception | None]] = [[], []]

    def run(number: int) -> None:
        found[number] = jobs[number].save(path, lambda process: {"who": number, "w": numbers(1000)})

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = [number for number in range(2) if found[number] == [None] * together.count]
    for outcome in found[1 - winner]:
        assert isinstance(outcome, BusyError | ExistsError)
    assert treering.load(path, only="who") == {"who": winner}

    def leftovers() -> list[str]:
        return [
            name for name in names(path) if name != "treering.json" and not is_data_of(index(path)["attempt"], name)
        ]

    # Where the winner swept what the loser's processes said, they have left unseen: then the next save sweeps the rest.
    assert all(is_message(name) and index(path)["attempt"] not in name for name in leftovers())
    jobs[winner].save(path, lambda process: {"who": winner, "w": numbers(1000)}, overwrite=True)
    assert leftovers() == []


def test_saved_alone_where_other_processes_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults.answer(monkeypatch, jax, "process_count", 2)
    treering.save(tmp_path / "ckpt", {"w": put(numbers(8), "x")}, processes="this")
    assert "process" not in index(tmp_path / "ckpt")["files"][0]


@pytest.mark.parametrize(
    "wrong", [{"processes": "some"}, {"host_local": "last"}, {"timeout": 0}, {"timeout": "soon"}], ids=str
)
def test_arguments_are_looked_at(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(wrong))):
        treering.save(tmp_path / "ckpt", {"a": 1}, **wrong)
    assert not (tmp_path / "ckpt").exists()
