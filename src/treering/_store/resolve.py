"""From what the caller gives to a store: the only place that knows which kinds there are."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import itertools
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, BinaryIO, Final, cast

from treering._printable import kind_of
from treering._store.api import Entry, Kind, Reader, StagedFolder, Store
from treering._store.objects.url import (
    READ_ONLY,
    UrlPath,
    WebPath,
    bucket_path,
    memory_path,
    scheme_of,
    url_meant,
    web_path,
)
from treering._store.pieces import Buffer, pieces
from treering._store.posix import descriptors
from treering._store.posix.folder import remove_folders
from treering._store.posix.reading import LocalFile
from treering._store.posix.store import PosixStore, entry_of
from treering._store.posix.writing import replace_file, stage_folder
from treering._values.checkpoint_names import step_of_name
from treering.errors import LinkRefusedError, PermissionDeniedError, StoreError, TreeringError, UnsupportedError

if TYPE_CHECKING:
    from treering._store.leaves_api import LeafWriter, LeavesSave, OpenLeaves, Unfinished
    from treering._store.objects.store import ObjectRoot

_DISK: Final = frozenset({None, "file"})
_WEB: Final = frozenset({"http", "https"})


def located(path: str | os.PathLike[str]) -> Path:
    """Return the path that a text or a path object names, in whichever store.

    One that is not on disk has no methods that look at the disk.

    Raises:
        UnsupportedError: it is a URL that names nothing that treering can use.

    Example:
        >>> located("s3a://bucket/a/"), located("memory://a").name, located("runs/a").name
        (BucketPath('s3://bucket/a'), 'a', 'a')
    """
    text = _text_of(path)
    if isinstance(path, UrlPath):
        if is_on_disk(text):
            raise UnsupportedError(f"{text!r} was made of a URL, and is none", hint="join no name that begins with '/'")
        return cast("Path", path)
    if ":" not in text and isinstance(path, Path):  # no URL, nor what was meant to be one
        return _without_missing(path) if ".." in text else path
    if (scheme := scheme_of(text)) is None:
        if (meant := url_meant(text)) is not None and not Path(Path(text).parts[0]).exists():
            raise UnsupportedError(f"{text!r} is no URL, and there is no such folder", hint=f"write {meant!r}")
        # A name in a folder that is called "a:" would be taken for a URL.
        place = _without_missing(Path(text))
        return place if scheme_of(f"{place}/") is None else place.absolute()
    if scheme == "memory":
        return cast("Path", memory_path(text))
    if scheme == "file":
        return _from_file_url(text)
    return cast("Path", web_path(text) if scheme in _WEB else bucket_path(text))


def _text_of(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    if not isinstance(text, str):
        raise UnsupportedError(f"a path is a str or os.PathLike of str, found {type(text).__name__}")
    return text


def _without_missing(path: Path) -> Path:
    """Return a path without a missing folder and its ``..``, which the system finds for a writer that makes it only."""
    if ".." not in path.parts:
        return path
    last = len(path.parts) - path.parts[::-1].index("..")
    above = Path(*path.parts[:last])
    with contextlib.suppress(ValueError):  # no path at all
        return path if os.path.exists(above) else Path(os.path.realpath(above), *path.parts[last:])
    return path


def _from_file_url(text: str) -> Path:
    """Return the path of a ``file:`` URL, in which ``%20`` is a space."""
    from urllib.request import url2pathname

    address = text[len("file:") :]
    host, slash, path = address[2:].partition("/") if address.startswith("//") else ("", "/", address.lstrip("/"))
    if host not in {"", "localhost"} or not slash:
        hint = "a URL of this machine is file:///PATH"
        raise UnsupportedError(f"{text!r} is on another machine or has no path", hint=hint)
    return Path(url2pathname(f"/{path}"))


def file_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file, refusing what is no URL that treering can use before a folder called so is made.

    Raises:
        UnsupportedError: it is no text, a URL of another kind, or names no file.
    """
    text = _text_of(path)
    if not text:
        raise UnsupportedError("the path is empty", hint="pass the name of a file or folder")
    if text.endswith(("/", os.sep)):
        raise UnsupportedError(f"{text!r} is not the name of a file", hint="pass the name of a file")
    return located(path)


