"""Loading while saves replace the tree: what is loaded is one state of it, wherever its files are just then."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treering
from tests import faults
from tests.leaves.saved import INDEX, index_at
from tests.system_calls import act_before_reading
from tests.trees import assert_same
from treering.errors import BusyError, CorruptError, NotFoundError, StoreError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

GOLDEN = Path(__file__).parents[1] / "compat" / "golden" / "eformer"


def tree(generation: int) -> dict[str, Any]:
    """A tree all of which says which one it is; every second one has other shapes and another leaf."""
    more = {"extra": jnp.full(5, generation)} if generation % 2 else {}
    return {
        "large": jnp.full((300 + generation % 2, 200), generation),
        "small": [jnp.full(3, generation), np.full(4, generation)],
        "n": generation,
        **more,
    }


def generation_of(found: Any) -> int:
    """Which tree it is, all of it."""
    assert_same(found, tree(int(found["n"])), restored=False)
    return int(found["n"])


def exact(path: Path, **arguments: Any) -> Any:
    return tree_deserialize_leaves(path, structure="exact", **arguments)


LOADERS: dict[str, Callable[[Path], Any]] = {"deserialize": exact, "load": treering.load}


# ---------------------------------------------------------------------------------------------------- between two saves


@pytest.mark.sampled(5)
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("saves", [1, 2, 5])
def test_the_newer_tree_is_loaded(loader: str, saves: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_serialize_leaves(tmp_path, tree(0))
    later = iter(range(1, saves + 1))
    act_before_reading(monkeypatch, [lambda: tree_serialize_leaves(tmp_path, tree(next(later)))] * saves)
    assert generation_of(LOADERS[loader](tmp_path)) == saves


def test_another_prefix_is_no_reason_to_start_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_serialize_leaves(tmp_path, tree(0))
    again = [lambda: tree_serialize_leaves(tmp_path, tree(1), prefix="other"), lambda: pytest.fail("read again")]
    act_before_reading(monkeypatch, again)
    assert generation_of(exact(tmp_path)) == 0


def test_damage_is_damage_when_nobody_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_serialize_leaves(tmp_path, tree(0))
    act_before_reading(
        monkeypatch, [(tmp_path / "large" / "0.0").unlink, lambda: pytest.fail("nothing has changed: no second try")]
    )
    with pytest.raises(CorruptError, match=r"large/0\.0"):
        exact(tmp_path)


def test_a_directory_that_goes_away_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_serialize_leaves(tmp_path / "d", tree(0))
    act_before_reading(monkeypatch, [lambda: shutil.rmtree(tmp_path / "d")])
    with pytest.raises((CorruptError, NotFoundError)):
        exact(tmp_path / "d")


@pytest.mark.slow
def test_without_end_it_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_serialize_leaves(tmp_path, tree(0))
    later = iter(range(1, 110))
    act_before_reading(monkeypatch, [lambda: tree_serialize_leaves(tmp_path, tree(next(later)))] * 109)
    with pytest.raises(BusyError, match="replaced 100 times"):
        exact(tmp_path)


def test_an_unverified_tree_is_not_mixed_with_the_one_that_replaces_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums bytes of another save look sound: only the index tells."""
    shutil.copytree(GOLDEN / "plain", tmp_path / "plain")
    path = tmp_path / "plain"
    before = tree_deserialize_leaves(path)
    saved: list[Any] = []
    chunks = 0

    def followed(name: Any, *_: object, **__: object) -> None:
        nonlocal chunks
        chunks += Path(name).name[0].isdigit()
        if chunks == 5 and not saved:  # the first four arrays are read
            saved.append(jax.tree.map(lambda leaf: leaf + 1, before))
            tree_serialize_leaves(path, saved[0])

    faults.before(monkeypatch, os, "open", followed)
    assert_same(tree_deserialize_leaves(path, chunk_size=4), saved[0], restored=False)


# ------------------------------------------------------------------------------------------------------------ callbacks


def test_a_callback_is_not_called_for_two_trees(tmp_path: Path) -> None:
    tree_serialize_leaves(tmp_path, tree(0))
    calls: list[str] = []

    def saves(_array: Any, key: str) -> None:
        calls.append(key)
        tree_serialize_leaves(tmp_path, tree(2))

    with pytest.raises(BusyError, match="after `callback` had been called"):
        exact(tmp_path, chunk_size=1, callback=saves)
    assert calls == ["large"]
    assert exact(tmp_path)["n"] == 2


