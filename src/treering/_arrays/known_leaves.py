"""Leaves that were described once: others that are alike are described again many times faster.

Never wrong: what is compared is all that a description is made of. Nothing here holds an array.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from treering._arrays.outgoing import DescribedLeaves, Describer, HeldBox, is_large
from treering._format.index import LeafType
from treering._tree.flatten import Flattened
from treering._values.boxes import Box
from treering._values.processes import Processes

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
