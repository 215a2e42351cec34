"""Which bucket and key each URL means, and which are refused, with what to write instead."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from pathlib import Path, PurePath

import pytest

import treering
from tests.buckets import MemoryBucket, bucket_path, use_for_memory
from tests.stores import located
from treering.errors import UnsupportedError

MEANT = {
    "s3://b": ("s3://b", ""),
    "s3://b/": ("s3://b", ""),
    "s3://b//": ("s3://b", ""),
    "s3://b/x": ("s3://b", "x"),
    "s3://b/x/": ("s3://b", "x"),
    "s3://b//x//y//": ("s3://b", "x/y"),
    "s3://b/./x/.": ("s3://b", "x"),
    "S3://b/X": ("s3://b", "X"),
    "s3a://b/x": ("s3://b", "x"),
    "gs://b_1/x": ("gs://b_1", "x"),
    "gcs://b/x": ("gs://b", "x"),
    "az://$web/x": ("az://$web", "x"),
    "abfs://c/x": ("az://c", "x"),
    "abfss://c@acc.dfs.core.windows.net/x": ("abfss://c@acc.dfs.core.windows.net", "x"),
    "s3://b/a b/c": ("s3://b", "a b/c"),
    "s3://b/a%20b": ("s3://b", "a%20b"),
    "s3://b/a+b": ("s3://b", "a+b"),
    "s3://b/a#b": ("s3://b", "a#b"),
    "s3://b/a?versionId=1": ("s3://b", "a?versionId=1"),
    "s3://b/gr\u00f6\u00dfe": ("s3://b", "gr\u00f6\u00dfe"),
    "s3://b/a:/c": ("s3://b", "a:/c"),
    "s3://b/~x": ("s3://b", "~x"),
    "s3://b/a\\b": ("s3://b", "a\\b"),
}
REFUSED = {
    "s3://": "names no bucket; a URL is s3://BUCKET/PATH",
    "s3:///x": "names no bucket",
    "s3://my bucket/x": "'my bucket' is no name of one",
    "s3://b?x=1/y": "names no bucket",
    "s3://key:secret@b/x": "credentials come from the environment",
    "s3://b/a/../c": "'..'",
    "s3://b/a\nb": "control character",
    "abfss://c/x": "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
    "s3n://b/x": "write s3:// instead",
    "wasbs://c@acc.blob.core.windows.net/x": "write az://CONTAINER/PATH instead",
    "hf://org/model": "snapshot_download",
    "ftp://host/x": "s3://, gs://, az://",
}


@pytest.mark.parametrize("url", MEANT)
def test_a_url_means_a_bucket_and_a_key(url: str) -> None:
    path = bucket_path(url)
    assert (path.bucket, path.key) == MEANT[url]
    assert os.fspath(path) == str(path) == "/".join(filter(None, MEANT[url]))
    assert bucket_path(str(path)) == bucket_path(path) == path


@pytest.mark.parametrize("url", REFUSED)
def test_a_url_that_means_nothing_is_refused(url: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        bucket_path(url)
    assert REFUSED[url] in str(caught.value)
    assert "secret" not in str(caught.value)


def test_paths_go_down_and_up_as_those_on_disk_do() -> None:
    path = bucket_path("s3://b/runs") / "a" / "step_00000001"
    assert (str(path), path.name, path.suffix) == ("s3://b/runs/a/step_00000001", "step_00000001", "")
    assert [str(above) for above in path.parents] == ["s3://b/runs/a", "s3://b/runs", "s3://b"]
    assert path.parents[-1].parent == bucket_path("s3://b")
    assert str(path.with_name("other")) == "s3://b/runs/a/other"
    assert bucket_path("s3://b/x.safetensors").suffix == ".safetensors"
    assert bucket_path("s3://b.safetensors").suffix == ""


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda path: pickle.loads(pickle.dumps(path))])
def test_paths_survive_copies(again: Callable[[PurePath], PurePath]) -> None:
    path = bucket_path("gs://b/x/y z")
    assert again(path) == path
    assert type(again(path)) is type(path)
    assert str(again(path)) == str(path)


def test_a_pathlib_path_of_a_url_means_the_same() -> None:
    assert bucket_path(Path("s3://b/x/y")) == bucket_path("s3://b/x/y")


NO_URLS = ("runs/a", "C:/a", "a:b", "/s3://b", "./s3://b", "")


def test_all_of_the_memory_is_a_place_and_no_folder_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use_for_memory(monkeypatch, MemoryBucket("memory://"))
    root = located("memory://")
    assert os.fspath(root) == os.fspath((root / "a").parent) == "memory://"
    assert located(os.fspath(root)) == root
    treering.save("memory://", {"w": 1})
    assert treering.load("memory://") == {"w": 1}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("url", ["memory://b/x/../ck", "memory://b/a\nb", "memory://b/.."])
def test_the_memory_refuses_what_buckets_do(url: str) -> None:
    with pytest.raises(UnsupportedError, match=r"'\.\.' in it|control character"):
        treering.save(url, {"a": 1})
    with pytest.raises(UnsupportedError, match=r"'\.\.' in it|control character"):
        treering.load(url)


def test_schemes() -> None:
    assert str(located("s3://b")) == "s3://b"
    assert located("FILE:/a") == Path("/a")
    assert [located(text).absolute() for text in NO_URLS] == [Path(text).absolute() for text in NO_URLS]


@pytest.mark.parametrize(("text", "meant"), [("s3//bucket/a", "s3://bucket/a"), ("gs:bucket/a", "gs://bucket/a")])
def test_what_is_almost_a_url_makes_no_folder(
    text: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for call in (lambda: treering.save(text, {"a": 1}), lambda: treering.load(text)):
        with pytest.raises(UnsupportedError, match=f"write '{meant}'"):
            call()
    assert list(tmp_path.iterdir()) == []
    Path("s3").mkdir()
    treering.save("s3//a", {"a": 1})
    assert treering.load("s3/a") == {"a": 1}
