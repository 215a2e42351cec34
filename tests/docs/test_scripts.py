"""Programs on the pages that end, or are ended, run as they stand there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import pytest

import treering as tr

DOCS = Path(__file__).parents[2] / "docs"
DEADLINE = 120


def program(page: str, words: str) -> str:
    """Return the Python program of a page that has these words."""
    text = (DOCS / page).read_text(encoding="utf-8")
    fences: list[str] = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (found,) = (fence for fence in fences if words in fence)
    return found


@contextmanager
def started(text: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    (folder / "program.py").write_text(text, encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=folder,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + DEADLINE
    while not true():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_script_that_ends_without_a_word_has_saved(tmp_path: Path) -> None:
    with started(program("guides/async.md", 'save_async("last"'), tmp_path) as process:
        said = process.communicate(timeout=DEADLINE)
    assert (process.returncode, *said) == (0, "", "")
    assert jnp.array_equal(tr.load(tmp_path / "last")["w"], jnp.ones(10_000_000))


def newer(run: tr.Run, step: int) -> bool:
    latest = run.latest()
    return latest is not None and latest > step


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows ends a program without asking it")
def test_a_preempted_training_saves_ends_and_goes_on(tmp_path: Path) -> None:
    text = program("guides/preemption.md", "save_on_signal(signal.SIGTERM)")
    run, reached = tr.Run(tmp_path / "run"), -1
    for _ in range(2):
        with started(text, tmp_path) as process:
            wait_until(partial(newer, run, reached), process)
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=DEADLINE)
        assert (process.returncode, *said) == (-signal.SIGTERM, "", "")
        assert newer(run, reached)
        reached = run.latest() or 0
        # The training adds one at each step, so this says that none was left out or taken twice.
        assert jnp.array_equal(run.load()["w"], jnp.full(4, reached + 2.0))
