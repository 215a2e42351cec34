"""How many bytes the saves in flight may hold on to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from treering.errors import Unsupported

_VARIABLE: Final = "TREERING_ASYNC_BYTES"
_UNKNOWN: Final = 4 << 30


def async_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Return the limit: ``TREERING_ASYNC_BYTES``, else half of the machine's memory.

    Raises:
        Unsupported: it is no number of bytes.

    Example:
        >>> async_bytes({"TREERING_ASYNC_BYTES": "1000000"}), async_bytes({}) > 0
        (1000000, True)
    """
    text = environment.get(_VARIABLE)
    if text:
        if not (text.isascii() and text.isdigit()):
            raise Unsupported(f"{_VARIABLE} is {text!r:.100}, it has to be a number of bytes")
        return int(text)
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows, or a system without that question
        return _UNKNOWN
