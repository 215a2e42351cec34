"""A state for each process: saved together by several or by one, given back to the process of the same number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

import treering as tr
from tests.buckets import MemoryBucket
from tests.checkpoint.together import Together, together, two
from tests.jobs import be_process
from treering.errors import CorruptError, MismatchError, UnsupportedError

__all__ = ["together", "two"]

SIZES = pytest.mark.parametrize("size", [0, 400, 3000, 30_000])


class Counter:
    """An iterator over numbers; it counts how often a state was asked of it and given to it."""

    def __init__(self, position: int = 0) -> None:
        self.position, self.asked, self.given = position, 0, 0

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        self.position += 1
        return self.position

    def get_state(self) -> Any:
        self.asked += 1
        return {"position": self.position}

    def set_state(self, state: Any) -> None:
        self.given += 1
        self.position = state["position"]


class Elastic(Counter):
    """One that brings its own merge and split: positions add up, and are shared out."""

    def merge(self, states: list[Any]) -> Any:
        return {"position": sum(state["position"] for state in states)}

    def split(self, state: Any, count: int) -> list[Any]:
        return [{"position": state["position"] // count + (n < state["position"] % count)} for n in range(count)]


@pytest.fixture(params=["disk", "bucket"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Where to."""
    if request.param == "disk":
        yield tmp_path
        return
    yield tr.bucket(MemoryBucket(f"s3://each-{tmp_path.name}"))


def _state_of(process: int, size: int) -> dict[str, Any]:
    return {"process": process, "rows": np.arange(process * size), "name": "x" * process, "raw": b"\xff" * size}


def _tree_of(size: int) -> Any:
    def tree_of(process: int) -> Any:
        x = jax.device_put(np.arange(8.0), jax.devices()[0]) if size else np.arange(8.0)
        return {"w": np.arange(8.0), "deep": {"data": tr.each(_state_of(process, size))}, "x": x, "n": 7}

    return tree_of


def _check(found: Any, process: int, size: int) -> None:
    wanted = _state_of(process, size)
    assert {**found, "rows": found["rows"].tolist()} == {**wanted, "rows": wanted["rows"].tolist()}
    assert list(found) == list(wanted)
    assert found["rows"].dtype == wanted["rows"].dtype


