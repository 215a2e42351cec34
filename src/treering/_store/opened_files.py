"""Which files a tree without checksums is read from: nothing else tells whether somebody wrote them anew meanwhile."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path, PurePath
from typing import Final

from treering._store.api import Reader, Version
from treering._store.posix.reading import LocalFile
from treering._store.resolve import find_at, is_on_disk, opened_store
from treering.errors import CorruptError

# So many requests for one file each are made before all are listed.
_ASKED_FOR: Final = 8


class OpenedFiles:
    """The files of an opened tree, and which versions of them were opened. Any thread may ask.

    Args:
        files: those that stay open.
        folder: where further ones lie, of which there may be thousands.
    """

    def __init__(self, *files: Reader, folder: Path | None = None) -> None:
        self._only = files[0] if len(files) == 1 else None
        self._folder = folder
        self._versions: dict[PurePath, Version] = {}
        for file in files:
            self.add(file.path, file)

    def add(self, path: PurePath, file: Reader) -> None:
        """Note which version of a file was opened.

        Raises:
            CorruptError: it is another one than when the file was opened for the first time.
        """
        if self._versions.setdefault(path, file.version) != file.version:
            raise CorruptError(f"{os.fspath(path)!r} was replaced while the tree was being read", hint="read it again")

    def is_current(self) -> bool:
        """Tell whether each file is the one that was opened, and stands at its path; what cannot change counts as so.

        Raises:
            StoreError: the store refuses to say.
        """
        if self._only is not None and not is_on_disk(self._only.path):
            return True  # each request is for the version that was opened
        if self._folder is not None and not is_on_disk(self._folder) and len(self._versions) > _ASKED_FOR:
            # A web server lists nothing, and a bucket may deny it.
            with contextlib.suppress(OSError), opened_store(self._folder) as store:
                listed = {os.fspath(self._folder / found.name): found.version for found in store.list()}
                return all(listed.get(os.fspath(path)) == version for path, version in self._versions.items())
        entries = ((find_at(path), version) for path, version in self._versions.items())
        return all(entry is not None and entry.version == version for entry, version in entries)

    def is_whole(self) -> bool:
        """Tell whether all was read from one open file, into which nobody has written, whatever has its name now."""
        return isinstance(self._only, LocalFile) and self._only.is_whole()

    def is_written_into(self) -> bool:
        """Tell whether all is read from one open file, into which somebody has written since."""
        return isinstance(self._only, LocalFile) and not self._only.is_whole()

    def tokens(self) -> list[str]:
        """Return a text for each file of which the store says on every host alike which version was opened."""
        texts = ((path, getattr(version, "text", None)) for path, version in self._versions.items())
        return sorted(f"{os.fspath(path)}\0{text()}" for path, text in texts if text is not None)
