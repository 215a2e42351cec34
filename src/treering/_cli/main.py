"""The command ``treering``: its verbs, imported one at a time, what they write to, and how it ends."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, TextIO, cast

import click

from treering import __version__
from treering._printable import printable
from treering._values.human import near
from treering._view.plain import cut
from treering.errors import CorruptError, TreeringError

GOOD = 0
"""Exit code: done, and the answer is good."""
NO = 1
"""Exit code: the answer is no (the file is damaged, nothing matches, a proof failed)."""
NOT_DONE = 2
"""Exit code: it could not be done (no such file, another form, a wrong option, an error of treering's own)."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells expect it: 128 + SIGINT."""

_LONGEST_LINE = 2000
_LINES_A_WRITE = 500

_VERBS = {
    "cat": ("cat", "Print one leaf, or a part of an array."),
    "convert": ("convert", "Save a checkpoint or file of any form in another one."),
    "cp": ("convert", "Copy a checkpoint, a run or a file, between disk and buckets."),
    "diff": ("verbs", "Compare two checkpoints or files."),
    "doctor": ("doctor", "Show which saves are in flight or dead, and what to do about each."),
    "du": ("verbs", "Show which branches take how many bytes."),
    "gc": ("verbs", "Show which steps of a run would be removed; --yes removes them."),
    "inspect": ("verbs", "Show the content of a checkpoint or file, from its headers alone."),
    "log": ("verbs", "Show the steps of a run, their metrics, and which rule keeps each."),
    "ls": ("verbs", "List the leaves, or the steps of a run, one a line."),
    "report": ("verbs", "Write a page: where the bytes are, every leaf, the history of a run."),
    "rm": ("verbs", "Remove one step of a run."),
    "verify": ("verbs", "Read every byte and compare the checksums."),
}
"""Verb -> the module of this room that has its command, and what it does."""

_IN_PYTHON = {"save": "save(path, tree)", "load": "load(path)", "open": "open(path)", "run": "Run(path)"}
"""What only a program can do, and how."""


class _ReaderLeft(Exception):
    """The reader of the output closed it, as ``| head`` does."""


class Verbs(click.Group):
    """A group whose verbs are imported when they are called; their names and summaries are known before."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Name the verbs in order."""
        return sorted(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import the module of one verb and return its command, which has the verb's name."""
        if cmd_name not in _VERBS:
            return None
        module = importlib.import_module(f"treering._cli.{_VERBS[cmd_name][0]}")
        return cast("click.Command", getattr(module, cmd_name))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb in the arguments, or say which one was probably meant."""
        if args[0] == "help":
            # As other programs take it: for `VERB --help`.
            args = [*args[1:2], "--help"]
            if len(args) == 1:
                click.echo(ctx.get_help())
                ctx.exit()
        if args[0] == "demo":
            ctx.fail("the demo is not installed with treering; run `python3 dev.py demo` in a checkout of its sources")
        if args[0] in _IN_PYTHON:
            ctx.fail(f"there is no verb {args[0]!r}; in Python: treering.{_IN_PYTHON[args[0]]}")
        if args[0] not in _VERBS and not args[0].startswith("-"):
            close = near(args[0], _VERBS)
            ctx.fail(f"there is no verb {args[0]!r}" + (f"; did you mean {close!r}?" if close else ""))
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb; what click would take for an end of its own is told apart here.

        At a reader that left the pipe it would exit with 1, and a gzip file that is cut short, which is an
        ``EOFError`` too, would be a Ctrl-D.
        """
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderLeft from error
        except EOFError as error:
            if not isinstance(error, CorruptError):
                raise
            raise CorruptError(error.message, path=error.path, offset=error.offset, hint=error.hint) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List the verbs without importing them."""
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, summary) for verb, (_, summary) in sorted(_VERBS.items())])


@click.group(
    cls=Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    subcommand_metavar="VERB ...",
    epilog="\b\nExamples:\n"
    "  treering inspect checkpoint\n"
    "  treering verify checkpoint\n"
    "  treering cat checkpoint 'params/w[:2]'\n"
    "  treering diff before after --values\n"
    "  treering log run\n",
)
@click.version_option(__version__, message="treering %(version)s", help="Show the version.")
def cli() -> None:
    """Save JAX pytrees, load them back bit for bit, and look into runs, checkpoints, safetensors and msgpack files."""


def main(arguments: Sequence[str] | None = None, *, command: click.Command = cli) -> None:
    """Run a command, usually the whole command line, and exit the program with its exit code.

    Every error of treering becomes one line on stderr, and a hint below it where there is one. What is written to a
    stream that the caller closed goes nowhere, and the exit code is that of the verb.
    """
    code: int = NOT_DONE
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # else a file that is written would get its number
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123
    try:
        # A verb answers with its exit code, or with None for GOOD.
        code = command.main(args=None if arguments is None else list(arguments), standalone_mode=False) or GOOD
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        explain(error.format_message(), f"{context.command_path} --help shows its arguments" if context else None)
    except (click.Abort, KeyboardInterrupt):
        explain("stopped")
        code = INTERRUPTED
    except TreeringError as error:
        explain_error(error)
        code = NO if isinstance(error, CorruptError) else NOT_DONE
    except (_ReaderLeft, BrokenPipeError):
        _silence_stdout()
        code = GOOD
    except OSError as error:
        _silence_stdout()
        explain(f"could not write the output: {error.strerror or error}")
    except Exception:  # noqa: BLE001 - the interpreter's exit code would say that the answer is no
        import traceback  # other verbs start sooner without it

        traceback.print_exc()
    sys.exit(code)


_AS_OPTIONS = (
    (r"\boverwrite=True\b", "--overwrite"),
    (r"\bby lose= with ", "by --lose "),
    (r"\bitems= names no tree\b", "--item names no tree"),
    (r"\bmax_file_size=(?=[^ ,;])", "--max-file-size "),
    (r"\bmax_file_size=", "--max-file-size"),
    (r"\b(at|dtype|only|to)=(?=['\"])", r"--\1 "),
    (r"\b(dtype|only)=(?=[ ,;]|$)", r"--\1"),
    (r", not those of `like`", ""),
    (r"\btreering\.load\(('[^']*'|\"[^\"]*\")\) loads it\b", r"treering inspect \1 shows it"),
)
"""What errors say of the arguments of functions, as patterns, and what the command line has for these."""


def explain_error(error: TreeringError) -> None:
    """Say on stderr what an error says, with the options of verbs for the arguments of functions."""
    texts = [str(error).removesuffix(f"; {error.hint}"), error.hint or ""]
    for pattern, told in _AS_OPTIONS:
        texts = [re.sub(pattern, told, text) for text in texts]
    explain(*texts)


def _silence_stdout() -> None:
    """Send what is still buffered nowhere: the interpreter would try to write it, and fail again, as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# ------------------------------------------------------------------------------------------------- what verbs write to


def wants_color(stream: TextIO) -> bool:
    """Tell whether to color: a terminal that understands it, unless NO_COLOR is set (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def can_show(text: str, stream: TextIO) -> bool:
    """Tell whether the stream's encoding has these characters."""
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def explain(message: str, hint: str | None = None) -> None:
    """Say on stderr what went wrong, and below it what to do about it; both may be lists of several lines."""
    color = wants_color(sys.stderr)
    bold_red, bold, plain = ("\x1b[1;31m", "\x1b[1m", "\x1b[0m") if color else ("", "", "")
    for label, text in ((f"{bold_red}error:{plain}", message), (f"{bold}hint:{plain}", hint)):
        if text:
            shown = "\n".join(plain_line(line, sys.stderr) for line in text.split("\n"))
            click.echo(f"{label} {shown}", err=True, color=color)


def note(message: str) -> None:
    """Say on stderr, in one line, what the output does not say itself."""
    click.echo(f"note: {plain_line(message, sys.stderr)}", err=True)


def plain_line(text: str, stream: TextIO) -> str:
    """Make a text one line that the stream can encode, with nothing in it that could move the cursor."""
    encoding = stream.encoding or "ascii"
    return printable(cut(text, _LONGEST_LINE)).encode(encoding, "backslashreplace").decode(encoding)


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout, some hundred at a time; what its encoding lacks comes out as an escape."""
    left = iter(lines)
    encoding = sys.stdout.encoding or "ascii"
    while batch := list(islice(left, _LINES_A_WRITE)):
        text = "\n".join(batch) + "\n"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
