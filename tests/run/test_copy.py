"""`treering cp`: copies between disk, memory, buckets and web servers, checked on the way."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests import limits
from tests.buckets import Answer, Delete, Get, MemoryBucket, Request, forget, lead_to
from tests.command import copy_path, ended
from tests.store.objects.web_server import serving
from treering.errors import BusyError, CorruptError, ExistsError, NotFoundError, UnsupportedError

TREE: dict[str, Any] = {
    "w": np.arange(300_000, dtype=np.float32),
    "small": [np.full(n, n, np.int16) for n in range(50)],
    "text": "tree ring",
    "empty": np.zeros((0, 3)),
    "step": 7,
}
NUMBERS = itertools.count()


@pytest.fixture(params=["disk", "memory", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Return where copies go to and come from."""
    if request.param == "disk":
        yield str(tmp_path / "there")
    elif request.param == "memory":
        yield f"memory://copies-{next(NUMBERS)}"
    else:
        bucket = MemoryBucket()
        lead_to(bucket, grace=0)
        yield bucket.shown
        forget(bucket)


def assert_same(a: object, b: object) -> None:
    assert treering.diff(a, b, values=True).differences == ()  # type: ignore[arg-type]


def test_a_checkpoint_there_and_back(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, copied_piece=1 << 17)
    treering.save(tmp_path / "a", TREE, metadata={"loss": 1.5})
    assert ended("cp", tmp_path / "a", f"{place}/b") == 0
    assert ended("cp", f"{place}/b", tmp_path / "c") == 0
    for copy in (f"{place}/b", tmp_path / "c"):
        assert_same(tmp_path / "a", copy)
        assert treering.verify(copy).ok
        assert treering.inspect(copy).metadata == {"loss": 1.5}
    first, last = (json.loads((tmp_path / name / "treering.json").read_bytes()) for name in "ac")
    assert last["attempt"] != first["attempt"]
    assert last["origin"]["path"] == f"{place}/b"
    assert all(last["attempt"] in file["name"] for file in last["files"])


def test_a_copy_replaces_nothing_that_it_may_not(place: str, tmp_path: Path) -> None:
    treering.save(tmp_path / "a", TREE)
    treering.save(f"{place}/b", {"w": 1})
    with pytest.raises(ExistsError):
        copy_path(str(tmp_path / "a"), f"{place}/b", overwrite=False)
    assert treering.load(f"{place}/b") == {"w": 1}
    copy_path(str(tmp_path / "a"), f"{place}/b", overwrite=True)
    assert_same(tmp_path / "a", f"{place}/b")


