"""A run's folder: its steps as far as names tell, and the bytes of ``run.json``. Nothing is parsed here.

A step is a folder ``step_00001200`` with a ``treering.json``. Everything else in the folder belongs to others. The
run's own path may be a link; no link in it is followed.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from treering._codec.key_document import HEAD_BYTES, SMALL_TOMBSTONE, is_tombstone, is_tombstone_size
from treering._store.api import Closable, Entry, Kind, Outcome, Store, Version, open_below
from treering._store.crew import map_together
from treering._store.failures import naming
from treering._store.open_folder import find_index, index_document, is_removed
from treering._store.resolve import find_at, is_on_disk, opened_store
from treering._values.checkpoint_names import INDEX, is_data
from treering.errors import LinkRefusedError, NotFoundError, StoreError

RUN_DOCUMENT: Final = "run.json"
"""Name of the document about all steps."""

WEIGHTS: Final = ("model.safetensors", "model.safetensors.index.json")
"""What makes a folder one of Hugging Face."""

LEFT_DOCUMENT: Final = ".run.json.left"
"""Name of the list of the steps that a save leaves behind which goes back to an earlier one."""

_EMPTIED: Final = frozenset({0, 33})

AT_ONCE: Final = 16
"""So many requests to a bucket wait for their answers at the same time."""

HIGHEST_STEP: Final = 2**63 - 1
"""Steps are counted from 0 to here."""

# Eight digits, and more only where eight are not enough: each step has one name.
_STEP: Final = re.compile(r"step_([0-9]{8}|[1-9][0-9]{8,18})")
_STEPS: Final = "step_"
_LARGEST_DOCUMENT: Final = 64 << 20
# So many of the highest steps are looked at one by one, then all are listed.
_LOOKED_AT: Final = 4
_NO_FOLDER: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK})


def step_name(step: int) -> str:
    """Return the name of a step's folder.

    Example:
        >>> step_name(1200), step_name(123456789)
        ('step_00001200', 'step_123456789')
    """
    return f"step_{step:08d}"


@functools.lru_cache(maxsize=1 << 14)  # each save asks for the names of thousands of steps again
def step_of_name(name: str) -> int | None:
    """Return the step whose folder has this name; None for any other name.

    Example:
        >>> step_of_name("step_00001200"), step_of_name("step_1200"), step_of_name("step_" + "9" * 100)
        (1200, None, None)
    """
    found = _STEP.fullmatch(name)
    step = int(found[1]) if found else None
    return step if step is not None and step <= HIGHEST_STEP else None


def is_linked(path: Path) -> bool:
    """Tell whether a link lies where a path has a step of a run, which no reader of the run follows.

    Raises:
        StoreError: the system refuses to say.

    Example:
        >>> import os, pathlib, tempfile
        >>> run = pathlib.Path(tempfile.mkdtemp())
        >>> os.symlink("elsewhere", run / "step_00000003"), os.symlink("elsewhere", run / "latest")
        (None, None)
        >>> is_linked(run / "step_00000003"), is_linked(run / "latest")
        (True, False)
    """
    if step_of_name(path.name) is None or not is_on_disk(path):
        return False
    found = find_at(path, follow=False)
    return found is not None and found.kind is Kind.LINK


def refuse_linked(path: Path) -> None:
    """Refuse to write a step through a link, which may lead to the step of another run.

    Raises:
        LinkRefusedError: one lies there.
        StoreError: the system refuses to say.
    """
    if is_linked(path):
        hint = "remove the link, or put a folder of its own in its place (cp -L)"
        raise LinkRefusedError(f"{os.fspath(path)!r} is a link in the place of a step, and is not followed", hint=hint)


def _is_emptied(left: Entry) -> bool:
    """Whether ``.run.json.left`` lists nothing: it is empty, or holds random digits and a line feed."""
    return left.is_file and left.size in _EMPTIED


class RunFolder(Closable):
    """A run's folder open for reading, a context manager. It takes no lock.

    Args:
        path: the folder.

    Attributes:
        store: the place that was opened.

    Raises:
        NotFoundError: nothing is there.
        StoreError: a file is there, or the system refuses.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp())
        >>> (path / "step_00000003").mkdir(), (path / "step_00000004").mkdir()
        (None, None)
        >>> _ = (path / "step_00000003" / "treering.json").write_text("{}")
        >>> with RunFolder(path) as run:
        ...     run.steps(), run.folders()
        ([3], [3, 4])
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._noted: Version | None = None
        with naming(os.fspath(path), "read"):
            self.store = opened_store(path)

    def close(self) -> None:
        """Close the folder."""
        self.store.close()

    def names(self) -> list[str]:
        """Return all names in it, those of others too.

        Raises:
            StoreError: the system refuses.
        """
        with naming(os.fspath(self.path), "read"):
            return self.store.names()

    def holds_index(self) -> bool:
        """Whether the folder itself is a checkpoint.

        Raises:
            StoreError: the system refuses.
        """
        with naming(os.fspath(self.path), "read"):
            return find_index(self.store) is not None

    def folders(self) -> list[int]:
        """Return the steps whose folders are there, with an index or without, ascending.

        Raises:
            StoreError: the system refuses.
        """
        with naming(os.fspath(self.path), "read"):
            return sorted([step for step in map(step_of_name, self.store.places()) if step is not None])

    def survey(self) -> tuple[set[int], set[int]]:
        """Return the steps that have a tombstone, and those in whose folders something may be left over.

        They are listed in one go where that can be, and not at all elsewhere: there a removed step leaves nothing.

        Raises:
            StoreError: the system refuses.
        """
        with naming(os.fspath(self.path), "read"):
            listed = self._listed()
            return set(self._tombstones(listed)), {step for step, entries in listed if not _is_tidy(entries)}

    def drop_tombstones(self) -> None:
        """Remove tombstones that list nothing, where the store can, and no late request could bring an older one back.

        Raises:
            StoreError: the system refuses.
        """
        with naming(os.fspath(self.path), "clear"):
            alone = [(step, entries[INDEX]) for step, entries in self._listed() if entries.keys() == {INDEX}]
            small = [(step, index) for step, index in alone if index.size == SMALL_TOMBSTONE]
            now = self.store.transaction().now() if small else 0.0
            for step, index in small:
                if index.modified + self.store.longest_delay < now:
                    with open_below(self.store, step_name(step)) as place:
                        if not place.transaction().delete_tombstone(index):
                            return  # it cannot compare, so it will not remove the others either

    def untidy(self) -> list[int]:
        """Return the steps in whose folders something may be left over, ascending; all where that takes a look at each.

        Raises:
            StoreError: the system refuses.
        """
        if not self.store.asks_by_request:
            return self.folders()
        with naming(os.fspath(self.path), "read"):
            return sorted(step for step, entries in self._listed() if not _is_tidy(entries))

    def steps(self) -> list[int]:
        """Return the steps that are there, ascending.

        Raises:
            StoreError: the system refuses; a step that cannot be looked at may be the latest.
        """
        with naming(os.fspath(self.path), "read"):
            if not self.store.asks_by_request:
                return [step for step in self.folders() if self._has_index(step)]
            # One listing tells indexes from tombstones, of which there may be far more, without a look at each.
            listed = self._listed()
            gone = set(self._tombstones(listed))
            return [step for step, entries in listed if INDEX in entries and step not in gone]

    def latest(self, without: Collection[int] = ()) -> int | None:
        """Return the highest step that is there; None where there is none. Lower ones are not looked at.

        Args:
            without: steps that do not count.

        Raises:
            StoreError: the system refuses; a step that cannot be looked at may be the latest.
        """
        with naming(os.fspath(self.path), "read"):
            while True:
                folders = self.folders()
                likely = [step for step in reversed(folders) if step not in without]
                looked_at = likely[:_LOOKED_AT] if self.store.asks_by_request else likely
                latest = next(filter(self._has_index, looked_at), None)
                if latest is None and len(looked_at) < len(likely):
                    latest = next((step for step in reversed(self.steps()) if step not in without), None)
                # The highest may have gone because a higher one was saved since.
                if latest == max(folders, default=None) or self.folders() == folders:
                    return latest

    def open_step(self, step: int) -> Store | None:
        """Open a step's folder, which the caller closes; None when there is none, or a link or file in its place.

        Raises:
            StoreError: the system refuses.
        """
        try:
            return open_below(self.store, step_name(step))
        except OSError as error:
            if error.errno in _NO_FOLDER:
                return None
            raise StoreError.of(error, self.path / step_name(step), "read") from error

    def read_head(self, step: int) -> tuple[int, bytes] | None:
        """Return the size of a step's index, and its first bytes, the first line in it; None when it is gone.

        Raises:
            LinkRefusedError: the index is a link.
            StoreError: the system refuses.
        """
        if (folder := self.open_step(step)) is not None:
            with folder, contextlib.suppress(NotFoundError), folder.open_file(INDEX) as file:
                head = file.read(0, min(file.size, HEAD_BYTES))
                return None if is_tombstone(head) else (file.size, head)
        return None

    def read_index(self, step: int) -> bytes | None:
        """Return the bytes of a step's index; None when it is gone.

        Raises:
            LinkRefusedError: it is a link.
            FormatError: it is larger than any index.
            StoreError: the system refuses.
        """
        if (folder := self.open_step(step)) is not None:
            with folder, contextlib.suppress(NotFoundError):
                return index_document(folder).data
        return None

    def index_nbytes(self, step: int) -> int | None:
        """Return how many bytes a step's index has, which is not opened; None when it is gone."""
        with naming(os.fspath(self.path), "read"):
            found = self._find(step)
        return found.size if found is not None and found.is_file else None

    def modified(self, step: int) -> float | None:
        """Return when a step's index was last written, in POSIX seconds; None when it is gone."""
        with naming(os.fspath(self.path), "read"):
            found = self._find(step)
        return None if found is None else found.modified

    def read_document(self) -> bytes | None:
        """Return the bytes of ``run.json``; None when it is not there, or is nothing that a run would have written.

        Raises:
            StoreError: the system refuses.
        """
        return self._read(RUN_DOCUMENT)

    def read_document_head(self) -> bytes | None:
        """Return the first bytes of ``run.json``, the first line in it, as `read_document` returns all of it.

        Raises:
            StoreError: the system refuses.
        """
        return self._read(RUN_DOCUMENT, HEAD_BYTES)

    def has_left(self) -> bool:
        """Whether anything is called ``.run.json.left``, and is not empty.

        Raises:
            StoreError: the system refuses.
        """
        with naming(os.fspath(self.path), "read"):
            found = self.store.find(LEFT_DOCUMENT)
            return found is not None and not _is_emptied(found)

    def read_left(self) -> bytes | None:
        """Return the bytes of ``.run.json.left``, as `read_document` those of ``run.json``; None where it is empty.

        Raises:
            StoreError: the system refuses.
        """
        data = self._read(LEFT_DOCUMENT)
        return None if data is None or len(data) in _EMPTIED else data

    def write_left(self, data: bytes) -> None:
        """Write ``.run.json.left``, durably, which must not be there, or be empty.

        One that is not written to its end is known by its digest: it needs no other name meanwhile.

        Raises:
            StoreError: the system refuses.
        """
        with naming(os.fspath(self.path / LEFT_DOCUMENT), "write"):
            found = self.store.find(LEFT_DOCUMENT)
            if self.store.longest_delay or (found is not None and _is_emptied(found)):
                if found is not None and not _is_emptied(found):
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                self._swap_left(data, found)
                return
            try:
                self.store.create(LEFT_DOCUMENT, [data], len(data))
                self.store.flush()
            except FileExistsError:
                raise
            except BaseException:  # an interrupt too: nobody goes by what is not durable; raised again below
                with contextlib.suppress(OSError):  # the next save sweeps it
                    self.store.remove(LEFT_DOCUMENT)
                raise

    def remove_left(self) -> None:
        """Remove ``.run.json.left``, or empty it where a late request could bring it back; gone already is as well.

        Raises:
            StoreError: the system refuses.
        """
        with naming(os.fspath(self.path / LEFT_DOCUMENT), "remove"):
            if not self.store.longest_delay:
                self.store.remove(LEFT_DOCUMENT)
            elif (found := self.store.find(LEFT_DOCUMENT)) is not None and not _is_emptied(found):
                # Random digits: a late request meets another version each time that it is empty.
                self._swap_left(f"{secrets.token_hex(16)}\n".encode(), found)

    def _swap_left(self, data: bytes, found: Entry | None) -> None:
        outcome = self.store.replace(LEFT_DOCUMENT, data, None if found is None else found.version)
        if outcome is not Outcome.DONE:
            raise OSError(errno.EAGAIN, f"another process changed it, or no answer came to PUT {LEFT_DOCUMENT!r}")

    def replace_document(self, data: bytes, *, sweep: bool = True) -> None:
        """Put a ``run.json`` there in one step, in the place of the one that was.

        Args:
            data: its bytes.
            sweep: whether to look through the folder for what dead writers of it left.

        Raises:
            LinkRefusedError: a link or no file is called so.
            StoreError: the system refuses; nothing has changed.
        """
        path = self.path / RUN_DOCUMENT
        with naming(os.fspath(path), "write"):
            found = None if self.store.asks_by_request else self.store.find(RUN_DOCUMENT)
            if found is not None and not found.is_file:
                raise LinkRefusedError(f"{os.fspath(path)!r} is not a file of its own", hint="remove it")
            # In a bucket by the version that was read here, which need not be asked for; if it still is that one.
            known, self._noted = self._noted, None
            if known is None or self.store.replace(RUN_DOCUMENT, data, known) is not Outcome.DONE:
                self.store.replace(RUN_DOCUMENT, data, sweep=sweep)

    def _read(self, name: str, most: int = _LARGEST_DOCUMENT) -> bytes | None:
        with naming(os.fspath(self.path), "read"):
            found = None if self.store.asks_by_request else self.store.find(name)
        if not self.store.asks_by_request and (found is None or not found.is_file or found.size > _LARGEST_DOCUMENT):
            return None
        # Users do not know the list of steps that were left; a link: it was replaced meanwhile.
        shown = self.path if name == LEFT_DOCUMENT else self.path / name
        with contextlib.suppress(LinkRefusedError), naming(os.fspath(shown), "read"):
            document = self.store.read(name, most)
            if self.store.asks_by_request and name == RUN_DOCUMENT:
                self._noted = None if document is None else document.version
            return None if document is None else document.data
        return None

    def _has_index(self, step: int) -> bool:
        if (found := self._find(step)) is None or found.kind is not Kind.LINK:
            return found is not None and found.is_file
        # A snapshot of a hub has links for files; which of them are followed, opening knows.
        with contextlib.suppress(LinkRefusedError):
            return self.read_head(step) is not None
        return False

    def _find(self, step: int) -> Entry | None:
        return find_index(self.store, step_name(step))

    def _listed(self) -> list[tuple[int, dict[str, Entry]]]:
        """Return the steps, ascending, with what lies in each, where one listing tells; none elsewhere."""
        found: dict[int, dict[str, Entry]] = {}
        for entry in self.store.list(_STEPS) if self.store.asks_by_request else ():
            place, _, name = entry.name.partition("/")
            if (step := step_of_name(place)) is not None:
                found.setdefault(step, {})[name] = entry
        return sorted(found.items())

    def _tombstones(self, listed: Iterable[tuple[int, Mapping[str, Entry]]]) -> list[int]:
        """Return the steps, of those that were listed, that have a tombstone; only a few have to be read for that."""
        found = [(step, entries[INDEX]) for step, entries in listed if INDEX in entries]
        small = [step for step, index in found if index.size == SMALL_TOMBSTONE]
        other = [each for each in found if each[1].size != SMALL_TOMBSTONE and is_tombstone_size(each[1].size)]
        read = map_together(lambda each: is_removed(self.store, each[1], step_name(each[0])), other, AT_ONCE)
        return [*small, *(step for (step, _), gone in zip(other, read, strict=True) if gone)]


def _is_tidy(entries: Mapping[str, Entry]) -> bool:
    """Tell by names and sizes whether an index and its data, or a tombstone that lists nothing, is all there is."""
    if (index := entries.get(INDEX)) is None or is_tombstone_size(index.size):
        return index is not None and index.size == SMALL_TOMBSTONE and len(entries) == 1
    others = entries.keys() - {INDEX}
    return all(map(is_data, others)) and len({name.split("-")[1] for name in others}) <= 1
