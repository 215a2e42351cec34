"""Who saves while a loop goes on: treering's ``save_async``, and Orbax' asynchronous checkpointer."""

from __future__ import annotations

import threading
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint

import treering
from benchmarks.workloads import Tree

__all__ = ["Orbax", "Saver", "Saving", "Treering"]


class Saving(Protocol):
    """A save that goes on."""

    def done(self) -> bool:
        """Whether it is written."""

    def finish(self) -> None:
        """Wait for it; raises what went wrong."""


class Saver(Protocol):
    """Saves while the caller does something else."""

    def begin(self, path: Path, tree: Tree) -> Saving:
        """Begin to save to a path where nothing is; the tree may be donated when this returns."""

    def load(self, path: Path, target: Tree) -> Tree:
        """Load what was saved."""

    def close(self) -> None:
        """End its threads."""


class Treering:
    """``treering.save_async``, durable and with checksums."""

    def begin(self, path: Path, tree: Tree) -> Saving:
        """Begin to save."""
        return _Ours(treering.save_async(path, tree))

    def load(self, path: Path, target: Tree) -> Tree:
        """Load onto the default device; what the target is, the checkpoint knows."""
        del target
        tree: Tree = treering.load(path)
        return tree

    def close(self) -> None:
        """Nothing: its thread is no part of this benchmark."""


class _Ours:
    def __init__(self, pending: treering.checkpoint.PendingSave) -> None:
        self._pending = pending

    def done(self) -> bool:
        return self._pending.done()

    def finish(self) -> None:
        self._pending.result()


class Orbax:
    """``AsyncCheckpointer`` for pytrees; what it writes is not durable when it is done."""

    @cached_property
    def _checkpointer(self) -> Any:
        return orbax.checkpoint.AsyncCheckpointer(orbax.checkpoint.StandardCheckpointHandler())

    def begin(self, path: Path, tree: Tree) -> Saving:
        """Begin to save."""
        self._checkpointer.save(path, args=orbax.checkpoint.args.StandardSave(tree))
        return _Theirs(self._checkpointer)

    def load(self, path: Path, target: Tree) -> Tree:
        """Restore into arrays like the target's."""
        found = self._checkpointer.restore(path, args=orbax.checkpoint.args.StandardRestore(target))
        tree: Tree = jax.block_until_ready(found)
        return tree

    def close(self) -> None:
        """End its threads."""
        self._checkpointer.close()


class _Theirs:
    """Orbax only waits, and cannot be asked; so a thread waits, and is asked."""

    def __init__(self, checkpointer: Any) -> None:
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._wait, args=(checkpointer,))
        self._thread.start()

    def _wait(self, checkpointer: Any) -> None:
        try:
            checkpointer.wait_until_finished()
        except Exception as error:  # noqa: BLE001 - raised by whoever waits for the thread
            self._fault = error

    def done(self) -> bool:
        return not self._thread.is_alive()

    def finish(self) -> None:
        self._thread.join()
        if self._fault is not None:
            raise self._fault
