"""What tests see and do at the calls of the system: bytes that are read, savers that come between, calls that fail."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from tests import faults


def spans_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that fills with offset and count of each read into memory of the caller, from now on."""
    spans: list[tuple[int, int]] = []
    faults.after(monkeypatch, os, "preadv", lambda count, _, __, offset, *flags: spans.append((offset, count)))
    return spans


_CHUNK = re.compile(r"\d+(\.\d+)*")


def act_before_reading(monkeypatch: pytest.MonkeyPatch, actions: Sequence[Callable[[], object]]) -> None:
    """Do one of these things each time that a reader of a leaves directory has an index and turns to the chunks."""
    waiting = list(actions)
    has_index = acting = False

    def watched(path: Any, flags: int, *arguments: Any, **options: Any) -> None:
        nonlocal has_index, acting
        name = os.path.basename(os.fspath(path))  # noqa: PTH119 - it may be bytes
        if acting:  # an action opens files of its own
            pass
        elif name == "tensorstore_index.json":
            has_index = True
        elif has_index and waiting and _CHUNK.fullmatch(name):
            has_index, acting = False, True
            waiting.pop(0)()
            acting = False

    faults.before(monkeypatch, os, "open", watched)


def act_before_indexes(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> list[str]:
    """Return a list that fills with the folders whose indexes are opened; do something before each, which may fail."""
    folders: list[str] = []
    opened = os.open

    def watched(path: Any, flags: int, *arguments: Any, dir_fd: int | None = None) -> None:
        if os.path.basename(os.fspath(path)) == "treering.json":  # noqa: PTH119 - it may be bytes
            above = Path() if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink()
            folders.append((above / path).parent.name)
            with monkeypatch.context() as patch:  # the action may open indexes of its own
                patch.setattr(os, "open", opened)
                act()

    faults.before(monkeypatch, os, "open", watched)
    return folders


def refuse_removals(monkeypatch: pytest.MonkeyPatch, *attempts: str) -> None:
    """Let every removal of a step, or only of these attempts, fail where its index becomes a tombstone."""

    def refuse(name: Any, new: Any, **options: Any) -> None:
        name_parts = os.fspath(new).split(".")
        if name_parts[-1] == "removed" and (not attempts or name_parts[-2] in attempts):
            raise OSError(errno.EIO, "the program is gone")

    faults.before(monkeypatch, os, "replace", refuse)


class _Entries:
    """What ``os.scandir`` gives, without some names."""

    def __init__(self, entries: Any, hidden: re.Pattern[str]) -> None:
        self._entries = entries
        self._hidden = hidden

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._entries.close()

    def __iter__(self) -> Iterator[os.DirEntry[str]]:
        return (entry for entry in self._entries if not self._hidden.fullmatch(entry.name))


def hide_names(monkeypatch: pytest.MonkeyPatch, pattern: str) -> None:
    """Let folders not list such names yet, as those of a network file system do; a file that is asked for is there."""
    hidden = re.compile(pattern)
    listdir, scandir = os.listdir, os.scandir
    monkeypatch.setattr(os, "listdir", lambda *path: [name for name in listdir(*path) if not hidden.fullmatch(name)])
    monkeypatch.setattr(os, "scandir", lambda *path: _Entries(scandir(*path), hidden))


def fail_sync(monkeypatch: pytest.MonkeyPatch, start: str) -> None:
    """Let the flush of files whose names start so fail."""

    def fail(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith(start):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    faults.before(monkeypatch, os, "fsync", fail)


class CommitGate:
    """Holds every commit of a checkpoint until it is opened; or lets it fail."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.error: OSError | None = None


@pytest.fixture
def commit_gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[CommitGate]:
    """Return the gate before commits; it is opened at the end in any case, for the thread that writes is shared."""
    gate = CommitGate()

    def hold(real: Callable[..., None]) -> Callable[..., None]:
        def held(name: Any, new: Any, **options: Any) -> None:
            if Path(new).name == "treering.json":
                gate.reached.set()
                assert gate.opened.wait(60)
                if gate.error is not None:
                    raise gate.error
            real(name, new, **options)

        return held

    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, hold(getattr(os, name)))
    yield gate
    gate.opened.set()
