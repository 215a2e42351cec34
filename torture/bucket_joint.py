"""Two real processes that save together to a bucket, each through the proxy."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, Final, Self

import treering
from torture.bucket_servers import BucketServer
from treering.errors import TreeringError

__all__ = ["JointPair", "fingerprint_of_version", "loaded_fingerprint"]

COUNT: Final = 2
_PATIENCE: Final = 90.0
_ROWS: Final = 16
_CONTEXT: Final = get_context("forkserver")


def fingerprint_of_version(version: int) -> str:
    """Return the fingerprint of the tree that both save as that version, and of what was loaded of it."""
    from torture.process_scenes import values
    from torture.scenes import fingerprint

    return fingerprint(values(version, _ROWS, 2))


class JointPair:
    """The processes, which wait for orders; a context manager.

    Args:
        server: the server, or the proxy before it.
        seconds: how long a request may take.
        patience: seconds after which nothing is asked again.
    """

    def __init__(self, server: BucketServer, *, seconds: float, patience: float) -> None:
        self._orders: list[Connection[Any, Any]] = []
        self._workers: list[Any] = []
        job = secrets.token_hex(8)
        for number in range(COUNT):
            mine, theirs = _CONTEXT.Pipe()
            given, how = (server, number, job, theirs), {"seconds": seconds, "patience": patience}
            worker = _CONTEXT.Process(target=_work, args=given, kwargs=how, daemon=True)
            worker.start()
            theirs.close()
            self._orders.append(mine)
            self._workers.append(worker)
        if self._answers() != ["ready"] * COUNT:
            raise RuntimeError("the processes of a joint save did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()

    def save(self, name: str, version: int, *, old: bool) -> Sequence[tuple[str, bool]]:
        """Let all save; return what each was told, "" for nothing, and whether by an error of treering's."""
        for orders in self._orders:
            orders.send((name, version, old))
        return self._answers()

    def _answers(self) -> list[Any]:
        return [orders.recv() if orders.poll(_PATIENCE) else ("it hangs", False) for orders in self._orders]


def _work(
    server: BucketServer, number: int, job: str, orders: Connection[Any, Any], *, seconds: float, patience: float
) -> None:
    """Be one process of the job."""
    from torture.bucket_scenes import open_bucket
    from torture.process_scenes import JointScene
    from torture.process_workers import forge
    from treering._values.processes import Processes

    path = open_bucket(server, "together", seconds=seconds, patience=patience)
    scene = JointScene(name="together", form="checkpoint", rows=_ROWS)
    forge(Processes(this=number, count=COUNT), job)
    orders.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            name, version, old = orders.recv()
            try:
                scene.save(path / name, version, old=old, timeout=3 * patience)
            except Exception as error:  # noqa: BLE001 - the judge is told
                orders.send((f"{type(error).__name__}: {error}", isinstance(error, TreeringError)))
            else:
                orders.send(("", True))


def loaded_fingerprint(path: Any) -> str:
    """Return the fingerprint of what is there."""
    from torture.process_scenes import print_of

    return print_of(treering.load(path))
