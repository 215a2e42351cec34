"""Two servers in one program: what has begun on one stays there, whatever the environment says meanwhile."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from obstore.store import GCSStore

import treering
from tests import faults
from tests.buckets import without_settings
from torture import gcs_fake
from torture.bucket_servers import BucketServer
from torture.gcs_fake import GcsFake
from treering.errors import NotFoundError

TREE: dict[str, Any] = {"w": np.arange(2_000_000, dtype=np.float32), "b": np.ones(3)}


class _Two:
    """The server that is entered first, and the one that the environment names after `leave`."""

    def __init__(self, servers: list[BucketServer], monkeypatch: pytest.MonkeyPatch) -> None:
        self._servers = servers
        self._monkeypatch = monkeypatch
        self.enter(0)

    def enter(self, number: int) -> None:
        for name, value in self._servers[number].environment().items():
            self._monkeypatch.setenv(name, value)

    def leave(self, *_: object) -> None:
        self.enter(1)

    def holds(self, number: int, path: str) -> bool:
        self.enter(number)
        try:
            found = treering.load(path)
        except NotFoundError:
            return False
        assert np.array_equal(found["w"], TREE["w"])
        return True


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Two]:
    with without_settings(monkeypatch), GcsFake() as first, GcsFake() as second:
        yield _Two([BucketServer("gs", f"http://127.0.0.1:{fake.port}") for fake in (first, second)], monkeypatch)


@pytest.mark.parametrize("name", ["a", "a.safetensors", "a.msgpack"])
def test_a_save_ends_where_it_began(name: str, two: _Two) -> None:
    path = f"gs://bucket/{name}"
    treering.save(path, TREE, progress=two.leave)
    assert two.holds(0, path)
    assert not two.holds(1, path)


@pytest.mark.parametrize("name", ["a", "a.safetensors"])
def test_a_save_in_the_background_ends_where_it_began(name: str, two: _Two) -> None:
    path = f"gs://bucket/{name}"
    pending = treering.save_async(path, TREE)
    two.leave()
    pending.result()
    assert two.holds(0, path)
    assert not two.holds(1, path)


def test_a_load_and_a_handle_read_where_they_began(two: _Two) -> None:
    treering.save("gs://bucket/a", TREE)
    with treering.open("gs://bucket/a") as handle:
        two.leave()
        assert np.array_equal(handle["w"], TREE["w"])
    two.enter(0)
    loaded = treering.load("gs://bucket/a", progress=two.leave)
    assert np.array_equal(loaded["w"], TREE["w"])


def test_a_run_stays_where_it_began(two: _Two) -> None:
    with treering.Run("gs://bucket/run", keep=treering.KeepLast(2)) as run:
        two.leave()
        for step in range(3):
            run.save(step, TREE, force=True)
        run.wait()
        assert list(run.steps()) == [1, 2]
        assert np.array_equal(run.load()["w"], TREE["w"])
        run.save(3, TREE, force=True)
        run.wait()
    assert not two.holds(1, "gs://bucket/run")
    assert two.holds(0, "gs://bucket/run")


def _path_with(token: str, server: GcsFake, name: str) -> Any:
    def provide() -> Any:
        return {"token": token, "expires_at": datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)}

    url = f"http://127.0.0.1:{server.port}"
    store = GCSStore("bucket", base_url=url, credential_provider=provide, client_options={"allow_http": True})
    return treering.bucket(store, name)


def test_two_paths_of_one_url_lead_to_two_servers_with_their_own_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[int, str]] = set()

    def see(handler: Any) -> None:
        seen.add((handler.server.port, handler.headers["Authorization"]))

    faults.before(monkeypatch, gcs_fake._Handler, "_asked", see)
    with GcsFake() as first, GcsFake() as second:
        a, b = _path_with("of-a", first, "a"), _path_with("of-b", second, "a")
        assert str(a) == str(b) == "gs://bucket/a"
        pending = [treering.save_async(path, {"w": np.full(3, number)}) for number, path in enumerate((a, b))]
        for save in pending:
            save.result()
        with treering.open(a) as handle, treering.Run(b.parent / "run") as run:
            assert (handle["w"][0], treering.load(b)["w"][0]) == (0, 1)
            run.save(1, {"w": np.full(3, 5)})
        assert treering.verify(b.parent / "run").ok
        with pytest.raises(NotFoundError):
            treering.load(a.parent / "run")
        assert seen == {(first.port, "Bearer of-a"), (second.port, "Bearer of-b")}


def test_two_credentials_of_one_bucket_are_used_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[str]] = {"a": set(), "b": set()}

    def see(asked: tuple[str, dict[str, str]], handler: Any) -> None:
        name, options = asked
        shown = options.get("prefix", name.removeprefix("bucket/"))
        seen[shown[0]].add(handler.headers["Authorization"])

    faults.after(monkeypatch, gcs_fake._Handler, "_asked", see)
    with GcsFake() as server:
        for _ in range(2):
            for name in ("a", "b"):
                path = _path_with(f"of-{name}", server, name)
                treering.save(path, TREE, overwrite=True)
                assert np.array_equal(treering.load(path)["w"], TREE["w"])
        treering.convert(path, _path_with("of-a", server, "a2"))
    assert seen == {"a": {"Bearer of-a"}, "b": {"Bearer of-b"}}
