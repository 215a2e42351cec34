"""Every public function on a bucket: a bucket in memory behind the URL of a real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests.buckets import MemoryBucket, forget, lead_to
from tests.command import ended
from treering import serialization
from treering.errors import ExistsError, FormatError, NotFoundError
from treering.leaves import tree_serialize_leaves

TREE = {"w": np.arange(30, dtype=np.float32).reshape(3, 10), "step": 7}


@pytest.fixture
def bucket() -> Iterator[MemoryBucket]:
    bucket = MemoryBucket()
    lead_to(bucket)
    yield bucket
    forget(bucket)


@pytest.fixture
def url(bucket: MemoryBucket) -> str:
    return bucket.shown


def assert_tree(found: Any, step: int = 7) -> None:
    assert found["step"] == step
    np.testing.assert_array_equal(found["w"], TREE["w"])


class PathOf:
    """A path object of another library."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __fspath__(self) -> str:
        return self.text


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "below", ["ckpt", "a/b/ckpt", "a b", "100%", "a%20b", "a#b", "a+b", "a?b=c", "gr\u00f6\u00dfe", "ckpt/", "", "/"]
)
def test_a_checkpoint_comes_back_from_every_place(below: str, url: str, bucket: MemoryBucket) -> None:
    path = f"{url}/{below}"
    treering.save(path, TREE)
    prefix = below.strip("/")
    assert all(name.startswith(f"{prefix}/" if prefix else "") for name in bucket.names())
    assert f"{prefix}/treering.json".removeprefix("/") in bucket.names()
    assert_tree(treering.load(path))
    with pytest.raises(ExistsError):
        treering.save(path, TREE)
    treering.save(path, TREE | {"step": 8}, overwrite=True)
    assert_tree(treering.load(path), 8)
    assert treering.verify(path).ok


@pytest.mark.parametrize("kind", [str, PathOf, Path, treering.bucket], ids=["str", "fspath", "pathlib", "bucket"])
def test_every_kind_of_path(kind: Callable[[str], Any], url: str, bucket: MemoryBucket) -> None:
    treering.save(kind(f"{url}/runs/a"), TREE)
    assert_tree(treering.load(kind(f"{url}/runs/a")))
    assert "runs/a/treering.json" in bucket.names()


def test_epath(url: str) -> None:
    epath = pytest.importorskip("etils.epath")
    treering.save(epath.Path(url) / "a", TREE)
    assert_tree(treering.load(epath.Path(url) / "a"))


def test_an_object_with_the_name_of_the_place_and_one_that_stands_for_a_folder(url: str, bucket: MemoryBucket) -> None:
    bucket.put("a/ckpt", b"of somebody")
    bucket.put("a/ckpt/", b"")
    bucket.put("a/", b"")
    treering.save(f"{url}/a/ckpt", TREE)
    assert_tree(treering.load(f"{url}/a/ckpt"))
    assert treering.verify(f"{url}/a/ckpt").ok
    assert bucket.data("a/ckpt") == b"of somebody"


def test_each_folder_may_have_an_empty_object_of_its_name(url: str, bucket: MemoryBucket) -> None:
    for name in ("ckpt", "run", "run/step_00000001", "leaves", "nothing"):
        bucket.put(name, b"")
    treering.save(f"{url}/ckpt", TREE)
    with treering.Run(f"{url}/run") as run:
        run.save(1, TREE)
    tree_serialize_leaves(f"{url}/leaves", TREE)
    for name in ("ckpt", "run", "leaves"):
        assert_tree(treering.load(f"{url}/{name}"))
        assert treering.verify(f"{url}/{name}").ok
        assert ended("doctor", f"{url}/{name}") == 0
    assert ended("log", f"{url}/run") == 0
    with pytest.raises(FormatError, match="it is empty"):
        treering.load(f"{url}/nothing")


def test_the_functions_of_checkpoints(url: str, tmp_path: Path) -> None:
    path = f"{url}/ckpt"
    treering.save_async(path, TREE).result()
    with treering.open(path) as checkpoint:
        assert checkpoint["w"][1:2].tolist() == TREE["w"][1:2].tolist()  # type: ignore[index]
    treering.save(tmp_path / "ckpt", TREE | {"step": 8})
    assert len(treering.diff(path, tmp_path / "ckpt", values=True).differences) == 1
    assert treering.inspect(path).path == path
    assert treering.load(path, only="step") == {"step": 7}