@pytest.mark.sampled(3)
@SIZES
def test_saved_together_each_process_gets_its_own(
    together: Together, place: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert together.save(place / "a", _tree_of(size)) == [None] * together.count
    assert tr.verify(place / "a").ok
    every = tr.load(place / "a")["deep"]["data"]
    assert len(every) == together.count
    for process, state in enumerate(every):
        _check(state, process, size)
        be_process(monkeypatch, process, together.count)
        back = tr.load(place / "a", like={"deep": {"data": tr.each(None)}}, only="deep")
        _check(back["deep"]["data"].item, process, size)
    with tr.open(place / "a") as checkpoint:  # nothing else has changed
        assert checkpoint["w"][...].tolist() == list(range(8))
        assert checkpoint["n"] == 7


@SIZES
def test_all_states_are_one_leaf_and_at_most_one_file_more(two: Together, tmp_path: Path, size: int) -> None:
    def without(process: int) -> Any:
        return {**_tree_of(size)(process), "deep": {}}

    assert two.save(tmp_path / "with", _tree_of(size)) == two.save(tmp_path / "without", without) == [None, None]
    counts = [len([*(tmp_path / name).iterdir()]) for name in ("with", "without")]
    assert counts[0] - counts[1] == (size >= 400), counts
    with tr.open(tmp_path / "with") as checkpoint:
        assert [key for key in checkpoint if key.startswith("deep")] == ["deep/data/processes", "deep/data/states"]


def test_a_process_reads_its_own_bytes_alone(two: Together, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = MemoryBucket(f"s3://own-{tmp_path.name}")
    place = tr.bucket(bucket)
    large = {"noise": np.random.default_rng(0).bytes(600_000)}
    assert (
        two.save(cast("Path", place / "a"), lambda process: {"data": tr.each(large if process else {"noise": b""})})
        == [None] * 2
    )
    be_process(monkeypatch, 0, 2)
    bucket.received = 0
    assert tr.load(place / "a", like={"data": tr.each(None)})["data"].item == {"noise": b""}
    assert bucket.received < 400_000


def test_one_that_saves_alone_has_the_same_form(tmp_path: Path) -> None:
    data = Counter(5)
    tree = {"w": np.ones(3), "data": tr.each(data)}
    tr.save(tmp_path / "a", tree)
    pending = tr.save_async(tmp_path / "b", tree)
    next(data)
    pending.result()
    assert data.asked == 2
    for name in ("a", "b"):
        back = Counter()
        found: Any = tr.load(tmp_path / name, like={"w": np.zeros(3), "data": tr.each(back)})
        assert found["data"].item is back
        assert (back.position, back.given) == (5, 1)
        assert next(found["data"]) == 6
        assert next(iter(found["data"])) == 7
    assert not isinstance(tree["data"], Counter)  # nothing of the tree is changed


def test_the_whole_tree_may_be_one(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", tr.each({"position": 5}))
    assert tr.load(tmp_path / "a")[0] == {"position": 5}
    assert tr.load(tmp_path / "a", like=tr.each(None)).item == {"position": 5}
    tr.save(tmp_path / "b", {"data": tr.each((1, None))})
    assert tr.load(tmp_path / "b", at="data", like=tr.each(None)).item == (1, None)
    renamed = tr.load(tmp_path / "b", like={"loader": tr.each(None)}, key_map={"loader": "data"})
    assert renamed["loader"].item == (1, None)


def test_a_branch_with_one_may_be_renamed(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", {"old": {"data": tr.each({"n": 5}), "deep": {"it": tr.each({"n": 6})}, "w": 1.5}})
    deep: dict[str, Any] = {"it": tr.each(None)}
    like = {"new": {"data": tr.each(None), "deep": deep, "w": 0.0}}
    for renames in ({"new": "old"}, {"new": "old", "new/deep": "old/deep"}):
        found: Any = tr.load(tmp_path / "a", like=like, key_map=renames)
        assert (found["new"]["data"].item, found["new"]["deep"]["it"].item) == ({"n": 5}, {"n": 6})
        assert found["new"]["w"] == 1.5
    found = tr.load(tmp_path / "a", like={"x": {"y": deep}}, key_map={"x/y": "old/deep"}, extra="ignore")
    assert found["x"]["y"]["it"].item == {"n": 6}
    with pytest.raises(MismatchError, match="`like` has no such key"):
        tr.load(tmp_path / "a", like=like, key_map={"new": "old", "more": "old"})


def test_states_of_all_are_saved_again_as_they_are(two: Together, tmp_path: Path) -> None:
    assert two.save(tmp_path / "a", _tree_of(400)) == [None, None]
    tree = tr.load(tmp_path / "a")
    tr.save(tmp_path / "b", {**tree, "w": np.zeros(8)})
    again = tr.load(tmp_path / "b")["deep"]["data"]
    assert again == tree["deep"]["data"]
    assert "2 processes" in repr(again)
    tr.convert(tmp_path / "a", tmp_path / "c")
    assert tr.load(tmp_path / "c")["deep"]["data"] == again
    assert tr.load(tmp_path / "c", like=tr.load(tmp_path / "a"))["deep"]["data"] == again
    assert again[-1]["process"] == 1
    assert [state["process"] for state in again[:1]] == [0]


class Silent(Counter):
    """One that must not be asked."""

    def get_state(self) -> Any:
        raise AssertionError("asked for its state")


class Shard:
    """A key whose text has characters that no key text has, and one that has an address for its text."""

    def __init__(self, text: str | None) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text or object.__repr__(self)


@pytest.mark.parametrize("key", [Shard("é"), Shard(None), np.str_("0x0123456789")], ids=["accent", "address", "digits"])
def test_below_keys_of_any_class_each_process_gets_its_own(two: Together, tmp_path: Path, key: Any) -> None:
    assert two.save(tmp_path / "a", lambda process: {key: {"data": tr.each({"next": process})}}) == [None, None]
    (inner,) = tr.load(tmp_path / "a").values()
    assert list(inner["data"]) == [{"next": 0}, {"next": 1}]
    assert two.save(tmp_path / "b", lambda process: {key: {"data": tr.each(process)}, "w": 1}, only=["*/data"]) == [
        None,
        None,
    ]


def test_of_a_part_only_the_states_in_it_are_asked_for(together: Together, tmp_path: Path) -> None:
    def tree_of(process: int) -> Any:
        return {"w": np.arange(3), "a": tr.each(Counter(process)), "b": {"c": tr.each(Silent())}}

    for number, only in enumerate([["w", "a"], ["w", "**/a"], ["*/processes", "a/states", "w"]]):
        path = tmp_path / str(number)
        assert together.save(path, tree_of, only=only) == [None] * together.count
        assert [state["position"] for state in tr.load(path)["a"]] == list(range(together.count))
        tr.save(path / "alone", tree_of(7), only=only)
        assert list(tr.load(path / "alone")["a"]) == [{"position": 7}]
    with pytest.raises(MismatchError, match=r"part of the states at 'a'"):
        tr.save(tmp_path / "no", tree_of(0), only=["w", "a/states"])
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("processes", ["all", "this"])
def test_the_rest_of_the_tree_may_be_what_jax_refuses(tmp_path: Path, processes: Any) -> None:
    tree: dict[str, Any] = {"odd": {1: np.ones(2), "x": 3}, "data": tr.each({"n": 1})}
    tr.save(tmp_path / "a", tree, processes=processes)
    assert tr.load(tmp_path / "a")["odd"]["x"] == 3
    tree["odd"]["itself"] = [tree]
    with pytest.raises(UnsupportedError, match="it may hold itself"):
        tr.save(tmp_path / "b", tree, processes=processes)


# ------------------------------------------------------------------------------------------ another number of them


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2), (2, 4), (4, 2), (4, 3)])
@pytest.mark.parametrize("own", [False, True], ids=["given", "own"])
def test_another_number_of_processes_asks_merge_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, loaded: int, own: bool
) -> None:
    _save_counters(tmp_path / "a", monkeypatch, saved)
    elastic, found = Elastic(), []
    for process in range(loaded):
        be_process(monkeypatch, process, loaded)
        back = Elastic() if own else Counter()
        item = tr.each(back) if own else tr.each(back, merge=elastic.merge, split=elastic.split)
        tr.load(tmp_path / "a", like={"data": item})
        found.append(back.position)
    assert sum(found) == sum(range(1, saved + 1))
    assert max(found) - min(found) <= 1