def new_file_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of something to write, refusing also ``~``: a folder called so is hardly meant.

    Raises:
        UnsupportedError: as `file_path`, or it begins with ``~``, is read-only, or is the root of the file system.

    Example:
        >>> new_file_path("runs/7").name
        '7'
    """
    place = file_path(path)
    if isinstance(place, WebPath):
        raise UnsupportedError(f"{os.fspath(path)!r} cannot be written", hint=f"over {place.parts[0]}// {READ_ONLY}")
    if place.parts[:1] and place.parts[0].startswith("~"):
        hint = "'~' is not expanded here; os.path.expanduser does it"
        raise UnsupportedError(f"{os.fspath(path)!r} begins with '~'", hint=hint)
    if place.name in ("", "..") and is_on_disk(place) and (whole := resolved(place)) == whole.parent:
        what = f"{os.fspath(place)!r} is the root of the file system"
        raise UnsupportedError(what, hint="pass the path of a folder in it")
    return place


def require_path(path: object) -> None:
    """Refuse what is no path, such as a tree in its place.

    Raises:
        UnsupportedError: neither a str nor an ``os.PathLike`` of one.
    """
    given: object = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(given, str):
        raise UnsupportedError(f"the first argument is the path, a str or os.PathLike; found {kind_of(given)}")


def leaves_path(path: str | os.PathLike[str], *, new: bool = False) -> Path:
    """Return the path of a leaves directory.

    Args:
        path: the directory; it may end in a separator, as a shell completes it.
        new: whether it is to be written.

    Raises:
        UnsupportedError: as `file_path`, or as `new_folder_path` for a new one.

    Example:
        >>> leaves_path("runs/a/").name
        'a'
    """
    return located(kept((new_file_path if new else file_path)(_without_end(path))))


def is_on_disk(path: str | os.PathLike[str]) -> bool:
    """Tell whether a path leads to the file system, which has renames, locks and descriptors.

    Example:
        >>> is_on_disk("runs/a"), is_on_disk("memory://runs/a")
        (True, False)
    """
    return _buckets_of(path) is None


def has_renames(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder at a path can get its name by one rename, so that what has its name is whole.

    Example:
        >>> has_renames("runs/a"), has_renames("memory://runs/a")
        (True, False)
    """
    return is_on_disk(path)


def require_shared(path: str | os.PathLike[str]) -> None:
    """Refuse a joint save into the memory of each process; all of them refuse it, so none waits.

    Raises:
        UnsupportedError: the path is such a place.
    """
    if (buckets := _buckets_of(path)) is not None and not buckets.is_shared:
        hint = "save to a folder or a bucket that all processes see, or pass processes='this'"
        raise UnsupportedError(f"{os.fspath(path)!r} is another place in each process of the job", hint=hint)


def require_paths(path: str | os.PathLike[str], what: str, hint: str) -> None:
    """Refuse a place where other libraries cannot write by the paths of files, for the reason that ``what`` says.

    Raises:
        UnsupportedError: the path is such a place.
    """
    if not is_on_disk(path):
        raise UnsupportedError(what, hint=hint)


