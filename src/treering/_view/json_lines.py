"""JSON for programs, in ASCII: one object with its lists, one entry a line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

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
