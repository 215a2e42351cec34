"""What the checkpoint benchmark compares with: Orbax, and treering itself without its checksums."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import jax
import orbax.checkpoint
import xxhash

from benchmarks.workloads import Tree
from treering._arrays import host, incoming
from treering._values.checksums import block_count

__all__ = ["Orbax", "inside", "unchecked", "without_checksums"]

T = TypeVar("T")


class Orbax:
    """Orbax' simple API for pytrees, ``StandardCheckpointer``: asynchronous, so a save is waited for."""

    @cached_property
    def _checkpointer(self) -> Any:
        return orbax.checkpoint.StandardCheckpointer()

    def save(self, path: Path, tree: Tree) -> Path:
        """Save to a path where nothing is, and wait until it is there."""
        self._checkpointer.save(path, tree)
        self._checkpointer.wait_until_finished()
        return path

    def load(self, path: Path, target: Tree) -> Tree:
        """Restore into arrays like the target's."""
        tree: Tree = jax.block_until_ready(self._checkpointer.restore(path, target))
        return tree

    def close(self) -> None:
        """End its threads."""
        self._checkpointer.close()


def _zeros(data: memoryview, block: int) -> array[int]:
    return array("Q", bytes(8 * block_count(len(data), block)))


def _zero(_: bytes) -> int:
    return 0


def _trusting(*_: Any) -> None:
    pass


@contextmanager
def without_checksums() -> Iterator[None]:
    """Saves made inside write zeros for checksums: no bytes are looked at twice."""
    with mock.patch.object(host, "block_checksums", _zeros), mock.patch.object(xxhash, "xxh3_64_intdigest", _zero):
        yield


@contextmanager
def unchecked() -> Iterator[None]:
    """Loads made inside compare no checksums of array bytes."""
    with mock.patch.object(incoming.StoredArrays, "_check", _trusting):
        yield


def inside(manager: Callable[[], Any], work: Callable[[], T]) -> Callable[[], T]:
    """The same work, done inside of a context."""

    def done() -> T:
        with manager():
            return work()

    return done
