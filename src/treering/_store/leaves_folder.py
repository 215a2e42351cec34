"""Saving into a leaves directory: files staged under ``.treering``, then one index that sends readers there.

``docs/design/store.md`` says why each step is where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from treering._store.leaves_rules import IndexRules, Update
from treering._store.pieces import Buffer
from treering._store.reading import LocalFile

__all__ = ["StagedLeaves"]


class StagedLeaves:
    """One save on its way into a leaves directory: left without `commit` or `leave`, nothing has changed.

    Staging takes no lock, so several saves may be under way; only their commits wait for each other. A context manager, or
    used without ``with`` and ended by `close`, as when another thread commits later.

    Attributes:
        attempt: 16 hexadecimal digits, new for each save.

    Args:
        path: the directory, made if it is missing; a link to a folder stays a link.
        rules: how to read an index.

    Raises:
        StoreFailed: the system refused. Nothing has changed.
        LinkRefused: ``.treering`` there is a link.
    """

    attempt: str

    def __init__(self, path: Path, rules: IndexRules) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove what was not committed or left, give everything back. May be called twice."""
        raise NotImplementedError

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit.

        Raises:
            StoreFailed: the file system has fewer than ``size`` bytes free.
        """
        raise NotImplementedError

    def write_small(self, folder: str, files: Sequence[tuple[str, bytes]]) -> None:
        """Make the folder of a leaf and its files, in few system calls: for thousands of small leaves.

        Raises:
            StoreFailed: the system refused.
            Unsupported: the folder's path is longer than the system takes.
        """
        raise NotImplementedError

    def write_file(self, folder: str, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """Write one file of a leaf as the concatenation of ``buffers``; from several threads if you like.

        Args:
            folder: the folder of the leaf, made if it is missing.
            name: a file in it that is not there yet; ``0/0`` for a chunk in a folder of its own.
            buffers: C-contiguous buffers of any item type, asked for one after the other.
            size: how many bytes they hold together.

        Raises:
            StoreFailed: the system refused, or the buffers hold another number of bytes.
            Unsupported: the folder's path is longer than the system takes.
        """
        raise NotImplementedError

    def path_of(self, folder: str) -> str:
        """Return the absolute path of a leaf's staged folder, for a manager of jax to write to. Its parent is made."""
        raise NotImplementedError

    def open(self, folder: str, name: str) -> LocalFile:
        """Open a staged file for reading; the caller closes it.

        Raises:
            DataFileMissing: it is not there.
            LinkRefused: it, or a folder on the way, is a link.
            StoreFailed: the system refuses.
        """
        raise NotImplementedError

    def names(self, folder: str) -> list[str]:
        """Return the names in a staged folder, sorted; none when it is not there.

        Raises:
            StoreFailed: the system refuses.
        """
        raise NotImplementedError

    def rewrite(self, folder: str, name: str, data: bytes) -> None:
        """Put ``data`` in the place of a staged file.

        Raises:
            StoreFailed: the system refused.
        """
        raise NotImplementedError

    def commit(self, record: bytes, update: Callable[[bytes | None], Update]) -> None:
        """Make everything durable, make ``update(index)`` the index, move the files to their key paths.

        Waits up to a minute for other savers. Roll-forward of a dead save comes first: ``update`` gets an index without moves.

        Args:
            record: the copy of the record that is kept under ``.treering``.
            update: gets the present index, None when there is none, while nobody else can change it; what it raises is
                raised here, and then nothing has changed.

        Raises:
            Busy: others kept saving, or the directory was moved away.
            Exists: files that no index lists stand where new ones would go.
            LinkRefused: the index is a link.
            StoreFailed: the system refused. Nothing has changed, except when the message says that the new content is in
                place: then readers get it, and the next save finishes what is left to do.
        """
        raise NotImplementedError

    def leave(self, record: bytes) -> None:
        """Make everything durable, and leave it to be indexed later (`commit_pending`).

        The files are moved to their key paths if nothing is there; else they stay staged until then.

        Raises:
            Busy: others kept saving, or the directory was moved away.
            StoreFailed: the system refused.
        """
        raise NotImplementedError
