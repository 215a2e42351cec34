"""The tree through which votes come in: process ``p`` collects for ``fan_in * p + 1`` to ``fan_in * (p + 1)``."""

from __future__ import annotations

from collections.abc import Iterator


def parent_of(process: int, fan_in: int) -> int:
    """Return the process that collects the vote of another; of process 0 there is none, and 0 stands for it.

    Example:
        >>> parent_of(32, 32), parent_of(33, 32)
        (0, 1)
    """
    return max(process - 1, 0) // fan_in


def children_of(process: int, count: int, fan_in: int) -> range:
    """Return the processes whose votes a process collects.

    Example:
        >>> children_of(0, 34, 32), children_of(1, 34, 32), children_of(2, 34, 32)
        (range(1, 33), range(33, 34), range(34, 34))
    """
    first = fan_in * process + 1
    return range(min(first, count), min(first + fan_in, count))


def subtree_of(process: int, count: int, fan_in: int) -> Iterator[int]:
    """Yield a process and all whose votes go through it.

    Example:
        >>> list(subtree_of(1, 12, 2))
        [1, 3, 4, 7, 8, 9, 10]
    """
    level = range(process, process + 1)
    while level:
        yield from level
        level = range(children_of(level[0], count, fan_in).start, children_of(level[-1], count, fan_in).stop)
