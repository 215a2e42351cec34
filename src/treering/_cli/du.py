"""``treering du``: where the bytes of a checkpoint, leaves directory or file are."""

from __future__ import annotations

import sys

import click

from treering._cli.depth import DEPTH
from treering._cli.output import nothing_matches, write_lines
from treering._cli.run_path import latest_of
from treering._cli.terminal import GOOD, look_of
from treering._inspect.inspect import listing_of
from treering._values.keys import Glob
from treering._view.rows import lay_out
from treering._view.usage import shares_of, usage_json, usage_lines

_USUAL_DEPTH = 2


@click.command(
    epilog="\b\nExamples:\n"
    "  treering du checkpoint\n"
    "  treering du checkpoint --depth 4\n"
    "  treering du state.msgpack 'params/**' --depth 3\n"
)
@click.argument("path", type=click.Path(path_type=str))
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs, with plain numbers.")
@click.option(
    "--depth",
    type=DEPTH,
    default=_USUAL_DEPTH,
    show_default=True,
    metavar="N",
    help="Add up what lies deeper than N levels.",
)
def du(path: str, globs: tuple[str, ...], as_json: bool, depth: int) -> int:
    """Show where the bytes in PATH are: the branches N levels down and the leaves above them, the largest first.

    PATH is a checkpoint's folder, a leaves directory, a safetensors file, a msgpack file, or a run, of which the latest
    step is shown; treering log shows the bytes of every step. The lines add up to the whole, no byte is counted twice;
    names, headers, checksums and compressors are not counted. GLOBs choose leaves as in treering ls.
    """
    path = latest_of(path)
    patterns = [Glob.parse(glob) for glob in globs]
    root = listing_of(path).root
    layout = lay_out(root, globs=patterns, depth=depth)
    shares = shares_of(layout)
    if as_json:
        write_lines(usage_json(layout, shares, title=path, globs=globs, depth=depth))
    elif layout.rows:
        write_lines(usage_lines(layout, shares, ellipsis=look_of(sys.stdout).ellipsis))
    return GOOD if layout.rows else nothing_matches(path, globs, root)
