"""Leaves as they are now, held so that neither donation nor mutation changes them afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from treering._arrays.outgoing import Outgoing, Source
from treering._arrays.parted import cut_out, to_host
from treering._format.headers import Row
from treering._values.boxes import contains

__all__ = ["snapshot"]


def snapshot(leaves: Outgoing, wanted: Iterable[Row]) -> Outgoing:
    """Return the same leaves with host arrays as their sources; what they hold cannot change any more.

    Args:
        leaves: described leaves, on any devices.
        wanted: leaf and box of what this process will need. Of a leaf that lies in one process its boxes; of one that
            lies over several, boxes inside of those that this process holds. What is not wanted keeps its boxes, and
            its data is None.

    Example:
        >>> from treering._tree.flatten import flatten
        >>> from treering._arrays.outgoing import outgoing
        >>> weights = np.zeros(3)
        >>> held = snapshot(outgoing(flatten({"w": weights})), [(0, None)])
        >>> weights[:] = 1.0
        >>> held.data_of(0, None)
        array([0., 0., 0.])
    """
    sources: dict[int, tuple[Source, ...]] = {}
    for number, box in wanted:
        held = next(source for source in leaves.sources[number] if box is None or contains(source.box, box))
        data = held.data if box in (None, held.box) else cut_out(held.data, held.box, box or held.box)
        sources[number] = (*sources.get(number, ()), Source(box or held.box, _fixed(data)))
    empty = {number: tuple(Source(held.box, None) for held in all_) for number, all_ in leaves.sources.items()}
    return dataclasses.replace(leaves, sources={number: sources.get(number, empty[number]) for number in empty})


def _fixed(data: Any) -> Any:
    return np.array(to_host(data)) if isinstance(data, np.ndarray | jax.Array) else data
