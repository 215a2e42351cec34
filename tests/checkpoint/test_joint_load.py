"""Loads by several processes: they agree, read their parts, exchange them, or all fail.

One process plays them all. Real jobs are in ``tests/multiprocess``.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from tests import faults, limits, meshes
from tests.checkpoint.together import Loading, Said, count_given_up, exchange_at_once, failing, loading
from tests.system_calls import spans_read
from treering._checkpoint import joint_load, source
from treering._store.open_folder import OpenFolder
from treering._values import timing
from treering._values.processes import Processes
from treering._values.timing import Timing
from treering.errors import (
    BusyError,
    CorruptError,
    ExistsError,
    MismatchError,
    NotFoundError,
    NotSharedError,
    ProcessFailedError,
    StoreError,
    TimedOutError,
    UnsupportedError,
)
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

__all__ = ["loading"]

MESH = meshes.line()
PLANE = meshes.grid(4, 2)
COLUMNS = NamedSharding(MESH, P(None, "x"))
EVERYWHERE = NamedSharding(MESH, P())
COMPARED = ["last", "plan", "state"]
RNG = np.random.default_rng(0)
WIDE = RNG.standard_normal((512, 1024), np.float32)
TREE: dict[str, Any] = {
    "w": jnp.asarray(WIDE),
    "b": {"v": jnp.asarray(WIDE[:256]).astype(jnp.bfloat16)},
    "n": np.arange(5, dtype=np.int32),
    "step": 7,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    tr.save(path / "ckpt", TREE)
    tr.save(path / "one.safetensors", {"w": TREE["w"]})
    tr.save(path / "one.msgpack", {"w": TREE["w"]})
    tree_serialize_leaves(path / "leaves", TREE, compressor={"id": "zstd", "level": 1}, chunk_bytes=128 << 10)
    return path


def where(key: str, aval: Any) -> Any:
    return COLUMNS if len(aval.shape) == 2 else EVERYWHERE


def from_meeting(number: int, second: Said) -> Callable[[int, Said], list[Said]]:
    """Process 2 says something else from a meeting on."""
    return lambda meeting, said: [said, second if meeting >= number else said, said]


def assert_wide(found: Any, sharding: Any = COLUMNS, wanted: np.ndarray = WIDE) -> None:
    assert isinstance(found, jax.Array)
    assert found.sharding == sharding
    assert np.asarray(found).tobytes() == wanted.tobytes()


# ------------------------------------------------------------------------------------------------------- all is well


@pytest.mark.parametrize("name", ["ckpt", "leaves"])
def test_columns_are_read_once_and_exchanged(loading: Loading, saved: Path, name: str) -> None:
    tree = tr.load(saved / name, shardings=where, timeout=5)
    assert_wide(tree["w"])
    assert tree["b"]["v"].dtype == jnp.bfloat16
    assert np.asarray(tree["b"]["v"]).tobytes() == np.asarray(TREE["b"]["v"]).tobytes()
    assert tree["step"] == 7
    assert len(loading.exchanges) == 1
    # To agree, before the exchange, at the end.
    assert [sorted(said) for said in loading.meetings] == [COMPARED, [], [], [], []]


def test_each_byte_is_read_once(loading: Loading, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = spans_read(monkeypatch)
    told: list[tuple[int, int]] = []
    tr.load(saved / "ckpt", only="w", shardings=COLUMNS, progress=lambda done, total: told.append((done, total)))
    assert sum(count for _, count in spans) == WIDE.nbytes
    assert told[-1] == (WIDE.nbytes, WIDE.nbytes)


def test_batches_are_exchanged_one_after_the_other(
    loading: Loading, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange_at_once(monkeypatch, 1)
    assert_wide(tr.load(saved / "ckpt", shardings=where)["w"])
    assert len(loading.exchanges) == 2
    assert len(loading.meetings) == 8


def test_what_each_process_reads_for_itself_is_not_exchanged(loading: Loading, saved: Path) -> None:
    assert_wide(tr.load(saved / "ckpt", mesh=MESH)["w"], EVERYWHERE)
    assert len(loading.exchanges) == 0
    # It is read before the processes compare what they read.
    assert [sorted(said) for said in loading.meetings] == [COMPARED]
    assert loading.meetings[0]["last"]


def test_what_takes_long_to_read_is_compared_first(
    loading: Loading, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.lower(monkeypatch, read_first=WIDE.nbytes)
    spans = spans_read(monkeypatch)
    loading.others = lambda meeting, said: [{**said, "plan": "other"}, said, said]
    with pytest.raises(MismatchError, match="process 1 wants other leaves"):
        tr.load(saved / "ckpt", only="w", mesh=MESH)
    assert spans == []
    loading.others = lambda meeting, said: [said, said, said]
    loading.meetings.clear()
    assert_wide(tr.load(saved / "ckpt", only="w", mesh=MESH)["w"], EVERYWHERE)
    assert [sorted(said) for said in loading.meetings] == [COMPARED, []]
    assert not loading.meetings[0]["last"]


def test_what_has_no_checksums_is_compared_first(loading: Loading, saved: Path) -> None:
    """Whether it was replaced is asked at the end: when all have opened it."""
    assert_wide(tr.load(saved / "one.msgpack", mesh=MESH)["w"], EVERYWHERE)
    assert [sorted(said) for said in loading.meetings] == [COMPARED, ["read"]]
    assert not loading.meetings[0]["last"]


def test_what_only_this_process_reads_counts_too(
    loading: Loading, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits.lower(monkeypatch, read_first=WIDE.nbytes)
    here = jax.devices()[0]
    tr.load(saved / "ckpt", shardings=lambda key, aval: here if key == "w" else EVERYWHERE)
    assert [sorted(said) for said in loading.meetings] == [COMPARED, []]


def test_who_compared_before_it_read_is_met_once_more(loading: Loading, saved: Path) -> None:
    loading.others = lambda meeting, said: [{**said, "last": False} if "last" in said else said, said, said]
    assert_wide(tr.load(saved / "ckpt", mesh=MESH)["w"], EVERYWHERE)
    assert [sorted(said) for said in loading.meetings] == [COMPARED, []]


@pytest.mark.parametrize("fails", [False, True])
def test_another_state_that_is_found_after_reading_is_opened_again(
    loading: Loading, saved: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of this process is none where it read another tree than the others."""
    loading.others = lambda meeting, said: [said, {**said, "state": "newer"} if meeting == 1 else said, said]
    failures = iter([StoreError("a stale file")] if fails else [])

    def reading(*given: Any) -> None:
        for error in failures:
            raise error

    faults.before(monkeypatch, joint_load.LoadGroup, "read_batches", reading)
    assert_wide(tr.load(saved / "ckpt", mesh=MESH)["w"], EVERYWHERE)
    assert [said["last"] for said in loading.meetings] == [not fails, True]


