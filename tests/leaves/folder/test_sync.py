"""What stands behind durability of many files: one call where it can be trusted, else one for each."""

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from treering._store.leaves_folder.sync import sync_folders, sync_written
from treering._store.posix import descriptors
from treering._store.posix.folder import Folder
from treering._store.posix.folder_tree import FolderTree

linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no syncfs")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Folder, FolderTree]]:
    with Folder(str(tmp_path)) as folder:
        tree = FolderTree(folder, str(tmp_path))
        yield folder, tree
        tree.close()


@linux
@pytest.mark.parametrize(("release", "trusted"), [("5.7.19-generic", False), ("4.18.0", False), ("odd", False)])
def test_kernels_that_keep_errors_to_themselves(
    monkeypatch: pytest.MonkeyPatch, opened: tuple[Folder, FolderTree], release: str, trusted: bool
) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release=release))
    assert opened[0].descriptor is not None
    assert descriptors.sync_file_system(opened[0].descriptor) is trusted


@linux
def test_file_systems_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(release="6.1.0"))
    with Folder("/proc") as folder:
        assert folder.descriptor is not None
        assert not descriptors.sync_file_system(folder.descriptor)


@linux
def test_file_systems_that_are_known(monkeypatch: pytest.MonkeyPatch, opened: tuple[Folder, FolderTree]) -> None:
    assert opened[0].descriptor is not None
    monkeypatch.setattr(descriptors, "_syncs_as_a_whole", lambda descriptor: True)
    assert descriptors.sync_file_system(opened[0].descriptor)
    with pytest.raises(OSError, match="Bad file descriptor") as caught:
        descriptors.sync_file_system(-1)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_written_is_synced_and_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: tuple[Folder, FolderTree], whole: bool
) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c" / "0").write_bytes(b"1")
    (tmp_path / "a" / "beside").write_bytes(b"1")
    (tmp_path / "a" / "b" / "link").symlink_to("../beside")
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    monkeypatch.setattr(descriptors, "sync_file_system", lambda descriptor: whole)
    sync_written(*opened, ("a", "b"), {("c",): ["0"]})
    below = ["", "/a", "/a/b", "/a/b/c", "/a/b/c/0"]
    assert sorted(synced) == ([] if whole else [f"{tmp_path}{name}" for name in below])


@pytest.mark.parametrize("count", [1, 40])
def test_an_error_of_any_folder_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: tuple[Folder, FolderTree], count: int
) -> None:
    folders = [(str(number),) for number in range(count)]
    for (name,) in folders:
        (tmp_path / name).mkdir()

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(descriptors, "sync_file_system", lambda descriptor: False)
    sync_folders(*opened, folders)
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folders(*opened, folders)
