"""Levels the loads of processes that share work: water that each pool pours on its owners.

All sums are of whole numbers, so every process that computes them comes to the same plan, whatever its Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

# Pools that overlap crosswise push load along from one to the next, each round by one step and by less each time.
_MOST_ROUNDS: Final = 64


Pool: TypeAlias = tuple[tuple[int, ...], int]
"""Work that any of its owners can do any part of: these processes, ascending, and how much work there is."""


def pour(amount: int, levels: Sequence[int]) -> list[int]:
    """Pour an amount on columns of given heights, as water would lie; return how much lies on each.

    Example:
        >>> pour(10, [0, 4, 30])
        [7, 3, 0]
    """
    order = sorted(range(len(levels)), key=levels.__getitem__)
    wet, below = 0, 0
    while wet < len(order):
        height = levels[order[wet]]
        if wet and height * wet - below >= amount:
            break
        below += height
        wet += 1
    surface, left = divmod(amount + below, wet)
    result = [0] * len(levels)
    for rank, column in enumerate(order[:wet]):
        result[column] = surface + (rank < left) - levels[column]
    return result


def level_loads(loads: list[int], pools: Sequence[Pool]) -> list[list[int]]:
    """Add every pool's work to ``loads`` so that the highest is as low as can be; return each owner's amount.

    One pool after the other is poured anew while the others lie still, until a round moves next to nothing. That is
    descent along one coordinate at a time on the sum of squares, which is convex, so it ends where no load can be
    lowered but by raising a higher one. Pools that nest or do not touch are done after the first round when the
    smallest come first.
    """
    amounts = [[0] * len(owners) for owners, _ in pools]
    order = sorted(range(len(pools)), key=lambda number: (len(pools[number][0]), number))
    near = (sum(loads) + sum(amount for _, amount in pools)) // (1000 * max(1, len(loads)))
    for _ in range(_MOST_ROUNDS):
        if max((_pour_anew(loads, *pools[number], amounts[number]) for number in order), default=0) <= near:
            break
    return amounts


def _pour_anew(loads: list[int], owners: tuple[int, ...], work: int, amounts: list[int]) -> int:
    """Pour one pool again; return the largest change of a load."""
    without = [loads[owner] - amount for owner, amount in zip(owners, amounts, strict=True)]
    farthest = 0
    for place, amount in enumerate(pour(work, without)):
        farthest = max(farthest, abs(amount - amounts[place]))
        amounts[place] = amount
        loads[owners[place]] = without[place] + amount
    return farthest
