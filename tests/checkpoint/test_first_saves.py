"""Two first saves of one file: one of them is told that the other was there first, in whichever store and form."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests import faults, limits
from tests.buckets import MemoryBucket, lead_to
from tests.command import copy_path
from treering.errors import BusyError, ExistsError, NotFoundError

TREE = {"a": np.arange(40_000, dtype=np.float32), "b": np.arange(6, dtype=np.int32)}
OTHER = {name: array + 1 for name, array in TREE.items()}
TREES = (TREE, OTHER)
NAMES = ("x", "x.msgpack", "x.safetensors", "x.npz")
Write = Callable[[Any, Any, Any], Any]


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
        limits.lower(monkeypatch, whole_object=1000)
    return str(lead_to(MemoryBucket()))


@pytest.mark.sampled(5)
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

    with pytest.raises(ExistsError, match=f"{name}' was saved by another writer meanwhile"):
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

    with pytest.raises(ExistsError, match=r"model\.safetensors' was saved by another writer meanwhile"):
        treering.convert(source, path, to="hf", progress=come_between)
    assert np.array_equal(treering.load(path)["a"], TREE["a"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sizes", [(None, 1000), (1000, None)], ids=["one file", "shards"])
def test_a_model_in_one_file_and_one_in_shards_are_not_both_saved(sizes: tuple[Any, Any], place: Any) -> None:
    """No name of the one is a name of the other, and transformers would read the one file alone."""
    path = f"{place}/hf"
    began, go_on = threading.Event(), threading.Event()
    came: list[bool] = []

    def write_other() -> None:
        treering.export(path, OTHER, to="hf", max_file_size=sizes[1], progress=begin)

    def begin(done: int, total: int) -> None:
        began.set()
        assert go_on.wait(20)

    def come_between(done: int, total: int) -> None:
        go_on.set()
        if not came:
            came.append(True)
            other.result(20) if other is not None else write_other()

    # Both begin before one of them is seen in the folder. Of shards the first is seen soon, so one file begins first.
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(write_other) if sizes[1] is None else None
        assert other is None or began.wait(20)
        with pytest.raises(ExistsError, match=r"wrote 'model\.safetensors.*meanwhile"):
            treering.export(path, TREE, to="hf", max_file_size=sizes[0], progress=come_between)
    assert all(np.array_equal(treering.load(path)[name], array) for name, array in OTHER.items())
    assert treering.verify(path).ok


def is_saved(path: str) -> bool:
    try:
        treering.inspect(path)
    except NotFoundError:
        return False
    return True


def _convert(name: str, to: str, path: str, number: int, progress: Any) -> None:
    source = Path(os.environ["TREERING_SOURCES"], f"{number}")
    treering.convert(source, f"{path}/{name}", to=to, max_file_size=1000 if to == "hf" else None, progress=progress)


def _copy(suffix: str, path: str, number: int, progress: Any) -> None:
    source = Path(os.environ["TREERING_SOURCES"], f"{number}{suffix}")
    copy_path(str(source), f"{path}/x{suffix}", overwrite=False, progress=progress)


def _save(name: str, form: Any, path: str, number: int, progress: Any) -> None:
    treering.export(f"{path}/{name}", TREES[number], to=form, progress=progress)


FORMS: dict[str, Write] = {
    "msgpack": functools.partial(_save, "x.msgpack", None),
    "safetensors": functools.partial(_save, "x.safetensors", None),
    "folder": functools.partial(_save, "x", None),
    "hf": functools.partial(_save, "x", "hf"),
    "npz of convert": functools.partial(_convert, "x.npz", "npz"),
    "flax of convert": functools.partial(_convert, "x.msgpack", "flax"),
    "safetensors of convert": functools.partial(_convert, "x.safetensors", "safetensors"),
    "treering of convert": functools.partial(_convert, "x", "treering"),
    "shards of convert": functools.partial(_convert, "x", "hf"),
    "leaves of convert": functools.partial(_convert, "x", "leaves"),
    "copy of a file": functools.partial(_copy, ".safetensors"),
    "copy of a folder": functools.partial(_copy, ""),
}


# What is put in parts cannot be put by condition, as docs/guides/buckets.md says.
@pytest.mark.sampled(5)
@pytest.mark.parametrize("place", ["disk", "memory", "bucket"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_one_of_two_that_write_at_once_returns(form: str, place: Any) -> None:
    """Both wait for each other behind the look at the path; the one that loses is told, and leaves nothing behind."""
    for number, tree in enumerate(TREES):
        for suffix in ("", ".safetensors"):
            treering.save(Path(os.environ["TREERING_SOURCES"], f"{number}{suffix}"), tree)
    both = threading.Barrier(2)
    place = f"{place}/race"

    def write(number: int) -> str:
        seen: list[int] = []

        def wait(done: int, total: int) -> None:
            seen.append(done)
            if len(seen) == 1:
                with contextlib.suppress(threading.BrokenBarrierError):
                    both.wait(20)

        try:
            FORMS[form](place, number, wait)
        except (ExistsError, BusyError):
            both.abort()
            return "told"
        return "saved"

    with ThreadPoolExecutor(2) as pool:
        outcomes = list(pool.map(write, range(2)))
    assert sorted(outcomes) == ["saved", "told"]
    name = next(name for name in NAMES if is_saved(f"{place}/{name}"))
    found = treering.load(f"{place}/{name}")
    assert all(np.array_equal(found[key], array) for key, array in TREES[outcomes.index("saved")].items())
    assert treering.verify(f"{place}/{name}").ok


@pytest.mark.parametrize("reason", [errno.EPERM, errno.EOPNOTSUPP])
def test_where_files_have_one_name_only(reason: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links still looks again at the end."""

    faults.fail(monkeypatch, os, "link", reason)
    path = tmp_path / "a.msgpack"
    with pytest.raises(ExistsError, match="meanwhile"):
        treering.save(path, TREE, progress=lambda done, total: path.write_bytes(b"first"))
    assert path.read_bytes() == b"first"
    treering.save(tmp_path / "b.msgpack", TREE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.msgpack", "b.msgpack"]
