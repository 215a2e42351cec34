"""A tombstone that was copied to disk with the rest of a bucket: for every verb no checkpoint is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import treering as tr
from tests.command import ended
from treering._checkpoint.detect import Form, detect
from treering._codec.key_document import Superseded, encode_tombstone, placeholder
from treering._inspect.inspect import inspect
from treering._store.open_folder import find_index, find_index_at, index_document
from treering._store.resolve import opened_store
from treering.errors import NotFoundError

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


@pytest.mark.parametrize("verb", sorted(READING))
def test_no_verb_reads_it(removed: Path, verb: str) -> None:
    with pytest.raises(NotFoundError):
        READING[verb](removed)


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
