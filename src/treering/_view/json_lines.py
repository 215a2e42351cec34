"""JSON for programs, in ASCII: one object with its lists, one entry a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Json = Mapping[str, object]


def json_document(head: Mapping[str, object], **lists: Iterable[Json]) -> Iterator[str]:
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


def json_text(value: Mapping[str, object]) -> str:
    """Write an object as one line of ASCII; a number that JSON lacks is written as text.

    Example:
        >>> json_text({"loss": float("nan")})
        '{"loss": "nan"}'
    """
    try:
        text = json.dumps(value, ensure_ascii=True, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=True, allow_nan=False)
    # DEL is the one control character that JSON leaves as it is.
    return text.replace("\x7f", "\\u007f")


def _finite(value: Any) -> Any:
    """Copy an object with text in place of the numbers that JSON lacks."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