def test_before_the_first_call_it_starts_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_serialize_leaves(tmp_path, tree(0))
    calls: list[str] = []
    act_before_reading(monkeypatch, [lambda: tree_serialize_leaves(tmp_path, tree(1))])
    exact(tmp_path, callback=lambda _, key: calls.append(key))
    assert calls == ["large", "small.0", "small.1", "extra"]


def test_an_unverified_tree_replaced_after_the_callbacks(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "plain", tmp_path / "plain")
    path = tmp_path / "plain"

    def saves(_array: Any, key: str) -> None:
        if key == "step":
            tree_serialize_leaves(path, tree(1))

    with pytest.raises(BusyError):
        tree_deserialize_leaves(path, callback=saves)


# ------------------------------------------------------------------------------------------------ while files are moved


@contextlib.contextmanager
def dying_after(moves: int) -> Iterator[None]:
    """Let a save die when it has committed, and has moved so many things to their key paths."""
    left = [moves]

    class Dead(OSError):
        pass

    def counted(name: Any, new: Any, **options: Any) -> None:
        if Path(new).name != INDEX:
            if not left[0]:
                raise Dead(5, "the disk is gone")
            left[0] -= 1

    with pytest.MonkeyPatch.context() as patch:
        faults.before(patch, os, "replace", counted)
        yield


@pytest.mark.parametrize(
    ("prefix", "beside"),
    [(None, False), ("model", False), ("model", True)],
    ids=["whole folders", "one folder", "file by file"],
)
def test_a_tree_is_whole_however_many_of_its_files_are_moved(prefix: str | None, beside: bool, tmp_path: Path) -> None:
    unfinished = 0
    for moves in range(30):
        path = tmp_path / str(moves)
        tree_serialize_leaves(path, tree(1), prefix=prefix)
        tree_serialize_leaves(path, tree(1), prefix="other")
        if beside:  # a folder that holds somebody's file cannot be replaced as a whole
            for zarray in path.rglob(".zarray"):
                (zarray.parent / "note.txt").write_text("mine")
        with dying_after(moves), contextlib.suppress(StoreError):
            tree_serialize_leaves(path, tree(2), prefix=prefix)
        moving = "moving" in index_at(path)["treering"][prefix or ""]
        unfinished += moving
        assert generation_of(exact(path, prefix=prefix)) == 2
        assert generation_of(exact(path, prefix="other")) == 1
        # The next saver moves the rest.
        tree_serialize_leaves(path, tree(3), prefix="other")
        assert "moving" not in index_at(path)["treering"][prefix or ""]
        assert generation_of(exact(path, prefix=prefix)) == 2
        if not moving:
            break
    assert unfinished >= (6 if beside else 1)
    assert not moving


@pytest.mark.parametrize("loader", LOADERS)
def test_files_that_move_while_they_are_read(loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree_serialize_leaves(tmp_path, tree(1))
    with dying_after(1), pytest.raises(StoreError):
        tree_serialize_leaves(tmp_path, tree(2))
    # Another tree's saver moves them between the look at the index and the reading.
    act_before_reading(monkeypatch, [lambda: tree_serialize_leaves(tmp_path, {"w": 1}, prefix="other")])
    loaded = LOADERS[loader](tmp_path)
    assert generation_of(loaded) == 2


# --------------------------------------------------------------------------------------------------------- side by side


@pytest.mark.parametrize("saves", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_readers_beside_a_saver_see_whole_trees_that_only_get_newer(tmp_path: Path, saves: int) -> None:
    tree_serialize_leaves(tmp_path, tree(0))
    stop = threading.Event()
    wrong: list[BaseException] = []

    def reads() -> None:
        newest = 0
        try:
            while not stop.is_set():
                generation = generation_of(exact(tmp_path))
                assert generation >= newest
                newest = generation
        except BaseException as error:  # noqa: BLE001 - told by the thread that waits
            wrong.append(error)

    readers = [threading.Thread(target=reads) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for generation in range(1, saves + 1):
            tree_serialize_leaves(tmp_path, tree(generation))
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert generation_of(exact(tmp_path)) == saves
