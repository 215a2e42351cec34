"""Loads by several processes: they agree, read their parts, exchange them, or all fail.

One process plays them all: each two of its eight devices belong to another one, as far as plans know, and the others
say at each meeting what the test wants. Real jobs are in ``tests/multiprocess``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import treering as tr
from treering._arrays import exchange
from treering._arrays.incoming import StoredArrays
from treering._checkpoint import joint_load
from treering._coordination import allgather, broadcast
from treering._coordination.messages import Failure
from treering._values import timing
from treering._values.processes import Processes
from treering._values.timing import Timing
from treering.errors import Busy, Corrupt, Exists, Mismatch, NotFound, NotShared, ProcessFailed, Timeout, Unsupported
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

MESH = Mesh(np.array(jax.devices()), ("x",))
PLANE = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
COLUMNS = NamedSharding(MESH, P(None, "x"))
EVERYWHERE = NamedSharding(MESH, P())
RNG = np.random.default_rng(0)
WIDE = RNG.standard_normal((512, 1024), np.float32)
TREE: dict[str, Any] = {
    "w": jnp.asarray(WIDE),
    "b": {"v": jnp.asarray(WIDE[:256]).astype(jnp.bfloat16)},
    "n": np.arange(5, dtype=np.int32),
    "step": 7,
}

Said = dict[str, Any]


@dataclasses.dataclass
class Job:
    """Four processes, of which this is process 0."""

    meetings: list[Said] = dataclasses.field(default_factory=list)
    """What this process said at each."""
    others: Callable[[int, Said], list[Said]] = lambda meeting, said: [said] * 3
    """What the others say at a meeting, given what this one says."""
    exchanges: int = 0

    def allgather_with_deadline(self, payload: bytes, processes: Processes, **waiting: Any) -> list[bytes]:
        assert processes == Processes(this=0, count=4)
        assert waiting["timeout"] > 0
        assert len(payload) <= 512
        said = json.loads(payload)
        self.meetings.append(said)
        return [payload, *(json.dumps(other).encode() for other in self.others(len(self.meetings), said))]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    playing = Job()

    def run_in_order(work: Callable[[], Any], processes: Processes, **waiting: Any) -> Any:
        playing.exchanges += 1
        return work()

    monkeypatch.setattr(exchange, "process_of", lambda device: device.id // 2)
    monkeypatch.setattr(joint_load, "job_processes", lambda: Processes(this=0, count=4))
    monkeypatch.setattr(joint_load, "allgather_with_deadline", playing.allgather_with_deadline)
    monkeypatch.setattr(joint_load, "run_in_order", run_in_order)
    monkeypatch.setattr(timing, "current", Timing(reopen_first=0.0))
    yield playing
    exchange._reading_mesh.cache_clear()
    exchange._own_places.cache_clear()


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


def failing(error: Exception) -> Said:
    return {"failure": Failure.of(error).to_node()}


def from_meeting(number: int, second: Said) -> Callable[[int, Said], list[Said]]:
    """Process 2 says something else from a meeting on."""
    return lambda meeting, said: [said, second if meeting >= number else said, said]


def assert_wide(found: Any, sharding: Any = COLUMNS, wanted: np.ndarray = WIDE) -> None:
    assert isinstance(found, jax.Array)
    assert found.sharding == sharding
    assert np.asarray(found).tobytes() == wanted.tobytes()


# ------------------------------------------------------------------------------------------------------- all is well


@pytest.mark.parametrize("name", ["ckpt", "leaves"])
def test_columns_are_read_once_and_exchanged(job: Job, saved: Path, name: str) -> None:
    tree = tr.load(saved / name, shardings=where, timeout=5)
    assert_wide(tree["w"])
    assert tree["b"]["v"].dtype == jnp.bfloat16
    assert np.asarray(tree["b"]["v"]).tobytes() == np.asarray(TREE["b"]["v"]).tobytes()
    assert tree["step"] == 7
    assert job.exchanges == 1
    # To agree, before the exchange, at the end.
    assert [sorted(said) for said in job.meetings] == [["plan", "state"], [], [], []]


def test_each_byte_is_read_once(job: Job, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    read = StoredArrays.read

    def counting(arrays: StoredArrays, *arguments: Any) -> None:
        before = arrays.bytes_read
        read(arrays, *arguments)
        counted.append(arrays.bytes_read - before)

    monkeypatch.setattr(StoredArrays, "read", counting)
    told: list[tuple[int, int]] = []
    tr.load(saved / "ckpt", only="w", shardings=COLUMNS, progress=lambda done, total: told.append((done, total)))
    assert sum(counted) == WIDE.nbytes
    assert told[-1] == (WIDE.nbytes, WIDE.nbytes)


def test_batches_are_exchanged_one_after_the_other(job: Job, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_load, "BATCH_BYTES", 1)
    assert_wide(tr.load(saved / "ckpt", shardings=where)["w"])
    assert job.exchanges == 2
    assert len(job.meetings) == 6


def test_what_each_process_reads_for_itself_is_not_exchanged(job: Job, saved: Path) -> None:
    assert_wide(tr.load(saved / "ckpt", mesh=MESH)["w"], EVERYWHERE)
    assert job.exchanges == 0
    assert len(job.meetings) == 2


@pytest.mark.parametrize(
    "shardings", [None, jax.devices()[3], NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), P())]
)
def test_what_lies_with_one_process_is_loaded_without_a_word(job: Job, saved: Path, shardings: Any) -> None:
    tree = tr.load(saved / "ckpt", shardings=shardings)
    assert np.asarray(tree["w"]).tobytes() == WIDE.tobytes()
    assert job.meetings == []


def test_safetensors_are_exchanged_and_msgpack_is_not(job: Job, saved: Path) -> None:
    assert_wide(tr.load(saved / "one.safetensors", shardings=COLUMNS)["w"])
    assert job.exchanges == 1
    assert_wide(tr.load(saved / "one.msgpack", shardings=COLUMNS)["w"])
    assert job.exchanges == 1
    assert len(job.meetings) == 4 + 2


@pytest.mark.parametrize("abstract", [False, True])
def test_like_says_where(job: Job, saved: Path, abstract: bool) -> None:
    both = NamedSharding(PLANE, P("y", "x"))
    like: Any = jax.device_put(np.zeros(WIDE.shape, np.float32), both)
    if abstract:
        like = jax.ShapeDtypeStruct(WIDE.shape, np.float32, sharding=both)
    tree = tr.load(saved / "ckpt", {"w": like}, only="w")
    assert_wide(tree["w"], both)
    assert job.exchanges == 1


def test_everything_that_load_can_do_to_leaves(job: Job, saved: Path) -> None:
    like = {
        "renamed": jax.ShapeDtypeStruct(WIDE.shape, jnp.bfloat16, sharding=COLUMNS),
        "new": jax.device_put(np.ones(8), EVERYWHERE),
        "step": 0,
    }
    tree = tr.load(saved / "ckpt", like, only=["w", "step"], rename={"renamed": "w"}, missing="keep", cast=True)
    assert np.asarray(tree["renamed"]).tobytes() == WIDE.astype(jnp.bfloat16).tobytes()
    assert tree["renamed"].sharding == COLUMNS
    assert tree["new"] is like["new"]
    assert tree["step"] == 7
    part = tr.load(saved / "ckpt", at="b", shardings=COLUMNS)
    assert np.asarray(part["v"]).tobytes() == np.asarray(TREE["b"]["v"]).tobytes()
    assert job.exchanges == 2
    assert_wide(tr.load(saved / "ckpt", mapped=True, only="w", shardings=COLUMNS)["w"])


def test_typed_keys_are_exchanged_as_their_numbers(job: Job, tmp_path: Path) -> None:
    keys = jax.random.split(jax.random.key(3), (64, 512))
    tr.save(tmp_path / "ckpt", keys)
    found = tr.load(tmp_path / "ckpt", shardings=COLUMNS)
    assert jax.random.key_impl(found) == jax.random.key_impl(keys)
    assert np.array_equal(jax.random.key_data(found), jax.random.key_data(keys))
    assert job.exchanges == 1


def test_a_number_that_becomes_an_array_lies_everywhere(job: Job, saved: Path) -> None:
    like = {"step": jax.ShapeDtypeStruct((), np.int32, sharding=EVERYWHERE)}
    assert tr.load(saved / "ckpt", like, only="step", cast=True)["step"] == 7


def test_leaves_batch_by_batch(job: Job, saved: Path) -> None:
    seen: list[str] = []

    def callback(array: Any, key: str) -> Any:
        seen.append(key)
        return array

    tree = tree_deserialize_leaves(saved / "leaves", shardings=where, callback=callback, chunk_size=1, timeout=5)
    assert_wide(tree["w"])
    assert sorted(seen) == ["b.v", "n", "w"]
    assert job.exchanges == 2
    assert len(job.meetings) == 6


# ------------------------------------------------------------------------------------------------------ others fail


@pytest.mark.parametrize("meeting", [1, 2, 3, 4])
def test_who_fails_is_named_by_all(job: Job, saved: Path, meeting: int) -> None:
    job.others = from_meeting(meeting, failing(Corrupt("block 3 of 'w' is damaged", hint="use another copy")))
    with pytest.raises(Corrupt, match=r"could not load '.*ckpt': process 2: block 3 of 'w' is damaged; use another"):
        tr.load(saved / "ckpt", shardings=where)
    assert len(job.meetings) == meeting
    assert not any("failure" in said for said in job.meetings)


def test_an_error_of_another_class_is_a_failed_process(job: Job, saved: Path) -> None:
    job.others = from_meeting(2, failing(MemoryError("no room")))
    with pytest.raises(ProcessFailed, match="process 2: MemoryError: no room") as caught:
        tr.load(saved / "ckpt", shardings=where)
    assert caught.value.processes == (2,)


def test_other_wishes_are_a_mismatch(job: Job, saved: Path) -> None:
    job.others = lambda meeting, said: [{**said, "plan": "other"} if "plan" in said else said, said, said]
    with pytest.raises(Mismatch, match="process 1 wants other leaves"):
        tr.load(saved / "ckpt", shardings=where)
    assert len(job.meetings) == 1


def test_another_state_is_opened_again(job: Job, saved: Path) -> None:
    job.others = lambda meeting, said: [said, {**said, "state": "older"} if meeting <= 2 else said, said]
    assert_wide(tr.load(saved / "ckpt", shardings=where)["w"])
    assert len(job.meetings) == 6


def test_states_that_stay_different_are_different_folders(job: Job, saved: Path) -> None:
    job.others = lambda meeting, said: [said, {**said, "state": "mine"}, {**said, "state": "mine"}]
    with pytest.raises(NotShared, match="processes 2 and 3 found another state") as caught:
        tr.load(saved / "ckpt", shardings=where)
    assert caught.value.processes == (2, 3)
    assert len(job.meetings) == 16


def test_what_was_replaced_for_one_is_read_again_by_all(job: Job, saved: Path) -> None:
    job.others = lambda meeting, said: [said, {"again": True} if meeting == 2 else said, said]
    assert_wide(tr.load(saved / "ckpt", shardings=where)["w"])
    assert len(job.meetings) == 2 + 4


def test_after_callbacks_nothing_is_read_again(job: Job, saved: Path) -> None:
    job.others = lambda meeting, said: [said, {"again": True} if meeting == 3 else said, said]
    with pytest.raises(Busy, match="was replaced"):
        tree_deserialize_leaves(saved / "leaves", shardings=where, callback=lambda array, key: array, chunk_size=1)
    assert len(job.meetings) == 3


def test_who_does_not_come_is_not_waited_for_twice(job: Job, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def late(payload: bytes, processes: Processes, **waiting: Any) -> list[bytes]:
        nonlocal calls
        calls += 1
        assert waiting["timeout"] == 3.0
        raise Timeout("process 3 did not come")

    monkeypatch.setattr(joint_load, "allgather_with_deadline", late)
    with pytest.raises(Timeout, match="process 3"):
        tr.load(saved / "ckpt", shardings=where, timeout=3)
    assert calls == 1


def test_a_broken_exchange_is_not_talked_about(job: Job, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in the midst of it: they would take the meeting for a part of it, or never come."""

    def broken(work: Callable[[], Any], processes: Processes, **waiting: Any) -> Any:
        raise ProcessFailed("process 1 broke off")

    monkeypatch.setattr(joint_load, "run_in_order", broken)
    with pytest.raises(ProcessFailed, match="process 1 broke off"):
        tr.load(saved / "ckpt", shardings=where)
    assert len(job.meetings) == 3