def test_an_error_after_which_the_trees_are_alike_is_told(
    loading: Loading, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing_read(*given: Any) -> list[Any]:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(joint_load.LoadGroup, "read_batches", failing_read)
    with pytest.raises(StoreError, match="the disk is gone"):
        tr.load(saved / "ckpt", mesh=MESH)
    assert [sorted(said) for said in loading.meetings] == [COMPARED, ["failure"]]
    # Whatever the others say: each process raises its own error.
    loading.meetings.clear()
    loading.others = from_meeting(1, failing(CorruptError("block 3 of 'w' is damaged")))
    with pytest.raises(StoreError, match="the disk is gone"):
        tr.load(saved / "ckpt", mesh=MESH)
    assert [sorted(said) for said in loading.meetings] == [COMPARED]
    # But not where they do not have its folder: of that all hear alike.
    loading.others = from_meeting(1, failing(NotFoundError("nothing is there")))
    with pytest.raises(NotSharedError, match="process 2 did not find what the others found") as caught:
        tr.load(saved / "ckpt", mesh=MESH)
    assert isinstance(caught.value.__cause__, StoreError)


@pytest.mark.parametrize(
    "shardings", [None, jax.devices()[3], NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), P())]
)
def test_what_lies_with_one_process_is_loaded_without_a_word(loading: Loading, saved: Path, shardings: Any) -> None:
    tree = tr.load(saved / "ckpt", shardings=shardings)
    assert np.asarray(tree["w"]).tobytes() == WIDE.tobytes()
    assert loading.meetings == []


