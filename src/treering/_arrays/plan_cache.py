"""A tree -> what saving it needs: its leaves, who writes which box, and where everything will lie.

A training loop saves the same structure again and again. What was found out for one save is kept, without any array of
it, and a tree that is the same in all that matters takes it over; whether it is, is looked at leaf by leaf.

Leaves that were described once let others that are alike be described again many times faster, and never wrong: what is
compared is all that a description is made of. The same holds of the structure: a tree passes only if ``flatten`` would
give the same tokens, keys, kinds and opaque leaves. Containers of Python's own are compared by class, keys and the
classes of their children, all those of one depth at once: most containers of a model are small, there are many, and a
step of the interpreter for each costs more than the comparison. What classes, handlers or an object's inside decide is
opened and looked at as ``flatten`` does it, since that may have changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from treering._arrays.host import shards_of, this_processes
from treering._arrays.outgoing import (
    WHOLE,
    DescribedLeaves,
    Describer,
    DividedSave,
    HeldBox,
    LeafSources,
    SavedPart,
    SaveLayout,
    cast_leaves,
    describe_leaves,
    divide_save,
    is_large,
    snapshot,
)
from treering._format.document import data_name
from treering._format.index import Chunks, Container, Index, leaf_bytes
from treering._format.leaf_values import same_value
from treering._format.safetensors import Row, lay_out_files, of_attempt, single_file
from treering._plan.increment import CHANGED, cut_rows, gather_files, row_bytes
from treering._plan.save import FILE_BYTES, SavePlan, plan_save
from treering._tree.flatten import KINDS, REFUSED, Flattened, flatten, flatten_part, kind_to_save, open_node
from treering._tree.registry import is_namedtuple
from treering._tree.static_values import opaque_of
from treering._values.boxes import Box
from treering._values.processes import Processes
from treering._values.telemetry import phase
from treering.errors import UnsupportedError

_KEPT: Final = 4


@dataclasses.dataclass(slots=True)
class _Common:
    """What all saves of leaves that are alike have in common, made when it is first asked for."""

    layout: tuple[Chunks, list[bytes]] | None = None
    """Chunks of a process that saves alone, and the headers of its files as those of an attempt of zeros."""
    single: tuple[Chunks, list[bytes]] | None = None
    """The same of one file in which no leaf is in parts."""
    header_size: tuple[int, int] | None = None
    """What `single_file` knows of the size of its header."""
    plan: SavePlan[Box] | None = None
    """Who writes what."""
    boxes: list[Row] | None = None
    """The boxes that this process compares with those of an older checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """A tree, planned: nothing was copied from a device yet, and no attempt has begun."""

    flat: Flattened
    """The tree."""
    leaves: DescribedLeaves
    """Its leaves, as this process sees them."""
    processes: Processes
    """Those that save it together."""
    states: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    """Keys of leaves that get the states of all processes, each with that of this one (`treering.each`)."""
    _common: _Common = dataclasses.field(default_factory=_Common)
    """What was made for these leaves, or for others that are alike."""

    def layout(self, attempt: str) -> SaveLayout:
        """Return where everything will lie in the files of a process that saves alone.

        Args:
            attempt: the save's 16 hexadecimal digits.
        """
        common = self._common
        if common.layout is None:
            leaves = self.leaves
            rows = _rows(leaves)
            sizes = row_bytes(rows, leaves.types, leaves.leaf_types)
            files = [[rows[at] for at in file] for file in gather_files([CHANGED] * len(rows), sizes, FILE_BYTES)]
            common.layout = lay_out_files("0" * 16, self.flat.keys, leaves.types, leaves.leaf_types, files)
        chunks, made = common.layout
        headers = [of_attempt(header, attempt) for header in made]
        names = [data_name(attempt, number, len(made)) for number in range(len(made))]
        return SaveLayout(leaves=self.leaves, chunks=chunks, headers=headers, names=names, writers=[0] * len(made))

    def boxes(self) -> list[Row]:
        """Return the boxes in which this process compares what it writes with an older checkpoint."""
        common, leaves = self._common, self.leaves
        if common.boxes is None:
            rows = _rows(leaves) if self.processes.count == 1 else self.divided().rows_of(self.processes.this)
            common.boxes = cut_rows(rows, leaves.types, leaves.leaf_types)
        return common.boxes

    def single_layout(self) -> SaveLayout:
        """Return where everything will lie in one file, with every leaf in one piece, before `single_header` moves it.

        The header is that of a data file.
        """
        leaves, common = self.leaves, self._common
        if leaves.sources.parted:
            joined = LeafSources({number: leaves.whole_of(number) for number in leaves.sources})
            leaves = dataclasses.replace(leaves, sources=joined, casts={})
        if common.single is None:
            rows: list[Row] = [(number, None) for number in leaves.sources]
            common.single = lay_out_files("0" * 16, self.flat.keys, leaves.types, leaves.leaf_types, [rows])
        chunks, headers = common.single
        return SaveLayout(leaves=leaves, chunks=chunks, headers=headers, names=[""], writers=[0])

    def single_header(self, index: Index, header: bytes) -> bytes:
        """Return the bytes before the data of a file of `single_layout`, given its index and the layout's header."""
        _, made, self._common.header_size = single_file(index, header, self._common.header_size)
        return made

    def divided(self) -> DividedSave:
        """Return who writes what, in a save by several processes."""
        divided = divide_save(self.flat.keys, self.leaves, self.processes.count, self._common.plan)
        self._common.plan = divided.plan
        return divided

    @property
    def nbytes(self) -> int:
        """How much memory its snapshot takes."""
        return held_bytes(self.leaves)

    def snapshot(self, *, host_local: bool = False, left: Collection[int] = ()) -> TreePlan:
        """Return the same with its leaves in memory that nobody changes any more; see ``snapshot``.

        What this process writes by its plan is there, and what `signature.claim_leaves` may still find to be its own.
        ``flat.leaves`` is empty then: no array of a device is held longer than it has to be.

        Args:
            host_local: keep also the leaves that each process holds alone, which are to be compared.
            left: the leaves that are not copied, because the bytes of an older checkpoint are shared.
        """
        wanted = None if self.processes.count == 1 else self._wanted(host_local=host_local)
        if left:
            every: Iterator[Row] = ((number, None) for number in self.leaves.sources)
            wanted = (row for row in wanted or every if row[0] not in left)
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
def plan_tree(tree: Any, processes: Processes | None = None, part: SavedPart = WHOLE) -> TreePlan:
    """Plan to save a tree.

    Args:
        tree: any pytree.
        processes: those that save it together; None for those of the job that jax runs.
        part: what of it is saved, and what is cast.

    Raises:
        UnsupportedError: leaves that cannot be saved; nothing was written.
        MismatchError: nothing matches a glob.

    Example:
        >>> import numpy as np
        >>> plan = plan_tree({"w": np.zeros(16, "f4"), "step": 3})
        >>> plan.flat.keys, plan.layout("0" * 16).chunks.nbytes
        (['w', 'step'], [64])
    """
    for entry in tuple(_ENTRIES):
        if (found := entry.of(tree, processes, part)) is not None:
            _remember(entry)
            return found
    whole, flat, numbers = (None, flatten(tree), None) if part.only is None else flatten_part(tree, part.only)
    if processes is None:
        processes = this_processes(flat.leaves if whole is None else whole.leaves)
    leaves = describe_leaves(flat, processes)
    cast = cast_leaves(flat, leaves, part) if part.dtypes else leaves
    plan = TreePlan(flat=flat, leaves=cast, processes=processes)
    if whole is None or REFUSED not in whole.kinds:  # what is refused is looked at anew each time
        empty = dataclasses.replace(cast, sources=LeafSources({}), values={})
        _remember(_Entry(
            structure=KnownStructure(tree, whole or flat), part=part, numbers=numbers,
            leaves=KnownLeaves(flat, leaves, processes),
            plan=dataclasses.replace(plan, flat=dataclasses.replace(flat, leaves=[]), leaves=empty),
        ))  # fmt: skip
    return plan


