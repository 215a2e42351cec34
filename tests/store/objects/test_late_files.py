"""A single file in a bucket whose versions say no more than the content does: a late request undoes no later save."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering
from tests import faults, limits
from tests.buckets import NO_ANSWER, Answer, MemoryBucket, ObstoreClient, Put, Request, Status
from tests.command import copy_path
from treering import serialization
from treering.errors import NotFencedWarning, StoreError

A = {f"layer {number}": np.full((2, 3), number, np.float32) for number in range(6)}
B = {name: array + 1 for name, array in A.items()}
Write = Callable[[Any, Any], None]


class Md5Bucket(MemoryBucket):
    """A bucket as S3 is without versioning: the ETag is the MD5 of the content.

    Attributes:
        held: the request that is on its way for so long that no answer to it comes.
        holds: whether the next one that puts something is held.
        heeds: whether conditions are heeded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: Put | None = None
        self.holds = False
        self.heeds = True

    def answer(self, request: Request) -> Answer:
        if isinstance(request, Put) and self.holds:
            self.holds, self.held = False, request
            return NO_ANSWER
        if isinstance(request, Put) and not self.heeds:
            request = Put(request.name, request.data)
        return super().answer(request)

    def arrive(self) -> Status:
        """Let the request arrive that was held."""
        assert self.held is not None
        return super().answer(self.held).status

    def _e_tag(self, data: bytes) -> str:
        return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def save(path: str, tree: Any) -> None:
    treering.save(path, tree, overwrite=True)


def convert(path: str, tree: Any) -> None:
    source = Path(os.environ["TREERING_SOURCES"], hashlib.md5(repr(tree).encode()).hexdigest())
    if not source.exists():
        treering.save(source, tree)
    treering.convert(source, path, overwrite=True)


def save_to_file(path: str, tree: Any) -> None:
    serialization.save_to_file(tree, path)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Md5Bucket]:
    monkeypatch.setenv("TREERING_SOURCES", str(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotFencedWarning)
        yield Md5Bucket()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.msgpack", save),
        ("a.safetensors", save),
        ("a.msgpack", convert),
        ("a.safetensors", convert),
        ("a.npz", convert),
        ("a.msgpack", save_to_file),
    ],
)
def test_a_late_request_does_not_undo_a_save_of_the_same_tree(name: str, write: Write, bucket: Md5Bucket) -> None:
    path = treering.bucket(bucket) / name
    write(path, A)
    bucket.holds = True
    write(path, B)
    write(path, A)
    assert bucket.arrive() is Status.REFUSED
    found = treering.load(path)
    assert all(np.array_equal(found[name], array) for name, array in A.items())


def test_a_copy_keeps_its_bytes_and_says_that_it_is_not_fenced(tmp_path: Path, bucket: Md5Bucket) -> None:
    treering.save(tmp_path / "a.msgpack", A)
    path: Any = treering.bucket(bucket) / "a.msgpack"
    copy_path(str(tmp_path / "a.msgpack"), path, overwrite=False)
    with pytest.warns(NotFencedWarning, match="a request of an earlier save that comes late"):
        copy_path(str(tmp_path / "a.msgpack"), path, overwrite=True)
    assert bucket._objects["a.msgpack"].data == (tmp_path / "a.msgpack").read_bytes()


@pytest.mark.parametrize("tree", [3, {}, {"w": np.zeros((300, 300), np.float32)}], ids=["int", "empty", "one array"])
def test_a_file_of_few_headers_says_that_it_is_not_fenced(tree: Any, bucket: Md5Bucket) -> None:
    path = treering.bucket(bucket) / "a.msgpack"
    treering.save(path, tree)
    with pytest.warns(NotFencedWarning, match=r"a\.msgpack: few arrays in msgpack"):
        treering.save(path, tree, overwrite=True)


def test_a_version_that_does_not_say_the_content_needs_no_nonce() -> None:
    path = treering.bucket(MemoryBucket("s3://numbered")) / "a.msgpack"
    for _ in range(2):
        treering.save(path, 3, overwrite=True)


def test_a_server_that_heeds_no_conditions_is_told(bucket: Md5Bucket) -> None:
    bucket.heeds = False
    path = treering.bucket(bucket) / "a.msgpack"
    with pytest.warns(NotFencedWarning, match="the server does not heed conditions"):
        treering.save(path, A)
    assert treering.load(path).keys() == A.keys()


def test_a_save_without_an_answer_says_that_it_may_yet_be_done(bucket: Md5Bucket) -> None:
    path = treering.bucket(bucket) / "a.msgpack"
    treering.save(path, A)
    bucket.patience = 0.0
    bucket.holds = True
    with pytest.raises(StoreError, match="may have been put, or may yet be"):
        treering.save(path, B, overwrite=True)
    treering.save(path, A, overwrite=True)
    assert bucket.arrive() is Status.REFUSED


def test_another_save_that_came_between_is_replaced_and_no_bytes_are_put_twice(
    bucket: Md5Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the first request is lost, and what it made was replaced: it is not put once more."""
    path = treering.bucket(bucket) / "a.msgpack"
    treering.save(path, A)
    bucket.holds = True

    def come_between(request: Request) -> Answer:
        answer = bucket.answer(request)
        if answer is NO_ANSWER:
            assert bucket.arrive() is Status.DONE
            bucket.meet = lambda _: None
            treering.save(path, A, overwrite=True)
        return answer

    bucket.meet = come_between
    with pytest.raises(StoreError, match="may have been put, or may yet be"):
        treering.save(path, B, overwrite=True)
    assert np.array_equal(treering.load(path)["layer 1"], A["layer 1"])


def test_a_save_that_is_refused_tries_again_on_what_is_there(bucket: Md5Bucket) -> None:
    path = treering.bucket(bucket) / "a.msgpack"
    treering.save(path, A)

    def come_between(request: Request) -> None:
        if isinstance(request, Put):
            bucket.meet = lambda _: None
            treering.save(path, A, overwrite=True)

    bucket.meet = come_between
    treering.save(path, B, overwrite=True)
    assert np.array_equal(treering.load(path)["layer 1"], B["layer 1"])


def test_parts_that_may_yet_be_completed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    from obstore.exceptions import GenericError
    from obstore.store import MemoryStore

    limits.lower(monkeypatch, whole_object=100)
    path = treering.bucket(ObstoreClient(MemoryStore(), "s3://late-parts")) / "a.msgpack"

    faults.fail(
        monkeypatch,
        obstore,
        "put",
        GenericError("Generic S3 error: Error performing POST - status code: 500 Internal Server Error"),
    )
    with pytest.raises(StoreError, match="if its upload was not aborted, may yet be"):
        treering.save(path, A)
