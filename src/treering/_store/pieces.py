"""Many buffers, small and large, as few pieces; and writing a piece to the end."""

from __future__ import annotations

import errno
import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from treering._values.human import pluralize

Buffer: TypeAlias = bytes | bytearray | memoryview
Readable: TypeAlias = bytes | bytearray | memoryview | mmap.mmap

# Below this a system call (or a step of the ring) costs more than copying the bytes once more.
SMALL = 64 << 10
# Small buffers travel together up to about this size.
_TOGETHER = 256 << 10


class Lasting:
    """A base of those whose bytes stay what they are as long as anything refers to them."""

    __slots__ = ()


def is_lasting(owner: object) -> bool:
    """Tell whether a buffer's object stays what it is: `Lasting`, ``bytes``, or a read-only map of a file.

    Example:
        >>> is_lasting(b"tree"), is_lasting(bytearray(b"ring"))
        (True, False)
    """
    return isinstance(owner, bytes | Lasting) or (isinstance(owner, mmap.mmap) and memoryview(owner).readonly)


def pieces(buffers: Iterable[Buffer], size: int | None = None) -> Iterator[memoryview]:
    """Yield the same bytes in the same order, small neighbours joined, as flat views.

    Args:
        buffers: C-contiguous buffers of any item type. One of 64 KiB or more is not read again once the next one was
            asked for.
        size: how many bytes they must hold together; None when nobody knows.

    Raises:
        OSError: they hold more (at once) or fewer (at the end) than ``size`` bytes.

    Example:
        >>> [bytes(piece) for piece in pieces([b"tree", b"", memoryview(b"ring")], 8)]
        [b'treering']
    """
    waiting: list[Buffer] = []
    held = total = 0
    most = sys.maxsize if size is None else size
    for buffer in buffers:
        count = buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
        total += count
        if total > most:
            raise OSError(errno.EINVAL, f"the buffers hold more than the announced {size} bytes")
        if count < SMALL:
            waiting.append(buffer)
            held += count
            if held < _TOGETHER:
                continue
        if held:
            yield memoryview(b"".join(waiting))
        waiting.clear()
        held = 0
        if count >= SMALL:
            yield memoryview(buffer).cast("B")
        del buffer  # what made it may use its memory again
    if held:
        yield memoryview(b"".join(waiting))
    if size is not None and total != size:
        raise OSError(errno.EINVAL, f"the buffers hold {pluralize(total, 'bytes')}, {size} were announced")


def write_all(descriptor: int, piece: memoryview) -> None:
    """Write a whole piece at the descriptor's position, however often the system takes only a part."""
    while piece:
        if not (written := os.write(descriptor, piece)):
            raise OSError(errno.EIO, "the system accepts no more bytes and gives no reason")
        piece = piece[written:]
