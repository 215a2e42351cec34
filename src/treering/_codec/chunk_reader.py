"""A chunk file as its codec reads it: the bytes that come next, never more than there are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from treering.errors import Corrupt

DAMAGED = "use another copy of the file"


class ChunkReader:
    """The bytes of one chunk file, taken from its beginning.

    Example:
        >>> import io
        >>> file = ChunkReader(io.BytesIO(b"abc").read, 3)
        >>> file.take(2), file.left
        (b'ab', 1)
        >>> file.take(2)
        Traceback (most recent call last):
        ...
        treering.errors.Corrupt: a chunk file is cut short; use another copy of the file
    """

    __slots__ = ("_read", "left")

    left: int
    """Bytes that were not taken yet."""

    def __init__(self, read: Callable[[int], bytes], nbytes: int) -> None:
        self._read = read
        self.left = nbytes

    def take(self, count: int) -> bytes:
        """Return the next ``count`` bytes. Raises ``Corrupt`` where there are fewer."""
        if count > self.left:
            raise cut_short_error()
        data = self._read(count)
        if len(data) != count:
            raise cut_short_error()
        self.left -= count
        return data

    def take_some(self, most: int) -> bytes:
        """Return the next ``most`` bytes, fewer at the end, none behind it."""
        return self.take(min(most, self.left)) if self.left else b""


def fill(target: memoryview, pieces: Iterable[bytes]) -> None:
    """Copy pieces into memory, which they must fill exactly. Raises ``Corrupt`` where they do not.

    Example:
        >>> memory = bytearray(3)
        >>> fill(memoryview(memory), [b"ab", b"", b"c"])
        >>> memory
        bytearray(b'abc')
    """
    at = 0
    for piece in pieces:
        if len(piece) > len(target) - at:
            raise wrong_size_error("more", target)
        target[at : at + len(piece)] = piece
        at += len(piece)
    if at < len(target):
        raise wrong_size_error(str(at), target)


def damaged_error(reason: object) -> Corrupt:
    """Return the error for a file that its codec cannot undo."""
    return Corrupt(f"a chunk file is damaged: {reason}", hint=DAMAGED)


def cut_short_error() -> Corrupt:
    """Return the error for a file that ends too early."""
    return Corrupt("a chunk file is cut short", hint=DAMAGED)


def overlong_error() -> Corrupt:
    """Return the error for a file that goes on behind its compressed data."""
    return Corrupt("a chunk file has extra bytes after its compressed data", hint=DAMAGED)


def wrong_size_error(found: str, target: memoryview) -> Corrupt:
    """Return the error for compressed data that holds something else than one chunk."""
    return Corrupt(f"a chunk file decompresses to {found} bytes, a chunk has {len(target)}", hint=DAMAGED)
