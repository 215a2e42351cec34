"""A tree -> what saving it needs: its leaves, who writes which box, and where everything will lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from treering._arrays.divided import Divided, divided
from treering._arrays.outgoing import Outgoing, outgoing
from treering._arrays.processes import this_processes
from treering._arrays.snapshot import snapshot
from treering._arrays.written import Layout
from treering._format.headers import Row, laid_out
from treering._ops.signature import signature_of
from treering._plan.save import plan_save
from treering._plan.save_files import FILE_BYTES
from treering._tree.flatten import Flattened, flatten
from treering._values.processes import Processes

__all__ = ["Planned", "planned"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A tree, planned: nothing was copied from a device yet, and no attempt has begun."""

    flat: Flattened
    """The tree."""
    leaves: Outgoing
    """Its leaves, as this process sees them."""
    processes: Processes
    """Those that save it together."""

    def layout(self, attempt: str) -> Layout:
        """Return where everything will lie in the files of a process that saves alone.

        Args:
            attempt: the save's 16 hexadecimal digits.
        """
        rows = _shared_out(self.leaves, _rows(self.leaves))
        chunks, headers = laid_out(attempt, self.flat.keys, self.leaves.types, self.leaves.leaf_types, rows)
        return Layout(leaves=self.leaves, chunks=chunks, headers=headers)

    def divided(self) -> Divided:
        """Return who writes what, in a save by several processes."""
        return divided(self.flat.keys, self.leaves, self.processes.count)

    def signature(self) -> bytes:
        """Return what this process says of the tree; see ``signature_of``."""
        return signature_of(self.flat, self.leaves)

    def snapshot(self, *, host_local: bool = False) -> Planned:
        """Return the same with its leaves in memory that nobody changes any more; see ``snapshot``.

        What this process writes by its plan is there, and what `signature.claimed` may still find to be its own.
        ``flat.leaves`` is empty then: no array of a device is held longer than it has to be.

        Args:
            host_local: keep also the leaves that each process holds alone, which are to be compared.
        """
        leaves = snapshot(self.leaves, self._wanted(host_local=host_local))
        return dataclasses.replace(self, flat=dataclasses.replace(self.flat, leaves=[]), leaves=leaves)

    def _wanted(self, *, host_local: bool) -> Iterator[Row]:
        leaves = self.leaves
        if self.processes.count == 1:
            for number, sources in leaves.sources.items():
                yield from ((number, source.box) for source in sources)
            return
        plan = self.divided()
        for part in plan.plan.parts_of(self.processes.this):
            if plan.stored[part.leaf] in leaves.spread:
                yield plan.stored[part.leaf], part.box
        for number, sources in leaves.sources.items():
            if number not in leaves.spread and (
                host_local or self.processes.leads or self.flat.kinds[number] in ("jax", "key")
            ):
                yield from ((number, source.box) for source in sources)


def planned(tree: Any, processes: Processes | None = None) -> Planned:
    """Plan to save a tree.

    Args:
        tree: any pytree.
        processes: those that save it together; None for those of the job that jax runs.

    Raises:
        Unsupported: leaves that cannot be saved; nothing was written.

    Example:
        >>> import numpy as np
        >>> plan = planned({"w": np.zeros(16, "f4"), "step": 3})
        >>> plan.flat.keys, plan.layout("0" * 16).chunks.nbytes
        (['w', 'step'], [64])
    """
    flat = flatten(tree)
    if processes is None:
        processes = this_processes(flat.leaves)
    return Planned(flat=flat, leaves=outgoing(flat, processes), processes=processes)


def _rows(leaves: Outgoing) -> list[Row]:
    """Return the boxes that this process writes; a leaf that lies in one piece is written as one."""
    rows: list[Row] = [(number, None) for number, sources in leaves.sources.items() if len(sources) == 1]
    numbers = [number for number, sources in leaves.sources.items() if len(sources) > 1]
    (parts,) = plan_save(list(map(leaves.layout_of, numbers)), 1).parts
    return rows + [(numbers[part.leaf], part.box) for part in parts]


def _shared_out(leaves: Outgoing, rows: Sequence[Row]) -> list[list[Row]]:
    """Share the rows out to files; one that is larger than a file's limit has a file of its own."""
    files: list[list[Row]] = [[]]
    held = 0
    for row in rows:
        nbytes = leaves.source_of(*row).data.nbytes
        if held and held + nbytes > FILE_BYTES:
            files.append([])
            held = 0
        files[-1].append(row)
        held += nbytes
    return files if rows else []