# -------------------------------------------------------------------------------------------------- this one fails


def test_damage_here_is_told(job: Job, tmp_path: Path) -> None:
    tr.save(tmp_path / "ckpt", {"w": TREE["w"]})
    (data,) = (tmp_path / "ckpt").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    with pytest.raises(Corrupt, match="leaf 'w' is damaged"):
        tr.load(tmp_path / "ckpt", shardings=where)
    assert "leaf 'w' is damaged" in job.meetings[-1]["failure"]["message"]
    assert len(job.meetings) == 2


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
def test_who_fails_before_it_knows_the_tree_tells_too(job: Job, tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(NotFound, match="nothing here"):
        tr.load(tmp_path / "nothing here", **said)
    assert [list(one) for one in job.meetings] == [["failure"]]
    assert job.meetings[0]["failure"]["class"] == "NotFound"


@pytest.mark.parametrize("said", [{}, {"shardings": jax.devices()[0]}, {"shardings": where}, {"like": {"w": WIDE}}])
def test_who_fails_alone_tells_nobody(job: Job, tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(NotFound):
        tr.load(tmp_path / "nothing here", **said)
    assert job.meetings == []


def test_a_target_that_does_not_fit_is_told(job: Job, saved: Path) -> None:
    like = {"w": jax.ShapeDtypeStruct((3, 3), np.float32, sharding=EVERYWHERE)}
    with pytest.raises(Mismatch, match="differences"):
        tr.load(saved / "ckpt", like)
    assert job.meetings[-1]["failure"]["class"] == "Mismatch"


def test_a_callback_that_fails_is_told(job: Job, saved: Path) -> None:
    def callback(array: Any, key: str) -> Any:
        raise KeyError(key)

    with pytest.raises(KeyError):
        tree_deserialize_leaves(saved / "leaves", shardings=where, callback=callback, chunk_size=1)
    assert "KeyError" in job.meetings[-1]["failure"]["message"]


def test_an_interrupt_is_told_to_nobody_and_counted(job: Job, saved: Path) -> None:
    """The others wait at a point of this load; the next load of this process is none of theirs."""

    def callback(array: Any, key: str) -> Any:
        raise KeyboardInterrupt

    before = allgather._order.given_up
    with pytest.raises(KeyboardInterrupt):
        tree_deserialize_leaves(saved / "leaves", shardings=where, callback=callback, chunk_size=1)
    assert not any("failure" in said for said in job.meetings)
    assert allgather._order.given_up == before + 1


def test_nothing_found_by_some_is_no_not_found(job: Job, saved: Path, tmp_path: Path) -> None:
    """Whoever hears NotFound begins a new run, and saves it over what the others found."""
    job.others = from_meeting(1, failing(NotFound("nothing is there")))
    with pytest.raises(NotShared, match="process 2 did not find what the others found") as caught:
        tr.load(saved / "ckpt", shardings=where)
    assert caught.value.processes == (2,)
    job.others = lambda meeting, said: [{"state": "one", "plan": "one"}] * 3
    with pytest.raises(NotShared, match="process 0 did not find what the others found") as caught:
        tr.load(tmp_path / "nothing here", mesh=MESH)
    assert isinstance(caught.value.__cause__, NotFound)


def test_the_own_error_is_raised_whatever_the_others_say(job: Job, tmp_path: Path) -> None:
    job.others = from_meeting(1, failing(Exists("something other")))
    with pytest.raises(NotFound):
        tr.load(tmp_path / "nothing here", mesh=MESH)


@pytest.mark.parametrize("message", ["x" * 5000, "\N{SNOWMAN}" * 1000, "\U0001f332" * 1000, 'a"\\' * 500, "short"])
@pytest.mark.parametrize("hint", [None, "h" * 600])
def test_any_error_fits_into_a_payload(message: str, hint: str | None) -> None:
    for error in (Mismatch(message, hint=hint), RuntimeError(message)):
        payload = broadcast.encode_reply({}, Failure.of(error))
        assert len(payload) <= 512
        found = Failure.from_node(json.loads(payload)["failure"], "it")
        assert message[:20] in found.message


def test_a_timeout_that_makes_no_sense_is_refused_before_anything_is_opened(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="timeout is 0"):
        tr.load(tmp_path / "nothing", timeout=0)
    with pytest.raises(Unsupported, match="timeout is -1"):
        tree_deserialize_leaves(tmp_path / "nothing", timeout=-1)
