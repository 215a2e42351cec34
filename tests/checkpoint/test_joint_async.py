"""Saves by several processes in the background; the processes are threads here, each with a writing thread."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import treering
from tests import meshes
from tests.checkpoint.in_background import PATIENCE, Gate, gate, wait_until_ended, write_by_threads
from tests.checkpoint.together import PATIENT, Together, fail_snapshots, job_of
from treering.checkpoint import save_async
from treering.errors import CancelledError, ExistsError, MismatchError, TimedOutError, TreeringError, UnsupportedError


@pytest.fixture(params=[2, 4])
def together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Together:
    write_by_threads(monkeypatch)
    return patient_job(request.param, monkeypatch)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Together:
    write_by_threads(monkeypatch)
    return patient_job(2, monkeypatch)


def patient_job(count: int, monkeypatch: pytest.MonkeyPatch) -> Together:
    """A job whose process 0 stays until all have heard how a save ended: then nothing is left of one that failed."""
    job = job_of(count, monkeypatch)
    job.timing = PATIENT
    return job


def spread(items: int = 64) -> jax.Array:
    """An array of which each process has a part."""
    mesh = meshes.line()
    return jax.device_put(np.arange(items, dtype="f4"), NamedSharding(mesh, P("x")))


def tree(**more: Any) -> dict[str, Any]:
    return {"spread": spread(), "numpy": np.arange(7), "step": 3, **more}


def waited(path: Path, tree: Any, **wishes: Any) -> None:
    """Save in the background, and wait; also until the others are told of what was refused in the foreground."""
    try:
        save_async(path, tree, **wishes).result(PATIENCE)
    finally:
        wait_until_ended(path)


def begun(after: Callable[[int, Any], None]) -> Callable[..., None]:
    """Return what begins a save, does something with it, and waits for it.

    Args:
        after: is called with the number of the process, which is also in its wishes, and the save.
    """

    def save(path: Path, tree: Any, *, this: int, **wishes: Any) -> None:
        try:
            pending = save_async(path, tree, **wishes)
            after(this, pending)
            pending.result(PATIENCE)
        finally:
            wait_until_ended(path)

    return save


def this(process: int) -> dict[str, Any]:
    return {"this": process}


def test_what_is_saved_is_what_the_trees_were(tmp_path: Path, together: Together) -> None:
    trees = {process: tree(numpy=np.arange(7)) for process in range(together.count)}

    def change(process: int, pending: Any) -> None:
        trees[process]["numpy"][:] = -1
        jax.jit(lambda x: x * 0, donate_argnums=0)(trees[process]["spread"]).block_until_ready()

    done = together.save(tmp_path / "x", trees.get, save=begun(change), wishes_of=this)
    assert done == [None] * together.count
    found = treering.load(tmp_path / "x")
    np.testing.assert_array_equal(found["spread"], np.arange(64, dtype="f4"))
    np.testing.assert_array_equal(found["numpy"], np.arange(7))
    assert found["step"] == 3
    with treering.open(tmp_path / "x") as opened:
        assert opened.metadata == {}
    assert len(list((tmp_path / "x").glob("*.safetensors"))) == together.count


def test_it_is_what_a_save_makes(tmp_path: Path, two: Together) -> None:
    whole = tree(key=jax.random.key(3), bits=jnp.ones(8, "int4"), text="x" * 10_000, none=None, large=spread(1 << 16))
    wishes: dict[str, Any] = {"metadata": {"a": 1}, "host_local": "equal"}
    assert two.save(tmp_path / "one", lambda process: whole, **wishes) == [None, None]
    assert two.save(tmp_path / "other", lambda process: whole, save=waited, **wishes) == [None, None]
    assert not treering.diff(tmp_path / "one", tmp_path / "other")
    assert treering.verify(tmp_path / "other").ok


def test_one_after_the_other(tmp_path: Path, together: Together) -> None:
    # Each process is a thread that has one call, so each save comes in threads, and writers, of its own.
    for step in range(3):
        saved = tree(step=step)
        done = together.save(tmp_path / "x", dict.fromkeys(range(4), saved).get, save=waited, overwrite=True)
        assert done == [None] * together.count
    assert treering.load(tmp_path / "x", only="step") == {"step": 2}
    assert not [path for path in (tmp_path / "x").iterdir() if path.name.startswith(".")]


def test_an_error_in_the_background_is_everybodys(tmp_path: Path, together: Together) -> None:
    treering.save(tmp_path / "x", {"x": 1})
    done = together.save(tmp_path / "x", lambda process: tree(), save=waited)
    assert [type(error) for error in done] == [ExistsError] * together.count


def test_trees_that_differ(tmp_path: Path, two: Together) -> None:
    done = two.save(tmp_path / "x", lambda process: tree(numpy=np.arange(7 + process)), save=waited)
    assert [type(error) for error in done] == [MismatchError, MismatchError]


@pytest.mark.parametrize("bad", [0, 1])
def test_what_one_cannot_save_is_told_to_the_others(tmp_path: Path, two: Together, bad: int) -> None:
    seen: list[int] = []
    done = two.save(
        tmp_path / "x",
        lambda process: tree(numpy=object() if process == bad else np.arange(7)),
        save=begun(lambda process, pending: seen.append(process)),
        wishes_of=this,
    )
    assert seen == [1 - bad]  # the other one raised at once
    assert [type(error) for error in done] == [UnsupportedError, UnsupportedError]
    assert f"process {bad} (" in str(done[1 - bad])
    assert not (tmp_path / "x").exists()
    assert two.save(tmp_path / "x", lambda process: tree(), save=waited) == [None, None]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_snapshot_that_fails_is_told_to_the_others(
    tmp_path: Path, two: Together, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(path: Path, tree: Any) -> None:
        try:
            waited(path, tree)
        except KeyboardInterrupt as error:
            raise MemoryError("interrupted") from error

    fail_snapshots(monkeypatch, bad)
    done = two.save(tmp_path / "x", lambda process: tree(), save=save)
    assert isinstance(done[bad], MemoryError)
    assert isinstance(done[1 - bad], TreeringError)
    assert f"process {bad} (" in str(done[1 - bad])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("forgetful", [0, 1])
def test_an_earlier_error_that_one_was_not_told_stops_all(tmp_path: Path, two: Together, forgetful: int) -> None:
    treering.save(tmp_path / "taken", {"x": 1})
    failed = threading.Event()

    def save(path: Path, tree: Any, *, this: int) -> None:
        if this == forgetful:
            save_async(tmp_path / "taken", {"x": 2}, processes="this")
            wait_until_ended(tmp_path / "taken")
            failed.set()
        else:
            treering.save(tmp_path / "other", {"x": 2}, processes="this")
            assert failed.wait(PATIENCE)  # else it would find the folder locked
        waited(tmp_path / "taken", tree, overwrite=True)

    done = two.save(tmp_path / "taken", lambda process: tree(), save=save, wishes_of=this)
    assert [type(error) for error in done] == [ExistsError, ExistsError]
    assert "the earlier save to" in str(done[0])
    assert "the earlier save to" in str(done[1])
    assert treering.load(tmp_path / "taken") == {"x": 1}


@pytest.mark.parametrize("who", [0, 1])
def test_one_calls_off(tmp_path: Path, together: Together, who: int) -> None:
    with gate() as closed:
        gates = {process: closed if process == who else Gate() for process in range(together.count)}

        def cancel(process: int, pending: Any) -> None:
            if process == who:
                assert closed.reached.wait(PATIENCE)
                assert pending.cancel()
                closed.open()

        for process, one in gates.items():
            if process != who:
                one.open()
        done = together.save(
            tmp_path / "x",
            lambda process: tree(),
            save=begun(cancel),
            wishes_of=lambda process: {"this": process, "progress": gates[process]},
        )
    assert [type(error) for error in done] == [CancelledError] * together.count
    assert all(f"process {who} (" in str(error) for process, error in enumerate(done) if process != who)
    assert not (tmp_path / "x").exists()
    assert together.save(tmp_path / "x", lambda process: tree(), save=waited) == [None] * together.count


@pytest.mark.parametrize("who", [0, 1])
def test_one_calls_off_while_it_waits_for_another(tmp_path: Path, two: Together, who: int) -> None:
    with gate() as closed:

        def cancel(process: int, pending: Any) -> None:
            if process == who and who == 0:
                assert closed.reached.wait(PATIENCE)  # the other one is at work, and this one waits for it
                assert pending.cancel()
                assert isinstance(pending.exception(PATIENCE), CancelledError)
                closed.open()
            elif process == who:
                assert pending.cancel() in (False, True)
                closed.open()

        done = two.save(
            tmp_path / "x",
            lambda process: tree(),
            save=begun(cancel),
            wishes_of=lambda process: {"this": process, **({"progress": closed} if process != who else {})},
        )
    if who == 0:
        assert [type(error) for error in done] == [CancelledError, CancelledError]
    else:  # it may have handed in its part before
        assert done == [None, None] or {type(error) for error in done} == {CancelledError}


@pytest.mark.parametrize("comes", [0, 1])
def test_one_that_does_not_come(tmp_path: Path, two: Together, comes: int) -> None:
    two.timeout = 1
    done = two.save(tmp_path / "x", lambda process: tree(), who=range(comes, comes + 1), save=waited, timeout=1)
    assert isinstance(done[comes], TimedOutError)
    assert f"process {1 - comes}" in str(done[comes])
    assert not (tmp_path / "x" / "treering.json").exists()
