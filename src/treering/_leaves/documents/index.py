"""``tensorstore_index.json``: the branches of a leaves directory, and back. ``docs/spec/leaves.md`` specifies it.

It is eformer's index with one more member, ``treering``, which holds the record of each branch that we wrote. What is
not understood stays as it is.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from treering._codec.documents import (
    check_json,
    check_name,
    decode_text,
    member,
    parse_json,
    quote,
    raising_corrupt,
    show,
)
from treering._format.index import ARRAY_KINDS
from treering._leaves.documents.record import LeavesRecord, arrays_of, parse_record
from treering._values.checkpoint_names import ATTEMPT
from treering._values.checksums import digest
from treering._values.human import pluralize
from treering._values.leaves_names import staged_leaves
from treering.errors import CorruptError, FormatError, UnsupportedError

LEAVES_INDEX: Final = "tensorstore_index.json"
"""Name of the document in a leaves directory."""

_OURS: Final = "treering"
_UNINDEXED: Final = "unindexed"
_OF_BRANCHES: Final = ("format", "version", "prefixes", "arrays", _OURS, _UNINDEXED)
_OF_ENTRY: Final = ["path", "shape", "dtype"]
_OF_NODE: Final = ("record", "moving", "stays", "superseded")
_MEMBERS_OF_ENTRY: Final = operator.itemgetter(*_OF_ENTRY)
_DAMAGED: Final = "treering.leaves.index_leaves rebuilds it from the copies under .treering"
_OTHER_LIST: Final = f"if another program saved over that tree, save it again, or use another copy; else {_DAMAGED}"
# What may not stand in a path.
_UNSOUND: Final = re.compile(r"(?:\A|/)(?:\.\.?)?(?:/|\Z)|\A\.treering(?:/|\Z)|[\0\ud800-\udfff]")
_IN_ATTEMPT: Final = re.compile(r"\A\.treering/[0-9a-f]{16}/leaves/(?!\Z)")
_LATEST: Final = 1e12


class Entry(NamedTuple):
    """One array of a branch."""

    path: str
    """Its folder, relative to the directory; empty where another writer put an array into the directory itself. Of a
    branch that stays in the folder of its attempt, relative to the leaves there."""
    document: Mapping[str, Any]
    """The whole entry, members that are unknown among them."""


class SupersededSave(NamedTuple):
    """A save whose files wait for readers that began earlier."""

    attempt: str
    """The attempt."""
    since: float
    """When it was replaced, in POSIX seconds by the clock of the store."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexBranch:
    """What the index says of one prefix, or of the tree without prefix."""

    prefix: str | None
    """The prefix as it was given, None for the tree without one."""
    entries: Sequence[Entry]
    """Its arrays, in the order of the leaves."""
    record: bytes | None
    """The record, unread; None where another program wrote the branch."""
    moving: tuple[str, ...] | None
    """While staged folders are not moved: the folders of leaves that this save replaces; else None."""
    stays: bool = False
    """Whether its files stay in the folder of its attempt, as in a bucket, where nothing is renamed."""
    superseded: tuple[SupersededSave, ...] = ()
    """The saves that it replaced, and whose files may still be in the folders of their attempts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeavesIndex:
    """All branches of a leaves directory."""

    branches: Mapping[str | None, IndexBranch]
    """Prefix -> branch, in the order of the document, the one without prefix last."""
    document: Mapping[str, Any]
    """The document as it was parsed, so that members that are unknown stay."""
    unindexed: Sequence[bytes] = ()
    """The records, unread, of saves in a bucket that are to be listed later, oldest first."""


# -------------------------------------------------------------------------------------------------------------- reading


def parse_leaves_index(data: bytes) -> LeavesIndex:
    """Return the branches of an index, whichever program and version wrote it.

    The records in it are not read; `record_of` does that.

    Raises:
        CorruptError: it is no JSON, an entry leads out of the directory, or our own member in it is damaged.
        FormatError: it is the index of another format.

    Example:
        >>> index = parse_leaves_index(b'{"format": "tensorstore", "arrays": [{"path": "a/b"}]}')
        >>> index.branches[None].entries
        [Entry(path='a/b', document={'path': 'a/b'})]
    """
    try:
        return _index(parse_json(decode_text(data, LEAVES_INDEX), LEAVES_INDEX))
    except CorruptError as error:
        if not error.message.startswith(LEAVES_INDEX):
            error.message = f"{LEAVES_INDEX} is damaged: {error.message}"
        error.hint = error.hint or _DAMAGED
        raise


def _index(document: Any) -> LeavesIndex:
    if type(document) is not dict:
        raise CorruptError("it is not a JSON object")
    if document.get("format") != "tensorstore":
        raise FormatError(
            f"{LEAVES_INDEX} is of the format {show(document.get('format'))}; only 'tensorstore' is known",
            hint="load it with the program that wrote it",
        )
    _check_depth({name: value for name, value in document.items() if name not in _OF_BRANCHES}, "the index")
    lists: dict[str | None, list[Any]] = {}
    if "prefixes" in document:
        for prefix, nodes in member(document, "prefixes", dict, "the index").items():
            if not prefix or type(nodes) is not list:
                raise CorruptError(f"the prefix {prefix[:200]!r} has no list of arrays, or is none")
            lists[prefix] = nodes
    if "arrays" in document:
        lists[None] = member(document, "arrays", list, "the index")
    ours = member(document, _OURS, dict, "the index") if _OURS in document else {}
    nodes = {prefix or None: _read_node(node, prefix) for prefix, node in ours.items()}
    branches: dict[str | None, IndexBranch] = {}
    # A record whose list is lost has a branch without entries, so that the loss is seen.
    names = [*lists, *(name for name in nodes if name not in lists)]
    for branch in sorted(names, key=lambda name: name is None):
        found = nodes.get(branch) or IndexBranch(prefix=branch, entries=(), record=None, moving=None)
        entries = _entries(lists.get(branch, []), branch, stays=found.stays)
        branches[branch] = dataclasses.replace(found, entries=entries)
    waiting = member(document, _UNINDEXED, list, "the index") if _UNINDEXED in document else []
    if not all(type(record) is str and record.isascii() for record in waiting):
        raise CorruptError("a save that is not listed yet has no record")
    return LeavesIndex(branches=branches, document=document, unindexed=[record.encode("ascii") for record in waiting])


def _check_depth(node: dict[str, Any], what: str) -> None:
    """Refuse what is unknown and nested so deep that it could not be written again."""
    if node:
        with raising_corrupt(UnsupportedError):
            check_json(node, what)


def _entries(nodes: list[Any], prefix: str | None, *, stays: bool) -> list[Entry]:
    what = "an entry" if prefix is None else f"an entry of {prefix[:200]!r}"
    paths = [member(node, "path", str, what) for node in nodes]
    if stays:
        paths = [_IN_ATTEMPT.sub("", path) for path in paths]
    for node in nodes:
        # Nearly all hold nothing but path, shape and dtype: then nothing is nested.
        if not (len(node) == len(_OF_ENTRY) and type(node.get("dtype")) is str and _is_flat(node.get("shape"))):
            _check_depth(node, what)
    for path in paths:
        if _UNSOUND.search(path) and path != ".":
            raise CorruptError(f"the path {path[:200]!r} of {what} leads out of the directory, or is none")
    return [Entry("" if path == "." else path, node) for path, node in zip(paths, nodes, strict=True)]


def _is_flat(shape: Any) -> bool:
    return type(shape) is list and set(map(type, shape)) <= {int}


def _read_node(node: Any, prefix: str) -> IndexBranch:
    """Return what our member says of a branch, without its entries."""
    what = f"the record of {prefix[:200]!r}" if prefix else "the record of the tree without prefix"
    text = member(node, "record", str, what)
    if not text.isascii():
        raise CorruptError(f"{what} is not ASCII")
    record = text.encode("ascii")
    _check_depth({name: value for name, value in node.items() if name not in _OF_NODE}, what)
    stays = member(node, "stays", bool, what) if "stays" in node else False
    waiting = member(node, "superseded", list, what) if "superseded" in node else []
    superseded = [_read_superseded(one, what) for one in waiting]
    cleared = _read_moving(node, record, what) if "moving" in node else None
    return IndexBranch(
        prefix=prefix or None, entries=(), record=record, moving=cleared, stays=stays, superseded=tuple(superseded)
    )


def _read_superseded(node: Any, what: str) -> SupersededSave:
    attempt = check_name(ATTEMPT, member(node, "attempt", str, what), "an attempt that was replaced")
    since = node.get("since")
    if type(since) not in (int, float) or not 0 <= since < _LATEST:
        raise CorruptError(f"{what} has an attempt that was replaced at {show(since)}, which is no time")
    return SupersededSave(attempt, float(since))


def _read_moving(node: dict[str, Any], record: bytes, what: str) -> tuple[str, ...]:
    moving = member(node, "moving", dict, what)
    _check_depth(moving, what)
    cleared = member(moving, "cleared", list, what)
    if not set(map(type, cleared)) <= {str} or any(_UNSOUND.search(folder) and folder for folder in cleared):
        raise CorruptError(f"{what} is to clear something that is not a folder of the directory")
    if member(moving, "digest", str, what) != _moving_digest(record, cleared):
        raise CorruptError(f"the list of folders that {what} is to clear is damaged")
    return tuple(cleared)


def _moving_digest(record: bytes, cleared: Iterable[str]) -> str:
    """Return what binds a list of folders to its record; a folder that is not to be cleared must never get into it."""
    return digest((record, *(b"\0" + folder.encode() for folder in cleared)))


def entries_of(record: LeavesRecord, *, stays: bool = False) -> list[dict[str, Any]]:
    """Return what the index has to list for a record: its arrays in the order of the leaves.

    Long texts lie in folders too, but no other program would take them for what they are.

    Args:
        record: the record.
        stays: whether the arrays stay in the folder of its attempt.
    """
    above = "/".join((*staged_leaves(record.attempt), "")) if stays else ""
    arrays = [kind.kind in ARRAY_KINDS for kind in record.types]
    leaf_types = record.leaf_types
    return [
        {"path": above + folder, "shape": list(found.shape), "dtype": found.dtype}
        for leaf, folder, found in zip(record.stored_leaves(), record.folders, arrays_of(record), strict=True)
        if arrays[leaf_types[leaf]]
    ]


def record_of(branch: IndexBranch) -> LeavesRecord | None:
    """Return the record of a branch, None where it has none.

    Without one, or where its entries are other ones, the ``.zarray`` files of the entries decide: where none of them
    has a marker, another program wrote the branch. A branch without entries has to have a record: no other program
    writes such a branch.

    Raises:
        CorruptError: the record is damaged or lost, or its entries are not those of the branch.
        FormatError: a newer version wrote it.
        UnsupportedError: it has a dtype that this version does not know.
    """
    whose = "the tree without prefix" if branch.prefix is None else f"prefix {branch.prefix[:200]!r}"
    if branch.record is None:
        if not branch.entries:
            raise CorruptError(f"{LEAVES_INDEX}: {whose} has neither arrays nor a record", hint=_DAMAGED)
        return None
    try:
        record = parse_record(branch.record)
        _compare(record, branch)
    except (CorruptError, FormatError, UnsupportedError) as error:
        error.message = f"{LEAVES_INDEX}: {whose}: {error.message}"
        raise
    return record


def _compare(record: LeavesRecord, branch: IndexBranch) -> None:
    if record.prefix != branch.prefix:
        raise CorruptError(f"the record is that of prefix {show(record.prefix)}", hint=_DAMAGED)
    wanted, nodes = entries_of(record, stays=branch.stays), [entry.document for entry in branch.entries]
    if nodes == wanted:
        return
    for number, (want, node) in enumerate(zip(wanted, nodes, strict=False)):
        # Another program may add members, and a number may be any that is equal.
        if any(node.get(name) != value for name, value in want.items()):
            raise CorruptError(f"entry {number} is {_shown(node)}, its record says {_shown(want)}", hint=_OTHER_LIST)
    if len(nodes) != len(wanted):
        raise CorruptError(
            f"{pluralize(len(nodes), 'arrays are')} listed, the record has {len(wanted)}", hint=_OTHER_LIST
        )


def _shown(node: Mapping[str, Any]) -> str:
    shape = node.get("shape")
    sizes = ", ".join(map(show, shape[:8])) if isinstance(shape, list) else show(shape)
    return f"{show(node.get('path'))} {show(node.get('dtype'))}[{sizes}]"


# -------------------------------------------------------------------------------------------------------------- writing


def encode_leaves_index(index: LeavesIndex) -> bytes:
    """Return the document: ``branches`` as they are, and of ``document`` all members that are not about branches.

    It is laid out as ``json.dumps(..., indent=2)`` does.

    Example:
        >>> index = parse_leaves_index(b'{"format": "tensorstore", "arrays": [], "by": "me"}')
        >>> json.loads(encode_leaves_index(index))
        {'format': 'tensorstore', 'version': '1.0', 'prefixes': {}, 'arrays': [], 'by': 'me'}
    """
    members = ",\n".join(f"  {quote(name)}: {text}" for name, text in _members(index))
    return f"{{\n{members}\n}}".encode("ascii")


def _members(index: LeavesIndex) -> Iterator[tuple[str, str]]:
    lists = {prefix: _list(branch.entries, 2 if prefix is None else 3) for prefix, branch in index.branches.items()}
    prefixed = [prefix for prefix in lists if prefix is not None]
    yield "format", quote("tensorstore")
    yield "version", quote("2.0" if prefixed else "1.0")
    items = ",".join(f"\n    {quote(prefix)}: {lists[prefix]}" for prefix in prefixed)
    yield "prefixes", f"{{{items}\n  }}" if items else "{}"
    if None in lists:
        yield "arrays", lists[None]
    ours = {prefix or "": _our_node(index, branch) for prefix, branch in index.branches.items() if branch.record}
    if ours:
        yield _OURS, _text(ours, 1)
    if index.unindexed:
        yield _UNINDEXED, _text([record.decode("ascii") for record in index.unindexed], 1)
    yield from ((name, _text(value, 1)) for name, value in index.document.items() if name not in _OF_BRANCHES)


def _our_node(index: LeavesIndex, branch: IndexBranch) -> dict[str, Any]:
    # What is unknown there stays.
    node = dict(index.document.get(_OURS, {}).get(branch.prefix or "", {}))
    record = branch.record or b""
    node["record"] = record.decode("ascii")
    for name in ("moving", "stays", "superseded"):
        node.pop(name, None)
    if branch.moving is not None:
        node["moving"] = {"cleared": list(branch.moving), "digest": _moving_digest(record, branch.moving)}
    if branch.stays:
        node["stays"] = True
    if branch.superseded:
        node["superseded"] = [one._asdict() for one in branch.superseded]
    return node


def _text(value: Any, level: int) -> str:
    # A line break inside a JSON string is written as an escape, so each one begins a line of the layout.
    return json.dumps(value, indent=2).replace("\n", "\n" + "  " * level)


def _list(entries: Sequence[Entry], level: int) -> str:
    """Return the entries of a branch; ten thousand of them have few shapes, whose text is made once."""
    tails: dict[str, str] = {}
    line = "\n" + "  " * level
    items = []
    for _, node in entries:
        if list(node) != _OF_ENTRY:
            items.append(f"{line}{_text(node, level)}")
            continue
        path, shape, dtype = _MEMBERS_OF_ENTRY(node)
        known = f"{shape!r} {dtype!r}"
        if known not in tails:
            tails[known] = _text({"shape": shape, "dtype": dtype}, level).removeprefix("{")
        items.append(f'{line}{{{line}  "path": {quote(path)},{tails[known]}')
    return f"[{','.join(items)}{line[:-2]}]" if items else "[]"
