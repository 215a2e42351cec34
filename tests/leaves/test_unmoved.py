"""Leaves directories where nothing is renamed: in memory and in a bucket, whose index points into attempts for good."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering as tr
from tests.buckets import NO_ANSWER, Answer, Delete, List, MemoryBucket, ObjectVersion, Put, Request, use_for_memory
from tests.command import ended
from tests.stores import begin_leaves, located, store_at
from tests.trees import assert_unchanged
from treering.errors import (
    BusyError,
    CorruptError,
    ExistsError,
    MismatchError,
    NotFoundError,
    StoreError,
    UnsupportedError,
)
from treering.leaves import index_leaves, tree_deserialize_leaves, tree_serialize_leaves

INDEX = "tensorstore_index.json"
TREE = {"params": {"w": jnp.arange(6.0).reshape(2, 3), "layer.0": np.arange(5)}, "step": 7, "note": "x" * 70_000}
OTHER = {"m": jnp.ones(3)}


@pytest.fixture
def bucket() -> MemoryBucket:
    return MemoryBucket()


@pytest.fixture(params=["memory", "bucket"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, bucket: MemoryBucket) -> str:
    if request.param == "bucket":
        use_for_memory(monkeypatch, bucket, grace=3600)
    return f"memory://{request.node.name.replace('[', '-')}/leaves"


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch, bucket: MemoryBucket) -> str:
    use_for_memory(monkeypatch, bucket, grace=3600)
    return "memory://a/leaves"


def use(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch, grace: float = 3600.0) -> None:
    """Let what is at memory:// be in a bucket."""
    use_for_memory(monkeypatch, bucket, grace=grace)


def exact(path: str | Path, prefix: str | None = None) -> Any:
    return tree_deserialize_leaves(path, prefix=prefix, structure="exact")


def names(path: str) -> set[str]:
    return {found.name for found in store_at(path).list()}


def attempts(path: str) -> set[str]:
    return {name.split("/")[1] for name in names(path) if name.startswith(".treering/")}


def index_of(path: str) -> Any:
    found = store_at(path).read(INDEX)
    assert found is not None
    return json.loads(found.data)


def attempt_of(path: str, prefix: str = "") -> str:
    attempt: str = json.loads(index_of(path)["treering"][prefix]["record"])["attempt"]
    return attempt


def copy(path: str, folder: Path) -> Path:
    """Copy all objects to a folder, as the clouds' own tools do."""
    for name in names(path):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        found = store_at(path).read(name)
        assert found is not None
        (folder / name).write_bytes(found.data)
    return folder


# ------------------------------------------------------------------------------------------------------ save and load


def test_what_was_saved_comes_back(path: str) -> None:
    tree_serialize_leaves(path, TREE)
    assert_unchanged(exact(path), TREE)
    assert_unchanged(tr.load(path), TREE)
    assert tr.verify(path).ok
    assert list(tr.inspect(path).leaves) == ["params/w", "params/layer.0", "step", "note"]
    with tr.open(path) as opened:
        assert np.array_equal(opened["params/w"][1:], [[3, 4, 5]])


def test_the_index_points_to_the_folders_of_the_attempts(path: str) -> None:
    tree_serialize_leaves(path, TREE, prefix="model")
    tree_serialize_leaves(path, OTHER)
    index = index_of(path)
    above = f".treering/{attempt_of(path, 'model')}/leaves/model"
    assert [one["path"] for one in index["prefixes"]["model"]] == [f"{above}/params/w", f"{above}/params/layer%2E0"]
    assert index["arrays"] == [{"path": f".treering/{attempt_of(path)}/leaves/m", "shape": [3], "dtype": "float32"}]
    listed = {f"{one['path']}/.zarray" for one in (*index["prefixes"]["model"], *index["arrays"])}
    assert listed <= names(path)
    assert {name for name in names(path) if not name.startswith(".treering/")} == {INDEX}


