"""A slice of the bit flipper, and proof that it would notice."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests import faults
from tests.crash.attacks import attack
from torture import flip
from torture.flip import Bit, look
from torture.scenes import fingerprint

TREE = {"w": np.arange(9, dtype=np.float32), "n": 3}


@pytest.mark.slow
def test_a_slice_of_all_bits_is_detected_and_named() -> None:
    done = attack("flip", "--stride", "79", "--random", "60", "--processes", "1", "--seed", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  0 violations") == 7
    assert "in the data files: detected" in done.stdout
    assert "in the index: detected" in done.stdout
    assert "silently" not in done.stdout
    # Of an index of leaves the text of its version is the one thing that nobody reads.
    checkpoints, _, _ = done.stdout.partition("leaves directory")
    assert "unharmed" not in checkpoints
    assert not re.search("(data|zarray) files: unharmed", done.stdout)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    treering.save(tmp_path / "a", TREE, metadata=flip._METADATA)
    return tmp_path / "a"


@pytest.mark.parametrize("stride", [101, pytest.param(13, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["small npz", "small deflated npz"])
def test_no_bit_of_an_archive_changes_what_is_loaded(tmp_path: Path, name: str, stride: int) -> None:
    subject = flip.SUBJECTS[name]
    subject.save(tmp_path / "a", subject.state())
    bits = flip.every_bit(tmp_path / "a", stride)
    tally = flip.flipped(name, tmp_path / "a", bits)
    assert tally.violations == []
    assert tally.outcomes["archive: detected"] > len(bits) / 2


def damage(path: Path) -> Bit:
    """Flip a bit of the array."""
    file = next(path.glob("data-*"))
    with file.open("r+b") as opened:
        opened.seek(-1, os.SEEK_END)
        (last,) = opened.read()
        opened.seek(-1, os.SEEK_END)
        opened.write(bytes([last ^ 4]))
    return Bit(file.name, file.stat().st_size - 1, 2)


def test_a_whole_checkpoint_is_unharmed(saved: Path) -> None:
    assert look(saved, fingerprint(TREE), "") == ("unharmed", [])


def test_another_state_is_silently_wrong(saved: Path) -> None:
    outcome, wrong = look(saved, fingerprint(TREE | {"n": 4}), "")
    assert (outcome, wrong) == ("silently wrong", ["SILENTLY WRONG"])


def test_damage_is_detected_and_must_be_named(saved: Path) -> None:
    bit = damage(saved)
    assert flip._places(saved).named(bit) == "w"
    assert look(saved, fingerprint(TREE), "w") == ("detected", [])
    _, wrong = look(saved, fingerprint(TREE), "another leaf")
    assert len(wrong) == 2
    assert all(line.startswith("another leaf is not named: ") for line in wrong)


def test_load_and_verify_must_agree(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage(saved)
    monkeypatch.setattr(treering, "verify", lambda path: True, raising=False)
    _, wrong = look(saved, fingerprint(TREE), "w")
    assert [line[:9] for line in wrong] == ["load says"]


@pytest.mark.parametrize("verb", ["load", "verify"])
def test_foreign_errors_are_noticed(saved: Path, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    faults.fail(monkeypatch, treering, verb, ZeroDivisionError())
    _, wrong = look(saved, fingerprint(TREE), "w")
    assert wrong[0].startswith(f"{verb} raised ZeroDivisionError")


def test_bits_that_are_put_back_wrongly_are_noticed(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flip, "SUBJECTS", {"small": flip._checkpoint(lambda: TREE)})
    bit = damage(saved)
    tally = flip.flipped("small", saved, [bit])
    # The flip mended it, and putting it back damaged it again.
    assert tally.outcomes == {"data files: unharmed": 1}
    assert tally.violations == ["it does not load after its bits were put back"]


def test_fingerprints_see_types_order_and_signs() -> None:
    trees: list[Any] = [
        {"a": 1, "b": 2},
        {"b": 2, "a": 1},
        {"a": 1, "b": 2.0},
        {"a": True, "b": 2},
        [1, 2],
        (1, 2),
        [np.float32(0.0)],
        [np.float32(-0.0)],
        [np.zeros((), np.float32)],
        [np.zeros(1, np.float32)],
        [b""],
        [""],
    ]
    assert len({fingerprint(tree) for tree in trees}) == len(trees)
