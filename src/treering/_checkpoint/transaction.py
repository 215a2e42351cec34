"""Saving into a checkpoint's folder: new files beside the old ones, then one step that makes them the checkpoint.

Data files have names of their own attempt and are never rewritten. The index, ``treering.json``, is the commit: a first
save links it into place, an overwrite renames it over the old one. Only then are the old data files removed.
``docs/design/store.md`` says why each step is where it is.

A checkpoint is removed by giving its index the name of a tombstone. From then on it is gone; the tombstone proves which
files were its own, and goes after them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from treering._codec.key_document import Superseded, is_tombstone
from treering._coordination.message_board import (
    FolderMessageBoard,
    MessageBoard,
    PathMessageBoard,
    holds_messages,
    sweep_messages,
)
from treering._store.api import Closable, Entry, Held, NamesIn, Outcome, Reader, Store, Transaction, Version
from treering._store.failures import naming, with_errno
from treering._store.open_folder import index_document, is_removed, key_content
from treering._store.pieces import Buffer
from treering._store.resolve import link_file, refuse_linked, remove_made, require_space, store_at
from treering._store.waiting import NOTHING, list_names, listed_names, remove_data, supersede
from treering._values import checkpoint_names
from treering._values.checkpoint_names import INDEX, LOCK_FILE, require_data_name
from treering.errors import (
    BusyError,
    CorruptError,
    ExistsError,
    FormatError,
    NotFoundError,
    StoreError,
    TreeringError,
    UnsupportedError,
)


class AttemptFiles(Closable):
    """The new data files of one attempt.

    Args:
        path: the folder.
        attempt: the attempt.

    Attributes:
        attempt: 16 hexadecimal digits; data files are called ``data-<attempt>-NNNNN-of-NNNNN.safetensors``.
    """

    def __init__(self, path: Path, attempt: str) -> None:
        self.attempt = attempt
        self._path = path
        self._shown = os.fspath(path)
        self._store = store_at(path)
        self._transaction = self._store.transaction()
        self._opened = False
        self._old: Version | None = None
        self._written: list[str] = []

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit.

        Raises:
            StoreError: the file system has fewer than ``size`` bytes free, or there is no folder.
        """
        with naming(self._shown, "write"):
            self._open_store()
            require_space(self._path, size)

    def write_file(self, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """Write the new file ``name``, durable but for its name, as the concatenation of ``buffers``.

        Args:
            name: a name of this attempt.
            buffers: C-contiguous buffers of any item type, asked for one after the other.
            size: how many bytes the buffers hold together.

        Raises:
            StoreError: the system refused, or the buffers hold another number of bytes.
            ValueError: the name is not one of this attempt.
        """
        with self._noting(name) as store:
            store.create(name, buffers, size, like=self._old)

    def link_file(self, name: str, source: Store, old: str | None = None) -> bool:
        """Give a file of another place a name here too: a second name of the same bytes, or a copy by the server.

        Args:
            name: the new name.
            source: the other place.
            old: the name there; None for the same one. A file that has two names is made read-only.

        Returns:
            False where that cannot be, on another file system for one: then its bytes have to be written.

        Raises:
            StoreError: the system refused.
            ValueError: the name is not one of this attempt.
        """
        with self._noting(name) as store:
            linked = link_file(source, store, old or name, name, shared=old is not None)
        if not linked:
            self._written.remove(name)
        return linked

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[Store]:
        """Give the place in which a name of this attempt is made; what fails meanwhile is removed with the others."""
        require_data_name(self.attempt, name)
        with naming(self._shown, "write"):
            store = self._open_store()
            self._written.append(name)
            try:
                yield store
            except FileExistsError:
                self._written.remove(name)  # somebody else's
                raise

    def open_linked(self, name: str) -> Reader:
        """Open a file that was linked.

        Raises:
            NotFoundError, StoreError: it is not there, or the store refuses.
        """
        return self._open_store().open_file(name)

    def unlink(self, name: str) -> None:
        """Give up the name of a file that was linked.

        Raises:
            StoreError: the system refused.
        """
        with naming(self._shown, "write"):
            self._open_store().remove(name)
            self._written.remove(name)

    def _open_store(self) -> Store:
        if not self._opened:
            raise RuntimeError("the with block has not begun, or is over")
        return self._store


class JoinedFolder(AttemptFiles):
    """The part of one process in the save of another, a context manager. Nothing is opened before it is needed.

    Attributes:
        board: the messages in the folder that is at the path.

    Args:
        path: the folder that process 0 makes.
        attempt: the attempt that process 0 has announced.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp())
        >>> with JoinedFolder(path, "0123456789abcdef") as joined:
        ...     joined.write_file("data-0123456789abcdef-00001-of-00002.safetensors", [b"tree"], 4)
        ...     joined.make_durable()
        >>> [entry.name for entry in path.iterdir()]
        ['data-0123456789abcdef-00001-of-00002.safetensors']
    """

    def __init__(self, path: Path, attempt: str) -> None:
        super().__init__(path, attempt)
        self.board: MessageBoard = PathMessageBoard(path)

    def close(self) -> None:
        """Close the folder; what was written stays."""
        self._opened = False
        self._store.close()

    def make(self) -> None:
        """Make the folder, if process 0 has not: to leave a note there for process 0, should it come yet.

        Raises:
            OSError: the system refused.
        """
        self._transaction.make()

    def make_durable(self) -> None:
        """Make the names of the written files durable; their content is.

        Raises:
            StoreError: the system refused.
        """
        with naming(self._shown, "write"):
            self._open_store().flush()

    def abort(self) -> None:
        """Remove what was written here, as far as that goes; the journal of process 0 is the proof for the rest."""
        written, self._written = self._written, []
        if self._opened:
            with contextlib.suppress(OSError):  # all were tried
                self._store.remove(*written)

    def _open_store(self) -> Store:
        if not self._opened:
            self._store.open()
            self._opened = True
            found = self._store.find(INDEX)
            self._old = None if found is None else found.version
        return self._store


@contextlib.contextmanager
def refusing_board(path: Path) -> Iterator[MessageBoard]:
    """Give the board of a folder that process 0 could not enter; made for that, and removed, if it is not there.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "ckpt")
        >>> with refusing_board(path) as board:
        ...     board.put(".treering-0123456789abcdef-verdict", b"refused")
        ...     board.remove_all((".treering-0123456789abcdef-verdict",))
        >>> path.exists()
        False
    """
    with naming(os.fspath(path), "write"):
        made = store_at(path).transaction().make()
    try:
        yield PathMessageBoard(path)
    finally:
        remove_made(made)


_TRIES = 20


class _Vanished(Exception):
    """The folder is gone, or another one is at its path."""


class CheckpointFolder(AttemptFiles):
    """One save into the folder at ``path``, a context manager: left without ``commit``, it leaves what was there.

    Attributes:
        superseded: data files that no reader that begins after the commit needs. The new index must list them, for
            they may survive the removal.
        waiting: those of them that stay for readers that began before, where the store has a grace for these. The new
            index must list them too.

    Args:
        path: the folder, made if it is missing; a link to a folder stays a link.
        overwrite: whether a checkpoint that is there may be replaced.
        names_in: gives the names of all data files that an old index mentions; its own errors mean a damaged index,
            whose data files then stay.
        attempt: that of a save in which other processes take part; None for a new one. When such a save fails, its
            journal stays, unlocked, as the proof that files of the others are leftovers; see `others_are_done`.
        live: the attempts whose messages stay, beside the own one.

    Raises:
        ExistsError: a checkpoint is there, or a folder that holds anything else.
        BusyError: another process is saving there.
        LinkRefusedError: a link lies there, in the place of a step of a run.
        StoreError: the system refused. Nothing has changed.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "ckpt")
        >>> with CheckpointFolder(path, overwrite=False, names_in=lambda index: []) as saving:
        ...     name = f"data-{saving.attempt}-00000-of-00001.safetensors"
        ...     saving.write_file(name, [b"tree", b"ring"], 8)
        ...     saving.commit(b"{}")
        >>> (path / name).read_bytes(), (path / "treering.json").read_bytes()
        (b'treering', b'{}')
    """

    def __init__(
        self, path: Path, *, overwrite: bool, names_in: NamesIn, attempt: str | None = None, live: Collection[str] = ()
    ) -> None:
        super().__init__(path, secrets.token_hex(8) if attempt is None else attempt)
        self._made: Sequence[str] = ()
        self.superseded: tuple[str, ...] = ()
        self.waiting: tuple[Superseded, ...] = ()
        self._removable: tuple[str, ...] = ()
        self._is_first = False
        self._modified = 0.0
        self._key = b""
        self._overwrite = overwrite
        self._names_in = names_in
        self._live = live
        self._begun = False
        self._joint = attempt is not None
        self._alone = not self._joint

    def __enter__(self) -> Self:
        refuse_linked(self._path)
        with naming(self._shown, "write"):
            for _ in range(_TRIES):
                try:
                    self._begin()
                except _Vanished:
                    self.close()
                except BaseException:  # an interrupt too; raised again below
                    self.close()
                    raise
                else:
                    return self
        hint = "another process removes it, or folders cannot be created there"
        raise self._refuse("the folder disappears repeatedly", hint)

    @property
    def board(self) -> MessageBoard:
        """The board in the folder."""
        return FolderMessageBoard(self._open_store())

    def others_are_done(self) -> None:
        """Let everything go, should the save fail: no other process will write anything of this attempt any more."""
        self._alone = True

    def commit(self, index: bytes) -> None:
        """Make the new files durable, make ``index`` the index, make that durable, remove the superseded files.

        Raises:
            ExistsError: somebody else committed a first save meanwhile.
            BusyError: another process moved the folder or removed the new files.
            StoreError: the system refused. Nothing has changed, except in one case that the message names: the new
                content is in place but may not be durable.
        """
        store = self._open_store()
        if not self._begun:
            raise RuntimeError("call commit once, inside the with block")
        with naming(self._shown, "write"):
            try:
                outcome = self._transaction.commit(index)
            except FileNotFoundError as error:
                raise self._refuse(str(error.strerror)) from error
            if outcome is Outcome.LOST:
                raise (
                    self._exists()
                    if self._is_first
                    else self._refuse("another process or thread saved there meanwhile")
                )
            if outcome is Outcome.UNKNOWN:
                raise OSError(errno.EIO, f"no answer came to PUT {INDEX!r}, the commit: it may yet be in place")
        try:
            store.flush()
        except OSError as error:
            hint = "the new content is in place, but a power cut may undo it: save again when the disk works"
            raise StoreError.of(error, self._shown, "make durable", hint=hint) from error
        remove_data(store, self._removable)  # the index lists them: the next save tries again

    def _begin(self) -> None:
        """Make the place, keep others out, look at it, put the marker there, sweep."""
        store = self._store
        try:
            self._made = self._transaction.make()
            store.open()
            self._opened = True
            if not self._transaction.lock():
                hint = None if store.find(LOCK_FILE) is None else f"remove {LOCK_FILE!r} there if none is"
                raise self._refuse("another process is saving to this checkpoint, or another thread of this one", hint)
            names = list_names(store)
            found = store.find(INDEX)
            self._old = None if found is None else found.version
            self._modified, self._key = 0.0 if found is None else found.modified, b""
            self._is_first = found is None or is_removed(store, found)
            listed = self._listed(found) if found is not None and not self._is_first else self._removed(names, found)
            self._begun = True
            self._transaction.begin(checkpoint_names.journal_of(self.attempt), self._old)
        except FileNotFoundError as error:
            if isinstance(error, TreeringError):
                raise
            # A saver that failed removed the folder that it had made.
            raise _Vanished from error
        if listed is not None:
            self._sweep(names, listed)

    def _listed(self, old: Entry) -> tuple[str, ...] | None:
        """Return the names in the old index, None when it is damaged; refuse what may not be overwritten."""
        if not old.is_file:
            raise self._refuse(f"{INDEX!r} there is not a file of its own", "save to another path", ExistsError)
        if not self._overwrite:
            raise self._exists()
        try:
            return tuple(self._names_in(self._read_key()))
        except TreeringError as error:
            if isinstance(error, OSError):
                raise
            return None

    def _removed(self, names: list[str], tombstone: Entry | None) -> tuple[str, ...]:
        """Return the names that a tombstone lists; refuse a folder that holds anything but leftovers."""
        listed = []
        if tombstone is not None:
            try:
                key = self._read_key()
                if not is_tombstone(key):
                    raise _Vanished  # another save is committed meanwhile
                listed = listed_names(key)
            except NotFoundError as error:
                raise _Vanished from error
            except (CorruptError, FormatError, UnsupportedError):
                pass  # it lists nothing that could be read
        self._require_only_leftovers(names, listed)
        return tuple(listed)

    def _read_key(self) -> bytes:
        """Return what is in the place of the index."""
        key = key_content(self._store)
        if self._store.grace and key.version != self._old:
            raise _Vanished  # it was replaced since it was found: when, is not known
        # What is listed is of this version, whatever was found before.
        self._old, self._key = key.version, key.data
        return key.data

    def _require_only_leftovers(self, names: list[str], listed: Sequence[str]) -> None:
        """Refuse a folder that holds anything but what dead attempts left there, and what a tombstone lists."""
        store = self._store
        attempts = [attempt for name in names if (attempt := checkpoint_names.attempt_of_journal(name))]
        ours = {LOCK_FILE, *map(checkpoint_names.journal_of, attempts), *filter(checkpoint_names.is_message, names)}
        ours.update(name for name in names if holds_messages(store, name))
        ours.update(listed if self._old is None else (INDEX, *listed))
        ours.update(filter(checkpoint_names.attempt_of_tombstone, names))
        # Where data may arrive when their marker was swept; elsewhere others may have put such files there.
        ours.update(filter(checkpoint_names.is_data, names) if store.longest_delay else ())
        for attempt in attempts:
            ours.update(checkpoint_names.data_of(attempt, names))
        for _, others in listed_by_tombstones(store, names, self._names_in):
            ours.update(others)
        if foreign := sorted(set(names) - ours):
            what = f"it is not empty and holds no checkpoint ({foreign[0]!r} is there)"
            raise self._refuse(what, "save to a new or an empty folder", ExistsError)

    def _sweep(self, names: list[str], listed: tuple[str, ...]) -> None:
        """Remove what dead attempts left, and what the old index had superseded; remember what this one supersedes."""
        store = self._store
        for _, life in sweep_attempts(self._transaction, names, listed):
            if life is Held.YES:
                raise self._refuse("another process is saving to this checkpoint, or another thread of this one")
        with contextlib.suppress(OSError):  # a removal that was cut short; the next one tries again
            finish_removals(store, names, self._names_in, listed)
        # What is not swept may go on: its marker is there. It may also have come after the names were listed.
        sweep_messages(store, names, self._may_go_on)
        if store.grace:
            waiting = NOTHING
            if self._key:
                waiting = supersede(store.grace, self._transaction.now, self._key, self._modified, names)
            self.superseded, self.waiting, self._removable = waiting.names, waiting.kept, waiting.past
            return
        # Listed anew: where no lock keeps others out, the index may name data that came after the first listing.
        present = set(list_names(store)) if listed else set[str]()
        self.superseded = tuple(name for name in listed if name in present and checkpoint_names.is_data(name))
        self._removable = self.superseded

    def _may_go_on(self, attempt: str) -> bool:
        live = attempt == self.attempt or attempt in self._live
        return live or self._store.find(checkpoint_names.journal_of(attempt)) is not None

    def close(self) -> None:
        """Remove what was not committed, give the lock back, close everything; called again, do what is left of that.

        ``with contextlib.closing(folder), folder:`` calls it twice, so that one interrupt never leaves the lock held.
        """
        committed = self._begun and not self._undone(self._store)
        self._transaction.close()
        if not committed:
            # Whoever came into them meanwhile has put a file there, or meets a missing folder and begins again.
            remove_made(self._made)
        self._made = ()
        self._begun = False  # before the place is closed: called again, nothing more is looked for in it
        self._store.close()
        self._opened = False
        self._transaction = self._store.transaction()  # which has made nothing

    def _undone(self, store: Store) -> bool:
        """Remove the files of the attempt; False when it is committed, or when that cannot be known now."""
        try:
            if self._transaction.committed():
                return False
        except OSError:
            return False
        try:
            # Where others took part, perhaps one of them could not remove what it wrote.
            others = checkpoint_names.data_of(self.attempt, store.names()) if self._joint and self._alone else []
            store.remove(*{*self._written, *others})
        except OSError:  # what stays is proved to be a leftover by the marker
            return True
        if self._alone:
            self._transaction.abort()
        return True

    def _exists(self) -> ExistsError:
        error = ExistsError(f"a checkpoint is at {self._shown!r} already", hint="pass overwrite=True to replace it")
        return with_errno(error, errno.EEXIST, self._shown)

    def _refuse(
        self, what: str, hint: str | None = None, kind: type[BusyError | ExistsError] = BusyError
    ) -> BusyError | ExistsError:
        error = kind(f"could not write {self._shown!r}: {what}", hint=hint)
        return with_errno(error, errno.EBUSY if kind is BusyError else errno.EEXIST, self._shown)


def listed_by_tombstones(store: Store, names: Iterable[str], names_in: NamesIn) -> Iterator[tuple[str, list[str]]]:
    """Yield each tombstone that can be read, with the names that it lists, those of data files only.

    A tombstone that is damaged, or of a newer version, proves nothing: it stays, and so does what it may list.

    Args:
        store: the place.
        names: names in it, of any kind.
        names_in: gives the names of all data files that an index mentions.

    Raises:
        OSError: the system refused.
    """
    for name in names:
        if checkpoint_names.attempt_of_tombstone(name) is None:
            continue
        if (found := store.find(name)) is None or not found.is_file:
            continue
        try:
            listed = names_in(index_document(store, name).data)
        except (NotFoundError, CorruptError, FormatError, UnsupportedError):
            continue
        yield name, [data for data in listed if checkpoint_names.is_data(data)]


def sweep_attempts(
    transaction: Transaction, names: Collection[str], live: Collection[str]
) -> Iterator[tuple[str, Held]]:
    """Remove what dead attempts left, and yield each attempt of the folder with what its marker says.

    Args:
        transaction: the change of the place, whose lock it has.
        names: the names in it.
        live: names that the index lists that is there now; they stay.

    Raises:
        OSError: the system refused.
    """
    for marker in names:
        if (attempt := checkpoint_names.attempt_of_journal(marker)) is not None:
            data = [name for name in checkpoint_names.data_of(attempt, names) if name not in live]
            yield attempt, transaction.sweep(marker, data)


def finish_removals(store: Store, names: Collection[str], names_in: NamesIn, live: Collection[str]) -> None:
    """Remove what tombstones list, then the tombstones. The caller has the lock of the folder.

    Args:
        store: the place.
        names: the names in it.
        names_in: gives the names of all data files that an index mentions.
        live: names that the index lists that is there now; they stay.

    Raises:
        OSError: the system refused; a tombstone is left for whoever comes next.
    """
    if not any(map(checkpoint_names.attempt_of_tombstone, names)):
        return
    # That the index is gone must be durable before the first of its files goes: whoever gave it this name may have died
    # before that.
    store.flush()
    for tombstone, listed in listed_by_tombstones(store, names, names_in):
        data = [name for name in listed if name in names and name not in live]
        store.remove(*data)
        if data:
            # As durable as the tombstone's own end, or nobody would know any more which attempt they belong to.
            store.flush()
        store.remove(tombstone)
