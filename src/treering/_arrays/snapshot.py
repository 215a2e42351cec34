"""Leaves as they are now, held so that neither donation nor mutation changes them afterwards.

On CPU a numpy view of a jax array is enough: the runtime does not hand a donated buffer on while somebody holds a view
of it. Elsewhere the bytes come to the host, all copies begun before the first is waited for. What is numpy's own is
copied, since anybody may write into it.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from treering._arrays.host import cut_box, is_view
from treering._arrays.outgoing import DescribedLeaves, HeldBox
from treering._format.index import LeafType
from treering._format.safetensors import Row
from treering._store.crew import work_together
from treering._values.boxes import Box, contains

if TYPE_CHECKING:
    from numpy.typing import NDArray


_SMALL_BYTES: Final = 64 << 10
_ITEMS = 4096


def snapshot(leaves: DescribedLeaves, wanted: Iterable[Row] | None = None) -> DescribedLeaves:
    """Return the same leaves with host arrays as their sources; what they hold cannot change any more.

    Args:
        leaves: described leaves, on any devices.
        wanted: leaf and box of what this process will need; None for all that it holds. Of a leaf that lies in one
            process its boxes; of one that lies over several, boxes inside of those that this process holds. What is
            not wanted keeps its boxes, and its data is None.

    Example:
        >>> from treering._tree.flatten import flatten
        >>> from treering._arrays.outgoing import describe_leaves
        >>> weights = np.zeros(3)
        >>> held = snapshot(describe_leaves(flatten({"w": weights})))
        >>> weights[:] = 1.0
        >>> held.data_of(0, None)
        array([0., 0., 0.])
    """
    taking = _HostCopies(leaves.types)
    chosen = [(number, leaves.leaf_types[number], parts) for number, parts in _choose(leaves, wanted)]
    for _, kind, parts in chosen:
        for _, data in parts:
            taking.begin(data, kind)
    sources = {n: tuple([HeldBox(box, taking.hold(data, kind)) for box, data in parts]) for n, kind, parts in chosen}
    values = {number: bytearray(v) if type(v) is bytearray else v for number, v in leaves.values.items()}
    return dataclasses.replace(leaves, sources=sources, values=values)


def _choose(leaves: DescribedLeaves, wanted: Iterable[Row] | None) -> Iterable[tuple[int, Sequence[HeldBox]]]:
    """Yield each leaf and what is to be held of it."""
    if wanted is None:
        yield from leaves.sources.items()
        return
    boxes: dict[int, list[Box | None]] = {}
    for number, box in wanted:
        boxes.setdefault(number, []).append(box)
    for number, sources in leaves.sources.items():
        if (chosen := boxes.get(number)) is None:
            yield number, [HeldBox(source.box, None) for source in sources]
        elif number in leaves.spread:
            yield number, [_cut(sources, box) for box in chosen]
        else:
            # All of its boxes stay: whoever plans again has to come to the same plan.
            yield number, [s if s.box in chosen or None in chosen else HeldBox(s.box, None) for s in sources]


def _cut(sources: Sequence[HeldBox], box: Box | None) -> HeldBox:
    held = next(source for source in sources if box is None or contains(source.box, box))
    return held if box is None or box == held.box else HeldBox(box, cut_box(held.data, held.box, box))


class _HostCopies:
    """One snapshot, and what it found out of arrays that are alike."""

    def __init__(self, types: Sequence[LeafType]) -> None:
        # The memory of a text is nobody else's: it was copied, or lies in a ``bytes``.
        self._texts = [kind.kind in ("str", "bytes", "bytearray") for kind in types]
        self._views: dict[tuple[int, Any], bool] = {}
        self._coming: dict[int, jax.Array] = {}

    def begin(self, data: Any, kind: int) -> None:
        """Begin to fetch an array, where that takes a copy from its device."""
        if isinstance(data, jax.Array) and not self._is_view(data, kind) and id(data) not in self._coming:
            self._coming[id(data)] = _begin_copy(data)

    def hold(self, data: Any, kind: int) -> NDArray[Any] | None:
        """Return a host array that nobody else writes into, of what was begun."""
        if data is None:
            return None
        if (coming := self._coming.get(id(data))) is not None:
            with jax.transfer_guard_device_to_host("allow"):
                copy: NDArray[Any] = np.asarray(coming)
            return copy
        if isinstance(data, jax.Array):
            return np.asarray(data) if views_survive() else np.asarray(data).copy()
        host: NDArray[Any] = data if self._texts[kind] else np.array(data, order="C")
        return host

    def _is_view(self, data: jax.Array, kind: int) -> bool:
        # Leaves of one type have one dtype; shardings are as many objects as there are arrays.
        key = (kind, next(iter(data.sharding.device_set)))
        if (known := self._views.get(key)) is None:
            known = self._views[key] = is_view(data)
        return known


def _begin_copy(array: jax.Array) -> jax.Array:
    """Begin to copy an array to the host, and return what to wait for.

    jax keeps that copy as long as the array lives; of a large one it is therefore made through a handle of its own.
    """
    held: jax.Array = array.addressable_shards[0].data
    if array.nbytes > _SMALL_BYTES:
        held = jax.make_array_from_single_device_arrays(held.shape, held.sharding, [held])
    with jax.transfer_guard_device_to_host("allow"):
        held.copy_to_host_async()
    return held


@functools.cache
def views_survive() -> bool:
    """Tell whether views of arrays on CPU outlive their donation; found out once, by donating a small array.

    jax's runtime gives a donated buffer away only if nobody else holds on to it, and a live view does. That is how it
    is and nothing that it promises; where it is not so, a snapshot has to copy.

    Example:
        >>> views_survive()
        True
    """
    found: list[bool] = []
    # The caller may be inside of a mesh, or of a trace, in which jax runs nothing on one device; another thread is not.
    work_together(lambda: found.append(_survives_donation()), 1, lambda: None)
    return found == [True]


def _survives_donation() -> bool:
    cpu = jax.local_devices(backend="cpu")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a runtime that does not donate says so
        with jax.transfer_guard("allow"), jax.disable_jit(False):
            numbers = [np.arange(_ITEMS).astype(jax.numpy.dtype(name)) for name in ("float32", "bfloat16")]
            return all(_outlives(jax.device_put(array, cpu)) for array in numbers)


def _outlives(array: jax.Array) -> bool:
    """Donate an array that jax made itself, so that its memory is the runtime's to give away."""
    own = jax.jit(lambda x: x + 1)(array)
    view = np.asarray(own)
    before = view.copy()
    jax.jit(lambda x: x * 2 + 1, donate_argnums=0)(own).block_until_ready()
    return bool((view == before).all())
