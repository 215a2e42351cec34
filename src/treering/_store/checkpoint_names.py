"""The names that treering gives to files in a checkpoint's folder. No other file there is ever removed."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["INDEX", "attempt_of_journal", "data_of", "is_data", "journal_of"]

INDEX = "treering.json"
"""The index; its being there is the commit."""

_JOURNAL = re.compile(r"\.treering\.json\.([0-9a-f]{16})\.treering-tmp")
_DATA = re.compile(r"data-([0-9a-f]{16})-\d{5,}-of-\d{5,}\.safetensors")


def journal_of(attempt: str) -> str:
    """Return the name of the journal of an attempt: its index before it is the index.

    Example:
        >>> journal_of("0123456789abcdef")
        '.treering.json.0123456789abcdef.treering-tmp'
    """
    return f".{INDEX}.{attempt}.treering-tmp"


def attempt_of_journal(name: str) -> str | None:
    """Return the attempt whose journal has this name; None for any other name.

    Example:
        >>> attempt_of_journal(".treering.json.0123456789abcdef.treering-tmp")
        '0123456789abcdef'
    """
    found = _JOURNAL.fullmatch(name)
    return found[1] if found else None


def is_data(name: str) -> bool:
    """Whether a data file of a checkpoint could have this name.

    Example:
        >>> is_data("data-0123456789abcdef-00000-of-00001.safetensors"), is_data("model.safetensors")
        (True, False)
    """
    return _DATA.fullmatch(name) is not None


def data_of(attempt: str, names: Iterable[str]) -> list[str]:
    """Return the names that are data files of an attempt.

    Example:
        >>> data_of("0123456789abcdef", ["data-0123456789abcdef-00000-of-00001.safetensors", "config.json"])
        ['data-0123456789abcdef-00000-of-00001.safetensors']
    """
    return [name for name in names if (found := _DATA.fullmatch(name)) and found[1] == attempt]
