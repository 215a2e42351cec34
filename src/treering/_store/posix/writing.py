"""Writing files by whichever way to the disk is faster now, and durably.

``write`` and then ``fsync`` lets the disk wait until everything is copied. Here the kernel is asked to begin with each
run of bytes as soon as it is in the page cache; ``docs/design/store.md`` has the measurements.

Past the page cache, the caller fills aligned blocks and a few threads hand them to the disk. With ``write`` and
``fsync`` every byte is copied into the page cache first and the disk starts late. There copying and writing overlap, in
a fixed amount of memory.

A folder of files of other forms is made beside the path that it will have: it gets its name when all is durable.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import mmap
import os
import queue
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn, Self

from treering._store.api import StagedFolder
from treering._store.crew import FirstError, ThreadPool
from treering._store.failures import naming, taken_meanwhile
from treering._store.pieces import Buffer, pieces, write_all
from treering._store.posix import descriptors
from treering._store.posix.descriptors import OpenDescriptor
from treering._store.posix.folder import (
    CAREFUL,
    NEW,
    NO_LINKS,
    make_folder,
    remove_folders,
    resolved,
    resolved_folder,
    sync_folder,
)
from treering.errors import ExistsError, StoreError

_SUFFIX = ".treering-tmp"
_TOKEN_BYTES = 8
# The longest name that the usual file systems of Linux, macOS and Windows take, in bytes.
_NAME_MAX = 255
_ATTEMPTS = 20


class StagedFile:
    """A new file beside the one it will replace, a context manager: left without ``commit``, it is removed.

    It is called ``.NAME.<16 hex digits>.treering-tmp`` until it is whole and durable. Its writer holds a lock on it for
    as long as it lives, so a later save of the same name can tell the leftover of a dead writer (the lock can be taken)
    from the work of a live one (it cannot).
    """

    def __init__(self, target: str, shown: str, *, sweep: bool = True, new: bool = False) -> None:
        """Stage beside the absolute path ``target``, which the caller calls ``shown``.

        Args:
            target: the path.
            shown: what messages call it.
            sweep: whether to look through the folder for what dead writers of the same name left.
            new: whether nothing may be there when it is put in place.
        """
        self._sweeps = sweep and descriptors.fcntl is not None
        self._target = target
        self._shown = shown
        self._put = _put_new if new else os.replace
        self._folder, name = os.path.split(target)
        self._stem = _stem(name)
        self._path: str | None = None
        self._open_folder: OpenDescriptor | None = None
        self._file = OpenDescriptor()

    @property
    def descriptor(self) -> int:
        """The open file, for writing; -1 when it is closed."""
        return self._file.number

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as undo:
            undo.callback(self._discard)
            # Opened before anything is written: after the rename, only its fsync is left to fail.
            self._open_folder = descriptors.open_folder(self._folder)
            if self._sweeps:
                _sweep(self._folder, self._stem)
            old = descriptors.stat_at(self._target)
            # Closed to others until it has the rights of the old file, which may be as narrow.
            self._create(0o600 if old else 0o666)
            if old:
                if not os.access(self._target, os.W_OK):
                    raise PermissionError(errno.EACCES, "it is write-protected")
                descriptors.take_over(self.descriptor, old)
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._discard()

    def commit(self) -> None:
        """Make the content durable, put it in the place of ``target``, make that durable too.

        Raises:
            OSError: nothing has changed.
            ExistsError: it had to be new, and something is there; nothing has changed.
            StoreError: the new content is in place, but may not survive a power cut.
        """
        descriptors.sync(self.descriptor)
        if descriptors.fcntl is None:  # Windows renames only what is closed
            self._file.finish()
        self._rename()
        try:
            if self._open_folder is not None:
                descriptors.sync_folder(self._open_folder.number)
            self._file.finish()
        except OSError as error:
            hint = "the new content is in place, but a power cut may undo it: save again when the disk works"
            raise StoreError.of(error, self._shown, "make durable", hint=hint) from error

    def _rename(self) -> None:
        if self._path is None:
            return
        try:
            self._put(self._path, self._target)
        except OSError as error:
            # On a network file system a rename may be done and only its answer lost.
            if self.descriptor < 0 or not descriptors.is_at(self.descriptor, self._target):
                if self._put is _put_new and isinstance(error, FileExistsError):
                    raise taken_meanwhile(self._shown) from error
                raise
        if self._put is _put_new:
            with contextlib.suppress(OSError):  # a sweeper knows it by its name
                os.unlink(self._path)
        self._path = None

    def _create(self, mode: int) -> None:
        for _ in range(_ATTEMPTS):
            path = os.path.join(self._folder, f".{self._stem}.{os.urandom(_TOKEN_BYTES).hex()}{_SUFFIX}")
            self._path, self._file = path, OpenDescriptor()
            self._file.open(os.open, path, NEW | CAREFUL, mode)
            if self._file.lock() is not False and descriptors.is_at(self.descriptor, path):
                return
            # A sweeper met the file between its creation and its lock, and took it for a leftover.
            self._remove()
        raise OSError(errno.EAGAIN, "other processes keep removing its staged file")

    def _remove(self) -> None:
        """Remove the staged file if it is still there: the error that brought us here says more than one from here."""
        if descriptors.fcntl is None:  # Windows removes only what is closed
            self._file.close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self._path = None
        self._file.close()

    def _discard(self) -> None:
        self._remove()
        if self._open_folder is not None:
            self._open_folder.close()


def _put_new(path: str, target: str) -> None:
    """Give a file a name that nothing may have.

    Raises:
        OSError: the system refused; FileExistsError where something is there.
    """
    if descriptors.fcntl is None:  # Windows renames nothing over a file
        os.rename(path, target)
        return
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from None
        os.replace(path, target)


def _stem(name: str) -> str:
    """Cut ``name`` so that the name of the staged file is not too long."""
    room = _NAME_MAX - len(f"..{_SUFFIX}") - 2 * _TOKEN_BYTES
    while len(os.fsencode(name)) > room:
        name = name[:-1]
    return name


def _sweep(folder: str, stem: str) -> None:
    """Remove what dead writers of the same name left. What cannot be swept does not stand in the way of a save."""
    start = f".{stem}."
    length = len(start) + 2 * _TOKEN_BYTES + len(_SUFFIX)
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if len(name) == length and name.startswith(start) and name.endswith(_SUFFIX):
                path = os.path.join(folder, name)
                # For writing because NFS gives an exclusive lock to nobody else; without waiting, should it be a pipe.
                flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
                with contextlib.suppress(OSError), OpenDescriptor(os.open, path, flags) as opened:
                    if opened.lock() and descriptors.is_at(opened.number, path):
                        os.unlink(path)


# Below this the page cache is as fast, and one thread leaves the other cores alone.
DIRECT_FROM = 128 << 20

# The page cache is the faster way while there is free memory for it. A file that would take more than this share of
# what is free would first push out other pages: it goes past the cache.
FREE_SHARE = 0.25

_PIECE_BYTES = 4 << 20
_RUN_BYTES = 16 << 20


def write_content(descriptor: int, buffers: Iterable[Buffer], size: int) -> None:
    """Write the concatenation of ``buffers``, ``size`` bytes, into a new and empty file. It is not yet durable.

    Raises:
        OSError: the system refused, or the buffers hold another number of bytes.
    """
    parts = pieces(buffers, size)
    if size >= DIRECT_FROM:
        free = descriptors.free_memory()
        if free is not None and size > FREE_SHARE * free and descriptors.go_direct(descriptor):
            write_direct(descriptor, parts, size)
            return
        descriptors.reserve(descriptor, size)
    written = begun = 0
    early = True
    for part in parts:
        for start in range(0, len(part), _PIECE_BYTES):
            piece = part[start : start + _PIECE_BYTES]
            write_all(descriptor, piece)
            written += len(piece)
            if early and written - begun >= _RUN_BYTES:
                early = descriptors.start_writeback(descriptor, begun, written - begun)
                begun = written


def replace_file(path: Path, buffers: Iterable[Buffer], size: int, *, new: bool = False) -> None:
    """Durably replace the file at ``path``, or make it, with the concatenation of ``buffers``.

    When this returns, the new content survives a power cut. Until then, and after any error or kill, ``path`` holds the
    old content (or nothing) or the new one, whole.

    Missing folders are made. A link at ``path`` stays, the file that it leads to is replaced. Permission bits are kept;
    access lists, extended attributes and hard links are not.

    Args:
        path: where to; relative to the current folder as it is now.
        buffers: C-contiguous buffers of any item type, asked for one after the other.
        size: how many bytes the buffers hold together.
        new: whether nothing may be there, at the end either.

    Raises:
        ExistsError: it had to be new, and something is there.
        StoreError: the system refused; ``errno`` says why, ``filename`` is ``path``. Nothing has changed, except in
            one case that the message names: the new content is in place but may not be durable.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "new", "a.bin")
        >>> replace_file(path, [b"tree", b"ring"], 8)
        >>> path.read_bytes()
        b'treering'
    """
    shown = os.fspath(path)
    with naming(shown, "write"):
        target = resolved(shown)
        made = make_folder(os.path.dirname(target))
        try:
            with StagedFile(target, shown, new=new) as staged:
                descriptors.require_space(staged.descriptor, size)
                write_content(staged.descriptor, buffers, size)
                staged.commit()
        except BaseException:  # an interrupt too; raised again below
            remove_folders(made)
            raise


BLOCK_BYTES = 2 << 20
BLOCKS = 8
THREADS = 3
# O_DIRECT wants memory, offset and length in multiples of the disk's sector; 4096 suits every sector size in use.
_ALIGNMENT = 4096


def write_direct(descriptor: int, parts: Iterable[memoryview], size: int) -> None:
    """Write ``parts``, ``size`` bytes together, from the start of an empty file that was made direct.

    Raises:
        OSError: the first error of any thread; all threads are gone by then.
    """
    descriptors.reserve(descriptor, size)
    with contextlib.closing(Ring(descriptor)) as ring, ring:
        for part in parts:
            ring.put(part)
        ring.finish()
    # The last block was padded to the alignment.
    os.ftruncate(descriptor, size)


class Ring:
    """A ring of staging blocks in front of one file.

    A context manager: leaving it by an error drops what is not yet written; leaving it in any way joins the threads
    and gives the memory back.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._direct = True
        self._offset = 0
        self._filled = 0
        self._failure = FirstError()
        self._abandoned = False
        self._memory: mmap.mmap | None = None
        self._views: list[memoryview] = []
        self._threads = ThreadPool(self._drain, THREADS)
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[memoryview, int, int] | None] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self._memory = mmap.mmap(-1, BLOCK_BYTES * BLOCKS)
        if hasattr(mmap, "MADV_HUGEPAGE"):  # where there are any, they are much cheaper to touch first
            with contextlib.suppress(OSError):  # a kernel without them
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        whole = memoryview(self._memory)
        self._views = [whole, *(whole[at : at + BLOCK_BYTES] for at in range(0, len(whole), BLOCK_BYTES))]
        self._block, *others = self._views[1:]
        for block in others:
            self._free.put(block)
        self._threads.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._abandoned = error is not None
        self.close()

    def close(self) -> None:
        """Join the threads and give the memory back. May be called twice, so that one interrupt cannot prevent it."""
        self._stop()
        for view in reversed(self._views):
            view.release()
        # After an error its traceback may still hold a slice; the memory then goes when the error goes.
        with contextlib.suppress(BufferError):
            if self._memory is not None:
                self._memory.close()

    def put(self, part: memoryview) -> None:
        """Append ``part``; it is copied before this returns.

        Raises:
            OSError: an earlier block could not be written.
        """
        start, end = 0, len(part)
        while start < end:
            stop = min(end, start + BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + stop - start] = part[start:stop]
            self._filled += stop - start
            start = stop
            if self._filled == BLOCK_BYTES:
                self._submit(BLOCK_BYTES)
                # A thread that just woke up waits for the interpreter, which copying does not let go.
                time.sleep(0)
                self._block = self._free.get()
                self._filled = 0
                self._failure.reraise()

    def finish(self) -> None:
        """Write the last block, padded with zeros to the alignment, and wait for all of them.

        Raises:
            OSError: a block could not be written.
        """
        padding = -self._filled % _ALIGNMENT
        self._block[self._filled : self._filled + padding] = bytes(padding)
        if self._filled:
            self._submit(self._filled + padding)
        self._stop()
        self._failure.reraise()

    def _submit(self, length: int) -> None:
        self._full.put((self._block, length, self._offset))
        self._offset += length
        if not self._threads.size:
            self._full.put(None)
            self._drain()

    def _stop(self) -> None:
        for _ in range(self._threads.size):
            self._full.put(None)
        self._threads.close()

    def _drain(self) -> None:
        # A block comes back whatever happens to it: the caller never waits for one in vain.
        while (job := self._full.get()) is not None:
            block, length, offset = job
            with self._failure:
                if self._failure.error is None and not self._abandoned:
                    self._write(block[:length], offset)
            self._free.put(block)

    def _write(self, rest: memoryview, offset: int) -> None:
        while rest:
            direct = self._direct
            try:
                written = os.pwrite(self._descriptor, rest, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not direct:
                    raise
                # This file system wants another alignment, or a short write broke ours: on through the page cache.
                descriptors.leave_direct(self._descriptor)
                self._direct = False
                continue
            if not written:
                raise OSError(errno.EIO, "the system accepts no more bytes and gives no reason")
            offset += written
            rest = rest[written:]


_DIGITS = 20


@contextlib.contextmanager
def stage_folder(path: Path, suffix: str) -> Iterator[StagedFolder]:
    """Make a folder; at the end of the block everything in it becomes durable, and then it gets its name.

    Until then it is called ``NAME``, ``suffix``, a dash and 20 digits. Its writer holds a lock on it for as long as it
    lives, so that the next one for the same path removes what a dead writer left, and nothing else.

    Args:
        path: the path that it gets; an empty folder may be there.
        suffix: what a name ends with that the program which reads the form takes for unfinished.

    Raises:
        ExistsError: something is at the path, or came there meanwhile.
        StoreError: the system refuses; nothing is at the path, unless the message says so.
    """
    shown = os.fspath(path)
    with naming(shown, "write"):
        target = resolved_folder(shown)
        _require_free(target, shown)
        with contextlib.ExitStack() as undo:
            undo.callback(remove_folders, make_folder(os.path.dirname(target)))
            _sweep_folders(target, suffix)
            staged, opened = _make_staged(f"{target}{suffix}-")
            undo.callback(_remove_tree, staged)
            with opened or contextlib.nullcontext():
                yield StagedFolder(staged, functools.partial(_write_into, staged))
                _sync_all(staged)
                _put_in_place(staged, target, shown)
            undo.pop_all()
        try:
            sync_folder(os.path.dirname(target))
        except OSError as error:
            hint = "it is in place, but a power cut may undo it"
            raise StoreError.of(error, shown, "make durable", hint=hint) from error


def _write_into(staged: str, name: str, data: bytes) -> None:
    path = os.path.join(staged, *name.split("/"))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with OpenDescriptor(os.open, path, NEW | CAREFUL, 0o666) as opened:
        write_all(opened.number, memoryview(data))


def _require_free(target: str, shown: str) -> None:
    if os.path.isdir(target) and not os.listdir(target):
        return
    if os.path.lexists(target):
        hint = "such a folder cannot be replaced in one step; save to another path, or remove it"
        raise ExistsError(f"{shown!r} exists", hint=hint)


def _make_staged(start: str) -> tuple[str, OpenDescriptor | None]:
    """Return a new folder, and what holds its lock."""
    for _ in range(_ATTEMPTS):
        path = f"{start}{int.from_bytes(os.urandom(16)) % 10**_DIGITS:0{_DIGITS}}"
        os.mkdir(path)
        opened = descriptors.open_folder(path)
        # A sweeper may have met it before it had its lock, and removed it.
        if opened is None or (opened.lock() is not False and descriptors.is_at(opened.number, path)):
            return path, opened
        opened.close()
        with contextlib.suppress(OSError):
            os.rmdir(path)
    raise OSError(errno.EAGAIN, "other processes keep removing its staged folder")


def _sweep_folders(target: str, suffix: str) -> None:
    """Remove what dead writers of the same path left. What cannot be swept does not stand in the way of a save."""
    above, name = os.path.split(target)
    ours = re.compile(f"{re.escape(name + suffix)}-[0-9]{{{_DIGITS}}}")
    with contextlib.suppress(OSError):
        for left in filter(ours.fullmatch, os.listdir(above)):
            path = os.path.join(above, left)
            with contextlib.suppress(OSError), descriptors.open_folder(path) or contextlib.nullcontext() as opened:
                if opened is not None and opened.lock() and descriptors.is_at(opened.number, path):
                    _remove_tree(path)


def _remove_tree(path: str) -> None:
    import shutil  # what only reads starts sooner without it

    shutil.rmtree(path, ignore_errors=True)


def _sync_all(folder: str) -> None:
    """Make everything in a folder durable, its own names last."""
    for place, _, files in os.walk(folder, topdown=False, onerror=_refuse):
        for file in files:
            with OpenDescriptor(os.open, os.path.join(place, file), os.O_RDWR | CAREFUL) as opened:
                descriptors.sync(opened.number)
        sync_folder(place)


def _refuse(error: OSError) -> NoReturn:
    """Raise what the system says of a folder that cannot be listed: nothing in it would be durable."""
    raise error


def _put_in_place(staged: str, target: str, shown: str) -> None:
    try:
        if os.name == "nt" and os.path.isdir(target):  # Windows renames nothing over a folder
            os.rmdir(target)
        os.rename(staged, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise taken_meanwhile(shown) from error
        raise