def test_a_large_job_has_one_process_read_the_index(
    loading: Loading, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.answer(monkeypatch, joint_load, "this_processes", Processes(this=0, count=4))
    limits.lower(monkeypatch, shared_index_from=4)
    wide = jax.ShapeDtypeStruct(WIDE.shape, WIDE.dtype, sharding=COLUMNS)
    assert_wide(tr.load(saved / "ckpt", {"w": wide}, extra="ignore")["w"])
    # To offer it, before it is sent; then as ever.
    shared = [["index"], [], [], COMPARED, [], [], [], []]
    assert [sorted(said) for said in loading.meetings] == shared
    loading.meetings.clear()
    # What may not be a joint load is none before the tree was opened.
    here = jax.ShapeDtypeStruct(WIDE.shape, WIDE.dtype, sharding=NamedSharding(Mesh(jax.devices()[:1], "x"), P()))
    tr.load(saved / "ckpt", {"w": here}, extra="ignore")
    tr.load(saved / "ckpt", {"step": 0}, extra="ignore", shardings=COLUMNS)
    assert loading.meetings == []
    assert_wide(tr.load(saved / "ckpt", shardings=where)["w"])
    assert_wide(tr.load(saved / "ckpt", {"w": wide}, extra="ignore", missing="keep")["w"])
    assert [sorted(said) for said in loading.meetings] == [*shared[3:], *shared[3:]]
    loading.meetings.clear()
    # A safetensors file has no index.
    assert_wide(tr.load(saved / "one.safetensors", {"w": wide})["w"])
    assert [sorted(said) for said in loading.meetings] == [["index"], *shared[3:]]
    assert loading.meetings[0] == {"index": None}


def test_no_exchange_begins_where_others_may_have_given_up(
    loading: Loading, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 4.0, 4.0, 8.0])
    monkeypatch.setattr(joint_load, "last_allgather", lambda: next(clock))
    assert_wide(tr.load(saved / "ckpt", only="w", shardings=COLUMNS, timeout=5)["w"])
    for times in ([0.0, 4.6], [0.0, 0.0, 0.0, 4.6]):
        clock = iter(times)
        before = count_given_up()
        with pytest.raises(TimedOutError, match="did not synchronise within 5 s"):
            tr.load(saved / "ckpt", only="w", shardings=COLUMNS, timeout=5)
        assert count_given_up() == before + 1
    assert len(loading.exchanges) == 1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("files", [0, 1, 5, 16, 1024, 1500])
