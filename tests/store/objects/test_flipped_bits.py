"""A bit that changes on the way from a bucket is no damage: what came is asked for once more."""

from pathlib import PurePosixPath

import pytest

from tests.buckets import MemoryBucket
from treering._codec.key_document import placeholder
from treering._store.objects.reading import FIRST_BYTES, ObjectReader
from treering._store.objects.requests import Answer, Get, Request
from treering._store.objects.store import ObjectStore


class FlippingBucket(MemoryBucket):
    """Flips a bit in the middle of what it gives, so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def answer(self, request: Request) -> Answer:
        answer = super().answer(request)
        if isinstance(request, Get) and self.times:
            self.times -= 1
            middle = len(answer.data) // 2
            data = answer.data[:middle] + bytes([answer.data[middle] ^ 1]) + answer.data[middle + 1 :]
            return Answer(answer.status, data, answer.found)
        return answer


@pytest.mark.parametrize(("times", "whole"), [(0, True), (1, True), (2, False)])
def test_a_document_is_read_once_more(*, times: int, whole: bool) -> None:
    bucket, data = FlippingBucket(times), placeholder()
    bucket.put("a/treering.json", data)
    found = ObjectStore(bucket, "a/", PurePosixPath("a")).read("treering.json")
    assert found is not None
    assert (found.data == data) is whole
    assert bucket.times == 0


def test_the_first_bytes_are_fetched_anew() -> None:
    bucket, data = FlippingBucket(1), bytes(range(200))
    bucket.put("a", data)
    assert len(data) < FIRST_BYTES
    with ObjectReader(bucket, "a", PurePosixPath("a")) as file:
        assert file.read(0, 200) != data
        room = bytearray(150)
        assert file.refetch([(50, memoryview(room))])
        assert bytes(room) == data[50:]