def new_folder_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder to write.

    Raises:
        UnsupportedError: it is no path, empty, a URL, or begins with ``~``.
    """
    return new_file_path(_without_end(path))


def absolute(path: PurePath) -> Path:
    """Return a path that holds when the program changes its current folder.

    Raises:
        StoreError: the path is relative, and the current folder was removed.
    """
    if (buckets := _buckets_of(path)) is not None:
        return cast("Path", buckets.absolute(path))
    try:
        return Path(path).absolute()
    except OSError as error:
        gone = OSError(error.errno or errno.ENOENT, "it is relative, and the current folder was removed")
        raise StoreError.of(gone, path, "find", hint="change to another folder, or pass the whole path") from error


def kept(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a path that leads to the same server and account to the end of a call, whatever the environment says then.

    What is no path at all is left to those who refuse it.

    Raises:
        TreeringError: a bucket cannot be reached so, as when it is used.
    """
    given: object = path
    return path if not isinstance(given, str | os.PathLike) or is_on_disk(path) else absolute(located(path))


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return the path by which one place is known, whatever leads to it; itself where the system cannot say."""
    place = located(path)
    with contextlib.suppress(OSError, ValueError):  # the current folder is gone, or it can be no name
        return place if isinstance(place, UrlPath) else Path(os.path.realpath(place))
    return place


def require_outside(source: str | os.PathLike[str], target: str | os.PathLike[str], shown: str) -> None:
    """Refuse to write to a source or into it, whatever leads there.

    Raises:
        UnsupportedError: the target, which is called ``shown``, is the source, or lies in it.

    Example:
        >>> require_outside("runs/a", "runs/b/../a/copy", "runs/b/../a/copy")
        Traceback (most recent call last):
            ...
        treering.errors.UnsupportedError: 'runs/b/../a/copy' is, or lies in, the source; choose another path
    """
    if resolved(target).is_relative_to(resolved(source)):
        raise UnsupportedError(f"{shown!r} is, or lies in, the source", hint="choose another path")


def _buckets_of(path: str | os.PathLike[str]) -> ObjectRoot | None:
    """Return what knows all places of the kind that a path is of; None for the disk."""
    text = _text_of(path)
    if ":" not in text or (scheme := scheme_of(text)) in _DISK:
        return None
    if scheme == "memory":
        return _memory()
    return _web() if scheme in _WEB else _buckets()


@functools.cache
def _memory() -> ObjectRoot:
    from treering._store.objects.memory import DictionaryClient, MemoryRoot

    return MemoryRoot(DictionaryClient())


@functools.cache
def _buckets() -> ObjectRoot:
    from treering._store.objects.connect import connect, frozen, grace_of
    from treering._store.objects.store import ObjectRoot

    return ObjectRoot(connect, grace_of, frozen)


@functools.cache
def _web() -> ObjectRoot:
    from treering._store.objects.https import WebRoot

    return WebRoot()


def find_at(path: str | os.PathLike[str], *, follow: bool = True) -> Entry | None:
    """Return what is at a path; None for nothing, and where there can be nothing.

    Raises:
        StoreError: the store refuses to say.
    """
    place = located(path)
    if isinstance(place, UrlPath) and (buckets := _buckets_of(place)) is not None:
        return buckets.find(place)
    try:
        return entry_of(place.name, os.stat(place, follow_symlinks=follow))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise StoreError.of(error, place, "read") from error


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


def names_at(path: str | os.PathLike[str], most: int | None = None) -> list[str]:
    """Return the first ``most`` names in a place, or all; none where it cannot be read."""
    place = located(path)
    with contextlib.suppress(OSError):
        if isinstance(place, UrlPath):
            return list(itertools.islice(store_at(place).names(), most))
        with os.scandir(place) as entries:
            return [entry.name for entry in itertools.islice(entries, most)]
    return []


def places_at(path: str | os.PathLike[str], most: int | None = None) -> list[str]:
    """Return the places among the first ``most`` names in a place, or in all of it; a link to one is none."""
    place = located(path)
    with contextlib.suppress(OSError):
        if isinstance(place, UrlPath):
            return store_at(place).places()[:most]
        with os.scandir(place) as entries:
            return [entry.name for entry in itertools.islice(entries, most) if _is_folder(entry)]
    return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Tell whether a folder is at a path, or a link to one.

    Raises:
        StoreError: the store refuses to say.

    Example:
        >>> import tempfile
        >>> is_folder(tempfile.mkdtemp()), is_folder("not-there")
        (True, False)
    """
    found = find_at(path)
    return found is not None and found.kind is Kind.PLACE


def is_seen(path: str | os.PathLike[str]) -> bool:
    """Tell whether anything is known to be at a path."""
    try:
        return find_at(path, follow=False) is not None
    except StoreError:
        return False


