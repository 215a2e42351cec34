"""Pytree -> the structure, key texts and leaves that a checkpoint holds, in one walk that keeps its own stack."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Final

from treering._format.index import MAX_LEVELS, OpaqueLeaf, Token
from treering._format.key_text import key_text
from treering._printable import listed, printable
from treering._tree.flatten_leaves import KINDS, WRITABLE, KindOf, kind_in_target, kind_to_save
from treering._tree.flatten_nodes import opened
from treering._tree.static_text import opaque_of
from treering._values.human import counted
from treering._values.keys import escape_part, split_key
from treering.errors import Unsupported

_LONGEST_KEY: Final = 400


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flattened:
    """A tree as a checkpoint sees it."""

    tokens: list[Token]
    """The containers in pre-order, and between them how many leaves come next."""
    keys: list[str]
    """Key text of each leaf."""
    leaves: list[Any]
    """The leaves themselves."""
    kinds: list[str]
    """Kind of each leaf: one of ``ARRAY_KINDS`` or ``PYTHON_KINDS``; in a target also "abstract"."""
    opaque: dict[int, OpaqueLeaf]
    """Leaf number -> what stands in a file for an opaque leaf."""


def flatten(tree: Any) -> Flattened:
    """Return what a checkpoint holds of ``tree``. No array is touched.

    None is a leaf. Containers are dict (its order and the types of its keys are kept), list, tuple, namedtuple, and
    as "other" nodes every further class that jax knows as a pytree node, what only a state-dict handler knows, and
    dataclasses that nobody registered. A class stands there by its name with its static fields: those of a
    dataclass that are no children, the function of a ``Partial``, the factory of a ``defaultdict``, else as "aux"
    what the class told jax. The children of an OrderedDict, FrozenDict or other mapping are its fields; where a key
    is no str, its fields are their texts and a static "keys" has the keys themselves. Static fields and keys that a
    file cannot hold are ``ForeignKey``: class and text.

    Functions, dtypes, enums, meshes and shardings, which a ``like`` gives again, are "opaque" leaves.

    Raises:
        Unsupported: one or more leaves that could not be given back; all of them are named, with what to do.
            Dict keys that are alike as text. More than 1,024 levels.

    Example:
        >>> flat = flatten({"w": [1.5, None], "f": abs})
        >>> flat.keys, flat.kinds
        (['w/0', 'w/1', 'f'], ['float', 'none', 'opaque'])
        >>> [token if isinstance(token, int) else (token.node, token.keys) for token in flat.tokens]
        [('dict', ('w', 'f')), ('list', (0, 1)), 3]
    """
    return _Walk(kind_to_save).over(tree)


def flatten_like(like: Any) -> Flattened:
    """Return a target in the same form: nothing is refused as a leaf, and abstract arrays are of kind "abstract".

    Raises:
        Unsupported: dict keys that are alike as text, or more than 1,024 levels.

    Example:
        >>> import jax
        >>> flatten_like({"w": jax.ShapeDtypeStruct((2,), "float32")}).kinds
        ['abstract']
    """
    return _Walk(kind_in_target).over(like)


@dataclasses.dataclass(slots=True)
class _Walk:
    """A walk over one tree, and what it found so far."""

    kind_of: KindOf
    tokens: list[Token] = dataclasses.field(default_factory=list)
    keys: list[str] = dataclasses.field(default_factory=list)
    leaves: list[Any] = dataclasses.field(default_factory=list)
    kinds: list[str] = dataclasses.field(default_factory=list)
    opaque: dict[int, OpaqueLeaf] = dataclasses.field(default_factory=dict)
    refused: list[tuple[str, Unsupported]] = dataclasses.field(default_factory=list)
    counted: int = 0

    def over(self, tree: Any) -> Flattened:
        """Walk over all of it."""
        keys, leaves, kinds = self.keys, self.leaves, self.kinds
        top = self._begin("", tree)
        # A level: its children still to come, and the key text in front of theirs.
        levels: list[tuple[Iterator[tuple[str, Any]], str]] = [] if top is None else [(top, "")]
        while levels:
            children, prefix = levels[-1]
            for part, child in children:
                if "/" in part or "~" in part:
                    part = escape_part(part)  # noqa: PLW2901
                key = prefix + part or "~"  # the one empty part, as join_key writes it
                kind = KINDS.get(type(child))
                if kind is not None and (kind != "numpy" or child.dtype in WRITABLE):
                    keys.append(key)
                    leaves.append(child)
                    kinds.append(kind)
                    continue
                inner = self._begin(key, child)
                if inner is not None:
                    _check_level(key, len(levels) + 1)
                    levels.append((inner, f"{prefix}{part}/"))
                    break
            else:
                levels.pop()
        self._count_leaves()
        self._raise_refused()
        opaque = {number: opaque_of(leaves[number]) for number, kind in enumerate(kinds) if kind == "opaque"}
        return Flattened(tokens=self.tokens, keys=keys, leaves=leaves, kinds=kinds, opaque=opaque)

    def _begin(self, key: str, x: Any) -> Iterator[tuple[str, Any]] | None:
        """Note ``x`` down; return the children of a node with the texts of their keys, None for a leaf."""
        kind = KINDS.get(type(x))
        try:
            node = opened(x) if kind is None else None
            if node is not None:
                self._count_leaves()
                self.tokens.append(node.container)
                return zip(map(key_text, node.container.keys), node.children, strict=True)
            if kind is None or kind == "numpy":
                kind = self.kind_of(x)
        except Unsupported as error:
            self.refused.append((key, error))
            return None
        self.keys.append(key)
        self.leaves.append(x)
        self.kinds.append(kind)
        return None

    def _count_leaves(self) -> None:
        """Note how many leaves came since the last container."""
        count = len(self.keys) - self.counted
        if count:
            self.tokens.append(count)
            self.counted = len(self.keys)

    def _raise_refused(self) -> None:
        if len(self.refused) == 1:
            ((key, error),) = self.refused
            raise Unsupported(error.message, path=split_key(key), hint=error.hint) from error
        if self.refused:
            lines = [f"{_shown(key)}: {error}" for key, error in self.refused]
            raise Unsupported(f"{counted(len(lines), 'leaves')} cannot be saved:{listed(lines)}")


def _check_level(key: str, level: int) -> None:
    if level > MAX_LEVELS:
        raise Unsupported(
            f"the tree is more than {MAX_LEVELS} containers deep",
            path=split_key(key),
            hint="it may hold itself",
        )


def _shown(key: str) -> str:
    text = key if len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]}..."
    return printable(text) or "."
