"""Bytes that are wanted of files -> what is read with one call: neighbours, and those with little between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar


class Piece(Protocol):
    """Bytes of a file that are read together."""

    @property
    def file(self) -> int:
        """Number of the file."""

    @property
    def offset(self) -> int:
        """Where they begin in it."""

    @property
    def nbytes(self) -> int:
        """How many they are."""


P = TypeVar("P", bound=Piece)


def group_near(pieces: Iterable[P], *, gap: int, most: int) -> Iterator[list[P]]:
    """Yield groups of pieces that are read together, ascending; pieces that overlap are in different groups.

    Args:
        pieces: in any order.
        gap: so many bytes that nobody wants may lie between two pieces of a group.
        most: how many bytes a group covers, unless one piece alone has more.

    Example:
        >>> from collections import namedtuple
        >>> Wanted = namedtuple("Wanted", "file offset nbytes")
        >>> wanted = [Wanted(0, 40, 2), Wanted(0, 0, 8), Wanted(0, 9, 8), Wanted(1, 17, 1)]
        >>> [[piece.offset for piece in group] for group in group_near(wanted, gap=4, most=32)]
        [[0, 9], [40], [17]]
    """
    group: list[P] = []
    file = start = stop = 0
    for piece in sorted(pieces, key=lambda piece: (piece.file, piece.offset)):
        end = piece.offset + piece.nbytes
        near = piece.file == file and stop <= piece.offset <= stop + gap
        if group and near and end - start <= most:
            group.append(piece)
        else:
            if group:
                yield group
            group, file, start = [piece], piece.file, piece.offset
        stop = end
    if group:
        yield group
