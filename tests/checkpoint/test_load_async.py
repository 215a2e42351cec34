"""load_async: a tree that is read on a thread of its own, as the caller's thread would have read it."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import meshes
from tests.trees import assert_unchanged
from tests.warm import Programs
from treering.errors import CorruptError, MismatchError, NotFoundError, TimedOutError, TreeringError, UnsupportedError

TREE: dict[str, Any] = {"w": jnp.arange(64.0).reshape(8, 8), "n": np.arange(5), "step": 7, "key": jax.random.key(1)}


@pytest.fixture(params=["disk", "memory"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place = f"{tmp_path}/ckpt" if request.param == "disk" else f"memory://{tmp_path.name}/ckpt"
    tr.save(place, TREE)
    return place


def test_it_gives_what_load_gives(path: str) -> None:
    assert_unchanged(tr.load_async(path).result(), tr.load(path))
    like = {"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16), "step": 0}
    found = tr.load_async(path, like, cast=True, extra="ignore").result()
    assert_unchanged(found, tr.load(path, like, cast=True, extra="ignore"))


def test_it_is_read_on_another_thread_and_waits_for_saves(path: str) -> None:
    threads = set()
    tr.save_async(path, {"w": np.arange(300_000)}, overwrite=True)
    pending = tr.load_async(path, progress=lambda done, total: threads.add(threading.get_ident()))
    assert pending.result()["w"][-1] == 299_999
    assert pending.result() is pending.result()
    assert pending.done()
    assert threads
    assert threading.get_ident() not in threads


def test_it_can_be_awaited(path: str) -> None:
    async def both() -> list[Any]:
        return await asyncio.gather(*[_awaited(tr.load_async(path, at=key)) for key in ("step", "n")])

    async def _awaited(pending: Any) -> Any:
        return await pending

    step, array = asyncio.run(both())
    assert (step, array.tolist()) == (7, [0, 1, 2, 3, 4])

    async def fails() -> None:
        with pytest.raises(NotFoundError):
            await tr.load_async(f"{path}-not")

    asyncio.run(fails())


def test_errors_come_from_result(path: str, tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="w: wanted float32"):
        tr.load_async(path, TREE | {"w": jnp.zeros(3)}).result()
    missing = tr.load_async(f"{path}-not")
    for _ in range(2):
        with pytest.raises(NotFoundError, match="ckpt-not"):
            missing.result()
    if path.startswith("/"):
        (file,) = Path(path).glob("data-*")
        file.write_bytes(file.read_bytes()[:-1] + b"!")
        with pytest.raises(CorruptError):
            tr.load_async(path).result()


def test_arguments_are_checked_at_once(path: str) -> None:
    with pytest.raises(UnsupportedError, match="found an int"):
        tr.load_async(3)  # type: ignore[call-overload]
    with pytest.raises(UnsupportedError, match="cast="):
        tr.load_async(path, cast=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'lazy'"):
        tr.load_async(path, lazy=True)  # type: ignore[call-overload]


def test_what_is_set_for_the_caller_s_thread_counts(path: str) -> None:
    mesh = meshes.line()
    last = jax.devices()[-1]
    with jax.set_mesh(mesh):
        split = tr.load_async(path, only="w", shardings=P("x"))
    with jax.default_device(last):
        there = tr.load_async(path, only="w")
    with jax.enable_x64(True):
        tr.save(f"{path}-wide", {"x": jnp.arange(3)})
        wide = tr.load_async(f"{path}-wide")
    assert split.result()["w"].sharding.mesh == mesh
    assert there.result()["w"].devices() == {last}
    assert isinstance(wide.result()["x"], jax.Array)
    assert wide.result()["x"].dtype == np.int64


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tr.save(tmp_path / "ckpt", {"w": np.zeros(500_000)})
    monkeypatch.chdir(tmp_path)
    go = threading.Event()
    pending = tr.load_async(["ckpt"], progress=lambda done, total: go.wait(60) and None)
    monkeypatch.chdir("/")
    go.set()
    assert pending.result()["w"].shape == (500_000,)


@pytest.mark.parametrize("timeout", [0.01, Fraction(1, 100)])
def test_a_wait_may_end_before_it(timeout: Any, path: str) -> None:
    go = threading.Event()
    pending = tr.load_async(path, progress=lambda done, total: go.wait(60))
    assert not pending.done()
    with pytest.raises(TimedOutError, match=r"is not done within 0\.01 s; it goes on"):
        pending.result(timeout=timeout)
    go.set()
    assert pending.result(timeout=60)["step"] == 7


def test_a_wait_may_be_longer_than_a_lock_can_wait(path: str) -> None:
    for timeout in (math.inf, 1e10):
        go = threading.Event()
        pending = tr.load_async(path, timeout=1e10, progress=lambda done, total, go=go: go.wait(60))  # type: ignore[misc]
        threading.Timer(0.1, go.set).start()
        assert pending.result(timeout)["step"] == 7


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore")
def test_a_fork_has_no_result(path: str) -> None:
    pending = tr.load_async(path)
    pending.result()
    child = os.fork()
    if child == 0:
        try:
            pending.result(timeout=5)
        except TreeringError as error:
            os._exit(17 if "is a fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


PROGRAM = """
import asyncio, sys, threading
import numpy as np
import treering as tr
path, way = sys.argv[1:]
if way == "failed":
    pending = tr.load_async(path + "-not")
    try:
        tr.load_async(path + "-not").result()
    except FileNotFoundError:
        pass
    while not pending.done():
        pass