def test_a_save_keeps_other_prefixes_and_what_is_unknown(path: str) -> None:
    tree_serialize_leaves(path, TREE, prefix="model")
    before = index_of(path)
    store_at(path).replace(INDEX, json.dumps({**before, "by": "me"}).encode())
    for number in range(3):
        tree_serialize_leaves(path, {"m": jnp.full(3, number)}, prefix="opt")
    assert_unchanged(exact(path, "model"), TREE)
    assert_unchanged(exact(path, "opt"), {"m": jnp.full(3, 2)})
    after = index_of(path)
    assert after["by"] == "me"
    assert after["prefixes"]["model"] == before["prefixes"]["model"]
    assert after["treering"]["model"] == before["treering"]["model"]


def test_no_index_is_like_one_before(path: str) -> None:
    nonces = set()
    for _ in range(3):
        tree_serialize_leaves(path, OTHER)
        nonces.add(index_of(path)["nonce"])
    assert len(nonces) == 3


def test_many_and_large_leaves(path: str) -> None:
    tree: dict[str, Any] = {str(number): np.full(3, number, np.int16) for number in range(100)}
    tree |= {"large": np.arange(3 << 18, dtype=np.float32).reshape(3, -1), "empty": np.zeros((0, 2), np.int8)}
    tree_serialize_leaves(path, tree, compressor=None, chunk_bytes=1 << 20)
    assert_unchanged(exact(path), tree)
    tree_serialize_leaves(path, tree, compressor={"id": "zlib", "level": 1})
    assert_unchanged(exact(path), tree)


def test_leaves_of_prefixes_may_not_lie_in_each_other(path: str) -> None:
    tree_serialize_leaves(path, {"b": OTHER}, prefix="a")
    with pytest.raises(MismatchError, match="the same, or one lies in the other"):
        tree_serialize_leaves(path, OTHER, prefix="a.b")
    assert_unchanged(exact(path, "a"), {"b": OTHER})
    assert len(attempts(path)) == 1


def test_what_fails_leaves_nothing(path: str) -> None:
    tree_serialize_leaves(path, OTHER)
    before = names(path)

    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tree_serialize_leaves(path, TREE, progress=fail)
    assert names(path) == before
    assert_unchanged(exact(path), OTHER)


def test_a_first_save_that_fails_leaves_an_index_without_trees(stored: str) -> None:
    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tree_serialize_leaves(stored, TREE, progress=fail)
    assert names(stored) == {INDEX}
    index = index_of(stored)
    assert (index["format"], index["prefixes"]) == ("tensorstore", {})
    with pytest.raises(NotFoundError, match="no leaves directory"):
        tree_deserialize_leaves(stored)
    tree_serialize_leaves(stored, TREE)
    assert_unchanged(exact(stored), TREE)


def test_a_checkpoint_is_not_saved_over(path: str) -> None:
    tr.save(path, OTHER)
    with pytest.raises(ExistsError):
        tree_serialize_leaves(path, TREE)
    assert_unchanged(tr.load(path), OTHER)


def test_a_manager_that_would_write_is_refused(path: str) -> None:
    with pytest.raises(UnsupportedError, match=r"manager.*save_async"):
        tree_serialize_leaves(path, OTHER, object())
    assert not names(path)


def test_a_manager_reads_nothing_behind_a_url(path: str) -> None:
    class Reader:
        def wait_until_finished(self) -> None:
            pass

        def deserialize_with_paths(self, shardings: Any, paths: Any) -> Any:
            raise AssertionError(paths)

    tree_serialize_leaves(path, OTHER, prefix="ours")
    zarray = {"chunks": [2], "compressor": None, "dtype": "<f4", "fill_value": None, "filters": None, "order": "C"}
    index = index_of(path) | {"arrays": [{"path": "w", "shape": [2], "dtype": "float32"}]}
    store_at(path).replace(INDEX, json.dumps(index).encode())
    store_at(path).replace("w/.zarray", json.dumps(zarray | {"shape": [2], "zarr_format": 2}).encode())
    store_at(path).replace("w/0", np.ones(2, np.float32).tobytes())
    mesh = jax.make_mesh((1,), ("x",))
    for prefix, wanted in (("ours", OTHER), (None, {"w": jnp.ones(2)})):
        found = tree_deserialize_leaves(path, mesh, Reader(), prefix=prefix)
        assert {name: np.asarray(leaf).tolist() for name, leaf in found.items()} == {
            name: leaf.tolist() for name, leaf in wanted.items()
        }