@pytest.mark.parametrize("count", [1, 3, 16, 1024])
def test_each_file_is_checked_and_each_process_opens_one(files: int, count: int, tmp_path: Path) -> None:
    with contextlib.ExitStack() as opened, OpenFolder(tmp_path) as folder:
        names = [str(number) for number in range(files)]
        shares = [
            source._FilesOnDemand(folder, names, opened, Processes(this=this, count=count)).own for this in range(count)
        ]
    found = collections.Counter(itertools.chain.from_iterable(shares))
    assert found.keys() == set(range(files))
    assert max(map(len, shares)) == -(-files // count)
    assert min(map(len, shares)) >= min(1, files)


def test_safetensors_are_exchanged_and_msgpack_is_not(loading: Loading, saved: Path) -> None:
    assert_wide(tr.load(saved / "one.safetensors", shardings=COLUMNS)["w"])
    assert len(loading.exchanges) == 1
    assert_wide(tr.load(saved / "one.msgpack", shardings=COLUMNS)["w"])
    assert len(loading.exchanges) == 1
    assert len(loading.meetings) == 5 + 2


@pytest.mark.parametrize("abstract", [False, True])
def test_like_says_where(loading: Loading, saved: Path, abstract: bool) -> None:
    both = NamedSharding(PLANE, P("y", "x"))
    like: Any = jax.device_put(np.zeros(WIDE.shape, np.float32), both)
    if abstract:
        like = jax.ShapeDtypeStruct(WIDE.shape, np.float32, sharding=both)
    tree = tr.load(saved / "ckpt", {"w": like}, only="w")
    assert_wide(tree["w"], both)
    assert len(loading.exchanges) == 1


def test_everything_that_load_can_do_to_leaves(loading: Loading, saved: Path) -> None:
    like = {
        "renamed": jax.ShapeDtypeStruct(WIDE.shape, jnp.bfloat16, sharding=COLUMNS),
        "new": jax.device_put(np.ones(8), EVERYWHERE),
        "step": 0,
    }
    tree = tr.load(saved / "ckpt", like, only=["w", "step"], key_map={"renamed": "w"}, missing="keep", cast=True)
    assert np.asarray(tree["renamed"]).tobytes() == WIDE.astype(jnp.bfloat16).tobytes()
    assert tree["renamed"].sharding == COLUMNS
    assert tree["new"] is like["new"]
    assert tree["step"] == 7
    part = tr.load(saved / "ckpt", at="b", shardings=COLUMNS)
    assert np.asarray(part["v"]).tobytes() == np.asarray(TREE["b"]["v"]).tobytes()
    assert len(loading.exchanges) == 2
    assert_wide(tr.load(saved / "ckpt", mapped=True, only="w", shardings=COLUMNS)["w"])


def test_typed_keys_are_exchanged_as_their_numbers(loading: Loading, tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(3), (64, 512))
    tr.save(tmp_path / "ckpt", keys)
    found = tr.load(tmp_path / "ckpt", shardings=COLUMNS)
    assert jax.random.key_impl(found) == jax.random.key_impl(keys)
    assert np.array_equal(jax.random.key_data(found), jax.random.key_data(keys))
    assert len(loading.exchanges) == 1


def test_a_number_that_becomes_an_array_lies_everywhere(loading: Loading, saved: Path) -> None:
    like = {"step": jax.ShapeDtypeStruct((), np.int32, sharding=EVERYWHERE)}
    assert tr.load(saved / "ckpt", like, only="step", cast=True)["step"] == 7


def test_leaves_batch_by_batch(loading: Loading, saved: Path) -> None:
    seen: list[str] = []

    def callback(array: Any, key: str) -> Any:
        seen.append(key)
        return array

    tree = tree_deserialize_leaves(saved / "leaves", shardings=where, callback=callback, chunk_size=1, timeout=5)
    assert_wide(tree["w"])
    assert sorted(seen) == ["b.v", "n", "w"]
    assert len(loading.exchanges) == 2
    assert len(loading.meetings) == 8


# ------------------------------------------------------------------------------------------------------ others fail


@pytest.mark.parametrize("meeting", [1, 2, 3, 4])
def test_who_fails_is_named_by_all(loading: Loading, saved: Path, meeting: int) -> None:
    loading.others = from_meeting(meeting, failing(CorruptError("block 3 of 'w' is damaged", hint="use another copy")))
    with pytest.raises(
        CorruptError, match=r"could not load '.*ckpt': process 2: block 3 of 'w' is damaged; use another"
    ):
        tr.load(saved / "ckpt", shardings=where)
    assert len(loading.meetings) == meeting
    assert not any("failure" in said for said in loading.meetings)


def test_an_error_of_another_class_is_a_failed_process(loading: Loading, saved: Path) -> None:
    loading.others = from_meeting(2, failing(MemoryError("no room")))
    with pytest.raises(ProcessFailedError, match="process 2: MemoryError: no room") as caught:
        tr.load(saved / "ckpt", shardings=where)
    assert caught.value.processes == (2,)


def test_other_wishes_are_a_mismatch(loading: Loading, saved: Path) -> None:
    loading.others = lambda meeting, said: [{**said, "plan": "other"} if "plan" in said else said, said, said]
    with pytest.raises(MismatchError, match="process 1 wants other leaves"):
        tr.load(saved / "ckpt", shardings=where)
    assert len(loading.meetings) == 1


def test_another_state_is_opened_again(loading: Loading, saved: Path) -> None:
    loading.others = lambda meeting, said: [said, {**said, "state": "older"} if meeting <= 2 else said, said]
    assert_wide(tr.load(saved / "ckpt", shardings=where)["w"])
    assert len(loading.meetings) == 7


def test_states_that_stay_different_are_different_folders(loading: Loading, saved: Path) -> None:
    loading.others = lambda meeting, said: [said, {**said, "state": "mine"}, {**said, "state": "mine"}]
    with pytest.raises(NotSharedError, match="processes 2 and 3 found another state") as caught:
        tr.load(saved / "ckpt", shardings=where)
    assert caught.value.processes == (2, 3)
    assert len(loading.meetings) == 16


def test_all_tries_end_within_the_time_to_wait(loading: Loading, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(timing, "current", Timing())
    monkeypatch.setattr(joint_load, "time", SimpleNamespace(sleep=pauses.append))
    loading.others = lambda meeting, said: [said, {**said, "state": "mine"}, said]
    with pytest.raises(NotSharedError):
        tr.load(saved / "ckpt", shardings=where, timeout=4)
    assert len(loading.meetings) == 16
    assert 3 < sum(pauses) < 4


def test_what_was_replaced_for_one_is_read_again_by_all(loading: Loading, saved: Path) -> None:
    loading.others = lambda meeting, said: [said, {"again": True} if meeting == 2 else said, said]
    assert_wide(tr.load(saved / "ckpt", shardings=where)["w"])
    assert len(loading.meetings) == 2 + 5


def test_after_callbacks_nothing_is_read_again(loading: Loading, saved: Path) -> None:
    loading.others = lambda meeting, said: [said, {"again": True} if meeting == 3 else said, said]
    with pytest.raises(BusyError, match="was replaced"):
        tree_deserialize_leaves(saved / "leaves", shardings=where, callback=lambda array, key: array, chunk_size=1)
    assert len(loading.meetings) == 3


def test_who_does_not_come_is_not_waited_for_twice(loading: Loading, saved: Path) -> None:
    loading.late = TimedOutError("process 3 did not come")
    with pytest.raises(TimedOutError, match="process 3"):
        tr.load(saved / "ckpt", shardings=where, timeout=3)
    assert loading.timeouts == [3.0]


def test_a_broken_exchange_is_not_talked_about(loading: Loading, saved: Path) -> None:
    """The others are in the midst of it: they would take the meeting for a part of it, or never come."""
    loading.broken = ProcessFailedError("process 1 broke off")
    with pytest.raises(ProcessFailedError, match="process 1 broke off"):
        tr.load(saved / "ckpt", shardings=where)
    assert len(loading.meetings) == 4


# -------------------------------------------------------------------------------------------------- this one fails


def test_damage_here_is_told(loading: Loading, tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": TREE["w"]})
    (data,) = (tmp_path / "ckpt").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptError, match="leaf 'w' is damaged"):
        tr.load(tmp_path / "ckpt", shardings=where)
    assert "leaf 'w' is damaged" in loading.meetings[-1]["failure"]["message"]
    assert len(loading.meetings) == 2


@pytest.mark.parametrize(("meeting", "sharding"), [(1, EVERYWHERE), (2, COLUMNS)])
@pytest.mark.parametrize("late", [TimedOutError, ProcessFailedError])
def test_neither_damage_nor_who_did_not_come_hides_the_other(
    loading: Loading, tmp_path: Path, late: type[TimedOutError | ProcessFailedError], meeting: int, sharding: Any
) -> None:
    tr.save(tmp_path / "ckpt", {"w": TREE["w"]})
    (data,) = (tmp_path / "ckpt").glob("*.safetensors")
    data.write_bytes(data.read_bytes()[:-5] + b"other")
    error = late("process 3 did not come within 3 s")
    if isinstance(error, TimedOutError):
        error.missing = (3,)
    loading.late, loading.late_from = error, meeting
    both = "process 3 did not come within 3 s; before that.*CorruptError.*leaf 'w' is damaged"
    with pytest.raises(late, match=both) as caught:
        tr.load(tmp_path / "ckpt", shardings=sharding, timeout=3)
    assert isinstance(caught.value.__cause__, CorruptError)
    assert len(loading.timeouts) == meeting  # it is not waited for again
    assert getattr(caught.value, "missing", (3,)) == (3,)


@pytest.mark.parametrize(
    "said",
    [
        {"mesh": MESH},
        {"shardings": COLUMNS},
        {"shardings": {"w": COLUMNS, "b": None}},
        {"like": {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=COLUMNS)}},
        {"shardings": [("w", P("x"))], "mesh": MESH},
    ],
    ids=["mesh", "sharding", "tree", "like", "rules"],
)
def test_who_fails_before_it_knows_the_tree_tells_too(loading: Loading, tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(NotFoundError, match="nothing here"):
        tr.load(tmp_path / "nothing here", **said)
    assert [list(one) for one in loading.meetings] == [["failure"]]
    assert loading.meetings[0]["failure"]["class"] == "NotFoundError"


@pytest.mark.parametrize("said", [{}, {"shardings": jax.devices()[0]}, {"shardings": where}, {"like": {"w": WIDE}}])
def test_who_fails_alone_tells_nobody(loading: Loading, tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(NotFoundError):
        tr.load(tmp_path / "nothing here", **said)
    assert loading.meetings == []


def test_a_target_that_does_not_fit_is_told(loading: Loading, saved: Path) -> None:
    like = {"w": jax.ShapeDtypeStruct((3, 3), np.float32, sharding=EVERYWHERE)}
    with pytest.raises(MismatchError, match="differences"):
        tr.load(saved / "ckpt", like)
    assert loading.meetings[-1]["failure"]["class"] == "MismatchError"


def test_a_callback_that_fails_is_told(loading: Loading, saved: Path) -> None:
    def callback(array: Any, key: str) -> Any:
        raise KeyError(key)

    with pytest.raises(KeyError):
        tree_deserialize_leaves(saved / "leaves", shardings=where, callback=callback, chunk_size=1)
    assert "KeyError" in loading.meetings[-1]["failure"]["message"]


def test_an_interrupt_is_told_to_nobody_and_counted(loading: Loading, saved: Path) -> None:
    """The others wait at a point of this load; the next load of this process is none of theirs."""

    def callback(array: Any, key: str) -> Any:
        raise KeyboardInterrupt

    before = count_given_up()
    with pytest.raises(KeyboardInterrupt):
        tree_deserialize_leaves(saved / "leaves", shardings=where, callback=callback, chunk_size=1)
    assert not any("failure" in said for said in loading.meetings)
    assert count_given_up() == before + 1


def test_nothing_found_by_some_is_no_not_found(loading: Loading, saved: Path, tmp_path: Path) -> None:
    """Whoever hears NotFound begins a new run, and saves it over what the others found."""
    loading.others = from_meeting(1, failing(NotFoundError("nothing is there")))
    with pytest.raises(NotSharedError, match="process 2 did not find what the others found") as caught:
        tr.load(saved / "ckpt", shardings=where)
    assert caught.value.processes == (2,)
    loading.others = lambda meeting, said: [{"state": "one", "plan": "one"}] * 3
    with pytest.raises(NotSharedError, match="process 0 did not find what the others found") as caught:
        tr.load(tmp_path / "nothing here", mesh=MESH)
    assert isinstance(caught.value.__cause__, NotFoundError)


def test_the_own_error_is_raised_whatever_the_others_say(loading: Loading, tmp_path: Path) -> None:
    loading.others = from_meeting(1, failing(ExistsError("something other")))
    with pytest.raises(NotFoundError):
        tr.load(tmp_path / "nothing here", mesh=MESH)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("message", ["x" * 5000, "\N{SNOWMAN}" * 1000, "\U0001f332" * 1000, 'a"\\' * 500, "short"])
@pytest.mark.parametrize("hint", [None, "h" * 600])
def test_any_error_fits_into_what_a_process_says(loading: Loading, saved: Path, message: str, hint: str | None) -> None:
    for error in (MismatchError(message, hint=hint), RuntimeError(message)):

        def fail(array: Any, key: str, error: Exception = error) -> Any:
            raise error

        with pytest.raises(type(error)):
            tree_deserialize_leaves(saved / "leaves", shardings=where, callback=fail, chunk_size=1)
        assert message[:20] in loading.meetings[-1]["failure"]["message"]


def test_a_timeout_that_makes_no_sense_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="timeout is 0"):
        tr.load(tmp_path / "nothing", timeout=0)
    with pytest.raises(UnsupportedError, match="timeout is -1"):
        tree_deserialize_leaves(tmp_path / "nothing", timeout=-1)
