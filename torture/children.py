"""Children that save once, forked from a warm process, and what they answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from treering.errors import TreeringError

__all__ = ["PATIENCE_SECONDS", "Answer", "Child", "compile_once", "in_child"]

PATIENCE_SECONDS = 60.0
# The looking is no part of what is looked at: no fault strikes it.
_scandir = os.scandir


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a child said before it ended."""

    acknowledged: bool
    """The save returned."""
    error: str | None
    """The save raised: the error's text."""
    ours: bool
    """That error is a TreeringError and an OSError that names the file."""
    kept: list[str]
    """What the error left behind: descriptors, threads."""
    calls: list[str]
    """The calls that were counted."""
    hung: bool
    """It had to be ended from outside."""


_SILENT: dict[str, Any] = {"acknowledged": False, "error": None, "ours": True, "kept": [], "calls": []}


class Child:
    """A forked child that runs one save; its answer comes through a pipe."""

    def __init__(self, save: Callable[[], None], path: Path, calls: list[str], *, wait: bool = False) -> None:
        """Fork. With ``wait`` the child begins only after `begin`."""
        self._answers, answer = os.pipe()
        started, self._start = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._answers)
            os.close(self._start)
            try:
                before = _descriptors()
                if wait:
                    os.read(started, 1)
                _answer(save, path, calls, answer, before)
            finally:
                os._exit(0)
        os.close(answer)
        os.close(started)

    def begin(self) -> None:
        """Let a waiting child go."""
        with contextlib.suppress(BrokenPipeError):  # killed while it waited
            os.write(self._start, b"!")

    def answer(self) -> Answer:
        """Wait for the end of the child."""
        parts: list[bytes] = []
        hung = False
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                hung = True
                os.kill(self.pid, signal.SIGKILL)
                break
            part = os.read(self._answers, 1 << 16)
            if not part:
                break
            parts.append(part)
        os.waitpid(self.pid, 0)
        os.close(self._answers)
        os.close(self._start)
        said = json.loads(b"".join(parts)) if parts else _SILENT
        return Answer(**said, hung=hung)


def in_child(save: Callable[[], None], path: Path, calls: list[str]) -> Answer:
    """Run ``save`` in a child; ``calls`` is the list that its injector fills."""
    return Child(save, path, calls).answer()


def _answer(save: Callable[[], None], path: Path, calls: list[str], pipe: int, before: set[str]) -> None:
    """Save, then tell. A fault that strikes the telling makes the child silent: nobody learns how the save ended."""
    write = os.write
    said = dict(_SILENT)
    try:
        save()
        said["acknowledged"] = True
    except OSError as error:
        named = str(path) in str(error) and str(error.filename).startswith(str(path))
        ours = isinstance(error, TreeringError) and named
        said |= {"error": f"{type(error).__name__}: {error}", "ours": ours}
    with contextlib.suppress(OSError):
        kept = sorted(_descriptors() - before)
        kept += [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        said |= {"calls": list(calls), "kept": kept}
        write(pipe, json.dumps(said).encode())


def _descriptors() -> set[str]:
    with _scandir("/proc/self/fd") as entries:
        return {entry.name for entry in entries}


def compile_once(folder: Path) -> None:
    """Let all processes that are forked from now on share what jax compiles."""
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