def test_no_folder_gets_the_name_of_a_file(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    treering.save(tmp_path / "a", TREE)
    with treering.Run(tmp_path / "run") as run:
        run.save(1, TREE)
    file = f"{place}/a.msgpack"
    treering.save(file, {"old": 1})
    for source in ("a", "run"):
        assert ended("cp", "--overwrite", tmp_path / source, file) == 2
        assert "is a file; the copy would be a folder" in capsys.readouterr().err
    assert treering.load(file) == {"old": 1}


def test_a_folder_of_checkpoints_is_none(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = f"{place}/folder"
    treering.save(f"{folder}/a", {"w": 1})
    assert ended("cp", folder, tmp_path / "copy") == 2
    error = capsys.readouterr().err
    assert f"there is no checkpoint in {folder!r}: it has no 'treering.json'" in error
    assert "hint: there are checkpoints in it: 'a'" in error


def test_the_hint_of_the_verb_is_the_option_of_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        treering.save(tmp_path / name, {"w": 1})
    assert ended("cp", tmp_path / "a", tmp_path / "b") == 2
    assert "hint: pass --overwrite to replace it" in capsys.readouterr().err


def test_damage_is_not_copied(place: str, tmp_path: Path) -> None:
    treering.save(tmp_path / "a", TREE)
    treering.save(str(tmp_path / "a.safetensors"), {"w": TREE["w"]})
    for file in (next((tmp_path / "a").glob("data-*")), tmp_path / "a.safetensors"):
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
    with pytest.raises(CorruptError, match="is damaged"):
        copy_path(str(tmp_path / "a"), f"{place}/b", overwrite=False)
    with pytest.raises(CorruptError, match="is damaged"):
        copy_path(str(tmp_path / "a.safetensors"), f"{place}/b.safetensors", overwrite=False)
    for name in ("b", "b.safetensors"):
        with pytest.raises(NotFoundError):
            treering.load(f"{place}/{name}")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["a.safetensors", "a.msgpack"])
def test_single_files(name: str, place: str, tmp_path: Path) -> None:
    treering.save(str(tmp_path / name), {"w": TREE["w"]})
    assert ended("cp", tmp_path / name, f"{place}/{name}") == 0
    assert ended("cp", f"{place}/{name}", tmp_path / f"b{name}") == 0
    assert (tmp_path / name).read_bytes() == (tmp_path / f"b{name}").read_bytes()
    assert ended("cp", tmp_path / name, f"{place}/{name}") == 2
    assert ended("cp", "--overwrite", tmp_path / name, f"{place}/{name}") == 0


def test_a_run_step_by_step(place: str, tmp_path: Path) -> None:
    with treering.Run(tmp_path / "run", keep=treering.KeepLast(3)) as run:
        for step in (1, 2):
            run.save(step, TREE | {"step": step}, metrics={"loss": step})
    assert ended("cp", tmp_path / "run", f"{place}/run") == 0
    with treering.Run(tmp_path / "run") as run:
        run.save(3, TREE | {"step": 3}, metrics={"loss": 3})
    assert ended("cp", tmp_path / "run", f"{place}/run") == 0
    with treering.Run(f"{place}/run") as run:
        assert run.steps() == [1, 2, 3]
        assert run.metrics(2) == {"loss": 2}
        assert run.best("loss") == 1
        assert run.load()["step"] == 3
    for step in (2, 4):
        with treering.Run(tmp_path / f"other{step}") as run:
            run.save(step, {"w": 1})
    with pytest.raises(ExistsError, match="is another run"):
        copy_path(str(tmp_path / "other2"), f"{place}/run", overwrite=False)
    with pytest.raises(ExistsError, match="is another run"):
        copy_path(str(tmp_path / "other4"), f"{place}/run", overwrite=True)


def save_steps(path: Any, *steps: int, keep: int | None = None) -> None:
    with treering.Run(path, keep=treering.KeepLast(keep) if keep else None) as run:
        for step in steps:
            run.save(step, {"step": step, "of": str(path)})


def test_a_run_is_not_mixed_with_another_one(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_steps(tmp_path / "run", 1, 2, 4, keep=3)
    other = f"{place}/other"
    save_steps(other, 3, 5, keep=7)
    for option in ((), ("--overwrite",)):
        assert ended("cp", *option, tmp_path / "run", other) == 2
        assert "is another run: its step 3 is none of the steps of" in capsys.readouterr().err
    with treering.Run(other) as run:
        assert run.steps() == [3, 5]
    save_steps(f"{place}/last", 4)
    assert ended("cp", tmp_path / "run", f"{place}/last") == 2
    assert "is another step" in capsys.readouterr().err
    with treering.Run(f"{place}/last") as run:
        assert run.steps() == [4]  # not even the steps before the one that is another
    assert ended("log", other) == 0
    assert "KeepLast(7)" in capsys.readouterr().out
    assert ended("cp", "--overwrite", tmp_path / "run", f"{place}/last") == 0
    assert treering.load(f"{place}/last/step_00000004")["of"] == str(tmp_path / "run")


def test_a_copy_takes_what_its_run_saved_since_also_when_that_removed_the_rest(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path / "run", 1, 2, 3, keep=2)
    assert ended("cp", tmp_path / "run", f"{place}/copy") == 0
    save_steps(tmp_path / "run", 4, keep=2)
    monkeypatch.chdir(tmp_path)  # by another spelling of its path
    assert ended("cp", "run", f"{place}/copy") == 0
    save_steps(tmp_path / "run", 5, 6, keep=2)
    assert ended("cp", "run", f"{place}/copy") == 0
    with treering.Run(f"{place}/copy") as run:
        assert run.steps() == [2, 3, 4, 5, 6]
    treering.Run("run").delete(6)
    with pytest.raises(ExistsError, match="has step 6, and 'run' has saved an earlier one since, or lost it"):
        copy_path("run", f"{place}/copy", overwrite=True)
    save_steps(f"{place}/copy", 7)  # it goes its own way
    save_steps(tmp_path / "run", 8, keep=2)
    assert ended("cp", "run", f"{place}/copy") == 2


def test_a_checkpoint_that_goes_while_it_is_copied_is_busy(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    source: Any = treering.bucket(bucket) / "run" / "step_00000001"
    treering.save(source, TREE)

    def lose(request: Request) -> Answer | None:
        if not isinstance(request, Get) or not request.name.endswith(".safetensors"):
            return None
        bucket.meet = lambda _: None
        answer = bucket.answer(request)  # of the first bytes of the file, which is longer
        with treering.Run(treering.bucket(bucket) / "run", keep=treering.KeepLast(1)) as run:
            run.save(2, {"w": 1})
        bucket.answer(Delete((request.name,)))
        return answer

    bucket.meet = lose
    with pytest.raises(BusyError, match="removed while it was being copied"):
        copy_path(source, str(tmp_path / "copy"), overwrite=False)
    assert not (tmp_path / "copy").exists()
    with pytest.raises(NotFoundError):
        copy_path(source, str(tmp_path / "copy"), overwrite=False)


def test_from_a_web_server(tmp_path: Path) -> None:
    treering.save(tmp_path / "a", TREE)
    with serving(tmp_path) as files:
        assert ended("cp", f"{files.url}/a", tmp_path / "b") == 0
        assert ended("cp", tmp_path / "a", f"{files.url}/b") == 2
    assert_same(tmp_path / "a", tmp_path / "b")


def test_a_leaves_directory_is_not_copied(tmp_path: Path) -> None:
    treering.leaves.tree_serialize_leaves(tmp_path / "leaves", {"w": TREE["w"]})
    with pytest.raises(UnsupportedError, match="leaves directory"):
        copy_path(str(tmp_path / "leaves"), str(tmp_path / "b"), overwrite=False)
