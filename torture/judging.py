"""Judging what a save left: looked at by a fresh process, compared with a ledger that no file can touch."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torture.children import PATIENCE_SECONDS, Answer
from torture.scenes import OLD, Scene

__all__ = ["NEW", "fresh", "judge", "next_save", "told"]

NEW = 2
"""The version whose save is attacked."""


def fresh(look: Callable[[], Any]) -> Any:
    """Run ``look`` in a process that has opened and saved nothing; return its answer, or its error as text."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(told(look)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], PATIENCE_SECONDS)
    if not ready:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as file:
        answer = file.read()
    os.waitpid(child, 0)
    return json.loads(answer) if answer else "the onlooker hung or died"


def judge(scene: Scene, path: Path, answer: Answer, *, killed: bool, call: str = "") -> list[str]:
    """Say what is wrong with what a save left at ``path`` after a fault at ``call``."""
    wrong = fresh(lambda: list(_judged(scene, path, answer, killed=killed, call=call)))
    return wrong if isinstance(wrong, list) else [f"the judge failed: {wrong}"]


def told(look: Callable[[], Any]) -> Any:
    """Return the answer of ``look``, or its error as text."""
    try:
        return look()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the onlooker found
        return f"{type(error).__name__}: {error}"


def _judged(scene: Scene, path: Path, answer: Answer, *, killed: bool, call: str) -> Iterator[str]:
    found = told(lambda: scene.found(path))
    old = scene.ledger(OLD) if scene.old else None
    new = scene.ledger(NEW)
    if found not in (old, new):
        yield f"neither the old nor the new state: {found}"
    if answer.acknowledged and found != new:
        yield "acknowledged, and not there"
    if answer.error and found == new and "in place" not in answer.error:
        yield f"there, and the error does not say so: {answer.error}"
    if answer.hung:
        yield "hung"
    if not answer.ours:
        yield f"not our error, or the path is not named: {answer.error}"
    if answer.kept:
        yield f"kept {answer.kept}"
    yield from scene.harmed(path)
    # What cannot be removed stays, and so does an old leftover that could not be looked at.
    if not killed and not scene.leftover and not call.startswith(("unlink", "rmdir")) and (left := scene.litter(path)):
        yield f"left {left} behind"
    yield from next_save(scene, path, old=found is not None)


def next_save(scene: Scene, path: Path, *, old: bool) -> Iterator[str]:
    """Save once more, and yield what is wrong with that."""
    version = NEW + 1
    scene.configure()
    failed = told(lambda: scene.save(path, version, old=old))
    if failed is not None:
        yield f"the next save failed: {failed}"
        return
    found = told(lambda: scene.found(path))
    if found != scene.ledger(version):
        yield f"the next save left something else: {found}"
    yield from (f"after the next save {what}" for what in scene.harmed(path))
    if left := scene.litter(path):
        yield f"the next save left {left}"
