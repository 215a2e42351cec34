"""A simulated disk that keeps only what was flushed: calls are recorded once, then the power is cut after each of them.

`Recorder` notes every name that a save makes, moves or removes, and every flush with the lines of treering that asked
for it. `states` replays such a record, if you like without the flushes of one line, and gives what a disk may hold
after a power cut. A file whose content was not flushed is empty then. Of the names that were not flushed none is
there, or all, or those of one folder up to any of them. A new name that was not flushed may be missing although
later changes of its folder are there; what happens to names that are there already stays in its order, unless the disk
is a ``loose`` one: there any single change may be the only one.
"""

import contextlib
import dataclasses
import functools
import inspect
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

import treering
from torture.faults import FILE_SYSTEM_FLUSH

SOURCES = Path(inspect.getfile(treering)).parent

Line: TypeAlias = tuple[str, int]
"""A file of treering and a line in it."""
Tree: TypeAlias = "tuple[tuple[str, Tree | bytes], ...]"
"""What a folder holds: names, with the content of files."""


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """Names that change in one step: folder, name, and what it stands for afterwards."""

    changes: tuple[tuple[int, str, int | None], ...]
    folders: frozenset[int]
    """Those folders, and one that was removed: it was empty."""
    new: bool
    """A file or folder was made."""
    client: int
    """The machine that asked. It flushes its own names alone, as on a network file system."""


@dataclasses.dataclass(frozen=True, slots=True)
class Flush:
    """A flush of one file, of one folder, or of the whole file system (None)."""

    what: int | None
    contents: dict[int, bytes]
    client: int
    lines: frozenset[Line]


@dataclasses.dataclass(frozen=True, slots=True)
class Acknowledged:
    """A save has returned."""

    version: int


Event: TypeAlias = Names | Flush | Acknowledged