def held_bytes(leaves: DescribedLeaves, some: Collection[int] | None = None) -> int:
    """Return how much memory a snapshot of leaves takes, of some or of all."""
    types, leaf_types = leaves.held or (leaves.types, leaves.leaf_types)
    nbytes = list(map(leaf_bytes, types))
    every = leaves.sources if some is None else some
    spread = leaves.spread if some is None else [leaf for leaf in some if leaf in leaves.spread]
    own: int = sum(source.data.nbytes for leaf in spread for source in leaves.sources[leaf])
    alone = (leaf for leaf in every if leaf not in leaves.spread) if leaves.spread else every
    return own + sum(map(nbytes.__getitem__, map(leaf_types.__getitem__, alone)))


def forget() -> None:
    """Let go of all that is kept of earlier plans.

    Example:
        >>> forget()
    """
    _ENTRIES.clear()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entry:
    """A structure that was planned."""

    structure: KnownStructure
    """That of the whole tree."""
    part: SavedPart
    """What of it was saved."""
    numbers: Sequence[int] | None
    """The leaves of the tree that were; None: all."""
    leaves: KnownLeaves
    """These leaves."""
    plan: TreePlan
    """Its plan, without any array or value."""

    def of(self, tree: Any, processes: Processes | None, part: SavedPart) -> TreePlan | None:
        """Return the plan of a tree that is the same in all that matters, None for any other."""
        plan = self.plan
        if part != self.part or (processes is not None and processes != plan.processes):
            return None
        found = self.structure.leaves(tree)
        if found is None or (processes is None and this_processes(found) != plan.processes):
            return None
        found = found if self.numbers is None else list(map(found.__getitem__, self.numbers))
        if (known := self.leaves.describe(found)) is None:
            return None
        leaves = dataclasses.replace(plan.leaves, sources=known[0], values=known[1])
        return dataclasses.replace(plan, flat=dataclasses.replace(plan.flat, leaves=found), leaves=leaves)