def is_taken(path: str | os.PathLike[str]) -> bool:
    """Tell whether a file that is written at a path is known to replace anything; some may write and not look.

    Raises:
        StoreError: a bucket does not answer, so what would be replaced is not known.
    """
    if (buckets := _buckets_of(path)) is None:
        return is_seen(path)
    try:
        return buckets.is_taken(located(path))
    except PermissionDeniedError:
        return False


def store_at(path: str | os.PathLike[str]) -> Store:
    """Return the store at a path, which is not opened yet."""
    place = located(path)
    buckets = _buckets_of(place) if isinstance(place, UrlPath) else None
    return PosixStore(place) if buckets is None else buckets.place(place)


def opened_store(path: str | os.PathLike[str], *, quick: bool = False) -> Store:
    """Return the store at a path, open; ``quick`` for those who open it again and again.

    Raises:
        OSError: nothing is there, or it cannot be opened.
    """
    store = store_at(path)
    store.open(quick=quick)
    return store


def open_file(path: str | os.PathLike[str]) -> Reader:
    """Open a single file.

    Raises:
        NotFoundError: nothing is there.
        StoreError: it is a folder or no file at all, or the store refuses.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "a.bin")
        >>> _ = path.write_bytes(b"treering")
        >>> with open_file(path) as file:
        ...     file.size, file.read(4, 4)
        (8, b'ring')
    """
    place = located(path)
    buckets = _buckets_of(place) if isinstance(place, UrlPath) else None
    return LocalFile(place) if buckets is None else buckets.open_file(place)


def needs_nonce(path: str | os.PathLike[str]) -> bool:
    """Tell whether a single file at a path has to have other bytes than every earlier one.

    Example:
        >>> needs_nonce("runs/a.msgpack"), needs_nonce("s3://bucket/a.msgpack")
        (False, True)
    """
    return (buckets := _buckets_of(path)) is not None and buckets.needs_nonce


def write_file(
    path: str | os.PathLike[str], buffers: Iterable[Buffer], size: int, *, new: bool = False, unique: bool = False
) -> None:
    """Make a single file, or, unless it is ``new``, replace it as a whole, durably; folders above are made.

    ``unique`` says that no other save has these bytes; else, where such a file is not safe, a warning says so.

    Raises:
        ExistsError: it had to be new, and something is there, or came there meanwhile.
        StoreError: the store refused, or the buffers hold another number of bytes.
    """
    if (buckets := _buckets_of(path)) is None:
        replace_file(located(path), buffers, size, new=new)
    else:
        buckets.write_file(located(path), buffers, size, new=new, unique=unique)


def write_stream(file: BinaryIO, buffers: Iterable[Buffer]) -> None:
    """Write ``buffers`` at the position of an open binary file, flush it, and make it durable if it is a real file.

    Not all or nothing: what was written before an error stays in the caller's file.

    Args:
        file: an object with ``write``; ``flush`` and ``fileno`` are used where there are any.
        buffers: C-contiguous buffers of any item type.

    Raises:
        UnsupportedError: the file takes text.
        StoreError: the file refused the bytes, or took only a part of them and blocks.

    Example:
        >>> import io
        >>> file = io.BytesIO()
        >>> write_stream(file, [b"tree", b"ring"])
        >>> file.getvalue()
        b'treering'
    """
    shown = name_of(file)
    given: object = file
    if isinstance(given, io.TextIOBase):
        raise UnsupportedError(f"{shown!r} is open for text", hint="open it in binary mode, 'wb'")
    try:
        for piece in pieces(buffers):
            _write_to(file, piece)
        if hasattr(file, "flush"):
            file.flush()
        _sync_if_real(file)
    except TreeringError:
        raise
    except TypeError as error:
        raise UnsupportedError(f"{shown!r} accepts no bytes: {error}", hint="open it in binary mode, 'wb'") from error
    except OSError as error:
        raise StoreError.of(error, shown, "write") from error


def _write_to(file: BinaryIO, piece: memoryview) -> None:
    while piece:
        written: int | None = file.write(piece)
        if written is None and not isinstance(file, io.IOBase):
            return  # an object of the caller's that does not count what it took
        if not written:
            raise BlockingIOError("the file accepts no more bytes now")
        piece = piece[written:]


