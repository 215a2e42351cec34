"""Boxes: the part of an array between two corners."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["Box", "whole"]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""One half-open range for each axis; () for the whole of a 0-d array."""


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that is all of an array.

    Example:
        >>> whole((2, 3))
        ((0, 2), (0, 3))
    """
    return tuple((0, length) for length in shape)
