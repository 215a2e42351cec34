"""The leaves of a document as columns, lists of equal length, and the containers around them as JSON.

What is read is checked as columns too, with a handful of passes that run in C, never one object at a time. The key
texts follow from the containers. `treering._format.document` says whether the chunks fit the leaves and the files.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Final

from treering._codec.documents import check_hashes, check_json, check_texts, member, raising_corrupt, show
from treering._format.index import (
    DIGEST_BYTES,
    LIMIT,
    Chunks,
    Container,
    Index,
    LeafType,
    Token,
    TreeColumns,
    holds_text,
)
from treering._format.leaf_values import (
    decode_key,
    decode_type,
    decode_value,
    encode_key,
    encode_type,
    encode_value,
    from_base64,
    to_base64,
)
from treering._format.structure import KEYS, iter_runs, key_text
from treering._printable import shorten
from treering._values.boxes import Box
from treering._values.checksums import pack_checksums, unpack_checksums
from treering._values.human import pluralize
from treering.errors import CorruptError, FormatError, TreeringError, UnsupportedError

EACH_STATES: Final = "treering.checkpoint.EachStates"
"""Class of the states of all processes. Its containers are of a kind of their own, which versions that would give them
to an object as its one state do not know."""

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_SHOWN: Final = 200
_WRITTEN_SURROGATE: Final = re.compile("~u([0-9a-f]{4})")


def escape_surrogates(key: str) -> str:
    r"""Return a key text as documents hold it: half a surrogate pair, which JSON cannot keep, is ``~u`` and its number.

    Example:
        >>> escape_surrogates("a/\ud800")
        'a/~ud800'
    """
    return _SURROGATE.sub(lambda found: f"~u{ord(found[0]):04x}", key)


def unescape_surrogates(text: str) -> str:
    r"""Return the key text that `escape_surrogates` wrote.

    Example:
        >>> unescape_surrogates("a/~ud800") == "a/\ud800"
        True
    """
    return _WRITTEN_SURROGATE.sub(lambda found: chr(int(found[1], 16)), text) if "~u" in text else text


# ------------------------------------------------------------------------------------------------------------- as JSON


def encode_structure(structure: Sequence[Token]) -> list[Any]:
    """Return the tokens as JSON: numbers of leaves, and an object for each container.

    Raises:
        UnsupportedError: a key or static field has no form in the document.

    Example:
        >>> encode_structure([Container(node="dict", keys=("a", "b")), 2])
        [{'node': 'dict', 'keys': ['a', 'b']}, 2]
    """
    return [token if type(token) is int else encode_container(token) for token in structure]  # type: ignore[arg-type]


def encode_container(container: Container) -> dict[str, Any]:
    """Return the token of a container as JSON."""
    is_each = container.class_name == EACH_STATES
    node: dict[str, Any] = {"node": "each" if is_each else container.node}
    match container.node:
        case "dict":
            node["keys"] = _encode_keys(container.keys)
        case "list" | "tuple":
            node["length"] = len(container.keys)
        case _:
            node |= {"class": container.class_name, "fields": _encode_keys(container.keys)}
            if container.node == "other":
                node["static"] = {name: encode_key(value) for name, value in container.static}
                _check_static(container.static, UnsupportedError, f"a {container.class_name}")
    return node


def _encode_keys(keys: Sequence[Any]) -> list[Any]:
    # Nearly always all of them are plain names.
    if {*map(type, keys)} == {str} and "".join(keys).isascii():
        return list(keys)
    encoded = [encode_key(key) for key in keys]
    check_hashes(keys, "the keys of a container", UnsupportedError)
    return encoded


def _check_static(static: Sequence[tuple[str, Any]], error: type[TreeringError], what: str) -> None:
    for name, value in static:
        if name == KEYS and type(value) is tuple:
            check_hashes(value, f"the keys of {what}", error)


def decode_structure(nodes: list[Any], leaves: int) -> list[Token]:
    """Return the tokens that `encode_structure` wrote.

    Args:
        nodes: the list.
        leaves: how many leaves there are; no more children than leaves and containers are believed in.

    Raises:
        CorruptError: a token makes no sense, or the numbers of leaves do not add up.
        FormatError: a container of a kind that this version does not know.

    Example:
        >>> decode_structure([{"node": "list", "length": 2}, 2], 2)
        [Container(node='list', keys=(0, 1), class_name=None, static=()), 2]
    """
    found = in_runs = children = 0
    most = leaves + len(nodes) - 1
    tokens: list[Token] = []
    # Layers have the same names in them; those were checked once, and one container stands for all.
    known: dict[tuple[Any, ...], Container] = {}
    for number, node in enumerate(nodes):
        if type(node) is int:
            if not 0 < node <= leaves:
                raise CorruptError(f"token {number} of the structure counts {show(node)} leaves, of {leaves} in all")
            in_runs += node
            tokens.append(node)
            continue
        container = _find_repeated(node, known) or decode_container(
            node, f"token {number} of the structure", most - children
        )
        if container.node == "dict":
            known[container.keys] = container
        found += 1
        children += len(container.keys)
        tokens.append(container)
    check_counts(leaves, in_runs=in_runs, containers=found, children=children)
    return tokens


def check_counts(leaves: int, *, in_runs: int, containers: int, children: int) -> None:
    """Require that the tokens count as many leaves as there are, and that every child is a container or a leaf.

    Raises:
        CorruptError: they do not.
    """
    if in_runs != leaves:
        raise CorruptError(f"the structure has {pluralize(in_runs, 'leaves')}, there are {pluralize(leaves, 'keys')}")
    if children != (there := containers + leaves - 1):
        raise CorruptError(f"the containers have {pluralize(children, 'children')}, there are {there} of them")


def _find_repeated(node: Any, known: dict[tuple[Any, ...], Container]) -> Container | None:
    if type(node) is dict and node.get("node") == "dict":
        keys = node.get("keys")
        if type(keys) is list and set(map(type, keys)) == {str}:
            return known.get(tuple(keys))
    return None


def decode_container(node: Any, what: str, most: int) -> Container:
    """Return the container that a token stands for; ``most`` is how many children there can be for it."""
    kind = member(node, "node", str, what)
    match kind:
        case "dict":
            return Container(node=kind, keys=_decode_keys(node, "keys", what))
        case "list" | "tuple":
            length = member(node, "length", int, what)
            if not 0 <= length <= most:
                raise CorruptError(f"{what} is a {kind} of {show(length)} items; the tree has {most} for it")
            return Container(node=kind, keys=tuple(range(length)))
        case "namedtuple" | "other" | "each":
            fields, name = _decode_keys(node, "fields", what), member(node, "class", str, what)
            nodes = member(node, "static", dict, what) if kind != "namedtuple" else {}
            static = tuple((name, decode_key(value, f"{what}, {name!r},")) for name, value in nodes.items())
            _check_static(static, CorruptError, what)
            if (kind == "each") != (name == EACH_STATES):
                raise CorruptError(f"{what} is of the kind {kind}, but its class is {show(name)}")
            return Container(node="other" if kind == "each" else kind, keys=fields, class_name=name, static=static)
        case _:
            raise FormatError(f"{what} is a container of the unknown kind {kind[:60]!r}", hint="use a newer treering")


def _decode_keys(node: dict[str, Any], name: str, what: str) -> tuple[Any, ...]:
    keys = member(node, name, list, what)
    if set(map(type, keys)) <= {str}:
        found = tuple(keys)
    else:
        found = tuple(decode_key(key, f"a key of {what}") for key in keys)
        check_hashes(found, f"the keys of {what}")
    texts = found if keys == list(found) else tuple(map(key_text, found))
    if len(set(found)) != len(found) or len(set(texts)) != len(texts):
        raise CorruptError(f"{what} has two children of the same name")
    if any(holds_text(key) for key in found if type(key) is tuple):  # few keys are tuples
        raise CorruptError(
            f"{what} has a tuple for a key that holds the text of an object; such a tuple is text itself"
        )
    return found


# ------------------------------------------------------------------------------------------------------------ key texts


def check_keys(structure: Sequence[Token], keys: Sequence[str]) -> None:
    """Require that the key texts are those that the structure gives.

    Raises:
        CorruptError: they are not, or the structure is not one tree or more than 1,024 levels deep, or two leaves have
            one key.

    Example:
        >>> check_keys([Container(node="dict", keys=("a", "b")), 2], ["a", "b"])
        >>> check_keys([Container(node="dict", keys=("a", "b")), 2], ["a", "c"])
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: leaf 1 has the key 'c', the structure says 'b'
    """
    with raising_corrupt(FormatError):
        # One at a time: a hostile structure may say far more than the keys that are there.
        texts = (above + name for above, names in iter_runs(structure) for name in names)
        for leaf, (key, text) in enumerate(itertools.zip_longest(keys, texts)):
            if key != text:
                shown, said = (each and shorten(each, _SHOWN) for each in (key, text))  # what is said may be huge
                raise CorruptError(f"leaf {leaf} has the key {shown!r}, the structure says {said!r}")
    if len(set(keys)) != len(keys):
        raise CorruptError("two leaves have the same key")


COLUMNS: Final = ("leaf", "file", "offset", "nbytes", "block")
"""The columns of chunks that hold whole numbers."""

_CHECKSUM: Final = "xxh3-64"
_DIGEST: Final = "xxh3-128"


def encode_chunks(index: Index) -> dict[str, Any]:
    """Return the chunks as JSON, a list for each column."""
    columns: dict[str, Any] = {name: list(getattr(index.chunks, name)) for name in COLUMNS}
    return columns | {"box": list(index.chunks.box), "codec": None}


def check_ints(column: list[Any], limit: int, what: str) -> None:
    """Require that a list holds integers from 0 up to, but not including, ``limit``.

    Raises:
        CorruptError: something else is in it.

    Example:
        >>> check_ints([0, 3], 4, "the column")
        >>> check_ints([0, True], 4, "the column")
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: the column holds something other than whole numbers
    """
    if not set(map(type, column)) <= {int}:
        raise CorruptError(f"{what} holds something other than whole numbers")
    check_range(column, limit, what)


def check_range(column: list[int], limit: int, what: str) -> None:
    """Require that whole numbers are from 0 up to, but not including, ``limit``. Raises ``CorruptError``."""
    if column and (min(column) < 0 or max(column) >= limit):
        raise CorruptError(f"{what} holds a number that is not from 0 to {limit - 1}")


def decode_chunks(node: Any, tree: TreeColumns, files: int) -> Chunks:
    """Return the columns of chunks; `check_chunks` says whether they fit the rest.

    Raises:
        CorruptError: the columns are no columns of whole numbers, or of unequal length.
        FormatError: the bytes lie there in a coded form, which a newer version wrote.
    """
    what = "the table of chunks"
    check_codec(node)
    columns = {name: member(node, name, list, what) for name in COLUMNS}
    boxes = member(node, "box", list, what)
    check_lengths(*columns.values(), boxes)
    limits = {"leaf": len(tree.keys), "file": files}
    for name, column in columns.items():
        check_ints(column, limits.get(name, LIMIT), f"the column {name!r} of the chunks")
    return Chunks(**columns, box=decode_boxes(boxes))


def check_codec(node: Any) -> None:
    """Require that the bytes of the chunks lie there as they are. Raises ``FormatError`` where they do not."""
    if type(node) is dict and node.get("codec") is not None:
        raise FormatError(f"the chunks are packed with the codec {show(node['codec'])}", hint="use a newer treering")


def check_lengths(*columns: Sequence[Any]) -> None:
    """Require that the columns of chunks are of equal length. Raises ``CorruptError`` where they are not."""
    if len(set(map(len, columns))) != 1:
        raise CorruptError("the columns of the table of chunks are of unequal length")


def decode_boxes(boxes: list[Any]) -> list[Box | None]:
    """Return boxes that lie in a document as lists.

    Raises:
        CorruptError: one is no list of pairs of whole numbers.
    """
    if boxes.count(None) != len(boxes):
        boxes = [None if box is None else _decode_box(box, number) for number, box in enumerate(boxes)]
        sides = itertools.chain.from_iterable(box for box in boxes if box is not None)
        check_ints([*itertools.chain.from_iterable(sides)], LIMIT, "the column 'box' of the chunks")
        check_hashes(boxes, "the boxes of the chunks")
    return boxes


def _decode_box(node: Any, number: int) -> Box:
    try:
        return tuple([(start, stop) for start, stop in node])
    except (TypeError, ValueError):
        raise CorruptError(f"the box of chunk {number} is not a list of pairs") from None


def read_free_json(document: dict[str, Any], name: str, what: str) -> dict[str, Any]:
    """Return a member that is an object of people's own, no deeper than a walk over it can go.

    Raises:
        CorruptError: it is no object, or deeper.
    """
    found = member(document, name, dict, what)
    with raising_corrupt(UnsupportedError):
        check_json(found, name)
    return found


def encode_checksums(checksums: array[int]) -> dict[str, str]:
    """Return the table of checksums as JSON.

    Example:
        >>> encode_checksums(array("Q", [1]))
        {'algorithm': 'xxh3-64', 'table': 'AQAAAAAAAAA='}
    """
    return {"algorithm": _CHECKSUM, "table": to_base64(pack_checksums(checksums))}


def decode_checksums(node: Any) -> array[int]:
    """Return the table that `encode_checksums` wrote.

    Raises:
        CorruptError: it is no table of numbers of 8 bytes.
        FormatError: it is of an algorithm that this version does not know.
    """
    what = "the table of checksums"
    if (algorithm := member(node, "algorithm", str, what)) != _CHECKSUM:
        raise FormatError(f"{what} is of the unknown algorithm {algorithm[:60]!r}", hint="use a newer treering")
    table = from_base64(member(node, "table", str, what), what)
    if len(table) % 8:
        raise CorruptError(f"{what} has {pluralize(len(table), 'bytes')}, not 8 for each")
    return unpack_checksums(table)


def encode_digests(digests: bytes, saves: int) -> dict[str, Any]:
    """Return the digests of the chunks as JSON, and how many saves in a row have shared files.

    Example:
        >>> encode_digests(bytes(16), 2)
        {'algorithm': 'xxh3-128', 'table': 'AAAAAAAAAAAAAAAAAAAAAA==', 'saves': 2}
    """
    return {"algorithm": _DIGEST, "table": to_base64(digests), "saves": saves}


def decode_digests(document: dict[str, Any], chunks: int) -> tuple[bytes, int]:
    """Return what `encode_digests` wrote; nothing where a save noted none, or notes what this version does not know.

    Raises:
        CorruptError: it is no table of 16 bytes for each chunk.
    """
    what = "the table of digests"
    if "digests" not in document or (node := member(document, "digests", dict, what)).get("algorithm") != _DIGEST:
        return b"", 0
    table, saves = from_base64(member(node, "table", str, what), what), member(node, "saves", int, what)
    if len(table) != DIGEST_BYTES * chunks or not 0 <= saves < LIMIT:
        raise CorruptError(f"{what} has {pluralize(len(table), 'bytes')} for {pluralize(chunks, 'chunks')}")
    return table, saves


def encode_tree(tree: TreeColumns) -> Iterator[tuple[str, Any]]:
    """Yield the members of a tree.

    Raises:
        UnsupportedError: a key or static field of the structure has no form in a document.
    """
    yield "structure", encode_structure(tree.structure)
    yield "types", [encode_type(kind) for kind in tree.types]
    keys = list(tree.keys)
    if not "".join(keys).isascii():
        keys = [escape_surrogates(key) for key in keys]
    yield "leaves", {"key": keys, "type": list(tree.leaf_types)}
    yield "values", encode_values(tree)


def encode_values(tree: TreeColumns) -> list[Any]:
    """Return the values of the leaves that lie in no file, in the order of the leaves, as JSON."""
    return [
        None if kind == "none" else encode_value(kind, tree.values[leaf])
        for leaf, kind in _iter_unstored(tree.types, tree.leaf_types)
    ]


def decode_tree(document: Any, what: str) -> TreeColumns:
    """Return the tree that a parsed document holds, with everything in it checked.

    Args:
        document: the document.
        what: what it is, for messages.

    Raises:
        CorruptError: its members do not fit each other; the message names the leaf.
        FormatError: a kind of leaf, container or key is unknown: a newer version wrote it.
        UnsupportedError: it has a dtype that this version does not know.
    """
    leaves = member(document, "leaves", dict, what)
    keys = check_texts(member(leaves, "key", list, "leaves"), "the column of keys")
    leaf_types = member(leaves, "type", list, "leaves")
    types = decode_types(document, what)
    check_ints(leaf_types, len(types), "the column of leaf types")
    if len(leaf_types) != len(keys):
        raise CorruptError(f"there are {pluralize(len(keys), 'keys')} and {pluralize(len(leaf_types), 'leaf types')}")
    if "~u" in "".join(keys):
        keys = [unescape_surrogates(key) for key in keys]
    structure = decode_structure(member(document, "structure", list, what), len(keys))
    check_keys(structure, keys)
    values = decode_values(document, what, keys, types, leaf_types)
    return TreeColumns(structure=structure, keys=keys, types=types, leaf_types=leaf_types, values=values)


def decode_types(document: Any, what: str) -> list[LeafType]:
    """Return the types of leaves that a parsed document lists.

    Raises:
        CorruptError, FormatError, UnsupportedError: as `decode_type` says.
    """
    types = [decode_type(node, number) for number, node in enumerate(member(document, "types", list, what))]
    check_hashes([kind.shape for kind in types], "the shapes of the types")
    return types


def decode_values(
    document: Any, what: str, keys: Sequence[str], types: Sequence[LeafType], leaf_types: Sequence[int]
) -> dict[int, Any]:
    """Return the values of the leaves that lie in no file, by the numbers of these.

    Raises:
        CorruptError: they are not as many as there are such leaves, or one is not of its kind.
    """
    unstored = list(_iter_unstored(types, leaf_types))
    nodes = member(document, "values", list, what)
    if len(unstored) != len(nodes):
        count = pluralize(len(unstored), "leaves lie")
        raise CorruptError(f"{count} in no file, there are {pluralize(len(nodes), 'values')}")
    pairs = zip(unstored, nodes, strict=True)
    return {leaf: decode_value(kind, node, f"the value of leaf {keys[leaf]!r:.200}") for (leaf, kind), node in pairs}


def _iter_unstored(types: Sequence[LeafType], leaf_types: Sequence[int]) -> Iterator[tuple[int, str]]:
    kinds = [None if kind.stored else kind.kind for kind in types]
    for leaf, number in enumerate(leaf_types if any(kinds) else ()):
        if (kind := kinds[number]) is not None:
            yield leaf, kind
