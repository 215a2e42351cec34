"""The tree in our documents: containers, leaves and their types in columns, and the values that lie in no file.

Every document of ours has the same four members for them: ``structure``, ``types``, ``leaves`` and ``values``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from treering._codec.documents import member
from treering._format.columns import check_ints
from treering._format.document_parts import texts
from treering._format.index import LeafType, Token
from treering._format.leaf_types import decoded_type, encoded_type
from treering._format.leaf_values import decoded_value, encoded_value
from treering._format.structure_text import check_keys, decoded_structure, encoded_structure, sound_key, unsound_key
from treering._values.hashes import check_hashes
from treering._values.human import counted
from treering.errors import Corrupt


class Tree(Protocol):
    """What has a tree in columns."""

    @property
    def structure(self) -> Sequence[Token]:
        """The containers around the leaves, in pre-order."""

    @property
    def keys(self) -> Sequence[str]:
        """Key text of each leaf."""

    @property
    def types(self) -> Sequence[LeafType]:
        """The different types of leaves."""

    @property
    def leaf_types(self) -> Sequence[int]:
        """Number of the type of each leaf."""

    @property
    def values(self) -> Mapping[int, Any]:
        """Leaf number -> its Python value, for leaves that do not lie in files."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreeColumns:
    """A tree that was read; the members mean what those of ``Index`` do."""

    structure: Sequence[Token]
    keys: Sequence[str]
    types: Sequence[LeafType]
    leaf_types: Sequence[int]
    values: Mapping[int, Any]


def encoded_tree(tree: Tree) -> Iterator[tuple[str, Any]]:
    """Yield the members of a tree.

    Raises:
        Unsupported: a key or static field of the structure has no form in a document.
    """
    yield "structure", encoded_structure(tree.structure)
    yield "types", [encoded_type(kind) for kind in tree.types]
    keys = list(tree.keys)
    if not "".join(keys).isascii():
        keys = [sound_key(key) for key in keys]
    yield "leaves", {"key": keys, "type": list(tree.leaf_types)}
    values = tree.values
    yield (
        "values",
        [
            None if kind == "none" else encoded_value(kind, values[leaf])
            for leaf, kind in _unstored(tree.types, tree.leaf_types)
        ],
    )


def decoded_tree(document: Any, what: str) -> TreeColumns:
    """Return the tree that a parsed document holds, with everything in it checked.

    Args:
        document: the document.
        what: what it is, for messages.

    Raises:
        Corrupt: its members do not fit each other; the message names the leaf.
        Format: a kind of leaf, container or key is unknown: a newer version wrote it.
        Unsupported: it has a dtype that this version does not know.
    """
    leaves = member(document, "leaves", dict, what)
    keys = texts(member(leaves, "key", list, "leaves"), "the column of keys")
    leaf_types = member(leaves, "type", list, "leaves")
    types = [decoded_type(node, number) for number, node in enumerate(member(document, "types", list, what))]
    check_hashes([kind.shape for kind in types], "the shapes of the types")
    check_ints(leaf_types, len(types), "the column of leaf types")
    if len(leaf_types) != len(keys):
        raise Corrupt(f"there are {counted(len(keys), 'keys')} and {counted(len(leaf_types), 'leaf types')}")
    if "~u" in "".join(keys):
        keys = [unsound_key(key) for key in keys]
    structure = decoded_structure(member(document, "structure", list, what), len(keys))
    check_keys(structure, keys)
    unstored = list(_unstored(types, leaf_types))
    nodes = member(document, "values", list, what)
    if len(unstored) != len(nodes):
        raise Corrupt(f"{counted(len(unstored), 'leaves lie')} in no file, there are {counted(len(nodes), 'values')}")
    values = {
        leaf: decoded_value(kind, node, f"the value of leaf {keys[leaf]!r:.200}")
        for (leaf, kind), node in zip(unstored, nodes, strict=True)
    }
    return TreeColumns(structure=structure, keys=keys, types=types, leaf_types=leaf_types, values=values)


def _unstored(types: Sequence[LeafType], leaf_types: Sequence[int]) -> Iterator[tuple[int, str]]:
    kinds = [None if kind.stored else kind.kind for kind in types]
    for leaf, number in enumerate(leaf_types):
        kind = kinds[number]
        if kind is not None:
            yield leaf, kind
