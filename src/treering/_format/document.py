"""``treering.json``: the index as a document, and back. ``docs/spec/checkpoint.md`` is its specification.

Strict JSON in ASCII, a member a line. The first line holds the version and a digest of every other byte. Reading
believes nothing: what passes here is a tree, files and leaves that fit each other.

From 4,096 leaves on the columns are packed (`treering._format.packed`), and the version is another. `read_summary`
looks at the few members that do not grow with the tree: the digest covers the others, and costs little.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Final

from treering._codec.documents import (
    DIGEST,
    check_hashes,
    check_json,
    check_name,
    check_texts,
    join_lines,
    member,
    member_line,
    show,
)
from treering._codec.key_document import (
    GAPPED_FORM,
    INDEX_FORM,
    PACKED_FORM,
    decode_waiting,
    encode_waiting,
    index_members,
)
from treering._format import columns, packed
from treering._format.index import LIMIT, Container, DataFile, Index, Token, leaf_bytes
from treering._values.boxes import Box, find_cover_error, size_of, text_of
from treering._values.checkpoint_names import ATTEMPT
from treering._values.checksums import LARGEST_BLOCK, SMALLEST_BLOCK
from treering._values.dtypes import itemsize_of
from treering._values.human import pluralize
from treering.errors import CorruptError

INDEX_NAME: Final = "treering.json"
"""Name of the document in the checkpoint's folder."""

PACKED_FROM: Final = 4096
"""An index of so many leaves is written with packed columns."""

