"""A tree -> what saving it needs: its leaves, who writes which box, and where everything will lie.

A training loop saves the same structure again and again. What was found out for one save is kept, without any array of
it, and a tree that is the same in all that matters takes it over; whether it is, is looked at leaf by leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Final

from treering._arrays.host import this_processes
from treering._arrays.known_leaves import KnownLeaves
from treering._arrays.outgoing import DescribedLeaves, describe_leaves
from treering._arrays.snapshot import snapshot
from treering._arrays.written import DividedSave, SaveLayout, divide_save
from treering._format.blocks import leaf_bytes
from treering._format.document import data_name
from treering._format.headers import Row, lay_out_files, of_attempt
from treering._format.index import Chunks
from treering._plan.save import FILE_BYTES, SavePlan, plan_save
from treering._tree.flatten import Flattened, flatten
from treering._tree.remembered import KnownStructure
from treering._values.boxes import size_of, whole
from treering._values.processes import Processes
from treering._values.telemetry import phase

_KEPT: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """A tree, planned: nothing was copied from a device yet, and no attempt has begun."""

    flat: Flattened
    """The tree."""
    leaves: DescribedLeaves
    """Its leaves, as this process sees them."""
    processes: Processes
    """Those that save it together."""
    _common: _Entry
    """What was made for these leaves, or for others that are alike."""

    def layout(self, attempt: str) -> SaveLayout:
        """Return where everything will lie in the files of a process that saves alone.

        Args:
            attempt: the save's 16 hexadecimal digits.
        """
        common = self._common
        if common.layout is None:
            leaves = self.leaves
            rows = _shared_out(leaves, _rows(leaves))
            common.layout = lay_out_files("0" * 16, self.flat.keys, leaves.types, leaves.leaf_types, rows)
        chunks, made = common.layout
        headers = [of_attempt(header, attempt) for header in made]
        names = [data_name(attempt, number, len(made)) for number in range(len(made))]
        return SaveLayout(leaves=self.leaves, chunks=chunks, headers=headers, names=names, writers=[0] * len(made))

    def divided(self) -> DividedSave:
        """Return who writes what, in a save by several processes."""
        divided = divide_save(self.flat.keys, self.leaves, self.processes.count, self._common.plan)
        self._common.plan = divided.plan
        return divided

    @property
    def nbytes(self) -> int:
        """How much memory its snapshot takes."""
        return held_bytes(self.leaves)

    def snapshot(self, *, host_local: bool = False) -> TreePlan:
        """Return the same with its leaves in memory that nobody changes any more; see ``snapshot``.

        What this process writes by its plan is there, and what `signature.claim_leaves` may still find to be its own.
        ``flat.leaves`` is empty then: no array of a device is held longer than it has to be.

        Args:
            host_local: keep also the leaves that each process holds alone, which are to be compared.
        """
        wanted = None if self.processes.count == 1 else self._wanted(host_local=host_local)
        flat = dataclasses.replace(self.flat, leaves=[])
        return dataclasses.replace(self, flat=flat, leaves=snapshot(self.leaves, wanted))

    def _wanted(self, *, host_local: bool) -> Iterator[Row]:
        leaves, plan = self.leaves, self.divided()
        for part in plan.plan.parts_of(self.processes.this):
            if plan.stored[part.leaf] in leaves.spread:
                yield plan.stored[part.leaf], part.box
        for number in leaves.sources:
            if number not in leaves.spread and (
                host_local or self.processes.is_coordinator or self.flat.kinds[number] in ("jax", "key")
            ):
                yield number, None


@phase("save/plan")
def plan_tree(tree: Any, processes: Processes | None = None) -> TreePlan:
    """Plan to save a tree.

    Args:
        tree: any pytree.
        processes: those that save it together; None for those of the job that jax runs.

    Raises:
        Unsupported: leaves that cannot be saved; nothing was written.

    Example:
        >>> import numpy as np
        >>> plan = plan_tree({"w": np.zeros(16, "f4"), "step": 3})
        >>> plan.flat.keys, plan.layout("0" * 16).chunks.nbytes
        (['w', 'step'], [64])
    """
    for entry in tuple(_ENTRIES):
        if (found := entry.of(tree, processes)) is not None:
            _remember(entry)
            return found
    flat = flatten(tree)
    if processes is None:
        processes = this_processes(flat.leaves)
    leaves = describe_leaves(flat, processes)
    entry = _Entry(tree, flat, leaves, processes)
    _remember(entry)
    return TreePlan(flat=flat, leaves=leaves, processes=processes, _common=entry)


def held_bytes(leaves: DescribedLeaves) -> int:
    """Return how much memory a snapshot of leaves takes."""
    nbytes = list(map(leaf_bytes, leaves.types))
    own: int = sum(source.data.nbytes for leaf in leaves.spread for source in leaves.sources[leaf])
    return own + sum(nbytes[leaves.leaf_types[leaf]] for leaf in leaves.sources if leaf not in leaves.spread)


def forget() -> None:
    """Let go of all that is kept of earlier plans.

    Example:
        >>> forget()
    """
    _ENTRIES.clear()


class _Entry:
    """A structure that was planned, and what all saves of it have in common, made when it is first asked for.

    Attributes:
        layout: chunks of a process that saves alone, and the headers of its files as those of an attempt of zeros.
        plan: who writes what.
    """

    def __init__(self, tree: Any, flat: Flattened, leaves: DescribedLeaves, processes: Processes) -> None:
        self.layout: tuple[Chunks, list[bytes]] | None = None
        self.plan: SavePlan | None = None
        self._flat = dataclasses.replace(flat, leaves=[])
        self._structure = KnownStructure(tree, flat)
        self._leaves = KnownLeaves(flat, leaves, processes)

    def of(self, tree: Any, processes: Processes | None) -> TreePlan | None:
        """Return the plan of a tree that is the same in all that matters, None for any other."""
        if processes is not None and processes != self._leaves.processes:
            return None
        found = self._structure.leaves(tree)
        if found is None or (processes is None and this_processes(found) != self._leaves.processes):
            return None
        if (leaves := self._leaves.describe(found)) is None:
            return None
        known = self._flat
        flat = Flattened(tokens=known.tokens, keys=known.keys, leaves=found, kinds=known.kinds, opaque=known.opaque)
        return TreePlan(flat=flat, leaves=leaves, processes=self._leaves.processes, _common=self)


_ENTRIES: Final[list[_Entry]] = []


def _remember(entry: _Entry) -> None:
    """Keep an entry as the one that is tried first."""
    # One assignment, which no other thread sees half done; what two threads remember at once may cost one of them.
    _ENTRIES[:] = [entry, *(known for known in tuple(_ENTRIES) if known is not entry)][:_KEPT]


def _rows(leaves: DescribedLeaves) -> list[Row]:
    """Return the boxes that this process writes; a leaf that lies in one piece is written as one."""
    rows: list[Row] = [(number, None) for number, sources in leaves.sources.items() if len(sources) == 1]
    numbers = [number for number, sources in leaves.sources.items() if len(sources) > 1]
    parts = plan_save(list(map(leaves.layout_of, numbers)), 1).parts_of(0)
    return rows + [(numbers[part.leaf], part.box) for part in parts]


def _shared_out(leaves: DescribedLeaves, rows: Sequence[Row]) -> list[list[Row]]:
    """Share the rows out to files; one that is larger than a file's limit has a file of its own."""
    files: list[list[Row]] = [[]]
    held = 0
    for row in rows:
        nbytes = _nbytes(leaves, row)
        if held and held + nbytes > FILE_BYTES:
            files.append([])
            held = 0
        files[-1].append(row)
        held += nbytes
    return files if rows else []


def _nbytes(leaves: DescribedLeaves, row: Row) -> int:
    leaf, box = row
    kind = leaves.types[leaves.leaf_types[leaf]]
    all_ = whole(kind.shape or ())
    return leaf_bytes(kind) // (size_of(all_) or 1) * size_of(all_ if box is None else box)
