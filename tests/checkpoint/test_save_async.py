import contextlib
import gc
import math
import pathlib
import re
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering
from tests.checkpoint.in_background import (
    PATIENCE,
    Elsewhere,
    begin_without_thread,
    count_in_flight,
    gate,
    nothing_left,
    wait_until_ended,
)
from tests.system_calls import CommitGate, commit_gate
from torture.interrupted import Strike
from treering.checkpoint import save_async
from treering.errors import (
    CorruptError,
    ExistsError,
    MismatchError,
    NotFoundError,
    SaveFailedWarning,
    StoreError,
    TimedOutError,
    TreeringError,
    UnsupportedError,
)

__all__ = ["commit_gate", "nothing_left"]

FORMS = ("ckpt", "tree.msgpack", "tree.safetensors")


# ------------------------------------------------------------------------------------------------------- what is saved


@pytest.mark.parametrize("form", FORMS)
def test_what_is_saved_is_what_the_tree_was(tmp_path: Path, form: str) -> None:
    path = tmp_path / form
    held = np.arange(100_000, dtype="f4")
    donated = jnp.arange(100_000, dtype="i4")
    wanted = {"held": held.copy(), "donated": np.asarray(donated).copy(), "bfloat": np.ones(3, jnp.bfloat16)}
    with gate() as closed:
        first = save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        assert closed.reached.wait(PATIENCE)
        pending = save_async(path, {"held": held, "donated": donated, "bfloat": jnp.ones(3, "bfloat16")})
        held[:] = -1
        jax.jit(lambda x: x * 0 - 1, donate_argnums=0)(donated).block_until_ready()
        assert not pending.done()
    pending.result(PATIENCE)
    first.result(PATIENCE)
    found = treering.load(path)
    assert all(np.array_equal(np.asarray(found[key]), wanted[key]) for key in wanted)


def test_what_is_saved_is_the_same_as_a_save_makes(tmp_path: Path) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("a", "b"))
    tree = {
        "spread": jax.device_put(np.arange(64.0, dtype="f4").reshape(8, 8), sharding),
        "key": jax.random.key(7),
        "narrow": jnp.ones(5, "int4"),
        "python": (1, 2.5, None, "text", b"bytes"),
        "long": "x" * 100_000,
        "bytes": bytearray(b"y" * 100_000),
        "scalar": np.float32(3),
        "function": treering.load,
    }
    treering.save(tmp_path / "one", tree, metadata={"loss": 0.5})
    save_async(tmp_path / "other", tree, metadata={"loss": 0.5}).result(PATIENCE)
    assert not treering.diff(tmp_path / "one", tmp_path / "other")
    with treering.open(tmp_path / "one") as one, treering.open(tmp_path / "other") as other:
        assert one.metadata == other.metadata == {"loss": 0.5}
    assert treering.verify(tmp_path / "other").ok


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_bytearray_that_is_changed(tmp_path: Path, size: int) -> None:
    data = bytearray(b"a" * size)
    with gate() as closed:
        first = save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        pending = save_async(tmp_path / "x", {"data": data})
        data[:] = b"b" * size
    pending.result(PATIENCE)
    first.result(PATIENCE)
    assert treering.load(tmp_path / "x")["data"] == bytearray(b"a" * size)


@pytest.mark.parametrize("form", ["ckpt", "tree.safetensors"])
def test_metadata_that_is_changed(tmp_path: Path, form: str) -> None:
    metadata = {"losses": [1.0]}
    with gate() as closed:
        first = save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        pending = save_async(tmp_path / form, {"x": np.zeros(3)}, metadata=metadata)
        metadata["losses"].append(2.0)
    pending.result(PATIENCE)
    first.result(PATIENCE)
    with treering.open(tmp_path / form) as opened:
        assert opened.metadata == {"losses": [1.0]}


def test_a_relative_path_is_that_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with gate() as closed:
        first = save_async("first", {"x": np.zeros(3)}, progress=closed)
        pending = save_async("second", {"x": np.ones(3)})
        pathlib.Path("elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
    pending.result(PATIENCE)
    first.result(PATIENCE)
    assert pending.path == (tmp_path / "second").resolve()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "first", "second"]


