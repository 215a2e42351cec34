"""The state of a data iterator of grain, as Orbax stores it: JSON, which becomes leaves of a tree.

Source: ``PyGrainCheckpointHandler`` of grain. A ``DataLoader`` takes its state back as the bytes of that JSON, an
iterator of a ``Dataset`` as the dict.
"""

from __future__ import annotations

import json
from typing import Any, Final

from treering._foreign.foreign_tree import ForeignLeaf
from treering._foreign.leaf_paths import EMPTY, Entry, Step
from treering._format.index import LeafType

_OF_LOADER: Final = "last_seen_indices"


def grain_entries(state: Any) -> list[Entry]:
    """Return what ``set_state`` takes, by paths.

    Example:
        >>> [(path, leaf.value) for path, leaf in grain_entries({"next": [7]})]
        [((('next', False), ('0', True)), 7)]
        >>> type(grain_entries({"last_seen_indices": {"0": 3}})[0][1].value)
        <class 'bytes'>
    """
    if type(state) is dict and _OF_LOADER in state:
        state = json.dumps(state, indent=4).encode()
    entries: list[Entry] = []
    waiting: list[tuple[tuple[Step, ...], Any]] = [((), state)]
    while waiting:
        path, value = waiting.pop()
        if value and isinstance(value, dict | list):
            items, listed = (value.items(), False) if isinstance(value, dict) else (enumerate(value), True)
            waiting += reversed([((*path, (str(key), listed)), child) for key, child in items])
        else:
            kind = "none" if value is None else type(value).__name__
            entries.append((path, EMPTY.get(kind.title(), ForeignLeaf(LeafType(kind=kind), value))))
    return entries
