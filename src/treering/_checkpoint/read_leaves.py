"""Leaves on their way out of an opened tree: read, checked and placed, a batch at a time."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax

from treering._arrays.delivered import Delivery, convert_value, deliver, request_for
from treering._arrays.jobs import Progress, split_by_bytes
from treering._arrays.source import Source
from treering._format.index import leaf_bytes
from treering._tree.likeness import KEPT, LeafMatch
from treering._values.dtypes import SUB_BYTE

BATCH_BYTES: Final = 256 << 20
"""Arrays are read and placed about so many bytes at a time: host copies of device arrays do not add up."""
_NBYTES: Final = operator.attrgetter("nbytes")
_SMALL_BYTES: Final = 64 << 10


def plan_deliveries(
    source: Source, matches: Sequence[LeafMatch], placements: Sequence[Any]
) -> tuple[list[Any], list[Delivery]]:
    """Return the leaves of the result, as far as they need no reading, and what is to be read for the others.

    Args:
        source: the opened tree.
        matches: what each leaf of the result becomes.
        placements: where each of them goes; None is the default device, or the host for what stays there.
    """
    index = source.index
    result: list[Any] = [None] * len(matches)
    deliveries: list[Delivery] = []
    by_type = list(map(leaf_bytes, index.types))
    for number, (match, sharding) in enumerate(zip(matches, placements, strict=True)):
        if match.fit is KEPT:
            continue
        leaf_type, key = index.type_of(match.leaf), index.keys[match.leaf]
        if leaf_type.stored:
            shape = leaf_type.shape or ()
            request = request_for(match.leaf, shape, sharding)
            nbytes = by_type[index.leaf_types[match.leaf]]
            dtype = None if request.boxes else source.arrays.dtype_of(match.leaf)
            deliveries.append(Delivery(number, key, request, shape, nbytes, match.fit, sharding, dtype))
        else:
            result[number] = convert_value(index.values[match.leaf], match.fit, sharding, key)
    return result, deliveries


def read_batches(
    source: Source,
    deliveries: Sequence[Delivery],
    report: ReadProgress | None = None,
    look: Callable[[Sequence[Delivery]], None] | None = None,
) -> list[Any]:
    """Return the leaves of some deliveries, in their order.

    Args:
        source: the opened tree.
        deliveries: none of them exchanged with other processes.
        report: is told of the bytes.
        look: looks at what was read of some of them.

    Raises:
        CorruptError: bytes are damaged or not there.
        MismatchError, UnsupportedError: an array does not become what is wanted of it.
        StoreError: the system refuses.
    """
    total = sum(delivery.nbytes for delivery in deliveries)
    report = report or ReadProgress(None, total)
    leaves: list[Any] = []
    # A map is no copy: nothing adds up.
    most = total if source.mapped else BATCH_BYTES
    for batch, _ in split_by_bytes(deliveries, functools.partial(_copied_bytes, source), most):
        source.arrays.read([delivery.request for delivery in batch if delivery.request.boxes], report.step)
        report.add(sum(map(_NBYTES, batch)))
        if look is not None:
            look(batch)
        leaves += deliver(batch, mapped=source.mapped)
    return leaves


def _copied_bytes(source: Source, delivery: Delivery) -> int:
    """Return how many bytes of a leaf are copied when it is placed; none where it keeps the memory that it is read to.

    Fewer batches are faster: at the end of each one thread waits for the other.
    """
    kind = delivery.fit.kind
    sharding: Any = delivery.sharding
    if sharding is None:
        config: Any = jax.config  # jax 0.10 does not say which settings it has
        is_on_cpu = jax.default_backend() == "cpu" and config.jax_default_device is None
    else:
        is_on_cpu = all(device.platform == "cpu" for device in sharding.device_set)
    stays = kind == "numpy" or (kind == "jax" and is_on_cpu)
    if not stays or delivery.fit.dtype is not None or delivery.nbytes <= _SMALL_BYTES:
        return delivery.nbytes
    return delivery.nbytes if source.index.type_of(delivery.request.leaf).dtype in SUB_BYTE else 0


class ReadProgress:
    """Adds batches up for the user's ``progress``, which counts the bytes of the leaves.

    Args:
        progress: the user's, or None.
        total: bytes of all leaves.

    Attributes:
        step: what is told of the bytes of one batch; None where nobody listens.
    """

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._before = 0
        self.step: Progress | None = self._step if progress else None

    def _step(self, done: int, batch: int) -> None:
        del batch
        if self._progress is not None:
            self._progress(min(self._before + done, self._total), self._total)

    def add(self, nbytes: int) -> None:
        """Count a batch that is done."""
        self._before += nbytes
