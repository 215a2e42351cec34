"""``treering inspect``: what is in a checkpoint, leaves directory or file, from its headers alone."""

from __future__ import annotations

import sys

import click

from treering._cli.depth import DEPTH
from treering._cli.output import nothing_matches, write_lines
from treering._cli.run_path import latest_of
from treering._cli.terminal import GOOD, look_of
from treering._inspect.inspect import listing_of
from treering._values.keys import Glob
from treering._view.listing_json import json_lines, origin_members
from treering._view.origin import notes_of
from treering._view.rows import USUAL_DEPTH, lay_out
from treering._view.tree_text import tree_lines


@click.command(
    epilog="\b\nExamples:\n"
    "  treering inspect checkpoint\n"
    "  treering inspect checkpoint --depth 1\n"
    "  treering inspect model.safetensors\n"
    "  treering inspect state.msgpack 'params/**/kernel'\n"
    "  treering inspect checkpoint --json | python -m json.tool\n"
)
@click.argument("path", type=click.Path(path_type=str))
@click.argument("globs", metavar="[GLOB]...", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs, with plain numbers.")
@click.option(
    "--depth",
    type=DEPTH,
    default=USUAL_DEPTH,
    show_default=True,
    metavar="N",
    help="Fold branches deeper than N levels into their totals.",
)
def inspect(path: str, globs: tuple[str, ...], as_json: bool, depth: int) -> int:
    """Show the tree in PATH: dtype, shape and size of every leaf, totals of every branch.

    PATH is a checkpoint's folder, a leaves directory, a safetensors file, a msgpack file, or a run, of which the latest
    step is shown. Only headers are read, so any size takes a moment. With GLOBs only the leaves that one of them
    matches are shown, and everything below a branch that one matches: * is any run inside a part of a key, ** any
    number of parts. Quote them, or the shell expands them.
    """
    path = latest_of(path)
    patterns = [Glob.parse(glob) for glob in globs]
    listing = listing_of(path)
    layout = lay_out(listing.root, globs=patterns, depth=depth)
    size = listing.file_bytes
    if as_json:
        origin = origin_members(listing)
        write_lines(json_lines(layout, title=path, file_bytes=size, globs=globs, depth=depth, origin=origin))
    elif layout.rows:
        look, notes = look_of(sys.stdout), notes_of(listing)
        write_lines(tree_lines(layout, title=path, file_bytes=size, look=look, notes=notes))
    return GOOD if layout.rows else nothing_matches(path, globs, listing.root)
