"""Chunk files that are open while somebody reads: the last few stay open, so that thousands need few descriptors."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator
from types import TracebackType
from typing import Final, Self

from treering._store.posix.reading import LocalFile

_MOST: Final = 32


@dataclasses.dataclass(slots=True)
class _Held:
    file: LocalFile
    users: int = 0


class OpenChunks:
    """Opens files when they are used and keeps the last ones open; a context manager around each reading.

    Any thread may use it, also for several readings at a time. When the last one ends, all files are closed.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "0")
        >>> _ = path.write_bytes(b"ring")
        >>> chunks = OpenChunks()
        >>> with chunks, chunks.using("w/0", lambda: LocalFile(path)) as file:
        ...     file.read(0, 4)
        b'ring'
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, _Held] = {}
        self._readings = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        with self._lock:
            self._readings += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._readings -= 1
            if not self._readings:
                self._close_down_to(0)

    @contextlib.contextmanager
    def using(self, key: Hashable, opener: Callable[[], LocalFile]) -> Iterator[LocalFile]:
        """Give a file for as long as the block runs.

        Args:
            key: which file it is.
            opener: opens it where it is not open.
        """
        with self._lock:
            held = self._held.pop(key, None)
            if held is None:
                held = _Held(opener())
            self._held[key] = held  # the one that was used last stands last
            held.users += 1
            self._close_down_to(_MOST)
        try:
            yield held.file
        finally:
            with self._lock:
                held.users -= 1

    def _close_down_to(self, most: int) -> None:
        """Close those that nobody uses, the one that was used longest ago first."""
        for key in list(self._held)[: max(len(self._held) - most, 0)]:
            if not self._held[key].users:
                self._held.pop(key).file.close()