_ENTRIES: Final[list[_Entry]] = []


def _remember(entry: _Entry) -> None:
    """Keep an entry as the one that is tried first."""
    # One assignment, which no other thread sees half done; what two threads remember at once may cost one of them.
    _ENTRIES[:] = [entry, *(known for known in tuple(_ENTRIES) if known is not entry)][:_KEPT]


def _rows(leaves: DescribedLeaves) -> list[Row]:
    """Return the boxes that this process writes; a leaf that lies in one piece is written as one."""
    counts = {number: len(parts) for number, parts in leaves.sources.parted.items()}
    rows: list[Row] = [(number, None) for number in leaves.sources if counts.get(number, 1) == 1]
    numbers = [number for number, count in counts.items() if count > 1]
    parts = plan_save(list(map(leaves.layout_of, numbers)), 1).parts_of(0)
    return rows + [(numbers[number], box) for number, box in parts]


_TEXTS: Final = ("str", "bytes", "bytearray")
# Kinds of leaves that are arrays themselves, and are compared with what they were; others are described anew.
_COMPARED: Final = ("jax", "numpy")
_AVAL: Final = operator.attrgetter("aval")
_SHAPE_AND_DTYPE: Final = operator.attrgetter("shape", "dtype")
_SHARDING: Final = operator.attrgetter("sharding")
_MANY_ALIKE: Final = 4
"""Leaves for each object that some of them share, from which on it is faster to find the pairs than to compare all."""

_Picks = tuple[tuple[Box, Any], ...]
"""The boxes of an array that are wanted, each with the device that holds it."""
_Match = Callable[[Sequence[Any]], bool]


