"""Processes that are forked from one which has imported jax, for that alone takes a second of a core.

The one process is Python's fork server. It has imported and has started nothing: no device, no thread of ours. Each
process gets variables, streams and a folder of its own, as one that is started anew does. What a program does at its
very end, and what it has imported or not, is told only by one that is started anew: such tests use `subprocess`.

Where the system has no fork server, all is started anew.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, Protocol

__all__ = ["CAN_FORK", "Child", "Forked", "run"]

ROOT: Final = Path(__file__).parents[1]
CAN_FORK: Final = "forkserver" in multiprocessing.get_all_start_methods()
# numpy and jax with what joint programs use, pytest because workers are written in modules of tests.
_PRELOADED: Final = [
    "jax", "jax.numpy", "jax.experimental.multihost_utils", "pytest", "treering",
    "tests.multiprocess.runs", "tests.multiprocess.meetings", "tests.multiprocess.interrupted",
]  # fmt: skip


class Child(Protocol):
    """What tests use of a `subprocess.Popen`."""

    stdin: IO[str] | None
    stdout: IO[str] | None
    stderr: IO[str] | None
    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def kill(self) -> None: ...


class Forked:
    """A forked process, of which this one holds the streams: a `Child`.

    Args:
        work: what it does; a function that can be pickled, as its arguments can.
        arguments: of the function.
        variables: all that it finds in ``os.environ``.
        folder: where it works.
    """

    def __init__(
        self, work: Callable[..., object], arguments: tuple[Any, ...], *, variables: dict[str, str], folder: Path = ROOT
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        pipes = [context.Pipe(duplex=False) for _ in range(3)]
        theirs = pipes[0][0], pipes[1][1], pipes[2][1]
        ours = pipes[0][1], pipes[1][0], pipes[2][0]
        self._process = context.Process(target=_begin, args=(work, arguments, variables, str(folder), theirs))
        self._process.start()
        files: list[IO[str]] = []
        for one, mode in zip(ours, ("w", "r", "r"), strict=True):
            files.append(os.fdopen(os.dup(one.fileno()), mode, encoding="utf-8", errors="replace"))
        for each in (*theirs, *ours):
            each.close()
        self.stdin: IO[str] | None = files[0]
        self.stdout: IO[str] | None = files[1]
        self.stderr: IO[str] | None = files[2]
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self._code is None and (code := self._process.exitcode) is not None:
            self._code = code
            # The descriptor that tells of its end would else stay until somebody collects garbage.
            self._process.close()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return its exit code."""
        if self._code is None:
            self._process.join(timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send it a signal; nothing happens where it has ended, for its number may be another's by then."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def run(
    *arguments: str, folder: Path = ROOT, environment: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` to its end: ``-c``, ``-m`` or a script, ``-W`` and an action before it.

    Args:
        arguments: of Python.
        folder: where it works.
        environment: variables that differ from those of this process.
        timeout: seconds after which it is killed, and the error is `subprocess.TimeoutExpired`.
    """
    variables = {**os.environ, **(environment or {})}
    command = [sys.executable, *arguments]
    if not CAN_FORK:
        return subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout, check=False
        )
    # Files, for nobody reads while it runs.
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place, name) for name in ("out", "err")]
        child = Forked(_be_program, (arguments, *map(str, files)), variables=variables, folder=folder)
        try:
            code = child.wait(timeout)
        finally:
            child.kill()
            for stream in (child.stdin, child.stdout, child.stderr):
                assert stream is not None
                stream.close()
        out, err = (file.read_text(encoding="utf-8", errors="replace") if file.exists() else "" for file in files)
    return subprocess.CompletedProcess(command, code, out, err)


def _begin(
    work: Callable[..., object],
    arguments: tuple[Any, ...],
    variables: dict[str, str],
    folder: str,
    streams: tuple[Any, ...],
) -> None:
    # Where jax was not imported ahead, nobody would notice but by the time.
    assert "jax" in sys.modules
    import jax

    os.environ.clear()
    os.environ.update(variables)
    # What is read of them when jax, or the first temporary file, is there: both may be already.
    jax.config.update("jax_enable_x64", variables.get("JAX_ENABLE_X64") in ("1", "True"))
    tempfile.tempdir = None
    os.chdir(folder)
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    _open_streams()
    work(*arguments)


def _open_streams() -> None:
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, encoding="utf-8", closefd=False) for number in (1, 2))


def _be_program(arguments: tuple[str, ...], *files: str) -> None:
    for number, name in enumerate(files, 1):
        opened = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    _open_streams()
    while arguments[0] == "-W":
        warnings.simplefilter(arguments[1])  # type: ignore[arg-type]
        arguments = arguments[2:]
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = list(arguments)
        runpy.run_path(arguments[0], run_name="__main__")
