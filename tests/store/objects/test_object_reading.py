"""Objects are read with few requests, of one version, ahead where reads follow each other, and none is asked twice."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

import pytest

from tests.buckets import MemoryBucket
from treering._store.api import asking, remembered
from treering._store.objects import reading
from treering._store.objects.reading import FIRST_BYTES, ObjectReader, plan_spans
from treering._store.objects.requests import Answer, Delete, Get, Head, List, Put, Range, Request, Status, ask
from treering.errors import CorruptError, DataFileMissingError, NotFoundError, StoreError

KIB, MIB = 1 << 10, 1 << 20


class CountedBucket(MemoryBucket):
    """A bucket that remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[int] = []

    def read_range(self, request: Range) -> Answer:
        self.ranges += [offset for offset, _ in request.span.targets]
        return super().read_range(request)


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


@functools.cache
def large() -> bytes:
    """What the larger objects hold."""
    return random.Random(3).randbytes(40 * MIB)


@pytest.fixture
def bucket() -> MemoryBucket:
    bucket = MemoryBucket()
    bucket.put("a", large())
    bucket.start_over()
    return bucket


@pytest.fixture
def opened(bucket: MemoryBucket) -> Iterator[ObjectReader]:
    with ObjectReader(bucket, "a", PurePath("a")) as file:
        yield file


@pytest.mark.sampled(3)
@pytest.mark.parametrize("count", [100, 16 * KIB, 300 * KIB, 3 * MIB])
@pytest.mark.parametrize("gap", [0, 700])
def test_reads_that_follow_each_other(bucket: MemoryBucket, opened: ObjectReader, count: int, gap: int) -> None:
    start, stop = 3 * MIB, min(39 * MIB, 3 * MIB + 4000 * (count + gap))
    for offset in range(start, stop - count, count + gap):
        assert opened.read(offset, count) == large()[offset : offset + count]
    assert len(bucket.asked) <= (stop - start) / (8 * MIB) + 5
    assert bucket.received <= stop - start + 9 * MIB


def test_three_series_side_by_side(bucket: MemoryBucket, opened: ObjectReader) -> None:
    for number in range(400):
        for start, count in ((MIB, 20 * KIB), (16 * MIB, 5 * KIB), (30 * MIB, 100)):
            offset = start + number * count
            assert opened.read(offset, count) == large()[offset : offset + count]
    assert len(bucket.asked) <= 14
    assert bucket.received <= 40 * MIB


def test_reads_in_no_order_fetch_little_more(bucket: MemoryBucket, opened: ObjectReader) -> None:
    draw = random.Random(4)
    for _ in range(3000):
        offset, count = draw.randrange(len(large()) - 4 * KIB), draw.randrange(1, 4 * KIB)
        assert opened.read(offset, count) == large()[offset : offset + count]
    # Every byte once, and what did not pay.
    assert bucket.received <= len(large()) + 48 * MIB


def test_threads_get_the_right_bytes(opened: ObjectReader) -> None:
    wrong: list[int] = []

    def read(number: int) -> None:
        draw = random.Random(number)
        offset = number * MIB
        for _ in range(300):
            rooms = [bytearray(draw.randrange(1, 60 * KIB)) for _ in range(3)]
            starts = [offset + 70 * KIB * place for place in draw.sample(range(3), 3)]
            opened.read_into([(start, memoryview(room)) for start, room in zip(starts, rooms, strict=True)])
            wrong.extend(s for s, room in zip(starts, rooms, strict=True) if large()[s : s + len(room)] != room)
            offset = (offset + draw.choice((200 * KIB, 3 * MIB))) % (len(large()) - MIB)

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
        bucket.put(f"b{number}", large())
        files.append(ObjectReader(bucket, f"b{number}", PurePath("b")))
        for offset in range(4 * MIB, 5 * MIB, 64 * KIB):
            assert files[-1].read(offset, 10) == large()[offset : offset + 10]
    held = sum(window.stop - window.start for window in reading._HELD)
    assert 0 < held <= 64 * MIB
    for file in files:
        file.close()
    assert not reading._HELD


