"""Reading a leaves directory in a store that has no folders and no descriptors: names, and objects that may go.

Each of many small requests is a wait, and a leaf needs two: they are made at once.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from treering._codec.key_document import is_empty, unindexed_attempts
from treering._store.api import Document, Reader, Store
from treering._store.crew import Crew, FirstError, map_together
from treering._store.failures import DataFileMissingError, missing_error, naming, with_errno
from treering._store.leaves_folder.open_leaves import OpenLeaves, SmallFiles
from treering._values import leaves_names
from treering._values.checkpoint_names import INDEX as CHECKPOINT
from treering.errors import CorruptError, NotFoundError


class StoredLeaves(OpenLeaves):
    """A leaves directory in a store, open for reading.

    Args:
        store: the place, not opened yet.
        path: the directory as given.

    Raises:
        NotFoundError: nothing is at the path, where the store can tell.
        StoreError: the store refuses.

    Example:
        >>> from treering._store.objects.memory import MemoryStore
        >>> store = MemoryStore()
        >>> store.create("model/w/.zarray", [b"{}"], 2)
        >>> StoredLeaves(store, Path("a")).read_small("model/w", [(".zarray", 9)], None)
        [b'{}']
    """

    def __init__(self, store: Store, path: Path) -> None:
        self.path = path
        self._shown = os.fspath(path)
        self._store = store
        with naming(self._shown, "read"):
            store.open()

    def close(self) -> None:
        """Close the place; files opened from it stay open."""
        self._store.close()

    def read_index(self) -> bytes:
        """Return the bytes of the index; one without branches is what a save that came to nothing left."""
        with naming(self._shown, "read"):
            found = self._store.read(leaves_names.INDEX)
            if found is not None and not is_empty(found.data):
                return found.data
            checkpoint = self._store.find(CHECKPOINT)
        hint = None
        if checkpoint is not None:
            hint = f"it holds {CHECKPOINT!r}: that is a checkpoint, which treering.load reads"
        elif found is not None and unindexed_attempts(found.data):
            hint = "treering.leaves.index_leaves lists the saves that were left without an index"
        error = NotFoundError(
            f"there is no leaves directory in {self._shown!r}: it has no index that lists a tree", hint=hint
        )
        raise with_errno(error, errno.ENOENT, os.path.join(self._shown, leaves_names.INDEX))

    def open(self, folder: str, name: str, attempt: str | None) -> Reader:
        """Open the file ``name`` of the leaf whose folder is ``folder``; the caller closes it."""
        if not name:
            raise CorruptError(f"a file without a name is wanted of {folder!r}")
        for key in _keys(folder, name, attempt):
            try:
                return self._store.open_file(key)
            except NotFoundError:
                continue
        raise missing_error(os.path.join(self._shown, folder, name), name)

    def read_small(self, folder: str, files: Sequence[tuple[str, int]], attempt: str | None) -> list[bytes]:
        """Return what is in some small files of a leaf."""
        return [self._read(folder, name, most, attempt).data for name, most in files]

    def read_each(self, wanted: Sequence[SmallFiles]) -> list[list[bytes] | None]:
        """Return what `read_small` does for each of several leaves, by many requests at once."""

        def fetch(one: tuple[str, str, int, str | None]) -> bytes | None:
            with contextlib.suppress(DataFileMissingError):
                return self._read(*one).data
            return None

        each = [(folder, name, most, attempt) for folder, files, attempt in wanted for name, most in files]
        read = iter(map_together(fetch, each, THREADS))
        found = [[data for data in itertools.islice(read, len(files)) if data is not None] for _, files, _ in wanted]
        return [some if len(some) == len(one[1]) else None for some, one in zip(found, wanted, strict=True)]

    def names(self, folder: str, attempt: str | None) -> list[str]:
        """Return all names in the folder of a leaf, sorted; none when nothing is in it."""
        found: set[str] = set()
        with naming(self._shown, "read"):
            for key in _keys(folder, "", attempt):
                place = self._store
                for part in filter(None, key.split("/")):
                    place = place.at(part)
                found.update(place.names())
        return sorted(found)

    def pending(self) -> set[str]:
        """Return the attempts that were saved without an index, which the index names."""
        with naming(self._shown, "read"):
            found = self._store.read(leaves_names.INDEX)
        return set() if found is None else set(unindexed_attempts(found.data))

    def _read(self, folder: str, name: str, most: int, attempt: str | None) -> Document:
        with naming(self._shown, "read"):
            for key in _keys(folder, name, attempt):
                if (found := self._store.read(key, most + 1)) is not None:
                    return found
        raise missing_error(os.path.join(self._shown, folder, name), name)


def _keys(folder: str, name: str, attempt: str | None) -> list[str]:
    """Return where a file may be: in the folder of the attempt first, then at its key path."""
    if attempt is not None and not leaves_names.is_attempt(attempt):
        raise CorruptError(f"{attempt!r} is not an attempt")
    key = "/".join((*leaves_names.parts_of(folder), *leaves_names.parts_of(name)))
    return [key] if attempt is None else ["/".join((*leaves_names.staged_leaves(attempt), key)), key]


THREADS: Final = 16
"""So many requests are made at once."""

_WAITING: Final = 64


class RequestQueue:
    """Runs jobs in threads of its own while more are added; few of them wait, so that little memory is held.

    Example:
        >>> found = []
        >>> jobs = RequestQueue()
        >>> for number in range(3):
        ...     jobs.add(lambda number=number: found.append(number))
        >>> jobs.finish()
        >>> jobs.close()
        >>> sorted(found)
        [0, 1, 2]
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], object] | None] = queue.Queue(_WAITING)
        self._failure = FirstError()
        self._crew = Crew(self._work, THREADS)
        self._crew.__enter__()

    def add(self, job: Callable[[], object]) -> None:
        """Run a job soon; raises the first error of any."""
        self._failure.reraise()
        if self._crew.size:
            self._jobs.put(job)
        else:
            job()

    def finish(self) -> None:
        """Wait for all jobs; raises the first error of any."""
        self._jobs.join()
        self._failure.reraise()

    def close(self) -> None:
        """End the threads; jobs that have not begun are left out. May be called twice."""
        with self._failure:
            raise _Closed
        for _ in range(self._crew.size):
            self._jobs.put(None)
        self._crew.close()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._failure:
                if self._failure.error is None:
                    job()
            self._jobs.task_done()


class _Closed(Exception):
    """Nothing more is run."""