class _Parts(Mapping[int, tuple[HeldBox, ...]]):
    """The boxes of leaves that lie on several devices: of arrays nothing is made until it is asked for."""

    def __init__(
        self, picks: Mapping[int, _Picks], anew: Mapping[int, tuple[HeldBox, ...]], leaves: Sequence[Any]
    ) -> None:
        self._picks = picks
        self._anew = anew
        self._leaves = leaves
        self._last: tuple[int, tuple[HeldBox, ...]] = (-1, ())

    def __getitem__(self, number: int) -> tuple[HeldBox, ...]:
        if (picks := self._picks.get(number)) is None:
            return self._anew[number]
        # The boxes of a leaf are asked for one after another, and each time jax would make all shards of it.
        last, boxes = self._last
        if last != number:
            held = {shard.device: shard.data for shard in shards_of(self._leaves[number])}
            boxes = tuple([HeldBox(box, held[device]) for box, device in picks])
            self._last = number, boxes
        return boxes

    def __iter__(self) -> Iterator[int]:
        return itertools.chain(self._picks, self._anew)

    def __len__(self) -> int:
        return len(self._picks) + len(self._anew)


def _match_numpy(arrays: Sequence[Any]) -> _Match:
    """Return what tells whether other numpy arrays are like these, one by one."""
    facts = list(map(_SHAPE_AND_DTYPE, arrays))
    return lambda others: list(map(_SHAPE_AND_DTYPE, others)) == facts


def _match_jax(arrays: Sequence[Any]) -> _Match:
    """Return what tells whether other jax arrays are like these, one by one, and have bytes."""
    avals, shardings = list(map(_AVAL, arrays)), list(map(_SHARDING, arrays))
    # Asked of the class, which all of them share: this is most of what a comparison costs.
    is_deleted = type(arrays[0]).is_deleted

    def match(others: Sequence[Any]) -> bool:
        found, known = _to_compare(list(map(_AVAL, others)), avals)
        if list(map(_SHAPE_AND_DTYPE, found)) != list(map(_SHAPE_AND_DTYPE, known)):
            return False
        found, known = _to_compare(list(map(_SHARDING, others)), shardings)
        return list(map(type, found)) == list(map(type, known)) and found == known and not any(map(is_deleted, others))

    return match


