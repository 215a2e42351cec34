"""A bit that changes on the way from a bucket is no damage: what came is asked for once more."""

import numpy as np
import pytest

import treering
from tests.buckets import Answer, Get, MemoryBucket, Range, Request
from treering.errors import CorruptError


class FlippingBucket(MemoryBucket):
    """Flips a bit in the middle of what it gives of objects with such names, so many times."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.ending = ending
        self.times = 0

    def answer(self, request: Request) -> Answer:
        answer = super().answer(request)
        if not isinstance(request, Get) or not request.name.endswith(self.ending) or not self.times:
            return answer
        data = bytearray(answer.data)
        self._flip(data)
        return Answer(answer.status, bytes(data), answer.found)

    def read_range(self, request: Range) -> Answer:
        answer = super().read_range(request)
        if request.name.endswith(self.ending) and self.times:
            self._flip(request.span.targets[0][1])
        return answer

    def _flip(self, data: bytearray | memoryview) -> None:
        self.times -= 1
        data[len(data) // 2] ^= 1


@pytest.mark.parametrize(("times", "whole"), [(0, True), (1, True), (2, False)])
@pytest.mark.parametrize("ending", ["treering.json", ".safetensors"])
def test_what_came_is_read_once_more(ending: str, *, times: int, whole: bool) -> None:
    bucket, array = FlippingBucket(ending), np.arange(4000)
    path = treering.bucket(bucket) / "a"
    treering.save(path, {"w": array})
    bucket.times = times
    if whole:
        assert np.array_equal(treering.load(path)["w"], array)
    else:
        with pytest.raises(CorruptError):
            treering.load(path)
    assert bucket.times == 0
