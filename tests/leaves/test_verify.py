"""Verifying leaves directories: every kind of damage is named, load refuses the same, and notes are no damage."""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec

import treering as tr
from tests import faults, on_disk
from tests.leaves.saved import INDEX, index_at, put
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError
from treering.leaves import tree_serialize_leaves

GOLDEN = Path(__file__).parents[1] / "compat" / "golden" / "eformer"
ZSTD = {"id": "zstd", "level": 1}
LARGE = np.arange(300_000, dtype=np.int32)


def saved(path: Path) -> Path:
    """A tree without prefix, a cut and ragged one, a compressed one."""
    tree_serialize_leaves(path, {"w": np.arange(6.0), "large": LARGE, "none": np.zeros((0, 3))})
    tree_serialize_leaves(path, {"r": np.arange(10, dtype=np.int8)}, prefix="cut", chunk_bytes=4)
    tree_serialize_leaves(path, {"w": put(np.arange(8.0), PartitionSpec("x"), (2,))}, prefix="zip", compressor=ZSTD)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("verify") / "leaves")


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "leaves", symlinks=True))


def refusal(path: Path) -> str:
    """What a load says; empty where it is content."""
    try:
        tr.load(path)
    except TreeringError as error:
        return str(error)
    return ""


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit the index as a program would that reads and writes JSON."""
    index = index_at(path)
    edit(index)
    (path / INDEX).write_text(json.dumps(index, indent=2))


def test_all_is_whole(whole: Path) -> None:
    found = tr.verify(whole)
    assert (found.ok, found.checked, found.note, found.leaves) == (True, True, None, 5)
    data = [file for file in whole.rglob("*") if file.is_file() and ".treering" not in file.parts]
    assert found.nbytes == sum(file.stat().st_size for file in data if file.name not in (INDEX, ".zarray"))
    assert refusal(whole) == ""
    calls: list[tuple[int, int]] = []
    tr.verify(whole, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (found.nbytes, found.nbytes)


FILES: dict[str, tuple[Callable[[Path], object], tuple[str, str, int, int]]] = {
    "a bit": (lambda path: flip(path / "w/0", 5), ("w", "w/0", 0, 48)),
    "a block of many": (lambda path: flip(path / "large/0", 200_000), ("large", "large/0", 196_608, 262_144)),
    "two neighbours": (
        lambda path: (flip(path / "large/0", 131_000), flip(path / "large/0", 132_000)),  # type: ignore[func-returns-value]
        ("large", "large/0", 65_536, 196_608),
    ),
    "the filling of the last chunk": (lambda path: flip(path / "cut/r/2", 3), ("cut/r", "cut/r/2", 0, 4)),
    "a compressed bit": (lambda path: flip(path / "zip/w/1", 9), ("zip/w", "zip/w/1", 0, -1)),
    "a lost chunk": (lambda path: (path / "cut/r/1").unlink(), ("cut/r", "cut/r/1", 0, 4)),
    "an empty chunk": (lambda path: (path / "cut/r/1").write_bytes(b""), ("cut/r", "cut/r/1", 0, 4)),
    "a short one": (lambda path: (path / "w/0").write_bytes(bytes(40)), ("w", "w/0", 40, 48)),
    "a long one": (lambda path: (path / "w/0").write_bytes(np.arange(7.0).tobytes()), ("w", "w/0", 48, 56)),
    "a lost .zarray": (lambda path: (path / "none/.zarray").unlink(), ("none", "none/.zarray", 0, -1)),
    "a bit of a .zarray": (lambda path: flip(path / "cut/r/.zarray", 12), ("cut/r", "cut/r/.zarray", 12, 13)),
    "another .zarray": (
        lambda path: shutil.copy(path / "w/.zarray", path / "none/.zarray"),
        ("none", "none/.zarray", 0, -1),
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_named(path: Path, name: str) -> None:
    damage, (key, file, start, stop) = FILES[name]
    damage(path)
    found = tr.verify(path)
    assert not found
    (finding,) = found.findings
    assert (finding.key, finding.file, finding.start) == (key, file, start)
    assert finding.stop == stop or stop < 0
    # One line says leaf, file and bytes.
    assert all(part in str(finding) for part in (repr(key), file, f"bytes {start} to "))
    assert repr(key) in refusal(path)


@pytest.mark.parametrize("name", ["w/0", "w/.zarray", "w"])
def test_links_are_not_followed(path: Path, tmp_path: Path, name: str) -> None:
    (path / name).rename(tmp_path / "far")
    (path / name).symlink_to(tmp_path / "far")
    assert refusal(path)
    findings = tr.verify(path).findings
    assert {(finding.key, "is a link" in finding.problem) for finding in findings} == {("w", True)}
    assert {finding.file for finding in findings} == ({"w/0", "w/.zarray"} if name == "w" else {name})


RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no record": lambda index: index["treering"].pop("zip"),
    "no records": lambda index: index.pop("treering"),
    "another record": lambda index: index["treering"]["zip"].update(record=index["treering"]["cut"]["record"]),
    "another shape": lambda index: index["prefixes"]["zip"][0].update(shape=[9]),
    "another dtype": lambda index: index["arrays"][1].update(dtype="int8"),
    "another folder": lambda index: index["arrays"][1].update(path="w"),
    "an entry less": lambda index: index["arrays"].pop(),
    "no entries": lambda index: index["prefixes"]["zip"].clear(),
    "a branch less": lambda index: index["prefixes"].pop("zip"),
    "no branch without prefix": lambda index: index.pop("arrays"),
    "another prefix": lambda index: index["prefixes"].update(zap=index["prefixes"].pop("zip")),
    "a way out": lambda index: index["arrays"][0].update(path="../x"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", RECORDS)
def test_what_the_index_lost_is_damage(path: Path, name: str) -> None:
    change(path, RECORDS[name])
    found = tr.verify(path)
    assert not found
    assert all(finding.file == INDEX for finding in found.findings), found
    assert INDEX in refusal(path)


def test_an_index_that_is_none(path: Path) -> None:
    (path / INDEX).write_bytes(b'{"format": "tensorstore"')
    (finding,) = tr.verify(path).findings
    assert (finding.key, finding.file) == (None, INDEX)
    (path / INDEX).write_bytes(b'{"format": "zarr"}')
    for refusing in (tr.load, tr.verify, tr.inspect, tr.open):
        with pytest.raises(FormatError):
            refusing(path)
    (path / INDEX).rename(path / "other")
    (path / INDEX).symlink_to("other")
    (finding,) = tr.verify(path).findings
    assert "cannot be read" in finding.problem
    assert refusal(path)


def test_all_damage_is_listed_in_the_order_of_the_leaves(path: Path) -> None:
    for name in ("w/0", "zip/w/1", "zip/w/0", "cut/r/2", "cut/r/0"):
        flip(path / name, 1)
    flip(path / "zip/w/.zarray", 5)
    change(path, lambda index: index["arrays"][0].update(path="x"))
    found = tr.verify(path)
    assert [finding.file for finding in found.findings] == [
        INDEX,
        "cut/r/0",
        "cut/r/2",
        "zip/w/.zarray",
        "zip/w/0",
        "zip/w/1",
    ]
    assert found.leaves == 2
    assert "6 findings" in str(found)


def test_a_save_that_still_moves_is_a_note(path: Path) -> None:
    record = index_at(path)["treering"]["zip"]["record"]
    staged = path / ".treering" / json.loads(record)["attempt"] / "leaves" / "zip"
    staged.mkdir(parents=True)
    (path / "zip" / "w").rename(staged / "w")
    moving = {"cleared": ["zip/w"], "digest": on_disk.digest(record.encode(), b"\0zip/w")}
    change(path, lambda index: index["treering"]["zip"].update(moving=moving))
    found = tr.verify(path)
    assert found, str(found)
    assert "has not moved all its files" in (found.note or "")
    assert "; note: the save of 'zip'" in str(found)
    assert any("has not moved" in note for note in tr.inspect(path).notes)
    assert refusal(path) == ""
    flip(staged / "w" / "0", 7)
    assert [finding.file for finding in tr.verify(path).findings] == ["zip/w/0"]
    assert "zip/w" in refusal(path)


def test_a_save_without_an_index_is_a_note(path: Path) -> None:
    tree_serialize_leaves(path, {"w": np.arange(3)}, prefix="late", write_index=False)
    found = tr.verify(path)
    assert found, str(found)
    assert found.note == "1 save is not in the index; treering.leaves.index_leaves adds saves without one"
    assert found.leaves == 5


def test_a_link_in_the_place_of_what_no_reader_needs_is_a_note(path: Path, tmp_path: Path) -> None:
    (path / ".treering").rename(tmp_path / "far")
    (path / ".treering").symlink_to(tmp_path / "far", target_is_directory=True)
    found = tr.verify(path)
    assert found
    assert "is a link" in (found.note or "")
    assert tr.inspect(path).notes == [found.note]
    assert refusal(path) == ""


def test_a_damaged_text_is_found_beside_its_checksum(tmp_path: Path) -> None:
    """Bytes that are those that were saved, and no UTF-8: only who made the record can have done that."""
    path = tmp_path / "forged"
    tree_serialize_leaves(path, {"t": "ä" * 3000})
    file = path / "t" / "0"
    content = file.read_bytes()[:4001] + b"\xff" + file.read_bytes()[4002:]
    file.write_bytes(content)
    text = json.loads((path / INDEX).read_bytes())["treering"][""]["record"]
    before = json.loads(text)["checksums"]["table"]
    sums = base64.b64encode(array("Q", on_disk.block_checksums(content)).tobytes()).decode()
    forged = on_disk.signed_again(text.replace(before, sums).encode()).decode()
    change(path, lambda index: index["treering"][""].update(record=forged))
    (finding,) = tr.verify(path).findings
    assert (finding.key, finding.file, finding.start) == ("t", "t/0", 4000)
    assert "not UTF-8" in str(finding)
    with pytest.raises(CorruptError, match="'t'"):
        tr.load(path)


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a lost chunk": lambda chunk: chunk.unlink(),
    "an empty chunk": lambda chunk: chunk.write_bytes(b""),
    "a cut chunk": lambda chunk: chunk.write_bytes(chunk.read_bytes()[:-3]),
    "another chunk": lambda chunk: chunk.write_bytes(b"x" * 40),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_chunks_of_another_program_must_unpack(tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(GOLDEN / "sharded_2x4", tmp_path / "x"))
    chunk = next(path.glob("**/1.2"))
    FOREIGN[name](chunk)
    (finding,) = tr.verify(path).findings
    assert finding.file == str(chunk.relative_to(path))
    assert repr(finding.key) in refusal(path)


def test_a_large_chunk_of_another_program_is_one_finding(tmp_path: Path) -> None:
    folder = tmp_path / "w"
    folder.mkdir()
    zarray = {"shape": [5_000_000], "chunks": [5_000_000], "dtype": "<f4", "order": "C", "zarr_format": 2}
    (folder / ".zarray").write_text(json.dumps(zarray | dict.fromkeys(("compressor", "fill_value", "filters"))))
    document = {"format": "tensorstore", "prefixes": {}, "arrays": [{"path": "w"}]}
    (tmp_path / INDEX).write_text(json.dumps(document))
    (finding,) = tr.verify(tmp_path).findings
    assert (finding.key, finding.file, finding.problem) == ("w", "w/0", "lacks a chunk file")
    (folder / "0").write_bytes(np.zeros(5_000_000, np.float32).tobytes())
    assert tr.verify(tmp_path)
    (folder / "0").write_bytes(bytes(12_000_000))
    (finding,) = tr.verify(tmp_path).findings
    assert (finding.start, finding.stop) == (0, 12_000_000)
    assert "20000000 bytes" in finding.problem
    assert "'w'" in refusal(tmp_path)


def test_a_zarray_of_another_program(tmp_path: Path) -> None:
    path = Path(shutil.copytree(GOLDEN / "plain", tmp_path / "x"))
    zarray = min(path.glob("**/.zarray"))
    text = zarray.read_bytes()
    zarray.write_bytes(text[:-1])
    (finding,) = tr.verify(path).findings
    assert finding.file == str(zarray.relative_to(path))
    assert refusal(path)
    zarray.write_bytes(text.replace(b'"id":"zstd"', b'"id":"snap"'))
    for refusing in (tr.load, tr.verify):
        with pytest.raises(UnsupportedError, match="snap"):
            refusing(path)


def test_a_claim_of_more_chunks_than_can_be_counted(tmp_path: Path) -> None:
    path = Path(shutil.copytree(GOLDEN / "plain", tmp_path / "x"))
    zarray = next(file for file in sorted(path.glob("**/.zarray")) if json.loads(file.read_bytes())["shape"])
    document = json.loads(zarray.read_bytes())
    axes = len(document["shape"])
    zarray.write_text(json.dumps(document | {"shape": [1 << 40] * axes, "chunks": [1] * axes}))
    found = tr.verify(path)
    assert 1 <= len(found.findings) <= 101
    assert refusal(path)
    assert tr.inspect(path).nbytes > 0


def _foreign(path: Path, **zarray: Any) -> Path:
    """Make the array ``w`` of another program, and return its folder."""
    (folder := path / "w").mkdir()
    document = {"dtype": "<f4", "order": "C", "zarr_format": 2, "compressor": None, "fill_value": None, "filters": None}
    (folder / ".zarray").write_text(json.dumps(document | zarray))
    index = {"format": "tensorstore", "prefixes": {}, "arrays": [{"path": "w"}]}
    (path / INDEX).write_text(json.dumps(index))
    return folder


def test_no_memory_is_taken_for_a_chunk_that_no_file_of_its_size_holds(tmp_path: Path) -> None:
    folder = _foreign(tmp_path, shape=[1 << 40], chunks=[1 << 40], compressor={"id": "gzip", "level": 1})
    (folder / "0").write_bytes(gzip.compress(bytes(16)))
    (finding,) = tr.verify(tmp_path).findings
    assert (finding.key, finding.file) == ("w", "w/0")
    assert "no gzip of" in finding.problem


def test_of_many_lost_chunks_some_are_told(tmp_path: Path) -> None:
    (_foreign(tmp_path, shape=[300], chunks=[1]) / "0").write_bytes(bytes(4))
    found = tr.verify(tmp_path).findings
    assert len(found) == 100
    assert found[0].problem == "lacks a chunk file"
    assert found[-1].problem == "lacks a chunk file, and there may be more like it"


def test_a_link_to_a_folder_of_chunks_is_a_finding(tmp_path: Path) -> None:
    (path := tmp_path / "x").mkdir()
    folder = _foreign(path, shape=[2, 2], chunks=[1, 1], dimension_separator="/")
    for row in (folder / "0", tmp_path / "elsewhere"):
        row.mkdir()
        for chunk in (row / "0", row / "1"):
            chunk.write_bytes(bytes(4))
    (folder / "1").symlink_to(tmp_path / "elsewhere")
    found = tr.verify(path).findings
    assert [finding.file for finding in found] == ["w/1/0", "w/1/1"]
    assert all("is a link" in finding.problem for finding in found)


def test_an_index_that_lists_nothing(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"format": "tensorstore", "version": "2.0", "prefixes": {}}')
    assert tr.load(tmp_path) == {}
    assert tr.verify(tmp_path)
    assert tr.inspect(tmp_path).leaves == {}


def test_a_save_meanwhile_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = iter([{"w": np.arange(3.0)}])

    def overtake(name: Any, *_: object, **__: object) -> None:
        if Path(name).name == ".zarray":  # the index is read
            for tree in saves:
                tree_serialize_leaves(path, tree)

    faults.before(monkeypatch, os, "open", overtake)
    found = tr.verify(path)
    assert list(saves) == []
    assert found, str(found)
    assert found.leaves == 3
