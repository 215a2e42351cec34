"""Jobs of real processes on this machine, joined by ``jax.distributed`` over loopback.

A worker is a function of a module under ``tests``; each process imports it by name and calls it with the arguments::

    outcomes = run_job(saves_and_loads, 4, devices=2, arguments=(str(tmp_path),))
    assert results(outcomes) == [...]

The processes are forked from one that has imported jax (see `tests.warm`). Tests whose workers end in step with each
other share the processes of the fixture ``crews`` besides, which do one worker after another::

    outcomes = crews.run(saves_and_loads, 4, devices=2, arguments=(str(tmp_path),))

Inside a worker jax is up: ``jax.process_index()`` says which process it is. What it returns has to be JSON. While it
runs, a worker can tell the test where it is with `say` (the test reads `Job.events`) and wait for a word of the test
with `hear` (the test calls `Job.tell`), so nobody has to sleep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self

from tests import warm
from torture.ports import free_port

__all__ = ["Crews", "Job", "Outcome", "hear", "results", "run_job", "say", "start_job"]

_ROOT: Final = Path(__file__).parents[2]
_EVENT: Final = "@event "
_RESULT: Final = "@result "
_LEAVE: Final = "@leave"
_WORK: Final = "@work "
_LEAVING_SECONDS: Final = 60.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a process ended."""

    process: int
    """Its number."""
    code: int
    """Its exit code; the number of the signal that ended it, negative."""
    result: Any
    """What its worker returned; None where it ended otherwise."""
    error: str | None
    """``"Class: message"`` of what its worker raised."""
    output: str
    """What it printed."""
    errors: str
    """What it printed on stderr, Gloo's lines among it."""
    late: bool
    """It ran longer than the job was given, and was killed for it."""


def results(outcomes: Sequence[Outcome]) -> list[Any]:
    """Return what the workers returned; fail with all that they printed where one did not."""
    bad = [one for one in outcomes if one.code or one.error]
    told = "\n".join(
        f"process {one.process}: code {one.code}{' (too late)' if one.late else ''}, {one.error}\n{one.errors[-4000:]}"
        for one in bad
    )
    assert not bad, told
    return [one.result for one in outcomes]


def run_job(
    worker: Callable[..., Any],
    count: int,
    *,
    devices: int | Sequence[int] = 2,
    arguments: Sequence[Any] = (),
    timeout: float = 60,
    heartbeat: int = 10,
    environment: dict[str, str] | None = None,
) -> list[Outcome]:
    """Run a job to its end; processes that are not done after ``timeout`` seconds are killed.

    Args:
        worker: a function of an importable module.
        count: number of processes.
        devices: of each process, or of each one.
        arguments: of the worker; JSON.
        timeout: seconds for the whole job.
        heartbeat: seconds after which jax notices that a process is dead, and ends the others.
        environment: variables of the processes, beside those of this one.
    """
    with start_job(
        worker, count, devices=devices, arguments=arguments, heartbeat=heartbeat, environment=environment
    ) as job:
        return job.wait(timeout)


def start_job(
    worker: Callable[..., Any],
    count: int,
    *,
    devices: int | Sequence[int] = 2,
    arguments: Sequence[Any] = (),
    heartbeat: int = 10,
    environment: dict[str, str] | None = None,
) -> Job:
    """Start a job; use it as a context manager, which ends what still runs."""
    each = [devices] * count if isinstance(devices, int) else list(devices)
    assert len(each) == count
    common = {
        "worker": [worker.__module__, worker.__qualname__],
        "address": f"127.0.0.1:{free_port()}",
        "count": count,
        "arguments": list(arguments),
        "heartbeat": heartbeat,
    }
    return Job([common | {"process": number, "devices": many} for number, many in enumerate(each)], environment or {})


