"""A listing laid out as rows: what the globs keep, folded below a depth, with the totals of every branch.

Everything here walks with its own stack: a file may nest 100,000 deep, Python's calls may not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from treering._format.index import OpaqueLeaf
from treering._format.listing import LeafRecord, Named
from treering._format.structure import key_text
from treering._values.keys import GlobSet, escape_part
from treering._view.plain import cut

_LONGEST_VALUE = 200
_NUMBER_BYTES = {bool: 1, int: 8, float: 8, complex: 16}
_TIMESTAMP_BYTES = 12
_NUMBER_BITS = 64
_WIDEST_NUMBER = 10_000
"""Bits from which an int is shown in hexadecimal: Python refuses to write a longer one in decimal."""
LONGEST_KEY = 1000
"""A longer key text is cut in its middle: a hostile file may nest 100,000 names."""

T = TypeVar("T")
States: TypeAlias = tuple[Any, ...] | None
"""The state of each glob at one branch; None below a branch that a glob keeps whole: nothing is left to match."""


def is_branch(node: Any) -> bool:
    """Tell whether a node of a listing holds further nodes.

    Example:
        >>> is_branch({}), is_branch("text")
        (True, False)
    """
    return isinstance(node, dict | list | tuple)


def branch_kind(branch: Any) -> str:
    """Name the kind of a branch: "map", "list", "tuple", "namedtuple" or "other".

    Example:
        >>> branch_kind({}), branch_kind(()), branch_kind(Named({}, node="namedtuple", class_name="a.B"))
        ('map', 'tuple', 'namedtuple')
    """
    if isinstance(branch, Named):
        return branch.node
    return "map" if isinstance(branch, dict) else "tuple" if isinstance(branch, tuple) else "list"


def children_of(branch: Any) -> Iterator[tuple[str, Any]]:
    """Walk through the children of a branch with their names; a key that is no text is named as in a key text.

    Example:
        >>> list(children_of({"a": 1, 2: 3})), list(children_of([True]))
        ([('a', 1), ('2', 3)], [('0', True)])
    """
    if isinstance(branch, dict):
        return ((key if isinstance(key, str) else key_text(key), node) for key, node in branch.items())
    return ((str(place), node) for place, node in enumerate(branch))


def weight_of(leaf: Any) -> tuple[int, int, bool]:
    """Answer a leaf's bytes, its elements (0 unless it is an array), and whether it is an array.

    The part of `record_of` that totals need, for files of a million leaves.

    Example:
        >>> weight_of(LeafRecord(kind="array", dtype="int8", shape=(2, 3), nbytes=6, offset=0)), weight_of("text")
        ((6, 6, True), (4, 0, False))
    """
    if isinstance(leaf, LeafRecord):
        is_array = leaf.is_array
        return leaf.nbytes, math.prod(leaf.shape or ()) if is_array else 0, is_array
    return _value_bytes(leaf), 0, False


def record_of(leaf: Any) -> LeafRecord:
    """Return the record of a leaf, also of a small Python value that stands for itself.

    Example:
        >>> record = record_of(7)
        >>> record.kind, record.value, record.nbytes
        ('int', 7, 8)
    """
    if isinstance(leaf, LeafRecord):
        return leaf
    kind = "opaque" if isinstance(leaf, OpaqueLeaf) else "none" if leaf is None else type(leaf).__name__.lower()
    return LeafRecord(kind=kind, dtype=None, shape=None, nbytes=_value_bytes(leaf), offset=None, value=leaf)


def value_text(leaf: Any) -> str | None:
    """Return a small Python value as Python writes it, cut beyond 200 characters; None for None and what was not read.

    Example:
        >>> value_text(7), value_text("text"), value_text(None)
        ('7', "'text'", None)
    """
    return None if leaf is None or isinstance(leaf, LeafRecord) else format_value(leaf, _LONGEST_VALUE)[:_LONGEST_VALUE]


def format_value(value: Any, longest: int) -> str:
    """Write a small Python value as Python does; of a long text or bytes the beginning, a huge int in hexadecimal.

    Example:
        >>> format_value("text", 2), format_value(1 << 20_000, 9)[:4]
        ("'te'", '0x10')
    """
    if isinstance(value, OpaqueLeaf):
        return value.text
    if isinstance(value, str | bytes | bytearray) and len(value) > longest:
        value = value[:longest]
    return hex(value) if isinstance(value, int) and value.bit_length() > _WIDEST_NUMBER else repr(value)


def has_json(value: Any) -> bool:
    """Tell whether JSON has a small Python value as it is; a number that it lacks is written as text.

    Example:
        >>> has_json(None), has_json(7), has_json(1j)
        (True, True, False)
    """
    is_short = not isinstance(value, int) or value.bit_length() <= _WIDEST_NUMBER
    return value is None or (isinstance(value, int | str | float) and is_short)


def _value_bytes(leaf: Any) -> int:
    if isinstance(leaf, str):
        return len(leaf) if leaf.isascii() else len(leaf.encode("utf-8", "surrogatepass"))
    if isinstance(leaf, bytes | bytearray):
        return len(leaf)
    if isinstance(leaf, int) and leaf.bit_length() > _NUMBER_BITS:
        return (leaf.bit_length() + 7) // 8
    return 0 if leaf is None or isinstance(leaf, OpaqueLeaf) else _NUMBER_BYTES.get(type(leaf), _TIMESTAMP_BYTES)


# --------------------------------------------------------------------------------------------------------- walks


def leaves_of(root: Any, globs: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Walk through the leaves in the file's order, each with its key text.

    Without globs all of them. A glob keeps the leaves that it matches, and everything below a branch that it matches.

    Example:
        >>> list(leaves_of({"a": {"b": 1, "c/d": 2}, "e": 3}))
        [('a/b', 1), ('a/c~1d', 2), ('e', 3)]
        >>> list(leaves_of({"a": {"b": 1}, "e": 3}, ["a"]))
        [('a/b', 1)]
    """
    return ((key, node) for key, node in nodes_of(root, globs) if not is_branch(node))


