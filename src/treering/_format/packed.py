"""The columns of an index of many leaves: numbers as bytes in base64, equal containers once, key texts not at all.

The functions have the names of those in `treering._format.columns`, which write and read the lists of smaller indexes.
``docs/spec/checkpoint.md`` says how such columns lie in the document, ``docs/design/checkpoint.md`` why.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from treering._codec.documents import json_text, member, raising_corrupt, show
from treering._format import columns
from treering._format.index import LIMIT, Chunks, Container, Index, Token, TreeColumns
from treering._format.leaf_values import encode_type, from_base64, to_base64
from treering._format.structure import iter_runs
from treering._values.human import pluralize
from treering.errors import CorruptError, FormatError

KEY_CHARACTERS: Final = 256
"""The key texts have at most this many characters for each leaf: the structure repeats what it says, they do not."""
STATIC_CHARACTERS: Final = 256
"""And so many the static fields of the containers, each counted as often as it stands there: whoever builds has all."""

# Little endian and unsigned: how a column begins, and what Python's arrays call such items.
_ITEMS: Final = {"u1:": "B", "u2:": "H", "u4:": "I", "u8:": "Q"}


def fits(keys: Sequence[str], structure: Sequence[Token]) -> bool:
    """Tell whether key texts are short enough to be left out of a document, and static fields to be written once.

    Raises:
        UnsupportedError: a key or static field of the structure has no form in a document.

    Example:
        >>> fits(["a", "b" * 511], [2]), fits(["a", "b" * 512], [2])
        (True, False)
    """
    if sum(map(len, keys)) > KEY_CHARACTERS * len(keys):
        return False
    nodes = {id(token): token for token in structure if type(token) is Container and token.static}
    times = Counter(map(id, structure if nodes else ()))
    total = sum(_static_characters(columns.encode_container(node)) * times[number] for number, node in nodes.items())
    return total <= STATIC_CHARACTERS * len(keys)


def _static_characters(node: dict[str, Any]) -> int:
    return len(json_text(node["static"])) if node.get("static") else 0


# -------------------------------------------------------------------------------------------------------------- columns


def pack(column: Sequence[int]) -> str:
    """Return whole numbers from 0 on as text: the size of an item, and the items in base64.

    Example:
        >>> pack([1, 2]), pack([1, 256]), pack([])
        ('u1:AQI=', 'u2:AQAAAQ==', 'u1:')
    """
    bits = max(column, default=0).bit_length()
    size = next(size for size in _ITEMS if bits <= 8 * int(size[1]))
    return size + to_base64(_little_endian(array(_ITEMS[size], column)).tobytes())


def unpack(node: Any, limit: int, what: str) -> list[int]:
    """Return the numbers of a packed column.

    Raises:
        CorruptError: it is none, or a number in it is not below ``limit``.

    Example:
        >>> unpack("u2:AQAAAQ==", 257, "the column")
        [1, 256]
        >>> unpack("u2:AQAAAQ==", 256, "the column")
        Traceback (most recent call last):
        ...
        treering.errors.CorruptError: the column holds a number that is not from 0 to 255
    """
    if type(node) is not str or (code := _ITEMS.get(node[:3])) is None:
        raise CorruptError(f"{what} is {show(node)}, not a packed column")
    data, items = from_base64(node[3:], what), array(code)
    if len(data) % items.itemsize:
        raise CorruptError(f"{what} has {pluralize(len(data), 'bytes')}, not {items.itemsize} for each number")
    items.frombytes(data)
    found = _little_endian(items).tolist()
    if limit < 1 << 8 * items.itemsize:  # else no such item reaches it
        columns.check_range(found, limit, what)
    return found


def _little_endian(items: array[int]) -> array[int]:
    if sys.byteorder == "big":
        items.byteswap()
    return items


# ----------------------------------------------------------------------------------------------------------------- tree


def encode_tree(tree: TreeColumns) -> Iterator[tuple[str, Any]]:
    """Yield the members of a tree.

    Raises:
        UnsupportedError: a key or static field of the structure has no form in a document.
    """
    yield "structure", _encode_structure(tree.structure)
    yield "types", [encode_type(kind) for kind in tree.types]
    yield "leaves", {"type": pack(tree.leaf_types)}
    yield "values", columns.encode_values(tree)


def _encode_structure(structure: Sequence[Token]) -> dict[str, Any]:
    nodes: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    # Layers often share one container, whose text is made once.
    known: dict[int, int] = {}
    tokens: list[int] = []
    for token in structure:
        if type(token) is int:
            tokens.append(-token)
            continue
        if (number := known.get(id(token))) is None:
            node = columns.encode_container(token)  # type: ignore[arg-type]
            if (number := numbers.setdefault(json_text(node), len(nodes))) == len(nodes):
                nodes.append(node)
            known[id(token)] = number
        tokens.append(number)
    runs = len(nodes) - 1
    return {"containers": nodes, "tokens": pack([token if token >= 0 else runs - token for token in tokens])}


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
    types = columns.decode_types(document, what)
    packed_types = member(member(document, "leaves", dict, what), "type", str, "leaves")
    leaf_types = unpack(packed_types, len(types), "the column of leaf types")
    structure = _decode_structure(member(document, "structure", dict, what), len(leaf_types))
    problem = f"the key texts have more than {KEY_CHARACTERS} characters for each leaf"
    keys = key_texts(structure, KEY_CHARACTERS * len(leaf_types), problem)
    values = columns.decode_values(document, what, keys, types, leaf_types)
    return TreeColumns(structure=structure, keys=keys, types=types, leaf_types=leaf_types, values=values)


def _decode_structure(node: dict[str, Any], leaves: int) -> list[Token]:
    nodes = member(node, "containers", list, "the structure")
    runs = len(nodes) - 1
    tokens = unpack(node.get("tokens"), len(nodes) + leaves, "the column of tokens")
    # What one of a kind may have bounds what all of them have.
    most = leaves + len(tokens) - 1
    containers: list[Container] = []
    for number, each in enumerate(nodes):
        containers.append(columns.decode_container(each, f"container {number} of the structure", most))
        most -= len(containers[-1].keys)
    in_runs = found = children = static = 0
    for token, times in Counter(tokens).items():
        if token > runs:
            in_runs += (token - runs) * times
        else:
            found += times
            children += len(containers[token].keys) * times
            static += _static_characters(nodes[token]) * times
    columns.check_counts(leaves, in_runs=in_runs, containers=found, children=children)
    if static > STATIC_CHARACTERS * leaves:
        raise CorruptError(f"the static fields have more than {STATIC_CHARACTERS} characters for each leaf")
    return [containers[token] if token <= runs else token - runs for token in tokens]


def key_texts(structure: Sequence[Token], left: int, problem: str) -> list[str]:
    """Return the key text of each leaf, which follows from the structure.

    Args:
        structure: the structure.
        left: how many characters all of them may have.
        problem: what is wrong where they have more.

    Raises:
        CorruptError: the structure is not one tree or more than 1,024 levels deep, or its key texts are too long.

    Example:
        >>> key_texts([Container(node="dict", keys=("a", "b")), 2], 2, "the key texts are too long")
        ['a', 'b']
    """
    keys: list[str] = []
    with raising_corrupt(FormatError):
        for above, names in iter_runs(structure, left):
            # Before they are made: a few containers may say any number of long ones.
            left -= len(above) * len(names) + sum(map(len, names))
            if left < 0:
                raise CorruptError(problem)
            keys += [above + name for name in names] if above else names
    return keys


# --------------------------------------------------------------------------------------------------------------- chunks


def encode_chunks(index: Index) -> dict[str, Any]:
    """Return the chunks as JSON: a text for each column, or the number that all of its rows have."""
    chunks = index.chunks
    boxes = {box: number for number, box in enumerate(dict.fromkeys(chunks.box))}
    return {
        "leaf": None if list(chunks.leaf) == index.stored_leaves() else pack(chunks.leaf),
        "file": _pack_or_share(chunks.file),
        "offset": pack(chunks.offset),
        "nbytes": _pack_or_share(chunks.nbytes),
        "block": _pack_or_share(chunks.block),
        "boxes": list(boxes),
        "box": _pack_or_share([*map(boxes.__getitem__, chunks.box)]),
        "codec": None,
    }


def _pack_or_share(column: Sequence[int]) -> str | int:
    return column[0] if len(column) > 0 and min(column) == max(column) else pack(column)


def decode_chunks(node: Any, tree: TreeColumns, files: int) -> Chunks:
    """Return the columns of chunks; `treering._format.document.check_chunks` says whether they fit the rest.

    Raises:
        CorruptError: the columns are no columns of whole numbers, or of unequal length.
        FormatError: the bytes lie there in a coded form, which a newer version wrote.
    """
    what = "the table of chunks"
    columns.check_codec(node)
    offset = unpack(member(node, "offset", str, what), LIMIT, "the column 'offset' of the chunks")

    def column(name: str, limit: int = LIMIT) -> list[int]:
        named = f"the column {name!r} of the chunks"
        if type(shared := node.get(name, "")) is not int:
            return unpack(shared, limit, named)
        columns.check_range([shared], limit, named)
        return [shared] * len(offset)

    found: dict[str, Any] = {"file": column("file", files), "nbytes": column("nbytes"), "block": column("block")}
    each = node.get("leaf", "") is None
    found["leaf"] = tree.stored_leaves() if each else column("leaf", len(tree.keys))
    boxes = columns.decode_boxes(member(node, "boxes", list, what))
    found["box"] = [*map(boxes.__getitem__, column("box", len(boxes)))]
    columns.check_lengths(offset, *found.values())
    return Chunks(**found, offset=offset)