def _to_compare(found: list[Any], known: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return what has to be compared, one by one: nothing where each is the same object as before."""
    if all(map(operator.is_, found, known)):
        return [], []
    if _MANY_ALIKE * len(set(map(id, found))) > len(found):
        return found, known
    # What one jitted function gives time and again are a few objects: each pair of them is compared once.
    pairs = {(id(one), id(other)): (one, other) for one, other in zip(found, known, strict=True)}
    return [one for one, _ in pairs.values()], [other for _, other in pairs.values()]


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
        >>> sources, values = known.describe([np.ones(3), 2])
        >>> sources[0][0].data, values
        (array([1., 1., 1.]), {1: 2})
        >>> known.describe([np.ones(4), 2]) is None
        True
    """

    def __init__(self, flat: Flattened, leaves: DescribedLeaves, processes: Processes) -> None:
        self._processes = processes
        self._values = list(leaves.values)
        self._opaque = {number: value for number, value in leaves.values.items() if flat.kinds[number] == "opaque"}
        self._texts = [(number, flat.kinds[number]) for number in leaves.values if flat.kinds[number] in _TEXTS]
        held, kinds = leaves.sources, flat.kinds
        self._whole = [number for number in held.whole if kinds[number] in _COMPARED]
        self._anew = [(n, kinds[n], leaves.types[leaves.leaf_types[n]]) for n in held if kinds[n] not in _COMPARED]
        self._picks: dict[int, _Picks] = {}
        shared: dict[_Picks, _Picks] = {}
        for number, parts in held.parted.items():
            if kinds[number] == "jax":
                # Which device holds which box follows from sharding and shape.
                devices = {id(shard.data): shard.device for shard in shards_of(flat.leaves[number])}
                picks = tuple((source.box, devices[id(source.data)]) for source in parts)
                self._picks[number] = shared.setdefault(picks, picks)
        self._columns: list[tuple[Callable[[Sequence[Any]], Any], _Match]] = []
        for kind, match in (("jax", _match_jax), ("numpy", _match_numpy), ("key", _match_jax)):
            if numbers := [number for number in leaves.sources if flat.kinds[number] == kind]:
                take = operator.itemgetter(*numbers, numbers[0])  # of two and more it makes a tuple
                self._columns.append((take, match(take(flat.leaves))))

    def describe(self, leaves: Sequence[Any]) -> tuple[LeafSources, dict[int, Any]] | None:
        """Return sources and values of leaves of the same kinds, in the same order; None where one is not alike.

        Args:
            leaves: as many as there were.
        """
        if any(is_large(kind, leaves[number]) for number, kind in self._texts):
            return None
        if not all(matches(take(leaves)) for take, matches in self._columns):
            return None
        # The few that are not simply compared with what they were: keys, numpy scalars, long texts.
        describer = Describer(self._processes)
        found = [describer.add(number, kind, leaves[number]) for number, kind, _ in self._anew]
        types = tuple(describer.numbers)
        if any(types[number] != known for number, (_, _, known) in zip(found, self._anew, strict=True)):
            return None
        held = describer.whole | {number: leaves[number] for number in self._whole}
        values = {number: leaves[number] for number in self._values} | self._opaque
        return LeafSources(held, _Parts(self._picks, describer.parted, leaves)), values


# Keys that are the same in a file where their classes and they themselves are equal; 0.0 and -0.0 are not.
_PLAIN_KEYS: Final = frozenset({str, int, bool, type(None), bytes})


@dataclasses.dataclass(slots=True)
class _DepthLevel:
    """The containers of one depth, by the ways in which they are opened, and what their children are.

    The children of all of them are in one sequence: those of the dicts first, then of the sequences, then of others.
    """

    dicts: list[int] = dataclasses.field(default_factory=list)
    """Which children of the level above are dicts."""
    keys: list[Any] = dataclasses.field(default_factory=list)
    """The keys of all of them, one dict after the other."""
    key_types: list[type] = dataclasses.field(default_factory=list)
    """The classes of the keys."""
    items: list[int] = dataclasses.field(default_factory=list)
    """Which are sequences of Python's own."""
    lengths: list[int] = dataclasses.field(default_factory=list)
    """How many children each of the dicts has, then each of the sequences."""
    others: list[tuple[int, Container]] = dataclasses.field(default_factory=list)
    """Which are containers that ``opened`` knows, and what a file says of them."""
    types: list[type] = dataclasses.field(default_factory=list)
    """The classes of all the children."""


class KnownStructure:
    """The structure of a tree that was flattened.

    Args:
        tree: the tree.
        flat: what became of it.

    Example:
        >>> from treering._tree.flatten import flatten
        >>> tree = {"w": [1.5, None], "f": abs}
        >>> known = KnownStructure(tree, flatten(tree))
        >>> known.leaves({"w": [2.5, None], "f": abs})
        [2.5, None, <built-in function abs>]
        >>> known.leaves({"w": [2, None], "f": abs}), known.leaves({"f": abs, "w": [2.5, None]})
        (None, None)
    """

    def __init__(self, tree: Any, flat: Flattened) -> None:
        self._top = type(tree)
        self._levels, self._order = _record_levels(tree)
        self._asked = [
            (number, kind, flat.opaque.get(number))
            for number, kind in enumerate(flat.kinds)
            if kind == "opaque" or type(flat.leaves[number]) not in KINDS
        ]

    def leaves(self, tree: Any) -> list[Any] | None:
        """Return the leaves of a tree of the same structure and kinds, None of any other; dtypes are not compared."""
        try:
            found = self._found(tree)
            return found if found is not None and self._same_objects(found) else None
        except UnsupportedError:
            return None  # ``flatten`` says what cannot be saved, and where it is

    def _found(self, tree: Any) -> list[Any] | None:
        if type(tree) is not self._top:
            return None
        above: list[Any] = [tree]
        everything = [tree]
        for level in self._levels:
            if (children := _collect_children(level, above)) is None:
                return None
            everything += children
            above = children
        return list(map(everything.__getitem__, self._order))

    def _same_objects(self, found: list[Any]) -> bool:
        """Tell whether the leaves whose class alone does not say what they are, are what they were."""
        for number, kind, opaque in self._asked:
            leaf = found[number]
            if type(leaf) not in KINDS and (open_node(leaf) is not None or kind_to_save(leaf) != kind):
                return False
            if opaque is not None and not same_value(opaque, opaque_of(leaf), in_file=True):
                return False
        return True


def _collect_children(level: _DepthLevel, above: Sequence[Any]) -> list[Any] | None:
    """Return the children of all containers of a level, whose classes are those that were met; None if others."""
    dicts = list(map(above.__getitem__, level.dicts))
    items = list(map(above.__getitem__, level.items))
    if list(map(len, itertools.chain(dicts, items))) != level.lengths:
        return None
    keys = list(itertools.chain.from_iterable(dicts))
    if not _same(map(type, keys), level.key_types) or keys != level.keys:
        return None
    children = list(itertools.chain.from_iterable(itertools.chain(map(dict.values, dicts), items)))
    for place, head in level.others:
        node = open_node(above[place])
        if node is None or not same_value(_facts(node.container), _facts(head), in_file=True):
            return None
        children += node.children
    return children if len(children) == len(level.types) and _same(map(type, children), level.types) else None


def _same(found: Iterable[type], known: Sequence[type]) -> bool:
    """Compare as many classes: by identity, for what a class says of equality is its own affair."""
    return all(map(operator.is_, found, known))


def _record_levels(tree: Any) -> tuple[list[_DepthLevel], list[int]]:
    """Return the levels of a tree; and where, in the sequence of all its nodes by depth, its leaves lie in order."""
    levels: list[_DepthLevel] = []
    inside: dict[int, range] = {}
    above, before = [tree], 0
    while True:
        level, children, counts = _level_of(above)
        if not counts:
            return levels, list(_in_order(inside))
        levels.append(level)
        start = before + len(above)
        for place, count in counts:
            inside[before + place] = range(start, start + count)
            start += count
        before += len(above)
        above = children


def _level_of(above: Sequence[Any]) -> tuple[_DepthLevel, list[Any], list[tuple[int, int]]]:
    """Return the containers among these nodes, their children, and how many each has, in the order of the children."""
    level = _DepthLevel()
    dicts: list[Any] = []
    items: list[Any] = []
    others: list[Any] = []
    counts: tuple[list[tuple[int, int]], ...] = ([], [], [])
    for place, x in enumerate(above):
        kind = type(x)
        if kind in KINDS:
            continue
        if kind is dict and _PLAIN_KEYS.issuperset(map(type, x)):
            level.dicts.append(place)
            level.keys += x
            dicts += x.values()
            counts[0].append((place, len(x)))
        elif kind is list or kind is tuple or is_namedtuple(x):
            found = list(x)  # whatever a class of the user's says of its length
            level.items.append(place)
            items += found
            counts[1].append((place, len(found)))
        elif (node := open_node(x)) is not None:
            level.others.append((place, node.container))
            others += node.children
            counts[2].append((place, len(node.children)))
    level.key_types = list(map(type, level.keys))
    level.lengths = [count for _, count in counts[0] + counts[1]]
    children = dicts + items + others
    level.types = list(map(type, children))
    return level, children, counts[0] + counts[1] + counts[2]


def _in_order(inside: dict[int, range]) -> Iterator[int]:
    """Yield the leaves as ``flatten`` meets them, all that is in one container before the next one."""
    left = [0]
    while left:
        node = left.pop()
        if node in inside:
            left += reversed(inside[node])
        else:
            yield node


def _facts(head: Container) -> tuple[Any, ...]:
    return head.node, head.keys, head.class_name, head.static
