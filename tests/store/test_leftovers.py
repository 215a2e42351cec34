"""What is left at a place: attempts to save, whose files, who removes them; tombstones that were copied to disk."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import treering as tr
from tests.buckets import install
from tests.command import ended
from treering._checkpoint.detect import Form, detect
from treering._codec.key_document import Superseded, encode_tombstone, placeholder
from treering._inspect.inspect import inspect
from treering._store.open_folder import find_index, find_index_at, index_document
from treering._store.orphans import FolderScan, Orphan, find_life, scan_folder
from treering._store.resolve import opened_store
from treering._values.checkpoint_names import journal_of
from treering._values.processes import Life
from treering.errors import NotFoundError

A, B, C = "0123456789abcdef", "fedcba9876543210", "00000000000000aa"
HIDDEN = "on nfs4 locks of other machines are not shown here"


def data_name(attempt: str) -> str:
    return f"data-{attempt}-00000-of-00001.safetensors"


def scan(path: str | os.PathLike[str]) -> FolderScan:
    with opened_store(os.fspath(path)) as store:
        return scan_folder(store)


def of(found: FolderScan) -> dict[str, Orphan]:
    return {orphan.attempt: orphan for orphan in found.orphans}


def test_files_are_those_of_their_attempt(tmp_path: Path) -> None:
    (tmp_path / journal_of(A)).write_bytes(b"12")
    (tmp_path / data_name(A)).write_bytes(b"345")
    (tmp_path / data_name(B)).write_bytes(b"6")
    (tmp_path / "notes.txt").write_bytes(b"a user's")
    staged = tmp_path / ".treering" / C
    (staged / "leaves" / "w").mkdir(parents=True)
    (staged / "leaves" / "w" / "0").write_bytes(bytes(7))
    (staged / "record.json").write_bytes(bytes(9))
    found = scan(tmp_path)
    assert {name: (each.form, len(each.files), each.proved) for name, each in of(found).items()} == {
        A: ("checkpoint", 2, True),
        B: ("checkpoint", 1, False),
        C: ("leaves", 2, True),
    }
    assert of(found)[C].files == {"leaves/w/0": 7, "record.json": 9}
    assert of(found)[C].recorded
    assert found.names == [".treering", journal_of(A), data_name(A), data_name(B), "notes.txt"]
    assert of(found)[A].removal == "the next save removes it"
    assert "remove them yourself" in of(found)[B].removal


def test_an_empty_folder_of_an_attempt_is_seen(tmp_path: Path) -> None:
    (tmp_path / ".treering" / A).mkdir(parents=True)
    (orphan,) = scan(tmp_path).orphans
    assert (orphan.form, orphan.files) == ("leaves", {})


@pytest.mark.skipif(os.name == "nt", reason="Windows has no links for everybody")
def test_a_link_in_the_place_of_the_attempts_is_no_way(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / A).mkdir(parents=True)
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / ".treering").symlink_to(tmp_path / "elsewhere")
    found = scan(tmp_path / "place")
    assert not found.orphans
    assert found.trouble is not None


@pytest.mark.skipif(os.name == "nt", reason="Windows removes no folder that is open")
def test_a_folder_is_opened_once(tmp_path: Path) -> None:
    """One that is removed meanwhile is empty, whatever is at its path by then."""
    place = tmp_path / "place"
    place.mkdir()
    with opened_store(place) as store:
        place.rmdir()
        found = scan_folder(store)
    assert (found.names, found.orphans, found.trouble) == ([], [], None)


def test_a_second_name_of_the_index_is_known(tmp_path: Path) -> None:
    (tmp_path / "treering.json").write_bytes(b"{}")
    os.link(tmp_path / "treering.json", tmp_path / journal_of(A))
    (orphan,) = scan(tmp_path).orphans
    assert orphan.is_index
    assert orphan.files == {journal_of(A): 0}


def test_in_a_bucket_locks_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    found = scan("memory://run/step_00000001")
    assert (found.orphans, found.saver) == ([], None)
    assert found.gap == "a bucket does not tell whether its process runs"


def test_how_a_life_is_known() -> None:
    assert find_life(None, None, None, 0.0) == (Life.DEAD, "no process holds its lock")
    assert find_life(-1, HIDDEN, None, 0.0) == (Life.IN_FLIGHT, "a process of this machine holds its lock")
    life, reason = find_life(None, HIDDEN, None, 0.0)
    assert (life, HIDDEN in reason) == (Life.UNKNOWN, True)


@pytest.mark.skipif(sys.platform != "linux", reason="only there processes can be looked at")
def test_a_process_that_started_later_is_another_one() -> None:
    who = f"{platform.node()}, pid {os.getpid()}"
    assert find_life(None, HIDDEN, who, time.time())[0] is Life.IN_FLIGHT
    life, reason = find_life(None, HIDDEN, who, time.time() - 1e6)
    assert (life, "another process has its number" in reason) == (Life.DEAD, True)


# ------------------------------------------------------------------------------- tombstones that were copied


ATTEMPT = "0123456789abcdef"
DATA = f"data-{ATTEMPT}-00000-of-00001.safetensors"
TOMBSTONES = {
    "small": placeholder(),
    "remembers": encode_tombstone([Superseded(ATTEMPT, None, [])]),
    "lists": encode_tombstone([Superseded(ATTEMPT, None, [DATA])]),
}
TREE = {"w": np.arange(8.0)}


@pytest.fixture(params=sorted(TOMBSTONES))
def removed(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A step of a run that was removed in a bucket, copied here with the data that it lists."""
    step = tmp_path / "run" / "step_00000003"
    step.mkdir(parents=True)
    (step / "treering.json").write_bytes(TOMBSTONES[request.param])
    if request.param == "lists":
        (step / DATA).write_bytes(b"what was removed")
    return step