_BLOCKS: Final = frozenset(1 << bits for bits in range(SMALLEST_BLOCK.bit_length() - 1, LARGEST_BLOCK.bit_length()))
_SHOWN_KEYS: Final = 4
_DATA_NAME: Final = re.compile(r"data-[0-9a-f]{16}-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_ALIGNMENT: Final = 4096
_LARGEST_HEADER: Final = 2 << 30  # as of an index, which says the same of each leaf
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
    if not 0 < header <= nbytes < LIMIT or header % _ALIGNMENT or header > _LARGEST_HEADER:
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
    """
    digest = read_digest(data)
    members = index_members(data)
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
        CorruptError, FormatError: as `read_summary` says.
    """
    return read_summary(data).names


# ------------------------------------------------------------------------------------------------------ chunks that fit
# Ten thousand leaves are checked as columns, with a handful of passes that run in C, never one object at a time.


def check_chunks(index: Index) -> None:
    """Require that every byte of the files and every item of the leaves is accounted for exactly once.

    Raises:
        CorruptError: a chunk is of the wrong size, chunks overlap or leave a gap in a file or a leaf, or the number of
            checksums is not that of the blocks; the message names the leaf, or the file and the bytes.
    """
    chunks = index.chunks
    expected = index.stored_leaves()
    if chunks.leaf != expected:
        _check_parts(index, expected)
    _check_sizes(index, whole=len(chunks) == len(expected))
    if not set(chunks.block) <= _BLOCKS:
        raise CorruptError(f"a block of the chunks is not a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK}")
    _check_tiles(index)
    if index.verified and (blocks := chunks.first_blocks()[-1]) != len(index.checksums):
        found = pluralize(len(index.checksums), "checksums")
        raise CorruptError(f"the chunks have {pluralize(blocks, 'blocks')}, there are {found}")


def _check_parts(index: Index, expected: list[int]) -> None:
    """Check the order of the chunks where some leaf has several."""
    if (found := [leaf for leaf, _ in itertools.groupby(index.chunks.leaf)]) == expected:
        return
    wrong = next((pair for pair in itertools.zip_longest(found, expected) if pair[0] != pair[1]), (None, None))
    if wrong[1] is not None and wrong[1] not in set(found):
        raise CorruptError(f"leaf {index.keys[wrong[1]]!r:.200} lies in no file")
    raise CorruptError(
        f"the chunks of leaf {index.keys[wrong[0] or 0]!r:.200} are in the place of those of another leaf"
    )


def _check_sizes(index: Index, *, whole: bool) -> None:
    """Check that the chunks of the leaves have the bytes of these; ``whole`` says that each leaf has one."""
    chunks = index.chunks
    by_type = [leaf_bytes(kind) for kind in index.types]
    if whole and chunks.box.count(None) == len(chunks):
        kinds = index.leaf_types if len(chunks) == len(index.keys) else map(index.leaf_types.__getitem__, chunks.leaf)
        if list(map(by_type.__getitem__, kinds)) == chunks.nbytes:
            return
    # Most leaves of a model are alike, and so are their parts: each way to cut one is looked at once.
    cuts: dict[int, tuple[int, tuple[Box | None, ...], tuple[int, ...]]] = {}
    start = 0
    for leaf, parts in Counter(chunks.leaf).items():
        stop = start + parts
        cuts[start] = (index.leaf_types[leaf], tuple(chunks.box[start:stop]), tuple(chunks.nbytes[start:stop]))
        start = stop
    check_hashes(cuts.values(), "the ways to cut leaves")
    fit: set[tuple[int, tuple[Box | None, ...], tuple[int, ...]]] = set()
    for start, cut in cuts.items():
        if cut not in fit:
            _check_leaf(index, chunks.leaf[start], range(start, start + len(cut[1])))
            fit.add(cut)


def _check_leaf(index: Index, leaf: int, numbers: range) -> None:
    """Check that the chunks of one leaf have the bytes of their boxes, and that these cover it."""
    kind, chunks = index.type_of(leaf), index.chunks
    boxes = list(map(index.box_of, numbers))
    for number, box in zip(numbers, boxes, strict=True):
        if len(box) != len(kind.shape or ()):
            axes = pluralize(len(box), "axes")
            raise CorruptError(f"a box of leaf {index.keys[leaf]!r:.200} has {axes}, its shape {kind.shape}")
        wanted = size_of(box) * itemsize_of(kind.dtype)
        if any(stop < start for start, stop in box) or wanted != chunks.nbytes[number]:
            place = f"[{text_of(box)}]" if chunks.box[number] is not None else ""
            found = f"its chunk in file {chunks.file[number]} has {chunks.nbytes[number]}"
            raise CorruptError(f"leaf {index.keys[leaf]!r:.200}{place} takes {pluralize(wanted, 'bytes')}, {found}")
    if (wrong := find_cover_error(kind.shape or (), boxes)) is not None:
        raise CorruptError(f"the parts of leaf {index.keys[leaf]!r:.200} do not cover it: {wrong}")


def _check_tiles(index: Index) -> None:
    """Check that the chunks of each file follow each other from its header to its end."""
    chunks = index.chunks
    for number, file in enumerate(index.files):
        rows = chunks.of_file(number)
        begins, sizes = chunks.offset, chunks.nbytes
        if rows != range(len(chunks)):
            begins, sizes = [begins[row] for row in rows], [sizes[row] for row in rows]
        if list(itertools.accumulate(sizes, initial=file.header)) == [*begins, file.nbytes]:
            continue
        for begin, size, after in zip([file.header, *begins], [0, *sizes], [*begins, file.nbytes], strict=True):
            stop = begin + size
            if stop > after or (stop < after and not index.gapped):
                first, last = sorted((stop, after))
                raise CorruptError(_tiling_problem(index, file, first, last, gap=stop < after))


def _tiling_problem(index: Index, file: DataFile, first: int, last: int, *, gap: bool) -> str:
    """Say what is wrong with the bytes from ``first`` to ``last`` of a file."""
    chunks, number = index.chunks, index.files.index(file)
    where = f"bytes {first} to {last} of {file.name or 'the file'}"
    if gap:
        return f"{where} belong to no leaf"
    rows = zip(chunks.leaf, chunks.file, chunks.offset, chunks.nbytes, strict=True)
    leaves = (leaf for leaf, of, offset, size in rows if of == number and offset < last and offset + size > first)
    named = ", ".join(f"{index.keys[leaf]!r:.100}" for leaf in itertools.islice(leaves, _SHOWN_KEYS))
    return f"{where} cannot belong to {named}: the file ends there, or its header or another leaf lies there"
