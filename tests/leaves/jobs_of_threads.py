"""Threads that stand for the processes of a job: each holds some of the devices, and all save into one directory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import pytest

from treering._arrays import outgoing as outgoing_module
from treering._coordination.operations import Call, derive_attempt
from treering._leaves import serialize
from treering._leaves.serialize import LeavesSaveOptions, serialize_together
from treering._tree.flatten import flatten
from treering._values.boxes import Box
from treering._values.processes import Processes

__all__ = ["Job"]

PATIENCE = 60.0


class Job:
    """A job of ``count`` processes: devices are dealt out to them evenly, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, name: str = "0123456789abcdef") -> None:
        self.count = count
        self.name = name
        self.calls = 0
        self._monkeypatch = monkeypatch
        self._of_thread = threading.local()
        each = len(jax.devices()) // count
        monkeypatch.setattr(outgoing_module, "process_of", lambda device: device.id // each)
        monkeypatch.setattr(serialize, "next_sequence", self._next_call)

    @property
    def attempt(self) -> str:
        """The attempt of the last call."""
        return derive_attempt(self.name, self.calls)

    @property
    def this(self) -> int | None:
        """The process that this thread stands for; None where it stands for none."""
        return getattr(self._of_thread, "this", None)

    def hold(self, *parts: tuple[Box, tuple[int, ...]]) -> None:
        """Let every leaf lie in these boxes, each with the processes that hold it."""
        self._monkeypatch.setattr(outgoing_module, "held_boxes", lambda *_: parts)

    def _next_call(self, path: Path, processes: Processes, *, timeout: float, doing: str) -> Call:
        del path
        return Call(job=self.name, number=self.calls, processes=processes, timeout=timeout, doing=doing)

    def save(
        self,
        path: Path,
        tree: Any,
        *,
        trees: Mapping[int, Any] | None = None,
        asked: Mapping[int, Mapping[str, Any]] | None = None,
        timeout: float = PATIENCE,
        absent: tuple[int, ...] = (),
        before: Callable[[int], None] | None = None,
        **wished: Any,
    ) -> dict[int, BaseException | None]:
        """Save from all processes but those that are absent; return the error of each, or None.

        Args:
            path: the directory.
            tree: what is saved.
            trees: other trees of some processes.
            asked: other options of some processes, by name.
            timeout: seconds that each waits for others.
            absent: processes that do not come.
            before: called in the thread of each process, with its number, before it saves.
            wished: the options, by name.
        """
        self.calls += 1
        errors: dict[int, BaseException | None] = {}

        def run(this: int) -> None:
            self._of_thread.this = this
            try:
                if before is not None:
                    before(this)
                serialize_together(
                    path,
                    flatten((trees or {}).get(this, tree)),
                    LeavesSaveOptions(**{**(asked or {}).get(this, wished), "timeout": timeout}),
                    processes=Processes(this=this, count=self.count),
                )
            except Exception as error:  # noqa: BLE001 - looked at by the test
                errors[this] = error
            else:
                errors[this] = None

        threads = [threading.Thread(target=run, args=(this,)) for this in range(self.count) if this not in absent]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors
