"""A listing laid out as rows: what the globs keep, folded below a depth, with the totals of every branch.

Everything here walks with its own stack: a file may nest 100,000 deep, Python's calls may not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from treering._format.records import LeafRecord
from treering._values.keys import GlobSet
from treering._view.nodes import States, child_key, children_of, is_branch, match_name, start_matching, weight_of

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
        >>> from treering._format.records import LeafRecord
        >>> tree = {"a": {"kernel": LeafRecord(kind="array", dtype="float32", shape=(2, 3), nbytes=24, offset=9)}}
        >>> [(row.depth, row.name, row.totals.parameters) for row in lay_out(tree).rows]
        [(0, '', 6), (1, 'a', 6), (2, 'kernel', 6)]
        >>> [(row.name, row.closed) for row in lay_out(tree, depth=1).rows]
        [('', None), ('a', 'depth')]
        >>> lay_out(tree, globs=["b"]).rows
        ()
    """
    together, start = start_matching(globs)
    builder = _RowBuilder(globs=together, depth=depth)
    builder.enter("", root, start)
    while builder.open:
        builder.advance()
    return TreeLayout(rows=tuple(builder.rows), everything=builder.everything, kept=builder.kept)


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

    row: Row
    """Its row, which is not among the rows where the branch lies too deep."""
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


@dataclasses.dataclass(slots=True, kw_only=True)
class _RowBuilder:
    """The walk over a tree, from the root down, with its own stack."""

    globs: GlobSet
    depth: int
    rows: list[Row] = dataclasses.field(default_factory=list)
    open: list[_OpenBranch] = dataclasses.field(default_factory=list)
    everything: Totals = dataclasses.field(default_factory=Totals)
    kept: Totals = dataclasses.field(default_factory=Totals)

    def advance(self) -> None:
        """Walk to the next child of the innermost open branch, or close that branch."""
        above = self.open[-1]
        for name, node in above.children:
            if self.enter(name, node, match_name(self.globs, above.states, name)):
                return
        self.open.pop()
        self.total.add(above.total)
        if above.states is not None and not above.total.leaves and self.rows and self.rows[-1] is above.row:
            self.rows.pop()

    @property
    def total(self) -> Totals:
        """The sum to which what comes next is added."""
        return self.open[-1].total if self.open else self.kept

    def enter(self, name: str, node: Any, states: States) -> bool:
        """Count a leaf or a long list, or open a branch and answer True."""
        depth = len(self.open)
        branch = is_branch(node)
        if branch and not (states is None and _is_long_list(node)):
            total, closed = Totals(), "depth" if depth == self.depth and node else None
            row = Row(depth=depth, name=name, node=node, below=total, closed=closed)
            self.open.append(_OpenBranch(row, total, children_of(node), states))
            if depth <= self.depth:
                self.rows.append(row)
            return True
        below = _sum(node) if branch else None
        added = _sum([node]) if below is None else below
        for total in (self.everything,) if states is not None else (self.everything, self.total):
            total.add(added)
        if states is None and depth <= self.depth:
            self.rows.append(Row(depth=depth, name=name, node=node, below=below, closed="long" if below else None))
        return False
