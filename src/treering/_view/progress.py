"""How far long work is: a bar of rich or tqdm where one is installed, else one line on stderr that is rewritten.

It is shown on a terminal and in notebooks. Neither library is imported before a bar is due.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Self, TypeAlias

from treering._values import timing
from treering._values.human import bytes_text, duration_text, rate_text
from treering.errors import UnsupportedError

Progress: TypeAlias = Callable[[int, int], object]
"""Called as ``progress(done, total)``, in bytes."""

_BAR: Final = 20
_USUAL_WIDTH: Final = 80


def reporter(progress: Progress | bool | None, verb: str) -> Progress | None:
    """Return what is called with the bytes that are done: the caller's function, a `ProgressLine` for True, or None.

    Args:
        progress: the argument of that name of a public function.
        verb: what is being done, such as "saving".

    Raises:
        UnsupportedError: it is something else.

    Example:
        >>> reporter(True, "saving").line(1, 2, 0.5)[:31]
        'saving: 50% [##########        '
        >>> reporter(False, "saving") is None
        True
    """
    if progress is True:
        return ProgressLine(verb)
    if progress is None or progress is False:
        return None
    if not callable(progress):
        raise UnsupportedError(f"progress= is True or a function of (done, total), found {progress!r:.100}")
    return progress


def showing(progress: Progress | None) -> AbstractContextManager[Any]:
    """Return a context in which a line of ours is shown, and at whose end it is cleared."""
    return progress if isinstance(progress, ProgressLine) else contextlib.nullcontext()


class Bar(NamedTuple):
    """What is on the screen while something is done."""

    show: Progress
    """Called with the bytes that are done, and with all."""
    close: Callable[[], object]
    """Takes it away."""


class ProgressLine:
    """Shows bytes done and bytes in all; a context manager that clears what it shows at the end.

    Call it with both numbers, as ``progress=`` of the operations does. It says nothing in the first 0.3 seconds, and
    never anything where stderr is neither a terminal nor that of a notebook.

    Args:
        verb: what is being done, such as "checking".
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._notebook = is_notebook()
        there = sys.stderr is not None and not sys.stderr.closed
        self._wanted = there and (self._notebook or sys.stderr.isatty())
        self._bar: Bar | None = None
        self._begin()

    def _begin(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + timing.current.bar_first

    def __enter__(self) -> Self:
        self._begin()  # a save in the background has waited for its turn
        return self

    def __exit__(self, *_: object) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            self._try(bar.close)

    def __call__(self, done: int, total: int) -> None:
        """Take in how far it is."""
        now = time.monotonic()
        if not self._wanted or now < self._next:
            return
        self._next = now + timing.current.bar_every
        self._try(lambda: self._show(done, total))

    def _show(self, done: int, total: int) -> None:
        if self._bar is None:
            own = Bar(self._write, lambda: self._print(""))
            self._bar = _installed_bar(self._verb, done, total, notebook=self._notebook) or own
        self._bar.show(done, total)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception:  # noqa: BLE001 - the terminal is gone, or the library fails: the work goes on without a bar
            self._wanted, self._bar = False, None

    def _write(self, done: int, total: int) -> None:
        self._print(self.line(done, total, time.monotonic() - self._began)[: _width() - 1])

    def line(self, done: int, total: int, seconds: float) -> str:
        """Write the line.

        Example:
            >>> ProgressLine("checking").line(1 << 30, 4 << 30, 0.5)
            'checking: 25% [#####               ] 1.00 GiB of 4.00 GiB, 2.15 GB/s, 1.50 s left'
        """
        share = done / total if total else 1.0
        left = f", {duration_text(seconds * (1 - share) / share)} left" if share else ""
        rate = rate_text(done, seconds)
        bar = f"[{'#' * int(share * _BAR):<{_BAR}}]"
        return f"{self._verb}: {share:.0%} {bar} {bytes_text(done)} of {bytes_text(total)}, {rate}{left}"

    def _print(self, text: str) -> None:
        # Notebooks go back to the start of a line, but know no sequence that clears it.
        clear = f"{' ' * (_width() - 1)}\r" if self._notebook else "\x1b[K"
        sys.stderr.write(f"\r{clear}{text}")
        sys.stderr.flush()


def is_notebook() -> bool:
    """Tell whether this runs in the kernel of a notebook; IPython is not imported for that.

    Example:
        >>> is_notebook()
        False
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def _installed_bar(verb: str, done: int, total: int, *, notebook: bool) -> Bar | None:
    """Return a bar of what is installed, first of what the program itself has imported; None where nothing is."""
    bars: dict[str, Callable[[str, int, int, bool], Bar]]
    bars = {"ipywidgets": _tqdm_bar} if notebook else {"rich": _rich_bar, "tqdm": _tqdm_bar}
    for name in sorted(bars, key=lambda name: name not in sys.modules):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)  # without ipywidgets, tqdm has no bar for notebooks
            return bars[name](verb, done, total, notebook)
    return None


def _rich_bar(verb: str, done: int, total: int, _: bool) -> Bar:
    progress: Any = importlib.import_module("rich.progress")
    console = importlib.import_module("rich.console").Console(stderr=True)
    columns = progress.BarColumn(), progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()
    bar = progress.Progress(
        f"{verb}: {{task.percentage:.0f}}%",
        *columns,
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )  # fmt: skip - what other threads print goes where they mean it to
    task = bar.add_task(verb, completed=done, total=total)
    bar.start()
    return Bar(lambda done, total: bar.update(task, completed=done, total=total, refresh=True), bar.stop)


def _tqdm_bar(verb: str, done: int, total: int, notebook: bool) -> Bar:
    kind: Any = importlib.import_module("tqdm.notebook" if notebook else "tqdm").tqdm
    bar = kind(
        desc=verb, initial=done, total=total, unit="B", unit_scale=True, unit_divisor=1024, leave=False, mininterval=0,
        dynamic_ncols=True,
    )  # fmt: skip

    def show(done: int, total: int) -> None:
        if total != bar.total:
            bar.reset(total)
        bar.update(done - bar.n)

    return Bar(show, bar.close)


def _width() -> int:
    """Return how many columns the terminal behind stderr has: a longer line would wrap, and could not be rewritten."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _USUAL_WIDTH
    except (OSError, ValueError):
        return _USUAL_WIDTH