@pytest.mark.parametrize("suffix", [".msgpack", ".safetensors"])
def test_single_files(suffix: str, url: str, bucket: MemoryBucket) -> None:
    path, tree = f"{url}/a/state{suffix}", {"w": TREE["w"]}
    treering.save(path, tree)
    assert bucket.names() == [f"a/state{suffix}"]
    with pytest.raises(ExistsError):
        treering.save(path, tree)
    treering.save(path, tree, overwrite=True)
    np.testing.assert_array_equal(treering.load(path)["w"], TREE["w"])
    assert treering.verify(path).ok
    assert treering.inspect(path).nbytes > 120


def test_files_of_the_serialization_door(url: str, bucket: MemoryBucket) -> None:
    serialization.save_to_file(TREE, f"{url}/state")
    assert bucket.names() == ["state"]
    assert_tree(serialization.load_from_file(TREE, f"{url}/state"))


def test_a_run(url: str, tmp_path: Path) -> None:
    with treering.Run(f"{url}/run") as run:
        for step in range(1, 5):
            run.save(step, TREE | {"step": step}, metrics={"loss": abs(step - 2)})
        run.wait()
        assert run.steps() == [1, 2, 3, 4]
        assert run.best("loss") == 2
        found, tree = run.load_or_init(lambda: TREE)
        assert found == 4
        assert_tree(tree, 4)
        run.branch(3, f"{url}/branch")
        run.branch(3, tmp_path / "branch")
    with treering.Run(tmp_path / "branch") as run:
        assert_tree(run.load(), 3)
        run.branch(3, f"{url}/back")
    for name in ("branch", "back"):
        with treering.Run(f"{url}/{name}") as run:
            assert run.steps() == [3]
            assert_tree(run.load(), 3)


VERBS = {
    "ls URL/ckpt": 0,
    "ls URL/run": 0,
    "inspect URL/ckpt": 0,
    "inspect URL/run": 0,
    "inspect URL/a.safetensors": 0,
    "verify URL/ckpt": 0,
    "verify URL/run": 0,
    "du URL/ckpt": 0,
    "cat URL/ckpt w[0,:2]": 0,
    "diff URL/ckpt URL/run": 0,
    "doctor URL/ckpt": 0,
    "doctor URL/run": 0,
    "log URL/run": 0,
    "gc URL/run --keep-last 1": 0,
    "ls URL/nothing": 2,
    "ls URL": 2,
}


def test_every_verb(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    treering.save(f"{url}/ckpt", TREE)
    treering.save(f"{url}/a.safetensors", {"w": TREE["w"]})
    with treering.Run(f"{url}/run") as run:
        run.save(1, TREE)
    assert {verb: ended(*verb.replace("URL", url).split()) for verb in VERBS} == VERBS
    said = capsys.readouterr()
    assert url in said.out
    assert f"{url.replace('//', '/')}/" not in said.out + said.err


def test_what_is_not_there(url: str) -> None:
    treering.save(f"{url}/ckpt", TREE)
    with pytest.raises(NotFoundError, match=r"did you mean 's3://tests-[0-9-]*/ckpt'"):
        treering.load(f"{url}/ckptt")


def test_leaves_directories(url: str) -> None:
    treering.leaves.tree_serialize_leaves(f"{url}/leaves", TREE, prefix="model")
    assert list(treering.load(f"{url}/leaves")) == ["model"]
    assert treering.leaves.tree_deserialize_leaves(f"{url}/leaves", prefix="model")["step"] == 7


def test_few_requests(url: str, bucket: MemoryBucket) -> None:
    treering.save(f"{url}/ckpt", TREE)
    asked = bucket.requests
    asked.clear()
    with treering.open(f"{url}/ckpt") as checkpoint:
        assert checkpoint["step"] == 7
    assert len(asked) == 3
    asked.clear()
    treering.inspect(f"{url}/ckpt")
    assert len(asked) <= 4
    for path, overwrite in (("new", False), ("new", True)):
        asked.clear()
        treering.save(f"{url}/{path}", TREE, overwrite=overwrite)
        assert len(asked) == 7, asked
