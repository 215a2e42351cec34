"""Leaves that were described once: others that are alike are described again many times faster.

Never wrong: what is compared is all that a description is made of. Nothing here holds an array.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import jax

from treering._arrays.outgoing import Describer, Outgoing, Source, is_large
from treering._format.index import LeafType
from treering._tree.flatten import Flattened
from treering._values.boxes import Box
from treering._values.processes import Processes

__all__ = ["KnownLeaves"]

_TEXTS: Final = ("str", "bytes", "bytearray")
_SHAPE: Final = operator.attrgetter("shape")
_DTYPE: Final = operator.attrgetter("dtype")
_SHARDING: Final = operator.attrgetter("sharding")
_DELETED: Final = operator.methodcaller("is_deleted")


class _Pick(NamedTuple):
    """Where a box of an array is found among its shards."""

    box: Box
    """Which box."""
    shard: int
    """Number of the shard."""
    device: Any
    """The device that holds it."""


class _Column:
    """What numpy arrays or jax arrays have to be, one row for each of them."""

    def __init__(self, numbers: Sequence[int], leaves: Sequence[Any]) -> None:
        self.numbers = numbers
        arrays = [leaves[number] for number in numbers]
        self._shapes = list(map(_SHAPE, arrays))
        self._dtypes = list(map(_DTYPE, arrays))
        sharded = bool(arrays) and isinstance(arrays[0], jax.Array)
        self._shardings = list(map(_SHARDING, arrays)) if sharded else None

    def fits(self, leaves: Sequence[Any]) -> bool:
        """Tell whether these leaves are alike."""
        arrays = [leaves[number] for number in self.numbers]
        if list(map(_SHAPE, arrays)) != self._shapes or list(map(_DTYPE, arrays)) != self._dtypes:
            return False
        if self._shardings is None:
            return True
        return not any(map(_DELETED, arrays)) and self._lie_alike(list(map(_SHARDING, arrays)), self._shardings)

    @staticmethod
    def _lie_alike(mine: Sequence[Any], known: Sequence[Any]) -> bool:
        if all(map(operator.is_, mine, known)):
            return True
        # Most are a few objects, each met many times.
        pairs = {(id(one), id(other)): (one, other) for one, other in zip(mine, known, strict=True)}
        return all(itertools.starmap(_same_sharding, pairs.values()))


def _same_sharding(one: jax.sharding.Sharding, other: jax.sharding.Sharding) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or one != other:
        return False
    # Equal specs may be written in two ways, and their text goes into the index.
    return not isinstance(one, jax.sharding.NamedSharding) or repr(one) == repr(other)


class KnownLeaves:
    """What was found of the leaves of a tree.

    Args:
        flat: the tree.
        leaves: its leaves, described.
        processes: those that save it together.

    Example:
        >>> import numpy as np
        >>> from treering._arrays.outgoing import ALONE, outgoing
        >>> from treering._tree.flatten import flatten
        >>> flat = flatten({"w": np.zeros(3), "step": 1})
        >>> known = KnownLeaves(flat, outgoing(flat), ALONE)
        >>> again = known.described([np.ones(3), 2])
        >>> again.data_of(0, None), again.values
        (array([1., 1., 1.]), {1: 2})
        >>> known.described([np.ones(4), 2]) is None
        True
    """

    def __init__(self, flat: Flattened, leaves: Outgoing, processes: Processes) -> None:
        self.processes = processes
        self._empty = dataclasses.replace(leaves, sources={}, values={})
        self._sources = list(leaves.sources)
        self._values = list(leaves.values)
        self._opaque = {number: value for number, value in leaves.values.items() if flat.kinds[number] == "opaque"}
        self._texts = [(number, flat.kinds[number]) for number in leaves.values if flat.kinds[number] in _TEXTS]
        self._plain: list[tuple[int, Box]] = []
        self._picked: list[tuple[int, tuple[_Pick, ...]]] = []
        self._anew: list[tuple[int, str, LeafType, tuple[Box, ...]]] = []
        shared: dict[tuple[_Pick, ...], tuple[_Pick, ...]] = {}
        for number, sources in leaves.sources.items():
            kind, leaf = flat.kinds[number], flat.leaves[number]
            if kind in ("jax", "numpy") and len(sources) == 1 and sources[0].data is leaf:
                self._plain.append((number, sources[0].box))
            elif kind == "jax":
                picks = _picks(leaf, sources)
                self._picked.append((number, shared.setdefault(picks, picks)))
            else:
                boxes = tuple(source.box for source in sources)
                self._anew.append((number, kind, leaves.types[leaves.leaf_types[number]], boxes))
        by_kind = [[n for n in leaves.sources if flat.kinds[n] == kind] for kind in ("jax", "numpy", "key")]
        self._columns = [_Column(numbers, flat.leaves) for numbers in by_kind if numbers]

    def described(self, leaves: Sequence[Any]) -> Outgoing | None:
        """Describe leaves of the same kinds, in the same order; None where one of them is not alike.

        Args:
            leaves: as many as there were.
        """
        if any(is_large(kind, leaves[number]) for number, kind in self._texts):
            return None
        if not all(column.fits(leaves) for column in self._columns):
            return None
        # The order in which leaves stand in here is that of their numbers, as it was.
        sources: dict[int, tuple[Source, ...]] = dict.fromkeys(self._sources, ())
        sources.update([(number, (Source(box, leaves[number]),)) for number, box in self._plain])
        for number, picks in self._picked:
            found = _picked(leaves[number], picks)
            if found is None:
                return None
            sources[number] = found
        if not self._describe_anew(leaves, sources):
            return None
        values = {number: leaves[number] for number in self._values}
        values.update(self._opaque)
        return dataclasses.replace(self._empty, sources=sources, values=values)

    def _describe_anew(self, leaves: Sequence[Any], sources: dict[int, tuple[Source, ...]]) -> bool:
        """Describe the few that are not simply held against what they were: keys, numpy scalars, long texts."""
        describe = Describer(self.processes)
        types: list[int] = []
        for number, kind, _, boxes in self._anew:
            leaf = leaves[number]
            if kind in _TEXTS and not is_large(kind, leaf):
                return False
            found_type, found, _ = describe.stored(kind, leaf)
            if tuple(source.box for source in found) != boxes:
                return False
            types.append(found_type)
            sources[number] = found
        found_types = tuple(describe.numbers)
        return all(found_types[found] == row[2] for found, row in zip(types, self._anew, strict=True))


def _picks(leaf: jax.Array, sources: Sequence[Source]) -> tuple[_Pick, ...]:
    shards = leaf.addressable_shards
    places = {id(shard.data): place for place, shard in enumerate(shards)}
    return tuple(
        _Pick(source.box, places[id(source.data)], shards[places[id(source.data)]].device) for source in sources
    )


def _picked(leaf: jax.Array, picks: Sequence[_Pick]) -> tuple[Source, ...] | None:
    shards = leaf.addressable_shards
    if any(shards[pick.shard].device is not pick.device for pick in picks):
        return None
    return tuple(Source(pick.box, shards[pick.shard].data) for pick in picks)