def _save_counters(path: Any, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    if count == 1:
        tr.save(path, {"data": tr.each(Counter(1))})
        return
    from tests.checkpoint.together import job_of

    with monkeypatch.context() as patch:
        job = job_of(count, patch)
        assert job.save(path, lambda process: {"data": tr.each(Counter(process + 1))}) == [None] * count


@pytest.mark.parametrize(
    ("counts", "item", "lacking"),
    [
        ((2, 1), tr.each(None), "merge"),
        ((1, 2), tr.each(None), "split"),
        ((2, 4), tr.each(None, merge=lambda states: states[0]), "split"),
        ((4, 2), tr.each(None, split=lambda state, count: [state] * count), "merge"),
        ((2, 3), tr.each(None, merge=lambda states: states[0], split=lambda state, count: [state]), "1 state"),
    ],
)
def test_without_them_the_error_names_item_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: tuple[int, int], item: Any, lacking: str
) -> None:
    saved, loaded = counts
    _save_counters(tmp_path / "a", monkeypatch, saved)
    be_process(monkeypatch, 0, loaded)
    other = Counter(99)
    with pytest.raises(MismatchError, match=r"item 'data'.*" + lacking) as caught:
        tr.load(tmp_path / "a", like={"data": item})
    named = [f"{n} process{'es' * (n > 1)}" for n in counts]
    assert all(count in str(caught.value) for count in (named if lacking != "1 state" else named[1:]))
    assert (item.item, other.position) == (None, 99)


# ---------------------------------------------------------------------------------------------------------------- runs


def test_a_run_saves_marked_and_unmarked_items(tmp_path: Path) -> None:
    marked, unmarked = Counter(3), Counter(4)
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"w": np.ones(2), "data": {"mine": tr.each(marked), "all": unmarked}})
    assert tr.load(tmp_path / "run")["data"]["all"] == {"position": 4}

    def init() -> Any:
        return {"w": np.zeros(2), "data": {"mine": tr.each(Counter()), "all": Counter()}}

    step, tree = tr.Run(tmp_path / "run").load_or_init(init)
    assert step == 1
    assert (next(tree["data"]["mine"]), next(tree["data"]["all"])) == (4, 5)
    with tr.Run(tmp_path / "run") as run:
        run.save(2, tree)  # what a load gives can be saved
    back = init()
    tr.Run(tmp_path / "run").load(like=back)
    assert back["data"]["mine"].item.position == 4


def test_a_checkpoint_with_one_state_for_all_loads_into_a_marker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"data": Counter(4)})
    for process in range(3):
        be_process(monkeypatch, process, 3)
        back = Counter()
        tr.load(tmp_path / "run", like={"data": tr.each(back)})
        assert back.position == 4


def test_a_marked_state_loads_into_an_unmarked_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tr.Run(tmp_path / "run") as run:
        run.save(1, {"data": tr.each(Counter(4))})
    for kind in (Counter, Elastic):
        back = kind()
        tr.Run(tmp_path / "run").load(like={"data": back})
        assert back.position == 4


