"""The few members of ``treering.json`` that do not grow with the tree, read without parsing those that do.

The index of ten thousand leaves is a MiB of JSON. Its digest covers all of it and costs little; once that is right,
each member stands on the line that its writer gave it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

from treering._codec.documents import member, parsed
from treering._format.document import INDEX_NAME, VERSION, parse_index
from treering._format.document_parts import free_json, matching, texts
from treering._format.signed import SignedForm
from treering.errors import Corrupt

_FORM: Final = SignedForm(
    member="treering", version=VERSION, name=INDEX_NAME, hint="use another copy of the checkpoint"
)
_FIRST_LINE: Final = re.compile(rb'\{"treering": [1-9][0-9]{0,8}, "digest": "(xxh3-128:[0-9a-f]{32})",\n')
# A member on a line of its own; the last one ends with the document.
_LINE: Final = re.compile(rb'^"(attempt|files|replaces|metadata)": (.*?)(?:,|\}\s*\Z)$', re.MULTILINE)
_MEMBERS: Final = 4
_BEGINNING: Final = b'{"treering": %d, ' % VERSION
_ATTEMPT: Final = re.compile(r"[0-9a-f]{16}")
_LIMIT: Final = 1 << 63


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Glance:
    """What an index says of its checkpoint as a whole."""

    attempt: str
    digest: str
    """The digest in its first line: another index has another."""
    names: tuple[str, ...]
    """The data files, and those that they superseded."""
    nbytes: int
    """How many bytes the data files and the index have."""
    metadata: Mapping[str, Any]


def digest_in(head: bytes) -> str | None:
    r"""Return the digest that stands in the first line of an index; None when that is no first line.

    Example:
        >>> digest_in(b'{"treering": 1, "digest": "xxh3-128:0123456789abcdef0123456789abcdef",\n"attempt": ')
        'xxh3-128:0123456789abcdef0123456789abcdef'
    """
    found = _FIRST_LINE.match(head)
    return found[1].decode() if found else None


def glance(data: bytes) -> Glance:
    """Return what an index says of its checkpoint as a whole; its digest is checked, its leaves are not looked at.

    Raises:
        Corrupt: it is damaged.
        Format: a newer version wrote it.
        Unsupported: it has a dtype that this version does not know.
    """
    digest = digest_in(data)
    if digest is not None and data.startswith(_BEGINNING) and _FORM.is_whole(data):
        members = _members(data)
        if members is not None:
            return _glance(members, digest, len(data))
    # Damaged, of another version, or laid out by another writer: who reads all of it says which.
    index = parse_index(data)
    sizes = sum(file.nbytes for file in index.files)
    names = (*(file.name for file in index.files), *index.replaces)
    return Glance(
        attempt=index.attempt, digest=digest or "", names=names, nbytes=sizes + len(data), metadata=index.metadata
    )


def names_in(data: bytes) -> tuple[str, ...]:
    """Return the data files that an index mentions: its own, and those that it superseded.

    Raises:
        Corrupt, Format, Unsupported: as `glance` says.
    """
    return glance(data).names


def _members(data: bytes) -> dict[str, Any] | None:
    """Return the members that stand on lines of their own; None unless each of them does, once."""
    lines = _LINE.findall(data)
    if len(lines) != _MEMBERS or len({name for name, _ in lines}) != _MEMBERS:
        return None
    try:
        return {name.decode(): parsed(text.decode("ascii"), INDEX_NAME) for name, text in lines}
    except (Corrupt, UnicodeDecodeError):
        return None


def _glance(members: dict[str, Any], digest: str, size: int) -> Glance:
    files = member(members, "files", list, INDEX_NAME)
    names = texts([member(file, "name", str, INDEX_NAME) for file in files], "the list of data files")
    replaced = texts(member(members, "replaces", list, INDEX_NAME), "the list of replaced files")
    sizes = [member(file, "nbytes", int, INDEX_NAME) for file in files]
    attempt = matching(_ATTEMPT, member(members, "attempt", str, INDEX_NAME), "the attempt")
    if min(sizes, default=0) < 0 or sum(sizes) >= _LIMIT:
        raise Corrupt(f"{INDEX_NAME} has data files of sizes that no file has")
    return Glance(
        attempt=attempt,
        digest=digest,
        names=(*names, *replaced),
        nbytes=sum(sizes) + size,
        metadata=free_json(members, "metadata", INDEX_NAME),
    )
