"""Each fault at each request of a save into a leaves directory in a bucket: told or done, whole, and none is lost."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.properties.sameness import fingerprint
from tests.store.objects.memory_bucket import MemoryBucket
from treering._store import resolve
from treering._store.memory import MemoryPath
from treering._store.objects import claim, requests
from treering._store.objects import store as objects
from treering._store.objects.requests import Answer, Put, Request, Status
from treering._store.objects.root import ObjectRoot
from treering.errors import Busy, StoreFailed
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

PATH = "memory://a/leaves"
OLD, NEW = {"w": jnp.zeros(3), "step": 1}, {"w": jnp.ones(3), "b": np.arange(2), "step": 2}

Perform = Callable[[Request], Answer]


def lose_request(perform: Perform, request: Request) -> Answer:
    return Answer(Status.NO_ANSWER)


def lose_answer(perform: Perform, request: Request) -> Answer:
    perform(request)
    return Answer(Status.NO_ANSWER)


def refuse(perform: Perform, request: Request) -> Answer:
    raise OSError(5, "the bucket refuses")


def repeat(perform: Perform, request: Request) -> Answer:
    """Do it twice, as something on the way may: the second answer is the one that comes."""
    perform(request)
    return dataclasses.replace(perform(request), sure=False)


def save_another(perform: Perform, request: Request) -> Answer:
    """Let another save be committed in between."""
    tree_serialize_leaves(PATH, {"m": jnp.ones(2)}, prefix="other")
    return perform(request)


class FaultyBucket(MemoryBucket):
    """A bucket that does one thing wrong, once.

    Args:
        place: at which request.
        fault: what it does; None: nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arm(-1, None)

    def arm(self, place: int, fault: Callable[[Perform, Request], Answer] | None) -> None:
        self.left, self.fault = place, fault

    def perform(self, request: Request) -> Answer:
        self.left -= 1
        if self.left == -1 and self.fault is not None:
            fault, self.fault = self.fault, None
            return fault(super().perform, request)
        return super().perform(request)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> FaultyBucket:
    bucket = FaultyBucket()

    def connect(path: PurePath) -> tuple[FaultyBucket, str]:
        return bucket, MemoryPath(path).key

    monkeypatch.setattr(resolve, "_IN_MEMORY", ObjectRoot(connect, lambda _: 0.0))
    monkeypatch.setattr(requests, "_wait", lambda _: Answer(Status.DONE))
    for module in (claim, objects):
        turns = itertools.count()
        monkeypatch.setattr(module, "patience", lambda _, turns=turns: lambda: next(turns) > 20)
    return bucket


def load(prefix: str) -> Any:
    return fingerprint(tree_deserialize_leaves(PATH, prefix=prefix, structure="exact"))


FAULTS = [lose_request, lose_answer, refuse, repeat, save_another]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_every_request_of_a_save(fault: Any, bucket: FaultyBucket) -> None:
    wanted = {name: fingerprint(tree, restored=False) for name, tree in (("old", OLD), ("new", NEW))}
    ended = set()
    tree_serialize_leaves(PATH, OLD, prefix="beside")
    for place in itertools.count():
        tree_serialize_leaves(PATH, OLD, prefix="model")
        bucket.arm(place, fault)
        try:
            tree_serialize_leaves(PATH, NEW, prefix="model")
            state = "new"
        except (Busy, StoreFailed) as error:
            state = "unknown" if "may be in place" in str(error) else "old"
        ended.add(state)
        done = bucket.fault is not None
        bucket.arm(-1, None)
        assert load("beside") == wanted["old"]
        assert load("model") in [wanted[name] for name in wanted if state in {name, "unknown"}], place
        if done:  # there are no more requests
            break
    assert place > 12
    assert "new" in ended
    assert (fault is repeat) or len(ended) > 1 or fault is lose_answer


def test_a_request_that_arrives_late_changes_nothing(bucket: FaultyBucket) -> None:
    """A commit without an answer is repeated a day later, when two other saves have been committed."""
    late: list[Request] = []

    def keep(perform: Perform, request: Request) -> Answer:
        late.append(request)
        return Answer(Status.NO_ANSWER)

    tree_serialize_leaves(PATH, OLD, prefix="model")
    for place in range(16):
        bucket.arm(place, keep)
        with contextlib.suppress(Busy, StoreFailed):
            tree_serialize_leaves(PATH, NEW, prefix="model")
        bucket.arm(-1, None)
        tree_serialize_leaves(PATH, OLD, prefix="model")
        tree_serialize_leaves(PATH, {"m": jnp.ones(2)}, prefix="other")
        for request in late:
            if isinstance(request, Put):
                bucket.perform(request)
        late.clear()
        assert load("model") == fingerprint(OLD, restored=False)
