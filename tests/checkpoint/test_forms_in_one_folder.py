"""Two forms in one folder, each pair in both orders, on disk and in memory: the second is refused, or the first read.

What other programs write, and steps that are saved by hand into a folder, cannot be refused: there, reading refuses the
folder by name where it cannot tell which of the two is meant.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import treering as tr
from tests.command import copy_path
from tests.stores import copy_to_memory
from treering.errors import ExistsError, FormatError, TreeringError
from treering.leaves import tree_deserialize_leaves, tree_serialize_leaves

FIRST, SECOND = {"a": np.zeros(3)}, {"b": np.ones(4)}
GOLDEN = Path(__file__).parent.parent / "foreign" / "golden"


def _run(path: str, tree: Any) -> None:
    with tr.Run(path) as run:
        run.save(1, tree).result()


def _source(path: str, tree: Any, write: Callable[[str, Any], object]) -> str:
    write(f"{path}-source", tree)
    return f"{path}-source"


def _by_other_program(name: str) -> Callable[[str, Any], None]:
    def write(path: str, _tree: Any) -> None:
        source = GOLDEN / name
        if path.startswith("memory:"):
            copy_to_memory(source, path)
        else:
            shutil.copytree(source, path, dirs_exist_ok=True)

    return write


CHECKPOINTS: dict[str, Callable[[str, Any], object]] = {
    "checkpoint": tr.save,
    "checkpoint over": lambda path, tree: tr.save(path, tree, overwrite=True),
    "checkpoint in the background": lambda path, tree: tr.save_async(path, tree).result(),
    "checkpoint copied": lambda path, tree: copy_path(_source(path, tree, tr.save), path, overwrite=False),
    "checkpoint converted": lambda path, tree: tr.convert(_source(path, tree, tr.save), path),
}
RUNS: dict[str, Callable[[str, Any], object]] = {
    "run": _run,
    "run branched": lambda path, tree: tr.Run(_source(path, tree, _run)).branch(1, path),
    "run copied": lambda path, tree: copy_path(_source(path, tree, _run), path, overwrite=False),
    "run converted": lambda path, tree: tr.convert(_source(path, tree, _run), path),
}
LEAVES: dict[str, Callable[[str, Any], object]] = {
    "leaves": tree_serialize_leaves,
    "leaves by prefix": lambda path, tree: tree_serialize_leaves(path, tree, prefix="m"),
    "leaves without an index": lambda path, tree: tree_serialize_leaves(path, tree, write_index=False),
    "leaves converted": lambda path, tree: tr.convert(_source(path, tree, tr.save), path, to="leaves", overwrite=True),
}
WEIGHTS: dict[str, Callable[[str, Any], object]] = {
    "weights": lambda path, tree: tr.export(path, tree, to="hf"),
    "weights converted": lambda path, tree: tr.convert(_source(path, tree, tr.save), path, to="hf"),
}
OTHERS: dict[str, Callable[[str, Any], object]] = {
    "steps by hand": lambda path, tree: tr.save(f"{path}/step_00000001", tree),
    "steps of Orbax": _by_other_program("orbax/manager"),
    "an item of Orbax": _by_other_program("orbax/plain_zarr2"),
    "a tree of jax": _by_other_program("jax/0.12"),
    "leaves of eformer": _by_other_program("eformer_structured"),
}
OURS = {name: number for number, forms in enumerate((CHECKPOINTS, RUNS, LEAVES, WEIGHTS)) for name in forms}
WRITE = CHECKPOINTS | RUNS | LEAVES | WEIGHTS | OTHERS
PLACES = ("disk", "memory")
# The others of a form leave the same in the folder.
FIRSTS = ("checkpoint", "run", "leaves", "leaves by prefix", "leaves without an index", "weights", *OTHERS)
# A step by hand makes a run of a folder, and leaves of others are leaves.
SAME = {("steps by hand", name) for name in RUNS} | {("leaves of eformer", name) for name in LEAVES}
REFUSED = [
    (first, second)
    for first, second in itertools.product(FIRSTS, OURS)
    if OURS.get(first) != OURS[second] and (first, second) not in SAME
]


# On disk each pair. What refuses is the same in memory, and asks the store what is there: each form is the first there,
# and each writer comes second, with every third of the others.
REFUSED_WHERE = [
    (first, second, place)
    for first, second in REFUSED
    for place in PLACES
    if place == "disk" or (FIRSTS.index(first) + list(OURS).index(second)) % 3 == 0
]


def test_each_form_comes_first_and_second_in_memory() -> None:
    for which in (0, 1):
        wanted = {pair[which] for pair in REFUSED}
        assert {case[which] for case in REFUSED_WHERE if case[2] == "memory"} == wanted


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "x") if request.param == "disk" else f"memory://{tmp_path.name}/x"


@pytest.mark.sampled(7)
@pytest.mark.parametrize(("first", "second", "place"), REFUSED_WHERE, indirect=["place"])
def test_what_treering_writes_second_is_refused(first: str, second: str, place: str) -> None:
    WRITE[first](place, FIRST)
    before = _read(place)
    with pytest.raises((ExistsError, FormatError)) as caught:
        WRITE[second](place, SECOND)
    assert place in str(caught.value)
    _require_same(_read(place), before)
    if first in OURS and first != "leaves without an index":
        _require_same(before, {"m": FIRST} if first == "leaves by prefix" else FIRST)
        assert tr.verify(place).ok


BY_OTHERS = [
    (first, second)
    for first, second in itertools.product(FIRSTS, OTHERS)
    if first in OURS
    and first != "leaves without an index"
    and not (first == "run" and second == "steps by hand")
    and not (first.startswith("leaves") and second == "leaves of eformer")
]
AMBIGUOUS = {
    *itertools.product(("leaves", "leaves by prefix", "weights"), ("steps by hand",)),
    *itertools.product(("run", "weights"), ("leaves of eformer",)),
}
"""What reading cannot tell apart, and refuses."""


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("first", "second"), BY_OTHERS)
def test_what_others_write_second_is_not_taken_for_the_first(first: str, second: str, place: str) -> None:
    WRITE[first](place, FIRST)
    WRITE[second](place, SECOND)
    if (first, second) not in AMBIGUOUS:
        _require_same(tr.load(place), {"m": FIRST} if first == "leaves by prefix" else FIRST)
    elif place.startswith("memory:") and first == "weights" and second == "steps by hand":
        assert "b" in tr.load(place)  # in a bucket that look would take a request for each load of a run
    else:
        for read in (tr.load, tr.verify, tr.inspect, tr.open):
            with pytest.raises(FormatError, match="a folder holds one form alone"):
                read(place)


def test_steps_and_leaves_in_one_folder_are_still_read_by_name(tmp_path: Path) -> None:
    WRITE["run"](str(tmp_path), FIRST)
    WRITE["leaves of eformer"](str(tmp_path), None)
    _require_same(tr.Run(tmp_path).load(), FIRST)
    assert "mu" in tree_deserialize_leaves(tmp_path, prefix="opt")


def test_leaves_may_have_the_names_of_other_forms(place: str) -> None:
    tree = dict.fromkeys(("step_00000003", "run.json", "model.safetensors", "pytreedef.json"), np.ones(2))
    for _ in range(2):  # the second replaces the first
        tree_serialize_leaves(place, tree)
        _require_same(tr.load(place), tree)
        assert tr.verify(place).ok
    with pytest.raises(FormatError, match="is a leaves directory"):
        _run(place, SECOND)
    if not place.startswith("memory:"):  # in a bucket, leaves lie elsewhere
        with pytest.raises(ExistsError):
            tr.save(f"{place}/step_00000003", SECOND)
    _require_same(tr.load(place), tree)


def test_single_files_may_lie_in_a_run(place: str) -> None:
    _run(place, FIRST)
    for name in ("model.safetensors", "state.msgpack"):
        tr.save(f"{place}/{name}", SECOND)
    _require_same(tr.load(place), FIRST)
    with tr.Run(place) as run:
        run.save(2, SECOND)
    _require_same(tr.load(place), SECOND)


def _read(place: str) -> Any:
    try:
        return tr.load(place)
    except TreeringError as error:
        return str(error)


def _require_same(found: Any, wanted: Any) -> None:
    leaves, others = jax.tree.leaves(found), jax.tree.leaves(wanted)
    assert len(leaves) == len(others)
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(leaves, others, strict=True)), found
