"""A sequence whose items are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, overload

T_co = TypeVar("T_co", covariant=True)


class LazySequence(Sequence[T_co]):
    """Items that are made each time when they are asked for, so that ten thousand of them take no memory.

    Args:
        count: how many there are.
        make: makes the item of a number.

    Example:
        >>> squares = LazySequence(4, lambda number: number**2)
        >>> len(squares), squares[-1], squares[1:3]
        (4, 9, [1, 4])
    """

    def __init__(self, count: int, make: Callable[[int], T_co]) -> None:
        self._numbers = range(count)
        self._make = make

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, number: int) -> T_co: ...
    @overload
    def __getitem__(self, number: slice) -> list[T_co]: ...
    def __getitem__(self, number: int | slice) -> T_co | list[T_co]:
        found = self._numbers[number]
        return self._make(found) if isinstance(found, int) else list(map(self._make, found))
