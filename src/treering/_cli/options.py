"""What several verbs share: arguments and options, paths that may be those of a run, and how trees are drawn."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias, TypeVar

import click

from treering._checkpoint.detect import ForeignForm, Form, detect
from treering._checkpoint.forms import is_run, list_headers
from treering._cli.main import NO, can_show, explain, note, wants_color
from treering._values.human import bytes_text, near, pluralize, steps_text
from treering._view.rows import DEEPEST, leaves_of, nodes_of
from treering._view.tree_text import ASCII, UNICODE, Style
from treering.errors import NotFoundError, UnsupportedError

if TYPE_CHECKING:
    from treering._foreign.foreign_tree import ForeignSteps
    from treering._view.run_text import RunListing

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


T = TypeVar("T")


def read_latest(path: str, read: Callable[[str], T]) -> tuple[str, T]:
    """Read what stands at a path, of a run its latest step, which is said on stderr; return what was read, and of what.

    A step that goes meanwhile has a newer one beside it.

    Raises:
        NotFoundError: the run has no step yet; and as ``detect`` and ``read``.
    """
    form = detect(path)
    if form is Form.RUN:
        from treering._runs.steps import of_latest

        what = "a run"
        step, found = of_latest(path, lambda latest: (os.fspath(latest), read(os.fspath(latest))))
    elif isinstance(form, ForeignForm) and (steps := _find_steps(path, form)) is not None:
        what, step = f"a folder of steps of {form.value}", os.fspath(steps.path_of(max(steps.names)))
        found = read(step)
    else:
        return path, read(path)
    note(f"{path!r} is {what}; this is its latest step, {os.path.basename(step)}")  # noqa: PTH119 - a text
    return step, found


def list_steps(path: str) -> RunListing | None:
    """List the steps of a run, or in a folder of another program; None for everything else. Raises as ``detect``."""
    form = detect(path)
    steps = _find_steps(path, form) if isinstance(form, ForeignForm) else None
    if form is not Form.RUN and steps is None:
        return None
    from treering._runs.reports import list_foreign_steps, list_run

    return list_run(path) if steps is None else list_foreign_steps(path, steps)


def steps_at(path: str, steps: Sequence[int]) -> list[str]:
    """Return the paths of steps of a run, or in a folder of another program.

    Raises:
        NotFoundError: one is not there.
        UnsupportedError: it is no run; and as ``detect``.
    """
    if (listing := list_steps(path)) is None:
        raise no_run(path)
    paths = {step.step: step.path for step in listing.steps}
    if lost := [step for step in steps if step not in paths]:
        hint = f"it has {steps_text(list(paths))}" if paths else "it has no step yet"
        raise NotFoundError(f"the run {path!r} has no step {lost[0]}", hint=hint)
    return [paths[step] for step in steps]


def describe(path: str) -> str:
    """Say in a few words what stands at a path. Raises as ``detect``."""
    if (run := list_steps(path)) is not None:
        return f"run, {pluralize(len(run.steps), 'steps')}, {bytes_text(run.nbytes)}"
    listing = list_headers(path)
    count = sum(1 for _ in leaves_of(listing.root))
    return f"{listing.form}, {pluralize(count, 'leaves')}, {bytes_text(listing.file_bytes)}"


def _find_steps(path: str, form: ForeignForm) -> ForeignSteps | None:
    from treering._foreign.foreign_tree import find_steps

    return find_steps(path, form)


def require_run(path: str) -> None:
    """Refuse what is no run.

    Raises:
        UnsupportedError: it is something else; and as ``detect``.
    """
    if not is_run(path):
        raise no_run(path)


def no_run(path: str) -> UnsupportedError:
    """Return the error that a path is no run."""
    return UnsupportedError(f"{path!r} is not a run", hint="a run is the folder that treering.Run saves its steps in")


def style_of(stream: TextIO) -> Style:
    """Choose how a tree is drawn on a stream."""
    style = UNICODE if can_show("├└│─·…", stream) else ASCII
    width = None
    if stream.isatty():
        import shutil  # what writes into a pipe starts sooner without it

        width = shutil.get_terminal_size().columns
    return dataclasses.replace(style, color=wants_color(stream), width=width)


def nothing_matches(path: str, globs: Sequence[str], root: Any) -> int:
    """Say that no leaf below ``root`` matches, and which keys were perhaps meant; return the exit code for that."""
    found = (near(glob, (key for key, _ in nodes_of(root) if key)) for glob in globs)
    close = list(dict.fromkeys(key for key in found if key))
    hint = "treering ls without a glob lists all keys"
    if close:
        hint = f"did you mean {' or '.join(map(repr, close))}?"
    elif any("*" in glob for glob in globs):
        hint = "'*' stays inside one part of a key; '**/NAME' looks at every depth"
    explain(f"nothing in {path!r} matches {' or '.join(map(repr, globs))}", hint)
    return NO
