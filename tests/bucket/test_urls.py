"""URLs and the environment lead to real servers, and their refusals say what is wrong."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests.buckets import without_settings
from tests.command import copy_path
from tests.stores import read_file
from torture.bucket_servers import BucketServer
from treering.errors import NotFencedWarning, StoreError, TreeringError

pytestmark = pytest.mark.bucket
TREE: dict[str, Any] = {"w": np.arange(6_000_000, dtype=np.float32), "step": 7}


@pytest.fixture(params=["seaweed", "gcs"])
def server(request: pytest.FixtureRequest) -> BucketServer:
    found: BucketServer = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def _forget_buckets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with without_settings(monkeypatch):
        yield


def enter(server: BucketServer, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    return server.url


@pytest.mark.parametrize("name", ["a b", "100%", "a%20b", "a+b", "a#b", "a?b=c", "gr\u00f6\u00dfe", "x//y/"])
def test_awkward_names(name: str, server: BucketServer, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"{enter(server, monkeypatch)}/{prefix}/{name}"
    treering.save(path, {"step": 1})
    treering.save(path, {"step": 2}, overwrite=True)
    assert treering.load(path) == {"step": 2}
    assert treering.verify(path).ok


@pytest.mark.parametrize("name", ["a.msgpack", "a.safetensors"])
def test_a_single_file_has_other_bytes_each_time(
    name: str, server: BucketServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{enter(server, monkeypatch)}/{prefix}/{name}"
    tree = {f"layer {number}": np.full(3, number, np.float32) for number in range(6)}
    found = []
    for _ in range(3):
        treering.save(path, tree, overwrite=True)
        found.append(read_file(path))
        assert treering.load(path).keys() == tree.keys()
    assert len(set(found)) == len(found)


def test_a_file_of_few_headers_is_told_where_versions_recur(
    server: BucketServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{enter(server, monkeypatch)}/{prefix}/a.msgpack"
    with pytest.warns(NotFencedWarning, match="few arrays") if path.startswith("s3:") else contextlib.nullcontext():
        treering.save(path, {"step": 1}, overwrite=True)


def test_a_single_file_tells_of_a_server_that_ignores_conditions(
    rclone: BucketServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"{enter(rclone, monkeypatch)}/{prefix}/a.safetensors"
    with pytest.warns(NotFencedWarning, match="the server does not heed conditions"):
        treering.save(path, {"w": TREE["w"][:3]}, overwrite=True)
    assert treering.load(path)["w"].tolist() == [0, 1, 2]


def test_copies(server: BucketServer, prefix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:

    url = f"{enter(server, monkeypatch)}/{prefix}"
    treering.save(tmp_path / "a", TREE)
    copy_path(str(tmp_path / "a"), f"{url}/b", overwrite=False)
    copy_path(f"{url}/b", str(tmp_path / "c"), overwrite=False)
    assert treering.diff(tmp_path / "a", tmp_path / "c", values=True).differences == ()


def test_without_the_right_to_list(seaweed: BucketServer, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{enter(seaweed.as_unlisted(), monkeypatch)}/{prefix}"
    for path in (f"{url}/a", f"{url}/a.safetensors"):
        for overwrite in (False, True):
            treering.save(path, {"w": TREE["w"][:3]}, overwrite=overwrite)
        assert treering.load(path)["w"].tolist() == [0, 1, 2]
        with pytest.raises(FileExistsError):
            treering.save(path, {"w": TREE["w"][:3]})
    with treering.Run(f"{url}/run") as run:
        for step in (1, 2):
            run.save(step, {"step": step}).result()
            assert run.load(step) == {"step": step}
            assert treering.load(f"{url}/run/step_{step:08d}") == {"step": step}
        with pytest.raises(FileExistsError):
            run.save(1, {"step": 0})
        with pytest.raises(PermissionError, match=r"s3:ListBucket.*without the right to list"):
            run.steps()
    enter(seaweed, monkeypatch)
    assert treering.Run(f"{url}/run").steps() == [1, 2]


def test_what_refuses_says_why(seaweed: BucketServer, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"{enter(seaweed, monkeypatch)}/{prefix}/a"
    treering.save(url, {"step": 1})
    for call in (
        lambda: treering.save("s3://no-such-bucket/a", {"step": 1}),
        lambda: treering.load("s3://no-such-bucket/a"),
    ):
        with pytest.raises(StoreError, match=r"s3://no-such-bucket.*does not exist.*make it first"):
            call()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    for call in (lambda: treering.save(f"{url}b", {"step": 1}), lambda: treering.load(url)):
        with pytest.raises(TreeringError, match="denies it to these credentials") as caught:
            call()
        assert isinstance(caught.value, PermissionError)
