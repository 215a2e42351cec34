"""A run's folder: its steps as far as names tell, and the bytes of the documents that a run keeps beside them.

A step is a folder ``step_00001200`` with a ``treering.json``. Everything else in the folder belongs to others. The
run's own path may be a link; no link in it is followed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, TypeVar

from treering import errors
from treering._codec.key_document import HEAD_BYTES, SMALL_TOMBSTONE, is_tombstone, is_tombstone_size
from treering._format import run_document
from treering._format.document import read_summary
from treering._store.api import Closable, Document, Entry, Kind, Outcome, Store, Version, open_below
from treering._store.crew import map_together
from treering._store.failures import naming, naming_file
from treering._store.open_folder import find_index, index_document, index_heads, is_removed
from treering._store.resolve import opened_store
from treering._values.checkpoint_names import INDEX, LEFT_DOCUMENT, RUN_DOCUMENT, is_data, step_name, step_of_name

T = TypeVar("T")

NOT_READ: Final = (errors.CorruptError, errors.FormatError, errors.UnsupportedError)
"""The errors of an index, or a ``run.json``, that says nothing that this version could read."""

AT_ONCE: Final = 16
"""So many requests to a bucket wait for their answers at the same time."""

GONE: Final = "gone"
"""Stands for the attempt of a step that has no index."""

# Of a list that was not written to its end, or whose commit nothing proves.
_UNPROVED: Final = (errors.CorruptError, errors.UnsupportedError, errors.LinkRefusedError)
_EMPTIED: Final = frozenset({0, 33})
_TRIES: Final = 20
_STEPS: Final = "step_"
_LARGEST_DOCUMENT: Final = 64 << 20
# So many of the highest steps are looked at one by one, then all are listed.
_LOOKED_AT: Final = 4
_NO_FOLDER: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK})


class RunFolder(Closable):
    """A run's folder open for reading, a context manager. It takes no lock. Every method may raise ``StoreError``.

    Args:
        path: the folder.

    Attributes:
        store: the place that was opened.
        listed: the names in it, where they were listed already; None where not.

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
        self.listed: Collection[str] | None = None
        self._noted: Version | None = None
        self._reading = naming(os.fspath(path), "read")
        with self._reading:
            self.store = opened_store(path)

    def close(self) -> None:
        """Close the folder."""
        self.store.close()

    # -------------------------------------------------------------------------------------- its steps, by their names

    def names(self) -> set[str]:
        """Return all names in it, those of others too."""
        with self._reading:
            return set(self.store.names())

    def holds_index(self) -> bool:
        """Whether the folder itself is a checkpoint."""
        with self._reading:
            return find_index(self.store) is not None

    def folders(self) -> list[int]:
        """Return the steps whose folders are there, with an index or without, ascending."""
        with self._reading:
            return sorted([step for step in map(step_of_name, self.store.places()) if step is not None])

    def steps(self) -> list[int]:
        """Return the steps that are there, ascending, without those that were superseded.

        Raises:
            FormatError: a newer version wrote which steps are superseded.
            StoreError: the system refuses; a step that cannot be looked at may be the latest.
        """
        with self._reading:
            there = self._indexed()
        superseded = self.superseded_steps()
        return [step for step in there if step not in superseded]

    def heads(self) -> dict[int, tuple[int, bytes] | None]:
        """Return the steps as `steps` does, each with what `read_head` says; None where that has to be asked."""
        with self._reading:
            folders = [] if self.store.asks_by_request else self.folders()
            read = dict(zip(folders, index_heads(self.store, list(map(step_name, folders))), strict=True))
            on_disk = [step for step in folders if read[step] is not None or self._has_index(step)]
            there = self._indexed() if self.store.asks_by_request else on_disk
        superseded = self.superseded_steps()
        return {step: read.get(step) for step in there if step not in superseded}

    def latest(self) -> int | None:
        """Return the highest step that is there; None where there is none. Raises as `steps` does."""
        return self._latest(self.superseded_steps())

    def has_steps(self) -> bool:
        """Whether any step is there, superseded or not."""
        return self._latest(()) is not None

    def survey(self) -> tuple[set[int], set[int]]:
        """Return the steps that have a tombstone, and those in whose folders something may be left over.

        They are listed in one go where that can be, and not at all elsewhere: there a removed step leaves nothing.
        """
        with self._reading:
            listed = self._listed()
            return set(self._tombstones(listed)), {step for step, entries in listed if not _is_tidy(entries)}

    def untidy(self) -> list[int]:
        """Return the steps in whose folders something may be left, ascending; all where that takes a look at each."""
        if not self.store.asks_by_request:
            return self.folders()
        with self._reading:
            return [step for step, entries in self._listed() if not _is_tidy(entries)]

    def drop_tombstones(self) -> None:
        """Remove tombstones that list nothing, where the store can, and no late request could bring back an older."""
        with naming(os.fspath(self.path), "clear"):
            alone = [(step, entries[INDEX]) for step, entries in self._listed() if entries.keys() == {INDEX}]
            small = [(step, index) for step, index in alone if index.size == SMALL_TOMBSTONE]
            now = self.store.transaction().now() if small else 0.0
            for step, index in small:
                if index.modified + self.store.longest_delay < now:
                    with open_below(self.store, step_name(step)) as place:
                        if not place.transaction().delete_tombstone(index):
                            return  # it cannot compare, so it will not remove the others either

    def _latest(self, without: Collection[int]) -> int | None:
        """Return the highest step that has an index and is not among some; lower ones are not looked at."""
        with self._reading:
            while True:
                folders = self.folders()
                likely = [step for step in reversed(folders) if step not in without]
                looked_at = likely[:_LOOKED_AT] if self.store.asks_by_request else likely
                latest = next(filter(self._has_index, looked_at), None)
                if latest is None and len(looked_at) < len(likely):
                    latest = next((step for step in reversed(self._indexed()) if step not in without), None)
                # The highest may have gone because a higher one was saved since.
                if latest == max(folders, default=None) or self.folders() == folders:
                    return latest

    def _indexed(self) -> list[int]:
        if not self.store.asks_by_request:
            return list(filter(self._has_index, self.folders()))
        # One listing tells indexes from tombstones, of which there may be far more, without a look at each.
        listed = self._listed()
        gone = set(self._tombstones(listed))
        return [step for step, entries in listed if INDEX in entries and step not in gone]

    def _has_index(self, step: int) -> bool:
        if (found := find_index(self.store, step_name(step))) is None or found.kind is not Kind.LINK:
            return found is not None and found.is_file
        # A snapshot of a hub has links for files; which of them are followed, opening knows.
        with contextlib.suppress(errors.LinkRefusedError):
            return self.read_head(step) is not None
        return False

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

    # ------------------------------------------------------------------------------------------------------- one step

    def open_step(self, step: int) -> Store | None:
        """Open a step's folder as `open_folder` does."""
        return self.open_folder(step_name(step))

    def open_folder(self, name: str) -> Store | None:
        """Open a folder in it, which the caller closes; None when there is none, or a link or file in its place."""
        try:
            return open_below(self.store, name)
        except OSError as error:
            if error.errno in _NO_FOLDER:
                return None
            raise errors.StoreError.of(error, self.path / name, "read") from error

    def find_index(self, step: int) -> Entry | None:
        """Return what is known of a step's index, which is not opened; None when it is gone."""
        with self._reading:
            return find_index(self.store, step_name(step))

    def read_head(self, step: int) -> tuple[int, bytes] | None:
        """Return the size of a step's index, and its first bytes, the first line in it; None when it is gone.

        Raises:
            LinkRefusedError: the index is a link.
        """
        if (folder := self.open_step(step)) is not None:
            with folder, contextlib.suppress(errors.NotFoundError), folder.open_file(INDEX) as file:
                head = file.read(0, min(file.size, HEAD_BYTES))
                return None if is_tombstone(head) else (file.size, head)
        return None

    def read_index(self, step: int) -> bytes | None:
        """Return the bytes of a step's index; None when it is gone.

        Raises:
            LinkRefusedError: it is a link.
            FormatError: it is larger than any index.
        """
        if (folder := self.open_step(step)) is not None:
            with folder, contextlib.suppress(errors.NotFoundError):
                return index_document(folder).data
        return None

    def attempt_of(self, step: int) -> str | None:
        """Return the attempt of a step's index; None where it cannot be read, ``GONE`` where there is none."""
        try:
            data = self.read_index(step)
            return GONE if data is None else attempt_in(data)
        except NOT_READ:
            return None

    # ------------------------------------------------------------------------------------------------------- run.json

    def read_document(self, most: int = _LARGEST_DOCUMENT) -> bytes | None:
        """Return ``run.json``, or its first bytes; None when it is not there, or is nothing that a run would write."""
        return self._read(RUN_DOCUMENT, most)

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
                raise errors.LinkRefusedError(f"{os.fspath(path)!r} is not a file of its own", hint="remove it")
            # In a bucket by the version that was read here, which need not be asked for; if it still is that one.
            known, self._noted = self._noted, None
            if known is None or self.store.replace(RUN_DOCUMENT, data, known) is not Outcome.DONE:
                self.store.replace(RUN_DOCUMENT, data, sweep=sweep)

    def _read(self, name: str, most: int = _LARGEST_DOCUMENT) -> bytes | None:
        if not self.store.asks_by_request:
            with self._reading:
                found = self.store.find(name)
            if found is None or not found.is_file or found.size > _LARGEST_DOCUMENT:
                return None
        # Users do not know the list of steps that were left; a link: it was replaced meanwhile.
        shown = self.path if name == LEFT_DOCUMENT else self.path / name
        with contextlib.suppress(errors.LinkRefusedError), naming(os.fspath(shown), "read"):
            document = self.store.read(name, most)
            if self.store.asks_by_request and name == RUN_DOCUMENT:
                self._noted = None if document is None else document.version
            return None if document is None else document.data
        return None

    # ------------------------------------------------------------------------------------------------- .run.json.left

    def read_superseded(self) -> run_document.SupersededSteps | None:
        """Return the steps that a committed save superseded; None where there are none, as nearly always.

        Raises:
            FormatError: a newer version wrote the list.
        """
        try:
            document = self.read_left()
            index = None if document is None or document.step < 0 else self.read_index(document.step)
            note = None if index is None else run_document.find_note(read_summary(index).metadata)
        except _UNPROVED:
            return None
        return document if document is not None and note is not None and note.mark == document.mark else None

    def superseded_steps(self) -> frozenset[int]:
        """Return the superseded steps whose folders still have an index; raises as `read_superseded` does."""
        document = self.read_superseded()
        return self.unchanged({} if document is None else document.left)

    def unchanged(self, noted: Mapping[int, str | None]) -> frozenset[int]:
        """Return the steps whose index still has the attempt that was noted of it, or, for None, cannot be read yet."""
        return frozenset(step for step, attempt in noted.items() if self.attempt_of(step) == attempt)

    def has_left(self) -> bool:
        """Whether anything is called ``.run.json.left``, and is not empty."""
        with self._reading:
            left = self.store.find(LEFT_DOCUMENT)
            return left is not None and not (left.is_file and left.size in _EMPTIED)

    def read_left(self) -> run_document.SupersededSteps | None:
        """Return what ``.run.json.left`` says, whether it counts or not; None where it is not there, or empty.

        Raises:
            CorruptError: it is damaged, or was not written to its end.
            FormatError: a newer version wrote it.
        """
        data = self._read(LEFT_DOCUMENT)
        with naming_file(self.path / LEFT_DOCUMENT):
            return None if data is None else _list_in(data)

    def write_left(self, document: run_document.SupersededSteps) -> None:
        """Write ``.run.json.left``, durably, which must not be there, be empty, or be there for leases alone."""

        def change(data: bytes | None) -> bytes | None:
            there = None if data is None else _list_in(data)
            if there is not None and there.step >= 0:
                if there.mark == document.mark:  # put by a request that was not answered
                    return None
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
            leases = there is not None and there.leases
            return run_document.encode_superseded(dataclasses.replace(document, leases=leases))

        with naming(os.fspath(self.path / LEFT_DOCUMENT), "write"):
            if self.store.longest_delay or not self._create_left(run_document.encode_superseded(document)):
                self._change_left(change)

    def remove_left(self) -> None:
        """Remove ``.run.json.left``, or empty it where a late request could bring it back; gone already is as well.

        Of one that is there for leases too only the list of steps goes.
        """

        def change(data: bytes | None) -> bytes | None:
            if data is None or (len(data) in _EMPTIED and self.store.longest_delay):
                return None
            with contextlib.suppress(*NOT_READ):
                if run_document.parse_superseded(data).leases:
                    return run_document.encode_superseded(run_document.SupersededSteps(leases=True))
            return b""

        with naming(os.fspath(self.path / LEFT_DOCUMENT), "remove"):
            self._change_left(change)

    def is_left_for_leases(self) -> bool:
        """Whether ``.run.json.left`` is there for leases alone, and supersedes no step."""
        with contextlib.suppress(*NOT_READ):
            return (document := self.read_left()) is not None and document.step < 0
        return False

    def stamp(self) -> None:
        """Let ``.run.json.left`` say that there may be leases, and what it says already.

        Raises:
            FormatError: a newer version wrote it.
            StoreError: the system refuses, or others change it again and again.
        """

        def change(data: bytes | None) -> bytes | None:
            there = run_document.SupersededSteps()
            with contextlib.suppress(errors.CorruptError):  # it was not written to its end
                there = (None if data is None else _list_in(data)) or there
            return None if there.leases else run_document.encode_superseded(dataclasses.replace(there, leases=True))

        with naming(os.fspath(self.path / LEFT_DOCUMENT), "write"):
            self._change_left(change)

    def unstamp(self) -> None:
        """Let ``.run.json.left`` go that is there for leases alone; where others change it meanwhile, it stays."""
        with naming(os.fspath(self.path / LEFT_DOCUMENT), "remove"):
            found = self.store.read(LEFT_DOCUMENT, _LARGEST_DOCUMENT)
            if found is None or len(found.data) in _EMPTIED or not self.is_left_for_leases():
                return
            with contextlib.suppress(BlockingIOError):
                self._swap_left(b"", found)

    def _change_left(self, change: Callable[[bytes | None], bytes | None]) -> None:
        """Put what ``change`` makes of what ``.run.json.left`` says; asked again where others change it meanwhile.

        None is given where it is not there, and returned to leave it; no bytes are returned to let it go.
        """
        for _ in range(_TRIES):
            found = self.store.read(LEFT_DOCUMENT, _LARGEST_DOCUMENT)
            data = change(None if found is None else found.data)
            if data is None or self._swap_left(data, found):
                return
        raise OSError(errno.EAGAIN, f"others change {LEFT_DOCUMENT!r} again and again")

    def _swap_left(self, data: bytes, found: Document | None) -> bool:
        """Replace ``.run.json.left`` if it is as it was found, and tell whether it was.

        Without data it goes; where a late request could bring it back, random digits are put in its place, so that one
        meets another version each time.
        """
        if data or found is None or self.store.longest_delay:
            version = None if found is None else found.version
            emptied = f"{secrets.token_hex(16)}\n".encode()
            return self.store.replace(LEFT_DOCUMENT, data or emptied, version) is Outcome.DONE
        entry = Entry(LEFT_DOCUMENT, len(found.data), 0.0, found.version)
        return self.store.transaction(LEFT_DOCUMENT).delete_tombstone(entry)

    def _create_left(self, data: bytes) -> bool:
        """Create ``.run.json.left`` in place, where a crash leaves no other name; tell whether it is there as written.

        One that is not whole is known by its digest.
        """
        try:
            self.store.create(LEFT_DOCUMENT, [data], len(data))
            self.store.flush()
            # A stamp that met it before it was whole put its own there; one that meets it from now on keeps the list.
            written = self.store.read(LEFT_DOCUMENT, _LARGEST_DOCUMENT)
        except FileExistsError:
            return False
        except BaseException:  # an interrupt too: nobody goes by what is not durable; raised again below
            with contextlib.suppress(OSError):  # the next save sweeps it
                if (found := self.store.read(LEFT_DOCUMENT, _LARGEST_DOCUMENT)) and data.startswith(found.data):
                    self._swap_left(b"", found)
            raise
        return written is not None and written.data == data

    # ---------------------------------------------------------------------------------------------- .run.json.resumed

    def read_resumes(self) -> run_document.Resumes:
        """Return what ``.run.json.resumed`` says; nothing where it is not there.

        Raises:
            CorruptError: it is damaged.
            FormatError: a newer version wrote it.
        """
        data = self._read(run_document.Resumes.NAME)
        with naming_file(self.path / run_document.Resumes.NAME):
            return run_document.Resumes() if data is None else run_document.Resumes.parse(data)

    def write_resumes(self, document: run_document.Resumes) -> None:
        """Put a ``.run.json.resumed`` there in one step, durably; a link of that name is replaced, not followed."""
        with naming(os.fspath(self.path / run_document.Resumes.NAME), "write"):
            self.store.replace(run_document.Resumes.NAME, document.encode())

    def passed_over(self) -> frozenset[int]:
        """Return the steps that were passed over when the run was resumed, and were not saved anew since.

        Nothing is asked where the names in the folder were not listed, or that document is not among them. Raises as
        `read_resumes` does.
        """
        if run_document.Resumes.NAME not in (self.listed or ()):
            return frozenset()
        return self.unchanged(self.read_resumes().passed)


