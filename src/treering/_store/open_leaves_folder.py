"""Reading a leaves directory: its index, and the files of its leaves wherever a save that is under way has them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from treering._store.reading import LocalFile

__all__ = ["OpenLeaves"]


class OpenLeaves:
    """A leaves directory open for reading, a context manager. It takes no lock; any thread may ask.

    Folders and files are looked up from the directory that was opened, one part of a path after the other; links are
    refused, but the directory itself may be one.

    Attributes:
        path: the directory as given.

    Raises:
        NotFound: nothing is at the path.
        StoreFailed: a file is there, or the system refuses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory; files opened from it stay open."""
        raise NotImplementedError

    def read_index(self) -> bytes:
        """Return the bytes of ``tensorstore_index.json``.

        Raises:
            NotFound: there is none; the hint says what is there instead.
            LinkRefused: it is a link.
            Format: it is larger than any index.
            StoreFailed: the system refuses.
        """
        raise NotImplementedError

    def open(self, folder: str, name: str, attempt: str | None) -> LocalFile:
        """Open the file ``name`` of the leaf whose folder is ``folder``; the caller closes it.

        Args:
            folder: the parts of the path below the directory, joined by ``/``; the empty text is the directory itself.
            name: a file in it; ``0/0`` for a chunk in a folder of its own.
            attempt: look among the staged files of this attempt first, then at the key path; None: there only.

        Raises:
            DataFileMissing: it is in neither place. A newer index may name others: read it again.
            LinkRefused: it, or a folder on the way, is a link.
            Corrupt: the text leads elsewhere than into the directory.
            StoreFailed: the system refuses.
        """
        raise NotImplementedError

    def names(self, folder: str, attempt: str | None) -> list[str]:
        """Return all names in the folder of a leaf, of both places, sorted; none when it is in neither.

        Raises:
            LinkRefused: it, or a folder on the way, is a link.
            Corrupt: the text leads elsewhere than into the directory.
            StoreFailed: the system refuses.
        """
        raise NotImplementedError

    def records(self) -> dict[str, bytes]:
        """Return the copies of records that are there, by attempt.

        Raises:
            LinkRefused: one of them, or a folder on the way, is a link.
            StoreFailed: the system refuses.
        """
        raise NotImplementedError

    def pending(self) -> set[str]:
        """Return the attempts that were saved without an index and that no index has taken up yet.

        Raises:
            LinkRefused: a folder on the way is a link.
            StoreFailed: the system refuses.
        """
        raise NotImplementedError

    def array_folders(self) -> Iterator[str]:
        """Yield every folder that holds a ``.zarray``, in sorted order; links are not followed, staged ones left out.

        Nothing is looked for inside the folder of an array.

        Raises:
            StoreFailed: the system refuses.
        """
        raise NotImplementedError
