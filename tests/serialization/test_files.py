"""save_to_file and load_from_file: paths, open files, atomicity, mapping, errors."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests import faults
from tests.trees import assert_same
from treering import serialization
from treering.errors import CorruptError, MismatchError, NotFoundError, StoreError, TreeringError

TREE = {"w": np.arange(5000, dtype=np.float32), "step": 3}
OLD = {"w": np.zeros(3, np.float32), "step": 1}


class PathLike:
    """The least that os.fspath takes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __fspath__(self) -> str:
        return str(self._path)


@pytest.mark.parametrize("kind", [str, Path, PathLike], ids=["str", "Path", "PathLike"])
def test_a_path_may_be_str_or_any_path_like(kind: Any, tmp_path: Path) -> None:
    path = kind(tmp_path / "state.msgpack")
    serialization.save_to_file(TREE, path)
    assert_same(serialization.load_from_file(TREE, path), TREE)
    assert (tmp_path / "state.msgpack").read_bytes() == serialization.to_bytes(TREE)


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    serialization.save_to_file(TREE, "state.msgpack")
    assert_same(serialization.load_from_file(None, "state.msgpack"), TREE)


def test_missing_parent_folders_are_made(tmp_path: Path) -> None:
    serialization.save_to_file(TREE, tmp_path / "a" / "b" / "state.msgpack")
    assert_same(serialization.load_from_file(None, tmp_path / "a" / "b" / "state.msgpack"), TREE)


def test_an_open_file_is_written_and_read_from_where_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "state"
    with path.open("w+b") as file:
        file.write(b"head")
        serialization.save_to_file(TREE, file)
        file.seek(4)
        assert_same(serialization.load_from_file(TREE, file), TREE)
    assert path.read_bytes() == b"head" + serialization.to_bytes(TREE)


def test_a_stream_in_memory_and_one_without_seek() -> None:
    stream = io.BytesIO()
    serialization.save_to_file(TREE, stream)
    assert stream.getvalue() == serialization.to_bytes(TREE)
    stream.seek(0)
    assert_same(serialization.load_from_file(None, stream), TREE)
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as into:
        serialization.save_to_file({"a": 1}, into)
    with os.fdopen(reader, "rb") as outof:
        assert serialization.load_from_file(None, outof) == {"a": 1}


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "text").open("w+", encoding="utf-8") as file:
        with pytest.raises(TypeError):
            serialization.save_to_file(TREE, file)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            serialization.load_from_file(None, file)  # type: ignore[call-overload]


@pytest.mark.parametrize("bad", [None, 5, 1.5, object()], ids=lambda bad: type(bad).__name__)
def test_what_is_neither_path_nor_file_is_a_type_error(bad: Any) -> None:
    with pytest.raises(TypeError):
        serialization.save_to_file(TREE, bad)
    with pytest.raises(TypeError):
        serialization.load_from_file(None, bad)


# ------------------------------------------------------------------------------------------------------------ atomicity


def test_saving_again_replaces_the_file_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "state"
    serialization.save_to_file(OLD, path)
    serialization.save_to_file(TREE, path)
    assert_same(serialization.load_from_file(None, path), TREE)
    assert os.listdir(tmp_path) == ["state"]  # noqa: PTH208


@pytest.mark.parametrize(
    "bad", [{"w": object()}, {"w": np.array(["text"])}, {1: 0, "1": 1}], ids=["object", "text", "keys"]
)
def test_a_refused_tree_leaves_the_old_file_and_nothing_beside(bad: Any, tmp_path: Path) -> None:
    path = tmp_path / "state"
    serialization.save_to_file(OLD, path)
    with pytest.raises(TreeringError):
        serialization.save_to_file(bad, path)
    assert_same(serialization.load_from_file(None, path), OLD)
    assert os.listdir(tmp_path) == ["state"]  # noqa: PTH208


def test_a_refused_tree_makes_no_folders(tmp_path: Path) -> None:
    with pytest.raises(TreeringError):
        serialization.save_to_file({"w": object()}, tmp_path / "new" / "state")
    assert os.listdir(tmp_path) == []  # noqa: PTH208


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_of_the_disk_leaves_the_old_file_and_nothing_beside(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    serialization.save_to_file(OLD, path)

    for name in {"fsync": ("fsync", "fdatasync"), "replace": ("replace", "rename")}[step]:
        faults.fail(monkeypatch, os, name, errno.EIO)
    with pytest.raises(OSError, match="Input/output error") as caught:
        serialization.save_to_file(TREE, path)
    assert isinstance(caught.value, StoreError)
    assert caught.value.errno == 5
    monkeypatch.undo()
    assert_same(serialization.load_from_file(None, path), OLD)
    assert os.listdir(tmp_path) == ["state"]  # noqa: PTH208


def test_a_link_is_followed_and_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    serialization.save_to_file(OLD, real)
    link.symlink_to("real")
    serialization.save_to_file(TREE, link)
    assert link.is_symlink()
    assert_same(serialization.load_from_file(None, real), TREE)
    assert_same(serialization.load_from_file(None, link), TREE)


def test_others_may_read_a_new_file_as_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        serialization.save_to_file(TREE, tmp_path / "state")
    finally:
        os.umask(old)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 65536, 2**20 - 1, 2**20, 3 * 2**20 + 17])
