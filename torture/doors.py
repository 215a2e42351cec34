"""Every door through which a hostile file can come in, and the verdict over what happens there."""

from __future__ import annotations

import dataclasses
import gc
import random
import resource
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from treering._inspect.inspect import inspect
from treering.errors import TreeringError
from treering.serialization import decompress_bytes, from_bytes, from_compressed_bytes, load_from_file, msgpack_restore

__all__ = ["Verdict", "feed", "judge"]

_SECONDS = 2.0
_MEMORY_FACTOR = 100
_MEMORY_FLOOR = 64 << 20
_LONGEST_MESSAGE = 4000
_PAGE = resource.getpagesize()


class _Pair(NamedTuple):
    params: Any
    step: Any


def _targets() -> tuple[Any, ...]:
    dense = {"kernel": np.ones((3, 2), np.float32), "bias": np.zeros(2, np.int64)}
    return (
        {}, None, 0, (), [], "text", np.zeros(300, np.uint16), {"params": {"dense_2": dense}, "step": np.int32(0)},
        {"params": {f"dense_{n}": dense for n in range(4)}}, _Pair({"dense_1": dense}, 3), [1, (2, [3])],
        {"none": None, "int": 1, "float": 0.5, "str": "", "bytes": b"", "complex": 1j, "list": [1], "tuple": (1, (2,))},
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one input did at one door."""

    door: str
    """Which door."""
    outcome: str
    """``accepted``, or the class of the error."""
    violation: str | None
    """What must not be, or None."""


def feed(data: bytes, source: random.Random, scratch: Path) -> Verdict:
    """Send ``data`` through a door picked by ``source``, and judge."""
    door, enter = _picked(data, source, scratch)
    return judge(door, enter, len(data))


def judge(door: str, enter: Callable[[], Any], nbytes: int, floor: int = _MEMORY_FLOOR) -> Verdict:
    """Go through a door under a limit of memory, and judge what happens.

    Accepted values are looked at to the last byte: a view past the end of its memory ends this process.

    Args:
        door: its name.
        enter: goes through it.
        nbytes: bytes of the input; memory may be some times as much.
        floor: what it may be at least.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = _memory_in_use() + _MEMORY_FACTOR * nbytes + floor
    outcome, violation = "accepted", None
    start = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        _look_at(enter())
    except TreeringError as error:
        outcome = type(error).__name__
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        if len(str(error)) > _LONGEST_MESSAGE:
            violation = f"a message of {len(str(error))} characters"
    except Exception as error:  # noqa: BLE001 - any other class is just what is looked for
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        outcome = type(error).__name__
        violation = f"{outcome}: {str(error)[:300]}{_place_of(error)}"
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    spent = time.process_time() - start
    if violation is None and spent > _SECONDS:
        violation = f"took {spent:.1f} s"
    return Verdict(door=door, outcome=outcome, violation=violation)


def _place_of(error: Exception) -> str:
    """Say in which lines of treering an error was raised."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "treering" in frame.filename]
    return "".join(f" <- {Path(frame.filename).name}:{frame.lineno}" for frame in frames[:-4:-1])


def _picked(data: bytes, source: random.Random, scratch: Path) -> tuple[str, Callable[[], Any]]:
    target, strict = source.choice(_TARGETS), source.random() < 0.2
    number = source.randrange(16)
    if number < 6:
        return "msgpack_restore", lambda: msgpack_restore(data)
    if number < 11:
        return "from_bytes", lambda: from_bytes(target, data, strict=strict)
    if number == 11:
        return "decompress_bytes", lambda: decompress_bytes(data)
    if number == 12:
        return "from_compressed_bytes", lambda: from_compressed_bytes(target, data, strict=strict)
    scratch.write_bytes(data)
    if number == 13:
        return "load_from_file", lambda: load_from_file(target, scratch, strict=strict)
    if number == 14:
        return "load_from_file, mapped", lambda: load_from_file(target, scratch, strict=strict, mapped=True)
    return "inspect", lambda: inspect(scratch)


def _look_at(value: Any) -> None:
    """Touch every byte of every array."""
    todo = [value]
    while todo:
        node = todo.pop()
        if isinstance(node, dict):
            todo.extend(node.values())
        elif isinstance(node, list | tuple):
            todo.extend(node)
        elif isinstance(node, np.ndarray):
            node.reshape(-1).view(np.uint8).max(initial=0)


def _memory_in_use() -> int:
    pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    return pages * _PAGE


_TARGETS = _targets()
# What the last input left is not the next one's: cycles go when they go, but arrays go at once.
gc.set_threshold(50_000, 20, 20)