def test_damage_is_found(path: str) -> None:
    tree_serialize_leaves(path, TREE)
    name = next(name for name in names(path) if name.endswith("w/0.0"))
    store_at(path).replace(name, b"\1" * 24)
    with pytest.raises(CorruptError, match="params/w"):
        tree_deserialize_leaves(path)
    assert [finding.key for finding in tr.verify(path).findings] == ["params/w"]
    store_at(path).remove(name)
    with pytest.raises(CorruptError, match="is missing"):
        tree_deserialize_leaves(path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["arrays"][0].update(path=".treering/0123456789abcdef/leaves/../../secret"),
        lambda index: index["arrays"][0].update(path=".treering/0123456789abcdef/record.json"),
        lambda index: index["treering"][""].update(stays=False),
        lambda index: index["treering"][""].update(stays=1),
        lambda index: index["treering"][""].update(superseded=[{"attempt": "../..", "since": 1}]),
        lambda index: index["treering"][""].update(superseded=[{"attempt": "0123456789abcdef", "since": None}]),
        lambda index: index["treering"][""].update(superseded={}),
    ],
)
def test_an_index_that_contradicts_itself_is_damaged(change: Callable[[Any], None], path: str) -> None:
    tree_serialize_leaves(path, OTHER)
    index = index_of(path)
    change(index)
    store_at(path).replace(INDEX, json.dumps(index).encode())
    with pytest.raises(CorruptError):
        tree_deserialize_leaves(path)
    before = names(path)
    with pytest.raises(CorruptError):
        tree_serialize_leaves(path, TREE)
    assert names(path) == before


def test_an_entry_in_the_folder_of_another_attempt_is_damage(path: str) -> None:
    tree_serialize_leaves(path, OTHER)
    index = index_of(path)
    index["arrays"][0]["path"] = ".treering/0123456789abcdef/leaves/m"
    store_at(path).replace(INDEX, json.dumps(index).encode())
    with pytest.raises(CorruptError, match="entry 0"):
        tree_deserialize_leaves(path)


# --------------------------------------------------------------------------------------------------------------- races


@pytest.mark.parametrize("prefix", ["model", "opt"])
def test_of_two_savers_one_wins_and_the_other_is_told(path: str, prefix: str) -> None:
    tree_serialize_leaves(path, {"old": jnp.zeros(2)}, prefix="model")
    won: list[str] = []

    def save_another(done: int, total: int) -> None:
        if not won:
            tree_serialize_leaves(path, OTHER, prefix=prefix)
            won.append(attempt_of(path, prefix))

    with pytest.raises(BusyError, match="another save changed the index"):
        tree_serialize_leaves(path, TREE, prefix="model", progress=save_another)
    assert_unchanged(exact(path, prefix), OTHER)
    if prefix != "model":
        assert_unchanged(exact(path, "model"), {"old": jnp.zeros(2)})
    # What the other one wrote is gone, and a save after it succeeds.
    assert not [name for name in names(path) if "note" in name]
    tree_serialize_leaves(path, TREE, prefix="model")
    assert_unchanged(exact(path, "model"), TREE)


def test_a_save_whose_answer_is_lost_is_found_by_its_attempt(stored: str, bucket: MemoryBucket) -> None:
    """The index that is there afterwards is another one, which names it: of another prefix, or of a later save."""
    tree_serialize_leaves(stored, OTHER, prefix="opt")
    lost = [False]

    def lose_answer(request: Request) -> Answer | None:
        if not isinstance(request, Put) or not request.name.endswith(INDEX) or lost[0]:
            return None
        bucket.answer(request)
        lost[0] = True
        tree_serialize_leaves(stored, {"m": jnp.zeros(3)}, prefix="opt")
        return NO_ANSWER

    bucket.meet = lose_answer
    tree_serialize_leaves(stored, TREE, prefix="model")
    assert lost[0]
    assert_unchanged(exact(stored, "model"), TREE)
    assert_unchanged(exact(stored, "opt"), {"m": jnp.zeros(3)})