def test_saves_are_written_in_their_order(tmp_path: Path) -> None:
    pendings = [save_async(tmp_path / "x", {"step": step}, overwrite=True) for step in range(12)]
    pendings[-1].result(PATIENCE)
    assert all(pending.done() for pending in pendings)
    assert treering.load(tmp_path / "x") == {"step": 11}


@pytest.mark.parametrize("form", FORMS)
def test_progress_is_told_from_the_thread_that_writes(tmp_path: Path, form: str) -> None:
    said: list[tuple[int, int]] = []
    threads: set[str] = set()

    def progress(done: int, total: int) -> None:
        said.append((done, total))
        threads.add(threading.current_thread().name)

    save_async(tmp_path / form, {"x": np.zeros(1 << 20)}, progress=progress).result(PATIENCE)
    assert said[-1][0] == said[-1][1] > 0
    assert threads == {"treering-saves"}


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("form", FORMS)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path, form: str) -> None:
    with pytest.raises(UnsupportedError, match="bad"):
        save_async(tmp_path / form, {"bad": object(), "good": np.zeros(3)})
    assert count_in_flight(tmp_path / form) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong", [{"metadata": {"x": object()}}, {"metadata": 3}, {"timeout": -1}, {"processes": "some"}]
)
def test_arguments_that_mean_nothing_are_refused_at_once(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        save_async(tmp_path / "x", {"x": 1}, **wrong)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_that_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREERING_ASYNC_BYTES", "half")
    with pytest.raises(UnsupportedError, match="TREERING_ASYNC_BYTES is 'half'"):
        save_async(tmp_path / "x", {"x": 1})


# -------------------------------------------------------------------------------------------------------------- errors


def fail(path: Path) -> Any:
    """Begin a save that fails, and return it when it has."""
    pending = save_async(path, {"x": 2})
    wait_until_ended(path)
    return pending


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """A path where something is."""
    path = tmp_path / "taken"
    treering.save(path, {"x": 1})
    return path


def test_an_error_is_raised_by_result(taken: Path) -> None:
    pending = save_async(taken, {"x": 2})
    for _ in range(2):
        with pytest.raises(ExistsError, match="is at"):
            pending.result(PATIENCE)
    assert isinstance(pending.exception(), ExistsError)
    assert treering.load(taken) == {"x": 1}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("call", ["save", "save_async", "load", "open"])
def test_an_error_that_nobody_asked_for_is_raised_by_the_next_call(tmp_path: Path, form: str, call: str) -> None:
    path = tmp_path / form
    treering.save(path, {"x": np.ones(3)})
    fail_with = save_async(path, {"x": np.zeros(3)})
    wait_until_ended(path)
    link = tmp_path / f"link.{form}"
    link.symlink_to(path)
    calls = {
        "save": lambda: treering.save(link, {"x": 3}, overwrite=True),
        "save_async": lambda: save_async(link, {"x": 3}, overwrite=True),
        "load": lambda: treering.load(link),
        "open": lambda: treering.open(link),
    }
    with pytest.raises(ExistsError, match=f"the earlier save to '{path}' failed: ") as told:
        calls[call]()
    assert told.value.__cause__ is fail_with.exception()
    np.testing.assert_array_equal(treering.load(path)["x"], np.ones(3))  # told once, and nothing changed


def test_an_error_that_was_told_is_not_raised_again(taken: Path) -> None:
    pending = fail(taken)
    assert isinstance(pending.exception(), ExistsError)
    assert treering.load(taken) == {"x": 1}


def test_an_error_does_not_concern_other_paths(tmp_path: Path, taken: Path) -> None:
    fail(taken)
    treering.save(tmp_path / "other", {"x": 1})
    save_async(tmp_path / "another", {"x": 1}).result(PATIENCE)
    with pytest.raises(ExistsError, match="the earlier save to"):
        treering.load(taken)


def test_several_errors_of_a_run_are_told_together(tmp_path: Path, commit_gate: CommitGate) -> None:
    run = treering.Run(tmp_path / "run")
    commit_gate.error = OSError(28, "full")
    run.save(1, {"x": 1})
    run.save(2, {"x": 2})
    commit_gate.opened.set()
    wait_until_ended(run.path)
    with pytest.raises(StoreError, match=r"the earlier save to .*step_00000001' failed: ") as told:
        run.load()
    (note,) = told.value.__notes__
    assert re.match("the earlier save to '.*step_00000002' failed as well: StoreError: ", note)


@pytest.mark.parametrize(
    ("raised", "kind"),
    [(KeyError("x"), TreeringError), (OSError(28, "full"), StoreError), (CorruptError("c"), CorruptError)],
)
def test_errors_of_any_class_are_told(tmp_path: Path, raised: Exception, kind: type[Exception]) -> None:
    def progress(done: int, total: int) -> None:
        raise raised

    pending = save_async(tmp_path / "x", {"x": np.zeros(3)}, progress=progress)
    wait_until_ended(tmp_path / "x")
    with pytest.raises(kind, match="the earlier save to") as told:
        treering.load(tmp_path / "x")
    assert type(told.value) is kind
    assert told.value.__cause__ is pending.exception()
    assert list(tmp_path.iterdir()) == []


def test_an_error_keeps_its_differences(tmp_path: Path) -> None:
    def progress(done: int, total: int) -> None:
        error = MismatchError("the first difference")
        error.differences = ("one",)
        raise error

    save_async(tmp_path / "x", {"x": np.zeros(3)}, progress=progress)
    with pytest.raises(MismatchError, match="the earlier save to") as told:
        treering.load(tmp_path / "x")
    assert told.value.differences == ("one",)


def count_held(items: int) -> int:
    """Return how many arrays of so many items are held, by anybody."""
    gc.collect()
    # The collector does not know of a dict in which only arrays are.
    columns = [one for one in gc.get_referents(*gc.get_objects()) if type(one) is dict]
    holders = [*columns, *(one for one in gc.get_objects() if isinstance(one, tuple))]
    return len({id(one) for one in gc.get_referents(*holders) if isinstance(one, np.ndarray) and one.shape == (items,)})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_held_when_a_save_is_over(tmp_path: Path, form: str, *, fails: bool) -> None:
    path = tmp_path / form
    if fails:
        treering.save(path, {"x": np.zeros(3)})
    with gate() as closed:
        save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        pending = save_async(path, {"x": np.zeros(12_345)})
        assert count_held(12_345) == (0 if form == "tree.msgpack" else 1)
    assert isinstance(pending.exception(PATIENCE), ExistsError) is fails
    save_async(tmp_path / "next", {"x": 1}).result(PATIENCE)  # the thread is done with the other one for sure
    assert count_held(12_345) == 0


# --------------------------------------------------------------------------------------------------- room, and waiting


def test_two_saves_are_in_flight_at_most(tmp_path: Path) -> None:
    with gate() as closed:
        save_async(tmp_path / "0", {"x": np.zeros(3)}, progress=closed)
        save_async(tmp_path / "1", {"x": np.zeros(3)})
        third = Elsewhere(lambda: save_async(tmp_path / "2", {"x": np.zeros(3)}))
        assert third.is_on()
        assert [count_in_flight(tmp_path / name) for name in "012"] == [1, 1, 0]
        closed.open()
        third.end().result(PATIENCE)


def test_the_bytes_in_flight_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TREERING_ASYNC_BYTES", "1000")
    with gate() as closed:
        save_async(tmp_path / "large", {"x": np.zeros(1000)}, progress=closed)  # one alone is always taken
        small = Elsewhere(lambda: save_async(tmp_path / "small", {"x": np.zeros(1)}))
        assert small.is_on()
        closed.open()
        small.end().result(PATIENCE)
    with gate() as closed:
        save_async(tmp_path / "first", {"x": np.zeros(50)}, progress=closed)
        save_async(tmp_path / "second", {"x": np.zeros(50)})
        closed.open()


def test_room_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    with gate() as closed:
        first = save_async(tmp_path / "0", {"x": np.zeros(3)}, progress=closed, timeout=1)
        save_async(tmp_path / "1", {"x": np.zeros(3)}, timeout=1)
        with pytest.raises(TimedOutError, match="no room beside the saves in flight"):
            save_async(tmp_path / "2", {"x": np.zeros(3)}, timeout=1)
        assert not first.done()
        closed.open()
    first.result(PATIENCE)


@pytest.mark.parametrize("form", FORMS)
def test_a_save_waits_for_the_one_in_flight_to_its_path(tmp_path: Path, form: str) -> None:
    path = tmp_path / form
    with gate() as closed:
        save_async(path, {"x": np.zeros(3)}, progress=closed)
        second = Elsewhere(lambda: treering.save(path, {"x": np.ones(3)}, overwrite=True))
        treering.save(tmp_path / f"other.{form}", {"x": np.ones(3)})  # this one does not
        assert second.is_on()
        closed.open()
        second.end()
    np.testing.assert_array_equal(treering.load(path)["x"], np.ones(3))


@pytest.mark.parametrize("read", [treering.load, lambda path: dict(treering.open(path))])
def test_reading_waits_for_the_save_in_flight(tmp_path: Path, read: Any) -> None:
    with gate() as closed:
        save_async(tmp_path / "x", {"x": np.ones(3)}, progress=closed)
        reading = Elsewhere(lambda: read(tmp_path / "x"))
        assert reading.is_on()
        closed.open()
        assert list(reading.end()) == ["x"]


def test_a_snapshot_that_fails_leaves_room(tmp_path: Path) -> None:
    endless = np.broadcast_to(np.float64(0), (1 << 50,))  # eight bytes, and no memory has room for a copy
    for _ in range(3):
        with pytest.raises(MemoryError):
            save_async(tmp_path / "x", {"x": endless})
    save_async(tmp_path / "x", {"x": np.ones(3)}).result(PATIENCE)


def test_without_a_thread_it_is_saved_before_it_returns(taken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    begin_without_thread(monkeypatch)
    monkeypatch.setattr("_thread.start_new_thread", fails)
    pending = save_async(taken.parent / "x", {"x": 1})
    assert pending.done()
    pending.result()
    with pytest.raises(ExistsError):
        save_async(taken, {"x": 1})


def test_the_thread_that_writes_does_not_wait_for_itself(tmp_path: Path) -> None:
    said: list[Any] = []

    def progress(done: int, total: int) -> None:
        with pytest.raises(NotFoundError):
            treering.load(tmp_path / "x")
        with pytest.raises(TreeringError, match="cannot wait"):
            held[0].result()
        said.append(save_async(tmp_path / "y", {"y": 1}))

    held: list[Any] = []
    with gate() as closed:
        first = save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        held.append(save_async(tmp_path / "x", {"x": np.zeros(3)}, progress=progress))
        closed.open()
    held[0].result(PATIENCE)
    first.result(PATIENCE)
    said[0].result(PATIENCE)


def test_the_thread_that_writes_does_not_wait_for_itself_after_a_step_that_failed(tmp_path: Path) -> None:
    run = treering.Run(tmp_path / "run", on_save_error="warn")
    (tmp_path / "run").touch()
    said: list[str] = []

    def progress(done: int, total: int) -> None:
        with pytest.warns(SaveFailedWarning):
            run.save(1, {"x": 1})
        with pytest.raises(TreeringError) as raised:
            held[0].result(1)
        said.append(str(raised.value))

    held: list[Any] = []
    with gate() as closed:
        save_async(tmp_path / "first", {"x": np.zeros(3)}, progress=closed)
        held.append(save_async(tmp_path / "x", {"x": np.zeros(3)}, progress=progress))
        closed.open()
    held[0].result(PATIENCE)
    assert all("cannot wait" in one for one in said)
    assert said
    (tmp_path / "run").unlink()
    run.save(2, {"x": 2}).result()


def test_a_time_to_wait_that_is_no_number_is_refused_at_once(tmp_path: Path) -> None:
    with gate() as closed:
        pending = save_async(tmp_path / "x", {"x": np.zeros(3)}, progress=closed)
        with pytest.raises(UnsupportedError, match="timeout is nan"):
            pending.result(math.nan)
        with pytest.raises(UnsupportedError, match="timeout is nan"):
            treering.Run(tmp_path / "x").wait(math.nan)
    pending.result(PATIENCE)


def test_a_result_that_was_interrupted_can_be_asked_for_again(tmp_path: Path) -> None:
    for at in range(1, 30):
        pending = save_async(tmp_path / "x", {"x": at}, overwrite=True)
        with contextlib.suppress(KeyboardInterrupt), Strike("place", at):
            pending.result()
        pending.result(PATIENCE)
        assert treering.load(tmp_path / "x") == {"x": at}
