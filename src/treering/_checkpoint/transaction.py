"""Saving into a checkpoint's folder: new files beside the old ones, then one step that makes them the checkpoint.

Data files have names of their own attempt and are never rewritten. The index, ``treering.json``, is the commit: a first
save links it into place, an overwrite renames it over the old one. Only then are the old data files removed.
``docs/design/store.md`` says why each step is where it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self, TypeVar

from treering._checkpoint.tombstones import finish_removals, listed_by_tombstones
from treering._coordination.message_board import FolderMessageBoard, MessageBoard, stale_messages
from treering._store.failures import naming
from treering._store.open_folder import index_bytes
from treering._store.pieces import Buffer
from treering._store.posix.folder import Folder
from treering._store.posix.folder_lock import LOCK_FILE, FolderLock
from treering._store.posix.folders import make_folder, remove_folders, resolved_folder, sync_parent
from treering._store.posix.journal import Journal, remove_leftover
from treering._store.posix.new_file import require_data_name, write_new_file
from treering._values import checkpoint_names
from treering._values.checkpoint_names import INDEX
from treering.errors import Busy, Exists, StoreFailed, TreeringError

_TRIES = 20
_AnyOSError = TypeVar("_AnyOSError", bound=OSError)


class _Vanished(Exception):
    """The folder is gone, or another one is at its path."""


class CheckpointFolder:
    """One save into the folder at ``path``, a context manager: left without ``commit``, it leaves what was there.

    Attributes:
        attempt: 16 hexadecimal digits; data files are called ``data-<attempt>-NNNNN-of-NNNNN.safetensors``.
        superseded: data files that nothing needs once this save is committed. The new index must list them, for
            they may survive the removal.

    Args:
        path: the folder, made if it is missing; a link to a folder stays a link.
        overwrite: whether a checkpoint that is there may be replaced.
        names_in: gives the names of all data files that an old index mentions; its own errors mean a damaged index,
            whose data files then stay.
        attempt: that of a save in which other processes take part; None for a new one. When such a save fails, its
            journal stays, unlocked, as the proof that files of the others are leftovers; see `others_are_done`.
        live: the attempts whose messages stay, beside the own one.

    Raises:
        Exists: a checkpoint is there, or a folder that holds anything else.
        Busy: another process is saving there.
        StoreFailed: the system refused. Nothing has changed.

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
        self,
        path: Path,
        *,
        overwrite: bool,
        names_in: Callable[[bytes], Sequence[str]],
        attempt: str | None = None,
        live: Collection[str] = (),
    ) -> None:
        self.attempt = secrets.token_hex(8) if attempt is None else attempt
        self.superseded: tuple[str, ...] = ()
        self._shown = os.fspath(path)
        self._overwrite = overwrite
        self._names_in = names_in
        self._live = live
        self._folder: Folder | None = None
        self._lock: FolderLock | None = None
        self._journal: Journal | None = None
        self._joint = attempt is not None
        self._alone = not self._joint
        self._old: os.stat_result | None = None
        self._made: list[str] = []
        self._written: list[str] = []

    def __enter__(self) -> Self:
        with naming(self._shown, "write"):
            target = resolved_folder(self._shown)
            for _ in range(_TRIES):
                try:
                    self._begin(target)
                except _Vanished:
                    self.close()
                except BaseException:  # an interrupt too; raised again below
                    self.close()
                    raise
                else:
                    return self
        hint = "another process removes it, or folders cannot be made there"
        raise self._busy("the folder disappears again and again", hint)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def board(self) -> MessageBoard:
        """The messages in the folder."""
        return FolderMessageBoard(self._open_folder)

    def others_are_done(self) -> None:
        """Let everything go, should the save fail: no other process will write anything of this attempt any more."""
        self._alone = True

    def require_space(self, size: int) -> None:
        """Refuse early what cannot fit.

        Raises:
            StoreFailed: the file system has fewer than ``size`` bytes free.
        """
        with naming(self._shown, "write"):
            self._open_folder.require_space(size)

    def write_file(self, name: str, buffers: Iterable[Buffer], size: int) -> None:
        """Write the new file ``name``, durable but for its name, as the concatenation of ``buffers``.

        Args:
            name: a name of this attempt.
            buffers: C-contiguous buffers of any item type, asked for one after the other.
            size: how many bytes the buffers hold together.

        Raises:
            StoreFailed: the system refused, or the buffers hold another number of bytes.
            ValueError: the name is not one of this attempt.
        """
        require_data_name(self.attempt, name)
        with naming(self._shown, "write"):
            folder = self._open_folder
            self._written.append(name)
            write_new_file(folder, name, buffers, size, self._old)

    def link_file(self, name: str, source: Folder) -> bool:
        """Give the file ``name`` of another folder the same name here, as a second name of the same bytes.

        Returns:
            False where that cannot be, on another file system for one: then its bytes have to be written.

        Raises:
            StoreFailed: the system refused.
            ValueError: the name is not one of this attempt.
        """
        require_data_name(self.attempt, name)
        with naming(self._shown, "write"):
            self._written.append(name)
            return self._open_folder.link_from(source, name)

    def commit(self, index: bytes) -> None:
        """Make the new files durable, make ``index`` the index, make that durable, remove the superseded files.

        Raises:
            Exists: somebody else committed a first save meanwhile.
            Busy: another process moved the folder or removed the new files.
            StoreFailed: the system refused. Nothing has changed, except in one case that the message names: the new
                content is in place but may not be durable.
        """
        folder, journal = self._open_folder, self._journal
        if journal is None:
            raise RuntimeError("commit belongs into the with block, once")
        with naming(self._shown, "write"):
            if not folder.is_there():
                raise self._busy("another process moved or removed the folder")
            journal.fill(index)
            folder.sync()
            try:
                journal.become_first() if self._old is None else journal.become_next()
            except FileExistsError as error:
                raise self._exists() from error
            except FileNotFoundError as error:
                raise self._busy("another process removed the new files") from error
        try:
            folder.sync()
        except OSError as error:
            hint = "the new content is in place, but a power cut may undo it: save again when the disk is well"
            raise StoreFailed.of(error, self._shown, "make durable", hint=hint) from error
        for name in self.superseded:
            with contextlib.suppress(OSError):  # the index lists it: the next save tries again
                folder.remove(name)

    @property
    def _open_folder(self) -> Folder:
        if self._folder is None:
            raise RuntimeError("the with block has not begun, or is over")
        return self._folder

    def _begin(self, target: str) -> None:
        """Make the folder, lock it, look at it, put the journal there, sweep."""
        try:
            self._made = make_folder(target)
            self._folder = folder = Folder(target)
            self._lock = FolderLock(folder)
            if not self._lock.take():
                hint = None if folder.find(LOCK_FILE) is None else f"remove {LOCK_FILE!r} there if none is"
                raise self._busy("another process is saving to this checkpoint", hint)
            if not folder.is_there():
                raise _Vanished
            names = folder.names()
            self._old = folder.find(INDEX)
            listed = self._listed() if self._old is not None else self._only_leftovers(names)
            self._journal = Journal(folder, self.attempt)
            self._journal.make(self._old)
            if self._old is None and not self._made:
                with contextlib.suppress(PermissionError):  # a folder above that is not ours
                    sync_parent(target)
        except FileNotFoundError as error:
            if isinstance(error, TreeringError):
                raise
            # A saver that failed removed the folder that it had made.
            raise _Vanished from error
        # The journal's name is durable before any data file's, and the index before what it supersedes goes.
        folder.sync()
        if listed is not None:
            self._sweep(names, listed)

    def _listed(self) -> tuple[str, ...] | None:
        """Return the names in the old index, None when it is damaged; refuse what may not be overwritten."""
        folder, old = self._open_folder, self._old
        if old is None or not stat.S_ISREG(old.st_mode):
            self._refuse(f"{INDEX!r} there is not a file of its own", "save to another place")
        if not self._overwrite:
            raise self._exists()
        folder.require_writable(INDEX)
        try:
            return tuple(self._names_in(index_bytes(folder, Path(self._shown, INDEX))))
        except TreeringError as error:
            if isinstance(error, OSError):
                raise
            return None

    def _only_leftovers(self, names: list[str]) -> tuple[str, ...]:
        """Refuse a folder that holds anything but what dead attempts left there."""
        attempts = [attempt for name in names if (attempt := checkpoint_names.attempt_of_journal(name))]
        ours = {LOCK_FILE, *map(checkpoint_names.journal_of, attempts), *filter(checkpoint_names.is_message, names)}
        ours.update(filter(checkpoint_names.attempt_of_tombstone, names))
        for attempt in attempts:
            ours.update(checkpoint_names.data_of(attempt, names))
        for _, listed in listed_by_tombstones(self._open_folder, self._shown, names, self._names_in):
            ours.update(listed)
        foreign = sorted(set(names) - ours)
        if foreign:
            what = f"it is not empty and holds no checkpoint ({foreign[0]!r} is there)"
            self._refuse(what, "save to a new or an empty folder")
        return ()

    def _sweep(self, names: list[str], listed: tuple[str, ...]) -> None:
        """Remove what dead attempts left, and what the old index had superseded; remember what this one supersedes."""
        folder = self._open_folder
        for journal in names:
            attempt = checkpoint_names.attempt_of_journal(journal)
            if attempt is not None:
                data = [name for name in checkpoint_names.data_of(attempt, names) if name not in listed]
                if not remove_leftover(folder, journal, data):
                    raise self._busy("another process is saving to this checkpoint")
        with contextlib.suppress(OSError):  # a removal that was cut short; the next one tries again
            finish_removals(folder, self._shown, names, self._names_in, listed)
        # No other attempt is alive: its journal would be locked.
        for note in stale_messages(names, {self.attempt, *self._live}.__contains__, FolderMessageBoard(folder).get):
            with contextlib.suppress(OSError):  # it stands in nobody's way
                folder.remove(note)
        present = set(names)
        self.superseded = tuple(name for name in listed if name in present and checkpoint_names.is_data(name))

    def close(self) -> None:
        """Remove what was not committed, give the lock back, close everything; called again, do what is left of that.

        ``with contextlib.closing(folder), folder:`` calls it twice, so that one interrupt never leaves the lock held.
        """
        folder, journal = self._folder, self._journal
        committed = journal is not None and folder is not None and not self._undone(folder, journal)
        if self._lock is not None:
            self._lock.give_back()
        if not committed:
            # Whoever came into them meanwhile has put a file there, or meets a missing folder and begins again.
            remove_folders(self._made)
        if folder is not None:
            folder.close()
        self._folder = self._lock = self._journal = None
        self._made = []

    def _undone(self, folder: Folder, journal: Journal) -> bool:
        """Remove the files of the attempt; False when it is committed, or when that cannot be known now."""
        try:
            committed = journal.is_index()
        except OSError:
            committed = True
        if committed:
            journal.close()
            return False
        try:
            # Where others took part, perhaps one of them could not remove what it wrote.
            others = checkpoint_names.data_of(self.attempt, folder.names()) if self._joint and self._alone else []
            for name in {*self._written, *others}:
                folder.remove(name)
        except OSError:
            # What stays is proved to be a leftover by the journal.
            journal.close()
            return True
        if self._alone:
            journal.remove()
        else:
            journal.close()
        return True

    def _exists(self) -> Exists:
        error = Exists(f"a checkpoint is at {self._shown!r} already", hint="pass overwrite=True to replace it")
        return self._named(error, errno.EEXIST)

    def _busy(self, what: str, hint: str | None = None) -> Busy:
        return self._named(Busy(f"could not write {self._shown!r}: {what}", hint=hint), errno.EBUSY)

    def _refuse(self, what: str, hint: str) -> NoReturn:
        raise self._named(Exists(f"could not write {self._shown!r}: {what}", hint=hint), errno.EEXIST)

    def _named(self, error: _AnyOSError, reason: int) -> _AnyOSError:
        error.errno = reason
        error.strerror = os.strerror(reason)
        error.filename = self._shown
        return error