def test_where_nothing_tells_what_became_of_it_all_stays(stored: str, bucket: MemoryBucket) -> None:
    tree_serialize_leaves(stored, OTHER)
    bucket.patience = 1e-9
    bucket.meet = lambda request: NO_ANSWER if isinstance(request, Put) and request.name.endswith(INDEX) else None
    with pytest.raises(StoreError, match="may yet be in place"):
        tree_serialize_leaves(stored, TREE)
    bucket.meet = lambda _: None
    assert_unchanged(exact(stored), OTHER)
    assert [name for name in names(stored) if name.endswith("params/w/0.0")]
    # The next save proves that it can never be committed.
    tree_serialize_leaves(stored, OTHER)
    assert not [name for name in names(stored) if name.endswith("params/w/0.0")]


def test_an_endpoint_that_ignores_conditions_is_refused(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ignorant(MemoryBucket):
        def answer(self, request: Request) -> Answer:
            if isinstance(request, Put) and isinstance(request.condition, ObjectVersion):
                request = Put(request.name, request.data)
            return super().answer(request)

    use_for_memory(monkeypatch, Ignorant(), grace=3600)
    with pytest.raises(StoreError, match="does not heed conditions"):
        tree_serialize_leaves("memory://a/leaves", TREE)
    assert names("memory://a/leaves") == {INDEX}


# -------------------------------------------------------------------------------------------- what waits and what goes


def test_superseded_leaves_wait_for_readers_then_go(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket.time = 1e9
    use_for_memory(monkeypatch, bucket, grace=100.0)
    path = "memory://a/leaves"
    tree_serialize_leaves(path, TREE)
    first = attempt_of(path)
    with tr.open(path) as opened:
        tree_serialize_leaves(path, OTHER)
        second = attempt_of(path)
        assert np.array_equal(opened["params/w"][:], TREE["params"]["w"])  # type: ignore[index]
        assert attempts(path) == {first, second}
        (waits,) = index_of(path)["treering"][""]["superseded"]
        assert (waits["attempt"], waits["since"] // 1) == (first, 1e9)
        bucket.wait(200)
        # Of whichever prefix the next save is.
        tree_serialize_leaves(path, OTHER, prefix="opt")
        assert attempts(path) == {second, attempt_of(path, "opt")}
        with pytest.raises(BusyError, match="saved again after it was opened"):
            opened["note"][:]
    tree_serialize_leaves(path, OTHER, prefix="opt")
    assert "superseded" not in index_of(path)["treering"][""]
    assert tr.verify(path).ok


def test_without_a_grace_they_go_at_once(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    use_for_memory(monkeypatch, bucket, grace=0.0)
    path = "memory://a/leaves"
    for number in range(3):
        tree_serialize_leaves(path, {"m": jnp.full(3, number)})
        assert attempts(path) == {attempt_of(path)}


def test_an_index_that_calls_what_it_lists_superseded_is_not_believed(path: str) -> None:
    tree_serialize_leaves(path, OTHER, prefix="opt")
    tree_serialize_leaves(path, TREE)
    index = index_of(path)
    index["treering"][""]["superseded"] = [{"attempt": attempt_of(path, "opt"), "since": 1}]
    store_at(path).replace(INDEX, json.dumps(index).encode())
    tree_serialize_leaves(path, TREE)
    assert_unchanged(exact(path, "opt"), OTHER)


def test_what_a_dead_saver_left_goes_once_it_can_never_be_committed(path: str) -> None:
    tree_serialize_leaves(path, OTHER)
    dead = begin_leaves(located(path))
    dead.write("w", [("0", [b"x" * (2 << 20)], 2 << 20)])
    begin_leaves(located(path)).__exit__()
    assert dead.attempt in attempts(path)  # its base is still there
    tree_serialize_leaves(path, OTHER)
    assert dead.attempt not in attempts(path)
    assert_unchanged(exact(path), OTHER)


def test_the_doctor_knows_what_is_left_over(stored: str, capsys: pytest.CaptureFixture[str]) -> None:
    tree_serialize_leaves(stored, OTHER)
    with begin_leaves(located(stored)) as save, begin_leaves(located(stored)) as other:
        save.write("w", [("0", [b"x" * (2 << 20)], 2 << 20)])
        store_at(stored).remove(f".treering/{other.attempt}/marker")
        other.write("w", [("0", [b"x" * (2 << 20)], 2 << 20)])
        for changed, said in ((False, "may still be committed"), (True, "it can never be committed")):
            if changed:
                found = store_at(stored).read(INDEX)
                assert found is not None
                store_at(stored).replace(INDEX, found.data + b"\n")
            ended("doctor", stored)
            text = capsys.readouterr().out
            assert f"attempt {save.attempt}" in text
            assert said in text
            assert "nothing proves that they are leftovers" in text
    ended("doctor", stored)
    assert "attempt" not in capsys.readouterr().out


def test_data_without_a_marker_stay(path: str) -> None:
    """Perhaps an index that was lost had named them."""
    tree_serialize_leaves(path, TREE)
    before = {name for name in names(path) if name != INDEX}
    store_at(path).remove(INDEX)
    tree_serialize_leaves(path, OTHER)
    assert before <= names(path)


def test_saving_works_where_nothing_may_be_deleted_or_listed(stored: str, bucket: MemoryBucket) -> None:
    def is_denied(request: Request) -> bool:
        return isinstance(request, List) or (isinstance(request, Delete) and request.condition is None)

    bucket.denied = is_denied
    tree_serialize_leaves(stored, TREE)
    tree_serialize_leaves(stored, OTHER)
    assert_unchanged(exact(stored), OTHER)
    bucket.denied = lambda _: False
    assert len(index_of(stored)["treering"][""]["superseded"]) == 1


# ---------------------------------------------------------------------------------------------------- copies on a disk


def test_a_copy_on_disk_is_read_and_saved_into(path: str, tmp_path: Path) -> None:
    tree_serialize_leaves(path, TREE, prefix="model")
    tree_serialize_leaves(path, OTHER, prefix="opt")
    here = copy(path, tmp_path)
    assert_unchanged(exact(here, "model"), TREE)
    assert tr.verify(here).ok
    tree_serialize_leaves(here, {"m": jnp.zeros(2)}, prefix="opt")
    assert (here / "opt" / "m" / ".zarray").is_file()
    assert_unchanged(exact(here, "opt"), {"m": jnp.zeros(2)})
    assert_unchanged(exact(here, "model"), TREE)
    there = {folder.name for folder in (here / ".treering").iterdir()}
    assert len(there) == 2
    assert attempt_of(path, "model") in there
    assert attempt_of(path, "opt") not in there


def test_a_copy_whose_index_is_lost_is_indexed_on_disk(path: str, tmp_path: Path) -> None:
    tree_serialize_leaves(path, TREE, prefix="model")
    here = copy(path, tmp_path)
    (here / INDEX).unlink()
    index_leaves(here)
    assert_unchanged(exact(here, "model"), TREE)
    assert (here / "model" / "params" / "w" / ".zarray").is_file()


def test_a_copy_from_a_disk_is_read_and_saved_into(path: str, tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, TREE, prefix="model")
    store = store_at(path)
    store.transaction().make()
    for file in tmp_path.rglob("*"):
        if file.is_file():
            store.create(file.relative_to(tmp_path).as_posix(), [data := file.read_bytes()], len(data))
    assert_unchanged(exact(path, "model"), TREE)
    before = names(path)
    tree_serialize_leaves(path, OTHER, prefix="model")
    assert_unchanged(exact(path, "model"), OTHER)
    # What is at key paths stays: another program may have put it there.
    assert {name for name in before if name.startswith("model/")} <= names(path)


def test_stale_messages_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counting, looks = MemoryBucket(), []
    use_for_memory(monkeypatch, counting)
    for count in (0, 0, 20):
        with store_at("memory://stale") as store:
            for number in range(count):
                store.put(f".treering-0123456789abcd{number:02}-verdict", b"{}")
        counting.asked.clear()
        tree_serialize_leaves("memory://stale", OTHER)
        looks.append(counting.asked.count("Head"))
    assert looks[2] <= looks[1] + 20  # whether the attempt of each has a saver
