"""What is at the key of a checkpoint or of a leaves directory: an index, a tombstone, or an index of nothing.

A bucket has tombstones at ``treering.json``, which say that no checkpoint is there: a name that went away could come
back with the same content and version, a document with something random in it does not. ``docs/design/buckets.md`` says
what they are for, ``docs/spec/checkpoint.md`` what is in them. At ``tensorstore_index.json`` an index without branches
does the same. Only the members that do not grow with the tree are looked at here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from treering._codec.documents import (
    SignedForm,
    check_name,
    check_texts,
    decode_text,
    json_text,
    member,
    parse_json,
    show,
)
from treering._values.checkpoint_names import ATTEMPT, INDEX, data_of, is_data
from treering._values.human import pluralize
from treering._values.leaves_names import INDEX as LEAVES_INDEX
from treering.errors import CorruptError, FormatError, UnsupportedError

INDEX_FORM: Final = SignedForm("treering", 1, INDEX, hint="use another copy of the checkpoint", also=(4, 5))
"""How an index is signed. Its version grows when a reader of the old one would read something wrong."""

PACKED_FORM: Final = dataclasses.replace(INDEX_FORM, version=4, also=())
"""How an index of many leaves is signed, whose columns are packed."""

GAPPED_FORM: Final = dataclasses.replace(PACKED_FORM, version=5)
"""How an index is signed whose data files hold bytes of no leaf: those of older checkpoints that share them."""

TOMBSTONE_FORM: Final = dataclasses.replace(PACKED_FORM, version=3, hint="remove it, if no checkpoint is to be there")
"""How a tombstone is signed."""

SMALL_TOMBSTONE: Final = 192
"""A tombstone that lists no data has exactly this many bytes; no index has."""

TOMBSTONE_BLOCK: Final = 1024
"""A tombstone that lists data has a multiple of this many bytes."""

HEAD_BYTES: Final = 96
"""The first line of an index, of a tombstone or of ``run.json``, with its version and its digest, is shorter."""

MOST_SUPERSEDED: Final = 1 << 16
"""No document lists more attempts than this whose data wait."""

_IS_TOMBSTONE: Final = f'{{"treering": {TOMBSTONE_FORM.version}, "digest": "'.encode()
_NONCE: Final = re.compile(r"[0-9a-f]{32}")
_FENCE: Final = re.compile(rb'(?<=,\n)"fence": "[0-9a-f]{32}",\n')
_LARGEST_TOMBSTONE: Final = 1 << 30
_LATEST: Final = 1 << 63


@dataclasses.dataclass(frozen=True, slots=True)
class Superseded:
    """Data of an attempt that were the checkpoint, or were to be, and wait for readers that began earlier."""

    attempt: str
    since: float | None
    """When they ceased to be the checkpoint, in POSIX seconds; None: when the document was put that says so."""
    files: Sequence[str]
    """Their names; none where only the attempt is remembered."""


# ---------------------------------------------------------------------------------------------------------- tombstones


def is_tombstone(head: bytes) -> bool:
    r"""Tell from its first line whether a document is a tombstone.

    Example:
        >>> is_tombstone(placeholder()[:96]), is_tombstone(b'{"treering": 1, "digest": "xxh3-128:')
        (True, False)
    """
    return head.startswith(_IS_TOMBSTONE)


def is_tombstone_size(size: int) -> bool:
    """Tell whether a tombstone can have so many bytes.

    Example:
        >>> is_tombstone_size(192), is_tombstone_size(2048), is_tombstone_size(2000)
        (True, True, False)
    """
    return size == SMALL_TOMBSTONE or (size > 0 and size % TOMBSTONE_BLOCK == 0)


def placeholder() -> bytes:
    """Return a tombstone that lists nothing; each one is different.

    Example:
        >>> len(placeholder()), placeholder() == placeholder()
        (192, False)
    """
    return encode_tombstone([])


def encode_tombstone(superseded: Iterable[Superseded]) -> bytes:
    """Return a new tombstone with this list.

    Example:
        >>> wait = Superseded("0123456789abcdef", 7.5, ["data-0123456789abcdef-00000-of-00001.safetensors"])
        >>> data = encode_tombstone([wait])
        >>> len(data), superseded_in(data) == [wait]
        (1024, True)
    """
    listed = list(superseded)
    lines = f'"nonce": "{os.urandom(16).hex()}",\n"superseded": {json_text(encode_waiting(listed))}}}'.encode("ascii")
    size = len(TOMBSTONE_FORM.sign(lines + b"\n"))
    if size > SMALL_TOMBSTONE or any(waiting.files for waiting in listed):
        padding = -size % TOMBSTONE_BLOCK
    else:
        padding = SMALL_TOMBSTONE - size
    return TOMBSTONE_FORM.sign(lines + b" " * padding + b"\n")


def tombstone_of(data: bytes, modified: float) -> bytes:
    """Return the tombstone to put in the place of an index or tombstone: what it lists is `superseded_by`.

    Args:
        data: what is there; where it is damaged or of a newer version, nothing is listed.
        modified: when it was put there, in POSIX seconds by the clock of the store.

    Example:
        >>> wait = Superseded("0123456789abcdef", None, ["data-0123456789abcdef-00000-of-00001.safetensors"])
        >>> [found.since for found in superseded_in(tombstone_of(encode_tombstone([wait]), 12.0))]
        [12.0]
    """
    try:
        return encode_tombstone(superseded_by(data, modified))
    except (CorruptError, FormatError, UnsupportedError):
        return placeholder()


# ------------------------------------------------------------------------------------------------------------- reading


def attempts_in(data: bytes) -> tuple[str, ...]:
    """Return the attempts that a document at the key knows to have committed: its own first, "" for a tombstone.

    Raises:
        CorruptError: it is damaged, or contradicts itself.
        FormatError: a newer version wrote it.
        UnsupportedError: there is something in it that this version does not know.

    Example:
        >>> attempts_in(placeholder())
        ('',)
    """
    members = _read_members(data)
    waiting = [found.attempt for found in decode_waiting(members)]
    if "files" not in members:
        return ("", *waiting)
    replaced = check_texts(member(members, "replaces", list, INDEX), "the list of replaced files")
    more = (name.split("-")[1] for name in replaced if is_data(name))
    return tuple(dict.fromkeys([_own_attempt(members), *waiting, *more]))


def superseded_in(data: bytes) -> list[Superseded]:
    """Return the data that wait, as a document at the key lists them.

    Raises:
        CorruptError, FormatError, UnsupportedError: as `attempts_in` says.

    Example:
        >>> superseded_in(placeholder())
        []
    """
    return decode_waiting(_read_members(data))


def superseded_by(data: bytes, modified: float) -> list[Superseded]:
    """Return what the document that takes the place of ``data`` has to list: what waits, and its own attempt.

    Args:
        data: an index or a tombstone.
        modified: when it was put there, in POSIX seconds by the clock of the store.

    Raises:
        CorruptError, FormatError, UnsupportedError: as `attempts_in` says.
    """
    members = _read_members(data)
    waiting = [
        found if found.since is not None else dataclasses.replace(found, since=modified)
        for found in decode_waiting(members)
    ]
    if "files" not in members:
        return waiting
    own, listed = _own_attempt(members), {name for found in waiting for name in found.files}
    files = [member(file, "name", str, INDEX) for file in member(members, "files", list, INDEX)]
    # What it says it replaced and lists no more was to be removed at its commit, or was replaced by a store without
    # a grace: where such files are still there, they go with the others.
    old: dict[str, list[str]] = {}
    for name in (*files, *check_texts(member(members, "replaces", list, INDEX), "the list of replaced files")):
        if is_data(name) and name not in listed and not data_of(own, [name]):
            old.setdefault(name.split("-")[1], []).append(name)
    others = [found for found in waiting if found.attempt not in old and found.attempt != own]
    more = {found.attempt: found for found in waiting if found.attempt in old}
    for attempt, names in old.items():
        found = more.get(attempt, Superseded(attempt, modified, ()))
        others.append(dataclasses.replace(found, files=[*found.files, *names]))
    return [Superseded(own, None, data_of(own, files)), *others]


def index_members(data: bytes) -> dict[str, Any]:
    """Return the members of an index; those that grow with its tree are not looked at.

    Raises:
        CorruptError, FormatError, UnsupportedError: as `attempts_in` says.
    """
    return INDEX_FORM.read(data, _check_index)


def _read_members(data: bytes) -> dict[str, Any]:
    if not is_tombstone(data):
        return index_members(data)
    if len(data) > _LARGEST_TOMBSTONE or not is_tombstone_size(len(data)):
        raise CorruptError(f"{INDEX} is damaged: no tombstone has {pluralize(len(data), 'bytes')}")
    return TOMBSTONE_FORM.read(data, _check_tombstone)


def _check_index(document: Any) -> dict[str, Any]:
    _own_attempt(document)
    member(document, "files", list, INDEX)
    return dict(document)


def _check_tombstone(document: Any) -> dict[str, Any]:
    check_name(_NONCE, member(document, "nonce", str, "the tombstone"), "the nonce")
    member(document, "superseded", list, "the tombstone")
    if "files" in document:
        raise CorruptError("it lists data files of its own")
    return dict(document)


def _own_attempt(members: dict[str, Any]) -> str:
    return check_name(ATTEMPT, member(members, "attempt", str, INDEX), "the attempt")


# --------------------------------------------------------------------------------------------------- the list of data


def encode_waiting(superseded: Iterable[Superseded]) -> list[dict[str, Any]]:
    """Return the member ``superseded`` of a document."""
    return [{"attempt": one.attempt, "since": one.since, "files": list(one.files)} for one in superseded]


def decode_waiting(document: dict[str, Any]) -> list[Superseded]:
    """Return what the member ``superseded`` of a parsed document says; it is optional.

    Raises:
        CorruptError: it is no such list: a file is not one of its attempt, an attempt is there twice, a time is none.

    Example:
        >>> decode_waiting({"superseded": [{"attempt": "0123456789abcdef", "since": None, "files": ["config.json"]}]})
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: the list of superseded data has files that are none of attempt 0123456789abcdef
    """
    if "superseded" not in document:
        return []
    what = "the list of superseded data"
    nodes = member(document, "superseded", list, INDEX)
    if len(nodes) > MOST_SUPERSEDED:
        raise CorruptError(f"{what} has {pluralize(len(nodes), 'attempts')}, at most {MOST_SUPERSEDED} are allowed")
    found = [_decode_one(node, what) for node in nodes]
    if len({one.attempt for one in found}) != len(found):
        raise CorruptError(f"{what} has an attempt twice")
    return found


def _decode_one(node: Any, what: str) -> Superseded:
    attempt = check_name(ATTEMPT, member(node, "attempt", str, what), "an attempt")
    files = check_texts(member(node, "files", list, what), what)
    if len(data_of(attempt, files)) != len(files) or len(set(files)) != len(files):
        raise CorruptError(f"{what} has files that are none of attempt {attempt}")
    if (since := node.get("since", "")) is None:
        return Superseded(attempt, None, files)
    if type(since) not in (int, float) or not 0 <= since < _LATEST:
        raise CorruptError(f"{what} has the time {show(since)}")
    return Superseded(attempt, float(since), files)


# --------------------------------------------------------------------------------------------------------------- fence


def fenced(data: bytes) -> bytes:
    """Return a document that says the same and is another: no attempt on this one can be committed over that one.

    Raises:
        CorruptError, FormatError, UnsupportedError: as `attempts_in` says: nothing of that kind is fenced.

    Example:
        >>> data = placeholder()
        >>> fenced(data) == data, superseded_in(fenced(data)) == superseded_in(data)
        (False, True)
    """
    if is_tombstone(data):
        return encode_tombstone(superseded_in(data))
    document = index_members(data)
    first, _, lines = data.partition(b"\n")
    old = _FENCE.match(data, len(first) + 1)
    if ("fence" in document) != (old is not None):
        raise UnsupportedError(f"{INDEX} has a member 'fence' that another writer put there")
    rest = lines if old is None else data[old.end() :]
    form = dataclasses.replace(INDEX_FORM, version=document["treering"])
    return form.sign(f'"fence": "{os.urandom(16).hex()}",\n'.encode() + rest)


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
    document = {"format": "tensorstore", "version": "1.0", "prefixes": {}, "nonce": os.urandom(16).hex()}
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
    document = parse_json(decode_text(data, LEAVES_INDEX), LEAVES_INDEX)
    if type(document) is not dict or document.get("format") != "tensorstore":
        raise CorruptError(f"{LEAVES_INDEX} is no index of leaves")
    return document
