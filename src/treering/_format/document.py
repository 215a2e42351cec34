"""``treering.json``: the index as a document, and back. ``docs/spec/checkpoint.md`` is its specification.

Strict JSON in ASCII, a member a line. The first line holds the version and a digest of every other byte. Reading
believes nothing: what passes here is a tree, files and leaves that fit each other.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Iterator
from typing import Any, Final

from treering._codec.documents import check_json, json_text, member, parsed, shown
from treering._format.columns import check_chunks, check_ints, decoded_chunks, encoded_chunks
from treering._format.index import DataFile, Index
from treering._format.leaf_types import decoded_type, encoded_type
from treering._format.leaf_values import decoded_value, encoded_value, from_base64, to_base64
from treering._format.structure_text import check_keys, decoded_structure, encoded_structure, sound_key, unsound_key
from treering._values.checksums import digest, packed
from treering.errors import Corrupt, Format, Unsupported

__all__ = ["INDEX_NAME", "VERSION", "data_name", "encode_index", "parse_index"]

INDEX_NAME: Final = "treering.json"
"""Name of the document in the checkpoint's folder."""

VERSION: Final = 1
"""Version of the format. It grows when a reader of the old version would read something wrong."""

_FIRST_LINE: Final = re.compile(rb'\{"treering": ([1-9][0-9]{0,8}), "digest": "(xxh3-128:[0-9a-f]{32})",\n')
_OTHER_VERSION: Final = re.compile(rb'\{"treering": ([1-9][0-9]{0,8})[,}]')
_DATA_NAME: Final = re.compile(r"data-[0-9a-f]{16}-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_ATTEMPT: Final = re.compile(r"[0-9a-f]{16}")
_DIGEST: Final = re.compile(r"xxh3-128:[0-9a-f]{32}")
_ALIGNMENT: Final = 4096
_LIMIT: Final = 1 << 63
_CHECKSUM: Final = "xxh3-64"
_DAMAGED: Final = "use another copy of the checkpoint"


def data_name(attempt: str, number: int, count: int) -> str:
    """Return the name of a data file.

    Example:
        >>> data_name("0123456789abcdef", 0, 2)
        'data-0123456789abcdef-00000-of-00002.safetensors'
    """
    return f"data-{attempt}-{number:05}-of-{count:05}.safetensors"


# -------------------------------------------------------------------------------------------------------------- writing


def encode_index(index: Index) -> bytes:
    """Return the document, ready to be written.

    Raises:
        Unsupported: the metadata, or a key or static field of the structure, has no form in it.
    """
    lines = [f'"{name}": {json_text(value)}' for name, value in _members(index)]
    head, body = f'{{"treering": {VERSION}, "digest": "', '",\n' + ",\n".join(lines) + "}\n"
    return f"{head}{digest((head.encode(), body.encode()))}{body}".encode("ascii")


def _members(index: Index) -> Iterator[tuple[str, Any]]:
    check_json(index.metadata, "metadata")
    check_json(index.written, "written")
    yield "attempt", index.attempt
    yield "written", index.written
    yield "processes", index.processes
    yield "meshes", list(index.meshes)
    yield "structure", encoded_structure(index.structure)
    yield "types", [encoded_type(kind) for kind in index.types]
    keys = list(index.keys)
    if not "".join(keys).isascii():
        keys = [sound_key(key) for key in keys]
    yield "leaves", {"key": keys, "type": list(index.leaf_types)}
    yield "values", _encoded_values(index)
    yield "chunks", encoded_chunks(index.chunks)
    yield "checksums", {"algorithm": _CHECKSUM, "table": to_base64(packed(index.checksums))}
    yield (
        "files",
        [
            {"name": file.name, "nbytes": file.nbytes, "header": file.header, "digest": file.digest}
            for file in index.files
        ],
    )
    yield "replaces", list(index.replaces)
    yield "metadata", index.metadata


def _unstored(index: Index) -> Iterator[tuple[int, str]]:
    kinds = [None if kind.stored else kind.kind for kind in index.types]
    for leaf, number in enumerate(index.leaf_types):
        kind = kinds[number]
        if kind is not None:
            yield leaf, kind


def _encoded_values(index: Index) -> list[Any]:
    values = index.values
    return [None if kind == "none" else encoded_value(kind, values[leaf]) for leaf, kind in _unstored(index)]


# -------------------------------------------------------------------------------------------------------------- reading


def parse_index(data: bytes, *, embedded: bool = False) -> Index:
    """Return the index that a document holds, with everything in it checked.

    Args:
        data: the document.
        embedded: whether it lies in the very file that has the data; then that file has no name in it.

    Raises:
        Corrupt: it is damaged, or contradicts itself; the message names the leaf, or the file and the bytes.
        Format: a newer version wrote it: its version, or a kind of leaf, container, key, codec or checksum is unknown.
        Unsupported: it has a dtype that this version does not know.
    """
    first = _FIRST_LINE.match(data)
    if first is None or digest((data[: first.start(2)], data[first.end(2) :])) != first[2].decode():
        newer = None if first is not None else _OTHER_VERSION.match(data)
        if newer is not None and int(newer[1]) != VERSION:
            raise _newer(int(newer[1]))
        problem = "its digest is not that of its bytes" if first else "it does not begin as an index does"
        raise Corrupt(f"{INDEX_NAME} is damaged: {problem}", hint=_DAMAGED)
    if int(first[1]) != VERSION:
        raise _newer(int(first[1]))
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError as error:
        raise Corrupt(f"{INDEX_NAME} is no ASCII", offset=error.start, hint=_DAMAGED) from None
    try:
        return _index(parsed(text, INDEX_NAME), embedded=embedded)
    except Corrupt as error:
        if not error.message.startswith(INDEX_NAME):
            error.message = f"{INDEX_NAME} contradicts itself: {error.message}"
        error.hint = error.hint or _DAMAGED
        raise
    except (Format, Unsupported) as error:
        error.message = f"{INDEX_NAME}: {error.message}"
        raise


def _newer(version: int) -> Format:
    return Format(
        f"{INDEX_NAME} is of version {version}; this treering reads version {VERSION}",
        hint="it was written by a newer treering: use that one",
    )


def _index(document: Any, *, embedded: bool) -> Index:
    what = INDEX_NAME
    leaves = member(document, "leaves", dict, what)
    keys = _texts(member(leaves, "key", list, "leaves"), "the column of keys")
    leaf_types = member(leaves, "type", list, "leaves")
    types = [decoded_type(node, number) for number, node in enumerate(member(document, "types", list, what))]
    check_ints(leaf_types, len(types), "the column of leaf types")
    if len(leaf_types) != len(keys):
        raise Corrupt(f"there are {len(keys)} keys and {len(leaf_types)} leaf types")
    if "~u" in "".join(keys):
        keys = [unsound_key(key) for key in keys]
    structure = decoded_structure(member(document, "structure", list, what), len(keys))
    check_keys(structure, keys)
    files = [_file(node, embedded=embedded) for node in member(document, "files", list, what)]
    if len({file.name for file in files}) != len(files) or (embedded and len(files) != 1):
        raise Corrupt("two data files have the same name")
    values: dict[int, Any] = {}
    index = Index(
        attempt=_matching(_ATTEMPT, member(document, "attempt", str, what), "the attempt"),
        written=_json(document, "written"),
        processes=member(document, "processes", int, what),
        meshes=_texts(member(document, "meshes", list, what), "the list of meshes"),
        structure=structure,
        keys=keys,
        types=types,
        leaf_types=leaf_types,
        values=values,
        chunks=decoded_chunks(document.get("chunks"), len(keys), len(files)),
        checksums=_checksums(document.get("checksums")),
        files=files,
        replaces=[_matching(_DATA_NAME, name, "a replaced file") for name in _replaced(document)],
        metadata=_json(document, "metadata"),
    )
    if index.processes < 1 or not {file.name for file in files}.isdisjoint(index.replaces):
        raise Corrupt("its processes and files cannot be those of a checkpoint")
    check_chunks(index)
    values |= _decoded_values(index, member(document, "values", list, what))
    return index


def _decoded_values(index: Index, nodes: list[Any]) -> dict[int, Any]:
    unstored = list(_unstored(index))
    if len(unstored) != len(nodes):
        raise Corrupt(f"{len(unstored)} leaves lie in no file, there are {len(nodes)} values")
    return {
        leaf: decoded_value(kind, node, f"the value of leaf {index.keys[leaf]!r:.200}")
        for (leaf, kind), node in zip(unstored, nodes, strict=True)
    }


def _texts(nodes: list[Any], what: str) -> list[str]:
    if not set(map(type, nodes)) <= {str}:
        raise Corrupt(f"{what} holds something else than text")
    return nodes


def _json(document: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object of people's own, no deeper than a walk over it can go."""
    found = member(document, name, dict, INDEX_NAME)
    try:
        check_json(found, name)
    except Unsupported as error:
        raise Corrupt(error.message) from None
    return found


def _matching(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise Corrupt(f"{what} is called {text[:100]!r}, which no writer would")
    return text


def _replaced(document: dict[str, Any]) -> list[str]:
    return _texts(member(document, "replaces", list, INDEX_NAME), "the list of replaced files")


def _file(node: Any, *, embedded: bool) -> DataFile:
    what = "the list of data files"
    name = member(node, "name", str, what)
    if embedded:
        if name or node.get("digest") is not None:
            raise Corrupt(f"{what} names another file, {name[:100]!r}")
        checksum = None
    else:
        _matching(_DATA_NAME, name, "a data file")
        checksum = _matching(_DIGEST, member(node, "digest", str, what), "a digest")
    nbytes, header = member(node, "nbytes", int, what), member(node, "header", int, what)
    if not 0 < header <= nbytes < _LIMIT or header % _ALIGNMENT:
        raise Corrupt(f"{name or 'the file'} cannot have {shown(nbytes)} bytes of which {shown(header)} are its header")
    return DataFile(name=name, nbytes=nbytes, header=header, digest=checksum)


def _checksums(node: Any) -> array[int]:
    what = "the table of checksums"
    algorithm = member(node, "algorithm", str, what)
    if algorithm != _CHECKSUM:
        raise Format(f"{what} is of the unknown algorithm {algorithm[:60]!r}", hint="use a newer treering")
    table = from_base64(member(node, "table", str, what), what)
    if len(table) % 8:
        raise Corrupt(f"{what} has {len(table)} bytes, not 8 for each")
    found = array("Q", table)
    if sys.byteorder == "big":
        found.byteswap()
    return found
