"""verify finds what load refuses, names leaf, file and bytes, and says plainly what it could not check."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import treering
from tests import faults
from tests.checkpoint.documents import document_of, rewrite, sample
from treering import serialization, verify
from treering.errors import CorruptError, FormatError, NotFoundError, TreeringError
from treering.leaves import tree_serialize_leaves

BLOCK = 65536
TREE = {
    "large": np.arange(100_000, dtype=np.float64),
    "small": np.arange(7, dtype=np.int16),
    "step": 7,
    "tiny": np.int8(1),
}


@pytest.fixture
def ckpt(tmp_path: Path) -> Path:
    treering.save(tmp_path / "ckpt", TREE)
    return tmp_path / "ckpt"


def data_file(folder: Path) -> Path:
    (found,) = folder.glob("data-*")
    return found


def flip(path: Path, *places: int) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 1
    path.write_bytes(content)


def offset_of(folder: Path, key: str) -> tuple[int, int]:
    """Where a leaf's only chunk lies: its first byte and its size."""
    index = document_of(folder)
    chunk = index["chunks"]["leaf"].index(index["leaves"]["key"].index(key))
    return index["chunks"]["offset"][chunk], index["chunks"]["nbytes"][chunk]


def refuses(path: Path) -> bool:
    try:
        treering.load(path)
    except TreeringError:
        return True
    return False


def test_a_good_checkpoint(ckpt: Path) -> None:
    found = verify(ckpt)
    assert found
    assert found.ok
    assert found.checked
    assert found.findings == ()
    assert found.note is None
    assert found.leaves == 4
    assert found.nbytes == 800_000 + 14 + 1
    assert str(found) == f"'{ckpt}' is whole: 4 leaves, 781 KiB, every byte checked"


def test_a_checkpoint_without_arrays(tmp_path: Path) -> None:
    trees: list[Any] = [{}, [], None, {"a": "text"}]
    for number, tree in enumerate(trees):
        treering.save(tmp_path / str(number), tree)
        assert verify(tmp_path / str(number)).ok


def test_a_damaged_block(ckpt: Path) -> None:
    start, _ = offset_of(ckpt, "large")
    flip(data_file(ckpt), start + 3 * BLOCK + 5)
    found = verify(ckpt)
    assert not found
    (finding,) = found.findings
    assert (finding.key, finding.file) == ("large", data_file(ckpt).name)
    assert (finding.start, finding.stop) == (start + 3 * BLOCK, start + 4 * BLOCK)
    assert str(finding) == f"leaf 'large' is damaged: bytes {finding.start} to {finding.stop} of {finding.file}"
    with pytest.raises(CorruptError) as error:
        treering.load(ckpt)
    for part in ("'large'", str(finding.start), str(finding.stop), finding.file, "checksum", "treering verify"):
        assert part in str(error.value)


def test_adjacent_blocks_are_one_finding_and_others_are_not(ckpt: Path) -> None:
    start, nbytes = offset_of(ckpt, "large")
    small, size = offset_of(ckpt, "small")
    flip(data_file(ckpt), start + 1, start + BLOCK, start + 2 * BLOCK, start + 5 * BLOCK, start + nbytes - 1, small)
    ranges = [(finding.key, finding.start, finding.stop) for finding in verify(ckpt).findings]
    last = start + nbytes // BLOCK * BLOCK
    assert sorted(ranges, key=repr) == sorted(
        [
            ("large", start, start + 3 * BLOCK),
            ("large", start + 5 * BLOCK, start + 6 * BLOCK),
            ("large", last, start + nbytes),
            ("small", small, small + size),
        ],
        key=repr,
    )


def test_a_damaged_part_of_a_divided_leaf(tmp_path: Path) -> None:
    ckpt = sample(tmp_path / "ckpt")
    index = document_of(ckpt)
    leaf = index["leaves"]["key"].index("divided")
    chunk = index["chunks"]["leaf"].index(leaf) + 3
    offset, nbytes = index["chunks"]["offset"][chunk], index["chunks"]["nbytes"][chunk]
    flip(data_file(ckpt), offset)
    (finding,) = verify(ckpt).findings
    assert (finding.key, finding.start) == ("divided", offset)
    assert finding.stop == offset + nbytes
    with pytest.raises(CorruptError, match="'divided'"):
        treering.load(ckpt)


@pytest.mark.parametrize("place", [0, 9, 200, 4095])
def test_a_damaged_header(ckpt: Path, place: int) -> None:
    flip(data_file(ckpt), place)
    (finding,) = verify(ckpt).findings
    assert (finding.key, finding.start, finding.stop) == (None, place, place + 1)
    assert "header" in finding.problem
    assert refuses(ckpt)


