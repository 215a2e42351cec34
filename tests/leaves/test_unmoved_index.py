"""index_leaves where nothing is renamed: saves that the index names and does not list yet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import treering as tr
from tests.buckets import NO_ANSWER, Answer, MemoryBucket, Put, Request, install
from tests.leaves.jobs_of_threads import Job
from tests.leaves.saved import stored
from tests.leaves.test_joint import all_well, tree_of
from tests.stores import located, store_at
from tests.trees import assert_same_arrays
from treering.errors import BusyError, CorruptError, MismatchError, NotFoundError
from treering.leaves import index_leaves, tree_serialize_leaves

INDEX = "a/leaves/tensorstore_index.json"
PATH = located("memory://a/leaves")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> MemoryBucket:
    return install(monkeypatch)


def m(number: int) -> dict[str, Any]:
    return {"m": jnp.full(3, number)}


def save(number: int, prefix: str | None = None, path: Any = PATH) -> None:
    tree_serialize_leaves(path, m(number), prefix=prefix)


def leave(number: int, prefix: str | None = None) -> None:
    tree_serialize_leaves(PATH, m(number), prefix=prefix, write_index=False)


def index_of(bucket: MemoryBucket) -> Any:
    return json.loads(bucket.data(INDEX))


def attempts(bucket: MemoryBucket) -> set[str]:
    return {name.split("/")[3] for name in bucket.names("a/leaves/.treering/")}


def test_a_first_save_without_an_index_is_taken_up(bucket: MemoryBucket) -> None:
    leave(1)
    assert index_of(bucket)["prefixes"] == {}
    with pytest.raises(NotFoundError, match="index_leaves"):
        stored(PATH)
    index_leaves(str(PATH) + "/")
    assert_same_arrays(stored(PATH), m(1))
    assert tr.verify(PATH).ok
    assert "unindexed" not in index_of(bucket)
    before = bucket.names(), bucket.data(INDEX)
    index_leaves(PATH)  # there is nothing to do
    assert (bucket.names(), bucket.data(INDEX)) == before


def test_the_old_tree_is_there_until_the_newest_is_indexed(bucket: MemoryBucket) -> None:
    for prefix in (None, "model"):
        save(0, prefix)
        leave(1, prefix)
        leave(2, prefix)
    leave(3, "new")
    for prefix in (None, "model"):
        assert_same_arrays(stored(PATH, prefix), m(0))
    with pytest.raises(MismatchError, match=r"no prefix 'new'.*waits for treering\.leaves\.index_leaves"):
        stored(PATH, "new")
    assert any("5 saves are not in the index" in note for note in tr.inspect(PATH).notes)
    index_leaves(PATH)
    for prefix, number in ((None, 2), ("model", 2), ("new", 3)):
        assert_same_arrays(stored(PATH, prefix), m(number))
    assert len(index_of(bucket)["treering"]["model"]["superseded"]) == 2
    assert len(attempts(bucket)) == 7
    bucket.wait(3601)
    save(4, "new")
    assert len(attempts(bucket)) == 4  # three trees, and the one that was just replaced
    assert tr.verify(PATH).ok


def test_saves_of_other_prefixes_keep_what_waits_and_one_of_the_same_replaces_it(bucket: MemoryBucket) -> None:
    leave(1, "model")
    leave(1, "opt")
    for number in range(3):
        save(number)
        bucket.wait(3601)
    save(2, "model")
    assert_same_arrays(stored(PATH, "model"), m(2))
    bucket.wait(3601)
    save(9)
    index_leaves(PATH)
    assert_same_arrays(stored(PATH, "model"), m(2))
    assert_same_arrays(stored(PATH, "opt"), m(1))
    bucket.wait(3601)
    save(9)
    assert len(attempts(bucket)) == 4


def test_trees_that_no_index_could_list_together_are_refused(bucket: MemoryBucket) -> None:
    leave(1, "a")
    with pytest.raises(MismatchError, match="saved without an index"):
        save(1, "a.m")
    leave(1, "a.m")
    before = bucket.data(INDEX)
    with pytest.raises(MismatchError, match="one lies in the other"):
        index_leaves(PATH)
    assert bucket.data(INDEX) == before


def test_processes_leave_one_together(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    all_well(Job(monkeypatch, 2).save(PATH, tree_of(), write_index=False))
    index_leaves(PATH)
    assert_same_arrays(stored(PATH), tree_of())


def test_a_save_in_between_makes_either_busy(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    save(0)

    def save_another(request: Request) -> Answer | None:
        if not isinstance(request, Put) or not request.name.endswith("/marker"):
            return None
        bucket.meet = lambda _: None
        answer = bucket.answer(request)
        save(1, "other")
        return answer

    for change in (lambda: leave(5), lambda: index_leaves(PATH)):
        bucket.meet = save_another
        with pytest.raises(BusyError, match="another save changed the index"):
            change()
        leave(4)
    index_leaves(PATH)
    assert_same_arrays(stored(PATH), m(4))
    assert_same_arrays(stored(PATH, "other"), m(1))


def test_an_answer_that_is_lost_is_found_again(bucket: MemoryBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [False]

    def lose_answer(request: Request) -> Answer | None:
        if not isinstance(request, Put) or request.name != INDEX or lost[0]:
            return None
        lost[0] = True
        bucket.answer(request)
        return NO_ANSWER

    save(0)
    for change in (lambda: leave(1), lambda: index_leaves(PATH)):
        lost[0] = False
        bucket.meet = lose_answer
        change()
        assert lost[0]
    assert_same_arrays(stored(PATH), m(1))


def test_a_waiting_save_whose_record_is_damaged_is_named(bucket: MemoryBucket) -> None:
    save(0, "other")
    leave(1)
    leave(2, "model")
    index = index_of(bucket)
    index["unindexed"][0] = index["unindexed"][0].replace("int32", "int64").replace("float32", "float64")
    bucket.put(INDEX, json.dumps(index).encode())
    with pytest.raises(CorruptError, match=r"record\.json.*everything else is indexed"):
        index_leaves(PATH)
    assert_same_arrays(stored(PATH, "model"), m(2))
    # What is damaged goes on being named, so nothing of it is removed.
    bucket.wait(3601)
    save(3, "other")
    assert len(index_of(bucket)["unindexed"]) == 1
    bucket.wait(3601)
    save(3, "other")
    assert len(attempts(bucket)) >= 4
    index["unindexed"] = [3]
    bucket.put(INDEX, json.dumps(index).encode())
    with pytest.raises(CorruptError, match="copy the directory there"):
        index_leaves(PATH)


def test_what_only_a_disk_can_mend_is_told(bucket: MemoryBucket) -> None:
    with pytest.raises(NotFoundError, match="copy the directory there"):
        index_leaves(PATH)
    assert not bucket.names()
    tr.save(PATH, m(0))
    with pytest.raises(NotFoundError, match="that is a checkpoint"):
        index_leaves(PATH)
    bucket._objects.clear()
    save(0)
    index = index_of(bucket)
    index["treering"][""]["record"] = index["treering"][""]["record"].replace("attempt", "attempd")
    for data in (json.dumps(index).encode(), b"{"):
        bucket.put(INDEX, data)
        with pytest.raises(CorruptError, match="copy the directory there"):
            index_leaves(PATH)
        assert bucket.data(INDEX) == data


@pytest.mark.parametrize("how", ["index", "save", "lost"])
def test_a_copy_on_a_disk_has_them_too(how: str, bucket: MemoryBucket, tmp_path: Path) -> None:
    save(0)
    leave(1)
    leave(2, "model")
    for found in store_at(PATH).list():
        (tmp_path / found.name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / found.name).write_bytes(bucket.data(f"a/leaves/{found.name}"))
    assert_same_arrays(stored(tmp_path), m(0))
    if how == "save":
        save(3, path=tmp_path)
        assert_same_arrays(stored(tmp_path), m(3))
    if how == "lost":
        (tmp_path / "tensorstore_index.json").unlink()
    index_leaves(tmp_path)
    assert_same_arrays(stored(tmp_path), m(3 if how == "save" else 1))
    assert_same_arrays(stored(tmp_path, "model"), m(2))
    assert "unindexed" not in json.loads((tmp_path / "tensorstore_index.json").read_bytes())
    index_leaves(tmp_path)
    assert len(list((tmp_path / ".treering").iterdir())) == 2