def test_what_is_new_keeps_its_state_and_what_is_gone_may_be_ignored(tmp_path: Path) -> None:
    tr.save(tmp_path / "a", {"old": tr.each({"n": 1}), "w": 1.5})
    new = tr.each(Counter(9))
    with pytest.raises(MismatchError, match="new"):
        tr.load(tmp_path / "a", like={"new": new, "w": 0.0}, extra="ignore")
    found: Any = tr.load(tmp_path / "a", like={"new": new, "w": 0.0}, missing="keep", extra="ignore")
    assert found["new"].item.position == 9
    with pytest.raises(MismatchError, match="as a whole"):
        tr.load(tmp_path / "a", like={"old": tr.each(None)}, only="old/states")


@pytest.mark.parametrize("name", ["c", "c.msgpack"])
def test_a_conversion_gives_the_same_states(tmp_path: Path, name: str) -> None:
    tr.save(tmp_path / "a", {"w": np.ones(2), "data": tr.each(Counter(4))})
    to = "leaves" if name == "c" else None
    tr.convert(tmp_path / "a", tmp_path / name, to=to)
    back = Counter()
    tr.load(tmp_path / name, like={"w": np.zeros(2), "data": tr.each(back)})
    assert back.position == 4


# ------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("to", ["hf", "orbax", "npz"])
def test_forms_of_others_refuse_to_lose_it(tmp_path: Path, to: str) -> None:
    tr.save(tmp_path / "a", {"w": np.ones(2), "data": tr.each(Counter(4))})
    with pytest.raises(UnsupportedError, match="data/states"):
        tr.convert(tmp_path / "a", tmp_path / ("b.npz" if to == "npz" else "b"), to=None if to == "npz" else to)


@pytest.mark.parametrize("suffix", [".msgpack", ".safetensors"])
def test_single_files_refuse_it_by_name(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UnsupportedError, match=r"treering\.each.*save to a folder"):
        tr.save(tmp_path / f"a{suffix}", {"w": np.ones(2), "data": tr.each({"n": 1})})


@pytest.mark.parametrize("tree", [[tr.each({"n": 1})], {"a": (1, tr.each({"n": 1}))}])
def test_elsewhere_than_in_dicts_it_is_refused(tmp_path: Path, tree: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"only dicts lead to it.*treering\.each"):
        tr.save(tmp_path / "a", tree)


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({"a": [jax.numpy.ones(2)]}, r"leaf 'data/a/0'.*numpy\.asarray"),
        (jax.random.key(0), r"leaf 'data'.*key_data"),
        ({"f": abs}, r"leaf 'data/f'.*leave it out"),
        ({"a": {1, 2}}, r"a set cannot be saved.*leaf 'data/a'"),
        ({"a": b"x" * (1 << 20)}, r"more than 1048576"),
    ],
)
def test_states_that_no_file_holds_are_refused_with_their_place(tmp_path: Path, state: Any, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        tr.save(tmp_path / "a", {"data": tr.each(state)})
    assert not (tmp_path / "a").exists()


def test_bytes_that_are_no_states_are_damage(tmp_path: Path) -> None:
    forged = tr.checkpoint.EachStates
    for number, item in enumerate([forged(3, b"x" * 8), forged(1, b"x" * 9), forged(0, b""), forged(2, b"\1" * 4000)]):
        tr.save(tmp_path / str(number), {"data": item})
        with pytest.raises(CorruptError, match=r"processes|bytes"):
            tr.load(tmp_path / str(number), like={"data": tr.each(None)})
        with pytest.raises((CorruptError, IndexError)):
            tr.load(tmp_path / str(number))["data"][0]
    for number, odd in enumerate([forged("2", b"x" * 16), forged(2, "x" * 16), forged(2.0, None)]):  # type: ignore[arg-type]
        tr.save(tmp_path / f"odd {number}", {"data": odd})
        with pytest.raises(CorruptError, match="does not hold the states"):
            tr.load(tmp_path / f"odd {number}", like={"data": tr.each(None)})
        found: Any = tr.load(tmp_path / f"odd {number}")["data"]
        for ask in (len, list, lambda states: states[0]):
            with pytest.raises(CorruptError, match="holds no states"):
                ask(found)


@pytest.mark.parametrize("leaves", [1, 5000], ids=["lists", "packed"])
def test_its_container_is_of_a_kind_that_older_versions_refuse(tmp_path: Path, leaves: int) -> None:
    tr.save(tmp_path / "a", {"w": list(range(leaves)), "data": tr.each({"n": 1})})
    text = (tmp_path / "a" / "treering.json").read_text(encoding="ascii")
    assert text.count('{"node":"each","class":"treering.checkpoint.EachStates"') == 1
    found: Any = tr.load(tmp_path / "a", like={"w": list(range(leaves)), "data": tr.each(None)})
    assert found["data"].item == {"n": 1}
    tr.save(tmp_path / "b", {"w": list(range(leaves))})
    assert "each" not in (tmp_path / "b" / "treering.json").read_text(encoding="ascii")