@pytest.mark.parametrize("left", [0, 1, 4096, 4097, 500_000, -1])
def test_a_file_that_is_cut_short(ckpt: Path, left: int) -> None:
    data = data_file(ckpt)
    size = data.stat().st_size
    os.truncate(data, left % size)
    found = verify(ckpt)
    assert not found
    first = found.findings[0]
    assert "cut short" in first.problem
    assert (first.start, first.stop) == (left % size, size)
    lost = {finding.key for finding in found.findings[1:]} - {None}
    ends = {key: sum(offset_of(ckpt, key)) for key in ("large", "small", "tiny")}
    assert lost == {key for key, end in ends.items() if end > left % size}
    assert refuses(ckpt)


def test_a_file_that_is_too_long(ckpt: Path) -> None:
    with data_file(ckpt).open("ab") as file:
        file.write(b"more")
    (finding,) = verify(ckpt).findings
    assert "too long" in finding.problem
    assert refuses(ckpt)


def test_a_file_that_is_missing(ckpt: Path) -> None:
    name = data_file(ckpt).name
    data_file(ckpt).unlink()
    (finding,) = verify(ckpt).findings
    assert (finding.key, finding.file) == (None, name)
    assert "is missing, and with it 'large' and 2 more leaves" in str(finding)
    assert refuses(ckpt)


def test_every_bit_of_an_index_counts(ckpt: Path) -> None:
    path = ckpt / "treering.json"
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        found = verify(ckpt)
        assert [finding.file for finding in found.findings] == ["treering.json"]
        assert refuses(ckpt)


def test_a_digest_that_is_not_that_of_the_file(ckpt: Path) -> None:
    rewrite(ckpt, lambda document: document["files"][0].update(digest="xxh3-128:" + "0" * 32))
    (finding,) = verify(ckpt).findings
    assert (finding.start, finding.stop) == (0, 4096)
    assert refuses(ckpt)


def test_files_of_two_checkpoints_exchanged(tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2)):
        treering.save(tmp_path / name, {"w": np.full(1000, number)})
    shutil.copy(data_file(tmp_path / "a"), data_file(tmp_path / "b"))
    assert not verify(tmp_path / "b")
    assert refuses(tmp_path / "b")


def test_files_beside_it_do_not_matter(ckpt: Path) -> None:
    (ckpt / "config.json").write_text("{}")
    (ckpt / "data-0000000000000000-00000-of-00001.safetensors").write_bytes(b"of another attempt")
    assert verify(ckpt).ok


