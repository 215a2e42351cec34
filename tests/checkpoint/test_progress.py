"""``progress=True`` of every public function: a line of ours on a terminal, and not one byte anywhere else."""

from __future__ import annotations

import contextlib
import inspect
import io
import itertools
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import treering as tr
from tests import faults
from treering.errors import UnsupportedError

TREE = {"w": np.arange(1 << 14, dtype=np.float32)}


class Terminal(io.StringIO):
    """A stderr that says of itself that it is a terminal."""

    def isatty(self) -> bool:
        return True


def saved_step(path: Path, **options: Any) -> None:
    with tr.Run(path / "new run") as run:
        run.save(1, TREE, **options)


def resumed(path: Path, **options: Any) -> None:
    tr.Run(path / "run").load_or_init(lambda: {"w": np.zeros(1 << 14, np.float32)}, **options)


CALLS: dict[str, Callable[..., object]] = {
    "save": lambda path, **options: tr.save(path / "new", TREE, **options),
    "save_async": lambda path, **options: tr.save_async(path / "new", TREE, **options).result(60),
    "load": lambda path, **options: tr.load(path / "a", **options),
    "load_async": lambda path, **options: tr.load_async(path / "a", **options).result(60),
    "convert": lambda path, **options: tr.convert(path / "a", path / "converted", **options),
    "export": lambda path, **options: tr.export(path / "exported", TREE, **options),
    "verify": lambda path, **options: tr.verify(path / "a", **options),
    "diff": lambda path, **options: tr.diff(path / "a", path / "run" / "step_00000001", values=True, **options),
    "leaves.tree_serialize_leaves": lambda path, **options: tr.leaves.tree_serialize_leaves(
        path / "leaves", TREE, **options
    ),
    "Run.save": saved_step,
    "Run.load": lambda path, **options: tr.Run(path / "run").load(**options),
    "Run.load_or_init": resumed,
}


def prepared(path: Path) -> Path:
    tr.save(path / "a", TREE)
    with tr.Run(path / "run") as run:
        run.save(1, TREE)
    return path


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    clock, looks = time.monotonic, itertools.count()

    def monotonic() -> float:
        # All work takes long enough for a line, and no wait becomes so long that it ends.
        caller = inspect.currentframe().f_back  # type: ignore[union-attr]
        return clock() + (next(looks) if caller and caller.f_code.co_filename.endswith("progress.py") else 0)

    monkeypatch.setattr(time, "monotonic", monotonic)
    for name in ("rich", "tqdm", "ipywidgets"):
        monkeypatch.setitem(sys.modules, name, None)
    return prepared(tmp_path)


def with_progress() -> Iterator[str]:
    """Yield the names of all public functions and methods that take ``progress``."""
    for name in dir(tr):
        found = getattr(tr, name)
        inner = vars(found) if isinstance(found, type | types.ModuleType) else {}
        public = {f"{name}.{own}": each for own, each in inner.items() if own in getattr(found, "__all__", inner)}
        for full, function in {name: found, **public}.items():
            own = inspect.isfunction(function) and not full.split(".")[-1].startswith("_")
            if own and "progress" in inspect.signature(function).parameters and not full.startswith("checkpoint."):
                yield full


def test_every_function_that_takes_progress_is_called_here() -> None:
    assert set(with_progress()) == set(CALLS)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CALLS)
def test_a_bar_is_for_terminals_alone(name: str, path: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()) as pipe:
        with pytest.raises(UnsupportedError, match="progress= is True or a function"):
            CALLS[name](path, progress="yes")
        CALLS[name](path, progress=True)
    assert pipe.getvalue() == ""
    with contextlib.redirect_stderr(Terminal()) as terminal:
        CALLS[name](prepared(path / "another"), progress=False)
        assert terminal.getvalue() == ""
        CALLS[name](prepared(path / "again"), progress=True)
    said = terminal.getvalue()
    assert "100% [####################] 64.0 KiB of 64.0 KiB" in said
    assert said.endswith("\r\x1b[K")


def test_no_line_is_longer_than_the_terminal_is_wide(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    faults.answer(monkeypatch, os, "get_terminal_size", os.terminal_size((30, 10)))
    faults.answer(monkeypatch, Terminal, "fileno", 2)
    with contextlib.redirect_stderr(Terminal()) as terminal:
        tr.save(path / "new", TREE, progress=True)
    assert max(map(len, terminal.getvalue().split("\r\x1b[K"))) == 29


def test_lines_come_less_often_than_news(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    tree = [np.zeros(1 << 18) for _ in range(20)]
    news: list[tuple[int, int]] = []
    tr.save(path / "one", tree, progress=lambda done, total: news.append((done, total)))
    assert len(news) >= 10
    times = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 0.04 * next(times))  # a line takes at least a tenth of a second
    with contextlib.redirect_stderr(Terminal()) as terminal:
        tr.save(path / "two", tree, progress=True)
    assert 0 < terminal.getvalue().count("%") <= len(news) // 2


def test_nothing_to_do_has_a_line_too(path: Path) -> None:
    tr.save(path / "empty", {"a": np.zeros((0, 3))})
    with contextlib.redirect_stderr(Terminal()) as terminal:
        tr.verify(path / "empty", progress=True)
    assert "100% [####################] 0 B of 0 B" in terminal.getvalue()


def test_a_terminal_that_is_gone_stops_no_work(path: Path) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with contextlib.redirect_stderr(Gone()):
        tr.save(path / "new", TREE, progress=True)
        assert tr.verify(path / "new", progress=True).ok


@pytest.mark.parametrize("name", ["rich", "tqdm"])
def test_a_bar_of_an_installed_library_is_shown_and_taken_away(
    name: str, monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    monkeypatch.delitem(sys.modules, name)
    with contextlib.redirect_stderr(Terminal()) as terminal:
        tr.save(path / "new", TREE, progress=True)
    said = terminal.getvalue()
    assert "saving: 100%" in said
    assert "#" * 20 not in said
    assert said.endswith(("\x1b[2K", "\r"))


def test_a_notebook_without_widgets_has_a_line_that_no_sequence_clears(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    kernel = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: kernel))
    with contextlib.redirect_stderr(io.StringIO()) as notebook:
        tr.save(path / "new", TREE, progress=True)
    said = notebook.getvalue()
    assert "saving: 100% [####################]" in said
    assert "\x1b" not in said
    assert said.endswith(" \r")
