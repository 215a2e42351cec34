"""How often treering asks a bucket, how many of the requests wait for one another, and what that costs far away."""

from __future__ import annotations

import http.client
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

import treering
from benchmarks.bucket_scene import url_of
from benchmarks.byte_bucket import BUCKET, SLOW_BUCKET, Request, in_sequence, remove_objects, start_server, taken_log
from benchmarks.measure import Case, Group, Work
from benchmarks.workloads import LeafKind, Tree
from treering._codec.key_document import placeholder
from treering._values.checkpoint_names import step_name

__all__ = ["RunScene", "SmallScene", "call_groups"]

_LEAVES = 10


class _Asked(NamedTuple):
    """What the server was asked."""

    requests: list[Request]
    result: Any

    @property
    def beside_data(self) -> list[Request]:
        return [request for request in self.requests if not request.is_data]


class SmallScene:
    """Ten leaves of 1 KiB: the time is that of the requests.

    Args:
        name: S.
        leaves: numpy.
        factor: not used.
        folder: tells scenes of one run apart.
    """

    title = "ten leaves of 1 KiB"
    nbytes = _LEAVES << 10
    repeats = 1

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        del leaves, factor
        start_server()
        self._top = f"{name}-{folder.name}"
        self._tree: Tree = {f"leaf_{index}": np.arange(256, dtype=np.float32) + index for index in range(_LEAVES)}
        self._count = 0

    def prepare(self) -> None:
        """Save it, for what only reads."""
        treering.save(url_of(self._kept), self._tree)

    def close(self) -> None:
        """Remove every object."""
        remove_objects(f"{self._top}/")

    def groups(self) -> tuple[Group, ...]:
        """Each of the calls near by and far away."""
        calls: tuple[tuple[str, Callable[[str], Work], bool], ...] = (
            ("save", self._save, True),
            ("overwrite", self._overwrite, True),
            ("load", self._load, False),
            ("open one leaf", self._open, False),
            ("ls", lambda bucket: self._verb("ls", bucket), False),
            ("inspect", lambda bucket: self._verb("inspect", bucket), False),
        )
        return tuple(group for name, begin, beside in calls for group in call_groups(name, begin, beside_data=beside))

    @property
    def _kept(self) -> str:
        return f"{self._top}/kept"

    def _new(self) -> str:
        self._count += 1
        return f"{self._top}/new-{self._count}"

    def _save(self, bucket: str) -> Work:
        url = url_of(self._new(), bucket)
        return lambda: treering.save(url, self._tree)

    def _overwrite(self, bucket: str) -> Work:
        url = url_of(self._new(), bucket)
        treering.save(url, self._tree)
        return lambda: treering.save(url, self._tree, overwrite=True)

    def _load(self, bucket: str) -> Work:
        return lambda: treering.load(url_of(self._kept, bucket))

    def _open(self, bucket: str) -> Work:
        def work() -> None:
            with treering.open(url_of(self._kept, bucket)) as found:
                np.asarray(found["leaf_3"][:2])

        return work

    def _verb(self, verb: str, bucket: str) -> Work:
        command = [sys.executable, "-m", "treering", verb, url_of(self._kept, bucket)]
        return lambda: subprocess.run(command, check=True, capture_output=True)


class RunScene:
    """A run of 500 steps, and places of 50,000 removed ones beside them.

    Args:
        name: R.
        leaves: numpy.
        factor: on the number of steps.
        folder: tells scenes of one run apart.
    """

    nbytes = 80
    repeats = 1

    def __init__(self, name: str, leaves: LeafKind, factor: float, folder: Path) -> None:
        del leaves
        start_server()
        self._top = f"{name}-{folder.name}"
        self._steps, self._removed = max(3, round(500 * factor)), max(10, round(50_000 * factor))
        self.title = f"runs of {self._steps:,} steps, one with {self._removed:,} that were removed"

    def prepare(self) -> None:
        """Save the steps of both runs, and put what a removal leaves."""
        for each in ("kept", "removed"):
            with treering.Run(url_of(f"{self._top}/{each}")) as run:
                for step in range(self._removed + 1, self._removed + self._steps + 1):
                    run.save(step, {"w": np.arange(10.0)}, force=True)
        connection = http.client.HTTPConnection(urlsplit(start_server()).netloc)
        for step in range(1, self._removed + 1):
            key = f"/{BUCKET}/{self._top}/removed/{step_name(step)}/treering.json"
            connection.request("PUT", key, placeholder())
            connection.getresponse().read()
        connection.close()
        taken_log()

    def close(self) -> None:
        """Remove every object."""
        remove_objects(f"{self._top}/")

    def groups(self) -> tuple[Group, ...]:
        """The latest step, and all steps, near by and far away."""

        def latest(bucket: str) -> Work:
            return lambda: treering.Run(url_of(f"{self._top}/kept", bucket)).latest()

        def steps(bucket: str) -> Work:
            return lambda: len(treering.Run(url_of(f"{self._top}/removed", bucket)).steps())

        wanted = {"Run.latest": self._removed + self._steps, "Run.steps": self._steps}
        return tuple(
            group
            for name, begin in (("Run.latest", latest), ("Run.steps", steps))
            for group in call_groups(name, begin, beside_data=False, wanted=wanted[name])
        )


def call_groups(
    name: str,
    begin: Callable[[str], Work],
    *,
    beside_data: bool,
    wanted: Any = None,
    far: tuple[str, str] = (SLOW_BUCKET, "50 ms"),
) -> tuple[Group, ...]:
    """How often a call asks, and how long it takes where each request takes a while, with how many in sequence."""

    def check(asked: _Asked) -> str | None:
        if not asked.requests:
            return "the server was asked nothing"
        return None if wanted is None or wanted == asked.result else f"wanted {wanted}, found {asked.result}"

    def counted(request: _Asked) -> list[Request]:
        return request.beside_data if beside_data else request.requests

    beside = " beside the data" if beside_data else ""
    near = Case(
        name="treering", begin=lambda: _asked(begin(BUCKET)), check=check, count=lambda asked: len(counted(asked))
    )
    slow = Case(
        name="treering",
        begin=lambda: _asked(begin(far[0])),
        check=check,
        count=lambda asked: in_sequence(counted(asked)),
    )
    return (
        Group(name=name, cases=(near,), peaks=False, unit=f"requests{beside}"),
        Group(name=f"{name}, {far[1]} a request", cases=(slow,), peaks=False, unit=f"in sequence{beside}"),
    )


def _asked(work: Work) -> Work:
    """The same work; returns what it asked the server."""
    taken_log()

    def done() -> _Asked:
        result = work()
        return _Asked(taken_log(), result)

    return done
