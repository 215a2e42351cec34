"""Arrays of a leaves directory through somebody's manager of checkpoints, once their bytes are checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from treering._arrays.delivered import Delivery
from treering._checkpoint.arrivals import check_batches
from treering._leaves.source import LeavesSource
from treering._values.keys import split_key
from treering.errors import Corrupt, Unsupported


class ArrayReader(Protocol):
    """What reads arrays by their paths, such as jax's ``GlobalAsyncCheckpointManager``."""

    def deserialize_with_paths(self, shardings: Sequence[Any], paths: Sequence[str]) -> Sequence[Any]:
        """Return the array in the folder of each path, laid out as its sharding says."""


class ByManager:
    """Reads what a manager can read of an opened leaves directory.

    Args:
        manager: reads.
        source: the opened directory.
    """

    def __init__(self, manager: ArrayReader, source: LeavesSource) -> None:
        self._manager = manager
        self._source = source
        index = source.index
        stored = [leaf for leaf in range(len(index.keys)) if index.type_of(leaf).stored]
        lie = [
            # Files that are still staged lie elsewhere than the manager looks.
            None if branch.attempt is not None else (folder, array.dtype)
            for branch in source.branches
            for folder, array in zip(branch.record.folders, branch.arrays, strict=True)
        ]
        self._lies = dict(zip(stored, lie, strict=True))

    def takes(self, delivery: Delivery) -> bool:
        """Tell whether the manager can read a leaf: a jax array that lies there as what it is and has a sharding."""
        fit, lies = delivery.fit, self._lies[delivery.wish.leaf]
        if delivery.sharding is None or fit.kind != "jax" or fit.dtype is not None or fit.python is not None:
            return False
        return lies is not None and lies[1] == self._source.index.type_of(delivery.wish.leaf).dtype

    def bring(self, deliveries: Sequence[Delivery]) -> list[Any]:
        """Return leaves that it takes, in their order. Their bytes are read twice: the first time to check them.

        Raises:
            Corrupt: bytes are damaged or not there, or the tree was replaced before the manager had read it.
            Unsupported: the manager gave something else.
            StoreFailed: the system refuses.
        """
        source = self._source
        check_batches(source, deliveries)
        root = source.folder.path.absolute()
        folders = [lies[0] for delivery in deliveries if (lies := self._lies[delivery.wish.leaf]) is not None]
        paths = [os.fspath(root / folder) for folder in folders]
        arrays = list(self._manager.deserialize_with_paths([delivery.sharding for delivery in deliveries], paths))
        if not source.is_current():
            raise Corrupt(f"{str(root)!r} was replaced while a manager read it")
        for delivery, array in zip(deliveries, arrays, strict=True):
            dtype = source.dtype_of(delivery.wish.leaf)
            if array.shape != delivery.shape or np.dtype(array.dtype) != dtype:
                raise Unsupported(
                    f"the manager gave {array.dtype}{list(array.shape)} for {dtype.name}{list(delivery.shape)}",
                    path=split_key(delivery.key),
                    hint="leave the manager out",
                )
        return arrays
