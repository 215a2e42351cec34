"""Files of a leaves directory in a store, written into the folder of their attempt, where they stay."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from treering._store.api import Store
from treering._store.closable import Closable
from treering._store.failures import naming
from treering._store.pieces import Buffer, pieces
from treering._store.unmoved_leaves.many_requests import RequestQueue
from treering._values.leaves_names import parts_of, staged_leaves

# A file of up to this size is copied, and written while the next ones are made.
_SMALL_BYTES: Final = 1 << 20


class JoinedAttempt(Closable):
    """What this process writes for an attempt that process 0 has begun, a context manager. Any thread may write.

    Args:
        store: the place, not opened yet.
        path: the directory as given.
        attempt: the attempt.

    Attributes:
        store: the place.
        attempt: 16 hexadecimal digits, different for each save.

    Raises:
        StoreFailed: the store refused.

    Example:
        >>> from treering._store.memory import MemoryStore
        >>> store = MemoryStore()
        >>> with JoinedAttempt(store, Path("a"), "0123456789abcdef") as joined:
        ...     joined.write_file("w", "0.0", [b"tree"], 4)
        ...     joined.make_durable()
        >>> [found.name for found in store.list()]
        ['.treering/0123456789abcdef/leaves/w/0.0']
    """

    def __init__(self, store: Store, path: Path, attempt: str) -> None:
        self.store = store
        self.attempt = attempt
        self._shown = os.fspath(path)
        self._ended = False
        self._written: list[str] = []
        with naming(self._shown, "write"), contextlib.ExitStack() as undo:
            self._open(undo)
            undo.pop_all()
        self._queue = RequestQueue()

    def close(self) -> None:
        """Give everything back; the files stay. May be called twice."""
        if not self._ended:
            self._ended = True
            self._queue.close()
            self.store.close()

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit, where the store can tell."""
        with naming(self._shown, "write"):
            self.store.require_space(size)

    def write_small(self, folder: str, files: Sequence[tuple[str, bytes]]) -> None:
        """Put the files of a leaf there, soon."""
        with naming(self._shown, "write"):
            for name, data in files:
                self._queue.add(functools.partial(self._create, self._key_of(folder, name), [data], len(data)))

    def write_file(self, folder: str, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """Write one file of a leaf as the concatenation of ``buffers``; a small one soon."""
        with naming(self._shown, "write"):
            if size > _SMALL_BYTES:
                self._create(self._key_of(folder, name), buffers, size)
            else:
                self.write_small(folder, [(name, b"".join(map(bytes, pieces(buffers, size))))])

    def make_durable(self) -> None:
        """Wait for everything that was written.

        Raises:
            StoreFailed: the store refused something of it.
        """
        with naming(self._shown, "write"):
            self._queue.finish()
            self.store.flush()

    def withdraw(self) -> None:
        """Remove what was written here, as far as that goes; the marker of process 0 is the proof for the rest."""
        self._queue.close()
        with contextlib.suppress(OSError):
            self.store.remove_all(self._written)

    def _open(self, undo: contextlib.ExitStack) -> None:
        """Begin to use the place; ``undo`` is what has to be undone if that fails."""
        del undo
        self.store.open()

    def _key_of(self, folder: str, name: str) -> str:
        if self._ended:
            raise RuntimeError("this save has ended")
        key = "/".join((*staged_leaves(self.attempt), *parts_of(folder), name))
        self._written.append(key)
        return key

    def _create(self, key: str, buffers: Iterable[Buffer], size: int) -> None:
        with naming(self._shown, "write"):
            self.store.create(key, buffers, size)