def _sync_if_real(file: BinaryIO) -> None:
    try:
        descriptor: object = file.fileno()
    except (AttributeError, OSError):  # in memory, or a thing of the caller's own
        return
    if isinstance(descriptor, int) and stat.S_ISREG(os.fstat(descriptor).st_mode):
        descriptors.sync(descriptor)


def name_of(file: BinaryIO) -> str:
    """Return what an open file is called, or its class."""
    name: object = None
    with contextlib.suppress(AttributeError):
        name = file.name
    return name if isinstance(name, str) else f"<{type(file).__name__}>"


def new_folder(path: str | os.PathLike[str], suffix: str) -> contextlib.AbstractContextManager[StagedFolder]:
    """Return what makes a folder on disk for files that another library writes, as `stage_folder` does."""
    return stage_folder(located(path), suffix)


def require_space(path: str | os.PathLike[str], size: int) -> None:
    """Refuse early what cannot fit where a folder is; a bucket has no end.

    Raises:
        OSError: fewer than ``size`` bytes are free.
    """
    if is_on_disk(path):
        descriptors.require_space(os.fspath(path), size)


def link_file(source: Store, target: Store, name: str, new: str, *, shared: bool = False) -> bool:
    """Give data of one place a name in another one, as a second name or as a copy by the server.

    Args:
        source: where the data are.
        target: where they get the name.
        name: their name there.
        new: the name that they get.
        shared: whether the server of a bucket may copy them, and a file with two names becomes read-only.

    Returns:
        False where that cannot be; nothing has changed then.

    Raises:
        OSError: the system refused.
    """
    if isinstance(source, PosixStore) and isinstance(target, PosixStore):
        return target.folder.link_from(source.folder, name, new, read_only=shared)
    if not shared or isinstance(source, PosixStore) or isinstance(target, PosixStore):
        return False
    from treering._store.objects.store import copy_object

    return copy_object(source, target, name, new)


def remove_made(made: Sequence[str]) -> bool:
    """Remove folders that `Transaction.make` made, as far as they are empty; False where the last is still there."""
    if not made:
        return True
    remove_folders(made)
    return not os.path.lexists(made[-1])


def _without_end(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    require_path(path)
    return f"{path}." if isinstance(path, str) and path.endswith(("/", os.sep)) else path


def open_leaves(path: str | os.PathLike[str]) -> OpenLeaves:
    """Open a leaves directory for reading.

    Raises:
        NotFoundError: nothing is at the path, where the store can tell.
        StoreError: a file is there, or the system refuses.
    """
    place = located(path)
    if is_on_disk(place):
        from treering._store.leaves_folder.leaves_folder import LeavesFolder

        return LeavesFolder(place)
    from treering._store.unmoved_leaves import StoredLeaves

    return StoredLeaves(store_at(place), place)


def begin_leaves_save(path: Path, unfinished: Unfinished, *, attempt: str | None = None, nbytes: int = 0) -> LeavesSave:
    """Begin a save into a leaves directory; `StagedLeaves` and `LeavesAttempt` say what the arguments are.

    Raises:
        ExistsError: a checkpoint is there.
        StoreError: the system refused, or has not so much space. Nothing has changed.
    """
    if is_on_disk(path):
        from treering._store.leaves_folder.staged_leaves import StagedLeaves

        return StagedLeaves(path, unfinished, attempt=attempt, nbytes=nbytes)
    from treering._store.unmoved_leaves import LeavesAttempt

    return LeavesAttempt(store_at(path), path, attempt=attempt)


def join_leaves_save(path: Path, attempt: str, nbytes: int) -> LeafWriter:
    """Join the save that process 0 has begun, to write so many bytes of it.

    Raises:
        StoreError: the system refused, or nothing of that save is there.
    """
    if is_on_disk(path):
        from treering._store.leaves_folder.staged_leaves import JoinedLeaves

        return JoinedLeaves(path, attempt, nbytes)
    from treering._store.unmoved_leaves import JoinedAttempt

    return JoinedAttempt(store_at(path), path, attempt)
