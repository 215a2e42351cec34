"""Bit rot in a leaves directory: nothing wrong is ever loaded, what is damaged is named, load and verify agree.

`python -m torture flip` does it with every bit; here is a sample. The slow tests have all bits of the data files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import treering as tr
from torture.flip import SUBJECTS, Bit, _files, _kind, _places, every_bit, look
from torture.scenes import fingerprint
from treering.leaves import tree_serialize_leaves

GOLDEN: Final = Path(__file__).parents[1] / "compat" / "golden" / "eformer"
SUBJECT: Final = SUBJECTS["small leaves directory"]
INDEX: Final = "tensorstore_index.json"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rot") / "leaves"
    SUBJECT.save(folder, SUBJECT.state())
    return folder


def flips(path: Path, bits: list[Bit]) -> Iterator[Bit]:
    """Flip each bit in turn for as long as it is looked at."""
    for bit in bits:
        with (path / bit.file).open("r+b", buffering=0) as file:
            before = os.pread(file.fileno(), 1, bit.byte)
            os.pwrite(file.fileno(), bytes([before[0] ^ 1 << bit.bit]), bit.byte)
            yield bit
            os.pwrite(file.fileno(), before, bit.byte)


def test_the_directory_has_what_can_rot(path: Path) -> None:
    names = set(_files(path))
    assert {INDEX, "model/kernel/.zarray", "model/kernel/0.0", "ema/kernel/0", "bias/0", "model/a%2Eb/0"} <= names
    assert "model/empty/.zarray" in names
    leaves = tr.inspect(path).leaves
    assert leaves["ema/kernel"].compressor
    assert {"step", "model/a.b", "ema/lr"} <= leaves.keys()


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        ("data files", 31),
        (".zarray files", 307),
        ("index", 467),
        # The strides have no factor in common with a byte, so each number of a bit has its turn.
        pytest.param("data files", 1, marks=pytest.mark.slow),
        pytest.param(".zarray files", 17, marks=pytest.mark.slow),
        pytest.param("index", 41, marks=pytest.mark.slow),
    ],
)
def test_every_flip_is_detected_and_named(path: Path, kind: str, stride: int) -> None:
    truth = fingerprint(SUBJECT.state())
    places = _places(path)
    of_kind = [bit for bit in every_bit(path, 1) if _kind(bit.file) == kind]
    version = next(line for line in (path / INDEX).read_bytes().splitlines() if b'"version"' in line)
    unread = (path / INDEX).read_bytes().index(version)
    for bit in flips(path, of_kind[::stride]):
        outcome, wrong = look(path, truth, places.named(bit), SUBJECT.metadata)
        assert wrong == []
        # The version is the one member that no reader goes by.
        assert outcome == "detected" or (bit.file == INDEX and unread <= bit.byte < unread + len(version)), bit
    assert look(path, truth, "", SUBJECT.metadata) == ("unharmed", [])


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_where_there_are_no_arrays_the_index_is_all(tmp_path: Path, stride: int) -> None:
    """No .zarray is there whose marker could tell that a record was lost."""
    tree_serialize_leaves(tmp_path, {"lr": 0.5}, prefix="cfg")
    tree_serialize_leaves(tmp_path, {"step": 7})
    truth = fingerprint({"cfg": {"lr": 0.5}, "step": 7})
    # Up to the first record: that has a digest of its own.
    record = (tmp_path / INDEX).read_bytes().index(b'"record": "') + len(b'"record": "')
    bits = [bit for bit in every_bit(tmp_path, 1) if bit.byte < record]
    for bit in flips(tmp_path, bits[::stride]):
        outcome, wrong = look(tmp_path, truth, INDEX, {})
        assert wrong == [], bit
        assert outcome in ("detected", "unharmed")
    assert look(tmp_path, truth, "", {}) == ("unharmed", [])


@pytest.mark.parametrize("stride", [101, pytest.param(29, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["prefixed", "mixed_index"])
def test_of_another_program_no_flip_does_more_than_change_values(name: str, stride: int, tmp_path: Path) -> None:
    path = Path(shutil.copytree(GOLDEN / name, tmp_path / name))
    truth = fingerprint(tr.load(path))
    for bit in flips(path, every_bit(path, stride)):
        _, wrong = look(path, truth, "", {})
        # Nothing tells what the values were; but whatever is refused is refused by both, with an error of ours.
        assert [line for line in wrong if line != "SILENTLY WRONG"] == [], bit
    assert look(path, truth, "", {}) == ("unharmed", [])
