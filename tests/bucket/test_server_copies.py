"""Saves that write only what changed, on real servers: what is shared is copied there, and its bytes are not sent."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import limits
from tests.buckets import without_settings
from torture.bucket_servers import BucketServer, missing_azurite
from torture.fault_proxy import FaultProxy

pytestmark = pytest.mark.bucket
FROZEN = np.arange(300_000, dtype=np.float32)
LAYERS = 64
"""Of 8 KiB each, stacked in one leaf; one of them changes."""


@pytest.fixture(autouse=True)
def _small_boxes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    limits.lower(monkeypatch, compared_box=8192)
    with without_settings(monkeypatch):
        yield


@pytest.fixture(params=["seaweed", "gcs"])
def watched(request: pytest.FixtureRequest) -> Iterator[tuple[Any, FaultProxy]]:
    """A path in a bucket of a server, and the proxy that every request to it passes."""
    with watching(request.getfixturevalue(request.param), request.getfixturevalue("prefix")) as found:
        yield found


@contextlib.contextmanager
def watching(server: BucketServer, prefix: str) -> Iterator[tuple[Any, FaultProxy]]:
    with FaultProxy(server.port, whole=server.sign_whole) as proxy:
        yield tr.bucket(server.at(proxy.port).connect(), prefix, grace=0), proxy


def state(step: int) -> dict[str, Any]:
    """A frozen base, a stacked leaf of which one layer is trained, and a count."""
    layers = np.ones((LAYERS, 2048), np.float32)
    layers[3] += step
    return {"base": FROZEN, "layers": layers, "step": step}


def assert_state(found: Any, step: int) -> None:
    assert all(np.array_equal(found[key], leaf) for key, leaf in state(step).items())


def sent(proxy: FaultProxy) -> tuple[int, int]:
    """Bytes of data files that were sent since the last look, and how many were copied."""
    puts = [one for one in proxy.seen if one.method == "PUT" and "data-" in one.target]
    proxy.heal()
    return sum(one.sent for one in puts), sum(one.sent == 0 for one in puts)


def test_the_bytes_of_what_did_not_change_are_sent_once(watched: tuple[Any, FaultProxy]) -> None:
    path, proxy = watched
    with tr.Run(path / "run", incremental=True, keep=tr.KeepLast(3)) as run:
        for step in range(1, 7):
            run.save(step, state(step)).result()
            nbytes, copies = sent(proxy)
            if step == 1:
                assert nbytes > FROZEN.nbytes + state(1)["layers"].nbytes
            else:
                assert nbytes < 8192 + 4096 + 256  # one layer, and the header of its file
                assert copies >= 1
        assert run.steps() == [4, 5, 6]
        run.delete(5)
        for step in (4, 6):  # no older step is there, nor the one in between
            assert_state(run.load(step), step)
            assert tr.verify(path / "run" / f"step_{step:08}").ok
        sent(proxy)
    with tr.Run(path / "run", incremental=True, full_every=4) as run:  # a new program goes on from what is there
        run.save(7, state(7)).result()
        assert sent(proxy)[0] > FROZEN.nbytes  # the seventh of its chain
        run.save(6, state(60), rollback=True).result()
        assert sent(proxy)[0] < FROZEN.nbytes
        assert run.steps() == [4, 6]
        assert_state(run.load(4), 4)
        assert_state(run.load(6), 60)
    assert tr.verify(path / "run").ok


def test_a_checkpoint_beside_another_shares_its_files(watched: tuple[Any, FaultProxy]) -> None:
    path, proxy = watched
    tr.save(path / "a", state(1))
    sent(proxy)
    tr.save(path / "b", state(2), base=path / "a")
    tr.save_async(path / "c", state(2), base=path / "b").result()
    nbytes, copies = sent(proxy)
    assert nbytes < 2 * (8192 + 4096 + 256)
    assert copies == 3  # one file of "a"; that one and what "b" wrote
    tr.save(path / "a", {"other": 1.5}, overwrite=True)
    for name in ("b", "c"):
        assert_state(tr.load(path / name), 2)
        assert tr.verify(path / name).ok


@pytest.mark.skipif(missing_azurite() is not None, reason=f"{missing_azurite()}")
def test_on_azure_everything_is_sent(request: pytest.FixtureRequest, prefix: str) -> None:
    with watching(request.getfixturevalue("azurite"), prefix) as (path, proxy):
        with tr.Run(path, incremental=True, keep=tr.KeepLast(1)) as run:
            for step in (1, 2):
                run.save(step, state(step)).result()
                nbytes, copies = sent(proxy)
                assert nbytes > FROZEN.nbytes
                assert copies == 0
            assert_state(run.load(), 2)
        assert tr.verify(path).ok


def test_what_is_reached_with_other_options_is_sent(seaweed: BucketServer, prefix: str) -> None:
    paths = [tr.bucket(seaweed.connect(), prefix, timeout=timeout) for timeout in (20.0, 21.0)]
    tr.save(paths[0] / "a", state(1))
    with FaultProxy(seaweed.port) as proxy:
        tr.save(tr.bucket(seaweed.at(proxy.port).connect(), prefix) / "b", state(1), base=paths[0] / "a")
        nbytes, copies = sent(proxy)
    assert nbytes > FROZEN.nbytes
    assert copies == 0
    assert_state(tr.load(paths[1] / "b"), 1)
