"""What a call knows already while it finds out what stands at a path."""

from __future__ import annotations

import threading

from tests.buckets import MemoryBucket
from treering._store.asked import asking, remembered
from treering._store.objects.requests import Get, Head, List, Put, Status, ask


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
