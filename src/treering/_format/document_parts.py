"""Pieces that our documents share: columns of text, objects of people's own, the table of checksums."""

from __future__ import annotations

import re
import sys
from array import array
from typing import Any, Final

from treering._codec.documents import check_json, member
from treering._format.leaf_values import from_base64, to_base64
from treering._values.checksums import packed
from treering._values.human import counted
from treering.errors import Corrupt, Format, Unsupported

_CHECKSUM: Final = "xxh3-64"


def texts(nodes: list[Any], what: str) -> list[str]:
    """Return a list that has to hold nothing but text.

    Raises:
        Corrupt: something else is in it.
    """
    if not set(map(type, nodes)) <= {str}:
        raise Corrupt(f"{what} holds something else than text")
    return nodes


def matching(pattern: re.Pattern[str], text: str, what: str) -> str:
    """Return a name that has to match a pattern.

    Raises:
        Corrupt: it does not.

    Example:
        >>> matching(re.compile("[a-f]+"), "fade", "the attempt")
        'fade'
    """
    if not pattern.fullmatch(text):
        raise Corrupt(f"{what} is called {text[:100]!r}, which no writer would")
    return text


def free_json(document: dict[str, Any], name: str, what: str) -> dict[str, Any]:
    """Return a member that is an object of people's own, no deeper than a walk over it can go.

    Raises:
        Corrupt: it is no object, or deeper.
    """
    found = member(document, name, dict, what)
    try:
        check_json(found, name)
    except Unsupported as error:
        raise Corrupt(error.message) from None
    return found


def encoded_checksums(checksums: array[int]) -> dict[str, str]:
    """Return the table of checksums as JSON.

    Example:
        >>> encoded_checksums(array("Q", [1]))
        {'algorithm': 'xxh3-64', 'table': 'AQAAAAAAAAA='}
    """
    return {"algorithm": _CHECKSUM, "table": to_base64(packed(checksums))}


def decoded_checksums(node: Any) -> array[int]:
    """Return the table that `encoded_checksums` wrote.

    Raises:
        Corrupt: it is no table of numbers of 8 bytes.
        Format: it is of an algorithm that this version does not know.
    """
    what = "the table of checksums"
    algorithm = member(node, "algorithm", str, what)
    if algorithm != _CHECKSUM:
        raise Format(f"{what} is of the unknown algorithm {algorithm[:60]!r}", hint="use a newer treering")
    table = from_base64(member(node, "table", str, what), what)
    if len(table) % 8:
        raise Corrupt(f"{what} has {counted(len(table), 'bytes')}, not 8 for each")
    found = array("Q", table)
    if sys.byteorder == "big":
        found.byteswap()
    return found