def nodes_of(root: Any, globs: Sequence[str] = ()) -> Iterator[tuple[str, Any]]:
    """Walk through branches and leaves, each branch before what it holds.

    With globs only what one of them matches, or lies below a branch that one matches.

    Example:
        >>> [key for key, _ in nodes_of({"a": [1, 2]})]
        ['', 'a', 'a/0', 'a/1']
    """
    together, start = start_matching(globs)

    def children(place: tuple[States, Any]) -> Iterator[tuple[str, tuple[States, Any]]] | None:
        states, branch = place
        if states == () or not is_branch(branch):
            return None
        return ((name, (match_name(together, states, name), node)) for name, node in children_of(branch))

    return ((key, node) for key, (states, node) in walk_tree((start, root), children) if states is None)


def walk_tree(root: T, children: Callable[[T], Iterator[tuple[str, T]] | None]) -> Iterator[tuple[str, T]]:
    """Walk through whatever is nested, each node with its key text and before what lies in it.

    Args:
        root: the outermost node.
        children: returns the names and nodes in a node; None where nothing is.

    Example:
        >>> list(walk_tree("ab", lambda text: zip("xy", text) if len(text) > 1 else None))
        [('', 'ab'), ('x', 'a'), ('y', 'b')]
    """
    yield "", root
    stack = [("", 0, children(root) or iter(()))]
    while stack:
        above, depth, left = stack[-1]
        for name, node in left:
            key = child_key(above, depth, name)
            yield key, node
            if (below := children(node)) is not None:
                stack.append((key, depth + 1, below))
                break
        else:
            stack.pop()


def child_key(above: str, depth: int, name: str) -> str:
    """Write the key text of a child, as join_key does: a lone empty part is "~", because the empty text is the root.

    Args:
        above: the key text of its branch, perhaps cut.
        depth: steps from the root to that branch.
        name: the child's name, not escaped.

    Example:
        >>> child_key("", 0, "a"), child_key("a", 1, "b/c"), child_key("", 0, ""), child_key("~", 1, "")
        ('a', 'a/b~1c', '~', '/')
    """
    part = escape_part(name)
    key = part or "~" if not depth else f"/{part}" if depth == 1 and above == "~" else f"{above}/{part}"
    return key if len(key) <= LONGEST_KEY else cut(key, LONGEST_KEY + 1)


def start_matching(globs: Sequence[str]) -> tuple[GlobSet, States]:
    """Return the globs and their state at the root; None where they keep everything."""
    together = GlobSet(globs)
    return together, together.start if globs and not together.accepted(together.start) else None


def match_name(globs: GlobSet, states: States, name: str) -> States:
    """Return the state of globs one name further down; None as soon as one of them matches."""
    below = None if states is None else globs.step(states, name)
    return None if below is None or globs.accepted(below) else below


USUAL_DEPTH = 32
"""Levels shown by default. Real trees have fewer."""
_LONG_LIST = 100

