"""Hashes of keys from files: numbers and tuples can be chosen so that all have one, and a dict takes quadratic time."""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable
from typing import Final

from treering.errors import Corrupt, TreeringError

# Python's own coincidences stay below: 35 floats that are powers of two have one hash, 17 ints of 64 bits.
_MOST_OF_ONE_HASH: Final = 64


def colliding(values: Collection[Hashable]) -> bool:
    """Tell whether more than 64 different values have one hash, as numbers and tuples of numbers can be made to have.

    Text and bytes cannot: Python hashes them with a secret key. The answer takes time in proportion to the values.

    Example:
        >>> colliding(range(100_000)), colliding([number * (2**61 - 1) for number in range(100)])
        (False, True)
    """
    if len(values) <= _MOST_OF_ONE_HASH:
        return False
    counts = collections.Counter(map(hash, values))
    if max(counts.values()) <= _MOST_OF_ONE_HASH:
        return False
    seen: dict[int, list[Hashable]] = {number: [] for number, count in counts.items() if count > _MOST_OF_ONE_HASH}
    for value in values:
        same = seen.get(hash(value))
        if same is not None and value not in same:
            same.append(value)
            if len(same) > _MOST_OF_ONE_HASH:
                return True
    return False


def check_hashes(values: Collection[Hashable], what: str, error: type[TreeringError] = Corrupt) -> None:
    """Require that no more than 64 different values have one hash.

    Raises:
        Corrupt: more have; or ``error``.

    Example:
        >>> check_hashes([number * (2**61 - 1) for number in range(100)], "the keys")
        Traceback (most recent call last):
        ...
        treering.errors.Corrupt: more than 64 of the keys have one hash, which would make a dict of them quadratic
    """
    if colliding(values):
        raise error(f"more than {_MOST_OF_ONE_HASH} of {what} have one hash, which would make a dict of them quadratic")
