"""Which bytes of files are read into arrays, seen at the calls of the system."""

from __future__ import annotations

import os
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