DEEPEST = 200
"""Levels that can be asked for: each row is as long as its depth, so the text grows with their product."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Totals:
    """What a branch adds up to."""

    leaves: int = 0
    """Leaves of every kind."""
    arrays: int = 0
    """Leaves that are arrays."""
    parameters: int = 0
    """Elements of these arrays together."""
    nbytes: int = 0
    """Bytes of data in all leaves, names and headers not counted."""

    def add_leaf(self, leaf: Any) -> None:
        """Count one leaf."""
        nbytes, elements, is_array = weight_of(leaf)
        self.leaves += 1
        self.nbytes += nbytes
        self.arrays += is_array
        self.parameters += elements

    def add(self, other: Totals) -> None:
        """Count what another branch adds up to."""
        self.leaves += other.leaves
        self.arrays += other.arrays
        self.parameters += other.parameters
        self.nbytes += other.nbytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a listing: a leaf, or a branch with its totals."""

    depth: int
    """Steps from the root; the root's children stand at 1."""
    name: str
    """The last part of the path, as it stands in the file: not escaped. The root's is empty."""
    node: Any
    """What stands there: a dict, list or tuple, or a leaf."""
    below: Totals | None
    """For a branch the sum over the kept leaves below it; None for a leaf."""
    closed: str | None
    """Why what lies below has no rows: "depth", too deep; "long", a long list of small values; else None."""

    @property
    def totals(self) -> Totals:
        """The sum over the kept leaves at and below this row."""
        # That of a leaf is not kept in the row: a file may hold a million leaves.
        return _sum([self.node]) if self.below is None else self.below


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreeLayout:
    """The rows of a listing in the file's order, each branch before what it holds."""

    rows: Sequence[Row]
    """The root first; empty when the globs keep nothing."""
    everything: Totals
    """The sum over all leaves, kept or not."""
    kept: Totals
    """The sum over the kept leaves."""


def lay_out(root: Any, *, globs: Sequence[str] = (), depth: int = USUAL_DEPTH) -> TreeLayout:
    """Lay the root of a listing out as rows.

    Without globs everything is kept. A glob keeps the leaves that it matches, and everything below a branch that
    it matches. Branches deeper than ``depth`` are folded into the totals of the row above them, and so is a list of
    more than 100 small Python values, unless a glob looks inside. Time and memory grow with the number of leaves
    and branches, not with how deep they lie.

    Example:
        >>> from treering._format.listing import LeafRecord
        >>> tree = {"a": {"kernel": LeafRecord(kind="array", dtype="float32", shape=(2, 3), nbytes=24, offset=9)}}
        >>> [(row.depth, row.name, row.totals.parameters) for row in lay_out(tree).rows]
        [(0, '', 6), (1, 'a', 6), (2, 'kernel', 6)]
        >>> [(row.name, row.closed) for row in lay_out(tree, depth=1).rows]
        [('', None), ('a', 'depth')]
        >>> lay_out(tree, globs=["b"]).rows
        ()
    """
    rows, everything, kept = list[Row](), Totals(), Totals()
    together, start = start_matching(globs)
    stack = [_OpenBranch(None, kept, iter([("", root)]), start)]
    while stack:
        above, level = stack[-1], len(stack) - 1
        for name, node in above.children:
            states = match_name(together, above.states, name) if level else start
            branch = is_branch(node)
            if branch and not (states is None and _is_long_list(node)):
                total, closed = Totals(), "depth" if level == depth and node else None
                row = Row(depth=level, name=name, node=node, below=total, closed=closed)
                stack.append(_OpenBranch(row, total, children_of(node), states))
                rows += [row] if level <= depth else []
                break
            below = _sum(node) if branch else None
            added = _sum([node]) if below is None else below
            everything.add(added)
            if states is None:
                above.total.add(added)
                if level <= depth:
                    rows.append(Row(depth=level, name=name, node=node, below=below, closed="long" if below else None))
        else:
            stack.pop()
            if stack:
                stack[-1].total.add(above.total)
            if above.states is not None and not above.total.leaves and rows and rows[-1] is above.row:
                rows.pop()
    return TreeLayout(rows=tuple(rows), everything=everything, kept=kept)


def with_keys(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """Walk through the rows with their key texts, each built from its parent's in bounded time.

    Example:
        >>> [key for key, _ in with_keys(lay_out({"a": {"b": 1}}).rows)]
        ['', 'a', 'a/b']
    """
    above: list[str] = []
    for row in rows:
        del above[row.depth :]
        above.append(child_key(above[-1], row.depth - 1, row.name) if row.depth else "")
        yield above[-1], row


class _OpenBranch(NamedTuple):
    """A branch whose children are being walked."""

    row: Row | None
    """Its row, which is not among the rows where the branch lies too deep; None above the root."""
    total: Totals
    children: Iterator[tuple[str, Any]]
    states: States


def _sum(leaves: Iterable[Any]) -> Totals:
    total = Totals()
    for leaf in leaves:
        total.add_leaf(leaf)
    return total


def _is_long_list(branch: Any) -> bool:
    """Tell whether a list is long and holds nothing but small Python values: a vocabulary, a history of losses."""
    is_long = not isinstance(branch, dict) and len(branch) > _LONG_LIST
    return is_long and not any(is_branch(value) or isinstance(value, LeafRecord) for value in branch)
