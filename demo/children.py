"""The demo's other processes: started, listened to, held still, and killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import treering

_PATIENCE_S = 240.0


class Failed(Exception):
    """A process of the demo did not do its part; the text says why."""


class Child:
    """A Python process that tells what it does, a context manager that does not leave it behind.

    Args:
        module: the module that it runs.
        arguments: its arguments.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        # The new process imports the same treering and the same demo as this one.
        homes = (os.fspath(Path(file).resolve().parents[1]) for file in (treering.__file__, __file__))
        paths = [*homes, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", "-m", module, *arguments],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            encoding="utf-8",
        )
        self._watch = threading.Timer(_PATIENCE_S, self._process.kill)
        self._watch.daemon = True
        self._watch.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.cancel()
        self._process.kill()
        self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._complaints.close()

    @property
    def number(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """Whether it is no more."""
        return self._process.poll() is not None

    def events(self) -> Iterator[dict[str, Any]]:
        """Listen until it ends.

        Raises:
            Failed: it ended with an error, or took more than four minutes.
        """
        for line in self._process.stdout or ():
            yield json.loads(line)
        code = self._process.wait()
        if code:
            self._complaints.seek(0)
            complaint = self._complaints.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
            raise Failed(f"process {self.number} ended with code {code}: {complaint[-1]}")

    def last_words(self) -> Iterator[dict[str, Any]]:
        """Listen to what it had told before it was killed."""
        for line in self._process.stdout or ():
            # The kill may have come in the midst of a line.
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def hold_still(self) -> None:
        """Stop all its threads, where the system can; it notices nothing.

        Raises:
            Failed: it has ended.
        """
        if os.name == "nt":
            return
        os.kill(self.number, signal.SIGSTOP)
        _, status = os.waitpid(self.number, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            raise Failed(f"process {self.number} ended before it was held still")

    def go_on(self) -> None:
        """Let it run again."""
        if os.name != "nt":
            os.kill(self.number, signal.SIGCONT)

    def kill(self) -> int:
        """End it at once, as a power failure would, and return how it ended: minus nine on POSIX."""
        self._process.kill()
        return self._process.wait()
