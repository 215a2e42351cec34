"""Two first saves of one file: one of them is told that the other was there first, in whichever store and form."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests.store.objects.memory_bucket import CountingBucket
from treering._runs.copy_run import copy_path
from treering._store.objects import root
from treering.errors import Exists

TREE = {"a": np.arange(40_000, dtype=np.float32), "b": np.arange(6, dtype=np.int32)}
OTHER = {name: array + 1 for name, array in TREE.items()}
Write = Callable[[Any, Any, Any], None]


def save(path: Any, tree: Any, progress: Any) -> None:
    treering.save(path, tree, progress=progress)


def convert_it(path: Any, tree: Any, progress: Any) -> None:
    source = Path(os.environ["TREERING_SOURCES"], f"{tree['b'][0]}")
    if not source.exists():
        treering.save(source, tree)
    treering.convert(source, path, progress=progress)


def copy_it(path: Any, tree: Any, progress: Any) -> None:
    source = Path(os.environ["TREERING_SOURCES"], f"{tree['b'][0]}.safetensors")
    if not source.exists():
        treering.save(source, tree)
    copy_path(str(source), path, overwrite=False, progress=progress)


@pytest.fixture(params=["disk", "memory", "bucket", "bucket in parts"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TREERING_SOURCES", str(tmp_path))
    if request.param == "disk":
        return tmp_path
    if request.param == "memory":
        return f"memory://{tmp_path.name}"
    if request.param == "bucket in parts":
        monkeypatch.setattr(root, "WHOLE_BYTES", 1000)
    return str(treering.at(CountingBucket()))


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.msgpack", save),
        ("a.safetensors", save),
        ("a.npz", convert_it),
        ("a.msgpack", convert_it),
        ("a.safetensors", convert_it),
        ("a.safetensors", copy_it),
    ],
)
def test_one_of_two_first_saves_is_refused(name: str, write: Write, place: Any) -> None:
    """The other one comes between the look at the path and the end, in the middle of the writing."""
    path = f"{place}/{name}"
    came: list[bool] = []

    def come_between(done: int, total: int) -> None:
        if not came:
            came.append(True)
            write(path, OTHER, None)

    with pytest.raises(Exists, match=f"{name}' was saved by another writer meanwhile"):
        write(path, TREE, come_between)
    assert came
    loaded = treering.load(path)
    assert all(np.array_equal(loaded[name], array) for name, array in OTHER.items())
    treering.save(f"{place}/b.msgpack", TREE)
    treering.save(f"{place}/b.msgpack", OTHER, overwrite=True)
    assert np.array_equal(treering.load(f"{place}/b.msgpack")["a"], OTHER["a"])


def test_a_folder_of_hugging_face_is_refused_too(place: Any) -> None:
    path = f"{place}/hf"
    source = Path(os.environ["TREERING_SOURCES"], "source")
    treering.save(source, TREE)
    came: list[bool] = []

    def come_between(done: int, total: int) -> None:
        if not came:
            came.append(True)
            treering.convert(source, path, to="hf")

    with pytest.raises(Exists, match=r"model\.safetensors' was saved by another writer meanwhile"):
        treering.convert(source, path, to="hf", progress=come_between)
    assert np.array_equal(treering.load(path)["a"], TREE["a"])


@pytest.mark.parametrize("reason", [errno.EPERM, errno.EOPNOTSUPP])
def test_where_files_have_one_name_only(reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links still looks again at the end."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "a.msgpack"
    with pytest.raises(Exists, match="meanwhile"):
        treering.save(path, TREE, progress=lambda done, total: path.write_bytes(b"first"))
    assert path.read_bytes() == b"first"
    treering.save(tmp_path / "b.msgpack", TREE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.msgpack", "b.msgpack"]
