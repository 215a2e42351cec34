"""The same tree in other bytes: msgpack has several forms of one header, and every reader takes them for the same.

A file in a bucket needs that: its version may say no more than its bytes do, and a version that came back would let a
late request be done. ``docs/design/buckets.md`` says more, ``docs/spec/msgpack.md`` names the forms.
"""

from __future__ import annotations

import math
import secrets
from typing import Final, TypeAlias

from treering._codec.msgpack.window import EXT_ARRAY, EXT_SCALAR, LONGEST_PAYLOAD
from treering._codec.msgpack.write import Block, Piece

ENOUGH: Final = 64.0
"""Bits after which the rest of a file is left as it is."""

FEWEST: Final = 32.0
"""Bits with which no two files are taken to be alike."""

_Family: TypeAlias = tuple[int, int, int, range]
"""The forms of a header: the first byte of the narrowest with a count behind it, the bytes of that count, how many such
forms there are, each with a count of twice the bytes, and the first bytes that have the count in themselves.
"""

_MAP: Final = (0xDE, 2, 2, range(0x80, 0x90))
_LIST: Final = (0xDC, 2, 2, range(0x90, 0xA0))
_STR: Final = (0xD9, 1, 3, range(0xA0, 0xC0))
_BIN: Final = (0xC4, 1, 3, range(0))
_EXT: Final = (0xC7, 1, 3, range(0xD4, 0xD9))
_UINT: Final = (0xCC, 1, 4, range(0x80))
_OTHER: Final = (0, 0, 0, range(0))
_FIXED: Final = {0xCA: 5, 0xCB: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
"""Bytes of other numbers, which have one form here."""
_MOST_GROWTH: Final = 1024


def vary(pieces: list[Piece]) -> tuple[list[Piece], bool]:
    r"""Return pieces that every reader decodes to the same tree, some headers of which have a form drawn by chance.

    Returns:
        The pieces, and whether there were so many forms that no other call returns the same ones.

    Example:
        >>> pieces, unique = vary([b"\x81", b"\xa1w", b"\xc0"])
        >>> import msgpack
        >>> msgpack.unpackb(b"".join(pieces)), unique
        ({'w': None}, False)
    """
    draw = _Draw()
    varied: list[Piece] = []
    skip = 0  # bytes of these pieces that belong to the last item
    for piece in pieces:
        if isinstance(piece, Block) or draw.bits >= ENOUGH:
            varied.append(piece)
            skip -= piece.nbytes if isinstance(piece, Block) else 0
        else:
            parts, end = _vary_items(piece, skip, draw)
            varied.append(b"".join((piece[:skip], *parts)))
            skip = end - len(piece)
    return varied, draw.bits >= FEWEST


class _Draw:
    """Draws forms of headers, and counts by how many bits."""

    def __init__(self) -> None:
        self.bits = 0.0

    def __call__(self, family: _Family, count: int, short: bytes = b"") -> bytes:
        """Return a header of a family; ``short`` is its form without a count, where it has one."""
        first, narrowest, wide, _ = family
        widths = enumerate(narrowest << number for number in range(wide))
        forms = [bytes((first + n,)) + count.to_bytes(width, "big") for n, width in widths if count < 256**width]
        forms += [short] if short else []
        self.bits += math.log2(len(forms))
        return secrets.choice(forms)


def _vary_items(data: bytes, at: int, draw: _Draw, *, in_array: bool = False) -> tuple[list[bytes], int]:
    """Return the items from ``at`` on with other headers, and where the last one ends; of an array all but its bytes.

    In arrays, readers of older versions know two forms of the shape, and two of the name of the dtype.
    """
    parts: list[bytes] = []
    while at < len(data):
        family, count, short, begin = _read_header(data, at)
        at = begin + (family is _EXT) + (count if family in (_STR, _BIN, _EXT) else 0)
        if in_array and family in (_LIST, _STR):
            family = (*family[:2], 1, family[3])
        if family is _EXT and data[begin] in (EXT_ARRAY, EXT_SCALAR) and count < LONGEST_PAYLOAD - _MOST_GROWTH:
            inner, after = _vary_items(data, begin + 2, draw, in_array=True)
            growth = sum(map(len, inner)) - (after - begin - 2)
            parts += [draw(_EXT, count + growth), data[begin : begin + 2], *inner]
            begin = after
        else:
            parts.append(draw(family, count, short))
        if in_array and family is _BIN:
            return parts, begin
        parts.append(data[begin:at])
    return parts, at


def _read_header(data: bytes, at: int) -> tuple[_Family, int, bytes, int]:
    """Return the family of a header, its count or number, its form without a count, and where it ends."""
    first = data[at]
    for family in (_UINT, _MAP, _LIST, _STR, _BIN, _EXT):
        code, narrowest, wide, shorts = family
        if first in shorts:
            number = first - shorts.start
            return family, 1 << number if family is _EXT else number, data[at : at + 1], at + 1
        if code <= first < code + wide:
            end = at + 1 + (narrowest << first - code)
            return family, int.from_bytes(data[at + 1 : end], "big"), b"", end
    end = at + _FIXED.get(first, 1)
    return _OTHER, 0, data[at:end], end
