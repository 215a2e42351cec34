"""Writing to a binary file that the caller has opened, a real one or any object with ``write``."""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Iterable
from typing import BinaryIO

from treering._store.pieces import Buffer, pieces
from treering._store.posix import descriptors
from treering.errors import StoreError, TreeringError, UnsupportedError


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
    shown = _shown(file)
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


def _shown(file: BinaryIO) -> str:
    name: object = None
    with contextlib.suppress(AttributeError):
        name = file.name
    return name if isinstance(name, str) else f"<{type(file).__name__}>"
