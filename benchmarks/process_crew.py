"""Crews of real ``jax.distributed`` processes that live as long as the run, so that their rounds can take turns."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["CrewFailed", "ThreadPool", "crew", "dismiss"]

_PATIENCE_S = 600.0
_TREERING_PATIENCE_S = 120
_SHOWN = 3000


class CrewFailed(RuntimeError):
    """A process of a crew answered with an error, not in time, or not at all."""


class ThreadPool:
    """So many processes of one job, each with its share of the cores and of eight devices.

    A crew that has failed once is of no use any more: its processes may wait for each other.
    """

    def __init__(self, count: int, *, patience: float = _PATIENCE_S) -> None:
        self.count = count
        self._patience = patience
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the crew
        self._processes: list[subprocess.Popen[bytes]] = []
        port = _free_port()
        environment = {
            **os.environ,
            "TREERING_TIMEOUT_S": str(_TREERING_PATIENCE_S),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        try:
            for number in range(count):
                command = [sys.executable, "-m", "benchmarks.process_worker", *map(str, (number, count, port))]
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=self._log,
                        env=environment,
                        bufsize=0,
                    )
                )
            self._answers("start")
        except BaseException:
            self.close()
            raise

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return bool(self._processes)

    def ask(self, verb: str, *arguments: Any) -> list[Any]:
        """Ask every process the same; their answers, in the order of their numbers.

        Raises:
            CrewFailed: one of them failed, or took too long; all have been ended.
        """
        if not self.is_alive:
            raise CrewFailed(f"a crew of {self.count}: {verb}: it was ended before")
        line = json.dumps([verb, arguments]).encode() + b"\n"
        try:
            for process in self._processes:
                assert process.stdin is not None  # piped
                process.stdin.write(line)
            return self._answers(verb)
        except OSError as error:
            raise self._failed(f"{verb}: {error}") from error

    def _answers(self, verb: str) -> list[Any]:
        """One line from each, until the patience ends."""
        deadline = time.monotonic() + self._patience
        texts = [b""] * self.count
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self._processes):
                assert process.stdout is not None  # piped
                selector.register(process.stdout, selectors.EVENT_READ, number)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = ", ".join(str(key.data) for key in selector.get_map().values())
                    raise self._failed(f"{verb}: no answer of {late} after {self._patience:g} s")
                for key, _ in ready:
                    more = os.read(key.fd, 1 << 16)
                    texts[key.data] += more
                    if not more:
                        raise self._failed(f"{verb}: process {key.data} has ended")
                    if more.endswith(b"\n"):
                        selector.unregister(key.fileobj)
        answers = [json.loads(text) for text in texts]
        errors = [f"process {number}: {each['error']}" for number, each in enumerate(answers) if "error" in each]
        if errors:
            raise self._failed(f"{verb}: " + "; ".join(errors))
        return [each["answer"] for each in answers]

    def _failed(self, what: str) -> CrewFailed:
        """End all, and say what they last said."""
        size = os.fstat(self._log.fileno()).st_size
        said = os.pread(self._log.fileno(), _SHOWN, max(0, size - _SHOWN)).decode(errors="replace")
        self.close()
        return CrewFailed(f"a crew of {self.count}: {what}\n{said}")

    def close(self) -> None:
        """End every process, by its own id; also a second time."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None  # piped
                with contextlib.suppress(OSError):
                    pipe.close()
        self._processes.clear()
        self._log.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


_crews: dict[int, ThreadPool] = {}


def crew(count: int) -> ThreadPool:
    """The crew of so many processes: started when it is first asked for or has failed, ended with the program."""
    known = _crews.get(count)
    if known is None or not known.is_alive:
        known = _crews[count] = ThreadPool(count)
    return known


@atexit.register
def dismiss() -> None:
    """End all crews."""
    while _crews:
        _crews.popitem()[1].close()