def unless_denied(store: Store, look: Callable[[], T], known: Callable[[], T]) -> T:
    """Return what a look into a run's folder finds; what is known without it, where a bucket denies to list alone."""
    try:
        return look()
    except errors.PermissionDeniedError:
        if not store.separate_rights:
            raise
        return known()


def has_run(path: Path) -> bool:
    """Tell whether a folder has steps, or the document that a run keeps about them; `RunFolder` says what it raises."""
    with RunFolder(path) as run:
        if run.has_steps():
            return True
        data = run.read_document()
    try:
        return data is not None and run_document.parse_run(data) is not None
    except NOT_READ as error:
        return isinstance(error, errors.FormatError)  # one of a newer version is a run's too


def attempt_in(data: bytes) -> str | None:
    """Return the attempt that an index names; None where it cannot be read."""
    try:
        return read_summary(data).attempt
    except NOT_READ:
        return None


def _list_in(data: bytes) -> run_document.SupersededSteps | None:
    return None if len(data) in _EMPTIED else run_document.parse_superseded(data)


def _is_tidy(entries: Mapping[str, Entry]) -> bool:
    """Tell by names and sizes whether an index and its data, or a tombstone that lists nothing, is all there is."""
    if (index := entries.get(INDEX)) is None or is_tombstone_size(index.size):
        return index is not None and index.size == SMALL_TOMBSTONE and len(entries) == 1
    others = entries.keys() - {INDEX}
    return all(map(is_data, others)) and len({name.split("-")[1] for name in others}) <= 1
