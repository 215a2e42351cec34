"""``treering.json``: the index as a document, and back. ``docs/spec/checkpoint.md`` is its specification.

Strict JSON in ASCII, a member a line. The first line holds the version and a digest of every other byte. Reading
believes nothing: what passes here is a tree, files and leaves that fit each other.

From 4,096 leaves on the columns are packed (`treering._format.packed`), and the version is another. `read_summary`
reads the few members that do not grow with the tree and does not parse the others: the digest covers all of it and
costs little, and each member has a line of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

from treering._codec.documents import DIGEST, check_json, check_name, check_texts, join_lines, member, member_line, show
from treering._codec.key_document import (
    GAPPED_FORM,
    INDEX_FORM,
    PACKED_FORM,
    decode_waiting,
    encode_waiting,
    find_members,
)
from treering._format import columns, packed
from treering._format.chunk_checks import check_chunks
from treering._format.index import LIMIT, Container, DataFile, Index, Token
from treering._values.checkpoint_names import ATTEMPT
from treering.errors import CorruptError

INDEX_NAME: Final = "treering.json"
"""Name of the document in the checkpoint's folder."""

PACKED_FROM: Final = 4096
"""An index of so many leaves is written with packed columns."""

_DATA_NAME: Final = re.compile(r"data-[0-9a-f]{16}-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_ALIGNMENT: Final = 4096
# In a single file; version 1 of it had no other names in `__metadata__` than ours.
_EMBEDDED_FORM: Final = dataclasses.replace(INDEX_FORM, version=2, also=())
_IS_FIRST: Final = f'{{"treering": {INDEX_FORM.version}, '.encode()


def is_first_version(data: bytes) -> bool:
    """Tell whether an index is of version 1, which the single files of old have.

    Example:
        >>> is_first_version(b'{"treering": 1, "digest": "'), is_first_version(b'{"treering": 2, "digest": "')
        (True, False)
    """
    return data.startswith(_IS_FIRST)


def data_name(attempt: str, number: int, count: int) -> str:
    """Return the name of a data file.

    Example:
        >>> data_name("0123456789abcdef", 0, 2)
        'data-0123456789abcdef-00000-of-00002.safetensors'
    """
    return f"data-{attempt}-{number:05}-of-{count:05}.safetensors"


# -------------------------------------------------------------------------------------------------------------- writing


def encode_index(index: Index, *, embedded: bool = False) -> bytes:
    """Return the document, ready to be written.

    Args:
        index: what it says.
        embedded: whether it is to lie in the very file that has the data.

    Raises:
        UnsupportedError: the metadata, or a key or static field of the structure, has no form in it.
    """
    # Each column becomes text before the next one is made: those of a large tree together would take far more memory.
    is_packed = not embedded and len(index.keys) >= PACKED_FROM and packed.fits(index.keys, index.structure)
    lines = [member_line(name, value) for name, value in _members(index, packed if is_packed else columns)]
    form = _EMBEDDED_FORM if embedded else PACKED_FORM if is_packed else INDEX_FORM
    return (GAPPED_FORM if index.gapped else form).sign(join_lines(lines))


def _members(index: Index, form: ModuleType) -> Iterator[tuple[str, Any]]:
    check_json(index.metadata, "metadata")
    check_json(index.written, "written")
    yield "attempt", index.attempt
    yield "written", index.written
    yield "processes", index.processes
    yield "meshes", list(index.meshes)
    yield from form.encode_tree(index)
    yield "chunks", form.encode_chunks(index)
    yield "checksums", columns.encode_checksums(index.checksums)
    if index.digests:
        yield "digests", columns.encode_digests(index.digests, index.saves)
    yield "files", list(map(_file_members, index.files))
    yield "replaces", list(index.replaces)
    if index.superseded:
        yield "superseded", encode_waiting(index.superseded)
    if index.origin is not None:
        check_json(index.origin, "origin")
        yield "origin", index.origin
    if not index.structured:
        yield "structured", False
    if index.part:
        yield "part", {"only": list(map(columns.escape_surrogates, index.part))}
    yield "metadata", index.metadata


def _file_members(file: DataFile) -> dict[str, Any]:
    members = {"name": file.name, "nbytes": file.nbytes, "header": file.header, "digest": file.digest}
    return members if file.process is None else members | {"process": file.process}


# -------------------------------------------------------------------------------------------------------------- reading


def parse_index(data: bytes, *, embedded: bool = False) -> Index:
    """Return the index that a document holds, with everything in it checked.

    Args:
        data: the document.
        embedded: whether it lies in the very file that has the data; then that file has no name in it.

    Raises:
        CorruptError: it is damaged, or contradicts itself; the message names the leaf, or the file and the bytes.
        FormatError: a newer version wrote it: its version, or a kind of leaf, container, key, codec or checksum is
            unknown.
        UnsupportedError: it has a dtype that this version does not know.
    """
    form = _EMBEDDED_FORM if embedded and not is_first_version(data) else INDEX_FORM
    return form.read(data, functools.partial(_index, embedded=embedded))


def _index(document: Any, *, embedded: bool) -> Index:
    what = INDEX_NAME
    version = document["treering"]
    gapped = version == GAPPED_FORM.version
    is_packed = type(document.get("structure")) is dict if gapped else version == PACKED_FORM.version
    form = packed if is_packed else columns
    tree = form.decode_tree(document, what)
    files = [_file(node, embedded=embedded) for node in member(document, "files", list, what)]
    names = {file.name for file in files}
    if len(names) != len(files) or (embedded and len(files) != 1):
        raise CorruptError("two data files have the same name")
    chunks = form.decode_chunks(document.get("chunks"), tree, len(files))
    digests, saves = columns.decode_digests(document, len(chunks))
    index = Index(
        attempt=check_name(ATTEMPT, member(document, "attempt", str, what), "the attempt"),
        written=columns.read_free_json(document, "written", what),
        processes=member(document, "processes", int, what),
        meshes=check_texts(member(document, "meshes", list, what), "the list of meshes"),
        **tree.columns(),
        chunks=chunks,
        checksums=columns.decode_checksums(document.get("checksums")),
        files=files,
        replaces=[check_name(_DATA_NAME, name, "a replaced file") for name in _replaced(document)],
        superseded=tuple(decode_waiting(document)),
        metadata=columns.read_free_json(document, "metadata", what),
        origin=columns.read_free_json(document, "origin", what) if "origin" in document else None,
        structured=member(document, "structured", bool, what) if "structured" in document else True,
        part=_part(document) if "part" in document else (),
        digests=digests,
        saves=saves,
        gapped=gapped,
    )
    if index.part:  # a dict may stand for another container that lost children
        index = dataclasses.replace(index, structure=list(map(_thinned, index.structure)))
    if any(not names.isdisjoint(waiting.files) for waiting in index.superseded):
        raise CorruptError("one of its data files is in the list of superseded data")
    writers = {0, *(file.process for file in files if file.process is not None)}
    if not 0 <= min(writers) <= max(writers) < index.processes or not names.isdisjoint(index.replaces):
        raise CorruptError("its processes and files cannot be those of a checkpoint")
    check_chunks(index)
    return index


def _part(document: dict[str, Any]) -> tuple[str, ...]:
    globs = member(member(document, "part", dict, INDEX_NAME), "only", list, "what is said of a part")
    if not globs:
        raise CorruptError("it is said to be a part of a tree, of which no glob keeps anything")
    return tuple(map(columns.unescape_surrogates, check_texts(globs, "the globs of a part")))


def _thinned(token: Token) -> Token:
    if isinstance(token, Container) and token.node == "dict":
        return dataclasses.replace(token, thinned=True)
    return token


def _replaced(document: dict[str, Any]) -> list[str]:
    return check_texts(member(document, "replaces", list, INDEX_NAME), "the list of replaced files")


def _file(node: Any, *, embedded: bool) -> DataFile:
    what = "the list of data files"
    name = member(node, "name", str, what)
    checksum = None
    if not embedded:
        check_name(_DATA_NAME, name, "a data file")
        checksum = check_name(DIGEST, member(node, "digest", str, what), "a digest")
    elif name or node.get("digest") is not None:
        raise CorruptError(f"{what} names another file, {name[:100]!r}")
    nbytes, header = member(node, "nbytes", int, what), member(node, "header", int, what)
    if not 0 < header <= nbytes < LIMIT or header % _ALIGNMENT:
        raise CorruptError(
            f"{name or 'the file'} cannot have {show(nbytes)} bytes of which {show(header)} are its header"
        )
    process = member(node, "process", int, what) if "process" in node else None
    return DataFile(name=name, nbytes=nbytes, header=header, digest=checksum, process=process)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexSummary:
    """What an index says of its checkpoint as a whole."""

    attempt: str
    digest: str
    """The digest in its first line: another index has another."""
    names: tuple[str, ...]
    """The data files, and those that they superseded."""
    nbytes: int
    """How many bytes the data files and the index have."""
    metadata: Mapping[str, Any]


def read_digest(head: bytes) -> str | None:
    r"""Return the digest that stands in the first line of an index; None when that is no first line.

    Example:
        >>> read_digest(b'{"treering": 1, "digest": "xxh3-128:0123456789abcdef0123456789abcdef",\n"attempt": ')
        'xxh3-128:0123456789abcdef0123456789abcdef'
    """
    return INDEX_FORM.read_digest(head)


def read_summary(data: bytes) -> IndexSummary:
    """Return what an index says of its checkpoint as a whole; its digest is checked, its leaves are not looked at.

    Raises:
        CorruptError: it is damaged.
        FormatError: a newer version wrote it.
        UnsupportedError: it has a dtype that this version does not know.
    """
    digest = read_digest(data)
    if (members := find_members(data)) is None:
        # Damaged, of another version, or laid out by another writer: reading all of it says which.
        index = parse_index(data)
        attempt, metadata = index.attempt, index.metadata
        names = [*(file.name for file in index.files), *index.replaces]
        sizes = [file.nbytes for file in index.files]
    else:
        files = member(members, "files", list, INDEX_NAME)
        names = check_texts([member(file, "name", str, INDEX_NAME) for file in files], "the list of data files")
        names = [*names, *_replaced(members)]
        sizes = [member(file, "nbytes", int, INDEX_NAME) for file in files]
        attempt = check_name(ATTEMPT, member(members, "attempt", str, INDEX_NAME), "the attempt")
        metadata = columns.read_free_json(members, "metadata", INDEX_NAME)
        if min(sizes, default=0) < 0 or sum(sizes) >= LIMIT:
            raise CorruptError(f"{INDEX_NAME} has data files of sizes that no file has")
    nbytes = sum(sizes) + len(data)
    return IndexSummary(attempt=attempt, digest=digest or "", names=tuple(names), nbytes=nbytes, metadata=metadata)


def read_names(data: bytes) -> tuple[str, ...]:
    """Return the data files that an index mentions: its own, and those that it superseded.

    Raises:
        CorruptError, FormatError, UnsupportedError: as `read_summary` says.
    """
    return read_summary(data).names
