"""Whole numbers as options, and ``--depth`` of the verbs that fold."""

from __future__ import annotations

from typing import Any

import click

from treering._view.rows import DEEPEST


class WholeNumber(click.IntRange):
    """A whole number in a range, told in words that need no knowledge of types."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number, or fail with the range."""
        try:
            checked: int = super().convert(int(value), param, ctx)
        except (ValueError, click.BadParameter):
            upper = "on" if self.max is None else f"to {self.max}"
            self.fail(f"{str(value)!r} is no whole number from {self.min} {upper}", param, ctx)
        return checked


DEPTH = WholeNumber(0, DEEPEST)
"""Levels of a tree."""
