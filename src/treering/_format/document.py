"""``treering.json``: the index as a document, and back. ``docs/spec/checkpoint.md`` is its specification.

Strict JSON in ASCII, a member a line. The first line holds the version and a digest of every other byte. Reading
believes nothing: what passes here is a tree, files and leaves that fit each other.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any, Final

from treering._codec.documents import check_json, member, shown
from treering._format.columns import check_chunks, decoded_chunks, encoded_chunks
from treering._format.document_parts import decoded_checksums, encoded_checksums, free_json, matching, texts
from treering._format.index import DataFile, Index
from treering._format.signed import SignedForm
from treering._format.tree_columns import decoded_tree, encoded_tree
from treering.errors import Corrupt

INDEX_NAME: Final = "treering.json"
"""Name of the document in the checkpoint's folder."""

VERSION: Final = 1
"""Version of the format. It grows when a reader of the old version would read something wrong."""

_DATA_NAME: Final = re.compile(r"data-[0-9a-f]{16}-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")
_ATTEMPT: Final = re.compile(r"[0-9a-f]{16}")
_DIGEST: Final = re.compile(r"xxh3-128:[0-9a-f]{32}")
_ALIGNMENT: Final = 4096
_LIMIT: Final = 1 << 63
_FORM: Final = SignedForm(
    member="treering", version=VERSION, name=INDEX_NAME, hint="use another copy of the checkpoint"
)
# In a single file; version 1 of it had no other names in `__metadata__` than ours.
_EMBEDDED_FORM: Final = dataclasses.replace(_FORM, version=2)
_IS_FIRST: Final = f'{{"treering": {VERSION}, '.encode()


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
        Unsupported: the metadata, or a key or static field of the structure, has no form in it.
    """
    return (_EMBEDDED_FORM if embedded else _FORM).encoded(_members(index))


def _members(index: Index) -> Iterator[tuple[str, Any]]:
    check_json(index.metadata, "metadata")
    check_json(index.written, "written")
    yield "attempt", index.attempt
    yield "written", index.written
    yield "processes", index.processes
    yield "meshes", list(index.meshes)
    yield from encoded_tree(index)
    yield "chunks", encoded_chunks(index.chunks)
    yield "checksums", encoded_checksums(index.checksums)
    yield "files", list(map(_file_members, index.files))
    yield "replaces", list(index.replaces)
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
        Corrupt: it is damaged, or contradicts itself; the message names the leaf, or the file and the bytes.
        Format: a newer version wrote it: its version, or a kind of leaf, container, key, codec or checksum is unknown.
        Unsupported: it has a dtype that this version does not know.
    """
    form = _EMBEDDED_FORM if embedded and not is_first_version(data) else _FORM
    return form.read(data, functools.partial(_index, embedded=embedded))


def _index(document: Any, *, embedded: bool) -> Index:
    what = INDEX_NAME
    tree = decoded_tree(document, what)
    files = [_file(node, embedded=embedded) for node in member(document, "files", list, what)]
    if len({file.name for file in files}) != len(files) or (embedded and len(files) != 1):
        raise Corrupt("two data files have the same name")
    index = Index(
        attempt=matching(_ATTEMPT, member(document, "attempt", str, what), "the attempt"),
        written=free_json(document, "written", what),
        processes=member(document, "processes", int, what),
        meshes=texts(member(document, "meshes", list, what), "the list of meshes"),
        structure=tree.structure,
        keys=tree.keys,
        types=tree.types,
        leaf_types=tree.leaf_types,
        values=tree.values,
        chunks=decoded_chunks(document.get("chunks"), len(tree.keys), len(files)),
        checksums=decoded_checksums(document.get("checksums")),
        files=files,
        replaces=[matching(_DATA_NAME, name, "a replaced file") for name in _replaced(document)],
        metadata=free_json(document, "metadata", what),
    )
    writers = {0, *(file.process for file in files if file.process is not None)}
    if not 0 <= min(writers) <= max(writers) < index.processes or not {file.name for file in files}.isdisjoint(
        index.replaces
    ):
        raise Corrupt("its processes and files cannot be those of a checkpoint")
    check_chunks(index)
    return index


def _replaced(document: dict[str, Any]) -> list[str]:
    return texts(member(document, "replaces", list, INDEX_NAME), "the list of replaced files")


def _file(node: Any, *, embedded: bool) -> DataFile:
    what = "the list of data files"
    name = member(node, "name", str, what)
    if embedded:
        if name or node.get("digest") is not None:
            raise Corrupt(f"{what} names another file, {name[:100]!r}")
        checksum = None
    else:
        matching(_DATA_NAME, name, "a data file")
        checksum = matching(_DIGEST, member(node, "digest", str, what), "a digest")
    nbytes, header = member(node, "nbytes", int, what), member(node, "header", int, what)
    if not 0 < header <= nbytes < _LIMIT or header % _ALIGNMENT:
        raise Corrupt(f"{name or 'the file'} cannot have {shown(nbytes)} bytes of which {shown(header)} are its header")
    process = member(node, "process", int, what) if "process" in node else None
    return DataFile(name=name, nbytes=nbytes, header=header, digest=checksum, process=process)
