"""Where the demo's story is told, and what every chapter of it needs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from demo import FILES
from treering._cli.verbs import style_of
from treering._view.tree_text import Style


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Where the story is told and where its files go."""

    console: Console
    """What it is told on."""
    folder: Path
    """Where its files go."""
    kept: bool
    """Whether they stay there."""
    symbols: bool
    """Whether the output can show box drawing and check marks."""

    @property
    def run(self) -> Path:
        """Where the run's steps are saved."""
        return self.folder / FILES[0]

    @property
    def style(self) -> Style:
        """How trees and tables are drawn."""
        return dataclasses.replace(style_of(sys.stdout), width=self.console.width - 3)

    def chapter(self, number: int, title: str) -> None:
        """Begin a chapter."""
        self.console.print()
        self.console.print(Text(f"{number}  {title}", style="bold"))

    def say(self, line: str) -> None:
        """Print a line that may be long: wrapped below itself on a terminal, whole elsewhere."""
        self.quote(line, "", indent=3)

    def code(self, line: str) -> None:
        """Print the line of a program that does what is told."""
        self.quote(line, "cyan")

    def quote(self, line: str, style: str, *, indent: int = 5) -> None:
        """Print a line as `say` does, in a style."""
        if self.console.is_terminal:
            self.console.print(Padding(Text(line, style=style), (0, 0, 0, indent)))
        else:
            self.console.print(Text(f"{'':{indent}}{line}"), soft_wrap=True)

    def command(self, command: str, lines: Iterable[str]) -> None:
        """Print what a verb of the command line answers."""
        self.console.print()
        self.console.print(Text(f"   $ treering {command}"), soft_wrap=True)
        for line in lines:
            self.console.print(Text.from_ansi(f"   {line}"), soft_wrap=True)

    def patience(self, line: str) -> AbstractContextManager[object]:
        """Show that something is under way, where a line can be taken back."""
        if self.console.is_terminal and self.symbols:
            return self.console.status(Text(line, style="dim"))
        return nullcontext()


def short(name: str) -> str:
    """Shorten the name of a file that a save makes: sixteen digits say nothing to a reader.

    Example:
        >>> short("data-a1fc788bfe69efae-00000-of-00001.safetensors"), short("treering.json")
        ('data-a1fc....safetensors', 'treering.json')
    """
    parts = name.split("-")
    if name.startswith("data-"):
        return f"{parts[0]}-{parts[1][:4]}...{parts[-1][5:]}"
    journal = ".treering.json."
    return f"{journal}{name[len(journal) : len(journal) + 4]}..." if name.startswith(journal) else name
