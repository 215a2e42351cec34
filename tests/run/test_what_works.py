"""The table at the end of docs/runs.md: what does not work is refused by name, with the class that the table says.

What works is tested where it belongs; the column "a job" is in ``tests/multiprocess/test_what_works.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import treering as tr
from tests.command import here
from treering.errors import BusyError, FormatError, NotDirectoryError, NotFoundError, UnsupportedError
from treering.leaves import tree_serialize_leaves

TREE: dict[str, Any] = {"base": jnp.arange(300.0), "adapter": jnp.zeros(3)}
DATA: dict[str, Any] = {"w": jnp.zeros(3), "data": tr.each({"position": 7})}
_DOCS = Path(__file__).parents[2] / "docs"
_TITLE = "\n## What works where\n"


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint, files, a leaves directory, and a run."""
    path = tmp_path_factory.mktemp("what works")
    for name in ("ckpt", "one.safetensors", "one.msgpack"):
        tr.save(path / name, TREE)
    tr.save(path / "each", DATA)
    tree_serialize_leaves(path / "leaves", TREE)
    with tr.Run(path / "run") as run:
        for step in (1, 2):
            run.save(step, TREE)
    return path


def loads_each(at: Path) -> object:
    return tr.load_async(at / "each", like=DATA).result()


def deletes_held(at: Path) -> None:
    with tr.Run(at / "run").hold(1):
        assert here("rm", str(at / "run"), "1", code=2).stderr.startswith("error: step 1 of ")
        tr.Run(at / "run").delete(1)


_REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "base of a single file": (
        lambda at: tr.save(at / "new", TREE, base=at / "one.safetensors"), UnsupportedError, "a single file"),
    "base for a single file": (
        lambda at: tr.save(at / "new.msgpack", TREE, base=at / "ckpt"), UnsupportedError, "a single file"),
    "base of leaves": (lambda at: tr.save(at / "new", TREE, base=at / "leaves"), UnsupportedError, "not a checkpoint"),
    "base in the background": (
        lambda at: tr.save_async(at / "new", TREE, base=at / "leaves").result(), UnsupportedError, "not a checkpoint"),
    "base that is not there": (lambda at: tr.save(at / "new", TREE, base=at / "no"), NotFoundError, "base="),
    "base for leaves": (
        lambda at: tree_serialize_leaves(at / "new", TREE, base=at / "leaves"),  # type: ignore[call-arg]
        TypeError, "'base'"),
    "only for leaves": (
        lambda at: tree_serialize_leaves(at / "new", TREE, only="base"),  # type: ignore[call-arg]
        TypeError, "'only'"),
    "only for msgpack": (lambda at: tr.save(at / "new.msgpack", TREE, only="base"), UnsupportedError, "only="),
    "dtype for msgpack": (lambda at: tr.save(at / "new.msgpack", TREE, dtype="float16"), UnsupportedError, "dtype="),
    "each in safetensors": (lambda at: tr.save(at / "new.safetensors", DATA), UnsupportedError, r"treering\.each"),
    "each in msgpack": (lambda at: tr.save_async(at / "new.msgpack", DATA), UnsupportedError, r"treering\.each"),
    "each in leaves": (lambda at: tree_serialize_leaves(at / "new", DATA), UnsupportedError, "Each"),
    "each in the background": (loads_each, UnsupportedError, r"treering\.each"),
    "watch leaves": (lambda at: next(tr.Run(at / "leaves").watch(timeout=0)), FormatError, "a leaves directory"),
    "watch a file": (lambda at: next(tr.Run(at / "one.msgpack").watch(timeout=0)), NotDirectoryError, "a file"),
    "hold in leaves": (lambda at: tr.Run(at / "leaves").hold(1), FormatError, "a leaves directory"),
    "hold in a file": (lambda at: tr.Run(at / "one.safetensors").hold(1), NotDirectoryError, "a file"),
    "remove a held step": (deletes_held, BusyError, "held by"),
    "fallback in leaves": (lambda at: tr.Run(at / "leaves").load(fallback=True), FormatError, "a leaves directory"),
    "fallback in a file": (lambda at: tr.Run(at / "one.msgpack").load(fallback=True), NotDirectoryError, "a file"),
    "fallback and a step": (lambda at: tr.Run(at / "run").load(1, fallback=True), UnsupportedError, "fallback="),
    "fallback without a run": (
        lambda at: tr.load(at / "run", fallback=True),  # type: ignore[call-overload]
        TypeError, "'fallback'"),
    "fallback in the background": (
        lambda at: tr.load_async(at / "run", fallback=True),  # type: ignore[call-overload]
        TypeError, "'fallback'"),
    "search leaves": (lambda at: tr.Run(at / "none", search=[at / "leaves"]).load(), FormatError, "leaves directory"),
    "save steps into leaves": (lambda at: tr.Run(at / "leaves").save(1, TREE), FormatError, "a leaves directory"),
    "save steps into a file": (lambda at: tr.Run(at / "one.msgpack").save(1, TREE), NotDirectoryError, "a file"),
}  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.parametrize("what", _REFUSED)
def test_what_does_not_work_is_refused_by_name(at: Path, what: str) -> None:
    call, error, said = _REFUSED[what]
    before = sorted(path.name for path in at.iterdir())
    with pytest.raises(error, match=said) as caught:
        call(at)
    assert type(caught.value).__name__ == error.__name__
    assert sorted(path.name for path in at.iterdir()) == before  # nothing was written
    assert tr.Run(at / "run").steps() == [1, 2]


def test_every_class_in_the_table_is_one_that_is_tested() -> None:
    table = (_DOCS / "guides" / "runs.md").read_text(encoding="utf-8").partition(_TITLE)[2]
    assert table
    assert set(re.findall(r"`(\w+Error)`", table)) == {error.__name__ for _, error, _ in _REFUSED.values()}