class Job:
    """Processes that run, a context manager."""

    def __init__(self, settings: Sequence[dict[str, Any]], environment: dict[str, str]) -> None:
        self._events: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
        self._processes: list[_Process] = []
        try:
            for one in settings:
                self._processes.append(_Process(one, environment, self._events))
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def pid(self, number: int) -> int:
        """Return the process id of one."""
        return self._processes[number].child.pid

    def send(self, number: int, what: signal.Signals) -> None:
        """Send a signal to one; nothing happens where it has ended."""
        self._processes[number].child.send_signal(what)

    def wake(self, number: int) -> None:
        """Let one go on that stops itself, as soon as it has: it says so before, and might not have come to it yet."""
        end = time.monotonic() + 60
        while Path("/proc").exists() and "\nState:\tT" not in self._state(number) and time.monotonic() < end:
            time.sleep(0.005)
        self.send(number, signal.SIGCONT)

    def _state(self, number: int) -> str:
        return Path(f"/proc/{self.pid(number)}/status").read_text(encoding="utf-8")

    def tell(self, number: int, text: str = "") -> None:
        """Give one the line that its `hear` waits for."""
        file = self._processes[number].child.stdin
        assert file is not None
        with contextlib.suppress(BrokenPipeError):
            file.write(f"{text}\n")
            file.flush()

    def events(self, timeout: float = 60) -> Iterator[tuple[int, str]]:
        """Yield what the workers say, with their numbers, until all have ended; fail if nothing comes for a while."""
        ended = 0
        while ended < len(self._processes):
            try:
                number, text = self._events.get(timeout=timeout)
            except queue.Empty:
                told = "\n".join(one.outcome(late=False).errors[-2000:] for one in self._processes)
                raise AssertionError(f"no process said anything for {timeout} s\n{told}") from None
            if text is None:
                ended += 1
            else:
                yield number, text

    def wait_for(self, number: int, text: str, timeout: float = 60) -> None:
        """Wait until one has said ``text``; what others say meanwhile is passed over."""
        for found in self.events(timeout):
            if found == (number, text):
                return
        raise AssertionError(f"process {number} ended and never said {text!r}")

    def ask(self, worker: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Let all, whose worker has returned, do another one."""
        text = json.dumps({"worker": [worker.__module__, worker.__qualname__], "arguments": list(arguments)})
        for number, one in enumerate(self._processes):
            one.begin_again()
            self.tell(number, _WORK + text)

    def returned(self, timeout: float) -> list[Outcome]:
        """Wait until the workers have returned, and say how; the processes stay."""
        deadline = time.monotonic() + timeout
        for one in self._processes:
            one.done.wait(max(0.0, deadline - time.monotonic()))
        return [one.outcome(late=not one.done.is_set()) for one in self._processes]

    def wait(self, timeout: float = 60) -> list[Outcome]:
        """Wait for the end of all, kill what is not done in time, and return how they ended."""
        self.returned(timeout)
        # Nobody leaves before all are done: jax ends the others when it misses one.
        for number in range(len(self._processes)):
            self.tell(number, _LEAVE)
        return [one.ended(_LEAVING_SECONDS if one.done.is_set() else 0) for one in self._processes]

    def _end(self) -> None:
        for one in self._processes:
            one.child.kill()
        for one in self._processes:
            one.ended(_LEAVING_SECONDS)
            one.close()


class Crews:
    """Jobs that stay for the next test, one of each number of processes and devices; a context manager."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[int, int], Job] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs.values():
            job.wait()
            job.__exit__(None, None, None)

    def run(
        self,
        worker: Callable[..., Any],
        count: int,
        *,
        devices: int = 2,
        arguments: Sequence[Any] = (),
        timeout: float = 60,
    ) -> list[Outcome]:
        """Do as `run_job` does, in processes that may have done other workers; they go where one of them failed."""
        key = count, devices
        job = self._jobs.pop(key, None)
        if job is None:
            job = start_job(worker, count, devices=devices, arguments=arguments, heartbeat=100)
        else:
            job.ask(worker, arguments)
        outcomes = job.returned(timeout)
        if any(one.code or one.error or one.late for one in outcomes):
            job.__exit__(None, None, None)
        else:
            self._jobs[key] = job
        return outcomes


class _Process:
    """One process, and the threads that read what it prints."""

    def __init__(
        self, settings: dict[str, Any], environment: dict[str, str], events: queue.SimpleQueue[tuple[int, str | None]]
    ) -> None:
        self.number: int = settings["process"]
        self._events = events
        self._output: list[str] = []
        self._errors: list[str] = []
        self._said: dict[str, Any] = {}
        self._gone = False
        self.done = threading.Event()
        """Its worker has returned, or it has ended."""
        self.child = _started(settings, environment)
        self._readers = [
            threading.Thread(target=self._read_output, args=(self.child.stdout,), daemon=True),
            threading.Thread(target=self._read_errors, args=(self.child.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def begin_again(self) -> None:
        """Wait for another result."""
        self._said = {}
        self.done.clear()
        if self._gone:
            self.done.set()

    def ended(self, timeout: float) -> Outcome:
        """Wait for its end and return how it came."""
        late = False
        try:
            self.child.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
            self.child.kill()
            self.child.wait()
        for reader in self._readers:
            reader.join()
        return self.outcome(late=late)

    def outcome(self, *, late: bool) -> Outcome:
        """Return what is known of it."""
        code = self.child.poll()
        return Outcome(
            process=self.number,
            code=0 if code is None else code,
            result=self._said.get("result"),
            error=self._said.get("error"),
            output="".join(self._output),
            errors="".join(self._errors),
            late=late,
        )

    def close(self) -> None:
        """Close its pipes."""
        for file in (self.child.stdin, self.child.stdout, self.child.stderr):
            with contextlib.suppress(BrokenPipeError):
                if file is not None:
                    file.close()

    def _read_output(self, file: IO[str]) -> None:
        for line in file:
            if line.startswith(_EVENT):
                self._events.put((self.number, line[len(_EVENT) : -1]))
            elif line.startswith(_RESULT):
                self._said = json.loads(line[len(_RESULT) :])
                self.done.set()
            else:
                self._output.append(line)
        self._gone = True
        self.done.set()
        self._events.put((self.number, None))

    def _read_errors(self, file: IO[str]) -> None:
        self._errors.extend(file)


def _started(settings: dict[str, Any], environment: dict[str, str]) -> warm.Child:
    # How many devices it has, it is told later.
    own = {"XLA_FLAGS": "--xla_backend_optimization_level=0", "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"}
    variables = dict(os.environ) | own | environment
    if warm.CAN_FORK:
        return warm.Forked(_main, (settings,), variables=variables)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.multiprocess.jobs", json.dumps(settings)],
        cwd=_ROOT,
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )


def say(text: str) -> None:
    """Tell the test where this worker is."""
    # One write: other threads may print too.
    os.write(1, f"{_EVENT}{text}\n".encode())


def hear() -> str:
    """Wait for a line from the test."""
    line = sys.stdin.readline()
    if not line:  # the test is gone
        os._exit(1)
    return line[:-1]


def _main(settings: dict[str, Any]) -> None:
    """Be one process of a job."""
    import jax

    jax.config.update("jax_num_cpu_devices", settings["devices"])

    def arrive() -> None:
        jax.distributed.initialize(
            settings["address"], settings["count"], settings["process"], heartbeat_timeout_seconds=settings["heartbeat"]
        )

    code = _work(settings, arrive)
    while (word := hear()) != _LEAVE:
        if word.startswith(_WORK):
            code = _work(json.loads(word.removeprefix(_WORK)), lambda: None)
    # No way out that waits for others: jax would wait for those that are dead.
    os._exit(code)


def _work(settings: dict[str, Any], arrive: Callable[[], None]) -> int:
    """Call a worker and tell the test what it returned; return the exit code."""
    code = 1
    said: dict[str, Any] = {"error": "never began"}
    try:
        arrive()
        module, name = settings["worker"]
        worker = getattr(importlib.import_module(module), name)
        said = {"result": worker(*settings["arguments"])}
        json.dumps(said)
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test is told
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.flush()
    sys.stderr.flush()
    # One write: other threads may print too.
    os.write(1, f"{_RESULT}{json.dumps(said)}\n".encode())
    return code


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
