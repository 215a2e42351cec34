"""The training as it is watched: one live line with a curve on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

_RISING = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 24
_CURVE_CELLS = 24
_PLAIN_LINE_EVERY_S = 2.0


def curve(values: Sequence[float], cells: int = _CURVE_CELLS) -> str:
    """Draw values as a row of blocks, each the mean of an equal share of them; the highest is full.

    Example:
        >>> curve([4.0, 3.0, 2.0, 1.0], cells=4)
        '█▆▃▁'
        >>> curve([])
        ''
    """
    cells = min(cells, len(values))
    edges = [len(values) * cell // cells for cell in range(cells + 1)] if cells else [0]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    span = (high - low) or 1.0
    return "".join(_RISING[round((mean - low) / span * (len(_RISING) - 1))] for mean in means)


class TrainingDisplay:
    """Shows steps and losses while ``seconds`` of training pass; a context manager."""

    def __init__(self, console: Console, seconds: float, *, blocks: bool) -> None:
        self._console = console
        self._seconds = seconds
        self._blocks = blocks
        self._losses: list[float] = []
        self._began = time.perf_counter()
        self._last_line = float("-inf")
        self._live = Live(console=console, refresh_per_second=8, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
            self._live.update(Text("  compiling the training step ...", style="dim"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def compiled(self) -> None:
        """Start the clock: the first step, which compiles, is over."""
        self._began = time.perf_counter()

    def show(self, loss: float) -> None:
        """Take in the loss of one more step."""
        self._losses.append(loss)
        now = time.perf_counter()
        if self._live:
            self._live.update(self._line(now - self._began))
        elif now - self._last_line >= _PLAIN_LINE_EVERY_S:
            self._last_line = now
            self._console.print(f"  step {len(self._losses):4d}   loss {loss:.3f}")

    def _line(self, elapsed: float) -> Table:
        share = min(elapsed / self._seconds, 1.0)
        filled = round(share * _BAR_CELLS)
        full, empty = ("━", "─") if self._blocks else ("#", "-")
        line = Table.grid(padding=(0, 1))
        shown = [
            Text("  " + full * filled, style="green").append(empty * (_BAR_CELLS - filled), style="dim"),
            Text(f"{elapsed:4.1f} s"),
            Text(f"step {len(self._losses):4d}"),
            Text(f"loss {self._losses[-1]:.3f}", style="bold"),
        ]
        if self._blocks:
            shown.append(Text(curve(self._losses), style="cyan"))
        line.add_row(*shown)
        return line