READING: dict[str, Callable[[Path], object]] = {
    "load": tr.load,
    "open": tr.open,
    "inspect": inspect,
    "verify": tr.verify,
    "diff": lambda path: tr.diff(path, path),
    "index_document": lambda path: index_document(opened_store(path)),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("verb", sorted(READING))
def test_no_verb_reads_it(removed: Path, verb: str) -> None:
    with pytest.raises(NotFoundError):
        READING[verb](removed)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("verb", ["ls", "inspect", "du", "verify", "cat"])
def test_no_command_reads_it(removed: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(verb, removed, *(["w"] if verb == "cat" else []))
    assert "says so" in capsys.readouterr().err


def test_nothing_finds_it(removed: Path) -> None:
    assert find_index_at(removed) is None
    with opened_store(removed.parent) as store:
        assert find_index(store, removed.name) is None
    assert detect(removed) is Form.CHECKPOINT  # opening it says what is there instead


def test_a_run_has_no_such_step(removed: Path) -> None:
    with tr.Run(removed.parent) as run:
        assert run.steps() == []
        assert run.latest() is None
        with pytest.raises(NotFoundError):
            run.load(step=3)
        run.save(2, TREE).result()
        assert run.steps() == [2]
        assert run.latest() == 2
        run.save(3, TREE).result()
        assert run.steps() == [2, 3]
    assert not list(removed.glob(DATA))


def test_gc_removes_what_is_left_of_it(removed: Path) -> None:
    with tr.Run(removed.parent) as run:
        run.save(1, TREE).result()
        run.gc(dry_run=False)
        assert run.steps() == [1]
    assert not removed.exists() or not list(removed.glob(DATA))


def test_a_save_replaces_it_as_if_nothing_were_there(removed: Path) -> None:
    tr.save(removed, TREE)
    np.testing.assert_array_equal(tr.load(removed)["w"], TREE["w"])
    assert len(list(removed.iterdir())) == 2
    with pytest.raises(tr.errors.ExistsError):
        tr.save(removed, TREE)


def test_a_save_beside_what_others_put_there_is_refused(removed: Path) -> None:
    (removed / "notes.txt").write_text("mine")
    with pytest.raises(tr.errors.ExistsError, match="not empty"):
        tr.save(removed, TREE)


def test_a_folder_with_a_tombstone_can_be_a_run(removed: Path) -> None:
    (removed / DATA).unlink(missing_ok=True)
    with tr.Run(removed) as run:
        run.save(1, TREE).result()
        assert run.steps() == [1]
    assert detect(removed) is Form.RUN


def test_the_doctor_says_that_nothing_is_committed(removed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended("doctor", removed)
    said = capsys.readouterr()
    assert "nothing is committed here" in said.out + said.err
