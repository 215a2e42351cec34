"""Checkpoints and files on web servers: read by ranges, never written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests import limits, warm
from tests.command import ended
from tests.store.objects.web_server import WebFiles, serving
from treering.errors import NotFoundError, StoreError, TreeringError, UnsupportedError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves
from treering.serialization import load_from_file, save_to_file

TREE: dict[str, Any] = {"w": np.arange(200_000, dtype=np.float32), "b": {"c": np.ones((3, 4), np.int8)}, "step": 7}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebFiles]:
    limits.lower(monkeypatch, patience_with_web_servers=1.0, longest_pause=0.01)
    with serving(tmp_path) as files:
        yield files


def assert_tree(tree: Any) -> None:
    assert isinstance(tree, dict)
    assert tree["step"] == 7
    np.testing.assert_array_equal(tree["w"], TREE["w"])
    np.testing.assert_array_equal(tree["b"]["c"], TREE["b"]["c"])


def test_a_checkpoint_is_loaded_by_ranges(files: WebFiles, tmp_path: Path) -> None:
    treering.save(tmp_path / "runs" / "my ckpt", TREE)
    url = f"{files.url}/runs/my%20ckpt"
    assert_tree(treering.load(url))
    assert treering.load(f"{url}/", at="step") == 7
    assert all(wanted is not None for _, wanted in files.asked)
    assert treering.verify(url).ok
    assert treering.diff(url, tmp_path / "runs" / "my ckpt", values=True).differences == ()
    assert treering.inspect(url).nbytes == treering.inspect(tmp_path / "runs" / "my ckpt").nbytes


def test_names_below_a_url_are_no_part_of_it(files: WebFiles, tmp_path: Path) -> None:
    tree = {
        name: np.full(3, number) for number, name in enumerate(("a?b", "50%", "a%20b", "c:d", "e#f", "g h", "\u00fc"))
    }
    tree_serialize_leaves(tmp_path / "my leaves", tree)
    found = tree_deserialize_leaves(f"{files.url}/my%20leaves")
    assert {name: leaf.tolist() for name, leaf in found.items()} == {name: tree[name].tolist() for name in tree}


def test_the_web_is_read_without_obstore(files: WebFiles, tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"step": 7})
    program = "import sys; sys.modules['obstore'] = None; import treering; treering.load(sys.argv[1])"
    done = warm.run("-c", program, f"{files.url}/ckpt")
    assert done.returncode == 0, done.stderr


def test_a_lazy_leaf_costs_few_requests(files: WebFiles, tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", {"w": np.zeros((1000, 1000), np.float32), "b": np.ones(3)})
    with treering.open(f"{files.url}/ckpt") as checkpoint:
        assert checkpoint["b"][:].tolist() == [1, 1, 1]
    assert len(files.asked) <= 4


@pytest.mark.parametrize("name", ["a.safetensors", "a.msgpack"])
def test_single_files(name: str, files: WebFiles, tmp_path: Path) -> None:
    tree = {"w": TREE["w"], "b": np.ones(3, np.int16)}
    treering.save(str(tmp_path / name), tree)
    loaded = treering.load(f"{files.url}/{name}")
    np.testing.assert_array_equal(loaded["w"], tree["w"])
    assert treering.verify(f"{files.url}/{name}").ok
    assert ended("ls", f"{files.url}/{name}") == 0


def test_files_of_the_serialization_door(files: WebFiles, tmp_path: Path) -> None:
    save_to_file({"w": TREE["w"]}, tmp_path / "state")
    np.testing.assert_array_equal(load_from_file({"w": TREE["w"]}, f"{files.url}/state")["w"], TREE["w"])
    with pytest.raises(UnsupportedError, match="read-only"):
        save_to_file({"w": TREE["w"]}, f"{files.url}/other")


def test_a_presigned_url_is_of_one_file(files: WebFiles, tmp_path: Path) -> None:
    treering.save(str(tmp_path / "a.safetensors"), {"w": TREE["w"]})
    treering.save(tmp_path / "ckpt", TREE)
    files.secret = "X-Amz-Credential=K%2F20260101&X-Amz-Signature=ab.cd"
    loaded = treering.load(f"{files.url}/a.safetensors?X-Amz-Credential=K/20260101&X-Amz-Signature=ab.cd")
    np.testing.assert_array_equal(loaded["w"], TREE["w"])
    with pytest.raises(TreeringError, match="never of a folder") as caught:
        treering.load(f"{files.url}/ckpt")
    assert isinstance(caught.value, PermissionError)
    with pytest.raises(NotFoundError, match="a presigned URL is of one file"):
        treering.load(f"{files.url}/ckpt?{files.secret}")


def test_nothing_is_written(files: WebFiles, tmp_path: Path) -> None:
    for save in (
        lambda: treering.save(f"{files.url}/new", TREE),
        lambda: treering.save(f"{files.url}/new.safetensors", {"w": TREE["w"]}),
        lambda: treering.save_async(f"{files.url}/new", TREE),
        lambda: treering.Run(f"{files.url}/new"),
    ):
        with pytest.raises(UnsupportedError, match=r"cannot be written.*s3://"):
            save()
    assert files.asked == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there(files: WebFiles) -> None:
    with pytest.raises(NotFoundError, match=r"'.*/nothing'"):
        treering.load(f"{files.url}/nothing")


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, patience_with_web_servers=0.3)
    with serving(Path("/nonexistent")) as files:
        gone = files.url
    with pytest.raises(StoreError, match="does not answer"):
        treering.load(f"{gone}/a.msgpack")


def test_passing_troubles_are_passed_over(files: WebFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    treering.save(tmp_path / "ckpt", TREE)
    files.refusals = [503]
    files.cut = 2
    assert_tree(treering.load(f"{files.url}/ckpt"))
    files.cut = 1_000_000
    limits.lower(monkeypatch, patience_with_web_servers=0.3)
    with pytest.raises(StoreError, match="cut its answer short"):
        treering.load(f"{files.url}/ckpt")


def test_a_server_without_ranges_is_refused_for_what_is_large(files: WebFiles, tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", TREE)
    treering.save(tmp_path / "small", {"step": 7})
    files.ranges = False
    assert treering.load(f"{files.url}/small") == {"step": 7}
    with pytest.raises(StoreError, match="ignores ranges"):
        treering.load(f"{files.url}/ckpt")


@pytest.mark.parametrize("claims", [(1, 0), (0, -1), (0, 1), (1, 1)])
def test_an_answer_with_another_range_is_refused(claims: tuple[int, int], files: WebFiles, tmp_path: Path) -> None:
    treering.save(tmp_path / "ckpt", TREE)
    files.claims = claims
    with pytest.raises(StoreError, match="ignores ranges"):
        treering.load(f"{files.url}/ckpt")


def test_a_file_that_is_replaced_meanwhile_is_never_mixed(files: WebFiles, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    treering.save(str(path), {"w": np.zeros(500_000, np.float32)})
    with treering.open(f"{files.url}/a.safetensors") as checkpoint:
        treering.save(str(path), {"w": np.ones(500_000, np.float32)}, overwrite=True)
        with pytest.raises(TreeringError, match="replaced or removed"):
            checkpoint["w"][:]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://example.com/a.msgpack", "not encrypted"),
        ("https://key:secret@example.com/a", "login"),
        ("https://example.com/a#b", "without '#'"),
        ("https://example.com/a//b", "empty part"),
        ("https:///a", "no URL of a file"),
    ],
)
def test_urls_that_are_refused(url: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why) as caught:
        treering.load(url)
    assert "secret" not in str(caught.value)


def test_no_message_has_the_signature_of_a_url(files: WebFiles, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "treering")
    with pytest.raises(NotFoundError) as caught:
        treering.load(f"{files.url}/a.safetensors?X-Amz-Signature=1f")
    with pytest.raises(UnsupportedError) as refused:
        treering.load("http://host/a.safetensors?X-Amz-Signature=1f")
    texts = [str(caught.value), str(refused.value), *caplog.messages]
    assert len(texts) > 2
    assert all("a.safetensors?..." in text and "1f" not in text for text in texts)


def test_the_top_of_a_server_is_named_once(files: WebFiles) -> None:
    for url in (files.url, f"{files.url}/"):
        with pytest.raises(
            NotFoundError, match=f"there is no checkpoint at the top of '{files.url}'; nothing is listed"
        ):
            treering.load(url)
