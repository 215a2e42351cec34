"""The option ``--depth`` of the verbs that fold."""

from __future__ import annotations

from typing import Any

import click

from treering._view.rows import DEEPEST

__all__ = ["DEPTH"]


class _Depth(click.IntRange):
    """A whole number in a range, told in words that need no knowledge of types."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number, or fail with the range."""
        try:
            number = int(value)
        except ValueError:
            self.fail(f"{value!r} is no whole number from {self.min} to {self.max}", param, ctx)
        checked: int = super().convert(number, param, ctx)
        return checked


DEPTH = _Depth(0, DEEPEST)
"""Levels of a tree."""
