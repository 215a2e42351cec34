"""Small files read whole: what is there, no link followed, nothing left open, in whichever place they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from treering._store.failures import DataFileMissing, LinkRefused
from treering._store.leaves_folder.leaves_folder import LeavesFolder
from treering._store.posix import folder
from treering.errors import Corrupt

ATTEMPT = "0123456789abcdef"


@pytest.fixture(params=[True, False], ids=["from descriptors", "by paths"])
def leaves(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not request.param:
        monkeypatch.setattr(folder, "FROM_DESCRIPTOR", False)
    for number in range(3):
        place = tmp_path / "a" / f"n{number}"
        place.mkdir(parents=True)
        (place / ".zarray").write_bytes(b"{}")
        (place / "0").write_bytes(bytes(number))
    return tmp_path


def test_each_file_comes_up_to_one_byte_more(leaves: Path) -> None:
    with LeavesFolder(leaves) as directory:
        assert directory.read_small("a/n2", [(".zarray", 9), ("0", 2)], None) == [b"{}", b"\0\0"]
        assert directory.read_small("a/n2", [("0", 1), (".zarray", 0)], None) == [b"\0\0", b"{"]
        assert directory.read_small("a/n2", [("0", 0)], None) == [b"\0"]
        assert directory.read_small("a/n0", [("0", 5)], None) == [b""]


def test_files_beside_the_index_have_no_folder(leaves: Path) -> None:
    (leaves / "0").write_bytes(b"x")
    with LeavesFolder(leaves) as directory:
        assert directory.read_small("", [("0", 5)], None) == [b"x"]


def test_staged_files_come_first_and_both_of_one_place(leaves: Path) -> None:
    staged = leaves / ".treering" / ATTEMPT / "leaves" / "a" / "n1"
    staged.mkdir(parents=True)
    (staged / ".zarray").write_bytes(b"new")
    with LeavesFolder(leaves) as directory:
        assert directory.read_small("a/n1", [(".zarray", 9)], ATTEMPT) == [b"new"]
        assert directory.read_small("a/n1", [(".zarray", 9), ("0", 9)], ATTEMPT) == [b"{}", b"\0"]
        assert directory.read_small("a/n2", [(".zarray", 9)], ATTEMPT) == [b"{}"]


@pytest.mark.parametrize("way", ["a/n9", "b", "a/n1/0"])
def test_what_is_not_there_is_named(leaves: Path, way: str) -> None:
    with LeavesFolder(leaves) as directory, pytest.raises(DataFileMissing, match="1"):
        directory.read_small(way, [("1", 5)], None)


def test_links_are_refused(leaves: Path) -> None:
    (leaves / "a" / "n0" / "1").symlink_to(leaves / "a" / "n1" / "0")
    (leaves / "b").symlink_to(leaves / "a")
    with LeavesFolder(leaves) as directory:
        for way, name in (("a/n0", "1"), ("b/n0", "0"), ("b", "0")):
            with pytest.raises(LinkRefused, match="link"):
                directory.read_small(way, [(name, 5)], None)


def test_a_folder_in_the_place_of_a_file(leaves: Path) -> None:
    with LeavesFolder(leaves) as directory, pytest.raises(DataFileMissing, match="n1"):
        directory.read_small("a", [("n1", 5)], None)


def test_a_pipe_is_not_waited_for(leaves: Path) -> None:
    os.mkfifo(leaves / "a" / "n0" / "1")
    with LeavesFolder(leaves) as directory:
        assert directory.read_small("a/n0", [("1", 5)], None) == [b""]


def test_no_way_leads_out(leaves: Path) -> None:
    with LeavesFolder(leaves) as directory:
        for way in ("../a", "a/../a", "/a", ".treering/x"):
            with pytest.raises(Corrupt):
                directory.read_small(way, [("0", 5)], None)


def test_nothing_stays_open(leaves: Path) -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    with LeavesFolder(leaves) as directory:
        for number in range(3):
            directory.read_small(f"a/n{number}", [("0", 9), (".zarray", 9)], None)
            with pytest.raises(DataFileMissing):
                directory.read_small(f"a/n{number}", [("0", 9), ("1", 9)], None)
    assert len(list(Path("/dev/fd").iterdir())) == before
