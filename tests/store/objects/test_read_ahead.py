"""Bytes that are fetched ahead: the right ones, few requests for reads that follow each other, little for others."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import PurePath

import pytest

from tests.buckets import MemoryBucket
from treering._store.objects import reading
from treering._store.objects.reading import ObjectReader

MIB = 1 << 20
DATA = random.Random(3).randbytes(40 * MIB)
KIB = 1 << 10


@pytest.fixture
def bucket() -> MemoryBucket:
    bucket = MemoryBucket()
    bucket.put("a", DATA)
    bucket.start_over()
    return bucket


@pytest.fixture
def opened(bucket: MemoryBucket) -> Iterator[ObjectReader]:
    with ObjectReader(bucket, "a", PurePath("a")) as file:
        yield file


@pytest.mark.parametrize("count", [100, 16 * KIB, 300 * KIB, 3 * MIB])
@pytest.mark.parametrize("gap", [0, 700])
def test_reads_that_follow_each_other(bucket: MemoryBucket, opened: ObjectReader, count: int, gap: int) -> None:
    start, stop = 3 * MIB, min(39 * MIB, 3 * MIB + 4000 * (count + gap))
    for offset in range(start, stop - count, count + gap):
        assert opened.read(offset, count) == DATA[offset : offset + count]
    assert len(bucket.asked) <= (stop - start) / (8 * MIB) + 5
    assert bucket.received <= stop - start + 9 * MIB


def test_three_series_side_by_side(bucket: MemoryBucket, opened: ObjectReader) -> None:
    for number in range(400):
        for start, count in ((MIB, 20 * KIB), (16 * MIB, 5 * KIB), (30 * MIB, 100)):
            offset = start + number * count
            assert opened.read(offset, count) == DATA[offset : offset + count]
    assert len(bucket.asked) <= 14
    assert bucket.received <= 40 * MIB


def test_reads_in_no_order_fetch_little_more(bucket: MemoryBucket, opened: ObjectReader) -> None:
    draw = random.Random(4)
    for _ in range(3000):
        offset, count = draw.randrange(len(DATA) - 4 * KIB), draw.randrange(1, 4 * KIB)
        assert opened.read(offset, count) == DATA[offset : offset + count]
    # Every byte once, and what did not pay.
    assert bucket.received <= len(DATA) + 48 * MIB


def test_threads_get_the_right_bytes(opened: ObjectReader) -> None:
    wrong: list[int] = []

    def read(number: int) -> None:
        draw = random.Random(number)
        offset = number * MIB
        for _ in range(300):
            rooms = [bytearray(draw.randrange(1, 60 * KIB)) for _ in range(3)]
            starts = [offset + 70 * KIB * place for place in draw.sample(range(3), 3)]
            opened.read_into([(start, memoryview(room)) for start, room in zip(starts, rooms, strict=True)])
            wrong.extend(s for s, room in zip(starts, rooms, strict=True) if DATA[s : s + len(room)] != room)
            offset = (offset + draw.choice((200 * KIB, 3 * MIB))) % (len(DATA) - MIB)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_is_bounded_over_all_files_and_let_go(bucket: MemoryBucket) -> None:
    reading._HELD.clear()  # of files that nobody closed
    files = []
    for number in range(20):
        bucket.put(f"b{number}", DATA)
        files.append(ObjectReader(bucket, f"b{number}", PurePath("b")))
        for offset in range(4 * MIB, 5 * MIB, 64 * KIB):
            assert files[-1].read(offset, 10) == DATA[offset : offset + 10]
    held = sum(window.stop - window.start for window in reading._HELD)
    assert 0 < held <= 64 * MIB
    for file in files:
        file.close()
    assert not reading._HELD


def test_what_is_fetched_anew_is_not_what_was_held(bucket: MemoryBucket, opened: ObjectReader) -> None:
    for offset in range(4 * MIB, 5 * MIB, 64 * KIB):
        opened.read(offset, 10)
    found = bucket._objects["a"]
    bucket._objects["a"] = found._replace(data=bytes(len(DATA)))  # of the same version: a bit was wrong on the way
    room = bytearray(10)
    opened.read_into([(9 * MIB // 2, memoryview(room))])
    assert room == DATA[9 * MIB // 2 : 9 * MIB // 2 + 10]
    assert opened.refetch([(9 * MIB // 2, memoryview(room))])
    assert room == bytes(10)


@pytest.mark.parametrize("order", [sorted, lambda offsets: sorted(offsets, reverse=True)], ids=["up", "down"])
def test_a_whole_object_in_small_reads(
    bucket: MemoryBucket, opened: ObjectReader, order: Callable[[range], list[int]]
) -> None:
    for offset in order(range(0, len(DATA), 50_000)):
        count = min(50_000, len(DATA) - offset)
        assert opened.read(offset, count) == DATA[offset : offset + count]
    assert len(bucket.asked) <= len(DATA) // (8 * MIB) + 5
    assert bucket.received <= len(DATA) * 1.01 + 100_000
