"""Which bytes of files are read into arrays, seen at the calls of the system."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def spans_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that fills with offset and count of each read into memory of the caller, from now on."""
    spans: list[tuple[int, int]] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        count = preadv(descriptor, buffers, offset, *flags)
        spans.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    return spans


_CHUNK = re.compile(r"\d+(\.\d+)*")


def act_before_reading(monkeypatch: pytest.MonkeyPatch, actions: Sequence[Callable[[], object]]) -> None:
    """Do one of these things each time that a reader of a leaves directory has an index and turns to the chunks."""
    waiting = list(actions)
    has_index = acting = False
    opened = os.open

    def watched(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
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
        return opened(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", watched)