class Recorder:
    """Records what happens below ``root`` from `watch` on; what is there then is on the disk."""

    def __init__(self, root: Path, *, clients: bool = False, whole: bool = True) -> None:
        """Watch a folder; ``clients``: each thread is a machine of its own; ``whole``: there is ``syncfs``."""
        self.root = root
        self.events: list[Event] = []
        self.names: dict[int, dict[str, int]] = {}
        self.before: dict[int, dict[str, int]] = {}
        self.contents: dict[int, bytes] = {}
        self._clients = clients
        self._whole = whole
        self._owners: dict[int, int] = {}
        self._held: dict[int, int] = {}  # number of a file -> a descriptor, so that the number is not given again
        self._lock = threading.RLock()
        self._real = {name: getattr(os, name) for name in ("open", "close", "stat", "fstat")}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Stand between the program and the system; nothing is flushed really."""
        self.root_number = self._hold(self.root)
        for folder, folders, files in os.walk(self.root):
            here = self.names[self._hold(folder)]
            here.update((name, self._hold(Path(folder, name))) for name in (*folders, *files))
        self.before = {number: dict(names) for number, names in self.names.items()}
        self.contents = self._read_all()
        try:
            with pytest.MonkeyPatch.context() as patch:
                for call in ("open", "mkdir", "link", "replace", "rename", "unlink", "remove", "rmdir"):
                    patch.setattr(os, call, functools.partial(self._named, call, getattr(os, call)))
                patch.setattr(os, "fsync", self._flushed)
                patch.setattr(*FILE_SYSTEM_FLUSH, self._flushed_whole)
                yield
        finally:
            for descriptor in self._held.values():
                self._real["close"](descriptor)

    def acknowledge(self, version: int) -> None:
        """Note that a save of this version has returned."""
        self.events.append(Acknowledged(version))

    def flushes(self) -> list[Flush]:
        """Return the flushes."""
        return [event for event in self.events if isinstance(event, Flush)]

    def _named(self, call: str, real: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        if call == "open" and not arguments[1] & os.O_CREAT:
            return real(*arguments, **keywords)
        with self._lock:
            places = []
            if call in {"link", "replace", "rename"}:
                places.append(self._place(arguments[0], keywords.get("src_dir_fd")))
                places.append(self._place(arguments[1], keywords.get("dst_dir_fd")))
            else:
                places.append(self._place(arguments[0], keywords.get("dir_fd")))
            emptied = {os.stat(arguments[0], dir_fd=keywords.get("dir_fd")).st_ino} if call == "rmdir" else set()
            result = real(*arguments, **keywords)
            if any(folder not in self.names for folder, _, _ in places):
                return result  # somewhere else
            *_, (folder, name, start) = places
            gone = call in {"unlink", "remove", "rmdir"}
            new = None if gone else self._hold(arguments[len(places) - 1], dir_fd=start)
            changes: tuple[tuple[int, str, int | None], ...] = ((folder, name, new),)
            if call in {"replace", "rename"}:
                changes = ((*places[0][:2], None), *changes)
            folders = frozenset(emptied.union(each for each, _, _ in changes))
            if new is not None:
                self._owners.setdefault(new, self._client())
            self.events.append(Names(changes, folders, call in {"open", "mkdir"}, self._client()))
            return result

    def _flushed(self, descriptor: int) -> None:
        with self._lock:
            about = os.fstat(descriptor)
            if about.st_ino in self._held:
                contents = {} if stat.S_ISDIR(about.st_mode) else {about.st_ino: self._content(about.st_ino)}
                self.events.append(Flush(about.st_ino, contents, self._client(), _lines()))

    def _flushed_whole(self, descriptor: int) -> bool:
        with self._lock:
            if self._whole and os.fstat(descriptor).st_ino in self._held:
                own = {number: data for number, data in self._read_all().items() if self._is_own(number)}
                self.events.append(Flush(None, own, self._client(), _lines()))
            return self._whole

    def _is_own(self, number: int) -> bool:
        return self._owners.get(number) in {None, self._client()}

    def _client(self) -> int:
        return threading.get_ident() if self._clients else 0

    def _place(self, path: Any, start: int | None) -> tuple[int, str, int | None]:
        folder, name = os.path.split(os.fspath(path))
        found = os.fstat(start) if start is not None and not folder else os.stat(folder or ".", dir_fd=start)
        return found.st_ino, name, start

    def _hold(self, path: Any, dir_fd: int | None = None) -> int:
        descriptor = self._real["open"](path, os.O_PATH | os.O_NOFOLLOW, dir_fd=dir_fd)
        about = os.fstat(descriptor)
        if about.st_ino in self._held:
            self._real["close"](descriptor)
            return about.st_ino
        self._held[about.st_ino] = descriptor
        if stat.S_ISDIR(about.st_mode):
            self.names[about.st_ino] = {}
        return about.st_ino

    def _content(self, number: int) -> bytes:
        return Path(f"/proc/self/fd/{self._held[number]}").read_bytes()

    def _read_all(self) -> dict[int, bytes]:
        return {number: self._content(number) for number in self._held if number not in self.names}


def _lines() -> frozenset[Line]:
    """Return the lines of treering that this thread is in."""
    lines: set[Line] = set()
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(SOURCES):
            lines.add((file.relative_to(SOURCES).as_posix(), frame.f_lineno))
    return frozenset(lines)


@dataclasses.dataclass
class _Disk:
    """What is on the disk, and what is not yet."""

    names: dict[int, dict[str, int]]
    contents: dict[int, bytes]
    loose: bool
    waiting: list[Names] = dataclasses.field(default_factory=list)

    def take(self, event: Names | Flush) -> None:
        if isinstance(event, Names):
            self.waiting.append(event)
            return
        self.contents.update(event.contents)
        due = [one for one in self.waiting if one.client == event.client and event.what in {None, *_folders(one)}]
        self.waiting = [one for one in self.waiting if one not in due]
        for one in due:
            _change(self.names, one)

    def trees(self, root: int, *, latest: bool = False) -> Iterator[Tree]:
        """Yield what may be found after a power cut now; ``latest``: but for what could be found a step before."""
        yield self._tree(root, self.names)
        for chosen in self._chosen(len(self.waiting) - 1 if latest else 0):
            names = {folder: dict(entries) for folder, entries in self.names.items()}
            for one in chosen:
                _change(names, one)
            yield self._tree(root, names)

    def _chosen(self, first: int) -> Iterator[list[Names]]:
        """Yield which of the changes that wait may have reached the disk."""
        for at, last in enumerate(self.waiting[first:], first):
            folders = set(last.folders)
            before: list[Names] = []
            for one in reversed(self.waiting[:at]):
                if not folders.isdisjoint(one.folders):
                    folders |= one.folders
                    before.insert(0, one)
            yield [*before, last]
            yield [*(one for one in before if not one.new), last]
            if self.loose:
                yield [last]
        yield self.waiting

    def _tree(self, number: int, names: dict[int, dict[str, int]]) -> Tree:
        return tuple(
            (name, self._tree(below, names) if below in names else self.contents.get(below, b""))
            for name, below in sorted(names[number].items())
        )


def states(
    recorder: Recorder, version: int | None, without: Callable[[frozenset[Line]], bool], *, loose: bool
) -> Iterator[tuple[Tree, int | None]]:
    """Yield each state that a power cut may leave, with the version that was acknowledged last.

    Args:
        recorder: what was done.
        version: the version that was there before.
        without: whether the flushes that come from these lines are left out.
        loose: whether the disk keeps no order of names at all.
    """
    names: dict[int, dict[str, int]] = {number: dict(recorder.before.get(number, {})) for number in recorder.names}
    disk = _Disk(names, dict(recorder.contents), loose)
    for event in recorder.events:
        if isinstance(event, Acknowledged):
            version = event.version
        elif isinstance(event, Names) or not without(event.lines):
            disk.take(event)
        trees = disk.trees(recorder.root_number, latest=isinstance(event, Names))
        yield from ((tree, version) for tree in trees)


def lay(tree: Tree, folder: Path) -> None:
    """Make those files in a new folder."""
    folder.mkdir()
    for name, what in tree:
        if isinstance(what, bytes):
            (folder / name).write_bytes(what)
        else:
            lay(what, folder / name)


def _folders(names: Names) -> set[int]:
    return {folder for folder, _, _ in names.changes}


def _change(names: dict[int, dict[str, int]], step: Names) -> None:
    for folder, name, number in step.changes:
        if number is None:
            names[folder].pop(name, None)
        else:
            names[folder][name] = number
