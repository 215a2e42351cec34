"""Where the values of a msgpack file begin and end, and where their lengths are written.

This is a walker for the attacker: it trusts the file, and gives up quietly where the file makes no sense.
"""

from __future__ import annotations

import dataclasses

__all__ = ["Token", "tokens"]

# First byte -> (bytes of the length field, bytes per counted unit or 0 for counted values, kind)
_SIZED = {
    0xC4: 1, 0xC5: 2, 0xC6: 4,  # bin
    0xC7: 1, 0xC8: 2, 0xC9: 4,  # ext
    0xD9: 1, 0xDA: 2, 0xDB: 4,  # str
    0xDC: 2, 0xDD: 4,  # array
    0xDE: 2, 0xDF: 4,  # map
}  # fmt: skip
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_EXT = {0xC7, 0xC8, 0xC9}
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_MANY = 20_000
# Ext payloads inside ext payloads, after which they are bytes.
_DEEP = 8


@dataclasses.dataclass(slots=True, kw_only=True)
class Token:
    """One value."""

    start: int
    """Where its first byte is."""
    width: int
    """Bytes of the length field behind the first byte; 0 when the length is in the first byte or fixed."""
    end: int
    """Where the value ends, children and all."""


def tokens(data: bytes) -> list[Token]:
    """Return the values of ``data`` in the order of their first bytes, those inside ext payloads too."""
    found: list[Token] = []
    _walk(data, 0, len(data), found, 0)
    return found


def _walk(data: bytes, at: int, end: int, found: list[Token], depth: int) -> None:
    open_values: list[tuple[Token, int]] = []  # with the number of children still to come
    while at < end and len(found) < _MANY:
        token = Token(start=at, width=_SIZED.get(data[at], 0), end=end)
        found.append(token)
        at, children = _step(data, at, end, found, depth)
        open_values.append((token, children))
        while open_values and not open_values[-1][1]:
            open_values.pop()[0].end = min(at, end)
            if open_values:
                parent, left = open_values[-1]
                open_values[-1] = (parent, left - 1)


def _step(data: bytes, at: int, end: int, found: list[Token], depth: int) -> tuple[int, int]:
    """Return where the head (or the whole leaf) at ``at`` ends, and how many values belong into it."""
    first = data[at]
    at += 1
    if first < 0x80 or first >= 0xE0:
        return at, 0
    if first < 0x90:
        return at, 2 * (first & 15)
    if first < 0xA0:
        return at, first & 15
    if first < 0xC0:
        return at + (first & 31), 0
    if first in _FIXED:
        return at + _FIXED[first], 0
    if first in _FIXEXT:
        return at + 1 + _FIXEXT[first], 0
    width = _SIZED.get(first, 0)
    length = int.from_bytes(data[at : at + width])
    at += width
    if first >= 0xDC:
        return at, length * (2 if first >= 0xDE else 1)
    if first in _EXT:
        at += 1
        if depth < _DEEP:  # the library's own ext types hold msgpack again
            _walk(data, at, min(at + length, end), found, depth + 1)
    return at + length, 0