elif way == "cancelled":
    stopped = threading.Event()

    def fail(done, total):
        stopped.wait(60)
        raise ValueError("too late")

    async def cancel():
        task = asyncio.ensure_future(wait(pending := tr.load_async(path, progress=fail)))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
        stopped.set()
        while not pending.done():
            await asyncio.sleep(0.01)

    async def wait(pending):
        await pending

    asyncio.run(cancel())
else:
    stopped = threading.Event()
    tr.load_async(path, progress=lambda done, total: stopped.wait(0.01))
"""


@pytest.mark.parametrize("way", ["failed", "cancelled", "under way"])
def test_the_end_of_a_program(way: str, programs: Programs, tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": np.zeros(1 << 20)})
    run = programs.run("-c", PROGRAM, str(tmp_path / "ckpt"), way)
    if way != "under way":
        assert run.returncode == 1
        kind = "NotFoundError" if way == "failed" else "ValueError"
        assert run.stderr.count(f"its error was never raised: {kind}") == 1
    else:
        assert (run.returncode, run.stderr) == (0, "")


MANY = """
import threading, time
from tests.checkpoint.in_background import begin_load
ended = threading.Event()

def waits(require_wanted):
    ended.wait(60)

def hears(require_wanted):
    try:
        while True:
            require_wanted()
            time.sleep(0.01)
    finally:
        ended.set()

for number in range(9):
    begin_load(hears if number == 4 else waits, shown="a", timeout=50)
"""


def test_the_end_of_a_program_gives_up_all_of_them_at_once(programs: Programs) -> None:
    start = time.monotonic()
    run = programs.run("-c", MANY)
    assert (run.returncode, run.stderr) == (0, "")
    assert time.monotonic() - start < 45


INTERRUPTED = """
import sys, time
import treering as tr
from torture.interrupted import Strike
tr.load_async(sys.argv[1]).result()
for at in range(1, 400):
    try:
        with Strike("place", at):
            tr.load_async(sys.argv[1], timeout=30).result()
    except KeyboardInterrupt:
        pass
"""


def test_the_end_of_a_program_does_not_wait_for_a_load_that_an_interrupt_kept_from_beginning(
    programs: Programs, tmp_path: Path
) -> None:
    tr.save(tmp_path / "ckpt", {"step": 7})
    start = time.monotonic()
    run = programs.run("-c", INTERRUPTED, str(tmp_path / "ckpt"))
    assert (run.returncode, run.stderr) == (0, "")
    assert time.monotonic() - start < 25


def test_many_at_once_from_many_threads(path: str) -> None:
    found: list[Any] = []

    def loads() -> None:
        found.extend([pending.result(60)["step"] for pending in [tr.load_async(path) for _ in range(5)]])

    threads = [threading.Thread(target=loads) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [7] * 20
