"""Processes that are forked from one which has imported jax, for that alone takes a second of a core.

The one process is Python's fork server. It has imported and has started nothing: no device, no thread of ours. Each
process gets variables, streams and a folder of its own, as one that is started anew does. What a program does at its
very end such a process does not tell, and what it has imported or not is told only by one that is started anew: the
latter use `subprocess`.

`Programs` are forked from another such process, and end as programs do that are started anew: with their threads waited
for, their exit handlers called and their interpreter taken down.

Where the system has no fork server, all is started anew.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final, Protocol

__all__ = ["CAN_FORK", "Child", "Forked", "Programs", "run"]

ROOT: Final = Path(__file__).parents[1]
CAN_FORK: Final = "forkserver" in multiprocessing.get_all_start_methods()
# numpy and jax with what joint programs use, pytest because workers are written in modules of tests.
_PRELOADED: Final = [
    "jax", "jax.numpy", "jax.experimental.multihost_utils", "pytest", "treering",
    "tests.multiprocess.runs", "tests.multiprocess.meetings", "tests.multiprocess.interrupted",
]  # fmt: skip

# Of treering what saves and loads, which starts nothing before it is used and takes a third of a second to import.
_PRELOADED_BY_PROGRAMS: Final = [
    "jax.numpy", "treering._checkpoint.load", "treering._checkpoint.save", "treering._runs.load_step",
    "treering._runs.save_step", "treering.checkpoint", "treering.run",
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


class Programs:
    """Runs programs to their very end, one after the other, as forks of one process that has imported jax.

    Each is its own interpreter from the fork on, and leaves it by coming to the end of its main module.
    """

    def __init__(self) -> None:
        self._host: subprocess.Popen[str] | None = None

    def run(
        self, *arguments: str, folder: Path = ROOT, environment: dict[str, str] | None = None, timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run ``python ARGUMENTS`` as the function `run` does; its end is that of a program, too."""
        variables = {**os.environ, **(environment or {})}
        command = [sys.executable, *arguments]
        if not CAN_FORK:
            return subprocess.run(
                command, cwd=folder, env=variables, capture_output=True, text=True, timeout=timeout, check=False
            )
        with tempfile.TemporaryDirectory() as place:
            files = [Path(place, name) for name in ("out", "err")]
            host = self._started()
            assert host.stdin is not None
            assert host.stdout is not None
            host.stdin.write(f"{json.dumps([arguments, str(folder), variables, [*map(str, files)], timeout])}\n")
            host.stdin.flush()
            code = json.loads(host.stdout.readline())
            if code is None:
                raise subprocess.TimeoutExpired(command, timeout)
            out, err = (file.read_text(encoding="utf-8", errors="replace") for file in files)
        return subprocess.CompletedProcess(command, code, out, err)

    def close(self) -> None:
        """Let the process end from which the programs are forked."""
        if self._host is not None:
            self._host.communicate()

    def _started(self) -> subprocess.Popen[str]:
        if self._host is None:
            self._host = subprocess.Popen(
                [sys.executable, "-m", "tests.warm"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        return self._host


def _fork_programs() -> None:
    """Fork one program for each line on stdin, and tell its status, or null where its time ran out."""
    for name in _PRELOADED_BY_PROGRAMS:
        importlib.import_module(name)
    for line in sys.stdin:
        arguments, folder, variables, files, timeout = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.environ.clear()
            os.environ.update(variables)
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            _be_program(tuple(arguments), *files)
            return  # and with it the main module: the fork ends as a program does
        sys.stdout.write(f"{json.dumps(_status_of(pid, time.monotonic() + timeout))}\n")
        sys.stdout.flush()


def _status_of(pid: int, deadline: float) -> int | None:
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


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


if __name__ == "__main__":
    _fork_programs()
