"""The names that treering gives to things in a leaves directory, and texts of folders as parts of a path."""

from __future__ import annotations

import os

from treering._values.checkpoint_names import ATTEMPT
from treering.errors import CorruptError

INDEX = "tensorstore_index.json"
"""The index; what it names is what was saved."""

ZARRAY = ".zarray"
"""What makes a folder an array of zarr v2."""

ATTEMPTS = ".treering"
"""The folder of all attempts."""

LEAVES = "leaves"
"""In the folder of an attempt: its files, until they are moved."""

RECORD = "record.json"
"""In the folder of an attempt: the copy of its record."""

PENDING = "pending"
"""In the folder of an attempt: an empty file, as long as no index has taken it up and one may."""

MARKER = "marker"
"""In the folder of an attempt in a bucket: which version of the index it is based on."""

NEXT_INDEX = "index"
"""In the folder of an attempt: the index before it is the index."""

_NO_PARTS = frozenset({"", ".", ".."})
_NEVER = frozenset("\0\\:" if os.name == "nt" else "\0")


def is_attempt(name: str) -> bool:
    """Whether the folder of an attempt could have this name.

    Example:
        >>> is_attempt("0123456789abcdef"), is_attempt("leaves")
        (True, False)
    """
    return ATTEMPT.fullmatch(name) is not None


def attempt_of_marker(name: str) -> str | None:
    """Return the attempt whose marker has this name; None for any other name.

    Example:
        >>> attempt_of_marker(".treering/0123456789abcdef/marker")
        '0123456789abcdef'
    """
    parts = name.split("/")
    return parts[1] if parts[::2] == [ATTEMPTS, MARKER] and is_attempt(parts[1]) else None


def attempt_folder(attempt: str) -> tuple[str, ...]:
    """Return where an attempt has its files, below the directory.

    Example:
        >>> attempt_folder("0123456789abcdef")
        ('.treering', '0123456789abcdef')
    """
    return (ATTEMPTS, attempt)


def staged_leaves(attempt: str) -> tuple[str, ...]:
    """Return where an attempt has the folders of its leaves until they are moved.

    Example:
        >>> staged_leaves("0123456789abcdef")
        ('.treering', '0123456789abcdef', 'leaves')
    """
    return (ATTEMPTS, attempt, LEAVES)


def parts_of(folder: str) -> tuple[str, ...]:
    """Return the parts of the folder of a leaf; none for the directory itself.

    Raises:
        CorruptError: it leads elsewhere, or among the staged files.

    Example:
        >>> parts_of("layer/w"), parts_of("")
        (('layer', 'w'), ())
    """
    if not folder:
        return ()
    parts = tuple(folder.split("/"))
    if not _NO_PARTS.isdisjoint(parts) or not _NEVER.isdisjoint(folder) or parts[0] == ATTEMPTS:
        raise CorruptError(f"{folder!r} is not a folder of a leaf")
    return parts
