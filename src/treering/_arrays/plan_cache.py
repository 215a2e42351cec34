"""A tree -> what saving it needs: its leaves, who writes which box, and where everything will lie.

A training loop saves the same structure again and again. What was found out for one save is kept, without any array of
it, and a tree that is the same in all that matters takes it over; whether it is, is looked at leaf by leaf.

Leaves that were described once let others that are alike be described again many times faster, and never wrong: what is
compared is all that a description is made of.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from treering._arrays.host import this_processes
from treering._arrays.outgoing import (
    DescribedLeaves,
    Describer,
    DividedSave,
    HeldBox,
    SaveLayout,
    describe_leaves,
    divide_save,
    is_large,
)
from treering._arrays.snapshot import snapshot
from treering._format.document import data_name
from treering._format.index import Chunks, LeafType, leaf_bytes
from treering._format.safetensors import Row, lay_out_files, of_attempt
from treering._plan.save import FILE_BYTES, SavePlan, plan_save
from treering._tree.flatten import Flattened, flatten
from treering._tree.remembered import KnownStructure
from treering._values.boxes import Box, size_of, whole
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
        for number, box in plan.plan.parts_of(self.processes.this):
            if plan.stored[number] in leaves.spread:
                yield plan.stored[number], box
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
        UnsupportedError: leaves that cannot be saved; nothing was written.

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
        self.plan: SavePlan[Box] | None = None
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
    return rows + [(numbers[number], box) for number, box in parts]


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


_TEXTS: Final = ("str", "bytes", "bytearray")
_AVAL: Final = operator.attrgetter("aval")
_SHAPE_AND_DTYPE: Final = operator.attrgetter("shape", "dtype")
_SHARDING: Final = operator.attrgetter("sharding")

_Picks = tuple[tuple[Box, Any], ...]
"""The boxes of an array that are wanted, each with the device that holds it."""
_Match = Callable[[Sequence[Any]], bool]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Sources(Mapping[int, tuple[HeldBox, ...]]):
    """The boxes of leaves that are alike: for thousands of leaves nothing is made until it is asked for."""

    order: Sequence[int]
    whole: Mapping[int, Box]
    picked: Mapping[int, _Picks]
    anew: Mapping[int, tuple[HeldBox, ...]]
    leaves: Sequence[Any]

    def __getitem__(self, number: int) -> tuple[HeldBox, ...]:
        if (box := self.whole.get(number)) is not None:
            return (HeldBox(box, self.leaves[number]),)
        if (picks := self.picked.get(number)) is None:
            return self.anew[number]
        held = {shard.device: shard.data for shard in self.leaves[number].addressable_shards}
        return tuple(HeldBox(box, held[device]) for box, device in picks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)

    def __len__(self) -> int:
        return len(self.order)


def _match_numpy(arrays: Sequence[Any]) -> _Match:
    """Return what tells whether other numpy arrays are like these, one by one."""
    facts = list(map(_SHAPE_AND_DTYPE, arrays))
    return lambda others: list(map(_SHAPE_AND_DTYPE, others)) == facts


def _match_jax(arrays: Sequence[Any]) -> _Match:
    """Return what tells whether other jax arrays are like these, one by one, and have bytes."""
    avals, shardings = list(map(_AVAL, arrays)), list(map(_SHARDING, arrays))
    # Asked of the class, which all of them share: this is most of what a comparison costs.
    is_deleted = type(arrays[0]).is_deleted
    return lambda others: (
        _all_alike(
            list(map(_AVAL, others)), avals, lambda one, other: one.shape == other.shape and one.dtype == other.dtype
        )
        and _all_alike(
            list(map(_SHARDING, others)), shardings, lambda one, other: type(one) is type(other) and one == other
        )
        and not any(map(is_deleted, others))
    )


def _all_alike(found: Sequence[Any], known: Sequence[Any], alike: Callable[[Any, Any], bool]) -> bool:
    # What one jitted function gives time and again are a few objects; others are compared once for each pair.
    if all(map(operator.is_, found, known)):
        return True
    others = {(id(one), id(other)): (one, other) for one, other in zip(found, known, strict=True) if one is not other}
    return all(itertools.starmap(alike, others.values()))


class KnownLeaves:
    """What was found of the leaves of a tree.

    Args:
        flat: the tree.
        leaves: its leaves, described.
        processes: those that save it together.

    Example:
        >>> import numpy as np
        >>> from treering._arrays.outgoing import ALONE, describe_leaves
        >>> from treering._tree.flatten import flatten
        >>> flat = flatten({"w": np.zeros(3), "step": 1})
        >>> known = KnownLeaves(flat, describe_leaves(flat), ALONE)
        >>> again = known.describe([np.ones(3), 2])
        >>> again.data_of(0, None), again.values
        (array([1., 1., 1.]), {1: 2})
        >>> known.describe([np.ones(4), 2]) is None
        True
    """

    def __init__(self, flat: Flattened, leaves: DescribedLeaves, processes: Processes) -> None:
        self.processes = processes
        self._empty = dataclasses.replace(leaves, sources={}, values={})
        self._order = list(leaves.sources)
        self._values = list(leaves.values)
        self._opaque = {number: value for number, value in leaves.values.items() if flat.kinds[number] == "opaque"}
        self._texts = [(number, flat.kinds[number]) for number in leaves.values if flat.kinds[number] in _TEXTS]
        self._whole: dict[int, Box] = {}
        self._picked: dict[int, _Picks] = {}
        self._anew: list[tuple[int, str, LeafType]] = []
        shared: dict[_Picks, _Picks] = {}
        for number, sources in leaves.sources.items():
            kind, leaf = flat.kinds[number], flat.leaves[number]
            if kind in ("jax", "numpy") and len(sources) == 1 and sources[0].data is leaf:
                self._whole[number] = sources[0].box
            elif kind == "jax":
                # Which device holds which box follows from sharding and shape.
                devices = {id(shard.data): shard.device for shard in leaf.addressable_shards}
                picks = tuple((source.box, devices[id(source.data)]) for source in sources)
                self._picked[number] = shared.setdefault(picks, picks)
            else:
                self._anew.append((number, kind, leaves.types[leaves.leaf_types[number]]))
        self._columns: list[tuple[Callable[[Sequence[Any]], Any], _Match]] = []
        for kind, match in (("jax", _match_jax), ("numpy", _match_numpy), ("key", _match_jax)):
            if numbers := [number for number in leaves.sources if flat.kinds[number] == kind]:
                take = operator.itemgetter(*numbers, numbers[0])  # of two and more it makes a tuple
                self._columns.append((take, match(take(flat.leaves))))

    def describe(self, leaves: Sequence[Any]) -> DescribedLeaves | None:
        """Describe leaves of the same kinds, in the same order; None where one of them is not alike.

        Args:
            leaves: as many as there were.
        """
        if any(is_large(kind, leaves[number]) for number, kind in self._texts):
            return None
        if not all(matches(take(leaves)) for take, matches in self._columns):
            return None
        # The few that are not simply compared with what they were: keys, numpy scalars, long texts.
        describer = Describer(self.processes)
        found = [describer.describe(kind, leaves[number]) for number, kind, _ in self._anew]
        types = tuple(describer.numbers)
        if any(types[number] != row[2] for (number, _, _), row in zip(found, self._anew, strict=True)):
            return None
        anew = {number: boxes for (number, _, _), (_, boxes, _) in zip(self._anew, found, strict=True)}
        values = {number: leaves[number] for number in self._values} | self._opaque
        sources = _Sources(self._order, self._whole, self._picked, anew, leaves)
        return dataclasses.replace(self._empty, sources=sources, values=values)
