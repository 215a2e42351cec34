"""Objects are read with few requests, and what is read is of one version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import pytest

from tests.buckets import MemoryBucket
from treering._store.objects.reading import FIRST_BYTES, ObjectReader, plan_spans
from treering._store.objects.requests import Answer, Delete, Get, ObjectVersion, Put, Request, Status
from treering.errors import CorruptError, DataFileMissingError, NotFoundError, StoreError

MIB = 1 << 20


class CountedBucket(MemoryBucket):
    """A bucket that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[int] = []

    def read_into(self, name: str, version: ObjectVersion, jobs: Sequence[tuple[int, memoryview]]) -> None:
        self.ranges += [offset for offset, _ in jobs]
        super().read_into(name, version, jobs)


def open_object(data: bytes) -> tuple[CountedBucket, ObjectReader]:
    bucket = CountedBucket()
    bucket.put("a", data)
    return bucket, ObjectReader(bucket, "a", PurePath("a"))


def test_a_small_object_is_one_request() -> None:
    data = random.Random(0).randbytes(FIRST_BYTES)
    bucket, file = open_object(data)
    room = bytearray(1000)
    assert file.read(0, len(data)) == data == file.map()
    file.read_into([(7, memoryview(room)[:400]), (len(data) - 600, memoryview(room)[400:])])
    assert bytes(room) == data[7:407] + data[-600:]
    assert (bucket.requests, bucket.ranges) == ([Get("a", FIRST_BYTES)], [])


def test_only_what_is_not_known_yet_is_asked_for() -> None:
    data = random.Random(1).randbytes(FIRST_BYTES + 5000)
    bucket, file = open_object(data)
    assert file.size == len(data)
    assert file.read(FIRST_BYTES - 10, 100) == data[FIRST_BYTES - 10 :][:100]
    assert file.read(FIRST_BYTES + 10, 100) == data[FIRST_BYTES + 10 :][:100]
    assert file.map() == data
    assert bucket.ranges == [FIRST_BYTES]
    room: Any = memoryview(bytearray(8 * 3)).cast("d")
    file.read_into([(FIRST_BYTES - 8, room)])
    assert room.tobytes() == data[FIRST_BYTES - 8 :][:24]


@pytest.mark.parametrize("change", [Put("a", bytes(FIRST_BYTES + 9)), Delete(("a",))])
def test_what_was_replaced_is_opened_anew_by_the_caller(change: Request) -> None:
    bucket, file = open_object(bytes(FIRST_BYTES + 9))
    bucket.perform(change)
    assert file.read(0, 10) == bytes(10)
    with pytest.raises(DataFileMissingError, match="'a' was replaced or removed while it was read") as caught:
        file.read(FIRST_BYTES, 9)
    assert (caught.value.name, caught.value.filename) == ("a", "a")


def test_what_is_not_there_or_denied_is_named() -> None:
    bucket, file = open_object(b"")
    with pytest.raises(CorruptError, match="is empty"):
        file.map()
    with pytest.raises(NotFoundError, match="could not read 'runs/b'"):
        ObjectReader(bucket, "b", PurePath("runs/b"))
    silent = Answer(Status.NO_ANSWER, reason="503")
    bucket.meet = lambda _: silent
    with pytest.raises(StoreError, match="503"):
        ObjectReader(bucket, "a", PurePath("a"))


def test_near_ranges_travel_together_and_large_ones_in_pieces() -> None:
    room = memoryview(bytearray(200 * MIB))
    near = [(offset, room[:1000]) for offset in range(0, 3 * MIB, MIB // 2)]
    assert [(span.start, span.stop) for span in plan_spans(near)] == [(0, 5 * MIB // 2 + 1000)]
    far = [(offset, room[:1000]) for offset in range(0, 9 * MIB, 3 * MIB)]
    assert len(plan_spans(far)) == 3
    whole = plan_spans([(5, room)])
    assert len(whole) == 13
    assert max(span.stop - span.start for span in whole) == 16 * MIB
    assert (whole[0].start, whole[-1].stop) == (5, 5 + 200 * MIB)
    # Few bytes are spread over all connections.
    assert len(plan_spans([(0, room[: 80 * MIB])])) == 8
    assert plan_spans([]) == plan_spans([(3, room[:0])]) == []
    # However they are cut: no more requests than there are 8 MiB.
    for size in (5, 6, 7, 11):
        assert len(plan_spans([(start * MIB, room[: size * MIB]) for start in range(0, 77, size)])) <= 77 // 8 + 1
    for size in range(8, 60):
        assert len(plan_spans([(0, room[: size * MIB])])) <= size // 8


def test_spans_fill_what_was_asked_for() -> None:
    draw = random.Random(2)
    data = draw.randbytes(3 * MIB)
    for _ in range(20):
        jobs = []
        for _ in range(draw.randrange(1, 12)):
            offset = draw.randrange(len(data))
            # Some overlap.
            jobs.append((offset, memoryview(bytearray(draw.randrange(min(400_000, len(data) - offset) + 1)))))
        for span in plan_spans(jobs):
            position = span.start
            while position < span.stop:
                stop = min(span.stop, position + draw.randrange(1, 300_000))
                span.fill(position, memoryview(data)[position:stop])
                position = stop
        for offset, buffer in jobs:
            assert buffer == data[offset : offset + len(buffer)]
