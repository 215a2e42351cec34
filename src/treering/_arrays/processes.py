"""The processes of the running jax job, asked for without starting a backend that nobody needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from treering._values.processes import Processes


def this_processes(leaves: Iterable[Any]) -> Processes:
    """Return which process of the job this is, and how many there are.

    jax is asked only where it is sure to run already: ``jax.distributed`` is initialised, or a leaf is an array of
    jax's. A tree of numpy arrays starts no backend.

    Example:
        >>> import numpy as np
        >>> this_processes([np.zeros(2), 3])
        Processes(this=0, count=1)
    """
    # By class: there are few of them, and thousands of leaves.
    if jax.distributed.is_initialized() or any(issubclass(kind, jax.Array) for kind in set(map(type, leaves))):
        return Processes(this=jax.process_index(), count=jax.process_count())
    return Processes(this=0, count=1)
