"""What stands at the key ``tensorstore_index.json`` of a bucket: an index, which may list no branch at all."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, Final

from treering._codec.documents import decode_text, parse_json
from treering._values.leaves_names import INDEX
from treering.errors import CorruptError

# In the index a record is a string, so its quotes have a backslash in front.
_ATTEMPT: Final = re.compile(rb'attempt\\?": ?\\?"([0-9a-f]{16})')


_LARGEST_EMPTY: Final = 4096


def find_attempts(index: bytes) -> frozenset[str]:
    """Return all attempts that an index of leaves names, moved or not; in one that is damaged, all that look like one.

    Example:
        >>> sorted(find_attempts(b'{"attempt": "0123456789abcdef", "digest": "0000000000000000"}'))
        ['0123456789abcdef']
    """
    return frozenset(found.decode() for found in _ATTEMPT.findall(index))


def empty_index() -> bytes:
    """Return an index without branches, different each time: a save of an absent directory puts one there first.

    Every program that reads such an index finds no tree in it.

    Example:
        >>> is_empty(empty_index()), empty_index() == empty_index()
        (True, False)
    """
    document = {"format": "tensorstore", "version": "1.0", "prefixes": {}, "nonce": secrets.token_hex(16)}
    return json.dumps(document, indent=2).encode("ascii")


def is_empty(data: bytes) -> bool:
    """Tell whether an index lists no branch; not of one that cannot be read.

    Example:
        >>> is_empty(b'{"format": "tensorstore", "arrays": []}'), is_empty(b"")
        (False, False)
    """
    if len(data) > _LARGEST_EMPTY:  # what is large is parsed by its reader alone
        return False
    try:
        document = _parse(data)
    except CorruptError:
        return False
    return not (document.get("prefixes") or document.get("treering") or "arrays" in document)


def unindexed_attempts(data: bytes) -> frozenset[str]:
    """Return the saves that an index names and does not list yet; none of one that is damaged.

    Example:
        >>> unindexed_attempts(b'{"format": "tensorstore", "unindexed": [{"attempt": "0123456789abcdef"}]}')
        frozenset({'0123456789abcdef'})
    """
    if b'"unindexed"' not in data:  # nearly always; it may be large
        return frozenset()
    try:
        return find_attempts(json.dumps(_parse(data).get("unindexed")).encode())
    except CorruptError:
        return frozenset()


def read_attempts(data: bytes) -> tuple[str, ...]:
    """Return all attempts that an index names, behind an empty text: no attempt is the whole index's own.

    Raises:
        CorruptError: it is no index.

    Example:
        >>> read_attempts(empty_index())
        ('',)
    """
    _parse(data)
    return ("", *find_attempts(data))


def _parse(data: bytes) -> dict[str, Any]:
    document = parse_json(decode_text(data, INDEX), INDEX)
    if type(document) is not dict or document.get("format") != "tensorstore":
        raise CorruptError(f"{INDEX} is no index of leaves")
    return document
