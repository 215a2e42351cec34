"""Text from files made safe to print, and JSON in ASCII for programs."""

from __future__ import annotations

import dataclasses
import json
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from treering._printable import printable

_WIDE = frozenset("WF")
_UNSEEN_MARKS = frozenset(("Mn", "Me"))


def visible(text: str, limit: int = 200, ellipsis: str = "…") -> str:
    r"""Escape whatever does not show as itself, and leave out the middle beyond ``limit`` characters.

    See `printable`; a backslash comes out as ``\\``, so that two texts never look the same.

    Example:
        >>> print(visible("red\x1b[31m, \u202eright to left"))
        red\x1b[31m, \u202eright to left
        >>> print(visible("a" * 50, limit=9))
        aaaa…aaaa
    """
    # Cut before escaping, so that a key of some megabytes costs no more than a short one.
    return printable(cut(text, limit, ellipsis).replace("\\", "\\\\"))


def cut(text: str, limit: int, ellipsis: str = "…") -> str:
    """Leave out the middle of a text longer than ``limit`` characters.

    Example:
        >>> cut("params/decoder/kernel", 11)
        'param…ernel'
    """
    if len(text) <= limit:
        return text
    kept = max(limit - len(ellipsis), 2)
    return f"{text[: (kept + 1) // 2]}{ellipsis}{text[len(text) - kept // 2 :]}"


def cell_width(text: str) -> int:
    """Count the columns that a text takes on a terminal: wide characters take two, combining marks none.

    Example:
        >>> cell_width("kernel"), cell_width("重み"), cell_width("e\u0301")
        (6, 4, 1)
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.category(each) in _UNSEEN_MARKS else 2 if unicodedata.east_asian_width(each) in _WIDE else 1
        for each in text
    )


def fit_width(text: str, width: int, ellipsis: str = "…") -> str:
    """Leave out the middle of a text that takes more than ``width`` columns; at least two columns of it stay.

    Example:
        >>> fit_width("decoder", 5), fit_width("重み重み重み", 8)
        ('de…er', '重み…み')
    """
    if cell_width(text) <= width:
        return text
    room = max(width - len(ellipsis), 2)
    head = _cells_long(text, (room + 1) // 2)
    tail = _cells_long(text[::-1], room // 2)
    return f"{text[:head]}{ellipsis}{text[len(text) - tail :]}"


def _cells_long(text: str, width: int) -> int:
    """Return how many of the first characters take up to ``width`` columns together."""
    for count, each in enumerate(text):
        width -= cell_width(each)
        if width < 0:
            return count
    return len(text)


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Fill a text with spaces up to ``width`` columns, on its right side or, with ``right``, on its left.

    Example:
        >>> pad("ab", 4), pad("ab", 4, right=True)
        ('ab  ', '  ab')
    """
    spaces = " " * (width - cell_width(text))
    return spaces + text if right else text + spaces


def align(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), widest: Sequence[int] = ()
) -> Iterator[list[str]]:
    """Pad the cells of rows into columns; the last column is padded only if it is among those to the right.

    Args:
        rows: the cells, as many in each row.
        right: the columns whose cells are padded on their left.
        widest: how wide the first columns are at most; a longer cell moves the rest of its row.

    Example:
        >>> list(align([("a", "10", "x"), ("bcd", "5", "yz")], right=[1]))
        [['a  ', '10', 'x'], ['bcd', ' 5', 'yz']]
    """
    widths = [max(map(cell_width, column)) for column in zip(*rows, strict=True)]
    widths[: len(widest)] = map(min, widths, widest)
    if widths and len(widths) - 1 not in right:
        widths[-1] = 0
    sides = [place in right for place in range(len(widths))]
    for row in rows:
        yield [pad(cell, width, right=side) for cell, width, side in zip(row, widths, sides, strict=True)]


Json = Mapping[str, object]
_WITHOUT_JSON = {"NaN": "nan", "Infinity": "inf", "-Infinity": "-inf"}


def json_document(head: Mapping[str, object], **lists: Iterable[object]) -> Iterator[str]:
    """Write the lines of one JSON object in ASCII: its first members, then its lists with one entry a line.

    Example:
        >>> for line in json_document({"schema": "x/1"}, steps=[{"step": 1}, {"step": 2}]):
        ...     print(line)
        {"schema": "x/1",
         "steps": [
          {"step": 1},
          {"step": 2}
         ]}
    """
    yield json_text(head)[:-1] + ","
    for number, (name, entries) in enumerate(lists.items(), 1):
        yield f' "{name}": ['
        waiting = None
        for entry in entries:
            if waiting is not None:
                yield f"  {waiting},"
            waiting = json_text(entry)
        if waiting is not None:
            yield f"  {waiting}"
        yield " ]," if number < len(lists) else " ]}"


def json_text(value: object) -> str:
    """Write an object as one line of ASCII; a dataclass as its fields, and a number that JSON lacks as text.

    Example:
        >>> json_text({"loss": float("nan")})
        '{"loss": "nan"}'
    """
    try:
        text = json.dumps(value, allow_nan=False, default=dataclasses.asdict)
    except ValueError:
        plain = json.loads(json.dumps(value, default=dataclasses.asdict), parse_constant=_WITHOUT_JSON.__getitem__)
        text = json.dumps(plain)
    # DEL is the one control character that JSON leaves as it is.
    return text.replace("\x7f", "\\u007f")


def members_of(record: object, *names: str) -> dict[str, Any]:
    """Give attributes of a record as members of an object.

    Example:
        >>> members_of(7, "real", "imag")
        {'real': 7, 'imag': 0}
    """
    return {name: getattr(record, name) for name in names}
