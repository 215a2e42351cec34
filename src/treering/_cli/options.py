"""The arguments and options that several verbs take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import click

from treering._view.rows import DEEPEST

Verb: TypeAlias = Callable[..., int]

PATH = click.argument("path", type=click.Path(path_type=str))
RUN = click.argument("path", metavar="RUN", type=click.Path(path_type=str))
GLOBS = click.argument("globs", metavar="[GLOB]...", nargs=-1)
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON object for programs, with plain numbers.")


def verb(*examples: str) -> Callable[[Verb], click.Command]:
    """Make a function the command of its name, whose help ends with examples."""
    return click.command(epilog="\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)]) + "\n")


def depth(usual: int, help_text: str) -> Callable[[Verb], Verb]:
    """Add ``--depth``, the levels of a tree that are shown."""
    levels = WholeNumber(0, DEEPEST)
    return click.option("--depth", type=levels, default=usual, show_default=True, metavar="N", help=help_text)


class WholeNumber(click.IntRange):
    """A whole number in a range, told in words that need no knowledge of types."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number, or fail with the range."""
        try:
            checked: int = super().convert(int(value), param, ctx)
        except (ValueError, click.BadParameter):
            upper = "on" if self.max is None else f"to {self.max}"
            self.fail(f"{str(value)!r} is not a whole number from {self.min} {upper}", param, ctx)
        return checked


class BestOf(click.ParamType[tuple[str, str]]):
    """A metric and which of its values is best, as ``accuracy:max``."""

    name = "metric"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Read both, or fail with how to write them."""
        metric, _, mode = str(value).rpartition(":")
        if not metric or mode not in ("min", "max"):
            self.fail(f"{str(value)!r:.200} does not say which value is best: METRIC:min or METRIC:max", param, ctx)
        return metric, mode