def test_files_of_any_size_are_exact(size: int, tmp_path: Path) -> None:
    tree = {"raw": np.random.default_rng(size).integers(0, 255, size, np.uint8), "text": "t"}
    path = tmp_path / "state"
    serialization.save_to_file(tree, path)
    assert path.read_bytes() == serialization.to_bytes(tree)
    for mapped in (False, True):
        assert_same(serialization.load_from_file(tree, path, mapped=mapped), tree)


def test_ten_thousand_small_leaves(tmp_path: Path) -> None:
    tree = {f"layer{number}": np.full(7, number, np.int16) for number in range(10_000)}
    serialization.save_to_file(tree, tmp_path / "state")
    for mapped in (False, True):
        assert_same(serialization.load_from_file(tree, tmp_path / "state", mapped=mapped), tree)


@pytest.mark.parametrize("place", [65_000, 65_500, 65_530, 65_536, 66_000, 131_000])
def test_every_kind_of_item_across_the_readers_window(place: int, tmp_path: Path) -> None:
    items: list[Any] = [
        "k" * 300,
        b"b" * 70_000,
        2**63,
        -5,
        1.5,
        2j,
        None,
        np.float32(3),
        np.zeros((1,) * 20, np.complex128),
        np.arange(300, dtype=np.int64),
        {"inner" * 100: [1, {}]},
        jnp.ones(3),
    ]
    for first in range(len(items)):
        tree = {"pad": b"x" * (place + first), "long key " * 60: 1} | {
            f"{n}": item for n, item in enumerate(items[first:])
        }
        serialization.save_to_file(tree, tmp_path / "state")
        assert_same(serialization.load_from_file(tree, tmp_path / "state"), tree)


# --------------------------------------------------------------------------------------------------------------- mapped


def test_a_mapped_tree_survives_a_save_over_its_file(tmp_path: Path) -> None:
    path = tmp_path / "state"
    serialization.save_to_file(TREE, path)
    mapped = serialization.load_from_file(TREE, path, mapped=True)
    serialization.save_to_file(OLD, path)
    assert_same(mapped, TREE)
    path.unlink()
    assert_same(mapped, TREE)


def test_mapped_arrays_are_read_only(tmp_path: Path) -> None:
    path = tmp_path / "state"
    serialization.save_to_file(TREE, path)
    assert not serialization.load_from_file(None, path, mapped=True)["w"].flags.writeable


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("mapped", [False, True])
def test_a_missing_file_is_file_not_found(mapped: bool, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent") as caught:
        serialization.load_from_file(None, tmp_path / "absent", mapped=mapped)
    assert isinstance(caught.value, NotFoundError)
    assert os.listdir(tmp_path) == []  # noqa: PTH208


@pytest.mark.parametrize("mapped", [False, True])
def test_a_folder_is_no_file(mapped: bool, tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        serialization.load_from_file(None, tmp_path, mapped=mapped)
    assert isinstance(caught.value, TreeringError)


def test_saving_onto_a_folder_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder") as caught:
        serialization.save_to_file(TREE, tmp_path / "folder")
    assert isinstance(caught.value, TreeringError)
    assert os.listdir(tmp_path) == ["folder"]  # noqa: PTH208


def test_a_file_where_a_folder_should_be_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(OSError, match="file") as caught:
        serialization.save_to_file(TREE, tmp_path / "file" / "state")
    assert isinstance(caught.value, TreeringError)


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("keep", [0, 1, 100, -1, -4000])
def test_a_file_cut_short_is_corrupt(keep: int, mapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(serialization.to_bytes(TREE)[:keep])
    with pytest.raises(CorruptError) as caught:
        serialization.load_from_file(None, path, mapped=mapped)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("mapped", [False, True])
def test_trailing_bytes_in_a_file_are_corrupt(mapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(serialization.to_bytes(TREE) + b"\x00")
    with pytest.raises(CorruptError):
        serialization.load_from_file(None, path, mapped=mapped)


@pytest.mark.parametrize("mapped", [False, True])
def test_strict_is_told_by_files_too(mapped: bool, tmp_path: Path) -> None:
    path = tmp_path / "state"
    serialization.save_to_file(TREE, path)
    serialization.load_from_file(TREE, path, strict=True, mapped=mapped)
    with pytest.raises(MismatchError) as caught:
        serialization.load_from_file(OLD | {"more": 1}, path, strict=True, mapped=mapped)
    assert len(caught.value.differences) == 2


def test_a_gzipped_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "state.gz"
    path.write_bytes(serialization.to_compressed_bytes(TREE))
    with pytest.raises(TreeringError, match="gzip"):
        serialization.load_from_file(None, path)
