"""Each call stays on the server on which it began, whenever in its middle the environment comes to name another one."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from obstore.store import GCSStore

import treering as tr
from tests import faults
from tests.buckets import without_settings
from tests.command import copy_path
from torture import gcs_fake
from torture.bucket_servers import BucketServer
from torture.gcs_fake import GcsFake
from treering.leaves import index_leaves, tree_deserialize_leaves, tree_serialize_leaves

TREE: Final[dict[str, Any]] = {"w": np.arange(2000, dtype=np.float32), "b": np.ones(3)}
HERE: Final = "gs://bucket"


class _Moving:
    """Two servers; the environment comes to name the second one while the first is asked something."""

    def __init__(self, first: GcsFake, second: GcsFake, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.second = first, second
        self.elsewhere = 0
        """How much the second server was asked."""
        self.saw: Callable[[Any], object] = lambda _: None
        """Called with each request to the first one."""
        self._left = 0
        self._monkeypatch = monkeypatch

        def count(handler: Any) -> None:
            self.saw(handler)
            self._count(handler.server)

        faults.before(monkeypatch, gcs_fake._Handler, "_asked", count)
        self.name(first)

    def name(self, server: GcsFake) -> None:
        """Let the environment name a server."""
        for name, value in BucketServer("gs", f"http://127.0.0.1:{server.port}").environment().items():
            self._monkeypatch.setenv(name, value)

    def begin(self, request: int) -> None:
        """Let it name the second one at that request, counted from now on, to the first one."""
        self._left, self.elsewhere = request, 0

    @property
    def has_moved(self) -> bool:
        return self._left <= 0

    def _count(self, server: GcsFake) -> None:
        if server is self.second:
            self.elsewhere += 1
        elif self._left:
            self._left -= 1
            if not self._left:
                self.name(self.second)


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Moving]:
    with without_settings(monkeypatch), GcsFake() as first, GcsFake() as second:
        yield _Moving(first, second, monkeypatch)


def _check(tree: Any) -> None:
    assert np.array_equal(tree["w"], TREE["w"])
    assert np.array_equal(tree["b"], TREE["b"])


def _save_run(tree: Any, steps: int) -> None:
    with tr.Run(f"{HERE}/run") as run:
        for step in range(steps):
            run.save(step, tree, force=True)


def _read_handle(_: Path) -> None:
    with tr.open(f"{HERE}/a") as handle:
        _check(handle)
        _check({name: handle[name][:] for name in TREE})


def _gc(_: Path) -> None:
    run = tr.Run(f"{HERE}/run", keep=tr.KeepLast(1))
    run.gc(dry_run=False)
    assert list(run.steps()) == [2]
    _check(run.load())


def _resume(_: Path) -> None:
    with tr.Run(f"{HERE}/run", keep=tr.KeepLast(2)) as run:
        _check(run.load_or_init(lambda: TREE)[1])
        run.save(3, TREE, force=True)


CALLS: Final[dict[str, Callable[[Path], object]]] = {
    "save": lambda _: tr.save(f"{HERE}/new", TREE),
    "save over": lambda _: tr.save(f"{HERE}/a", TREE, overwrite=True),
    "save_async": lambda _: tr.save_async(f"{HERE}/new", TREE).result(),
    "load": lambda _: _check(tr.load(f"{HERE}/a")),
    "load, like": lambda _: _check(tr.load(f"{HERE}/a", TREE)),
    "load, a file": lambda _: _check(tr.load(f"{HERE}/f.safetensors")),
    "open": _read_handle,
    "inspect": lambda _: tr.inspect(f"{HERE}/a"),
    "verify": lambda _: tr.verify(f"{HERE}/a"),
    "abstract": lambda _: tr.abstract(f"{HERE}/a"),
    "diff": lambda _: tr.diff(f"{HERE}/a", f"{HERE}/b"),
    "convert": lambda _: tr.convert(f"{HERE}/a", f"{HERE}/new.safetensors"),
    "convert, from disk": lambda folder: tr.convert(folder / "local", f"{HERE}/new"),
    "convert, to disk": lambda folder: tr.convert(f"{HERE}/a", folder / "new"),
    "convert, a run": lambda _: tr.convert(f"{HERE}/run", f"{HERE}/copy"),
    "branch": lambda _: tr.Run(f"{HERE}/run").branch(1, f"{HERE}/copy"),
    "cp": lambda _: copy_path(f"{HERE}/a", f"{HERE}/new", overwrite=False),
    "cp, a run": lambda _: copy_path(f"{HERE}/run", f"{HERE}/copy", overwrite=False),
    "cp, a file": lambda _: copy_path(f"{HERE}/f.safetensors", f"{HERE}/new.safetensors", overwrite=False),
    "cp, to disk": lambda folder: copy_path(f"{HERE}/run", f"{folder}/run", overwrite=False),
    "gc": _gc,
    "resume": _resume,
    "leaves, a new prefix": lambda _: tree_serialize_leaves(f"{HERE}/leaves", TREE, prefix="new"),
    "leaves, over": lambda _: tree_serialize_leaves(f"{HERE}/leaves", TREE, prefix="opt"),
    "leaves, load": lambda _: _check(tree_deserialize_leaves(f"{HERE}/leaves", prefix="opt")),
    "leaves, index": lambda _: index_leaves(f"{HERE}/leaves"),
    "leaves, verify": lambda _: tr.verify(f"{HERE}/leaves"),
    "leaves, convert": lambda _: tr.convert(f"{HERE}/leaves", f"{HERE}/new"),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("request_number", [1, 3])
@pytest.mark.parametrize("call", CALLS)
def test_a_call_asks_no_other_server(call: str, request_number: int, moving: _Moving, tmp_path: Path) -> None:
    tr.save(f"{HERE}/a", TREE)
    tr.save(f"{HERE}/b", TREE)
    tr.save(f"{HERE}/f.safetensors", TREE)
    tr.save(tmp_path / "local", TREE)
    if "leaves" in call:
        tree_serialize_leaves(f"{HERE}/leaves", TREE, prefix="opt")
    if call.startswith(("gc", "cp", "resume", "branch", "convert, a run")):
        _save_run(TREE, 3)
    moving.begin(request_number)
    CALLS[call](tmp_path)
    assert moving.elsewhere == 0
    assert not moving.second.objects
    assert moving.has_moved or request_number > 1


def test_credentials_are_renewed_by_the_provider_of_the_account(moving: _Moving) -> None:
    given: list[str] = []
    seen: list[str] = []

    def provide() -> Any:  # each is over before the next request
        given.append(f"token-{len(given)}")
        return {"token": given[-1], "expires_at": datetime.datetime.now(datetime.UTC)}

    moving.saw = lambda handler: seen.append(handler.headers["Authorization"])
    base_url = f"http://127.0.0.1:{moving.first.port}"
    store = GCSStore("bucket", base_url=base_url, credential_provider=provide, client_options={"allow_http": True})
    with tr.Run(tr.bucket(store, "run")) as run:
        run.save(0, TREE, force=True)
        run.wait()
        with tr.open(run.path / "step_00000000") as handle:
            moving.name(moving.second)
            before = len(given)
            _check({name: handle[name][:] for name in TREE})
            run.save(1, TREE, force=True)
            run.wait()
            _check(run.load())
    assert len(given) > before
    assert moving.elsewhere == 0
    assert set(seen[-5:]) <= {f"Bearer {token}" for token in given[before:]}
