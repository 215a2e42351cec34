"""A server that dies in a save: told within one patience, with the request that failed first."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import limits
from treering._store.objects.client import ObstoreClient
from treering._store.objects.obstore_stores import StoreVariants
from treering._store.objects.requests import Answer, Delete, Get, Head, Put, Request, Status
from treering.errors import StoreError
from treering.leaves import tree_serialize_leaves

obstore = pytest.importorskip("obstore")
PATIENCE = 2.0
_VERBS = ("put", "put_async", "get", "head", "delete", "list", "list_with_delimiter_async")


class _Died(OSError):
    """What a server that was reached and is silent is."""


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ObstoreClient]:
    """Return what makes a client of a server that dies at the first request of a verb for such a name."""

    def make(verb: str, part: str) -> ObstoreClient:
        dead = False

        def dying(one: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(store: Any, name: Any = None, *more: Any, **options: Any) -> Any:
                nonlocal dead
                dead = dead or (one == verb and part in str(name))
                if dead:
                    raise _Died("the connection was reset")
                return real(store, name, *more, **options)

            return call

        for one in _VERBS:
            monkeypatch.setattr(obstore, one, dying(one, getattr(obstore, one)))
        return ObstoreClient(obstore.store.MemoryStore(), f"s3://dies-{secrets.token_hex(4)}", patience=PATIENCE)

    return make


@pytest.mark.parametrize(
    ("verb", "part", "size"),
    [
        ("put", "treering-tmp", 10), ("put", "data-", 10), ("put", "data-", 5_000_000), ("put", "treering.json", 10),
        ("list_with_delimiter_async", "", 10),
    ],
)  # fmt: skip
def test_a_save_tells_it_after_one_patience(
    kill: Callable[[str, str], ObstoreClient], verb: str, part: str, size: int
) -> None:
    client = kill(verb, part)
    path = tr.bucket(client) / "a"
    tr.save("memory://imports", {"w": np.zeros(1)}, overwrite=True)
    begun = time.monotonic()
    with pytest.raises(StoreError) as caught:
        tr.save(path, {"w": np.zeros(size, np.float32)})
    took = time.monotonic() - begun
    assert took < 1.5 * PATIENCE, caught.value
    assert f"{verb.partition('_')[0].upper()} 'a/" in str(caught.value)
    assert part in str(caught.value)


def _serialize(path: Any) -> None:
    tree_serialize_leaves(path / "leaves", {"w": np.zeros(3)}, prefix="x")


def _save_run(path: Any, *steps: int) -> None:
    with tr.Run(path / "run") as run:
        for step in steps:
            run.save(step, {"w": 1}, force=True)


ZEROS = {"w": np.zeros(10)}
HANGING: dict[str, tuple[str, str, Callable[[Any], Any], str]] = {
    "a commit": ("put", "a/treering.json", lambda path: tr.save(path / "a", {}, overwrite=True), "PUT 'treering.json'"),
    "a first commit": ("put", "b/treering.json", lambda path: tr.save(path / "b", ZEROS), "PUT 'b/treering.json'"),
    "a commit of leaves": ("put", "leaves/tensorstore_index.json", _serialize, "PUT 'tensorstore_index.json'"),
    "data": ("put", "b/data-.*", lambda path: tr.save(path / "b", ZEROS), "PUT 'b/data-"),
    "a marker": ("put", "b/.*tmp", lambda path: tr.save(path / "b", ZEROS), "PUT 'b/.treering.json."),
    "a file": ("put", "b.safetensors", lambda path: tr.save(path / "b.safetensors", ZEROS), "PUT 'b.safetensors'"),
    "run.json": ("put", "run/run.json", lambda path: _save_run(path, 2), "PUT 'run/run.json'"),
    "a removal": (
        "put", "run/step_00000000/treering.json",
        lambda path: tr.Run(path / "run", keep=tr.KeepLast(1)).gc(dry_run=False), "PUT 'treering.json'",
    ),
    "a listing": ("list_with_delimiter_async", "run/", lambda path: tr.Run(path / "run").steps(), "LIST 'run/'"),
    "a reading": ("get", "a/treering.json", lambda path: tr.load(path / "a"), "GET 'a/treering.json'"),
}  # fmt: skip


@pytest.mark.parametrize("case", HANGING)
def test_the_request_that_hangs_is_named_where_others_are_answered(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, name, call, told = HANGING[case]
    client = ObstoreClient(obstore.store.MemoryStore(), f"s3://hangs-{secrets.token_hex(4)}", patience=0.3)
    path = tr.bucket(client)
    tr.save(path / "a", ZEROS)
    _serialize(path)
    _save_run(path, 0, 1)
    real = getattr(obstore, verb)

    def hang(store: Any, asked: Any = None, *more: Any, **options: Any) -> Any:
        if re.fullmatch(name, str(asked)):
            raise _Died("operation timed out")
        return real(store, asked, *more, **options)

    monkeypatch.setattr(obstore, verb, hang)
    with pytest.raises(StoreError) as caught:
        call(path)
    assert told in str(caught.value)
    assert "refuses" not in str(caught.value)


def test_the_parts_of_an_upload_are_ended_by_time_alone() -> None:
    store = obstore.store.S3Store("b", access_key_id="x", secret_access_key="y")
    retries = StoreVariants(store, 30).variant(16 << 20, parts=True).retry_config
    assert retries["max_retries"] * retries["backoff"]["init_backoff"] >= retries["retry_timeout"]


def test_a_later_call_has_the_whole_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    limits.lower(monkeypatch, client_made_anew_after=0.2)
    client = ObstoreClient(obstore.store.MemoryStore(), "s3://bucket", patience=PATIENCE)
    assert client.perform(Put("a", b"1")).status is Status.DONE
    tries: list[Request] = []

    def fail(*_: Any, **__: Any) -> None:
        tries.append(Head("a"))
        raise _Died("reset")

    monkeypatch.setattr(obstore, "head", fail)

    def asked(request: Request) -> tuple[Answer, int]:
        tries.clear()
        return client.perform(request), len(tries)

    answer, many = asked(Head("a"))
    assert answer.status is Status.NO_ANSWER
    assert answer.reason == "GET 'a' failed first: reset"
    assert many > 2
    assert client.patience < 0
    assert asked(Head("b")) == (Answer(Status.NO_ANSWER, reason="GET 'a' failed first: reset"), 1)
    assert client.perform(Delete(("a",))).status is Status.NO_ANSWER
    time.sleep(0.3)
    assert client.patience == PATIENCE
    assert asked(Head("b"))[1] > 2
    assert client.perform(Get("a")).data == b"1"
    assert client.patience == PATIENCE
