"""How many requests saves and loads in a bucket take, and how many at once."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import treering
from tests.buckets import Answer, MemoryBucket, Range

TREE = {f"leaf {number}": np.full(40_000, float(number)) for number in range(12)}


class SlowBucket(MemoryBucket):
    """A bucket that counts what it is asked, and takes its time for ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._now = 0

    def read_range(self, request: Range) -> Answer:
        with self._counting:
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(0.01)
        answer = super().read_range(request)
        with self._counting:
            self._now -= 1
        return answer


@pytest.fixture
def bucket() -> tuple[SlowBucket, Any]:
    bucket = SlowBucket()
    path = treering.bucket(bucket) / "a"
    treering.save(path, TREE)
    bucket.asked.clear()
    return bucket, path


def test_an_overwrite_takes_few_requests(bucket: tuple[SlowBucket, Any]) -> None:
    counted, path = bucket
    treering.save(path, TREE, overwrite=True)
    assert counted.asked == ["List", "Head", "Get", "Put", "Put", "Put", "Delete"]
    counted.asked.clear()
    # What the second one supersedes has a time: that of the bucket is looked at once.
    treering.save(path, TREE, overwrite=True)
    assert counted.asked == ["List", "Head", "Get", "Put", "Head", "Put", "Put", "Delete"]


def test_a_first_save_takes_few_requests(bucket: tuple[SlowBucket, Any]) -> None:
    counted, path = bucket
    treering.save(path.parent / "b", TREE)
    assert counted.asked == ["List", "Head", "Put", "Put", "Put", "Put", "Delete"]


def test_one_leaf_is_read_with_four_requests(bucket: tuple[SlowBucket, Any]) -> None:
    counted, path = bucket
    with treering.open(path) as tree:
        assert np.array_equal(tree["leaf 11"][...], TREE["leaf 11"])
    assert counted.asked == ["Head", "Get", "Get", "Range"]


def test_a_load_reads_many_ranges_at_once(bucket: tuple[SlowBucket, Any]) -> None:
    counted, path = bucket
    tree = {f"leaf {number}": np.full(1_000_000, float(number)) for number in range(12)}
    treering.save(path.parent / "large", tree)
    counted.asked.clear()
    found = treering.load(path.parent / "large")
    assert all(np.array_equal(found[name], leaf) for name, leaf in tree.items())
    assert 4 <= counted.most <= 8
    assert len(counted.asked) <= 3 + 12
    counted.asked.clear()
    found = treering.load(path)
    assert all(np.array_equal(found[name], leaf) for name, leaf in TREE.items())
    assert counted.asked == ["Head", "Get", "Get", "Range"]