def test_what_is_fetched_anew_is_not_what_was_held(bucket: MemoryBucket, opened: ObjectReader) -> None:
    for offset in range(4 * MIB, 5 * MIB, 64 * KIB):
        opened.read(offset, 10)
    found = bucket._objects["a"]
    bucket._objects["a"] = found._replace(data=bytes(len(large())))  # of the same version: a bit was wrong on the way
    room = bytearray(10)
    opened.read_into([(9 * MIB // 2, memoryview(room))])
    assert room == large()[9 * MIB // 2 : 9 * MIB // 2 + 10]
    assert opened.refetch([(9 * MIB // 2, memoryview(room))])
    assert room == bytes(10)


@pytest.mark.parametrize("order", [sorted, lambda offsets: sorted(offsets, reverse=True)], ids=["up", "down"])
def test_a_whole_object_in_small_reads(
    bucket: MemoryBucket, opened: ObjectReader, order: Callable[[range], list[int]]
) -> None:
    for offset in order(range(0, len(large()), 50_000)):
        count = min(50_000, len(large()) - offset)
        assert opened.read(offset, count) == large()[offset : offset + count]
    assert len(bucket.asked) <= len(large()) // (8 * MIB) + 5
    assert bucket.received <= len(large()) * 1.01 + 100_000


# ----------------------------------------------------------------------------------- what a call knows already


def bucket_with(*names: str) -> MemoryBucket:
    bucket = MemoryBucket()
    for name in names:
        bucket.perform(Put(name, name.encode()))
    bucket.start_over()
    return bucket


def test_nothing_is_looked_at_twice() -> None:
    bucket = bucket_with("a/b", "a/c/d")
    with asking(once=True):
        first = [ask(bucket, request) for request in (Head("a/b"), Get("a/b", 2), List("a/"))]
        with asking(once=True):
            assert [ask(bucket, request) for request in (Head("a/b"), Get("a/b", 2), List("a/"))] == first
    assert bucket.asked == ["Head", "Get", "List"]


def test_a_listing_says_what_is_there_and_what_is_not() -> None:
    bucket = bucket_with("a/b", "a/c/d")
    with asking(once=True):
        listed = ask(bucket, List("a/"))
        assert ask(bucket, Head("a/b")).found == listed.listed[0]
        assert ask(bucket, Head("a/x")).status is ask(bucket, Get("a/x", 9)).status is Status.MISSING
        assert ask(bucket, List("a/x/")).listed == ()
        assert bucket.asked == ["List"]
        # It does not say what is in an object, nor what is below a place.
        assert ask(bucket, Get("a/b", 9)).data == b"a/b"
        assert [found.name for found in ask(bucket, List("a/c/")).listed] == ["a/c/d"]


def test_what_may_have_changed_is_asked_anew() -> None:
    bucket = bucket_with("a/b")
    with asking(once=True):
        for _ in range(2):  # a document may have been damaged on the way, and a deep listing tells what has changed
            ask(bucket, Get("a/b"))
            ask(bucket, List("a/", deep=True))
        ask(bucket, Head("a/b"))
        with asking(once=False):
            ask(bucket, Head("a/b"))
        ask(bucket, Head("a/b"))
    ask(bucket, Head("a/b"))
    assert bucket.asked == ["Get", "List"] * 2 + ["Head"] * 3


def test_another_bucket_and_another_thread_know_nothing() -> None:
    one, other = bucket_with("a"), bucket_with("a")
    with asking(once=True):
        for bucket in (one, other):
            ask(bucket, Head("a"))
        thread = threading.Thread(target=ask, args=(one, Head("a")))
        thread.start()
        thread.join()
    assert (one.asked, other.asked) == (["Head"] * 2, ["Head"])


def test_few_answers_are_kept() -> None:
    with asking(once=True):
        assert [remembered(number, lambda: None) for number in range(100)] == [None] * 100
        assert [remembered(number, lambda: "anew") for number in (0, 99)] == [None, "anew"]