def test_progress_is_told_in_bytes(ckpt: Path) -> None:
    told: list[tuple[int, int]] = []
    assert verify(ckpt, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (800_015, 800_015)
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_an_error_of_the_callers_progress_is_the_callers(ckpt: Path) -> None:
    class Stop(Exception):
        pass

    def stop(done: int, total: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        verify(ckpt, progress=stop)


def test_a_file_that_cannot_be_read_in_places(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, _ = offset_of(ckpt, "large")
    bad = start + 2 * BLOCK

    faults.fail(
        monkeypatch,
        os,
        "pread",
        errno.EIO,
        when=lambda descriptor, count, offset: offset < bad + 10 and offset + count > bad,
    )
    (finding,) = verify(ckpt).findings
    assert (finding.key, finding.start, finding.stop) == ("large", bad, bad + BLOCK)
    assert "Input/output error" in finding.problem


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("ckpt", "data-"), ("ckpt", "treering.json"), ("leaves", ".zarray"), ("leaves", "0.0"),
        ("a.msgpack", "a.msgpack"), ("a.safetensors", "a.safetensors"), ("hf", "model.safetensors"),
    ],
)  # fmt: skip
def test_a_file_that_may_not_be_read_is_no_damage(
    form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tree = tmp_path / form, {"w": np.ones((3, 4))}
    if form == "leaves":
        tree_serialize_leaves(path, tree)
    else:
        treering.export(path, tree, to="hf" if form == "hf" else None)
    faults.fail(
        monkeypatch, os, "open", errno.EACCES, when=lambda path, *arguments, **options: Path(path).name.startswith(name)
    )
    with pytest.raises(PermissionError, match="Permission denied"):
        verify(path)


def test_an_overwrite_meanwhile_is_no_damage(ckpt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = 0

    def late(path: Any, flags: int, *arguments: Any, **options: Any) -> None:
        nonlocal saves
        if saves < 3 and Path(path).name.startswith("data-") and not flags & os.O_CREAT:
            saves += 1  # behind the index, in front of its files
            treering.save(ckpt, {"w": np.full(1000, saves)}, overwrite=True)

    faults.before(monkeypatch, os, "open", late)
    assert verify(ckpt).ok
    assert saves == 3


def test_many_small_leaves(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", [np.full(100, number, np.int32) for number in range(2000)])
    assert verify(tmp_path / "ckpt").nbytes == 2000 * 400
    starts = [offset_of(tmp_path / "ckpt", key)[0] for key in ("3", "4", "1999")]
    flip(data_file(tmp_path / "ckpt"), *starts)
    assert {finding.key for finding in verify(tmp_path / "ckpt").findings} == {"3", "4", "1999"}


def test_files_of_more_than_one_piece_are_read_in_two_threads(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"w": np.arange(3_000_000, dtype=np.float32), "v": np.arange(10)})
    assert verify(tmp_path / "ckpt").nbytes == 12_000_080
    start, _ = offset_of(tmp_path / "ckpt", "w")
    flip(data_file(tmp_path / "ckpt"), *range(start, start + 12_000_000, 1_000_000))
    found = verify(tmp_path / "ckpt").findings
    assert {finding.key for finding in found} == {"w"}
    assert sum((finding.stop or 0) - (finding.start or 0) for finding in found) == 12 * BLOCK


def test_a_long_list_of_findings_is_shortened_for_people(tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", [np.full(100, number, np.int32) for number in range(100)])
    data = data_file(tmp_path / "ckpt")
    data.write_bytes(data.read_bytes()[:-40_000] + bytes(40_000))
    found = verify(tmp_path / "ckpt")
    assert len(found.findings) == 99  # the first array is of zeros
    assert str(found).endswith("\n  and 49 more")


# --------------------------------------------------------------------------------------------------------- single files


def test_a_safetensors_file_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    treering.save(path, {"large": TREE["large"], "small": TREE["small"]})
    found = verify(path)
    assert found
    assert found.checked
    assert found.nbytes == 800_014
    content = path.read_bytes()
    for place in [*range(0, len(content) - 1, 20_011), len(content) - 1]:
        flip(path, place)
        assert not verify(path)
        assert refuses(path)
        path.write_bytes(content)
    flip(path, len(content) - 20)
    (finding,) = verify(path).findings
    assert (finding.key, finding.file) == ("large", str(path))
    for size in (0, 5, 100, 5000, len(content) - 1):
        path.write_bytes(content[:size])
        assert not verify(path)
        assert refuses(path)
    path.write_bytes(content + b"\0")
    assert not verify(path)
    assert refuses(path)


@pytest.mark.parametrize("stride", [11, pytest.param(3, marks=pytest.mark.slow)])
def test_every_bit_of_the_header_of_a_small_file(tmp_path: Path, stride: int) -> None:
    path = tmp_path / "a.safetensors"
    treering.save(path, {"w": np.arange(3, dtype=np.float32), "none": None}, metadata={"note": "x"})
    good = path.read_bytes()
    size = struct.unpack("<Q", good[:8])[0] + 8
    for place in range(0, size, stride):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        assert refuses(path), place
        assert not verify(path)


def test_a_safetensors_file_of_another_writer(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"w": np.arange(3, dtype=np.float32)}, path)
    found = verify(path)
    assert found.ok
    assert not found.checked
    assert "so its arrays were not checked" in str(found)
    os.truncate(path, path.stat().st_size - 1)
    assert not verify(path)
    assert refuses(path)


def test_a_data_file_alone_is_no_checkpoint(ckpt: Path) -> None:
    with pytest.raises(FormatError, match="part of a checkpoint"):
        verify(data_file(ckpt))


def test_msgpack(tmp_path: Path) -> None:
    path = tmp_path / "a.msgpack"
    serialization.save_to_file({"w": np.arange(3), "n": None, "l": [1, (2, "x")]}, path)
    found = verify(path)
    assert found.ok
    assert not found.checked
    assert found.leaves == 5
    assert "so its arrays were not checked" in str(found)
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    found = verify(path)
    assert not found
    assert found.findings[0].file == str(path)


def test_gzip_has_a_checksum_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.msgpack.gz"
    path.write_bytes(serialization.compress_bytes(serialization.to_bytes({"w": np.arange(300)})))
    found = verify(path)
    assert found.ok
    assert found.checked
    content = path.read_bytes()
    for place in (len(content) // 2, len(content) - 6, len(content) - 2):
        path.write_bytes(content[:place] + bytes([content[place] ^ 16]) + content[place + 1 :])
        assert not verify(path)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir()], ids=["nothing", "an empty folder"])
def test_nothing_to_verify(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a")
    with pytest.raises(NotFoundError):
        verify(tmp_path / "a")


def test_jax_is_not_needed(ckpt: Path) -> None:
    code = f"import sys, treering; print(bool(treering.verify({str(ckpt)!r})), 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False"]


def test_the_outcome_is_json_for_who_wants_it(ckpt: Path) -> None:
    flip(data_file(ckpt), 4096)
    (finding,) = verify(ckpt).findings
    parts = {name: getattr(finding, name) for name in ("key", "file", "start", "stop", "problem")}
    assert json.loads(json.dumps(parts)) == parts
